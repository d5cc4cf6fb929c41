# pyright: reportArgumentType=false
"""What every kernel over pairs is made of: loads, products in three precisions, the tile iterator, sums.

Matrices are padded with zeros to whole blocks, so no load needs a mask. PRECISION says what operands of products are:

| PRECISION | operands | product |
|---|---|---|
| ``fp16`` | float16 | one |
| ``bf16x3`` | bfloat16 ``hi`` + ``lo`` | three, good to float32 |
| ``ieee`` | float32 | one, in the interpreter |

Rows and columns are sorted by label, so the positives of row i are the columns POS_BEGIN[i] <= j < POS_END[i], and a
block of rows has its positives in one range of columns. Tiles of that range run masked, all others run bare.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# RowState: (9, padded) float32, what the backward pass must know of each anchor. The first four lines are proportional
# to the gradient of the anchor's value; the last four are what a positive pair is compared with:
#
# | line | supcon_out | supcon_in | infonce | two_sided, circle |
# |---|---|---|---|---|
# | LOG_DENOMINATOR | log D | log D | log F | |
# | LOG_NUMERATOR | | log of the weighted sum over positives | log of the count of negatives | the same sum's log |
# | WEIGHT_OFFSET | log D − value, or log D | 1 / divisor, or 0 | value | |
SUM_GRAD = tl.constexpr(0)  # dL/d(first sum over negatives)
SECOND_SUM_GRAD = tl.constexpr(1)  # dL/d(second sum over negatives)
REPEL = tl.constexpr(2)  # how strongly positives repel, through the denominator
ATTRACT = tl.constexpr(3)  # how strongly positives attract
LSE = tl.constexpr(4)  # log-sum-exp of negatives in base 2; or the shift of the relative term; or a mining threshold
LOG_DENOMINATOR = tl.constexpr(5)
LOG_NUMERATOR = tl.constexpr(6)
WEIGHT_OFFSET = tl.constexpr(7)
POSITIVE_LIMIT = tl.constexpr(8)  # of mined pairs: the similarity from which positives are left out
ROW_STATE_LINES = 9
GRADIENT_LINES = 4

LSE_DISABLED = tl.constexpr(1e30)  # a log-sum-exp that leaves nothing: for rows that send no gradient


class Operand(NamedTuple):
    """One encoder's side of a product: pointers or tensor descriptors, or a block that was loaded from them.

    ``lo`` repeats ``hi`` unless PRECISION is bf16x3.
    """

    hi: tl.tensor
    lo: tl.tensor


class PairOperands(NamedTuple):
    """Both sides of the comparison, of both encoders, in memory."""

    rows: Operand
    columns: Operand
    rows2: Operand
    columns2: Operand


class Anchors(NamedTuple):
    """A block of rows: where it begins, its rows, their positives, and their operands of both encoders."""

    row: tl.tensor
    offs_m: tl.tensor
    pos_begin: tl.tensor
    pos_end: tl.tensor
    q: Operand
    q2: Operand


class TileRange(NamedTuple):
    """Column tiles of one row block: masked are those from ``begin`` to ``end`` and ``ragged`` (0 or 1) at the end."""

    first: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    ragged: tl.tensor
    total: tl.tensor


@triton.jit
def read_number(x):
    """A run-time number: given itself, or where it lies on the device, so that nobody waits for it."""
    if isinstance(x, tl.tensor):  # the interpreter hands on floats as they are
        if x.dtype.is_ptr():
            return tl.load(x).to(tl.float32)
        else:
            return x
    else:
        return x


@triton.jit
def load_block(
    X, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, USE_TMA: tl.constexpr
):
    """ROWS × COLUMNS entries of a padded matrix of HEAD_DIM columns."""
    if USE_TMA:
        return X.load([row, column])
    else:
        # One wide offset for the block; those inside it are narrow and the same for every block.
        r = tl.arange(0, ROWS)
        c = tl.arange(0, COLUMNS)
        start = (tl.full((), 0, tl.int64) + row) * HEAD_DIM + column
        return tl.load(X + start + (r[:, None] * HEAD_DIM + c[None, :]))


@triton.jit
def load_rows(
    Q, row, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr, zero=0.0, ROWS_IN_REGISTERS: tl.constexpr = False,
):  # fmt: skip
    """The row block of an operand, where BLOCK_K spans HEAD_DIM; else nothing worth holding.

    ROWS_IN_REGISTERS: what a product gets from a load it reads from shared memory, again and again, which takes as
    long as the product itself where columns are few; what it gets from a sum, even with ``zero``, stays where it is.
    """
    if BLOCK_K == HEAD_DIM:
        hi = load_block(Q.hi, row, 0, BLOCK_M, BLOCK_K, HEAD_DIM, USE_TMA)
        nothing = (tl.zeros((1, 1), tl.float32) + zero).to(hi.dtype)
        if ROWS_IN_REGISTERS:
            hi = hi + nothing
        lo = hi
        if PRECISION == "bf16x3":
            lo = load_block(Q.lo, row, 0, BLOCK_M, BLOCK_K, HEAD_DIM, USE_TMA)
            if ROWS_IN_REGISTERS:
                lo = lo + nothing
        return Operand(hi, lo)
    else:
        nothing = tl.zeros((1,), tl.float32)
        return Operand(nothing, nothing)


@triton.jit
def dot_transposed(a, b, acc, PRECISION: tl.constexpr):
    """Acc + a·bᵀ for operands a (m, k) and b (n, k); the product of the two ``lo`` is beyond float32."""
    if PRECISION == "bf16x3":
        acc = tl.dot(a.lo, tl.trans(b.hi), acc)
        acc = tl.dot(a.hi, tl.trans(b.lo), acc)
        return tl.dot(a.hi, tl.trans(b.hi), acc)
    elif PRECISION == "fp16":
        return tl.dot(a.hi, tl.trans(b.hi), acc)
    else:
        return tl.dot(a.hi, tl.trans(b.hi), acc, input_precision="ieee")


@triton.jit
def dot_accumulate(ds, b, acc, PRECISION: tl.constexpr):
    """Acc + ds·b for a float32 tile ds (m, n) and an operand b (n, k)."""
    if PRECISION == "bf16x3":
        hi = ds.to(tl.bfloat16)
        lo = (ds - hi.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(lo, b.hi, acc)
        acc = tl.dot(hi, b.lo, acc)
        return tl.dot(hi, b.hi, acc)
    elif PRECISION == "fp16":
        return tl.dot(ds.to(tl.float16), b.hi, acc)
    else:
        return tl.dot(ds, b.hi, acc, input_precision="ieee")


@triton.jit
def similarity_tile(
    q, Q, K, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_M × BLOCK_N products of rows and columns; the rows are held in ``q`` where BLOCK_K spans HEAD_DIM."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BLOCK_K == HEAD_DIM:
        b = load_block(K.hi, column, 0, BLOCK_N, BLOCK_K, HEAD_DIM, USE_TMA)
        b_lo = b
        if PRECISION == "bf16x3":
            b_lo = load_block(K.lo, column, 0, BLOCK_N, BLOCK_K, HEAD_DIM, USE_TMA)
        acc = dot_transposed(q, Operand(b, b_lo), acc, PRECISION)
    else:
        for k in range(0, HEAD_DIM, BLOCK_K):
            a = load_block(Q.hi, row, k, BLOCK_M, BLOCK_K, HEAD_DIM, USE_TMA)
            b = load_block(K.hi, column, k, BLOCK_N, BLOCK_K, HEAD_DIM, USE_TMA)
            a_lo = a
            b_lo = b
            if PRECISION == "bf16x3":
                a_lo = load_block(Q.lo, row, k, BLOCK_M, BLOCK_K, HEAD_DIM, USE_TMA)
                b_lo = load_block(K.lo, column, k, BLOCK_N, BLOCK_K, HEAD_DIM, USE_TMA)
            acc = dot_transposed(Operand(a, a_lo), Operand(b, b_lo), acc, PRECISION)
    return acc


@triton.jit
def similarity_float32(
    Z, C, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for float32 rows, in float32 accuracy."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, HEAD_DIM, BLOCK_K):
        a = load_block(Z, row, k, BLOCK_M, BLOCK_K, HEAD_DIM, False)
        b = load_block(C, column, k, BLOCK_N, BLOCK_K, HEAD_DIM, False)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=INPUT_PRECISION)
    return acc


@triton.jit
def find_tiles(POS_BEGIN, POS_END, row, n, m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, first):
    """The column tiles of the row block that begins at ``row``, from tile ``first`` on."""
    last = tl.minimum(row + BLOCK_M, n) - 1
    total = (m + BLOCK_N - 1) // BLOCK_N
    full = m // BLOCK_N
    begin = tl.maximum(tl.minimum(tl.load(POS_BEGIN + row) // BLOCK_N, total), first)
    end = tl.maximum(tl.minimum((tl.load(POS_END + last) + BLOCK_N - 1) // BLOCK_N, total), begin)
    ragged = tl.where((full < total) & (end < total), 1, 0)
    return TileRange(first, begin, end, ragged, total)


@triton.jit
def count_bare(tiles):
    """How many tiles need no mask. Program ``split`` of ``splits`` takes one stretch of them."""
    return tiles.total - tiles.first - (tiles.end - tiles.begin) - tiles.ragged


@triton.jit
def bare_tile(tiles, t):
    """Which tile is the t-th bare one."""
    j = tiles.first + t
    return tl.where(j < tiles.begin, j, j + (tiles.end - tiles.begin))


@triton.jit
def count_masked(tiles):
    """How many tiles need a mask. Program ``split`` of ``splits`` takes every ``splits``-th of them."""
    return tiles.end - tiles.begin + tiles.ragged


@triton.jit
def masked_tile(tiles, t):
    """Which tile is the t-th masked one."""
    return tl.where(t < tiles.end - tiles.begin, tiles.begin + t, tiles.total - 1)


@triton.jit
def negative_mask(offs_n, pos_begin, pos_end, m):
    """Which entries of a masked tile are pairs of two labels, and of columns that are there."""
    return ((offs_n[None, :] < pos_begin[:, None]) | (offs_n[None, :] >= pos_end[:, None])) & (offs_n < m)[None, :]


@triton.jit
def upper_triangle_mask(offs_m, offs_n, n):
    """Which entries of a masked tile are pairs i < j of n rows with themselves."""
    return (offs_n[None, :] > offs_m[:, None]) & (offs_m < n)[:, None] & (offs_n < n)[None, :]


@triton.jit
def is_positive_tile(column, end, SELF: tl.constexpr):
    """Whether the walk over tiles of positives goes on at ``column``."""
    if SELF == "diagonal":
        return True
    else:
        return column < end


@triton.jit
def positive_mask(offs_m, offs_n, pos_begin, pos_end, self_column, SELF: tl.constexpr):
    """Which entries of a tile are positives: of the row's label, and not the row's own sample, as SELF says where."""
    keep = (offs_n[None, :] >= pos_begin[:, None]) & (offs_n[None, :] < pos_end[:, None])
    if SELF == "diagonal":
        keep = keep & (offs_n[None, :] != offs_m[:, None])
    if SELF == "column":
        keep = keep & (offs_n[None, :] != self_column[:, None])
    return keep


@triton.jit
def next_positive_tile(column, pos_begin, pos_end, BLOCK_N: tl.constexpr):
    """The next tile from ``column`` on that holds a positive of some row, far away where there is none.

    Compared with themselves, rows have their positives side by side; among references those of a block of rows may lie
    far apart, and most tiles between the first and the last one hold none.
    """
    some = (pos_end > column) & (pos_end > pos_begin)
    first = tl.min(tl.where(some, tl.maximum(pos_begin, column), 1073741824), 0)
    return first // BLOCK_N * BLOCK_N


@triton.jit
def partial_row_sum(f, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row sums of a tile in four parts: what each thread holds of a row; threads meet once, at the end."""
    return tl.sum(tl.sum(tl.reshape(f, (BLOCK_M, BLOCK_N // 8, 4, 2)), 3), 1)


@triton.jit
def partial_row_max(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row maxima of a tile in four parts, as `partial_row_sum`."""
    return tl.max(tl.max(tl.reshape(x, (BLOCK_M, BLOCK_N // 8, 4, 2)), 3), 1)


@triton.jit
def atomic_column_sum(to, f, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROW_WARPS: tl.constexpr):
    """Add the column sums of a tile, each warp those of its own rows: to meet first, warps would have to wait.

    What a thread holds is added before threads meet.
    """
    own = tl.sum(tl.sum(tl.reshape(f, (BLOCK_M // (16 * ROW_WARPS), ROW_WARPS, 16, BLOCK_N)), 0), 1)
    tl.atomic_add(to[None, :] + tl.zeros((ROW_WARPS, 1), tl.int32), own, sem="relaxed")


@triton.jit
def merge_logsumexp(PARTIAL, offs_m, padded, splits, SIZE: tl.constexpr):
    """Log₂ Σ of the (maximum, sum) of each split."""
    m_i = tl.full((SIZE,), -float("inf"), tl.float32)
    for p in range(splits):
        m_i = tl.maximum(m_i, tl.load(PARTIAL + 2 * p * padded + offs_m))
    m_i = tl.where(m_i == -float("inf"), 0.0, m_i)
    l_i = tl.zeros((SIZE,), tl.float32)
    for p in range(splits):
        here = tl.load(PARTIAL + 2 * p * padded + offs_m)
        l_i += tl.exp2(here - m_i) * tl.load(PARTIAL + (2 * p + 1) * padded + offs_m)
    return m_i + tl.log2(l_i)


@triton.jit
def merge_sums(PARTIAL, offs_m, padded, splits, which, SIZE: tl.constexpr):
    """Σ of the first or second sum of each split."""
    total = tl.zeros((SIZE,), tl.float32)
    for p in range(splits):
        total += tl.load(PARTIAL + (2 * p + which) * padded + offs_m)
    return total


@triton.jit
def merge_maxima(PARTIAL, offs_m, padded, splits, which, SIZE: tl.constexpr):
    """The same for a maximum."""
    found = tl.full((SIZE,), -float("inf"), tl.float32)
    for p in range(splits):
        found = tl.maximum(found, tl.load(PARTIAL + (2 * p + which) * padded + offs_m))
    return found


@triton.jit
def store_gradient(OUT, row, g, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, ADD: tl.constexpr):
    """Rows of gradients to where they belong. Nobody else adds there, so the order of the sum is known."""
    if ADD and HEAD_DIM > 128:  # one half after the other: on their way they lie in shared memory, beside what is held
        left, right = tl.split(tl.permute(tl.reshape(g, (ROWS, 2, HEAD_DIM // 2)), (0, 2, 1)))
        add_gradient(OUT, row, left, ROWS, HEAD_DIM // 2, HEAD_DIM)
        add_gradient(OUT + HEAD_DIM // 2, row, right, ROWS, HEAD_DIM // 2, HEAD_DIM)
    elif ADD:
        add_gradient(OUT, row, g, ROWS, HEAD_DIM, HEAD_DIM)
    else:
        at = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        tl.store(OUT + at, g)


@triton.jit
def add_gradient(OUT, row, g, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """To some columns of what is there already."""
    at = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, COLUMNS)[None, :]
    tl.atomic_add(OUT + at, g, sem="relaxed")
