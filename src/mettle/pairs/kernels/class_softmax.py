# pyright: reportGeneralTypeIssues=false
"""Margin softmax over any number of classes, chunk by chunk.

    target = ẑ·ŵ_y          negatives = log Σ_{c ≠ y} e^{scale · ẑ·ŵ_c}

Both with gradient to samples and class vectors; margin and loss are in `margin_loss`, or stay with the caller. A class
of K vectors counts by the one that is nearest to a sample (`nearest_vector`). Class vectors are normalized
chunk by chunk, never as a second copy: in half precision they wait for the backward pass where their gradient will be.
Of the B × C logits only B × chunk exist at once, and only in the backward pass.
Samples are sorted by class, so that a block of them has its own classes in one range of columns.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.kernels.backward import matmul_float32, score_gradients_kernel
from mettle.pairs.kernels.config import LARGE_BATCH, NegativesConfig, TileConfig, cdiv, select_config, split_columns
from mettle.pairs.kernels.forward import negatives_forward
from mettle.pairs.kernels.launch import Launch, align_tensor, find_launch_cache, flatten_tensor, tensor_descriptors
from mettle.pairs.kernels.nearest_vector import (
    nearest_gradients_kernel,
    nearest_negatives_kernel,
    select_nearest_tiles,
)
from mettle.pairs.kernels.operands import (
    INTERPRETER_PAD,
    PAD,
    normalize_backward,
    normalize_rows,
    padded_head_dim,
    prepare_operands,
    select_row_block,
)
from mettle.pairs.kernels.pair_terms import LN2
from mettle.pairs.kernels.pair_terms import LOG2E as KERNEL_LOG2E
from mettle.pairs.kernels.primitives import (
    LSE,
    LSE_DISABLED,
    ROW_STATE_LINES,
    SUM_GRAD,
    merge_logsumexp,
    merge_sums,
)
from mettle.pairs.kernels.spec import LOG2E, MOST_EXPONENT

FORWARD_CLASSES = 1 << 18  # of a chunk in the forward pass
SCORES_IN_MEMORY = 1 << 26  # entries of dL/ds at once in the backward pass: few chunks, few launches
LEAST_CLASSES = 1 << 12  # of a chunk in the backward pass
GRADIENT_LIMIT = 16384.0  # dL/ds reaches this at most: only one end of a pair counts
SMALL_BLOCK = 64  # samples of a program that does little with each


def class_softmax(
    z: Tensor,
    w: Tensor,
    labels: Tensor,
    scale: float,
    half: bool = False,
    normalize: bool = False,
    precision: str | None = None,
    vectors_per_class: int = 1,
) -> tuple[Tensor, Tensor]:
    """(B,) cosine to the own class and (B,) log-sum-exp over the others, as `class_reductions` of the room.

    Args:
        z: (B, d) samples, of any length; where ``normalize`` is off they keep it.
        w: (C · K, d) class vectors of any length, those of a class behind each other; they are normalized here.
        labels: (B,) class of each sample, from 0 to C − 1.
        scale: of the cosines.
        half: products in float16; else as precise as float32.
        normalize: bring samples to length 1 here.
        precision: overrides ``half``.
        vectors_per_class: K. The cosine to a class is that to the nearest of its vectors.
    """
    if w.ndim != 2 or z.ndim != 2 or w.shape[1] != z.shape[1]:
        raise InputError(f"class vectors must be (C, d) with the samples' d: got {tuple(w.shape)} for {tuple(z.shape)}")
    precision = precision or ("ieee" if not z.is_cuda else "fp16" if half else "bf16x3")
    with torch.cuda.device_of(z):
        w_needs_grad = w.requires_grad and torch.is_grad_enabled()
        return ClassSoftmaxFunction.apply(  # type: ignore[return-value]
            z, w, labels, float(scale), normalize, precision, w_needs_grad, vectors_per_class
        )


class ClassSoftmaxFunction(torch.autograd.Function):
    """Targets and log-sum-exps as functions of samples and class vectors."""

    @staticmethod
    def forward(
        ctx,
        z: Tensor,
        w: Tensor,
        labels: Tensor,
        scale: float,
        normalize: bool,
        precision: str,
        w_needs_grad: bool,
        vectors_per_class: int,
    ):  # type: ignore[override]
        """(B,) each."""
        ctx.call = ClassSoftmaxCall(z.detach(), w.detach(), labels, scale, normalize, precision, vectors_per_class)
        ctx.save_for_backward(z, w, labels)
        ctx.scale, ctx.normalize = scale, normalize
        return ctx.call.forward(w_needs_grad)

    @staticmethod
    def backward(ctx, g_target: Tensor, g_lse: Tensor):  # type: ignore[override]
        """Gradients of samples and class vectors."""
        z, w, labels = ctx.saved_tensors  # the first two also so that torch notices a change in place
        if torch.is_grad_enabled():  # create_graph=True: the kernels have no graph
            from mettle.pairs import similarity
            from mettle.pairs.class_softmax import dense_class_reductions

            similarity.warn_dense_recomputation(len(z), len(w))
            rows = similarity.at_least_float32(z)
            rows = similarity.normalize_rows(rows) if ctx.normalize else rows
            outputs = dense_class_reductions(
                rows, w, labels, ctx.scale, unit_vectors=True, vectors_per_class=ctx.call.vectors_per_class
            )
            found = similarity.differentiable_gradients(outputs, (g_target, g_lse), (z, w))
            return *found, None, None, None, None, None, None
        g_target, g_lse = (flatten_tensor(g.float()) for g in (g_target, g_lse))
        return *ctx.call.backward(g_target, g_lse, z, ctx.needs_input_grad[1]), None, None, None, None, None, None


class ClassOperands(NamedTuple):
    """Class vectors of length 1 in the operands' precision, padded, and 1 / the lengths they had."""

    hi: Tensor
    lo: Tensor
    inverse_norm: Tensor


