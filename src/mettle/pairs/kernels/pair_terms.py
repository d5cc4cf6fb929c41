# pyright: reportGeneralTypeIssues=false
"""Every function of one pair, beside its derivative: what negatives add to their rows, what positives come to.

Operands of products carry a factor each, so that a product is x = s · log₂e / temperature, s the similarity: 2^x =
e^{s/temperature} is one exponential per pair and nothing else, with no maximum to subtract, because cosines stay within
±1 and float32 holds e^±64. (The hinge and the circle have no temperature in their products: there x = s.) Derivatives
are those for s / temperature. Positives are computed in float32 from s itself.

| TERM of a negative | adds to the first sum | to the second |
|---|---|---|
| ``plain`` | e | |
| ``threshold`` | w·e, w = max(x·slope + offset, floor) | w |
| ``importance`` | e^(1 + beta) | e^beta |
| ``relative`` | e + e² / (e + e_b·u), u of its row | |
| ``relative_raw`` | e + e² / (e + e_b) | |
| ``hinge`` | [margin − d]₊ and the like | |
| ``circle`` | 2^y, y = slope·[x + m]₊·(x − m) − floor | |

with e = 2^x and e_b = 2^b that of a second encoder. Where pairs are MINED, ``plain``, ``threshold`` and ``circle``
count only above a threshold of the row, and in place of a second sum there is the largest x of the row.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mettle.pairs.kernels.primitives import ATTRACT, LOG_DENOMINATOR, LOG_NUMERATOR, REPEL, WEIGHT_OFFSET

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class NegativeParams(NamedTuple):
    """Run-time numbers of a negative's term.

    ``slope`` is beta of ``importance`` and the margin of ``hinge``. The weight of ``threshold`` is a line in x with
    ``slope`` and ``offset``, not below ``floor``, where it ends at x = ``kink``. Of ``circle``, ``slope`` is
    gamma · log₂e, ``offset`` is m, and ``floor`` keeps the exponent small.
    """

    slope: tl.tensor
    offset: tl.tensor
    floor: tl.tensor
    kink: tl.tensor | float


class PositiveParams(NamedTuple):
    """Run-time numbers of a positive: 1 / temperature, the bound of x, the prior of a debiased loss, the margin.

    ``margin`` is the base of ``two_sided`` and m of ``circle``, ``scale`` alpha of the one and gamma of the other.
    """

    inv_t: tl.tensor
    bound: tl.tensor
    prior: tl.tensor
    margin: tl.tensor
    scale: tl.tensor


class NegativeTerm(NamedTuple):
    """What a negative adds, at compile time. SQUARE: a plain pair adds e², ``importance`` has beta = 1.

    MINED: it adds that only where x is above the threshold of its end.
    """

    TERM: tl.constexpr
    SQUARE: tl.constexpr
    HINGE_FORM: tl.constexpr
    MINED: tl.constexpr


class EndState(NamedTuple):
    """What the gradient of a pair needs of one of its ends: dL/d(its two sums), and one more number.

    ``lse`` is its log-sum-exp, its shift in the relative form, or the threshold of its mined negatives.
    """

    sum_grad: tl.tensor
    second_sum_grad: tl.tensor
    lse: tl.tensor


@triton.jit
def threshold_weight(x, params):
    """Threshold's weight of a negative, a line that ends below."""
    return tl.maximum(x * params.slope + params.offset, params.floor)


@triton.jit
def threshold_weight_grad(x, params):
    """Its derivative, which begins at the kink: told from x itself, because no rounding may decide about a jump."""
    return tl.where((x - params.kink) * params.slope > 0, params.slope * LOG2E, 0.0)


@triton.jit
def relative_value(x, b, u_row, u_column):
    """What a pair adds to each of its ends in the relative form, e + e² / (e + e_b · u), with one inverse for both.

    u is at most √Σe² / e_b: no product leaves float32. The weight is a constant, so this is the derivative too.
    """
    e = tl.exp2(x)
    e_b = tl.exp2(b)
    row = e + e_b * u_row
    column = e + e_b * u_column
    part = e * tl.rsqrt(row * column)  # one instruction and a product, where a division takes ten
    part = part * part
    return e + part * column, e + part * row


@triton.jit
def relative_raw_value(x, b):
    """The same without u, alike for both ends."""
    e = tl.exp2(x)
    part = e * tl.rsqrt(e + tl.exp2(b))
    return e + part * part


@triton.jit
def relative_weight(x, b):
    """What a pair weighs in the raw form, where 2^x itself may be too large: 1 + 1 / (1 + e_b / e)."""
    return 1.0 + 1.0 / (1.0 + tl.exp2(b - x))


