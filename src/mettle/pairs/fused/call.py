# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""The fused engine: one autograd function from raw embeddings to one value per anchor and their mean.

    prepare ─ far ─ near ─ mean          forward:  4 launches
    far ─ near ─ project                 backward: 3 launches

Backward owns its rows, so nothing is added atomically there; forward visits each pair once and adds it to both ends
where the table says so, unless torch is asked for deterministic algorithms: then every run is identical bit for bit.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.fused.far import far_backward, far_forward, far_scores
from mettle.pairs.fused.form import Form, precision
from mettle.pairs.fused.launch import launch
from mettle.pairs.fused.near import mean_kernel, near_backward, near_forward, shift_kernel
from mettle.pairs.fused.prepare import Rows, prepared, projected
from mettle.pairs.fused.table import Choice, Shape, choice

LOG2E = 1.4426950408889634
FEW = 16  # rows of a block of positives
BESIDE = 32  # columns of a block of positives
ROOM = 8192.0  # h reaches twice this at most: float16 ends at 65504
WRITTEN = 1 << 25  # bytes of h that are written at once, or this many times the embeddings where that is more:
TIMES = {"half": 16, "split": 20, "exact": 8}  # enough rows of 512 columns to give every multiprocessor a block
LEAST = 4  # tiles that a split is worth
ONCE_FROM = 8192  # rows from which visiting each pair once is worth a launch to clear the sums


@dataclass(frozen=True)
class Result:
    """One value per anchor, where it is defined, and the mean over those."""

    values: Tensor
    defined: Tensor
    mean: Tensor


def fused(
    form: Form,
    z: Tensor,
    labels: Tensor,
    ref: tuple[Tensor, Tensor] | None = None,
    biased: tuple[Tensor, Tensor] | None = None,
    mode: str | None = None,
    cut: Choice | None = None,
) -> Result:
    """Evaluate a form on raw embeddings, against themselves or against ``ref``.

    ``mode`` overrides the precision of the products, ``cut`` the sizes of tiles.
    """
    others = (labels, *(ref or ()), *(biased or ()))
    if any(x.device != z.device for x in others):
        raise InputError(
            f"embeddings are on {z.device}, others on {', '.join({str(x.device) for x in others})}: use one"
        )
    biased = biased if form.second else None
    mode = mode or (precision(form, z.dtype) if z.is_cuda else "exact")
    plan = _Plan(form, labels, None if ref is None else ref[1], biased, mode, cut)
    with torch.cuda.device_of(z):
        values, mean, defined = _Fused.apply(plan, z, None if ref is None else ref[0])  # type: ignore[misc]
    return Result(values, defined, mean)


class _Fused(torch.autograd.Function):
    """Values and mean as functions of the embeddings; scores are computed again on the way back."""

    @staticmethod
    def forward(ctx, plan: "_Plan", z: Tensor, ref: Tensor | None):  # type: ignore[override]
        values, mean, defined = plan.forward(z.detach(), None if ref is None else ref.detach())
        ctx.plan = plan
        ctx.like = z.new_empty(0), None if ref is None else ref.new_empty(0)
        ctx.mark_non_differentiable(defined)
        ctx.set_materialize_grads(False)
        return values, mean, defined

    @staticmethod
    def backward(ctx, g_values: Tensor | None, g_mean: Tensor | None, _):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise InputError("the fused engine has first derivatives only: do not pass create_graph=True")
        z, ref = ctx.like
        needs = ctx.needs_input_grad
        return None, *ctx.plan.backward(g_values, g_mean, z, ref, needs[1], needs[2])


