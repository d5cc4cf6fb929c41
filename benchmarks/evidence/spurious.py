"""A spurious attribute: coloured digits, and birds on land or water. Who is worst off?"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence.contrastive import ContrastiveStudy, Setting, probe_labels
from benchmarks.evidence.study import (
    build_model,
    build_resnet18,
    choose_few,
    choose_precision,
    decode_npz,
    embed_parts,
    probe_parts,
    save_samples,
    split_samples,
    train_method,
)
from benchmarks.evidence.worker_pool import Job

from mettle.data import Samples
from mettle.data.loader import Batch, Loader
from mettle.data.sampler import ShuffledBatchSampler
from mettle.data.transforms import Augment
from mettle.evaluate.linear_probe import ProbeAccuracy
from mettle.losses import NormFace
from mettle.model import Embedder, EmbedderSpec
from mettle.pairs import pair_weights
from mettle.train import Supervised, TwoEncoder
from mettle.train.methods.jtt import find_misclassified
from mettle.train.methods.two_encoder import SpuriousAttribute

FIRST = 0.2  # of the steps, for the first classifier of "just train twice"
COPIES = 20  # extra copies of what it gets wrong
NEW_EPOCH = 10_000  # whose random changes no training has seen


@dataclass(frozen=True)
class Spurious(ContrastiveStudy):
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
            x, columns = decode_npz(folder / self.file, choose_few("label", 60) if quick else None)
            x = color_digits(x, columns["color_95"], columns["palette"])
            columns = {"label": columns["label"], "colour": columns["color_95"], "split": columns["split"]}
        else:
            x, columns = decode_npz(folder / self.file, choose_few("group", 40) if quick else None)
            columns = {"label": columns["y"], "place": columns["place"], "split": columns["split"]}
        save_samples(cache, x, columns)

    def run(self, data: Samples, job: Job, cache: Path, device: str) -> dict[str, Any]:
        """Train one method, and ask its features for the label and for the attribute."""
        if job.method in ("erm", "jtt"):
            return self.run_supervised(data, job, device)
        if job.method == "untrained":
            model = build_model(self.setting.network, data.part("train"), job.seed, device)
            return {"rows": {"untrained": self.measure_test(model, data)}}
        method, trace = self.setting.train(job.method, data, job.seed, job.steps, device)
        rows = {job.method: self.measure_test(method.model, data)}
        if method.biased is not None:
            rows["biased"] = self.measure_test(method.biased, data)
            trace["weights"] = self.measure_weights(method, data.part("train"), job.seed, device)
        return {"rows": rows, **trace}

    def measure_test(self, model: Embedder, data: Samples, answers: ProbeAccuracy | None = None) -> dict[str, float]:
        """One row of the table; ``answers`` are those of a classifier, which then needs no probe."""
        z, parts = embed_parts(model, data), split_samples(data)
        row: dict[str, float] = {}
        if answers is None:
            row, answers = probe_labels(z, data)
        y, a = parts["test"].labels, parts["test"].column(self.attribute).codes
        group = y * 1000 + a
        shares = {int(g): float(answers.correct[group == g].mean()) for g in np.unique(group)}
        aligned = y == a
        row |= {
            "top-1": answers.accuracy,
            "worst class": answers.worst_class[1],
            "worst group": min(shares.values()),
            "aligned": float(answers.correct[aligned].mean()),
            "conflicting": float(answers.correct[~aligned].mean()),
            f"{self.attribute} probe": probe_parts(z, parts, self.attribute)[0].linear.accuracy,
        }
        return row | ({f"group {g // 1000}/{g % 1000}": v for g, v in shares.items()} if len(shares) <= 8 else {})

    def measure_weights(self, method: TwoEncoder, train: Samples, seed: int, device: str) -> dict[str, Any]:
        """Mean w by whether groups agree, over a few batches in training mode, as a step would see them."""
        attribute = SpuriousAttribute.from_column(train, self.attribute)
        sampler = ShuffledBatchSampler(len(train), min(self.setting.size, len(train)), seed + 77)
        loader = Loader(train, sampler, self.setting.augment, seed=seed, views=2, device=device)
        found: dict[str, list[float]] = {}
        for batch in loader.batches(0, min(8, len(sampler)), (NEW_EPOCH, 0)):
            for name, value in weight_statistics(method, batch, attribute).items():
                found.setdefault(name, []).append(value)
        return {name: float(np.mean(v)) for name, v in found.items()}

    def run_supervised(self, data: Samples, job: Job, device: str) -> dict[str, Any]:
        """A classifier; for JTT a short one first, and then more of what that gets wrong."""
        train, test, wrong, found = data.part("train"), data.part("test"), np.empty(0, np.int64), {}
        if job.method == "jtt":
            first = self.train_classifier(train, wrong, job.seed, max(1, round(FIRST * job.steps)), device)[0]
            wrong = find_misclassified(first.model, first.loss, first.classes, train)  # type: ignore[arg-type]
            found["wrong"] = len(wrong)
        method, trace = self.train_classifier(train, wrong, job.seed, job.steps, device)
        correct = np.ones(len(test))
        correct[find_misclassified(method.model, method.loss, method.classes, test)] = 0  # type: ignore[arg-type]
        row = self.measure_test(method.model, data, ProbeAccuracy(correct, test.labels))
        return {"rows": {job.method: row}, **found, **trace}

    def train_classifier(
        self, train: Samples, wrong: np.ndarray, seed: int, steps: int, device: str
    ) -> tuple[Supervised, dict[str, Any]]:
        """Cross-entropy over cosines, single views."""
        count = len(train.label.names)
        model = build_model(self.setting.network, train, seed, device)
        loss = NormFace(count, model.dim, scale=16.0).to(device)
        classes = torch.arange(count, device=device)
        method = Supervised(model, loss, classes=classes, weight_decay=1e-4, precision=choose_precision(device))
        again = train.take(np.concatenate([np.arange(len(train)), np.repeat(wrong, COPIES)]))
        sampler = ShuffledBatchSampler(len(again), min(self.setting.size, len(train)), seed)
        options: dict[str, Any] = {"steps": steps, "rate": 1e-3, "seed": seed, "device": device}
        return method, train_method(method, again, sampler, self.setting.augment, **options)


@torch.no_grad()
def weight_statistics(method: TwoEncoder, batch: Batch, attribute: SpuriousAttribute) -> dict[str, float]:
    """How w depends on the groups of both ends."""
    terms, loss = method.terms(batch), method.loss
    w = pair_weights(loss, terms.embeddings, batch.ids, difficulty=loss.difficulty, biased=terms.biased)
    negative = batch.ids[:, None] != batch.ids[None, :]
    found = attribute.weight_statistics(w, negative, batch) | {
        "mean": w[negative].mean().item(),
        "std": w[negative].std().item(),
    }
    return {name: value for name, value in found.items() if isinstance(value, float)}


def color_digits(grey: np.ndarray, colour: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Digits in the colour that was drawn for them."""
    made = np.empty((*grey.shape, 3), np.uint8)
    for k, rgb in enumerate(palette):
        own = colour == k
        made[own] = np.rint(grey[own][..., None] * (rgb / 255.0)).astype(np.uint8)
    return made


