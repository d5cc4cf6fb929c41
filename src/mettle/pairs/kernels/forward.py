# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""The negatives: row sums over all tiles.

Rows and columns are sorted by label, so a block of rows has its positives in one range of columns. Tiles of that
range run masked, all others run bare.
"""

import triton
import triton.language as tl

from mettle.pairs.kernels.primitives import added, held, leaning, product, relative, weight


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
