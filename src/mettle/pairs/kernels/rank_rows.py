"""One rank's anchors against the embeddings of all ranks, with the whole gradient of its own embeddings.

    forward     the rows of this rank, all columns                          1 product for each pair
    between     the row state of every rank, ROW_STATE_LINES + 1 numbers a row, goes to all
    backward    the same rows: Σ_j (g_i f'(s_ij) + g_j f'(s_ij)) z_j        2 products for each pair

A pair has two ends. The end of this rank's row is known here; the other end needs the sums of its own row, which
another rank has: with them, the gradient of the embeddings of this rank comes from one kernel, and no gradient of
other ranks' embeddings is computed or sent. Without, there would be a second kernel for the columns (2 products
more), and n·d numbers to be summed over ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.kernels.config import KernelConfig
from mettle.pairs.kernels.function import PairLossCall, default_precision, on_device_of
from mettle.pairs.kernels.launch import align_tensor, flatten_tensor
from mettle.pairs.kernels.operands import normalize_backward
from mettle.pairs.kernels.primitives import ROW_STATE_LINES
from mettle.pairs.kernels.spec import LoweredSpec

Gather = Callable[[Tensor], Tensor]
"""(n, k) rows of this rank -> (m, k) rows of all ranks, in the order of their embeddings."""


def evaluate_rank_rows(
    spec: LoweredSpec,
    z: Tensor,
    labels: Tensor,
    columns: tuple[Tensor, Tensor],
    own: slice,
    gather: Gather,
    biased: tuple[Tensor, Tensor] | None = None,
    precision: str | None = None,
    config: KernelConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """One value per anchor of this rank, and where it is defined.

    Args:
        spec: what is computed.
        z: (n, d) embeddings of this rank; only they have a gradient, that of what all ranks make of their values.
        labels: (n,) theirs.
        columns: (m, d) embeddings and (m,) labels of all ranks, this one included.
        own: where the rows of this rank are among them.
        gather: how the backward pass, which every rank makes, gets rows of all ranks.
        biased: a second encoder's embeddings of this rank and of all.
        precision: overrides that of the products.
        config: overrides the sizes of tiles.
    """
    number = torch.arange(own.start, own.stop, dtype=torch.int32, device=z.device)
    biased = biased if spec.has_second_encoder else None
    precision = precision or default_precision(spec, z, columns[0])
    with on_device_of(z):
        call = RankRowsCall(spec, flatten_tensor(labels), flatten_tensor(columns[1]), biased, precision, config, number)
        values = RankRowsFunction.apply(call, gather, z, columns[0].detach(), spec.log_temperature)
    return values, call.defined  # type: ignore[return-value]


class RankRowsFunction(torch.autograd.Function):
    """The values of this rank's anchors as a function of its own embeddings."""

    @staticmethod
    def forward(ctx, call: "RankRowsCall", gather: Gather, z: Tensor, columns: Tensor, log_temperature: Tensor | None):  # type: ignore[override]
        """The values; the call knows where they are defined."""
        values, _ = call.forward(z.detach(), columns)
        ctx.call, ctx.gather = call, gather
        ctx.save_for_backward(z, log_temperature)
        return values

    @staticmethod
    def backward(ctx, g_values: Tensor):  # type: ignore[override]
        """Gradients of this rank's embeddings, and its part of that of the logarithm of the temperature."""
        if torch.is_grad_enabled():
            raise InputError("across ranks there are first derivatives only: do not pass create_graph=True")
        z, _ = ctx.saved_tensors
        with on_device_of(z):
            state = ctx.call.gradient_state(g_values)
            _, _, z_needs_grad, _, temperature_needs_grad = ctx.needs_input_grad
            dz, d_log_temperature = ctx.call.gradient(ctx.gather(state), z, temperature_needs_grad)
        return None, None, dz if z_needs_grad else None, None, d_log_temperature


class RankRowsCall(PairLossCall):
    """A call whose columns are rows of other ranks too, so that a pair has a value at both of its ends."""

    def gradient_state(self, g_values: Tensor) -> Tensor:
        """(n, ROW_STATE_LINES + 1) what the other ends of pairs must know of this rank's rows, in their order.

        The last number is the largest coefficient among all of this rank.
        """
        rows = self.rows
        self.scaled_state, largest = self.scale_row_state(g_values.float())
        found = torch.empty(rows.n, ROW_STATE_LINES + 1, device=g_values.device)
        found[rows.order[: rows.n].long(), :ROW_STATE_LINES] = self.scaled_state[:, : rows.n].T
        found[:, ROW_STATE_LINES] = largest
        return found

    def gradient(self, all_states: Tensor, z: Tensor, temperature_needs_grad: bool) -> tuple[Tensor, Tensor | None]:
        """Of this rank's embeddings, from the states of all ranks; and this rank's part of that of log temperature."""
        rows, columns, spec = self.rows, self.columns, self.spec
        column_state = torch.zeros(ROW_STATE_LINES, columns.padded, device=z.device)
        column_state[:, : columns.n] = all_states[columns.order[: columns.n].long(), :ROW_STATE_LINES].T
        largest = all_states[:, ROW_STATE_LINES].amax()
        stats = torch.stack([self.stats[0], self.stats[1], torch.where(largest > 0, largest, 1.0)])
        self.sum_scale = self._sum_scale(stats)
        g = self._gradient(rows, columns, self.rows2, self.columns2, self.scaled_state, stats, True, True, column_state)
        projections = torch.empty(rows.n, device=z.device) if temperature_needs_grad else None
        dz = normalize_backward(
            rows,
            g,
            None,
            stats,
            align_tensor(z),
            spec.normalize,
            scale=self.sum_scale / spec.temperature if self.config.scores_in_memory else 1.0,
            projections=projections,
            cache=self.cache,
            name=f"rank rows {z.dtype}{'' if projections is None else ', projections'}",
        )
        if projections is None or spec.log_temperature is None:
            return dz, None
        # Both ends of a pair are rows, here or on another rank, and each has the whole of its gradient.
        return dz, (-0.5 * projections.sum()).to(spec.log_temperature.dtype)
