# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""One call of the fused engine: what is launched, in which order, with which numbers.

    prepare ─ far ─ near ─ mean          forward:  4 launches
    far ─ near ─ project                 backward: 3 launches, and one to clear where sums begin anew

Backward owns its rows: nobody else adds to them, so the order of each sum is fixed. Forward visits each pair once and
adds it to both ends where the table says so, unless torch is asked for deterministic algorithms: then every run is
identical bit for bit.
"""

from typing import Any

import torch
from torch import Tensor

from mettle.pairs.kernels.backward import far_backward
from mettle.pairs.kernels.config import MANY, Choice, Shape, choice, parts
from mettle.pairs.kernels.forward import far_forward
from mettle.pairs.kernels.launch import aligned, divided, evened, script, sides
from mettle.pairs.kernels.operands import Rows, prepared, projected
from mettle.pairs.kernels.positives import near_backward, near_forward
from mettle.pairs.kernels.row_sums import mean_kernel, shift_kernel
from mettle.pairs.kernels.score_blocks import written
from mettle.pairs.kernels.spec import Form

FEW = 16  # rows of a block of positives
BESIDE = 16  # columns of a block of positives
SUMMED = 1024  # columns that tensor cores sum up with the accuracy of float32
SPARE = 1 << 23  # numbers of partial gradients
ROOM = 8192.0  # h reaches twice this at most: float16 ends at 65504
ONCE_FROM = 8192  # rows from which visiting each pair once is worth a launch to clear the sums


def most_parts(d: int, width: int, second: int, padded: int) -> int:
    """How many partial gradients of each row may exist at once, so that a step takes 8 n d floats and 64 MB at most.

    One of the eight is the result; the rows that are compared take two of their padded widths.
    """
    rest = (7 * d - 2 * (width + second)) // width
    return max(1, min(3, rest) + SPARE // (padded * width))


class Plan:
    """What to compare and, after the forward pass, what the backward pass needs."""

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
        form, z = self.form, aligned(z)
        ref = None if ref is None else aligned(ref)
        biased = () if self.biased is None else tuple(aligned(b.detach()) for b in self.biased)
        self.fixed = torch.are_deterministic_algorithms_enabled()
        given = (z, self.labels, ref, self.ref_labels, *biased)
        self.script = script((form, self.mode, self.cut, self.fixed), given)
        self.left = self.right = self._prepared(z, "left")
        if ref is not None:
            self.right = self._prepared(ref, "right")
        self.left2 = self.right2 = None
        if biased:
            self.left2 = self.right2 = self._prepared(biased[0], "left", self.left)
            if ref is not None:
                self.right2 = self._prepared(biased[1], "right", self.right)
        other = self.left2.width if self.left2 else 0
        self.many = self.left.n >= MANY
        self.choice = self.cut or choice(
            self.mode, self.left.width, other=other, heavy=form.heavy, two=form.looks_twice, many=self.many
        )
        self.shift = self.left.inverse
        if form.far == "relative":
            own, splits = self._sums("own", "plain", False, self.left, self.right, square=True)
            other, others = self._sums("other", "plain", False, self.left2, self.right2, square=True)
            self.shift, padded = torch.empty_like(self.left.inverse), len(self.left.inverse)
            self.script.launch(
                "shift",
                shift_kernel,
                (own, other, self.shift),
                lambda: ((padded // 64,), (padded, splits, others), {"SIZE": 64}),
            )
        return self._finish(*self._sums("far", form.far, form.two, self.left, self.right, self.left2, self.right2))

    def _prepared(self, z: Tensor, side: str, like: Rows | None = None) -> Rows:
        """One side; a second encoder's rows in the order of the first one's."""
        labels, other = (self.labels, self.ref_labels) if side == "left" else (self.ref_labels, self.labels)
        assert labels is not None
        name = side if like is None else f"{side}, second"
        return prepared(
            z, labels, other, self.mode, self.form.unit, by=self.form.factor, grouped=not self.fixed, like=like,
            script=self.script, name=name,
        )  # fmt: skip

    def _sums(
        self, name: str, far: str, two: bool, left: Rows, right: Rows, left2: Rows | None = None,
        right2: Rows | None = None, square: bool = False,
    ) -> tuple[Tensor, int]:  # fmt: skip
        """Partial row sums over the negatives, of one encoder or of two, or of ``square``s."""
        form, padded, device = self.form, len(left.full), left.full.device
        cut = choice(self.mode, left.width, many=self.many) if square else self.choice
        once = cut.forward.half and form.additive and left is right and not self.fixed
        once = once and (left.n >= ONCE_FROM or not left.full.is_cuda)
        shape = cut.visiting(once)
        blocks = parts(left.n, shape.rows)
        splits = divided(blocks, parts(right.n, shape.columns), device, 16)
        make = torch.zeros if once else torch.empty
        partial = make(1 if once else splits, 2, padded, device=device)
        self.script.launch(
            name,
            far_forward,
            (*self._operands(left, right, left2, right2, shape), left.lo, left.hi, self.shift, partial),
            lambda: (
                (blocks, splits),
                (left.n, right.n, padded, splits, *form.numbers, 0.0),
                {
                    **self._widths(shape, left, left2), "BM": shape.rows, "BN": shape.columns, "MODE": self.mode,
                    "TMA": shape.tma, "FAR": far, "SQUARE": square or form.beta == 1, "SHAPE": form.shape, "TWO": two,
                    "OTHER": left2 is not None, "ONLINE": form.online, "HALF": once, "WARPS": shape.row_warps,
                    "FIRM": shape.firm, "num_warps": shape.warps, "num_stages": shape.stages,
                },
            ),
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
        self.script.launch(
            "near",
            near_forward,
            (
                left.full, right.full, left.lo, left.hi, partial, self.shift, left.order, values, defined, self.table,
                sums,
            ),
            lambda: (
                (blocks,),
                (left.n, right.n, padded, splits, *self._pull(), float(form.scale), *self._ends()),
                {
                    **self._near(), "FAR": form.far, "ONLINE": form.online, "BY": form.by, "MEAN_ALL": form.mean_all,
                    "COUNT": form.count_weight, "num_warps": 1 if left.width <= 128 else 2,
                },
            ),
        )  # fmt: skip
        self.script.launch(
            "mean", mean_kernel, (sums, self.stats, mean), lambda: ((1,), (blocks,), {"SIZE": 1024, "num_warps": 8})
        )
        return values, mean, defined

    def backward(
        self, g_values: Tensor | None, g_mean: Tensor | None, z: Tensor, ref: Tensor | None, own: bool, other: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the embeddings and of the references, where asked for."""
        if g_values is None and g_mean is None:
            return None, None
        left, right, table, stats = self.left, self.right, self.table, self.stats
        factor = g_mean if g_mean is None else aligned(g_mean)
        if g_values is not None:  # a gradient for every row: into the coefficients
            anchors = g_values.float()
            if g_mean is not None:
                anchors = anchors + g_mean * stats[1]
            by = torch.nn.functional.pad(anchors[left.order[: left.n]], (0, table.shape[1] - left.n))
            table = torch.cat([table[:4] * by, table[4:]])
            largest = stats[2] * by.abs().amax()
            stats = torch.stack([stats[0], stats[1], torch.where(largest > 0, largest, 1.0)])
            factor = None
        name = "" if factor is None else f"mean {factor.dtype}"
        dz = dref = None
        if own:
            g = self._gradient(left, right, self.left2, self.right2, table, stats, True, left is right)
            dz = projected(left, g, factor, stats, z, self.form.unit, script=self.script, name=f"left {name}")
            del g
        if other and ref is not None:
            g = self._gradient(right, left, self.right2, self.left2, table, stats, False, True)
            dref = projected(right, g, factor, stats, ref, self.form.unit, script=self.script, name=f"right {name}")
        return dz, dref

    def _gradient(
        self, a: Rows, b: Rows, a2: Rows | None, b2: Rows | None, table: Tensor, stats: Tensor, rows: bool,
        columns: bool,
    ) -> Tensor:  # fmt: skip
        """Of the prepared rows of ``a``: negatives, then positives on top."""
        form, shape, device = self.form, self.choice.backward, a.full.device
        padded, other = len(a.full), len(b.full)
        room = ROOM / (1 + 2 * form.beta)
        operands, tables = self._operands(a, b, a2, b2, shape), (table, table, stats)
        blocks = parts(a.n, shape.rows)
        most = most_parts(a.d, a.width, a2.width if a2 else 0, padded)
        splits = 1 if self.choice.written else evened(blocks, parts(b.n, shape.columns), device, shape.beside, most)
        if self.choice.written:
            flags = self._flags(shape, a, a2, rows, columns)
            entries = other * (a.width + (a2.width if a2 else 0))
            g = written(a, b, operands, tables, (*form.numbers, room), flags, shape, entries, self.script)
            g *= stats[2] * (1 / (room * form.factor))
        else:
            turn = self._turn(parts(b.n, splits * shape.columns), shape)
            make = torch.zeros if turn else torch.empty
            g = make(splits, padded, a.width, device=device)
            self.script.launch(
                f"back {rows}",
                far_backward,
                (*operands, a.lo, a.hi, *tables, g),
                lambda: (
                    (blocks, splits),
                    (a.n, b.n, padded, other, splits, *form.numbers, 0.0, room, form.factor),
                    {"FIRM": shape.firm, "TURN": turn}
                    | {k: v for k, v in self._flags(shape, a, a2, rows, columns).items() if k != "BK"},
                ),
            )
        self.script.launch(
            f"near back {rows}",
            near_backward,
            (a.full, b.full, a.lo, a.hi, table, table, g),
            lambda: (
                (parts(a.n, FEW), a.width // self._near()["BK"]),
                (a.n, b.n, padded, other, splits, *self._pull(), *self._ends()),
                {
                    **self._near(),
                    "LIVE": form.live,
                    "ROWS": rows,
                    "COLUMNS": columns,
                    "num_warps": 2,
                },
            ),
        )
        return g

    def _turn(self, tiles: int, shape: Shape) -> int:
        """How many tiles a sum of gradients may go over, 0 for all: in half precision other errors are larger."""
        most = SUMMED // shape.columns
        return most if self.mode == "split" and tiles > most else 0

    def _flags(self, shape: Shape, a: Rows, a2: Rows | None, rows: bool, columns: bool) -> dict[str, Any]:
        """Of the kernels over all pairs on the way back; ``rows`` and ``columns``: which ends count."""
        form = self.form
        return {
            **self._widths(shape, a, a2), "BM": shape.rows, "BN": shape.columns, "MODE": self.mode, "TMA": shape.tma,
            "FAR": form.far, "SQUARE": form.beta == 1, "SHAPE": form.shape, "TWO": form.looks_twice,
            "OTHER": form.second, "ONLINE": form.online, "LIVE": form.live, "ROWS": rows, "COLUMNS": columns,
            "num_warps": shape.warps, "num_stages": shape.stages,
        }  # fmt: skip

    def _operands(self, a: Rows, b: Rows, a2: Rows | None, b2: Rows | None, shape: Shape) -> tuple:
        """Both sides of both encoders; where there is one encoder, it stands for the other too."""
        widths = self._widths(shape, a, a2)
        found = sides(shape.tma, widths["BK"], (a.high, a.low, shape.rows), (b.high, b.low, shape.columns))
        if a2 is None or b2 is None:
            return (*found, *found)
        second = (a2.high, a2.low, shape.rows), (b2.high, b2.low, shape.columns)
        return (*found, *sides(shape.tma, widths["BK2"], *second))

    def _widths(self, shape: Shape, a: Rows, a2: Rows | None) -> dict[str, int]:
        second, depth = (a2 or a).width, min(shape.depth, a.width)
        return {
            "WIDTH": a.width,
            "BK": depth,
            "WIDTH2": second,
            "BK2": second if max(a.width, second) <= 128 else min(64, second),
        }

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
