"""Market-1501: people that were never seen, across cameras. SupCon, difficulty-aware SupCon, its control, ArcFace."""

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence import data as sets
from benchmarks.evidence.contrastive import Constant
from benchmarks.evidence.fit import fit, outputs, precision, ready, resnet18
from benchmarks.evidence.worker_pool import Job
from torch import Tensor

from mettle.data.sampler import PKBatchSampler
from mettle.data.transforms import Augment
from mettle.evaluate import compare, retrieval, verification
from mettle.losses import ArcFace, DASupCon, SupCon
from mettle.train import Supervised

TEMPERATURES = (0.03, 0.05, 0.07, 0.1)
MARGIN = 0.1  # of the control: cosine added to every negative
DIM = 256
AUGMENT = Augment(flip=0.5, shift=0.06, erase=0.4)
METHODS: dict[str, tuple[dict[str, Any], ...]] = {
    "supcon": tuple({"temperature": t} for t in TEMPERATURES),
    "da-supcon": tuple({"temperature": t, "alpha": 1.0, "beta": 10.0} for t in TEMPERATURES),
    "margin": tuple({"temperature": t, "margin": MARGIN} for t in TEMPERATURES),
    "arcface": tuple({"scale": s, "margin": m} for s, m in ((16, 0.2), (16, 0.3), (24, 0.2), (32, 0.3))),
}
WORDS = {
    "supcon": "SupCon",
    "da-supcon": "DA-SupCon, alpha 1, beta 10",
    "margin": "control: every negative by a margin of 0.1",
    "arcface": "ArcFace",
}


def loss_of(method: str, options: dict[str, Any], classes: int) -> Any:
    """The methods differ in this line."""
    if method == "arcface":
        return ArcFace(classes, DIM, **options)
    if method == "da-supcon":
        return DASupCon(**options)
    t = options["temperature"]
    return SupCon(t) if method == "supcon" else SupCon(t, difficulty=Constant(float(np.exp(options["margin"] / t))))


