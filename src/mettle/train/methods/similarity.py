"""Similarity learning: one embedder, a loss over the pairs or triplets of a table."""

from typing import Any

import numpy as np
from torch import Tensor

from mettle.data.loader import Batch
from mettle.data.samples import Samples
from mettle.data.tuples import Pairs, Triplets, Tuples
from mettle.errors import DataError
from mettle.train.methods.base import Supervised
from mettle.train.recipe import SAME_CLASS, Data, Recipe


class Similarity(Supervised):
    """One embedder, one loss over the pairs or triplets of a batch, one optimiser.

    The loss may be any callable ``loss(x1, x2, target, weight=...)`` or ``loss(x, positive, negative, weight=...)`` on
    embeddings; one with state of its own (an ``nn.Module``) is trained, saved and resumed with the model.
    """

    def value(self, embeddings: Tensor, batch: Batch, progress: float) -> Tensor:
        """The loss of a batch, a scalar with gradient."""
        return self.loss(*_arguments(embeddings, batch), weight=batch.weight)

    def facts(self, embeddings: Tensor, batch: Batch, progress: float) -> dict[str, Any]:
        """The facts of the loss, where it has any."""
        if not hasattr(self.loss, "statistics"):
            return {}
        return dict(self.loss.statistics(*_arguments(embeddings, batch)))


def _arguments(embeddings: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """The embeddings of the first members, of the second ones, ...; then the target, where there is one."""
    assert batch.weight is not None, "Similarity needs a loader with tuples"
    parts = embeddings.split(len(batch.weight))
    return parts if batch.target is None else (*parts, batch.target)


def named(data: Data, samples: Samples) -> Tuples | None:
    """The table that a recipe names by its path, read while samples still know what their files are called."""
    path = data.pairs or data.triplets
    if path is None or path == SAME_CLASS:
        return None
    return Pairs.read(path, samples) if data.pairs else Triplets.read(path, samples)


def settled(recipe: Recipe, table: Tuples | None, samples: Samples) -> tuple[Tuples | None, tuple[str, ...]]:
    """The table of a recipe with the split of every row, and notes about rows that are left out."""
    data = recipe.data
    if SAME_CLASS in (data.pairs, data.triplets):
        kind = Pairs if data.pairs else Triplets
        table = kind.same_class(samples, seed=recipe.seed)
    if table is None:
        return None, ()
    return table.within(*getattr(recipe.criterion(), "range", (-np.inf, np.inf))).settled(samples)


def training_rows(table: Tuples, size: int) -> Tuples:
    """The rows to train on, if they fill a batch."""
    rows = table.part("train")
    if len(rows) < size:
        few = f"{len(rows)} training {table.noun}s, fewer than the {size} of a batch"
        raise DataError(f"{table.origin} has {few}: lower batch.size, or check the split")
    return rows
