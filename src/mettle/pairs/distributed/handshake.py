"""What ranks tell each other before they compute: who brings what, whether it fits together, whose error it is.

A call of a loss is taken apart into tensors that have rows (`CallTensors`); ranks exchange its description in numbers
of a fixed length (`exchange_descriptions`). What does not fit together, or is wrong on one rank, is the same error on
all of them, before anything waits for what will never come.
"""

import zlib
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch import distributed as dist

from mettle.errors import InputError
from mettle.pairs.validation import stack_views

PLACES = ("1", "2", "3", "4", "ref[0]", "ref[1]", "ref[2]", "ids", "biased[0]", "biased[1]", "weight")
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
DEVICES = ("cpu", "cuda")
WORDS = 1024  # bytes of a message that other ranks are told
# What every rank says of a call, beside its tensors; all but the first three must be alike.
HEAD = ("failed", "fresh", "fuses", "call", "gradients", "training", "loss", "options")
SLOT = ("given", "dimensions", "width", "depth", "type", "device", "rows", "wants")  # the last two may differ
PLAIN = bool | int | float | str
"""What is the same on two ranks if it reads the same."""


@dataclass(frozen=True)
class RankInfo:
    """Which rank this is, and how many rows every rank brings of each tensor."""

    rank: int
    size: int
    rows: dict[str, list[int]]
    wanted: frozenset[str]  # tensors that need a gradient on some rank
    fresh: bool  # whether some rank's loss has not met the others yet
    fuses: bool = False  # whether every rank can compute its anchors in the fused kernels

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


def has_other_ranks() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def can_send(device: torch.device) -> bool:
    """Whether the process group can send tensors of this kind of device."""
    return f"{device.type}:" in dist.get_backend_config()


def control_device() -> torch.device:
    """Where numbers about a call are exchanged."""
    return torch.device("cpu" if can_send(torch.device("cpu")) else "cuda")


@dataclass(frozen=True)
class CallSummary:
    """What a rank is about to do, in numbers."""

    call: int
    training: bool
    loss: int
    options: int
    fresh: bool
    fuses: bool


def exchange_descriptions(
    tensors: dict[str, Tensor], names: dict[str, str], call: CallSummary, error: Exception | None
) -> RankInfo:
    """Tell the others what this rank brings, and hear what they do; raises on all ranks where it does not fit."""
    gradients = torch.is_grad_enabled()
    said = (error is not None, call.fresh, call.fuses, call.call, gradients, call.training, call.loss, call.options)
    row = [int(x) for x in said]
    for place in PLACES:
        row += _describe_tensor(tensors.get(place))
    table = _exchange_numbers(row)
    if any(line[0] for line in table):
        raise_everywhere(error)
    for k, name in enumerate(HEAD[3:], 3):
        _require_equal([line[k] for line in table], name)
    for k, place in enumerate(PLACES):
        start = len(HEAD) + k * len(SLOT)
        found = [line[start : start + len(SLOT)] for line in table]
        if len({tuple(slot[:-2]) for slot in found}) > 1:
            _raise_unequal_tensors(names.get(place, place), found)
    slots = {p: [line[len(HEAD) + PLACES.index(p) * len(SLOT) :] for line in table] for p in tensors}
    rows = {place: [slot[SLOT.index("rows")] for slot in found] for place, found in slots.items()}
    wanted = frozenset(place for place, found in slots.items() if any(slot[SLOT.index("wants")] for slot in found))
    fresh, fuses = any(line[1] for line in table), all(line[2] for line in table)
    return RankInfo(dist.get_rank(), dist.get_world_size(), rows, wanted, fresh, fuses)


def _describe_tensor(x: Tensor | None) -> list[int]:
    if x is None:
        return [0] * len(SLOT)
    shape = [*x.shape[1:], 0, 0][:2]
    wants = x.requires_grad and torch.is_grad_enabled()
    return [1, x.ndim, *shape, TYPES.index(x.dtype), DEVICES.index(x.device.type), len(x), int(wants)]


def _exchange_numbers(row: list[int]) -> list[list[int]]:
    """One row of numbers per rank."""
    mine = torch.tensor(row, dtype=torch.long, device=control_device())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).tolist()


def _require_equal(said: list[int], name: str) -> None:
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


def _raise_unequal_tensors(name: str, found: list[list[int]]) -> NoReturn:
    other = next(rank for rank, slot in enumerate(found) if slot[:-2] != found[0][:-2])
    said = []
    for rank in (0, other):
        given, dimensions, width, depth, kind, device, *_ = found[rank]
        shape = ", ".join(["n", str(width), str(depth)][:dimensions])
        what = f"({shape}) {TYPES[kind]} on {DEVICES[device]}".replace("torch.", "") if given else "none"
        said.append(f"rank {rank} has {what}")
    raise InputError(f"{name} must be alike on all ranks but for the number of rows: {', '.join(said)}")


def raise_everywhere(error: Exception | None) -> NoReturn:
    """Where some rank cannot go on: raise what is wrong there on every rank."""
    said = "" if error is None else " ".join(str(error).split())
    if error is not None and not isinstance(error, InputError):
        said = f"{type(error).__name__}: {said}"
    mine = torch.zeros(WORDS, dtype=torch.uint8)
    told = said.encode()[:WORDS]
    mine[: len(told)] = torch.tensor(list(told), dtype=torch.uint8)
    mine = mine.to(control_device())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    for rank, words in enumerate(found):
        message = bytes(words.tolist()).rstrip(b"\0").decode(errors="ignore")
        if message:
            raise InputError(f"rank {rank}: {message}") from error
    raise InputError("a rank could not go on, and did not say why") from error