class _Plan:
    """One call: what to compare and, after the forward pass, what the backward pass needs."""

    def __init__(
        self,
        form: Form,
        labels: Tensor,
        ref_labels: Tensor | None,
        biased: tuple[Tensor, Tensor] | None,
        mode: str,
        cut: Choice | None,
    ):
        self.form, self.mode, self.cut = form, mode, cut
        self.labels, self.ref_labels, self.biased = labels, ref_labels, biased

    def forward(self, z: Tensor, ref: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Values, mean and where values are defined."""
        form = self.form
        self.left = prepared(z, self.labels, self.ref_labels, self.mode, form.unit)
        self.right = self.left
        if ref is not None:
            assert self.ref_labels is not None
            self.right = prepared(ref, self.ref_labels, self.labels, self.mode, form.unit)
        self._prepare_biased()
        self.choice = self.cut or choice(self.mode, self.left.width, other=self.left2.width if self.left2 else 0)
        self.shift = self.left.inverse
        if form.far == "relative":
            partial, splits = self._sums("twice", two=True)
            self.shift = torch.empty_like(self.left.inverse)
            launch(shift_kernel, (len(self.shift) // 64,), partial, self.shift, len(self.shift), splits, SIZE=64)
        partial, splits = self._sums(form.far, form.two)
        return self._finish(partial, splits)

    def _prepare_biased(self) -> None:
        """The second encoder's rows in the same order: the same labels sort alike."""
        self.left2: Rows | None = None
        self.right2: Rows | None = None
        if self.biased is not None:
            first, second = (b.detach() for b in self.biased)
            self.left2 = self.right2 = prepared(first, self.labels, self.ref_labels, self.mode, self.form.unit)
            if self.ref_labels is not None:
                self.right2 = prepared(second, self.ref_labels, self.labels, self.mode, self.form.unit)

    def _sums(self, far: str, two: bool) -> tuple[Tensor, int]:
        """Partial row sums over the negatives."""
        form, shape, left, right = self.form, self.choice.forward, self.left, self.right
        padded = len(left.full)
        once = shape.half and form.symmetric and left is right and not torch.are_deterministic_algorithms_enabled()
        once = once and (left.n >= ONCE_FROM or not left.full.is_cuda)
        blocks = triton.cdiv(left.n, shape.rows)
        splits = divided(blocks, triton.cdiv(right.n, shape.columns), left.full, 16)
        make = torch.zeros if once else torch.empty
        partial = make(1 if once else splits, 2, padded, device=left.full.device)
        launch(
            far_forward, (blocks, splits),
            *self._operands(left, right, self.left2, self.right2, shape), left.lo, left.hi, self.shift, partial,
            left.n, right.n, padded, splits, *self._numbers(),
            **self._widths(shape), BM=shape.rows, BN=shape.columns, MODE=self.mode, TMA=shape.tma, FAR=far,
            SQUARE=form.beta == 1, SHAPE=form.shape, TWO=two, OTHER=far in ("twice", "relative", "raw"),
            ONLINE=form.online, HALF=once, FLAT=shape.flat, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        return partial, 1 if once else splits

    def _finish(self, partial: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        form, left, right = self.form, self.left, self.right
        device, padded = left.full.device, len(left.full)
        values = torch.empty(left.n, device=device)
        defined = torch.empty(left.n, dtype=torch.bool, device=device)
        self.table = torch.empty(8, padded, device=device)
        blocks = padded // FEW
        sums, self.stats = torch.empty(blocks, 3, device=device), torch.empty(3, device=device)
        mean = torch.empty((), device=device)
        launch(
            near_forward, (blocks,),
            left.full, right.full, left.lo, left.hi, partial, self.shift, left.order, values, defined, self.table, sums,
            left.n, right.n, padded, splits, *self._pull(), float(form.scale), *self._ends(),
            **self._near(), FAR=form.far, ONLINE=form.online, BY=form.by, MEAN_ALL=form.mean_all,
            COUNT=form.count_weight, num_warps=4,
        )  # fmt: skip
        launch(mean_kernel, (1,), sums, self.stats, mean, blocks, SIZE=1024, num_warps=8)
        return values, mean, defined

    def backward(
        self, g_values: Tensor | None, g_mean: Tensor | None, z: Tensor, ref: Tensor | None, own: bool, other: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the embeddings and of the references, where asked for."""
        if g_values is None and g_mean is None:
            return None, None
        left, right, table, stats = self.left, self.right, self.table, self.stats
        if g_values is not None:  # a gradient for every row: into the coefficients
            anchors = g_values.float()
            if g_mean is not None:
                anchors = anchors + g_mean * stats[1]
            by = torch.nn.functional.pad(anchors[left.order[: left.n]], (0, table.shape[1] - left.n))
            table = torch.cat([table[:4] * by, table[4:]])
            largest = stats[2] * by.abs().amax()
            stats = torch.stack([stats[0], stats[1], torch.where(largest > 0, largest, 1.0)])
        factor = g_mean if g_values is None else None
        dz = dref = None
        both = left is right
        if own:
            g = self._gradient(left, right, self.left2, self.right2, table, table, stats, True, both)
            dz = projected(left, g, factor, stats, z, self.form.unit)
        if other and ref is not None:
            g = self._gradient(right, left, self.right2, self.left2, table, table, stats, False, True)
            dref = projected(right, g, factor, stats, ref, self.form.unit)
        return dz, dref

    def _gradient(
        self, a: Rows, b: Rows, a2: Rows | None, b2: Rows | None, row: Tensor, column: Tensor, stats: Tensor,
        rows: bool, columns: bool,
    ) -> Tensor:  # fmt: skip
        """Of the prepared rows of ``a``: negatives, then positives on top."""
        form, shape = self.form, self.choice.backward
        padded, other = len(a.full), len(b.full)
        numbers = (*self._numbers(), self._live(), ROOM / (1 + 2 * form.beta))
        flags: dict[str, Any] = {
            **self._widths(shape), "BM": shape.rows, "BN": shape.columns, "MODE": self.mode, "TMA": shape.tma,
            "FAR": form.far, "SQUARE": form.beta == 1, "SHAPE": form.shape, "TWO": form.far == "tilt",
            "OTHER": form.second, "ONLINE": form.online, "ROWS": rows, "COLUMNS": columns,
            "num_warps": shape.warps, "num_stages": shape.stages,
        }  # fmt: skip
        operands = self._operands(a, b, a2, b2, shape)
        if self.choice.written:
            splits, g = 1, self._written(a, b, operands, row, column, stats, numbers, flags)
        else:
            blocks = triton.cdiv(a.n, shape.rows)
            splits = divided(blocks, triton.cdiv(b.n, shape.columns), a.full, 2)
            g = torch.empty(splits, padded, a.width, device=a.full.device)
            flags.pop("BK")
            launch(
                far_backward, (blocks, splits), *operands, a.lo, a.hi, row, column, stats, g,
                a.n, b.n, padded, other, splits, *numbers, **flags,
            )  # fmt: skip
        near = self._near()
        wide = near["BK"]
        launch(
            near_backward, (triton.cdiv(a.n, FEW), a.width // wide),
            a.full, b.full, a.lo, a.hi, row, column, g, a.n, b.n, padded, other, splits,
            *self._pull(), *self._ends(), **near, LIVE=form.live, ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        return g

    def _written(
        self, a: Rows, b: Rows, operands: tuple, row: Tensor, column: Tensor, stats: Tensor, numbers: tuple, flags: dict
    ) -> Tensor:
        """H for some rows at a time, then h·z by the library."""
        padded, other, shape = len(a.full), len(b.full), self.choice.backward
        g = torch.empty(1, padded, a.width, device=a.full.device)
        size = 2 if self.mode == "half" else 4
        room = max(WRITTEN, TIMES[self.mode] * other * a.width)
        most = max(room // (size * other) // shape.rows, 1) * shape.rows
        h = torch.empty(min(most, padded), other, dtype=a.high.dtype, device=a.full.device)
        low = torch.empty_like(h) if self.mode == "split" else h
        back = stats[2] * (1 / numbers[-1])
        for start in range(0, a.n, most):
            stop = min(start + most, padded)
            launch(
                far_scores, (triton.cdiv(other, shape.columns), (stop - start) // shape.rows),
                *operands, a.lo, a.hi, row, column, stats, h, low,
                start, a.n, b.n, padded, other, *numbers, **flags,
            )  # fmt: skip
            part = g[0, start:stop]
            multiplied(h[: stop - start], b.high, part)
            if self.mode == "split":
                part += multiplied(h[: stop - start], b.low)
                part += multiplied(low[: stop - start], b.high)
            part *= back
        return g

    def _operands(self, a: Rows, b: Rows, a2: Rows | None, b2: Rows | None, shape: Shape) -> tuple:
        """Both sides of both encoders; where there is one encoder, it stands for the other too."""
        widths = self._widths(shape)

        def pair(rows: Rows, size: int, depth: int) -> tuple[Any, Any]:
            if not shape.tma:
                return rows.high, rows.low
            from triton.tools.tensor_descriptor import TensorDescriptor  # newer than the oldest triton we run on

            high = TensorDescriptor.from_tensor(rows.high, [size, depth])
            low = high if rows.low is rows.high else TensorDescriptor.from_tensor(rows.low, [size, depth])
            return high, low

        found = (*pair(a, shape.rows, widths["BK"]), *pair(b, shape.columns, widths["BK"]))
        if a2 is None or b2 is None:
            return (*found, *found)
        return (*found, *pair(a2, shape.rows, widths["BK2"]), *pair(b2, shape.columns, widths["BK2"]))

    def _widths(self, shape: Shape) -> dict[str, int]:
        second = self.left2.width if self.left2 is not None else self.left.width
        depth = shape.depth
        return {
            "WIDTH": self.left.width,
            "BK": depth,
            "WIDTH2": second,
            "BK2": second if depth == self.left.width else min(depth, second),
        }

    def _numbers(self) -> tuple[float, float, float, float]:
        """K and the three parameters of what a negative adds."""
        form = self.form
        p0 = {"tilt": form.beta, "hinge": form.margins[1]}.get(form.far, form.slope)
        return LOG2E / form.temperature, float(p0), float(form.knee), float(form.least)

    def _live(self) -> float:
        """What multiplies the derivative of the weight: derivatives are taken times the temperature."""
        if not self.form.live:
            return 0.0
        return self.form.temperature if self.form.far == "threshold" else 1.0

    def _pull(self) -> tuple[float, float, float, float, float]:
        """1 / temperature, the bound of x, and the parameters of what a positive weighs."""
        form = self.form
        t = 1 / form.temperature
        return t, t, float(form.near_slope), float(form.near_knee), float(form.near_least)

    def _ends(self) -> tuple[float, float]:
        return float(self.form.prior), float(self.form.margins[0])

    def _near(self) -> dict[str, Any]:
        form, wide = self.form, self.left.width
        return {
            "WIDTH": wide, "BK": wide if wide <= 128 else 64, "BR": FEW, "BC": BESIDE,
            "PRECISION": "ieee" if self.mode == "exact" else "tf32x3", "FINISH": form.finish,
            "SELF": self.left is self.right, "WEIGHTED": form.weighted, "NUMERATOR": form.numerator,
            "PRIOR": form.prior > 0, "SHAPE": form.shape,
        }  # fmt: skip


def multiplied(h: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
    """h·z in float32 from operands of half the width."""
    if h.dtype == torch.float32:
        return torch.mm(h, z, out=out) if out is not None else torch.mm(h, z)
    try:
        if out is not None:
            return torch.mm(h, z, out_dtype=torch.float32, out=out)
        found = torch.mm(h, z, out_dtype=torch.float32)
    except TypeError:  # torch before 2.8 rounds what it returns to the operands' type: slower, but right
        found = torch.mm(h.float(), z.float())
    return found if out is None else out.copy_(found)


@cache
def multiprocessors(device: int) -> int:
    """How many a GPU has; asked on every launch, so asked once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def divided(blocks: int, tiles: int, like: Tensor, each: int) -> int:
    """Into how many parts to cut the columns so that every multiprocessor gets ``each`` programs, or nearly."""
    if not like.is_cuda:
        return 2 if tiles > 2 else 1
    units = multiprocessors(like.device.index)
    return max(1, min(each * units // blocks, tiles // LEAST, 64))


__all__ = ["Choice", "Result", "fused"]
