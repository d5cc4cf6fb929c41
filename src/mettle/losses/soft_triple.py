"""SoftTriple: several vectors per class, each sample against all of them by how near they are."""

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_numbers
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs.similarity import normalize_rows


class SoftTriple(ClassVectors):
    r"""SoftTriple loss (Qian et al. 2019).

    Formula, ŵ_jk the k-th of K vectors of class j, all of length 1, s_ijk = ẑ_i·ŵ_jk, λ = ``scale``, δ = ``margin``:
        S_ij = Σ_k softmax_k(s_ijk / γ) s_ijk                          γ = ``gamma``
        L_i  = −log( e^{λ (S_iy − δ)} / ( e^{λ (S_iy − δ)} + Σ_{j≠y} e^{λ S_ij} ) ) + τ R        τ = ``tau``
        R    = Σ_j Σ_{k<l} ‖ŵ_jk − ŵ_jl‖ / (C K (K − 1))               so that vectors nobody needs merge
    Needs:
        labels 0 to C − 1. Embeddings are normalised inside.
    Use when:
        a class shows several kinds of samples.
    Relations:
        γ → 0: the nearest vector counts, as in `SubCenterArcFace`. K = 1: `CosFace`.
    """

    self_contained = True
    regularizes_vectors = True

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 20.0,
        margin: float = 0.01,
        gamma: float = 0.1,
        tau: float = 0.2,
        vectors_per_class: int = 10,
        **options,
    ):
        super().__init__(num_classes, dim, vectors_per_class=vectors_per_class, **options)
        validate_numbers(scale=scale, margin=margin, gamma=gamma, tau=tau)
        require(scale > 0, f"scale must be above 0, got {scale}")
        require(margin >= 0, f"margin must be at least 0, got {margin}")
        require(gamma > 0, f"gamma must be above 0, got {gamma}")
        require(tau >= 0, f"tau must be at least 0, got {tau}")
        self.scale, self.margin, self.gamma, self.tau = scale, margin, gamma, tau

    def extra_repr(self) -> str:
        """As it was built."""
        return f"{super().extra_repr()}, margin={self.margin}, gamma={self.gamma}, tau={self.tau}"

    def pool(self, similarity: Tensor) -> Tensor:
        """The mean of the similarities to the vectors of a class, the near ones first of all."""
        return (torch.softmax(similarity / self.gamma, -1) * similarity).sum(-1)

    def target(self, cosine: Tensor) -> Tensor:
        """Minus the margin."""
        return cosine - self.margin

    def regularizer(self, z: Tensor, vectors: Tensor) -> Tensor | None:
        """τ R, of the classes that take part."""
        k = self.vectors_per_class
        if k == 1 or self.tau == 0:
            return None
        w = normalize_rows(vectors.to(z.dtype)).unflatten(0, (-1, k))
        first, second = torch.triu_indices(k, k, 1, device=w.device)
        squared = 2 - 2 * (w @ w.transpose(1, 2))[:, first, second]
        together = squared <= torch.finfo(squared.dtype).eps  # no direction to part in
        distance = torch.where(together, 1, squared).sqrt().masked_fill(together, 0)
        return self.tau * distance.sum() / (len(w) * k * (k - 1))
