"""The fused engine: one autograd function from raw embeddings to one value per anchor and their mean.

    prepare ─ negatives ─ positives ─ mean     forward:  4 launches
    negatives ─ positives ─ normalize          backward: 3 launches, and one to clear where sums begin anew

Up to `COUNTED_ROWS` rows the host takes longer than the kernels: from the third of steps that are alike, launches are
replayed (`replay`).

Backward owns its rows: nobody else adds to them, so the order of each sum is fixed. Forward visits each pair once and
adds it to both ends where the table says so, unless torch is asked for deterministic algorithms: then every run is
identical bit for bit.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.kernels.backward import gradient_through_memory, negatives_backward, positives_backward
from mettle.pairs.kernels.config import (
    LARGE_BATCH,
    POSITIVE_BLOCK,
    KernelConfig,
    NegativesConfig,
    PositivesConfig,
    TileConfig,
    balance_waves,
    cdiv,
    flush_interval,
    most_gradient_splits,
    select_config,
    split_columns,
)
from mettle.pairs.kernels.forward import (
    mean_kernel,
    mining_threshold_kernel,
    negatives_forward,
    positives_forward,
    shift_kernel,
)
from mettle.pairs.kernels.launch import (
    Launch,
    LaunchCache,
    align_tensor,
    find_launch_cache,
    flatten_tensor,
    tensor_descriptors,
)
from mettle.pairs.kernels.operands import COUNTED_ROWS, Operands, normalize_backward, prepare_operands, sort_labels
from mettle.pairs.kernels.primitives import GRADIENT_LINES, ROW_STATE_LINES
from mettle.pairs.kernels.replay import LaunchRecorder, RecordedPass, RecordedStep
from mettle.pairs.kernels.spec import LoweredSpec, choose_precision
from mettle.pairs.similarity import differentiable_gradients, warn_dense_recomputation

SYMMETRIC_ROWS = 8192  # from which visiting each pair once is worth a launch to clear the sums
ZERO = 0.0  # an argument, so that the compiler does not know it: see `primitives.load_rows`


class SpecResult(NamedTuple):
    """One value per anchor, where it is defined, and the mean over those."""

    values: Tensor
    defined: Tensor
    mean: Tensor


def evaluate_spec(
    spec: LoweredSpec,
    z: Tensor,
    labels: Tensor,
    ref: tuple[Tensor, Tensor] | None = None,
    biased: tuple[Tensor, Tensor] | None = None,
    precision: str | None = None,
    config: KernelConfig | None = None,
    self_column: Tensor | None = None,
    sorted_rows: bool = False,
    reference: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]] | None = None,
) -> SpecResult:
    """Evaluate a spec on raw embeddings, against themselves or against ``ref``.

    ``precision`` overrides that of the products, ``config`` the sizes of tiles. ``self_column``: (n,) which reference
    is the same sample as an anchor, and has its label, -1 where there is none: such pairs are left out.
    ``sorted_rows``: the labels of anchors ascend. ``reference`` computes values and mean with a graph, for second
    derivatives.
    """
    others = (labels, *(ref or ()), *(biased or ()))
    if any(x.device != z.device for x in others):
        raise InputError(
            f"embeddings are on {z.device}, others on {', '.join({str(x.device) for x in others})}: use one"
        )
    biased = biased if spec.has_second_encoder else None
    precision = precision or default_precision(spec, z, None if ref is None else ref[0])
    ref_labels = None if ref is None else flatten_tensor(ref[1])
    call = PairLossCall(spec, flatten_tensor(labels), ref_labels, biased, precision, config, self_column, sorted_rows)
    with on_device_of(z):
        embeddings = None if ref is None else ref[0]
        values, mean = PairLossFunction.apply(call, reference, z, embeddings, spec.log_temperature)  # type: ignore[misc]
    return SpecResult(values, call.defined, mean)


def on_device_of(z: Tensor) -> AbstractContextManager:
    """The device of ``z`` as the current one; where it is that already, nothing is switched."""
    if not z.is_cuda or z.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device_of(z)


def mean_and_gradient(
    spec: LoweredSpec, z: Tensor, labels: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The mean of a batch with itself, its gradient in float32 or None, and where values are defined."""
    with on_device_of(z):
        call = PairLossCall(spec, flatten_tensor(labels), None, None, default_precision(spec, z), None)
        _, mean = call.forward(z, None, with_gradient)
        if not with_gradient:
            return mean, None, call.defined
        one = torch.ones((), device=z.device)
        # In float32: in half precision a gradient that nothing has scaled yet would lose its small entries.
        gradient, _, _ = call.backward(None, one, one, None, (True, False, False))
    return mean, gradient, call.defined


