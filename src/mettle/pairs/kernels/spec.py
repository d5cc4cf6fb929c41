"""From what a loss and a difficulty declare to what the kernels are launched with.

A `LoweredSpec` says how a negative enters its row (``negative_term``), how the positives enter and the row ends
(``row_loss``), and the numbers of both. It follows from the `KernelSpec` that the loss declares; whatever declares
none, or one that these kernels cannot compute, runs on the tiled engine, with the reason. Needs no triton.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.kernel_spec import (
    BatchHardSpec,
    CircleSpec,
    ExponentialWeights,
    HardestWeights,
    HingeSpec,
    KernelWeights,
    LinearWeights,
    MultiSimilarityWeights,
    NoKernel,
    Number,
    RelativeWeights,
    SoftmaxSpec,
    TwoSidedSpec,
    declared_spec,
    may_be_nonzero,
)
from mettle.pairs.kernels.config import HingeForm, NegativeTermName, RowLossName

LOG2E = math.log2(math.e)
MOST_EXPONENT = 64.0  # sums of e^±64 over millions of pairs, and their inverses, are ordinary float32 numbers
MOST_COLUMNS = 4096  # of an embedding that one row of the small kernels can hold
FP16_TEMPERATURE = 0.05  # from which float16 operands are accurate enough
# Losses that are steep by design, by a factor of 32 to 112: half products on them are less accurate than float16
# embeddings (gradients by up to a factor of 4, while all cosines are near 0.9) and more accurate than bfloat16 ones.
STEEP_ROW_LOSSES = ("two_sided", "circle")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GRADIENT_LIMIT = 8192.0  # dL/ds reaches twice this at most: float16 ends at 65504


PairSpec = SoftmaxSpec | TwoSidedSpec | CircleSpec | HingeSpec
"""What sums over pairs come to, and not single pairs."""


class NegativeNumbers(NamedTuple):
    """Run-time numbers of a negative's term, as `pair_terms.NegativeParams`."""

    slope: Number = 0.0
    offset: Number = 0.0
    floor: Number = 0.0
    kink: Number = 0.0


class PositiveNumbers(NamedTuple):
    """Run-time numbers of the positives: 1 / temperature, the bound of x, and what a positive weighs."""

    inv_t: Number
    bound: Number
    slope: Number
    threshold: Number
    floor: Number


class RowLossNumbers(NamedTuple):
    """Run-time numbers of a row's loss: prior, margin (or base), and what `TwoSidedSpec` and `CircleSpec` add."""

    prior: float
    margin: float
    positive_scale: float
    positive_factor: Number
    negative_factor: float
    log_shift: float  # what the log of the sum over negatives lacks