def name_class(x: Any) -> str:
    """The class of an object in words that mean the same in every process: ranks compare them, nothing else does."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


@dataclass(frozen=True)
class CallTensors:
    """The tensors of a call by their places, and its other options."""

    tensors: dict[str, Tensor]
    plain: dict[str, Any]

    @classmethod
    def from_call(cls, args: tuple, options: dict[str, Any]) -> Self:
        """Take a call apart; refuses what has no rows to be put together over ranks."""
        named = [
            name for name in ("indices_tuple", "positives", "negatives", "targets") if options.get(name) is not None
        ]
        if named or (len(args) > 2 and isinstance(args[2], tuple | list)):
            raise InputError(
                f"{named[0] if named else 'indices_tuple'}= names pairs of one rank's rows and is not known across "
                "ranks: give labels (n,) or (n, C), or call the loss without across_ranks"
            )
        if not 1 <= len(args) <= 4:
            raise InputError(f"across ranks, give embeddings and labels by position: got {len(args)} of them")
        options = {name: given for name, given in options.items() if given is not None}
        if options.pop("views", False):
            if len(args) != 2:
                raise InputError(f"views=True takes embeddings (n, views, d) and labels (n,), got {len(args)} of them")
            z, labels, biased = stack_views(*args, options.get("biased"))
            args, options = (z, labels), options if biased is None else options | {"biased": biased}
        tensors: dict[str, Any] = {str(k): x for k, x in enumerate(args, 1)}
        for name in ("ids", "weight"):
            if name in options:
                tensors[name] = options.pop(name)
        for name in ("ref", "biased"):
            if name in options:
                given = options.pop(name)
                given = given if isinstance(given, tuple | list) else (given,)
                most = 3 if name == "ref" else 2
                if not 1 <= len(given) <= most:
                    raise InputError(f"{name} has {len(given)} entries: at most {most} are known")
                tensors |= {f"{name}[{k}]": x for k, x in enumerate(given)}
        made = cls(tensors, options)
        for place, x in tensors.items():
            tensors[place] = made._validate_tensor(place, x)
        for name, given in options.items():
            if isinstance(given, Tensor | tuple | list):
                raise InputError(
                    f"{name}= is not known across ranks: give ref, ids, biased or weight, or gather it before"
                )
        return made

    def _validate_tensor(self, place: str, x: Any) -> Tensor:
        name = self.names[place]
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor, got {type(x).__name__}")
        if not 1 <= x.ndim <= 3:
            raise InputError(f"{name} must have one entry per row, got shape {tuple(x.shape)}")
        if not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
            x = x.long()
        if x.dtype not in TYPES:
            raise InputError(f"{name} must be of an ordinary floating or whole type, got {x.dtype}")
        if x.device.type not in DEVICES or not can_send(x.device):
            raise InputError(
                f"{name} is on {x.device}, which this process group cannot send: move it, or use another backend"
            )
        first = self.tensors["1"]
        if place in ("2", "3", "4") and len(x) != len(first):
            raise InputError(f"{name} must have one entry per embedding: got {tuple(x.shape)} for {len(first)}")
        return x

    @property
    def names(self) -> dict[str, str]:
        """What to call the tensors in messages."""
        own = {"1": "embeddings", "2": "labels"} if "3" not in self.tensors else {}
        return {place: own.get(place, f"argument {place}" if place.isdigit() else place) for place in self.tensors}

    @property
    def options(self) -> int:
        """A number by which ranks tell whether their other options are the same."""
        # Of anything else only the type: its repr may be an address.
        said = [(k, v if isinstance(v, PLAIN) else name_class(v)) for k, v in sorted(self.plain.items())]
        return zlib.crc32(repr(said).encode())

    @property
    def has_more_than_batch(self) -> bool:
        """Whether more was given than a batch: a reference set or weights."""
        return any(place in self.tensors for place in ("ref[0]", "ids", "biased[1]", "weight", "4"))

    def rebuild_call(self, tensors: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
        """A call with these tensors."""
        options = dict(self.plain) | {name: tensors[name] for name in ("ids", "weight") if name in tensors}
        for name in ("ref", "biased"):
            held = [tensors[f"{name}[{k}]"] for k in range(3) if f"{name}[{k}]" in tensors]
            if held:
                options[name] = held[0] if name == "biased" and len(held) == 1 else tuple(held)
        return [x for place, x in sorted(tensors.items()) if place.isdigit()], options

    @staticmethod
    def raise_if_ids_collide(tensors: dict[str, Tensor], ranks: RankInfo) -> None:
        """References that two ranks call by one id: given twice, or numbered by each rank for itself."""
        ids = tensors.get("ref[2]")
        if ids is None:
            return
        call_tensors = ids.split(ranks.rows["ref[2]"])
        if sum(len(part.unique()) for part in call_tensors) > len(ids.unique()):
            raise InputError(
                "the same reference id comes from two ranks: each rank gives its own part of the references, and ids "
                "must be numbered over all ranks (a queue numbers its entries for one rank)"
            )
