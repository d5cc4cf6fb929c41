"""Rows of numbers in memory, an `Inputs`; and how the columns of a table became them.

What a model was trained on is a list of `Feature`: the names of the columns and, of text, the categories and their
places. As JSON it goes into the contract of a run, so that a later table is matched by name and by category.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mettle.errors import DataError


@dataclass(frozen=True)
class Feature:
    """One column of a table, and the numbers it becomes.

    Attributes:
        name: Of the column.
        categories: Of text, in the order of their places; None for a column of numbers.
        coded: Of text: one number, the place of the category, instead of one number per category.
        fill: What a missing number becomes; None where none may be missing.
    """

    name: str
    categories: tuple[str, ...] | None = None
    coded: bool = False
    fill: float | None = None

    @property
    def titles(self) -> list[str]:
        """What the numbers are called."""
        if self.categories is None or self.coded:
            return [self.name]
        return [f"{self.name}={category}" for category in self.categories]

    def table(self) -> dict[str, Any]:
        """The same as JSON can hold it, without what is at its default."""
        found: dict[str, Any] = {"name": self.name}
        if self.categories is not None:
            found |= {"categories": list(self.categories)}
        return found | ({"coded": True} if self.coded else {}) | ({} if self.fill is None else {"fill": self.fill})


def features_of(tables: Iterable[Mapping[str, Any] | Feature]) -> tuple[Feature, ...]:
    """Features from what `Feature.table` gave.

    Raises:
        DataError: they are not that.
    """
    found = []
    for one in tables:
        if isinstance(one, Mapping):
            try:
                categories = one.get("categories")
                fill = one.get("fill")
                one = Feature(
                    str(one["name"]),
                    None if categories is None else tuple(map(str, categories)),
                    bool(one.get("coded", False)),
                    None if fill is None else float(fill),
                )
            except (KeyError, TypeError, ValueError):
                raise DataError(f"the columns that a model was trained on cannot be read: {str(one)[:80]}") from None
        if not isinstance(one, Feature):
            raise DataError(f"the columns that a model was trained on cannot be read: {str(one)[:80]}")
        found.append(one)
    return tuple(found)


class Rows:
    """Rows of numbers in memory: embeddings, or the features of a table.

    Args:
        array: (n, f) numbers; kept as float32, in which a number beyond its range is infinite.
        names: What the f columns are called, when known.
        features: The columns of the table that they came from, when they came from one.
    """

    kind: Literal["image", "row"] = "row"
    resident = True

    def __init__(self, array: np.ndarray, names: Sequence[str] = (), features: Sequence[Feature] = ()) -> None:
        array = np.asarray(array)
        if array.ndim != 2 or array.dtype.kind not in "fiub":
            raise DataError(f"rows must be (n, f) numbers, got {array.dtype} {array.shape}")
        names = names or [title for feature in features for title in feature.titles]
        if names and len(names) != array.shape[1]:
            raise DataError(f"{len(names)} names for {array.shape[1]} columns: one per column is needed")
        with np.errstate(over="ignore"):
            self.array = array.astype(np.float32, copy=False)
        self.names, self.features = tuple(names), tuple(features)

    def __len__(self) -> int:
        return len(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        """(f,)."""
        return self.array.shape[1:]

    def read(self, at: np.ndarray) -> np.ndarray:
        """Copies of the rows at these positions."""
        return self.array[np.asarray(at, np.int64)]

    def fingerprint(self) -> str:
        """Hash of all numbers; what they are called is the contract's affair."""
        return digest(str(self.array.shape).encode(), self.array)

    def take(self, at: np.ndarray) -> "Rows":
        """Only the rows at these positions."""
        return Rows(self.array[np.asarray(at, np.int64)], self.names, self.features)

    def name(self, i: int) -> str:
        """What to call one row, counted from 1."""
        return f"row {i + 1}"

    def content(self, i: int) -> bytes:
        """The numbers of one row."""
        return self.array[i].tobytes()


def digest(head: bytes, *arrays: np.ndarray) -> str:
    """A short hash of some arrays."""
    found = hashlib.sha256(head)
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]
