"""What goes between ranks: who brings what, rows of all ranks with gradient, sums over ranks.

Ranks first tell each other what they bring, in numbers of a fixed length. What does not fit together, or is wrong on
one rank, is the same error on all of them, before anything waits for what will never come.

    arrive(...)  -> Crowd      everybody's sizes, or the error of all
    spread(...)  -> tensors    gathered, kept or shared; one node of the graph, so one meeting on the way back
    total(...)   -> numbers    summed over ranks, or the error of all

Every rank back-propagates. What reaches a rank's own rows is multiplied by the number of ranks, because
`DistributedDataParallel` then takes the mean over ranks of what must be a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch import distributed as dist

from mettle.errors import InputError

Kind = Literal["gather", "own", "share"]
"""Rows of all ranks; a rank's own rows; something that all ranks have alike, such as class vectors."""

PLACES = ("1", "2", "3", "4", "ref[0]", "ref[1]", "ref[2]", "ids", "biased[0]", "biased[1]", "weight")
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
DEVICES = ("cpu", "cuda")
WORDS = 1024  # bytes of a message that other ranks are told

# What every rank says of a call, beside its tensors; all but the first two must be alike.
HEAD = ("failed", "fresh", "call", "gradients", "training", "loss", "options")
SLOT = ("given", "dimensions", "width", "depth", "type", "device", "rows", "wants")  # the last two may differ


@dataclass(frozen=True)
class Crowd:
    """Which rank this is, and how many rows every rank brings of each tensor."""

    rank: int
    size: int
    rows: dict[str, list[int]]
    wanted: frozenset[str]  # tensors that need a gradient on some rank
    fresh: bool  # whether some rank's loss has not met the others yet

    @property
    def own(self) -> slice:
        """This rank's rows among those of all ranks."""
        return self.span("1")

    def span(self, place: str) -> slice:
        """The same of any tensor."""
        start = sum(self.rows[place][: self.rank])
        return slice(start, start + self.rows[place][self.rank])

    @property
    def count(self) -> int:
        """The rows of all ranks together."""
        return sum(self.rows["1"])


def many() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def carries(device: torch.device) -> bool:
    """Whether the process group can send tensors of this kind of device."""
    return f"{device.type}:" in dist.get_backend_config()


def desk() -> torch.device:
    """Where numbers about a call are exchanged."""
    return torch.device("cpu" if carries(torch.device("cpu")) else "cuda")


@dataclass(frozen=True)
class Call:
    """What a rank is about to do, in numbers."""

    call: int
    training: bool
    loss: int
    options: int
    fresh: bool


def arrive(tensors: dict[str, Tensor], names: dict[str, str], call: Call, error: Exception | None) -> Crowd:
    """Tell the others what this rank brings, and hear what they do; raises on all ranks where it does not fit."""
    gradients = torch.is_grad_enabled()
    said = (error is not None, call.fresh, call.call, gradients, call.training, call.loss, call.options)
    row = [int(x) for x in said]
    for place in PLACES:
        row += _slot(tensors.get(place))
    table = _table(row)
    if any(line[0] for line in table):
        tell(error)
    for k, name in enumerate(HEAD[2:], 2):
        _alike([line[k] for line in table], name)
    for k, place in enumerate(PLACES):
        start = len(HEAD) + k * len(SLOT)
        found = [line[start : start + len(SLOT)] for line in table]
        if len({tuple(slot[:-2]) for slot in found}) > 1:
            _refuse_slots(names.get(place, place), found)
    slots = {p: [line[len(HEAD) + PLACES.index(p) * len(SLOT) :] for line in table] for p in tensors}
    rows = {place: [slot[SLOT.index("rows")] for slot in found] for place, found in slots.items()}
    wanted = frozenset(place for place, found in slots.items() if any(slot[SLOT.index("wants")] for slot in found))
    return Crowd(dist.get_rank(), dist.get_world_size(), rows, wanted, any(line[1] for line in table))


def _slot(x: Tensor | None) -> list[int]:
    if x is None:
        return [0] * len(SLOT)
    shape = [*x.shape[1:], 0, 0][:2]
    wants = x.requires_grad and torch.is_grad_enabled()
    return [1, x.ndim, *shape, TYPES.index(x.dtype), DEVICES.index(x.device.type), len(x), int(wants)]


def _table(row: list[int]) -> list[list[int]]:
    """One row of numbers per rank."""
    mine = torch.tensor(row, dtype=torch.long, device=desk())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).tolist()


def _alike(said: list[int], name: str) -> None:
    """Refuse ranks that do not make the same call."""
    other = next((rank for rank, value in enumerate(said) if value != said[0]), None)
    if other is None:
        return
    what = {
        "call": "make different calls: call the loss, or per_anchor, on every rank",
        "gradients": "differ in whether gradients are on: use torch.no_grad() on all ranks or on none",
        "training": "differ in whether the loss is training: use train() or eval() on every rank",
        "loss": "hold different losses: every rank needs the same one, with the same settings, and parameters of the "
        "same shapes and types",
        "options": "give different options: call the loss with the same engine, tile and others on every rank",
    }
    raise InputError(f"ranks 0 and {other} {what[name]}")


def _refuse_slots(name: str, found: list[list[int]]) -> NoReturn:
    other = next(rank for rank, slot in enumerate(found) if slot[:-2] != found[0][:-2])
    said = []
    for rank in (0, other):
        given, dimensions, width, depth, kind, device, *_ = found[rank]
        shape = ", ".join(["n", str(width), str(depth)][:dimensions])
        what = f"({shape}) {TYPES[kind]} on {DEVICES[device]}".replace("torch.", "") if given else "none"
        said.append(f"rank {rank} has {what}")
    raise InputError(f"{name} must be alike on all ranks but for the number of rows: {', '.join(said)}")


