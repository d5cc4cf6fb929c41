# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false
"""Batch-hard mining: the closest negative and the farthest positive of every row.

The tiles keep only each row's highest score and the tile it came from. A second small kernel looks at that one tile
again in float32 and finds the pair, so the loss is computed from exact scores of the mined pairs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.contract import Tile
from mettle.pairs.fused.call import divided
from mettle.pairs.fused.far import tiles
from mettle.pairs.fused.prepare import Rows, prepared
from mettle.pairs.fused.table import choice
from mettle.pairs.fused.tile import held, product
from mettle.pairs.similarity import ready


def mines_hardest(loss: Any, difficulty: Any) -> bool:
    """Whether this is batch-hard triplet on the sphere."""
    if f"{type(loss).__module__}.{type(loss).__qualname__}" != "mettle.losses.triplet.Triplet":
        return False
    if loss.measure != "cosine" or loss.mining not in ("hardest", "all"):
        return False
    if difficulty is None:
        return loss.mining == "hardest"
    named = f"{type(difficulty).__module__}.{type(difficulty).__qualname__}" == "mettle.difficulty.hardest.Hardest"
    return named and difficulty.side == "both"


def hardest_rows(
    loss: Any, z: Tensor, labels: Tensor, ref: tuple[Tensor, Tensor] | None = None, mode: str | None = None
) -> dict[str, Tensor]:
    """What the rows of a batch-hard triplet loss accumulate, in the order of ``z``, with gradient.

    Where several pairs tie exactly, one of them is mined.
    """
    mode = mode or ("exact" if not z.is_cuda else "split" if z.dtype == torch.float32 else "half")
    with torch.no_grad(), torch.cuda.device_of(z):
        left = prepared(z.detach(), labels, None if ref is None else ref[1], mode, True)
        right = left if ref is None else prepared(ref[0].detach(), ref[1], labels, mode, True)
        near, far, positives, negatives = mined(left, right, mode)
    own = ready(z, "cosine")
    other = own if ref is None else ready(ref[0], "cosine")

    def peak(at: Tensor, sign: int) -> Tensor:
        s = (own * other.index_select(0, at.clamp(min=0))).sum(1, keepdim=True)
        none = torch.zeros(0, device=s.device)
        d = loss.distance(Tile(s, False, False, none, none)).squeeze(1)
        return torch.where(at >= 0, sign * d, -torch.inf)

    return {
        "positives": positives,
        "negatives present": negatives,
        "farthest": peak(near, 1),
        "closest": peak(far, -1),
    }


def mined(left: Rows, right: Rows, mode: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every row: its farthest positive and closest negative (−1 where none), and how many there are of each."""
    shape, device = choice(mode, left.width).forward, left.full.device
    blocks = triton.cdiv(left.n, shape.rows)
    splits = divided(blocks, triton.cdiv(right.n, shape.columns), left.full, 4)
    padded = len(left.full)
    top = torch.empty(splits, padded, device=device)
    tile = torch.empty(splits, padded, dtype=torch.int32, device=device)
    peak_kernel[(blocks, splits)](
        left.high, left.low, right.high, right.low, left.lo, left.hi, top, tile, left.n, right.n, padded, splits,
        WIDTH=left.width, BK=shape.depth, BM=shape.rows, BN=shape.columns, MODE=mode,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    near, far = (torch.empty(left.n, dtype=torch.int64, device=device) for _ in range(2))
    positives, negatives = (torch.empty(left.n, device=device) for _ in range(2))
    found_kernel[(left.n,)](
        left.full, right.full, left.lo, left.hi, left.order, right.order, top, tile, near, far, positives, negatives,
        right.n, padded, splits, SELF=left is right, WIDTH=left.width, BLOCK=triton.next_power_of_2(left.width),
        BN=shape.columns, BC=min(32, shape.columns), num_warps=4,
    )  # fmt: skip
    return near, far, positives, negatives


@triton.jit
def peak_kernel(
    Q, QL, K, KL, LO, HI, TOP, TILE, n, m, padded, splits,
    WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Highest score over the negatives of each row, and its tile."""
    row = tl.program_id(0) * BM
    split = tl.program_id(1)
    rows = row + tl.arange(0, BM)
    lo = tl.load(LO + rows)
    hi = tl.load(HI + rows)
    q, ql = held(Q, QL, row, BM, BK, WIDTH, MODE, False)
    begin, end, extra, total = tiles(LO, HI, row, n, m, BM, BN, 0, True)
    top = tl.full((BM,), -float("inf"), tl.float32)
    best = tl.full((BM,), -1, tl.int32)
    bare = total - (end - begin) - extra
    for t in range(bare * split // splits, bare * (split + 1) // splits):
        j = tl.where(t < begin, t, t + (end - begin))
        s = product(q, ql, Q, QL, K, KL, row, j * BN, BM, BN, BK, WIDTH, MODE, False)
        here = tl.max(s, 1)
        best = tl.where(here > top, j, best)
        top = tl.maximum(top, here)
    for t in range(split, end - begin + extra, splits):
        j = tl.where(t < end - begin, begin + t, total - 1)
        s = product(q, ql, Q, QL, K, KL, row, j * BN, BM, BN, BK, WIDTH, MODE, False)
        columns = j * BN + tl.arange(0, BN)
        keep = ((columns[None, :] < lo[:, None]) | (columns[None, :] >= hi[:, None])) & (columns < m)[None, :]
        here = tl.max(tl.where(keep, s, -float("inf")), 1)
        best = tl.where(here > top, j, best)
        top = tl.maximum(top, here)
    tl.store(TOP + split * padded + rows, top)
    tl.store(TILE + split * padded + rows, best)


@triton.jit
def found_kernel(
    Z, C, LO, HI, ORDER, COLUMN_ORDER, TOP, TILE, NEAR, FAR, POSITIVES, NEGATIVES, m, padded, splits,
    SELF: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One row: the pair inside the tile that held its maximum, and the least similar positive, in float32."""
    row = tl.program_id(0)
    lo = tl.load(LO + row)
    hi = tl.load(HI + row)
    c = tl.arange(0, BLOCK)
    z = tl.load(Z + row.to(tl.int64) * WIDTH + c, mask=c < WIDTH, other=0.0)
    top = tl.load(TOP + row)
    tile = tl.load(TILE + row)
    for p in range(1, splits):
        here = tl.load(TOP + p * padded + row)
        tile = tl.where(here > top, tl.load(TILE + p * padded + row), tile)
        top = tl.maximum(top, here)
    best = tl.full((), -float("inf"), tl.float32)
    far = tl.full((), -1, tl.int32)
    for start in range(0, BN, BC):
        at = tl.maximum(tile, 0) * BN + start + tl.arange(0, BC)
        x = tl.load(C + at.to(tl.int64)[:, None] * WIDTH + c[None, :], mask=(c < WIDTH)[None, :], other=0.0)
        keep = ((at < lo) | (at >= hi)) & (at < m) & (tile >= 0)
        s = tl.where(keep, tl.sum(x * z[None, :], 1), -float("inf"))
        here = tl.max(s, 0)
        first = tl.min(tl.where((s == here) & keep, at, 2147483647), 0)
        far = tl.where(here > best, first, far)
        best = tl.maximum(best, here)
    worst = tl.full((), float("inf"), tl.float32)
    near = tl.full((), -1, tl.int32)
    for start in range(lo, hi, BC):
        at = start + tl.arange(0, BC)
        keep = at < hi
        if SELF:
            keep = keep & (at != row)
        there = (at < hi)[:, None] & (c < WIDTH)[None, :]
        x = tl.load(C + at.to(tl.int64)[:, None] * WIDTH + c[None, :], mask=there, other=0.0)
        s = tl.where(keep, tl.sum(x * z[None, :], 1), float("inf"))
        here = tl.min(s, 0)
        first = tl.min(tl.where((s == here) & keep, at, 2147483647), 0)
        near = tl.where(here < worst, first, near)
        worst = tl.minimum(worst, here)
    to = tl.load(ORDER + row)
    tl.store(FAR + to, tl.where(far >= 0, tl.load(COLUMN_ORDER + tl.maximum(far, 0)), -1).to(tl.int64))
    tl.store(NEAR + to, tl.where(near >= 0, tl.load(COLUMN_ORDER + tl.maximum(near, 0)), -1).to(tl.int64))
    own = hi - lo
    tl.store(NEGATIVES + to, (m - own).to(tl.float32))
    if SELF:
        own = own - 1
    tl.store(POSITIVES + to, own.to(tl.float32))
