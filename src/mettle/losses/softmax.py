"""Plain cross-entropy over class vectors, modified softmax, and NormFace."""

import torch
from torch import Tensor, nn

from mettle.difficulty.settings import validate_numbers
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs import MarginSpec
from mettle.pairs.similarity import normalize_rows


class Softmax(ClassVectors):
    r"""Cross-entropy of a linear classifier; its last layer's rows are the class vectors.

    Formula:
        L_i = −log( e^{z_i·w_y + b_y} / Σ_j e^{z_i·w_j + b_j} )
        modified (``unit_weights=True, bias=False``): w_j of length 1, so that logits are ‖z‖ cos θ_j
    Needs:
        labels 0 to C − 1. Embeddings are used as they are.
    Use when:
        a baseline is wanted, or as the classifier under `Center`.
    Relations:
        modified softmax is `SphereFace` with margin 1; `NormFace` also normalises the features.
    """

    self_contained = True
    unit_features = False
    scale = 1.0  # features keep their length

    def __init__(self, num_classes: int, dim: int, unit_weights: bool = False, bias: bool = True, **options):
        super().__init__(num_classes, dim, **options)
        require(
            not (bias and self.sparse), "sparse gradients need bias=False: a bias is one more column of class vectors"
        )
        self.unit_weights = unit_weights
        self.unit_vectors = unit_weights and not bias
        self.bias = nn.Parameter(torch.zeros(len(self.weight))) if bias else None

    def extra_repr(self) -> str:
        """As it was built."""
        return f"{super().extra_repr()}, unit_weights={self.unit_weights}, bias={self.bias is not None}"

    def vectors(self) -> Tensor:
        """(C, dim) the class vectors by themselves."""
        with torch.no_grad():
            return self._by_class(normalize_rows(self.weight) if self.unit_weights else self.weight).clone()

    def logit(self, own: Tensor, z: Tensor) -> Tensor:
        """There is no margin."""
        return own

    def _features(self, z: Tensor) -> Tensor:
        return z if self.bias is None else torch.cat([z, torch.ones_like(z[:, :1])], 1)

    def _vectors(self) -> Tensor:
        if self.bias is None:
            return self.weight
        return torch.cat([normalize_rows(self.weight) if self.unit_weights else self.weight, self.bias[:, None]], 1)


class NormFace(ClassVectors):
    r"""Cross-entropy over cosines: features and class vectors of length 1 (Wang et al. 2017).

    Formula:
        L_i = −log( e^{s cos θ_y} / Σ_j e^{s cos θ_j} )
    Needs:
        labels 0 to C − 1. Embeddings are normalised inside.
    Use when:
        embeddings will be compared by cosine, and no margin is wanted.
    Relations:
        `CosFace` and `ArcFace` with margin 0; `AdaCos` finds the scale s by itself.
    """

    self_contained = True

    def __init__(self, num_classes: int, dim: int, scale: float = 16.0, **options):
        super().__init__(num_classes, dim, **options)
        validate_numbers(scale=scale)
        require(scale > 0, f"scale must be above 0, got {scale}")
        self.scale = scale

    def margin_spec(self) -> MarginSpec:
        """There is no margin."""
        return MarginSpec(float(self.scale))
