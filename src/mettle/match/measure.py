"""What an index loses against exact search, and how long it takes: measured on the gallery it is built for."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from mettle.match.index import Exact, Index

PROBES, TIMED, K = 400, 100, 10
IMPOSTORS = 4096  # templates with which each probe is compared to find the threshold
FAR = 1e-3


@dataclass(frozen=True)
class Measured:
    """Facts about an index, found when it was built."""

    kind: str
    size: int
    dim: int
    recall_at: dict[int, float]  # share of the exact top k that came out, by k
    tar_loss: float | None  # share of genuine probes that exact search accepts at FAR 1e-3 and this index does not
    p50_ms: float
    p99_ms: float
    exact_p50_ms: float
    bytes: int
    probes: int = 0  # how many were measured
    recall_low: float = 1.0  # recall@10 less two standard errors

    def __str__(self) -> str:
        if not self.probes:
            return f"{self.kind} index, empty"
        recall = ", ".join(f"recall@{k} {value:.4f}" for k, value in sorted(self.recall_at.items()))
        loss = "" if self.tar_loss is None else f", TAR lost at FAR 1e-3 {self.tar_loss:.4f}"
        return (
            f"{self.kind} index of {self.size:,} x {self.dim}, {self.bytes / 1e6:.0f} MB: {recall}{loss} against exact "
            f"search on {self.probes} probes; {self.p50_ms:.2f} ms a probe (p99 {self.p99_ms:.2f}, exact "
            f"{self.exact_p50_ms:.2f})"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        return vars(self) | {"recall_at": {str(k): v for k, v in self.recall_at.items()}}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "Measured":
        """From `as_dict`."""
        values: dict[str, Any] = facts | {"recall_at": {int(k): float(v) for k, v in facts["recall_at"].items()}}
        return cls(**values)


@dataclass(frozen=True, eq=False)
class Trial:
    """Probes with what exact search says of them."""

    probes: np.ndarray  # (p, dim)
    skip: np.ndarray  # (p,) number that does not count for this probe (the template it was), -1: none
    scores: np.ndarray  # (p, k) exact
    numbers: np.ndarray  # (p, k) exact
    exact_p50_ms: float
    people: "People | None"  # whose probes and templates they are; None: not known

    def loss(self, scores: np.ndarray, numbers: np.ndarray) -> float | None:
        """Share of probes that exact search accepts as who they are and this answer does not."""
        if self.people is None or self.people.threshold is None:
            return None
        accepted = self.people.accepted(self.scores, self.numbers)
        return float((accepted & ~self.people.accepted(scores, numbers)).mean())


@dataclass(frozen=True, eq=False)
class People:
    """Whose probes (p,) and whose templates (n,) they are, and what makes a match."""

    probe: np.ndarray
    numbers: np.ndarray  # of templates, rising
    template: np.ndarray
    threshold: float | None  # at FAR 1e-3; None where there are too few impostors to tell

    def accepted(self, scores: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """(p,) whether a template of the right person came out with a score that reaches the threshold."""
        at = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        own = (self.template[at] == self.probe[:, None]) & (numbers >= 0)
        return (own & (scores >= self.threshold)).any(1)


def trial(
    exact: Exact, labels: np.ndarray | None = None, probes: np.ndarray | None = None, *, count: int = PROBES
) -> Trial:
    """Search probes exactly. Given ones are taken as they are; otherwise templates of the gallery are (`drawn`)."""
    people, skip = None, None
    if probes is None:
        labels = np.arange(len(exact)) if labels is None else labels
        draw = np.random.default_rng(0)
        probes, rows, skip = drawn(exact.rows.numbers, exact.rows.vectors, labels, count, draw)
        order = np.argsort(exact.rows.numbers, kind="stable")
        threshold = _threshold(exact.rows.vectors, labels, probes, labels[rows], draw)
        people = People(labels[rows], exact.rows.numbers[order], labels[order], threshold)
    probes = np.asarray(probes, np.float32)
    skip = np.full(len(probes), -1, np.int64) if skip is None else skip
    scores, numbers = without(*exact.search(probes, K + 1), skip)
    return Trial(probes, skip, scores, numbers, float(np.median(_times(exact, probes[: TIMED // 4]))), people)


def drawn(
    numbers: np.ndarray, vectors: np.ndarray, labels: np.ndarray, count: int, draw: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Probes, the rows they come from, and the numbers that do not count for them.

    Templates of people who have several, each without itself. Where there are hardly any such people, templates mixed
    with another one, so that they are still nearest to their own (cosine about 0.8).
    """
    rows = _several(labels)
    if len(rows) >= min(50, len(numbers)):
        rows = draw.choice(rows, min(count, len(rows)), replace=False)
        return vectors[rows], rows, numbers[rows]
    rows = draw.choice(len(numbers), min(count, len(numbers)), replace=False)
    mixed = vectors[rows] + np.float32(0.75) * vectors[draw.choice(len(numbers), len(rows))]
    return mixed / np.maximum(np.linalg.norm(mixed, axis=1, keepdims=True), 1e-6), rows, None


