# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Impostor pairs of a set whose fast score falls into a window, listed by one kernel: pass 2 on a CUDA device.

It walks the tiles of :func:`mettle.pairs.kernels.histograms.score_counts`; nothing quadratic is stored. Rows are split
into two bfloat16 halves, x = h + l with errors of 2⁻⁹ and 2⁻¹⁸ of x, and three of four products taken, so a score is
off by

    δ = 3·2⁻¹⁸ + (13/4·d + 64)·2⁻²⁴       halves kept and dropped; 3d products, sixteen to a sum that cuts off 17 bits

where the last term holds normalisation and bins too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.kernels.config import choice, parts
from mettle.pairs.kernels.forward import tiles
from mettle.pairs.kernels.operands import prepared
from mettle.pairs.kernels.primitives import held, product

ROOM = 1 << 24  # rows of tiles that are listed; windows that reach more are a matter for torch's products
AT_LEAST = 4096  # programs of a launch, where columns can be divided that far
AT_ONCE = 1 << 24  # bits spelled out at a time
WORD = 64  # columns whose hits are the bits of one number


class Listed(NamedTuple):
    """Positions of the pairs whose fast score lies in one window, and how many score above it."""

    first: Tensor
    second: Tensor
    above: int


def slack(d: int) -> float:
    """δ: how far a fast score of either pass can be from the exact one."""
    return 3 * 2.0**-18 + (3.25 * d + 64) * 2.0**-24


