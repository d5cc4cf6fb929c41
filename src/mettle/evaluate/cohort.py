"""Cohort normalisation: how unusual a score is for the two samples that gave it.

Some samples score high against everybody. Against a cohort of people who take part in no trial, row i scores with
mean μ_i and standard deviation σ_i, over all of the cohort or over its k nearest members (adaptive normalisation):

    s' = ½·((s − μ_i)/σ_i + (s − μ_j)/σ_j)
"""

from typing import Any

import numpy as np

from mettle.errors import InputError
from mettle.evaluate.checks import Rows, check_embeddings, to_numpy
from mettle.evaluate.scores import Side, Unit


def normalisers(probe: Rows, gallery: Rows | None, cohort: Any, top: int | None) -> tuple[Side, Side]:
    """Mean and inverse deviation of the cohort scores of every row, on both sides.

    Raises:
        InputError: a cohort of fewer than two, of another dimension, or that scores all alike with some row.
    """
    values = to_numpy(cohort, "cohort")
    people = check_embeddings(values, np.arange(len(values) if values.ndim else 0), side="cohort ")
    if people.values.shape[1] != probe.values.shape[1] or len(people) < 2:
        raise InputError(
            f"cohort must be at least two embeddings of dimension {probe.values.shape[1]}: got {people.values.shape}"
        )
    if top is not None and not 2 <= top <= len(people):
        raise InputError(f"cohort_top must lie between 2 and the {len(people)} members of the cohort: got {top}")
    double = any(r.values.dtype == np.float64 for r in (probe, gallery, people) if r is not None)
    other = Unit.of(people.values, double)
    first = _side(Unit.of(probe.values, double), other, top)
    return first, first if gallery is None else _side(Unit.of(gallery.values, double), other, top)


def _side(rows: Unit, cohort: Unit, top: int | None) -> Side:
    mean, scale = np.empty(len(rows)), np.empty(len(rows))
    for start in range(0, len(rows), 512):
        part = slice(start, start + 512)
        s = np.sort(rows.take(part).cosine(cohort).astype(np.float64), axis=1)  # sorted: sums in one order
        s = s if top is None else s[:, -top:]
        mean[part], deviation = s.mean(axis=1), s.std(axis=1, ddof=1)
        if not (deviation > 0).all():
            at = start + int(np.argmin(deviation))
            raise InputError(f"row {at} scores alike with the whole cohort: its scores cannot be normalised")
        scale[part] = 1 / deviation
    return Side(mean, scale)
