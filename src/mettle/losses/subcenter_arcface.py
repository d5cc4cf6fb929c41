"""Sub-center ArcFace: several vectors per class, of which the nearest counts."""

import math

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_numbers
from mettle.losses.arcface import ArcFace, Mode
from mettle.losses.base import require
from mettle.pairs.similarity import at_least_float32, normalize_rows


class SubCenterArcFace(ArcFace):
    r"""ArcFace with K vectors per class (Deng et al. 2020).

    Formula, ŵ_jk the k-th vector of class j, of length 1:
        cos θ_j = max_k ẑ·ŵ_jk,  and L_i of `ArcFace` with these
    Needs:
        labels 0 to C − 1. Embeddings are normalised inside.
    Use when:
        labels are noisy, or a class shows several kinds of samples: a few of them gather at vectors of their own and
        no longer pull at the rest. `find_outliers` then names the samples that are far from where most of a class is.
    Relations:
        ``vectors_per_class=1``: `ArcFace`. Every class-vector loss takes ``vectors_per_class``; here it is 3 by
        default.
    """

    self_contained = True

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.5,
        mode: Mode = "keep",
        vectors_per_class: int = 3,
        **options,
    ):
        super().__init__(num_classes, dim, scale, margin, mode, vectors_per_class=vectors_per_class, **options)

    @torch.no_grad()
    def find_outliers(self, embeddings: Tensor, labels: Tensor, degrees: float = 75.0) -> Tensor:
        """(n,) whether a sample is farther than so many degrees from the dominant vector of its class.

        The dominant vector is the one that is nearest to most of the samples given here, the first one of several.
        """
        validate_numbers(degrees=degrees)
        require(0 < degrees <= 180, f"degrees must be in (0, 180], got {degrees}")
        labels = self._check(embeddings, labels)
        z, k = normalize_rows(at_least_float32(embeddings)), self.vectors_per_class
        own = normalize_rows(self.weight).unflatten(0, (-1, k))[labels].to(z.dtype)
        cosine = (own @ z[:, :, None]).squeeze(2)
        votes = torch.zeros(self.num_classes * k, dtype=torch.long, device=z.device)
        votes.index_add_(0, labels * k + cosine.argmax(1), torch.ones_like(labels))
        dominant = votes.unflatten(0, (-1, k)).argmax(1)[labels]
        return cosine.gather(1, dominant[:, None]).squeeze(1) < math.cos(math.radians(degrees))
