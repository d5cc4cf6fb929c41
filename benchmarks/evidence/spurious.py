"""A spurious attribute: coloured digits, and birds on land or water. Who is worst off?"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence import data as sets
from benchmarks.evidence.contrastive import Setting, classified, column, frozen, units
from benchmarks.evidence.fit import fit, outputs, precision, ready, resnet18
from benchmarks.evidence.probes import linear
from benchmarks.evidence.worker_pool import Job

from mettle.data.sampler import ShuffledBatchSampler
from mettle.data.transforms import Augment
from mettle.evaluate.probe import Accuracy
from mettle.losses import NormFace
from mettle.model import Embedder, EmbedderSpec
from mettle.train import Supervised
from mettle.train.methods.two_encoder import SpuriousAttribute

FIRST = 0.2  # of the steps, for the first classifier of "just train twice"
COPIES = 20  # extra copies of what it gets wrong


@dataclass(frozen=True)
class Spurious:
    """A labelled set with an attribute that goes along with the label in training."""

    name: str
    file: str
    attribute: str
    setting: Setting
    methods: dict[str, tuple[dict[str, Any], ...]]
    steps: int
    least: int = 100
    seeds: int = 3
    workers: int = 5

    def prepare(self, folder: Path, cache: Path, quick: bool) -> None:
        """Decode; colour the digits."""
        if self.attribute == "colour":
            x, columns = sets.decoded(folder / self.file, sets.thinned("label", 60) if quick else None)
            x = coloured(x, columns["color_95"], columns["palette"])
            columns = {"label": columns["label"], "colour": columns["color_95"], "split": columns["split"]}
        else:
            x, columns = sets.decoded(folder / self.file, sets.thinned("group", 40) if quick else None)
            columns = {"label": columns["y"], "place": columns["place"], "split": columns["split"]}
        sets.save(cache, x, columns)

    def load(self, cache: Path, device: str) -> sets.Set:
        """The set on the device."""
        return sets.load(cache, device)

    def step(self, data: sets.Set) -> Callable[[int], None]:
        """For the clock."""
        return self.setting.step(data)

    def units(self, method: str) -> float:
        """What a step costs."""
        return units(method)

    def run(self, data: sets.Set, job: Job, cache: Path) -> dict[str, Any]:
        """Train one method, and ask its features for the label and for the attribute."""
        if job.method in ("erm", "jtt"):
            return self.supervised(data, job)
        if job.method == "untrained":
            model = ready(lambda: self.setting.network(data.shape), data, data.part(sets.TRAIN), job.seed)
            return {"rows": {"untrained": self.judged(model, data)}}
        method, told = self.setting.trained(job.method, data, job.seed, job.steps)
        rows = {job.method: self.judged(method.model, data)}
        if method.biased is not None:
            rows["biased"] = self.judged(method.biased, data)
            told["weights"] = self.weights(method, data, job.seed)
        return {"rows": rows, **told}

    def judged(self, model: Embedder, data: sets.Set, said: Accuracy | None = None) -> dict[str, float]:
        """One row of the table; ``said`` are the answers of a classifier, which then needs no probe."""
        z = frozen(model, data)
        row: dict[str, float] = {}
        if said is None:
            row, said = classified(z, data)
        test, y = data.part(sets.TEST), column(data, "label")["test"]
        a = data.columns[self.attribute][test].astype(np.int64)
        group = y * 1000 + a
        shares = {int(g): float(said.correct[group == g].mean()) for g in np.unique(group)}
        aligned = y == a
        row |= {
            "top-1": said.accuracy,
            "worst class": said.worst_class[1],
            "worst group": min(shares.values()),
            "aligned": float(said.correct[aligned].mean()),
            "conflicting": float(said.correct[~aligned].mean()),
            f"{self.attribute} probe": linear(z, column(data, self.attribute))[0].accuracy,
        }
        return row | ({f"group {g // 1000}/{g % 1000}": v for g, v in shares.items()} if len(shares) <= 8 else {})

    def weights(self, method: Any, data: sets.Set, seed: int) -> dict[str, Any]:
        """Mean w by whether groups agree, over a few batches in training mode, as a step would see them."""
        train, labels = data.part(sets.TRAIN), data.columns["label"].astype(np.int64)
        codes = data.columns[self.attribute][train].astype(np.int64)
        names = tuple(str(v) for v in range(int(codes.max()) + 1))
        order = ShuffledBatchSampler(len(train), min(self.setting.size, len(train)), seed + 77).epoch_batches(0)
        found: dict[str, list[float]] = {}
        for step, at in enumerate(order[:8]):
            batch = data.batch(train[at], labels, self.setting.augment, seed=seed, step=step, epoch=10_000, views=2)
            told = weighed(method, batch, SpuriousAttribute(self.attribute, train, codes, names))
            for name, value in told.items():
                found.setdefault(name, []).append(value)
        return {name: float(np.mean(v)) for name, v in found.items()}

    def supervised(self, data: sets.Set, job: Job) -> dict[str, Any]:
        """A classifier; for JTT a short one first, and then more of what that gets wrong."""
        train, labels = data.part(sets.TRAIN), data.columns["label"].astype(np.int64)
        wrong, told = np.empty(0, np.int64), {}
        if job.method == "jtt":
            first = self.classifier(data, train, labels, wrong, job.seed, max(1, round(FIRST * job.steps)))[0]
            wrong = np.flatnonzero(answers(first, data, train) != labels[train])
            told["wrong"] = len(wrong)
        method, more = self.classifier(data, train, labels, wrong, job.seed, job.steps)
        test = data.part(sets.TEST)
        correct = (answers(method, data, test) == labels[test]).astype(float)
        said = Accuracy(correct, labels[test])
        return {"rows": {job.method: self.judged(method.model, data, said)}, **told, **more}

    def classifier(self, data: sets.Set, train, labels, wrong, seed: int, steps: int) -> tuple[Supervised, dict]:
        """Cross-entropy over cosines, single views."""
        count = len(np.unique(labels))
        model = ready(lambda: self.setting.network(data.shape), data, train, seed)
        loss = NormFace(count, model.spec.dim, scale=16.0).to(data.device)
        classes = torch.arange(count, device=data.device)
        method = Supervised(model, loss, classes=classes, weight_decay=1e-4, precision=precision(data.device))
        again = np.concatenate([train, np.repeat(train[wrong], COPIES)])
        order = ShuffledBatchSampler(len(again), min(self.setting.size, len(train)), seed)
        told = fit(method, data, again, labels, order, self.setting.augment, steps=steps, rate=1e-3, seed=seed)
        return method, told


@torch.no_grad()
def weighed(method: Any, batch: Any, attribute: SpuriousAttribute) -> dict[str, float]:
    """How w depends on the groups of both ends."""
    from mettle.pairs import pair_weights

    terms, loss = method.terms(batch), method.loss
    w = pair_weights(loss, terms.embeddings, batch.ids, difficulty=loss.difficulty, biased=terms.biased)
    negative = batch.ids[:, None] != batch.ids[None, :]
    told = attribute.weight_statistics(w, negative, batch) | {
        "mean": w[negative].mean().item(),
        "std": w[negative].std().item(),
    }
    return {name: value for name, value in told.items() if isinstance(value, float)}


def answers(method: Supervised, data: sets.Set, at: np.ndarray) -> np.ndarray:
    """What a classifier says, in eval mode and without augmentation."""
    z = torch.nn.functional.normalize(outputs(method.model, data, at), dim=1)
    vectors = torch.nn.functional.normalize(method.loss.vectors().detach().float(), dim=1)
    return (z @ vectors.T).argmax(1).cpu().numpy()


def coloured(grey: np.ndarray, colour: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Digits in the colour that was drawn for them."""
    made = np.empty((*grey.shape, 3), np.uint8)
    for k, rgb in enumerate(palette):
        own = colour == k
        made[own] = np.rint(grey[own][..., None] * (rgb / 255.0)).astype(np.uint8)
    return made


