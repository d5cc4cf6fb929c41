"""What losses over given pairs and triplets share: the similarity of two rows, the checks, the weighted mean."""

from typing import Literal, get_args

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.similarity import at_least_float32, may_read, normalize_rows

Likeness = Literal["cosine", "dot", "squared", "euclidean", "l1"]
"""How alike two embeddings are: cosine, dot product, or minus a distance (squared, Euclidean, L1)."""

RANGE: dict[str, tuple[float, float]] = {"cosine": (-1.0, 1.0), "dot": (-torch.inf, torch.inf)}
DISTANCES = (-torch.inf, 0.0)


def similarity(a: Tensor, b: Tensor, measure: Likeness) -> Tensor:
    """(n,) similarity of row i of ``a`` and row i of ``b``, in float32 or better, higher = more alike.

    What is not finite is NaN: an infinite distance would otherwise look like a triplet in perfect order.
    """
    f = _similarity(at_least_float32(a), at_least_float32(b), measure)
    return torch.where(f.isfinite(), f, torch.nan)


def _similarity(a: Tensor, b: Tensor, measure: Likeness) -> Tensor:
    if measure == "cosine":
        return (normalize_rows(a) * normalize_rows(b)).sum(1)
    if measure == "dot":
        return (a * b).sum(1)
    if measure == "l1":
        return -(a - b).abs().sum(1)
    squared = (a - b).square().sum(1)
    if measure == "squared":
        return -squared
    # Two coincident points have no direction to move in: gradient 0 there.
    together = squared == 0
    return -torch.where(together, 1, squared).sqrt().masked_fill(together, 0)


def check_measure(measure: str) -> None:
    """Refuse an unknown similarity."""
    if measure not in get_args(Likeness):
        raise InputError(f"measure must be one of {', '.join(get_args(Likeness))}, got {measure!r}")


def check_rows(**rows: Tensor) -> None:
    """Refuse embeddings that are not equally shaped (n, d) tensors of one device."""
    (first, wanted), *_ = rows.items()
    for name, x in rows.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.ndim != 2 or 0 in x.shape:
            raise InputError(f"{name} must be embeddings (n, d), not empty, got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise InputError(f"{name} must be floating point, got {x.dtype}")
        if x.shape != wanted.shape:
            raise InputError(
                f"{name} has shape {tuple(x.shape)}, {first} {tuple(wanted.shape)}: row i of each belongs together"
            )
        if x.device != wanted.device:
            raise InputError(f"{first} is on {wanted.device}, {name} on {x.device}: move them to one device")


def check_target(f: Tensor, target: Tensor, low: float, high: float) -> Tensor:
    """The target in the type of the similarities, if it has one entry per pair, each between ``low`` and ``high``."""
    target = _validate_vector(target, f, "target")
    if may_read(target):
        outside = (target < low) | (target > high)  # NaN is not outside: it makes its value NaN
        if bool(outside.any()):
            at = int(outside.nonzero()[0, 0])
            raise InputError(f"target {float(target[at]):g} of pair {at} is not in [{low:g}, {high:g}]")
    return target


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Σ w·value / Σ w: weight 0 = the item is absent, 1 = nothing changes, 2 = as if it were listed twice."""
    if weight is None:
        return values.mean()
    weight = _validate_vector(weight, values, "weight")
    total = weight.sum()
    if may_read(weight) and (bool((weight < 0).any()) or bool(total == 0)):
        raise InputError("weight must be at least 0, and above 0 for some item: 0 leaves an item out")
    return (weight * values).sum() / total


def _validate_vector(x: Tensor, like: Tensor, name: str) -> Tensor:
    if not isinstance(x, Tensor) or x.shape != like.shape or x.is_complex():
        came = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{name} must be a tensor with one number per item, ({len(like)},), got {came}")
    if x.device != like.device:
        raise InputError(f"embeddings are on {like.device}, {name} on {x.device}: move them to one device")
    return x.to(like.dtype)
