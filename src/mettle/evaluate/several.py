"""Arguments that take one number or many: rates, ranks, thresholds, cuts. One number is a list of one, everywhere."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from mettle.errors import InputError

Numbers = Iterable[float] | float
Wholes = Iterable[int] | int


def rates(given: Any, name: str = "fars", least: int = 1, *, below_one: bool = False) -> tuple[float, ...]:
    """Rates above 0 and at most 1, in the order given; ``below_one``: 1 has no threshold, for it accepts everybody."""
    found = numbers(given)
    if found is None or len(found) < least or not all(0 < x <= 1 for x in found):
        raise InputError(f"{name} must be rates between 0 and 1, such as 0.001 or (0.01, 0.001): got {given!r}")
    if below_one and 1 in found:
        raise InputError(f"{name} must be above 0 and below 1: got {given!r}")
    return tuple(float(x) for x in found)


def wholes(given: Any, name: str) -> tuple[int, ...]:
    """Whole numbers from 1 up, sorted, each once."""
    found = numbers(given)
    if not found or not all(isinstance(x, int) and x >= 1 for x in found):
        raise InputError(f"{name} must be whole numbers from 1 up, such as 4 or (1, 2, 4, 8): got {given!r}")
    return tuple(sorted({int(x) for x in found}))


def thresholds(given: Any, name: str = "thresholds", least: int = 1) -> tuple[float, ...]:
    """Thresholds, in the order given; infinite ones accept all or none."""
    found = numbers(given)
    if found is None or len(found) < least or any(math.isnan(x) for x in found):
        raise InputError(f"{name} must be numbers, such as 0.4 or (0.4, 0.5): got {given!r}")
    return tuple(float(x) for x in found)


def numbers(given: Any) -> tuple[int | float, ...] | None:
    """The numbers themselves, as Python's own so that they print as typed.

    None for text, truth values and nothing, and for whole numbers that are too large for a float.
    """
    if isinstance(given, np.ndarray | np.generic | torch.Tensor):
        given = given.tolist()
    many = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    found: list[Any] = [x.item() if isinstance(x, np.generic) else x for x in (given if many else (given,))]
    return tuple(found) if all(map(_is_number, found)) else None


def _is_number(x: Any) -> bool:
    if not isinstance(x, int | float) or isinstance(x, bool):
        return False
    try:
        float(x)
    except OverflowError:
        return False
    return True


__all__ = ["Numbers", "Wholes", "numbers", "rates", "thresholds", "wholes"]