@dataclass(frozen=True)
class LoweredSpec:
    """What the kernels compute. x = s / temperature; s a cosine, or a dot product where not ``normalize``.

    Temperature, slopes and thresholds may be tensors of one float32 number each, which the kernels read on the device.
    """

    row_loss: RowLossName
    negative_term: NegativeTermName = "plain"
    temperature: Number = 1.0
    log_temperature: Tensor | None = None  # of a learned one, for its gradient
    normalize: bool = True
    online: bool = False  # every row tracks its own maximum, because no fixed one is safe
    # negatives weigh 1 + max(slope·(s − threshold), floor)
    slope: Number = 0.0
    threshold: Number = 0.0
    floor: float = 0.0
    # positives weigh 1 + max(slope·(threshold − s), floor)
    positive_slope: Number = 0.0
    positive_threshold: Number = 0.0
    positive_floor: float = 0.0
    differentiable_weights: bool = False  # gradient flows through the weights too
    beta: float = 0.0  # of importance weights
    numerator_only: bool = False  # SupCon: positive weights stay out of the denominator
    divide_by: Literal["count", "weight", "sum"] = "weight"
    scale: float = 1.0  # of the value
    all_anchors: bool = False
    prior: float = 0.0
    count_by_weight: bool = False  # a negative counts as often as it weighs
    positive_margin: float = 0.0
    negative_margin: float = 0.0
    hinge_form: HingeForm = "hadsell"
    # two_sided: exponents −positive_scale·(s − positive_base) and (s − negative_base) / temperature
    positive_scale: float = 0.0
    positive_base: float = 0.0
    negative_base: float = 0.0
    positive_factor: Number = 1.0
    negative_factor: float = 1.0
    circle_margin: float = 0.0  # m of the circle loss, whose gamma is 1 / temperature
    mining_epsilon: float | None = None  # of mined pairs; None: all pairs count

    @property
    def is_mined(self) -> bool:
        """Whether pairs count only where they are hard beside the anchor's hardest pair of the other kind."""
        return self.mining_epsilon is not None

    @property
    def has_positive_weights(self) -> bool:
        """Whether positives carry weights of their own."""
        return may_be_nonzero(self.positive_slope)

    @property
    def has_second_sum(self) -> bool:
        """Whether a row sums two things over its negatives."""
        return self.negative_term == "importance" or self.count_by_weight

    @property
    def second_sum_has_grad(self) -> bool:
        """Whether the gradient of a negative depends on both sums."""
        return self.negative_term == "importance" and self.differentiable_weights

    @property
    def has_second_encoder(self) -> bool:
        """Whether a second encoder is compared with."""
        return self.negative_term in ("relative", "relative_raw")

    @property
    def register_heavy(self) -> bool:
        """Whether a pair takes more than its similarity and one exponential."""
        return self.negative_term != "plain" or self.online or self.is_mined

    @property
    def square(self) -> bool:
        """Whether importance weights are the exponentials themselves."""
        return self.beta == 1

    @cached_property
    def compile_key(self) -> tuple:
        """All that grids and compile-time flags depend on; the other numbers are passed at launch."""
        return (
            self.row_loss,
            self.negative_term,
            self.normalize,
            self.online,
            self.has_positive_weights,
            self.differentiable_weights,
            self.square,
            self.numerator_only,
            self.divide_by,
            self.all_anchors,
            self.prior > 0,
            self.count_by_weight,
            self.hinge_form,
            self.is_mined,
            isinstance(self.positive_factor, Tensor),
            *(isinstance(x, Tensor) for x in (self.temperature, self.slope, self.threshold)),
            *(isinstance(x, Tensor) for x in (self.positive_slope, self.positive_threshold)),
        )

    @cached_property
    def on_device(self) -> bool:
        """Whether some of the numbers are tensors, with values that only the device knows."""
        return any(isinstance(getattr(self, field.name), Tensor) for field in fields(self))

    @cached_property
    def operand_scale(self) -> Number:
        """What each side of a product carries, so that products are similarities times log₂e / temperature."""
        return 1.0 if self.negative_term in ("hinge", "circle") else (LOG2E / self.temperature) ** 0.5

    @property
    def grad_scale_limit(self) -> float:
        """What the largest coefficient of a row's gradient is scaled to: the derivative of a pair may add to it."""
        most = 2.0 if self.negative_term == "circle" else 1 + 2 * self.beta
        return GRADIENT_LIMIT / most

    @property
    def mining_scale(self) -> Number:
        """What similarities are multiplied by where mined negatives are told by x."""
        return 1.0 if not self.is_mined or self.negative_term == "circle" else LOG2E / self.temperature

    @property
    def circle_shift(self) -> float:
        """The middle of a circle's exponents, which reach from −γm² to γ(1 − m²); 0 where every row has a maximum."""
        if self.online or self.negative_term != "circle":
            return 0.0
        return (1 - 2 * self.circle_margin**2) / (2 * float(self.temperature))

    @cached_property
    def negative_numbers(self) -> NegativeNumbers:
        """Of what a negative adds: see `pair_terms.negative_value`."""
        if self.negative_term == "threshold":
            # 1 + max(slope · (s − threshold), floor), as a line in x = s · operand_scale², and where it begins
            slope_of_x = LOG2E / self.temperature
            kink = (self.threshold + self.floor / self.slope) * slope_of_x if self.differentiable_weights else 0.0
            return NegativeNumbers(self.slope / slope_of_x, 1.0 - self.slope * self.threshold, 1.0 + self.floor, kink)
        if self.negative_term == "importance":
            return NegativeNumbers(float(self.beta))
        if self.negative_term == "circle":
            return NegativeNumbers(LOG2E / self.temperature, float(self.circle_margin), LOG2E * self.circle_shift)
        return NegativeNumbers(float(self.negative_margin) if self.negative_term == "hinge" else 0.0)

    @cached_property
    def positive_numbers(self) -> PositiveNumbers:
        """Of what a positive comes to."""
        inv_t = 1 / self.temperature
        slope, threshold = (
            x if isinstance(x, Tensor) else float(x) for x in (self.positive_slope, self.positive_threshold)
        )
        return PositiveNumbers(inv_t, inv_t, slope, threshold, float(self.positive_floor))

    @cached_property
    def row_loss_numbers(self) -> RowLossNumbers:
        """Of what a row's sums come to."""
        margin = {"two_sided": self.positive_base, "circle": self.circle_margin}.get(
            self.row_loss, self.positive_margin
        )
        log_shift = -self.negative_base / float(self.temperature) if self.row_loss == "two_sided" else self.circle_shift
        return RowLossNumbers(
            float(self.prior),
            float(margin),
            float(self.positive_scale),
            self.positive_factor,
            float(self.negative_factor),
            float(log_shift),
        )


