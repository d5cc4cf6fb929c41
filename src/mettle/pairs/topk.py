"""Neighbours on any device, for evaluation: a running best k over blocks of references, never the whole matrix."""

from typing import get_args

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.interface import Measure
from mettle.pairs.similarity import ready, similarity

QUERIES, GALLERY = 4096, 16384  # rows of one block


@torch.no_grad()
def topk(q: Tensor, ref: Tensor, k: int, *, measure: Measure = "cosine") -> tuple[Tensor, Tensor]:
    """The ``k`` most similar references of every query: scores and positions, best first; NaN counts as best."""
    if measure not in get_args(Measure):
        raise InputError(f"measure must be one of {', '.join(get_args(Measure))}: got {measure!r}")
    if not (q.ndim == ref.ndim == 2 and q.shape[1] == ref.shape[1] and k >= 1):
        shapes = f"{tuple(q.shape)} and {tuple(ref.shape)}"
        raise InputError(f"topk needs queries (n, d), references (m, d) and k of 1 or more: got {shapes}, k = {k}")
    a, b = ready(q, measure), ready(ref, measure)
    k = min(k, len(b))
    scores = a.new_empty(len(a), k)
    found = torch.empty(len(a), k, dtype=torch.int64, device=a.device)
    for i in range(0, len(a), QUERIES):
        rows = slice(i, i + QUERIES)
        best, at = a.new_empty(len(a[rows]), 0), found.new_empty(len(a[rows]), 0)
        for j in range(0, len(b), GALLERY):
            part = b[j : j + GALLERY]
            s = -torch.cdist(a[rows], part, p=1) if measure == "l1" else similarity(a[rows], part, measure)
            s, here = s.topk(min(k, len(part)), dim=1)
            best, at = torch.cat([best, s], 1), torch.cat([at, here + j], 1)
            best, keep = best.topk(min(k, best.shape[1]), dim=1)
            at = at.gather(1, keep)
        scores[rows], found[rows] = best, at
    return scores, found
