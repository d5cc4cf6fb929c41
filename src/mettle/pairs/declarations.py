"""What losses and difficulties declare about themselves, and whether a subclass may still rely on it.

A declaration (``traits``, ``self_contained``, ``kernel_spec``, ``kernel_weights``, ``log_weight``) describes the maths
of the class that makes it. Subclasses inherit it. A subclass that overrides the maths and does not restate the
declaration loses it: what was true of one formula need not be true of another. Nothing but speed is lost.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

from torch import nn

# Around the maths, not part of it: a subclass may override these and keep every declaration.
AROUND = {
    "__call__",
    "per_anchor",
    "output",
    "statistics",
    "row_values",
    "at",
    "observe",
    "_observe",
    "forward",
    "extra_repr",
    "difficulty",
}
AROUND |= {
    "kernel_spec",
    "kernel_weights",
    "margin_spec",
    "self_contained",
    "traits",
}  # one may be restated without the others
AROUND |= {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}  # of every class below an ABC or a Protocol


@dataclass(frozen=True)
class Traits:
    """What a difficulty declares about its weights, as its attribute ``traits``. The default promises nothing.

    A wrong promise gives wrong numbers.

    Args:
        symmetric: w_ij = w_ji, so that both ends of a pair can share the work.
        continuous: a rounding of s moves a weight by no more than a rounding, so that positive pairs may be taken from
            a list instead of the tile that row statistics came from.
        trusted: ``weights`` gives a tensor (a, b) of the tile's device and type without NaN, so that the engine
            need not look at the weights of every tile (for which a GPU has to wait).
        self_contained: weights follow from the tile, the row statistics and the settings alone: not from positions
            in the batch, random draws, or anything that may differ between ranks.
        positive_weights: where SupCon applies positive weights.
        negatives: whether InfoNCE counts a negative as often as it weighs, or once (``plain``).
    """

    symmetric: bool = False
    continuous: bool = False
    trusted: bool = False
    self_contained: bool = False
    positive_weights: Literal["everywhere", "numerator"] = "everywhere"
    negatives: Literal["weight", "plain"] = "weight"

    def without_promises(self) -> "Traits":
        """What is left for a subclass with weights of its own: how losses use them, nothing about what they are."""
        return replace(self, symmetric=False, continuous=False, trusted=False, self_contained=False)


NO_TRAITS = Traits()


def declared_traits(difficulty: Any) -> Traits:
    """The traits that hold for a difficulty, or for none."""
    traits = getattr(difficulty, "traits", NO_TRAITS)
    return traits if overridden_since(type(difficulty), "traits") is None else traits.without_promises()


def is_self_contained(part: Any) -> bool:
    """Whether a loss, or a difficulty, promises to depend on settings, state and what it is shown alone."""
    if hasattr(part, "traits"):
        return declared_traits(part).self_contained
    return getattr(part, "self_contained", False) is True and overridden_since(type(part), "self_contained") is None


def declared_log_weight(difficulty: Any) -> Callable[..., Any] | None:
    """The ``log_weight`` of a difficulty whose weights are exponential up to a constant of the row, else None."""
    found = getattr(difficulty, "log_weight", None)
    return None if found is None or overridden_since(type(difficulty), "log_weight") is not None else found


@lru_cache(maxsize=1024)
def overridden_since(kind: type, declaration: str) -> str | None:
    """What a class overrides of the maths that a declaration describes; None where the declaration holds.

    The declaring class is the first in the order of resolution that defines the declaration. It describes whatever that
    class defines or inherits, except its fields, which a declaration reads from the object.
    """
    order = kind.__mro__
    at = next((k for k, base in enumerate(order) if declaration in vars(base)), None)
    if not at:  # declared by the class itself, or by the object
        return None
    declaring = order[at]
    described = {name for base in declaring.__mro__ if base not in (object, nn.Module) for name in vars(base)}
    described |= {"statistic_passes"}  # of a difficulty, in place of its row_statistics
    described -= AROUND | {field.name for field in _fields(declaring)}
    for base in order[:at]:
        for name in vars(base):
            if name in described and not (name.startswith("__") and name.endswith("__")):
                return name
    return None


def _fields(kind: type) -> tuple:
    return fields(kind) if hasattr(kind, "__dataclass_fields__") else ()  # pyright: ignore[reportArgumentType]


def iterate_parts(thing: Any) -> Iterator[Any]:
    """A loss or a difficulty and all that it is made of, itself first: its difficulty, and the parts of that."""
    if thing is None:
        return
    yield thing
    parts: Any = getattr(thing, "parts", None)
    inside: Any = parts() if callable(parts) else (getattr(thing, "difficulty", None),)
    for part in inside:
        yield from iterate_parts(part)
