"""What losses and difficulties were built with, looked at once: numbers that are numbers, difficulties that are ones.

A tensor or a learnable parameter in place of a number would work on one engine, get half of its gradient on another
and none on a third. So it is refused where the object is built.
"""

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import Traits

NUMBERS = (float, int, float | None, int | None)


def number(name: str, value: Any) -> None:
    """Refuse what is not one finite number."""
    if isinstance(value, Tensor):
        raise InputError(
            f"{name} must be a number, got a tensor: write float({name}); a learnable one is not supported"
        )
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, got {value}")


def numbers(**given: Any) -> None:
    """Each of them."""
    for name, value in given.items():
        number(name, value)


def whole(**given: Any) -> None:
    """Each of them must be a whole number: one that counts something."""
    numbers(**given)
    for name, value in given.items():
        if not isinstance(value, Integral):
            raise InputError(f"{name} must be a whole number, got {value!r}")


def weighing(name: str, value: Any) -> None:
    """Refuse what weighs no pairs: a name, a number, or a class in place of an object of it."""
    if isinstance(value, type):
        raise InputError(f"{name} must be a difficulty, got the class {value.__name__}: write {value.__name__}()")
    if not (callable(getattr(value, "stats", None)) and callable(getattr(value, "weigh", None))):
        raise InputError(f"{name} must be a difficulty such as mettle.difficulty.Threshold(), got {value!r}")
    traits = getattr(value, "traits", None)
    if traits is not None and not isinstance(traits, Traits):
        raise InputError(f"traits of a difficulty must be a mettle.pairs.Traits, got {traits!r}")


def settings(built: Any) -> None:
    """The same for the fields of a dataclass: those declared as numbers, and its difficulty."""
    for field in fields(built):
        value = getattr(built, field.name)
        if field.type in NUMBERS and value is not None:
            number(field.name, value)
        if field.name == "difficulty" and not (value is None and field.default is None):
            weighing(field.name, value)
