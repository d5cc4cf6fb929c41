# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Rows made ready for the kernels: sorted by label, on the unit sphere, in the operands' precision; and back again.

Sorting turns every mask into a range: the positives of row i are the columns lo_i <= j < hi_i. Small batches are
ranked inside the kernel by counting, so that one launch does it all; larger ones are sorted by torch first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.pairs.fused.launch import Script
from mettle.pairs.fused.table import parts, power

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
    high: Tensor  # operands of the products: float16, or the upper bfloat16 half, or `full` itself
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
    high = full if mode == "exact" else torch.empty_like(full, dtype=kind)
    low = torch.empty_like(high) if mode == "split" else high
    inverse = torch.empty(padded, dtype=torch.float32, device=z.device)
    columns = labels if other is None else other
    ranked = n <= RANKED and len(columns) <= RANKED and like is None
    if like is not None:
        order, lo, hi = like.order, like.lo, like.hi
    else:
        order, lo, hi = torch.empty(3, padded, dtype=torch.int32, device=z.device).unbind()
        if not ranked:
            _sorted(labels, other, order[:n], lo[:n], hi[:n])
    block, rows, warps = span(wide)
    (script or Script()).launch(
        f"prepare {name}",
        prepare_kernel,
        (z, labels, columns, order, lo, hi, inverse, full, high, low),
        lambda: (
            (parts(padded, rows),),
            (n, len(columns), padded, d, z.stride(0)),
            {
                "WIDTH": wide,
                "BLOCK": block,
                "ROWS": rows,
                "RANK": ranked,
                "UNIT": unit,
                "MODE": mode,
                "num_warps": warps,
            },
        ),
    )
    return Rows(n, d, full, high, low, order, lo, hi, inverse)


def _sorted(labels: Tensor, other: Tensor | None, order: Tensor, lo: Tensor, hi: Tensor) -> None:
    """Order and ranges of many rows, by torch."""
    by_label, at = torch.sort(labels, stable=True)
    right = by_label if other is None else torch.sort(other).values
    torch.searchsorted(right, by_label, out_int32=True, out=lo)
    torch.searchsorted(right, by_label, right=True, out_int32=True, out=hi)
    order.copy_(at)


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
def prepare_kernel(
    Z, LABELS, COLUMNS, ORDER, LO, HI, INVERSE, FULL, HIGH, LOW, n, m, padded, d, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, UNIT: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    """Rank, normalise, split and store a block of rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    if RANK:
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
        at = tl.where(real, at, row)
        source = row
        tl.store(ORDER + at, row, mask=row < padded)
        tl.store(LO + at, tl.where(real, lo, 0), mask=row < padded)
        tl.store(HI + at, tl.where(real, hi, 0), mask=row < padded)
    else:
        at = row
        source = tl.load(ORDER + row, mask=real, other=0)
        tl.store(LO + row, tl.zeros((ROWS,), tl.int32), mask=(row >= n) & (row < padded))
        tl.store(HI + row, tl.zeros((ROWS,), tl.int32), mask=(row >= n) & (row < padded))
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
    if MODE == "half":
        tl.store(HIGH + where, z.to(tl.float16), mask=put)
    if MODE == "split":
        high = z.to(tl.bfloat16)
        tl.store(HIGH + where, high, mask=put)
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
