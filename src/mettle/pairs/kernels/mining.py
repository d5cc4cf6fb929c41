# pyright: reportGeneralTypeIssues=false
"""Batch-hard mining: the closest negative and the farthest positive of every row.

The tiles keep only each row's highest score and the tile it came from. A second small kernel looks at that one tile
again in float32 and finds the pair, so the loss is computed from exact scores of the mined pairs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.closed_form import mined_row_values
from mettle.pairs.kernels.config import cdiv, next_power_of_2, select_mining_tile, split_columns
from mettle.pairs.kernels.launch import Launch, LaunchCache, align_tensor, find_launch_cache, flatten_tensor
from mettle.pairs.kernels.operands import Operands, normalize_backward, prepare_operands, select_row_block
from mettle.pairs.kernels.primitives import (
    Operand,
    bare_tile,
    count_bare,
    count_masked,
    find_tiles,
    load_rows,
    masked_tile,
    negative_mask,
    similarity_tile,
)
from mettle.pairs.similarity import at_least_float32, differentiable_gradients, normalize_rows

BACKWARD_ROWS = 8  # of a block


class HardestPairs(NamedTuple):
    """(2, n) each: first of the farthest positive, then of the closest negative."""

    columns: Tensor  # in label order: its column there, −1 where there is none
    scores: Tensor  # in the order in which rows came: similarities, 0 where there is none
    counts: Tensor  # likewise: how many there are to mine from


def batch_hard_rows(
    loss: Any, z: Tensor, labels: Tensor, ref: tuple[Tensor, Tensor] | None = None, precision: str | None = None
) -> dict[str, Tensor]:
    """What the rows of a batch-hard triplet loss accumulate, in the order of ``z``, with gradient.

    Where several pairs tie exactly, one of them is mined.
    """
    precision = precision or ("ieee" if not z.is_cuda else "bf16x3" if z.dtype == torch.float32 else "fp16")
    with torch.cuda.device_of(z):
        scores, counts = BatchHardFunction.apply(z, labels, ref, None if ref is None else ref[0], precision)  # type: ignore[misc]
    return mined_row_values(loss, scores, counts, counts > 0, scores.dtype)


def _mined_scores(rows: Operands, columns: Operands, index: Tensor, z: Tensor, ref_z: Tensor | None) -> Tensor:
    """(2, n) similarities of the mined pairs in the order in which rows came, with a graph; 0 where there is none."""
    u = normalize_rows(at_least_float32(z))
    v = u if ref_z is None else normalize_rows(at_least_float32(ref_z))
    anchors, index = rows.order[: rows.n].long(), index[:, : rows.n].long()
    references = columns.order[: columns.n].long()[index.clamp(min=0)]
    scores = (u[anchors] * v[references]).sum(-1) * (index >= 0)
    return torch.zeros_like(scores).index_copy(1, anchors, scores)


class BatchHardFunction(torch.autograd.Function):
    """Similarities of the mined pairs, with gradient, and how many pairs there were to mine from."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, z: Tensor, labels: Tensor, ref: tuple[Tensor, Tensor] | None, ref_z: Tensor | None, precision: str
    ):  # type: ignore[override]
        """(2, n) each."""
        given = z
        z, labels = align_tensor(z.detach()), flatten_tensor(labels)
        ref_labels = None if ref is None else flatten_tensor(ref[1])
        sides = (z, labels)
        if ref_z is not None and ref_labels is not None:
            sides = (z, labels, align_tensor(ref_z.detach()), ref_labels)
        cache = find_launch_cache(("batch hard", precision), sides)
        rows = columns = prepare_operands(z, labels, ref_labels, precision, True, cache=cache, name="rows")
        if ref_labels is not None:
            columns = prepare_operands(sides[2], ref_labels, labels, precision, True, cache=cache, name="columns")
        mined = find_hardest_pairs(rows, columns, precision, cache)
        ctx.sides, ctx.index, ctx.cache = (rows, columns), mined.columns, cache
        ctx.save_for_backward(given, ref_z)
        ctx.mark_non_differentiable(mined.counts)
        return mined.scores, mined.counts

    @staticmethod
    def backward(ctx, g: Tensor, _):  # type: ignore[override]
        """To both ends of each pair."""
        (rows, columns), (z, ref_z), cache = ctx.sides, ctx.saved_tensors, ctx.cache
        if torch.is_grad_enabled():  # create_graph=True: the kernels have no graph, but the mined pairs are few
            scores = _mined_scores(rows, columns, ctx.index, z, ref_z)
            dz, dref = differentiable_gradients((scores,), (g,), (z, ref_z))
            return dz, None, None, dref, None
        g = flatten_tensor(g.float())
        dz = torch.zeros_like(rows.normalized)
        dc = dz if columns is rows else torch.zeros_like(columns.normalized)
        if torch.are_deterministic_algorithms_enabled():
            _scatter_gradient(rows, columns, ctx.index, g, dz, dc)
        else:
            cache.launch(
                "backward",
                batch_hard_backward_kernel,
                (rows.normalized, columns.normalized, rows.order, ctx.index, g, dz, dc),
                lambda: Launch(
                    (cdiv(rows.n, BACKWARD_ROWS),),
                    (rows.n,),
                    {
                        "HEAD_DIM": rows.head_dim,
                        "BLOCK": next_power_of_2(rows.head_dim),
                        "ROWS": BACKWARD_ROWS,
                        "num_warps": 4,
                    },
                ),
            )
        gradient = normalize_backward(rows, dz, None, dz, z, True, cache=cache, name="rows")
        if ref_z is None:
            return gradient, None, None, None, None
        ref_gradient = normalize_backward(columns, dc, None, dc, ref_z, True, cache=cache, name="columns")
        return gradient, None, None, ref_gradient, None


