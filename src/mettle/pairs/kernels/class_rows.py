# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""What happens once per sample or per class around the tiles of samples x classes: lengths, own classes, row ends."""

import triton
import triton.language as tl

from mettle.pairs.kernels.row_sums import log_sum, plain_sum


@triton.jit
def own_kernel(
    Z, W, LABELS, ORDER, TARGET, INVERSE, AT, n, d, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of a block of samples: the cosine to the own class, 1 / the length of its vector, and which class that is."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    source = tl.load(ORDER + row, mask=real, other=0)
    at = tl.load(LABELS + source, mask=real, other=-1).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = real[:, None] & (c < d)[None, :]
    z = tl.load(Z + row.to(tl.int64)[:, None] * WIDTH + c[None, :], mask=inside, other=0.0)
    w = tl.load(W + at[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    w, inverse = directed(w)
    tl.store(TARGET + source, tl.sum(z * w, 1), mask=real)
    tl.store(INVERSE + row, inverse)
    tl.store(AT + row, at)


@triton.jit
def directed(w):
    """Rows of length 1, zero where they have no direction, and 1 / their lengths; broken ones stay so."""
    size = tl.max(tl.abs(w), 1)
    none = size < 1e-30
    scaled = w / tl.where(none, 1.0, size)[:, None]
    length = tl.where(none, 1.0, tl.sqrt(tl.sum(scaled * scaled, 1)))
    return tl.where(none[:, None], 0.0, scaled / length[:, None]) + (w - w), tl.where(none, 0.0, 1.0 / (size * length))


@triton.jit
def ranges_kernel(AT, LO, HI, chunk, padded, SIZE: tl.constexpr):
    """The own class of each sample as a range of columns in each chunk of classes, most of them empty."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    k = tl.program_id(1)
    at = tl.load(AT + row) - k.to(tl.int64) * chunk
    to = k.to(tl.int64) * padded + row
    tl.store(LO + to, tl.minimum(tl.maximum(at, 0), chunk).to(tl.int32))
    tl.store(HI + to, tl.minimum(tl.maximum(at + 1, 0), chunk).to(tl.int32))


@triton.jit
def finish_kernel(PARTIAL, ORDER, LSE, FAR, n, padded, splits, ONLINE: tl.constexpr, SIZE: tl.constexpr):
    """Log-sum-exp over the other classes, -inf where there are none."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    real = row < n
    if ONLINE:
        lse = log_sum(PARTIAL, row, padded, splits, SIZE) * 0.6931471805599453
    else:
        lse = tl.log(plain_sum(PARTIAL, row, padded, splits, 0, SIZE))
    tl.store(LSE + row, lse)
    tl.store(FAR + tl.load(ORDER + row, mask=real, other=0), lse, mask=real)


@triton.jit
def weights_kernel(G, LSE, ORDER, TABLE, STATS, n, padded, samples, classes, ONLINE: tl.constexpr, SIZE: tl.constexpr):
    """What multiplies each row of probabilities; one scale for all of h, and what undoes it. One program."""
    most = tl.zeros((SIZE,), tl.float32)
    for start in range(0, padded, SIZE):
        row = start + tl.arange(0, SIZE)
        there = row < padded
        lse = tl.load(LSE + row, mask=there, other=-float("inf"))
        source = tl.load(ORDER + row, mask=row < n, other=0)
        g = tl.load(G + source, mask=row < n, other=0.0)
        alone = (row >= n) | (lse == -float("inf"))
        g = tl.where(alone, 0.0, g)
        lse = tl.where(alone, 0.0, lse)
        most = tl.maximum(most, tl.abs(g))
        tl.store(TABLE + row, g if ONLINE else g * tl.exp(-lse), mask=there)
        tl.store(TABLE + 4 * padded + row, tl.where(alone, 1e30, lse * 1.4426950408889634), mask=there)
    largest = tl.max(most, 0)
    largest = tl.where(largest > 0, largest, 1.0)
    tl.store(STATS, largest * samples)
    tl.store(STATS + 1, largest * classes)
    tl.store(STATS + 2, largest)


@triton.jit
def attract_kernel(
    Z, W, AT, INVERSE, ORDER, G, STATS, DZ, PULL, n, d, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The own class's part: onto the samples' gradient, in place, and PULL (n, d) for the class vectors."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    source = tl.load(ORDER + row, mask=real, other=0).to(tl.int64)
    g = tl.load(G + source, mask=real, other=0.0)[:, None]
    at = tl.load(AT + row, mask=real, other=0)
    inverse = tl.load(INVERSE + row, mask=real, other=0.0)[:, None]
    c = tl.arange(0, BLOCK)
    inside = real[:, None] & (c < d)[None, :]
    here = row.to(tl.int64)[:, None] * WIDTH + c[None, :]
    z = tl.load(Z + here, mask=inside, other=0.0)
    own = tl.load(W + at[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32) * inverse
    away = tl.load(DZ + here, mask=inside, other=0.0) * tl.load(STATS)
    tl.store(DZ + here, away + own * g, mask=inside)
    across = (z - own * tl.sum(own * z, 1)[:, None]) * (inverse * g)
    tl.store(PULL + source[:, None] * d + c[None, :], across.to(PULL.dtype.element_ty), mask=inside)


@triton.jit
def class_rows_kernel(
    W, HIGH, LOW, INVERSE, n, d, stride, by,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Normalise and split a block of class vectors."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (row < n)[:, None] & (c < d)[None, :]
    w = tl.load(W + row.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    w, inverse = directed(w)
    tl.store(INVERSE + row, inverse)
    at = row.to(tl.int64)[:, None] * WIDTH + c[None, :]
    put = (c < WIDTH)[None, :] & (row >= 0)[:, None]
    w = w * by
    high = w.to(HIGH.dtype.element_ty)
    tl.store(HIGH + at, high, mask=put)
    if MODE == "split":
        tl.store(LOW + at, (w - high.to(tl.float32)).to(tl.bfloat16), mask=put)


@triton.jit
def class_project_kernel(
    G, W, INVERSE, STATS, OUT, n, d, stride, stride_w, stride_out, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Take away what would only change a class vector's length."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (row < n)[:, None] & (c < d)[None, :]
    far = row.to(tl.int64)[:, None]
    g = tl.load(G + far * stride + c[None, :], mask=inside, other=0.0)
    inverse = tl.load(INVERSE + row, mask=row < n, other=0.0)[:, None]
    w = tl.load(W + far * stride_w + c[None, :], mask=inside, other=0.0).to(tl.float32) * inverse
    g = (g - w * tl.sum(w * g, 1)[:, None]) * (inverse * tl.load(STATS + 1))
    tl.store(OUT + far * stride_out + c[None, :], g.to(OUT.dtype.element_ty), mask=inside)
