# pyright: reportGeneralTypeIssues=false
"""Classes of several vectors: the logit of a class is the largest product with one of its vectors.

    log Σ_{c ≠ y} e^{max_v x_cv},  and for its gradient dL/dx_cv, which is 0 for all but the nearest vector of a class

Columns are classes. The vectors of a chunk lie kind by kind: the first ones of all its classes, padded to ``group``
rows, then the second ones, and so on; so vector v of column j is row v · group + j. Of equally near ones the first
counts. Products are logits in base 2, as in `class_softmax`, which launches these kernels.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mettle.pairs.kernels.config import KernelConfig, TileConfig
from mettle.pairs.kernels.primitives import LSE, SUM_GRAD, Operand, load_rows, negative_mask, similarity_tile


class NearestTiles(NamedTuple):
    """Tiles of the two passes: each holds the products with one vector and the largest ones so far."""

    forward: TileConfig
    backward: TileConfig


_TILES = {
    "fp16": NearestTiles(TileConfig(64, 128, 64, 4, 3), TileConfig(64, 64, 64, 4, 4)),
    "bf16x3": NearestTiles(TileConfig(128, 128, 32, 8, 3), TileConfig(128, 64, 64, 8, 2)),
}


def select_nearest_tiles(precision: str, config: KernelConfig) -> NearestTiles:
    """Those of a precision; in the interpreter the tiles of one vector per class do."""
    return _TILES.get(precision) or NearestTiles(config.forward_tile(False), config.forward_tile(False))


@triton.jit
def nearest_similarity(
    q, rows, columns, row, column, group,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M × BLOCK_N products with the nearest vector of each class, and which vector that is."""
    s = similarity_tile(q, rows, columns, row, column, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, PRECISION, False)
    nearest = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for v in tl.static_range(1, VECTORS):
        other = similarity_tile(
            q, rows, columns, row, column + v * group, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, PRECISION, False
        )
        nearest = tl.where(other > s, v, nearest)
        s = tl.maximum(s, other, propagate_nan=tl.PropagateNan.ALL)
    return s, nearest


@triton.jit
def nearest_negatives_kernel(
    Q, Q_LO, K, K_LO, POS_BEGIN, POS_END, OUT, m, group, padded, splits,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp over the other classes of each row, of one split of the m classes of a chunk.

    Grid: (row blocks, splits). Program (i, p) owns rows [i·BLOCK_M, (i + 1)·BLOCK_M) of OUT[p], (splits, 2, padded)
    float32: maximum and sum in base 2. Q (padded, HEAD_DIM) and K (VECTORS · group, HEAD_DIM): operands of PRECISION.
    Cost: 2·padded·m·VECTORS·HEAD_DIM FLOPs (× 3 for bf16x3), one exponential a class.
    """
    row = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    offs_m = row + tl.arange(0, BLOCK_M)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    rows = Operand(Q, Q_LO)
    columns = Operand(K, K_LO)
    q = load_rows(rows, row, BLOCK_M, BLOCK_K, HEAD_DIM, PRECISION, False)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    for j in range(split, tl.cdiv(m, BLOCK_N), splits):
        s, _ = nearest_similarity(
            q, rows, columns, row, j * BLOCK_N, group, HEAD_DIM, BLOCK_K, BLOCK_M, BLOCK_N, PRECISION, VECTORS
        )
        s = tl.where(negative_mask(j * BLOCK_N + tl.arange(0, BLOCK_N), pos_begin, pos_end, m), s, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1), propagate_nan=tl.PropagateNan.ALL)
        safe = tl.where(m_new == -float("inf"), 0.0, m_new)
        l_i = l_i * tl.exp2(m_i - safe) + tl.sum(tl.exp2(s - safe[:, None]), 1)
        m_i = m_new
    out = OUT + split.to(tl.int64) * 2 * padded
    tl.store(out + offs_m, m_i)
    tl.store(out + padded + offs_m, l_i)


@triton.jit
def nearest_gradients_kernel(
    Q, Q_LO, K, K_LO, POS_BEGIN, POS_END, ROW_STATE, STATS, DS, DS_LO, m, group, padded, grad_scale_limit,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """dL/ds of a chunk of classes, for all of their vectors.

    Grid: (row blocks, group / BLOCK_N). Program (i, j) owns tile (i, j) of every kind of vector in DS (padded,
    VECTORS · group), in the type of the operands (DS_LO: the lower half for bf16x3), times grad_scale_limit / STATS[2];
    0 for vectors that are not the nearest, for own classes and for missing ones.
    Cost: 2·VECTORS·HEAD_DIM FLOPs a class (× 3 for bf16x3), 2 or 4 bytes written a vector.
    """
    row = tl.program_id(0) * BLOCK_M  # rows first: programs that run together share their columns
    column = tl.program_id(1) * BLOCK_N
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    rows = Operand(Q, Q_LO)
    q = load_rows(rows, row, BLOCK_M, BLOCK_K, HEAD_DIM, PRECISION, False)
    s, nearest = nearest_similarity(
        q, rows, Operand(K, K_LO), row, column, group, HEAD_DIM, BLOCK_K, BLOCK_M, BLOCK_N, PRECISION, VECTORS
    )
    g = tl.load(ROW_STATE + SUM_GRAD * padded + offs_m) * (grad_scale_limit / tl.load(STATS + 2))
    lse = tl.load(ROW_STATE + LSE * padded + offs_m)
    ds = tl.where(negative_mask(offs_n, pos_begin, pos_end, m), tl.exp2(s - lse[:, None]) * g[:, None], 0.0)
    stride = VECTORS * group
    at = row.to(tl.int64) * stride + column + (tl.arange(0, BLOCK_M)[:, None] * stride + tl.arange(0, BLOCK_N)[None, :])
    for v in tl.static_range(0, VECTORS):
        own = tl.where(nearest == v, ds, 0.0)
        hi = own.to(DS.dtype.element_ty)
        tl.store(DS + at + v * group, hi)
        if PRECISION == "bf16x3":
            tl.store(DS_LO + at + v * group, (own - hi.to(tl.float32)).to(tl.bfloat16))
