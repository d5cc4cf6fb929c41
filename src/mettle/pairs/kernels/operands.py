# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
"""Embeddings made ready for the kernels: sorted by label, normalized, in the operands' precision; and gradients back.

Sorting turns every mask into a range: the positives of row i are the columns positive_begin[i] <= j < positive_end[i].
Small batches are ranked inside the kernel by counting, so that one launch does it all; larger ones are sorted by torch
first. Where any order of the labels will do, a hash table groups them in a quarter of the time. Operands of products
carry a factor that the caller names; ``normalized`` does not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.kernels.config import cdiv, next_power_of_2
from mettle.pairs.kernels.launch import Launch, LaunchCache
from mettle.pairs.kernels.primitives import read_number

PAD = 256  # rows are padded with zeros to a multiple of this: no load ever needs a mask
INTERPRETER_PAD = 64  # the same in the interpreter, where padding costs as much as rows
COUNTED_ROWS = 4096  # up to which counting is quicker than sorting
BLOCK_ENTRIES = 4096  # of a block of rows
HASH_BLOCK = 128  # rows of a program that hashes labels

DTYPES = {"fp16": torch.float16, "bf16x3": torch.bfloat16, "ieee": torch.float32}


@dataclass(frozen=True)
class Operands:
    """One side of the comparison, in label order, padded."""

    n: int
    d: int
    normalized: Tensor  # (padded, head_dim) float32
    hi: Tensor  # operands of the products, times their factor: float16, or the upper bfloat16 half, or float32
    lo: Tensor  # the lower bfloat16 half where there is one, else `hi`
    order: Tensor  # (padded,) where each row came from
    positive_begin: Tensor  # (padded,) first positive column on the other side
    positive_end: Tensor  # (padded,) behind the last one
    inverse_norm: Tensor  # (padded,) 1 / length of the row as it came

    @property
    def head_dim(self) -> int:
        """Columns, padding included."""
        return self.normalized.shape[1]

    @property
    def padded(self) -> int:
        """Rows, padding included."""
        return self.normalized.shape[0]


class RowBlockConfig(NamedTuple):
    """What a program of the kernels that treat each row once holds, and the warps to hold it."""

    columns: int  # a power of two
    rows: int
    num_warps: int


def padded_head_dim(d: int) -> int:
    """Columns that products run over: a power of two up to 256, whole blocks of 128 beyond."""
    return max(16, next_power_of_2(d)) if d <= 256 else cdiv(d, 128) * 128


@cache
def select_row_block(head_dim: int) -> RowBlockConfig:
    """For rows of this width."""
    columns = next_power_of_2(head_dim)
    return RowBlockConfig(columns, min(32, max(1, BLOCK_ENTRIES // columns)), 4 if columns <= 512 else 8)


def sort_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Labels in order, and where each came from."""
    return torch.sort(labels, stable=True)  # type: ignore[return-value]


