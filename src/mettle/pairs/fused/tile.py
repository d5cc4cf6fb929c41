# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""What happens on one tile: the product of two blocks of rows, and what a negative adds to its row.

s a similarity, k = log₂e / temperature, e = 2^(k·s) = e^{s/temperature}: one exponential per pair and no maximum to
subtract, because cosines stay within ±1 and float32 holds e^±64. Derivatives are with respect to s, times the
temperature.
"""

import triton
import triton.language as tl


@triton.jit
def block(X, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """ROWS × COLUMNS entries of a padded matrix."""
    if TMA:
        return X.load([row, column])
    else:
        # One wide offset for the block; those inside it are narrow and the same for every block.
        r = tl.arange(0, ROWS)
        c = tl.arange(0, COLUMNS)
        start = (tl.full((), 0, tl.int64) + row) * WIDTH + column
        return tl.load(X + start + (r[:, None] * WIDTH + c[None, :]))


@triton.jit
def held(
    Q, QL, row,
    BM: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The row block itself and its lower half, where one block spans the width; else nothing worth holding."""
    if BK == WIDTH:
        q = block(Q, row, 0, BM, BK, WIDTH, TMA)
        ql = q
        if MODE == "split":
            ql = block(QL, row, 0, BM, BK, WIDTH, TMA)
        return q, ql
    else:
        nothing = tl.zeros((1,), tl.float32)
        return nothing, nothing


@triton.jit
def times(a, al, b, bl, acc, MODE: tl.constexpr):
    """Acc + a·bᵀ; two halves each multiply three times, the product of the lower halves is beyond float32."""
    if MODE == "split":
        acc = tl.dot(al, tl.trans(b), acc)
        acc = tl.dot(a, tl.trans(bl), acc)
        return tl.dot(a, tl.trans(b), acc)
    elif MODE == "half":
        return tl.dot(a, tl.trans(b), acc)
    else:
        return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


