"""What tables of pairs and of triplets share: rows of sample ids, their checks, and who is in which split.

What the columns mean is said in :mod:`mettle.data.tuples`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from mettle.data.decode import shown
from mettle.data.manifest import split_column
from mettle.data.references import Names, numbers
from mettle.data.samples import NO_SPLIT, SPLITS, Samples, codes_of, int64
from mettle.data.table import read_table
from mettle.errors import DataError, InputError


@dataclass(frozen=True, eq=False)
class Tuples:
    """What pairs and triplets share. Rows are cut with :meth:`where`, and brought to samples with :meth:`settled`."""

    members: np.ndarray  # (n, 2) or (n, 3) sample ids, int64
    target: np.ndarray | None  # (n,) float64; triplets have none
    weight: np.ndarray  # (n,) float64
    split: np.ndarray  # (n,) codes of SPLITS, or NO_SPLIT
    lines: np.ndarray  # (n,) where each row stands in its file, for messages
    origin: str = ""

    roles: ClassVar[tuple[str, ...]] = ()
    noun: ClassVar[str] = ""

    def __len__(self) -> int:
        return len(self.members)

    def where(self, mask: np.ndarray) -> Self:
        """The rows for which ``mask`` is true."""
        at = np.flatnonzero(mask)
        target = None if self.target is None else self.target[at]
        return replace(
            self,
            members=self.members[at],
            target=target,
            weight=self.weight[at],
            split=self.split[at],
            lines=self.lines[at],
        )

    def part(self, split: str) -> Self:
        """The rows of one split that are there: weight 0 leaves a row out."""
        return self.where((self.split == SPLITS.index(split)) & (self.weight > 0))

    def positions(self, samples: Samples) -> np.ndarray:
        """(n, 2) or (n, 3) positions of the members in a table of samples, -1 for those that it does not hold."""
        if len(samples) == 0:
            return np.full(self.members.shape, -1)
        order = np.argsort(samples.ids, kind="stable")
        place = np.searchsorted(samples.ids[order], self.members).clip(max=len(samples) - 1)
        found = order[place]
        return np.where(samples.ids[found] == self.members, found, -1)

    def within(self, low: float, high: float) -> Self:
        """The same table, if every target lies between these two."""
        if self.target is not None:
            bad = ~((self.target >= low) & (self.target <= high))
            if bad.any():
                value = self.target[bad][0]
                raise self.error(
                    int(bad.argmax()), f"target {value:g} is not in [{low:g}, {high:g}], as the loss needs"
                )
        return self

    def by_identity(self, samples: Samples) -> Samples:
        """Samples split as the rows say: an identity is in the split of the rows that it occurs in, or in none."""
        at = self.positions(samples)
        part = np.full(samples.labels.max(initial=0) + 1, NO_SPLIT, np.int8)
        for code in range(len(SPLITS)):
            found = at[self.split == code]
            part[samples.labels[found[found >= 0]]] = code
        return replace(samples, split=part[samples.labels])

    def settled(self, samples: Samples) -> tuple[Self, tuple[str, ...]]:
        """The rows that can be used with these samples, each with its split; and a note for those that cannot.

        Raises:
            DataError: an identity of one split occurs in rows of another: what is tested on must not be trained on.
        """
        notes = []
        there = self.positions(samples).min(1) >= 0
        if not there.all():
            notes.append(f"{(~there).sum()} of {len(self)} {self.noun}s name samples that were left out")
        table = self.where(there)
        at = table.positions(samples)
        of_members = samples.split[at].reshape(at.shape)
        common = np.where((of_members == of_members[:, :1]).all(1), of_members[:, 0], NO_SPLIT)
        split = np.where(table.split == NO_SPLIT, common, table.split).astype(np.int8)
        if (split == NO_SPLIT).any():
            notes.append(f"{(split == NO_SPLIT).sum()} of {len(self)} {self.noun}s lie across splits and are not used")
        table = replace(table, split=split).where(split != NO_SPLIT)
        table._refuse_leaks(samples)
        return table, tuple(notes)

    def fingerprint(self) -> str:
        """A short hash of the table."""
        digest = hashlib.sha256(type(self).__name__.encode())
        for array in (self.members, self.target, self.weight, self.split):
            digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def error(self, row: int, problem: str) -> DataError:
        """An error about one row."""
        return DataError(f"{self.origin or self.noun + 's'} line {self.lines[row]}: {problem}")

    def _refuse_leaks(self, samples: Samples) -> None:
        """No identity may be in two splits, neither by its samples nor by the rows it occurs in."""
        labels = samples.labels[self.positions(samples)]
        seen = np.zeros((samples.labels.max(initial=0) + 1, len(SPLITS)), bool)
        known = samples.split != NO_SPLIT
        seen[samples.labels[known], samples.split[known]] = True
        seen[labels, self.split[:, None]] = True
        leaking = seen[labels].sum(2) > 1
        if leaking.any():
            row, role = np.argwhere(leaking)[0]
            label = labels[row, role]
            own = SPLITS[self.split[row]]
            other = next(name for k, name in enumerate(SPLITS) if seen[label, k] and name != own)
            raise self.error(
                row,
                f"a {own} {self.noun} involves {shown(samples.label.names[label])}, which is in the {other} split too: "
                "what is trained on must not be tested on; split by identity",
            )

    def _checked(self) -> Self:
        """The same table, if it makes sense by itself."""
        n = len(self.members)
        if n == 0:
            raise DataError(f"{self.origin or 'the table'} has no {self.noun}s")
        columns = {"target": self.target, "weight": self.weight, "split": self.split}
        for name, column in columns.items():
            if column is not None and column.shape != (n,):
                raise DataError(f"{name} has shape {column.shape} for {n} {self.noun}s: one entry each is needed")
        if self.target is not None and not np.isfinite(self.target).all():
            raise self.error(int((~np.isfinite(self.target)).argmax()), "target is not a finite number")
        bad = ~((self.weight >= 0) & np.isfinite(self.weight))
        if bad.any():
            raise self.error(int(bad.argmax()), f"weight must be at least 0, got {self.weight[bad][0]:g}")
        for i in range(1, len(self.roles)):
            for j in range(i):
                twice = self.members[:, i] == self.members[:, j]
                if twice.any():
                    names = f"{self.roles[j]} and {self.roles[i]}"
                    raise self.error(int(twice.argmax()), f"{names} are one sample: take the row out")
        return self

    @classmethod
    def _build(
        cls,
        members: Sequence[Iterable[int]],
        target: Iterable[float] | None,
        weight: Iterable[float] | None,
        split: Iterable[object] | None,
        origin: str,
        lines: Iterable[int] | None = None,
    ) -> Self:
        columns = [_array(column, name) for name, column in zip(cls.roles, members, strict=True)]
        for name, column in zip(cls.roles, columns, strict=True):
            sound = column.ndim == 1 and (column.dtype.kind in "iu" or not len(column))
            if not sound or len(column) != len(columns[0]):
                raise DataError(f"{name} must be sample ids, whole numbers, as many as {cls.roles[0]}")
        n = len(columns[0])
        return cls(
            members=np.stack([int64(c, name) for c, name in zip(columns, cls.roles, strict=True)], 1),
            target=None if target is None else _reals(target, "target"),
            weight=np.ones(n) if weight is None else _reals(weight, "weight"),
            split=codes_of(None if split is None else _array(split, "split"), SPLITS, "split", n),
            lines=np.arange(1, n + 1) if lines is None else _array(lines, "lines").astype(np.int64),
            origin=origin,
        )._checked()

    @classmethod
    def _from_file(cls, path: str | Path, samples: Samples, graded: bool) -> Self:
        table = read_table(Path(path))
        find = Names(samples)
        return cls._build(
            [find.ids(table, table.known(role)) for role in cls.roles],
            numbers(table, table.known("target")) if graded else None,
            numbers(table, "weight") if "weight" in table.columns else None,
            split_column(table),
            shown(path),
            table.lines,
        )


def _array(values: Iterable[object], name: str) -> np.ndarray:
    try:
        return values if isinstance(values, np.ndarray) else np.asarray(list(values))
    except (TypeError, ValueError):  # one number, or lists of several lengths
        raise InputError(f"{name} must be a list or an array, one entry a row: got {str(values)[:60]}") from None


def _reals(values: Iterable[object], name: str) -> np.ndarray:
    array = _array(values, name)
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be numbers, one a row: got {str(array.flat[0])[:40]!r}") from None
