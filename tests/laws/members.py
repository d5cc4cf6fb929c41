"""Every pairwise loss in every form, and every difficulty: what the laws are tried on."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mettle.difficulty import (
    Angular,
    DistanceWeighted,
    EasyHard,
    Hardest,
    Importance,
    MultiSimilarityMining,
    PairMargin,
    Product,
    Relative,
    SemiHard,
    Threshold,
    TripletMarginMining,
    curriculum,
)
from mettle.losses import (
    Circle,
    Contrastive,
    DASupCon,
    InfoNCE,
    LiftedStructure,
    Margin,
    MultiSimilarity,
    NPair,
    SelfTriplet,
    SmoothAP,
    SupCon,
    Triplet,
)
from mettle.pairs import Traits
from mettle.pairs.declarations import declared_traits
from mettle.pairs.problem import STATISTIC, build_problem, difficulty_statistics
from mettle.pairs.reference import reduce_problem

FORMS: dict[str, Any] = {
    "supcon out": SupCon(0.2),
    "supcon in": SupCon(0.2, form="in"),
    "supcon sum": SupCon(0.2, normalise="sum"),
    "supcon linear": SupCon(0.2, neg_weight="linear"),
    "supcon cold": SupCon(0.02),  # below the safe range of the fixed maximum in float32
    "infonce": InfoNCE(0.5),
    "infonce cold": InfoNCE(0.02),
    "debiased": InfoNCE(0.5, prior=0.1),
    "debiased clamped": InfoNCE(0.1, prior=0.4),
    "contrastive squared": Contrastive(0.4, 1.3, "squared"),
    "contrastive hadsell": Contrastive(0.4, 1.3, "hadsell"),
    "contrastive linear": Contrastive(0.4, 1.3, "linear"),
    "contrastive raw": Contrastive(0.4, 3.0, "hadsell", normalise=False),
    "triplet all": Triplet(0.3),
    "triplet all of all": Triplet(0.3, average="all"),
    "triplet squared soft": Triplet(0.3, squared=True, soft=True),
    "triplet raw": Triplet(0.3, normalise=False),
    "triplet hardest": Triplet(0.3, "hardest"),
    "triplet semihard": Triplet(0.3, "semihard"),
    "triplet semihard set": Triplet(0.5, "semihard-set", squared=True),
    "self triplet": SelfTriplet(0.1),
    "self triplet mean": SelfTriplet(0.1, "mean"),
    "self triplet readme": SelfTriplet(0.1, "readme"),
    "self triplet paired": SelfTriplet(0.0, "paired"),
    "lifted": LiftedStructure(),
    "lifted unit": LiftedStructure(normalise=True),
    "n-pair": NPair(0.02),
    "multi-similarity": MultiSimilarity(2.0, 10.0),
    "circle": Circle(0.4, 8.0),
    "margin": Margin(0.2, 1.1, boundary="fixed"),
    "margin raw": Margin(0.2, 2.0, boundary="fixed", normalise=False),
    "smooth ap": SmoothAP(0.1),
}
ON_SPHERE = [name for name, loss in FORMS.items() if getattr(loss, "measure", "") == "cosine"]

DIFFICULTIES: dict[str, Any] = {
    "threshold": Threshold(positive=0.6, negative=0.1),
    "threshold live": Threshold(positive=0.6, negative=0.1, detach=False),
    "importance": Importance(0.7),
    "importance detached": Importance(0.7, detach=True),
    "relative": Relative(),
    "relative raw": Relative("raw"),
    "relative distance": Relative("distance"),
    "hardest": Hardest(),
    "hardest negatives": Hardest("negatives"),
    "semi-hard": SemiHard(0.7),
    "multi-similarity mining": MultiSimilarityMining(0.3),
    "easy-hard": EasyHard(),
    "hard-semi-hard": EasyHard("hard", "semihard"),
    "semi-hard-hard": EasyHard("semihard", "hard"),
    "all-easy": EasyHard("all", "easy"),
    "pair margin": PairMargin(0.7, 0.1),
    "angular": Angular(40),
    "triplet margin": TripletMarginMining(0.2),
    "triplet margin semi-hard": TripletMarginMining(0.2, "semihard"),
    "distance-weighted": DistanceWeighted(),
    "product of mining": Product(EasyHard("hard", "semihard"), Angular(30)),
    "product": Product(Threshold(), Importance(0.5)),
    "curriculum": curriculum(Threshold(), end=0.5).at(0.25),
}


def with_difficulty(loss: Any, difficulty: Any) -> Any:
    return replace(loss, difficulty=difficulty)


def differentiable(loss: Any) -> Any:
    """The loss without what it holds constant for the gradient, which finite differences do not."""
    return replace(loss, stop_gradient=False) if hasattr(loss, "stop_gradient") else loss


@dataclass(frozen=True)
class Given:
    """Weights from a table: what a user's own difficulty may look like."""

    table: Tensor  # (n, m)
    positive_weights: Literal["everywhere", "numerator"] = "everywhere"
    negatives: Literal["weight", "plain"] = "weight"
    detach: bool = True

    @property
    def traits(self):
        return Traits(positive_weights=self.positive_weights, negatives=self.negatives)

    def row_statistics(self, tile):
        return {}

    def weights(self, tile, row_values):
        return self.table.to(tile.similarity.dtype)[tile.anchor_index, tile.reference_index]


