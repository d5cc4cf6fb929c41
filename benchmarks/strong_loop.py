"""The pieces of a strong training loop, each on and off from a plain baseline, and all together.

    python benchmarks/strong_loop.py                          glyphs, one core, about 12 minutes in all
    python benchmarks/strong_loop.py --market FOLDER          Market-1501, a GPU; FOLDER holds market1501.npz
    python benchmarks/strong_loop.py --table                  the table of the runs that are there, without any run

Every finished run is one JSON line of ``--output``; what is there is not run again, so the command can be stopped at
any time (or by ``--seconds``) and goes on where it was. Identities of the *training* split only are used: sorted, then
permuted by ``default_rng(7)``; fold k holds out every fourth from k, the rest is trained on. Test identities are never
looked at. ``--jobs`` trains several networks at once, each in a process of its own: a small step leaves a GPU idle.
It runs where only torch, NumPy and Pillow are installed (`stand_ins`); the intervals of the table need SciPy.

A number is the mean over folds and seeds. The effect of a piece is the mean of the paired differences (the same fold,
seed, batches and start) to its baseline, with the 95 % interval of a t distribution over these pairs. They share
training data, so the interval says how steady the effect is from fold to fold, not how it will be on other data.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from photo_folder import unpack_images
from stand_ins import MISSING
from torch import Tensor, nn

from mettle.data import Samples, glyphs
from mettle.data.inputs import ImageArray
from mettle.data.transforms import to_input_tensor
from mettle.evaluate import verification
from mettle.model import Embedder, EmbedderSpec, embed
from mettle.model.backbones import remove_last_stride
from mettle.model.embedder import find_device
from mettle.train import Schedule, load, run_loop
from mettle.train.from_recipe import GivenObjects, build_method_and_loader, evenly_spaced
from mettle.train.methods.supervised import start_class_vectors
from mettle.train.optim import build_shape
from mettle.train.recipe import Recipe

FOLDS = 4
COSFACE = {"kind": "CosFace", "scale": 16.0, "margin": 0.2}
TWO_SPACES = {
    "kind": "WeightedSum",
    "losses": [{"kind": "SupCon", "temperature": 0.05}, COSFACE],
    "weights": [0.5, 0.5],
    "spaces": ["before", "after"],
}


@dataclass(frozen=True)
class Piece:
    """What a piece changes in the recipe, and which other piece it is compared with."""

    words: str
    changes: Mapping[str, Any]
    against: str = "plain"


@dataclass(frozen=True)
class Setting:
    """Data, the plain recipe, and the pieces that are tried on it."""

    name: str
    plain: Mapping[str, Any]
    pieces: Mapping[str, Piece]
    together: tuple[str, ...]  # the pieces that "all" switches on
    seeds: int
    augment: str  # of the plain recipe, beside which erasing and shifting come
    by_camera: bool = False  # whether candidates of the same camera do not count

    def changes(self, piece: str) -> dict[str, Any]:
        """The keys that differ from the plain recipe."""
        if piece == "plain":
            return {}
        if piece != "all":
            found = dict(self.pieces[piece].changes)
            if "batch.augment" in found:
                found["batch.augment"] = f"{self.augment}+{found['batch.augment']}"
            return found
        found, augment = {"loss": COSFACE}, [self.augment]
        for name in self.together:
            own = dict(self.pieces[name].changes)
            augment += [own.pop("batch.augment")] if "batch.augment" in own else []
            if name == "label smoothing":  # of whatever loss there is
                own = {"loss": _smooth(found["loss"])}
            found |= own
        return {**found, "batch.augment": "+".join(augment)}


def _smooth(loss: Mapping[str, Any]) -> dict[str, Any]:
    """A loss with label smoothing in its class vectors."""
    if loss["kind"] == "WeightedSum":
        return {**loss, "losses": [_smooth(one) if one["kind"] == "CosFace" else one for one in loss["losses"]]}
    return {**loss, "label_smoothing": 0.1}


def ema_pieces(decay: float) -> dict[str, Piece]:
    """The average of the weights over the second half of a run, and what it teaches."""
    average = {"train.ema": decay, "train.ema_start": 0.5}
    taught = average | {"train.distill": 1.0}
    return {
        "ema": Piece(f"average of the weights, {decay} over the second half", average),
        "distill": Piece("distillation of similarities, on top of the average", taught, "ema"),
    }


PIECES = {
    "gem": Piece("GeM pooling instead of the mean", {"model.pool": "gem"}),
    "last stride": Piece("last stride 1 instead of 2", {"model.last_stride": 1}),
    "two spaces": Piece(
        "batch-norm neck, SupCon before it and CosFace after it, half each",
        {"model.neck": "batchnorm", "loss": TWO_SPACES},
    ),
    "label smoothing": Piece("label smoothing 0.1", {"loss": _smooth(COSFACE)}),
    "erase": Piece("random erasing", {"batch.augment": "erase"}),
    "shift": Piece("pad and crop", {"batch.augment": "shift"}),
    "flip": Piece("mean of an image and its mirror image at test", {"model.flip": True}),
}
GLYPHS = Setting(
    "glyphs",
    {
        "batch.classes": 32,
        "batch.samples": 4,
        "model.backbone": "convnet",
        "model.width": 16,
        "model.depth": 3,
        "model.pool": "average",
        "model.dim": 64,
        "train.steps": 200,
        "train.rate": 2e-3,
        "train.loss_rate": 3.0,
    },
    # An average over half of 200 steps that keeps 0.995 of itself would be mostly its first weights.
    {name: piece for name, piece in PIECES.items() if name != "last stride"} | ema_pieces(0.98),
    ("gem", "two spaces", "label smoothing", "erase", "shift", "ema", "distill"),  # mirrored characters are others
    seeds=2,
    augment="none",
)
MARKET = Setting(
    "market1501",
    {
        "batch.classes": 16,
        "batch.samples": 4,
        "model.pool": "average",
        "model.width": 64,  # with depth 4 the 512 channels that the ResNet below ends with
        "model.depth": 4,
        "model.dim": 256,
        "train.steps": 4000,
        "train.rate": 1e-3,
        "train.loss_rate": 3.0,
    },
    PIECES | ema_pieces(0.995),
    (*PIECES, "ema", "distill"),
    seeds=1,
    augment="mirror",
    by_camera=True,
)
GLYPH_IDENTITIES = 480  # of the training characters, evenly spaced


# Data


def load_glyphs() -> Samples:
    """Some of the training characters."""
    part = glyphs().part("train")
    people = np.unique(part.labels)
    chosen = people[np.linspace(0, len(people) - 1, GLYPH_IDENTITIES).round().astype(int)]
    return part.take(np.flatnonzero(np.isin(part.labels, chosen)))


def load_market(folder: Path) -> Samples:
    """The training people of Market-1501, decoded; the camera is the domain."""
    arrays = dict(np.load(folder / "market1501.npz"))
    at = np.flatnonzero(arrays["role"] == 0)
    images = unpack_images(arrays).read(at)
    return Samples.of(
        ImageArray(images), arrays["identity"][at].astype(int), domain=arrays["camera"][at], source_name="market1501"
    )


def hold_out_fold(samples: Samples, fold: int, every: int = FOLDS) -> Samples:
    """One identity of so many of a fixed permutation is measured on, the others are trained on."""
    order = np.random.default_rng(7).permutation(np.unique(samples.labels))
    held_out = np.isin(samples.labels, order[fold::every])
    return replace(samples, split=np.where(held_out, 2, 0).astype(np.int8))


# Network


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2016)."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.downsample = None
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """(b, before, h, w) to (b, after, h / stride, w / stride)."""
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


def resnet18(channels: int = 3) -> nn.Sequential:
    """A ResNet-18 in plain torch, for machines without torchvision: images to a map of 512 channels."""
    net = nn.Sequential()
    net.add_module("conv1", nn.Conv2d(channels, 64, 7, 2, 3, bias=False))
    net.add_module("bn1", nn.BatchNorm2d(64))
    net.add_module("relu", nn.ReLU())
    net.add_module("maxpool", nn.MaxPool2d(3, 2, 1))
    before = 64
    for k, (after, stride) in enumerate(((64, 1), (128, 2), (256, 2), (512, 2)), 1):
        net.add_module(f"layer{k}", nn.Sequential(Block(before, after, stride), Block(after, after, 1)))
        before = after
    for part in net.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return net


def build_network(recipe: Recipe, samples: Samples, is_market: bool) -> Embedder:
    """The network of a recipe; on Market-1501 its backbone is the ResNet above, not the small convnet."""
    height, width, channels = samples.inputs.shape
    stride = recipe.model.get("last_stride", 2)
    spec: EmbedderSpec = replace(recipe.spec(), last_stride=2)
    torch.manual_seed(recipe.seed)
    model = Embedder(spec, (channels, height, width))
    if is_market:
        torch.manual_seed(recipe.seed)
        model.backbone = resnet18(channels)
        if stride == 1:
            remove_last_stride(model.backbone, "ResNet-18", model.shape)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    part = samples.part("train")
    model.fit_normalization(to_input_tensor(part.read(evenly_spaced(len(part), 2048)), "cpu"))
    return model


# Measuring


def measure(model: Any, held_out: Samples, by_camera: bool) -> dict[str, float]:
    """EER over all pairs, and Recall@1 and mean average precision of every sample among all others, in percent."""
    found, device = embed(model, held_out), find_device(model)
    z, labels = (torch.from_numpy(x).to(device) for x in (found, held_out.labels))
    camera = torch.from_numpy(np.asarray(held_out.domain.codes)).to(device) if by_camera else None
    first, precision = [], []
    for rows in torch.arange(len(z), device=device).split(512):
        same = labels[rows, None] == labels
        left_out = rows[:, None] == torch.arange(len(z), device=device)
        if camera is not None:  # as in the official evaluation
            left_out |= same & (camera[rows, None] == camera)
        scores = (z[rows] @ z.T).masked_fill(left_out, -torch.inf)  # behind all others, and never a hit
        hit = (same & ~left_out).gather(1, scores.argsort(dim=1, descending=True, stable=True)).double()
        counts = hit.sum(1)
        share = hit.cumsum(1) / torch.arange(1, len(z) + 1, device=device)
        first.append(hit[counts > 0, 0])
        precision.append(((hit * share).sum(1) / counts)[counts > 0])
    means = {"recall@1": torch.cat(first), "map": torch.cat(precision)}
    eer = verification(found, held_out.labels).eer
    return {"eer": 100 * float(eer)} | {name: 100 * float(values.mean()) for name, values in means.items()}


def run_once(setting: Setting, samples: Samples, piece: str, fold: int, seed: int, steps: int) -> dict[str, Any]:
    """Train and measure; what a line of the output holds."""
    begun = time.perf_counter()
    keys = {"seed": seed, "loss": COSFACE, "batch.augment": setting.augment, "train.schedule": "warmup-cosine"}
    own = {**setting.plain, **keys, **setting.changes(piece), "train.steps": steps}
    recipe = load("cosface").with_values({"auto": [], "model": {}, **own})
    data = hold_out_fold(samples, fold)
    model = build_network(recipe, data, setting is MARKET)
    method, loader = build_method_and_loader(recipe, data, given=GivenObjects(samples=data, model=model))
    start_class_vectors(method, data.part("train"))
    run_loop(method, loader, Schedule(steps, recipe.train.rate, build_shape(recipe.train.schedule, 0.2)))
    found = measure(method.final_module(), data.part("test"), setting.by_camera)
    more = {"seconds": round(time.perf_counter() - begun, 1), "torch": torch.__version__}
    return key_of(setting.name, piece, fold, seed, steps) | found | more


def key_of(data: str, piece: str, fold: int, seed: int, steps: int) -> dict[str, Any]:
    """What a run is known by."""
    return {"data": data, "piece": piece, "fold": fold, "seed": seed, "steps": steps}


# The table

METRICS = {"eer": "EER", "recall@1": "Recall@1", "map": "mAP"}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The runs that are there; a line that was cut off is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def write_table(lines: Iterable[Mapping[str, Any]], setting: Setting, steps: int) -> str:
    """Means, and effects with their intervals, as Markdown."""
    runs = {
        (line["piece"], line["fold"], line["seed"]): line
        for line in lines
        if line["data"] == setting.name and line["steps"] == steps
    }
    names = {"plain": Piece("plain", {}), **setting.pieces, "all": Piece("all together" + _without(setting), {})}
    rows = [
        "| | runs | " + " | ".join(f"{word} | effect" for word in METRICS.values()) + " |",
        "|---|---:|" + "---:|---|" * len(METRICS),
    ]
    for name, piece in names.items():
        own = {key[1:]: line for key, line in runs.items() if key[0] == name}
        base = {key[1:]: line for key, line in runs.items() if key[0] == piece.against}
        if not own:
            continue
        cells = [piece.words, str(len(own))]
        for metric in METRICS:
            cells.append(f"{np.mean([line[metric] for line in own.values()]):.2f}")
            both = [own[key][metric] - base[key][metric] for key in own if key in base]
            cells.append("" if name == "plain" else describe_effect(both))
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _without(setting: Setting) -> str:
    left_out = [name for name in setting.pieces if name not in setting.together]
    return f", without {' and '.join(left_out)}" if left_out else ""


def describe_effect(differences: list[float]) -> str:
    """Mean and 95 % interval of paired differences."""
    mean, n = float(np.mean(differences)), len(differences)
    if n < 2 or "scipy" in MISSING.missing:
        return f"{mean:+.2f}"
    from scipy.stats import t as student

    half = float(student.ppf(0.975, n - 1) * np.std(differences, ddof=1) / n**0.5)
    return f"{mean:+.2f} [{mean - half:+.2f}, {mean + half:+.2f}]"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--market", type=Path, help="the folder of market1501.npz; without it, glyphs")
    parser.add_argument("--output", type=Path, default=Path("strong_loop.jsonl"), help="a line for every finished run")
    parser.add_argument("--pieces", nargs="+", help="only these; plain is always one of them")
    parser.add_argument("--folds", type=int, default=FOLDS, help="the first so many of the four")
    parser.add_argument("--seeds", type=int, help="how many seeds of every fold")
    parser.add_argument("--steps", type=int, help="optimization steps of every run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other run after so long")
    parser.add_argument("--jobs", type=int, default=1, help="networks that are trained at the same time")
    parser.add_argument("--table", action="store_true", help="print the table only")
    options = parser.parse_args()
    setting = MARKET if options.market else GLYPHS
    steps = options.steps or setting.plain["train.steps"]
    begun = time.perf_counter()
    names = ["plain", *(name for name in (*setting.pieces, "all") if options.pieces is None or name in options.pieces)]
    jobs = [
        (name, fold, seed)
        for seed in range(options.seeds or setting.seeds)
        for fold in range(options.folds)
        for name in names
    ]
    done = [tuple(line.get(key) for key in key_of("", "", 0, 0, 0)) for line in read_lines(options.output)]
    jobs = [job for job in jobs if tuple(key_of(setting.name, *job, steps).values()) not in done]
    if jobs and not options.table:
        samples = load_market(options.market) if options.market else load_glyphs()
        print(f"data after {time.perf_counter() - begun:.0f} s, {len(jobs)} runs to do", flush=True)

        def work(waiting: Any) -> None:
            while time.perf_counter() - begun < options.seconds:
                try:
                    name, fold, seed = waiting.get_nowait()
                except Empty:
                    return
                line = run_once(setting, samples, name, fold, seed, steps)
                with options.output.open("a") as file:  # a line is written at once: those of processes do not mix
                    file.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)

        run_in_processes(work, jobs, options.jobs)
    print(write_table(read_lines(options.output), setting, steps))


def run_in_processes(work: Callable[[Any], None], jobs: Sequence[Any], count: int) -> None:
    """Call ``work`` with a queue of the jobs, in so many forks of this process; in this one where it is one.

    Forks share the data in memory. Nothing here may have used a GPU before they are made.
    """
    if count == 1:
        waiting: Any = SimpleQueue()
        for job in jobs:
            waiting.put(job)
        return work(waiting)
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        waiting = manager.Queue()
        for job in jobs:
            waiting.put(job)
        workers = [context.Process(target=work, args=(waiting,)) for _ in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return None


if __name__ == "__main__":
    main()