class PairLossFunction(torch.autograd.Function):
    """Values and mean as functions of the embeddings; scores are computed again in the backward pass.

    ``log_temperature`` is that of the spec, where it is learned: an argument here for the sake of its gradient.
    """

    @staticmethod
    def forward(ctx, call: "PairLossCall", reference, z: Tensor, ref: Tensor | None, log_temperature: Tensor | None):  # type: ignore[override]
        """Values and mean; the call knows where values are defined."""
        values, mean = call.forward(z.detach(), None if ref is None else ref.detach(), ctx.needs_input_grad[2])
        ctx.call, ctx.reference = call, reference
        ctx.save_for_backward(z, ref, log_temperature)
        ctx.set_materialize_grads(False)
        return values, mean

    @staticmethod
    def backward(ctx, g_values: Tensor | None, g_mean: Tensor | None):  # type: ignore[override]
        """Gradients of the embeddings, of the references and of the logarithm of the temperature."""
        z, ref, log_temperature = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the kernels have no graph
            if ctx.reference is None:
                raise InputError("the kernels alone have first derivatives only: call the loss for second ones")
            warn_dense_recomputation(len(z), len(z) if ref is None else len(ref))
            inputs, outputs = (z, ref, log_temperature), ctx.reference(z, ref)
            return None, None, *differentiable_gradients(outputs, (g_values, g_mean), inputs)
        return None, None, *ctx.call.backward(g_values, g_mean, z, ref, ctx.needs_input_grad[2:])