@dataclass(frozen=True)
class KernelInputs:
    """What the engine was called with."""

    z: Tensor
    labels: Tensor
    ref: Tensor | None = None
    ref_labels: Tensor | None = None
    biased: tuple[Tensor, Tensor] | None = None
    self_column: Tensor | NoKernel | None = None  # (n,) the reference that is the same sample, -1 where none is


def collect_inputs(z: Tensor, labels: Tensor, ref: Any, ids: Tensor | None, biased: Any) -> KernelInputs:
    """The engine's arguments, a second encoder's always as a pair; ids count only where both sides have them."""
    ref_z, ref_labels = (None, None) if ref is None else (ref[0], ref[1])
    if biased is not None and isinstance(biased, tuple) == (ref is None):
        raise InputError("biased must be one tensor, or with ref= a pair: the second encoder's batch and references")
    both = (biased, biased) if isinstance(biased, Tensor) else biased
    own = None
    if ids is not None and ref is not None and len(ref) == 3:
        own = match_ids(ids, ref[2], labels, ref[1])
    return KernelInputs(z, labels, ref_z, ref_labels, both, own)


def match_ids(ids: Tensor, ref_ids: Tensor, labels: Tensor, ref_labels: Tensor) -> Tensor | NoKernel:
    """(n,) which reference has the id of an anchor, -1 where none has.

    The kernels leave out one pair of each row, among its positives: ids must be unique in the reference set, and
    samples of equal id have equal labels. To ask whether that is so, the host waits for the device once.
    """
    ordered, order = torch.sort(ref_ids)
    at = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
    found = ordered[at] == ids
    own = torch.where(found, order[at], -1)
    unlike = found & (labels != ref_labels[order[at]])
    if bool((ordered[1:] == ordered[:-1]).any() | unlike.any()):
        return NoKernel("an id occurs twice in the reference set, or with two labels")
    return own


def lower_loss(loss: Any, difficulty: Any, inputs: KernelInputs) -> LoweredSpec | BatchHardSpec | NoKernel:
    """What the kernels are to compute for a loss under a difficulty, or why they cannot."""
    spec = declared_spec(loss, difficulty)
    if isinstance(spec, NoKernel):
        return spec
    learned = getattr(spec, "log_temperature", None)
    if learned is not None and learned.device != inputs.z.device:
        return NoKernel(f"the temperature is on {learned.device}: move the loss to {inputs.z.device}")
    lowered = spec if isinstance(spec, BatchHardSpec) else lower_spec(spec)
    if isinstance(lowered, NoKernel):
        return lowered
    refusal = _refuse_data(inputs)
    if refusal is None and isinstance(lowered, BatchHardSpec) and inputs.self_column is not None:
        refusal = NoKernel("the kernels that mine the hardest pairs cannot leave out pairs of equal id")
    if refusal is None and isinstance(lowered, LoweredSpec) and lowered.has_second_encoder and inputs.biased is None:
        refusal = NoKernel("the second encoder's embeddings are missing")
    return refusal or lowered


