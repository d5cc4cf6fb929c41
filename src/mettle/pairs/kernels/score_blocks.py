# pyright: reportMissingImports=false
"""Gradients of wide embeddings: h goes through memory, block by block, and h·z is left to the library's product.

Compared with themselves, embeddings have a symmetric h: a block away from the diagonal pulls the rows of both its
sides, and only half of the scores are computed again.
"""

import torch
from torch import Tensor

from mettle.pairs.kernels.backward import far_scores
from mettle.pairs.kernels.config import Shape
from mettle.pairs.kernels.launch import Script
from mettle.pairs.kernels.operands import PAD, Rows

SIDE = 8192  # rows of a block, and columns at most: products of few columns then fill every multiprocessor
ROOM = 1 << 25  # bytes of a block, or this many times the embeddings' entries where that is more
SUMMED = 2048  # columns of a library product in float32 accuracy: half as many take 2 % longer
TIMES = {"half": 16, "split": 20, "exact": 8}


def written(
    a: Rows, b: Rows, operands: tuple, tables: tuple, numbers: tuple, flags: dict, shape: Shape, entries: int,
    script: Script,
) -> Tensor:  # fmt: skip
    """(1, padded, width) gradient of the rows of ``a``, times ``numbers[-1]`` / the largest coefficient.

    ``entries`` of all embeddings that are compared with say what memory may be used.
    """
    padded, other, mode = len(a.full), len(b.full), flags["MODE"]
    g = torch.zeros(1, padded, a.width, device=a.full.device)
    tallest = min(SIDE, padded)
    widest = min(_columns(mode, tallest, entries), other)
    h = torch.empty(tallest * widest, dtype=a.high.dtype, device=a.full.device)
    low = torch.empty_like(h) if mode == "split" else h
    for i in range(0, a.n, SIDE):
        for j in range(i if a is b else 0, b.n, widest):
            tall, wide = min(SIDE, padded - i), min(widest, other - j)
            script.launch(
                f"scores {flags['ROWS']} {i} {j}",
                far_scores,
                (*operands, a.lo, a.hi, *tables, h, low),
                lambda i=i, j=j, tall=tall, wide=wide: (
                    (tall // shape.rows, wide // shape.columns),
                    (i, j, wide, a.n, b.n, padded, other, *numbers),
                    flags,
                ),
            )
            block, rest = (x[: tall * wide].view(tall, wide) for x in (h, low))
            _pull(g[0, i : i + tall], block, rest, b, slice(j, j + wide), mode)
            if a is b and j >= i + SIDE:
                _pull(g[0, j : j + wide], block.T, rest.T, a, slice(i, i + tall), mode)
    return g


def _columns(mode: str, rows: int, entries: int) -> int:
    """Columns of a block: as many as memory allows, SIDE or a half of it, or a half of that and so on."""
    most = max(ROOM, TIMES[mode] * entries) // (rows * (2 if mode == "half" else 4))
    columns = SIDE
    while columns > max(most, PAD):
        columns //= 2
    return columns


def _pull(g: Tensor, h: Tensor, low: Tensor, z: Rows, at: slice, mode: str) -> None:
    """G + h·z, in place; without the columns of missing rows, where h may be infinite."""
    at = slice(at.start, min(at.stop, z.n))
    h, low, high = h[:, : at.stop - at.start], low[:, : at.stop - at.start], z.high[at]
    if mode != "split":
        multiplied(h, high, g)
        return
    for k in range(0, len(high), SUMMED):  # tensor cores cut off what they add: in long sums that is felt
        multiplied(h[:, k : k + SUMMED], high[k : k + SUMMED], g)
    multiplied(h, z.low[at], g)
    multiplied(low, high, g)


def multiplied(h: Tensor, z: Tensor, onto: Tensor | None = None) -> Tensor:
    """h·z in float32 from operands of half the width; added to ``onto`` where that is given."""
    if h.dtype == torch.float32:
        return torch.mm(h, z) if onto is None else onto.addmm_(h, z)
    try:
        if onto is None:
            return torch.mm(h, z, out_dtype=torch.float32)
        return torch.addmm(onto, h, z, out_dtype=torch.float32, out=onto)
    except (TypeError, NotImplementedError):  # torch before 2.8, and on a CPU, rounds to the operands' type
        found = torch.mm(h.float(), z.float())
        return found if onto is None else onto.add_(found)
