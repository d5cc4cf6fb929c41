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
        value = float(threshold)
        if not -1 <= value <= 1:
            raise InputError(f"threshold is a cosine, between -1 and 1: got {threshold!r}")
        return Operating(value, None, "threshold given with the question")
    if far is not None and not 0 < far < 1:
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
        table = dict(entry) if isinstance(entry, Mapping) else {"threshold": float(entry)}
        value = table.get("threshold")
        if value is not None and not -1 <= float(value) <= 1:
            raise InputError(f"the threshold for far {far:g} is a cosine, between -1 and 1: got {value!r}")
        found[f"{far:g}"] = table
    return found
