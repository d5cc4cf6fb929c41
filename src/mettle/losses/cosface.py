"""CosFace: a margin on the cosine."""

from torch import Tensor

from mettle.difficulty.settings import validate_numbers
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs import MarginSpec


class CosFace(ClassVectors):
    r"""Additive cosine margin (Wang et al. 2018).

    Formula:
        L_i = −log( e^{s (cos θ_y − m)} / ( e^{s (cos θ_y − m)} + Σ_{j≠y} e^{s cos θ_j} ) )
    Needs:
        labels 0 to C − 1. Embeddings are normalised inside.
    Use when:
        there are many classes. On small data use a scale of 16 to 32 and a margin of 0.2 to 0.3.
    Relations:
        margin 0: `NormFace`. The margin has no numerical hazards at any angle, unlike `ArcFace`'s.
    """

    self_contained = True

    def __init__(self, num_classes: int, dim: int, scale: float = 64.0, margin: float = 0.35, **options):
        super().__init__(num_classes, dim, **options)
        validate_numbers(scale=scale, margin=margin)
        require(scale > 0, f"scale must be above 0, got {scale}")
        require(margin >= 0, f"margin must be at least 0, got {margin}")
        self.scale, self.margin = scale, margin

    def extra_repr(self) -> str:
        """As it was built."""
        return f"{super().extra_repr()}, margin={self.margin}"

    def target(self, cosine: Tensor) -> Tensor:
        """Cosine minus the margin."""
        return cosine - self.margin

    def margin_spec(self) -> MarginSpec:
        """For the kernels."""
        return MarginSpec(float(self.scale), subtract=self.margin)
