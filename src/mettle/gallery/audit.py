"""A look at what is enrolled: who would be taken for whom, and which templates may be under the wrong name.

    alike   people A and B of whom a template of one is accepted as the other, by the gallery's rule and threshold
    same    of these, where a template of A is one of B up to rounding: one picture under two names
    strays  templates that their own person, without them, would not accept

Both are lists to look at, not verdicts: strangers pass at the rate that the threshold stands for, and a bad picture of
somebody is theirs all the same. Without a threshold (none was measured, none was given) only what needs none is told:
pairs that share a template.

People are compared in tiles, so memory does not grow with their pairs. All pairs are looked at up to `SCORES` scores
(some 180,000 templates); beyond, everybody is compared with people drawn at random, as many as that allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mettle.gallery.scoring import SCORE_BLOCK, TemplateMatrix, read_everybody
from mettle.gallery.storage.base import Storage
from mettle.gallery.thresholds import DecisionThreshold

SCORES = 1 << 34  # of templates with templates: some minutes


SAME_COSINE = 1e-6  # how far below 1 a cosine of equal vectors may come out in single precision


LOOKED = 1024  # strays for whom a better place is looked for


@dataclass(frozen=True)
class ConfusablePair:
    """Two people who would be taken for each other."""

    first: str
    second: str
    score: float  # the highest of a template of one with the other
    same: bool  # they share a template, up to rounding


@dataclass(frozen=True)
class MisfiledTemplate:
    """A template that does not match the others of its person."""

    identity: str
    number: int  # of the template in the storage
    score: float  # with the others of its person
    other: str | None  # whom it fits best instead; None where nobody else is enrolled
    other_score: float | None


@dataclass(frozen=True)
class GalleryAudit:
    """What is enrolled, looked at from above. Lists hold the worst; the counts beside them are of all."""

    people: int
    templates: int
    single: int  # people with one template only
    threshold: float | None  # at which answers are given, as in `DecisionThreshold`
    far: float | None
    per: str | None
    basis: str
    pairs: int  # of people that were compared: all of them, unless there are too many
    alike_count: int  # pairs of people who would be taken for each other
    same_count: int  # pairs of people who share a template
    alike: tuple[ConfusablePair, ...]  # most alike first
    stray_count: int  # templates that do not match the others of their person
    strays: tuple[MisfiledTemplate, ...]  # first those that fit somebody else so much better
    problems: tuple[str, ...] = ()  # damage of storage or index; empty: they are sound
    notes: tuple[str, ...] = ()  # what is odd: a calibration that is stale, an index that had to be built again


def audit_templates(
    storage: Storage,
    point: DecisionThreshold,
    *,
    count: int = 20,
    problems: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> GalleryAudit:
    """Look at all that a storage holds, at an operating point; lists of at most ``count``."""
    found, rule = read_everybody(storage), storage.binding.fusion
    if len(found.owner) * (len(found.owner) + 1) // 2 > SCORES:
        found = found.shuffle_identities()
    pairs, alike_count, same_count, alike = _find_confusable(found, rule, point.threshold, count)
    stray_count, strays = (0, ()) if point.threshold is None else _find_misfiled(found, rule, point.threshold, count)
    return GalleryAudit(
        people=len(found.names),
        templates=len(found.owner),
        single=int(np.count_nonzero(found.counts == 1)),
        threshold=point.threshold,
        far=point.far,
        per=point.counts,
        basis=point.basis,
        pairs=pairs,
        alike_count=alike_count,
        same_count=same_count,
        alike=alike,
        stray_count=stray_count,
        strays=strays,
        problems=problems,
        notes=notes,
    )


def _find_confusable(
    found: TemplateMatrix, rule: str, threshold: float | None, count: int
) -> tuple[int, int, int, tuple[ConfusablePair, ...]]:
    """Pairs that were compared, those that are alike, those that share a template, and the first of them."""
    pairs, many, same = 0, 0, 0
    bar = 1 - SAME_COSINE if threshold is None else min(threshold, 1 - SAME_COSINE)
    scores, at = np.empty(0, np.float32), np.empty((0, 2), np.int64)
    for first, tile in _identity_score_tiles(found, rule):
        height, width = tile.shape
        tile[:, :height][np.tri(height, dtype=np.bool_)] = -np.inf  # everybody with themselves, and pairs seen before
        pairs += height * width - height * (height + 1) // 2
        many += int(np.count_nonzero(tile >= bar))
        same += int(np.count_nonzero(tile >= 1 - SAME_COSINE))
        full = len(scores) == count
        i, j = np.nonzero(tile > scores[-1] if full else tile >= bar)
        scores = np.concatenate([scores, tile[i, j]])
        at = np.concatenate([at, np.stack([i, j], axis=1) + first])
        best = np.lexsort((at[:, 1], at[:, 0], -scores))[:count]
        scores, at = scores[best], at[best]
    names = found.names[at]
    listed = zip(names[:, 0], names[:, 1], np.minimum(scores, 1).tolist(), strict=True)
    return pairs, many, same, tuple(ConfusablePair(a, b, score, score >= 1 - SAME_COSINE) for a, b, score in listed)


def _identity_score_tiles(found: TemplateMatrix, rule: str) -> Iterator[tuple[int, np.ndarray]]:
    """(first, (p, people - first)): the highest score of a template of one with the other, for people from there on."""
    starts, rows = found.starts, found.fuse_rows(rule)
    ends, size, a, spent = np.append(starts[1:], len(found.owner)), len(found.owner), 0, 0
    while a < len(starts) and spent < SCORES:
        width = size - int(starts[a])
        step = max(1, SCORE_BLOCK // width)
        b = max(a + 1, int(np.searchsorted(ends, starts[a] + step, side="right")))
        spent += int(ends[b - 1] - starts[a]) * width
        if rule == "best":
            yield a, _best_scores(found, a, b, step, rows[starts[a] :], starts[a:] - starts[a])
        else:  # not the same both ways: a template of one with what the templates of the other became
            there = _best_scores(found, a, b, step, rows[a:], None)
            back = np.maximum.reduceat(rows[a:b] @ found.vectors[starts[a] :].T, starts[a:] - starts[a], axis=1)
            yield a, np.maximum(there, back)
        a = b


def _best_scores(
    found: TemplateMatrix, a: int, b: int, step: int, rows: np.ndarray, groups: np.ndarray | None
) -> np.ndarray:
    """(b - a, m) best scores of templates of people a to b with m people, whose rows are grouped where there are many.

    Somebody with more templates than a step is met piece by piece.
    """
    at, last = np.searchsorted(found.owner, (a, b)).tolist()
    best: np.ndarray | None = None
    for start in range(at, last, step):
        owner = found.owner[start : min(start + step, last)] - a
        part = found.vectors[start : start + len(owner)] @ rows.T
        if groups is not None and len(groups) < len(rows):
            part = np.maximum.reduceat(part, groups, axis=1)
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        if len(first) < len(owner):
            part = np.maximum.reduceat(part, first, axis=0)
        if best is None:
            best = np.full((b - a, part.shape[1]), -np.inf, np.float32)
        best[owner[first]] = np.maximum(best[owner[first]], part)
    assert best is not None  # everybody has a template
    return best


def _find_misfiled(
    found: TemplateMatrix, rule: str, threshold: float, count: int
) -> tuple[int, tuple[MisfiledTemplate, ...]]:
    """How many templates do not match the others of their person, and those that fit somebody else so much better."""
    own = _own_scores(found, rule)
    strays = np.flatnonzero((own < threshold) & (found.counts[found.owner] > 1))
    looked = strays[np.argsort(own[strays], kind="stable")[:LOOKED]]
    who, score = _best_other_identity(found, rule, looked)
    order = np.argsort(own[looked] - score, kind="stable")[:count]
    listed = []
    for at, other, value in zip(looked[order], who[order].tolist(), score[order].tolist(), strict=True):
        alone = other < 0
        listed.append(
            MisfiledTemplate(
                identity=str(found.names[found.owner[at]]),
                number=int(found.numbers[at]),
                score=float(own[at]),
                other=None if alone else str(found.names[other]),
                other_score=None if alone else min(1.0, value),
            )
        )
    return len(strays), tuple(listed)


def _own_scores(found: TemplateMatrix, rule: str) -> np.ndarray:
    """(n,) score of each template with the others of its person; -inf where there are none."""
    best, starts = np.full(len(found.owner), -np.inf), found.starts
    ends, a = np.append(starts[1:], len(found.owner)), 0
    while a < len(starts):
        b = max(a + 1, int(np.searchsorted(ends, starts[a] + 512, side="right")))
        here = slice(int(starts[a]), int(ends[b - 1]))
        theirs, owner = found.vectors[here], found.owner[here] - a
        if rule == "best":
            best[here] = _best_other(theirs, owner)
        else:
            best[here] = _fused_others(rule, theirs.astype(np.float64), owner)
        a = b
    return best


def _best_other(rows: np.ndarray, owner: np.ndarray) -> np.ndarray:
    best = np.empty(len(rows))
    step = max(1, SCORE_BLOCK // len(rows))
    for start in range(0, len(rows), step):
        part = rows[start : start + step] @ rows.T
        part[owner[start : start + step, None] != owner] = -np.inf
        part[np.arange(len(part)), start + np.arange(len(part))] = -np.inf
        best[start : start + step] = part.max(1)
    return best


def _fused_others(rule: str, rows: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """As `fusion` does it, from what is left of each person's sum without the template."""
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    rest = np.add.reduceat(rows, first, axis=0)[owner] - rows
    many = np.bincount(owner)[owner] - 1
    length = many if rule == "mean" else np.linalg.norm(rest, axis=1)
    points = (length > 1e-6 * many) & (many > 0)  # templates that cancel out point nowhere
    score = np.einsum("nd,nd->n", rest, rows) / np.where(points, length, 1)
    return np.where(many > 0, np.where(points, score, 0), -np.inf)


def _best_other_identity(found: TemplateMatrix, rule: str, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Who else fits these templates best, and how well; -1 and -1 where there is nobody else."""
    who, score = np.full(len(at), -1), np.full(len(at), -1.0)
    if len(found.names) < 2 or not len(at):
        return who, score
    done = 0
    for here, part in found.score_blocks(at, rule):
        part[np.arange(len(here)), found.owner[here]] = -np.inf
        there = slice(done, done := done + len(here))
        who[there], score[there] = part.argmax(1), part.max(1)
    return who, score
