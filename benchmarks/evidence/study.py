"""What the studies share: samples that every worker maps, networks, a run through the package's loop, and probes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mettle.data import Samples
from mettle.data.dataset import SPLITS, Column
from mettle.data.inputs import FeatureArray, ImageArray, load_into_memory
from mettle.data.loader import Loader
from mettle.data.sampler import EpochBatchSampler
from mettle.data.sources.npz import read_npz
from mettle.data.transforms import Augment, to_input_tensor
from mettle.evaluate import probe
from mettle.evaluate.linear_probe import Probe
from mettle.model import Embedder, EmbedderSpec, embed
from mettle.train import Callback, Method, Schedule, TrainingState, run_loop
from mettle.train.callbacks import DivergenceGuard
from mettle.train.from_recipe import evenly_spaced
from mettle.train.optim import WarmupCosine

TRAIN, VAL, TEST = range(3)  # codes of the splits
MAX_SKIPPED_STEPS = 51  # in a row, before a run is given up
NORMALIZATION_SAMPLES = 2048
STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # of linear probes
WARMUP = 0.1  # share of the steps in which the learning rate rises
CLOCK_STEPS = 1_000_000  # of a run that a clock stops


# Samples


def decode_npz(
    path: Path, choose: Callable[[dict[str, np.ndarray]], np.ndarray] | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """All pictures of an NPZ file as one array, and its columns; ``choose`` picks positions from the columns first."""
    with np.load(path) as z:
        sizes = {name: z[name].shape for name in z.files if name not in ("data", "offsets", "header", "trailer")}
        n = len(z["split"])
        columns = {name: z[name] for name, s in sizes.items() if s == (n,)}
        extra = {name: z[name] for name, s in sizes.items() if s != (n,)}
    at = np.arange(n) if choose is None else choose(columns)
    columns = {name: c[at] for name, c in columns.items()}
    if "images" in extra:
        return extra.pop("images")[at], columns | extra
    label = next(name for name in ("label", "identity", "y") if name in columns)
    samples = read_npz(path, label=label, domain="", groups=[])
    return load_into_memory(samples.inputs.take(at)).read(np.arange(len(at))), columns | extra  # type: ignore[attr-defined]


def choose_few(by: str, each: int) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """For quick runs: the first ``each`` samples of every split and value of a column, of 24 values at most."""

    def choose(columns: dict[str, np.ndarray]) -> np.ndarray:
        found = []
        for split in np.unique(columns["split"]):
            inside = np.flatnonzero(columns["split"] == split)
            for value in np.unique(columns[by][inside])[:24]:
                found.append(inside[columns[by][inside] == value][:each])
        return np.sort(np.concatenate(found))

    return choose


def hold_out(split: np.ndarray, label: np.ndarray, last: int) -> np.ndarray:
    """The split with the last ``last`` training samples of every class as validation."""
    split = split.copy()
    for value in np.unique(label):
        own = np.flatnonzero((label == value) & (split == TRAIN))
        split[own[-last:]] = VAL
    return split


def save_samples(folder: Path, x: np.ndarray, columns: dict[str, np.ndarray]) -> None:
    """Write pictures or rows and their columns (``label``, ``split`` and any others) for the workers."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "x.npy", x)
    np.savez(folder / "columns.npz", **columns)  # type: ignore[arg-type]


def load_samples(folder: Path) -> Samples:
    """What `save_samples` wrote; the workers map one copy of the pictures.

    Labels keep the numbers that they have in the file, because the order of P x K batches depends on them.
    """
    x = np.load(folder / "x.npy", mmap_mode="r")
    with np.load(folder / "columns.npz") as z:
        columns = {name: z[name].astype(np.int64) for name in z.files}
    split, role = columns.pop("split"), columns.pop("role", None)
    coded = {name: Column(c, tuple(str(k) for k in range(int(c.max()) + 1))) for name, c in columns.items()}
    inputs = FeatureArray(x) if x.ndim == 2 else ImageArray(x)
    return Samples.of(inputs, coded.pop("label"), groups=coded, split=split, role=role)


# Networks


def choose_precision(device: str) -> str:
    """Half precision for the encoder where there are tensor cores; losses stay in float32."""
    return "bfloat16" if device.startswith("cuda") else "float32"


