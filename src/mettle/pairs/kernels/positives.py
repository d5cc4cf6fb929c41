# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""The positives, in float32: few, so they can be exact. They also end each row, because by then all is known.

Forward writes one value per anchor and a table of row coefficients, (8, padded):

| line | holds |
|---|---|
| 0, 1 | dL/d(sum) of the two sums over negatives |
| 2, 3 | q, r: how strongly positives repel through the denominator and attract |
| 4 | log-sum-exp of the negatives in base 2, or the shift of the relative form |
| 5, 6, 7 | what a positive pair is compared with on the way back |

Lines 0 to 3 are proportional to the gradient of the row's value.
"""

import triton
import triton.language as tl

from mettle.pairs.kernels.pair_terms import against, pull, pulls, sigmoid, softplus
from mettle.pairs.kernels.primitives import block
from mettle.pairs.kernels.row_sums import log_sum, plain_sum

NEVER = tl.constexpr(1e30)  # a log-sum-exp that leaves nothing: for rows that send no gradient


@triton.jit
def similar(
    Z, C, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Similarities of float32 rows."""
    s = tl.zeros((ROWS, COLUMNS), tl.float32)
    for c in range(0, WIDTH, BK):
        a = block(Z, row, c, ROWS, BK, WIDTH, False)
        b = block(C, column, c, COLUMNS, BK, WIDTH, False)
        s = tl.dot(a, tl.trans(b), s, input_precision=PRECISION)
    return s


