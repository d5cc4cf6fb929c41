"""Tables with a protected attribute: contrastive embeddings of rows, then accuracy and the gap between two groups."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence import data as sets
from benchmarks.evidence.contrastive import Setting, column, frozen, parts_of, units
from benchmarks.evidence.probes import linear
from benchmarks.evidence.worker_pool import Job

from mettle.data.transforms import Augment
from mettle.model import Embedder, EmbedderSpec

LEFT_OUT = {
    "adult": ("sex", "race", "marital-status", "relationship", "fnlwgt"),
    "compas": ("sex", "race", "decile_score", "score_text"),
    "law_school": ("race", "male"),
}
METHODS = ("wcl", "simclr", "dcl", "hcl", "constant", "raw")


def rows(shape: tuple[int, ...]) -> Embedder:
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
            x, columns = sets.table(folder / f"tabular_fairness/{name}.csv.gz", LEFT_OUT[name])
            columns = {"label": columns["y"], "group": columns["g"], "split": columns["split"]}
            some = slice(None, None, max(1, len(x) // 1500) if quick else None)
            sets.save(cache / name, x[some], {k: c[some] for k, c in columns.items()})

    def load(self, cache: Path, device: str) -> dict[str, sets.Set]:
        """All tables on the device."""
        return {name: sets.load(cache / name, device) for name in self.tables}

    def of(self, data: sets.Set) -> Setting:
        """The setting with a table's own rows to take corrupted features from."""
        pool = data.take(data.part(sets.TRAIN)[:4096])
        return replace(self.setting, augment=replace(self.setting.augment, pool=pool))

    def step(self, data: dict[str, sets.Set]) -> Callable[[int], None]:
        """For the clock."""
        one = data[self.tables[0]]
        return self.of(one).step(one)

    def units(self, method: str) -> float:
        """What a step costs."""
        return units(method.split()[1])

    def run(self, data: dict[str, sets.Set], job: Job, cache: Path) -> dict[str, Any]:
        """Train one method on one table, and probe it."""
        table, name = job.method.split()
        one = data[table]
        if name == "raw":
            z = {part: one.take(at) for part, at in parts_of(one).items()}
            return {"rows": {job.method: judged(z, one)}}
        method, told = self.of(one).trained(name, one, job.seed, job.steps)
        found = {job.method: judged(frozen(method.model, one), one)}
        if method.biased is not None:
            found[f"{table} biased"] = judged(frozen(method.biased, one), one)
        return {"rows": found, **told}


def judged(z: dict[str, torch.Tensor], data: sets.Set) -> dict[str, float]:
    """Accuracy, and how differently the two groups fare."""
    y, g = column(data, "label"), column(data, "group")
    found, strength = linear(z, y)
    truth, group, right = y["test"], g["test"], found.correct.astype(bool)
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
        "group probe": linear(z, g)[0].accuracy,
        "strength": strength,
    }


def study(quick: bool) -> Tables:
    """Adult, COMPAS and law school."""
    names = tuple(LEFT_OUT)
    setting = Setting(rows, Augment(noise=0.1, corrupt=0.2), size=512, prior=0.3, beta=1.0, pace=1.0)
    found = Tables("tables", names, setting, {f"{t} {m}": ({},) for t in names for m in METHODS})
    if quick:
        return replace(found, workers=1, seeds=2, setting=replace(setting, size=64))
    return found
