"""One probe of one encoder: fitted at several strengths, one chosen by validation, read on the test split once.

Probes are fitted on the training split and their strength is chosen on the validation split (on a tenth of the training
split where that cannot judge them); the test split is looked at once, with that choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mettle.data.draws import hashed
from mettle.evaluate.probe import Accuracy, Probe, probe

STRENGTHS = (1.0, 10.0, 100.0)  # tried always
STRONGER = (1e3, 1e4, 1e5)  # tried while that brings more: features that hardly differ need them
WORK = 1e11  # samples x features x classes x steps of one linear probe, at most


@dataclass(frozen=True, eq=False)
class Reading:
    """What one probe found: on which test rows, with which strength, chosen on what."""

    probe: Probe
    rows: np.ndarray
    strength: float
    chosen_on: str


def reading(z: Mapping[str, np.ndarray], codes: Mapping[str, np.ndarray]) -> Reading:
    """Fit at every strength, choose by validation, and tell what the chosen one does on the test split."""
    alive = {part: np.asarray(x.any(axis=1)) for part, x in z.items()}  # a row of zeros has no direction
    at = {part: np.flatnonzero(alive[part]) for part in z}
    known = codes["train"][at["train"]]
    val = at["val"][np.isin(codes["val"][at["val"]], known)]
    enough = len(val) > 1 and 2 * len(val) > len(codes["val"])
    fit = at["train"]
    if enough:
        source, chosen_on = "val", "the validation split"
    else:
        order = fit[np.argsort(hashed(0, 31, fit), kind="stable")]
        tenth = max(1, len(order) // 10)
        val, fit = order[:tenth], np.sort(order[tenth:])
        source, chosen_on = "train", "a tenth of the training split"
        val = val[np.isin(codes["train"][val], codes["train"][fit])]
    test = np.flatnonzero(np.isin(codes["test"], codes["train"][fit]))  # dead rows stay: they count as wrong
    live = alive["test"][test]
    first, second = z["train"][fit], np.concatenate([z[source][val], z["test"][test[live]]])
    targets = np.concatenate([codes[source][val], codes["test"][test[live]]])
    classes = len(np.unique(codes["train"][fit]))
    steps = int(np.clip(WORK / (first.size * classes), 50, 1000))
    own = np.arange(len(first) + len(second))  # splits share no samples, though rows of numbers may repeat themselves
    train = first, codes["train"][fit], None, own[: len(first)]
    n, tried, right = len(val), {}, {}
    for strength in (*STRENGTHS, *STRONGER):
        if strength in STRONGER and not (n and _rising(list(right.values()), targets[:n])):
            break
        tried[strength] = probe(train, (second, targets, None, own[len(first) :]), strength=strength, iterations=steps)
        right[strength] = tried[strength].linear.correct[:n].mean() if n else 0.0
    best = max(right, key=lambda c: (right[c], -c))
    chosen = tried[best]
    notes = chosen.warnings
    if best == STRONGER[-1]:
        notes += (f"the probe was best at the greatest strength tried, {best:g}: a stronger one may read more",)

    def on_test(one: Accuracy) -> Accuracy:
        correct = np.zeros(len(test))
        correct[live] = one.correct[n:]
        return Accuracy(correct, codes["test"][test])

    return Reading(Probe(on_test(chosen.linear), on_test(chosen.knn), notes), test, best, chosen_on)


def _rising(right: list[float], targets: np.ndarray) -> bool:
    """Whether a stronger probe may read more: the strongest is the best so far, or none read much beyond chance."""
    chance = np.unique(targets, return_counts=True)[1].max() / len(targets)
    return right[-1] > max(right[:-1]) or max(right) < chance + 0.1 * (1 - chance)
