"""What a loss and a difficulty declare so that the fused kernels compute them: data, checked where it is made.

The kernels know one family of losses. A loss whose formula is in it says so by ``kernel_spec(weights)``, a difficulty
by ``kernel_weights()``; the tiles remain the reference, and a test can hold the two against each other.

A number that follows the data may be a tensor on the device of the embeddings: kernels read it there, and nobody waits.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.declarations import overridden_since

Number = float | Tensor
"""A number, or a tensor of no dimensions that holds one."""


def may_be_nonzero(x: Number) -> bool:
    """Whether a number is not 0; of one on a device nobody asks."""
    return isinstance(x, Tensor) or x != 0


@dataclass(frozen=True)
class LinearWeights:
    """Weights that are piecewise linear in the cosine s.

    Formula:
        negatives  w = 1 + max(negative_slope · (s − negative_threshold), negative_floor)
        positives  w = 1 + max(positive_slope · (positive_threshold − s), positive_floor)
    A slope of 0 leaves its side at weight 1. ``differentiable``: gradient flows through the weights.
    """

    negative_slope: Number = 0.0
    negative_threshold: Number = 0.0
    negative_floor: float = 0.0
    positive_slope: Number = 0.0
    positive_threshold: Number = 0.0
    positive_floor: float = 0.0
    differentiable: bool = False

    def __post_init__(self) -> None:
        slopes = [x for x in (self.negative_slope, self.positive_slope) if not isinstance(x, Tensor)]
        _require(all(x >= 0 for x in slopes), "slopes must be at least 0", self)
        _require(self.negative_floor >= -1, "negative_floor must be at least -1: no negative weighs less than 0", self)

    @property
    def on_device(self) -> bool:
        """Whether some of the numbers are tensors, with values that only the device knows."""
        numbers = (self.negative_slope, self.negative_threshold, self.positive_slope, self.positive_threshold)
        return any(isinstance(x, Tensor) for x in numbers)

    def scaled(self, strength: float) -> "LinearWeights":
        """1 + strength · (w − 1)."""
        floor = self.positive_floor if self.positive_floor == -float("inf") else strength * self.positive_floor
        return replace(
            self,
            negative_slope=strength * self.negative_slope,
            negative_floor=strength * self.negative_floor,
            positive_slope=strength * self.positive_slope,
            positive_floor=floor,
        )


@dataclass(frozen=True)
class ExponentialWeights:
    """Negatives weigh e^{beta·s/temperature} over its mean among the anchor's negatives; positives weigh 1."""

    beta: float
    differentiable: bool = False

    def __post_init__(self) -> None:
        _require(self.beta >= 0, "beta must be at least 0", self)


@dataclass(frozen=True)
class RelativeWeights:
    """Negatives weigh 1 + σ of how much harder they are here than for a second encoder; positives weigh 1.

    As `mettle.difficulty.Relative`: ``raw`` is its form "raw", else its form "similarity". Constants for the gradient.
    """

    raw: bool = False


@dataclass(frozen=True)
class HardestWeights:
    """Of each anchor, the least similar positive and the most similar negative weigh 1, all others 0."""


@dataclass(frozen=True)
class MultiSimilarityWeights:
    """Of each anchor, the pairs that are hard beside its hardest pair of the other kind weigh 1, all others 0.

    Formula:
        negatives  w = 1 where s > min_p s_ip − epsilon;  positives  w = 1 where s < max_n s_in + epsilon
    """

    epsilon: float


KernelWeights = LinearWeights | ExponentialWeights | RelativeWeights | HardestWeights | MultiSimilarityWeights
"""What a difficulty may declare by ``kernel_weights()``."""


def is_differentiable(weights: KernelWeights | None) -> bool:
    """Whether gradient flows through the weights."""
    return getattr(weights, "differentiable", False)


def has_device_numbers(weights: KernelWeights | None) -> bool:
    """Whether some of the numbers of weights are tensors."""
    return isinstance(weights, LinearWeights) and weights.on_device


RowLoss = Literal["supcon_out", "supcon_in", "infonce", "npair"]

# A loss makes its spec on every call: what the checks need is made once.
KINDS, ROW_LOSSES = get_args(KernelWeights), get_args(RowLoss)
ONE_OF_ROW_LOSSES = f"row_loss must be one of {ROW_LOSSES}"


