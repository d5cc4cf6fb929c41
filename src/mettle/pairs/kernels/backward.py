# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
"""The backward pass: every row block owns its gradient.

Similarities are computed again, and because s_ij = s_ji both ends of a pair are served by the row's own sum,
Σ_j (g_i f'(s_ij) + g_j f'(s_ij)) z_j. Up to 256 columns of an embedding one kernel does it all; wider ones write the
gradients of the scores to memory, block by block, and leave the product with z to the library.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.kernels.config import TileConfig
from mettle.pairs.kernels.launch import Launch, LaunchCache
from mettle.pairs.kernels.operands import PAD, Operands
from mettle.pairs.kernels.pair_terms import (
    EndState,
    NegativeParams,
    NegativeTerm,
    PositiveParams,
    load_line,
    negative_grad,
    positive_grad,
    positive_weight,
    positive_weight_grad,
)
from mettle.pairs.kernels.primitives import (
    LSE,
    POSITIVE_LIMIT,
    SECOND_SUM_GRAD,
    SUM_GRAD,
    Anchors,
    Operand,
    PairOperands,
    bare_tile,
    count_bare,
    count_masked,
    dot_accumulate,
    dot_transposed,
    find_tiles,
    is_positive_tile,
    load_block,
    load_rows,
    masked_tile,
    negative_mask,
    next_positive_tile,
    positive_mask,
    read_number,
    similarity_float32,
    similarity_tile,
    store_gradient,
)

BLOCK_ROWS = 8192  # of a block of scores in memory, and columns at most: products then fill every multiprocessor
BLOCK_BYTES = 1 << 25  # of such a block, or this many times the embeddings' entries where that is more:
BYTES_PER_ENTRY = {"fp16": 16, "bf16x3": 20, "ieee": 8}
MOST_BLOCK_BYTES = 1 << 28  # a square block of BLOCK_ROWS in float32 accuracy
SUMMED_COLUMNS = 2048  # of a library product in float32 accuracy: half as many take 2 % longer


class GradConfig(NamedTuple):
    """What the gradient of a tile depends on at compile time; see `negatives_backward`."""

    HEAD_DIM: tl.constexpr
    HEAD_DIM2: tl.constexpr
    BLOCK_K2: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    PRECISION: tl.constexpr
    USE_TMA: tl.constexpr
    SECOND_SUM_HAS_GRAD: tl.constexpr
    HAS_SECOND_ENCODER: tl.constexpr
    ONLINE: tl.constexpr
    DIFFERENTIABLE_WEIGHTS: tl.constexpr
    ROW_END: tl.constexpr
    COLUMN_END: tl.constexpr


@triton.jit
def load_end_state(
    ROW_STATE, offs, padded, scale,
    USED: tl.constexpr, SECOND_SUM_HAS_GRAD: tl.constexpr, NEEDS_LSE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Of one end of each pair: the gradients of its two sums, times ``scale``, and its log-sum-exp or shift."""
    sum_grad = tl.zeros((SIZE,), tl.float32)
    second_sum_grad = sum_grad
    lse = sum_grad
    if USED:
        sum_grad = tl.load(ROW_STATE + SUM_GRAD * padded + offs) * scale
        if SECOND_SUM_HAS_GRAD:
            second_sum_grad = tl.load(ROW_STATE + SECOND_SUM_GRAD * padded + offs) * scale
        if NEEDS_LSE:
            lse = tl.load(ROW_STATE + LSE * padded + offs)
    return EndState(sum_grad, second_sum_grad, lse)


