"""Two-network models: one encoder seen through two or three inputs at once.

The branches share every weight because there is only one encoder; it sees all inputs as one batch, so batch norm treats
them alike and swapping inputs swaps nothing else.
"""

from numbers import Integral
from typing import Literal

import torch
from torch import Tensor, nn

from mettle.errors import InputError
from mettle.model.embedder import EmbeddingModel


class SiameseNet(nn.Module):
    r"""One encoder h, two inputs, one number per pair.

    distance     d = ‖h(x₁) − h(x₂)‖                 small = alike; no weights of its own
    difference   w · |h(x₁) − h(x₂)| + c             a logit, large = alike; w and c are learned

    Both are symmetric in x₁ and x₂. ``-net(x1, x2)`` of the one, and the logit of the other, are similarities that the
    losses of `mettle.losses` take by ``from_similarity``.

    Args:
        encoder: any module from inputs (n, ...) to embeddings (n, dim).
        head: which of the two.
        dim: of the embeddings; an `EmbeddingModel` says so itself.
    """

    def __init__(
        self, encoder: nn.Module, head: Literal["distance", "difference"] = "distance", dim: int | None = None
    ):
        super().__init__()
        if head not in ("distance", "difference"):
            raise InputError(f"head must be 'distance' or 'difference', got {head!r}")
        if dim is not None and (not isinstance(dim, Integral) or isinstance(dim, bool) or dim < 1):
            raise InputError(f"dim must be the whole number of numbers in an embedding, at least 1: got {dim!r}")
        dim = dim or (encoder.dim if isinstance(encoder, EmbeddingModel) else None)
        if head == "difference" and dim is None:
            raise InputError("head 'difference' needs to know the dimension of the embeddings: pass dim=...")
        self.encoder = encoder
        self.head = nn.Linear(dim, 1) if head == "difference" and dim is not None else None

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        """(n,) distances, or logits."""
        h1, h2 = encode_together(self.encoder, x1, x2)
        return euclidean_distance(h1, h2) if self.head is None else self.head((h1 - h2).abs()).squeeze(1)


class TripletNet(nn.Module):
    r"""One encoder h, three inputs, two distances (Hoffer and Ailon 2015).

    d₊ = ‖h(x) − h(x₊)‖,  d₋ = ‖h(x) − h(x₋)‖,  (p₊, p₋) = softmax(d₊, d₋)

    The loss is the mean of p₊² = ((p₊ − 0)² + (p₋ − 1)²) / 2: the softmax should be (0, 1).
    """

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """(n, 2) distances to the positive and to the negative."""
        h, near, far = encode_together(self.encoder, x, positive, negative)
        return torch.stack([euclidean_distance(h, near), euclidean_distance(h, far)], 1)

    def per_item(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """(n,) p₊² of every triplet: 0 when the negative is far, ¼ when both are equally near, 1 when all is wrong."""
        return self(x, positive, negative).softmax(1)[:, 0].square()

    def loss(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """The mean over triplets, a scalar with gradient."""
        return self.per_item(x, positive, negative).mean()


def encode_together(encoder: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Embeddings of several equally shaped batches, from one pass; float32 or better."""
    first = inputs[0]
    for x in inputs[1:]:
        if x.shape != first.shape:
            raise InputError(
                f"inputs of shape {tuple(first.shape)} and {tuple(x.shape)}: row i of each belongs together"
            )
    if len(first) == 0:
        raise InputError("inputs are empty: at least one row is needed")
    h = encoder(torch.cat(inputs))
    if h.ndim != 2:
        raise InputError(f"the encoder must give embeddings (n, dim), got shape {tuple(h.shape)}")
    return (h.float() if h.dtype in (torch.float16, torch.bfloat16) else h).chunk(len(inputs))


def euclidean_distance(a: Tensor, b: Tensor) -> Tensor:
    """(n,) Euclidean distance of row i to row i, with gradient 0 where two points coincide."""
    squared = (a - b).square().sum(1)
    same = squared == 0
    return torch.where(same, 1, squared).sqrt().masked_fill(same, 0)
