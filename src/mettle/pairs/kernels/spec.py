"""From what a loss and a difficulty declare to what the kernels are launched with.

A form is a small description: how a negative enters its row (``far``), how the positives enter and the row ends
(``finish``), and the numbers of both. It follows from the `KernelSpec` that the loss declares; whatever declares none,
or one that these kernels cannot compute, runs on the tiled engine, with the reason.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from mettle.pairs.kernel_spec import (
    BatchHardSpec,
    ExponentialWeights,
    HardestWeights,
    HingeSpec,
    LinearWeights,
    NoKernel,
    RelativeWeights,
    SoftmaxSpec,
    declared_spec,
)

Far = Literal["plain", "threshold", "tilt", "relative", "raw", "hinge"]
Finish = Literal["supcon out", "supcon in", "infonce", "npair", "contrastive"]

LOG2E = math.log2(math.e)
EXPONENT = 64.0  # sums of e^±64 over millions of pairs, and their inverses, are ordinary float32 numbers
WIDEST = 4096  # columns of an embedding that one row of the small kernels can hold
HALF_FROM = 0.05  # temperature from which float16 operands are accurate enough
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FINISHES: dict[str, Finish] = {
    "supcon_out": "supcon out",
    "supcon_in": "supcon in",
    "infonce": "infonce",
    "npair": "npair",
}


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
    """The fused form of a loss under a difficulty, None where there is none."""
    found = find_form(loss, difficulty, job)
    return found if isinstance(found, Form) else None


def find_form(loss: Any, difficulty: Any, job: Any) -> Form | BatchHardSpec | NoKernel:
    """What the kernels are to compute, or why they cannot.

    ``job`` needs ``z``, ``ref``, ``biased`` and ``ids``: anything that holds what the engine was called with.
    """
    spec = declared_spec(loss, difficulty)
    if isinstance(spec, NoKernel):
        return spec
    form = spec if isinstance(spec, BatchHardSpec) else lower_spec(spec)
    if isinstance(form, NoKernel):
        return form
    refusal = _refuse_data(job)
    if refusal is None and isinstance(form, Form) and form.second and job.biased is None:
        refusal = NoKernel("the second encoder's embeddings are missing")
    return refusal or form


@lru_cache(256)
def lower_spec(spec: SoftmaxSpec | HingeSpec) -> Form | NoKernel:
    """The form of a spec; a training run asks for the same one a million times."""
    if isinstance(spec, HingeSpec):
        return Form("contrastive", "hinge", margins=(spec.positive_margin, spec.negative_margin), shape=spec.form)
    form = Form(
        FINISHES[spec.row_loss],
        temperature=spec.temperature,
        unit=spec.measure == "cosine",
        numerator=spec.positive_weights == "numerator",
        by=spec.divide_by,
        scale=spec.scale,
        mean_all=spec.all_anchors,
        prior=spec.prior,
    )
    weighed = form if spec.weights is None else _with_weights(form, spec)
    return weighed if isinstance(weighed, NoKernel) else _with_safe_exponent(weighed)


def _with_weights(form: Form, spec: SoftmaxSpec) -> Form | NoKernel:
    """The form with its weights inside."""
    w = spec.weights
    if spec.row_loss == "npair":
        return NoKernel("the N-pair kernels take no weights")
    if isinstance(w, HardestWeights):
        return NoKernel("kernels that mine the hardest pairs have no softmax")
    if isinstance(w, LinearWeights):
        form = replace(
            form,
            near_slope=w.positive_slope,
            near_knee=w.positive_threshold,
            near_least=w.positive_floor,
            live=w.differentiable,
        )
        if spec.weigh_negatives and w.negative_slope:
            form = replace(
                form, far="threshold", slope=w.negative_slope, knee=w.negative_threshold, least=w.negative_floor
            )
    elif isinstance(w, ExponentialWeights):
        if spec.weigh_negatives and w.beta:
            form = replace(form, far="tilt", beta=w.beta, live=w.differentiable)
    elif isinstance(w, RelativeWeights):
        if not spec.weigh_negatives:
            return NoKernel("kernels that compare two encoders weigh negatives")
        form = replace(form, far="raw" if w.raw else "relative")
    # Exponential weights have mean 1, so their sum is the count too.
    if form.prior == 0 or spec.negatives == "plain" or form.far in ("plain", "tilt"):
        return form
    if form.live or form.far != "threshold":
        return NoKernel("the kernels count negatives by weight only where the weights are linear and constant")
    return replace(form, count_weight=True)


def precision(form: Form, dtype: torch.dtype) -> Literal["half", "split"]:
    """Float16 operands where they are accurate enough, else three bfloat16 products, good to float32."""
    half = dtype in (torch.float16, torch.bfloat16)
    safe = form.unit and form.far != "hinge" and form.temperature >= HALF_FROM
    return "half" if half and safe else "split"


def _refuse_data(job: Any) -> NoKernel | None:
    """Widths and types that the kernels do not hold; and pairs excluded by id."""
    for x in (job.z, job.ref, *(job.biased or ())):
        if x is None:
            continue
        if x.shape[1] > WIDEST:
            return NoKernel(f"embeddings are {x.shape[1]} wide, the kernels hold {WIDEST} columns")
        if x.dtype not in DTYPES:
            came = str(x.dtype).removeprefix("torch.")
            return NoKernel(f"embeddings are {came}, the kernels compute in float32 at most")
    return None if job.ids is None else NoKernel("the kernels cannot leave out pairs of equal id")


def _with_safe_exponent(form: Form) -> Form | NoKernel:
    """The form with a fixed maximum where that is safe, else with a running one, else none."""
    if form.far == "hinge":
        return form
    power = {"tilt": 1 + form.beta, "relative": 2.0}.get(form.far, 1.0)
    if form.unit and power / form.temperature <= EXPONENT:
        return form
    simple = form.far in ("plain", "threshold", "raw") and not form.count_weight
    if not simple:
        return NoKernel(f"a temperature of {form.temperature} with these weights is outside the range of the kernels")
    return replace(form, online=True)