def build_resnet18(shape: tuple[int, ...], *, stem: str, dim: int, head: str = "linear", unit: bool = True) -> Embedder:
    """The package's ResNet-18 with another first layer.

    ``half``: 3x3 at stride 2 without pooling, for 32 pixels a quarter of the work of the usual small stem;
    ``large``: 7x7 at stride 2 and pooling, whatever the size of the picture.
    """
    model = Embedder(EmbedderSpec("resnet18", head=head, dim=dim, unit=unit), shape)  # type: ignore[arg-type]
    assert isinstance(model.backbone, nn.Sequential)
    if stem == "half":
        model.backbone[0] = nn.Conv2d(shape[0], 64, 3, stride=2, padding=1, bias=False)
    elif stem == "large":
        model.backbone[0] = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
        model.backbone[3] = nn.MaxPool2d(3, 2, 1)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def build_model(network: Callable[[tuple[int, ...]], Embedder], train: Samples, seed: int, device: str) -> Embedder:
    """An untrained network on the device, centered on training inputs; a pure function of the seed."""
    torch.manual_seed(seed)
    shape = train.inputs.shape
    model = network((shape[2], *shape[:2]) if len(shape) == 3 else shape)
    some = train.read(evenly_spaced(len(train), NORMALIZATION_SAMPLES))
    model.fit_normalization(to_input_tensor(some, "cpu"))
    return model.to(device)


# Training


class Trace(Callback):
    """Notes what the method says at a few points of a run, and calls a function of the study there."""

    def __init__(self, visit: Callable[[int], None] | None = None, visits: int = 4):
        self.visit, self.visits = visit, visits
        self.epochs, self.lines = 0, []

    def on_step(self, state: TrainingState) -> None:
        """Note a line where one is due."""
        assert state.result is not None
        self.epochs = state.batch.epoch + 1
        if state.step not in {max(1, round(state.schedule.steps * k / self.visits)) for k in range(1, self.visits + 1)}:
            return
        stats = {name: v for name, v in state.result.lazy_stats().items() if isinstance(v, int | float | dict)}
        self.lines.append({"step": state.step, "loss": state.result.loss} | stats)
        if self.visit is not None:
            self.visit(state.step)

    def as_dict(self) -> dict[str, Any]:
        """For the record of the study."""
        return {"epochs": self.epochs, "trace": self.lines}


def train_method(
    method: Method,
    train: Samples,
    sampler: EpochBatchSampler,
    augment: Augment,
    *,
    steps: int,
    rate: float,
    seed: int,
    device: str,
    views: int = 1,
    visit: Callable[[int], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train, and return what the method said at four points on the way; ``visit`` is called there.

    Random changes are drawn by the place of a sample in ``train``, so that copies of one sample differ.
    """
    method.max_skipped_steps = MAX_SKIPPED_STEPS
    loader = Loader(replace(train, ids=np.arange(len(train))), sampler, augment, seed=seed, views=views, device=device)
    trace = Trace(visit)
    run_loop(method, loader, Schedule(steps, rate, WarmupCosine(WARMUP)), [DivergenceGuard(), trace, *callbacks])
    return trace.as_dict()


# Probes


def embed_parts(model: Embedder, samples: Samples) -> dict[str, np.ndarray]:
    """The features that the head sees, in eval mode, by split."""
    return {name: embed(model, samples.part(name), batch=2048, features=True) for name in SPLITS}


def probe_parts(z: dict[str, np.ndarray], parts: dict[str, Samples], column: str = "label") -> tuple[Probe, float]:
    """Probes for a column, fitted on ``train``; their strength is chosen on ``val`` and they are read on ``test``."""
    sides = {name: (z[name], part.column(column).codes, None, part.ids) for name, part in parts.items()}
    tried = {c: probe(sides["train"], sides["val"], strength=c).linear.accuracy for c in STRENGTHS}
    strength = max(tried, key=lambda c: tried[c])  # the weakest of equals
    return probe(sides["train"], sides["test"], strength=strength), strength


def split_samples(samples: Samples) -> dict[str, Samples]:
    """The three splits by name."""
    return {name: samples.part(name) for name in SPLITS}
