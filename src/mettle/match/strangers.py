"""How near strangers come to the people of a gallery: thresholds whose false-accept rate is per person.

Every template is tried on everybody else who is enrolled, fused by the gallery's own rule. So the rate counts people as
they are enrolled, with as many templates as they have, where a contract's rate counts single templates.

It is to hold for strangers who come later, so fewer than a share ``far`` of these scores may reach the threshold. Of
P pairs of people k may, with P(Beta(k + 1, P - k) <= far) >= 0.95, and of the scores a share k / P: templates of the
same two people are no further evidence.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import betainc

from mettle.errors import GalleryError
from mettle.evaluate import inputs, roc
from mettle.match.calibration import CONFIDENCE, Calibration, count_pairs
from mettle.match.everybody import Everybody, everybody
from mettle.match.record import Record

PAIRS = 10_000_000  # scores of a probe with a person, at most: 40 MB


def calibrated(record: Record, fars: Sequence[float] | float, seed: int = 0) -> Calibration:
    """A table of thresholds in the form of a contract's, with ``per`` "person"; above `PAIRS`, from a sample."""
    fars = inputs.rates(fars, below_one=True)
    sequence = record.sequence()  # before they are read: what comes in between counts as having come since
    found = everybody(record)
    vectors, people = found.vectors, len(found.names)
    if people < 2:
        raise GalleryError(f"calibration tries people on each other, and {people} are enrolled: enrol two or more")
    rule = record.binding.fusion
    tried = np.arange(len(vectors))
    if len(tried) * (people - 1) > PAIRS:
        tried = np.sort(np.random.default_rng(seed).choice(len(tried), max(1, PAIRS // (people - 1)), replace=False))
    scores = _scores(found, tried, rule)
    pairs = min(count_pairs(people), len(scores))
    about = {
        "per": "person",
        "fusion": rule,
        "templates": len(vectors) / people,
        "impostors": pairs,
        "measured_on": f"the {people} people enrolled, with {len(vectors)} templates: each tried on the others",
    }
    table = {repr(float(far)): _entry(scores, float(far), pairs) | about for far in fars}
    return Calibration(table, people, len(vectors), sequence, rule, record.binding.model)


def _entry(scores: np.ndarray, far: float, pairs: int) -> dict[str, Any]:
    budget = roc.rate(far) * pairs
    allowed = _allowed(far, pairs, math.floor(budget))
    if allowed >= 0:
        at = len(scores) - 1 - allowed * len(scores) // pairs
        threshold = float(np.nextafter(np.partition(scores, at)[at], np.float32(np.inf)))
        if threshold <= 1:
            return {"threshold": max(-1.0, threshold), "status": roc.status(float(budget))}
    return {"threshold": None, "status": "not measurable"}  # too few, or too many are enrolled under two names


def _allowed(far: float, pairs: int, most: int) -> int:
    """The largest k up to ``most`` whose rate among strangers stays within ``far``; -1: not even none will do."""
    counts = np.arange(most + 1)
    sure = np.flatnonzero(betainc(counts + 1, pairs - counts, far) >= CONFIDENCE)
    return int(sure[-1]) if len(sure) else -1


def _scores(found: Everybody, tried: np.ndarray, rule: str) -> np.ndarray:
    """(p·(people - 1),) fused scores of each of these templates with everybody but its own person."""
    people = np.arange(len(found.names))
    return np.concatenate([scores[people != found.owner[at, None]] for at, scores in found.tried(tried, rule)])