@triton.jit
def tile_gradient(column, row_end, operands, anchors, COLUMN_STATE, padded, scale, params, term, cfg):
    """dL/ds of one BLOCK_M × BLOCK_N tile, and the column block that it multiplies.

    row_end: `EndState` of the rows; COLUMN_STATE (9, padded): row state of the columns; params, term: of a negative;
    cfg: `GradConfig`.
    """
    offs_n = column + tl.arange(0, cfg.BLOCK_N)
    column_end = load_end_state(
        COLUMN_STATE, offs_n, padded, scale, cfg.COLUMN_END, cfg.SECOND_SUM_HAS_GRAD,
        cfg.ONLINE or term.TERM == "relative" or term.MINED, cfg.BLOCK_N,
    )  # fmt: skip
    hi = load_block(operands.columns.hi, column, 0, cfg.BLOCK_N, cfg.HEAD_DIM, cfg.HEAD_DIM, cfg.USE_TMA)
    lo = hi
    if cfg.PRECISION == "bf16x3":
        lo = load_block(operands.columns.lo, column, 0, cfg.BLOCK_N, cfg.HEAD_DIM, cfg.HEAD_DIM, cfg.USE_TMA)
    k = Operand(hi, lo)
    s = dot_transposed(anchors.q, k, tl.zeros((cfg.BLOCK_M, cfg.BLOCK_N), tl.float32), cfg.PRECISION)
    b = s
    if cfg.HAS_SECOND_ENCODER:
        b = similarity_tile(
            anchors.q2, operands.rows2, operands.columns2, anchors.row, column, cfg.BLOCK_M, cfg.BLOCK_N, cfg.BLOCK_K2,
            cfg.HEAD_DIM2, cfg.PRECISION, cfg.USE_TMA,
        )  # fmt: skip
    ds = negative_grad(
        s, b, row_end, column_end, params, term, cfg.ONLINE, cfg.DIFFERENTIABLE_WEIGHTS, cfg.ROW_END, cfg.COLUMN_END
    )
    return ds, k


@triton.jit
def add_tile_gradient(
    acc, j, row_end, operands, anchors, COLUMN_STATE, m, padded, scale, params, term, cfg, MASKED: tl.constexpr
):
    """Add ds·K of column tile j to the gradient of a row block.

    MASKED: where columns are missing, x is 0 and no bound holds, so ds may be infinite there.
    """
    column = j * cfg.BLOCK_N
    ds, k = tile_gradient(column, row_end, operands, anchors, COLUMN_STATE, padded, scale, params, term, cfg)
    if MASKED:
        keep = negative_mask(column + tl.arange(0, cfg.BLOCK_N), anchors.pos_begin, anchors.pos_end, m)
        ds = tl.where(keep, ds, 0.0)
    return dot_accumulate(ds, k, acc, cfg.PRECISION)


