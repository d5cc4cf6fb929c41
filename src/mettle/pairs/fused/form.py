"""Which losses have a fused form, and what the kernels must know of them.

A form is a small description: how a negative enters its row (``far``), how the positives enter and the row ends
(``finish``), and the numbers of both. It is recognised from the loss and its difficulty; whatever is not recognised
runs on the tiled engine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

Far = Literal["plain", "threshold", "tilt", "relative", "raw", "hinge"]
Finish = Literal["supcon out", "supcon in", "infonce", "npair", "contrastive"]

LOG2E = math.log2(math.e)
EXPONENT = 64.0  # sums of e^±64 over millions of pairs, and their inverses, are ordinary float32 numbers
WIDEST = 4096  # columns of an embedding that one row of the small kernels can hold
HALF_FROM = 0.05  # temperature from which float16 operands are accurate enough


@dataclass(frozen=True)
class Form:
    """What the kernels compute. x = s / temperature; s a cosine, or a dot product where not ``unit``."""

    finish: Finish
    far: Far = "plain"
    temperature: float = 1.0
    unit: bool = True
    online: bool = False  # every row tracks its own maximum, because no fixed one is safe
    # negatives: 1 + max(slope·(s − knee), least)
    slope: float = 0.0
    knee: float = 0.0
    least: float = 0.0
    # positives: 1 + max(slope·(knee − s), least)
    near_slope: float = 0.0
    near_knee: float = 0.0
    near_least: float = 0.0
    live: bool = False  # gradient flows through the weights too
    beta: float = 0.0  # of the tilt
    numerator: bool = False  # SupCon: positive weights stay out of the denominator
    by: Literal["count", "weight", "sum"] = "weight"
    scale: float = 1.0  # of the value
    mean_all: bool = False
    prior: float = 0.0
    count_weight: bool = False  # a negative counts as often as it weighs
    margins: tuple[float, float] = (0.0, 0.0)
    shape: Literal["squared", "hadsell", "linear"] = "hadsell"  # of the contrastive hinge

    @property
    def weighted(self) -> bool:
        """Whether positives carry weights of their own."""
        return self.near_slope != 0

    @property
    def two(self) -> bool:
        """Whether a row sums two things over its negatives."""
        return self.far == "tilt" or self.count_weight

    @property
    def looks_twice(self) -> bool:
        """Whether the gradient of a negative depends on both sums."""
        return self.far == "tilt" and self.live

    @property
    def second(self) -> bool:
        """Whether a second encoder is compared with."""
        return self.far in ("relative", "raw")

    @property
    def heavy(self) -> bool:
        """Whether a pair takes more than its similarity and one exponential."""
        return self.far != "plain" or self.online

    @property
    def factor(self) -> float:
        """What each side of a product carries, so that products are similarities times log₂e / temperature."""
        return 1.0 if self.far == "hinge" else math.sqrt(LOG2E / self.temperature)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """The parameters of what a negative adds: see `tile.added`."""
        if self.far == "threshold":
            # 1 + max(slope · (s − knee), least), as a line in x = s · factor², and where it begins
            begins = (self.knee + self.least / self.slope) * self.factor**2
            return self.slope / self.factor**2, 1.0 - self.slope * self.knee, 1.0 + self.least, begins
        return {"tilt": float(self.beta), "hinge": float(self.margins[1])}.get(self.far, 0.0), 0.0, 0.0, 0.0

    @property
    def additive(self) -> bool:
        """Whether sums grow pair by pair: then one visit serves both ends of a pair, and half of the tiles do."""
        return not self.online


def fused_form(loss: Any, difficulty: Any, job: Any) -> Form | None:
    """The fused form of a loss under a difficulty, None where there is none.

    ``job`` needs ``z``, ``ref``, ``biased`` and ``ids``: anything that holds what the engine was called with.
    """
    maker = _LOSSES.get(_name(loss))
    if maker is None or not _suits(job):
        return None
    constant = difficulty is None or _name(difficulty) in _CONSTANT
    form = _remembered(loss, difficulty) if constant else _made(loss, difficulty)
    return None if form is None or (form.second and job.biased is None) else form


def _made(loss: Any, difficulty: Any) -> Form | None:
    form = _LOSSES[_name(loss)](loss, difficulty)
    return None if form is None else _ranged(form)


@lru_cache(64)
def _remembered(loss: Any, difficulty: Any) -> Form | None:
    """Losses and most difficulties are frozen: a training run asks for the same form a million times."""
    return _made(loss, difficulty)


def precision(form: Form, dtype: torch.dtype) -> Literal["half", "split"]:
    """Float16 operands where they are accurate enough, else three bfloat16 products, good to float32."""
    half = dtype in (torch.float16, torch.bfloat16)
    safe = form.unit and form.far != "hinge" and form.temperature >= HALF_FROM
    return "half" if half and safe else "split"


def _suits(job: Any) -> bool:
    """Widths and types that the kernels hold; left out: float64, and pairs excluded by id."""
    sides: list[Tensor] = [job.z, *(x for x in (job.ref,) if x is not None), *(job.biased or ())]
    wide = max(x.shape[1] for x in sides)
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    return wide <= WIDEST and all(x.dtype in kinds for x in sides) and job.ids is None


def _ranged(form: Form) -> Form | None:
    """The form with a fixed maximum where that is safe, else with a running one, else none."""
    if form.far == "hinge":
        return form
    power = {"tilt": 1 + form.beta, "relative": 2.0}.get(form.far, 1.0)
    if form.unit and power / form.temperature <= EXPONENT:
        return form
    simple = form.far in ("plain", "threshold", "raw") and not form.count_weight
    return replace(form, online=True) if simple else None


def _name(x: Any) -> str:
    """Its type, by its full name: this room may not import the rooms of losses and difficulties."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


