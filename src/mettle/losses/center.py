"""Center loss: classes stay together around their centres."""

from typing import Any, Self

import torch
from torch import Tensor

from mettle.difficulty.settings import WriteOnceModule, validate_choice, validate_integers, validate_numbers, view_with
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors, class_means, reduce_samples
from mettle.losses.softmax import Softmax
from mettle.pairs.loss_reduction import LossReduction
from mettle.pairs.similarity import at_least_float32


class Center(WriteOnceModule):
    r"""A classification loss plus the distance of samples to the running centre of their class (Wen et al. 2016).

    Formula:
        L_i = base_i + (λ/2) ‖z_i − c_y‖²,   λ = ``weight``
        after each training call, outside the gradient:  c_j ← c_j − ``rate`` · Σ_{i: y_i=j} (c_j − z_i) / (1 + n_j)
    Needs:
        labels 0 to C − 1. Any class-vector loss as ``base``; `Softmax` unless given.
    Use when:
        a classifier's features should also be compact. Large λ makes everything collapse.
    Relations:
        λ = 0: the base loss. rate 1: a running mean; rate 0: centres stay. Centres are buffers: saved and resumed.
    """

    self_contained = True
    takes_progress = True
    centres: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        weight: float = 0.003,
        rate: float = 0.5,
        base: ClassVectors | None = None,
        *,
        reduction: LossReduction = "mean",
    ):
        super().__init__()
        validate_choice("reduction", reduction, LossReduction)
        validate_integers(num_classes=num_classes, dim=dim)
        validate_numbers(weight=weight, rate=rate)
        require(
            base is None or isinstance(base, ClassVectors),
            f"base must be a class-vector loss such as Softmax({num_classes}, {dim}), got {base!r}",
        )
        require(weight >= 0, f"weight must be at least 0, got {weight}")
        require(0 <= rate <= 1, f"rate must be in [0, 1], got {rate}")
        self.base = Softmax(num_classes, dim) if base is None else base
        shape = self.base.num_classes, self.base.dim
        require(shape == (num_classes, dim), f"base has {shape} class vectors, Center was told ({num_classes}, {dim})")
        require(
            self.base.reduction == "mean",
            f"base has reduction {self.base.reduction!r}: give it to Center, which reduces the sum of both parts",
        )
        require(
            not self.base.anchors_are_classes or reduction == "mean",
            f"reduction {reduction!r} of Center needs one value per sample, and those of {type(self.base).__name__} "
            "belong to classes: use 'mean'",
        )
        require(
            self.base.difficulty is None or reduction in ("mean", "sum", "none"),
            f"reduction {reduction!r} of Center takes a base without a difficulty: use 'mean', 'sum' or 'none'",
        )
        self.strength, self.rate = weight, rate
        self.reduction: LossReduction = reduction
        self.register_buffer("centres", torch.zeros(num_classes, dim))

    @property
    def weight(self) -> Tensor:
        """The class vectors of the base loss."""
        return self.base.weight

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return self.base.num_classes

    @property
    def difficulty(self) -> Any:
        """The difficulty of the base loss."""
        return self.base.difficulty

    def forward(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """The mean over samples, or another ``reduction``; a training call moves the centres."""
        if self.reduction == "mean":
            value = (
                self.base(embeddings, labels, progress=progress)
                + self.strength * self.distance_to_centre(embeddings, labels).mean()
            )
        else:
            values = view_with(self.base, reduction="none")(embeddings, labels, progress=progress)
            values = values + self.strength * self.distance_to_centre(embeddings, labels)
            value = reduce_samples(values, None, self.reduction)
        if self.training and torch.is_grad_enabled():
            self.update_centres(embeddings, labels)
        return value

    def per_anchor(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """(n,) one value per sample."""
        return self.base.per_anchor(embeddings, labels) + self.strength * self.distance_to_centre(embeddings, labels)

    def distance_to_centre(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """(n,) half the squared distance to the own centre."""
        z = at_least_float32(embeddings)
        return (z - self.centres[labels.long()].to(z.dtype)).square().sum(1) / 2

    @torch.no_grad()
    def update_centres(self, embeddings: Tensor, labels: Tensor) -> None:
        """The moving-average rule, for the classes of this batch."""
        known, at, counts = labels.long().unique(return_inverse=True, return_counts=True)
        z = at_least_float32(embeddings).to(self.centres.dtype)
        if not bool(torch.isfinite(z).all()):
            return  # a broken batch gives a broken loss, not a broken state
        centres = self.centres[known]
        pull = counts[:, None] * centres - torch.zeros_like(centres).index_add_(0, at, z)
        self.centres[known] = centres - self.rate * pull / (1 + counts[:, None])

    def start_from(self, embeddings: Tensor, labels: Tensor, *, centered: bool = False) -> Self:
        """Set class vectors and centres of the classes that occur to the means of their samples.

        ``centered`` says where class vectors start, as for the base loss; centres are the means themselves.
        """
        self.base.start_from(embeddings, labels, centered=centered)
        with torch.no_grad():
            known, means = class_means(at_least_float32(embeddings).to(self.centres.dtype), labels.long())
            self.centres[known] = means
        return self

    def logits(self, embeddings: Tensor) -> Tensor:
        """Of the base loss."""
        return self.base.logits(embeddings)

    def predict(self, embeddings: Tensor, chunk: int = 4096) -> Tensor:
        """Of the base loss."""
        return self.base.predict(embeddings, chunk)

    def extra_repr(self) -> str:
        """As it was built."""
        shown = f"weight={self.strength}, rate={self.rate}"
        return shown if self.reduction == "mean" else f"{shown}, reduction={self.reduction!r}"

    def vectors(self) -> Tensor:
        """Of the base loss."""
        return self.base.vectors()

    def statistics(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> dict[str, Any]:
        """Of the base loss, and how far samples are from their centres."""
        found = self.base.statistics(embeddings, labels, progress=progress)  # looks at both first
        with torch.no_grad():
            distance_to_centre = float((2 * self.distance_to_centre(embeddings, labels)).sqrt().mean())
        return found | {"distance_to_centre": distance_to_centre}
