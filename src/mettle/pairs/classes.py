"""A batch against class vectors: B x C similarities, of which no more than a chunk of classes is ever held.

A class vector is just another reference row, and `pairs.engine` would do; but there is exactly one positive per sample,
class vectors are normalised chunk by chunk instead of copied, and every chunk of their gradient is written once.
For each sample i of class y, with ŵ the class vectors (of length 1 where asked for):

    target_i = z_i·ŵ_y          far_i = log Σ_{j≠y} e^{scale · z_i·ŵ_j}

Both with gradient to z and to the class vectors.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.kernels import available
from mettle.pairs.similarity import unit

CHUNK = 1 << 19  # similarities held at once, 2 MB in float32: about what a core's cache holds


def class_rows(
    z: Tensor,
    vectors: Tensor,
    labels: Tensor,
    scale: float,
    *,
    unit_vectors: bool = True,
    unit_features: bool = False,
    half: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(B,) similarity to the own class, and (B,) log-sum-exp of scale x similarity over all other classes.

    ``unit_features``: bring ``z`` to length 1 here. ``half``: the embeddings were in half precision, so their products
    on a GPU may be too.
    """
    labels = labels.long()  # uint8 would be read as a mask
    if z.is_cuda and unit_vectors and z.dtype == torch.float32 and available(z.device.index):
        from mettle.pairs.kernels.class_softmax import class_softmax

        return class_softmax(z, vectors, labels, scale, half, unit_features)
    z = unit(z) if unit_features else z
    size = chunk or max(CHUNK // len(z), 64)
    return _Classes.apply(z, vectors, labels, scale, unit_vectors, size)  # type: ignore[return-value]


class _Classes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, vectors: Tensor, labels: Tensor, scale: float, unit_vectors: bool, size: int):  # type: ignore[override]
        walk = _Walk(z, vectors, labels, unit_vectors, size)
        scaled = z * scale
        own, top, sums = z.new_zeros(len(z)), z.new_full((len(z),), -torch.inf), z.new_zeros(len(z))
        for w, rows, columns, _ in walk:
            x = walk.products(scaled, w)
            own[rows] = x[rows, columns]
            x[rows, columns] = -torch.inf
            higher = torch.maximum(top, x.amax(1))
            safe = higher.masked_fill(higher == -torch.inf, 0)
            sums = sums * (top - safe).exp_() + x.sub_(safe[:, None]).exp_().sum(1)
            top = higher
        far = sums.log() + top.masked_fill(top == -torch.inf, 0)
        ctx.walk, ctx.scale = walk, scale
        ctx.save_for_backward(scaled, far, z, vectors)  # the last two so that torch notices a change in place
        return own / scale, far

    @staticmethod
    def backward(ctx, g_target: Tensor, g_far: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # recomputed chunks have no graph: a second derivative would be silently wrong
            raise InputError("class-vector losses have first derivatives only: do not pass create_graph=True")
        walk, (scaled, far, *_) = ctx.walk, ctx.saved_tensors
        none = far == -torch.inf  # a single class: nothing to be pushed away from
        far, push = far.masked_fill(none, 0), (g_far * ctx.scale).masked_fill(none, 0)[:, None]
        # A row's gradient multiplies its whole row of probabilities, so it waits until after the product with them.
        pushed, pulled = walk.z * push, walk.z * g_target[:, None]
        away, near = torch.zeros_like(walk.z), torch.zeros_like(walk.z)
        dw = torch.empty_like(walk.vectors)
        for w, rows, columns, span in walk:
            p = walk.products(scaled, w).sub_(far[:, None]).exp_()
            p[rows, columns] = 0
            away.addmm_(p, w)
            near[rows] = w[columns]
            g = torch.mm(p.T, pushed, out=dw[span]) if dw.dtype == p.dtype else p.T @ pushed
            g.index_add_(0, columns, pulled[rows])
            walk.through(g, w, span)
            if g.dtype != dw.dtype:
                dw[span] = g
        return away.mul_(push).addcmul_(near, g_target[:, None]), dw, None, None, None, None


class _Walk:
    """Chunks of class vectors in order, with the samples whose own class is among them."""

    def __init__(self, z: Tensor, vectors: Tensor, labels: Tensor, unit_vectors: bool, size: int):
        self.z, self.vectors, self.unit = z.detach(), vectors.detach(), unit_vectors
        self.order = torch.argsort(labels, stable=True)
        self.labels = labels[self.order]
        starts = range(0, len(vectors), size)
        self.spans = [slice(a, min(a + size, len(vectors))) for a in starts]
        edges = torch.tensor([*starts, len(vectors)], device=labels.device)
        self.cuts = torch.searchsorted(self.labels, edges).tolist()
        self.held = z.new_empty(len(z) * min(size, len(vectors)))

    def products(self, z: Tensor, w: Tensor) -> Tensor:
        """(B, chunk) of ``z`` with the vectors of a chunk, in memory that the next chunk uses again."""
        return torch.mm(z, w.T, out=self.held[: len(z) * len(w)].view(len(z), len(w)))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, slice]]:
        for k, span in enumerate(self.spans):
            w = self.vectors[span].to(self.z.dtype)
            here = slice(self.cuts[k], self.cuts[k + 1])
            yield unit(w) if self.unit else w, self.order[here], self.labels[here] - span.start, span

    def through(self, g: Tensor, w: Tensor, span: slice) -> None:
        """From the gradient of class vectors of length 1 to that of the vectors themselves, in place."""
        if not self.unit:
            return
        length = torch.linalg.vecdot(w, self.vectors[span].to(w.dtype)).unsqueeze(1)
        g.addcmul_(w, torch.linalg.vecdot(g, w).unsqueeze(1), value=-1)
        g.mul_(torch.where(length > 0, 1 / length, 0))
