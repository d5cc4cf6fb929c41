"""A batch against class vectors: B x C similarities, of which no more than a chunk of classes is ever held.

A class vector is just another reference row, and `pairs.dispatch` would do; but there is exactly one positive per
sample, class vectors are normalised chunk by chunk instead of copied, and every chunk of their gradient is written
once.
For each sample i of class y, with ŵ the class vectors (of length 1 where asked for):

    target_i = z_i·ŵ_y          others_i = log Σ_{j≠y} e^{scale · z_i·ŵ_j}

Both with gradient to z and to the class vectors. `general_class_reductions` is the same where a class has several
vectors or similarities to wrong classes are changed before the sum.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mettle.pairs.interface import Difficulty, PairLoss, Tile
from mettle.pairs.kernel_spec import MarginSpec
from mettle.pairs.kernels import available
from mettle.pairs.problem import PairProblem, RowBlock, make_side
from mettle.pairs.reference import reduce_problem
from mettle.pairs.similarity import (
    at_least_float32,
    differentiable_gradients,
    normalize_rows,
    prepare_embeddings,
    transforms_active,
    warn_dense_recomputation,
)

CHUNK = 1 << 19  # similarities held at once, 2 MB in float32: about what a core's cache holds
GPU_CHUNK = 1 << 26  # likewise on a GPU where no kernel takes them, 256 MB: large products keep it busy


def class_reductions(
    z: Tensor,
    vectors: Tensor,
    labels: Tensor,
    scale: float | Tensor,
    *,
    unit_vectors: bool = True,
    unit_features: bool = False,
    half: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(B,) similarity to the own class, and (B,) log-sum-exp of scale x similarity over all other classes.

    ``unit_features``: bring ``z`` to length 1 here. ``half``: the embeddings were in half precision, so their products
    on a GPU may be too; where `takes_kernels` says so they may still be.
    """
    labels = labels.long()  # uint8 would be read as a mask
    if unit_vectors and takes_kernels(z):
        from mettle.pairs.kernels.class_softmax import class_softmax

        return class_softmax(z, vectors, labels, float(scale), half, unit_features)
    traced = transforms_active() or torch.compiler.is_compiling()
    z = normalize_rows(z) if unit_features else z
    small = chunk is None and len(z) * len(vectors) <= CHUNK
    if small or traced:
        return dense_class_reductions(z, vectors, labels, scale, unit_vectors)
    size = chunk or max(CHUNK // len(z), 64)
    return _ClassSoftmaxFunction.apply(z, vectors, labels, scale, unit_vectors, size)  # type: ignore[return-value]


def class_losses(
    target: Tensor,
    others: Tensor,
    spec: MarginSpec | None,
    reference: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """(B,) the loss of each sample: by a kernel where a margin is declared, else as ``reference`` computes it."""
    if spec is None or target.dtype != torch.float32 or not takes_kernels(target):
        return reference(target, others)
    from mettle.pairs.kernels.margin_loss import margin_loss

    return margin_loss(target, others, spec, reference)


def takes_kernels(z: Tensor) -> bool:
    """Whether the kernels take samples of this type, on this device, in this mode of torch."""
    if not z.is_cuda or z.dtype == torch.float64 or transforms_active() or torch.compiler.is_compiling():
        return False
    return available(z.device.index)


def dense_class_reductions(
    z: Tensor,
    vectors: Tensor,
    labels: Tensor,
    scale: float | Tensor,
    unit_vectors: bool,
    vectors_per_class: int = 1,
) -> tuple[Tensor, Tensor]:
    """The same as one matrix with plain autograd: the reference, and the fastest for few samples and classes.

    Of several vectors per class the nearest one counts.
    """
    vectors = vectors.to(z.dtype)
    s = z @ (normalize_rows(vectors) if unit_vectors else vectors).T
    if vectors_per_class > 1:
        s = s.unflatten(1, (-1, vectors_per_class)).max(2).values
    own = labels[:, None]
    target = s.gather(1, own).squeeze(1)
    if s.shape[1] == 1:  # no other class
        return target, torch.full_like(target, -torch.inf)
    return target, torch.logsumexp((s * scale).scatter(1, own, -torch.inf), 1)


def general_class_reductions(
    z: Tensor,
    vectors: Tensor,
    labels: Tensor,
    scale: float | Tensor,
    *,
    similarity: "ClassSimilarity",
    modulate: Callable[[Tensor, Tensor], Tensor] | None = None,
    unit_features: bool = False,
    half: bool = False,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `class_reductions`, chunk by chunk, for classes that are not one product each.

    In plain torch, but where the nearest of several unit vectors counts: there the kernels do it on a GPU.

    Args:
        z: (B, d) samples.
        vectors: (C · K, d), those of a class behind each other.
        labels: (B,) from 0 to C - 1.
        scale: what similarities are multiplied by.
        similarity: how alike samples and classes are, and how many vectors K a class has.
        modulate: similarities to wrong classes (B, c), given those to the own class (B, 1): what is summed instead.
        unit_features: bring ``z`` to length 1.
        half: the embeddings were in half precision.
        chunk: classes at a time; chosen by size when left out.

    Returns:
        (B,) similarity to the own class, and (B,) log-sum-exp over all other classes; the smallest number there is, in
        place of -inf, where there is no other class.
    """
    labels = labels.long()
    if modulate is None and chunk is None and similarity.is_nearest and takes_kernels(z):
        from mettle.pairs.kernels.class_softmax import class_softmax

        return class_softmax(
            z, vectors, labels, float(scale), half, unit_features, vectors_per_class=similarity.per_class
        )
    z = at_least_float32(z)
    z = normalize_rows(z) if unit_features else z
    target = similarity.to_own(z, vectors, labels)

    return target, log_sum_of_others(z, vectors, labels, scale, target, similarity, modulate, chunk)


def log_sum_of_others(
    z: Tensor,
    vectors: Tensor,
    labels: Tensor,
    scale: float | Tensor,
    target: Tensor,
    similarity: "ClassSimilarity",
    modulate: Callable[[Tensor, Tensor], Tensor] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """(B,) log-sum-exp over all classes but the own one, whose similarity is ``target``, chunk by chunk.

    A label that numbers none of these classes leaves none out.
    """

    def others(z: Tensor, part: Tensor, start: int, target: Tensor) -> Tensor:
        s = similarity.to_all(z, part)
        x = (s if modulate is None else modulate(s, target[:, None])) * scale
        own = labels[:, None] == torch.arange(start, start + x.shape[1], device=x.device)
        return x.masked_fill(own, torch.finfo(x.dtype).min).logsumexp(1)

    traced = transforms_active() or torch.compiler.is_compiling()
    if traced or (chunk is None and len(z) * len(vectors) <= CHUNK):
        return others(z, vectors, 0, target)
    size = chunk or max(CHUNK // (len(z) * similarity.per_class), 64)
    parts = [  # of a part only its sums are kept; it is computed again on the way back
        checkpoint(others, z, part, k * size, target, use_reentrant=False, preserve_rng_state=False)
        for k, part in enumerate(vectors.split(size * similarity.per_class))
    ]
    return torch.stack(parts).logsumexp(0)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class ClassSimilarity:
    """How alike samples and classes of one or several vectors are.

    Args:
        per_class: K, the vectors of every class.
        pool: similarities to those, (..., K), to one similarity per class, (...); None takes the largest one.
        unit_vectors: bring class vectors to length 1.
    """

    per_class: int
    pool: Callable[[Tensor], Tensor] | None
    unit_vectors: bool

    @property
    def is_nearest(self) -> bool:
        """Whether the nearest of unit vectors counts, which the kernels know."""
        return self.pool is None and self.unit_vectors

    def to_all(self, z: Tensor, vectors: Tensor) -> Tensor:
        """(B, C) of every sample to every class."""
        w = vectors.to(z.dtype)
        return self._pool_similarities(z @ (normalize_rows(w) if self.unit_vectors else w).T)

    def to_own(self, z: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
        """(B,) of every sample to the class of its label."""
        w = vectors.unflatten(0, (-1, self.per_class))[labels].to(z.dtype).flatten(0, 1)
        w = normalize_rows(w) if self.unit_vectors else w
        return self._pool_similarities((w.unflatten(0, (-1, self.per_class)) @ z[:, :, None]).squeeze(2)).squeeze(1)

    def _pool_similarities(self, s: Tensor) -> Tensor:
        if self.per_class == 1:
            return s
        s = s.unflatten(1, (-1, self.per_class))
        return s.max(-1).values if self.pool is None else self.pool(s)


@dataclass(frozen=True, kw_only=True)
class ClassProblem(PairProblem):
    """Samples against classes of several vectors, for the engine that knows every difficulty: the whole matrix."""

    similarity: ClassSimilarity

    def tile(self, i: RowBlock, j: RowBlock, s: Tensor | None = None) -> Tile:
        """Every sample against every class."""
        assert self.ref is not None
        return super().tile(i, j, self.similarity.to_all(self.z, self.ref))


def reduce_classes(
    loss: PairLoss, z: Tensor, vectors: Tensor, labels: Tensor, difficulty: Difficulty, similarity: ClassSimilarity
) -> dict[str, Tensor]:
    """What every sample accumulates over classes under a difficulty, (B,) each with gradient."""
    classes = torch.arange(len(vectors) // similarity.per_class, device=labels.device)
    left, right = make_side(labels, None, None), make_side(classes, None, None)
    z = prepare_embeddings(z, loss.measure)
    return reduce_problem(
        ClassProblem(
            loss=loss, difficulty=difficulty, left=left, right=right, z=z, ref=vectors, second=None,
            similarity=similarity,
        )
    )  # fmt: skip


def shard_reductions(
    z: Tensor, vectors: Tensor, labels: Tensor, scale: float | Tensor, unit_vectors: bool
) -> tuple[Tensor, Tensor]:
    """The same as `class_reductions` where the vectors are those of some of the classes.

    A label that is the number of vectors is that of a class elsewhere: its sample has 0 as similarity to its own class,
    and all of these classes are others. Without any other class the log-sum-exp is -inf.
    """
    size = max((GPU_CHUNK if z.is_cuda else CHUNK) // max(len(z), 1), 64)
    return _ClassSoftmaxFunction.apply(z, vectors, labels, scale, unit_vectors, size)  # type: ignore[return-value]


class _ClassSoftmaxFunction(torch.autograd.Function):
    """Target similarity and log-sum-exp of the others; chunks are computed again in the backward pass."""

    @staticmethod
    def forward(ctx, z: Tensor, vectors: Tensor, labels: Tensor, scale: float, unit_vectors: bool, size: int):  # type: ignore[override]
        chunks = ClassChunks(z, vectors, labels, unit_vectors, size)
        scaled = z * scale
        target, highest, sums = z.new_zeros(len(z)), z.new_full((len(z),), -torch.inf), z.new_zeros(len(z))
        for w, rows, columns, _ in chunks:
            x = chunks.products(scaled, w)
            target[rows] = x[rows, columns]
            x[rows, columns] = -torch.inf
            higher = torch.maximum(highest, x.amax(1))
            safe = higher.masked_fill(higher == -torch.inf, 0)
            sums = sums * (highest - safe).exp_() + x.sub_(safe[:, None]).exp_().sum(1)
            highest = higher
        others_lse = sums.log() + highest.masked_fill(highest == -torch.inf, 0)
        ctx.chunks, ctx.scale = chunks, scale
        ctx.save_for_backward(scaled, others_lse, z, vectors, labels)  # inputs so that torch notices a change in place
        return target / scale, others_lse

    @staticmethod
    def backward(ctx, g_target: Tensor, g_others: Tensor):  # type: ignore[override]
        chunks, (scaled, others_lse, z, vectors, labels) = ctx.chunks, ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: chunks that are computed again have no graph
            warn_dense_recomputation(len(z), len(vectors))
            outputs = dense_class_reductions(z, vectors, labels, ctx.scale, chunks.unit_vectors)
            found = differentiable_gradients(outputs, (g_target, g_others), (z, vectors))
            return *found, None, None, None, None
        none = others_lse == -torch.inf  # a single class: nothing to be pushed away from
        others_lse, push = others_lse.masked_fill(none, 0), (g_others * ctx.scale).masked_fill(none, 0)[:, None]
        # A row's gradient multiplies its whole row of probabilities, so it waits until after the product with them.
        pushed, pulled = chunks.z * push, chunks.z * g_target[:, None]
        from_others, own_vectors = torch.zeros_like(chunks.z), torch.zeros_like(chunks.z)
        dw = torch.empty_like(chunks.vectors)
        for w, rows, columns, span in chunks:
            p = chunks.products(scaled, w).sub_(others_lse[:, None]).exp_()
            p[rows, columns] = 0
            from_others.addmm_(p, w)
            own_vectors[rows] = w[columns]
            g = torch.mm(p.T, pushed, out=dw[span]) if dw.dtype == p.dtype else p.T @ pushed
            g.index_add_(0, columns, pulled[rows])
            chunks.normalize_backward_(g, w, span)
            if g.dtype != dw.dtype:
                dw[span] = g
        return from_others.mul_(push).addcmul_(own_vectors, g_target[:, None]), dw, None, None, None, None


class ClassChunks:
    """Chunks of class vectors in order, with the samples whose own class is among them."""

    def __init__(self, z: Tensor, vectors: Tensor, labels: Tensor, unit_vectors: bool, size: int):
        self.z, self.vectors, self.unit_vectors = z.detach(), vectors.detach(), unit_vectors
        self.order = torch.argsort(labels, stable=True)
        self.labels = labels[self.order]
        starts = range(0, len(vectors), size)
        self.spans = [slice(a, min(a + size, len(vectors))) for a in starts]
        edges = torch.tensor([*starts, len(vectors)], device=labels.device)
        self.label_bounds = torch.searchsorted(self.labels, edges).tolist()
        self.buffer = z.new_empty(len(z) * min(size, len(vectors)))

    def products(self, z: Tensor, w: Tensor) -> Tensor:
        """(B, chunk) of ``z`` with the vectors of a chunk, in memory that the next chunk uses again."""
        return torch.mm(z, w.T, out=self.buffer[: len(z) * len(w)].view(len(z), len(w)))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, slice]]:
        for k, span in enumerate(self.spans):
            w = self.vectors[span].to(self.z.dtype)
            here = slice(self.label_bounds[k], self.label_bounds[k + 1])
            yield normalize_rows(w) if self.unit_vectors else w, self.order[here], self.labels[here] - span.start, span

    def normalize_backward_(self, g: Tensor, w: Tensor, span: slice) -> None:
        """From the gradient of class vectors of length 1 to that of the vectors themselves, in place."""
        if not self.unit_vectors:
            return
        length = torch.linalg.vecdot(w, self.vectors[span].to(w.dtype)).unsqueeze(1)
        g.addcmul_(w, torch.linalg.vecdot(g, w).unsqueeze(1), value=-1)
        g.mul_(torch.where(length > 0, 1 / length, 0))
