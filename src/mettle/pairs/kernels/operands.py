# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Rows made ready for the kernels: sorted by label, on the unit sphere, in the operands' precision; and back again.

Sorting turns every mask into a range: the positives of row i are the columns lo_i <= j < hi_i. Small batches are
ranked inside the kernel by counting, so that one launch does it all; larger ones are sorted by torch first. Where any
order of the labels will do, a hash table groups them in a quarter of the time. Operands of products carry a factor that
the caller names; `full` does not.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.kernels.config import parts, power
from mettle.pairs.kernels.launch import Script

PAD = 256  # rows are padded with zeros to a multiple of this: no load ever needs a mask
SMALL = 64  # the same in the interpreter, where padding costs as much as rows
RANKED = 4096  # rows up to which counting is quicker than sorting
HELD = 4096  # entries of a block of rows


@dataclass(frozen=True)
class Rows:
    """One side of the comparison, in label order, padded."""

    n: int
    d: int
    full: Tensor  # (padded, width) float32
    high: Tensor  # operands of the products, times the factor: float16, or the upper bfloat16 half, or float32
    low: Tensor  # the lower bfloat16 half where there is one, else `high`
    order: Tensor  # (padded,) where each row came from
    lo: Tensor  # (padded,) first positive column on the other side
    hi: Tensor  # (padded,) behind the last one
    inverse: Tensor  # (padded,) 1 / length of the row as it came

    @property
    def width(self) -> int:
        """Columns, padding included."""
        return self.full.shape[1]


def width(d: int) -> int:
    """Columns that products run over: a power of two up to 256, whole blocks of 128 beyond."""
    return max(16, power(d)) if d <= 256 else parts(d, 128) * 128