def candidates(
    z: Tensor, labels: Tensor, windows: Sequence[tuple[float, float]], room: int = ROOM
) -> list[Listed] | None:
    """The impostor pairs i < j with a fast score between two ends, for every window, in no order.

    Args:
        z: (n, d) embeddings, float32.
        labels: (n,) int64, ascending.
        windows: ends, both included.
        room: rows of tiles with such a pair that are listed at most.

    Returns:
        One list for each window, or None where there is no room for all.
    """
    with torch.no_grad(), torch.cuda.device_of(z):
        return _candidates(z, labels, windows, room // len(windows))


def _candidates(z: Tensor, labels: Tensor, windows: Sequence[tuple[float, float]], each: int) -> list[Listed] | None:
    mode = "split" if z.is_cuda else "exact"
    rows = prepared(z, labels, None, mode, True)
    shape = choice(mode, rows.width).forward
    ends = torch.tensor(windows, dtype=torch.float32).T.contiguous().to(z.device)
    above = torch.zeros(len(windows), len(rows.full), dtype=torch.int32, device=z.device)
    where = torch.empty(len(windows), each, dtype=torch.int64, device=z.device)
    words = parts(shape.columns, WORD)
    bits = torch.empty(len(windows), each, words, dtype=torch.int64, device=z.device)
    count = torch.zeros(len(windows), dtype=torch.int32, device=z.device)
    blocks = parts(rows.n, shape.rows)
    splits = min(8, max(1, AT_LEAST // blocks)) if z.is_cuda else 1
    window_kernel[(blocks, splits)](
        rows.high, rows.low, rows.lo, rows.hi, ends, above, where, bits, count,
        rows.n, len(rows.full), splits, each,
        WIDTH=rows.width, BK=shape.depth, BM=shape.rows, BN=shape.columns, MODE=mode,
        WINDOWS=len(windows), WORDS=words, BITS_OF=WORD, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    numbers = torch.stack([count, above.sum(1)]).tolist()  # one wait for the device
    if max(numbers[0]) > each:
        return None
    return [
        Listed(*_spelled(where[k, :many], bits[k, :many], len(rows.full)), over)
        for k, (many, over) in enumerate(zip(*numbers, strict=True))
    ]


def _spelled(where: Tensor, bits: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the bits that are set, some rows of tiles at a time."""
    offset, parts = torch.arange(WORD, device=bits.device), []
    for start in range(0, len(where), step := AT_ONCE // (WORD * bits.shape[1])):
        at, word, column = ((bits[start : start + step, :, None] >> offset) & 1).nonzero().unbind(1)
        hit = where[start : start + step][at]  # the row, and where its tile begins
        parts.append(torch.stack([hit // padded, hit % padded + word * WORD + column]))
    first, second = torch.cat([where.new_empty(2, 0), *parts], 1)
    return first, second


@triton.jit
def window_kernel(
    Q, QL, LO, HI, ENDS, ABOVE, WHERE, BITS, COUNT, n, padded, splits, each,
    WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr,
    WINDOWS: tl.constexpr, WORDS: tl.constexpr, BITS_OF: tl.constexpr,
):  # fmt: skip
    """Each pair above the diagonal once: counts ABOVE (windows, padded); COUNT rows of tiles with hits, listed.

    WHERE (windows, each) says which row and tile, BITS (windows, each, words) which columns of it.
    """
    row = tl.program_id(0) * BM
    split = tl.program_id(1)
    rows = row + tl.arange(0, BM)
    lo = tl.load(LO + rows)
    hi = tl.load(HI + rows)
    q, ql = held(Q, QL, row, BM, BK, WIDTH, MODE, False)
    begin, end, extra, total = tiles(LO, HI, row, n, n, BM, BN, row // BN)
    start = row // BN
    bare = total - start - (end - begin) - extra
    for t in range(bare * split // splits, bare * (split + 1) // splits):
        j = start + t
        j = tl.where(j < begin, j, j + (end - begin))
        s = product(q, ql, Q, QL, Q, QL, row, j * BN, BM, BN, BK, WIDTH, MODE, False)
        sift(s, rows, j * BN, ENDS, ABOVE, WHERE, BITS, COUNT, padded, each, BM, BN, WINDOWS, WORDS, BITS_OF)
    for t in range(split, end - begin + extra, splits):
        j = tl.where(t < end - begin, begin + t, total - 1)
        s = product(q, ql, Q, QL, Q, QL, row, j * BN, BM, BN, BK, WIDTH, MODE, False)
        columns = j * BN + tl.arange(0, BN)
        keep = (columns[None, :] > rows[:, None]) & (rows < n)[:, None] & (columns < n)[None, :]
        keep &= (columns[None, :] < lo[:, None]) | (columns[None, :] >= hi[:, None])
        s = tl.where(keep, s, -4.0)  # below every window
        sift(s, rows, j * BN, ENDS, ABOVE, WHERE, BITS, COUNT, padded, each, BM, BN, WINDOWS, WORDS, BITS_OF)


@triton.jit
def sift(
    s, rows, column, ENDS, ABOVE, WHERE, BITS, COUNT, padded, each,
    BM: tl.constexpr, BN: tl.constexpr, WINDOWS: tl.constexpr, WORDS: tl.constexpr, BITS_OF: tl.constexpr,
):  # fmt: skip
    """Count what lies above each window; list the rows of the tile that have something inside, with its columns."""
    for w in tl.static_range(WINDOWS):
        low = tl.load(ENDS + w)
        high = tl.load(ENDS + WINDOWS + w)
        over = tl.sum((s > high).to(tl.int32), 1)
        hit = tl.sum((s >= low).to(tl.int32), 1) > over
        tl.atomic_add(ABOVE + w * padded + rows, over, mask=over > 0, sem="relaxed")
        if tl.sum(hit.to(tl.int32), 0) > 0:  # noqa: SIM102, the second question is only asked after the first
            if tl.load(COUNT + w, volatile=True) <= each:  # an overflow need not be counted to its end
                at = tl.atomic_add(COUNT + w + tl.zeros((BM,), tl.int32), 1, mask=hit, sem="relaxed")
                to = tl.full((BM,), w, tl.int64) * each + at
                fits = hit & (at < each)
                tl.store(WHERE + to, rows.to(tl.int64) * padded + column, mask=fits)
                for k in tl.static_range(WORDS):
                    place = tl.arange(0, BN) - k * BITS_OF
                    mine = (place >= 0) & (place < BITS_OF)
                    bit = tl.where(mine, tl.full((BN,), 1, tl.int64) << tl.where(mine, place, 0).to(tl.int64), 0)
                    inside = (s >= low) & (s <= high)
                    tl.store(BITS + to * WORDS + k, tl.sum(tl.where(inside, bit[None, :], 0), 1), mask=fits)
