"""Any loss over the batch of all ranks: `across_ranks`."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from mettle.errors import InputError, nearest
from mettle.pairs.declarations import is_self_contained, iterate_parts
from mettle.pairs.dispatch import (
    PairOutput,
    RankColumns,
    nan_if_not_finite,
    pair_loss,
    pair_loss_of_rank,
    runs_fused,
)
from mettle.pairs.distributed.collectives import distribute, fail_everywhere, gather_rows, sum_over_ranks
from mettle.pairs.distributed.handshake import (
    PLAIN,
    CallSummary,
    CallTensors,
    RankInfo,
    control_device,
    exchange_descriptions,
    has_other_ranks,
    name_class,
)
from mettle.pairs.kernels import KernelInputs, LoweredSpec, lower_loss
from mettle.pairs.loss_reduction import LossReduction, divide_total

How = Literal["auto", "anchors", "rows", "replicated"]


PAIR_LOSS = ("passes", "row_loss", "is_defined", "anchor_weight", "measure")  # what the engine calls
CALLS = ("__call__", "per_anchor", "per_item")


def across_ranks(loss: Callable[..., Tensor], how: How = "auto") -> "AcrossRanks":
    """The loss of the batch that all ranks of `torch.distributed` hold together, each its own part of it.

    Called like the loss. The value is that of one process with the parts behind each other, the same on every rank;
    ``per_anchor`` gives this rank's rows. Every rank calls ``backward`` on it: the gradients of the encoder, averaged
    over ranks as `DistributedDataParallel` does, and those of the loss's own parameters, on every rank, are then the
    ones of one process. Without a process group, or alone in it, it is the loss itself.

    Args:
        loss: any loss of `mettle.losses`, or any callable ``loss(embeddings, labels)``.
        how: ``anchors``: this rank's anchors against the embeddings of all ranks, for losses of `mettle.pairs`;
            ``rows``: this rank's rows alone, for losses that are the plain mean of rows that do not see each other
            (they say so by an attribute ``by_row``); ``replicated``: the loss of all rows, on every rank.
            ``auto`` takes the first that is exact.
    """
    if not callable(loss) or isinstance(loss, type):
        came = f"the class {loss.__name__}: write {loss.__name__}(...)" if isinstance(loss, type) else repr(loss)
        raise InputError(f"loss must be a callable loss(embeddings, labels), got {came}")
    if isinstance(loss, AcrossRanks):
        raise InputError("this loss is across ranks already: wrap it once")
    if getattr(loss, "is_sharded", False) is True:
        raise InputError("a loss of shard_classes is across ranks already: call it as it is, in a loop of your own")
    known = ("auto", "anchors", "rows", "replicated")
    if how not in known:
        raise InputError(f"how must be one of {', '.join(known)}, got {how!r}{nearest(str(how), known)}")
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "none":
        raise InputError(
            "across ranks a loss is one number, and reduction='none' gives none: use reduction='mean', whose "
            "per_anchor gives this rank's rows"
        )
    if how == "rows" and reduction not in ("mean", "pairs"):
        raise InputError(f"how='rows' averages over ranks, and reduction={reduction!r} is no mean: use how='auto'")
    if how == "anchors" and not all(hasattr(loss, name) for name in PAIR_LOSS):
        raise InputError(f"how='anchors' needs a loss of mettle.pairs, got {type(loss).__name__}: use how='replicated'")
    return AcrossRanks(loss, choose_strategy(loss) if how == "auto" else how)


class AcrossRanks(nn.Module):
    """What `across_ranks` gives. The loss inside is ``.loss``; ``.how`` says how it is taken over ranks."""

    def __init__(self, loss: Callable[..., Any], how: str):
        super().__init__()
        self.loss, self.how = loss, how
        held = [] if isinstance(loss, nn.Module) else [x for x in iterate_parts(loss) if isinstance(x, nn.Module)]
        self.inside = nn.ModuleList(held)  # difficulties with state of a loss that is no module itself
        self._is_random = not all_self_contained(loss) or draws_randomly(loss)
        self._synchronized = False

    @property
    def difficulty(self) -> Any:
        """The loss's own."""
        return getattr(self.loss, "difficulty", None)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """The loss of the rows of all ranks, the same on every rank, with gradient."""
        return self._call("__call__", args, options)

    def per_anchor(self, *args: Any, **options: Any) -> Tensor:
        """This rank's rows of the loss. Their gradient is that of what all ranks make of their rows, summed."""
        return self._call("per_anchor", args, options)

    def per_item(self, *args: Any, **options: Any) -> Tensor:
        """The same for losses over given pairs and triplets."""
        return self._call("per_item", args, options)

    @property
    def takes_progress(self) -> bool:
        """Whether the loss inside takes the progress of training."""
        return getattr(self.loss, "takes_progress", False)

    def extra_repr(self) -> str:
        """A loss that is no module would not be shown."""
        shown = "" if isinstance(self.loss, nn.Module) else f"{self.loss!r}, "
        return f"{shown}how={self.how!r}"

    def _call(self, call: str, args: tuple, options: dict[str, Any]) -> Tensor:
        if not has_other_ranks():
            return _method(self.loss, call)(*args, **options)
        call_tensors, error = None, None
        try:
            call_tensors = CallTensors.from_call(args, options)
            self._check(call, call_tensors)
        except Exception as wrong:  # whatever it is, the others must not wait
            error = wrong
        given, names, rest = (
            ({}, {}, 0)
            if call_tensors is None or error
            else (call_tensors.tensors, call_tensors.names, call_tensors.options)
        )
        fuses = error is None and call_tensors is not None and self._fuses(call_tensors)
        fresh = not self._synchronized
        summary = CallSummary(CALLS.index(call), self.training, self._fingerprint(), rest, fresh, fuses)
        ranks = exchange_descriptions(given, names, summary, error)
        assert call_tensors is not None
        if ranks.fresh:
            self._broadcast_state()
        # A rank without rows has nothing to compute a part from, so all compute the whole.
        replicate = self.how == "replicated" or min(ranks.rows["1"]) == 0 or call_tensors.has_more_than_batch
        if replicate:
            return self._compute_replicated(call, call_tensors, ranks)
        return (self._compute_anchors if self.how == "anchors" else self._compute_rows)(call, call_tensors, ranks)

    def _compute_replicated(self, call: str, call_tensors: CallTensors, ranks: RankInfo) -> Tensor:
        """Every rank computes everything; only rows of its own are then asked for in parts."""
        reduce_gradients = call != "__call__"
        tensors, shared = distribute(
            ranks,
            call_tensors.tensors,
            "gather",
            self._trainable_parameters() if reduce_gradients else (),
            reduce_gradients=reduce_gradients,
        )
        call_tensors.raise_if_ids_collide(tensors, ranks)
        args, options = call_tensors.rebuild_call(tensors)
        with self._rank0_rng(args[0].device):
            found, error = self._run_guarded(lambda: self._call_loss(call, args, options, ranks.count), shared)
        if error is not None:
            fail_everywhere(0, args[0].device, error)
        sum_over_ranks([], args[0].device)
        return found if call == "__call__" else found[ranks.own]

    def _fuses(self, call_tensors: CallTensors) -> bool:
        """Whether this rank can compute its anchors in the fused kernels."""
        first = call_tensors.tensors["1"]
        if self.how != "anchors" or not runs_fused(first.device) or call_tensors.has_more_than_batch:
            return False
        labels, biased = call_tensors.tensors.get("2"), call_tensors.tensors.get("biased[0]")
        if labels is None or labels.ndim != 1 or labels.shape != first.shape[:1] or first.ndim != 2:
            return False
        if getattr(self.loss, "reduction", "mean") == "pairs":  # the kernels do not say how many an anchor has
            return False
        both = None if biased is None else (biased, biased)
        try:
            loss, difficulty, options = self._resolve(call_tensors)
            lowered = lower_loss(loss, difficulty, KernelInputs(first, labels, first, labels, both))
        except InputError:  # it will be raised where all ranks hear it
            return False
        wanted = options.pop("engine", "auto") in ("auto", "triton") and not set(options) - {"tile"}
        return wanted and isinstance(lowered, LoweredSpec)

    def _resolve(self, call_tensors: CallTensors) -> tuple[Any, Any, dict[str, Any]]:
        """The loss and its difficulty at this point of training, and the other options of the call."""
        loss, options = self.loss, dict(call_tensors.plain)
        if (progress := options.pop("progress", None)) is not None:
            loss = loss.resolve_difficulty(progress, None)  # type: ignore[union-attr]
        return loss, getattr(loss, "difficulty", None), options

    def _compute_anchors(self, call: str, call_tensors: CallTensors, ranks: RankInfo) -> Tensor:
        """This rank's anchors against the rows of all ranks; a row meets itself by its number, and is left out.

        In the fused kernels only a rank's own embeddings have a gradient here, which is then whole: the other ranks
        send what it needs of their rows, see `mettle.pairs.kernels.rank_rows`. Other engines give every rank a part of
        the gradient of all embeddings, and these parts are summed over ranks.
        """
        device = call_tensors.tensors["1"].device
        batch = {place: call_tensors.tensors[place] for place in ("1", "2")}
        kind = "local" if ranks.fuses else "gather"
        tensors, shared = distribute(ranks, batch, kind, self._trainable_parameters(), reduce_gradients=True)
        z, y = tensors["1"], tensors["2"]
        all_z, all_y = (gather_rows(tensors[p], ranks, p) for p in batch) if ranks.fuses else (z, y)
        biased = call_tensors.tensors.get("biased[0]")
        both = None if biased is None else (biased, gather_rows(biased, ranks, "biased[0]"))
        own = ranks.own
        loss, difficulty, options = self._resolve(call_tensors)

        def output() -> PairOutput:
            observe = getattr(difficulty, "observe", None)
            if observe is not None and torch.is_grad_enabled():
                observe(all_z.detach(), all_y)
            if ranks.fuses:
                columns = RankColumns(all_z, all_y, own, lambda rows: gather_rows(rows, ranks, "1"))
                return pair_loss_of_rank(loss, z, y, columns, difficulty=difficulty, biased=both)  # type: ignore[arg-type]
            number = torch.arange(ranks.count, device=device)
            return pair_loss(
                loss,  # type: ignore[arg-type]
                z[own],
                y[own],
                ref=(z, y, number),
                ids=number[own],
                difficulty=difficulty,
                biased=both,
                **options,
            )

        found, error = self._run_guarded(output, shared)
        if error is not None:
            fail_everywhere(3, device, error)
        # Whatever the loss made of it, every rank has to take part in the backward exchange.
        # One number of it: a sum of many may be too large for half precision, and 0 * inf is NaN.
        tie = 0 * z.flatten()[:1].sum() if z.requires_grad else 0
        if call != "__call__":
            sum_over_ranks([z.new_zeros(())] * 3, device)
            return found.per_anchor() + tie
        reduction: LossReduction = getattr(loss, "reduction", "mean")
        anchor_weight = found.weight_of(reduction)
        zero_if_empty = getattr(loss, "empty", "error") == "zero"
        absent = found.values.detach() * 0 if zero_if_empty else 0  # NaN where embeddings are broken
        sums = torch.where(found.defined, found.values, absent) * anchor_weight
        value, weight, defined = sum_over_ranks([sums.sum() + tie, anchor_weight.sum(), found.defined.sum()], device)
        if not zero_if_empty and not z.is_cuda and not bool(defined > 0):
            raise InputError(
                f"no anchor has a positive among {ranks.count} samples of {ranks.size} ranks: each class needs at "
                "least two samples in the batch of all ranks together; draw P classes x K samples"
            )
        return divide_total(value, weight, defined == 0, reduction, zero_if_empty=zero_if_empty).to(sums.dtype)

    def _compute_rows(self, call: str, call_tensors: CallTensors, ranks: RankInfo) -> Tensor:
        """This rank's rows alone; only their mean is over all ranks."""
        first = call_tensors.tensors["1"]
        tensors, shared = distribute(
            ranks, call_tensors.tensors, "local", self._trainable_parameters(), reduce_gradients=True
        )
        args, options = call_tensors.rebuild_call(tensors)
        found, error = self._run_guarded(lambda: self._call_loss(call, args, options, len(first)), shared)
        if error is not None:
            fail_everywhere(1, first.device, error)
        if call != "__call__":  # a broken row breaks the whole batch, on every rank
            return found + sum_over_ranks([nan_if_not_finite(first)], first.device)[0].to(found.dtype)
        (value,) = sum_over_ranks([found * (len(first) / ranks.count)], first.device)
        return value.to(found.dtype)

    def _call_loss(self, call: str, args: list[Tensor], options: dict[str, Any], rows: int) -> Tensor:
        """What the loss says of so many rows: one number, or one per row."""
        found = _method(self.loss, call)(*args, **options)
        if not isinstance(found, Tensor) or found.shape != (() if call == "__call__" else (rows,)):
            came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            wanted, advice = f"one number per row, a tensor ({rows},)", f"change what its {call} returns"
            if call == "__call__":
                wanted, advice = "one number, a tensor ()", "use one that takes the mean"
            raise InputError(f"across ranks, a loss must give {wanted}, got {came}: {advice}")
        return found

    def _run_guarded(self, function: Callable[[], Any], shared: list[Tensor]) -> tuple[Any, Exception | None]:
        """What came out, or the error, which the other ranks must hear of before it is raised."""
        try:
            return self._with_parameters(shared, function), None
        except Exception as error:
            return None, error

    def _with_parameters(self, shared: list[Tensor], function: Callable[[], Any]) -> Any:
        """Call with these in place of the learnt parameters: their gradient is then summed over ranks."""
        if not shared:
            return function()
        names = [name for name, p in self.named_parameters() if p.requires_grad]
        holder = _Holder(self)
        return torch.func.functional_call(holder, dict(zip(names, shared, strict=True)), (function,))

    def _trainable_parameters(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.requires_grad] if torch.is_grad_enabled() else []

    def _check(self, call: str, call_tensors: CallTensors) -> None:
        """What can be told before anybody else is asked."""
        _method(self.loss, call)
        device = call_tensors.tensors["1"].device
        for p in (*self.parameters(), *self.buffers()):
            if p.device.type != device.type:
                raise InputError(f"the loss is on {p.device}, its inputs on {device}: use loss.to(device)")

    def _fingerprint(self) -> int:
        """A number by which ranks tell whether they have the same loss."""
        held = (*self.parameters(), *self.buffers())
        shapes = [(tuple(x.shape), str(x.dtype), x.requires_grad) for x in held]
        # Of what promises nothing, settings are its own affair: what it holds may well differ between ranks.
        made_with = (
            "" if not all_self_contained(self.loss) else describe_settings(self.loss) if held else repr(self.loss)
        )
        summary = f"{name_class(self.loss)} {made_with} {self.how} {self._is_random} {shapes}"
        return zlib.crc32(summary.encode())

    @torch.no_grad()
    def _broadcast_state(self) -> None:
        """Where some rank calls its loss for the first time: all go on from the parameters and buffers of rank 0."""
        for x in (*self.parameters(), *self.buffers()):
            first = x.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(first, 0)
            if not torch.equal(first, x):
                x.copy_(first)
        self._synchronized = True

    @contextmanager
    def _rank0_rng(self, device: torch.device) -> Iterator[None]:
        """Draw on every rank what rank 0 draws: a loss that draws must draw alike."""
        if not self._is_random:
            yield
            return
        for part in iterate_parts(self.loss):
            given = getattr(part, "random", None)
            if isinstance(given, torch.Generator):
                given.set_state(_broadcast_from_rank0(given.get_state()))
        common = [torch.default_generator]
        if device.type == "cuda":
            common.append(torch.cuda.default_generators[device.index or 0])
        before = [generator.get_state() for generator in common]
        for generator, state in zip(common, before, strict=True):
            generator.set_state(_broadcast_from_rank0(state))
        try:
            yield
        finally:
            if dist.get_rank() > 0:  # other things that ranks draw must stay their own
                for generator, state in zip(common, before, strict=True):
                    generator.set_state(state)


