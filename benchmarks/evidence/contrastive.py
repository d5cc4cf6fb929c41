"""Contrastive learning from two views without labels: the settings of the methods that are compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence.study import (
    CLOCK_STEPS,
    build_model,
    choose_precision,
    load_samples,
    probe_parts,
    split_samples,
    train_method,
)
from torch import Tensor

from mettle.data import Samples
from mettle.data.sampler import ShuffledBatchSampler
from mettle.data.transforms import Augment
from mettle.difficulty import Importance, Relative
from mettle.evaluate.linear_probe import ProbeAccuracy
from mettle.losses import InfoNCE, SelfTriplet
from mettle.model import Embedder
from mettle.pairs import Reduction, RowValues, Tile, Traits
from mettle.train import Callback, TwoEncoder

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
# What a step costs in steps of DCL: two encoders cost twice as much; classifiers see one view.
COSTS = {"wcl": 2.0, "constant": 1.1, "jtt": 0.7, "erm": 0.5, "raw": 0.01, "untrained": 0.01}


@dataclass(frozen=True)
class Constant:
    """Every negative weighs the same: what is left of relative difficulty, which averages 1.5, without difficulty."""

    weight: float = 1.5

    detach = True
    traits = Traits(symmetric=True, continuous=True, trusted=True, self_contained=True, negatives="plain")

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """Nothing."""
        return {}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
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
    biased_rate: float = 10.0  # times the rate, for the biased encoder
    weight_decay: float = 1e-6

    def build_loss(self, method: str) -> InfoNCE:
        """The methods differ in this line."""
        t, p = self.temperature, self.prior
        return {
            "simclr": InfoNCE(t),
            "dcl": InfoNCE(t, prior=p),
            "hcl": InfoNCE(t, prior=p, difficulty=Importance(self.beta)),
            "wcl": InfoNCE(t, prior=p, difficulty=Relative()),
            "constant": InfoNCE(t, prior=p, difficulty=Constant()),
        }[method]

    def build_method(self, name: str, train: Samples, seed: int, device: str) -> TwoEncoder:
        """A method with untrained networks."""
        options: dict[str, Any] = {
            "weight_decay": self.weight_decay,
            "precision": choose_precision(device),
            "seed": seed,
        }
        model, loss = build_model(self.network, train, seed, device), self.build_loss(name)
        if name != "wcl":
            return TwoEncoder(model, loss, **options)
        biased = build_model(self.network, train, 1000 + seed, device)
        return TwoEncoder(model, loss, biased, SelfTriplet(prior=self.prior), lr_scale=self.biased_rate, **options)

    def train(
        self, name: str, samples: Samples, seed: int, steps: int, device: str, callbacks: Sequence[Callback] = ()
    ) -> tuple[TwoEncoder, dict[str, Any]]:
        """A method after so many steps, and what it said on the way."""
        train = samples.part("train")
        method = self.build_method(name, train, seed, device)
        sampler = ShuffledBatchSampler(len(train), min(self.size, len(train)), seed)
        options: dict[str, Any] = {"steps": steps, "rate": self.rate, "seed": seed, "device": device, "views": 2}
        return method, train_method(method, train, sampler, self.augment, callbacks=callbacks, **options)


class ContrastiveStudy:
    """What studies of one set of images share: they train contrastively, and count their work in steps of DCL."""

    setting: Setting

    def load(self, cache: Path) -> Samples:
        """The set."""
        return load_samples(cache)

    def time_steps(self, data: Samples, clock: Callback, device: str) -> None:
        """Steps of DCL."""
        self.setting.train("dcl", data, 0, CLOCK_STEPS, device, [clock])

    def step_cost(self, method: str) -> float:
        """In steps of DCL."""
        return COSTS.get(method, 1.0)


def probe_labels(z: dict[str, np.ndarray], samples: Samples) -> tuple[dict[str, float], ProbeAccuracy]:
    """Top-1, worst class and kNN of frozen features; and the linear probe's answers."""
    found, strength = probe_parts(z, split_samples(samples))
    linear = found.linear
    row = {
        "top-1": linear.accuracy,
        "worst class": linear.worst_class[1],
        "top-1 − worst": linear.accuracy - linear.worst_class[1],
        "classes at 0": float(sum(share == 0 for share in linear.per_class.values())),
        "kNN": found.knn.accuracy,
        "strength": strength,
    }
    return row, linear