@dataclass(frozen=True)
class SoftmaxSpec:
    """A softmax over pairs, with x = s / temperature, N(i) the negatives and P(i) the positives of an anchor.

    Formula, w the weights, F_i = Σ_{n∈N(i)} w·e^x:
        supcon_out  scale · Σ_p w·(log D − x) / divisor,                  D = F + Σ_p w·eˣ, s the cosine
        supcon_in   scale · (log D − log Σ_p w·eˣ + log divisor),         the same D
        infonce     Σ_p w·log(1 + G/eˣ) / Σ_p w,                          G = F, or debiased by ``prior``, s the cosine
        npair       log(1 + F / e^{Σ_p x}),                               s the dot product, temperature 1, no weights

    Args:
        row_loss: the line above.
        temperature: as above.
        log_temperature: of a temperature that is learned: its logarithm, a tensor that gets a gradient. It replaces
            ``temperature``. Weights are constants and there is no ``prior``, whose limits would move too.
        weights: of the pairs; None where all count alike. Hand on what ``kernel_spec`` was given.
        positive_weights: ``numerator`` leaves them out of D (SupCon).
        weigh_negatives: False leaves the negatives in F unweighted (SupCon).
        divide_by: the divisor is the ``count`` of positives, their total ``weight``, or 1 (``sum``) (SupCon).
        scale: multiplies the value (SupCon).
        all_anchors: anchors without positives count as 0 in the mean, instead of being left out (SupCon).
        prior: chance that a negative is really of the anchor's class (InfoNCE).
        negatives: what the prior multiplies: the number of negatives (``plain``), or their total ``weight`` (InfoNCE).
    """

    row_loss: RowLoss
    temperature: float = 1.0
    weights: KernelWeights | None = None
    positive_weights: Literal["everywhere", "numerator"] = "everywhere"
    weigh_negatives: bool = True
    divide_by: Literal["count", "weight", "sum"] = "weight"
    scale: float = 1.0
    all_anchors: bool = False
    prior: float = 0.0
    negatives: Literal["plain", "weight"] = "plain"
    log_temperature: Tensor | None = None

    def __post_init__(self) -> None:
        _require(self.row_loss in ROW_LOSSES, ONE_OF_ROW_LOSSES, self)
        _require(self.temperature > 0, "temperature must be above 0", self)
        _require(0 <= self.prior < 1, "prior must be in [0, 1)", self)
        _require(self.weights is None or isinstance(self.weights, KINDS), "weights must be KernelWeights", self)
        _require(self.row_loss != "npair" or self.temperature == 1, "the N-pair kernels have temperature 1", self)

        if self.log_temperature is not None:
            _require(
                not is_differentiable(self.weights) and self.prior == 0,
                "a learned temperature takes constant weights and no prior",
                self,
            )

    @property
    def measure(self) -> str:
        """The similarity that the kernels compute."""
        return "dot" if self.row_loss == "npair" else "cosine"

    @property
    def on_device(self) -> bool:
        """Whether some of the numbers are tensors, with values that only the device knows."""
        return self.log_temperature is not None or has_device_numbers(self.weights)


@dataclass(frozen=True)
class HingeSpec:
    """Hinges on the distances d of unit vectors: mean over positives plus mean over negatives, without weights.

    Formula:
        squared  [d² − m₊²]₊ and [m₋² − d²]₊;  hadsell  [d − m₊]₊² and [m₋ − d]₊²;  linear  [d − m₊]₊ and [m₋ − d]₊
    """

    positive_margin: float
    negative_margin: float
    form: Literal["squared", "hadsell", "linear"] = "hadsell"

    def __post_init__(self) -> None:
        known = ("squared", "hadsell", "linear")
        _require(self.form in known, f"form must be one of {known}", self)

    @property
    def measure(self) -> str:
        """The similarity that the kernels compute."""
        return "cosine"


@dataclass(frozen=True)
class TwoSidedSpec:
    """A soft maximum over the positives of an anchor and one over its negatives, each by itself; s the cosine.

    Formula, w the weights:
        L_i = positive_factor · log(1 + Σ_p w·e^{−alpha (s − positive_base)})
            + negative_factor · log(1 + Σ_n w·e^{beta (s − negative_base)})

    Args:
        alpha: as above, as are the next three.
        beta: as above.
        positive_base: as above.
        negative_base: as above.
        positive_factor: as above; it may be a tensor on the device of the embeddings.
        negative_factor: as above.
        weights: of the pairs; None where all count alike.
        all_anchors: an anchor without positives keeps the second term and counts in the mean, instead of being left
            out.
    """

    alpha: float
    beta: float
    positive_base: float = 0.0
    negative_base: float = 0.0
    positive_factor: Number = 1.0
    negative_factor: float = 1.0
    weights: KernelWeights | None = None
    all_anchors: bool = False

    measure = "cosine"

    def __post_init__(self) -> None:
        _require(self.alpha > 0 and self.beta > 0, "alpha and beta must be above 0", self)

    @property
    def on_device(self) -> bool:
        """Whether some of the numbers are tensors, with values that only the device knows."""
        return isinstance(self.positive_factor, Tensor) or has_device_numbers(self.weights)


