"""ArcFace: a margin on the angle."""

import math
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_numbers
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs import MarginSpec

Mode = Literal["keep", "none", "easy", "smooth", "detach"]


class ArcFace(ClassVectors):
    r"""Additive angular margin (Deng et al. 2019), and the combined margin.

    Formula:
        L_i = −log( e^{s t} / ( e^{s t} + Σ_{j≠y} e^{s cos θ_j} ) ),   t = cos(m₁ θ_y + m) − m₃
        m₁ = ``multiply`` and m₃ = ``subtract`` are 1 and 0 unless a combined margin is wanted. Where θ + m > π:
        keep    cos θ − m sin m          monotone, with a jump (default, as first published)
        none    cos(θ + m)               turns upwards again beyond π − m
        smooth  −2 − cos(θ + m)          monotone and continuous
        easy    cos θ wherever cos θ ≤ 0 margin in the right half only
        detach  value of none, gradient of cos θ
    Needs:
        labels 0 to C − 1. Embeddings are normalised inside.
    Use when:
        there are many classes. On small data use a scale of 16 to 32 and a margin of 0.2 to 0.3.
    Relations:
        margin 0: `NormFace`. multiply=1, margin=0, subtract=m: `CosFace`. The slope against cos θ is
        sin(θ + m) / sin θ, computed without an arccosine; at cos θ = ±1 it is cos m.
    """

    self_contained = True
    mode: Mode

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.5,
        mode: Mode = "keep",
        multiply: float = 1.0,
        subtract: float = 0.0,
        **options,
    ):
        super().__init__(num_classes, dim, **options)
        validate_numbers(scale=scale, margin=margin, multiply=multiply, subtract=subtract)
        require(scale > 0, f"scale must be above 0, got {scale}")
        require(0 <= margin < math.pi, f"margin is an angle in [0, π), got {margin}")
        known = ("keep", "none", "easy", "smooth", "detach")
        require(mode in known, f"mode must be one of {known}, got {mode!r}")
        require(multiply > 0, f"multiply must be above 0, got {multiply}")
        require(
            multiply == 1 or mode in ("none", "detach"),
            f"mode {mode!r} is defined for multiply = 1: with multiply = {multiply} use mode 'none' or 'detach'",
        )
        self.scale, self.margin, self.mode, self.multiply, self.subtract = scale, margin, mode, multiply, subtract

    def extra_repr(self) -> str:
        """As it was built."""
        combined = f", multiply={self.multiply}, subtract={self.subtract}"
        plain = self.multiply == 1 and self.subtract == 0
        return f"{super().extra_repr()}, margin={self.margin}, mode={self.mode!r}{'' if plain else combined}"

    def target(self, cosine: Tensor) -> Tensor:
        """Cosine of the angle with its margin."""
        m = self.margin
        moved = self._with_margin(cosine)
        if self.mode == "keep":
            moved = keep_monotone(cosine, moved, m)
        elif self.mode == "easy":
            moved = torch.where(cosine > 0, moved, cosine)
        elif self.mode == "smooth":
            moved = torch.where(cosine > math.cos(math.pi - m), moved, -2 - moved)
        elif self.mode == "detach":
            moved = cosine + (moved - cosine).detach()
        return moved - self.subtract if self.subtract else moved

    def margin_spec(self) -> MarginSpec | None:
        """The kernels know every mode; a multiple of the angle they do not."""
        if self.multiply != 1:
            return None
        return MarginSpec(float(self.scale), self.margin, self.subtract, self.mode)

    def _with_margin(self, cosine: Tensor) -> Tensor:
        """cos(m₁θ + m)."""
        if self.multiply == 1:
            return add_angle(cosine, self.margin)
        sine = sine_of(cosine)
        with torch.no_grad():  # for any real multiple the angle itself is needed, but not for the slope
            angle = self.multiply * torch.atan2(sine, cosine) + self.margin
            value, slope = angle.cos(), self.multiply * angle.sin() / sine
        return value + slope * (cosine - cosine.detach())


def add_angle(cosine: Tensor, angle: float | Tensor) -> Tensor:
    """cos(θ + angle) from cos θ; the angle may be one per entry, with gradient."""
    both = (angle.cos(), angle.sin()) if isinstance(angle, Tensor) else (math.cos(angle), math.sin(angle))
    return cosine * both[0] - sine_of(cosine) * both[1]


def sine_of(cosine: Tensor) -> Tensor:
    """Sin θ from cos θ, kept off 0, where its slope is infinite."""
    least = 1e-7 if cosine.dtype == torch.float32 else 1e-14
    return (1 - cosine.square()).clamp(min=least).sqrt()


def keep_monotone(cosine: Tensor, moved: Tensor, angle: float | Tensor) -> Tensor:
    """cos(θ + angle) as it is while θ + angle < π, and a line that goes on falling beyond: ArcFace's ``keep``."""
    if isinstance(angle, Tensor):
        limit, drop = -angle.cos(), angle * angle.sin()
    else:
        limit, drop = math.cos(math.pi - angle), angle * math.sin(angle)
    return torch.where(cosine > limit, moved, cosine - drop)