def measure(index: Index, trial: Trial) -> Measured:
    """Search the probes of a trial and compare."""
    scores, numbers = without(*index.search(trial.probes, K + 1), trial.skip)
    there = trial.numbers >= 0
    recall, share = {}, np.ones(len(numbers))
    for k in (1, K):
        hit = (trial.numbers[:, :k, None] == numbers[:, None, :k]).any(2) & there[:, :k]
        recall[k] = float(hit.sum() / max(1, there[:, :k].sum()))
        share = hit.sum(1) / np.maximum(1, there[:, :k].sum(1))
    times = _times(index, trial.probes[:TIMED])
    return Measured(
        kind=index.kind,
        size=len(index),
        dim=index.dim,
        recall_at=recall,
        tar_loss=trial.loss(scores, numbers),
        p50_ms=round(float(np.median(times)), 4),
        p99_ms=round(float(np.quantile(times, 0.99)), 4),
        exact_p50_ms=round(trial.exact_p50_ms, 4),
        bytes=index.bytes,
        probes=len(trial.probes),
        recall_low=round(recall[K] - 2 * float(share.std()) / len(share) ** 0.5, 6),
    )


def without(scores: np.ndarray, numbers: np.ndarray, skip: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Answers (p, k+1) less one number each -> (p, k)."""
    at = (numbers == skip[:, None]) & (numbers >= 0)
    at[~at.any(1), -1] = True  # it did not come out: the last one goes
    shape = (len(scores), scores.shape[1] - 1)
    return scores[~at].reshape(shape), numbers[~at].reshape(shape)


def _times(index: Index, probes: np.ndarray) -> np.ndarray:
    """Milliseconds of each probe alone."""
    index.search(probes[:1], K)
    times = []
    for probe in probes:
        began = time.perf_counter()
        index.search(probe[None], K)
        times.append(1e3 * (time.perf_counter() - began))
    return np.asarray(times or [0.0])


def _several(labels: np.ndarray) -> np.ndarray:
    """Rows whose label is not alone."""
    _, inverse, count = np.unique(labels, return_inverse=True, return_counts=True)
    return np.flatnonzero(count[inverse.reshape(-1)] > 1)


def _threshold(
    vectors: np.ndarray, labels: np.ndarray, probes: np.ndarray, label: np.ndarray, draw: np.random.Generator
) -> float | None:
    """The lowest score that at most one impostor in a thousand reaches; None where there are too few impostors."""
    rows = draw.choice(len(labels), min(IMPOSTORS, len(labels)), replace=False)
    strangers = label[:, None] != labels[rows]
    scores = np.sort((probes @ vectors[rows].astype(np.float32).T)[strangers])
    if len(scores) * FAR < 1:
        return None
    allowed = int(len(scores) * FAR)
    return float(np.nextafter(scores[-allowed - 1], np.float32(np.inf)))
