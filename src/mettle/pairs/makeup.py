"""What a loss is made of, as far as ranks must know: what it promises, what it was made with, whether it draws."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from mettle.pairs.declarations import is_self_contained
from mettle.pairs.distributed.handshake import PLAIN, name_class


def exact(loss: Any) -> Literal["pairs", "rows", "whole"]:
    """How much each rank may leave to the others."""
    if getattr(loss, "by_row", False) is True:
        return "rows"
    names = ("sweeps", "__call__", "per_anchor", "output")
    if not (self_contained(loss) and all(hasattr(loss, name) for name in names)):
        return "whole"  # it may look at positions in the batch, or at anything else
    own_way = len({_owner(loss, name) for name in names[1:]}) > 1
    if own_way or draws(loss) or any(sweep.reads == "both" for sweep in loss.sweeps()):
        return "whole"
    return "pairs"


def _owner(thing: Any, name: str) -> type:
    """The class that defines a method."""
    return next(kind for kind in type(thing).__mro__ if name in vars(kind))


def parts_of(thing: Any) -> Iterator[Any]:
    """What a loss is made of, itself first: its difficulty, and the difficulties that one is made of."""
    yield thing
    for name in ("difficulty", "first", "second"):
        if (part := getattr(thing, name, None)) is not None:
            yield from parts_of(part)


def self_contained(loss: Any) -> bool:
    """Whether a loss and all of its difficulties promise to depend on settings, state and what they are shown alone."""
    return all(is_self_contained(part) for part in parts_of(loss))


def settings(loss: Any) -> list[tuple[str, dict[str, Any]]]:
    """What a loss with a state was made with. Its repr would do, if it did not show the state as well."""
    held = [m for part in parts_of(loss) for m in (part.modules() if isinstance(part, nn.Module) else [part])]
    found = []
    for thing in (part for one in held for part in parts_of(one) if is_self_contained(part)):
        plain = {k: v for k, v in sorted(vars(thing).items()) if k[0] != "_" and isinstance(v, PLAIN | None)}
        plain.pop("training", None)  # compared by itself
        found.append((name_class(thing), plain))
    return found


def draws(loss: Any) -> bool:
    """Whether the passes of a loss draw at random: lots go by positions in the batch of all ranks."""
    if not hasattr(loss, "sweeps"):
        return False
    given = getattr(loss, "random", None)
    generator = given if isinstance(given, torch.Generator) else torch.default_generator
    before = generator.get_state()
    loss.sweeps()
    moved = not torch.equal(before, generator.get_state())
    generator.set_state(before)  # looking changes nothing
    return moved
