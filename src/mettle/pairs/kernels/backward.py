# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""The way back of the negatives: every row block owns its gradient.

The scores are computed again, and because s_ij = s_ji both ends of a pair are served by the row's own sum,
Σ_j (g_i f'(s_ij) + g_j f'(s_ij)) z_j.
"""

import triton
import triton.language as tl

from mettle.pairs.kernels.forward import tiles
from mettle.pairs.kernels.primitives import block, carry, held, product, pulled, times


@triton.jit
def far_backward(
    Q, QL, K, KL, QB, QBL, KB, KBL, LO, HI, ROW, COLUMN, STATS, OUT, n, m, padded, columns_padded, splits,
    p0, p1, p2, p3, zero, room, by,
    WIDTH: tl.constexpr, WIDTH2: tl.constexpr, BK2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, TMA: tl.constexpr, FIRM: tl.constexpr,
    FAR: tl.constexpr, SQUARE: tl.constexpr, SHAPE: tl.constexpr, TWO: tl.constexpr, OTHER: tl.constexpr,
    ONLINE: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Partial gradients of one row block over one split of the columns: OUT (splits, padded, WIDTH).

    ROW and COLUMN are the tables of row coefficients of the two sides; ROWS, COLUMNS say which ends count. ``by`` is
    the factor that the columns carry. TURN: after so many tiles a sum is added to OUT and begun anew, because tensor
    cores cut off what they add: over 32,768 columns that comes to 1e-4 of a sum, and where all embeddings have much
    in common little is left of it beside the positives. 0: never, and OUT is written once. (Masked tiles, at the edges
    of classes, are summed up in one go.)
    """
    row = tl.program_id(0) * BM
    split = tl.program_id(1)
    rows = row + tl.arange(0, BM)
    lo = tl.load(LO + rows)
    hi = tl.load(HI + rows)
    # One scale for all of h keeps float16 from under- and overflowing: no |h| exceeds 2 max |g|.
    scale = room / tl.load(STATS + 2)
    c0i, c1i, ui = coefficients(ROW, rows, padded, scale, ROWS, TWO, ONLINE or FAR == "relative", BM)
    q, ql = held(Q, QL, row, BM, WIDTH, WIDTH, MODE, TMA, zero, FIRM)
    qb = q
    qbl = q
    if OTHER:
        qb, qbl = held(QB, QBL, row, BM, BK2, WIDTH2, MODE, TMA, zero, FIRM)
    begin, end, extra, total = tiles(LO, HI, row, n, m, BM, BN, 0)
    acc = tl.zeros((BM, WIDTH), tl.float32)

    bare = total - (end - begin) - extra
    first = bare * split // splits
    last = bare * (split + 1) // splits
    if TURN:
        for start in range(first, last, TURN):
            for t in range(start, tl.minimum(start + TURN, last)):
                column = tl.where(t < begin, t, t + (end - begin)) * BN
                h, b, bl = felt(
                    q, ql, c0i, c1i, ui, qb, qbl, QB, QBL, K, KL, KB, KBL, COLUMN, row, column, columns_padded, scale,
                    p0, p1, p2, p3, WIDTH, WIDTH2, BK2, BM, BN, MODE, TMA, FAR, SQUARE, SHAPE, TWO, OTHER, ONLINE,
                    LIVE, ROWS, COLUMNS,
                )  # fmt: skip
                acc = carry(h, b, bl, acc, MODE)
            put(OUT, split * padded + row, acc * (1.0 / (scale * by)), BM, WIDTH, True)
            acc = tl.zeros((BM, WIDTH), tl.float32)
    else:
        for t in range(first, last):
            column = tl.where(t < begin, t, t + (end - begin)) * BN
            h, b, bl = felt(
                q, ql, c0i, c1i, ui, qb, qbl, QB, QBL, K, KL, KB, KBL, COLUMN, row, column, columns_padded, scale,
                p0, p1, p2, p3, WIDTH, WIDTH2, BK2, BM, BN, MODE, TMA, FAR, SQUARE, SHAPE, TWO, OTHER, ONLINE,
                LIVE, ROWS, COLUMNS,
            )  # fmt: skip
            acc = carry(h, b, bl, acc, MODE)
    # Where rows are missing, x is 0, and no bound holds: h may be infinite there.
    for t in range(split, end - begin + extra, splits):
        column = tl.where(t < end - begin, begin + t, total - 1) * BN
        h, b, bl = felt(
            q, ql, c0i, c1i, ui, qb, qbl, QB, QBL, K, KL, KB, KBL, COLUMN, row, column, columns_padded, scale,
            p0, p1, p2, p3, WIDTH, WIDTH2, BK2, BM, BN, MODE, TMA, FAR, SQUARE, SHAPE, TWO, OTHER, ONLINE,
            LIVE, ROWS, COLUMNS,
        )  # fmt: skip
        columns = column + tl.arange(0, BN)
        keep = ((columns[None, :] < lo[:, None]) | (columns[None, :] >= hi[:, None])) & (columns < m)[None, :]
        acc = carry(tl.where(keep, h, 0.0), b, bl, acc, MODE)
    put(OUT, split * padded + row, acc * (1.0 / (scale * by)), BM, WIDTH, TURN > 0)


