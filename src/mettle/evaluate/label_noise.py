"""How many labels are wrong, and where to cut the ranking of suspects.

Neighbours of another label are no proof of a wrong label: where classes overlap, many clean samples fit another class
better than their own. So the suspicions that were observed are compared with those that wrong labels would have. These
are known: pretend that a sample carries the label of another class, and its suspicion follows from the same
similarities. With N(t) samples at a suspicion of t or more, F(t) the share of pretended errors there and n samples,

    N(t) = n · (π · F(t) + (1 − π) · C(t)) ≥ n · π · F(t),   π the share of wrong labels, C(t) that of clean samples

so that N(t) / F(t) is above the number of wrong labels n·π by what clean samples add, which is the less the further
out t lies. The estimate is its smallest value; to prefer steady ones, that plus two standard errors is minimised, over
F(t) from 0.98 down to 0.2. (This is mixture proportion estimation, Blanchard, Lee and Scott 2010, with pretended errors
as the known component.) Of the N(t) samples above a cut, π·n·F(t) are expected to be wrong: that is its precision, F(t)
its recall, and the cut is where their harmonic mean is highest. Where that is below 0.6, clean samples and wrong labels
look alike, and no number is given.

Assumed is that a wrong label is that of any other sample. Labels that are confused because the classes look alike are
harder to see: of those the estimate finds fewer.
"""

from dataclasses import dataclass

import numpy as np

CLEAREST = 0.6  # harmonic mean of precision and recall below which a cut says little
_SHARES = np.linspace(0.98, 0.2, 40)


@dataclass(frozen=True)
class LabelNoise:
    """How many labels are wrong, as far as the embeddings can tell.

    Attributes:
        wrong: estimated number of wrong labels; None where classes overlap so much that it cannot be told.
        low: lower end of two standard errors about it.
        high: upper end; where ``wrong`` is None, the most that the ranking allows.
        cut: suspicion from which samples are listed; None where none are.
        listed: how many those are, the first of the ranking.
        precision: share of these that is expected to be wrong; None where none are.
        recall: share of the wrong labels that is expected among them; None where none are.
    """

    wrong: int | None
    low: int
    high: int
    cut: float | None = None
    listed: int = 0
    precision: float | None = None
    recall: float | None = None

    def __str__(self) -> str:
        if self.wrong is None:
            return (
                f"how many labels are wrong cannot be told (at most about {self.high}): classes overlap so much that "
                "clean samples look like wrong ones"
            )
        if self.wrong == 0:
            return "no label looks wrong" + (f" (at most about {self.high} may be)" if self.high > 1 else "")
        if self.precision is None or self.recall is None:
            return f"about {self.wrong} labels are wrong ({self.low} to {self.high})"
        return (
            f"about {self.wrong} {'label is' if self.wrong == 1 else 'labels are'} wrong ({self.low} to {self.high}): "
            f"look at the first {self.listed}, of which about {self.precision:.0%} are, with {self.recall:.0%} of all "
            "wrong ones"
        )


def estimate_label_noise(observed: np.ndarray, pretended: np.ndarray, weights: np.ndarray) -> LabelNoise:
    """Estimate the number of wrong labels from suspicions.

    Args:
        observed: (n,) suspicion of each sample under its own label, highest first.
        pretended: (m,) suspicions of samples under labels of other classes.
        weights: (m,) how likely each of these is, in any unit.
    """
    order = np.argsort(pretended, kind="stable")
    values = pretended[order]
    beyond = np.append(np.cumsum(weights[order][::-1])[::-1], 0.0) / weights.sum()

    def share(at: np.ndarray) -> np.ndarray:
        """Share of pretended errors from a suspicion on."""
        return beyond[np.searchsorted(values, at, side="left")]

    levels = values[np.minimum(np.searchsorted(-beyond[:-1], -_SHARES, side="left"), len(values) - 1)]
    count = np.searchsorted(-observed, -levels, side="right")
    f = share(levels)
    error = np.sqrt(np.maximum(count, 1)) / f
    at = int(np.argmin(count / f + 2 * error))
    wrong = float(count[at] / f[at])
    low, high = max(0, round(wrong - 2 * error[at])), round(wrong + 2 * error[at])
    observed = observed[observed > 0]  # what fits its own class best is not listed
    if round(wrong) < 1 or not len(observed):
        return LabelNoise(0, 0, high)
    above = np.arange(1, len(observed) + 1)
    # A cut below a sample is anywhere down to the next one: as low as that, where most pretended errors lie above it.
    found = share(np.nextafter(np.append(observed[1:], 0.0), np.inf))
    hits = np.minimum(wrong * found, above)
    score = 2 * hits / (above + wrong)
    best = int(np.argmax(score))
    if score[best] < CLEAREST:
        return LabelNoise(None, 0, high)
    listed = int(np.searchsorted(-observed, -observed[best], side="right"))  # equal suspicions stay together
    precision, recall = float(hits[best] / listed), float(found[best])
    return LabelNoise(round(wrong), low, high, float(observed[best]), listed, precision, recall)
