"""Contrastive learning from two views without labels: the methods that are compared, trained and probed alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from benchmarks.evidence.data import TEST, TRAIN, VAL, Set
from benchmarks.evidence.fit import fit, outputs, precision, ready
from benchmarks.evidence.probes import knn, linear
from torch import Tensor

from mettle.data.sampler import ShuffledBatchSampler
from mettle.data.transforms import Augment
from mettle.difficulty import Importance, Relative
from mettle.evaluate.probe import Accuracy
from mettle.losses import InfoNCE, SelfTriplet
from mettle.model import Embedder
from mettle.pairs import Reduction, RowValues, Tile, Traits
from mettle.train import TwoEncoder

METHODS = ("simclr", "dcl", "hcl", "wcl", "constant")
WORDS = {
    "simclr": "SimCLR",
    "dcl": "DCL",
    "hcl": "HCL",
    "wcl": "WCL (E_d)",
    "constant": "every negative x 1.5",
    "biased": "biased (E_b)",
    "raw": "raw inputs",
    "untrained": "untrained",
    "erm": "supervised",
    "jtt": "JTT",
}


@dataclass(frozen=True)
class Constant:
    """Every negative weighs the same: what is left of relative difficulty, which averages 1.5, without difficulty."""

    weight: float = 1.5

    detach = True
    traits = Traits(symmetric=True, continuous=True, trusted=True, self_contained=True, negatives="plain")

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """Nothing."""
        return {}

    def weights(self, tile: Tile, rows: RowValues) -> Tensor:
        """(a, b) weights."""
        w = torch.full_like(tile.similarity, self.weight)
        return w if tile.positive is False else torch.where(tile.positive, 1.0, w)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Setting:
    """What all methods on one set share."""

    network: Callable[[tuple[int, ...]], Embedder]
    augment: Augment
    size: int = 512  # samples of a batch, each in two views
    temperature: float = 0.5
    prior: float = 0.1
    beta: float = 0.5  # of HCL
    rate: float = 1e-3
    pace: float = 10.0  # times the rate for the biased encoder
    decay: float = 1e-6

    def loss(self, method: str) -> InfoNCE:
        """The methods differ in this line."""
        t, p = self.temperature, self.prior
        return {
            "simclr": InfoNCE(t),
            "dcl": InfoNCE(t, prior=p),
            "hcl": InfoNCE(t, prior=p, difficulty=Importance(self.beta)),
            "wcl": InfoNCE(t, prior=p, difficulty=Relative()),
            "constant": InfoNCE(t, prior=p, difficulty=Constant()),
        }[method]

    def method(self, name: str, data: Set, train: np.ndarray, seed: int) -> TwoEncoder:
        """A method with untrained networks."""
        options: dict[str, Any] = {"weight_decay": self.decay, "precision": precision(data.device), "seed": seed}
        model = ready(lambda: self.network(data.shape), data, train, seed)
        if name != "wcl":
            return TwoEncoder(model, self.loss(name), **options)
        other = ready(lambda: self.network(data.shape), data, train, 1000 + seed)
        return TwoEncoder(model, self.loss(name), other, SelfTriplet(prior=self.prior), lr_scale=self.pace, **options)

    def trained(self, name: str, data: Set, seed: int, steps: int) -> tuple[TwoEncoder, dict[str, Any]]:
        """After so many steps, and what was told on the way."""
        train = data.part(TRAIN)
        method = self.method(name, data, train, seed)
        order = ShuffledBatchSampler(len(train), min(self.size, len(train)), seed)
        labels = data.columns["label"].astype(np.int64)
        told = fit(method, data, train, labels, order, self.augment, steps=steps, rate=self.rate, seed=seed, views=2)
        return method, told

    def step(self, data: Set) -> Callable[[int], None]:
        """One step of DCL, for the clock."""
        train, labels = data.part(TRAIN), data.columns["label"].astype(np.int64)
        method = self.method("dcl", data, train, 0)
        size = min(self.size, len(train))

        def one(k: int) -> None:
            at = np.resize(np.roll(train, -size * k), size)
            method.step(data.batch(at, labels, self.augment, seed=0, step=k, epoch=k, views=2), self.rate, 0.0)

        return one


def units(method: str) -> float:
    """Two encoders cost twice as much; classifiers see one view."""
    return {"wcl": 2.0, "constant": 1.1, "jtt": 0.7, "erm": 0.5, "raw": 0.01, "untrained": 0.01}.get(method, 1.0)


def parts_of(data: Set) -> dict[str, np.ndarray]:
    """Positions by name."""
    return {"train": data.part(TRAIN), "val": data.part(VAL), "test": data.part(TEST)}


def frozen(model: Embedder, data: Set, most: int | None = None) -> dict[str, Tensor]:
    """Features of every part, from a network that learns no more."""
    return {name: outputs(model, data, at[:most], features=True) for name, at in parts_of(data).items()}


def column(data: Set, name: str) -> dict[str, np.ndarray]:
    """A column by part."""
    return {part: data.columns[name][at].astype(np.int64) for part, at in parts_of(data).items()}


def classified(z: dict[str, Tensor], data: Set) -> tuple[dict[str, float], Accuracy]:
    """Top-1, worst class and kNN of frozen features; and the linear probe's answers."""
    y = column(data, "label")
    found, strength = linear(z, y)
    classes = list(found.per_class.values())
    row = {
        "top-1": found.accuracy,
        "worst class": found.worst_class[1],
        "top-1 − worst": found.accuracy - found.worst_class[1],
        "classes at 0": float(sum(c == 0 for c in classes)),
        "kNN": knn(z, y).accuracy,
        "strength": strength,
    }
    return row, found
