"""Supervised contrastive loss: all positives against the rest."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty import Threshold
from mettle.losses.pairwise import Pairwise, filled, log_add, need
from mettle.pairs import Acc, Difficulty, Rows, Sweep, Tile, lse, total


@dataclass(frozen=True)
class SupCon(Pairwise):
    r"""Supervised contrastive loss (Khosla et al. 2020), with any difficulty.

    Formula, with x = cosine / temperature and D = Σ_a e^x over every other sample:
        out   L_i = −(1/|P|) Σ_p log(e^{x_ip} / D_i)
        in    L_i = −log( (1/|P|) Σ_p e^{x_ip} / D_i )
        With a difficulty, weights enter every sum: a pair of weight 2 counts as if it were listed twice.
        `Threshold` is read as difficulty-aware SupCon: L_i = −(1/|P|) Σ_p w_ip (x_ip − log D_i), positive weights in
        the numerator only, negative weights inside D. Options: ``normalise`` divides by the ``count`` of positives,
        their total ``weight``, or not at all (``sum``); ``neg_weight`` puts negative weights into the
        ``denominator``, into a ``penalty`` (mean of (w − 1)·(−log(1 − p_in)) is added), or uses ``none``.
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
    normalise: Literal["count", "weight", "sum"] | None = None  # None: count for Threshold, weight otherwise
    neg_weight: Literal["denominator", "penalty", "none"] = "denominator"

    def __post_init__(self) -> None:
        need(self.temperature > 0, f"temperature must be above 0, got {self.temperature}")
        need(self.form in ("out", "in"), f"form must be 'out' or 'in', got {self.form!r}")
        known = (None, "count", "weight", "sum")
        need(self.normalise in known, f"normalise must be one of {known}, got {self.normalise!r}")
        known = ("denominator", "penalty", "none")
        need(self.neg_weight in known, f"neg_weight must be one of {known}, got {self.neg_weight!r}")

    @property
    def numerator_only(self) -> bool:
        """Whether positive weights stay out of the denominator (the published reading of `Threshold`)."""
        return getattr(self.difficulty, "positive_weights", "everywhere") == "numerator"

    def sweeps(self) -> tuple[Sweep, ...]:
        """A second pass only for the penalty, which needs every row's denominator."""
        first = Sweep(self.terms)
        return (first, Sweep(self.penalty, reads="rows")) if self.neg_weight == "penalty" else (first,)

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Positives attract; positives and negatives fill the denominator."""
        x, top = tile.s / self.temperature, 1 / self.temperature
        found = {
            "positives": total(1.0, tile.pos, weigh="present"),
            "weight": total(1.0, tile.pos),
            "near": lse(x, tile.pos, weigh="present" if self.numerator_only else "full", ceiling=top),
            "far": lse(x, tile.neg, weigh="full" if self.neg_weight == "denominator" else "none", ceiling=top),
        }
        if self.form == "out":
            return found | {"attract": total(x, tile.pos)}
        return found | {"attract": lse(x, tile.pos, ceiling=top)}

    def penalty(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """How likely each negative is taken for a positive, with and without its weight."""
        logits = tile.s / self.temperature - log_add(rows["near"], rows["far"])
        surprise = -torch.log1p(-logits.clamp(max=-1e-6).exp())
        return {
            "surprise": total(surprise, tile.neg, weigh="none"),
            "weighted surprise": total(surprise, tile.neg),
            "negatives": total(1.0, tile.neg, weigh="none"),
        }

    def finish(self, rows: Rows) -> Tensor:
        """Denominator minus attraction, per positive."""
        count, weight = rows["positives"].clamp(min=1), rows["weight"]
        away = filled(log_add(rows["near"], rows["far"]))
        by = self.normalise or ("count" if self.numerator_only else "weight")
        divisor = {"count": count, "weight": torch.where(weight == 0, 1, weight), "sum": 1.0}[by]
        if self.form == "out":
            value = (weight * away - rows["attract"]) / divisor
        else:
            value = away - filled(rows["attract"]) + (divisor.log() if isinstance(divisor, Tensor) else 0)
        if self.neg_weight == "penalty":
            value = value + (rows["weighted surprise"] - rows["surprise"]) / rows["negatives"].clamp(min=1)
        return value


def DASupCon(
    temperature: float = 0.1,
    alpha: float = 1.0,
    beta: float = 2.0,
    positive: float = 0.7,
    negative: float = 0.3,
    *,
    preset: Literal["default", "literal"] = "default",
    **options,
) -> SupCon:
    r"""Difficulty-aware SupCon: `SupCon` whose difficulty is `Threshold`.

    ``preset="literal"`` is the formula as first written down: unclamped positive weights, negatives unweighted, no
    division by the number of positives. Other options go to `SupCon`.
    """
    need(preset in ("default", "literal"), f"preset must be 'default' or 'literal', got {preset!r}")
    if preset == "literal":
        hard = Threshold(alpha, beta, positive, negative, form="literal")
        return SupCon(temperature, difficulty=hard, **{"normalise": "sum", "neg_weight": "none", **options})
    return SupCon(temperature, difficulty=Threshold(alpha, beta, positive, negative), **options)
