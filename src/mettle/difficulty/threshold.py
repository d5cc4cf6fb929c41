"""Hard positives below one similarity, hard negatives above another: fixed thresholds, or ones that follow the data."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty.settings import WriteOnceModule, validate_fields, validate_numbers
from mettle.errors import InputError
from mettle.pairs import LinearWeights, Reduction, RowValues, Tile, Traits
from mettle.pairs.similarity import prepare_embeddings


@dataclass(frozen=True)
class Threshold:
    r"""Weights that grow with the distance from a threshold.

    Formula:
        positives  w = 1 + alpha · [(positive − s) / positive]₊     (1 once s reaches ``positive``)
        negatives  w = 1 + beta · [(s − negative) / (1 − negative)]₊   (1 while s stays below ``negative``)
        ``form="literal"`` leaves out the [·]₊: easy pairs then count less than 1. Positive weights may turn negative,
        as printed; negative ones stop at 0, because they multiply terms of a sum under a logarithm.
    Use when:
        similarities are cosines and a few pairs stay hard: recognition across devices, sessions, domains.
    Relations:
        alpha = beta = 0 changes nothing. Inside a softmax denominator a weight is an additive margin of
        temperature · log w, at most temperature · log(1 + beta).
    """

    alpha: float = 1.0
    beta: float = 2.0
    positive: float = 0.7
    negative: float = 0.3
    form: Literal["hinge", "literal"] = "hinge"
    detach: bool = True

    # SupCon lets its positive weights act in the numerator: difficulty-aware SupCon.
    traits = Traits(symmetric=True, trusted=True, self_contained=True, positive_weights="numerator")

    def __post_init__(self) -> None:
        validate_fields(self)
        if not (self.alpha >= 0 and self.beta >= 0):
            raise InputError(f"alpha and beta must be at least 0, got {self.alpha} and {self.beta}")
        if not 0 < self.positive <= 1:
            raise InputError(f"positive is a cosine in (0, 1], got {self.positive}")
        if not -1 <= self.negative < 1:
            raise InputError(f"negative is a cosine in [-1, 1), got {self.negative}")
        if self.form not in ("hinge", "literal"):
            raise InputError(f"form must be 'hinge' or 'literal', got {self.form!r}")

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """No row statistics are needed."""
        return {}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        if tile.positive is False:
            return self._negative(tile.similarity)
        return torch.where(tile.positive, self._positive(tile.similarity), self._negative(tile.similarity))  # type: ignore[arg-type]

    def _positive(self, s: Tensor) -> Tensor:
        excess = (self.positive - s) * (self.alpha / self.positive)
        return 1 + (excess.clamp(min=0) if self.form == "hinge" else excess)

    def _negative(self, s: Tensor) -> Tensor:
        excess = (s - self.negative) * (self.beta / (1 - self.negative))
        return 1 + excess.clamp(min=0 if self.form == "hinge" else -1)

    def kernel_weights(self) -> LinearWeights:
        """Two lines, each with its floor."""
        hinge = self.form == "hinge"
        return LinearWeights(
            negative_slope=self.beta / (1 - self.negative),
            negative_threshold=self.negative,
            negative_floor=0.0 if hinge else -1.0,
            positive_slope=self.alpha / self.positive,
            positive_threshold=self.positive,
            positive_floor=0.0 if hinge else -float("inf"),
            differentiable=not self.detach,
        )


MAX_OBSERVED = 512  # anchors looked at per batch, and references for the quantile: enough for both
MAX_NEGATIVE_THRESHOLD = (
    0.999  # of the threshold of negatives; an untrained network on photographs may start with cosines near it
)


class AdaptiveThreshold(WriteOnceModule):
    r"""`Threshold` with running thresholds: positives are hard below their own mean, negatives above a high quantile.

    Formula, before every training batch is weighed, m the momentum:
        positive ← m·positive + (1 − m)·mean similarity of positives, or their ``positive_quantile`` (0.5: the median)
        negative ← m·negative + (1 − m)·``quantile`` of the similarities of negatives
    kept in [0.05, 1] and [−1, 0.999], where they leave room for what is hard. Momentum 0 takes them from each batch
    alone, whatever they were.
    The thresholds are buffers: saved, resumed and moved with the training state. They move only while gradients are
    on, so that looking at statistics or validating changes nothing.
    """

    positive: Tensor
    negative: Tensor
    detach = True
    traits = Threshold.traits

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 2.0,
        positive: float = 0.7,
        negative: float = 0.3,
        momentum: float = 0.99,
        quantile: float = 0.9,
        positive_quantile: float | None = None,
    ):
        super().__init__()
        Threshold(alpha, beta, positive, negative)  # the same bounds apply
        validate_numbers(momentum=momentum, quantile=quantile)
        if not (0 <= momentum < 1 and 0 < quantile < 1):
            raise InputError(f"momentum lies in [0, 1), quantile in (0, 1), got {momentum} and {quantile}")
        if positive_quantile is not None:
            validate_numbers(positive_quantile=positive_quantile)
            if not 0 < positive_quantile < 1:
                raise InputError(
                    f"positive_quantile lies in (0, 1), or is None for the mean of positives, got {positive_quantile}"
                )
        self.alpha, self.beta, self.momentum, self.quantile = alpha, beta, momentum, quantile
        self.positive_quantile = positive_quantile
        self.start = {"positive": positive, "negative": negative}
        self.register_buffer("positive", torch.tensor(float(positive)))
        self.register_buffer("negative", torch.tensor(float(negative)))

    def extra_repr(self) -> str:
        """As it could be built to be what it is now."""
        at = [
            float(str(x.to(x.dtype if x.dtype == torch.float64 else torch.float32).cpu().numpy()[()]))
            for x in (self.positive, self.negative)
        ]
        shown = "" if self.positive_quantile is None else f", positive_quantile={self.positive_quantile}"
        return (
            f"alpha={self.alpha}, beta={self.beta}, positive={at[0]}, negative={at[1]}, momentum={self.momentum}, "
            f"quantile={self.quantile}{shown}"
        )

    def current_threshold(self) -> Threshold:
        """The fixed difficulty that it is now; a GPU is waited for."""
        positive, negative = torch.stack([self.positive, self.negative]).tolist()
        return Threshold(self.alpha, self.beta, positive, negative)

    @torch.no_grad()
    def observe(self, embeddings: Tensor, labels: Tensor) -> None:
        """Move the thresholds by one batch, without waiting for a GPU."""
        z = prepare_embeddings(embeddings.detach(), "cosine")
        step = max(len(z) // MAX_OBSERVED, 1)
        anchors = torch.arange(0, len(z), step, device=z.device)
        s = z[anchors] @ z.T
        same = labels[anchors, None] == labels[None, :]
        positive = same & (anchors[:, None] != torch.arange(len(z), device=z.device)[None, :])
        if self.positive_quantile is None:
            count = positive.sum()
            middle = s.masked_fill(~positive, 0).sum() / count.clamp(min=1)
        else:
            middle, count = masked_quantile(s, positive, self.positive_quantile)
        self._update(self.positive, middle, count, 0.05, 1.0)
        high, count = masked_quantile(s[:, ::step], ~same[:, ::step], self.quantile)
        self._update(self.negative, high, count, -1.0, MAX_NEGATIVE_THRESHOLD)

    def _update(self, threshold: Tensor, towards: Tensor, count: Tensor, low: float, high: float) -> None:
        moved = threshold * self.momentum + (1 - self.momentum) * towards.to(threshold)
        threshold.copy_(torch.where((count > 0) & torch.isfinite(towards), moved.clamp(low, high), threshold))

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """No row statistics are needed."""
        return {}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        s = tile.similarity
        positive, negative = self.positive.to(s), self.negative.to(s)
        w_negative = 1 + ((s - negative) * (self.beta / (1 - negative))).clamp(min=0)
        if tile.positive is False:
            return w_negative
        w_positive = 1 + ((positive - s) * (self.alpha / positive)).clamp(min=0)
        return torch.where(tile.positive, w_positive, w_negative)  # type: ignore[arg-type]

    def kernel_weights(self) -> LinearWeights:
        """Those of the fixed difficulty that it is now; on a GPU as tensors, so that nobody waits for them."""
        if self.positive.device.type == "cpu":
            return self.current_threshold().kernel_weights()
        return LinearWeights(
            negative_slope=self.beta / (1 - self.negative) if self.beta else 0.0,
            negative_threshold=self.negative,
            positive_slope=self.alpha / self.positive if self.alpha else 0.0,
            positive_threshold=self.positive,
        )


def masked_quantile(x: Tensor, mask: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """The value that this share of the masked entries does not exceed, and how many there are; inf where none is."""
    count = mask.sum()
    ordered = x.masked_fill(~mask, torch.inf).flatten().sort().values
    position = torch.minimum((quantile * count).long().clamp(min=1), count.clamp(min=1)) - 1
    return ordered.gather(0, position[None]).squeeze(0), count
