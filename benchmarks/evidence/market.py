"""Market-1501: people that were never seen, across cameras. SupCon, difficulty-aware SupCon, its control, ArcFace."""

import json
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.evidence.contrastive import Constant
from benchmarks.evidence.study import (
    CLOCK_STEPS,
    build_model,
    build_resnet18,
    choose_precision,
    decode_npz,
    load_samples,
    save_samples,
    train_method,
)
from benchmarks.evidence.worker_pool import Job

from mettle.data import Samples
from mettle.data.dataset import ROLES
from mettle.data.sampler import PKBatchSampler
from mettle.data.transforms import Augment
from mettle.evaluate import compare, retrieval, verification
from mettle.losses import ArcFace, DASupCon, SupCon
from mettle.model import embed
from mettle.train import Callback, Supervised

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


def build_loss(method: str, options: dict[str, Any], classes: int) -> Any:
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

        def choose(columns: dict[str, np.ndarray]) -> np.ndarray:
            known = np.flatnonzero(columns["role"] != 3)
            if not quick:
                return known
            few = [np.unique(columns["identity"][known][columns["split"][known] == s])[:24] for s in (0, 1, 2)]
            return known[np.isin(columns["identity"][known], np.concatenate(few))]

        x, columns = decode_npz(folder / "market1501/market1501.npz", choose)
        columns = {"label": columns["identity"], **{k: columns[k] for k in ("camera", "role", "split")}}
        save_samples(cache, x, columns)

    def load(self, cache: Path) -> Samples:
        """The set."""
        return load_samples(cache)

    def step_cost(self, method: str) -> float:
        """The encoder is all that counts."""
        return 1.0

    def build_method(self, name: str, options: dict[str, Any], train: Samples, seed: int, device: str) -> Supervised:
        """A method with an untrained network."""
        model = build_model(lambda shape: build_resnet18(shape, stem="large", dim=DIM), train, seed, device)
        classes = torch.from_numpy(np.unique(train.labels)).to(device)
        loss = build_loss(name, options, len(classes))
        loss = loss.to(device) if isinstance(loss, torch.nn.Module) else loss
        return Supervised(
            model,
            loss,
            classes=classes if hasattr(loss, "num_classes") else None,
            weight_decay=0.05,
            loss_rate=3.0,
            precision=choose_precision(device),
        )

    def train(self, method: Supervised, train: Samples, seed: int, device: str, **options: Any) -> dict[str, Any]:
        """Batches hold several pictures of each person."""
        sampler = PKBatchSampler(train.labels, self.classes, self.samples, seed)
        return train_method(method, train, sampler, self.augment, seed=seed, device=device, **options)

    def time_steps(self, data: Samples, clock: Callback, device: str) -> None:
        """Steps of SupCon."""
        train = data.part("train")
        method = self.build_method("supcon", {"temperature": 0.05}, train, 0, device)
        self.train(method, train, 0, device, steps=CLOCK_STEPS, rate=1e-3, callbacks=[clock])

    def run(self, data: Samples, job: Job, cache: Path, device: str) -> dict[str, Any]:
        """Train; a candidate is looked at on validation people only, and its test embeddings are kept unread."""
        train, val, test = map(data.part, ("train", "val", "test"))
        if job.kind == "judge":
            return self.judge(test, job, cache, device)
        options = self.methods[job.method][job.candidate]
        method = self.build_method(job.method, options, train, job.seed, device)
        trace = self.train(method, train, job.seed, device, steps=job.steps, rate=2e-3)
        v = verify(embed(method.model, val, batch=2048), val, device)
        trace |= {"score": -v.eer, "validation": {"EER": v.eer, "TAR at 1e-3": v.tar(1e-3)}}
        z = embed(method.model, test, batch=2048)
        if job.kind == "try":
            np.save(cache / f"{job.method}-{job.candidate}.npy", z)
            return trace
        return trace | {"rows": {job.method: measure_test(z, test, device)[0]}}

    def judge(self, test: Samples, job: Job, cache: Path, device: str) -> dict[str, Any]:
        """The test of a chosen candidate at the first seed, with intervals over resampled people."""
        row, v, r = measure_test(np.load(cache / f"{job.method}-{job.candidate}.npy"), test, device)
        found: dict[str, Any] = {"rows": {job.method: row}}
        try:
            return found | resample_people(test, job.method, v, r, cache, device)
        except Exception:  # the numbers themselves are there
            return found | {"without_intervals": traceback.format_exc()[-1000:]}


def measure_test(z: np.ndarray, test: Samples, device: str) -> tuple[dict[str, float], Any, Any]:
    """Error rates across cameras and within one, and rank-1 against the official gallery's other cameras."""
    v, within = verify(z, test, device), verify(z, test, device, "within")
    y, camera, query = test.labels, test.column("camera").codes, test.role == ROLES.index("query")
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


def resample_people(test: Samples, method: str, v: Any, r: Any, cache: Path, device: str) -> dict[str, Any]:
    """Intervals over resampled people, and of the difference to SupCon on the same people."""
    names = {"EER across": "eer", "TAR at 1e-3": "tar@1e-3"}
    found: dict[str, Any] = {name: as_bounds(v.interval(key)) for name, key in names.items()}
    found["rank-1 across"] = as_bounds(r.interval("recall@1"))
    record: dict[str, Any] = {"people": found}
    chosen = json.loads((cache / "chosen.json").read_text())
    if method != "supcon" and "supcon" in chosen:
        base = np.load(cache / f"supcon-{chosen['supcon']}.npy")
        _, first, ranks = measure_test(base, test, device)
        pairs = {name: compare(v, first, key) for name, key in names.items()}
        pairs["rank-1 across"] = compare(r, ranks, "recall@1")
        record["against supcon"] = {k: {"difference": c.difference, **as_bounds(c.interval)} for k, c in pairs.items()}
    return record


def verify(z: np.ndarray, samples: Samples, device: str, trials: str = "across") -> Any:
    """Verification across cameras or within them; on the device where that works, else on the host."""
    options: dict[str, Any] = {"domains": samples.column("camera").codes, "trials": trials}
    try:
        return verification(torch.from_numpy(z).to(device), samples.labels, **options)
    except Exception:  # the host is slower, and always there
        return verification(z, samples.labels, **options)


def as_bounds(interval: Any) -> dict[str, float]:
    """Low and high."""
    return {"low": interval.low, "high": interval.high}


def market_study(quick: bool) -> Market:
    """All of it, or two candidates of two classes of batch."""
    if not quick:
        return Market(METHODS)
    return replace(Market({m: c[:2] for m, c in METHODS.items()}), classes=8, samples=2, workers=1, seeds=2)
