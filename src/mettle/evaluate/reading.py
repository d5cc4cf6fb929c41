"""One probe of one encoder: fitted at several strengths, one chosen by validation, read on the test split once.

Probes are fitted on the training split and their strength is chosen on the validation split (on a tenth of the training
split where that cannot judge them); the test split is looked at once, with that choice. The grid of strengths grows at
either end until the best one lies inside: a weaker and a stronger one have been tried and are no better. Where that
cannot be had, the notes say so. A strength at which the probe does not converge is refused and never chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mettle.errors import NumericError
from mettle.evaluate.probe import Accuracy, Probe, probe
from mettle.rng import hash_bits

STRENGTHS = (1.0, 10.0, 100.0)  # tried always
WEAKER = (0.1, 0.01, 1e-3, 1e-4)  # tried while the weakest is the best: few samples and loud noise need them
STRONGER = (1e3, 1e4, 1e5)  # tried while that brings more: features that hardly differ need them
WORK = 1e11  # samples x features x classes x steps that one linear probe may take ...
STEPS = 1000, 10_000  # ... and it may always take so many steps, and never more than these


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
        order = fit[np.argsort(hash_bits(0, 31, fit), kind="stable")]
        tenth = max(1, len(order) // 10)
        val, fit = order[:tenth], np.sort(order[tenth:])
        source, chosen_on = "train", "a tenth of the training split"
        val = val[np.isin(codes["train"][val], codes["train"][fit])]
    test = np.flatnonzero(np.isin(codes["test"], codes["train"][fit]))  # dead rows stay: they count as wrong
    live = alive["test"][test]
    first, second = z["train"][fit], np.concatenate([z[source][val], z["test"][test[live]]])
    targets = np.concatenate([codes[source][val], codes["test"][test[live]]])
    classes = len(np.unique(codes["train"][fit]))
    steps = int(np.clip(WORK / (first.size * classes), *STEPS))
    own = np.arange(len(first) + len(second))  # splits share no samples, though rows of numbers may repeat themselves
    train = first, codes["train"][fit], None, own[: len(first)]
    n = len(val)
    tried: dict[float, Probe] = {}
    right: dict[float, float] = {}
    refused: dict[float, str] = {}

    def attempt(strength: float) -> bool:
        try:
            found = probe(train, (second, targets, None, own[len(first) :]), strength=strength, iterations=steps)
        except NumericError as problem:
            refused[strength] = str(problem)
            return False
        tried[strength] = found
        right[strength] = float(found.linear.correct[:n].mean()) if n else 0.0
        return True

    for strength in STRENGTHS:
        attempt(strength)
    for strength in STRONGER:
        if refused or not (n and _rising(right, targets[:n])) or not attempt(strength):
            break
    for strength in WEAKER:
        if tried and not (n and _best_at_edge(right, min(right))):
            break
        attempt(strength)
    if not tried:
        raise NumericError(f"no linear probe converged: {refused[min(refused)]}")
    inside = sorted(right)[1:-1]
    best = max(right, key=lambda c: (right[c], c in inside, -c))
    chosen = tried[best]
    notes = chosen.warnings
    if best not in inside:
        end, other = ("smallest", "weaker") if best == min(right) else ("greatest", "stronger")
        why = f" that converged within {steps} steps" if refused and end == "greatest" else " tried"
        notes += (f"the probe was best at the {end} strength{why}, {best:g}: a {other} one may read more",)

    def on_test(one: Accuracy) -> Accuracy:
        correct = np.zeros(len(test))
        correct[live] = one.correct[n:]
        return Accuracy(correct, codes["test"][test])

    return Reading(Probe(on_test(chosen.linear), on_test(chosen.knn), notes), test, best, chosen_on)


def _rising(right: Mapping[float, float], targets: np.ndarray) -> bool:
    """Whether a stronger probe may read more: the strongest is the best so far, or none read much beyond chance."""
    chance = np.unique(targets, return_counts=True)[1].max() / len(targets)
    return _best_at_edge(right, max(right)) or max(right.values()) < chance + 0.1 * (1 - chance)


def _best_at_edge(right: Mapping[float, float], edge: float) -> bool:
    """Whether the strength at an edge of the grid is better than all others."""
    return all(right[edge] > value for strength, value in right.items() if strength != edge)
