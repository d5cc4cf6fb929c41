"""Weights that are given as a table."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import Reduction, RowValues, Tile, Traits


@dataclass(frozen=True, eq=False)
class FixedWeights:
    """``table[i, j]`` is the weight of anchor i with reference j, in the order of the batch. No gradient."""

    table: Tensor
    positive_weights: Literal["everywhere", "numerator"] = "everywhere"
    negatives: Literal["weight", "plain"] = "plain"

    detach = True

    @property
    def traits(self) -> Traits:
        """As `Traits` says; not trusted, because tables come from users."""
        return Traits(continuous=True, positive_weights=self.positive_weights, negatives=self.negatives)

    def __post_init__(self) -> None:
        if not (isinstance(self.table, Tensor) and self.table.ndim == 2 and self.table.is_floating_point()):
            came = tuple(self.table.shape) if isinstance(self.table, Tensor) else type(self.table).__name__
            raise InputError(f"weights must be a floating point tensor (anchors, references), got {came}")

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """Nothing of a row is needed."""
        return {}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        return self.table[tile.anchor_index, tile.reference_index].to(tile.similarity.dtype)
