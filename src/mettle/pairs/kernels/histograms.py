# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""All pairs of a set on the device, for evaluation: how many genuine and impostor pairs score what."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.kernels.config import choice, parts
from mettle.pairs.kernels.forward import tiles
from mettle.pairs.kernels.launch import launch
from mettle.pairs.kernels.operands import prepared
from mettle.pairs.kernels.primitives import held, product

BINS = 1 << 16
COPIES = 8  # of the histogram, so that fewer additions meet
AT_ONCE = 1 << 30  # pairs of a launch: its counts are 32 bits wide


def score_counts(
    z: Tensor, labels: Tensor, bins: int = BINS, low: float = -1.0, high: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Histograms of the cosines of all pairs i < j: (genuine, impostor), int64 (bins,) each.

    Bin b counts the scores in [low + b·w, low + (b+1)·w), w = (high − low) / bins; scores beyond either end are
    counted in the first or last bin. Counts are whole numbers: they do not depend on the order of the work.
    """
    with torch.no_grad(), torch.cuda.device_of(z):
        return _score_counts(z, labels, bins, float(low), float(high))


def _score_counts(z: Tensor, labels: Tensor, bins: int, low: float, high: float) -> tuple[Tensor, Tensor]:
    mode = "split" if z.is_cuda else "exact"
    rows = prepared(z.detach().float(), labels.contiguous(), None, mode, True)
    shape = choice(mode, rows.width).forward
    total = torch.zeros(2, bins, dtype=torch.int64, device=z.device)
    copies = COPIES if z.is_cuda else 1
    span = max(AT_ONCE // max(rows.n, 1) // shape.rows, 1)
    blocks = parts(rows.n, shape.rows)
    for first in range(0, blocks, span):
        counts = torch.zeros(copies, 2, bins, dtype=torch.int32, device=z.device)
        many = min(span, blocks - first)
        splits = min(8, max(1, 4096 // many)) if z.is_cuda else 1
        launch(
            counts_kernel, (many, splits),
            rows.high, rows.low, rows.lo, rows.hi, counts, first, rows.n, splits, copies, bins, low,
            bins / (high - low),
            WIDTH=rows.width, BK=shape.depth, BM=shape.rows, BN=shape.columns, MODE=mode,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        total += counts.sum(0, dtype=torch.int64)
    return total[1], total[0]


@triton.jit
def counts_kernel(
    Q, QL, LO, HI, COUNTS, first, n, splits, copies, bins, low, per_unit,
    WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Each pair above the diagonal once: COUNTS (copies, impostor / genuine, bins)."""
    row = (first + tl.program_id(0)) * BM
    split = tl.program_id(1)
    rows = row + tl.arange(0, BM)
    lo = tl.load(LO + rows)
    hi = tl.load(HI + rows)
    q, ql = held(Q, QL, row, BM, BK, WIDTH, MODE, False)
    begin, end, extra, total = tiles(LO, HI, row, n, n, BM, BN, row // BN)
    counts = COUNTS + (tl.program_id(0) % copies) * 2 * bins
    start = row // BN
    one = tl.full((BM, BN), 1, tl.int32)
    bare = total - start - (end - begin) - extra
    for t in range(bare * split // splits, bare * (split + 1) // splits):
        j = start + t
        j = tl.where(j < begin, j, j + (end - begin))
        s = product(q, ql, Q, QL, Q, QL, row, j * BN, BM, BN, BK, WIDTH, MODE, False)
        at = binned(s, low, per_unit, bins)
        tl.atomic_add(counts + at, one, sem="relaxed")
    for t in range(split, end - begin + extra, splits):
        j = tl.where(t < end - begin, begin + t, total - 1)
        s = product(q, ql, Q, QL, Q, QL, row, j * BN, BM, BN, BK, WIDTH, MODE, False)
        columns = j * BN + tl.arange(0, BN)
        keep = (columns[None, :] > rows[:, None]) & (rows < n)[:, None] & (columns < n)[None, :]
        same = (columns[None, :] >= lo[:, None]) & (columns[None, :] < hi[:, None])
        at = binned(s, low, per_unit, bins) + tl.where(same, bins, 0)
        tl.atomic_add(counts + at, one, mask=keep, sem="relaxed")


@triton.jit
def binned(s, low, per_unit, bins):
    """The bin of each score."""
    at = tl.floor((s - low) * per_unit).to(tl.int32)
    return tl.minimum(tl.maximum(at, 0), bins - 1)
