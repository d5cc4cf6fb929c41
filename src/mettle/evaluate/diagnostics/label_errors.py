"""Suspects: samples that may carry the wrong label, labels that may be one subject, pairs that are hardest.

With unit vectors u, S_c the sum of class c and n_c its size, the similarity of sample i to a class is

    s_ic = <u_i, S_c> / n_c,   to its own class without itself: s_iy = (<u_i, S_y> − 1) / (n_y − 1)

    label error       max_{c≠y} s_ic − s_iy: how much better another class fits, and which
    one subject twice <S_a, S_b> / (n_a n_b) − min(within a, within b),   within c = (|S_c|² − n_c) / (n_c (n_c − 1))

Both are rankings, not verdicts. How many labels are wrong, and how many of the first ones to look at, is estimated by
:mod:`mettle.evaluate.diagnostics.label_errors`. Two labels of
one subject have a suspicion around 0, below it where they were captured differently; so they are listed not by its
sign but where <S_a, S_b> / (n_a n_b) lies two thirds of the way from the mean of impostors to that of genuine pairs.

How many labels are wrong, and where to cut the ranking of suspects.

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

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.inputs import EmbeddingSet, check_embeddings, check_int, joint_codes
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.unknown_names import explain_arguments

_CELLS = 1 << 20
_PRETENDED = 1 << 21  # wrong labels that are pretended, about
_FEWEST = 256  # samples that they are pretended of, at least
NEAR = 2 / 3  # of the way from strangers to relatives: what may be one subject
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


@dataclass(frozen=True, eq=False)
class LabelErrors:
    """Samples ranked by how much better another label would fit.

    Attributes:
        order: positions, most suspicious first; samples that are alone in their class are left out.
        suspicion: of each entry of ``order``; above 0 another class fits better than its own.
        suggested: the label that fits best, for each entry of ``order``.
        noise: how many labels are estimated to be wrong, and where to cut the ranking.
    """

    order: np.ndarray
    suspicion: np.ndarray
    suggested: np.ndarray
    noise: LabelNoise

    def __repr__(self) -> str:
        return f"LabelErrors({str(self.noise)!r}, ranked={len(self.order)})"

    @property
    def count(self) -> int:
        """How many fit another class better than their own: with classes that overlap, mostly clean samples."""
        return int(np.count_nonzero(self.suspicion > 0))

    @property
    def suspects(self) -> np.ndarray:
        """Positions above the cut, most suspicious first; none where it cannot be told which labels are wrong."""
        return self.order[: self.noise.listed]


@dataclass(frozen=True)
class DuplicateIdentities:
    """Two labels that may be one subject."""

    first: int | str
    second: int | str
    suspicion: float


@dataclass(frozen=True)
class ConfusedLabel:
    """One label's nearest neighbours.

    Attributes:
        label: the label.
        error: share of its samples whose nearest other sample has another label.
        most: the label it is most often taken for, or None if never.
        share: how often.
    """

    label: int | str
    error: float
    most: int | str | None
    share: float


@explain_arguments
def label_errors(embeddings: Any, labels: Any) -> LabelErrors:
    """Rank samples by how much better another class fits, and estimate how many labels are wrong.

    Args:
        embeddings: (n, d) array or tensor.
        labels: (n,) integers or text.

    Example:
        >>> import numpy as np
        >>> x = np.repeat(np.eye(3), 4, axis=0)
        >>> found = label_errors(x, [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2])  # the fourth belongs to 0
        >>> int(found.order[0]), int(found.suggested[0]), found.noise.wrong, found.suspects
        (3, 0, 1, array([3]))
    """
    _, unit, label, people = _check_classes(embeddings, labels)
    sums, size = _class_sums(unit, label, len(people))
    able = np.flatnonzero(size[label] > 1)
    if not len(able):
        raise InputError("no label has two samples: there is nothing to compare a sample with")
    suspicion, suggested = np.empty(len(able)), np.empty(len(able), np.int64)
    for start in range(0, len(able), step := max(1, _CELLS // len(people))):
        at = able[start : start + step]
        dot = unit[at] @ sums.T
        own = label[at]
        here = np.arange(len(at))
        inside = (dot[here, own] - 1) / (size[own] - 1)
        dot /= size
        dot[here, own] = -np.inf
        best = dot.argmax(axis=1)
        suspicion[start : start + step], suggested[start : start + step] = dot[here, best] - inside, best
    order = np.argsort(-suspicion, kind="stable")
    # Every so many-th of the ranking stands for all: the same rows whatever their order in the file.
    some = np.linspace(0, len(able) - 1, min(len(able), max(_FEWEST, _PRETENDED // len(people)))).astype(np.int64)
    noise = estimate_label_noise(suspicion[order], *_score_planted_errors(unit, label, able[order][some], sums, size))
    return LabelErrors(able[order], suspicion[order], people[suggested[order]], noise)


def _score_planted_errors(
    unit: np.ndarray, label: np.ndarray, at: np.ndarray, sums: np.ndarray, size: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Suspicions that samples would have under the label of every other class, and how common those classes are."""
    s, here, own = unit[at] @ sums.T, np.arange(len(at)), label[at]
    inside = (s[here, own] - 1) / (size[own] - 1)
    s /= size
    s[here, own] = inside
    first = s.argmax(axis=1)
    highest = s[here, first]
    rest = s.copy()
    rest[here, first] = -np.inf
    best = np.repeat(highest[:, None], len(size), axis=1)
    best[here, first] = rest.max(axis=1)  # of the classes but the pretended one
    others = np.ones(s.shape, bool)
    others[here, own] = False
    weights = np.broadcast_to(size / (len(label) - size[own])[:, None], s.shape)
    return (best - s)[others], weights[others]


