# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Margin softmax over any number of classes: the log-sum-exp over all classes but the target, chunk by chunk.

The target's logit, its margin and its loss are a gathered dot product and stay with the caller:

    loss = softplus(lse − target),   lse = log Σ_{c ≠ y} e^{scale · cos(z, w_c)}

Class vectors are normalised chunk by chunk, never as a second copy; of the B × C logits only B × chunk exist at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.fused.far import far_forward, far_scores
from mettle.pairs.fused.form import EXPONENT
from mettle.pairs.fused.launch import aligned, divided, script
from mettle.pairs.fused.plan import LOG2E
from mettle.pairs.fused.prepare import PAD, SMALL, prepared, span
from mettle.pairs.fused.table import choice, parts
from mettle.pairs.fused.written import multiplied
from mettle.pairs.similarity import unit

FORWARD = 1 << 18  # classes of a chunk on the way there
WRITTEN = 1 << 26  # entries of h that are written at once on the way back: few chunks, few launches
LEAST = 1 << 12  # classes of a chunk on the way back
ROOM = 16384.0  # h reaches this at most: only one end of a pair counts


def margin_softmax_lse(
    z_hat: Tensor, w: Tensor, labels: Tensor, scale: float, classes: Tensor | None = None, mode: str | None = None
) -> Tensor:
    """(B,) log Σ e^{scale·cos} over all classes but each row's own, with gradient to ``z_hat`` and ``w``.

    Args:
        z_hat: (B, d) unit vectors.
        w: (C, d) class vectors of any length; they are normalised here.
        labels: (B,) class of each row.
        scale: of the cosines.
        classes: (C,) which classes the rows of ``w`` are, in rising order, where only some take part.
        mode: ``half`` or ``split`` products; by default as precise as ``z_hat``.
    """
    if w.ndim != 2 or z_hat.ndim != 2 or w.shape[1] != z_hat.shape[1]:
        raise InputError(
            f"class vectors must be (C, d) with the embeddings' d: got {tuple(w.shape)} for {tuple(z_hat.shape)}"
        )
    if classes is not None and len(classes) != len(w):
        raise InputError(f"classes must name every row of w: got {len(classes)} for {len(w)}")
    if mode is None:
        mode = "exact" if not z_hat.is_cuda else "split" if z_hat.dtype == torch.float32 else "half"
    with torch.cuda.device_of(z_hat):
        return _Lse.apply(z_hat, w, labels, float(scale), classes, mode)  # type: ignore[return-value]


class _Lse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, w: Tensor, labels: Tensor, scale: float, classes: Tensor | None, mode: str):  # type: ignore[override]
        work = _Work(z.detach(), w.detach(), labels, scale, classes, mode)
        ctx.work, ctx.dtypes = work, (z.dtype, w.dtype)
        return work.forward()

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise InputError("the fused engine has first derivatives only: do not pass create_graph=True")
        dz, dw = ctx.work.backward(g, ctx.needs_input_grad[1])
        return dz.to(ctx.dtypes[0]), dw, None, None, None, None


def fused_class_rows(z: Tensor, w: Tensor, labels: Tensor, scale: float, half: bool) -> tuple[Tensor, Tensor]:
    """(B,) cosine to the own class and (B,) log-sum-exp over the others, as `mettle.pairs.classes.class_rows`."""
    with torch.cuda.device_of(z):
        return _Rows.apply(z, w, labels, float(scale), "half" if half else "split")  # type: ignore[return-value]