def lower_spec(spec: PairSpec) -> LoweredSpec | NoKernel:
    """What a spec comes to."""
    if getattr(spec, "on_device", False):  # tensors are compared by waiting for them
        return _lower_spec(spec)
    return _lower_known_spec(spec)


@lru_cache(256)
def _lower_known_spec(spec: PairSpec) -> LoweredSpec | NoKernel:
    """A training run asks for the same one a million times."""
    return _lower_spec(spec)


def _lower_spec(spec: PairSpec) -> LoweredSpec | NoKernel:
    if isinstance(spec, TwoSidedSpec):
        return _lower_two_sided(spec)
    if isinstance(spec, CircleSpec):
        return _lower_circle(spec)
    if isinstance(spec, HingeSpec):
        return LoweredSpec(
            "contrastive",
            "hinge",
            positive_margin=spec.positive_margin,
            negative_margin=spec.negative_margin,
            hinge_form=spec.form,
        )
    learned = spec.log_temperature
    lowered = LoweredSpec(
        spec.row_loss,
        temperature=spec.temperature if learned is None else learned.detach().float().exp(),
        log_temperature=learned,
        normalize=spec.measure == "cosine",
        numerator_only=spec.positive_weights == "numerator",
        divide_by=spec.divide_by,
        scale=spec.scale,
        all_anchors=spec.all_anchors,
        prior=spec.prior,
    )
    if spec.weights is None:
        return _with_safe_exponent(lowered)
    if spec.row_loss == "npair":
        return NoKernel("the N-pair kernels take no weights")
    return _with_weights(lowered, spec.weights, spec.weigh_negatives, spec.negatives)


def _lower_two_sided(spec: TwoSidedSpec) -> LoweredSpec | NoKernel:
    lowered = LoweredSpec(
        "two_sided",
        temperature=1 / spec.beta,
        positive_scale=spec.alpha,
        positive_base=spec.positive_base,
        negative_base=spec.negative_base,
        positive_factor=_as_float32(spec.positive_factor),
        negative_factor=spec.negative_factor,
        all_anchors=spec.all_anchors,
    )
    if spec.weights is None:
        return _with_safe_exponent(lowered)
    if isinstance(spec.weights, MultiSimilarityWeights) and spec.all_anchors:
        return NoKernel("the kernels mine pairs for anchors that have a positive")
    if isinstance(spec.weights, LinearWeights) and spec.weights.positive_floor < -1:
        return NoKernel("positive weights may be negative, and the kernels take the log of their sum")
    if isinstance(spec.weights, RelativeWeights):
        return NoKernel("the kernels that compare two encoders end in SupCon or InfoNCE")
    if isinstance(spec.weights, ExponentialWeights):  # of s itself, where the kernels have beta · s
        return _with_weights(lowered, replace(spec.weights, beta=spec.weights.beta / spec.beta))
    return _with_weights(lowered, spec.weights)


def _lower_circle(spec: CircleSpec) -> LoweredSpec | NoKernel:
    lowered = LoweredSpec(
        "circle",
        "circle",
        temperature=1 / spec.gamma,
        positive_scale=spec.gamma,
        circle_margin=spec.m,
        differentiable_weights=not spec.stop_gradient,
        online=spec.gamma > 2 * MOST_EXPONENT,  # exponents reach half of it, see `circle_shift`
    )
    if spec.weights is None:
        return lowered
    if not isinstance(spec.weights, MultiSimilarityWeights):
        return NoKernel("the circle kernels take mined pairs, but no other weights")
    return _with_weights(lowered, spec.weights)


def _with_weights(
    lowered: LoweredSpec,
    w: KernelWeights,
    weigh_negatives: bool = True,
    count_negatives: Literal["plain", "weight"] = "plain",
) -> LoweredSpec | NoKernel:
    """The same with weights inside, and a safe exponent."""
    weighted = _put_weights(lowered, w, weigh_negatives, count_negatives)
    return weighted if isinstance(weighted, NoKernel) else _with_safe_exponent(weighted)