@triton.jit
def negatives_backward(
    Q, Q_LO, K, K_LO, Q2, Q2_LO, K2, K2_LO, POS_BEGIN, POS_END, ROW_STATE, COLUMN_STATE, STATS, OUT,
    n, m, padded, columns_padded, splits, slope, offset, floor, kink, zero, grad_scale_limit, operand_scale,
    HEAD_DIM: tl.constexpr, HEAD_DIM2: tl.constexpr, BLOCK_K2: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr, ROWS_IN_REGISTERS: tl.constexpr,
    TERM: tl.constexpr, SQUARE: tl.constexpr, HINGE_FORM: tl.constexpr, SECOND_SUM_HAS_GRAD: tl.constexpr,
    HAS_SECOND_ENCODER: tl.constexpr, ONLINE: tl.constexpr, DIFFERENTIABLE_WEIGHTS: tl.constexpr,
    MINED: tl.constexpr, ROW_END: tl.constexpr, COLUMN_END: tl.constexpr, FLUSH_EVERY: tl.constexpr,
):  # fmt: skip
    """Gradients of the normalized rows from their negatives, of one split of the columns.

    Grid: (row blocks, splits). Program (i, p) owns rows [i·BLOCK_M, (i + 1)·BLOCK_M) of OUT[p], (splits, padded,
    HEAD_DIM) float32, zero before where FLUSH_EVERY. ROW_STATE, COLUMN_STATE: (9, padded) of the two operands; ROW_END,
    COLUMN_END: which ends of a pair have a value; ``operand_scale`` is the factor that the columns carry.
    FLUSH_EVERY: after so many tiles a sum is added to OUT and begun anew, because tensor cores cut off what they add:
    over 32,768 columns that comes to 1e-4 of a sum, and where all embeddings have much in common little is left of it
    beside the positives. 0: never, and OUT is written once. (Masked tiles, at the edges of classes, are summed up in
    one go.)
    Cost: 4·n·m·HEAD_DIM FLOPs (× 3 for bf16x3), one or two exponentials a pair; each program reads its rows once and
    all columns of its split, and writes 4·HEAD_DIM bytes a row.
    """
    row = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    offs_m = row + tl.arange(0, BLOCK_M)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    params = NegativeParams(read_number(slope), read_number(offset), read_number(floor), read_number(kink))
    operand_scale = read_number(operand_scale)
    term: tl.constexpr = NegativeTerm(TERM, SQUARE, HINGE_FORM, MINED)
    cfg: tl.constexpr = GradConfig(
        HEAD_DIM, HEAD_DIM2, BLOCK_K2, BLOCK_M, BLOCK_N, PRECISION, USE_TMA, SECOND_SUM_HAS_GRAD, HAS_SECOND_ENCODER,
        ONLINE, DIFFERENTIABLE_WEIGHTS, ROW_END, COLUMN_END,
    )  # fmt: skip
    # One scale for all of ds keeps float16 from under- and overflowing: no |ds| exceeds 2 max |g|.
    scale = grad_scale_limit / tl.load(STATS + 2)
    row_end = load_end_state(
        ROW_STATE, offs_m, padded, scale, ROW_END, SECOND_SUM_HAS_GRAD, ONLINE or TERM == "relative" or MINED, BLOCK_M
    )
    operands = PairOperands(Operand(Q, Q_LO), Operand(K, K_LO), Operand(Q2, Q2_LO), Operand(K2, K2_LO))
    q = load_rows(operands.rows, row, BLOCK_M, HEAD_DIM, HEAD_DIM, PRECISION, USE_TMA, zero, ROWS_IN_REGISTERS)
    q2 = q
    if HAS_SECOND_ENCODER:
        q2 = load_rows(operands.rows2, row, BLOCK_M, BLOCK_K2, HEAD_DIM2, PRECISION, USE_TMA, zero, ROWS_IN_REGISTERS)
    anchors = Anchors(row, offs_m, pos_begin, pos_end, q, q2)
    tiles = find_tiles(POS_BEGIN, POS_END, row, n, m, BLOCK_M, BLOCK_N, 0)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)

    bare = count_bare(tiles)
    first = bare * split // splits
    last = bare * (split + 1) // splits
    if FLUSH_EVERY:
        for start in range(first, last, FLUSH_EVERY):
            for t in range(start, tl.minimum(start + FLUSH_EVERY, last)):
                acc = add_tile_gradient(
                    acc, bare_tile(tiles, t), row_end, operands, anchors, COLUMN_STATE, m, columns_padded, scale,
                    params, term, cfg, False,
                )  # fmt: skip
            store_gradient(OUT, split * padded + row, acc * (1.0 / (scale * operand_scale)), BLOCK_M, HEAD_DIM, True)
            acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    else:
        for t in range(first, last):
            acc = add_tile_gradient(
                acc, bare_tile(tiles, t), row_end, operands, anchors, COLUMN_STATE, m, columns_padded, scale,
                params, term, cfg, False,
            )  # fmt: skip
    for t in range(split, count_masked(tiles), splits):
        acc = add_tile_gradient(
            acc, masked_tile(tiles, t), row_end, operands, anchors, COLUMN_STATE, m, columns_padded, scale,
            params, term, cfg, True,
        )  # fmt: skip
    store_gradient(OUT, split * padded + row, acc * (1.0 / (scale * operand_scale)), BLOCK_M, HEAD_DIM, FLUSH_EVERY > 0)