class _Rows(torch.autograd.Function):
    """`_Lse` and the own class in one, so that the gradient of the class vectors is written once."""

    @staticmethod
    def forward(ctx, z: Tensor, w: Tensor, labels: Tensor, scale: float, mode: str):  # type: ignore[override]
        work = _Work(z.detach(), w.detach(), labels, scale, None, mode if z.is_cuda else "exact")
        own = unit(w.detach()[labels].to(z.dtype))
        ctx.work, ctx.like = work, (z.detach(), labels)
        ctx.save_for_backward(own)
        return (z * own).sum(1), work.forward()

    @staticmethod
    def backward(ctx, g_target: Tensor, g_far: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise InputError("the fused engine has first derivatives only: do not pass create_graph=True")
        (own,), (z, labels), work = ctx.saved_tensors, ctx.like, ctx.work
        dz, dw = work.backward(g_far, ctx.needs_input_grad[1])
        dz = torch.addcmul(dz, own, g_target[:, None])
        if dw is not None:
            length = (own * work.w[labels].to(own.dtype)).sum(1, keepdim=True)
            across = z - own * (own * z).sum(1, keepdim=True)
            pull = torch.where(length > 0, across / length, 0) * g_target[:, None]
            dw.index_add_(0, labels, pull.to(dw.dtype))
        return dz.to(z.dtype), dw, None, None, None


class _Work:
    """One call."""

    def __init__(self, z: Tensor, w: Tensor, labels: Tensor, scale: float, classes: Tensor | None, mode: str):
        self.mode, self.scale, self.online = mode, scale, scale > EXPONENT
        self.w = aligned(w if w.stride(1) == 1 else w.contiguous())
        z, labels = aligned(z), aligned(labels)
        kinds = tuple((x.shape, x.stride(), x.dtype) for x in (z, self.w, labels))
        self.script = script(("classes", mode, scale, WRITTEN, FORWARD, z.device, kinds))
        self.rows = prepared(z, labels, None, mode, False, script=self.script)
        # Where each row's own class stands among the rows of w: nowhere is an empty range.
        own = labels[self.rows.order[: self.rows.n].long()]
        begin = own if classes is None else torch.searchsorted(classes, own)
        end = begin + 1 if classes is None else torch.searchsorted(classes, own, right=True)
        padding = (0, len(self.rows.full) - self.rows.n)
        self.begin, self.end = (torch.nn.functional.pad(x, padding) for x in (begin, end))
        self.choice = choice(mode, self.rows.width)
        self.lse = z.new_zeros(0)

    def chunks(self, size: int):
        """Each chunk of classes: its number, place, normalised rows, and the rows' own classes as ranges in it."""
        whole = SMALL if self.mode == "exact" else PAD
        firsts = torch.arange(0, len(self.w), size, device=self.w.device)[:, None]
        lo, hi = ((x - firsts).clamp(0, size).int() for x in (self.begin, self.end))  # of all chunks: few launches
        for k, first in enumerate(range(0, len(self.w), size)):
            n = min(size, len(self.w) - first)
            unit_rows = self.normalised(f"rows {size} {k}", self.w[first : first + n], whole)
            yield k, slice(first, first + n), n, unit_rows, lo[k], hi[k]

    def flags(self, shape) -> dict:
        """What the kernels over all pairs are told."""
        wide = self.rows.width
        return {
            "WIDTH": wide, "BK": shape.depth, "WIDTH2": wide, "BK2": shape.depth, "BM": shape.rows,
            "BN": shape.columns, "MODE": self.mode, "TMA": False, "FAR": "plain", "SQUARE": False,
            "SHAPE": "hadsell", "TWO": False, "OTHER": False, "ONLINE": self.online,
            "num_warps": shape.warps, "num_stages": shape.stages,
        }  # fmt: skip

    def forward(self) -> Tensor:
        rows, shape, partial = self.rows, self.choice.forward, []
        blocks, padded = parts(rows.n, shape.rows), len(rows.full)
        for k, _, n, (high, low, _), lo, hi in self.chunks(FORWARD):
            splits = divided(blocks, parts(n, shape.columns), rows.full.device, 4)
            part = torch.empty(splits, 2, padded, device=rows.full.device)
            operands = (rows.high, rows.low, high, low)
            self.script.launch(
                f"far {k}",
                far_forward,
                (*operands, *operands, lo, hi, rows.inverse, part),
                lambda n=n, splits=splits: (
                    (blocks, splits),
                    (rows.n, n, padded, splits, LOG2E * self.scale, 0.0, 0.0, 0.0),
                    self.flags(shape) | {"HALF": False, "WARPS": 1},
                ),
            )
            partial.append(part)
        sums = torch.cat(partial)[:, :, : rows.n]
        if self.online:
            top = sums[:, 0].amax(0)
            safe = torch.where(top == -torch.inf, 0, top)
            self.lse = (safe + ((sums[:, 0] - safe).exp2() * sums[:, 1]).sum(0).log2()) / LOG2E
        else:
            self.lse = sums[:, 0].sum(0).log()
        return torch.empty_like(self.lse).index_copy_(0, rows.order[: rows.n].long(), self.lse)

    def backward(self, g: Tensor, classes: bool) -> tuple[Tensor, Tensor | None]:
        rows, shape = self.rows, self.choice.backward
        if not self.choice.written:  # the rows' gradient is not held: tiles as in the forward pass
            shape = self.choice.forward
        n, padded, device = rows.n, len(rows.full), rows.full.device
        order = rows.order[:n].long()
        own = g.float()[order].masked_fill(self.lse == -torch.inf, 0)
        lse = torch.where(self.lse == -torch.inf, 0, self.lse)
        table = torch.zeros(8, padded, device=device)
        table[0, :n] = own if self.online else own * torch.exp(-lse)
        table[4] = 1e30  # a padded row leaves nothing
        table[4, :n] = torch.where(self.lse == -torch.inf, 1e30, lse * LOG2E)
        largest = own.abs().amax()
        stats = torch.where(largest > 0, largest, 1.0).expand(3).contiguous()
        back = stats[2:] * (self.scale / ROOM)
        dz = torch.zeros(padded, rows.width, device=device)
        dw = torch.empty_like(self.w) if classes else None
        for k, at, m, (high, low, inverse), lo, hi in self.chunks(max(LEAST, WRITTEN // padded)):
            wide = len(high)
            h = torch.empty(padded, wide, dtype=high.dtype, device=device)
            rest = torch.empty_like(h) if self.mode == "split" else h
            operands = (rows.high, rows.low, high, low)
            self.script.launch(
                f"scores {k}",
                far_scores,
                (*operands, *operands, lo, hi, table, table, stats, h, rest),
                lambda m=m, wide=wide: (
                    (wide // shape.columns, padded // shape.rows),
                    (0, 0, wide, n, m, padded, wide, LOG2E * self.scale, 0.0, 0.0, 0.0, 0.0, ROOM),
                    self.flags(shape) | {"ROWS": True, "COLUMNS": False},
                ),
            )
            self.product(h, rest, high, low, dz)
            if dw is not None:
                sent = self.product(h.T, rest.T, rows.high, rows.low)
                self.projected(f"project {k}", sent, self.w[at], inverse, back, dw[at])
        found = torch.empty(n, rows.d, device=device).index_copy_(0, order, dz[:n, : rows.d] * back)
        return found, dw

    def product(self, a: Tensor, a_low: Tensor, b: Tensor, b_low: Tensor, onto: Tensor | None = None) -> Tensor:
        """a·b in float32, added to ``onto`` where that is given."""
        found = multiplied(a, b, onto)
        if self.mode == "split":
            multiplied(a, b_low, found)
            multiplied(a_low, b, found)
        return found

    def normalised(self, name: str, w: Tensor, whole: int) -> tuple[Tensor, Tensor, Tensor]:
        """Class vectors of length 1 in the operands' precision, padded, and 1 / their lengths."""
        (n, d), rows = w.shape, self.rows
        padded = parts(n, whole) * whole
        high = torch.empty(padded, rows.width, dtype=rows.high.dtype, device=w.device)
        low = torch.empty_like(high) if self.mode == "split" else high
        inverse = torch.empty(padded, device=w.device)
        block, size, warps = span(rows.width)
        flags = {"WIDTH": rows.width, "BLOCK": block, "ROWS": size, "MODE": self.mode, "num_warps": warps}
        self.script.launch(
            name,
            class_rows_kernel,
            (w, high, low, inverse),
            lambda: ((padded // size,), (n, d, w.stride(0)), flags),
        )
        return high, low, inverse

    def projected(self, name: str, g: Tensor, w: Tensor, inverse: Tensor, back: Tensor, out: Tensor) -> None:
        """Gradient of class vectors as they are from that of the normalised ones, times ``back``."""
        n, d = w.shape
        block, size, warps = span(d)
        self.script.launch(
            name,
            class_project_kernel,
            (g, w, inverse, back, out),
            lambda: (
                (parts(n, size),),
                (n, d, g.stride(0), w.stride(0), out.stride(0)),
                {"BLOCK": block, "ROWS": size, "num_warps": warps},
            ),
        )


@triton.jit
def class_rows_kernel(
    W, HIGH, LOW, INVERSE, n, d, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Normalise and split a block of class vectors."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (row < n)[:, None] & (c < d)[None, :]
    w = tl.load(W + row.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.max(tl.abs(w), 1)
    none = size < 1e-30
    scaled = w / tl.where(none, 1.0, size)[:, None]
    length = tl.where(none, 1.0, tl.sqrt(tl.sum(scaled * scaled, 1)))
    tl.store(INVERSE + row, tl.where(none, 0.0, 1.0 / (size * length)))
    w = tl.where(none[:, None], 0.0, scaled / length[:, None]) + (w - w)
    at = row.to(tl.int64)[:, None] * WIDTH + c[None, :]
    put = (c < WIDTH)[None, :] & (row >= 0)[:, None]
    high = w.to(HIGH.dtype.element_ty)
    tl.store(HIGH + at, high, mask=put)
    if MODE == "split":
        tl.store(LOW + at, (w - high.to(tl.float32)).to(tl.bfloat16), mask=put)


@triton.jit
def class_project_kernel(
    G, W, INVERSE, BACK, OUT, n, d, stride, stride_w, stride_out, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Take away what would only change a class vector's length."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    inside = (row < n)[:, None] & (c < d)[None, :]
    far = row.to(tl.int64)[:, None]
    g = tl.load(G + far * stride + c[None, :], mask=inside, other=0.0)
    inverse = tl.load(INVERSE + row, mask=row < n, other=0.0)[:, None]
    w = tl.load(W + far * stride_w + c[None, :], mask=inside, other=0.0).to(tl.float32) * inverse
    g = (g - w * tl.sum(w * g, 1)[:, None]) * (inverse * tl.load(BACK))
    tl.store(OUT + far * stride_out + c[None, :], g.to(OUT.dtype.element_ty), mask=inside)
