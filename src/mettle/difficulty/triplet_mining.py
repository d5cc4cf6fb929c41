"""Mining by triplets under the law of weights: a pair is present if it belongs to a triplet that is looked for."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty.miner import Miner
from mettle.difficulty.mining import max_over_columns, require_rows, weigh_sides
from mettle.difficulty.settings import validate_fields
from mettle.errors import InputError
from mettle.pairs import (
    IndexTriplets,
    Measure,
    Pass,
    Reduction,
    RowValues,
    Tile,
    Traits,
    gather_over,
    list_triplets,
)
from mettle.pairs.similarity import MAX_ROUNDINGS, similarity
from mettle.pairs.validation import Reference


class TripletMiner(Miner):
    """A miner that looks at an anchor, a positive and a negative together.

    A member says by ``selects`` which triplets it looks for, of rows as the loss prepares them: of length 1 where it
    compares cosines, else as they are. A pair weighs 1 if it belongs to such a triplet, else 0.
    Called as a miner it gives the triplets themselves.
    """

    def selects(self, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """(c, b) whether a triplet of row i of the first two, (c, d), and row j of the third, (b, d), is looked for."""
        raise NotImplementedError

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """Where the positives of each row are."""
        return {"positive": gather_over(self._columns(tile) + 1, tile.positive)}  # 0 is the empty entry

    def statistic_passes(self) -> tuple[Pass, ...]:
        """First the positives of each row, then which of them form a triplet with some negative."""
        return Pass(lambda tile, _: self.row_statistics(tile), reads="anchor"), Pass(
            self._find_triplets, reads="anchor"
        )

    def _find_triplets(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Whether each positive of a row belongs to a triplet."""
        at = row_values["positive"]
        found = [
            (self._with_positive(tile, at[..., k]) & tile.negative).any(1, keepdim=True) for k in range(at.shape[2])
        ]
        return {"found": max_over_columns(torch.stack(found, 2).to(tile.similarity.dtype))}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        require_rows(tile, type(self).__name__)
        at, found = row_values["positive"], row_values["found"] > 0
        columns = self._columns(tile) + 1
        positive = torch.zeros_like(tile.similarity, dtype=torch.bool)
        negative = positive.clone()
        for k in range(at.shape[2]):  # one positive at a time, so that a tile stays a tile
            positive |= (columns == at[..., k]) & found[..., k]
            if tile.negative is not False:
                negative |= self._with_positive(tile, at[..., k])
        return weigh_sides(tile, positive, negative)

    def _with_positive(self, tile: Tile, at: Tensor) -> Tensor:
        """(a, b) triplets of a tile with one positive of each row, given as (a, 1) positions from 1, 0 for none."""
        operands = tile.operands
        if operands is None:  # the tile that the engine only asks for its reductions
            return torch.zeros_like(tile.similarity, dtype=torch.bool)
        self._check_measure(operands.measure)
        z, ref = operands.z.detach(), operands.ref.detach()
        positives = ref[(at.squeeze(1).long() - 1).clamp(min=0)]
        return self.selects(z[operands.i], positives, ref[operands.j]) & (at > 0)

    def _columns(self, tile: Tile) -> Tensor:
        """(a, b) positions among the rows that references are taken from."""
        j = slice(0, 1) if tile.operands is None else tile.operands.j
        assert isinstance(j, slice)
        columns = torch.arange(j.start, j.stop, device=tile.similarity.device, dtype=tile.similarity.dtype)
        return columns.expand(tile.similarity.shape)

    def _check_measure(self, measure: Measure) -> None:
        """Refuse rows that are prepared for one side only, so that no two of them have a distance."""
        if measure == "snr":
            raise InputError(
                f"{type(self).__name__} compares Euclidean distances, which the signal-to-noise measure has none of: "
                "use another measure, or mine by pairs"
            )

    def mine(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ref: Reference | None = None,
        ids: Tensor | None = None,
        measure: Measure = "cosine",
    ) -> IndexTriplets:
        """(anchors, positives, negatives) of all triplets that are looked for."""
        self._check_measure(measure)
        return list_triplets(self.selects, embeddings, labels, ref=ref, ids=ids, measure=measure)


@dataclass(frozen=True)
class Angular(TripletMiner):
    r"""Triplets whose negative sees the anchor and the positive under a large angle (Wang et al. 2017).

    Formula, c = (a + p)/2 the centre of an anchor and a positive:
        a triplet is looked for if arctan( ‖a − p‖ / (2·‖n − c‖) ) > angle
        w = 1 for pairs of such a triplet, else 0
    """

    angle: float = 20.0  # degrees
    detach: bool = True

    traits = Traits(trusted=True, self_contained=True)

    def __post_init__(self) -> None:
        validate_fields(self)
        if not 0 < self.angle < 90:
            raise InputError(f"angle must lie between 0 and 90 degrees, got {self.angle}")

    def selects(self, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """(c, b) whether the angle at the negative is above ``angle``."""
        apart = (anchors - positives).square().sum(1, keepdim=True)
        # Rounding may leave less than nothing, and then three copies of one point would form a triplet.
        to_centre = (-similarity((anchors + positives) / 2, negatives, "squared")).clamp(min=0)
        return apart > (2 * math.tan(math.radians(self.angle))) ** 2 * to_centre


@dataclass(frozen=True)
class TripletMarginMining(TripletMiner):
    r"""Triplets by how much farther the negative is than the positive, as the triplet loss compares them.

    Formula, g = ‖a − n‖ − ‖a − p‖:
        a triplet is looked for if  all: g <= margin,  hard: g <= 0,  semihard: 0 < g <= margin,  easy: g > margin
        w = 1 for pairs of such a triplet, else 0
    """

    margin: float = 0.2
    triplets: Literal["all", "hard", "semihard", "easy"] = "all"
    detach: bool = True

    traits = Traits(trusted=True, self_contained=True)

    def __post_init__(self) -> None:
        validate_fields(self)
        if not self.margin >= 0:
            raise InputError(f"margin must be at least 0, got {self.margin}")

    def selects(self, anchors: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """(c, b) whether the gap between the two distances is in the range that is looked for."""
        near = (anchors - positives).square().sum(1, keepdim=True).sqrt()
        far = (-similarity(anchors, negatives, "squared")).clamp(min=0).sqrt()
        lengths = anchors.square().sum(1)[:, None] + negatives.square().sum(1)[None, :]
        error = MAX_ROUNDINGS * torch.finfo(far.dtype).eps * lengths  # of the square of ``far``
        rounding = error / (2 * torch.maximum(far, error.sqrt()).clamp(min=torch.finfo(far.dtype).tiny))
        gap = far - near - rounding  # a negative that is a copy of the positive is no farther
        if self.triplets == "easy":
            return gap > self.margin
        keep = gap <= (0 if self.triplets == "hard" else self.margin)
        return keep & (gap > 0) if self.triplets == "semihard" else keep
