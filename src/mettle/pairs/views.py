"""Several views of every sample, as the rows of one batch."""

from typing import Any

from torch import Tensor

from mettle.errors import InputError


def stacked(embeddings: Tensor, labels: Tensor, biased: Any) -> tuple[Tensor, Tensor, Any]:
    """(n, v, d) views to (v * n, d), all of view 0 first, with labels repeated."""
    if not isinstance(embeddings, Tensor) or embeddings.ndim != 3:
        raise InputError(f"views=True takes embeddings (n, views, d), got {tuple(getattr(embeddings, 'shape', ()))}")
    if not isinstance(labels, Tensor):
        raise InputError(f"labels must be a tensor, got {type(labels).__name__}")
    flat = [x.transpose(0, 1).flatten(0, 1) if isinstance(x, Tensor) else x for x in (embeddings, biased)]
    return flat[0], labels.repeat(embeddings.shape[1]), flat[1]
