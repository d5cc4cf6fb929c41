"""What an audit leaves out: parts that cannot be measured, with the reason, and rows that would take too long."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mettle.errors import MettleError


@dataclass(frozen=True)
class Parts:
    """What could not be measured, and what was measured on some rows only, as it is found out."""

    missing: dict[str, str] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)

    def attempt(self, name: str, make: Callable[[], Any]) -> Any:
        """The part, or None with the reason kept."""
        try:
            return make()
        except MettleError as error:
            self.missing[name] = str(error)
            return None


def sampled(labels: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Positions of whole identities drawn at random, at most ``most`` of them; rows at random if two do not fit."""
    if len(labels) <= most:
        return np.arange(len(labels))
    drawn = np.random.default_rng(seed)
    values, counts = np.unique(labels, return_counts=True)
    order = drawn.permutation(len(values))
    fits = order[np.cumsum(counts[order]) <= most]
    if len(fits) < 2:
        return np.sort(drawn.permutation(len(labels))[:most])
    return np.flatnonzero(np.isin(labels, values[fits]))


def affordable(y: np.ndarray, budget: int, seed: int) -> np.ndarray:
    """Positions of whole identities, so few that rows x identities stay within a budget."""
    rows = len(y)
    while True:
        at = sampled(y, rows, seed)
        cost = len(at) * len(np.unique(y[at]))
        if cost <= budget or rows < 1000:
            return at
        rows = min(rows - 1, int(rows * math.sqrt(budget / cost)))
