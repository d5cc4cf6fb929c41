"""What losses over distances may measure them by: the Euclidean distance, or another of the field."""

from typing import Literal

from torch import Tensor

from mettle.losses.base import require
from mettle.pairs import Measure, Tile, distance

Metric = Literal["euclidean", "cosine", "dot", "snr"]
"""The distance of anchor a and positive or negative b: Euclidean, 1 − cosine, minus the dot product, or the
signal-to-noise distance Var(a − b) / Var(a) (Yuan et al. 2019)."""


def check_metric(metric: Metric, *, normalise: bool, squared: bool) -> None:
    """Refuse options that do not go together."""
    require(
        metric in ("euclidean", "cosine") or not normalise,
        f"metric {metric!r} is of embeddings as they are: set normalise=False with it",
    )
    require(metric == "euclidean" or not squared, f"a squared distance is Euclidean: metric {metric!r} has none")


def tile_measure(metric: Metric, *, normalise: bool) -> Measure:
    """The similarity from which tiles get the distance."""
    if metric == "euclidean":
        return "cosine" if normalise else "squared"
    return metric


def tile_distance(tile: Tile, metric: Metric, measure: Measure) -> Tensor:
    """The distances of the pairs of a tile that holds similarities of this measure."""
    if metric == "euclidean":
        return distance(tile, measure)
    if metric == "cosine":
        return 1 - tile.similarity
    return -tile.similarity if metric == "dot" else (-tile.similarity).clamp(min=0)
