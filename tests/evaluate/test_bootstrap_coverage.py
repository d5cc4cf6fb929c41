"""How often nominal 95 % intervals hold the truth, in simulated populations of subjects of unequal difficulty.

`python tests/evaluate/test_bootstrap_coverage.py 500` prints the table of docs/evaluation.md (about fifteen
minutes), with names of other metrics behind the number a table of those. A subject is a random direction with its own
spread, log-normal with deviation ``unequal``; the truth is the mean over twelve populations of 1500 subjects.
"""

import sys

import numpy as np
import pytest

from mettle.evaluate import verification

NAMES = ("eer", "auc", "tar@0.1", "tar@0.01")
SETTINGS = {  # subjects, samples of each, spread, unequal
    "30 subjects of 5": (30, 5, 1.0, 0.3),
    "60 subjects of 4, hard": (60, 4, 1.5, 0.3),
    "60 subjects of 4, very unequal": (60, 4, 0.8, 0.5),
    "120 subjects of 3": (120, 3, 1.2, 0.2),
    "600 subjects of 2, first-order weights": (600, 2, 1.0, 0.3),
}
DIM = 16


def population(rng, subjects, each, spread, unequal):
    y = np.repeat(np.arange(subjects), each)
    own = spread * np.exp(unequal * rng.normal(size=subjects))
    x = rng.normal(size=(subjects, DIM))[y] + own[y, None] * rng.normal(size=(len(y), DIM))
    return x.astype(np.float32), y


def truth(each, spread, unequal, names):
    rng = np.random.default_rng(999)
    found = []
    for _ in range(12):
        v = verification(*population(rng, 1500, each, spread, unequal))
        found.append([v.value(name) for name in names])
    return np.mean(found, axis=0)


def coverage(setting, simulations, names=NAMES, replicates=500):
    """Share of simulations whose interval holds the truth, by metric."""
    subjects, each, spread, unequal = SETTINGS[setting]
    wanted, held = truth(each, spread, unequal, names), np.zeros(len(names))
    for seed in range(simulations):
        rng = np.random.default_rng((7, seed))
        v = verification(*population(rng, subjects, each, spread, unequal))
        for k, name in enumerate(names):
            i = v.interval(name, replicates=replicates, seed=seed)
            held[k] += i.low <= wanted[k] <= i.high
    return dict(zip(names, held / simulations, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", list(SETTINGS)[:4])
def test_nominal_95_percent_intervals_hold_the_truth_92_to_98_times_in_100(setting):
    found = coverage(setting, 500)
    print(row(setting, found))
    assert all(0.92 <= share <= 0.98 for share in found.values()), found


def row(setting, found):
    return f"| {setting} | " + " | ".join(f"{share:.3f}" for share in found.values()) + " |"


if __name__ == "__main__":
    count, chosen = int(sys.argv[1]), tuple(sys.argv[2:]) or NAMES
    head = "| simulated population | " + " | ".join(chosen) + " |"
    print(head, "|---" * (1 + len(chosen)) + "|", sep="\n", flush=True)
    for key in SETTINGS:
        print(row(key, coverage(key, count, chosen)), flush=True)
