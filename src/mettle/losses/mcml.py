"""Maximally collapsing metric learning: each class a point, every other class infinitely far."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.losses.base import Pairwise, filled, log_add
from mettle.pairs import Acc, Difficulty, Measure, Rows, Tile, lse, total


@dataclass(frozen=True)
class MCML(Pairwise):
    r"""Maximally collapsing metric learning (Globerson and Roweis 2005).

    Formula, d² the squared distance of raw embeddings, P the positives of an anchor:
        L_i = (1/|P|) Σ_p d²_ip + log Σ_a e^{−d²_ia},  a over every other sample
        With a difficulty, weights enter both sums.
    Needs:
        labels; at least two samples of a class. No margin and no temperature: a linear map learns its own scale.
    Use when:
        learning a Mahalanobis matrix. For z = Lx the loss is convex in M = LᵀL, so a search has one valley to find.
    Relations:
        the ``out`` form of `SupCon` with −d² in place of cosine / temperature. With one positive per anchor it is
        neighbourhood components analysis in its logarithmic form.
    """

    difficulty: Difficulty | None = None

    temperature = 1.0

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Minus the squared distance."""
        return "squared"

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Pull of the positives; both parts of the denominator."""
        return {
            "pull": total(-tile.s, tile.pos),
            "weight": total(1.0, tile.pos),
            "near": lse(tile.s, tile.pos),
            "far": lse(tile.s, tile.neg),
            "positives": total(1.0, tile.pos, weigh="present"),
        }

    def finish(self, rows: Rows) -> Tensor:
        """Mean pull plus the logarithm of the denominator."""
        weight = torch.where(rows["weight"] == 0, 1, rows["weight"])
        return rows["pull"] / weight + filled(log_add(rows["near"], rows["far"]))
