"""At which threshold a gallery says yes, and the false-accept rate that it stands for.

- A ``threshold`` given with the question is taken as it is, 0 included; its rate is not known.
- Of the thresholds in the model's contract, or given when the gallery was made, the one for ``far`` is taken: by
  default 1e-3, or the lowest rate that could be measured.
- Where there are none, what independent directions of this dimension exceed at rate ``far``: an assumption, and the
  answer says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scipy.special import betaincinv

from mettle.errors import InputError

DEFAULT = 1e-3


@dataclass(frozen=True)
class Operating:
    """A threshold and what is known of it."""

    threshold: float
    far: float | None
    basis: str


def operating(
    thresholds: Mapping[str, Any], dim: int, far: float | None = None, threshold: float | None = None
) -> Operating:
    """The point that an answer is given at."""
    if threshold is not None:
        value = _number(threshold, "threshold is a cosine, between -1 and 1")
        if not -1 <= value <= 1:
            raise InputError(f"threshold is a cosine, between -1 and 1: got {threshold!r}")
        return Operating(value, None, "threshold given with the question")
    if far is not None and not 0 < _number(far, "far is a rate between 0 and 1") < 1:
        raise InputError(f"far is a rate between 0 and 1: got {far!r}")
    known = {float(rate): entry for rate, entry in thresholds.items() if entry.get("threshold") is not None}
    if not known:
        wanted = DEFAULT if far is None else far
        return Operating(
            isotropic(dim, wanted), wanted, "assumed: independent directions; nothing was measured for this gallery"
        )
    wanted = (DEFAULT if DEFAULT in known else min(known)) if far is None else far
    at = next((rate for rate in known if math.isclose(rate, wanted)), None)
    if at is None:
        listed = ", ".join(f"{rate:g}" for rate in sorted(known))
        raise InputError(f"no threshold was measured for far={wanted:g}; known are {listed}: ask for one of these")
    entry = known[at]
    return Operating(float(entry["threshold"]), at, str(entry.get("measured_on", "given when the gallery was made")))


def isotropic(dim: int, far: float) -> float:
    """The cosine that two independent directions in ``dim`` dimensions exceed with probability ``far``.

    (1 + cos) / 2 of independent directions follows Beta((dim - 1) / 2, (dim - 1) / 2).
    """
    if dim == 1:
        return 1.0
    half = (dim - 1) / 2
    return float(1 - 2 * betaincinv(half, half, far))


def as_thresholds(given: Mapping[Any, Any] | None) -> dict[str, Any]:
    """``{far: threshold}`` or the table of a contract, in the contract's form."""
    found: dict[str, Any] = {}
    for rate, entry in (given or {}).items():
        try:
            far = float(rate)
        except (TypeError, ValueError):
            raise InputError(f"thresholds are keyed by false-accept rates: got {rate!r}") from None
        if not 0 < far < 1:
            raise InputError(f"thresholds are keyed by false-accept rates between 0 and 1: got {rate!r}")
        table = dict(entry) if isinstance(entry, Mapping) else {"threshold": entry}
        if not isinstance(entry, Mapping) and entry is None:
            raise InputError(f"the threshold for far {far:g} is a cosine, between -1 and 1: got None")
        value, wanted = table.get("threshold"), f"the threshold for far {far:g} is a cosine, between -1 and 1"
        if value is not None and not -1 <= _number(value, wanted) <= 1:
            raise InputError(f"{wanted}: got {value!r}")
        found[repr(far)] = table | ({} if value is None else {"threshold": float(value)})
    return found


def _number(value: Any, wanted: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"{wanted}: got {value!r}") from None