def span(wide: int) -> tuple[int, int, int]:
    """Columns, a power of two, and rows of a block that the small kernels hold, and the warps to hold it."""
    block = power(wide)
    return block, min(32, max(1, HELD // block)), 4 if block <= 512 else 8


def prepared(
    z: Tensor,
    labels: Tensor,
    other: Tensor | None,
    mode: str,
    unit: bool,
    *,
    by: float = 1.0,
    grouped: bool = False,
    like: Rows | None = None,
    script: Script | None = None,
    name: str = "",
) -> Rows:
    """``z`` in label order.

    Args:
        z: (n, d) embeddings.
        labels: (n,) theirs.
        other: labels of the columns, None for the same rows.
        mode: precision of the operands.
        unit: whether rows are brought to length 1.
        by: the factor of the operands; a script has one.
        grouped: the order may be any that keeps a label's rows together, and another one in every run.
        like: rows of the same labels, to be put in the same order.
        script: where the launch is remembered.
        name: by which it is.
    """
    n, d = z.shape
    z = z if z.stride(1) == 1 else z.contiguous()
    whole = SMALL if mode == "exact" else PAD
    padded, wide = parts(n, whole) * whole, width(d)
    full = torch.empty(padded, wide, dtype=torch.float32, device=z.device)
    kind = {"half": torch.float16, "split": torch.bfloat16, "exact": torch.float32}[mode]
    high = torch.empty_like(full, dtype=kind)
    low = torch.empty_like(high) if mode == "split" else high
    inverse = torch.empty(padded, dtype=torch.float32, device=z.device)
    columns = labels if other is None else other
    at, script = labels, script or Script()
    if like is not None:
        rank, order, lo, hi = "known", like.order, like.lo, like.hi
    else:
        rank, (order, lo, hi) = "count", torch.empty(3, padded, dtype=torch.int32, device=z.device).unbind()
        if grouped and other is None and n > RANKED:
            rank, (labels, columns, at) = "group", _grouped(labels, script, name)
        elif n > RANKED or len(columns) > RANKED:
            rank, (labels, at) = "search", torch.sort(labels, stable=True)
            columns = labels if other is None else torch.sort(other).values
    block, rows, warps = span(wide)
    script.launch(
        f"prepare {rank} {name}",
        prepare_kernel,
        (z, labels, columns, at, order, lo, hi, inverse, full, high, low),
        lambda: (
            (parts(padded, rows),),
            (n, len(columns), padded, d, z.stride(0), len(columns).bit_length(), by),
            {
                "WIDTH": wide,
                "BLOCK": block,
                "ROWS": rows,
                "RANK": rank,
                "UNIT": unit,
                "MODE": mode,
                "num_warps": warps,
            },
        ),
    )
    return Rows(n, d, full, high, low, order, lo, hi, inverse)


def _grouped(labels: Tensor, script: Script, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of each place of a hash table, these summed up, and (2, n): the place of each row and its number there."""
    n, size = len(labels), 2 * power(len(labels))
    table = torch.zeros(2, size, dtype=torch.int32, device=labels.device)
    at = torch.empty(2, n, dtype=torch.int32, device=labels.device)
    script.launch(
        f"group {name}",
        group_kernel,
        (labels, table, at),
        lambda: ((parts(n, 128),), (n, size), {"SIZE": 128, "num_warps": 4}),
    )
    return table[1], torch.cumsum(table[1], 0, dtype=torch.int32), at


def projected(
    rows: Rows,
    g: Tensor,
    factor: Tensor | None,
    stats: Tensor,
    like: Tensor,
    unit: bool,
    *,
    script: Script | None = None,
    name: str = "",
) -> Tensor:
    """Gradient of the embeddings as they came, from that of the prepared rows (times factor · 1 / anchors)."""
    out = torch.empty(rows.n, rows.d, dtype=like.dtype, device=like.device)
    block, size, warps = span(rows.width)
    (script or Script()).launch(
        f"project {name}",
        project_kernel,
        (g, rows.full, rows.inverse, rows.order, stats if factor is None else factor, stats, out),
        lambda: (
            (parts(rows.n, size),),
            (rows.n, rows.d),
            {
                "WIDTH": rows.width, "BLOCK": block, "ROWS": size, "UNIT": unit, "MEAN": factor is not None,
                "num_warps": warps,
            },
        ),
    )  # fmt: skip
    return out


@triton.jit
def group_kernel(LABELS, PLACES, AT, n, size, SIZE: tl.constexpr):
    """A place for each label: PLACES (2, size) holds 1 + a row that has it, or 0, and how many rows do."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    real = row < n
    label = tl.load(LABELS + row, mask=real, other=0).to(tl.int64)
    mixed = (label ^ (label >> 32)) * -7046029254386353131  # by the golden ratio
    place = (mixed >> 33).to(tl.int32) & (size - 1)
    waiting = real
    while tl.max(waiting.to(tl.int32), 0) > 0:
        there = tl.atomic_cas(PLACES + place, tl.zeros((SIZE,), tl.int32), tl.where(real, row + 1, 0), sem="relaxed")
        same = (there == 0) | (tl.load(LABELS + there - 1, mask=real & (there > 0), other=0) == label)
        waiting = waiting & (same == 0)
        place = tl.where(waiting, (place + 1) & (size - 1), place)
    tl.store(AT + row, place, mask=real)
    tl.store(AT + n + row, tl.atomic_add(PLACES + size + place, 1, mask=real, sem="relaxed"), mask=real)


@triton.jit
def prepare_kernel(
    Z, LABELS, COLUMNS, AT, ORDER, LO, HI, INVERSE, FULL, HIGH, LOW, n, m, padded, d, stride, steps, by,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Rank, normalise, split and store a block of rows.

    RANK: by "count"ing labels as they come; by "search"ing in LABELS and COLUMNS, which are sorted, rows from AT; as
    "group"ed, LABELS rows of each place, COLUMNS up to it, AT places and numbers; or it is "known" already.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    if RANK == "count":
        own = tl.load(LABELS + row, mask=real, other=0)
        at = tl.zeros((ROWS,), tl.int32)
        for start in range(0, n, 128):  # rows of a smaller label, or of the same label further up
            j = start + tl.arange(0, 128)
            label = tl.load(LABELS + j, mask=j < n, other=0)
            before = (label[None, :] < own[:, None]) | ((label[None, :] == own[:, None]) & (j[None, :] < row[:, None]))
            at += tl.sum((before & (j < n)[None, :]).to(tl.int32), 1)
        lo = tl.zeros((ROWS,), tl.int32)
        hi = tl.zeros((ROWS,), tl.int32)
        for start in range(0, m, 128):
            j = start + tl.arange(0, 128)
            label = tl.load(COLUMNS + j, mask=j < m, other=0)
            there = (j < m)[None, :]
            lo += tl.sum(((label[None, :] < own[:, None]) & there).to(tl.int32), 1)
            hi += tl.sum(((label[None, :] <= own[:, None]) & there).to(tl.int32), 1)
    if RANK == "group":
        place = tl.load(AT + row, mask=real, other=0)
        hi = tl.load(COLUMNS + place)
        lo = hi - tl.load(LABELS + place)
        at = lo + tl.load(AT + n + row, mask=real, other=0)
    if RANK == "count" or RANK == "group":
        at = tl.where(real, at, row)
        source = row
        tl.store(ORDER + at, row, mask=row < padded)
        tl.store(LO + at, tl.where(real, lo, 0), mask=row < padded)
        tl.store(HI + at, tl.where(real, hi, 0), mask=row < padded)
    else:
        at = row
        if RANK == "search":
            own = tl.load(LABELS + row, mask=real, other=0)
            source = tl.load(AT + row, mask=real, other=0).to(tl.int32)
            lo = tl.zeros((ROWS,), tl.int32)
            hi = tl.zeros((ROWS,), tl.int32)
            lo_end = tl.full((ROWS,), 0, tl.int32) + m
            hi_end = lo_end
            for _ in range(steps):  # the first column of this label, and of a larger one, by halves
                middle = (lo + lo_end) // 2
                right = tl.load(COLUMNS + middle, mask=middle < lo_end, other=0) < own
                lo_end = tl.where(right, lo_end, middle)
                lo = tl.where(right & (middle < lo_end), middle + 1, lo)
                middle = (hi + hi_end) // 2
                right = tl.load(COLUMNS + middle, mask=middle < hi_end, other=0) <= own
                hi_end = tl.where(right, hi_end, middle)
                hi = tl.where(right & (middle < hi_end), middle + 1, hi)
            tl.store(ORDER + row, source, mask=row < padded)
            tl.store(LO + row, tl.where(real, lo, 0), mask=row < padded)
            tl.store(HI + row, tl.where(real, hi, 0), mask=row < padded)
        else:
            source = tl.load(ORDER + row, mask=real, other=0)
    c = tl.arange(0, BLOCK)
    inside = real[:, None] & (c < d)[None, :]
    z = tl.load(Z + source.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if UNIT:
        size = tl.max(tl.abs(z), 1)
        none = size < 1e-30
        scaled = z / tl.where(none, 1.0, size)[:, None]
        length = tl.sqrt(tl.sum(scaled * scaled, 1))
        length = tl.where(none, 1.0, length)
        tl.store(INVERSE + at, tl.where(none, 0.0, 1.0 / (size * length)), mask=row < padded)
        # z - z is 0, or NaN where the embedding is broken: a maximum may overlook that.
        z = tl.where(none[:, None], 0.0, scaled / length[:, None]) + (z - z)
    put = (row < padded)[:, None] & (c < WIDTH)[None, :]
    where = at.to(tl.int64)[:, None] * WIDTH + c[None, :]
    tl.store(FULL + where, z, mask=put)
    z = z * by
    high = z.to(HIGH.dtype.element_ty)
    tl.store(HIGH + where, high, mask=put)
    if MODE == "split":
        tl.store(LOW + where, (z - high.to(tl.float32)).to(tl.bfloat16), mask=put)


@triton.jit
def project_kernel(
    G, FULL, INVERSE, ORDER, FACTOR, STATS, OUT, n, d,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Take away what would only change a row's length, undo the sort."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    c = tl.arange(0, BLOCK)
    inside = real[:, None] & (c < d)[None, :]
    where = row.to(tl.int64)[:, None] * WIDTH + c[None, :]
    g = tl.load(G + where, mask=inside, other=0.0)
    if UNIT:
        z = tl.load(FULL + where, mask=inside, other=0.0)
        inverse = tl.load(INVERSE + row, mask=real, other=0.0)
        g = (g - z * tl.sum(z * g, 1)[:, None]) * inverse[:, None]
    if MEAN:
        g = g * (tl.load(FACTOR).to(tl.float32) * tl.load(STATS + 1))
    to = tl.load(ORDER + row, mask=real, other=0).to(tl.int64)
    tl.store(OUT + to[:, None] * d + c[None, :], g.to(OUT.dtype.element_ty), mask=inside)