@triton.jit
def carry(h, b, bl, acc, MODE: tl.constexpr):
    """Acc + h·b."""
    if MODE == "split":
        high = h.to(tl.bfloat16)
        low = (h - high.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(low, b, acc)
        acc = tl.dot(high, bl, acc)
        return tl.dot(high, b, acc)
    elif MODE == "half":
        return tl.dot(h.to(tl.float16), b, acc)
    else:
        return tl.dot(h, b, acc, input_precision="ieee")


@triton.jit
def product(
    q, ql, Q, QL, K, KL, row, column,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, MODE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Similarities of BM rows and BN columns; the rows are held in ``q`` where one block spans the width."""
    s = tl.zeros((BM, BN), tl.float32)
    if BK == WIDTH:
        b = block(K, column, 0, BN, BK, WIDTH, TMA)
        bl = b
        if MODE == "split":
            bl = block(KL, column, 0, BN, BK, WIDTH, TMA)
        s = times(q, ql, b, bl, s, MODE)
    else:
        for c in range(0, WIDTH, BK):
            a = block(Q, row, c, BM, BK, WIDTH, TMA)
            b = block(K, column, c, BN, BK, WIDTH, TMA)
            al = a
            bl = b
            if MODE == "split":
                al = block(QL, row, c, BM, BK, WIDTH, TMA)
                bl = block(KL, column, c, BN, BK, WIDTH, TMA)
            s = times(a, al, b, bl, s, MODE)
    return s


@triton.jit
def weight(s, slope, knee, least):
    """Threshold's weight of a negative."""
    return 1.0 + tl.maximum((s - knee) * slope, least)


@triton.jit
def steeper(s, slope, knee, least, live):
    """Its derivative, times ``live``."""
    return tl.where((s - knee) * slope > least, slope * live, 0.0)


@triton.jit
def odds(s, b, k):
    """e^{(b − s)/temperature}: how much more alike the other encoder finds a pair."""
    return tl.exp2((b - s) * k)


@triton.jit
def doubt(s, b, shift, k):
    """1 + odds · shift, kept where the product of two of them is a float32 number: 1e-18 or 0, a weight is the same."""
    return tl.minimum(1.0 + odds(s, b, k) * shift, 1e18, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def inverse(x):
    """1 / x of positive numbers, by one instruction and a product where a division takes ten."""
    y = tl.rsqrt(x)
    return y * y


@triton.jit
def push(s, margin, SHAPE: tl.constexpr):
    """The hinge of a negative on its distance d = √(2 − 2s)."""
    squared = tl.maximum(2.0 - 2.0 * s, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if SHAPE == "squared":
        return tl.maximum(margin * margin - squared, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        miss = tl.maximum(margin - tl.sqrt(squared), 0.0, propagate_nan=tl.PropagateNan.ALL)
        return miss * miss if SHAPE == "hadsell" else miss


@triton.jit
def pushed(s, margin, SHAPE: tl.constexpr):
    """Its derivative: d' = −1/d, 0 where two points coincide."""
    squared = 2.0 - 2.0 * s
    if SHAPE == "squared":
        return tl.where((squared > 0) & (squared < margin * margin), 2.0, 0.0)
    else:
        d = tl.sqrt(tl.where(squared > 0, squared, 1.0))
        miss = margin - d
        slope = 2.0 * miss / d if SHAPE == "hadsell" else 1.0 / d
        return tl.where((squared > 0) & (miss > 0), slope, 0.0)


@triton.jit
def added(
    s, b, shift, k, p0, p1, p2,
    FAR: tl.constexpr, SQUARE: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """What a negative adds to the two sums of one of its ends; the second one repeats the first where there is none.

    ``shift`` belongs to that end, in the relative form.
    """
    if FAR == "hinge":
        f = push(s, p0, SHAPE)
        return f, f
    elif FAR == "tilt":
        x = s * k
        if SQUARE:  # beta = 1
            e = tl.exp2(x)
            return e * e, e
        else:
            return tl.exp2(x * (1.0 + p0)), tl.exp2(x * p0)
    else:
        e = tl.exp2(s * k)
        if FAR == "threshold":
            w = weight(s, p0, p1, p2)
            return w * e, w
        elif FAR == "relative":
            return e + e * inverse(doubt(s, b, shift, k)), e
        elif FAR == "raw":
            return e * (1.0 + inverse(doubt(s, b, 1.0, k))), e
        else:
            return e, e


@triton.jit
def relative(s, b, ui, uj, k):
    """What a pair adds to each of its ends in the relative form, with one inverse for both."""
    e = tl.exp2(s * k)
    i = doubt(s, b, ui, k)
    j = doubt(s, b, uj, k)
    part = e * inverse(i * j)
    return e + part * j, e + part * i


@triton.jit
def pulled(
    s, b, c0i, c1i, ui, c0j, c1j, uj, k, p0, p1, p2, live,
    FAR: tl.constexpr, SQUARE: tl.constexpr, SHAPE: tl.constexpr, ONLINE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradient of s: each end's coefficients times the derivative of what the pair added there.

    ``u`` is the end's log-sum-exp (base 2) with a running maximum, its shift in the relative form.
    """
    if FAR == "hinge":
        return pushed(s, p0, SHAPE) * (c0i[:, None] + c0j[None, :])
    elif FAR == "tilt":
        x = s * k
        if SQUARE:
            e = tl.exp2(x)
            first = e * (1.0 + live)
            return e * (first * (c0i[:, None] + c0j[None, :]) + live * (c1i[:, None] + c1j[None, :]))
        else:
            first = tl.exp2(x * (1.0 + p0)) * (1.0 + p0 * live)
            second = tl.exp2(x * p0) * (p0 * live)
            return first * (c0i[:, None] + c0j[None, :]) + second * (c1i[:, None] + c1j[None, :])
    else:
        if ONLINE:
            x = s * k
            if ROWS and COLUMNS:
                e = tl.exp2(x - ui[:, None]) * c0i[:, None] + tl.exp2(x - uj[None, :]) * c0j[None, :]
            elif ROWS:  # an end that does not count has no log-sum-exp either
                e = tl.exp2(x - ui[:, None]) * c0i[:, None]
            else:
                e = tl.exp2(x - uj[None, :]) * c0j[None, :]
        elif FAR == "relative":
            i, j = relative(s, b, ui[:, None], uj[None, :], k)
            e = c0i[:, None] * i + c0j[None, :] * j
        else:
            e = tl.exp2(s * k) * (c0i[:, None] + c0j[None, :])
        if FAR == "threshold":
            e = e * (weight(s, p0, p1, p2) + steeper(s, p0, p1, p2, live))
        elif FAR == "raw":
            e = e * (1.0 + inverse(doubt(s, b, 1.0, k)))
        return e
