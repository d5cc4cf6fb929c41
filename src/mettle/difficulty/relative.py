"""Hard for this encoder but easy for a biased one: the relative difficulty of a negative."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import NoKernel, Reduction, RelativeWeights, RowValues, Tile, Traits, logsumexp_over, sum_over


@dataclass(frozen=True)
class Relative:
    r"""Weights of difficulty-based debiased contrastive learning (WCL, Jang and Wang 2023).

    Formula, for negatives, ℓ = s/t under this encoder (d) and under a bias-amplified one (b); positives weigh 1:
        similarity  w = 1 + σ( (ℓ_d − ν_d) − (ℓ_b − ν_b) ),  ν = ½ log Σ_n e^{2ℓ} over the anchor's negatives
        raw         w = 1 + σ( ℓ_d − ℓ_b )
        distance    w = 1 + u_d / (u_d + u_b),  u = d² divided by its L2 norm over the anchor's negatives
    Needs:
        the second encoder's embeddings: ``loss(z, y, biased=z_b)``. Weights are detached.
    Use when:
        a spurious attribute (background, colour, device) makes most pairs easy: `SelfTriplet` trains the encoder that
        falls for it, and pairs on which the two disagree weigh more.
    Relations:
        equal encoders give w = 1.5, not 1: a constant weight is a debiased loss at another prior. The ``distance``
        form goes the other way (far here, near there is raised): it is an ablation, not a synonym.
    """

    form: Literal["similarity", "raw", "distance"] = "similarity"
    detach: bool = True

    # Symmetric as far as it goes: row statistics are asked for at each end anyway. And a weight of 1.5 does not make
    # one and a half negatives of one.
    traits = Traits(symmetric=True, continuous=True, trusted=True, self_contained=True, negatives="plain")

    def __post_init__(self) -> None:
        known = ("similarity", "raw", "distance")
        if self.form not in known:
            raise InputError(f"form must be one of {known}, got {self.form!r}")

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """How concentrated each encoder's row is."""
        own, other = tile.similarity, self._biased(tile)
        if self.form == "raw":
            return {}
        if self.form == "distance":
            return {
                "own": sum_over((2 - 2 * own).square(), tile.negative),
                "other": sum_over((2 - 2 * other).square(), tile.negative),
            }
        twice = 2 / tile.temperature
        bound = None if isinstance(twice, Tensor) else twice  # a learned temperature has none
        return {
            "own": logsumexp_over(own * twice, tile.negative, bound=bound),
            "other": logsumexp_over(other * twice, tile.negative, bound=bound),
        }

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        own, other = tile.similarity, self._biased(tile)
        if self.form == "distance":
            u, v = (
                (2 - 2 * s).clamp(min=0) / torch.where(r > 0, r, 1).sqrt()
                for s, r in ((own, row_values["own"]), (other, row_values["other"]))
            )
            both = u + v
            w = 1 + u / torch.where(both > 0, both, 1)
        else:
            gap = own - other
            if self.form == "similarity":
                shift = (row_values["other"] - row_values["own"]) / 2
                gap = gap / tile.temperature + torch.where(torch.isfinite(shift), shift, 0)
            else:
                gap = gap / tile.temperature
            w = torch.sigmoid_(gap)
            w = 1 + w if w.requires_grad else w.add_(1)  # in place where no gradient needs the old value
        return w if tile.positive is False else torch.where(tile.positive, 1, w)  # type: ignore[arg-type]

    def kernel_weights(self) -> RelativeWeights | NoKernel:
        """Two of the three forms, as constants."""
        if self.form == "distance" or not self.detach:
            return NoKernel("the kernels know Relative in the forms 'similarity' and 'raw', detached")
        return RelativeWeights(raw=self.form == "raw")

    @staticmethod
    def _biased(tile: Tile) -> Tensor:
        if tile.second_similarity is None:
            raise InputError("Relative compares two encoders: pass the second one's embeddings, loss(z, y, biased=z_b)")
        return tile.second_similarity