def batch(n: int = 14, d: int = 5, seed: int = 0, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Classes of 1 to 4 samples in mixed order: some anchors have no positive."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [3, 3, 2, 4, 1, 1]
    labels = torch.cat([torch.full((size,), k) for k, size in enumerate(sizes)])
    labels = labels.repeat(n // 14 + 1)[:n] + torch.arange(n) // 14 * 10
    labels = labels[torch.randperm(n, generator=generator)]
    z = torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)
    return z.requires_grad_(), labels


def pairs_batch(n: int = 14, d: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Exactly two of every class, for N-pair."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n // 2).repeat(2)[torch.randperm(n, generator=generator)]
    return torch.randn(n, d, generator=generator, dtype=torch.float64).requires_grad_(), labels


def fitting(loss: Any, **options) -> tuple[Tensor, Tensor]:
    return pairs_batch(**options) if isinstance(loss, NPair) else batch(**options)


def second(z: Tensor, seed: int = 5) -> Tensor:
    """Another encoder's view of the same batch."""
    return torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(z.dtype)


def extra(loss: Any, z: Tensor) -> dict[str, Any]:
    """The second encoder's embeddings, where the difficulty asks for them."""
    return {"biased": second(z)} if isinstance(loss.difficulty, Relative) else {}


def value_and_gradient(loss: Any, z: Tensor, y: Tensor, **options) -> tuple[Tensor, Tensor]:
    leaf = z.detach().clone().requires_grad_()
    output = loss.output(leaf, y, **options)
    (gradient,) = torch.autograd.grad(output.mean(), leaf)
    return output.per_anchor().detach(), gradient


def frozen(loss, z, y, **options):
    """The loss with its weights fixed at this point: what "detached" means for a finite difference."""
    difficulty = loss.difficulty
    problem, _ = build_problem(loss, z.detach(), y, None, None, difficulty, options.get("biased"), sort=False)
    tile = problem.tile(*problem.whole_blocks())
    known = {k: v[:, None] for k, v in reduce_problem(problem).items() if k.startswith(STATISTIC)}
    w = difficulty.weights(tile, difficulty_statistics(known))
    traits = declared_traits(difficulty)
    return with_difficulty(loss, Given(w, traits.positive_weights, traits.negatives))


__all__ = ["DIFFICULTIES", "FORMS", "ON_SPHERE", "DASupCon", "Given", "batch", "extra", "fitting", "second"]
