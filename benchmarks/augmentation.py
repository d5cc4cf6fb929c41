"""Augmentation presets on one processor core, beside the same changes by torchvision's v2 transforms.

    python benchmarks/augmentation.py                         every preset at every size, about three minutes
    python benchmarks/augmentation.py --presets large --sides 224 --rounds 9
    python benchmarks/augmentation.py --quick                 a try: one size, one round

Both start from a batch of uint8 pictures (b, h, w, 3) in memory and end with (b, 3, h, w) float32 in [0, 1]. Ours
changes the whole batch; torchvision changes one picture after the other as uint8, which its pages recommend, converts
it, and the pictures are stacked. It draws new random numbers for every picture as ours does. Rounds take
turns; a number is the median of the processor time of a round in milliseconds for a hundred pictures, which other
processes disturb less than the time on the clock. The goal is a ratio of at most 1.1.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from record import keep

from mettle.data.transforms import Augment, find_preset
from mettle.model.backbones import import_torchvision

SIDES = {32: 256, 64: 256, 128: 128, 224: 64}  # of pictures, and how many a batch has
PRESETS = ("mild", "photo", "small", "large", "mirror", "shift", "erase", "reid")
GOAL = 1.1


def torchvision_changes(augment: Augment, side: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The changes of a preset as torchvision makes them: (3, h, w) uint8 in, (3, side, side) float32 in [0, 1] out."""
    import_torchvision()  # not at the top: whoever imports this script's names may have no use for it
    from torchvision.transforms import v2

    steps: list[Callable] = []
    if augment.takes_crops():
        ratio = (1 / augment.aspect, augment.aspect)
        steps.append(v2.RandomResizedCrop(side, augment.crop, ratio, antialias=True))
    if augment.rotate or augment.shear or augment.shift or augment.scale != (1.0, 1.0):
        scale = (1 / augment.scale[1], 1 / augment.scale[0])  # theirs enlarges the picture, ours the window
        shear = float(np.degrees(np.arctan(augment.shear)))
        options = {"translate": (augment.shift, augment.shift), "scale": scale, "shear": shear}
        steps.append(v2.RandomAffine(augment.rotate, interpolation=v2.InterpolationMode.BILINEAR, **options))
    if augment.flip:
        steps.append(v2.RandomHorizontalFlip(augment.flip))
    if augment.pad:
        steps.append(v2.RandomCrop(side, padding=round(augment.pad * side)))
    if any(augment.jitter):
        steps.append(v2.RandomApply([v2.ColorJitter(*augment.jitter)], augment.jitter_share))
    if augment.grey:
        steps.append(v2.RandomGrayscale(augment.grey))
    if augment.blur:
        steps.append(v2.RandomApply([v2.GaussianBlur(3, (0.1, 2.0))], augment.blur))
    if augment.contrast or augment.brightness:
        steps.append(v2.ColorJitter(augment.brightness, augment.contrast))
    steps.append(v2.ToDtype(torch.float32, scale=True))
    if augment.erase_area:
        ratio = (1 / augment.erase_aspect, augment.erase_aspect)
        steps.append(v2.RandomErasing(augment.erase, augment.erase_area, ratio, value="random"))
    elif augment.erase:
        steps.append(v2.RandomErasing(augment.erase))
    return v2.Compose(steps)


def measure(preset: str, side: int, rounds: int) -> dict[str, float]:
    """Milliseconds of processor time for a hundred pictures, ours and theirs."""
    count, augment = SIDES[side], find_preset(preset)
    pictures = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)
    change, ids = torchvision_changes(augment, side), np.arange(count)

    def ours(turn: int) -> torch.Tensor:
        return augment(torch.from_numpy(pictures), ids, seed=0, epoch=turn)

    def theirs(turn: int) -> torch.Tensor:
        torch.manual_seed(turn)
        return torch.stack([change(torch.from_numpy(one).permute(2, 0, 1)) for one in pictures])

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(rounds + 1):
        for name, run in (("ours", ours), ("theirs", theirs)):
            began = time.process_time()
            found = run(turn)
            spent = time.process_time() - began
            assert found.shape == (count, 3, side, side)
            assert found.dtype == torch.float32
            if turn:  # the first one warms up
                times[name].append(1e5 * spent / count)
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    """Print, and keep, the table."""
    parser = argparse.ArgumentParser(description="Augmentation presets beside torchvision's v2 transforms.")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--sides", nargs="+", type=int, choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="keep the table in RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="one size, one round")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sides, rounds = ([64], 1) if asked.quick else (asked.sides, asked.rounds)
    lines = ["| preset | side | torchvision v2, ms | mettle, ms | ratio |", "|---|---:|---:|---:|---:|"]
    print("\n".join(lines), flush=True)
    ratios = []
    for preset in asked.presets:
        for side in sides:
            found = measure(preset, side, rounds)
            ratios.append(found["ours"] / found["theirs"])
            lines.append(f"| `{preset}` | {side} | {found['theirs']:.1f} | {found['ours']:.1f} | {ratios[-1]:.2f} |")
            print(lines[-1], flush=True)
    verdict = "met" if max(ratios) <= GOAL else "missed"
    text = "\n".join(lines) + (
        f"\n\nMilliseconds of processor time for a hundred pictures in colour, medians of {rounds} rounds in turns. "
        f"The goal of at most {GOAL} times torchvision's time is {verdict}: the highest ratio is {max(ratios):.2f}."
    )
    print(text.rpartition("\n\n")[2])
    if asked.keep:
        keep("Augmentation on a processor", f"augmentation.py --rounds {rounds} --keep", text, threads="one thread")


if __name__ == "__main__":
    main()
