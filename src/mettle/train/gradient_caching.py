"""Gradient caching: the loss of a large batch, exactly, in the memory of a small one (GradCache, Gao et al. 2021).

    first pass   the network embeds the batch in micro-batches and keeps no graph: of each only its embeddings remain,
                 and the state of the random numbers that it was drawn with
    loss         of all embeddings, with whatever it needs of them; it gives their gradient
    second pass  the network embeds each micro-batch again, with the same random numbers and with a graph, through which
                 its rows of that gradient go to the weights; then the graph is freed

Activations of one micro-batch are held at a time, for one forward pass more: about 4/3 of the time of a plain step.
Gradients are those of the plain step but for the order of sums, unless a layer looks at more than one input. Batch
norms do: they see the micro-batch.

Both passes are one node of the graph of autograd. So everything beyond the embeddings (ranks, queues, sums of losses,
learned parameters of a loss, scaled gradients, accumulation) is as without it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from mettle.data.raw_inputs import RawInputs
from mettle.errors import InputError

ROWS = 64
TOLERANCE = {False: 0.01, True: 0.1}  # of the relative distance between both passes, not in half precision and in it


class GradientCaching(nn.Module):
    """A network that trains on a batch of any size in the memory of ``rows`` inputs, with the gradient of that batch.

    Called like the network, with tensors that have a row per input (also inside tuples, lists and mappings), and gives
    what the network gives: one tensor with a row per input. The inputs may lie in the memory of the host, pinned or
    not, and are then moved micro-batch by micro-batch.

        network = GradientCaching(network, rows=64)
        loss(network(images), labels).backward()

    With several processes it goes inside of `DistributedDataParallel`, and the loss into
    `mettle.pairs.across_ranks`. Buffers, such as running statistics of batch norms, are moved by the first pass only.

    Args:
        network: any module that gives one tensor with a row per input.
        rows: the most inputs in a micro-batch.
    """

    def __init__(self, network: nn.Module, rows: int = ROWS):
        super().__init__()
        if not isinstance(network, nn.Module):
            raise InputError(f"network must be a torch.nn.Module, got {type(network).__name__}")
        self.network, self.rows = network, check_rows(rows)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """What the network gives for the whole batch."""
        network = self.network
        return cached_forward(network, (inputs, options), self.rows, lambda given: network(*given[0], **given[1]))

    def extra_repr(self) -> str:
        """How large micro-batches are."""
        return f"rows={self.rows}"


def check_rows(rows: int) -> int:
    """The size of a micro-batch, if it can be one."""
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise InputError(f"rows of a micro-batch must be a whole number, at least 1: got {rows!r}")
    return rows


def has_batch_norm(network: nn.Module) -> bool:
    """Whether some layer of a network normalizes by statistics of the batch."""
    return any(isinstance(part, _BatchNorm) for part in network.modules())


def describe_batch_norm(rows: int) -> str:
    """What is different for a network with batch norms."""
    return (
        f"batch.cached = {rows}: batch norms of the network see one micro-batch at a time, so their statistics are "
        f"those of at most {rows} inputs and not of the whole batch; all else is as without gradient caching"
    )


def cached_forward(
    network: nn.Module, inputs: Any, rows: int = ROWS, forward: Callable[[Any], Tensor] | None = None
) -> Tensor:
    """What a network gives for a batch, computed in micro-batches of at most ``rows`` inputs.

    Without gradient it is the first pass alone. A batch of a single micro-batch is computed as ever.

    Args:
        network: whose parameters get the gradient.
        inputs: a tensor with a row per input, or tuples, lists and mappings that hold such; or `RawInputs`, of which
            each micro-batch is prepared anew in both passes.
        rows: of a micro-batch at most, whose sizes differ by one at most; 0 for the whole batch at once.
        forward: from such inputs to a tensor with a row per input; by default the network itself.

    Returns:
        one tensor, with a row per input.
    """
    forward = network if forward is None else forward
    if rows == 0:
        return forward(inputs.prepare_all() if isinstance(inputs, RawInputs) else inputs)
    if any(isinstance(part, DistributedDataParallel) for part in network.modules()):
        raise InputError(
            "gradient caching calls the network several times in a step, and DistributedDataParallel expects one call: "
            "put it around the cached network, DistributedDataParallel(GradientCaching(network))"
        )
    leaves: list[Tensor] = []
    _map_tensors(inputs, lambda x: leaves.append(x) or x)
    is_raw = isinstance(inputs, RawInputs)
    sizes = {len(inputs)} if is_raw else {len(leaf) for leaf in leaves if leaf.ndim}
    if len(sizes) != 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves) or "no tensor"
        raise InputError(f"gradient caching splits tensors that all have a row per input, got {shapes}")
    total, device = sizes.pop(), _find_device(network)
    parts = count_micro_batches(total, rows, network)
    if parts == 1:
        inputs = inputs.prepare_all() if is_raw else inputs
        return forward(_map_tensors(inputs, lambda x: x.to(device, non_blocking=True)))
    parameters = [p for p in network.parameters() if p.requires_grad]
    passes = _Passes(network, forward, inputs, _even_spans(total, parts), device, len(leaves))
    found: Any = _CachedForwardFunction.apply(passes, *leaves, *parameters)
    return found


def count_micro_batches(count: int, rows: int, network: nn.Module) -> int:
    """In how many parts a batch is computed; ranks with batch norms, which may wait for each other, agree on it."""
    parts = max(1, -(-count // rows))
    has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not has_ranks or not network.training or not has_batch_norm(network):
        return parts
    by_cpu = "cpu:" in dist.get_backend_config()
    most = torch.tensor(parts, device="cpu" if by_cpu else _find_device(network))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _even_spans(total: int, parts: int) -> list[slice]:
    """So many parts of the rows, in order, whose sizes differ by one at most."""
    bounds = [k * total // parts for k in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


@dataclass(eq=False)
class _Passes:
    """Both passes of a batch through a network, and what the second has to know of the first."""

    network: nn.Module
    forward: Callable[[Any], Tensor]
    inputs: Any
    spans: list[slice]
    device: torch.device  # of the network
    leaves: int  # tensors among the inputs
    states: list["_RandomState"] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind = self.device.type
        # What the network is called with: like the inputs, with other tensors.
        self.template = torch.empty(0) if isinstance(self.inputs, RawInputs) else self.inputs
        self.cast_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _embed(self, leaves: Iterable[Tensor], span: slice) -> Tensor:
        """One micro-batch, whose inputs are these."""
        remaining = iter([self.inputs.prepare_rows(span)] if isinstance(self.inputs, RawInputs) else leaves)
        inputs = _map_tensors(self.template, lambda _: next(remaining).to(self.device, non_blocking=True))
        # No cache: weights that are cast without a graph must not be found again by what needs one.
        with torch.autocast(self.device.type, self.cast_to, enabled=self.cast_to is not None, cache_enabled=False):
            found = self.forward(inputs)
        if not isinstance(found, Tensor) or found.ndim == 0 or len(found) != span.stop - span.start:
            came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(f"gradient caching takes networks that give one tensor with a row per input, got {came}")
        return found

    def run_first(self, leaves: Sequence[Tensor]) -> Tensor:
        """The embeddings of the whole batch."""
        found: Tensor | None = None
        for span in self.spans:
            self.states.append(_RandomState.capture(self.device))
            z = self._embed((_cut_rows(x, span) for x in leaves), span)
            if found is None:
                found = z.new_empty(self.spans[-1].stop, *z.shape[1:])
            found[span] = z
        assert found is not None
        return found

    def run_second(self, tensors: Sequence[Tensor], embeddings: Tensor, gradient: Tensor) -> list[Tensor | None]:
        """The gradient of all inputs and parameters; None where none is wanted, or nothing depends on them."""
        leaves = tensors[: self.leaves]
        wanted = [k for k, x in enumerate(tensors) if x.requires_grad]
        by_row = [k for k in wanted if k < self.leaves and leaves[k].ndim]
        others = [k for k in wanted if k >= self.leaves or not leaves[k].ndim]  # parameters, scalar inputs
        shared = [tensors[k] for k in others]
        of_rows = [torch.zeros_like(leaves[k]) for k in by_row]
        sums: list[Tensor | None] = [None] * len(shared)
        apart = torch.zeros((), device=embeddings.device)
        with _restored_buffers(self.network):
            for span, state in zip(self.spans, self.states, strict=True):
                cut = [_cut_rows(x, span) for x in leaves]
                own = [cut[k].detach().requires_grad_() for k in by_row]
                for k, x in zip(by_row, own, strict=True):
                    cut[k] = x
                with state.replay(), torch.enable_grad():
                    z = self._embed(cut, span)
                apart = torch.maximum(apart, _relative_distance(z.detach(), embeddings[span]))
                found = torch.autograd.grad(z, [*own, *shared], gradient[span], allow_unused=True)
                for total, g in zip(of_rows, found[: len(own)], strict=True):
                    if g is not None:
                        total[span] = g
                _add_gradients(sums, found[len(own) :])
                del z, found  # the next forward pass needs the room
        self._check_same(apart, embeddings.dtype)
        made = dict(zip([*by_row, *others], [*of_rows, *sums], strict=True))
        return [None if (g := made.get(k)) is None else g.to(x.dtype) for k, x in enumerate(tensors)]

    def _check_same(self, apart: Tensor, dtype: torch.dtype) -> None:
        """Refuse a network whose second pass was not the first one again: the gradient is of something else then."""
        is_half = self.cast_to is not None or dtype in (torch.float16, torch.bfloat16)
        distance = float(apart)
        if distance > TOLERANCE[is_half]:
            raise InputError(
                f"the network gave other embeddings when the same inputs came again ({100 * distance:.3g} % apart), so "
                "gradient caching knows no gradient of the first ones: a forward pass may depend on inputs, weights "
                "and the random numbers of torch, and on nothing that an earlier one changed"
            )


class _CachedForwardFunction(torch.autograd.Function):
    """The first pass forward, the second one backward; tensors are those of the inputs, then the parameters."""

    @staticmethod
    def forward(ctx, passes: _Passes, *tensors: Tensor):  # type: ignore[override]
        found = passes.run_first(tensors[: passes.leaves])
        ctx.passes = passes
        ctx.save_for_backward(found.clone(), *tensors)  # so that torch notices a change in place
        return found

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise InputError("gradient caching gives first derivatives only: do not pass create_graph=True")
        embeddings, *tensors = ctx.saved_tensors
        return None, *ctx.passes.run_second(tensors, embeddings, gradient)


@dataclass(frozen=True, eq=False)
class _RandomState:
    """The random numbers of torch as they are about to be drawn, on the processor and on the GPU of a network."""

    device: torch.device
    states: tuple[Tensor, ...]

    @classmethod
    def capture(cls, device: torch.device) -> "_RandomState":
        own = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
        return cls(device, (torch.get_rng_state(), *own))

    def _set(self) -> None:
        torch.set_rng_state(self.states[0])
        for state in self.states[1:]:
            torch.cuda.set_rng_state(state, self.device)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Inside, the same numbers are drawn; afterwards they go on as if nothing had been drawn."""
        now = self.capture(self.device)
        self._set()
        try:
            yield
        finally:
            now._set()


