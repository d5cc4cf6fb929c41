"""The neck of a model: a batch norm between the embedding that pairs are compared in and one that classes are told by.

Pairwise losses want distances, class-vector losses want directions; asked of one embedding, they pull against each
other. BNNeck (Luo et al. 2019, "Bag of tricks and a strong baseline for deep person re-identification") gives each a
space of its own: the embedding before the neck, and the same after a batch norm whose shift stays 0, so that classes
lie around the origin.
"""

from typing import Literal, get_args

from torch import Tensor, nn

from mettle.errors import RecipeError, nearest

Neck = Literal["none", "batchnorm"]
Space = Literal["before", "after"]  # the neck


class BatchNormNeck(nn.Module):
    """(b, dim) embeddings to (b, dim): γ (z − μ) / √(σ² + ε) with γ learned, and no shift.

    Args:
        dim: how long embeddings are.
        unit: whether what comes out is scaled to length 1.
    """

    def __init__(self, dim: int, unit: bool = False):
        super().__init__()
        self.unit = unit
        self.norm = nn.BatchNorm1d(dim)
        self.norm.bias.requires_grad_(False)

    def forward(self, embeddings: Tensor) -> Tensor:
        """The embeddings after the neck; in training mode by the mean and variance of the batch."""
        return self._scale(self.norm(embeddings.to(self.norm.weight.dtype)))

    def normalize_batch(self, embeddings: Tensor) -> Tensor:
        """The same by the mean and variance of these embeddings in either mode; the running ones stay as they are."""
        z, norm = embeddings.to(self.norm.weight.dtype), self.norm
        return self._scale(nn.functional.batch_norm(z, None, None, norm.weight, norm.bias, training=True, eps=norm.eps))

    def _scale(self, z: Tensor) -> Tensor:
        return nn.functional.normalize(z, dim=1) if self.unit else z


def build_neck(name: Neck, dim: int, unit: bool = False) -> BatchNormNeck | None:
    """The neck of this name; None for ``"none"``."""
    return None if name == "none" else BatchNormNeck(dim, unit)


def check_neck(neck: str, embedding: str) -> None:
    """Refuse names that are not known, and an embedding after a neck that is not there."""
    for name, value, known in (("neck", neck, get_args(Neck)), ("embedding", embedding, get_args(Space))):
        if value not in known:
            raise RecipeError(f"model.{name} = {value!r} is not known{nearest(str(value), known)}")
    if neck == "none" and embedding == "after":
        raise RecipeError("model.embedding = 'after' needs a neck: set model.neck = 'batchnorm'")
