"""Similarity classification: same or different, by a learned threshold on a similarity."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from mettle.difficulty.settings import WriteOnceModule, validate_numbers
from mettle.errors import InputError
from mettle.losses.given_pairs import Likeness, check_measure, check_rows, check_target, similarity, weighted_mean

# Where a threshold can start: cosines of untrained pairs crowd near 1, distances of unit vectors around 1.
THRESHOLD = {"cosine": 0.5, "dot": 0.0}


class SimilarityClassification(WriteOnceModule):
    r"""Binary cross-entropy of the similarity of a given pair, with a learned scale and offset.

    Formula:
        ℓ = BCE(σ(a · f(x₁, x₂) + b), y),   a = e^α > 0;  α and b are learned
    Needs:
        pairs with y = 1 for "same" and 0 for "different"; a share between them is fine too.
    Use when:
        all that is known is which pairs belong together, and a threshold is wanted in the end: it is −b/a.
    Relations:
        a → ∞ with b/a held: a hard threshold at −b/a. Without "different" pairs the best embedding is one point.
    """

    takes = "pairs"
    by_row = True  # items do not see each other: ranks need only their own
    self_contained = True
    range = (0.0, 1.0)

    def __init__(self, scale: float = 10.0, bias: float | None = None, measure: Likeness = "cosine"):
        """Start from this scale a and offset b; without b, from a threshold that suits the measure."""
        super().__init__()
        check_measure(measure)
        validate_numbers(scale=scale, bias=0.0 if bias is None else bias)
        if not scale > 0:
            raise InputError(f"scale must be above 0, got {scale}")
        self.measure: Likeness = measure
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.bias = nn.Parameter(torch.tensor(-scale * THRESHOLD.get(measure, -1.0) if bias is None else float(bias)))

    @property
    def scale(self) -> Tensor:
        """The factor a, above 0 by construction."""
        return self.log_scale.exp()

    @property
    def threshold(self) -> float:
        """The similarity −b/a at which "same" and "different" are equally likely."""
        return (-self.bias / self.scale).item()

    def similarity(self, x1: Tensor, x2: Tensor) -> Tensor:
        """(n,) f(x₁, x₂)."""
        check_rows(x1=x1, x2=x2)
        return similarity(x1, x2, self.measure)

    def logits(self, f: Tensor) -> Tensor:
        """(n,) a·f + b, in the type of the similarities."""
        return self.log_scale.to(f.dtype).exp() * f + self.bias.to(f.dtype)

    def probability(self, x1: Tensor, x2: Tensor) -> Tensor:
        """(n,) how likely each pair is "same"."""
        return self.logits(self.similarity(x1, x2)).sigmoid()

    def from_similarity(self, f: Tensor, target: Tensor) -> Tensor:
        """(n,) one value per pair, from similarities that came from anywhere."""
        target = check_target(f, target, *self.range)
        return binary_cross_entropy_with_logits(self.logits(f), target, reduction="none")

    def per_item(self, x1: Tensor, x2: Tensor, target: Tensor) -> Tensor:
        """(n,) one value per pair."""
        return self.from_similarity(self.similarity(x1, x2), target)

    def forward(self, x1: Tensor, x2: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean over pairs, a scalar with gradient; ``weight`` (n,) counts a pair that often."""
        return weighted_mean(self.per_item(x1, x2, target), weight)

    @torch.no_grad()
    def statistics(self, x1: Tensor, x2: Tensor, target: Tensor) -> dict[str, float]:
        """How many of these pairs fall on the right side, and where the threshold is now."""
        f = self.similarity(x1, x2)
        target = check_target(f, target, *self.range)
        right = ((self.logits(f) > 0) == (target > 0.5)).to(f.dtype)
        right = torch.where((f + target).isnan(), torch.nan, right)
        return {"accuracy": float(right.mean()), "scale": self.scale.item(), "threshold": self.threshold}

    def extra_repr(self) -> str:
        """Where scale and offset are now."""
        return f"scale={self.scale.item():.4g}, bias={self.bias.item():.4g}, measure={self.measure!r}"