def digits(shape: tuple[int, ...]) -> Embedder:
    """Four blocks of convolution, and a two-layer head."""
    return Embedder(EmbedderSpec("convnet", width=32, depth=4, pool="average", head="mlp", dim=128), shape)


def birds(shape: tuple[int, ...]) -> Embedder:
    """ResNet-18 from scratch."""
    return resnet18(shape, stem="large", dim=128, head="mlp")


def colour_study(quick: bool) -> Spurious:
    """Digits that have the colour of their class in 95 % of the training pictures, and any in the test."""
    names = ("wcl", "simclr", "dcl", "hcl", "constant", "jtt", "erm", "untrained")
    setting = Setting(digits, Augment(crop=(0.6, 1.0), aspect=4 / 3, rotate=10), size=512)
    study = Spurious("coloured", "mnist_colored/mnist_colored.npz", "colour", setting, {n: ({},) for n in names}, 3000)
    return smaller(study, quick)


def water_study(quick: bool) -> Spurious:
    """Birds on a background that goes with their kind in 95 % of the training pictures."""
    names = ("wcl", "simclr", "dcl", "hcl", "constant", "jtt", "erm", "untrained")
    setting = Setting(birds, Augment(crop=(0.7, 1.0), aspect=4 / 3, flip=0.5), size=256, beta=1.0)
    file = "waterbirds_style96/waterbirds_style96.npz"
    study = Spurious("waterbirds", file, "place", setting, {n: ({},) for n in names}, 1500)
    return smaller(study, quick)


def smaller(study: Spurious, quick: bool) -> Spurious:
    """A minute on a CPU instead."""
    return replace(study, workers=1, seeds=1, setting=replace(study.setting, size=16)) if quick else study