def prepare_operands(
    z: Tensor,
    labels: Tensor,
    column_labels: Tensor | None,
    precision: str,
    normalize: bool,
    *,
    operand_scale: float | Tensor = 1.0,
    hash_grouped: bool = False,
    sort: Callable[[Tensor], tuple[Tensor, Tensor]] = sort_labels,
    like: Operands | None = None,
    cache: LaunchCache | None = None,
    name: str = "",
) -> Operands:
    """``z`` in label order.

    Args:
        z: (n, d) embeddings.
        labels: (n,) theirs.
        column_labels: labels of the columns, None for the same rows.
        precision: of the operands.
        normalize: whether rows are brought to length 1.
        operand_scale: the factor that operands carry.
        sort: labels in order and where each came from; whoever compares two sides sorts each of them once.
        hash_grouped: the order may be any that keeps a label's rows together, and another one in every run.
        like: operands of the same labels, to be put in the same order.
        cache: where the launch is remembered.
        name: by which it is.
    """
    n, d = z.shape
    z = z if z.stride(1) == 1 else z.contiguous()
    whole = INTERPRETER_PAD if precision == "ieee" else PAD
    padded, head_dim = cdiv(n, whole) * whole, padded_head_dim(d)
    normalized = torch.empty(padded, head_dim, dtype=torch.float32, device=z.device)
    hi = torch.empty_like(normalized, dtype=DTYPES[precision])
    lo = torch.empty_like(hi) if precision == "bf16x3" else hi
    inverse_norm = torch.empty(padded, dtype=torch.float32, device=z.device)
    columns = labels if column_labels is None else column_labels
    source, cache = labels, cache or LaunchCache()
    if like is not None:
        ranking, order, begin, end = "given", like.order, like.positive_begin, like.positive_end
    else:
        ranking, (order, begin, end) = "count", torch.empty(3, padded, dtype=torch.int32, device=z.device).unbind()
        if hash_grouped and column_labels is None and n > COUNTED_ROWS:
            ranking, (labels, columns, source) = "hash", _hash_labels(labels, cache, name)
        elif n > COUNTED_ROWS or len(columns) > COUNTED_ROWS:
            ranking, (labels, source) = "search", sort(labels)
            columns = labels if column_labels is None else sort(column_labels)[0]
    block = select_row_block(head_dim)
    cache.launch(
        f"prepare {ranking} {name}",
        prepare_kernel,
        (z, labels, columns, source, order, begin, end, inverse_norm, normalized, hi, lo),
        lambda: Launch(
            (cdiv(padded, block.rows),),
            (n, len(columns), padded, d, z.stride(0), len(columns).bit_length()),
            {
                "HEAD_DIM": head_dim,
                "BLOCK": block.columns,
                "ROWS": block.rows,
                "RANKING": ranking,
                "NORMALIZE": normalize,
                "PRECISION": precision,
                "num_warps": block.num_warps,
            },
        ),
        (operand_scale,),
    )
    return Operands(n, d, normalized, hi, lo, order, begin, end, inverse_norm)


