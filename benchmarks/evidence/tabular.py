"""Tables with a protected attribute: contrastive embeddings of rows, then accuracy and the gap between two groups."""

import csv
import gzip
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence.contrastive import COSTS, Setting
from benchmarks.evidence.study import (
    CLOCK_STEPS,
    TRAIN,
    embed_parts,
    load_samples,
    probe_parts,
    save_samples,
    split_samples,
)
from benchmarks.evidence.worker_pool import Job

from mettle.data import Samples
from mettle.data.transforms import Augment
from mettle.model import Embedder, EmbedderSpec
from mettle.train import Callback

POOL = 4096  # training rows that corrupted features are taken from
LEFT_OUT = {
    "adult": ("sex", "race", "marital-status", "relationship", "fnlwgt"),
    "compas": ("sex", "race", "decile_score", "score_text"),
    "law_school": ("race", "male"),
}
METHODS = ("wcl", "simclr", "dcl", "hcl", "constant", "raw")


def build_network(shape: tuple[int, ...]) -> Embedder:
    """Two layers of 256 units and a two-layer head."""
    return Embedder(EmbedderSpec("mlp", width=32, depth=2, head="mlp", dim=64), shape)


@dataclass(frozen=True)
class Tables:
    """Several tables; a method's name is ``table method``."""

    name: str
    tables: tuple[str, ...]
    setting: Setting
    methods: dict[str, tuple[dict[str, Any], ...]]
    steps: int = 1500
    least: int = 100
    seeds: int = 5
    workers: int = 6

    def prepare(self, folder: Path, cache: Path, quick: bool) -> None:
        """Numbers as they are, text as one column a value; what defines the group stays out."""
        for name in self.tables:
            x, columns = read_table(folder / f"tabular_fairness/{name}.csv.gz", LEFT_OUT[name])
            columns = {"label": columns["y"], "group": columns["g"], "split": columns["split"]}
            some = slice(None, None, max(1, len(x) // 1500) if quick else None)
            save_samples(cache / name, x[some], {k: c[some] for k, c in columns.items()})

    def load(self, cache: Path) -> dict[str, Samples]:
        """All tables."""
        return {name: load_samples(cache / name) for name in self.tables}

    def setting_for(self, samples: Samples, device: str) -> Setting:
        """The setting with a table's own rows to take corrupted features from."""
        train = samples.part("train")
        pool = torch.from_numpy(train.read(np.arange(min(len(train), POOL)))).to(device)
        return replace(self.setting, augment=replace(self.setting.augment, pool=pool))

    def time_steps(self, data: dict[str, Samples], clock: Callback, device: str) -> None:
        """Steps of DCL on the first table."""
        samples = data[self.tables[0]]
        self.setting_for(samples, device).train("dcl", samples, 0, CLOCK_STEPS, device, [clock])

    def step_cost(self, method: str) -> float:
        """In steps of DCL."""
        return COSTS.get(method.split()[1], 1.0)

    def run(self, data: dict[str, Samples], job: Job, cache: Path, device: str) -> dict[str, Any]:
        """Train one method on one table, and probe it."""
        table, name = job.method.split()
        samples = data[table]
        if name == "raw":
            z = {part: own.read(np.arange(len(own))) for part, own in split_samples(samples).items()}
            return {"rows": {job.method: measure_gaps(z, samples)}}
        method, trace = self.setting_for(samples, device).train(name, samples, job.seed, job.steps, device)
        rows = {job.method: measure_gaps(embed_parts(method.model, samples), samples)}
        if method.biased is not None:
            rows[f"{table} biased"] = measure_gaps(embed_parts(method.biased, samples), samples)
        return {"rows": rows, **trace}


def read_table(path: Path, leave_out: tuple[str, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
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


def measure_gaps(z: dict[str, np.ndarray], samples: Samples) -> dict[str, float]:
    """Accuracy, and how differently the two groups fare."""
    parts = split_samples(samples)
    labels, strength = probe_parts(z, parts)
    found, test = labels.linear, parts["test"]
    truth, group, right = test.labels, test.column("group").codes, found.correct.astype(bool)
    said = np.where(right, truth, 1 - truth)  # two classes: what is not right is the other

    def rate(values: np.ndarray, *where: np.ndarray) -> float:
        inside = np.logical_and.reduce(where)
        return float(values[inside].mean()) if inside.any() else float("nan")

    cells = {(a, b): rate(right, truth == a, group == b) for a in (0, 1) for b in (0, 1)}
    odds = [abs(rate(said == 1, truth == a, group == 1) - rate(said == 1, truth == a, group == 0)) for a in (0, 1)]
    return {
        "accuracy": found.accuracy,
        "worst class": found.worst_class[1],
        "worst group": min(cells.values()),
        "accuracy gap": abs(rate(right, group == 1) - rate(right, group == 0)),
        "parity gap": abs(rate(said == 1, group == 1) - rate(said == 1, group == 0)),
        "odds gap": max(odds),
        "group probe": probe_parts(z, parts, "group")[0].linear.accuracy,
        "strength": strength,
    }


def tabular_study(quick: bool) -> Tables:
    """Adult, COMPAS and law school."""
    names = tuple(LEFT_OUT)
    setting = Setting(build_network, Augment(noise=0.1, corrupt=0.2), size=512, prior=0.3, beta=1.0, biased_rate=1.0)
    found = Tables("tables", names, setting, {f"{t} {m}": ({},) for t in names for m in METHODS})
    if quick:
        return replace(found, workers=1, seeds=2, setting=replace(setting, size=64))
    return found
