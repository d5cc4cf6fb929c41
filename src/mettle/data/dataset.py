"""`Samples`: the one table that every data source becomes.

| column | meaning |
|---|---|
| ids    | one int64 per sample, unique, kept through every subset: "the same picture" means the same id |
| inputs | where the picture or the row of numbers is; read in batches, on demand |
| label  | who or what it is |
| domain | how it was captured: device, camera, session, typeface (optional) |
| groups | any other attribute to slice results by (optional) |
| split  | train, val, test, or none |
| role   | query, gallery, or either |
| files  | the picture file it came from, where it came from one |

A subset shares its inputs with the whole: it only remembers the positions it keeps.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from mettle.errors import DataError, InputError, nearest

SPLITS = ("train", "val", "test")
SPLIT_WORDS = {name: name for name in SPLITS} | {  # what people call them
    "training": "train",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "testing": "test",
}
ROLES = ("either", "query", "gallery")
NO_SPLIT = -1
_NAMED = 8  # rows that a message names, at most


class Inputs(Protocol):
    """Pictures, rows or tensors, read by position.

    ``read`` returns (b, h, w, c) uint8 pictures, all of one size, (b, f) float32 rows, or (b, ...) tensors of float32
    or int64, which a network gets as they are.
    """

    @property
    def kind(self) -> Literal["image", "row", "tensor"]:
        """What the items are."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one item: (h, w, c), (f,), or that of a tensor."""
        ...

    @property
    def is_in_memory(self) -> bool:
        """Whether reading is a copy from memory (no decoding, no disk)."""
        ...

    def __len__(self) -> int: ...

    def read(self, at: np.ndarray) -> np.ndarray:
        """The items at these positions, in this order."""
        ...

    def fingerprint(self) -> str:
        """A short hash that changes when the content does."""
        ...


@dataclass(frozen=True, eq=False)
class Column:
    """A categorical column: one int64 code per sample, one name per code."""

    codes: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Iterable[object], what: str = "the column") -> "Column":
        """Code the distinct values in sorted order (integers by value, everything else as text).

        Raises:
            DataError: NaN among them, which is a missing value and no name; ``what`` says whose.
        """
        if not isinstance(values, Iterable) or (isinstance(values, np.ndarray) and values.ndim == 0):
            raise InputError(f"{what} must be a list or an array, one entry per sample: got {str(values)[:60]!r}")
        given = values if isinstance(values, np.ndarray) else list(values)
        values = np.asarray(given)
        if values.dtype.kind not in "iu":
            _refuse_nan(given, what)
            values = values.astype(str)
        distinct, codes = np.unique(values, return_inverse=True)
        return cls(codes.reshape(-1).astype(np.int64), tuple(str(v) for v in distinct))

    def __len__(self) -> int:
        return len(self.codes)

    def __repr__(self) -> str:
        return f"Column({len(self)} samples, {len(self.names)} names)"

    def take(self, at: np.ndarray) -> "Column":
        """The same column for some of the samples; codes keep their meaning."""
        return Column(self.codes[at], self.names)

    def values(self) -> np.ndarray:
        """One name per sample."""
        return np.asarray(self.names, dtype=object)[self.codes]