@dataclass(frozen=True)
class CircleSpec:
    """Every cosine s weighed by its distance to its optimum, as `mettle.losses.Circle`.

    Formula:
        L_i = log(1 + Σ_n e^{gamma [s + m]₊ (s − m)} · Σ_p e^{−gamma [1 + m − s]₊ (s − 1 + m)}), 0 without negatives
        ``stop_gradient``: the two [·]₊ are constants for the gradient.
    ``weights`` may be `MultiSimilarityWeights`, or None where all pairs count alike.
    """

    m: float
    gamma: float
    stop_gradient: bool = True
    weights: KernelWeights | None = None

    measure = "cosine"

    def __post_init__(self) -> None:
        _require(0 <= self.m < 1 and self.gamma > 0, "m must be in [0, 1) and gamma above 0", self)


@dataclass(frozen=True)
class BatchHardSpec:
    """The farthest positive and the closest negative of each anchor on the unit sphere.

    The kernels mine the two pairs. The loss does the rest, on rows of one entry per anchor: ``distance(tile)`` turns
    similarities into distances, which must fall as similarities rise; ``row_loss``, ``is_defined`` and
    ``anchor_weight`` get the row values ``farthest`` (a distance), ``closest`` (minus a distance), −inf where there is
    none, ``positives`` and ``negatives present`` (how many there are).
    """

    @property
    def measure(self) -> str:
        """The similarity that the kernels compute."""
        return "cosine"


@dataclass(frozen=True)
class MarginSpec:
    """What a loss over class vectors makes of the cosine c = cos θ to the own class, declared by ``margin_spec()``.

    Formula:
        L = log(1 + e^{others − scale · t}),  t = cos(θ + angle) − subtract, others = log Σ over the other classes
        where θ + angle > π, ``mode`` says what t is, as in `mettle.losses.ArcFace`.
    """

    scale: float
    angle: float = 0.0
    subtract: float = 0.0
    mode: Literal["keep", "none", "easy", "smooth", "detach"] = "none"


KernelSpec = SoftmaxSpec | TwoSidedSpec | CircleSpec | HingeSpec | BatchHardSpec
"""What a loss may declare by ``kernel_spec(weights)``."""

SPECS = get_args(KernelSpec)


@dataclass(frozen=True)
class NoKernel:
    """Why the fused kernels do not compute something: the end of the sentence "not fused because …"."""

    reason: str


def declared_weights(difficulty: Any) -> KernelWeights | NoKernel | None:
    """What the kernels must know of a difficulty; None for none."""
    if difficulty is None:
        return None
    return _read_declaration(difficulty, "kernel_weights", KINDS)


def declared_margin(loss: Any) -> MarginSpec | None:
    """The margin that a loss over class vectors declares, if it still describes the loss; else None."""
    declare = getattr(loss, "margin_spec", None)
    return None if declare is None or overridden_since(type(loss), "margin_spec") is not None else declare()


def declared_spec(loss: Any, difficulty: Any) -> KernelSpec | NoKernel:
    """What the kernels must know of a loss under a difficulty."""
    weights = declared_weights(difficulty)
    if isinstance(weights, NoKernel):
        return weights
    known = getattr(loss, "_known_kernel_specs", None)  # of a loss whose settings never change
    if has_device_numbers(weights):
        known = None  # tensors are compared by waiting for them
    if known is not None and weights in known:
        return known[weights]
    spec = _read_declaration(loss, "kernel_spec", SPECS, weights)
    if not isinstance(spec, NoKernel) and loss.measure != spec.measure:
        spec = NoKernel(f"the loss compares by {loss.measure!r}, its kernel spec by {spec.measure!r}")
    if known is not None and not getattr(spec, "on_device", False):
        known.clear()  # one is enough: weights that follow the data are new at every step
        known[weights] = spec
    return spec


def _read_declaration(part: Any, declaration: str, wanted: tuple[type, ...], *given: Any) -> Any:
    """What an object declares by a method of this name, if it still describes the object's own maths."""
    kind = type(part)
    declare = getattr(part, declaration, None)
    if declare is None:
        return NoKernel(f"{kind.__name__} declares no {declaration}")
    changed = overridden_since(kind, declaration)
    if changed is not None:
        return NoKernel(f"{kind.__name__} overrides {changed} and does not restate {declaration}")
    found = declare(*given)
    if found is None:
        return NoKernel(f"{declaration} of {kind.__name__} gives none for these settings")
    if not isinstance(found, (*wanted, NoKernel)):
        names = ", ".join(x.__name__ for x in wanted)
        raise InputError(
            f"{declaration} of {kind.__name__} must give one of {names}, or NoKernel, got {type(found).__name__}"
        )
    return found


def _require(condition: bool, message: str, spec: Any) -> None:
    if not condition:
        raise InputError(f"{message}, got {spec}")
