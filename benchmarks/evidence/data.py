"""Sets as arrays: decoded once into a folder that all workers map, then kept on the device."""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mettle.data.inputs import load_into_memory
from mettle.data.loader import Batch
from mettle.data.sources.npz import read_npz

TRAIN, VAL, TEST = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Set:
    """Pictures (n, h, w, c) uint8 or rows (n, f) float32 on a device, and columns on the host."""

    x: Tensor
    columns: dict[str, np.ndarray]
    device: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input, as networks take it."""
        s = tuple(self.x.shape[1:])
        return (s[2], s[0], s[1]) if len(s) == 3 else s

    def part(self, split: int) -> np.ndarray:
        """Positions of a split."""
        return np.flatnonzero(self.columns["split"] == split)

    def take(self, at: np.ndarray) -> Tensor:
        """Inputs at these positions, pictures as (b, c, h, w) in [0, 1]."""
        x = self.x[torch.from_numpy(np.ascontiguousarray(at)).to(self.device)]
        return x.permute(0, 3, 1, 2).float().div_(255) if x.ndim == 4 else x

    def batch(
        self,
        at: np.ndarray,
        labels: np.ndarray,
        augment,
        *,
        seed: int,
        step: int,
        epoch: int,
        views: int = 1,
        draw=None,
    ) -> Batch:
        """A batch of the package: augmented views of these positions, one after the other.

        ``draw``: what changes are drawn for, where that is not the position (copies of one sample differ).
        """
        x, ids = self.take(at), at.astype(np.int64)
        seen = [augment(x, ids if draw is None else draw, seed=seed, epoch=epoch, view=v) for v in range(views)]
        both = torch.from_numpy(np.stack([labels[at], ids])).to(self.device).repeat(1, views)
        return Batch(seen[0] if views == 1 else torch.cat(seen), both[0], both[1], step, epoch, 0.0)


def decoded(path: Path, keep=None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """All pictures of an NPZ as one array, and every column with one entry a sample; ``keep`` thins it first."""
    with np.load(path) as z:
        sizes = {name: z[name].shape for name in z.files if name not in ("data", "offsets", "header", "trailer")}
        n = len(z["split"])
        columns = {name: z[name] for name, s in sizes.items() if s == (n,)}
        extra = {name: z[name] for name, s in sizes.items() if s != (n,)}
    at = np.arange(n) if keep is None else keep(columns)
    columns = {name: c[at] for name, c in columns.items()}
    if "images" in extra:
        return extra.pop("images")[at], columns | extra
    label = next(name for name in ("label", "identity", "y") if name in columns)
    samples = read_npz(path, label=label, domain="", groups=[])
    return load_into_memory(samples.inputs.take(at)).read(np.arange(len(at))), columns | extra  # type: ignore[attr-defined]


def thinned(by: str, each: int):
    """A quick subset: the first ``each`` samples of every split and value of a column (of 24 values at most)."""

    def keep(columns: dict[str, np.ndarray]) -> np.ndarray:
        found = []
        for split in np.unique(columns["split"]):
            inside = np.flatnonzero(columns["split"] == split)
            for value in np.unique(columns[by][inside])[:24]:
                found.append(inside[columns[by][inside] == value][:each])
        return np.sort(np.concatenate(found))

    return keep


def save(cache: Path, x: np.ndarray, columns: dict[str, np.ndarray]) -> None:
    """Lay a set down for the workers."""
    cache.mkdir(parents=True, exist_ok=True)
    np.save(cache / "x.npy", x)
    np.savez(cache / "columns.npz", **columns)


def load(cache: Path, device: str) -> Set:
    """A set that was laid down, on a device."""
    x = torch.from_numpy(np.load(cache / "x.npy")).to(device)
    with np.load(cache / "columns.npz") as z:
        return Set(x, {name: z[name] for name in z.files}, device)


def hold_out(split: np.ndarray, label: np.ndarray, last: int) -> np.ndarray:
    """The split with the last ``last`` training samples of every class as validation."""
    split = split.copy()
    for value in np.unique(label):
        own = np.flatnonzero((label == value) & (split == TRAIN))
        split[own[-last:]] = VAL
    return split


def table(path: Path, leave_out: tuple[str, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A CSV as rows of numbers: text as one column a value (of at least 20 training rows), numbers as they are."""
    with gzip.open(path, "rt", newline="") as file:
        lines = list(csv.reader(file))
    head, body = lines[0], np.array(lines[1:], dtype=object)
    columns = {name: body[:, head.index(name)].astype(float).astype(np.int64) for name in ("y", "g", "split")}
    train, made = columns["split"] == TRAIN, []
    for name in head:
        if name in ("y", "g", "split", *leave_out):
            continue
        values = body[:, head.index(name)].astype(str)
        try:
            numbers = np.array([float(v) if v else np.nan for v in values])
            numbers = np.where(np.isnan(numbers), np.nanmean(numbers[train]), numbers)
            spread = numbers[train].std() or 1.0
            made.append(np.clip((numbers - numbers[train].mean()) / spread, -5, 5)[:, None])
        except ValueError:
            known, counts = np.unique(values[train], return_counts=True)
            made += [(values == v)[:, None].astype(float) for v in known[counts >= 20]]
    return np.concatenate(made, 1).astype(np.float32), columns