@explain_arguments
def same_subject(
    embeddings: Any, labels: Any, count: int = 20, *, near: float | None = NEAR
) -> list[DuplicateIdentities]:
    """Rank pairs of labels by how much they look like one subject: false negatives, if they are.

    Args:
        embeddings: (n, d) array or tensor.
        labels: (n,) integers or text.
        count: how many pairs at most.
        near: only pairs whose mean similarity lies so far on the way from strangers to relatives: 0 is the mean of
            impostor pairs, 1 that of genuine ones. None ranks all.
    """
    check_int(count, "count", 1)
    if near is not None and not (isinstance(near, Real) and isfinite(near)):
        raise InputError(f"near must be a finite number, such as 0.7, or None: got {near!r}")
    _, unit, label, people = _check_classes(embeddings, labels)
    sums, size = _class_sums(unit, label, len(people))
    able = np.flatnonzero(size > 1)
    if len(able) < 2:
        raise InputError("fewer than two labels have two samples: there is nothing to compare")
    sums, size, people = sums[able], size[able], people[able]
    within = (np.square(sums).sum(axis=1) - size) / (size * (size - 1))
    least = -np.inf if near is None else _on_the_way(sums, size, near)
    found: list[DuplicateIdentities] = []
    for start in range(0, len(able), step := max(1, _CELLS // len(able))):
        part = slice(start, min(start + step, len(able)))
        cross = sums[part] @ sums.T / (size[part, None] * size)
        score = cross - np.minimum(within[part, None], within)
        twice = np.arange(part.start, part.stop)[:, None] >= np.arange(len(able))
        score[twice | (cross < least)] = -np.inf
        flat = np.argsort(-score, axis=None, kind="stable")[:count]
        pairs = zip(*np.unravel_index(flat, score.shape), strict=True)
        found += [DuplicateIdentities(people[start + i].item(), people[j].item(), float(score[i, j])) for i, j in pairs]
        found = sorted((t for t in found if t.suspicion > -np.inf), key=lambda t: -t.suspicion)[:count]
    return found


def _on_the_way(sums: np.ndarray, size: np.ndarray, share: float) -> float:
    """The similarity that lies so far on the way from the mean of impostor pairs to that of genuine pairs."""
    own, pairs = float(np.square(sums).sum()), float((size * (size - 1)).sum())
    relatives = (own - float(size.sum())) / pairs
    strangers = (float(np.square(sums.sum(axis=0)).sum()) - own) / (float(size.sum()) ** 2 - float((size**2).sum()))
    return strangers + share * (relatives - strangers)


@explain_arguments
def confusion(embeddings: Any, labels: Any) -> list[ConfusedLabel]:
    """For each label, how often the nearest other sample is of another label, and of which; worst first.

    Nearest samples with equal scores share the count.
    """
    rows, _, label, people = _check_classes(embeddings, labels)
    unit = ExactUnitVectors.from_rows(rows.values)
    found = []
    for c, times in enumerate(_count_neighbor_labels(unit, label, len(people))):
        row = times / times.sum()
        error, row[c] = 1 - row[c], 0
        most = int(row.argmax())
        name = people[most].item() if row[most] else None
        found.append(ConfusedLabel(people[c].item(), float(error), name, float(row[most])))
    return sorted(found, key=lambda f: (-f.error, f.label))


def _count_neighbor_labels(unit: ExactUnitVectors, label: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """For each label in turn, how often the nearest other sample of its samples has each label."""
    order = np.argsort(label, kind="stable")  # so that of a label at a time, not of all, a row of counts is held
    times = np.zeros((0, count))
    for start in range(0, len(order), step := max(1, _CELLS // len(order))):
        at = order[start : start + step]
        tile = unit.take(at).cosine(unit)
        tile[np.arange(len(at)), at] = -np.inf
        i, j = np.nonzero(tile == tile.max(axis=1, keepdims=True))
        share = 1 / np.bincount(i, minlength=len(at))
        first, last = int(label[at[0]]), int(label[at[-1]])
        begun, times = times, np.zeros((1 + last - first, count))
        times[: len(begun)] = begun
        np.add.at(times, (label[at[i]] - first, label[j]), share[i])
        over = start + step >= len(order) or int(label[order[start + step]]) != last
        whole_ones = len(times) if over else len(times) - 1
        yield from times[:whole_ones]
        times = times[whole_ones:].copy()


@explain_arguments
def sample_difficulty(embeddings: Any, labels: Any) -> np.ndarray:
    """How hard each sample is: cosine of its nearest stranger minus that of its nearest relative.

    Above 0 the nearest neighbour has another label. A sample that is alone in its class has no relative: −1 stands in.
    """
    rows, _, label, _ = _check_classes(embeddings, labels)
    unit = ExactUnitVectors.from_rows(rows.values)
    found = np.empty(len(rows))
    for start in range(0, len(rows), step := max(1, _CELLS // len(rows))):
        part = slice(start, min(start + step, len(rows)))
        tile = unit.take(part).cosine(unit).astype(np.float64)
        tile[np.arange(len(tile)), np.arange(part.start, part.stop)] = -1
        same = label[part, None] == label
        found[part] = np.where(same, -1, tile).max(axis=1) - np.where(same, tile, -1).max(axis=1)
    return found


def _check_classes(embeddings: Any, labels: Any) -> tuple[EmbeddingSet, np.ndarray, np.ndarray, np.ndarray]:
    """Checked rows, unit vectors, label codes and the labels they stand for."""
    rows = check_embeddings(embeddings, labels)
    people = np.unique(rows.given_labels)
    if len(people) < 2:
        raise InputError("at least two labels are needed: got one")
    return rows, ExactUnitVectors.from_rows(rows.values).vectors(), joint_codes(rows.labels)[0].astype(np.int64), people


def _class_sums(unit: np.ndarray, label: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    sums = np.zeros((count, unit.shape[1]))
    np.add.at(sums, label, unit)
    return sums, np.bincount(label, minlength=count)


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

    def share_above(at: np.ndarray) -> np.ndarray:
        """Share of pretended errors from a suspicion on."""
        return beyond[np.searchsorted(values, at, side="left")]

    levels = values[np.minimum(np.searchsorted(-beyond[:-1], -_SHARES, side="left"), len(values) - 1)]
    count = np.searchsorted(-observed, -levels, side="right")
    f = share_above(levels)
    error = np.sqrt(np.maximum(count, 1)) / f
    at = int(np.argmin(count / f + 2 * error))
    wrong = float(count[at] / f[at])
    low, high = max(0, round(wrong - 2 * error[at])), round(wrong + 2 * error[at])
    observed = observed[observed > 0]  # what fits its own class best is not listed
    if round(wrong) < 1 or not len(observed):
        return LabelNoise(0, 0, high)
    above = np.arange(1, len(observed) + 1)
    # A cut below a sample is anywhere down to the next one: as low as that, where most pretended errors lie above it.
    found = share_above(np.nextafter(np.append(observed[1:], 0.0), np.inf))
    hits = np.minimum(wrong * found, above)
    score = 2 * hits / (above + wrong)
    best = int(np.argmax(score))
    if score[best] < CLEAREST:
        return LabelNoise(None, 0, high)
    listed = int(np.searchsorted(-observed, -observed[best], side="right"))  # equal suspicions stay together
    precision, recall = float(hits[best] / listed), float(found[best])
    return LabelNoise(round(wrong), low, high, float(observed[best]), listed, precision, recall)
