"""Verification: is this pair the same? Error rates over all pairs, with their exact counts.

    embeddings, labels ─ check ─ Design (which pairs) ─┬─ Scores (sorted) ──┬─ eer, auc, tar(far), roc, det, min_dcf
    scores, target ───── check ─ Listed ───────────────┴─ Counted (binned) ─┴─ interval(name)

Similarity is the cosine; accept iff s ≥ τ. Definitions are in :mod:`mettle.evaluate.point`.
"""

from dataclasses import replace
from numbers import Integral
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mettle.errors import InputError, nearest
from mettle.evaluate.checks import (
    Rows,
    both_kinds,
    check_embeddings,
    check_gallery,
    check_matrix,
    check_scores,
    codes,
    whole,
)
from mettle.evaluate.cohort import Norm, normalisers
from mettle.evaluate.copies import across, in_cohort, inside
from mettle.evaluate.counted import counted
from mettle.evaluate.design import WIDEST, Design
from mettle.evaluate.listing import check_trials
from mettle.evaluate.point import Pairs
from mettle.evaluate.rows import Source
from mettle.evaluate.scores import Listed, Scores
from mettle.evaluate.unit import Unit
from mettle.evaluate.verified import Verification
from mettle.unknown_names import explain_arguments

TRIALS = ("all", "within", "across")
MODES = ("exact", "histogram")
MEMORY = 1 << 28
EXACT_PAIRS = 1 << 25  # 8192 rows with each other


@explain_arguments
def verification(
    embeddings: Any,
    labels: Any,
    *,
    domains: Any = None,
    trials: Any = "all",
    gallery: tuple[Any, ...] | None = None,
    ids: Any = None,
    cohort: Any = None,
    cohort_top: int | None = None,
    mode: str | None = None,
    memory: int = MEMORY,
    chunk: int | None = None,
) -> Verification:
    """Compare pairs of embeddings by cosine and count errors.

    Args:
        embeddings: (n, d) array or tensor; float64 is scored in float64 (ties are equal to 12 decimals),
            anything else in float32.
        labels: (n,) integers or text, the subject of each row.
        domains: (n,) integers or text: device, session, camera.
        trials: "all" (every unordered pair once; None means the same), "within" (both of one domain),
            "across" (two domains), or integers (m, 3) of (id, id, target); see
            :func:`mettle.evaluate.read_trials`. Without ``ids`` an id is a row number.
        gallery: ``(embeddings, labels[, domains[, ids]])`` to compare every row with, instead of with each
            other.
        ids: (n,) integer sample ids; pairs of one id are left out. With a gallery, give ids on both sides: without,
            rows that are on both, number for number, are warned of, and refused from half of a side up.
        cohort: (c, d) embeddings of other people: scores are normalised by what each side scores against them,
            s' = ½·((s − μ_i)/σ_i + (s − μ_j)/σ_j).
        cohort_top: how many of its nearest cohort members a row is measured against; by default all.
        mode: "exact" (scores in memory, or exact counts where they do not fit) or "histogram" (64k bins, see
            :mod:`mettle.evaluate.counted`); by default exact up to 2²⁵ pairs, which is 8192 rows.
        memory: bytes that scores and tiles may take, about.
        chunk: rows scored at a time; it changes memory, never the result.

    Raises:
        DataError: one set was given as probes and as gallery, without ids.
        InputError: non-finite values, wrong shapes, no genuine or no impostor pair.

    Example:
        >>> import numpy as np
        >>> v = verification(np.eye(3)[[0, 0, 1, 1]], [7, 7, 8, 8])
        >>> v.eer, v.auc, v.genuine, v.impostor
        (0.0, 1.0, 2, 4)
    """
    if mode not in (None, *MODES):
        raise InputError(f"no mode named {mode!r}{nearest(str(mode), MODES)}")
    probe = check_embeddings(embeddings, labels, ids=ids, domains=domains)
    probe, other = (probe, None) if gallery is None else check_gallery(gallery, probe)
    notes = inside(probe) if other is None else across(probe, other, "the embeddings", "the gallery")
    norm = None
    if cohort is not None:
        cohort = check_matrix(cohort, "cohort ")
        norm = normalisers(probe, other, cohort, cohort_top)
        notes += in_cohort(cohort, *(side for side in (probe, other) if side is not None))
    kept = {"trials": trials, "cohort": cohort, "cohort_top": cohort_top, "mode": mode, "memory": memory}
    source = Source(probe, other, MappingProxyType(kept))
    if not (trials is None or isinstance(trials, str)):
        return replace(_listed(probe, other, trials, norm), source=source, notes=notes)
    keep = "all" if trials is None else trials
    if keep not in TRIALS:
        raise InputError(f"no trials named {keep!r}{nearest(keep, TRIALS)}")
    if keep != "all" and any(r.domains is None for r in (probe, other or probe)):
        raise InputError(f"trials={keep!r} compares domains: pass domains, one per row on every side")
    design = Design.of(probe, other, keep, _rows(chunk, memory, len(other or probe)), norm)
    subjects = 1 + max(int(side.max()) for side in design.subject)
    pairs = sum(design.bound())
    mode = mode or ("exact" if pairs <= EXACT_PAIRS else "histogram")
    if mode == "exact" and pairs * np.dtype(design.dtype).itemsize <= memory:
        found: Pairs = Scores.of(design.stream, design.bound(), design.dtype, subjects)
    else:
        both_kinds(*design.bound())
        found = counted(design, subjects, exact=mode == "exact", device=_device(embeddings))
    return Verification(found, keep, mode, source, notes)