@dataclass(frozen=True)
class GradientBuffer:
    """Normalized class vectors at the end of each chunk's gradient, until the backward pass needs them again.

    To bring a million vectors to length 1 takes as long as to read and write them, so twice is a waste; to hold a copy
    is memory. Their gradient needs room anyway, and has nothing to say before the backward pass, which reads from the
    first vector to the last and writes gradients behind itself.
    """

    gradient: Tensor  # (C, d)
    chunk: int  # vectors that are brought to length 1 at once
    step: int  # vectors that are read at once, and then written over
    chunks: dict[int, ClassOperands] = field(default_factory=dict)

    def allocate(self, place: slice, rows: int, like: Tensor) -> Tensor | None:
        """Room for so many rows ``like`` these; None where gradients would be written over what is not read yet."""
        n = place.stop - place.start
        own, row = (x.shape[1] * x.element_size() for x in (like, self.gradient))
        begin = (n * row - rows * own) // 16 * 16
        last = (n - 1) // self.step * self.step  # the gap closes: there it is smallest
        if self.chunk % self.step or begin + last * own < last * row:
            return None
        there = self.gradient[place].view(-1).view(torch.uint8)[begin : begin + rows * own]
        return there.view(like.dtype).view(rows, -1)

    def store(self, place: slice, vectors: ClassOperands) -> None:
        """Remember a chunk that was put where `allocate` said."""
        self.chunks[place.start // self.chunk] = vectors

    def read(self, place: slice, rows: int) -> ClassOperands | None:
        """A part of a chunk, or None where it is not here."""
        k, start = divmod(place.start, self.chunk)
        return ClassOperands(*(x[start : start + rows] for x in self.chunks[k])) if k in self.chunks else None


class ClassSoftmaxCall:
    """One call."""

    def __init__(
        self,
        z: Tensor,
        w: Tensor,
        labels: Tensor,
        scale: float,
        normalize: bool,
        precision: str,
        vectors_per_class: int = 1,
    ):
        self.precision, self.scale, self.normalize, self.vectors_per_class = (
            precision,
            scale,
            normalize,
            vectors_per_class,
        )
        # Samples as they come may be of any length.
        self.online = scale > MOST_EXPONENT or not normalize or vectors_per_class > 1
        # What samples and class vectors carry, so that products are logits in base 2: long samples nothing.
        both = math.sqrt(LOG2E * scale)
        self.sample_scale, self.class_scale = (both, both) if normalize else (1.0, LOG2E * scale)
        self.w, self.z = align_tensor(w if w.stride(1) == 1 else w.contiguous()), align_tensor(z)
        self.labels = flatten_tensor(labels)
        limits = (SCORES_IN_MEMORY, FORWARD_CLASSES, LEAST_CLASSES)
        settings = ("classes", vectors_per_class, self.online, normalize, precision, *limits)
        self.cache = find_launch_cache(settings, (self.z, self.w, self.labels))
        self.config = select_config(
            precision, padded_head_dim(z.shape[1]), register_heavy=self.online, large=len(w) >= LARGE_BATCH
        )
        self.pad = INTERPRETER_PAD if precision == "ieee" else PAD
        self.buffer: GradientBuffer | None = None
        self.ranges: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}  # by classes of a chunk

    def forward(self, w_needs_grad: bool) -> tuple[Tensor, Tensor]:
        """Targets and log-sum-exps; ``w_needs_grad``: the gradient of the class vectors will be asked for."""
        rows = self.rows = prepare_operands(
            self.z, self.labels, None, self.precision, self.normalize, operand_scale=self.sample_scale, cache=self.cache
        )
        padded, device, tile = rows.padded, rows.normalized.device, self.config.forward_tile(False)
        target, negatives = torch.empty(rows.n, device=device), torch.empty(rows.n, device=device)
        self.target_inverse_norm, self.lse = torch.empty(padded, device=device), torch.empty(padded, device=device)
        self.target_row = torch.empty(padded, dtype=torch.int64, device=device)
        self.label_rows = self._nearest_own_rows()
        block = select_row_block(rows.head_dim)
        self.cache.launch(
            "target",
            target_cosine_kernel,
            (rows.normalized, self.w, self.label_rows, rows.order, target, self.target_inverse_norm, self.target_row),
            lambda: Launch(
                (padded // block.rows,),
                (rows.n, rows.d, self.w.stride(0)),
                {
                    "HEAD_DIM": rows.head_dim,
                    "BLOCK": block.columns,
                    "ROWS": block.rows,
                    "num_warps": block.num_warps,
                },
            ),
        )
        many = self.vectors_per_class
        self.target_class = self.target_row if many == 1 else self.target_row.div(many, rounding_mode="floor")
        chunk = self.step if many > 1 else FORWARD_CLASSES
        if w_needs_grad and self.precision != "bf16x3":  # two halves take all of the room
            self.buffer = GradientBuffer(torch.empty_like(self.w), chunk * many, self.step * many)
        if many > 1:
            tile = select_nearest_tiles(self.precision, self.config).forward
        blocks = cdiv(rows.n, tile.block_m)
        splits = split_columns(blocks, cdiv(min(chunk, self.num_classes), tile.block_n), device, 4)
        sums = torch.empty(cdiv(self.num_classes, chunk), splits, 2, padded, device=device)
        config = self._negatives_config(tile)
        for k, place, begin, end in self.chunks(chunk):
            m, vectors = place.stop - place.start, self.normalize_classes(f"classes {k}", place, self.buffer)
            operands = self._operands(config, vectors)
            if many > 1:
                group = len(vectors.hi) // many
                self.cache.launch(
                    f"nearest negatives {k}",
                    nearest_negatives_kernel,
                    (*operands, begin, end, sums[k]),
                    lambda m=m, group=group: Launch(
                        (blocks, splits), (m, group, padded, splits), config.nearest_constexprs(many)
                    ),
                )
                continue
            self.cache.launch(
                f"negatives {k}",
                negatives_forward,
                (*operands, *operands, begin, end, rows.inverse_norm, sums[k]),
                lambda m=m: Launch(
                    (blocks, splits),
                    (rows.n, m, padded, splits),
                    config.forward_constexprs(has_second_sum=False, symmetric=False),
                ),
                4 * (0.0,),
            )
        self.cache.launch(
            "log-sum-exp",
            class_logsumexp_kernel,
            (sums, rows.order, self.lse, negatives),
            lambda: Launch(
                (padded // SMALL_BLOCK,),
                (rows.n, padded, len(sums) * splits),
                {"ONLINE": self.online, "SIZE": SMALL_BLOCK},
            ),
        )
        return target, negatives

    def backward(
        self, g_target: Tensor, g_lse: Tensor, like: Tensor, w_needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the samples and, where asked for, of the class vectors."""
        rows, tile = self.rows, self.config.backward
        if not self.config.scores_in_memory:  # the rows' gradient is not held: tiles as in the forward pass
            tile = self.config.forward
        many = self.vectors_per_class
        if many > 1:
            tile = select_nearest_tiles(self.precision, self.config).backward
        config = self._negatives_config(tile)
        n, padded, device = rows.n, rows.padded, rows.normalized.device
        row_state, stats = torch.empty(ROW_STATE_LINES, padded, device=device), torch.empty(3, device=device)
        undo = (self.scale / (GRADIENT_LIMIT * x) for x in (self.class_scale, self.sample_scale))
        self.cache.launch(
            "row state",
            class_row_state_kernel,
            (g_lse, self.lse, rows.order, row_state, stats),
            lambda: Launch((1,), (n, padded), {"ONLINE": self.online, "SIZE": 1024, "num_warps": 8}),
            tuple(undo),
        )
        dz = torch.zeros(padded, rows.head_dim, device=device)
        buffer, self.buffer = self.buffer, None  # to be written over: a second backward pass must not find it
        dw = None
        if w_needs_grad:
            dw = torch.empty_like(self.w) if buffer is None else buffer.gradient
        for k, place, begin, end in self.chunks(self.step):
            m, vectors = place.stop - place.start, self._read_classes(f"classes {k}, backward", place, buffer)
            hi, lo, inverse_norm = vectors
            width = len(hi)
            ds = torch.empty(padded, width, dtype=hi.dtype, device=device)
            ds_lo = torch.empty_like(ds) if self.precision == "bf16x3" else ds
            operands = self._operands(config, vectors)
            if many > 1:
                group = width // many
                self.cache.launch(
                    f"nearest gradients {k}",
                    nearest_gradients_kernel,
                    (*operands, begin, end, row_state, stats, ds, ds_lo),
                    lambda m=m, group=group: Launch(
                        (padded // tile.block_m, group // tile.block_n),
                        (m, group, padded),
                        config.nearest_constexprs(many),
                    ),
                    (GRADIENT_LIMIT,),
                )
                self._multiply(ds, ds_lo, hi, lo, dz)  # ds of missing classes is 0
                if dw is not None:
                    g = self._multiply(ds.T, ds_lo.T, rows.hi, rows.lo)
                    for v in range(many):  # vectors of one kind behind each other, as they were normalized
                        at = slice(v * group, v * group + m)
                        w, out = self._rows_of(self.w, place)[v::many], self._rows_of(dw, place)[v::many]
                        name = f"normalize classes backward {k}, {v}"
                        self.normalize_classes_backward(name, g[at], w, inverse_norm[at], stats, out)
                continue
            self.cache.launch(
                f"score gradients {k}",
                score_gradients_kernel,
                (*operands, *operands, begin, end, row_state, row_state, stats, ds, ds_lo),
                lambda width=width: Launch(
                    (padded // tile.block_m, width // tile.block_n),
                    (0, 0, width, n, padded, width),
                    config.score_gradients_constexprs(
                        second_sum_has_grad=False, differentiable_weights=False, row_end=True, column_end=False
                    ),
                ),
                (*4 * (0.0,), GRADIENT_LIMIT),
            )
            self._multiply(ds[:, :m], ds_lo[:, :m], hi[:m], lo[:m], dz)  # ds of missing vectors may be infinite
            if dw is not None:
                g = self._multiply(ds.T, ds_lo.T, rows.hi, rows.lo)
                self.normalize_classes_backward(
                    f"normalize classes backward {k}", g, self.w[place], inverse_norm, stats, dw[place]
                )
        dw_target = self._add_target_gradient(g_target, stats, dz)
        if dw is not None:
            dw.index_add_(0, self.label_rows, dw_target)
        return normalize_backward(rows, dz, None, stats, like, self.normalize, cache=self.cache), dw

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.w) // self.vectors_per_class

    @property
    def step(self) -> int:
        """Classes of a chunk in the backward pass, a power of two: so many of them are one in the forward pass.

        Several vectors per class have chunks of one size in both passes, of any number of classes.
        """
        most = max(LEAST_CLASSES, SCORES_IN_MEMORY // len(self.target_row))
        if self.num_classes <= min(2 * most, FORWARD_CLASSES) and self.vectors_per_class == 1:
            return FORWARD_CLASSES  # two chunks would take the host as long as the GPU
        if self.vectors_per_class > 1:
            return max(most // (self.vectors_per_class * self.pad), 1) * self.pad
        return min(1 << (most.bit_length() - 1), FORWARD_CLASSES)

    def _rows_of(self, x: Tensor, place: slice) -> Tensor:
        """The vectors of a chunk of classes, or what belongs to them."""
        return x[place.start * self.vectors_per_class : place.stop * self.vectors_per_class]

    def _nearest_own_rows(self) -> Tensor:
        """(B,) which class vector is the nearest one of a sample's own class."""
        many = self.vectors_per_class
        if many == 1:
            return self.labels
        rows = self.labels.long()[:, None] * many + torch.arange(many, device=self.labels.device)
        own = torch.nn.functional.normalize(self.w[rows].float(), dim=2)
        nearest = (own @ self.z.float()[:, :, None]).squeeze(2).argmax(1)
        return rows.gather(1, nearest[:, None]).squeeze(1)

    def chunks(self, size: int) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """Each chunk of classes: number, place, and the samples' own classes as ranges of its columns."""
        if size not in self.ranges:
            self.ranges[size] = self._find_ranges(size)
        for k, (begin, end) in enumerate(zip(*self.ranges[size], strict=True)):
            yield k, slice(k * size, min((k + 1) * size, self.num_classes)), begin, end

    def _find_ranges(self, size: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Begin and end of the samples' own classes among the columns of each chunk of so many classes."""
        padded, many = len(self.target_class), cdiv(self.num_classes, size)
        begin, end = torch.empty(2, many, padded, dtype=torch.int32, device=self.target_class.device).unbind()
        self.cache.launch(
            f"ranges {size}",
            class_ranges_kernel,
            (self.target_class, begin, end),
            lambda: Launch((padded // SMALL_BLOCK, many), (size, padded), {"SIZE": SMALL_BLOCK}),
        )
        return begin.unbind(), end.unbind()

    def _read_classes(self, name: str, place: slice, buffer: GradientBuffer | None) -> ClassOperands:
        """Normalized vectors of a chunk in the backward pass."""
        many, rows = self.vectors_per_class, self._padded(place.stop - place.start)
        whole = slice(place.start * many, place.stop * many)
        found = None if buffer is None else buffer.read(whole, rows * many)
        return self.normalize_classes(name, place) if found is None else found

    def _padded(self, n: int) -> int:
        """Classes of a chunk and what fills it up."""
        return cdiv(n, self.pad) * self.pad

    def _negatives_config(self, tile: TileConfig) -> NegativesConfig:
        return NegativesConfig(tile, self.precision, self.rows.head_dim, online=self.online)

    def _operands(self, config: NegativesConfig, vectors: ClassOperands) -> tuple:
        """Samples and a chunk of class vectors."""
        rows, tile = self.rows, config.tile
        return tensor_descriptors(
            tile.use_tma, config.block_k, (rows.hi, rows.lo, tile.block_m), (vectors.hi, vectors.lo, tile.block_n)
        )

    def _multiply(self, a: Tensor, a_lo: Tensor, b: Tensor, b_lo: Tensor, out: Tensor | None = None) -> Tensor:
        """a·b in float32, added to ``out`` where that is given."""
        found = matmul_float32(a, b, out)
        if self.precision == "bf16x3":
            matmul_float32(a, b_lo, found)
            matmul_float32(a_lo, b, found)
        return found

    def normalize_classes(self, name: str, place: slice, buffer: GradientBuffer | None = None) -> ClassOperands:
        """Those of a chunk, which then stay in the buffer where there is room.

        Of several vectors per class, the first ones of all classes come first, padded; then the second ones, and so on.
        """
        w, rows, many = self._rows_of(self.w, place), self.rows, self.vectors_per_class
        whole, padded = slice(place.start * many, place.stop * many), self._padded(place.stop - place.start)
        room = None if buffer is None else buffer.allocate(whole, padded * many, rows.hi)
        hi = room
        if hi is None:
            hi = torch.empty(padded * many, rows.head_dim, dtype=rows.hi.dtype, device=w.device)
        lo = torch.empty_like(hi) if self.precision == "bf16x3" else hi
        inverse_norm = torch.empty(padded * many, device=w.device)
        for v in range(many):
            at = slice(v * padded, (v + 1) * padded)
            of_kind = name if many == 1 else f"{name}, {v}"
            self._launch_normalize_classes(of_kind, w[v::many], hi[at], lo[at], inverse_norm[at])
        vectors = ClassOperands(hi, lo, inverse_norm)
        if buffer is not None and room is not None:
            buffer.store(whole, vectors)
        return vectors

    def _launch_normalize_classes(self, name: str, w: Tensor, hi: Tensor, lo: Tensor, inverse_norm: Tensor) -> None:
        (n, d), block = w.shape, select_row_block(self.rows.head_dim)
        self.cache.launch(
            name,
            normalize_classes_kernel,
            (w, hi, lo, inverse_norm),
            lambda: Launch(
                (len(hi) // block.rows,),
                (n, d, w.stride(0)),
                {
                    "HEAD_DIM": self.rows.head_dim,
                    "BLOCK": block.columns,
                    "ROWS": block.rows,
                    "PRECISION": self.precision,
                    "num_warps": block.num_warps,
                },
            ),
            (self.class_scale,),
        )

    def normalize_classes_backward(
        self, name: str, g: Tensor, w: Tensor, inverse_norm: Tensor, stats: Tensor, out: Tensor
    ) -> None:
        """Gradient of class vectors as they are from that of the normalized ones."""
        n, d = w.shape
        block = select_row_block(d)
        self.cache.launch(
            name,
            normalize_classes_backward_kernel,
            (g, w, inverse_norm, stats, out),
            lambda: Launch(
                (cdiv(n, block.rows),),
                (n, d, g.stride(0), w.stride(0), out.stride(0)),
                {"BLOCK": block.columns, "ROWS": block.rows, "num_warps": block.num_warps},
            ),
        )

    def _add_target_gradient(self, g: Tensor, stats: Tensor, dz: Tensor) -> Tensor:
        """The own class's part of ``dz``, in place, and (B, d) of the own class's vector."""
        rows, w = self.rows, self.w
        dw_target = torch.empty(rows.n, rows.d, dtype=w.dtype, device=w.device)
        block = select_row_block(rows.head_dim)
        inputs = (rows.normalized, w, self.target_row, self.target_inverse_norm, rows.order)
        self.cache.launch(
            "target backward",
            target_cosine_backward_kernel,
            (*inputs, g, stats, dz, dw_target),
            lambda: Launch(
                (cdiv(rows.n, block.rows),),
                (rows.n, rows.d, w.stride(0)),
                {
                    "HEAD_DIM": rows.head_dim,
                    "BLOCK": block.columns,
                    "ROWS": block.rows,
                    "num_warps": block.num_warps,
                },
            ),
        )
        return dw_target


@triton.jit
def target_cosine_kernel(
    Z, W, LABELS, ORDER, TARGET, TARGET_INVERSE_NORM, TARGET_CLASS, n, d, stride,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of each sample: the cosine to its own class, 1 / the length of that vector, and which class it is.

    Grid: (padded / ROWS,). A program owns ROWS samples of TARGET_INVERSE_NORM (padded,) float32, TARGET_CLASS
    (padded,) int64, −1 for padding, and TARGET (n,) float32 in the order in which samples came. Z (padded, HEAD_DIM)
    float32; W (C, d) of any float type. Cost: two rows read a sample.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    source = tl.load(ORDER + row, mask=real, other=0)
    at = tl.load(LABELS + source, mask=real, other=-1).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = real[:, None] & (c < d)[None, :]
    z = tl.load(Z + row.to(tl.int64)[:, None] * HEAD_DIM + c[None, :], mask=inside, other=0.0)
    w = tl.load(W + at[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    w, inverse_norm = normalize_rows(w)
    tl.store(TARGET + source, tl.sum(z * w, 1), mask=real)
    tl.store(TARGET_INVERSE_NORM + row, inverse_norm)
    tl.store(TARGET_CLASS + row, at)


@triton.jit
def target_cosine_backward_kernel(
    Z, W, TARGET_CLASS, TARGET_INVERSE_NORM, ORDER, G, STATS, DZ, DW_TARGET, n, d, stride,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The own class's part of the gradients.

    Grid: (n / ROWS,). A program owns ROWS samples of DZ (padded, HEAD_DIM) float32, in place, times STATS[0] as it is
    undone what scaled it, and of DW_TARGET (n, d), the gradient of the own class's vector, in the order in which
    samples came. Cost: three rows read and two written a sample.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < n
    source = tl.load(ORDER + row, mask=real, other=0).to(tl.int64)
    g = tl.load(G + source, mask=real, other=0.0)[:, None]
    at = tl.load(TARGET_CLASS + row, mask=real, other=0)
    inverse_norm = tl.load(TARGET_INVERSE_NORM + row, mask=real, other=0.0)[:, None]
    c = tl.arange(0, BLOCK)
    inside = real[:, None] & (c < d)[None, :]
    here = row.to(tl.int64)[:, None] * HEAD_DIM + c[None, :]
    z = tl.load(Z + here, mask=inside, other=0.0)
    w = tl.load(W + at[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32) * inverse_norm
    dz = tl.load(DZ + here, mask=inside, other=0.0) * tl.load(STATS)
    tl.store(DZ + here, dz + w * g, mask=inside)
    dw = (z - w * tl.sum(w * z, 1)[:, None]) * (inverse_norm * g)
    tl.store(DW_TARGET + source[:, None] * d + c[None, :], dw.to(DW_TARGET.dtype.element_ty), mask=inside)


@triton.jit
def class_ranges_kernel(TARGET_CLASS, POS_BEGIN, POS_END, chunk, padded, SIZE: tl.constexpr):
    """The own class of each sample as a range of columns in each chunk of classes, most of them empty.

    Grid: (padded / SIZE, chunks). A program owns SIZE samples of one chunk of POS_BEGIN and POS_END, (chunks, padded)
    int32 each.
    """
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    k = tl.program_id(1)
    at = tl.load(TARGET_CLASS + row) - k.to(tl.int64) * chunk
    to = k.to(tl.int64) * padded + row
    tl.store(POS_BEGIN + to, tl.minimum(tl.maximum(at, 0), chunk).to(tl.int32))
    tl.store(POS_END + to, tl.minimum(tl.maximum(at + 1, 0), chunk).to(tl.int32))


@triton.jit
def class_logsumexp_kernel(
    PARTIAL, ORDER, LSE_SORTED, OUT, n, padded, splits, ONLINE: tl.constexpr, SIZE: tl.constexpr
):
    """Log-sum-exp over the other classes, -inf where there are none.

    Grid: (padded / SIZE,). A program owns SIZE samples of LSE_SORTED (padded,) float32 in label order and of OUT (n,)
    float32 in the order in which samples came. PARTIAL: what `forward.negatives_forward` left of all chunks.
    """
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    real = row < n
    if ONLINE:
        lse = merge_logsumexp(PARTIAL, row, padded, splits, SIZE) * LN2
    else:
        lse = tl.log(merge_sums(PARTIAL, row, padded, splits, 0, SIZE))
    tl.store(LSE_SORTED + row, lse)
    tl.store(OUT + tl.load(ORDER + row, mask=real, other=0), lse, mask=real)


@triton.jit
def class_row_state_kernel(
    G, LSE_SORTED, ORDER, ROW_STATE, STATS, n, padded, undo_samples, undo_classes,
    ONLINE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What multiplies each row of probabilities; one scale for all of dL/ds, and what undoes it.

    Grid: (1,). Writes two lines of ROW_STATE (9, padded), see `primitives`, and STATS (3,) float32: the largest |g|
    times what undoes the scale of samples' and of classes' gradients, and itself.
    """
    most = tl.zeros((SIZE,), tl.float32)
    for start in range(0, padded, SIZE):
        row = start + tl.arange(0, SIZE)
        there = row < padded
        lse = tl.load(LSE_SORTED + row, mask=there, other=-float("inf"))
        source = tl.load(ORDER + row, mask=row < n, other=0)
        g = tl.load(G + source, mask=row < n, other=0.0)
        alone = (row >= n) | (lse == -float("inf"))
        g = tl.where(alone, 0.0, g)
        lse = tl.where(alone, 0.0, lse)
        most = tl.maximum(most, tl.abs(g))
        tl.store(ROW_STATE + SUM_GRAD * padded + row, g if ONLINE else g * tl.exp(-lse), mask=there)
        tl.store(ROW_STATE + LSE * padded + row, tl.where(alone, LSE_DISABLED, lse * KERNEL_LOG2E), mask=there)
    largest = tl.max(most, 0)
    largest = tl.where(largest > 0, largest, 1.0)
    tl.store(STATS, largest * undo_samples)
    tl.store(STATS + 1, largest * undo_classes)
    tl.store(STATS + 2, largest)


@triton.jit
def normalize_classes_kernel(
    W, HI, LO, INVERSE_NORM, n, d, stride, operand_scale,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Normalize and split a block of class vectors.

    Grid: (padded / ROWS,). A program reads ROWS rows of W (n, d), of any float type, and owns them in HI and LO
    (padded, HEAD_DIM) of PRECISION and INVERSE_NORM (padded,) float32. Cost: one read of W, 2 or 4 bytes written an
    entry.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (row < n)[:, None] & (c < d)[None, :]
    w = tl.load(W + row.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    w, inverse_norm = normalize_rows(w)
    tl.store(INVERSE_NORM + row, inverse_norm)
    at = row.to(tl.int64)[:, None] * HEAD_DIM + c[None, :]
    there = (c < HEAD_DIM)[None, :] & (row >= 0)[:, None]
    w = w * operand_scale
    hi = w.to(HI.dtype.element_ty)
    tl.store(HI + at, hi, mask=there)
    if PRECISION == "bf16x3":
        tl.store(LO + at, (w - hi.to(tl.float32)).to(tl.bfloat16), mask=there)


@triton.jit
def normalize_classes_backward_kernel(
    G, W, INVERSE_NORM, STATS, OUT, n, d, stride, stride_w, stride_out, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Take away what would only change a class vector's length.

    Grid: (n / ROWS,). A program owns ROWS rows of OUT (n, d), of W's type. G: float32 gradient of the normalized
    vectors, times what STATS[1] undoes. Cost: one read of G and W, one write of OUT.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (row < n)[:, None] & (c < d)[None, :]
    wide_row = row.to(tl.int64)[:, None]
    g = tl.load(G + wide_row * stride + c[None, :], mask=inside, other=0.0)
    inverse_norm = tl.load(INVERSE_NORM + row, mask=row < n, other=0.0)[:, None]
    w = tl.load(W + wide_row * stride_w + c[None, :], mask=inside, other=0.0).to(tl.float32) * inverse_norm
    g = (g - w * tl.sum(w * g, 1)[:, None]) * (inverse_norm * tl.load(STATS + 1))
    tl.store(OUT + wide_row * stride_out + c[None, :], g.to(OUT.dtype.element_ty), mask=inside)
