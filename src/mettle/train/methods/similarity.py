"""Similarity learning: one embedder, a loss over the pairs or triplets of a table."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mettle.data.loader import Batch
from mettle.train.methods.supervised import Supervised


class Similarity(Supervised):
    """One embedder, one loss over the pairs or triplets of a batch, one optimizer.

    The loss may be any callable ``loss(x1, x2, target, weight=...)`` or ``loss(x, positive, negative, weight=...)`` on
    embeddings; one with state of its own (an ``nn.Module``) is trained, saved and resumed with the model.
    """

    def compute_loss(self, embeddings: Tensor, batch: Batch, options: Mapping[str, Any]) -> Tensor:
        """The loss of these embeddings, a scalar with gradient."""
        return self.loss(*tuple_arguments(embeddings, batch), weight=batch.weight)

    def statistics(self, embeddings: Tensor, batch: Batch, options: Mapping[str, Any]) -> dict[str, Any]:
        """What the loss says of the batch, where it says anything."""
        if not hasattr(self.loss, "statistics"):
            return {}
        return dict(self.loss.statistics(*tuple_arguments(embeddings, batch)))


def tuple_arguments(embeddings: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """The embeddings of the first members, of the second ones, ...; then the target, where there is one."""
    assert batch.weight is not None, "Similarity needs a loader with tuples"
    parts = embeddings.split(len(batch.weight))
    return parts if batch.target is None else (*parts, batch.target)