@triton.jit
def hinge(s, margin, NEGATIVE: tl.constexpr, HINGE_FORM: tl.constexpr):
    """Of a pair at distance d = √(2 − 2s): a negative pays below the margin, a positive above it."""
    squared = tl.maximum(2.0 - 2.0 * s, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if HINGE_FORM == "squared":
        gap = margin * margin - squared if NEGATIVE else squared - margin * margin
        return tl.maximum(gap, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        gap = margin - tl.sqrt(squared) if NEGATIVE else tl.sqrt(squared) - margin
        gap = tl.maximum(gap, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return gap * gap if HINGE_FORM == "hadsell" else gap


@triton.jit
def hinge_grad(s, margin, NEGATIVE: tl.constexpr, HINGE_FORM: tl.constexpr):
    """Its derivative for s: d' = −1/d, 0 where two points coincide."""
    squared = 2.0 - 2.0 * s
    if HINGE_FORM == "squared":
        if NEGATIVE:
            return tl.where((squared > 0) & (squared < margin * margin), 2.0, 0.0)
        else:
            return tl.where((squared > 0) & (squared > margin * margin), -2.0, 0.0)
    else:
        d = tl.sqrt(tl.where(squared > 0, squared, 1.0))
        if NEGATIVE:
            gap = margin - d
            slope = 2.0 * gap / d if HINGE_FORM == "hadsell" else 1.0 / d
        else:
            gap = d - margin
            slope = -2.0 * gap / d if HINGE_FORM == "hadsell" else -1.0 / d
        return tl.where((squared > 0) & (gap > 0), slope, 0.0)


@triton.jit
def negative_exponent(x, params, term):
    """The exponent of a negative: x itself, but for the circle.

    Of 2. The second factor is broken where x is, whatever the maximum makes of it.
    """
    if term.TERM == "circle":
        return params.slope * tl.maximum(x + params.offset, 0.0) * (x - params.offset) - params.floor
    else:
        return x


@triton.jit
def negative_exponent_grad(x, params, DIFFERENTIABLE_WEIGHTS: tl.constexpr):
    """Of the circle's: over slope, and for a constant [x + m]₊ unless DIFFERENTIABLE_WEIGHTS."""
    if DIFFERENTIABLE_WEIGHTS:
        return tl.where(x + params.offset > 0, 2.0 * x, 0.0)
    else:
        return tl.maximum(x + params.offset, 0.0)


@triton.jit
def leave_out_easy(f, x, threshold):
    """F where x is above the threshold, else 0; what is broken stays so."""
    return tl.where(x <= threshold, 0.0, f)


@triton.jit
def negative_value(x, b, shift, params, term):
    """What a negative adds to the two sums of one of its ends; the second one repeats the first where there is none.

    ``shift`` is u of that end, in the relative form.
    """
    if term.TERM == "hinge":
        f = hinge(x, params.slope, True, term.HINGE_FORM)
        return f, f
    elif term.TERM == "relative":
        f, _ = relative_value(x, b, shift, shift)
        return f, f
    elif term.TERM == "relative_raw":
        f = relative_raw_value(x, b)
        return f, f
    elif term.TERM == "importance":
        if term.SQUARE:
            e = tl.exp2(x)
            return e * e, e
        else:
            return tl.exp2(x * (1.0 + params.slope)), tl.exp2(x * params.slope)
    else:
        e = tl.exp2(negative_exponent(x, params, term))
        if term.TERM == "threshold":
            w = threshold_weight(x, params)
            return w * e, w
        elif term.SQUARE:
            return e * e, e
        else:
            return e, e


@triton.jit
def negative_values(x, b, shift, SHIFT, offs_n, params, term, SYMMETRIC: tl.constexpr):
    """What a pair adds to the two sums of its row, and to the first of its column: in all terms but one the same."""
    if (term.TERM == "relative") and SYMMETRIC:
        f, f_column = relative_value(x, b, shift[:, None], tl.load(SHIFT + offs_n)[None, :])
        return f, f, f_column
    else:
        f0, f1 = negative_value(x, b, shift[:, None], params, term)
        if term.MINED:  # never SYMMETRIC, because of the maximum
            return leave_out_easy(f0, x, shift[:, None]), x, f0
        else:
            return f0, f1, f0


@triton.jit
def online_term(x, y, b, m_i, params, term):
    """What a negative adds when the running maximum of its row is ``m_i``; ``y`` is its exponent."""
    e = tl.exp2(y - m_i[:, None])
    if term.TERM == "threshold":
        e = e * threshold_weight(x, params)
    elif term.TERM == "relative_raw":
        e = e * relative_weight(x, b)
    return e


@triton.jit
def negative_grad(
    x, b, row, column, params, term,
    ONLINE: tl.constexpr, DIFFERENTIABLE_WEIGHTS: tl.constexpr, ROW_END: tl.constexpr, COLUMN_END: tl.constexpr,
):  # fmt: skip
    """Gradient of s: the gradient of each end's sums times the derivative of what the pair added there.

    ``row`` and ``column`` are the `EndState` of the two ends; ROW_END, COLUMN_END: which of them count.
    """
    if term.TERM == "hinge":
        return hinge_grad(x, params.slope, True, term.HINGE_FORM) * (row.sum_grad[:, None] + column.sum_grad[None, :])
    elif term.TERM == "importance":
        if term.SQUARE:
            e = tl.exp2(x)
            if DIFFERENTIABLE_WEIGHTS:
                return e * (
                    2.0 * e * (row.sum_grad[:, None] + column.sum_grad[None, :])
                    + (row.second_sum_grad[:, None] + column.second_sum_grad[None, :])
                )
            else:
                return e * e * (row.sum_grad[:, None] + column.sum_grad[None, :])
        else:
            first = tl.exp2(x * (1.0 + params.slope)) * (row.sum_grad[:, None] + column.sum_grad[None, :])
            if DIFFERENTIABLE_WEIGHTS:
                first = first * (1.0 + params.slope) + tl.exp2(x * params.slope) * params.slope * (
                    row.second_sum_grad[:, None] + column.second_sum_grad[None, :]
                )
            return first
    else:
        y = negative_exponent(x, params, term)
        if ONLINE:
            if ROW_END and COLUMN_END:
                e = (
                    tl.exp2(y - row.lse[:, None]) * row.sum_grad[:, None]
                    + tl.exp2(y - column.lse[None, :]) * column.sum_grad[None, :]
                )
            elif ROW_END:  # an end that does not count has no log-sum-exp either
                e = tl.exp2(y - row.lse[:, None]) * row.sum_grad[:, None]
            else:
                e = tl.exp2(y - column.lse[None, :]) * column.sum_grad[None, :]
            if term.TERM == "relative_raw":
                e = e * relative_weight(x, b)
        elif term.TERM == "relative":
            f_row, f_column = relative_value(x, b, row.lse[:, None], column.lse[None, :])
            e = row.sum_grad[:, None] * f_row + column.sum_grad[None, :] * f_column
        elif term.TERM == "relative_raw":
            e = relative_raw_value(x, b) * (row.sum_grad[:, None] + column.sum_grad[None, :])
        elif term.MINED:
            row_grad = row.sum_grad[:, None]
            if ROW_END:
                row_grad = leave_out_easy(row_grad, x, row.lse[:, None])
            column_grad = column.sum_grad[None, :]
            if COLUMN_END:
                column_grad = leave_out_easy(column_grad, x, column.lse[None, :])
            e = tl.exp2(y) * (row_grad + column_grad)
        else:
            e = tl.exp2(y) * (row.sum_grad[:, None] + column.sum_grad[None, :])
        if term.TERM == "circle":
            e = e * negative_exponent_grad(x, params, DIFFERENTIABLE_WEIGHTS)
        if term.TERM == "threshold":
            w = threshold_weight(x, params)
            if DIFFERENTIABLE_WEIGHTS:
                w += threshold_weight_grad(x, params)
            e = e * w
        return e


@triton.jit
def log1p(u):
    """Log(1 + u), also for tiny u."""
    return tl.where(u < 1e-4, u - 0.5 * u * u, tl.log(1.0 + u))


@triton.jit
def softplus(y):
    """Log(1 + eʸ)."""
    return tl.where(y > 0, y, 0.0) + log1p(tl.exp(-tl.abs(y)))


@triton.jit
def sigmoid(y):
    """1 / (1 + e⁻ʸ), the derivative of `softplus`."""
    return 1.0 / (1.0 + tl.exp(-y))


@triton.jit
def debiased_log_denominator(x, log_negatives, log_count, bound, prior, DEBIASED: tl.constexpr):
    """Log G, G = (F − prior · count · eˣ) / (1 − prior), not below count · e^−bound; its derivatives for x and log F.

    F is the sum over negatives, ``bound`` that of x. As `mettle.losses.InfoNCE` has it.
    """
    if DEBIASED:
        log_share = x + log_count + tl.log(prior) - log_negatives
        left = log_share < 0
        share = tl.exp(tl.where(left, log_share, -1.0))
        rest = tl.log(1.0 - share) + log_negatives - tl.log(1.0 - prior)
        # What is broken stays so.
        floor = log_count - bound + 0.0 * x + tl.where(log_negatives == log_negatives, 0.0, log_negatives)
        free = left & (rest > floor)
        return (
            tl.where(free, rest, floor),
            tl.where(free, -share / (1.0 - share), 0.0),
            tl.where(free, 1.0 / (1.0 - share), 0.0),
        )
    else:
        return log_negatives + 0.0 * x, 0.0 * x, 1.0 + 0.0 * x


@triton.jit
def positive_weight(s, slope, threshold, floor):
    """Threshold's weight of a positive."""
    return 1.0 + tl.maximum((threshold - s) * slope, floor)


@triton.jit
def positive_weight_grad(s, slope, threshold, floor):
    """Its derivative."""
    return tl.where((threshold - s) * slope > floor, -slope, 0.0)


@triton.jit
def positive_exponent(s, margin, scale, ROW_LOSS: tl.constexpr):
    """The exponent of a positive in ``two_sided`` and ``circle``."""
    if ROW_LOSS == "circle":
        return -scale * tl.maximum(1.0 + margin - s, 0.0) * (s - 1.0 + margin)
    else:
        return -scale * (s - margin)


@triton.jit
def positive_exponent_grad(s, margin, scale, ROW_LOSS: tl.constexpr, DIFFERENTIABLE_WEIGHTS: tl.constexpr):
    """Its derivative; that of ``circle`` for a constant [1 + m − s]₊ unless DIFFERENTIABLE_WEIGHTS."""
    if ROW_LOSS == "circle":
        if DIFFERENTIABLE_WEIGHTS:
            return tl.where(1.0 + margin - s > 0, -scale * (2.0 - 2.0 * s), 0.0)
        else:
            return -scale * tl.maximum(1.0 + margin - s, 0.0)
    else:
        return -scale + 0.0 * s


@triton.jit
def load_line(ROW_STATE, line, offs, padded, COLUMN: tl.constexpr):
    """One line of the row state along the rows of a tile, or along its columns."""
    x = tl.load(ROW_STATE + line * padded + offs)
    return x[None, :] if COLUMN else x[:, None]


@triton.jit
def positive_grad(
    s, x, w, dw, ROW_STATE, offs, padded, params,
    COLUMN: tl.constexpr, DIFFERENTIABLE_WEIGHTS: tl.constexpr, ROW_LOSS: tl.constexpr, NUMERATOR_ONLY: tl.constexpr,
    DEBIASED: tl.constexpr, HINGE_FORM: tl.constexpr,
):  # fmt: skip
    """Gradient of s from the value of one end of a positive pair; COLUMN: the ends run along the columns.

    The values are those of `forward.positives_forward`.
    """
    repel = load_line(ROW_STATE, REPEL, offs, padded, COLUMN)
    attract = load_line(ROW_STATE, ATTRACT, offs, padded, COLUMN)
    log_denominator = load_line(ROW_STATE, LOG_DENOMINATOR, offs, padded, COLUMN)
    log_numerator = load_line(ROW_STATE, LOG_NUMERATOR, offs, padded, COLUMN)
    weight_offset = load_line(ROW_STATE, WEIGHT_OFFSET, offs, padded, COLUMN)
    if ROW_LOSS == "npair":
        return -attract + 0.0 * s
    elif ROW_LOSS == "contrastive":
        return attract * hinge_grad(s, params.margin, False, HINGE_FORM)
    elif (ROW_LOSS == "two_sided") or (ROW_LOSS == "circle"):
        y = positive_exponent(s, params.margin, params.scale, ROW_LOSS)
        share = attract * tl.exp(tl.minimum(y - log_numerator, 80.0))
        g = share * w * positive_exponent_grad(s, params.margin, params.scale, ROW_LOSS, DIFFERENTIABLE_WEIGHTS)
        if DIFFERENTIABLE_WEIGHTS and ROW_LOSS == "two_sided":
            g += share * dw
        return g
    elif ROW_LOSS == "infonce":
        log_g, dx, _ = debiased_log_denominator(x, log_denominator, log_numerator, params.bound, params.prior, DEBIASED)
        alone = log_denominator == -float("inf")
        g = params.inv_t * attract * w * sigmoid(log_g - x) * (dx - 1.0)
        if DIFFERENTIABLE_WEIGHTS:
            g += dw * attract * (softplus(log_g - x) - weight_offset)
        return tl.where(alone, 0.0, g)
    else:
        push = repel * tl.exp(tl.minimum(x - log_denominator, 80.0))
        pull = attract + 0.0 * x
        if ROW_LOSS == "supcon_in":
            pull = attract * tl.exp(tl.minimum(x - log_numerator, 80.0))
        g = params.inv_t * ((push if NUMERATOR_ONLY else push * w) - pull * w)
        if DIFFERENTIABLE_WEIGHTS:
            if ROW_LOSS == "supcon_out":
                g += dw * attract * (weight_offset - x)
            else:
                g += dw * (attract * weight_offset - pull)
            if not NUMERATOR_ONLY:
                g += dw * push
        return g
