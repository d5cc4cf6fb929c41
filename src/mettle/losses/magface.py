"""MagFace: the margin grows with the length of the feature, and length is rewarded."""

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_numbers
from mettle.losses.adaface import feature_length
from mettle.losses.arcface import add_angle, keep_monotone
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors


class MagFace(ClassVectors):
    r"""Magnitude-aware margin (Meng et al. 2021).

    Formula, a = ‖z‖ kept between l_a = ``shortest`` and u_a = ``longest``, with gradient:
        m(a) = l_m + (u_m − l_m) (a − l_a) / (u_a − l_a)         l_m = ``low_margin``, u_m = ``high_margin``
        g(a) = 1/a + a/u_a²                                      falls up to u_a: length is rewarded
        L_i  = −log( e^{s T} / ( e^{s T} + Σ_{j≠y} e^{s cos θ_j} ) ) + λ g(a),   T = cos(θ_y + m(a)), λ = ``weight_g``
        Beyond θ + m = π the line of `ArcFace`'s ``keep``.
    Needs:
        labels 0 to C − 1, and embeddings that keep their length until here (``model.unit = false``).
    Use when:
        the length of an embedding shall say how good its image is: easy samples near their class become long.
    Relations:
        l_m = u_m and λ = 0: `ArcFace`. The larger u_m − l_m, the larger λ must be for lengths to stay apart.
    """

    self_contained = True

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        low_margin: float = 0.45,
        high_margin: float = 0.8,
        shortest: float = 10.0,
        longest: float = 110.0,
        weight_g: float = 35.0,
        **options,
    ):
        super().__init__(num_classes, dim, **options)
        validate_numbers(
            scale=scale, low_margin=low_margin, high_margin=high_margin, shortest=shortest, longest=longest,
            weight_g=weight_g,
        )  # fmt: skip
        require(scale > 0, f"scale must be above 0, got {scale}")
        require(
            0 <= low_margin <= high_margin < torch.pi,
            f"margins are angles, 0 <= low_margin <= high_margin < π, got {low_margin} and {high_margin}",
        )
        require(
            0 < shortest < longest,
            f"lengths must be 0 < shortest < longest, got {shortest} and {longest}",
        )
        require(weight_g >= 0, f"weight_g must be at least 0, got {weight_g}")
        self.scale, self.low_margin, self.high_margin = scale, low_margin, high_margin
        self.shortest, self.longest, self.weight_g = shortest, longest, weight_g

    def extra_repr(self) -> str:
        """As it was built."""
        return (
            f"{super().extra_repr()}, low_margin={self.low_margin}, high_margin={self.high_margin}, "
            f"shortest={self.shortest}, longest={self.longest}, weight_g={self.weight_g}"
        )

    def length(self, z: Tensor) -> Tensor:
        """(n,) between shortest and longest."""
        return feature_length(z).clamp(self.shortest, self.longest)

    def logit(self, own: Tensor, z: Tensor) -> Tensor:
        """Of the own class, with the margin of each sample."""
        rise = (self.high_margin - self.low_margin) / (self.longest - self.shortest)
        margin = (self.low_margin + rise * (self.length(z) - self.shortest)).to(own.dtype)
        return self._logit_scale() * keep_monotone(own, add_angle(own, margin), margin)

    def regularizer(self, z: Tensor, vectors: Tensor) -> Tensor:
        """λ g(a) of every sample."""
        a = self.length(z)
        return self.weight_g * (1 / a + a / self.longest**2)