def build_convnet(shape: tuple[int, ...]) -> Embedder:
    """Four blocks of convolution, and a two-layer head."""
    return Embedder(EmbedderSpec("convnet", width=32, depth=4, pool="average", head="mlp", dim=128), shape)


def build_large_resnet(shape: tuple[int, ...]) -> Embedder:
    """ResNet-18 from scratch."""
    return build_resnet18(shape, stem="large", dim=128, head="mlp")


def colored_digits_study(quick: bool) -> Spurious:
    """Digits that have the colour of their class in 95 % of the training pictures, and any in the test."""
    names = ("wcl", "simclr", "dcl", "hcl", "constant", "jtt", "erm", "untrained")
    setting = Setting(build_convnet, Augment(crop=(0.6, 1.0), aspect=4 / 3, rotate=10), size=512)
    study = Spurious("coloured", "mnist_colored/mnist_colored.npz", "colour", setting, {n: ({},) for n in names}, 3000)
    return shrink(study, quick)


def waterbirds_study(quick: bool) -> Spurious:
    """Birds on a background that goes with their kind in 95 % of the training pictures."""
    names = ("wcl", "simclr", "dcl", "hcl", "constant", "jtt", "erm", "untrained")
    setting = Setting(build_large_resnet, Augment(crop=(0.7, 1.0), aspect=4 / 3, flip=0.5), size=256, beta=1.0)
    file = "waterbirds_style96/waterbirds_style96.npz"
    study = Spurious("waterbirds", file, "place", setting, {n: ({},) for n in names}, 1500)
    return shrink(study, quick)


def shrink(study: Spurious, quick: bool) -> Spurious:
    """A minute on a CPU instead."""
    return replace(study, workers=1, seeds=1, setting=replace(study.setting, size=16)) if quick else study
