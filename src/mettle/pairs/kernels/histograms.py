# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
"""All pairs of a set on the device, for evaluation: how many genuine and impostor pairs score what, and which.

`score_histogram` counts all pairs; `list_impostor_pairs` lists the impostor pairs whose score falls into a window. Both
walk each pair above the diagonal once; nothing quadratic is stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.kernels.config import cdiv, select_config
from mettle.pairs.kernels.launch import launch_kernel
from mettle.pairs.kernels.operands import prepare_operands
from mettle.pairs.kernels.primitives import (
    Operand,
    bare_tile,
    count_bare,
    count_masked,
    find_tiles,
    load_rows,
    masked_tile,
    similarity_tile,
    upper_triangle_mask,
)

__all__ = ["ImpostorPairs", "list_impostor_pairs", "score_histogram"]

BINS = 1 << 16
HISTOGRAM_COPIES = 8  # so that fewer additions meet
PAIRS_PER_LAUNCH = 1 << 30  # counts of a launch are 32 bits wide
LEAST_PROGRAMS = 4096  # of a launch, where columns can be divided that far
BITS_PER_PASS = 1 << 24  # spelled out at a time
WORD = 64  # columns whose hits are the bits of one number


def score_histogram(
    z: Tensor, labels: Tensor, bins: int = BINS, low: float = -1.0, high: float = 1.0, rows: slice | None = None
) -> tuple[Tensor, Tensor]:
    """Histograms of the cosines of all pairs i < j: (genuine, impostor), int64 (bins,) each.

    Bin b counts the scores in [low + b·w, low + (b+1)·w), w = (high − low) / bins; scores beyond either end are
    counted in the first or last bin. Counts are whole numbers: they do not depend on the order of the work. With
    ``rows``, which begin at a multiple of the row blocks, i is among them: what ranks count adds up to the whole.
    """
    with torch.no_grad(), torch.cuda.device_of(z):
        return _score_histogram(z, labels, bins, float(low), float(high), rows)


def _score_histogram(
    z: Tensor, labels: Tensor, bins: int, low: float, high: float, some: slice | None
) -> tuple[Tensor, Tensor]:
    precision = "bf16x3" if z.is_cuda else "ieee"
    rows = prepare_operands(z.detach().float(), labels.contiguous(), None, precision, True)
    tile = select_config(precision, rows.head_dim).forward
    start, blocks = _row_blocks(rows.n, tile.block_m, some)
    total = torch.zeros(2, bins, dtype=torch.int64, device=z.device)
    copies = HISTOGRAM_COPIES if z.is_cuda else 1
    most = max(PAIRS_PER_LAUNCH // max(rows.n, 1) // tile.block_m, 1)
    for first in range(start, blocks, most):
        counts = torch.zeros(copies, 2, bins, dtype=torch.int32, device=z.device)
        grid = min(most, blocks - first)
        splits = min(8, max(1, LEAST_PROGRAMS // grid)) if z.is_cuda else 1
        operands = (rows.hi, rows.lo, rows.positive_begin, rows.positive_end)
        numbers = (first, rows.n, splits, copies, bins, low, bins / (high - low))
        constexprs = tile.constexprs(precision, rows.head_dim) | tile.launch_options
        launch_kernel(score_histogram_kernel, (grid, splits), *operands, counts, *numbers, **constexprs)
        total += counts.sum(0, dtype=torch.int64)
    return total[1], total[0]


def _row_blocks(n: int, block: int, some: slice | None) -> tuple[int, int]:
    """The first block of some of n rows, and the one after the last."""
    begin, end, _ = (some or slice(None)).indices(n)
    if begin % block or (end % block and end < n):
        raise ValueError(f"rows must be whole blocks of {block}, got {begin} to {end} of {n}")
    return begin // block, cdiv(end, block)


class ImpostorPairs(NamedTuple):
    """Positions of the pairs whose score lies in one window, and how many score above it."""

    first: Tensor
    second: Tensor
    above: int


def list_impostor_pairs(
    z: Tensor, labels: Tensor, windows: Sequence[tuple[float, float]], capacity: int, rows: slice | None = None
) -> list[ImpostorPairs] | None:
    """The impostor pairs i < j with a score between two ends, both included, for every window, in no order.

    Args:
        z: (n, d) embeddings, float32.
        labels: (n,) int64, ascending.
        windows: ends.
        capacity: rows of tiles with such a pair that are listed at most, for each window.
        rows: i is among these, which begin at a multiple of the row blocks; by default all.

    Returns:
        One list for each window, or None where there is no room for all.
    """
    with torch.no_grad(), torch.cuda.device_of(z):
        return _list_impostor_pairs(z, labels, windows, capacity, rows)


def _list_impostor_pairs(
    z: Tensor, labels: Tensor, windows: Sequence[tuple[float, float]], capacity: int, some: slice | None
) -> list[ImpostorPairs] | None:
    precision = "bf16x3" if z.is_cuda else "ieee"
    rows = prepare_operands(z, labels, None, precision, True)
    tile = select_config(precision, rows.head_dim).forward
    ends = torch.tensor(windows, dtype=torch.float32).T.contiguous().to(z.device)
    above = torch.zeros(len(windows), rows.padded, dtype=torch.int32, device=z.device)
    where = torch.empty(len(windows), capacity, dtype=torch.int64, device=z.device)
    words = cdiv(tile.block_n, WORD)
    bits = torch.empty(len(windows), capacity, words, dtype=torch.int64, device=z.device)
    count = torch.zeros(len(windows), dtype=torch.int32, device=z.device)
    start, end = _row_blocks(rows.n, tile.block_m, some)
    blocks = end - start
    splits = min(8, max(1, LEAST_PROGRAMS // max(blocks, 1))) if z.is_cuda else 1
    operands = (rows.hi, rows.lo, rows.positive_begin, rows.positive_end)
    constexprs = tile.constexprs(precision, rows.head_dim) | tile.launch_options
    constexprs |= {"WINDOWS": len(windows), "WORDS": words, "WORD": WORD}
    numbers = (start, rows.n, rows.padded, splits, capacity)
    if blocks:
        list_impostor_pairs_kernel[(blocks, splits)](*operands, ends, above, where, bits, count, *numbers, **constexprs)
    found, over = torch.stack([count, above.sum(1)]).tolist()  # one wait for the device
    if max(found) > capacity:
        return None
    return [
        ImpostorPairs(*_unpack_bits(where[k, :some], bits[k, :some], rows.padded), over[k])
        for k, some in enumerate(found)
    ]


def _unpack_bits(where: Tensor, bits: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the bits that are set, some rows of tiles at a time."""
    offset, parts = torch.arange(WORD, device=bits.device), []
    for start in range(0, len(where), step := BITS_PER_PASS // (WORD * bits.shape[1])):
        at, word, column = ((bits[start : start + step, :, None] >> offset) & 1).nonzero().unbind(1)
        hit = where[start : start + step][at]  # the row, and where its tile begins
        parts.append(torch.stack([hit // padded, hit % padded + word * WORD + column]))
    first, second = torch.cat([where.new_empty(2, 0), *parts], 1)
    return first, second


@triton.jit
def score_histogram_kernel(
    Q, Q_LO, POS_BEGIN, POS_END, COUNTS, first_block, n, splits, copies, bins, low, per_unit,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Each pair above the diagonal once, into its bin.

    Grid: (row blocks, splits), from row block ``first_block`` on. All programs add to COUNTS (copies, impostor /
    genuine, bins) int32 by atomics, to the copy of their row block. Q: operands of PRECISION.
    Cost: n·n·HEAD_DIM FLOPs (× 3 for bf16x3) and one atomic addition a pair.
    """
    row = (first_block + tl.program_id(0)) * BLOCK_M
    split = tl.program_id(1)
    offs_m = row + tl.arange(0, BLOCK_M)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    rows = Operand(Q, Q_LO)
    q = load_rows(rows, row, BLOCK_M, BLOCK_K, HEAD_DIM, PRECISION, False)
    tiles = find_tiles(POS_BEGIN, POS_END, row, n, n, BLOCK_M, BLOCK_N, row // BLOCK_N)
    counts = COUNTS + (tl.program_id(0) % copies) * 2 * bins
    one = tl.full((BLOCK_M, BLOCK_N), 1, tl.int32)
    bare = count_bare(tiles)
    for t in range(bare * split // splits, bare * (split + 1) // splits):
        j = bare_tile(tiles, t)
        s = similarity_tile(q, rows, rows, row, j * BLOCK_N, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, PRECISION, False)
        at = find_bin(s, low, per_unit, bins)
        tl.atomic_add(counts + at, one, sem="relaxed")
    for t in range(split, count_masked(tiles), splits):
        j = masked_tile(tiles, t)
        s = similarity_tile(q, rows, rows, row, j * BLOCK_N, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, PRECISION, False)
        offs_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
        keep = upper_triangle_mask(offs_m, offs_n, n)
        same = (offs_n[None, :] >= pos_begin[:, None]) & (offs_n[None, :] < pos_end[:, None])
        at = find_bin(s, low, per_unit, bins) + tl.where(same, bins, 0)
        tl.atomic_add(counts + at, one, mask=keep, sem="relaxed")


@triton.jit
def find_bin(s, low, per_unit, bins):
    """The bin of each score."""
    at = tl.floor((s - low) * per_unit).to(tl.int32)
    return tl.minimum(tl.maximum(at, 0), bins - 1)


@triton.jit
def list_impostor_pairs_kernel(
    Q, Q_LO, POS_BEGIN, POS_END, ENDS, ABOVE, WHERE, BITS, COUNT, first_block, n, padded, splits, capacity,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, WINDOWS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Each impostor pair above the diagonal once: rows of tiles with a score inside a window are listed.

    Grid: (row blocks, splits), from row block ``first_block`` on. All programs add to ABOVE (windows, padded) int32,
    scores above each window by row, and to COUNT (windows,) int32, rows of tiles with hits, by atomics; what COUNT gave
    a program it owns: WHERE (windows, capacity) int64, which row and tile, and BITS (windows, capacity, words) int64,
    which columns of it.
    Cost: n·n·HEAD_DIM FLOPs (× 3 for bf16x3); 8 · (1 + words) bytes a row of a tile with hits.
    """
    row = (first_block + tl.program_id(0)) * BLOCK_M
    split = tl.program_id(1)
    offs_m = row + tl.arange(0, BLOCK_M)
    pos_begin = tl.load(POS_BEGIN + offs_m)
    pos_end = tl.load(POS_END + offs_m)
    rows = Operand(Q, Q_LO)
    q = load_rows(rows, row, BLOCK_M, BLOCK_K, HEAD_DIM, PRECISION, False)
    tiles = find_tiles(POS_BEGIN, POS_END, row, n, n, BLOCK_M, BLOCK_N, row // BLOCK_N)
    bare = count_bare(tiles)
    for t in range(bare * split // splits, bare * (split + 1) // splits):
        j = bare_tile(tiles, t)
        s = similarity_tile(q, rows, rows, row, j * BLOCK_N, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, PRECISION, False)
        list_tile(
            s, offs_m, j * BLOCK_N, ENDS, ABOVE, WHERE, BITS, COUNT, padded, capacity,
            BLOCK_M, BLOCK_N, WINDOWS, WORDS, WORD,
        )  # fmt: skip
    for t in range(split, count_masked(tiles), splits):
        j = masked_tile(tiles, t)
        s = similarity_tile(q, rows, rows, row, j * BLOCK_N, BLOCK_M, BLOCK_N, BLOCK_K, HEAD_DIM, PRECISION, False)
        offs_n = j * BLOCK_N + tl.arange(0, BLOCK_N)
        keep = upper_triangle_mask(offs_m, offs_n, n)
        keep &= (offs_n[None, :] < pos_begin[:, None]) | (offs_n[None, :] >= pos_end[:, None])
        s = tl.where(keep, s, -4.0)  # below every window
        list_tile(
            s, offs_m, j * BLOCK_N, ENDS, ABOVE, WHERE, BITS, COUNT, padded, capacity,
            BLOCK_M, BLOCK_N, WINDOWS, WORDS, WORD,
        )  # fmt: skip


@triton.jit
def list_tile(
    s, offs_m, column, ENDS, ABOVE, WHERE, BITS, COUNT, padded, capacity,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWS: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Count what lies above each window; list the rows of the tile that have something inside, with its columns."""
    for w in tl.static_range(WINDOWS):
        low = tl.load(ENDS + w)
        high = tl.load(ENDS + WINDOWS + w)
        over = tl.sum((s > high).to(tl.int32), 1)
        hit = tl.sum((s >= low).to(tl.int32), 1) > over
        tl.atomic_add(ABOVE + w * padded + offs_m, over, mask=over > 0, sem="relaxed")
        if tl.sum(hit.to(tl.int32), 0) > 0:  # noqa: SIM102, the second question is only asked after the first
            if tl.load(COUNT + w, volatile=True) <= capacity:  # an overflow need not be counted to its end
                at = tl.atomic_add(COUNT + w + tl.zeros((BLOCK_M,), tl.int32), 1, mask=hit, sem="relaxed")
                to = tl.full((BLOCK_M,), w, tl.int64) * capacity + at
                fits = hit & (at < capacity)
                tl.store(WHERE + to, offs_m.to(tl.int64) * padded + column, mask=fits)
                for k in tl.static_range(WORDS):
                    place = tl.arange(0, BLOCK_N) - k * WORD
                    mine = (place >= 0) & (place < WORD)
                    bit = tl.where(mine, tl.full((BLOCK_N,), 1, tl.int64) << tl.where(mine, place, 0).to(tl.int64), 0)
                    inside = (s >= low) & (s <= high)
                    tl.store(BITS + to * WORDS + k, tl.sum(tl.where(inside, bit[None, :], 0), 1), mask=fits)