@triton.jit
def near_forward(
    Z, C, LO, HI, PARTIAL, SHIFT, ORDER, VALUES, DEFINED, TABLE, SUMS, n, m, padded, splits,
    t, ceiling, slope, knee, least, scale, prior, margin,
    WIDTH: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    FINISH: tl.constexpr, FAR: tl.constexpr, SELF: tl.constexpr, ONLINE: tl.constexpr, WEIGHTED: tl.constexpr,
    NUMERATOR: tl.constexpr, BY: tl.constexpr, MEAN_ALL: tl.constexpr, PRIOR: tl.constexpr, COUNT: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Sums over the positives of a row block, then the value of each row and its coefficients."""
    row = tl.program_id(0) * BR
    rows = row + tl.arange(0, BR)
    real = rows < n
    lo = tl.load(LO + rows)
    hi = tl.load(HI + rows)
    positives = (hi - lo).to(tl.float32)
    if SELF:
        positives = positives - 1.0
    negatives = m - (hi - lo).to(tl.float32)

    # What the negatives came to. Where there are none, far is -inf.
    if ONLINE:
        u = log_sum(PARTIAL, rows, padded, splits, BR)
        far = u * 0.6931471805599453
        total = tl.full((BR,), 1.0, tl.float32)
        second = total
    else:
        u = tl.zeros((BR,), tl.float32)
        total = plain_sum(PARTIAL, rows, padded, splits, 0, BR)
        second = total
        far = tl.log(total)
        if FAR == "tilt":
            second = plain_sum(PARTIAL, rows, padded, splits, 1, BR)
            far = tl.log(total) + tl.log(negatives) - tl.log(second)
            far = tl.where(negatives == 0, -float("inf"), far)
        if FAR == "relative":
            u = tl.load(SHIFT + rows)
    count = tl.log(tl.where(negatives > 0, negatives, 1.0))
    if COUNT:
        second = plain_sum(PARTIAL, rows, padded, splits, 1, BR)
        count = tl.log(tl.where(second == 0, 1.0, second))

    weight = tl.zeros((BR,), tl.float32)
    top = tl.full((BR,), -float("inf"), tl.float32)
    near = tl.zeros((BR,), tl.float32)
    attract = tl.zeros((BR,), tl.float32)
    sent = tl.zeros((BR,), tl.float32)
    begin = tl.load(LO + row) // BC * BC
    end = tl.load(HI + tl.minimum(row + BR, n) - 1, mask=row < n, other=0)  # none for a block of padding
    for column in range(begin, end, BC):
        s = similar(Z, C, row, column, BR, BC, WIDTH, BK, PRECISION)
        columns = column + tl.arange(0, BC)
        keep = (columns[None, :] >= lo[:, None]) & (columns[None, :] < hi[:, None])
        if SELF:
            keep = keep & (columns[None, :] != rows[:, None])
        x = s * t
        w = tl.full((BR, BC), 1.0, tl.float32)
        if WEIGHTED:
            w = 1.0 + tl.maximum((knee - s) * slope, least)
        weight += tl.sum(tl.where(keep, w, 0.0), 1)
        if FINISH == "npair":
            attract += tl.sum(tl.where(keep, x, 0.0), 1)
        elif FINISH == "contrastive":
            attract += tl.sum(tl.where(keep, pull(s, margin, SHAPE), 0.0), 1)
        elif FINISH == "infonce":
            log_g, _, df, _ = against(x, far[:, None], count[:, None], ceiling, prior, PRIOR)
            attract += tl.sum(tl.where(keep, w * softplus(log_g - x), 0.0), 1)
            sent += tl.sum(tl.where(keep, w * sigmoid(log_g - x) * df, 0.0), 1)
        else:
            new = tl.maximum(top, tl.max(tl.where(keep, x, -float("inf")), 1))
            safe = tl.where(new == -float("inf"), 0.0, new)
            e = tl.where(keep, tl.exp(x - safe[:, None]), 0.0)
            old = tl.exp(top - safe)
            near = near * old + (tl.sum(e, 1) if NUMERATOR else tl.sum(e * w, 1))
            if FINISH == "supcon out":
                attract += tl.sum(tl.where(keep, w * x, 0.0), 1)
            else:
                attract = attract * old + tl.sum(e * w, 1)
            top = new

    some = real & (positives > 0)
    some_far = negatives > 0
    by_weight = tl.where(weight == 0, 1.0, weight)
    q = tl.zeros((BR,), tl.float32)
    r = q
    a1 = q
    a2 = q
    a3 = q
    if (FINISH == "supcon out") or (FINISH == "supcon in"):
        top = tl.where(some, top, 0.0)
        near = top + tl.log(tl.where(some, near, 1.0))
        most = tl.maximum(near, far)
        away = most + tl.log(tl.exp(near - most) + tl.exp(far - most))
        divisor = tl.full((BR,), 1.0, tl.float32)
        if BY == "count":
            divisor = tl.where(some, positives, 1.0)
        if BY == "weight":
            divisor = by_weight
        a1 = away
        if FINISH == "supcon out":
            raw = (weight * away - attract) / divisor
            q = weight / divisor * scale
            r = scale / divisor
            a3 = away
            if BY == "weight":
                a3 = away - raw
        else:
            a2 = top + tl.log(tl.where(some, attract, 1.0))
            raw = away - a2 + tl.log(divisor)
            q = tl.full((BR,), 1.0, tl.float32) * scale
            r = q
            if BY == "weight":
                a3 = 1.0 / divisor
        value = raw * scale
        g = q * tl.exp(far - away)
    elif FINISH == "infonce":
        r = 1.0 / by_weight
        value = tl.where(far == -float("inf"), 0.0, attract * r)
        g = tl.where(far == -float("inf"), 0.0, sent * r)
        a1 = far
        a2 = count
        a3 = value
    elif FINISH == "npair":
        r = tl.where(far == -float("inf"), 0.0, sigmoid(far - attract))
        value = tl.where(far == -float("inf"), 0.0, softplus(far - attract))
        g = r
    else:
        r = 1.0 / tl.where(some, positives, 1.0)
        c = tl.where(some_far, 1.0 / tl.where(some_far, negatives, 1.0), 0.0)
        value = attract * r + total * c
        g = c * total

    c0 = tl.where(total == 0, 0.0, g / tl.where(total == 0, 1.0, total))
    c1 = tl.where(second == 0, 0.0, -g / tl.where(second == 0, 1.0, second))
    if FAR == "hinge":
        c0 = c
    if ONLINE:
        u = tl.where(some & (far != -float("inf")), u, NEVER)
    value = tl.where(some, value, 0.0)
    counted = some
    if MEAN_ALL:
        counted = real
    to = tl.load(ORDER + rows, mask=real, other=0)
    tl.store(VALUES + to, value, mask=real)
    tl.store(DEFINED + to, counted, mask=real)
    tl.store(TABLE + rows, tl.where(some, c0, 0.0))
    tl.store(TABLE + padded + rows, tl.where(some, c1, 0.0))
    tl.store(TABLE + 2 * padded + rows, tl.where(some, q, 0.0))
    tl.store(TABLE + 3 * padded + rows, tl.where(some, r, 0.0))
    tl.store(TABLE + 4 * padded + rows, u)
    tl.store(TABLE + 5 * padded + rows, tl.where(some, a1, 0.0))
    tl.store(TABLE + 6 * padded + rows, tl.where(some, a2, 0.0))
    tl.store(TABLE + 7 * padded + rows, tl.where(some, a3, 0.0))
    at = SUMS + 3 * tl.program_id(0)
    tl.store(at, tl.sum(tl.where(counted, value, 0.0), 0))
    tl.store(at + 1, tl.sum(counted.to(tl.float32), 0))
    tl.store(at + 2, tl.max(tl.where(some, tl.abs(g), 0.0), 0))


@triton.jit
def attracted(
    s, x, w, dw, TABLE, at, padded, ceiling, prior, t, margin, VERTICAL: tl.constexpr, LIVE: tl.constexpr,
    FINISH: tl.constexpr, NUMERATOR: tl.constexpr, PRIOR: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Gradient of s from the value of one end of a positive pair; VERTICAL: the ends run along the columns."""
    if VERTICAL:
        q = tl.load(TABLE + 2 * padded + at)[None, :]
        r = tl.load(TABLE + 3 * padded + at)[None, :]
        a1 = tl.load(TABLE + 5 * padded + at)[None, :]
        a2 = tl.load(TABLE + 6 * padded + at)[None, :]
        a3 = tl.load(TABLE + 7 * padded + at)[None, :]
    else:
        q = tl.load(TABLE + 2 * padded + at)[:, None]
        r = tl.load(TABLE + 3 * padded + at)[:, None]
        a1 = tl.load(TABLE + 5 * padded + at)[:, None]
        a2 = tl.load(TABLE + 6 * padded + at)[:, None]
        a3 = tl.load(TABLE + 7 * padded + at)[:, None]
    if FINISH == "npair":
        return -r + 0.0 * s
    elif FINISH == "contrastive":
        return r * pulls(s, margin, SHAPE)
    elif FINISH == "infonce":
        log_g, dx, _, _ = against(x, a1, a2, ceiling, prior, PRIOR)
        alone = a1 == -float("inf")
        g = t * r * w * sigmoid(log_g - x) * (dx - 1.0)
        if LIVE:
            g += dw * r * (softplus(log_g - x) - a3)
        return tl.where(alone, 0.0, g)
    else:
        repel = q * tl.exp(tl.minimum(x - a1, 80.0))
        draw = r + 0.0 * x
        if FINISH == "supcon in":
            draw = r * tl.exp(tl.minimum(x - a2, 80.0))
        g = t * ((repel if NUMERATOR else repel * w) - draw * w)
        if LIVE:
            if FINISH == "supcon out":
                g += dw * r * (a3 - x)
            else:
                g += dw * (r * a3 - draw)
            if not NUMERATOR:
                g += dw * repel
        return g


@triton.jit
def near_backward(
    Z, C, LO, HI, ROW, COLUMN, G, n, m, padded, columns_padded, splits,
    t, ceiling, slope, knee, least, prior, margin,
    WIDTH: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    FINISH: tl.constexpr, SELF: tl.constexpr, WEIGHTED: tl.constexpr, LIVE: tl.constexpr, NUMERATOR: tl.constexpr,
    PRIOR: tl.constexpr, SHAPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of rows and of their columns BK: what the negatives sent, plus the positives; in place."""
    row = tl.program_id(0) * BR
    start = tl.program_id(1) * BK
    rows = row + tl.arange(0, BR)
    lo = tl.load(LO + rows)
    hi = tl.load(HI + rows)
    c = start + tl.arange(0, BK)
    at = rows.to(tl.int64)[:, None] * WIDTH + c[None, :]
    acc = tl.zeros((BR, BK), tl.float32)
    slab = padded.to(tl.int64) * WIDTH
    for p in range(splits):
        acc += tl.load(G + p * slab + at)
    acc = acc * t
    begin = tl.load(LO + row) // BC * BC
    end = tl.load(HI + tl.minimum(row + BR, n) - 1)
    for column in range(begin, end, BC):
        s = similar(Z, C, row, column, BR, BC, WIDTH, BK, PRECISION)
        columns = column + tl.arange(0, BC)
        keep = (columns[None, :] >= lo[:, None]) & (columns[None, :] < hi[:, None])
        if SELF:
            keep = keep & (columns[None, :] != rows[:, None])
        w = tl.full((BR, BC), 1.0, tl.float32)
        dw = w
        if WEIGHTED:
            w = 1.0 + tl.maximum((knee - s) * slope, least)
            dw = tl.where((knee - s) * slope > least, -slope, 0.0)
        h = tl.zeros((BR, BC), tl.float32)
        if ROWS:
            h += attracted(s, s * t, w, dw, ROW, rows, padded, ceiling, prior, t, margin,
                           False, LIVE and WEIGHTED, FINISH, NUMERATOR, PRIOR, SHAPE)  # fmt: skip
        if COLUMNS:
            h += attracted(s, s * t, w, dw, COLUMN, columns, columns_padded, ceiling, prior, t, margin,
                           True, LIVE and WEIGHTED, FINISH, NUMERATOR, PRIOR, SHAPE)  # fmt: skip
        b = block(C, column, start, BC, BK, WIDTH, False)
        acc = tl.dot(tl.where(keep, h, 0.0), b, acc, input_precision=PRECISION)
    tl.store(G + at, acc)