def tell(error: Exception | None) -> NoReturn:
    """Where some rank cannot go on: raise what is wrong there on every rank."""
    said = "" if error is None else " ".join(str(error).split())
    if error is not None and not isinstance(error, InputError):
        said = f"{type(error).__name__}: {said}"
    mine = torch.zeros(WORDS, dtype=torch.uint8)
    told = said.encode()[:WORDS]
    mine[: len(told)] = torch.tensor(list(told), dtype=torch.uint8)
    mine = mine.to(desk())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    for rank, words in enumerate(found):
        message = bytes(words.tolist()).rstrip(b"\0").decode(errors="ignore")
        if message:
            raise InputError(f"rank {rank}: {message}") from error
    raise InputError("a rank could not go on, and did not say why") from error


@dataclass(frozen=True)
class _Plan:
    """What becomes of every tensor, forward and backward."""

    crowd: Crowd
    kinds: list[Kind]
    places: list[str]
    meet: bool  # whether ranks have different parts of the gradient, to be summed over them


def spread(
    crowd: Crowd, tensors: dict[str, Tensor], kind: Kind, shared: Sequence[Tensor] = (), *, meet: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """All tensors ``gather``-ed or each rank's ``own``, and ``shared`` ones as they are; with gradient where wanted.

    ``meet``: every rank computes a part of the whole, so gradients are summed over ranks. Else every rank computes
    the whole and has all of the gradient by itself.
    """
    wanted = [place for place in tensors if place in crowd.wanted]
    found = {p: x for p, x in tensors.items() if p not in wanted}
    if kind == "gather":
        found = {place: _gathered(x.detach(), crowd.rows[place]) for place, x in found.items()}
    given = [tensors[place] for place in wanted]
    if not torch.is_grad_enabled() or not (given or shared):
        found |= {p: _gathered(x, crowd.rows[p]) if kind == "gather" else x for p, x in zip(wanted, given, strict=True)}
        return found, list(shared)
    kinds: list[Kind] = [kind for _ in given]
    kinds.extend("share" for _ in shared)
    plan = _Plan(crowd, kinds, wanted, meet)
    # A rank whose own rows want no gradient still has to come to the meeting.
    seed = torch.zeros((), requires_grad=True)
    made: Any = _Spread.apply(plan, seed, *given, *shared)
    return found | dict(zip(wanted, made[: len(given)], strict=True)), list(made[len(given) :])


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: _Plan, seed: Tensor, *tensors: Tensor):  # type: ignore[override]
        ctx.plan = plan
        rows = [plan.crowd.rows[place] for place in plan.places]
        found = [
            _gathered(x.detach(), n) for x, n, kind in zip(tensors, rows, plan.kinds, strict=False) if kind == "gather"
        ]
        return tuple([*found, *(x.view_as(x) for x in tensors[len(found) :])])

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # a second derivative would miss what other ranks add
            raise InputError("across ranks there are first derivatives only: do not pass create_graph=True")
        plan, found = ctx.plan, []
        for k, (g, kind) in enumerate(zip(grads, plan.kinds, strict=True)):
            g = _summed(g) if plan.meet and kind != "own" else g
            if kind == "gather":
                g = g[plan.crowd.span(plan.places[k])]
            found.append(g if kind == "share" else g * plan.crowd.size)
        return None, None, *found


def _summed(g: Tensor) -> Tensor:
    """A gradient summed over ranks, in float32 or better; one that holds some rows only stays so."""
    rows = g.sparse_dim() if g.is_sparse else None
    wide = g.to_dense() if g.is_sparse else g
    wide = wide.float() if g.dtype in (torch.float16, torch.bfloat16) else wide
    wide = wide.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(wide)
    wide = wide.to(g.dtype)
    return wide if rows is None else wide.to_sparse(rows)


def _gathered(x: Tensor, rows: list[int]) -> Tensor:
    """The rows of all ranks in rank order; ranks may have different numbers of them."""
    most = max(rows)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: len(x)] = x
    found = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(found, padded)
    return torch.cat([part[:n] for part, n in zip(found, rows, strict=True)])


def gathered(x: Tensor, crowd: Crowd, place: str) -> Tensor:
    """The rows of all ranks, without gradient."""
    return _gathered(x.detach(), crowd.rows[place])


def total(numbers: list[Tensor], device: torch.device) -> Tensor:
    """Each number summed over ranks, in float64, with gradient; raises on every rank where one has failed."""
    fine = torch.zeros((), dtype=torch.float64, device=device)
    found: Any = _Total.apply(torch.stack([*(x.double() for x in numbers), fine]))
    if bool(found[-1] > 0):
        tell(None)
    return found[:-1]


def fail(count: int, device: torch.device, error: Exception | None) -> NoReturn:
    """Instead of `total` of so many numbers: raise this rank's error on every rank."""
    flags = torch.zeros(count + 1, dtype=torch.float64, device=device)
    flags[-1] = 1
    dist.all_reduce(flags)
    tell(error)


class _Total(torch.autograd.Function):
    """A sum over ranks; every rank back-propagates the same whole, so each number gets the gradient of the sum."""

    @staticmethod
    def forward(ctx, x: Tensor):  # type: ignore[override]
        found = x.detach().clone()
        dist.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[override]
        return g
