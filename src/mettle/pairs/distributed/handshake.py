"""A call of a loss taken apart into tensors that have rows, and put together again from the rows of all ranks."""

import zlib
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.distributed import collectives as gather
from mettle.pairs.distributed.collectives import Crowd
from mettle.pairs.validation import stacked

PLAIN = bool | int | float | str
"""What is the same on two ranks if it reads the same."""


def name_class(x: Any) -> str:
    """The class of an object in words that mean the same in every process: ranks compare them, nothing else does."""
    return f"{type(x).__module__}.{type(x).__qualname__}"


@dataclass(frozen=True)
class Parts:
    """The tensors of a call by their places, and its other options."""

    tensors: dict[str, Tensor]
    plain: dict[str, Any]

    @classmethod
    def of(cls, args: tuple, options: dict[str, Any]) -> Self:
        """Take a call apart; refuses what has no rows to be put together over ranks."""
        if not 1 <= len(args) <= 4:
            raise InputError(f"across ranks, give embeddings and labels by position: got {len(args)} of them")
        options = {name: given for name, given in options.items() if given is not None}
        if options.pop("views", False):
            if len(args) != 2:
                raise InputError(f"views=True takes embeddings (n, views, d) and labels (n,), got {len(args)} of them")
            z, labels, biased = stacked(*args, options.get("biased"))
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
            tensors[place] = made._checked(place, x)
        for name, given in options.items():
            if isinstance(given, Tensor | tuple | list):
                raise InputError(
                    f"{name}= is not known across ranks: give ref, ids, biased or weight, or gather it before"
                )
        return made

    def _checked(self, place: str, x: Any) -> Tensor:
        name = self.names[place]
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor, got {type(x).__name__}")
        if not 1 <= x.ndim <= 3:
            raise InputError(f"{name} must have one entry per row, got shape {tuple(x.shape)}")
        if not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
            x = x.long()
        if x.dtype not in gather.TYPES:
            raise InputError(f"{name} must be of an ordinary floating or whole type, got {x.dtype}")
        if x.device.type not in gather.DEVICES or not gather.carries(x.device):
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
    def beyond(self) -> bool:
        """Whether more was given than a batch: a reference set or weights."""
        return any(place in self.tensors for place in ("ref[0]", "ids", "biased[1]", "weight", "4"))

    def rebuilt(self, tensors: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
        """A call with these tensors."""
        options = dict(self.plain) | {name: tensors[name] for name in ("ids", "weight") if name in tensors}
        for name in ("ref", "biased"):
            held = [tensors[f"{name}[{k}]"] for k in range(3) if f"{name}[{k}]" in tensors]
            if held:
                options[name] = held[0] if name == "biased" and len(held) == 1 else tuple(held)
        return [x for place, x in sorted(tensors.items()) if place.isdigit()], options

    @staticmethod
    def refuse_common_ids(tensors: dict[str, Tensor], crowd: Crowd) -> None:
        """References that two ranks call by one id: given twice, or numbered by each rank for itself."""
        ids = tensors.get("ref[2]")
        if ids is None:
            return
        parts = ids.split(crowd.rows["ref[2]"])
        if sum(len(part.unique()) for part in parts) > len(ids.unique()):
            raise InputError(
                "the same reference id comes from two ranks: each rank gives its own part of the references, and ids "
                "must be numbered over all ranks (a queue numbers its entries for one rank)"
            )