@dataclass(frozen=True)
class Market:
    """Training and test people are disjoint; the camera is the domain."""

    methods: dict[str, tuple[dict[str, Any], ...]]
    name: str = "market"
    classes: int = 64
    samples: int = 4
    steps: int = 1500
    least: int = 300
    seeds: int = 5
    workers: int = 5
    augment: Augment = AUGMENT

    def prepare(self, folder: Path, cache: Path, quick: bool) -> None:
        """Decode; distractors are nobody and stay out."""

        def keep(columns: dict[str, np.ndarray]) -> np.ndarray:
            known = np.flatnonzero(columns["role"] != 3)
            if not quick:
                return known
            few = [np.unique(columns["identity"][known][columns["split"][known] == s])[:24] for s in (0, 1, 2)]
            return known[np.isin(columns["identity"][known], np.concatenate(few))]

        x, columns = sets.decoded(folder / "market1501/market1501.npz", keep)
        columns = {"label": columns["identity"], **{k: columns[k] for k in ("camera", "role", "split")}}
        sets.save(cache, x, columns)

    def load(self, cache: Path, device: str) -> sets.Set:
        """The set on the device."""
        return sets.load(cache, device)

    def units(self, method: str) -> float:
        """What a step costs: the encoder is all that counts."""
        return 1.0

    def made(self, data: sets.Set, method: str, options: dict[str, Any], seed: int) -> tuple[Supervised, Any]:
        """A method with an untrained network, and its batches."""
        train = data.part(sets.TRAIN)
        labels = data.columns["label"][train].astype(np.int64)
        model = ready(lambda: resnet18(data.shape, stem="large", dim=DIM), data, train, seed)
        names = torch.from_numpy(np.unique(labels)).to(data.device)
        loss = loss_of(method, options, len(names))
        loss = loss.to(data.device) if isinstance(loss, torch.nn.Module) else loss
        by_class = names if hasattr(loss, "num_classes") else None
        made = Supervised(
            model, loss, classes=by_class, weight_decay=0.05, loss_rate=3.0, precision=precision(data.device)
        )
        return made, PKBatchSampler(labels, self.classes, self.samples, seed)

    def step(self, data: sets.Set) -> Callable[[int], None]:
        """For the clock."""
        method, order = self.made(data, "supcon", {"temperature": 0.05}, 0)
        train, labels = data.part(sets.TRAIN), data.columns["label"].astype(np.int64)
        batches = order.epoch_batches(0)

        def one(k: int) -> None:
            at = train[batches[k % len(batches)]]
            method.step(data.batch(at, labels, self.augment, seed=0, step=k, epoch=k), 1e-3, 0.0)

        return one

    def run(self, data: sets.Set, job: Job, cache: Path) -> dict[str, Any]:
        """Train; a candidate is looked at on validation people only, and its test embeddings are kept unread."""
        test = data.part(sets.TEST)
        if job.kind == "judge":
            return self.judge(data, job, cache)
        options = self.methods[job.method][job.candidate]
        method, order = self.made(data, job.method, options, job.seed)
        labels = data.columns["label"].astype(np.int64)
        train = data.part(sets.TRAIN)
        told = fit(method, data, train, labels, order, self.augment, steps=job.steps, rate=2e-3, seed=job.seed)
        val = data.part(sets.VAL)
        v = across(outputs(method.model, data, val), labels[val], data.columns["camera"][val])
        told |= {"score": -v.eer, "validation": {"EER": v.eer, "TAR at 1e-3": v.tar(1e-3)}}
        z = outputs(method.model, data, test)
        if job.kind == "try":
            np.save(cache / f"{job.method}-{job.candidate}.npy", z.cpu().numpy())
            return told
        return told | {"rows": {job.method: self.judged(z, data)[0]}}

    def judged(self, z: Tensor, data: sets.Set) -> tuple[dict[str, float], Any, Any]:
        """Error rates across cameras and within one, and rank-1 against the official gallery's other cameras."""
        test = data.part(sets.TEST)
        y, camera = data.columns["label"][test].astype(np.int64), data.columns["camera"][test].astype(np.int64)
        v = across(z, y, camera)
        within = across(z, y, camera, "within")
        query, z = data.columns["role"][test] == 1, z.cpu()
        r = retrieval(
            z[query],
            y[query],
            domains=camera[query],
            gallery=(z[~query], y[~query], camera[~query]),
            exclude_same_domain=True,
            k=(1, 5),
        )
        row = {
            "EER across": v.eer,
            "TAR at 1e-3": v.tar(1e-3),
            "TAR at 1e-2": v.tar(1e-2),
            "rank-1 across": r.recall[1],
            "EER within": within.eer,
            "AUC across": v.auc,
        }
        return row, v, r

    def judge(self, data: sets.Set, job: Job, cache: Path) -> dict[str, Any]:
        """The test of a chosen candidate at the first seed, with intervals over resampled people."""
        z = torch.from_numpy(np.load(cache / f"{job.method}-{job.candidate}.npy"))
        row, v, r = self.judged(z.to(data.device), data)
        told: dict[str, Any] = {"rows": {job.method: row}}
        try:
            return told | self.resampled(data, job.method, v, r, cache)
        except Exception:  # the numbers themselves are there
            return told | {"without_intervals": traceback.format_exc()[-1000:]}

    def resampled(self, data: sets.Set, method: str, v: Any, r: Any, cache: Path) -> dict[str, Any]:
        """Intervals over resampled people, and of the difference to SupCon on the same people."""
        names = {"EER across": "eer", "TAR at 1e-3": "tar@1e-3"}
        found: dict[str, Any] = {name: ends(v.interval(key)) for name, key in names.items()}
        found["rank-1 across"] = ends(r.interval("recall@1"))
        told: dict[str, Any] = {"people": found}
        chosen = json.loads((cache / "chosen.json").read_text())
        if method != "supcon" and "supcon" in chosen:
            base = torch.from_numpy(np.load(cache / f"supcon-{chosen['supcon']}.npy"))
            _, first, ranks = self.judged(base.to(data.device), data)
            pairs = {name: compare(v, first, key) for name, key in names.items()}
            pairs["rank-1 across"] = compare(r, ranks, "recall@1")
            told["against supcon"] = {k: {"difference": c.difference, **ends(c.interval)} for k, c in pairs.items()}
        return told


def across(z: Tensor, y: np.ndarray, camera: np.ndarray, trials: str = "across") -> Any:
    """Verification; on the device where that works, else on the host."""
    try:
        return verification(z, y, domains=camera, trials=trials)
    except Exception:  # the host is slower, and always there
        return verification(z.cpu(), y, domains=camera, trials=trials)


def ends(interval: Any) -> dict[str, float]:
    """Low and high."""
    return {"low": interval.low, "high": interval.high}


def study(quick: bool) -> Market:
    """All of it, or two candidates of two classes of batch."""
    if not quick:
        return Market(METHODS)
    return replace(Market({m: c[:2] for m, c in METHODS.items()}), classes=8, samples=2, workers=1, seeds=2)
