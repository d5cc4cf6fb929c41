"""CurricularFace: wrong classes that are harder than the own one count more as training goes on."""

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_numbers
from mettle.losses.arcface import add_angle, keep_monotone
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs.similarity import at_least_float32, normalize_rows, widest_dtype


class CurricularFace(ClassVectors):
    r"""Adaptive curriculum over wrong classes (Huang et al. 2020).

    Formula, T = cos(θ_y + m), beyond θ_y + m = π the line of `ArcFace`'s ``keep``:
        L_i = −log( e^{s T} / ( e^{s T} + Σ_{j≠y} e^{s N_j} ) )
        N_j = cos θ_j                where cos θ_j ≤ cos(θ_y + m)     an easy wrong class
        N_j = cos θ_j (t + cos θ_j)  elsewhere                        a hard one
        before each training call, outside the gradient:  t ← ``momentum`` · t + (1 − ``momentum``) · mean cos θ_y
    Needs:
        labels 0 to C − 1. Embeddings are normalised inside.
    Use when:
        a margin loss is distracted by hard wrong classes early on: t starts at 0, where a hard one counts by its
        square, and rises with the cosine to the own class.
    Relations:
        at cos θ_j = 1 − t a hard wrong class counts as in `ArcFace`: below that less, above it more. t is the buffer
        ``t``: saved and resumed. Only training calls move it.
    """

    self_contained = True
    modulates_negatives = True
    t: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.5,
        momentum: float = 0.99,
        **options,
    ):
        super().__init__(num_classes, dim, **options)
        validate_numbers(scale=scale, margin=margin, momentum=momentum)
        require(scale > 0, f"scale must be above 0, got {scale}")
        require(0 <= margin < torch.pi, f"margin is an angle in [0, π), got {margin}")
        require(0 <= momentum <= 1, f"momentum must be in [0, 1], got {momentum}")
        self.scale, self.margin, self.momentum = scale, margin, momentum
        self.register_buffer("t", torch.zeros((), dtype=torch.float64))

    @property
    def by_row(self) -> bool:
        """T looks at all samples."""
        return False

    def extra_repr(self) -> str:
        """As it was built."""
        return f"{super().extra_repr()}, margin={self.margin}, momentum={self.momentum}"

    def forward(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """The mean over samples; a training call moves t first."""
        if self.training and torch.is_grad_enabled():
            self.adapt(embeddings, self._check(embeddings, labels))
        return super().forward(embeddings, labels, progress=progress)

    @torch.no_grad()
    def adapt(self, embeddings: Tensor, labels: Tensor) -> None:
        """Move t towards the mean cosine to the own class; a broken batch leaves it where it is."""
        z = normalize_rows(at_least_float32(embeddings))
        mean = self._similarity().to_own(z, self.weight, labels).mean().to(widest_dtype(z.device))
        moved = self.momentum * self.t + (1 - self.momentum) * mean
        self.t.copy_(torch.where(torch.isfinite(moved), moved, self.t))

    def target(self, cosine: Tensor) -> Tensor:
        """Cosine of the angle with its margin."""
        return keep_monotone(cosine, add_angle(cosine, self.margin), self.margin)

    def modulate(self, similarity: Tensor, own: Tensor) -> Tensor:
        """Hard wrong classes by themselves times t plus themselves."""
        hard = similarity.detach() > add_angle(own.detach(), self.margin)
        return torch.where(hard, similarity * (self.t.to(similarity.dtype) + similarity), similarity)
