"""AdaFace: the margin follows the length of the feature, which stands for the quality of the image."""

import torch
from torch import Tensor

from mettle.difficulty.settings import validate_numbers
from mettle.losses.arcface import add_angle
from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs.similarity import at_least_float32, widest_dtype

LENGTHS = (1e-3, 100.0)  # between which lengths are taken, as published


class AdaFace(ClassVectors):
    r"""Quality-adaptive margin (Kim et al. 2022).

    Formula, ‖z‖ the length of the feature between 0.001 and 100, without gradient; μ, σ running mean and deviation:
        q   = clip( ``concentration`` · (‖z‖ − μ) / (σ + 0.001), −1, 1 )
        L_i = −log( e^{s T} / ( e^{s T} + Σ_{j≠y} e^{s cos θ_j} ) ),   T = cos(θ_y − m q) − m (1 + q)
        with θ_y − m q kept between 0 and π. Before each training call:
        μ ← ``momentum`` · μ + (1 − ``momentum``) · mean ‖z‖, and σ likewise from the deviation of the batch
    Needs:
        labels 0 to C − 1, and embeddings that keep their length until here (``model.unit = false``).
    Use when:
        image quality varies: hard samples of good quality are emphasised, those of poor quality are not.
    Relations:
        q = −1, poor quality: cos(θ + m), `ArcFace`. q = 0: `CosFace`. q = 1, good quality: cos(θ − m) − 2m. μ and σ are
        the buffers ``mean`` and ``deviation``: saved and resumed. Only training calls move them.
    """

    self_contained = True
    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.4,
        concentration: float = 0.333,
        momentum: float = 0.99,
        **options,
    ):
        super().__init__(num_classes, dim, **options)
        validate_numbers(scale=scale, margin=margin, concentration=concentration, momentum=momentum)
        require(scale > 0, f"scale must be above 0, got {scale}")
        require(0 <= margin < torch.pi / 2, f"margin is an angle in [0, π/2), got {margin}")
        require(concentration >= 0, f"concentration must be at least 0, got {concentration}")
        require(0 <= momentum <= 1, f"momentum must be in [0, 1], got {momentum}")
        self.scale, self.margin, self.concentration, self.momentum = scale, margin, concentration, momentum
        self.register_buffer("mean", torch.tensor(20.0, dtype=torch.float64))
        self.register_buffer("deviation", torch.tensor(100.0, dtype=torch.float64))

    @property
    def by_row(self) -> bool:
        """Mean and deviation look at all samples."""
        return False

    def extra_repr(self) -> str:
        """As it was built."""
        return (
            f"{super().extra_repr()}, margin={self.margin}, concentration={self.concentration}, "
            f"momentum={self.momentum}"
        )

    def forward(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """The mean over samples; a training call moves mean and deviation first."""
        if self.training and torch.is_grad_enabled():
            self._check(embeddings, labels)
            self.adapt(embeddings)
        return super().forward(embeddings, labels, progress=progress)

    @torch.no_grad()
    def adapt(self, embeddings: Tensor) -> None:
        """Move mean and deviation by the lengths of a batch; a broken one leaves them where they are."""
        length = feature_length(embeddings).clamp(*LENGTHS).to(widest_dtype(embeddings.device))
        spread = length.std() if len(length) > 1 else self.deviation
        for state, seen in ((self.mean, length.mean()), (self.deviation, spread)):
            moved = self.momentum * state + (1 - self.momentum) * seen
            state.copy_(torch.where(torch.isfinite(moved), moved, state))

    def quality(self, embeddings: Tensor) -> Tensor:
        """(n,) in [−1, 1]: how long a feature is, compared with those of training; without gradient."""
        length = feature_length(embeddings.detach()).clamp(*LENGTHS)
        mean, deviation = (state.to(length.dtype) for state in (self.mean, self.deviation))
        return (self.concentration * (length - mean) / (deviation + 1e-3)).clamp(-1, 1)

    def logit(self, own: Tensor, z: Tensor) -> Tensor:
        """Of the own class, with the margin of each sample."""
        quality = self.quality(z).to(own.dtype)
        angle = -self.margin * quality
        inside = torch.where(angle < 0, own < angle.cos(), own > -angle.cos())  # of [0, π], the angle with its margin
        moved = torch.where(inside, add_angle(own, angle), torch.where(angle < 0, 1.0, -1.0).to(own.dtype))
        # A broken cosine is neither inside nor outside.
        moved = torch.where(own.isnan(), own, moved)
        return self._logit_scale() * (moved - self.margin * (1 + quality))


def feature_length(z: Tensor) -> Tensor:
    """(n,) lengths of features, in float32 or better."""
    return torch.linalg.vector_norm(at_least_float32(z), dim=1)
