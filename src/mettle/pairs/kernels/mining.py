# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Batch-hard mining: the closest negative and the farthest positive of every row.

The tiles keep only each row's highest score and the tile it came from. A second small kernel looks at that one tile
again in float32 and finds the pair, so the loss is computed from exact scores of the mined pairs.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.contract import Tile
from mettle.pairs.kernels.config import PEAK, choice, parts, power
from mettle.pairs.kernels.forward import tiles
from mettle.pairs.kernels.launch import Script, aligned, divided, flat, script
from mettle.pairs.kernels.operands import Rows, prepared, projected, span
from mettle.pairs.kernels.primitives import held, product

PULLED = 8  # rows of a block on the way back


def hardest_rows(
    loss: Any, z: Tensor, labels: Tensor, ref: tuple[Tensor, Tensor] | None = None, mode: str | None = None
) -> dict[str, Tensor]:
    """What the rows of a batch-hard triplet loss accumulate, in the order of ``z``, with gradient.

    Where several pairs tie exactly, one of them is mined.
    """
    mode = mode or ("exact" if not z.is_cuda else "split" if z.dtype == torch.float32 else "half")
    with torch.cuda.device_of(z):
        scores, found = _Mined.apply(z, labels, ref, None if ref is None else ref[0], mode)  # type: ignore[misc]
    none = scores.new_empty(0)
    d = loss.distance(Tile(scores, False, False, none, none))  # both at once: on a batch of this size launches count
    farthest, closest = torch.where(found > 0, torch.stack([d[0], -d[1]]), -torch.inf)
    return {"positives": found[0], "negatives present": found[1], "farthest": farthest, "closest": closest}


class _Mined(torch.autograd.Function):
    """(2, n) similarities of the mined pairs, 0 where there is none, and how many pairs there were to mine from."""

    @staticmethod
    def forward(ctx, z: Tensor, labels: Tensor, ref: tuple[Tensor, Tensor] | None, other: Tensor | None, mode: str):  # type: ignore[override]
        z, labels, names = aligned(z.detach()), flat(labels), None if ref is None else flat(ref[1])
        sides = (z, labels, *(() if other is None or names is None else (aligned(other.detach()), names)))
        by = script(("hardest", mode), sides)
        left = right = prepared(z, labels, names, mode, True, script=by, name="left")
        if other is not None and names is not None:
            right = prepared(sides[2], names, labels, mode, True, script=by, name="right")
        at, scores, counts = mined(left, right, mode, by)
        ctx.sides, ctx.at, ctx.script = (left, right), at, by
        ctx.like = z.new_empty(0), None if other is None else other.new_empty(0)
        ctx.mark_non_differentiable(counts)
        return scores, counts

    @staticmethod
    def backward(ctx, g: Tensor, _):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise InputError("the fused engine has first derivatives only: do not pass create_graph=True")
        (left, right), (first, second), g, by = ctx.sides, ctx.like, flat(g.float()), ctx.script
        da = torch.zeros_like(left.full)
        db = da if right is left else torch.zeros_like(right.full)
        if torch.are_deterministic_algorithms_enabled():
            _pull(left, right, ctx.at, g, da, db)
        else:
            flags = {"WIDTH": left.width, "BLOCK": power(left.width), "ROWS": PULLED, "num_warps": 4}
            tensors = (left.full, right.full, left.order, ctx.at, g, da, db)
            by.launch("pull", pull_kernel, tensors, lambda: ((parts(left.n, PULLED),), (left.n,), flags))
        dz = projected(left, da, None, da, first, True, script=by, name="left")
        if second is None:
            return dz, None, None, None, None
        return dz, None, None, projected(right, db, None, db, second, True, script=by, name="right"), None


