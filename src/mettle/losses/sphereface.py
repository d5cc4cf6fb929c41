"""SphereFace: a multiplied angle."""

import math

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_numbers
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs.similarity import may_read


class SphereFace(ClassVectors):
    r"""Multiplicative angular margin, A-Softmax (Liu et al. 2017).

    Formula, features keep their length:
        L_i = −log( e^{‖z‖ t} / ( e^{‖z‖ t} + Σ_{j≠y} e^{‖z‖ cos θ_j} ) ),   t = (λ cos θ_y + ψ(θ_y)) / (1 + λ)
        ψ(θ) = (−1)^k cos(mθ) − 2k,  θ in [kπ/m, (k+1)π/m]:  falls from 1 to 1 − 2m
        λ    = max(``floor``, ``start`` / (1 + ``fall`` · step)),  step counts training calls and is saved
    Needs:
        labels 0 to C − 1; a whole number m. Embeddings keep their length, class vectors are normalised.
    Use when:
        reproducing it; `CosFace` and `ArcFace` are easier to train.
    Relations:
        margin 1: modified softmax. At the published floor of 5 the margin acts with weight 1/6 only.
    """

    self_contained = True
    unit_features = False
    scale = 1.0  # features keep their length
    step: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: int = 4,
        start: float = 1000.0,
        fall: float = 0.12,
        floor: float = 5.0,
        **options,
    ):
        super().__init__(num_classes, dim, **options)
        validate_numbers(margin=margin, start=start, fall=fall, floor=floor)
        require(margin >= 1 and margin == int(margin), f"margin must be a whole number from 1 on, got {margin}")
        require(
            floor >= 0 and start >= 0 and fall >= 0,
            f"start, fall and floor must be at least 0, got {start}, {fall}, {floor}",
        )
        self.margin, self.start, self.fall, self.floor = int(margin), start, fall, floor
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def extra_repr(self) -> str:
        """As it was built."""
        schedule = f"start={self.start}, fall={self.fall}, floor={self.floor}"
        return f"{super().extra_repr()}, margin={self.margin}, {schedule}"

    @property
    def ease(self) -> float | Tensor:
        """λ: how much of the plain cosine is still mixed in."""
        if may_read(self.step):
            return max(self.floor, self.start / (1 + self.fall * int(self.step)))
        return (self.start / (1 + self.fall * self.step)).clamp(min=self.floor)

    def forward(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """The mean over samples; a training call moves the schedule on."""
        value = super().forward(embeddings, labels, progress=progress)
        if self.training and torch.is_grad_enabled():
            self.step += 1
        return value

    def target(self, cosine: Tensor) -> Tensor:
        """The plain cosine and ψ, mixed."""
        ease = self.ease
        return (ease * cosine + self.psi(cosine)) / (1 + ease)

    def psi(self, cosine: Tensor) -> Tensor:
        """The monotone continuation of cos(mθ), from the cosine, as a Chebyshev polynomial."""
        m = self.margin
        angle = cosine.detach().clamp(-1, 1).acos()
        k = (m * angle / math.pi).floor().clamp(max=m - 1)
        return (1 - 2 * (k % 2)) * chebyshev(cosine, m) - 2 * k


def chebyshev(c: Tensor, m: int) -> Tensor:
    """cos(m·arccos c), by T_{k+1} = 2c·T_k − T_{k−1}."""
    before, now = torch.ones_like(c), c
    for _ in range(m - 1):
        before, now = now, 2 * c * now - before
    return now