@triton.jit
def felt(
    q, ql, c0i, c1i, ui, qb, qbl, QB, QBL, K, KL, KB, KBL, COLUMN, row, column, columns_padded, scale, p0, p1, p2, p3,
    WIDTH: tl.constexpr, WIDTH2: tl.constexpr, BK2: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MODE: tl.constexpr, TMA: tl.constexpr, FAR: tl.constexpr, SQUARE: tl.constexpr, SHAPE: tl.constexpr,
    TWO: tl.constexpr, OTHER: tl.constexpr, ONLINE: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of the similarities of one tile, and the block of columns that they go through."""
    columns = column + tl.arange(0, BN)
    c0j, c1j, uj = coefficients(COLUMN, columns, columns_padded, scale, COLUMNS, TWO, ONLINE or FAR == "relative", BN)
    b = block(K, column, 0, BN, WIDTH, WIDTH, TMA)
    bl = b
    if MODE == "split":
        bl = block(KL, column, 0, BN, WIDTH, WIDTH, TMA)
    s = times(q, ql, b, bl, tl.zeros((BM, BN), tl.float32), MODE)
    o = s
    if OTHER:
        o = product(qb, qbl, QB, QBL, KB, KBL, row, column, BM, BN, BK2, WIDTH2, MODE, TMA)
    h = pulled(s, o, c0i, c1i, ui, c0j, c1j, uj, p0, p1, p2, p3, FAR, SQUARE, SHAPE, ONLINE, LIVE, ROWS, COLUMNS)
    return h, b, bl


@triton.jit
def put(OUT, row, g, ROWS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Rows of gradients to where they belong. Nobody else adds there, so the order of the sum is known."""
    if ADD and WIDTH > 128:  # one half after the other: on their way they lie in shared memory, beside what is held
        left, right = tl.split(tl.permute(tl.reshape(g, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))
        add(OUT, row, left, ROWS, WIDTH // 2, WIDTH)
        add(OUT + WIDTH // 2, row, right, ROWS, WIDTH // 2, WIDTH)
    elif ADD:
        add(OUT, row, g, ROWS, WIDTH, WIDTH)
    else:
        at = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(OUT + at, g)


@triton.jit
def add(OUT, row, g, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """To some columns of what is there already."""
    at = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * WIDTH + tl.arange(0, COLUMNS)[None, :]
    tl.atomic_add(OUT + at, g, sem="relaxed")


@triton.jit
def coefficients(
    TABLE, at, padded, scale, USED: tl.constexpr, TWO: tl.constexpr, THIRD: tl.constexpr, SIZE: tl.constexpr
):
    """Of one end: for the two sums, scaled, and its log-sum-exp or shift."""
    c0 = tl.zeros((SIZE,), tl.float32)
    c1 = c0
    u = c0
    if USED:
        c0 = tl.load(TABLE + at) * scale
        if TWO:
            c1 = tl.load(TABLE + padded + at) * scale
        if THIRD:
            u = tl.load(TABLE + 4 * padded + at)
    return c0, c1, u


@triton.jit
def far_scores(
    Q, QL, K, KL, QB, QBL, KB, KBL, LO, HI, ROW, COLUMN, STATS, H, HL, start, across, stride,
    n, m, padded, columns_padded, p0, p1, p2, p3, room,
    WIDTH: tl.constexpr, BK: tl.constexpr, WIDTH2: tl.constexpr, BK2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, TMA: tl.constexpr,
    FAR: tl.constexpr, SQUARE: tl.constexpr, SHAPE: tl.constexpr, TWO: tl.constexpr, OTHER: tl.constexpr,
    ONLINE: tl.constexpr, LIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of the block of h that begins at row ``start`` and column ``across``, written to H (rows, stride).

    Wide embeddings leave h·z to the library product.
    """
    local = tl.program_id(0) * BM  # rows first: programs that run together share their columns
    beside = tl.program_id(1) * BN
    column = across + beside
    row = start + local
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    lo = tl.load(LO + rows)
    hi = tl.load(HI + rows)
    scale = room / tl.load(STATS + 2)
    c0i, c1i, ui = coefficients(ROW, rows, padded, scale, ROWS, TWO, ONLINE or FAR == "relative", BM)
    c0j, c1j, uj = coefficients(COLUMN, columns, columns_padded, scale, COLUMNS, TWO, ONLINE or FAR == "relative", BN)
    q, ql = held(Q, QL, row, BM, BK, WIDTH, MODE, TMA)
    s = product(q, ql, Q, QL, K, KL, row, column, BM, BN, BK, WIDTH, MODE, TMA)
    o = s
    if OTHER:
        qb, qbl = held(QB, QBL, row, BM, BK2, WIDTH2, MODE, TMA)
        o = product(qb, qbl, QB, QBL, KB, KBL, row, column, BM, BN, BK2, WIDTH2, MODE, TMA)
    h = pulled(s, o, c0i, c1i, ui, c0j, c1j, uj, p0, p1, p2, p3, FAR, SQUARE, SHAPE, ONLINE, LIVE, ROWS, COLUMNS)
    if (column < tl.load(HI + tl.minimum(row + BM, n) - 1)) & (column + BN > tl.load(LO + row)):  # few tiles
        keep = (columns[None, :] < lo[:, None]) | (columns[None, :] >= hi[:, None])
        h = tl.where(keep, h, 0.0)
    # As in `block`: one wide offset, narrow ones inside.
    at = local.to(tl.int64) * stride + beside + (tl.arange(0, BM)[:, None] * stride + tl.arange(0, BN)[None, :])
    high = h.to(H.dtype.element_ty)
    tl.store(H + at, high)
    if MODE == "split":
        tl.store(HL + at, (h - high.to(tl.float32)).to(tl.bfloat16))
