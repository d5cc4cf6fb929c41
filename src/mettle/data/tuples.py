"""`Pairs` and `Triplets`: what is known of samples two or three at a time, where no class says it.

| column of a pair table | meaning |
|---|---|
| ``first``, ``second`` | the two samples |
| ``target`` | how alike they are: a grade, or 1 for "same" and 0 for "different" |
| ``weight`` | how often the pair counts (optional): 0 = absent, 2 = as if it were listed twice |
| ``split`` | train, val or test (optional); without it, the split that both samples are in |

A triplet table has ``anchor``, ``positive``, ``negative`` and the two optional columns: the anchor is more like the
positive than like the negative. Tables are CSV (or ``.csv.gz``) or Parquet; other columns are passed over.

A cell names a sample of a source as the source does: a picture by its path (relative to the root of a folder, or as a
manifest writes it; absolute paths work too), anything by its id: the ``id`` column or array where there is one, else
the row, counted from 0. Tables keep ids, which survive every subset of the samples.

What tables of pairs and of triplets share: rows of sample ids, their checks, and who is in which split.

What the columns mean is said in :mod:`mettle.data.tuples`.

Tuples from labels: for every sample one of its class and one of another, drawn as a pure function of a seed.

How the cells of a table name samples, and its numbers: for tables about samples, such as pairs.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from mettle.data.dataset import NO_SPLIT, SPLITS, Samples, encode_categories, to_int64
from mettle.data.image_decoding import quote_name
from mettle.data.inputs import ImageFiles
from mettle.data.sources.manifest import read_split_column
from mettle.data.sources.text_table import TextTable, is_integer_text, parse_number, read_table
from mettle.errors import DataError, InputError
from mettle.rng import uniform_per_id

NEAR = 20_000  # names among which a misspelt one is looked for


class SampleLookup:
    """Finds the sample that a cell names: a picture by its path, anything by its id."""

    def __init__(self, samples: Samples):
        self.samples, self.known = samples, set(samples.ids.tolist())
        self.root, self.names = "", {}
        if isinstance(samples.inputs, ImageFiles):
            self.root = samples.inputs.root
            for id, at in zip(samples.ids.tolist(), samples.storage_index.tolist(), strict=True):
                name = os.path.normpath(samples.inputs.name(at))
                self.names[name] = None if name in self.names else id  # listed twice: which one is meant?

    def find_ids(self, table: TextTable, column: str) -> list[int]:
        """The sample id of every cell of a column."""
        cells = [value.strip() for value in table.columns[column]]
        seen: dict[str, int] = {}
        for row, text in enumerate(cells):
            if text not in seen:
                seen[text] = self._find_id(table, row, column, text)
        return [seen[text] for text in cells]

    def _find_id(self, table: TextTable, row: int, column: str, text: str) -> int:
        if not text:
            raise table.error(row, column, "empty; every row needs a sample")
        if is_integer_text(text) and int(text) in self.known:
            return int(text)
        name = os.path.normpath(text)
        if name not in self.names and os.path.isabs(name) and self.root:
            name = os.path.relpath(name, os.path.abspath(self.root))
        if self.names.get(name) is not None:
            return self.names[name]
        if name in self.names:
            raise table.error(row, column, f"{quote_name(text)} is listed twice in {self._where}; name it by its id")
        raise table.error(row, column, f"no sample {quote_name(text)} in {self._where}{self._suggest(text)}")

    @property
    def _where(self) -> str:
        return quote_name(self.samples.source_name) if self.samples.source_name else "the samples"

    def _suggest(self, text: str) -> str:
        close = get_close_matches(os.path.normpath(text), list(self.names)[:NEAR], n=1, cutoff=0.5)
        if close and not is_integer_text(text):
            return f"; did you mean {quote_name(close[0])}?"
        if self.names:
            return f"; its pictures are named like {quote_name(next(iter(self.names)))}"
        ids = self.samples.ids
        return f"; its ids go from {ids.min()} to {ids.max()}" if len(ids) else ""


def read_finite_numbers(table: TextTable, name: str) -> list[float]:
    """A column of finite numbers."""
    found = []
    for row, text in enumerate(table.columns[name]):
        value = parse_number(text.strip())
        if value is None or not np.isfinite(value):
            raise table.error(row, name, f"{quote_name(text)} is not a finite number")
        found.append(value)
    return found


def sample_class_tuples(samples: Samples, each: int, seed: int) -> tuple[np.ndarray, ...]:
    """Ids of anchors, of a sample of the same class for each, of one of another class; and their splits."""
    found: list[list[np.ndarray]] = []
    for code in range(len(SPLITS)):
        part = samples.where(samples.split == code)
        order = np.lexsort((part.ids, part.labels))
        labels, ids, n = part.labels[order], part.ids[order], len(part)
        _, starts, counts = np.unique(labels, return_index=True, return_counts=True)
        start, count = np.repeat(starts, counts), np.repeat(counts, counts)
        usable = np.flatnonzero((count > 1) & (count < n))
        start, count = start[usable], count[usable]
        for k in range(each):
            u = uniform_per_id(seed, k, ids[usable], 2, stream=17)
            step = 1 + (u[:, 0] * (count - 1)).astype(np.int64)
            positive = start + (usable - start + step) % count
            negative = (start + count + (u[:, 1] * (n - count)).astype(np.int64)) % n
            found.append([ids[usable], ids[positive], ids[negative], np.full(len(usable), code, np.int8)])
    if not any(len(columns[0]) for columns in found):
        where = samples.source_name or "the samples"
        raise DataError(f"no same-class pairs in {where}: a split needs two classes, one with two samples")
    return tuple(np.concatenate(columns) for columns in zip(*found, strict=True))


@dataclass(frozen=True, eq=False)
class Tuples:
    """What pairs and triplets share: rows that are cut with :meth:`where` and get splits by :meth:`assign_splits`."""

    members: np.ndarray  # (n, 2) or (n, 3) sample ids, int64
    target: np.ndarray | None  # (n,) float64; triplets have none
    weight: np.ndarray  # (n,) float64
    split: np.ndarray  # (n,) codes of SPLITS, or NO_SPLIT
    lines: np.ndarray  # (n,) where each row stands in its file, for messages
    source_name: str = ""

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

    def check_target_range(self, low: float, high: float) -> Self:
        """The same table, if every target lies between these two."""
        if self.target is not None:
            bad = ~((self.target >= low) & (self.target <= high))
            if bad.any():
                value = self.target[bad][0]
                raise self.error(
                    int(bad.argmax()), f"target {value:g} is not in [{low:g}, {high:g}], as the loss needs"
                )
        return self

    def split_samples(self, samples: Samples) -> Samples:
        """Samples split as the rows say: an identity is in the split of the rows that it occurs in, or in none."""
        at = self.positions(samples)
        part = np.full(samples.labels.max(initial=0) + 1, NO_SPLIT, np.int8)
        for code in range(len(SPLITS)):
            found = at[self.split == code]
            part[samples.labels[found[found >= 0]]] = code
        return replace(samples, split=part[samples.labels])

    def assign_splits(self, samples: Samples) -> tuple[Self, tuple[str, ...]]:
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
        return DataError(f"{self.source_name or self.noun + 's'} line {self.lines[row]}: {problem}")

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
            who = quote_name(samples.label.names[label])
            raise self.error(
                row,
                f"a {own} {self.noun} involves {who}, which is in the {other} split too: "
                "what is trained on must not be tested on; split by identity",
            )

    def _validate(self) -> Self:
        """The same table, if it makes sense by itself."""
        n = len(self.members)
        if n == 0:
            raise DataError(f"{self.source_name or 'the table'} has no {self.noun}s")
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
    def _from_columns(
        cls,
        members: Sequence[Iterable[int]],
        target: Iterable[float] | None,
        weight: Iterable[float] | None,
        split: Iterable[object] | None,
        source_name: str,
        lines: Iterable[int] | None = None,
    ) -> Self:
        columns = [_as_array(column, name) for name, column in zip(cls.roles, members, strict=True)]
        for name, column in zip(cls.roles, columns, strict=True):
            sound = column.ndim == 1 and (column.dtype.kind in "iu" or not len(column))
            if not sound or len(column) != len(columns[0]):
                raise DataError(f"{name} must be sample ids, whole numbers, as many as {cls.roles[0]}")
        n = len(columns[0])
        return cls(
            members=np.stack([to_int64(c, name) for c, name in zip(columns, cls.roles, strict=True)], 1),
            target=None if target is None else _as_floats(target, "target"),
            weight=np.ones(n) if weight is None else _as_floats(weight, "weight"),
            split=encode_categories(None if split is None else _as_array(split, "split"), SPLITS, "split", n),
            lines=np.arange(1, n + 1) if lines is None else _as_array(lines, "lines").astype(np.int64),
            source_name=source_name,
        )._validate()

    @classmethod
    def _read_file(cls, path: str | Path, samples: Samples, graded: bool) -> Self:
        table = read_table(Path(path))
        find = SampleLookup(samples)
        return cls._from_columns(
            [find.find_ids(table, table.require_column(role)) for role in cls.roles],
            read_finite_numbers(table, table.require_column("target")) if graded else None,
            read_finite_numbers(table, "weight") if "weight" in table.columns else None,
            read_split_column(table),
            quote_name(path),
            table.lines,
        )


def _as_array(values: Iterable[object], name: str) -> np.ndarray:
    try:
        return values if isinstance(values, np.ndarray) else np.asarray(list(values))
    except (TypeError, ValueError):  # one number, or lists of several lengths
        raise InputError(f"{name} must be a list or an array, one entry a row: got {str(values)[:60]}") from None


def _as_floats(values: Iterable[object], name: str) -> np.ndarray:
    array = _as_array(values, name)
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be numbers, one a row: got {str(array.flat[0])[:40]!r}") from None


@dataclass(frozen=True, eq=False)
class Pairs(Tuples):
    """Pairs of samples, each with how alike they are. Build them with :meth:`of`, or read them with :meth:`read`."""

    roles: ClassVar[tuple[str, ...]] = ("first", "second")
    noun: ClassVar[str] = "pair"

    @classmethod
    def of(
        cls,
        first: Iterable[int],
        second: Iterable[int],
        target: Iterable[float],
        *,
        weight: Iterable[float] | None = None,
        split: Iterable[object] | None = None,
        source_name: str = "",
    ) -> Self:
        """Pairs of sample ids."""
        return cls._from_columns([first, second], target, weight, split, source_name)

    @classmethod
    def read(cls, path: str | Path, samples: Samples) -> Self:
        """A CSV or Parquet table; its cells name samples of ``samples``, see the top of this page.

        Raises:
            DataError: the table does not fit; one line says where and why.
        """
        return cls._read_file(path, samples, graded=True)

    @classmethod
    def same_class(cls, samples: Samples, *, each: int = 1, seed: int = 0) -> Self:
        """Pairs from labels: in its own split every sample meets ``each`` of its class (target 1), as many others (0).

        A pure function of the samples and the seed.
        """
        anchor, positive, negative, split = sample_class_tuples(samples, each, seed)
        n = len(anchor)
        members = [np.tile(anchor, 2), np.concatenate([positive, negative])]
        target = np.repeat([1.0, 0.0], n)
        return cls._from_columns(members, target, None, np.tile(split, 2), f"same-class pairs of {samples.source_name}")


@dataclass(frozen=True, eq=False)
class Triplets(Tuples):
    """Triplets of samples: the anchor is more like the positive than like the negative."""

    roles: ClassVar[tuple[str, ...]] = ("anchor", "positive", "negative")
    noun: ClassVar[str] = "triplet"

    @classmethod
    def of(
        cls,
        anchor: Iterable[int],
        positive: Iterable[int],
        negative: Iterable[int],
        *,
        weight: Iterable[float] | None = None,
        split: Iterable[object] | None = None,
        source_name: str = "",
    ) -> Self:
        """Triplets of sample ids."""
        return cls._from_columns([anchor, positive, negative], None, weight, split, source_name)

    @classmethod
    def read(cls, path: str | Path, samples: Samples) -> Self:
        """A CSV or Parquet table; its cells name samples of ``samples``, see the top of this page.

        Raises:
            DataError: the table does not fit; one line says where and why.
        """
        return cls._read_file(path, samples, graded=False)

    @classmethod
    def same_class(cls, samples: Samples, *, each: int = 1, seed: int = 0) -> Self:
        """Triplets from labels: every sample is anchor of ``each`` triplets, of its class and of another, in its split.

        A pure function of the samples and the seed.
        """
        *members, split = sample_class_tuples(samples, each, seed)
        return cls._from_columns(members, None, None, split, f"same-class triplets of {samples.source_name}")


__all__ = ["Pairs", "Triplets", "Tuples"]
