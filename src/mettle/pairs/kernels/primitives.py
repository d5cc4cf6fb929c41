# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""What happens on one tile: the product of two blocks of rows, and what a negative adds to its row.

The rows carry a factor each, so that their products are x = s · log₂e / temperature, s the similarity: 2^x =
e^{s/temperature} is one exponential per pair and nothing else, with no maximum to subtract, because cosines stay within
±1 and float32 holds e^±64. (The hinge has no temperature: there x = s.) Derivatives are those for s / temperature.
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
    zero=0.0, FIRM: tl.constexpr = False,
):  # fmt: skip
    """The row block itself and its lower half, where one block spans the width; else nothing worth holding.

    FIRM: in registers. What a product gets from a load it reads from shared memory, again and again, which takes as
    long as the product itself where columns are few; what it gets from a sum, even with ``zero``, stays where it is.
    """
    if BK == WIDTH:
        q = block(Q, row, 0, BM, BK, WIDTH, TMA)
        nothing = (tl.zeros((1, 1), tl.float32) + zero).to(q.dtype)
        if FIRM:
            q = q + nothing
        ql = q
        if MODE == "split":
            ql = block(QL, row, 0, BM, BK, WIDTH, TMA)
            if FIRM:
                ql = ql + nothing
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
def weight(x, p0, p1, p2):
    """Threshold's weight of a negative, a line that ends below."""
    return tl.maximum(x * p0 + p1, p2)


@triton.jit
def steeper(x, p0, p3):
    """Its derivative, which begins at p3: told from x itself, because no rounding may decide about a jump."""
    return tl.where((x - p3) * p0 > 0, p0 * 1.4426950408889634, 0.0)


@triton.jit
def relative(x, b, ui, uj):
    """What a pair adds to each of its ends in the relative form, e + e² / (e + e_b · u), with one inverse for both.

    u is at most √Σe² / e_b: no product leaves float32.
    """
    e = tl.exp2(x)
    other = tl.exp2(b)
    i = e + other * ui
    j = e + other * uj
    part = e * tl.rsqrt(i * j)  # one instruction and a product, where a division takes ten
    part = part * part
    return e + part * j, e + part * i


@triton.jit
def leaning(x, b):
    """What a pair weighs in the raw form, where 2^x itself may be too large: 1 + 1 / (1 + e_b / e)."""
    return 1.0 + 1.0 / (1.0 + tl.exp2(b - x))


@triton.jit
def raw(x, b):
    """The same for both ends, without u."""
    e = tl.exp2(x)
    part = e * tl.rsqrt(e + tl.exp2(b))
    return e + part * part


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
    x, b, shift, p0, p1, p2,
    FAR: tl.constexpr, SQUARE: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """What a negative adds to the two sums of one of its ends; the second one repeats the first where there is none.

    ``shift`` belongs to that end, in the relative form. SQUARE: a plain pair adds e², a tilt has beta = 1.
    """
    if FAR == "hinge":
        f = push(x, p0, SHAPE)
        return f, f
    elif FAR == "relative":
        f, _ = relative(x, b, shift, shift)
        return f, f
    elif FAR == "raw":
        f = raw(x, b)
        return f, f
    elif FAR == "tilt":
        if SQUARE:
            e = tl.exp2(x)
            return e * e, e
        else:
            return tl.exp2(x * (1.0 + p0)), tl.exp2(x * p0)
    else:
        e = tl.exp2(x)
        if FAR == "threshold":
            w = weight(x, p0, p1, p2)
            return w * e, w
        elif SQUARE:
            return e * e, e
        else:
            return e, e


@triton.jit
def pulled(
    x, b, c0i, c1i, ui, c0j, c1j, uj, p0, p1, p2, p3,
    FAR: tl.constexpr, SQUARE: tl.constexpr, SHAPE: tl.constexpr, ONLINE: tl.constexpr, LIVE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradient of s: each end's coefficients times the derivative of what the pair added there.

    ``u`` is the end's log-sum-exp (base 2) with a running maximum, its shift in the relative form. LIVE: gradient
    flows through the weights too.
    """
    if FAR == "hinge":
        return pushed(x, p0, SHAPE) * (c0i[:, None] + c0j[None, :])
    elif FAR == "tilt":
        if SQUARE:
            e = tl.exp2(x)
            if LIVE:
                return e * (2.0 * e * (c0i[:, None] + c0j[None, :]) + (c1i[:, None] + c1j[None, :]))
            else:
                return e * e * (c0i[:, None] + c0j[None, :])
        else:
            first = tl.exp2(x * (1.0 + p0)) * (c0i[:, None] + c0j[None, :])
            if LIVE:
                first = first * (1.0 + p0) + tl.exp2(x * p0) * p0 * (c1i[:, None] + c1j[None, :])
            return first
    else:
        if ONLINE:
            if ROWS and COLUMNS:
                e = tl.exp2(x - ui[:, None]) * c0i[:, None] + tl.exp2(x - uj[None, :]) * c0j[None, :]
            elif ROWS:  # an end that does not count has no log-sum-exp either
                e = tl.exp2(x - ui[:, None]) * c0i[:, None]
            else:
                e = tl.exp2(x - uj[None, :]) * c0j[None, :]
            if FAR == "raw":
                e = e * leaning(x, b)
        elif FAR == "relative":
            i, j = relative(x, b, ui[:, None], uj[None, :])
            e = c0i[:, None] * i + c0j[None, :] * j
        elif FAR == "raw":
            e = raw(x, b) * (c0i[:, None] + c0j[None, :])
        else:
            e = tl.exp2(x) * (c0i[:, None] + c0j[None, :])
        if FAR == "threshold":
            w = weight(x, p0, p1, p2)
            if LIVE:
                w += steeper(x, p0, p3)
            e = e * w
        return e