def _scatter_gradient(rows: Operands, columns: Operands, index: Tensor, g: Tensor, dz: Tensor, dc: Tensor) -> None:
    """`batch_hard_backward_kernel` by torch, whose additions can be told to keep one order."""
    z, order = rows.normalized[: rows.n], rows.order[: rows.n].long()  # rows are in the order of labels
    for g_pair, pair in zip(g, index, strict=True):
        column, weight = pair.clamp(min=0), torch.where(pair >= 0, g_pair[order], 0)[:, None]
        dz[: rows.n].addcmul_(columns.normalized[column], weight)
        dc.index_add_(0, column, z * weight)


def find_hardest_pairs(rows: Operands, columns: Operands, precision: str, cache: LaunchCache) -> HardestPairs:
    """The farthest positive and the closest negative of every row."""
    tile, device = select_mining_tile(precision, rows.head_dim), rows.normalized.device
    blocks = cdiv(rows.n, tile.block_m)
    splits = split_columns(blocks, cdiv(columns.n, tile.block_n), device, 4)
    padded = rows.padded
    best = torch.empty(splits, padded, device=device)
    best_tile = torch.empty(splits, padded, dtype=torch.int32, device=device)
    cache.launch(
        "block max",
        block_max_kernel,
        (rows.hi, rows.lo, columns.hi, columns.lo, rows.positive_begin, rows.positive_end, best, best_tile),
        lambda: Launch(
            (blocks, splits),
            (rows.n, columns.n, padded, splits),
            tile.constexprs(precision, rows.head_dim) | tile.launch_options,
        ),
    )
    index = torch.empty(2, rows.n, dtype=torch.int64, device=device)
    scores, counts = (torch.empty(2, rows.n, device=device) for _ in range(2))
    block = select_row_block(rows.head_dim)
    inputs = (rows.normalized, columns.normalized, rows.positive_begin, rows.positive_end, rows.order)
    cache.launch(
        "refine",
        refine_kernel,
        (*inputs, best, best_tile, index, scores, counts),
        lambda: Launch(
            (rows.n,),
            (rows.n, columns.n, padded, splits),
            {
                "SELF": rows is columns,
                "HEAD_DIM": rows.head_dim,
                "BLOCK": block.columns,
                "BLOCK_N": tile.block_n,
                "CHUNK": min(32, tile.block_n),
                "num_warps": block.num_warps,
            },
        ),
    )
    return HardestPairs(index, scores, counts)


