"""Any loss over the batch of all ranks: `across_ranks`."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from mettle.errors import InputError, nearest
from mettle.pairs.dispatch import PairOutput, broken, pair_loss
from mettle.pairs.distributed import collectives as gather
from mettle.pairs.distributed.collectives import Crowd
from mettle.pairs.distributed.handshake import Parts, name_class
from mettle.pairs.makeup import draws, exact, parts_of, self_contained, settings

How = Literal["auto", "pairs", "rows", "whole"]

CALLS = ("__call__", "per_anchor", "per_item")


def across_ranks(loss: Callable[..., Tensor], how: How = "auto") -> "AcrossRanks":
    """The loss of the batch that all ranks of `torch.distributed` hold together, each its own part of it.

    Called like the loss. The value is that of one process with the parts behind each other, the same on every rank;
    ``per_anchor`` gives this rank's rows. Every rank calls ``backward`` on it: the gradients of the encoder, averaged
    over ranks as `DistributedDataParallel` does, and those of the loss's own parameters, on every rank, are then the
    ones of one process. Without a process group, or alone in it, it is the loss itself.

    Args:
        loss: any loss of `mettle.losses`, or any callable ``loss(embeddings, labels)``.
        how: ``pairs``: this rank's anchors against the embeddings of all ranks, for losses of `mettle.pairs`;
            ``rows``: this rank's rows alone, for losses that are the plain mean of rows that do not see each other
            (they say so by an attribute ``by_row``); ``whole``: the loss of all rows, on every rank. ``auto`` takes
            the first that is exact.
    """
    if not callable(loss) or isinstance(loss, type):
        came = f"the class {loss.__name__}: write {loss.__name__}(...)" if isinstance(loss, type) else repr(loss)
        raise InputError(f"loss must be a callable loss(embeddings, labels), got {came}")
    if isinstance(loss, AcrossRanks):
        raise InputError("this loss is across ranks already: wrap it once")
    known = ("auto", "pairs", "rows", "whole")
    if how not in known:
        raise InputError(f"how must be one of {', '.join(known)}, got {how!r}{nearest(str(how), known)}")
    if how == "pairs" and not all(hasattr(loss, name) for name in ("sweeps", "finish", "defined", "share", "measure")):
        raise InputError(f"how='pairs' needs a loss of mettle.pairs, got {type(loss).__name__}: use how='whole'")
    return AcrossRanks(loss, exact(loss) if how == "auto" else how)


class AcrossRanks(nn.Module):
    """What `across_ranks` gives. The loss inside is ``.loss``; ``.how`` says how it is taken over ranks."""

    def __init__(self, loss: Callable[..., Any], how: str):
        super().__init__()
        self.loss, self.how = loss, how
        held = [] if isinstance(loss, nn.Module) else [x for x in parts_of(loss) if isinstance(x, nn.Module)]
        self.inside = nn.ModuleList(held)  # difficulties with a state, which a loss without one cannot save
        self._drawn = not self_contained(loss) or draws(loss)
        self._met = {"once": False}  # shared with the losses of later points of training

    @property
    def difficulty(self) -> Any:
        """The loss's own."""
        return getattr(self.loss, "difficulty", None)

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """The loss of the rows of all ranks, the same on every rank, with gradient."""
        return self._ask("__call__", args, options)

    def per_anchor(self, *args: Any, **options: Any) -> Tensor:
        """This rank's rows of the loss. Their gradient is that of what all ranks make of their rows, summed."""
        return self._ask("per_anchor", args, options)

    def per_item(self, *args: Any, **options: Any) -> Tensor:
        """The same for losses over given pairs and triplets."""
        return self._ask("per_item", args, options)

    def at(self, progress: float) -> "AcrossRanks":
        """The loss at a point of training, for difficulties that follow a curriculum; shares all state."""
        later = getattr(self.loss, "at", None)
        if later is None or (now := later(progress)) is self.loss:
            return self
        made = AcrossRanks(now, self.how)
        made._met = self._met
        return made.train(self.training)

    def extra_repr(self) -> str:
        """A loss that is no module would not be shown."""
        shown = "" if isinstance(self.loss, nn.Module) else f"{self.loss!r}, "
        return f"{shown}how={self.how!r}"

    def _ask(self, call: str, args: tuple, options: dict[str, Any]) -> Tensor:
        if not gather.many():
            return _method(self.loss, call)(*args, **options)
        parts, error = None, None
        try:
            parts = Parts.of(args, options)
            self._check(call, parts)
        except Exception as wrong:  # whatever it is, the others must not wait
            error = wrong
        given, names, rest = ({}, {}, 0) if parts is None or error else (parts.tensors, parts.names, parts.options)
        said = gather.Call(CALLS.index(call), self.training, self._fingerprint(), rest, not self._met["once"])
        crowd = gather.arrive(given, names, said, error)
        assert parts is not None
        if crowd.fresh:
            self._meet()
        # A rank without rows has nothing to compute a part from, so all compute the whole.
        alone = self.how == "whole" or min(crowd.rows["1"]) == 0 or parts.beyond
        if alone:
            return self._whole(call, parts, crowd)
        return (self._pairs if self.how == "pairs" else self._rows)(call, parts, crowd)

    def _whole(self, call: str, parts: Parts, crowd: Crowd) -> Tensor:
        """Every rank computes everything; only rows of its own are then asked for in parts."""
        meet = call != "__call__"
        tensors, shared = gather.spread(crowd, parts.tensors, "gather", self._learnt() if meet else (), meet=meet)
        parts.refuse_common_ids(tensors, crowd)
        args, options = parts.rebuilt(tensors)
        with self._luck(args[0].device):
            found, error = self._tried(lambda: self._asked(call, args, options, crowd.count), shared)
        if error is not None:
            gather.fail(0, args[0].device, error)
        gather.total([], args[0].device)
        return found if call == "__call__" else found[crowd.own]

    def _pairs(self, call: str, parts: Parts, crowd: Crowd) -> Tensor:
        """This rank's anchors against the rows of all ranks; a row meets itself by its number, and is left out."""
        device = parts.tensors["1"].device
        batch = {place: parts.tensors[place] for place in ("1", "2")}
        tensors, shared = gather.spread(crowd, batch, "gather", self._learnt(), meet=True)
        z, y = tensors["1"], tensors["2"]
        biased = parts.tensors.get("biased[0]")
        both = None if biased is None else (biased, gather.gathered(biased, crowd, "biased[0]"))
        number = torch.arange(crowd.count, device=device)
        own, loss = crowd.own, self.loss

        def output() -> PairOutput:
            observe = getattr(self.difficulty, "observe", None)
            if observe is not None and torch.is_grad_enabled():
                observe(z.detach(), y)
            return pair_loss(
                loss,  # type: ignore[arg-type]
                z[own],
                y[own],
                ref=(z, y, number),
                ids=number[own],
                difficulty=self.difficulty,
                biased=both,
                **parts.plain,
            )

        found, error = self._tried(output, shared)
        if error is not None:
            gather.fail(3, device, error)
        # Whatever the loss made of it, every rank has to come to the meeting on the way back.
        # One number of it: a sum of many may be too large for half precision, and 0 * inf is NaN.
        tie = 0 * z.flatten()[:1].sum() if z.requires_grad else 0
        if call != "__call__":
            gather.total([z.new_zeros(())] * 3, device)
            return found.per_anchor() + tie
        share = found.share * found.defined
        sums = torch.where(found.defined, found.values, 0) * share
        value, weight, defined = gather.total([sums.sum() + tie, share.sum(), found.defined.sum()], device)
        if not z.is_cuda and not bool(defined > 0):
            raise InputError(
                f"no anchor has a positive among {crowd.count} samples of {crowd.size} ranks: each class needs at "
                "least two samples in the batch of all ranks together; draw P classes x K samples"
            )
        return (value / weight).to(sums.dtype)

    def _rows(self, call: str, parts: Parts, crowd: Crowd) -> Tensor:
        """This rank's rows alone; only their mean is over all ranks."""
        first = parts.tensors["1"]
        tensors, shared = gather.spread(crowd, parts.tensors, "own", self._learnt(), meet=True)
        args, options = parts.rebuilt(tensors)
        found, error = self._tried(lambda: self._asked(call, args, options, len(first)), shared)
        if error is not None:
            gather.fail(1, first.device, error)
        if call != "__call__":  # a broken row breaks the whole batch, on every rank
            return found + gather.total([broken(first)], first.device)[0].to(found.dtype)
        (value,) = gather.total([found * (len(first) / crowd.count)], first.device)
        return value.to(found.dtype)

    def _asked(self, call: str, args: list[Tensor], options: dict[str, Any], rows: int) -> Tensor:
        """What the loss says of so many rows: one number, or one per row."""
        found = _method(self.loss, call)(*args, **options)
        if not isinstance(found, Tensor) or found.shape != (() if call == "__call__" else (rows,)):
            came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            wanted, advice = f"one number per row, a tensor ({rows},)", f"change what its {call} returns"
            if call == "__call__":
                wanted, advice = "one number, a tensor ()", "use one that takes the mean"
            raise InputError(f"across ranks, a loss must give {wanted}, got {came}: {advice}")
        return found

    def _tried(self, function: Callable[[], Any], shared: list[Tensor]) -> tuple[Any, Exception | None]:
        """What came out, or the error, which the other ranks must hear of before it is raised."""
        try:
            return self._with(shared, function), None
        except Exception as error:
            return None, error

    def _with(self, shared: list[Tensor], function: Callable[[], Any]) -> Any:
        """Call with these in place of the learnt parameters: their gradient is then summed over ranks."""
        if not shared:
            return function()
        names = [name for name, p in self.named_parameters() if p.requires_grad]
        holder = _Holder(self)
        return torch.func.functional_call(holder, dict(zip(names, shared, strict=True)), (function,))

    def _learnt(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.requires_grad] if torch.is_grad_enabled() else []

    def _check(self, call: str, parts: Parts) -> None:
        """What can be told before anybody else is asked."""
        _method(self.loss, call)
        device = parts.tensors["1"].device
        for p in (*self.parameters(), *self.buffers()):
            if p.device.type != device.type:
                raise InputError(f"the loss is on {p.device}, its inputs on {device}: use loss.to(device)")

    def _fingerprint(self) -> int:
        """A number by which ranks tell whether they have the same loss."""
        held = (*self.parameters(), *self.buffers())
        shapes = [(tuple(x.shape), str(x.dtype), x.requires_grad) for x in held]
        # Of what promises nothing, settings are its own affair: what it holds may well differ between ranks.
        made_with = "" if not self_contained(self.loss) else settings(self.loss) if held else repr(self.loss)
        said = f"{name_class(self.loss)} {made_with} {self.how} {self._drawn} {shapes}"
        return zlib.crc32(said.encode())

    @torch.no_grad()
    def _meet(self) -> None:
        """Where some rank calls its loss for the first time: all go on from the parameters and buffers of rank 0."""
        for x in (*self.parameters(), *self.buffers()):
            first = x.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(first, 0)
            if not torch.equal(first, x):
                x.copy_(first)
        self._met["once"] = True

    @contextmanager
    def _luck(self, device: torch.device) -> Iterator[None]:
        """Draw on every rank what rank 0 draws: a loss that draws must draw alike."""
        if not self._drawn:
            yield
            return
        given = getattr(self.loss, "random", None)
        if isinstance(given, torch.Generator):
            given.set_state(_first(given.get_state()))
        common = [torch.default_generator]
        if device.type == "cuda":
            common.append(torch.cuda.default_generators[device.index or 0])
        before = [generator.get_state() for generator in common]
        for generator, state in zip(common, before, strict=True):
            generator.set_state(_first(state))
        try:
            yield
        finally:
            if dist.get_rank() > 0:  # other things that ranks draw must stay their own
                for generator, state in zip(common, before, strict=True):
                    generator.set_state(state)


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


def _first(state: Tensor) -> Tensor:
    """The random state of rank 0."""
    sent = state.to(gather.desk(), copy=True)
    dist.broadcast(sent, 0)
    return sent.cpu()


__all__ = ["AcrossRanks", "across_ranks"]
