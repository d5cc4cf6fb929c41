"""Supervised contrastive loss: all positives against the rest."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mettle.difficulty import Threshold
from mettle.losses.base import SoftmaxLoss, any_pair, log_add, log_share, require, softplus, zero_if_empty
from mettle.pairs import (
    Difficulty,
    KernelWeights,
    NoKernel,
    Pass,
    Reduction,
    RowValues,
    SoftmaxSpec,
    Tile,
    logsumexp_over,
    sum_over,
)
from mettle.pairs.declarations import declared_traits, iterate_parts
from mettle.pairs.loss_reduction import LossReduction
from mettle.unknown_names import explain_arguments

LIKELY = math.log(2 / 3)  # log p from which 1 − p is summed over the others: two negatives cannot both be as likely


class SupCon(SoftmaxLoss):
    r"""Supervised contrastive loss (Khosla et al. 2020), with any difficulty.

    Formula, with x = cosine / temperature and D = Σ_a e^x over every other sample:
        out   L_i = −(1/|P|) Σ_p log(e^{x_ip} / D_i)
        in    L_i = −log( (1/|P|) Σ_p e^{x_ip} / D_i )
        With a difficulty, weights enter every sum: a pair of weight 2 counts as if it were listed twice.
        `Threshold` is read as difficulty-aware SupCon: L_i = −(1/|P|) Σ_p w_ip (x_ip − log D_i), positive weights in
        the numerator only, negative weights inside D. Options: ``pos_weight`` and ``neg_weight`` say where weights
        act (a ``penalty`` adds the mean of (w − 1)·(−log(1 − p_in)) over negatives), ``normalise`` divides by the
        ``count`` of positives, their total ``weight``, or not at all (``sum``). ``linear`` leaves D unweighted and adds
        push_factor · Σ_n w_in² (s_in − 1) / temperature / Σ_n w_in, s the cosine: a push on every negative, easy ones
        too, that never ends.
        With soft ``targets`` t in the call, L_i = −Σ_j q_ij log(e^{x_ij} / D_i), q_ij = t_ij / Σ_j t_ij (out): the
        cross-entropy between the targets of a row and its softmax.
    Needs:
        labels; at least two samples of a class in the batch. Embeddings are normalised inside.
    Use when:
        training embeddings from labels. Temperature is its strongest knob: try 0.03 to 0.1 first.
    Pairs well with:
        `Threshold` for hard pairs across domains.
    Relations:
        sample ids as labels, two views: SimCLR. in <= out, equal for a single positive.
    """

    temperature: float = 0.1
    form: Literal["out", "in"] = "out"
    difficulty: Difficulty | None = None
    pos_weight: Literal["numerator", "everywhere"] | None = None  # None: numerator for Threshold, else everywhere
    neg_weight: Literal["denominator", "penalty", "linear", "none"] = "denominator"
    normalise: Literal["count", "weight", "sum"] | None = None  # None: count for "numerator", weight otherwise
    base_temperature: float | None = None  # the loss is multiplied by temperature / this; None: by 1
    mean_all: bool = False  # anchors without positives count as 0 in the mean instead of being left out
    push_factor: float = field(default=0.3, kw_only=True)  # times the linear push on negatives

    self_contained = True
    takes_targets = True

    def __post_init__(self) -> None:
        super().__post_init__()
        base = self.base_temperature
        require(base is None or base > 0, f"base_temperature must be above 0, got {base}")
        require(self.push_factor >= 0, f"push_factor must be at least 0, got {self.push_factor}")
        require(
            not (self.learn_temperature and self.neg_weight == "linear"),
            "the linear push falls without end as a learned temperature does: leave learn_temperature off, or use "
            "another neg_weight",
        )
        parts = [
            part for part in iterate_parts(self.difficulty) if isinstance(part, Threshold) and part.form == "literal"
        ]
        require(
            self.form == "out" or not parts,
            "literal weights may be negative and form 'in' takes their logarithm: use form 'out'",
        )
        require(
            self.numerator_only or not any(part.alpha * (1 - part.positive) > part.positive for part in parts),
            "literal weights of this alpha may be negative and pos_weight 'everywhere' takes their logarithm: "
            "use pos_weight 'numerator'",
        )

    @property
    def numerator_only(self) -> bool:
        """Whether positive weights stay out of the denominator."""
        said = self.pos_weight or declared_traits(self.difficulty).positive_weights
        return self.difficulty is not None and said == "numerator"

    def passes(self) -> tuple[Pass, ...]:
        """Everything at once where all pairs count alike; else negatives, positives, and the penalty's pass."""
        if self.difficulty is None:
            return (Pass(self.plain),)
        both = Pass(self.reductions), Pass(self.positives, over="positives")
        return (*both, Pass(self.penalty, reads="anchor")) if self.neg_weight == "penalty" else both

    def plain(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Everyone else fills the denominator, positives attract."""
        return self.softmax_terms(tile) | self.push(tile)

    def push(self, tile: Tile) -> dict[str, Reduction]:
        """The linear push on negatives: a weight multiplies it twice, once in the mean over negatives."""
        if self.neg_weight != "linear":
            return {}
        x = (tile.similarity - 1) / self.temperature
        return {
            "push": sum_over(x, tile.negative, weighting="square"),
            "negative_weight": sum_over(1.0, tile.negative),
        }

    def softmax_terms(self, tile: Tile) -> dict[str, Reduction]:
        """The denominator and the attraction of positives where all pairs count alike, or as soft targets say."""
        x, bound = self.logits(tile), self.logit_bound
        if tile.target is not None:
            attraction = (
                sum_over(tile.target * x, tile.positive)
                if self.form == "out"
                else logsumexp_over(x + log_share(tile.target), tile.positive)
            )
            return {
                "positives": sum_over(1.0, tile.positive),
                "positive_weight": sum_over(tile.target, tile.positive),
                "log_denominator": logsumexp_over(x, any_pair(tile), bound=bound),
                "attraction": attraction,
            }
        return {
            "positives": sum_over(1.0, tile.positive),
            "log_denominator": logsumexp_over(x, any_pair(tile), bound=bound),
            "attraction": sum_over(x, tile.positive)
            if self.form == "out"
            else logsumexp_over(x, tile.positive, bound=bound),
        }

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Negatives fill the denominator, and are pushed."""
        weighting = "weight" if self.neg_weight == "denominator" else "none"
        x = self.logits(tile)
        found = {"negatives_lse": logsumexp_over(x, tile.negative, weighting=weighting, bound=self.logit_bound)}
        found |= self.push(tile)
        return (
            found | {"max_negative": Reduction("max", x, tile.negative, "none")}
            if self.neg_weight == "penalty"
            else found
        )

    def positives(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Positives attract, and fill the denominator too."""
        x, bound = self.logits(tile), self.logit_bound
        found = {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "positive_weight": sum_over(1.0, tile.positive),
            "positives_lse": logsumexp_over(
                x, tile.positive, weighting="mask" if self.numerator_only else "weight", bound=bound
            ),
        }
        if self.form == "out":
            return found | {"attraction": sum_over(x, tile.positive)}
        return found | {"attraction": logsumexp_over(x, tile.positive, bound=bound)}

    def penalty(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """−log(1 − p) of each negative, with and without its weight, but for one that takes most of the row.

        Near p = 1 the difference 1 − p has no digits left. That one negative is the row's maximum, so `row_loss` has
        its −log(1 − p) from the sum over all others, which is accumulated here.
        """
        x = self.logits(tile)
        logits = x - log_add(row_values["positives_lse"], row_values["negatives_lse"])
        likely = logits.detach() > LIKELY
        surprise = -torch.log1p(-torch.where(likely, LIKELY, logits).exp()).masked_fill(likely, 0)
        others = tile.negative & (x.detach() < row_values["max_negative"])
        return {
            "surprise": sum_over(surprise, tile.negative, weighting="none"),
            "weighted surprise": sum_over(surprise, tile.negative),
            "likely": sum_over(likely.to(x.dtype), tile.negative, weighting="none"),
            "weighted likely": sum_over(likely.to(x.dtype), tile.negative),
            "others": logsumexp_over(x, others, weighting="none", bound=self.logit_bound),
            "negatives": sum_over(1.0, tile.negative, weighting="none"),
        }

    def row_loss(self, row_values: RowValues) -> Tensor:
        """Denominator minus attraction, per positive."""
        count, weight = row_values["positives"].clamp(min=1), row_values.get("positive_weight", row_values["positives"])
        log_denominator = zero_if_empty(
            row_values["log_denominator"]
            if "log_denominator" in row_values
            else log_add(row_values["positives_lse"], row_values["negatives_lse"])
        )
        by = self.normalise or ("count" if self.numerator_only else "weight")
        divisor = {"count": count, "weight": torch.where(weight == 0, 1, weight), "sum": 1.0}[by]
        if self.form == "out":
            value = (weight * log_denominator - row_values["attraction"]) / divisor
        else:
            value = (
                log_denominator
                - zero_if_empty(row_values["attraction"])
                + (divisor.log() if isinstance(divisor, Tensor) else 0)
            )
        if "surprise" in row_values:
            likely = (row_values["likely"] > 0) & (row_values["positives"] > 0)
            rest = torch.where(likely, log_add(row_values["positives_lse"], row_values["others"]), 0)
            surprise = softplus(torch.where(likely, row_values["max_negative"], 0) - rest)  # log(all / all others)
            excess = row_values["weighted surprise"] - row_values["surprise"]
            excess = excess + torch.where(likely, (row_values["weighted likely"] - row_values["likely"]) * surprise, 0)
            value = value + excess / row_values["negatives"].clamp(min=1)
        if "push" in row_values:
            weight = row_values["negative_weight"]
            value = value + self.push_factor * row_values["push"] / torch.where(weight == 0, 1, weight)
        if self.mean_all:
            value = value.masked_fill(row_values["positives"] == 0, 0)
        return value if self.base_temperature is None else value * (self.current_temperature() / self.base_temperature)

    def is_defined(self, row_values: RowValues) -> Tensor:
        """Anchors with a positive, or all of them."""
        return (row_values["positives"] > 0) | self.mean_all

    def kernel_spec(self, weights: KernelWeights | None) -> SoftmaxSpec | NoKernel:
        """All but the penalty, which takes a pass of its own, and the linear push, a sum that is no softmax."""
        if self.learn_temperature and self.base_temperature is not None:
            return NoKernel("the value is multiplied by a learned temperature")
        if (refusal := self.refuse_learning(weights)) is not None:
            return refusal
        if self.neg_weight == "penalty":
            return NoKernel("the kernels have no pass for neg_weight='penalty'")
        if self.neg_weight == "linear":
            return NoKernel("the kernels have no sum for neg_weight='linear'")
        return SoftmaxSpec(
            "supcon_out" if self.form == "out" else "supcon_in",
            self.temperature,
            weights,
            positive_weights="numerator" if self.numerator_only else "everywhere",
            weigh_negatives=self.neg_weight == "denominator",
            divide_by=self.normalise or ("count" if self.numerator_only else "weight"),
            scale=1.0 if self.base_temperature is None else self.temperature / self.base_temperature,
            all_anchors=self.mean_all,
            log_temperature=self.learned_log_temperature(),
        )


@dataclass(frozen=True)
class Preset:
    """What `DASupCon` is where its call does not say."""

    temperature: float = 0.1
    alpha: float = 1.0
    beta: float = 2.0
    positive: float = 0.7
    negative: float = 0.3
    weight_form: Literal["hinge", "literal"] = "hinge"
    neg_weight: Literal["denominator", "penalty", "linear", "none"] = "denominator"
    normalise: Literal["count", "weight", "sum"] | None = None


PRESETS = {
    "default": Preset(),
    "literal": Preset(weight_form="literal", neg_weight="none", normalise="sum"),
    "author": Preset(0.07, 1.0, 1.0, 0.1, 0.7, "hinge", "linear", "weight"),
}


@explain_arguments
def DASupCon(
    temperature: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    positive: float | None = None,
    negative: float | None = None,
    *,
    preset: Literal["default", "literal", "author"] = "default",
    form: Literal["out", "in"] = "out",
    pos_weight: Literal["numerator", "everywhere"] | None = None,
    neg_weight: Literal["denominator", "penalty", "linear", "none"] | None = None,
    normalise: Literal["count", "weight", "sum"] | None = None,
    push_factor: float = 0.3,
    reduction: LossReduction = "mean",
) -> SupCon:
    r"""Difficulty-aware SupCon: `SupCon` whose difficulty is `Threshold`.

    What is left out is that of the preset:
        default  temperature 0.1, alpha 1, beta 2, thresholds 0.7 and 0.3; negative weights in the denominator
        literal  the same numbers and the formula as first written down: unclamped positive weights, negatives
                 unweighted, no division by the number of positives (the ``reduction`` over anchors stays)
        author   the loss as its author coded it: temperature 0.07, alpha 1, beta 1, thresholds 0.1 and 0.7;
                 positives normalised by their total weight, negatives in a linear push of ``push_factor`` 0.3
    The other options are those of `SupCon`.
    """
    require(preset in PRESETS, f"preset must be {' or '.join(map(repr, PRESETS))}, got {preset!r}")
    usual = PRESETS[preset]
    given = {"alpha": alpha, "beta": beta, "positive": positive, "negative": negative}
    numbers: dict[str, Any] = {name: getattr(usual, name) if value is None else value for name, value in given.items()}
    return SupCon(
        usual.temperature if temperature is None else temperature,
        form,
        Threshold(**numbers, form=usual.weight_form),
        pos_weight,
        neg_weight or usual.neg_weight,
        normalise or usual.normalise,
        push_factor=push_factor,
        reduction=reduction,
    )