@triton.jit
def score_gradients_kernel(
    Q, Q_LO, K, K_LO, Q2, Q2_LO, K2, K2_LO, POS_BEGIN, POS_END, ROW_STATE, COLUMN_STATE, STATS, DS, DS_LO,
    row_start, column_start, stride, n, padded, columns_padded, slope, offset, floor, kink, grad_scale_limit,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM2: tl.constexpr, BLOCK_K2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
    TERM: tl.constexpr, SQUARE: tl.constexpr, HINGE_FORM: tl.constexpr, SECOND_SUM_HAS_GRAD: tl.constexpr,
    HAS_SECOND_ENCODER: tl.constexpr, ONLINE: tl.constexpr, DIFFERENTIABLE_WEIGHTS: tl.constexpr,
    MINED: tl.constexpr, ROW_END: tl.constexpr, COLUMN_END: tl.constexpr,
):  # fmt: skip
    """dL/ds of the block of scores that begins at ``row_start`` and ``column_start``, for wide embeddings.

    Grid: (row blocks, column blocks). Program (i, j) owns tile (i, j) of DS (rows, stride), in the type of the operands
    (DS_LO: the lower half for bf16x3), times grad_scale_limit / STATS[2]. Entries of missing columns may be infinite.
    Cost: 2·HEAD_DIM FLOPs a pair (× 3 for bf16x3), 2 or 4 bytes written.
    """
    local_row = tl.program_id(0) * BLOCK_M  # rows first: programs that run together share their columns
    local_column = tl.program_id(1) * BLOCK_N
    column = column_start + local_column
    row = row_start + local_row
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = column + tl.arange(0, BLOCK_N)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    scale = grad_scale_limit / tl.load(STATS + 2)
    row_end = load_end_state(
        ROW_STATE, offs_m, padded, scale, ROW_END, SECOND_SUM_HAS_GRAD, ONLINE or TERM == "relative" or MINED, BLOCK_M
    )
    column_end = load_end_state(
        COLUMN_STATE, offs_n, columns_padded, scale, COLUMN_END, SECOND_SUM_HAS_GRAD,
        ONLINE or TERM == "relative" or MINED, BLOCK_N,
    )  # fmt: skip
    params = NegativeParams(read_number(slope), read_number(offset), read_number(floor), read_number(kink))
    term: tl.constexpr = NegativeTerm(TERM, SQUARE, HINGE_FORM, MINED)
    rows = Operand(Q, Q_LO)
    q = load_rows(rows, row, BLOCK_M, BLOCK_K, HEAD_DIM, PRECISION, USE_TMA)
    s = similarity_tile(q, rows, Operand(K, K_LO), row, column, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, PRECISION, USE_TMA)
    b = s
    if HAS_SECOND_ENCODER:
        rows2 = Operand(Q2, Q2_LO)
        q2 = load_rows(rows2, row, BLOCK_M, BLOCK_K2, HEAD_DIM2, PRECISION, USE_TMA)
        b = similarity_tile(
            q2, rows2, Operand(K2, K2_LO), row, column, BLOCK_M, BLOCK_N, BLOCK_K2, HEAD_DIM2, PRECISION, USE_TMA
        )
    ds = negative_grad(
        s, b, row_end, column_end, params, term,
        ONLINE, DIFFERENTIABLE_WEIGHTS, ROW_END, COLUMN_END,
    )  # fmt: skip
    if (column < tl.load(POS_END + tl.minimum(row + BLOCK_M, n) - 1)) & (column + BLOCK_N > tl.load(POS_BEGIN + row)):
        # Few tiles.
        keep = (offs_n[None, :] < pos_begin[:, None]) | (offs_n[None, :] >= pos_end[:, None])
        ds = tl.where(keep, ds, 0.0)
    # As in `load_block`: one wide offset, narrow ones inside.
    at = (
        local_row.to(tl.int64) * stride
        + local_column
        + (tl.arange(0, BLOCK_M)[:, None] * stride + tl.arange(0, BLOCK_N)[None, :])
    )
    hi = ds.to(DS.dtype.element_ty)
    tl.store(DS + at, hi)
    if PRECISION == "bf16x3":
        tl.store(DS_LO + at, (ds - hi.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def positives_backward(
    Z, C, POS_BEGIN, POS_END, SELF_COLUMN, ROW_STATE, COLUMN_STATE, G, n, padded, columns_padded, splits,
    inv_t, bound, slope, threshold, floor, prior, margin, positive_scale, sum_scale,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, ROW_LOSS: tl.constexpr, SELF: tl.constexpr, WEIGHTED: tl.constexpr,
    DIFFERENTIABLE_WEIGHTS: tl.constexpr, NUMERATOR_ONLY: tl.constexpr, DEBIASED: tl.constexpr,
    HINGE_FORM: tl.constexpr, MINED: tl.constexpr, ROW_END: tl.constexpr, COLUMN_END: tl.constexpr,
    SCALED_LATER: tl.constexpr,
):  # fmt: skip
    """Gradients of the normalized rows: what the negatives sent, plus the positives, in float32.

    Grid: (row blocks, HEAD_DIM / BLOCK_K). A program owns BLOCK_M rows and BLOCK_K columns of G, (splits, padded,
    HEAD_DIM) float32: it adds up the splits and leaves the result in G[0]. SCALED_LATER: what negatives sent
    came through memory and wants a factor, 1 / temperature and ``sum_scale``, that the result gets later; so positives
    are divided by it here, and blocks of rows without positives stay as they are. The derivatives are those of the row
    losses in `forward.positives_forward`.
    Cost: 4·HEAD_DIM FLOPs per pair of a row and the columns between its block's first and last positive; G is read
    once and G[0] written.
    """
    inv_t, bound = read_number(inv_t), read_number(bound)
    slope, threshold, floor = read_number(slope), read_number(threshold), read_number(floor)
    row = tl.program_id(0) * BLOCK_M
    start = tl.program_id(1) * BLOCK_K
    offs_m = row + tl.arange(0, BLOCK_M)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    self_column = offs_m
    if SELF == "column":
        self_column = tl.load(SELF_COLUMN + offs_m)
    if SCALED_LATER:  # noqa: SIM102  a flag beside a value that only the device knows
        if tl.max(pos_end - pos_begin, 0) == 0:
            return
    offs_k = start + tl.arange(0, BLOCK_K)
    at = offs_m.to(tl.int64)[:, None] * HEAD_DIM + offs_k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    size = padded.to(tl.int64) * HEAD_DIM
    for p in range(splits):
        acc += tl.load(G + p * size + at)
    positive_part = 1.0
    if SCALED_LATER:
        positive_part = 1.0 / (inv_t * read_number(sum_scale))
    else:
        acc = acc * inv_t
    params = PositiveParams(inv_t, bound, prior, margin, positive_scale)
    # The circle's two factors are weights of a kind.
    WEIGHT_GRAD: tl.constexpr = DIFFERENTIABLE_WEIGHTS and (WEIGHTED or ROW_LOSS == "circle")
    begin = tl.load(POS_BEGIN + row) // BLOCK_N * BLOCK_N
    end = tl.load(POS_END + tl.minimum(row + BLOCK_M, n) - 1)
    column = begin
    if SELF != "diagonal":
        column = next_positive_tile(begin, pos_begin, pos_end, BLOCK_N)
    for start_column in range(begin, end, BLOCK_N):
        if SELF == "diagonal":
            column = start_column
        if is_positive_tile(column, end, SELF):
            offs_n = column + tl.arange(0, BLOCK_N)
            keep = positive_mask(offs_m, offs_n, pos_begin, pos_end, self_column, SELF)
            s = similarity_float32(Z, C, row, column, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, INPUT_PRECISION)
            w = tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32)
            dw = w
            if WEIGHTED:
                w = positive_weight(s, slope, threshold, floor)
                dw = positive_weight_grad(s, slope, threshold, floor)
            ds = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if ROW_END:
                g = positive_grad(
                    s, s * inv_t, w, dw, ROW_STATE, offs_m, padded, params,
                    False, WEIGHT_GRAD, ROW_LOSS, NUMERATOR_ONLY, DEBIASED, HINGE_FORM,
                )  # fmt: skip
                if MINED:
                    g = tl.where(s >= load_line(ROW_STATE, POSITIVE_LIMIT, offs_m, padded, False), 0.0, g)
                ds += g
            if COLUMN_END:
                g = positive_grad(
                    s, s * inv_t, w, dw, COLUMN_STATE, offs_n, columns_padded, params,
                    True, WEIGHT_GRAD, ROW_LOSS, NUMERATOR_ONLY, DEBIASED, HINGE_FORM,
                )  # fmt: skip
                if MINED:
                    g = tl.where(s >= load_line(COLUMN_STATE, POSITIVE_LIMIT, offs_n, columns_padded, True), 0.0, g)
                ds += g
            if SCALED_LATER:
                ds = ds * positive_part
            k = load_block(C, column, start, BLOCK_N, BLOCK_K, HEAD_DIM, False)
            acc = tl.dot(tl.where(keep, ds, 0.0), k, acc, input_precision=INPUT_PRECISION)
            if SELF != "diagonal":
                column = next_positive_tile(column + BLOCK_N, pos_begin, pos_end, BLOCK_N)
    tl.store(G + at, acc)


def gradient_through_memory(
    a: Operands,
    b: Operands,
    tensors: tuple,
    row_states: tuple[Tensor, Tensor, Tensor],
    floats: tuple[float | Tensor, ...],
    constexprs: dict[str, Any],
    tile: TileConfig,
    entries: int,
    cache: LaunchCache,
    both: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(1, padded, head_dim) gradient of the rows of ``a``, times ``floats[-1]`` / the largest coefficient.

    dL/ds goes through memory, block by block, and its product with z is left to the library. Compared with themselves,
    embeddings have a symmetric dL/ds: a block away from the diagonal serves the rows of both its sides, and only half
    of the scores are computed again. ``entries`` of all embeddings that are compared with say what memory may be used.
    ``both``: the gradient of ``b``, which is another set, comes from the same blocks.
    """
    padded, columns_padded, precision = a.padded, b.padded, constexprs["PRECISION"]
    g = GradientSum(a)
    g_columns = GradientSum(b) if both else None
    if a is b:
        g_columns = g
    columns = min(_block_columns(precision, min(BLOCK_ROWS, padded), entries), columns_padded)
    step = BLOCK_ROWS  # of a symmetric dL/ds blocks are square, or halves of it
    if a is not b:  # few columns leave memory for more rows
        step *= max(1, _most_scores(precision, entries) // (BLOCK_ROWS * columns))
    rows = min(step, padded)
    ds = torch.empty(rows * columns, dtype=a.hi.dtype, device=a.normalized.device)
    ds_lo = torch.empty_like(ds) if precision == "bf16x3" else ds
    for i in range(0, a.n, step):
        for j in range(i if a is b else 0, b.n, columns):
            height, width = min(step, padded - i), min(columns, columns_padded - j)
            cache.launch(
                f"score gradients {constexprs['ROW_END']} {constexprs['COLUMN_END']} {i} {j}",
                score_gradients_kernel,
                (*tensors, a.positive_begin, a.positive_end, *row_states, ds, ds_lo),
                lambda i=i, j=j, height=height, width=width: Launch(
                    (height // tile.block_m, width // tile.block_n),
                    (i, j, width, a.n, padded, columns_padded),
                    constexprs,
                ),
                floats,
            )
            block, block_lo = (x[: height * width].view(height, width) for x in (ds, ds_lo))
            g.add_product(slice(i, i + height), block, block_lo, b, slice(j, j + width), precision)
            if g_columns is not None and (a is not b or j >= i + step):
                g_columns.add_product(slice(j, j + width), block.T, block_lo.T, a, slice(i, i + height), precision)
    return g.total, None if g_columns is None else g_columns.total


class GradientSum:
    """The gradient of prepared rows as a sum of products, of which the first one of a stretch of rows is written.

    Stretches come in order, the same ones again and again.
    """

    def __init__(self, rows: Operands):
        self.total = torch.empty(1, rows.padded, rows.head_dim, device=rows.normalized.device)
        self.begun = 0  # rows from here on hold nothing yet

    def add_product(self, at: slice, ds: Tensor, ds_lo: Tensor, z: Operands, rows: slice, precision: str) -> None:
        """To the rows ``at``: ds · ``rows`` of the other side."""
        _add_product(self.total[0, at], ds, ds_lo, z, rows, precision, first=at.start >= self.begun)
        self.begun = max(self.begun, at.stop)


def _most_scores(precision: str, entries: int) -> int:
    """How many entries of dL/ds memory allows at a time."""
    most = min(max(BLOCK_BYTES, BYTES_PER_ENTRY[precision] * entries), MOST_BLOCK_BYTES)
    return most // (2 if precision == "fp16" else 4)


def _block_columns(precision: str, rows: int, entries: int) -> int:
    """Columns of a block: as many as memory allows, BLOCK_ROWS or a half of it, or a half of that and so on."""
    columns = BLOCK_ROWS
    while columns > max(_most_scores(precision, entries) // rows, PAD):
        columns //= 2
    return columns


def _add_product(
    g: Tensor, ds: Tensor, ds_lo: Tensor, z: Operands, at: slice, precision: str, first: bool = False
) -> None:
    """G + ds·z, in place; without the columns of missing rows, where ds may be infinite. ``first``: without G."""
    at = slice(at.start, min(at.stop, z.n))
    ds, ds_lo, hi = ds[:, : at.stop - at.start], ds_lo[:, : at.stop - at.start], z.hi[at]
    if precision != "bf16x3":
        matmul_float32(ds, hi, g, first)
        return
    for k in range(0, len(hi), SUMMED_COLUMNS):  # tensor cores cut off what they add, which long sums would show
        part = slice(k, k + SUMMED_COLUMNS)
        matmul_float32(ds[:, part], hi[part], g, first and k == 0)
    matmul_float32(ds, z.lo[at], g)
    matmul_float32(ds_lo, hi, g)


def matmul_float32(a: Tensor, b: Tensor, out: Tensor | None = None, overwrite: bool = False) -> Tensor:
    """a·b in float32 from operands of half the width; added to ``out`` where that is given, or written there."""
    beta = 0 if overwrite else 1
    if a.dtype == torch.float32:
        return torch.mm(a, b) if out is None else out.addmm_(a, b, beta=beta)
    if not a.is_cuda:  # where torch knows no out_dtype
        found = torch.mm(a.float(), b.float())
        if out is None:
            return found
        return out.copy_(found) if overwrite else out.add_(found)
    if out is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, out=out)