class PairLossCall:
    """One call: what to compare and, after the forward pass, what the backward pass needs."""

    defined: Tensor  # (n,) where values are

    def __init__(
        self,
        spec: LoweredSpec,
        labels: Tensor,
        ref_labels: Tensor | None,
        biased: tuple[Tensor, Tensor] | None,
        precision: str,
        config: KernelConfig | None,
        self_column: Tensor | None = None,
        sorted_rows: bool = False,
    ):
        self.spec, self.precision, self.given_config = spec, precision, config
        self.labels, self.ref_labels, self.biased = labels, ref_labels, biased
        self.given_self_column = self_column
        self.sorted_rows = sorted_rows
        self.sorted_labels: dict[int, tuple[Tensor, Tensor]] = {}  # by the identity of the labels
        self.recorded: RecordedStep | None = None  # its forward pass
        self.replayed: ReplayedLaunches | None = None

    def forward(self, z: Tensor, ref: Tensor | None, with_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Values and mean; ``with_gradient``: the backward pass will follow."""
        spec, z = self.spec, align_tensor(z)
        ref = None if ref is None else align_tensor(ref)
        biased = () if self.biased is None else tuple(align_tensor(b.detach()) for b in self.biased)
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        has_self_column = self.given_self_column is not None
        settings = (spec.compile_key, self.precision, self.given_config, self.deterministic, has_self_column)
        cache = find_launch_cache(settings, (z, self.labels, ref, self.ref_labels, *biased))
        self.cache = cache
        if cache.may_replay and self._is_replayable(z, ref):
            step = cache.recorded_step
            if step is not None and step.spec is spec:
                return self._replay_forward(step, z)
            if with_gradient and cache.last_spec is spec:
                return self._record_forward(cache, z)
            cache.last_spec = spec
        return self._launch_forward(z, ref, biased)

    def _is_replayable(self, z: Tensor, ref: Tensor | None) -> bool:
        """Whether this is a small batch with itself, of which the host knows all numbers."""
        if ref is not None or self.biased is not None or self.given_self_column is not None:
            return False
        return len(z) <= COUNTED_ROWS and z.stride(1) == 1 and not self.spec.on_device and self.given_config is None

    def _record_forward(self, cache: LaunchCache, z: Tensor) -> tuple[Tensor, Tensor]:
        """Launch by launch, to be replayed in the next step; the backward pass completes it."""
        self.cache = recorder = LaunchRecorder(cache)
        values, mean = self._launch_forward(z, None, ())
        self.cache = cache
        sums, gradient = cache.decisions["sums"], self._decide_gradient(self.rows, self.rows, None, True, True)
        cleared = sums.symmetric or gradient.flush_every > 0
        if cleared or self.config.scores_in_memory or sums.flags.tile.use_tma or gradient.flags.tile.use_tma:
            cache.may_replay = False  # it does more than launch kernels on memory that they fill themselves
        else:
            recorded = RecordedPass(recorder, (), (z, self.labels, values, self.defined, mean))
            self.recorded = RecordedStep(self.spec, recorded)
        return values, mean

    def _replay_forward(self, step: RecordedStep, z: Tensor) -> tuple[Tensor, Tensor]:
        """All launches of a recorded step."""
        n, device = len(z), z.device
        values, mean = torch.empty(n, device=device), torch.empty((), device=device)
        self.defined = torch.empty(n, dtype=torch.bool, device=device)
        table, memory = step.forward.replay([], (z, self.labels, values, self.defined, mean))
        self.replayed = ReplayedLaunches(step, z, table, memory)
        return values, mean

    def _launch_forward(self, z: Tensor, ref: Tensor | None, biased: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Values and mean, launch by launch."""
        spec = self.spec
        self.rows = self.columns = self._prepare(z, "rows")
        if ref is not None:
            self.columns = self._prepare(ref, "columns")
        self.self_column, self.self_row = self._sort_self_column()
        self.rows2 = self.columns2 = None
        if biased:
            self.rows2 = self.columns2 = self._prepare(biased[0], "rows", self.rows)
            if ref is not None:
                self.columns2 = self._prepare(biased[1], "columns", self.columns)
        self.config = self.given_config or self.cache.decide("tiles", self._select_config)
        self.shift = self.rows.inverse_norm
        if spec.negative_term == "relative":
            assert self.rows2 is not None
            assert self.columns2 is not None
            sums, splits = self._sum_squares("squares", self.rows, self.columns)
            sums2, splits2 = self._sum_squares("squares, second", self.rows2, self.columns2)
            self.shift, padded = torch.empty_like(self.rows.inverse_norm), self.rows.padded
            self.cache.launch(
                "shift",
                shift_kernel,
                (sums, sums2, self.shift),
                lambda: Launch((padded // 64,), (padded, splits, splits2), {"SIZE": 64}),
            )
        if spec.is_mined:
            self._find_mining_thresholds()
        return self._finish_rows(*self.sum_negatives())

    def _find_mining_thresholds(self) -> None:
        """From which x on the negatives of each row count."""
        rows, columns = self.rows, self.columns
        self.shift = torch.empty_like(rows.inverse_norm)
        self.cache.launch(
            "mining thresholds",
            mining_threshold_kernel,
            (rows.normalized, columns.normalized, rows.positive_begin, rows.positive_end, self.self_column, self.shift),
            lambda: Launch(
                (rows.padded // POSITIVE_BLOCK,), (rows.n,), self._positives_config().threshold_constexprs()
            ),
            (self.spec.mining_epsilon or 0.0, self.spec.mining_scale),
        )

    def _sort_self_column(self) -> tuple[Tensor, Tensor]:
        """(padded,) int32 of rows and of columns: where each has its own sample on the other side, -1 for nowhere."""
        rows, columns, given = self.rows, self.columns, self.given_self_column
        if given is None:
            return rows.order, columns.order  # read by no kernel
        position = torch.empty(columns.n, dtype=torch.int32, device=given.device)
        numbers = torch.arange(columns.padded, dtype=torch.int32, device=given.device)
        position[columns.order[: columns.n].long()] = numbers[: columns.n]
        own = given[rows.order[: rows.n].long()].long()
        own = torch.where(own >= 0, position[own.clamp(min=0)], -1)
        row = torch.full((columns.padded + 1,), -1, dtype=torch.int32, device=given.device)
        at = torch.where(own >= 0, own, columns.padded).long()  # behind the end where there is none
        row[at] = torch.arange(rows.n, dtype=torch.int32, device=given.device)
        return torch.nn.functional.pad(own, (0, rows.padded - rows.n), value=-1), row[:-1].contiguous()

    def _prepare(self, z: Tensor, side: str, like: Operands | None = None) -> Operands:
        """One side; a second encoder's rows in the order of the first one's."""
        labels, other = (self.labels, self.ref_labels) if side == "rows" else (self.ref_labels, self.labels)
        assert labels is not None
        return prepare_operands(
            z,
            labels,
            other,
            self.precision,
            self.spec.normalize,
            operand_scale=self.spec.operand_scale,
            hash_grouped=not self.deterministic,
            sort=self._sort_once,
            like=like,
            cache=self.cache,
            name=side if like is None else f"{side}, second",
        )

    def _sort_once(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of one side in order, which both sides ask for; those of rows may be known to be."""
        if labels is self.labels and self.sorted_rows:
            return labels, torch.arange(len(labels), device=labels.device)
        found = self.sorted_labels.get(id(labels))
        if found is None:
            found = self.sorted_labels[id(labels)] = sort_labels(labels)
        return found

    def _select_config(self) -> KernelConfig:
        return select_config(
            self.precision,
            self.rows.head_dim,
            second_head_dim=_head_dim(self.rows2),
            register_heavy=self.spec.register_heavy,
            two_numbers_per_end=self.spec.second_sum_has_grad or self.spec.is_mined,
            large=self.rows.n >= LARGE_BATCH,
        )

    def sum_negatives(self) -> tuple[Tensor, int]:
        """Partial row sums over the negatives, and how many parts there are."""
        rows, columns, rows2, columns2 = self.rows, self.columns, self.rows2, self.columns2

        def plan() -> SumPlan:
            symmetric = self._is_symmetric(self.config, rows, columns)
            flags = self._negatives_config(self.config.forward_tile(symmetric), rows, rows2)
            return _plan_sums(flags, rows, columns, symmetric, self.spec.has_second_sum)

        return self._launch_sums("negatives", self.cache.decide("sums", plan), rows, columns, rows2, columns2)

    def _sum_squares(self, name: str, rows: Operands, columns: Operands) -> tuple[Tensor, int]:
        """The same of e² alone, of one encoder."""

        def plan() -> SumPlan:
            config = select_config(self.precision, rows.head_dim, large=rows.n >= LARGE_BATCH)
            symmetric = self._is_symmetric(config, rows, columns)
            flags = NegativesConfig(
                config.forward_tile(symmetric),
                self.precision,
                rows.head_dim,
                square=True,
                hinge_form=self.spec.hinge_form,
                online=self.spec.online,
            )
            return _plan_sums(flags, rows, columns, symmetric, False)

        return self._launch_sums(name, self.cache.decide(name, plan), rows, columns, None, None)

    def _is_symmetric(self, config: KernelConfig, rows: Operands, columns: Operands) -> bool:
        """Whether each pair is visited once: sums must grow pair by pair, in any order, and be worth clearing."""
        one_sided = self.spec.online or self.spec.is_mined  # a maximum is no sum
        if not config.forward.symmetric or one_sided or rows is not columns or self.deterministic:
            return False
        return rows.n >= SYMMETRIC_ROWS or not rows.normalized.is_cuda

    def _launch_sums(
        self,
        name: str,
        plan: "SumPlan",
        rows: Operands,
        columns: Operands,
        rows2: Operands | None,
        columns2: Operands | None,
    ) -> tuple[Tensor, int]:
        make = torch.zeros if plan.symmetric else torch.empty
        sums = make(plan.parts, 2, rows.padded, device=rows.normalized.device)
        operands = _pair_operands(plan.flags, rows, columns, rows2, columns2)
        self.cache.launch(
            name,
            negatives_forward,
            (*operands, rows.positive_begin, rows.positive_end, self.shift, sums),
            lambda: Launch(
                (plan.blocks, plan.splits),
                (rows.n, columns.n, rows.padded, plan.splits),
                plan.flags.forward_constexprs(has_second_sum=plan.has_second_sum, symmetric=plan.symmetric),
            ),
            (*self.spec.negative_numbers[:3], ZERO),
        )
        return sums, plan.parts

    def _finish_rows(self, sums: Tensor, splits: int) -> tuple[Tensor, Tensor]:
        """Values and mean from the sums over negatives."""
        spec, rows, columns = self.spec, self.rows, self.columns
        device, padded = rows.normalized.device, rows.padded
        values = torch.empty(rows.n, device=device)
        self.defined = torch.empty(rows.n, dtype=torch.bool, device=device)
        self.row_state = torch.empty(ROW_STATE_LINES, padded, device=device)
        blocks = padded // POSITIVE_BLOCK
        block_sums, self.stats = torch.empty(blocks, 3, device=device), torch.empty(3, device=device)
        mean = torch.empty((), device=device)
        inputs = (rows.normalized, columns.normalized, rows.positive_begin, rows.positive_end, self.self_column)
        self.cache.launch(
            "positives",
            positives_forward,
            (*inputs, sums, self.shift, rows.order, values, self.defined, self.row_state, block_sums),
            lambda: Launch(
                (blocks,),
                (rows.n, columns.n, padded, splits),
                self._positives_config().forward_constexprs(
                    negative_term=spec.negative_term,
                    online=spec.online,
                    divide_by=spec.divide_by,
                    all_anchors=spec.all_anchors,
                    count_by_weight=spec.count_by_weight,
                ),
            ),
            (
                *spec.positive_numbers,
                float(spec.scale),
                *spec.row_loss_numbers,
                spec.mining_epsilon or 0.0,
                spec.mining_scale,
            ),
        )
        self.cache.launch(
            "mean",
            mean_kernel,
            (block_sums, self.stats, mean),
            lambda: Launch((1,), (blocks,), {"SIZE": 1024, "num_warps": 8}),
        )
        return values, mean

    def backward(
        self,
        g_values: Tensor | None,
        g_mean: Tensor | None,
        z: Tensor,
        ref: Tensor | None,
        needed: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of the embeddings, of the references and of log temperature, where ``needed``.

        ``z``, ``ref``: of their types.
        """
        if g_values is None and g_mean is None:
            return None, None, None
        replayable = g_values is None and g_mean is not None and g_mean.dtype == torch.float32 and needed[0]
        if self.replayed is not None:
            recorded = self.replayed.step.backward.get(z.dtype)
            if replayable and recorded is not None:
                return self._replay_backward(recorded, align_tensor(g_mean), z.dtype), None, None  # type: ignore[arg-type]
            self._leave_replay(replayable)
        if self.recorded is not None and replayable:
            return self._record_backward(align_tensor(g_mean), z), None, None  # type: ignore[arg-type]
        return self._launch_backward(g_values, g_mean, z, ref, needed)

    def _record_backward(self, g_mean: Tensor, z: Tensor) -> Tensor:
        """Launch by launch, to be replayed in the next step."""
        step, self.recorded, cache = self.recorded, None, self.cache
        assert step is not None
        self.cache = recorder = LaunchRecorder(cache)
        gradient, _, _ = self._launch_backward(None, g_mean, z, None, (True, False, False))
        self.cache = cache
        assert gradient is not None
        recorded = RecordedPass(recorder, step.forward.tensors, (g_mean, gradient))
        known = cache.recorded_step
        if known is not None and known.spec is step.spec:
            step = known  # another type of gradient: the tables of its forward pass are the same
        step.backward[z.dtype] = recorded
        for made in (step.forward, recorded):
            made.tensors.clear()  # addresses are no longer compared
        cache.recorded_step = step
        return gradient

    def _replay_backward(self, recorded: RecordedPass, g_mean: Tensor, dtype: torch.dtype) -> Tensor:
        """All launches of a recorded step."""
        assert self.replayed is not None
        z = self.replayed.z
        out = torch.empty(z.shape, dtype=dtype, device=z.device)
        recorded.replay(self.replayed.table, (g_mean, out))
        return out

    def _leave_replay(self, record: bool) -> None:
        """The forward pass once more, for a gradient that was not recorded: a replayed one keeps no tensors for it."""
        assert self.replayed is not None
        z, self.replayed = self.replayed.z, None
        if record:
            self._record_forward(self.cache, z)
        else:
            self.cache.may_replay = False  # whoever asks for gradients of single values does so in every step
            self._launch_forward(z, None, ())

    def _launch_backward(
        self,
        g_values: Tensor | None,
        g_mean: Tensor | None,
        z: Tensor,
        ref: Tensor | None,
        needed: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The same, launch by launch."""
        z_needs_grad, ref_needs_grad, temperature_needs_grad = needed
        rows, columns, row_state, stats = self.rows, self.columns, self.row_state, self.stats
        factor = g_mean if g_mean is None else align_tensor(g_mean)
        if g_values is not None:  # a gradient for every row: into the row state
            anchors = g_values.float()
            if g_mean is not None:
                anchors = anchors + g_mean * stats[1]
            row_state, largest = self.scale_row_state(anchors)
            stats = torch.stack([stats[0], stats[1], torch.where(largest > 0, largest, 1.0)])
            factor = None
        self.sum_scale = self._sum_scale(stats)
        scale = self.sum_scale / self.spec.temperature if self.config.scores_in_memory else 1.0
        name = f"{z.dtype}" if factor is None else f"{z.dtype}, mean {factor.dtype}"
        normalize = self.spec.normalize
        dz = dref = d_log_temperature = None
        g_columns = None
        if z_needs_grad or temperature_needs_grad:
            if ref_needs_grad and self.config.scores_in_memory:
                g, g_columns = self._gradients_of_both(row_state, stats)
            else:
                g = self._gradient(rows, columns, self.rows2, self.columns2, row_state, stats, True, rows is columns)
            projections = torch.empty(rows.n, device=z.device) if temperature_needs_grad else None
            label = f"rows {name}" if projections is None else f"rows {name}, projections"
            dz = normalize_backward(
                rows,
                g,
                factor,
                stats,
                z,
                normalize,
                scale=scale,
                projections=projections,
                cache=self.cache,
                name=label,
            )
            if projections is not None:
                # Logits are s / temperature: dL/d(log temperature) = −Σ s·dL/ds over pairs. A row's product with its
                # gradient is that sum over its pairs, each of which has two such rows in a batch with itself.
                assert self.spec.log_temperature is not None
                total = projections.sum() * (-0.5 if rows is columns else -1.0)
                d_log_temperature = total.to(self.spec.log_temperature.dtype)
            del g
        if ref_needs_grad and ref is not None:
            if g_columns is None:
                g_columns = self._gradient(columns, rows, self.columns2, self.rows2, row_state, stats, False, True)
            dref = normalize_backward(
                columns,
                g_columns,
                factor,
                stats,
                ref,
                normalize,
                scale=scale,
                cache=self.cache,
                name=f"columns {name}",
            )
        return dz if z_needs_grad else None, dref, d_log_temperature

    def scale_row_state(self, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """The row state for these gradients of the values, and the largest coefficient in it."""
        rows, row_state = self.rows, self.row_state
        g_rows = torch.nn.functional.pad(anchors[rows.order[: rows.n]], (0, rows.padded - rows.n))
        scaled = torch.cat([row_state[:GRADIENT_LINES] * g_rows, row_state[GRADIENT_LINES:]])
        return scaled, self.stats[2] * g_rows.abs().amax()

    def _gradient(
        self,
        a: Operands,
        b: Operands,
        a2: Operands | None,
        b2: Operands | None,
        row_state: Tensor,
        stats: Tensor,
        row_end: bool,
        column_end: bool,
        column_state: Tensor | None = None,
    ) -> Tensor:
        """Of the prepared rows of ``a``: negatives, then positives on top; which ends of a pair have a value.

        ``column_state``: that of the rows of ``b``, where it is another one.
        """
        states = row_state, row_state if column_state is None else column_state
        if self.config.scores_in_memory:
            g, _ = self._gradient_through_memory(a, b, a2, b2, states, stats, row_end, column_end)
            return self._add_positives(g, a, b, states, row_end, column_end)
        spec, plan = self.spec, self._decide_gradient(a, b, a2, row_end, column_end)
        make = torch.zeros if plan.flush_every else torch.empty
        g = make(plan.splits, a.padded, a.head_dim, device=a.normalized.device)
        operands = _pair_operands(plan.flags, a, b, a2, b2)
        self.cache.launch(
            f"negatives backward {row_end} {column_end}",
            negatives_backward,
            (*operands, a.positive_begin, a.positive_end, *states, stats, g),
            lambda: Launch(
                (plan.blocks, plan.splits),
                (a.n, b.n, a.padded, b.padded, plan.splits),
                plan.flags.backward_constexprs(flush_every=plan.flush_every, **plan.ends),
            ),
            (*spec.negative_numbers, ZERO, spec.grad_scale_limit, spec.operand_scale),
        )
        return self._add_positives(g, a, b, states, row_end, column_end)

    def _gradients_of_both(self, row_state: Tensor, stats: Tensor) -> tuple[Tensor, Tensor]:
        """Of the prepared rows and of the prepared references, whose gradients of scores are the same in memory."""
        rows, columns, states = self.rows, self.columns, (row_state, row_state)
        g, g_columns = self._gradient_through_memory(
            rows, columns, self.rows2, self.columns2, states, stats, True, False, both=True
        )
        assert g_columns is not None
        g = self._add_positives(g, rows, columns, states, True, False)
        return g, self._add_positives(g_columns, columns, rows, states, False, True)

    def _gradient_through_memory(
        self,
        a: Operands,
        b: Operands,
        a2: Operands | None,
        b2: Operands | None,
        states: tuple[Tensor, Tensor],
        stats: Tensor,
        row_end: bool,
        column_end: bool,
        both: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """From negatives, of the rows of ``a``, and of ``b`` where ``both``; without `sum_scale`."""
        spec, plan = self.spec, self._decide_gradient(a, b, a2, row_end, column_end)
        return gradient_through_memory(
            a,
            b,
            _pair_operands(plan.flags, a, b, a2, b2),
            (*states, stats),
            (*spec.negative_numbers, spec.grad_scale_limit),
            plan.flags.score_gradients_constexprs(**plan.ends),
            self.config.backward,
            max(a.padded, b.padded) * (a.head_dim + _head_dim(a2)),
            self.cache,
            both,
        )

    def _sum_scale(self, stats: Tensor) -> float | Tensor:
        """What sums that came through memory lack beside 1 / temperature, a number on the device; 1 for others."""
        if not self.config.scores_in_memory:
            return 1.0
        return stats[2] / (self.spec.grad_scale_limit * self.spec.operand_scale)

    def _add_positives(
        self, g: Tensor, a: Operands, b: Operands, states: tuple[Tensor, Tensor], row_end: bool, column_end: bool
    ) -> Tensor:
        """The gradient of the rows of ``a``, from the parts that negatives sent, and positives."""
        spec = self.spec
        own_column = self.self_column if row_end else self.self_row
        self.cache.launch(
            f"positives backward {row_end} {column_end}",
            positives_backward,
            (a.normalized, b.normalized, a.positive_begin, a.positive_end, own_column, *states, g),
            lambda: Launch(
                (cdiv(a.n, POSITIVE_BLOCK), a.head_dim // self._positives_config().block_k),
                (a.n, a.padded, b.padded, len(g)),
                self._positives_config().backward_constexprs(
                    differentiable_weights=spec.differentiable_weights,
                    row_end=row_end,
                    column_end=column_end,
                    scaled_later=self.config.scores_in_memory,
                ),
            ),
            (*spec.positive_numbers, *spec.row_loss_numbers[:3], self.sum_scale),
        )
        return g

    def _decide_gradient(
        self, a: Operands, b: Operands, a2: Operands | None, row_end: bool, column_end: bool
    ) -> "GradientPlan":
        """How the gradient is cut, for all calls that are alike."""
        return self.cache.decide(
            f"gradient {row_end} {column_end}", lambda: self._plan_gradient(a, b, a2, row_end, column_end)
        )

    def _plan_gradient(
        self, a: Operands, b: Operands, a2: Operands | None, row_end: bool, column_end: bool
    ) -> "GradientPlan":
        spec, tile = self.spec, self.config.backward
        ends = {
            "second_sum_has_grad": spec.second_sum_has_grad,
            "differentiable_weights": spec.differentiable_weights,
            "row_end": row_end,
            "column_end": column_end,
        }
        flags, blocks = self._negatives_config(tile, a, a2), cdiv(a.n, tile.block_m)
        if self.config.scores_in_memory:
            return GradientPlan(flags, ends, blocks, 1, 0)
        most = most_gradient_splits(a.d, a.head_dim, _head_dim(a2), a.padded)
        tiles = cdiv(b.n, tile.block_n)
        splits = balance_waves(blocks, tiles, a.normalized.device, tile.programs_per_sm, most)
        flush_every = flush_interval(self.precision, cdiv(b.n, splits * tile.block_n), tile.block_n)
        return GradientPlan(flags, ends, blocks, splits, flush_every)

    def _negatives_config(self, tile: TileConfig, rows: Operands, rows2: Operands | None) -> NegativesConfig:
        spec = self.spec
        return NegativesConfig(
            tile,
            self.precision,
            rows.head_dim,
            _head_dim(rows2),
            spec.negative_term,
            spec.square,
            spec.hinge_form,
            spec.online,
            spec.is_mined,
        )

    def _positives_config(self) -> PositivesConfig:
        spec = self.spec
        self_pairs = "diagonal" if self.rows is self.columns else "none"
        if self.given_self_column is not None:
            self_pairs = "column"
        return PositivesConfig(
            self.precision,
            self.rows.head_dim,
            spec.row_loss,
            self_pairs=self_pairs,
            weighted=spec.has_positive_weights,
            numerator_only=spec.numerator_only,
            debiased=spec.prior > 0,
            hinge_form=spec.hinge_form,
            mined=spec.is_mined,
        )


class ReplayedLaunches(NamedTuple):
    """A forward pass that was replayed: its step, its embeddings, its table, and the memory that this points into."""

    step: RecordedStep
    z: Tensor
    table: list
    memory: Tensor


class SumPlan(NamedTuple):
    """How sums over negatives are cut."""

    flags: NegativesConfig
    symmetric: bool  # each pair is visited once, for both of its ends
    has_second_sum: bool
    blocks: int  # of rows
    splits: int  # of columns
    parts: int  # partial sums of a row


class GradientPlan(NamedTuple):
    """How a gradient of rows is cut; see `backward.negatives_backward`."""

    flags: NegativesConfig
    ends: dict[str, bool]
    blocks: int
    splits: int
    flush_every: int


def _plan_sums(
    flags: NegativesConfig, rows: Operands, columns: Operands, symmetric: bool, has_second_sum: bool
) -> SumPlan:
    blocks, tiles = cdiv(rows.n, flags.tile.block_m), cdiv(columns.n, flags.tile.block_n)
    splits = split_columns(blocks, tiles, rows.normalized.device, 16)
    return SumPlan(flags, symmetric, has_second_sum, blocks, splits, 1 if symmetric else splits)


def _pair_operands(
    flags: NegativesConfig, a: Operands, b: Operands, a2: Operands | None, b2: Operands | None
) -> tuple[Any, ...]:
    """Both sides of both encoders; where there is one encoder, it stands for the other too."""
    tile = flags.tile
    found = tensor_descriptors(tile.use_tma, flags.block_k, (a.hi, a.lo, tile.block_m), (b.hi, b.lo, tile.block_n))
    if a2 is None or b2 is None:
        return (*found, *found)
    second = (a2.hi, a2.lo, tile.block_m), (b2.hi, b2.lo, tile.block_n)
    return (*found, *tensor_descriptors(tile.use_tma, flags.second_block_k, *second))


def default_precision(spec: LoweredSpec, z: Tensor, ref: Tensor | None = None) -> str:
    """That of the products: what the embeddings are good for, and exact in the interpreter."""
    return choose_precision(spec, z.dtype, *(() if ref is None else (ref.dtype,))) if z.is_cuda else "ieee"


def _head_dim(operands: Operands | None) -> int:
    return 0 if operands is None else operands.head_dim
