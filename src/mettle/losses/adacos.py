"""AdaCos: cosine softmax that finds its own scale."""

import math

import torch
from torch import Tensor
from torch import distributed as dist

from mettle.losses.base import require
from mettle.losses.class_vectors import ClassVectors
from mettle.pairs.class_softmax import class_reductions
from mettle.pairs.similarity import at_least_float32, widest_dtype

MIN_SCALE = 0.1  # a scale of 0 or below would turn attraction around; only tiny, badly placed problems get there


class AdaCos(ClassVectors):
    r"""Cross-entropy over cosines with an adaptive scale and no margin (Zhang et al. 2019).

    Formula, L_i as in `NormFace` with
        fixed      s = √2 · ln(C − 1)
        dynamic    s_t = ln B / cos(min(π/4, θ_med)),  B = (1/n) Σ_i Σ_{j≠y} e^{s_{t−1} cos θ_ij},
                   θ_med the (lower) median of the angles to the own class; s_0 is the fixed scale
    Needs:
        labels 0 to C − 1 and at least three classes. Embeddings are normalised inside.
    Use when:
        you do not want to tune a scale.
    Relations:
        fixed: `NormFace` with that scale. The running scale is the buffer ``scale``: saved, resumed, and the same on
        every rank. Only training calls move it; no gradient passes through it.
    """

    self_contained = True
    scale: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, num_classes: int, dim: int, dynamic: bool = True, **options):
        super().__init__(num_classes, dim, **options)
        require(
            num_classes >= 3, f"AdaCos takes its scale from ln(C - 1): {num_classes} classes are too few, use NormFace"
        )
        self.dynamic = dynamic
        self.register_buffer("scale", torch.tensor(math.sqrt(2) * math.log(num_classes - 1), dtype=torch.float64))

    @property
    def by_row(self) -> bool:
        """The dynamic scale looks at all samples."""
        return not self.dynamic and super().by_row

    def extra_repr(self) -> str:
        """As it was built."""
        return f"{super().extra_repr()}, dynamic={self.dynamic}"

    def forward(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """The mean over samples; a training call adapts the scale first."""
        labels = self._check(embeddings, labels)
        if self.dynamic and self.training and torch.is_grad_enabled():
            self.adapt(embeddings, labels)
        return super().forward(embeddings, labels, progress=progress)

    @torch.no_grad()
    def adapt(self, embeddings: Tensor, labels: Tensor) -> None:
        """Move the scale by what this batch looks like, over all ranks."""
        target, others = class_reductions(
            at_least_float32(embeddings), self.weight, labels, self._logit_scale(), unit_features=True
        )
        target, others = _gather_over_ranks(target), _gather_over_ranks(others)
        dtype = widest_dtype(target.device)
        average = torch.logsumexp(others.to(dtype), 0) - math.log(len(others))
        angle = target.to(dtype).clamp(-1, 1).acos().median()
        scale = average / angle.clamp(max=math.pi / 4).cos()
        # A broken batch gives a broken loss, not a broken state.
        self.scale.copy_(torch.where(torch.isfinite(scale), scale.clamp(min=MIN_SCALE), self.scale))


def _gather_over_ranks(x: Tensor) -> Tensor:
    """The values of all ranks, in rank order; batches may differ in size."""
    if not (dist.is_available() and dist.is_initialized()):
        return x
    sizes = [torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(x)], device=x.device))
    most = max(int(n) for n in sizes)
    parts = [x.new_zeros(most) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(x, (0, most - len(x))))
    return torch.cat([part[: int(n)] for part, n in zip(parts, sizes, strict=True)])
