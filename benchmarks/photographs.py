"""Do the shipped recipes learn on data that they were not made for? EER before and after a short training.

    python benchmarks/photographs.py DATA                 DATA holds the NPZ files of SETS below
    python benchmarks/photographs.py DATA --keep          and write the table into RESULTS.md

Birds (CUB-200-2011), pedestrians (Market-1501), handwritten characters (Omniglot) and palms (Tongji), thinned to some
identities and at most 64 pixels; 100 steps each with no other setting than the size. EER is over all pairs of test
samples of identities that were not trained on, first of the untrained network, then of the trained one. A run that the
collapse guard stops is named with its reason. The last row plants a collapse, a loss that draws all embeddings
together: that one must be stopped.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from photo_folder import unpack_images
from PIL import Image
from record import keep

from mettle.data.image_decoding import read_image_header
from mettle.errors import NumericError
from mettle.evaluate import verification
from mettle.model import embed
from mettle.train import Schedule, Supervised, load, run_loop, train
from mettle.train.callbacks import CollapseGuard, DivergenceGuard
from mettle.train.datamodule import fill_settings, prepare_samples
from mettle.train.from_recipe import build_method_and_loader, build_model

SETS = {  # name: file, array of labels, (height, width)
    "CUB": ("cub200_96/cub200_96.npz", "label", (64, 64)),
    "Market-1501": ("market1501/market1501.npz", "identity", (64, 32)),
    "Omniglot": ("omniglot28/omniglot28.npz", "label", (28, 28)),
    "palms": ("tongji_palm128/tongji_palm128.npz", "label", (64, 64)),
}
RECIPES = ("supcon", "da-supcon", "simclr", "triplet-hard", "arcface", "wcl")
IDENTITIES = {0: 100, 2: 60}  # of the training and of the test split
EACH = 20  # samples of an identity at most


def thin(source: Path, label: str, size: tuple[int, int], target: Path) -> None:
    """Write some identities of a set, decoded and small."""
    arrays = dict(np.load(source))
    labels, split = arrays[label], arrays["split"]
    at, rng = [], np.random.default_rng(0)
    distractor = arrays["role"] == 3 if "role" in arrays else np.zeros(len(labels), bool)
    for part, most in IDENTITIES.items():
        there = np.unique(labels[(split == part) & ~distractor])
        for identity in np.sort(rng.choice(there, min(most, len(there)), replace=False)):
            own = np.flatnonzero((labels == identity) & (split == part) & ~distractor)
            at += own[np.unique(np.linspace(0, len(own) - 1, min(EACH, len(own))).astype(int))].tolist()
    chosen = np.asarray(at)
    if "images" in arrays:
        images = arrays["images"][chosen]
    else:
        grey = read_image_header(unpack_images(arrays).content(at[0])).grey
        decoded = unpack_images(arrays, 1 if grey else 3).read(chosen)
        opened = (Image.fromarray(one.squeeze(2) if grey else one) for one in decoded)
        images = np.stack([np.asarray(one.resize(size[::-1], Image.Resampling.BILINEAR)) for one in opened])
    np.savez_compressed(target, images=images, label=labels[chosen], split=split[chosen])


def eer(model, samples) -> float:
    """Over all pairs of the test split, in percent."""
    test = samples.part("test")
    return 100 * verification(embed(model, test), test.labels).eer


def measure(source: Path, recipe_name: str, overrides: list[str], folder: Path) -> tuple[float, float | None, str]:
    """EER before, EER after (None where the run was stopped), and why it was."""
    recipe = load(recipe_name, overrides, data={"source": str(source)})
    samples = prepare_samples(recipe)
    recipe, _ = fill_settings(recipe, samples)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = eer(build_model(recipe, samples).to(device), samples)
    try:
        outcome = train(recipe, folder, tensorboard=False)
    except NumericError as problem:
        return before, None, str(problem)
    return before, eer(outcome.model, samples), ""


def plant_collapse(source: Path, steps: int, folder: Path) -> str:
    """Train with a loss that draws all embeddings together; what the guard says, or an empty text."""
    recipe = load("supcon", [f"train.steps={steps}"], data={"source": str(source)})
    samples = prepare_samples(recipe)
    recipe, _ = fill_settings(recipe, samples)
    method, loader = build_method_and_loader(recipe, samples)
    together = Supervised(method.model, lambda z, labels: (z - z.mean(0)).square().sum(1).mean())
    try:
        run_loop(together, loader, Schedule(steps, recipe.train.rate), [DivergenceGuard(), CollapseGuard()])
    except NumericError as problem:
        return str(problem)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--thinned", type=Path, help="folder to keep the thinned sets in, and to find them again")
    parser.add_argument("--set", action="append", default=[], help="override a recipe key: table.key=value")
    parser.add_argument("--keep", action="store_true", help="write the table into RESULTS.md")
    given = parser.parse_args()
    steps = [f"train.steps={given.steps}"]
    lines = [f"| EER %, before → after {given.steps} steps | {' | '.join(given.recipes)} |"]
    lines.append("|---" * (1 + len(given.recipes)) + "|")
    with tempfile.TemporaryDirectory() as scratch:
        place = given.thinned or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        for name in given.sets:
            file, label, size = SETS[name]
            small = place / f"{name}.npz"
            if not small.exists():
                thin(given.data / file, label, size, small)
            cells = []
            for recipe in given.recipes:
                found = []
                for seed in range(given.seeds):
                    folder = Path(scratch) / f"{name}-{recipe}-{seed}"
                    before, after, why = measure(small, recipe, [*steps, f"seed={seed}", *given.set], folder)
                    print(f"{name} {recipe} seed {seed}: {before:.1f} -> {why or f'{after:.1f}'}", flush=True)
                    found.append((before, after))
                ends = [after for _, after in found if after is not None]
                after = f"{np.mean(ends):.1f}" if len(ends) == len(found) else "stopped"
                cells.append(f"{np.mean([before for before, _ in found]):.1f} → {after}")
            lines.append(f"| {name} | {' | '.join(cells)} |")
        why = plant_collapse(place / f"{given.sets[0]}.npz", given.steps, Path(scratch) / "planted")
    text = "\n".join(lines)
    text += f"\n\nPlanted collapse: {f'stopped. {chr(34)}{why}{chr(34)}' if why else 'NOT STOPPED'}"
    print(text)
    if given.keep:
        threads = "one GPU" if torch.cuda.is_available() else f"{torch.get_num_threads()} threads"
        options = " ".join(f"--set {one} " for one in given.set)
        keep("Photographs", f"photographs.py DATA --seeds {given.seeds} {options}--keep", text, threads=threads)


if __name__ == "__main__":
    main()
