"""Proxy-Anchor: every class vector is an anchor, and all samples of the batch are its pairs."""

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_numbers, view_with
from mettle.losses.base import PairwiseLoss, require, softplus
from mettle.losses.class_vectors import ClassPairs, ClassVectors
from mettle.pairs import (
    Difficulty,
    KernelWeights,
    NoKernel,
    PairOutput,
    Reduction,
    RowValues,
    Tile,
    TwoSidedSpec,
    logsumexp_over,
    pair_loss,
    sum_over,
)
from mettle.pairs.class_softmax import takes_kernels
from mettle.pairs.dispatch import autocast_disabled


class ProxyAnchor(ClassVectors):
    r"""Proxy-Anchor loss (Kim et al. 2020).

    Formula, s the cosine of a sample and a class vector w, α = ``alpha``, δ = ``margin``, C₊ the classes in the batch:
        near_w = log(1 + Σ_{x of w} e^{−α (s − δ)}),   far_w = log(1 + Σ_{x not of w} e^{α (s + δ)})
        L = (1/|C₊|) Σ_{w∈C₊} near_w + (1/C) Σ_w far_w
    Needs:
        labels 0 to C − 1. Embeddings are normalised inside. ``per_anchor`` is (C,): the anchors are the classes, and
        the mean of their values is the loss.
    Use when:
        classes are known and training should be quick: a sample pulls the more, the harder it is for its class vector
        among the batch. Class vectors want a larger rate than the network (``train.loss_rate``).
    Relations:
        the two sums of `MultiSimilarity`, without 1/α and with boundaries δ and −δ.
    """

    self_contained = True
    anchors_are_classes = True

    def __init__(self, num_classes: int, dim: int, margin: float = 0.1, alpha: float = 32.0, **options):
        super().__init__(num_classes, dim, **options)
        validate_numbers(margin=margin, alpha=alpha)
        require(alpha > 0, f"alpha must be above 0, got {alpha}")
        require(margin >= 0, f"margin must be at least 0, got {margin}")
        require(
            self.vectors_per_class == 1, f"every class has one proxy, which is an anchor, got {self.vectors_per_class}"
        )
        require(
            self.reduction != "pairs",
            "reduction 'pairs' counts the pairs of samples, and here classes are the anchors: use 'mean', 'nonzero', "
            "'sum' or 'none'",
        )
        self.margin, self.alpha = margin, alpha
        self.__dict__["_pairs"] = _ProxyPairs(float(alpha), float(margin))  # no part of the state

    @property
    def scale(self) -> float:  # type: ignore[override]
        """Of logits."""
        return self.alpha

    @property
    def by_row(self) -> bool:
        """The samples of a batch meet at the class vectors."""
        return False

    def extra_repr(self) -> str:
        """As it was built."""
        return f"{super().extra_repr()}, margin={self.margin}, alpha={self.alpha}"

    def forward(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """The mean over classes, or another ``reduction``; ``progress`` of training is for a curriculum."""
        by_kernels = self.difficulty is None and self.sample == 1 and takes_kernels(embeddings)
        if not by_kernels or self.reduction != "mean":
            return super().forward(embeddings, labels, progress=progress)
        labels, unknown = self._validate_inputs(embeddings, labels)
        with autocast_disabled(embeddings.device.type):
            mean = self._output(embeddings, self._vectors(), labels).mean()  # which kernels compute on the way
        return mean if unknown is None else mean.masked_fill(unknown.any(), torch.nan)

    def _evaluate(self, z: Tensor, vectors: Tensor, labels: Tensor, half: bool) -> tuple[Tensor, None]:
        return self._output(z, vectors, labels).values, None

    def _output(self, z: Tensor, vectors: Tensor, labels: Tensor) -> PairOutput:
        pairs, anchors, classes, ref = self._class_pairs(z, vectors, labels)
        return pair_loss(pairs, anchors, classes, ref=ref, difficulty=self.difficulty)

    def _class_pairs(self, z: Tensor, vectors: Tensor, labels: Tensor) -> ClassPairs:
        """Class vectors against samples."""
        pairs = self.__dict__["_pairs"]
        if takes_kernels(z):  # which see one class vector at a time
            present = torch.zeros(len(vectors), device=labels.device).index_fill_(0, labels, 1).sum()
            pairs = view_with(pairs, positive_factor=len(vectors) / present)
        return pairs, vectors, self._class_indices(len(vectors)), (z, labels)


class _ProxyPairs(PairwiseLoss):
    """The loss of each class vector over the samples of a batch."""

    alpha: float
    margin: float
    difficulty: Difficulty | None = None

    sorted_anchors = True
    positive_factor = 1.0  # of one call: classes over classes in the batch, a tensor

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Its own samples, and all others."""
        x, bound = self.alpha * tile.similarity, self.alpha * (1 + self.margin)
        shift = self.alpha * self.margin
        return {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "near": logsumexp_over(shift - x, tile.positive, bound=bound),
            "far": logsumexp_over(x + shift, tile.negative, bound=bound),
        }

    def row_loss(self, row_values: RowValues) -> Tensor:
        """Positives count as a mean over classes that have any, negatives as one over all classes."""
        present = row_values["positives"] > 0
        near = softplus(row_values["near"]) * present
        factor = len(near) / present.sum().clamp(min=1).to(near.dtype)
        return near * factor + softplus(row_values["far"])

    def is_defined(self, row_values: RowValues) -> Tensor:
        """Everywhere: a class that is not in the batch has negatives."""
        return torch.ones_like(row_values["positives"], dtype=torch.bool)

    def kernel_spec(self, weights: KernelWeights | None) -> TwoSidedSpec | NoKernel:
        """Two sums of exponentials, whose weights decide which classes count as present."""
        if weights is not None:
            return NoKernel("the kernels take Proxy-Anchor without weights")
        a, m = self.alpha, self.margin
        return TwoSidedSpec(a, a, m, -m, self.positive_factor, all_anchors=True)


__all__ = ["ProxyAnchor"]
