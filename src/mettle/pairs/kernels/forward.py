# pyright: reportAssignmentType=false
"""The forward pass: sums over negatives, which is everything quadratic; then positives, the loss of each row, the mean.

n rows (anchors) are compared with m columns; ``padded`` is n filled up to whole blocks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mettle.pairs.kernels.pair_terms import (
    LN2,
    NegativeParams,
    NegativeTerm,
    debiased_log_denominator,
    hinge,
    negative_exponent,
    negative_values,
    online_term,
    positive_exponent,
    positive_weight,
    sigmoid,
    softplus,
)
from mettle.pairs.kernels.primitives import (
    ATTRACT,
    LOG_DENOMINATOR,
    LOG_NUMERATOR,
    LSE,
    LSE_DISABLED,
    POSITIVE_LIMIT,
    REPEL,
    SECOND_SUM_GRAD,
    SUM_GRAD,
    WEIGHT_OFFSET,
    Anchors,
    Operand,
    PairOperands,
    atomic_column_sum,
    bare_tile,
    count_bare,
    count_masked,
    find_tiles,
    is_positive_tile,
    load_rows,
    masked_tile,
    merge_logsumexp,
    merge_maxima,
    merge_sums,
    negative_mask,
    next_positive_tile,
    partial_row_max,
    partial_row_sum,
    positive_mask,
    read_number,
    similarity_float32,
    similarity_tile,
)


class SumConfig(NamedTuple):
    """What the sums over a tile depend on at compile time; see `negatives_forward`."""

    HEAD_DIM: tl.constexpr
    BLOCK_K: tl.constexpr
    HEAD_DIM2: tl.constexpr
    BLOCK_K2: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    PRECISION: tl.constexpr
    USE_TMA: tl.constexpr
    HAS_SECOND_SUM: tl.constexpr
    HAS_SECOND_ENCODER: tl.constexpr
    ONLINE: tl.constexpr
    SYMMETRIC: tl.constexpr
    ROW_WARPS: tl.constexpr


class RowSums(NamedTuple):
    """Two sums of each row in parts, the second a maximum where pairs are MINED.

    Or where ONLINE l_i, a sum over e^m_i, and m_i, the running maximum.
    """

    part0: tl.tensor
    part1: tl.tensor
    l_i: tl.tensor
    m_i: tl.tensor


@triton.jit
def add_tile(sums, j, operands, anchors, shift, SHIFT, OUT, n, m, padded, params, term, cfg, MASKED: tl.constexpr):
    """Add the pairs of column tile j to the sums of a row block, and where SYMMETRIC to those of the columns.

    shift, SHIFT: u of the relative term, or the threshold of mined negatives, of these rows and of all.
    MASKED: not all pairs of the tile are negatives, or there.
    """
    s = similarity_tile(
        anchors.q, operands.rows, operands.columns, anchors.row, j * cfg.BLOCK_N, cfg.BLOCK_M, cfg.BLOCK_N, cfg.BLOCK_K,
        cfg.HEAD_DIM, cfg.PRECISION, cfg.USE_TMA,
    )  # fmt: skip
    b = s
    if cfg.HAS_SECOND_ENCODER:
        b = similarity_tile(
            anchors.q2, operands.rows2, operands.columns2, anchors.row, j * cfg.BLOCK_N, cfg.BLOCK_M, cfg.BLOCK_N,
            cfg.BLOCK_K2, cfg.HEAD_DIM2, cfg.PRECISION, cfg.USE_TMA,
        )  # fmt: skip
    offs_n = j * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
    if MASKED:
        keep = negative_mask(offs_n, anchors.pos_begin, anchors.pos_end, m)
        if cfg.SYMMETRIC:
            keep = keep & (offs_n[None, :] > anchors.offs_m[:, None]) & (anchors.offs_m < n)[:, None]
    part0, part1, l_i, m_i = sums
    if cfg.ONLINE:
        y = negative_exponent(s, params, term)
        m_new = tl.maximum(m_i, tl.max(tl.where(keep, y, -float("inf")) if MASKED else y, 1))
        safe = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
        f0 = online_term(s, y, b, safe, params, term)
        if MASKED:
            f0 = tl.where(keep, f0, 0.0)
        l_i = l_i * tl.exp2(m_i - safe) + tl.sum(f0, 1)
        m_i = m_new
    else:
        f0, f1, f_column = negative_values(s, b, shift, SHIFT, offs_n, params, term, cfg.SYMMETRIC)
        part0 += partial_row_sum(tl.where(keep, f0, 0.0) if MASKED else f0, cfg.BLOCK_M, cfg.BLOCK_N)
        if term.MINED:
            highest = tl.where(keep, f1, -float("inf")) if MASKED else f1
            part1 = tl.maximum(part1, partial_row_max(highest, cfg.BLOCK_M, cfg.BLOCK_N))
        elif cfg.HAS_SECOND_SUM:
            part1 += partial_row_sum(tl.where(keep, f1, 0.0) if MASKED else f1, cfg.BLOCK_M, cfg.BLOCK_N)
        if cfg.SYMMETRIC:
            f_column = tl.where(keep, f_column, 0.0) if MASKED else f_column
            atomic_column_sum(OUT + offs_n, f_column, cfg.BLOCK_M, cfg.BLOCK_N, cfg.ROW_WARPS)
            if cfg.HAS_SECOND_SUM:
                f1 = tl.where(keep, f1, 0.0) if MASKED else f1
                atomic_column_sum(OUT + padded + offs_n, f1, cfg.BLOCK_M, cfg.BLOCK_N, cfg.ROW_WARPS)
    return RowSums(part0, part1, l_i, m_i)


@triton.jit
def negatives_forward(
    Q, Q_LO, K, K_LO, Q2, Q2_LO, K2, K2_LO, POS_BEGIN, POS_END, SHIFT, OUT, n, m, padded, splits,
    slope, offset, floor, zero,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM2: tl.constexpr, BLOCK_K2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
    TERM: tl.constexpr, SQUARE: tl.constexpr, HINGE_FORM: tl.constexpr, HAS_SECOND_SUM: tl.constexpr,
    HAS_SECOND_ENCODER: tl.constexpr, ONLINE: tl.constexpr, MINED: tl.constexpr, SYMMETRIC: tl.constexpr,
    ROW_WARPS: tl.constexpr, ROWS_IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Sums over the negatives of each row, of one split of the columns.

    Grid: (row blocks, splits). Program (i, p) owns rows [i·BLOCK_M, (i + 1)·BLOCK_M) of OUT[p], (splits, 2, padded)
    float32: two sums, or (maximum, sum) in base 2 where ONLINE, or (sum, maximum of x) where MINED. SYMMETRIC: each
    pair of a batch with itself is visited once and added to both of its ends; then nobody owns OUT, (2, padded), zero
    before: additions are atomic.
    Q, K: operands of PRECISION; Q2, K2 those of a second encoder, else the first again; SHIFT (padded,) float32.
    Cost: 2·n·m·HEAD_DIM FLOPs (× 3 for bf16x3, half of it where SYMMETRIC), one or two exponentials a pair; each
    program reads its rows once and all columns of its split; it writes 8 bytes a row.
    """
    row = tl.program_id(0) * BLOCK_M
    split = tl.program_id(1)
    offs_m = row + tl.arange(0, BLOCK_M)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    # The kink matters to derivatives only.
    params = NegativeParams(read_number(slope), read_number(offset), read_number(floor), 0.0)
    term: tl.constexpr = NegativeTerm(TERM, SQUARE, HINGE_FORM, MINED)
    cfg: tl.constexpr = SumConfig(
        HEAD_DIM, BLOCK_K, HEAD_DIM2, BLOCK_K2, BLOCK_M, BLOCK_N, PRECISION, USE_TMA, HAS_SECOND_SUM,
        HAS_SECOND_ENCODER, ONLINE, SYMMETRIC, ROW_WARPS,
    )  # fmt: skip
    shift = tl.zeros((BLOCK_M,), tl.float32)
    if TERM == "relative" or MINED:
        shift = tl.load(SHIFT + offs_m)
    operands = PairOperands(Operand(Q, Q_LO), Operand(K, K_LO), Operand(Q2, Q2_LO), Operand(K2, K2_LO))
    q = load_rows(operands.rows, row, BLOCK_M, BLOCK_K, HEAD_DIM, PRECISION, USE_TMA, zero, ROWS_IN_REGISTERS)
    q2 = q
    if HAS_SECOND_ENCODER:
        q2 = load_rows(operands.rows2, row, BLOCK_M, BLOCK_K2, HEAD_DIM2, PRECISION, USE_TMA, zero, ROWS_IN_REGISTERS)
    anchors = Anchors(row, offs_m, pos_begin, pos_end, q, q2)
    first = 0
    if SYMMETRIC:
        first = row // BLOCK_N
    tiles = find_tiles(POS_BEGIN, POS_END, row, n, m, BLOCK_M, BLOCK_N, first)
    part0 = tl.zeros((BLOCK_M, 4), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    part1 = part0
    if MINED:
        part1 = tl.full((BLOCK_M, 4), -float("inf"), tl.float32)
    sums = RowSums(part0, part1, l_i, m_i)

    bare = count_bare(tiles)
    for t in range(bare * split // splits, bare * (split + 1) // splits):
        j = bare_tile(tiles, t)
        sums = add_tile(sums, j, operands, anchors, shift, SHIFT, OUT, n, m, padded, params, term, cfg, False)
    for t in range(split, count_masked(tiles), splits):
        j = masked_tile(tiles, t)
        sums = add_tile(sums, j, operands, anchors, shift, SHIFT, OUT, n, m, padded, params, term, cfg, True)
    part0, part1, l_i, m_i = sums
    if not ONLINE:
        l_i = tl.sum(part0, 1)
    second_sum = tl.max(part1, 1) if MINED else tl.sum(part1, 1)
    if SYMMETRIC:
        tl.atomic_add(OUT + offs_m, l_i, sem="relaxed")
        if HAS_SECOND_SUM:
            tl.atomic_add(OUT + padded + offs_m, second_sum, sem="relaxed")
    else:
        out = OUT + split.to(tl.int64) * 2 * padded
        if ONLINE:
            tl.store(out + offs_m, m_i)
            tl.store(out + padded + offs_m, l_i)
        else:
            tl.store(out + offs_m, l_i)
            if HAS_SECOND_SUM or MINED:
                tl.store(out + padded + offs_m, second_sum)


@triton.jit
def shift_kernel(PARTIAL, PARTIAL2, SHIFT, padded, splits, splits2, SIZE: tl.constexpr):
    """e^{ν − ν₂}, ν = ½ log Σ e^{2x}: how concentrated one encoder's row is against the second one's.

    Grid: (padded / SIZE,); a program owns SIZE rows of SHIFT (padded,) float32. The sums are those of
    `negatives_forward` with SQUARE. Cost: 4 bytes read per row, encoder and split.
    """
    offs_m = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    own = merge_sums(PARTIAL, offs_m, padded, splits, 0, SIZE)
    other = merge_sums(PARTIAL2, offs_m, padded, splits2, 0, SIZE)
    some = (own > 0) & (other > 0)
    tl.store(SHIFT + offs_m, tl.where(some, tl.sqrt(own / tl.where(some, other, 1.0)), 1.0))


@triton.jit
def mining_threshold_kernel(
    Z, C, POS_BEGIN, POS_END, SELF_COLUMN, SHIFT, n, epsilon, x_scale,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, SELF: tl.constexpr,
):  # fmt: skip
    """The threshold that mined negatives lie above: x_scale · (the least similar positive − epsilon).

    Grid: (padded / BLOCK_M,). A program owns BLOCK_M rows of SHIFT (padded,) float32; infinite where a row has no
    positive, which leaves no negative. Arguments and cost are those of `positives_forward`.
    """
    x_scale = read_number(x_scale)
    row = tl.program_id(0) * BLOCK_M
    offs_m = row + tl.arange(0, BLOCK_M)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    self_column = offs_m
    if SELF == "column":
        self_column = tl.load(SELF_COLUMN + offs_m)
    lowest = tl.full((BLOCK_M,), float("inf"), tl.float32)
    begin = tl.load(POS_BEGIN + row) // BLOCK_N * BLOCK_N
    end = tl.load(POS_END + tl.minimum(row + BLOCK_M, n) - 1, mask=row < n, other=0)
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
            lowest = tl.minimum(lowest, tl.min(tl.where(keep, s, float("inf")), 1))
            if SELF != "diagonal":
                column = next_positive_tile(column + BLOCK_N, pos_begin, pos_end, BLOCK_N)
    tl.store(SHIFT + offs_m, (lowest - epsilon) * x_scale)


@triton.jit
def positives_forward(
    Z, C, POS_BEGIN, POS_END, SELF_COLUMN, PARTIAL, SHIFT, ORDER, VALUES, DEFINED, ROW_STATE, BLOCK_SUMS,
    n, m, padded, splits, inv_t, bound, slope, threshold, floor, scale, prior, margin, positive_scale,
    positive_factor, negative_factor, log_shift, epsilon, x_scale,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, ROW_LOSS: tl.constexpr, TERM: tl.constexpr, SELF: tl.constexpr,
    ONLINE: tl.constexpr, WEIGHTED: tl.constexpr, NUMERATOR_ONLY: tl.constexpr, DIVIDE_BY: tl.constexpr,
    ALL_ANCHORS: tl.constexpr, DEBIASED: tl.constexpr, COUNT_BY_WEIGHT: tl.constexpr, HINGE_FORM: tl.constexpr,
    MINED: tl.constexpr,
):  # fmt: skip
    """Sums over the positives of each row, in float32: few, so they can be exact. Then, as all is known, its loss.

    The row losses are those of ``mettle.losses.supcon.SupCon``, ``infonce.InfoNCE``, ``npair.NPair``,
    ``contrastive.Contrastive``, ``multi_similarity.MultiSimilarity`` (two_sided) and ``circle.Circle``, in their
    ``row_loss``: change both or neither; the interpreter tests hold them against each other.

    Grid: (padded / BLOCK_M,). A program owns BLOCK_M rows of ROW_STATE (9, padded) float32, see `primitives`, the same
    rows of VALUES (n,) float32 and DEFINED (n,) bool in the order in which they came, and BLOCK_SUMS[i] (blocks, 3)
    float32: sum of values, number of anchors, largest |dL/d(log F)|.
    Z, C: float32 rows and columns; PARTIAL: what `negatives_forward` left. SELF: which column is a row's
    own sample, and no positive: ``none``, on the ``diagonal``, or as SELF_COLUMN (padded,) int32 says, -1 for none.
    Cost: 2·HEAD_DIM FLOPs per pair of a row and the columns between its block's first and last positive.
    """
    inv_t, bound = read_number(inv_t), read_number(bound)
    slope, threshold, floor = read_number(slope), read_number(threshold), read_number(floor)
    positive_factor, x_scale = read_number(positive_factor), read_number(x_scale)
    row = tl.program_id(0) * BLOCK_M
    offs_m = row + tl.arange(0, BLOCK_M)
    real = offs_m < n
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    positives = (pos_end - pos_begin).to(tl.float32)
    if SELF == "diagonal":
        positives = positives - 1.0
    self_column = offs_m
    if SELF == "column":
        self_column = tl.load(SELF_COLUMN + offs_m)
        positives = positives - tl.where(self_column >= 0, 1.0, 0.0)
    negatives = m - (pos_end - pos_begin).to(tl.float32)

    # What the negatives came to. Where there are none, log_negatives is -inf.
    if ONLINE:
        lse = merge_logsumexp(PARTIAL, offs_m, padded, splits, BLOCK_M)
        log_negatives = lse * LN2
        total = tl.full((BLOCK_M,), 1.0, tl.float32)
        second = total
    else:
        lse = tl.zeros((BLOCK_M,), tl.float32)
        total = merge_sums(PARTIAL, offs_m, padded, splits, 0, BLOCK_M)
        second = total
        log_negatives = tl.log(total)
        if TERM == "importance":
            second = merge_sums(PARTIAL, offs_m, padded, splits, 1, BLOCK_M)
            log_negatives = tl.log(total) + tl.log(negatives) - tl.log(second)
            log_negatives = tl.where(negatives == 0, -float("inf"), log_negatives)
        if TERM == "relative" or MINED:
            lse = tl.load(SHIFT + offs_m)
    if (ROW_LOSS == "two_sided") or (ROW_LOSS == "circle"):
        log_negatives += log_shift
    limit = tl.full((BLOCK_M,), float("inf"), tl.float32)
    if MINED:  # where there is no negative, no positive stays
        limit = merge_maxima(PARTIAL, offs_m, padded, splits, 1, BLOCK_M) / x_scale + epsilon
    log_count = tl.log(tl.where(negatives > 0, negatives, 1.0))
    if COUNT_BY_WEIGHT:
        second = merge_sums(PARTIAL, offs_m, padded, splits, 1, BLOCK_M)
        log_count = tl.log(tl.where(second == 0, 1.0, second))

    weight = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)  # Σ over positives in the denominator, times e^−m_i
    acc = tl.zeros((BLOCK_M,), tl.float32)  # Σ over positives of what the row loss says
    acc_grad = tl.zeros((BLOCK_M,), tl.float32)  # its derivative for log F
    begin = tl.load(POS_BEGIN + row) // BLOCK_N * BLOCK_N
    end = tl.load(POS_END + tl.minimum(row + BLOCK_M, n) - 1, mask=row < n, other=0)  # none for a block of padding
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
            if MINED:
                keep = keep & ((s >= limit[:, None]) == 0)  # what is broken stays
            x = s * inv_t
            w = tl.full((BLOCK_M, BLOCK_N), 1.0, tl.float32)
            if WEIGHTED:
                w = positive_weight(s, slope, threshold, floor)
            weight += tl.sum(tl.where(keep, w, 0.0), 1)
            if ROW_LOSS == "npair":
                acc += tl.sum(tl.where(keep, x, 0.0), 1)
            elif ROW_LOSS == "contrastive":
                acc += tl.sum(tl.where(keep, hinge(s, margin, False, HINGE_FORM), 0.0), 1)
            elif ROW_LOSS == "infonce":
                log_g, _, dlog_g = debiased_log_denominator(
                    x, log_negatives[:, None], log_count[:, None], bound, prior, DEBIASED
                )
                acc += tl.sum(tl.where(keep, w * softplus(log_g - x), 0.0), 1)
                acc_grad += tl.sum(tl.where(keep, w * sigmoid(log_g - x) * dlog_g, 0.0), 1)
            else:
                y = x
                if (ROW_LOSS == "two_sided") or (ROW_LOSS == "circle"):
                    y = positive_exponent(s, margin, positive_scale, ROW_LOSS)
                m_new = tl.maximum(m_i, tl.max(tl.where(keep, y, -float("inf")), 1))
                safe = tl.where(m_new == -float("inf"), 0.0, m_new)
                e = tl.where(keep, tl.exp(y - safe[:, None]), 0.0)
                alpha = tl.exp(m_i - safe)
                l_i = l_i * alpha + (tl.sum(e, 1) if NUMERATOR_ONLY else tl.sum(e * w, 1))
                if ROW_LOSS == "supcon_out":
                    acc += tl.sum(tl.where(keep, w * x, 0.0), 1)
                elif ROW_LOSS == "supcon_in":
                    acc = acc * alpha + tl.sum(e * w, 1)
                m_i = m_new
            if SELF != "diagonal":
                column = next_positive_tile(column + BLOCK_N, pos_begin, pos_end, BLOCK_N)

    if MINED:
        positives = weight
    has_positives = real & (positives > 0)
    has_value = has_positives
    has_negatives = negatives > 0
    by_weight = tl.where(weight == 0, 1.0, weight)
    repel = tl.zeros((BLOCK_M,), tl.float32)
    attract = repel
    log_denominator = repel
    log_numerator = repel
    weight_offset = repel
    if (ROW_LOSS == "supcon_out") or (ROW_LOSS == "supcon_in"):
        m_i = tl.where(has_positives, m_i, 0.0)
        log_positives = m_i + tl.log(tl.where(has_positives, l_i, 1.0))
        larger = tl.maximum(log_positives, log_negatives)
        log_d = larger + tl.log(tl.exp(log_positives - larger) + tl.exp(log_negatives - larger))
        divisor = tl.full((BLOCK_M,), 1.0, tl.float32)
        if DIVIDE_BY == "count":
            divisor = tl.where(has_positives, positives, 1.0)
        if DIVIDE_BY == "weight":
            divisor = by_weight
        log_denominator = log_d
        if ROW_LOSS == "supcon_out":
            unscaled = (weight * log_d - acc) / divisor
            repel = weight / divisor * scale
            attract = scale / divisor
            weight_offset = log_d
            if DIVIDE_BY == "weight":
                weight_offset = log_d - unscaled
        else:
            log_numerator = m_i + tl.log(tl.where(has_positives, acc, 1.0))
            unscaled = log_d - log_numerator + tl.log(divisor)
            repel = tl.full((BLOCK_M,), 1.0, tl.float32) * scale
            attract = repel
            if DIVIDE_BY == "weight":
                weight_offset = 1.0 / divisor
        value = unscaled * scale
        g = repel * tl.exp(log_negatives - log_d)
    elif ROW_LOSS == "infonce":
        attract = 1.0 / by_weight
        value = tl.where(log_negatives == -float("inf"), 0.0, acc * attract)
        g = tl.where(log_negatives == -float("inf"), 0.0, acc_grad * attract)
        log_denominator = log_negatives
        log_numerator = log_count
        weight_offset = value
    elif (ROW_LOSS == "two_sided") or (ROW_LOSS == "circle"):
        some = l_i > 0
        log_positives = tl.where(some, m_i + tl.log(tl.where(some, l_i, 1.0)), -float("inf")) + 0.0 * l_i
        if ROW_LOSS == "circle":
            alone = log_negatives == -float("inf")
            both = log_positives + log_negatives
            value = tl.where(alone, 0.0, softplus(both))
            g = tl.where(alone, 0.0, sigmoid(both))
            attract = g
        else:
            value = positive_factor * softplus(log_positives) + negative_factor * softplus(log_negatives)
            g = negative_factor * sigmoid(log_negatives)
            attract = positive_factor * sigmoid(log_positives)
            if ALL_ANCHORS:
                has_value = real
        log_numerator = tl.where(some, log_positives, 0.0)
    elif ROW_LOSS == "npair":
        attract = tl.where(log_negatives == -float("inf"), 0.0, sigmoid(log_negatives - acc))
        value = tl.where(log_negatives == -float("inf"), 0.0, softplus(log_negatives - acc))
        g = attract
    else:
        attract = 1.0 / tl.where(has_positives, positives, 1.0)
        per_negative = tl.where(has_negatives, 1.0 / tl.where(has_negatives, negatives, 1.0), 0.0)
        value = acc * attract + total * per_negative
        g = per_negative * total

    # g is dL/d(log F) of the row's loss; the sums themselves get g over them.
    sum_grad = tl.where(total == 0, 0.0, g / tl.where(total == 0, 1.0, total))
    second_sum_grad = tl.where(second == 0, 0.0, -g / tl.where(second == 0, 1.0, second))
    if TERM == "hinge":
        sum_grad = per_negative
    if ONLINE:
        lse = tl.where(has_value & (log_negatives != -float("inf")), lse, LSE_DISABLED)
    value = tl.where(has_value, value, 0.0)
    counted = has_positives
    if ALL_ANCHORS:
        counted = real
    to = tl.load(ORDER + offs_m, mask=real, other=0)
    tl.store(VALUES + to, value, mask=real)
    tl.store(DEFINED + to, counted, mask=real)
    tl.store(ROW_STATE + SUM_GRAD * padded + offs_m, tl.where(has_value, sum_grad, 0.0))
    tl.store(ROW_STATE + SECOND_SUM_GRAD * padded + offs_m, tl.where(has_value, second_sum_grad, 0.0))
    tl.store(ROW_STATE + REPEL * padded + offs_m, tl.where(has_positives, repel, 0.0))
    tl.store(ROW_STATE + ATTRACT * padded + offs_m, tl.where(has_positives, attract, 0.0))
    tl.store(ROW_STATE + LSE * padded + offs_m, lse)
    tl.store(ROW_STATE + LOG_DENOMINATOR * padded + offs_m, tl.where(has_positives, log_denominator, 0.0))
    tl.store(ROW_STATE + LOG_NUMERATOR * padded + offs_m, tl.where(has_positives, log_numerator, 0.0))
    tl.store(ROW_STATE + WEIGHT_OFFSET * padded + offs_m, tl.where(has_positives, weight_offset, 0.0))
    if MINED:
        tl.store(ROW_STATE + POSITIVE_LIMIT * padded + offs_m, limit)
    at = BLOCK_SUMS + 3 * tl.program_id(0)
    tl.store(at, tl.sum(tl.where(counted, value, 0.0), 0))
    tl.store(at + 1, tl.sum(counted.to(tl.float32), 0))
    tl.store(at + 2, tl.max(tl.where(has_value, tl.abs(g), 0.0), 0))


@triton.jit
def mean_kernel(BLOCK_SUMS, STATS, MEAN, blocks, SIZE: tl.constexpr):
    """The mean over anchors, and what the backward pass needs of all of them.

    Grid: (1,). Writes MEAN () and STATS[1] = 1 / number of anchors, STATS[2] = largest |dL/d(log F)|, or 1; float32.
    Reads BLOCK_SUMS (blocks, 3) of `positives_forward`: 12 bytes a block.
    """
    total = tl.zeros((SIZE,), tl.float32)
    anchors = tl.zeros((SIZE,), tl.float32)
    most = tl.zeros((SIZE,), tl.float32)
    for start in range(0, blocks, SIZE):
        at = start + tl.arange(0, SIZE)
        there = at < blocks
        total += tl.load(BLOCK_SUMS + 3 * at, mask=there, other=0.0)
        anchors += tl.load(BLOCK_SUMS + 3 * at + 1, mask=there, other=0.0)
        most = tl.maximum(most, tl.load(BLOCK_SUMS + 3 * at + 2, mask=there, other=0.0))
    number = tl.sum(anchors, 0)
    largest = tl.max(most, 0)
    tl.store(MEAN, tl.sum(total, 0) / number)
    tl.store(STATS + 1, 1.0 / number)
    tl.store(STATS + 2, tl.where(largest > 0, largest, 1.0))