@contextmanager
def _restored_buffers(network: nn.Module) -> Iterator[None]:
    """Whatever happens inside, buffers are afterwards what they were."""
    buffers = list(network.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _map_tensors(given: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same tuples, lists and mappings with other tensors in them, in a fixed order."""
    if isinstance(given, Tensor):
        return change(given)
    if isinstance(given, Mapping):
        return {name: _map_tensors(value, change) for name, value in given.items()}
    if isinstance(given, tuple | list):
        parts = [_map_tensors(part, change) for part in given]
        if hasattr(given, "_fields"):  # a named tuple
            return type(given)(*parts)
        return tuple(parts) if isinstance(given, tuple) else parts
    return given


def _cut_rows(x: Tensor, span: slice) -> Tensor:
    """These rows; a scalar belongs to all of them."""
    return x[span] if x.ndim else x


def _find_device(network: nn.Module) -> torch.device:
    tensor = next(network.parameters(), None)
    tensor = next(network.buffers(), None) if tensor is None else tensor
    return torch.device("cpu") if tensor is None else tensor.device


def _relative_distance(found: Tensor, wanted: Tensor) -> Tensor:
    """How far apart, in units of the second; NaN where either is not finite, which the loss tells."""
    wanted = wanted.float()
    size = torch.linalg.vector_norm(wanted)
    return torch.linalg.vector_norm(found.float() - wanted) / size.clamp(min=torch.finfo(size.dtype).tiny)


def _add_gradients(sums: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Add the gradients of one micro-batch to sums in float32 or better, in one launch where they are dense."""
    totals, parts = [], []
    for k, g in enumerate(found):
        if g is None:
            continue
        total = sums[k]
        wide = torch.float32 if g.dtype in (torch.float16, torch.bfloat16) else g.dtype
        if total is None:
            sums[k] = g.to(wide, copy=True)  # it may be a view of what others hold
        elif g.is_sparse:
            sums[k] = total + g.to(wide)
        else:
            totals.append(total)
            parts.append(g)
    if totals:
        torch._foreach_add_(totals, parts)