def choose_strategy(loss: Any) -> Literal["anchors", "rows", "replicated"]:
    """How much each rank may leave to the others."""
    if getattr(loss, "by_row", False) is True:
        return "rows"
    names = ("passes", "forward", "per_anchor", "output")
    if not (all_self_contained(loss) and all(hasattr(loss, name) for name in names)):
        return "replicated"  # it may look at positions in the batch, or at anything else
    overridden = len({_defining_class(loss, name) for name in names[1:]}) > 1
    if overridden or draws_randomly(loss) or any(one.reads == "both" for one in loss.passes()):
        return "replicated"
    return "anchors"


def _defining_class(thing: Any, name: str) -> type:
    """The class that defines a method."""
    return next(kind for kind in type(thing).__mro__ if name in vars(kind))


def all_self_contained(loss: Any) -> bool:
    """Whether a loss and all of its difficulties promise to depend on settings, state and what they are shown alone."""
    return all(is_self_contained(part) for part in iterate_parts(loss))


def describe_settings(loss: Any) -> list[tuple[str, dict[str, Any]]]:
    """What a loss with a state was made with. Its repr would do, if it did not show the state as well."""
    held = [m for part in iterate_parts(loss) for m in (part.modules() if isinstance(part, nn.Module) else [part])]
    found = []
    for thing in (part for one in held for part in iterate_parts(one) if is_self_contained(part)):
        plain = {k: v for k, v in sorted(vars(thing).items()) if k[0] != "_" and isinstance(v, PLAIN | None)}
        plain.pop("training", None)  # compared by itself
        found.append((name_class(thing), plain))
    return found


def draws_randomly(loss: Any) -> bool:
    """Whether the passes of a loss draw at random: lots go by positions in the batch of all ranks."""
    if not hasattr(loss, "passes"):
        return False
    given = getattr(loss, "random", None)
    generator = given if isinstance(given, torch.Generator) else torch.default_generator
    before = generator.get_state()
    loss.passes()
    moved = not torch.equal(before, generator.get_state())
    generator.set_state(before)  # looking changes nothing
    return moved


class _Holder(nn.Module):
    """The modules of a loss, and a function in place of a forward: what runs while parameters are exchanged."""

    def __init__(self, held: AcrossRanks):
        super().__init__()
        self.loss, self.inside = held.loss, held.inside

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def _method(loss: Any, call: str) -> Callable[..., Any]:
    found = loss if call == "__call__" else getattr(loss, call, None)
    if found is None:
        raise InputError(f"{type(loss).__name__} has no {call}: call it for its mean")
    return found


def _broadcast_from_rank0(state: Tensor) -> Tensor:
    """The random state of rank 0."""
    sent = state.to(control_device(), copy=True)
    dist.broadcast(sent, 0)
    return sent.cpu()


__all__ = ["AcrossRanks", "across_ranks"]
