"""Self-distillation of similarities: a network learns the similarities that the moving average of its weights gives.

For a batch of n embeddings, with s_ij the cosines of the network and s̄_ij those of its teacher,

    q_i = softmax over j ≠ i of s_ij / τ        p_i likewise of s̄_ij / τ, without gradient
    L = (1/n) Σ_i KL(p_i ‖ q_i)                 ∂L/∂s_ij = (q_ij − p_ij) / (n τ)

Row softmaxes of similarities as soft targets are those of S2SD (Roth et al. 2021, "Simultaneous similarity-based
self-distillation for deep metric learning"), whose factor τ² is left out; an average of the weights as the teacher is
the mean teacher of Tarvainen & Valpola 2017. The similarity of a sample to itself is 1 for both and is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mettle.errors import InputError
from mettle.train.gradient_caching import cached_forward

NO_TEACHER = "the teacher is the moving average of the weights: set train.ema, such as 0.995"


@dataclass(frozen=True)
class DistillationSettings:
    """How much a network learns from its teacher.

    Args:
        weight: of the distance to the similarities of the teacher, beside a loss of weight 1.
        temperature: τ of both softmaxes.
    """

    weight: float
    temperature: float = 0.1

    def __post_init__(self) -> None:
        for name in ("weight", "temperature"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InputError(f"{name} of a distillation must be above 0, got {value}")


def similarity_distillation(embeddings: Tensor, teacher: Tensor, temperature: float = 0.1) -> Tensor:
    """The mean over samples of KL(p_i ‖ q_i), with gradient to ``embeddings`` only; 0 for a single one.

    Args:
        embeddings: (n, d) of the network.
        teacher: (n, e) of the teacher, for the same inputs.
        temperature: τ.
    """
    if len(embeddings) < 2:
        return embeddings.sum() * 0
    q = _log_rows(embeddings, temperature)
    p = _log_rows(teacher.detach(), temperature)
    return (p.exp() * (p - q)).sum(1).mean()


def _log_rows(z: Tensor, temperature: float) -> Tensor:
    """(n, n − 1) log-softmax of each sample's cosines to the others."""
    z = nn.functional.normalize(z.float() if z.dtype in (torch.float16, torch.bfloat16) else z, dim=1)
    n = len(z)
    cosines = z @ z.T
    others = cosines.flatten()[1:].view(n - 1, n + 1)[:, :-1].reshape(n, n - 1)  # all but the diagonal
    return (others / temperature).log_softmax(1)


def embed_with_teacher(teacher: nn.Module, inputs: Tensor, cached: int = 0) -> Tensor:
    """The embeddings of a teacher in eval mode, before a neck, if there is one; ``cached`` inputs at a time, or all."""
    embed: Callable[[Tensor], Tensor] = getattr(teacher, "before_neck", teacher)
    teacher.eval()
    with torch.no_grad():
        return cached_forward(teacher, inputs, cached, embed)
