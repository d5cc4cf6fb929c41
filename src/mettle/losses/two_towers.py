"""Two encoders, two sets of embeddings, row i of one belongs to row i of the other: CLIP and SigLIP."""

import math
from collections.abc import Iterator
from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn

from mettle.difficulty import AdaptiveThreshold
from mettle.difficulty.settings import SettingsModule
from mettle.errors import InputError
from mettle.losses.base import PairwiseLoss, SoftmaxLoss, require, softplus
from mettle.losses.infonce import InfoNCE
from mettle.pairs import Difficulty, PairOutput, PairStatistics, Reduction, RowValues, Tile, iterate_parts, sum_over
from mettle.pairs.dispatch import Engine
from mettle.pairs.loss_reduction import LossReduction
from mettle.pairs.similarity import transforms_active


class TwoTowerLoss(SettingsModule):
    """What losses of two towers share: one pairwise loss, taken in both directions.

    The value of sample i is the mean of two: image i among all texts, and text i among all images.
    """

    takes_progress = True  # of training, as an argument of the call: for curricula
    self_contained = True
    is_symmetric = False  # whether the values of both directions have the same sum

    difficulty: Difficulty | None = field(default=None, kw_only=True)
    reduction: LossReduction = field(default="mean", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not any(isinstance(part, AdaptiveThreshold) for part in iterate_parts(self.difficulty)),
            "an adaptive threshold follows the pairs of one batch, here two are compared: use Threshold",
        )
        self.direction = self.build_direction()

    def build_direction(self) -> PairwiseLoss:
        """The loss of one tower against the other, which holds what is learned."""
        raise NotImplementedError

    def forward(self, images: Tensor, texts: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """The mean over samples, or another ``reduction`` of them, with gradient. Options: see :meth:`output`."""
        if self.is_symmetric and self.difficulty is None and self.reduction in ("mean", "sum"):
            return next(self._directions(images, texts, labels, **options)).reduce(self.reduction)
        return self.output(images, texts, labels, **options).reduce(self.reduction)

    def per_anchor(self, images: Tensor, texts: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """(n,) one value per sample. Options: see :meth:`output`."""
        return self.output(images, texts, labels, **options).per_anchor()

    def output(
        self,
        images: Tensor,
        texts: Tensor,
        labels: Tensor | None = None,
        *,
        progress: float | None = None,
        engine: Engine = "auto",
        tile: int | None = None,
    ) -> PairOutput:
        """Values, where they are defined, and the engine that computed them.

        Args:
            images: (n, d) embeddings of the first tower, any floating type; normalised inside.
            texts: (n, d) of the second: row i belongs to row i of the first.
            labels: (n,) whole numbers: rows of equal label belong together too. By default every row is its own.
            progress: how much of training is done, from 0 to 1, for a difficulty that follows a curriculum.
            engine: ``auto``, ``dense``, ``tiled`` or, on a GPU, ``triton``.
            tile: rows of a tile of the tiled engine; chosen by size when left out.
        """
        there, back = self._directions(images, texts, labels, progress=progress, engine=engine, tile=tile)
        mean = None
        if there.mean_value is not None and back.mean_value is not None and self.difficulty is None:
            mean = (there.mean_value + back.mean_value) / 2  # over all rows: each has the other tower's as a positive
        values, defined = (there.values + back.values) / 2, there.defined & back.defined
        return PairOutput(values, defined, None, there.engine, mean, positives=there.positives)

    def statistics(
        self, images: Tensor, texts: Tensor, labels: Tensor | None = None, *, progress: float | None = None
    ) -> PairStatistics:
        """Counts and means over the pairs of an image and a text; what the difficulty did, seen from the images."""
        labels = self._pair_labels(images, texts, labels)
        return self.direction.statistics(images, labels, ref=(texts, labels), progress=progress)

    def _directions(
        self,
        images: Tensor,
        texts: Tensor,
        labels: Tensor | None,
        *,
        progress: float | None = None,
        engine: Engine = "auto",
        tile: int | None = None,
    ) -> Iterator[PairOutput]:
        """Images among texts, then texts among images; computed as they are asked for."""
        labels = self._pair_labels(images, texts, labels)
        for rows, others in ((images, texts), (texts, images)):
            ref = (others, labels)
            yield self.direction.output(rows, labels, ref=ref, progress=progress, engine=engine, tile=tile)

    def _pair_labels(self, images: Tensor, texts: Tensor, labels: Tensor | None) -> Tensor:
        """Which rows belong together; refuses what are not two towers."""
        name = type(self).__name__
        for what, x in (("images", images), ("texts", texts)):
            if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
                came = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise InputError(
                    f"{name} compares the embeddings of two towers, loss(images, texts): {what} must be floating "
                    f"point (n, d), got {came}. For one tower and labels use InfoNCE or SupCon"
                )
        if images.shape != texts.shape:
            raise InputError(
                f"row i of images belongs to row i of texts: both must be (n, d), got {tuple(images.shape)} and "
                f"{tuple(texts.shape)}"
            )
        if labels is None:
            return torch.arange(len(images), device=images.device)
        if not isinstance(labels, Tensor) or labels.shape != images.shape[:1]:
            came = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
            raise InputError(f"labels must be ({len(images)},) numbers, equal where rows belong together, got {came}")
        return labels


class CLIP(TwoTowerLoss):
    r"""Symmetric cross-entropy between two towers (Radford et al. 2021).

    Formula, x_ij = cosine of image i and text j / temperature:
        L_i = ½ ( −log( e^{x_ii} / Σ_j e^{x_ij} ) − log( e^{x_ii} / Σ_j e^{x_ji} ) )
        The temperature is learned, as its logarithm. A training call first lifts it to ``min_temperature``: the scale
        1/temperature is at most 100, as published.
        With ``labels``, rows of equal label are no negatives but further positives, each alone against the negatives.
    Needs:
        two sets of embeddings; row i of both is one sample. Embeddings are normalised inside.
    Use when:
        two encoders shall meet in one space: images and texts, two sensors, queries and documents.
    Relations:
        in each direction it is `InfoNCE` with the other tower as ``ref``.
    """

    temperature: float = 0.07
    learn_temperature: bool = field(default=True, kw_only=True)
    min_temperature: float = field(default=0.01, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.min_temperature > 0 and (self.min_temperature <= self.temperature or not self.learn_temperature),
            f"min_temperature must be above 0, and at most the temperature that learning starts from, "
            f"{self.temperature}, got {self.min_temperature}",
        )

    def build_direction(self) -> InfoNCE:
        """The other tower's row of the sample against those of all others."""
        return InfoNCE(
            self.temperature,
            difficulty=self.difficulty,
            learn_temperature=self.learn_temperature,
            reduction=self.reduction,
        )

    def forward(self, images: Tensor, texts: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        """The mean over samples, or another ``reduction``; a training call first lifts too low a temperature."""
        learned = self.direction.learned_log_temperature()  # type: ignore[union-attr]
        if learned is not None and self.training and torch.is_grad_enabled() and not transforms_active():
            with torch.no_grad():
                learned.clamp_(min=math.log(self.min_temperature))
        return super().forward(images, texts, labels, **options)


class SigLIP(TwoTowerLoss):
    r"""Pairwise sigmoid loss between two towers (Zhai et al. 2023).

    Formula, s_ij the cosine of image i and text j, t = 1/temperature and b the bias, both learned; z_ij = 1 for a pair
    that belongs together, else −1:
        L_i = −½ Σ_j ( log σ(z_ij (t s_ij + b)) + log σ(z_ji (t s_ji + b)) );   the mean is −(1/n) Σ_ij log σ(…)
        Learned are log temperature, from log 0.1 (t from 10, as published), and the bias, from −10.
        With ``labels``, all rows of equal label belong together.
    Needs:
        two sets of embeddings; row i of both is one sample. Embeddings are normalised inside.
    Use when:
        batches are small, or every pair shall be judged by itself: nothing is normalised over the batch.
    Relations:
        `SimilarityClassification` of every pair of the batch, summed over a row. The bias starts where the many
        negatives of an untrained model cost next to nothing.
    """

    temperature: float = 0.1
    bias: float = -10.0
    learn_temperature: bool = field(default=True, kw_only=True)
    learn_bias: bool = field(default=True, kw_only=True)

    is_symmetric = True

    def build_direction(self) -> "SigmoidPairs":
        """Every text for itself."""
        return SigmoidPairs(
            self.temperature,
            self.bias,
            self.difficulty,
            learn_temperature=self.learn_temperature,
            learn_bias=self.learn_bias,
            reduction=self.reduction,
        )


class SigmoidPairs(SoftmaxLoss):
    """A binary classification of each pair, summed over the pairs of an anchor: one direction of `SigLIP`.

    A learned bias is the parameter ``logit_bias``.
    """

    temperature: float = 0.1
    bias: float = -10.0
    difficulty: Difficulty | None = None
    learn_bias: bool = field(default=False, kw_only=True)

    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        start = nn.Parameter(torch.tensor(float(self.bias))) if self.learn_bias else None
        self.register_parameter("logit_bias", start)

    def current_bias(self) -> float | Tensor:
        """The setting, or what was learned."""
        learned = self._parameters["logit_bias"]
        return self.bias if learned is None else learned

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Positives above the bias, negatives below it."""
        x = self.logits(tile) + self.current_bias()
        return {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "pull": sum_over(softplus(-x), tile.positive),
            "push": sum_over(softplus(x), tile.negative),
        }

    def row_loss(self, row_values: RowValues) -> Tensor:
        """Both sides."""
        return row_values["pull"] + row_values["push"]


__all__ = ["CLIP", "SigLIP"]
