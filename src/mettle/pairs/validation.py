"""What may be compared: embeddings and labels of both sides, and their companions.

On a GPU this runs before every launch: plain conditions, and words only where one fails.
"""

from typing import Any

import torch
from torch import Tensor

from mettle.errors import InputError

Reference = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""Embeddings and labels to compare with instead of the batch itself, and optionally their ids."""


def validate_embeddings(z: Tensor, labels: Tensor, what: str, names: str) -> None:
    """Refuse what cannot be compared, before any work."""
    if not isinstance(z, Tensor):
        raise InputError(f"{what} must be a tensor, got {type(z).__name__}")
    if not isinstance(labels, Tensor):
        raise InputError(f"{names} must be a tensor, got {type(labels).__name__}")
    if z.ndim != 2:
        raise InputError(
            f"{what} must be (n, d), got shape {tuple(z.shape)}. Several views per sample: "
            "stack them to (views * n, d) and repeat the labels"
        )
    if not z.is_floating_point():
        raise InputError(f"{what} must be floating point, got {z.dtype}")
    if z.shape[0] == 0:
        raise InputError(f"{what} are empty: a batch needs at least two samples of one class")
    if z.shape[1] == 0:
        raise InputError(f"{what} have no columns, shape {tuple(z.shape)}: give (n, d) with d at least 1")
    if labels.ndim != 1 or labels.shape[0] != z.shape[0]:
        raise InputError(
            f"{names} must have one entry per embedding: got {tuple(labels.shape)} for {len(z)} embeddings. "
            "If the embeddings stack two views, pass labels.repeat(2)"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.is_complex():
        raise InputError(f"{names} must be whole numbers, got {labels.dtype}: use labels.long()")
    if labels.device != z.device:
        raise InputError(f"{names} are on {labels.device}, {what} on {z.device}: move them to one device")


def validate_inputs(
    z: Tensor,
    labels: Tensor,
    ref: Reference | None,
    ids: Tensor | None,
    biased: Tensor | tuple[Tensor, Tensor] | None,
    tile: int | None = None,
) -> None:
    """Refuse what cannot be compared: both sides and their companions."""
    validate_embeddings(z, labels, "embeddings", "labels")
    if ref is not None:
        if not isinstance(ref, tuple | list) or len(ref) not in (2, 3):
            what = f"{len(ref)} entries" if isinstance(ref, tuple | list) else type(ref).__name__
            raise InputError(f"ref must be (embeddings, labels) or (embeddings, labels, ids), got {what}")
        validate_embeddings(ref[0], ref[1], "reference embeddings", "reference labels")
        if ref[0].shape[1] != z.shape[1] or ref[0].device != z.device:
            raise InputError(
                f"reference embeddings are {tuple(ref[0].shape)} on {ref[0].device}, "
                f"embeddings {tuple(z.shape)} on {z.device}: both need one width and one device"
            )
    if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 1):
        raise InputError(f"tile must be at least 1, a whole number, got {tile!r}")
    if ids is not None or (ref is not None and len(ref) == 3):
        _validate_ids(z, ref, ids)
    if biased is not None:
        _validate_second_embeddings(z, ref, biased)


def _validate_ids(z: Tensor, ref: Reference | None, ids: Tensor | None) -> None:
    """Refuse ids of one side only, and ids that do not fit their embeddings."""
    if ref is None or len(ref) < 3:
        raise InputError("ids= leaves out pairs of equal id: pass ref=(embeddings, labels, ids) with it")
    if ids is None:
        raise InputError(
            "ref has ids but the batch has none, so nothing would be left out: pass ids= with it, or ref without ids"
        )
    for given, rows, what in ((ids, z, "ids"), (ref[2], ref[0], "reference ids")):
        if not isinstance(given, Tensor):
            raise InputError(f"{what} must be a tensor, got {type(given).__name__}")
        if given.ndim != 1 or given.shape[0] != rows.shape[0]:
            raise InputError(
                f"{what} must have one entry per embedding: got {tuple(given.shape)} for {len(rows)} embeddings"
            )
        if given.is_floating_point() or given.dtype == torch.bool or given.is_complex():
            raise InputError(f"{what} must be whole numbers, got {given.dtype}: use .long()")
        if given.device != z.device:
            raise InputError(f"{what} are on {given.device}, embeddings on {z.device}: move them to one device")


def _validate_second_embeddings(z: Tensor, ref: Reference | None, biased: Tensor | tuple[Tensor, Tensor]) -> None:
    """Refuse a second encoder's embeddings that are not of the same rows."""
    if isinstance(biased, tuple) and (ref is None or len(biased) != 2):
        raise InputError("biased must be one tensor, or with ref= a pair: the second encoder's batch and references")
    if isinstance(biased, Tensor) and ref is not None:
        raise InputError("with ref=, biased must be a pair: the second encoder's batch and reference embeddings")
    sides = (z,) if ref is None else (z, ref[0])
    for given, rows in zip(biased if isinstance(biased, tuple) else (biased,), sides, strict=False):
        if not isinstance(given, Tensor):
            raise InputError(f"biased must be a tensor of embeddings (n, d), got {type(given).__name__}")
        if given.ndim != 2 or given.shape[0] != rows.shape[0] or given.shape[1] == 0:
            raise InputError(
                "biased must hold the second encoder's embeddings of the same rows: "
                f"got {tuple(given.shape)} for {len(rows)}"
            )
        if not given.is_floating_point():
            raise InputError(f"biased must be floating point, got {given.dtype}")
        if given.device != z.device:
            raise InputError(f"biased is on {given.device}, embeddings on {z.device}: move them to one device")
    if isinstance(biased, tuple) and biased[0].shape[1] != biased[1].shape[1]:
        widths = f"{biased[0].shape[1]} and {biased[1].shape[1]}"
        raise InputError(f"both embeddings of biased come from one encoder and need one width, got {widths}")


def stack_views(embeddings: Tensor, labels: Tensor | None, biased: Any) -> tuple[Tensor, Tensor, Any]:
    """(n, v, d) views to (v * n, d), all of view 0 first, with labels repeated."""
    if not isinstance(embeddings, Tensor) or embeddings.ndim != 3:
        raise InputError(f"views=True takes embeddings (n, views, d), got {tuple(getattr(embeddings, 'shape', ()))}")
    if not isinstance(labels, Tensor):
        raise InputError(f"labels must be a tensor, got {type(labels).__name__}")
    flat = [x.transpose(0, 1).flatten(0, 1) if isinstance(x, Tensor) else x for x in (embeddings, biased)]
    return flat[0], labels.repeat(embeddings.shape[1], *[1] * (labels.ndim - 1)), flat[1]
