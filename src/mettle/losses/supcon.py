"""Supervised contrastive loss: all positives against the rest."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty import Threshold
from mettle.difficulty.combine import nested
from mettle.losses.base import Pairwise, either, filled, log_add, need, softplus
from mettle.pairs import Acc, Difficulty, KernelWeights, NoKernel, Rows, SoftmaxSpec, Sweep, Tile, lse, total
from mettle.pairs.declarations import traits_of
from mettle.unknown_names import explain_arguments

LIKELY = math.log(2 / 3)  # log p from which 1 − p is summed over the others: two negatives cannot both be as likely


@dataclass(frozen=True)
class SupCon(Pairwise):
    r"""Supervised contrastive loss (Khosla et al. 2020), with any difficulty.

    Formula, with x = cosine / temperature and D = Σ_a e^x over every other sample:
        out   L_i = −(1/|P|) Σ_p log(e^{x_ip} / D_i)
        in    L_i = −log( (1/|P|) Σ_p e^{x_ip} / D_i )
        With a difficulty, weights enter every sum: a pair of weight 2 counts as if it were listed twice.
        `Threshold` is read as difficulty-aware SupCon: L_i = −(1/|P|) Σ_p w_ip (x_ip − log D_i), positive weights in
        the numerator only, negative weights inside D. Options: ``pos_weight`` and ``neg_weight`` say where weights
        act (a ``penalty`` adds the mean of (w − 1)·(−log(1 − p_in)) over negatives), ``normalise`` divides by the
        ``count`` of positives, their total ``weight``, or not at all (``sum``).
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
    neg_weight: Literal["denominator", "penalty", "none"] = "denominator"
    normalise: Literal["count", "weight", "sum"] | None = None  # None: count for "numerator", weight otherwise
    base_temperature: float | None = None  # the loss is multiplied by temperature / this; None: by 1
    mean_all: bool = False  # anchors without positives count as 0 in the mean instead of being left out

    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")
        need(self.form in ("out", "in"), f"form must be 'out' or 'in', got {self.form!r}")
        known = (None, "numerator", "everywhere")
        need(self.pos_weight in known, f"pos_weight must be one of {known}, got {self.pos_weight!r}")
        base = self.base_temperature
        need(base is None or base > 0, f"base_temperature must be above 0, got {base}")
        parts = [part for part in nested(self.difficulty) if isinstance(part, Threshold) and part.form == "literal"]
        need(
            self.form == "out" or not parts,
            "literal weights may be negative and form 'in' takes their logarithm: use form 'out'",
        )
        need(
            self.numerator_only or not any(part.alpha * (1 - part.positive) > part.positive for part in parts),
            "literal weights of this alpha may be negative and pos_weight 'everywhere' takes their logarithm: "
            "use pos_weight 'numerator'",
        )
        known = (None, "count", "weight", "sum")
        need(self.normalise in known, f"normalise must be one of {known}, got {self.normalise!r}")
        known = ("denominator", "penalty", "none")
        need(self.neg_weight in known, f"neg_weight must be one of {known}, got {self.neg_weight!r}")

    @property
    def numerator_only(self) -> bool:
        """Whether positive weights stay out of the denominator."""
        said = self.pos_weight or traits_of(self.difficulty).positive_weights
        return self.difficulty is not None and said == "numerator"

    def sweeps(self) -> tuple[Sweep, ...]:
        """Everything at once where all pairs count alike; else negatives, positives, and the penalty's pass."""
        if self.difficulty is None:
            return (Sweep(self.plain),)
        both = Sweep(self.terms), Sweep(self.positives, over="positives")
        return (*both, Sweep(self.penalty, reads="rows")) if self.neg_weight == "penalty" else both

    def plain(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Everyone else fills the denominator, positives attract."""
        x, top = tile.s / self.temperature, 1 / self.temperature
        return {
            "positives": total(1.0, tile.pos),
            "away": lse(x, either(tile), ceiling=top),
            "attract": total(x, tile.pos) if self.form == "out" else lse(x, tile.pos, ceiling=top),
        }

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Negatives fill the denominator."""
        weigh, x = "full" if self.neg_weight == "denominator" else "none", tile.s / self.temperature
        found = {"far": lse(x, tile.neg, weigh=weigh, ceiling=1 / self.temperature)}
        return found | {"top": Acc("peak", x, tile.neg, "none")} if self.neg_weight == "penalty" else found

    def positives(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Positives attract, and fill the denominator too."""
        x, top = tile.s / self.temperature, 1 / self.temperature
        found = {
            "positives": total(1.0, tile.pos, weigh="present"),
            "weight": total(1.0, tile.pos),
            "near": lse(x, tile.pos, weigh="present" if self.numerator_only else "full", ceiling=top),
        }
        if self.form == "out":
            return found | {"attract": total(x, tile.pos)}
        return found | {"attract": lse(x, tile.pos, ceiling=top)}

    def penalty(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """−log(1 − p) of each negative, with and without its weight, but for one that takes most of the row.

        Near p = 1 the difference 1 − p has no digits left. That one negative is the row's maximum, so `finish` has its
        −log(1 − p) from the sum over all others, which is collected here.
        """
        x = tile.s / self.temperature
        logits = x - log_add(rows["near"], rows["far"])
        likely = logits.detach() > LIKELY
        surprise = -torch.log1p(-torch.where(likely, LIKELY, logits).exp()).masked_fill(likely, 0)
        others = tile.neg & (x.detach() < rows["top"])
        return {
            "surprise": total(surprise, tile.neg, weigh="none"),
            "weighted surprise": total(surprise, tile.neg),
            "likely": total(likely.to(x.dtype), tile.neg, weigh="none"),
            "weighted likely": total(likely.to(x.dtype), tile.neg),
            "others": lse(x, others, weigh="none", ceiling=1 / self.temperature),
            "negatives": total(1.0, tile.neg, weigh="none"),
        }

    def finish(self, rows: Rows) -> Tensor:
        """Denominator minus attraction, per positive."""
        count, weight = rows["positives"].clamp(min=1), rows.get("weight", rows["positives"])
        away = filled(rows["away"] if "away" in rows else log_add(rows["near"], rows["far"]))
        by = self.normalise or ("count" if self.numerator_only else "weight")
        divisor = {"count": count, "weight": torch.where(weight == 0, 1, weight), "sum": 1.0}[by]
        if self.form == "out":
            value = (weight * away - rows["attract"]) / divisor
        else:
            value = away - filled(rows["attract"]) + (divisor.log() if isinstance(divisor, Tensor) else 0)
        if "surprise" in rows:
            likely = (rows["likely"] > 0) & (rows["positives"] > 0)
            rest = torch.where(likely, log_add(rows["near"], rows["others"]), 0)
            surprise = softplus(torch.where(likely, rows["top"], 0) - rest)  # log(all / all others)
            excess = rows["weighted surprise"] - rows["surprise"]
            excess = excess + torch.where(likely, (rows["weighted likely"] - rows["likely"]) * surprise, 0)
            value = value + excess / rows["negatives"].clamp(min=1)
        if self.mean_all:
            value = value.masked_fill(rows["positives"] == 0, 0)
        return value if self.base_temperature is None else value * (self.temperature / self.base_temperature)

    def defined(self, rows: Rows) -> Tensor:
        """Anchors with a positive, or all of them."""
        return (rows["positives"] > 0) | self.mean_all

    def kernel_spec(self, weights: KernelWeights | None) -> SoftmaxSpec | NoKernel:
        """All but the penalty, which takes a pass of its own."""
        if self.neg_weight == "penalty":
            return NoKernel("the kernels have no pass for neg_weight='penalty'")
        return SoftmaxSpec(
            "supcon_out" if self.form == "out" else "supcon_in",
            self.temperature,
            weights,
            positive_weights="numerator" if self.numerator_only else "everywhere",
            weigh_negatives=self.neg_weight == "denominator",
            divide_by=self.normalise or ("count" if self.numerator_only else "weight"),
            scale=1.0 if self.base_temperature is None else self.temperature / self.base_temperature,
            all_anchors=self.mean_all,
        )


@explain_arguments
def DASupCon(
    temperature: float = 0.1,
    alpha: float = 1.0,
    beta: float = 2.0,
    positive: float = 0.7,
    negative: float = 0.3,
    *,
    preset: Literal["default", "literal"] = "default",
    form: Literal["out", "in"] = "out",
    pos_weight: Literal["numerator", "everywhere"] | None = None,
    neg_weight: Literal["denominator", "penalty", "none"] | None = None,
    normalise: Literal["count", "weight", "sum"] | None = None,
) -> SupCon:
    r"""Difficulty-aware SupCon: `SupCon` whose difficulty is `Threshold`.

    ``preset="literal"`` is the formula as first written down: unclamped positive weights, negatives unweighted, no
    division by the number of positives (the mean over anchors stays). The other options are those of `SupCon`.
    """
    need(preset in ("default", "literal"), f"preset must be 'default' or 'literal', got {preset!r}")
    literal = preset == "literal"
    return SupCon(
        temperature,
        form,
        Threshold(alpha, beta, positive, negative, form="literal" if literal else "hinge"),
        pos_weight,
        neg_weight or ("none" if literal else "denominator"),
        normalise or ("sum" if literal else None),
    )