def _hash_labels(labels: Tensor, cache: LaunchCache, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of each slot of a hash table, these summed up, and (2, n): the slot of each row and its number there."""
    n, size = len(labels), 2 * next_power_of_2(len(labels))
    table = torch.zeros(2, size, dtype=torch.int32, device=labels.device)
    slots = torch.empty(2, n, dtype=torch.int32, device=labels.device)
    cache.launch(
        f"hash {name}",
        hash_labels_kernel,
        (labels, table, slots),
        lambda: Launch((cdiv(n, HASH_BLOCK),), (n, size), {"SIZE": HASH_BLOCK, "num_warps": 4}),
    )
    return table[1], torch.cumsum(table[1], 0, dtype=torch.int32), slots


def normalize_backward(
    operands: Operands,
    g: Tensor,
    g_mean: Tensor | None,
    stats: Tensor,
    like: Tensor,
    normalize: bool,
    *,
    scale: float | Tensor = 1.0,
    projections: Tensor | None = None,
    cache: LaunchCache | None = None,
    name: str = "",
) -> Tensor:
    """Gradient of the embeddings as they came, from that of the prepared rows (times scale · g_mean · 1 / anchors).

    ``projections``: (n,) float32 to be filled with the products of prepared rows and their gradients, in any order:
    their sum says how the loss changes with the scale of all similarities.
    """
    out = torch.empty(operands.n, operands.d, dtype=like.dtype, device=like.device)
    block = select_row_block(operands.head_dim)
    tensors = (g, operands.normalized, operands.inverse_norm, operands.order)
    (cache or LaunchCache()).launch(
        f"normalize backward {name}",
        normalize_backward_kernel,
        (*tensors, stats if g_mean is None else g_mean, stats, out, out if projections is None else projections),
        lambda: Launch(
            (cdiv(operands.n, block.rows),),
            (operands.n, operands.d),
            {
                "HEAD_DIM": operands.head_dim,
                "BLOCK": block.columns,
                "ROWS": block.rows,
                "NORMALIZE": normalize,
                "MEAN": g_mean is not None,
                "PROJECT": projections is not None,
                "num_warps": block.num_warps,
            },
        ),
        (scale,),
    )
    return out


@triton.jit
def hash_labels_kernel(LABELS, TABLE, SLOTS, n, size, SIZE: tl.constexpr):
    """A slot of a hash table for each label.

    Grid: (n / SIZE,). TABLE (2, size) int32, zero before, shared by all programs through atomics: 1 + a row that has
    the label of the slot, and how many rows do. SLOTS (2, n) int32: of each row its slot and its number there; a
    program owns SIZE rows. LABELS: (n,) of any integer type.
    """
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    real = row < n
    label = tl.load(LABELS + row, mask=real, other=0).to(tl.int64)
    mixed = (label ^ (label >> 32)) * -7046029254386353131  # by the golden ratio
    slot = (mixed >> 33).to(tl.int32) & (size - 1)
    waiting = real
    while tl.max(waiting.to(tl.int32), 0) > 0:
        there = tl.atomic_cas(TABLE + slot, tl.zeros((SIZE,), tl.int32), tl.where(real, row + 1, 0), sem="relaxed")
        same = (there == 0) | (tl.load(LABELS + there - 1, mask=real & (there > 0), other=0) == label)
        waiting = waiting & (same == 0)
        slot = tl.where(waiting, (slot + 1) & (size - 1), slot)
    tl.store(SLOTS + row, slot, mask=real)
    tl.store(SLOTS + n + row, tl.atomic_add(TABLE + size + slot, 1, mask=real, sem="relaxed"), mask=real)


@triton.jit
def measure_rows(z):
    """Rows over their largest entry, the lengths of these, the largest entries, and which rows have no direction."""
    largest = tl.max(tl.abs(z), 1)
    none = largest < 1e-30
    scaled = z / tl.where(none, 1.0, largest)[:, None]
    length = tl.where(none, 1.0, tl.sqrt(tl.sum(scaled * scaled, 1)))
    return scaled, length, largest, none


@triton.jit
def normalize_rows(z):
    """Rows of length 1, zero where they have no direction, and 1 / their lengths; broken ones stay so."""
    scaled, length, largest, none = measure_rows(z)
    # z - z is 0, or NaN where the embedding is broken: a maximum may overlook that.
    unit = tl.where(none[:, None], 0.0, scaled / length[:, None]) + (z - z)
    return unit, tl.where(none, 0.0, 1.0 / (largest * length))


@triton.jit
def prepare_kernel(
    Z, LABELS, COLUMN_LABELS, SOURCE, ORDER, POS_BEGIN, POS_END, INVERSE_NORM, NORMALIZED, HI, LO,
    n, m, padded, d, stride, steps, operand_scale,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RANKING: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rank, normalize, split and store a block of rows.

    Grid: (padded / ROWS,). A program reads ROWS rows of Z (n, d), of any float type, and owns the rows of the outputs
    that they go to: ORDER, POS_BEGIN, POS_END int32, INVERSE_NORM and NORMALIZED float32, HI and LO of PRECISION.
    RANKING: labels are ranked by ``count``ing; or by ``search``ing in LABELS and COLUMN_LABELS, which are sorted, rows
    from SOURCE, in ``steps`` halvings; or by ``hash``, LABELS rows of each slot, COLUMN_LABELS up to it, SOURCE slots
    and numbers; or the order is ``given``.
    Cost: one read of Z, 4 to 8 bytes written an entry; counting compares n labels with n + m.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    if RANKING == "count":
        own = tl.load(LABELS + row, mask=real, other=0)
        at = tl.zeros((ROWS,), tl.int32)
        for start in range(0, n, 128):  # rows of a smaller label, or of the same label further up
            j = start + tl.arange(0, 128)
            label = tl.load(LABELS + j, mask=j < n, other=0)
            before = (label[None, :] < own[:, None]) | ((label[None, :] == own[:, None]) & (j[None, :] < row[:, None]))
            at += tl.sum((before & (j < n)[None, :]).to(tl.int32), 1)
        begin = tl.zeros((ROWS,), tl.int32)
        end = tl.zeros((ROWS,), tl.int32)
        for start in range(0, m, 128):
            j = start + tl.arange(0, 128)
            label = tl.load(COLUMN_LABELS + j, mask=j < m, other=0)
            there = (j < m)[None, :]
            begin += tl.sum(((label[None, :] < own[:, None]) & there).to(tl.int32), 1)
            end += tl.sum(((label[None, :] <= own[:, None]) & there).to(tl.int32), 1)
    if RANKING == "hash":
        slot = tl.load(SOURCE + row, mask=real, other=0)
        end = tl.load(COLUMN_LABELS + slot)
        begin = end - tl.load(LABELS + slot)
        at = begin + tl.load(SOURCE + n + row, mask=real, other=0)
    if RANKING == "count" or RANKING == "hash":
        at = tl.where(real, at, row)
        source = row
        tl.store(ORDER + at, row, mask=row < padded)
        tl.store(POS_BEGIN + at, tl.where(real, begin, 0), mask=row < padded)
        tl.store(POS_END + at, tl.where(real, end, 0), mask=row < padded)
    else:
        at = row
        if RANKING == "search":
            own = tl.load(LABELS + row, mask=real, other=0)
            source = tl.load(SOURCE + row, mask=real, other=0).to(tl.int32)
            begin = tl.zeros((ROWS,), tl.int32)
            end = tl.zeros((ROWS,), tl.int32)
            begin_stop = tl.full((ROWS,), 0, tl.int32) + m
            end_stop = begin_stop
            for _ in range(steps):  # the first column of this label, and of a larger one, by halves
                middle = (begin + begin_stop) // 2
                right = tl.load(COLUMN_LABELS + middle, mask=middle < begin_stop, other=0) < own
                begin_stop = tl.where(right, begin_stop, middle)
                begin = tl.where(right & (middle < begin_stop), middle + 1, begin)
                middle = (end + end_stop) // 2
                right = tl.load(COLUMN_LABELS + middle, mask=middle < end_stop, other=0) <= own
                end_stop = tl.where(right, end_stop, middle)
                end = tl.where(right & (middle < end_stop), middle + 1, end)
            tl.store(ORDER + row, source, mask=row < padded)
            tl.store(POS_BEGIN + row, tl.where(real, begin, 0), mask=row < padded)
            tl.store(POS_END + row, tl.where(real, end, 0), mask=row < padded)
        else:
            source = tl.load(ORDER + row, mask=real, other=0)
    c = tl.arange(0, BLOCK)
    inside = real[:, None] & (c < d)[None, :]
    z = tl.load(Z + source.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORMALIZE:
        # As `normalize_rows`, in the order of operations in which this kernel was measured.
        scaled, length, largest, none = measure_rows(z)
        tl.store(INVERSE_NORM + at, tl.where(none, 0.0, 1.0 / (largest * length)), mask=row < padded)
        z = tl.where(none[:, None], 0.0, scaled / length[:, None]) + (z - z)
    there = (row < padded)[:, None] & (c < HEAD_DIM)[None, :]
    to = at.to(tl.int64)[:, None] * HEAD_DIM + c[None, :]
    tl.store(NORMALIZED + to, z, mask=there)
    z = z * read_number(operand_scale)
    hi = z.to(HI.dtype.element_ty)
    tl.store(HI + to, hi, mask=there)
    if PRECISION == "bf16x3":
        tl.store(LO + to, (z - hi.to(tl.float32)).to(tl.bfloat16), mask=there)


@triton.jit
def normalize_backward_kernel(
    G, NORMALIZED, INVERSE_NORM, ORDER, G_MEAN, STATS, OUT, PROJECTIONS, n, d, scale,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORMALIZE: tl.constexpr, MEAN: tl.constexpr,
    PROJECT: tl.constexpr,
):  # fmt: skip
    """Take away what would only change a row's length, undo the sort.

    Grid: (n / ROWS,). A program reads ROWS rows of G and NORMALIZED (padded, HEAD_DIM) float32 and owns the rows of
    OUT (n, d) that they came from, times ``scale``. MEAN: times G_MEAN · STATS[1] too. PROJECT: PROJECTIONS (n,)
    float32 are the products of rows of NORMALIZED and of the gradient. Cost: 8 bytes read an entry, one write of OUT.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    c = tl.arange(0, BLOCK)
    inside = real[:, None] & (c < d)[None, :]
    at = row.to(tl.int64)[:, None] * HEAD_DIM + c[None, :]
    g = tl.load(G + at, mask=inside, other=0.0) * read_number(scale)
    along = tl.zeros((ROWS,), tl.float32)
    if NORMALIZE:
        z = tl.load(NORMALIZED + at, mask=inside, other=0.0)
        inverse_norm = tl.load(INVERSE_NORM + row, mask=real, other=0.0)
        along = tl.sum(z * g, 1)
        g = (g - z * along[:, None]) * inverse_norm[:, None]
    if MEAN:
        g = g * (tl.load(G_MEAN).to(tl.float32) * tl.load(STATS + 1))
    if PROJECT:
        if MEAN:
            along = along * (tl.load(G_MEAN).to(tl.float32) * tl.load(STATS + 1))
        tl.store(PROJECTIONS + row, along, mask=real)
    to = tl.load(ORDER + row, mask=real, other=0).to(tl.int64)
    tl.store(OUT + to[:, None] * d + c[None, :], g.to(OUT.dtype.element_ty), mask=inside)
