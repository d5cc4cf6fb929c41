# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""The negatives: row sums over all tiles, and their way back. Everything quadratic happens here.

Rows and columns are sorted by label, so a block of rows has its positives in one range of columns. Tiles of that
range run masked, all others run bare. Backward, every row block owns its gradient: the scores are computed again,
and because s_ij = s_ji both ends of a pair are served by the row's own sum, Σ_j (g_i f'(s_ij) + g_j f'(s_ij)) z_j.
"""

import triton
import triton.language as tl

from mettle.pairs.fused.tile import added, block, carry, held, leaning, product, pulled, relative, times, weight


@triton.jit
def tiles(LO, HI, row, n, m, BM: tl.constexpr, BN: tl.constexpr, first):
    """First masked tile, how many are masked in one stretch, one more at the ragged end or not, and all tiles."""
    last = tl.minimum(row + BM, n) - 1
    total = (m + BN - 1) // BN
    full = m // BN
    begin = tl.maximum(tl.minimum(tl.load(LO + row) // BN, total), first)
    end = tl.maximum(tl.minimum((tl.load(HI + last) + BN - 1) // BN, total), begin)
    extra = tl.where((full < total) & (end < total), 1, 0)
    return begin, end, extra, total


@triton.jit
def far_forward(
    Q, QL, K, KL, QB, QBL, KB, KBL, LO, HI, SHIFT, OUT, n, m, padded, splits, p0, p1, p2, p3, zero,
    WIDTH: tl.constexpr, BK: tl.constexpr, WIDTH2: tl.constexpr, BK2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, TMA: tl.constexpr,
    FAR: tl.constexpr, SQUARE: tl.constexpr, SHAPE: tl.constexpr, TWO: tl.constexpr, OTHER: tl.constexpr,
    ONLINE: tl.constexpr, HALF: tl.constexpr, WARPS: tl.constexpr, FIRM: tl.constexpr,
):  # fmt: skip
    """Partial row sums of one row block over one split of the columns: OUT (splits, 2, padded).

    ONLINE keeps (maximum, sum); HALF visits each pair once and adds it to both of its ends, OUT (2, padded).
    """
    row = tl.program_id(0) * BM
    split = tl.program_id(1)
    rows = row + tl.arange(0, BM)
    lo = tl.load(LO + rows)
    hi = tl.load(HI + rows)
    shift = tl.zeros((BM,), tl.float32)
    if FAR == "relative":
        shift = tl.load(SHIFT + rows)
    q, ql = held(Q, QL, row, BM, BK, WIDTH, MODE, TMA, zero, FIRM)
    qb = q
    qbl = q
    if OTHER:
        qb, qbl = held(QB, QBL, row, BM, BK2, WIDTH2, MODE, TMA, zero, FIRM)
    first = 0
    if HALF:
        first = row // BN
    begin, end, extra, total = tiles(LO, HI, row, n, m, BM, BN, first)
    part0 = tl.zeros((BM, 4), tl.float32)
    part1 = part0
    sum0 = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)

    bare = total - first - (end - begin) - extra
    for t in range(bare * split // splits, bare * (split + 1) // splits):
        j = first + t
        j = tl.where(j < begin, j, j + (end - begin))
        s = product(q, ql, Q, QL, K, KL, row, j * BN, BM, BN, BK, WIDTH, MODE, TMA)
        b = s
        if OTHER:
            b = product(qb, qbl, QB, QBL, KB, KBL, row, j * BN, BM, BN, BK2, WIDTH2, MODE, TMA)
        if ONLINE:
            new = tl.maximum(top, tl.max(s, 1))
            f0 = running(s, b, new, p0, p1, p2, FAR)
            sum0 = sum0 * tl.exp2(top - new) + tl.sum(f0, 1)
            top = new
        else:
            columns = j * BN + tl.arange(0, BN)
            f0, f1, down = ends(s, b, shift, SHIFT, columns, p0, p1, p2, FAR, SQUARE, SHAPE, HALF)
            part0 += beside(f0, BM, BN)
            if TWO:
                part1 += beside(f1, BM, BN)
            if HALF:
                give(OUT + columns, down, BM, BN, WARPS)
                if TWO:
                    give(OUT + padded + columns, f1, BM, BN, WARPS)
    for t in range(split, end - begin + extra, splits):
        j = tl.where(t < end - begin, begin + t, total - 1)
        s = product(q, ql, Q, QL, K, KL, row, j * BN, BM, BN, BK, WIDTH, MODE, TMA)
        b = s
        if OTHER:
            b = product(qb, qbl, QB, QBL, KB, KBL, row, j * BN, BM, BN, BK2, WIDTH2, MODE, TMA)
        columns = j * BN + tl.arange(0, BN)
        keep = ((columns[None, :] < lo[:, None]) | (columns[None, :] >= hi[:, None])) & (columns < m)[None, :]
        if HALF:
            keep = keep & (columns[None, :] > rows[:, None]) & (rows < n)[:, None]
        if ONLINE:
            new = tl.maximum(top, tl.max(tl.where(keep, s, -float("inf")), 1))
            safe = tl.where(new == -float("inf"), 0.0, new)
            f0 = tl.where(keep, running(s, b, safe, p0, p1, p2, FAR), 0.0)
            sum0 = sum0 * tl.exp2(top - safe) + tl.sum(f0, 1)
            top = new
        else:
            f0, f1, down = ends(s, b, shift, SHIFT, columns, p0, p1, p2, FAR, SQUARE, SHAPE, HALF)
            part0 += beside(tl.where(keep, f0, 0.0), BM, BN)
            if TWO:
                part1 += beside(tl.where(keep, f1, 0.0), BM, BN)
            if HALF:
                give(OUT + columns, tl.where(keep, down, 0.0), BM, BN, WARPS)
                if TWO:
                    give(OUT + padded + columns, tl.where(keep, f1, 0.0), BM, BN, WARPS)
    if not ONLINE:
        sum0 = tl.sum(part0, 1)
    sum1 = tl.sum(part1, 1)
    if HALF:
        tl.atomic_add(OUT + rows, sum0, sem="relaxed")
        if TWO:
            tl.atomic_add(OUT + padded + rows, sum1, sem="relaxed")
    else:
        out = OUT + split.to(tl.int64) * 2 * padded
        if ONLINE:
            tl.store(out + rows, top)
            tl.store(out + padded + rows, sum0)
        else:
            tl.store(out + rows, sum0)
            if TWO:
                tl.store(out + padded + rows, sum1)


@triton.jit
def beside(f, BM: tl.constexpr, BN: tl.constexpr):
    """Row sums of a tile in four parts: what each thread holds of a row; threads meet once, at the end."""
    return tl.sum(tl.sum(tl.reshape(f, (BM, BN // 8, 4, 2)), 3), 1)


@triton.jit
def give(to, f, BM: tl.constexpr, BN: tl.constexpr, WARPS: tl.constexpr):
    """Add the column sums of a tile, each warp those of its own rows: to meet first, warps would have to wait.

    What a thread holds is added before threads meet.
    """
    own = tl.sum(tl.sum(tl.reshape(f, (BM // (16 * WARPS), WARPS, 16, BN)), 0), 1)
    tl.atomic_add(to[None, :] + tl.zeros((WARPS, 1), tl.int32), own, sem="relaxed")


@triton.jit
def ends(
    x, b, shift, SHIFT, columns, p0, p1, p2,
    FAR: tl.constexpr, SQUARE: tl.constexpr, SHAPE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """What a pair adds to the two sums of its row, and to the first of its column: in all forms but one the same."""
    if (FAR == "relative") and HALF:
        f, down = relative(x, b, shift[:, None], tl.load(SHIFT + columns)[None, :])
        return f, f, down
    else:
        f0, f1 = added(x, b, shift[:, None], p0, p1, p2, FAR, SQUARE, SHAPE)
        return f0, f1, f0


@triton.jit
def running(x, b, top, p0, p1, p2, FAR: tl.constexpr):
    """What a negative adds when its row's maximum is ``top``."""
    e = tl.exp2(x - top[:, None])
    if FAR == "threshold":
        e = e * weight(x, p0, p1, p2)
    elif FAR == "raw":
        e = e * leaning(x, b)
    return e


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
    in common little is left of it beside the positives. 0: never, and OUT is written once.
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