@dataclass(frozen=True, eq=False)
class Samples:
    """The table. Build it with :meth:`of`, cut it with :meth:`take`, :meth:`where` and :meth:`part`."""

    ids: np.ndarray
    inputs: Inputs
    label: Column
    domain: Column | None = None
    groups: Mapping[str, Column] = field(default_factory=dict)
    split: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))
    role: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))
    storage_index: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    source_name: str = ""
    skipped: tuple[str, ...] = ()  # bad files left out under the policy "skip", one line each
    files: np.ndarray | None = None  # paths as the source gives them, relative to ``root`` or absolute
    root: str = ""
    notes: tuple[str, ...] = ()  # what its reader made of the source that one might not expect, one line each

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        labels: Iterable[object] | Column,
        *,
        ids: Iterable[int] | None = None,
        domain: Iterable[object] | Column | None = None,
        groups: Mapping[str, Iterable[object] | Column] | None = None,
        split: Sequence[object] | np.ndarray | None = None,
        role: Sequence[object] | np.ndarray | None = None,
        source_name: str = "",
        skipped: tuple[str, ...] = (),
        files: Sequence[str] | np.ndarray | None = None,
        root: str = "",
        notes: tuple[str, ...] = (),
    ) -> "Samples":
        """Build a table; lengths, ids and codes are checked here and nowhere else."""
        if not all(hasattr(inputs, name) for name in ("kind", "read", "__len__")):
            wanted = "FeatureArray(array) for (n, f) numbers, ImageArray(array) for uint8 images, of mettle.data.inputs"
            raise InputError(f"inputs must be something to read from, got {type(inputs).__name__}: give {wanted}")
        n = len(inputs)
        if files is None and hasattr(inputs, "paths"):  # remembered here, because decoded pictures forget them
            files, root = inputs.paths, inputs.root  # type: ignore[attr-defined]
        whole = np.arange(n, dtype=np.int64)
        table = cls(
            ids=whole if ids is None else _check_ids(ids),
            inputs=inputs,
            label=_as_column(labels, "label"),
            domain=None if domain is None else _as_column(domain, "domain"),
            groups={name: _as_column(values, name) for name, values in (groups or {}).items()},
            split=encode_categories(split, SPLITS, "split", n),
            role=encode_categories(role, ROLES, "role", n),
            storage_index=whole,
            source_name=source_name,
            skipped=skipped,
            files=None if files is None else np.asarray(files, dtype=object),
            root=root,
            notes=notes,
        )
        lengths = {"ids": len(table.ids), "labels": len(table.label), "split": len(table.split)}
        lengths |= {} if table.files is None else {"files": len(table.files)}
        lengths |= {"role": len(table.role)} | {name: len(c) for name, c in table.columns().items()}
        for name, length in lengths.items():
            if length != n:
                raise DataError(f"{name} has {length} entries for {n} samples: one entry per sample is needed")
        if len(np.unique(table.ids)) != n:
            values, counts = np.unique(table.ids, return_counts=True)
            raise DataError(f"sample id {values[counts > 1][0]} occurs more than once: ids must be unique")
        return table

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:  # thousands of names and rows are nothing to print at the end of a notebook's cell
        shape = " x ".join(map(str, self.inputs.shape))
        parts = [f"{len(self)} samples of {self.inputs.kind} {shape}", f"{len(self.label.names)} labels"]
        parts += [] if self.domain is None else [f"{len(self.domain.names)} domains"]
        counts = [(name, int((self.split == i).sum())) for i, name in enumerate(SPLITS)]
        parts += [f"{name} {count}" for name, count in counts if count]
        return f"Samples({', '.join(parts)}{f', from {self.source_name!r}' if self.source_name else ''})"

    @property
    def labels(self) -> np.ndarray:
        """One int64 label code per sample."""
        return self.label.codes

    def columns(self) -> dict[str, Column]:
        """Every column one can slice by, the domain under the name ``domain``."""
        return ({"domain": self.domain} if self.domain is not None else {}) | dict(self.groups)

    def column(self, name: str) -> Column:
        """One column by name; an unknown name is an error that lists the known ones."""
        columns = self.columns() | {"label": self.label}
        if name not in columns:
            raise DataError(f"no column {name!r} in {self.source_name or 'these samples'}{nearest(name, columns)}")
        return columns[name]

    def take(self, positions: np.ndarray) -> "Samples":
        """Some of the samples, by position in this table, in this order."""
        at = np.asarray(positions)
        return replace(
            self,
            ids=self.ids[at],
            label=self.label.take(at),
            domain=None if self.domain is None else self.domain.take(at),
            groups={name: column.take(at) for name, column in self.groups.items()},
            split=self.split[at],
            role=self.role[at],
            storage_index=self.storage_index[at],
            files=None if self.files is None else self.files[at],
        )

    def where(self, mask: np.ndarray) -> "Samples":
        """The samples for which ``mask`` is true."""
        return self.take(np.flatnonzero(mask))

    def part(self, split: str) -> "Samples":
        """One split: ``train``, ``val`` or ``test``."""
        if split not in SPLITS:
            raise InputError(f"no split {split!r}{nearest(split, SPLITS)}")
        return self.where(self.split == SPLITS.index(split))

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Pictures (b, h, w, c) uint8 or rows (b, f) float32 at these positions of this table."""
        return self.inputs.read(self.storage_index[np.asarray(positions)])

    def read_seeded(self, positions: np.ndarray, ids: np.ndarray, **how: int) -> np.ndarray:
        """The same, of inputs that draw random numbers when they are read: see `DatasetItems.read_seeded`."""
        return self.inputs.read_seeded(self.storage_index[np.asarray(positions)], ids, **how)  # type: ignore[attr-defined]

    def read_uncropped(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Uncropped pictures and their width over height, see `mettle.data.inputs.UncroppedImages`."""
        whole = getattr(self.inputs, "uncropped", None)
        if whole is None:
            raise InputError("these samples have no whole pictures: they are not cropped to one size")
        return whole.read(self.storage_index[np.asarray(positions)])

    def name(self, position: int) -> str:
        """What to call one sample: its file, or its id, which is its row (from 0) where the source has no ids."""
        if self.files is not None and self.files[position]:
            return str(self.files[position])
        return f"sample {self.ids[position]}"

    def paths(self) -> np.ndarray | None:
        """The absolute path of every sample's file ("" for none); None where no sample has one."""
        if self.files is None or not any(self.files):
            return None
        root = os.path.abspath(self.root)
        return np.asarray([os.path.normpath(os.path.join(root, file)) if file else "" for file in self.files])

    def fingerprint(self) -> str:
        """A short hash of the table and of what it points at."""
        digest = hashlib.sha256(self.inputs.fingerprint().encode())
        arrays = [self.ids, self.storage_index, self.labels, self.split, self.role]
        for array in arrays + [column.codes for column in self.columns().values()]:
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update("\0".join(self.label.names).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class JoinedInputs:
    """The inputs of several sources, one after the other."""

    parts: tuple[Inputs, ...]

    @property
    def kind(self) -> Literal["image", "row", "tensor"]:
        """What all of them are."""
        return self.parts[0].kind

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one item."""
        return self.parts[0].shape

    @property
    def is_in_memory(self) -> bool:
        """Whether reading is a copy from memory."""
        return all(part.is_in_memory for part in self.parts)

    @property
    def is_seeded(self) -> bool:
        """Whether any of them draws random numbers when it is read."""
        return any(getattr(part, "is_seeded", False) for part in self.parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, at: np.ndarray) -> np.ndarray:
        """The items at these positions, in this order."""
        return self._collect(at, lambda part, own, _: part.read(own))

    def read_seeded(self, at: np.ndarray, ids: np.ndarray, **how: int) -> np.ndarray:
        """The same, with random numbers of these ids."""
        ids = np.asarray(ids)

        def read_part(part: Any, own: np.ndarray, rows: np.ndarray) -> np.ndarray:
            return part.read_seeded(own, ids[rows], **how) if getattr(part, "is_seeded", False) else part.read(own)

        return self._collect(at, read_part)

    def _collect(self, at: np.ndarray, read_part: Callable[[Any, np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        at, start, result = np.asarray(at, np.int64), 0, None
        for part in self.parts:
            rows = np.flatnonzero((at >= start) & (at < start + len(part)))
            if len(rows):
                found = read_part(part, at[rows] - start, rows)
                if len(rows) == len(at):
                    return found
                if result is None:
                    result = np.empty((len(at), *found.shape[1:]), found.dtype)
                if found.shape[1:] != result.shape[1:]:
                    raise DataError(
                        f"items of one shape are wanted, got {result.shape[1:]} and {found.shape[1:]}: "
                        "give preprocess= a size"
                    )
                result[rows] = found
            start += len(part)
        return np.empty((0, *self.shape), np.float32) if result is None else result

    def fingerprint(self) -> str:
        """A short hash of all fingerprints."""
        return hashlib.sha256(" ".join(part.fingerprint() for part in self.parts).encode()).hexdigest()[:16]

    def with_size(self, *size: Any, **how: Any) -> "JoinedInputs":
        """The same images in another size, in grey or in color."""
        return JoinedInputs(tuple(part.with_size(*size, **how) for part in self.parts))  # type: ignore[attr-defined]

    def name(self, i: int) -> str:
        """What to call one item."""
        return f"item {i}"

    def content(self, i: int) -> bytes:
        """The bytes of one item."""
        return self.read(np.asarray([i])).tobytes()


def join_splits(parts: Mapping[str, Samples]) -> Samples:
    """One table of several, each of which is a split: ``{"train": ..., "test": ...}``.

    Labels, domains and groups are the same where they have the same name; columns that some parts lack are left out.
    Samples are numbered anew.
    """
    kinds = {name: part.inputs.kind for name, part in parts.items()}
    if len(set(kinds.values())) > 1:
        raise DataError(f"all splits must be of one kind, got {', '.join(f'{k} {v}' for k, v in kinds.items())}")
    tables = list(parts.values())
    domains = [part.domain for part in tables if part.domain is not None]
    shared = [name for name in tables[0].groups if all(name in part.groups for part in tables)]
    starts = np.cumsum([0, *(len(part.inputs) for part in tables)])
    paths = [part.paths() for part in tables]
    count = sum(map(len, tables))
    return Samples(
        ids=np.arange(count, dtype=np.int64),
        inputs=JoinedInputs(tuple(part.inputs for part in tables)),
        label=_join_columns([part.label for part in tables]),
        domain=_join_columns(domains) if len(domains) == len(tables) else None,
        groups={name: _join_columns([part.groups[name] for part in tables]) for name in shared},
        split=np.concatenate([np.full(len(part), SPLITS.index(name), np.int8) for name, part in parts.items()]),
        role=np.concatenate([part.role for part in tables]),
        storage_index=np.concatenate([part.storage_index + start for part, start in zip(tables, starts, strict=False)]),
        source_name=tables[0].source_name,
        skipped=tuple(line for part in tables for line in part.skipped),
        files=None if any(own is None for own in paths) else np.concatenate(paths).astype(object),  # type: ignore[arg-type]
        notes=tuple(dict.fromkeys(note for part in tables for note in part.notes)),
    )


def _join_columns(columns: Sequence[Column]) -> Column:
    names = list(dict.fromkeys(name for column in columns for name in column.names))
    codes = {name: code for code, name in enumerate(names)}
    return Column(
        np.concatenate([np.asarray([codes[name] for name in c.names], np.int64)[c.codes] for c in columns]),
        tuple(names),
    )


def _check_ids(ids: Iterable[int]) -> np.ndarray:
    array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if array.dtype.kind not in "iu":
        raise DataError(f"sample ids must be whole numbers, got {array.dtype}")
    return to_int64(array, "sample ids")


def to_int64(array: np.ndarray, what: str) -> np.ndarray:
    """Whole numbers as int64; those of uint64 that are too large are refused, for they would turn negative."""
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise DataError(f"{what} must fit in int64, below 2^63: got {array.max()}; number them anew")
    return array.astype(np.int64)


def _as_column(values: Iterable[object] | Column, what: str) -> Column:
    return values if isinstance(values, Column) else Column.of(values, what)


def _refuse_nan(values: np.ndarray | list[object], what: str) -> None:
    """Refuse NaN: as text it would be one name for all that is missing."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "fc":
        rows = np.flatnonzero(np.isnan(values)).tolist()
    elif isinstance(values, list) or values.dtype.kind == "O":
        rows = [i for i, v in enumerate(values) if isinstance(v, float | np.floating) and v != v]
    else:
        rows = []
    if rows:
        named = ", ".join(map(str, rows[:_NAMED])) + (", ..." if len(rows) > _NAMED else "")
        raise DataError(
            f"{what} holds NaN in {len(rows)} of {len(values)} rows: {named} (from 0); give them a value, or leave "
            "these rows out"
        )


def encode_categories(
    values: Sequence[object] | np.ndarray | None, names: tuple[str, ...], what: str, n: int
) -> np.ndarray:
    """Codes from codes, or from names; an empty name means "none" for a split and "either" for a role."""
    absent = NO_SPLIT if what == "split" else 0
    if values is None:
        return np.full(n, absent, np.int8)
    array = np.asarray(values)
    if array.dtype.kind in "iu":
        bad = (array < min(absent, 0)) | (array >= len(names))
        if bad.any():
            raise DataError(
                f"{what} codes are 0..{len(names) - 1}, got {array[bad][0]} at row {np.flatnonzero(bad)[0]}"
            )
        return array.astype(np.int8)
    code = {name: i for i, name in enumerate(names)} | {"": absent}
    if what == "split":
        code |= {word: names.index(name) for word, name in SPLIT_WORDS.items()}
    try:
        return np.asarray([code[str(v).strip().lower()] for v in array], np.int8)
    except KeyError as unknown:
        raise DataError(f"{what} must be one of {', '.join(names)}, got {unknown.args[0]!r}") from None