def _rows(chunk: int | None, memory: int, columns: int) -> int:
    """Rows of a tile: at most 512, and what a quarter of the memory holds at 32 bytes a pair."""
    if not isinstance(memory, Integral) or memory < 1 << 20:
        raise InputError(f"memory must be at least one mebibyte, in whole bytes: got {memory!r}")
    if chunk is None:
        return int(np.clip(memory // 4 // (32 * min(columns, WIDEST)), 1, 512))
    return whole(chunk, "chunk", 1)


def _device(embeddings: Any) -> Any:
    """Where to score: on the accelerator that the embeddings are on."""
    on = isinstance(embeddings, torch.Tensor) and embeddings.device.type == "cuda"
    return embeddings.device if on else None


@explain_arguments
def from_scores(scores: Any, target: Any, subjects: Any = None) -> Verification:
    """Count errors of scores that came from anywhere.

    Args:
        scores: (m,) similarities, higher meaning more alike; −∞ marks a failed template. Equal means equal.
        target: (m,) 1 for a genuine pair, 0 for an impostor pair.
        subjects: (m, 2) labels of the two sides, integers or text; needed only for intervals.

    Example:
        >>> from_scores([0.9, 0.8, 0.3, 0.2], [1, 1, 0, 0]).tar(far=0.5)
        1.0
    """
    s, t, pairs, texts = check_scores(scores, target, subjects)
    both = None if pairs is None else (pairs[:, 0], pairs[:, 1])
    return _from_list(lambda part: s[part], t, s.dtype.type, both, texts)


def _listed(probe: Rows, gallery: Rows | None, trials: Any, norm: Any) -> Verification:
    """Score the pairs that a list names."""
    i, j, target = check_trials(trials, probe, gallery)
    other = probe if gallery is None else gallery
    double = probe.double or other.double
    first = Unit.of(probe.values, double)
    second = first if gallery is None else Unit.of(other.values, double)

    both = None if norm is None else Norm(*norm)

    def score(part: slice) -> np.ndarray:
        s = first.take(i[part]).paired(second.take(j[part]))
        return s if both is None else both.pairs(s, i[part], j[part])

    dtype = first.dtype if both is None else np.float64
    return _from_list(score, target, dtype, (probe.labels[i], other.labels[j]), probe.names, chunk=1 << 14)


def _from_list(
    score: Any, target: np.ndarray, dtype: type, pairs: Any, texts: np.ndarray | None, chunk: int = 1 << 18
) -> Verification:
    subject = None if pairs is None else codes(*pairs)
    listed = Listed(score, target, None if subject is None else (subject[0], subject[1]), chunk)
    genuine = int(np.count_nonzero(target))
    subjects = 0 if subject is None else 1 + max(int(side.max()) for side in subject)
    people = None
    if pairs is not None and subject is not None:
        people = np.empty(subjects, np.int64)
        people[subject[0]], people[subject[1]] = pairs
        people = people if texts is None else texts[people]
    found = Scores.of(listed.stream, (genuine, len(target) - genuine), dtype, subjects)
    return Verification(found, "listed", people=people)