def _pull(left: Rows, right: Rows, at: Tensor, g: Tensor, da: Tensor, db: Tensor) -> None:
    """`pull_kernel` by torch, whose additions can be told to keep one order."""
    a, order = left.full[: left.n], left.order[: left.n].long()  # rows are in the order of labels
    for by, pair in zip(g, at, strict=True):
        here, weight = pair.clamp(min=0), torch.where(pair >= 0, by[order], 0)[:, None]
        da[: left.n].addcmul_(right.full[here], weight)
        db.index_add_(0, here, a * weight)


def mined(left: Rows, right: Rows, mode: str, by: Script) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row, in label order: (2, n) its farthest positive and closest negative (−1 where none); and in the order
    in which rows came: (2, n) their similarities, and how many there are of each.
    """
    shape, device = choice(mode, left.width).forward, left.full.device
    if mode != "exact" and shape.depth == left.width <= 128:
        shape = replace(PEAK, depth=left.width)
    blocks = parts(left.n, shape.rows)
    splits = divided(blocks, parts(right.n, shape.columns), device, 4)
    padded = len(left.full)
    top = torch.empty(splits, padded, device=device)
    tile = torch.empty(splits, padded, dtype=torch.int32, device=device)
    by.launch(
        "peak",
        peak_kernel,
        (left.high, left.low, right.high, right.low, left.lo, left.hi, top, tile),
        lambda: (
            (blocks, splits),
            (left.n, right.n, padded, splits),
            {
                "WIDTH": left.width, "BK": shape.depth, "BM": shape.rows, "BN": shape.columns, "MODE": mode,
                "num_warps": shape.warps, "num_stages": shape.stages,
            },
        ),
    )  # fmt: skip
    at = torch.empty(2, left.n, dtype=torch.int64, device=device)
    scores, counts = (torch.empty(2, left.n, device=device) for _ in range(2))
    block, _, warps = span(left.width)
    by.launch(
        "found",
        found_kernel,
        (left.full, right.full, left.lo, left.hi, left.order, top, tile, at, scores, counts),
        lambda: (
            (left.n,),
            (left.n, right.n, padded, splits),
            {
                "SELF": left is right, "WIDTH": left.width, "BLOCK": block, "BN": shape.columns,
                "BC": min(32, shape.columns), "num_warps": warps,
            },
        ),
    )  # fmt: skip
    return at, scores, counts


@triton.jit
def pull_kernel(
    Z, C, ORDER, AT, G, DZ, DC, n,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient of the mined pairs' similarities to both ends of each pair."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    c = tl.arange(0, BLOCK)
    order = tl.load(ORDER + row, mask=real, other=0)
    here = row.to(tl.int64)[:, None] * WIDTH + c[None, :]
    own = real[:, None] & (c < WIDTH)[None, :]
    z = tl.load(Z + here, mask=own, other=0.0)
    pull = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in tl.static_range(2):
        pair = tl.load(AT + k * n + row, mask=real, other=-1)
        there = pair[:, None] * WIDTH + c[None, :]
        some = own & (pair >= 0)[:, None]
        g = tl.load(G + k * n + order, mask=real & (pair >= 0), other=0.0)[:, None]
        pull += g * tl.load(C + there, mask=some, other=0.0)
        tl.atomic_add(DC + there, g * z, mask=some, sem="relaxed")
    tl.atomic_add(DZ + here, pull, mask=own, sem="relaxed")


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
    begin, end, extra, total = tiles(LO, HI, row, n, m, BM, BN, 0)
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
    Z, C, LO, HI, ORDER, TOP, TILE, AT, SCORES, COUNTS, n, m, padded, splits,
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
    tl.store(AT + row, near.to(tl.int64))
    tl.store(AT + n + row, far.to(tl.int64))
    tl.store(SCORES + to, tl.where(near >= 0, worst, 0.0))
    tl.store(SCORES + n + to, tl.where(far >= 0, best, 0.0))
    own = hi - lo
    tl.store(COUNTS + n + to, (m - own).to(tl.float32))
    if SELF:
        own = own - 1
    tl.store(COUNTS + to, own.to(tl.float32))