@triton.jit
def batch_hard_backward_kernel(
    Z, C, ORDER, INDEX, G, DZ, DC, n, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Gradient of the mined pairs' similarities to both ends of each pair.

    Grid: (n / ROWS,). All programs add to DZ and DC, (padded, HEAD_DIM) float32 of the two sides or of the one, by
    atomics. Z, C: float32; INDEX (2, n) int64; G (2, n) float32, in the order in which rows came.
    Cost: 12·HEAD_DIM bytes read a row, and three rows of atomic additions.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    c = tl.arange(0, BLOCK)
    order = tl.load(ORDER + row, mask=real, other=0)
    here = row.to(tl.int64)[:, None] * HEAD_DIM + c[None, :]
    inside = real[:, None] & (c < HEAD_DIM)[None, :]
    z = tl.load(Z + here, mask=inside, other=0.0)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in tl.static_range(2):
        pair = tl.load(INDEX + k * n + row, mask=real, other=-1)
        there = pair[:, None] * HEAD_DIM + c[None, :]
        some = inside & (pair >= 0)[:, None]
        g = tl.load(G + k * n + order, mask=real & (pair >= 0), other=0.0)[:, None]
        acc += g * tl.load(C + there, mask=some, other=0.0)
        tl.atomic_add(DC + there, g * z, mask=some, sem="relaxed")
    tl.atomic_add(DZ + here, acc, mask=inside, sem="relaxed")


@triton.jit
def block_max_kernel(
    Q, Q_LO, K, K_LO, POS_BEGIN, POS_END, BEST, BEST_TILE, n, m, padded, splits,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Highest score over the negatives of each row, and its tile, of one split of the columns.

    Grid: (row blocks, splits). Program (i, p) owns rows [i·BLOCK_M, (i + 1)·BLOCK_M) of BEST[p] float32 and
    BEST_TILE[p] int32, (splits, padded) each. Q, K: operands of PRECISION.
    Cost: 2·n·m·HEAD_DIM FLOPs (× 3 for bf16x3); 8 bytes written a row and split.
    """
    row = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    offs_m = row + tl.arange(0, BLOCK_M)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    rows = Operand(Q, Q_LO)
    columns = Operand(K, K_LO)
    q = load_rows(rows, row, BLOCK_M, BLOCK_K, HEAD_DIM, PRECISION, False)
    tiles = find_tiles(POS_BEGIN, POS_END, row, n, m, BLOCK_M, BLOCK_N, 0)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    best_tile = tl.full((BLOCK_M,), -1, tl.int32)
    bare = count_bare(tiles)
    for t in range(bare * split // splits, bare * (split + 1) // splits):
        j = bare_tile(tiles, t)
        s = similarity_tile(q, rows, columns, row, j * BLOCK_N, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, PRECISION, False)
        here = tl.max(s, 1)
        best_tile = tl.where(here > m_i, j, best_tile)
        m_i = tl.maximum(m_i, here)
    for t in range(split, count_masked(tiles), splits):
        j = masked_tile(tiles, t)
        s = similarity_tile(q, rows, columns, row, j * BLOCK_N, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, PRECISION, False)
        offs_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
        keep = negative_mask(offs_n, pos_begin, pos_end, m)
        here = tl.max(tl.where(keep, s, -float("inf")), 1)
        best_tile = tl.where(here > m_i, j, best_tile)
        m_i = tl.maximum(m_i, here)
    tl.store(BEST + split * padded + offs_m, m_i)
    tl.store(BEST_TILE + split * padded + offs_m, best_tile)


@triton.jit
def refine_kernel(
    Z, C, POS_BEGIN, POS_END, ORDER, BEST, BEST_TILE, INDEX, SCORES, COUNTS, n, m, padded, splits,
    SELF: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of each row, the pair inside the tile that held its maximum, and the least similar positive, in float32.

    Grid: (n,). A program owns one row of INDEX (2, n) int64 in label order, SCORES and COUNTS (2, n) float32 in the
    order in which rows came. Z, C: float32 rows and columns; SELF: a row is not its own positive.
    Cost: 2·HEAD_DIM FLOPs and 4·HEAD_DIM bytes per column of one tile and per positive.
    """
    row = tl.program_id(0)
    begin = tl.load(POS_BEGIN + row)
    end = tl.load(POS_END + row)
    c = tl.arange(0, BLOCK)
    z = tl.load(Z + row.to(tl.int64) * HEAD_DIM + c, mask=c < HEAD_DIM, other=0.0)
    m_i = tl.load(BEST + row)
    tile = tl.load(BEST_TILE + row)
    for p in range(1, splits):
        here = tl.load(BEST + p * padded + row)
        tile = tl.where(here > m_i, tl.load(BEST_TILE + p * padded + row), tile)
        m_i = tl.maximum(m_i, here)
    highest = tl.full((), -float("inf"), tl.float32)
    closest_negative = tl.full((), -1, tl.int32)
    for start in range(0, BLOCK_N, CHUNK):
        at = tl.maximum(tile, 0) * BLOCK_N + start + tl.arange(0, CHUNK)
        x = tl.load(C + at.to(tl.int64)[:, None] * HEAD_DIM + c[None, :], mask=(c < HEAD_DIM)[None, :], other=0.0)
        keep = ((at < begin) | (at >= end)) & (at < m) & (tile >= 0)
        s = tl.where(keep, tl.sum(x * z[None, :], 1), -float("inf"))
        here = tl.max(s, 0)
        first = tl.min(tl.where((s == here) & keep, at, 2147483647), 0)
        closest_negative = tl.where(here > highest, first, closest_negative)
        highest = tl.maximum(highest, here)
    lowest = tl.full((), float("inf"), tl.float32)
    farthest_positive = tl.full((), -1, tl.int32)
    for start in range(begin, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        keep = at < end
        if SELF:
            keep = keep & (at != row)
        there = (at < end)[:, None] & (c < HEAD_DIM)[None, :]
        x = tl.load(C + at.to(tl.int64)[:, None] * HEAD_DIM + c[None, :], mask=there, other=0.0)
        s = tl.where(keep, tl.sum(x * z[None, :], 1), float("inf"))
        here = tl.min(s, 0)
        first = tl.min(tl.where((s == here) & keep, at, 2147483647), 0)
        farthest_positive = tl.where(here < lowest, first, farthest_positive)
        lowest = tl.minimum(lowest, here)
    to = tl.load(ORDER + row)
    tl.store(INDEX + row, farthest_positive.to(tl.int64))
    tl.store(INDEX + n + row, closest_negative.to(tl.int64))
    tl.store(SCORES + to, tl.where(farthest_positive >= 0, lowest, 0.0))
    tl.store(SCORES + n + to, tl.where(closest_negative >= 0, highest, 0.0))
    positives = end - begin
    tl.store(COUNTS + n + to, (m - positives).to(tl.float32))
    if SELF:
        positives = positives - 1
    tl.store(COUNTS + to, positives.to(tl.float32))
