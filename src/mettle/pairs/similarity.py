"""Embeddings made ready for comparison, and their similarities one tile at a time.

Everything quadratic runs in float32 or better: a bfloat16 similarity matrix puts up to a quarter of error into the
gradient, bfloat16 *inputs* do not.
"""

import torch
from torch import Tensor

from mettle.pairs.contract import Measure

ZERO = 1e-30  # rows shorter than this have no direction; they become the zero vector and receive no gradient


ORDINARY = 1e-12  # rows between this length and its inverse can be squared without a second thought


def widen(z: Tensor) -> Tensor:
    """Float32 for half precision, unchanged otherwise (float64 stays float64 throughout)."""
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


def unit(z: Tensor) -> Tensor:
    """Rows of length 1; rows without a direction become zero, with zero gradient.

    Dividing by the largest entry first keeps rows of length 1e-30 or 1e30 from under- or overflowing when squared; on
    the CPU, where looking costs nothing, rows of ordinary length skip that.
    """
    if not z.is_cuda:
        length = z.norm(dim=1, keepdim=True)
        low, high = (float(v) for v in torch.aminmax(length.detach()))
        if low > ORDINARY and high < 1 / ORDINARY:
            return z / length
    size = z.detach().abs().amax(dim=1, keepdim=True)
    zero = size < ZERO
    scaled = z / size.masked_fill(zero, 1)
    length = scaled.masked_fill(zero, 1).norm(dim=1, keepdim=True)
    return (scaled / length).masked_fill(zero, 0)


def ready(z: Tensor, measure: Measure) -> Tensor:
    """What tiles of this measure are computed from."""
    return unit(widen(z)) if measure == "cosine" else widen(z)


def similarity(a: Tensor, b: Tensor, measure: Measure) -> Tensor:
    """(len(a), len(b)) similarities of prepared rows, higher = more alike."""
    if measure == "l1":
        return -(a[:, None, :] - b[None, :, :]).abs().sum(-1)
    s = a @ b.T
    if measure == "squared":
        return (2 * s - (a * a).sum(1, keepdim=True) - (b * b).sum(1)[None, :]).clamp(max=0)
    return s
