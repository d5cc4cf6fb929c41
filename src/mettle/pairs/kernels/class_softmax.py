# pyright: reportMissingImports=false
"""Margin softmax over any number of classes, chunk by chunk.

    target = ẑ·ŵ_y          far = log Σ_{c ≠ y} e^{scale · ẑ·ŵ_c}

Both with gradient to samples and class vectors; margin and loss stay with the caller. Class vectors are normalised
chunk by chunk, never as a second copy: in half precision they wait for the way back where their gradient will be. Of
the B × C logits only B × chunk exist at once, and only on the way back.
Samples are sorted by class, so that a block of them has its own classes in one range of columns.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.kernels.backward import far_scores
from mettle.pairs.kernels.class_rows import (
    attract_kernel,
    class_project_kernel,
    class_rows_kernel,
    finish_kernel,
    own_kernel,
    ranges_kernel,
    weights_kernel,
)
from mettle.pairs.kernels.config import MANY, Shape, choice, parts
from mettle.pairs.kernels.forward import far_forward
from mettle.pairs.kernels.gradient_buffer import Vectors, Waiting
from mettle.pairs.kernels.launch import aligned, divided, flat, script, sides
from mettle.pairs.kernels.operands import PAD, SMALL, prepared, projected, span, width
from mettle.pairs.kernels.score_blocks import multiplied
from mettle.pairs.kernels.spec import EXPONENT, LOG2E

FORWARD = 1 << 18  # classes of a chunk on the way there
WRITTEN = 1 << 26  # entries of h that are written at once on the way back: few chunks, few launches
LEAST = 1 << 12  # classes of a chunk on the way back
ROOM = 16384.0  # h reaches this at most: only one end of a pair counts
SMALL_BLOCK = 64  # samples of a program that does little with each


def fused_class_rows(
    z: Tensor, w: Tensor, labels: Tensor, scale: float, half: bool = False, unit: bool = False, mode: str | None = None
) -> tuple[Tensor, Tensor]:
    """(B,) cosine to the own class and (B,) log-sum-exp over the others, as `mettle.pairs.classes.class_rows`.

    Args:
        z: (B, d) samples, of any length; where ``unit`` is off they keep it.
        w: (C, d) class vectors of any length; they are normalised here.
        labels: (B,) class of each sample, from 0 to C − 1.
        scale: of the cosines.
        half: products in float16; else as precise as float32.
        unit: bring samples to length 1 here.
        mode: overrides ``half``.
    """
    if w.ndim != 2 or z.ndim != 2 or w.shape[1] != z.shape[1]:
        raise InputError(f"class vectors must be (C, d) with the samples' d: got {tuple(w.shape)} for {tuple(z.shape)}")
    mode = mode or ("exact" if not z.is_cuda else "half" if half else "split")
    with torch.cuda.device_of(z):
        learns = w.requires_grad and torch.is_grad_enabled()
        return _Rows.apply(z, w, labels, float(scale), unit, mode, learns)  # type: ignore[return-value]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, w: Tensor, labels: Tensor, scale: float, unit: bool, mode: str, learns: bool):  # type: ignore[override]
        ctx.work = _Work(z.detach(), w.detach(), labels, scale, unit, mode)
        ctx.save_for_backward(z, w)
        return ctx.work.forward(learns)

    @staticmethod
    def backward(ctx, g_target: Tensor, g_far: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise InputError("the fused engine has first derivatives only: do not pass create_graph=True")
        z, _ = ctx.saved_tensors  # looked at so that torch notices a change in place
        g_target, g_far = (flat(g.float()) for g in (g_target, g_far))
        return *ctx.work.backward(g_target, g_far, z, ctx.needs_input_grad[1]), None, None, None, None, None


class _Work:
    """One call."""

    def __init__(self, z: Tensor, w: Tensor, labels: Tensor, scale: float, unit: bool, mode: str):
        self.mode, self.scale, self.unit = mode, scale, unit
        self.online = scale > EXPONENT or not unit  # samples as they come may be of any length
        # What samples and class vectors carry, so that products are logits in base 2: long samples nothing.
        self.by, self.by_classes = (math.sqrt(LOG2E * scale),) * 2 if unit else (1.0, LOG2E * scale)
        self.w, self.z = aligned(w if w.stride(1) == 1 else w.contiguous()), aligned(z)
        self.labels = flat(labels)
        given = (self.z, self.w, self.labels)
        self.script = script(("classes", scale, unit, mode, WRITTEN, FORWARD, LEAST), given)
        self.choice = choice(mode, width(z.shape[1]), heavy=self.online, many=len(w) >= MANY)
        self.whole = SMALL if mode == "exact" else PAD
        self.waiting: Waiting | None = None

    def forward(self, learns: bool) -> tuple[Tensor, Tensor]:
        """Targets and log-sum-exps; ``learns``: the gradient of the class vectors will be asked for."""
        rows = self.rows = prepared(self.z, self.labels, None, self.mode, self.unit, by=self.by, script=self.script)
        padded, device, shape = len(rows.full), rows.full.device, self.choice.visiting(False)
        target, far = torch.empty(rows.n, device=device), torch.empty(rows.n, device=device)
        self.inverse, self.lse = torch.empty(padded, device=device), torch.empty(padded, device=device)
        self.at = torch.empty(padded, dtype=torch.int64, device=device)
        block, size, warps = span(rows.width)
        self.script.launch(
            "own",
            own_kernel,
            (rows.full, self.w, self.labels, rows.order, target, self.inverse, self.at),
            lambda: (
                (padded // size,),
                (rows.n, rows.d, self.w.stride(0)),
                {"WIDTH": rows.width, "BLOCK": block, "ROWS": size, "num_warps": warps},
            ),
        )
        if learns and self.mode != "split":  # two halves take all of the room
            self.waiting = Waiting(torch.empty_like(self.w), FORWARD, self.step)
        blocks = parts(rows.n, shape.rows)
        each = divided(blocks, parts(min(FORWARD, len(self.w)), shape.columns), device, 4)
        partial = torch.empty(parts(len(self.w), FORWARD), each, 2, padded, device=device)
        for k, place, lo, hi in self.chunks(FORWARD):
            n, made = place.stop - place.start, self.normalised(f"rows {k}", place, self.waiting)
            operands = self.operands(shape, made)
            self.script.launch(
                f"far {k}",
                far_forward,
                (*operands, *operands, lo, hi, rows.inverse, partial[k]),
                lambda n=n: (
                    (blocks, each),
                    (rows.n, n, padded, each, *5 * (0.0,)),
                    self.flags(shape) | {"HALF": False, "WARPS": 1, "FIRM": shape.firm},
                ),
            )
        self.script.launch(
            "finish",
            finish_kernel,
            (partial, rows.order, self.lse, far),
            lambda: (
                (padded // SMALL_BLOCK,),
                (rows.n, padded, len(partial) * each),
                {"ONLINE": self.online, "SIZE": SMALL_BLOCK},
            ),
        )
        return target, far

    def backward(self, g_target: Tensor, g_far: Tensor, like: Tensor, classes: bool) -> tuple[Tensor, Tensor | None]:
        """Gradients of the samples and, where asked for, of the class vectors."""
        rows, shape = self.rows, self.choice.backward
        if not self.choice.written:  # the rows' gradient is not held: tiles as in the forward pass
            shape = self.choice.forward
        n, padded, device = rows.n, len(rows.full), rows.full.device
        table, stats = torch.empty(8, padded, device=device), torch.empty(3, device=device)
        self.script.launch(
            "weights",
            weights_kernel,
            (g_far, self.lse, rows.order, table, stats),
            lambda: (
                (1,),
                (n, padded, self.scale / (ROOM * self.by_classes), self.scale / (ROOM * self.by)),
                {"ONLINE": self.online, "SIZE": 1024, "num_warps": 8},
            ),
        )
        dz = torch.zeros(padded, rows.width, device=device)
        waiting, self.waiting = self.waiting, None  # to be written over: a second time back must not find them
        dw = None
        if classes:
            dw = torch.empty_like(self.w) if waiting is None else waiting.gradient
        for k, place, lo, hi in self.chunks(self.step):
            m, made = place.stop - place.start, self.vectors(f"rows {k}, back", place, waiting)
            high, low, inverse = made
            wide = len(high)
            h = torch.empty(padded, wide, dtype=high.dtype, device=device)
            rest = torch.empty_like(h) if self.mode == "split" else h
            operands = self.operands(shape, made)
            self.script.launch(
                f"scores {k}",
                far_scores,
                (*operands, *operands, lo, hi, table, table, stats, h, rest),
                lambda m=m, wide=wide: (
                    (padded // shape.rows, wide // shape.columns),
                    (0, 0, wide, n, m, padded, wide, *4 * (0.0,), ROOM),
                    self.flags(shape) | {"LIVE": False, "ROWS": True, "COLUMNS": False},
                ),
            )
            self.product(h[:, :m], rest[:, :m], high[:m], low[:m], dz)  # where vectors are missing, h may be infinite
            if dw is not None:
                sent = self.product(h.T, rest.T, rows.high, rows.low)
                self.projected(f"project {k}", sent, self.w[place], inverse, stats, dw[place])
        pull = self.attracted(g_target, stats, dz)
        if dw is not None:
            dw.index_add_(0, self.labels, pull)
        return projected(rows, dz, None, stats, like, self.unit, script=self.script), dw

    @property
    def step(self) -> int:
        """Classes of a chunk on the way back, a power of two: so many of them are one on the way there."""
        most = max(LEAST, WRITTEN // len(self.at))
        return min(1 << (most.bit_length() - 1), FORWARD)

    def chunks(self, size: int) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """Each chunk of classes: number, place, and the samples' own classes as ranges."""
        padded, many = len(self.at), parts(len(self.w), size)
        lo, hi = torch.empty(2, many, padded, dtype=torch.int32, device=self.at.device).unbind()
        self.script.launch(
            f"ranges {size}",
            ranges_kernel,
            (self.at, lo, hi),
            lambda: ((padded // SMALL_BLOCK, many), (size, padded), {"SIZE": SMALL_BLOCK}),
        )
        for k in range(many):
            yield k, slice(k * size, min((k + 1) * size, len(self.w))), lo[k], hi[k]

    def vectors(self, name: str, place: slice, waiting: Waiting | None) -> Vectors:
        """Those of a chunk on the way back."""
        found = None if waiting is None else waiting.read(place, self.padded(place.stop - place.start))
        return self.normalised(name, place) if found is None else found

    def padded(self, n: int) -> int:
        """Classes of a chunk and what fills it up."""
        return parts(n, self.whole) * self.whole

    def flags(self, shape: Shape) -> dict:
        """What the kernels over all pairs are told."""
        wide = self.rows.width
        return {
            "WIDTH": wide, "BK": shape.depth, "WIDTH2": wide, "BK2": shape.depth, "BM": shape.rows,
            "BN": shape.columns, "MODE": self.mode, "TMA": shape.tma, "FAR": "plain", "SQUARE": False,
            "SHAPE": "hadsell", "TWO": False, "OTHER": False, "ONLINE": self.online,
            "num_warps": shape.warps, "num_stages": shape.stages,
        }  # fmt: skip

    def operands(self, shape: Shape, made: Vectors) -> tuple:
        """Samples and a chunk of class vectors."""
        rows = self.rows
        return sides(shape.tma, shape.depth, (rows.high, rows.low, shape.rows), (made.high, made.low, shape.columns))

    def product(self, a: Tensor, a_low: Tensor, b: Tensor, b_low: Tensor, onto: Tensor | None = None) -> Tensor:
        """a·b in float32, added to ``onto`` where that is given."""
        found = multiplied(a, b, onto)
        if self.mode == "split":
            multiplied(a, b_low, found)
            multiplied(a_low, b, found)
        return found

    def normalised(self, name: str, place: slice, waiting: Waiting | None = None) -> Vectors:
        """Those of a chunk as it is, which then wait for the way back where there is room."""
        w, rows = self.w[place], self.rows
        (n, d), padded = w.shape, self.padded(place.stop - place.start)
        room = None if waiting is None else waiting.room(place, padded, rows.high)
        high = torch.empty(padded, rows.width, dtype=rows.high.dtype, device=w.device) if room is None else room
        low = torch.empty_like(high) if self.mode == "split" else high
        inverse = torch.empty(padded, device=w.device)
        block, size, warps = span(rows.width)
        flags = {"WIDTH": rows.width, "BLOCK": block, "ROWS": size, "MODE": self.mode, "num_warps": warps}
        self.script.launch(
            name,
            class_rows_kernel,
            (w, high, low, inverse),
            lambda: ((padded // size,), (n, d, w.stride(0), self.by_classes), flags),
        )
        made = Vectors(high, low, inverse)
        if waiting is not None and room is not None:
            waiting.keep(place, made)
        return made

    def projected(self, name: str, g: Tensor, w: Tensor, inverse: Tensor, stats: Tensor, out: Tensor) -> None:
        """Gradient of class vectors as they are from that of the normalised ones."""
        n, d = w.shape
        block, size, warps = span(d)
        self.script.launch(
            name,
            class_project_kernel,
            (g, w, inverse, stats, out),
            lambda: (
                (parts(n, size),),
                (n, d, g.stride(0), w.stride(0), out.stride(0)),
                {"BLOCK": block, "ROWS": size, "num_warps": warps},
            ),
        )

    def attracted(self, g: Tensor, stats: Tensor, dz: Tensor) -> Tensor:
        """The own class's part of ``dz``, in place, and (B, d) of the own class's vector."""
        rows, w = self.rows, self.w
        pull = torch.empty(rows.n, rows.d, dtype=w.dtype, device=w.device)
        block, size, warps = span(rows.width)
        self.script.launch(
            "attract",
            attract_kernel,
            (rows.full, w, self.at, self.inverse, rows.order, g, stats, dz, pull),
            lambda: (
                (parts(rows.n, size),),
                (rows.n, rows.d, w.stride(0)),
                {"WIDTH": rows.width, "BLOCK": block, "ROWS": size, "num_warps": warps},
            ),
        )
        return pull