def _supcon(loss: Any, difficulty: Any) -> Form | None:
    if loss.neg_weight == "penalty":
        return None
    base = 1.0 if loss.base_temperature is None else loss.temperature / loss.base_temperature
    by = loss.normalise or ("count" if loss.numerator_only else "weight")
    form = Form(
        "supcon out" if loss.form == "out" else "supcon in",
        temperature=loss.temperature,
        numerator=loss.numerator_only,
        by=by,
        scale=base,
        mean_all=loss.mean_all,
    )
    form = _weighed(form, difficulty)
    if form is None or loss.neg_weight == "denominator":
        return form
    # "none": negatives enter unweighted.
    return replace(form, far="plain", slope=0.0, beta=0.0) if form.far in ("plain", "threshold", "tilt") else None


def _infonce(loss: Any, difficulty: Any) -> Form | None:
    form = _weighed(Form("infonce", temperature=loss.temperature, prior=loss.prior), difficulty)
    if form is None or loss.prior == 0:
        return form
    by_weight = (loss.count or getattr(difficulty, "negatives", "weight")) == "weight"
    if form.far in ("plain", "tilt") or not by_weight:
        # A tilt's weights have mean 1, so their sum is the count too.
        return form
    return None if form.live or form.far != "threshold" else replace(form, count_weight=True)


def _npair(loss: Any, difficulty: Any) -> Form | None:
    return Form("npair", unit=False) if difficulty is None else None


def _contrastive(loss: Any, difficulty: Any) -> Form | None:
    if difficulty is not None or loss.measure != "cosine":
        return None
    return Form("contrastive", "hinge", margins=(loss.positive, loss.negative), shape=loss.form)


def _weighed(form: Form, difficulty: Any) -> Form | None:
    """The form with its difficulty inside."""
    if difficulty is None:
        return form
    maker = _DIFFICULTIES.get(_name(difficulty))
    return None if maker is None else maker(form, difficulty)


def _threshold(form: Form, it: Any, strength: float = 1.0) -> Form:
    hinge = it.form == "hinge"
    return replace(
        form,
        far="threshold" if it.beta * strength else "plain",
        slope=strength * it.beta / (1 - it.negative),
        knee=it.negative,
        least=0.0 if hinge else -strength,
        near_slope=strength * it.alpha / it.positive,
        near_knee=it.positive,
        near_least=0.0 if hinge else -float("inf"),
        live=not it.detach,
    )


def _adaptive(form: Form, it: Any) -> Form:
    return _threshold(form, it.current())


def _curriculum(form: Form, it: Any) -> Form | None:
    inside = it.difficulty
    if _name(inside) == "mettle.difficulty.adaptive.AdaptiveThreshold":
        inside = inside.current()
    return _threshold(form, inside, it.strength) if _name(inside) == "mettle.difficulty.threshold.Threshold" else None


def _importance(form: Form, it: Any) -> Form:
    return replace(form, far="tilt", beta=it.beta, live=not it.detach) if it.beta else form


def _relative(form: Form, it: Any) -> Form | None:
    if not it.detach or it.form == "distance":
        return None
    return replace(form, far="raw" if it.form == "raw" else "relative")


_LOSSES: dict[str, Callable[[Any, Any], Form | None]] = {
    "mettle.losses.supcon.SupCon": _supcon,
    "mettle.losses.infonce.InfoNCE": _infonce,
    "mettle.losses.npair.NPair": _npair,
    "mettle.losses.contrastive.Contrastive": _contrastive,
}
_CONSTANT = {
    "mettle.difficulty.threshold.Threshold",
    "mettle.difficulty.importance.Importance",
    "mettle.difficulty.relative.Relative",
}
_DIFFICULTIES: dict[str, Callable[[Form, Any], Form | None]] = {
    "mettle.difficulty.threshold.Threshold": _threshold,
    "mettle.difficulty.adaptive.AdaptiveThreshold": _adaptive,
    "mettle.difficulty.combine.curriculum": _curriculum,
    "mettle.difficulty.importance.Importance": _importance,
    "mettle.difficulty.relative.Relative": _relative,
}