def _put_weights(
    lowered: LoweredSpec, w: KernelWeights, weigh_negatives: bool, count_negatives: str
) -> LoweredSpec | NoKernel:
    if isinstance(w, HardestWeights):
        return NoKernel("kernels that mine the hardest pairs have no softmax")
    if isinstance(w, MultiSimilarityWeights):
        if not weigh_negatives or lowered.prior:
            return NoKernel("the kernels mine positives and negatives, and no prior counts what is left")
        return replace(lowered, mining_epsilon=float(w.epsilon))
    if isinstance(w, LinearWeights):
        lowered = replace(
            lowered,
            positive_slope=_as_float32(w.positive_slope),
            positive_threshold=_as_float32(w.positive_threshold),
            positive_floor=w.positive_floor,
            differentiable_weights=w.differentiable,
        )
        if weigh_negatives and may_be_nonzero(w.negative_slope):
            lowered = replace(
                lowered,
                negative_term="threshold",
                slope=_as_float32(w.negative_slope),
                threshold=_as_float32(w.negative_threshold),
                floor=w.negative_floor,
            )
    elif isinstance(w, ExponentialWeights):
        if weigh_negatives and w.beta:
            lowered = replace(lowered, negative_term="importance", beta=w.beta, differentiable_weights=w.differentiable)
    elif isinstance(w, RelativeWeights):
        if not weigh_negatives:
            return NoKernel("kernels that compare two encoders weigh negatives")
        lowered = replace(lowered, negative_term="relative_raw" if w.raw else "relative")
    # Exponential weights have mean 1, so their sum is the count too.
    if lowered.prior == 0 or count_negatives == "plain" or lowered.negative_term in ("plain", "importance"):
        return lowered
    if lowered.differentiable_weights or lowered.negative_term != "threshold":
        return NoKernel("the kernels count negatives by weight only where the weights are linear and constant")
    return replace(lowered, count_by_weight=True)


def _as_float32(x: Number) -> Number:
    return x.detach().float() if isinstance(x, Tensor) else x


def _with_safe_exponent(lowered: LoweredSpec) -> LoweredSpec | NoKernel:
    """The same with a fixed maximum where that is safe, else with a running one, else none."""
    power = {"importance": 1 + lowered.beta, "relative": 2.0}.get(lowered.negative_term, 1.0)
    learned = isinstance(lowered.temperature, Tensor)
    if lowered.negative_term == "circle":
        safe = not lowered.online
    else:
        safe = lowered.normalize and not learned and power / lowered.temperature <= MOST_EXPONENT
    if safe:
        return lowered
    if lowered.is_mined:
        return NoKernel("the kernels mine pairs where similarities are multiplied by 64 at most, which is constant")
    if lowered.negative_term in ("importance", "relative") or lowered.count_by_weight:
        what = "a learned temperature" if learned else f"a temperature of {lowered.temperature}"
        return NoKernel(f"{what} with these weights is outside the range of the kernels")
    return replace(lowered, online=True)


def choose_precision(lowered: LoweredSpec, *dtypes: torch.dtype) -> Literal["fp16", "bf16x3"]:
    """Float16 operands where they are accurate enough, else three bfloat16 products, good to float32.

    ``dtypes``: of the embeddings on both sides; the less accurate one decides.
    """
    half = torch.float16 in dtypes or torch.bfloat16 in dtypes
    if not half or isinstance(lowered.temperature, Tensor):  # one that is learned may become any
        return "bf16x3"
    if lowered.row_loss in STEEP_ROW_LOSSES:
        return "fp16"
    safe = lowered.normalize and lowered.negative_term != "hinge" and lowered.temperature >= FP16_TEMPERATURE
    return "fp16" if safe else "bf16x3"


def _refuse_data(inputs: KernelInputs) -> NoKernel | None:
    """Widths and types that the kernels do not hold; and ids that are no use."""
    for x in (inputs.z, inputs.ref, *(inputs.biased or ())):
        if x is None:
            continue
        if x.shape[1] > MOST_COLUMNS:
            return NoKernel(f"embeddings are {x.shape[1]} wide, the kernels hold {MOST_COLUMNS} columns")
        if x.dtype not in DTYPES:
            came = str(x.dtype).removeprefix("torch.")
            return NoKernel(f"embeddings are {came}, the kernels compute in float32 at most")
    return inputs.self_column if isinstance(inputs.self_column, NoKernel) else None
