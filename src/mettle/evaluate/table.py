"""Embeddings in a file, from any model: the vectors, who each one is, and what else is known about it.

| file | vectors | columns |
|---|---|---|
| ``.npz`` | a 2-D array ``embeddings``, ``features``, ``x``, … | every 1-D array with one entry a row |
| ``.parquet`` | a column of lists, or numbered columns ``e0, e1, …`` | all others |
| ``.csv``, ``.csv.gz`` | numbered columns, or one column of lists: ``"[0.1, 0.2]"`` or ``"0.1 0.2"`` | all others |
| ``.npy`` | the array | other ``.npy`` files of the folder, by their names: ``labels.npy``, ``domain.npy``, … |

Labels, domains and groups are whole numbers or text. What cannot be read is refused in one line; nothing is unpickled.
"""

import csv
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mettle.data.arrays import DOMAINS, IDS, LABELS, _load, _text, named
from mettle.data.decode import shown
from mettle.data.manifest import _lines
from mettle.data.samples import Column
from mettle.errors import DataError, InputError, MissingExtra, nearest

VECTORS = ("embeddings", "embedding", "features", "vectors", "x", "rows")
IMAGES = ("path", "image", "image_path", "file", "filename")
MOST_GROUPS = 32  # distinct values from which a column is no group unless it is named
MOST_NAMED = 256  # and if it is named
_NUMBERED = re.compile(r"^(.*?)(\d+)$")
_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Embedded:
    """Embeddings and what is known about each row.

    Attributes:
        values: (n, d) finite numbers, float64 if float64 came.
        label: who or what each row is.
        ids: (n,) codes of the sample ids; rows with one id are one sample.
        names: (n,) what to call each row: its id, or its number in the file from 0.
        domain: how each row was captured, or None.
        groups: other attributes to slice by.
        images: a picture's path for each row ("" for none), or None.
        folder: where relative paths of pictures start.
        origin: the file.
        columns: which column is what, for people.
    """

    values: np.ndarray
    label: Column
    ids: np.ndarray
    names: np.ndarray
    domain: Column | None = None
    groups: Mapping[str, Column] = field(default_factory=dict)
    images: np.ndarray | None = None
    folder: Path = Path()
    origin: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)


def read_embeddings(
    path: Path | str,
    labels: Path | str | None = None,
    *,
    embeddings: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    groups: Sequence[str] | None = None,
    image: str | None = None,
    where: Sequence[str] = (),
) -> Embedded:
    """Read embeddings from a file.

    Args:
        path: ``.npz``, ``.parquet`` (needs ``mettle-ml[parquet]``), ``.csv``, ``.csv.gz`` or ``.npy``.
        labels: with ``.npy``: the file of the labels, by default ``labels.npy`` or the like beside it.
        embeddings: the array, column, or prefix of numbered columns that holds the vectors.
        label: the column of labels; by default ``label``, ``labels``, ``y`` or ``identity``.
        domain: the column of domains; by default ``domain``, ``camera``, ``device`` or ``session``; ``""`` for none.
        groups: the columns to slice by; by default all whole numbers and text with 2 to 32 distinct values.
        image: the column of picture paths; by default ``path``, ``image``, ``file`` or the like; ``""`` for none.
        where: ``column=value``: keep only these rows; several must all hold.

    Raises:
        DataError: the file, a column or a row does not fit; one line says which and why.
        MissingExtra: Parquet support is not installed.
    """
    path = Path(path)
    kind = path.name.lower()
    if not path.is_file():
        raise DataError(f"no file {shown(path)}")
    if labels is not None and not kind.endswith(".npy"):
        raise InputError(f"a second file holds the labels of a .npy file, but {shown(path)} is none: leave it out")
    if kind.endswith(".npz"):
        values, columns, names = _npz(path, embeddings)
    elif kind.endswith((".parquet", ".pq")):
        values, columns, names = _parquet(path, embeddings)
    elif kind.endswith((".csv", ".csv.gz")):
        values, columns, names = _csv(path, embeddings)
    elif kind.endswith(".npy"):
        values, columns, names = _npy(path, labels)
        label = str(Path(labels).stem) if labels is not None else label
    else:
        raise DataError(f"{shown(path)} is no file of embeddings: .npz, .parquet, .csv, .csv.gz and .npy are read")
    _numbers(values, path)
    keep = np.ones(len(values), bool)
    for text in where:
        keep &= _holds(text, columns, names, path)
    if not keep.any():
        raise DataError(f"no row of {shown(path)} has {' and '.join(where)}")
    if not keep.all():
        values, columns = values[keep], {name: column[keep] for name, column in columns.items()}
    _finite(values, path)
    return _table(path, values, columns, names, label, domain, groups, image)


Read = tuple[np.ndarray, dict[str, np.ndarray], Mapping[str, np.ndarray]]  # vectors, columns, names of codes


def _table(
    path: Path,
    values: np.ndarray,
    columns: dict[str, np.ndarray],
    names: Mapping[str, np.ndarray],
    label: str | None,
    domain: str | None,
    groups: Sequence[str] | None,
    image: str | None,
) -> Embedded:
    """Which column is what."""
    who = _choose(columns, label, LABELS, "label", path)
    if who is None:
        raise DataError(f"no labels in {shown(path)}: say which column holds them with --label{nearest('', columns)}")
    where = None if domain == "" else _choose(columns, domain, DOMAINS, "domain", path)
    picture = None if image == "" else _choose(columns, image, IMAGES, "image", path)
    number = _choose(columns, None, IDS, "id", path)
    taken = {who, where, picture, number}
    if groups is None:
        free = [name for name in columns if name not in taken and _sliceable(columns[name])]
    else:
        free = [name for name in groups if _choose(columns, name, (), "group", path)]
        for name in free:
            _few(columns[name], name, path)
    labels = _column(columns[who], names.get(who), who, path, required=True)
    shape = None if where is None else _column(columns[where], names.get(where), where, path)
    called = np.arange(len(values)).astype(str) if number is None else columns[number].astype(str)
    return Embedded(
        values,
        labels,
        np.arange(len(values)) if number is None else Column.of(columns[number]).codes,
        called,
        shape if shape is not None and len(np.unique(shape.codes)) > 1 else None,
        {name: _column(columns[name], names.get(name), name, path) for name in free},
        None if picture is None else columns[picture].astype(str),
        path.parent,
        str(path),
        {"label": who, "domain": where, "groups": free, "image": picture, "id": number},
    )


def _npz(path: Path, wanted: str | None) -> Read:
    arrays = _load(path, largest=16 << 30)
    flat = {name: a for name, a in arrays.items() if a.ndim == 2}
    name = wanted if wanted is not None else next((n for n in VECTORS if n in flat), None)
    if name is None and len(flat) == 1:
        name = next(iter(flat))
    if name is None or name not in flat:
        what = "embeddings" if name is None else shown(name)
        raise DataError(f"no 2-D array {what} in {shown(path)}: name it with --embeddings{nearest(name or '', flat)}")
    values = flat[name]
    columns = {n: _text(a, n) for n, a in arrays.items() if a.shape == (len(values),) and not n.endswith("_names")}
    coded = {n: arrays[f"{n}_names"] for n in columns if f"{n}_names" in arrays}
    if "class_names" in arrays:
        coded |= {n: arrays["class_names"] for n in LABELS if n in columns and n not in coded}
    return values, columns, coded


def _npy(path: Path, labels: Path | str | None) -> Read:
    values = _array(path)
    found: dict[str, np.ndarray] = {}
    for other in sorted(path.parent.glob("*.npy")):
        if other != path and labels is None:
            column = _array(other, lazy=True)
            if column.shape == values.shape[:1]:
                found[other.stem] = _text(np.asarray(column), other.stem)
    if labels is not None:
        column = _array(Path(labels))
        if column.shape != values.shape[:1]:
            raise DataError(
                f"{shown(labels)} must hold one label for each of {len(values)} rows: got shape {column.shape}"
            )
        found[Path(labels).stem] = _text(column, Path(labels).stem)
    return values, found, {}


def _array(path: Path, lazy: bool = False) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False, mmap_mode="r" if lazy else None)
    except (OSError, ValueError, EOFError) as problem:
        reason = " ".join(str(problem).split())
        if "Object arrays" in reason or "pickle" in reason:
            reason = "it holds Python objects or is no NPY file; save numbers or text"
        raise DataError(f"cannot read {shown(path)}: {reason}") from None


def _parquet(path: Path, wanted: str | None) -> Read:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtra("Parquet needs pyarrow: pip install 'mettle-ml[parquet]'") from None
    try:
        table = parquet.read_table(path)
    except Exception as problem:  # its errors have several unrelated bases
        raise DataError(f"cannot read {shown(path)}: {' '.join(str(problem).split())[:200]}") from None
    types = arrow.types
    lists = [n for n in table.column_names if _listed(types, table.schema.field(n).type)]
    used = _which(table.column_names, lists, wanted, path)
    if used[0] in lists:
        values = _lists(table[used[0]].combine_chunks(), used[0], path)
    else:
        values = np.column_stack([_numeric(types, table[name], name, path) for name in used])
    columns = {}
    for name in table.column_names:
        column = table[name]
        if name in used or name in lists:
            continue
        if (types.is_integer(column.type) and not column.null_count) or types.is_floating(column.type):
            columns[name] = column.to_numpy()
        else:
            columns[name] = np.asarray(column.cast("string").fill_null("").to_pylist())
    return values, columns, {}


def _listed(types: Any, kind: Any) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _lists(column: Any, name: str, path: Path) -> np.ndarray:
    """A column of lists as a matrix."""
    if column.null_count:
        first = next(i for i, value in enumerate(column) if not value.is_valid)
        raise DataError(f"{shown(path)} column {shown(name)}: {column.null_count} rows are empty, the first is {first}")
    flat, n = column.flatten(), len(column)
    width = len(flat) // max(n, 1)
    lengths = np.asarray(column.value_lengths()) if hasattr(column, "value_lengths") else np.full(n, width)
    odd = np.flatnonzero(lengths != lengths[0]) if n else np.empty(0, np.int64)
    if len(odd):
        raise DataError(
            f"{shown(path)} column {shown(name)}: vectors must be of one length, but row 0 has {lengths[0]} numbers "
            f"and row {odd[0]} has {lengths[odd[0]]}"
        )
    try:
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(n, -1)
    except (ValueError, TypeError) as problem:
        raise DataError(f"{shown(path)} column {shown(name)} is no list of numbers: {problem}") from None


def _numeric(types: Any, column: Any, name: str, path: Path) -> np.ndarray:
    if not (types.is_integer(column.type) or types.is_floating(column.type)):
        raise DataError(f"{shown(path)} column {shown(name)} must hold numbers: got {column.type}")
    return column.to_numpy()


def _csv(path: Path, wanted: str | None) -> Read:
    reader = csv.reader(_lines(path), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if not header:
            raise DataError(f"{shown(path)} is empty")
        twice = [name for i, name in enumerate(header) if name in header[:i]]
        if twice:
            raise DataError(f"{shown(path)} line 1: two columns are called {shown(twice[0])}")
        used = _which(header, [n for n in header if n in (*VECTORS, wanted)], wanted, path)
        at = [header.index(name) for name in used]
        rest = [i for i in range(len(header)) if i not in set(at)]
        blocks, block = [], []
        texts: list[list[str]] = [[] for _ in rest]
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{shown(path)} line {reader.line_num}: {len(row)} fields, but the header has {len(header)}"
                )
            block.append(_vector([row[i] for i in at], used, path, reader.line_num))
            for kept, i in zip(texts, rest, strict=True):
                kept.append(row[i].strip())
            if len(block) == _CHUNK:
                blocks.append(_stacked(block, blocks, path))
                block = []
    except csv.Error as problem:
        raise DataError(f"{shown(path)} line {reader.line_num}: {problem}") from None
    if block:
        blocks.append(_stacked(block, blocks, path))
    if not blocks:
        raise DataError(f"{shown(path)} has no rows")
    columns = {header[i]: _typed(kept) for i, kept in zip(rest, texts, strict=True)}
    return np.concatenate(blocks), columns, {}


def _vector(fields: list[str], names: Sequence[str], path: Path, line: int) -> list[float]:
    """One row of numbers; a single field is a list of them."""
    if len(names) == 1:
        fields = fields[0].strip().strip("[]()").replace(",", " ").replace(";", " ").split()
    try:
        return [float(text) for text in fields]
    except ValueError:
        at = next(i for i, text in enumerate(fields) if not _is_number(text))
        name = names[0] if len(names) == 1 else names[at]
        raise DataError(
            f"{shown(path)} line {line}, column {shown(name)}: {shown(fields[at], 40)} is not a number"
        ) from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _stacked(block: list[list[float]], before: list[np.ndarray], path: Path) -> np.ndarray:
    width = before[0].shape[1] if before else len(block[0])
    start = sum(len(b) for b in before)
    for k, row in enumerate(block):
        if len(row) != width or not row:
            raise DataError(
                f"{shown(path)}: vectors must be of one length, but row 0 has {width} numbers and row {start + k} "
                f"has {len(row)}"
            )
    return np.asarray(block, np.float64)


def _typed(texts: list[str]) -> np.ndarray:
    """Whole numbers where all are written as such (007 is a name), else text."""
    if all(t.lstrip("-").isdecimal() and len(t) < 19 and str(int(t)) == t for t in texts):
        return np.asarray([int(t) for t in texts], np.int64)
    return np.asarray(texts)


def _which(names: Sequence[str], lists: Sequence[str], wanted: str | None, path: Path) -> list[str]:
    """The columns of the vectors: one of lists, or the largest family of numbered ones, in their order."""
    families: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        found = _NUMBERED.match(name)
        if found and name not in lists:
            families.setdefault(found[1], []).append((int(found[2]), name))
    if wanted is not None:
        if wanted in lists:
            return [wanted]
        if wanted not in families:
            known = {*lists, *families} - {""}
            raise DataError(f"embeddings: no columns {shown(wanted)} in {shown(path)}{nearest(wanted, known)}")
        return [name for _, name in sorted(families[wanted])]
    usual = next((name for name in VECTORS if name in lists), lists[0] if len(lists) == 1 else None)
    if usual is not None:
        return [usual]
    largest = max(families.values(), key=len, default=[])
    if len(largest) < 2:
        raise DataError(
            f"no embeddings in {shown(path)}: number their columns (e0, e1, …), put them into one column 'embedding' "
            "as lists, or name it with --embeddings"
        )
    return [name for _, name in sorted(largest)]


def _choose(columns: Mapping[str, Any], wanted: str | None, usual: Sequence[str], what: str, path: Path) -> str | None:
    """The wanted column, or the first of the usual ones that is there."""
    if wanted is None:
        return next((name for name in usual if name in columns), None)
    if wanted not in columns:
        raise DataError(f"{what}: no column {shown(wanted)} in {shown(path)}{nearest(wanted, columns)}")
    return wanted


def _column(values: np.ndarray, names: np.ndarray | None, name: str, path: Path, required: bool = False) -> Column:
    if values.dtype.kind not in "iubU":
        raise DataError(
            f"column {shown(name)} of {shown(path)} must hold whole numbers or text: got {values.dtype}; "
            "save codes as integers"
        )
    if required and values.dtype.kind == "U":
        empty = np.char.str_len(np.char.strip(values)) == 0
        if empty.any():
            raise DataError(
                f"{np.count_nonzero(empty)} of {len(values)} rows of {shown(path)} have no label, the first is row "
                f"{np.argmax(empty)} (from 0): fill column {shown(name)} or leave the rows out"
            )
    return named(values, names)


def _sliceable(values: np.ndarray) -> bool:
    return values.dtype.kind in "iubU" and 2 <= len(np.unique(values)) <= MOST_GROUPS


def _few(values: np.ndarray, name: str, path: Path) -> None:
    count = len(np.unique(values))
    if count > MOST_NAMED:
        raise DataError(f"group: column {shown(name)} of {shown(path)} has {count} distinct values, over {MOST_NAMED}")


def _holds(text: str, columns: Mapping[str, np.ndarray], names: Mapping[str, np.ndarray], path: Path) -> np.ndarray:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"where must be column=value, as in split=test: got {text!r}")
    _choose(columns, name, (), "where", path)
    return named(columns[name], names.get(name)).values().astype(str) == value


def _numbers(values: np.ndarray, path: Path) -> None:
    if values.ndim != 2 or 0 in values.shape:
        raise DataError(f"embeddings of {shown(path)} must be a non-empty (n, d) matrix: got shape {values.shape}")
    if values.dtype.kind not in "fiu":
        raise DataError(f"embeddings of {shown(path)} must be numbers: got {values.dtype}")


def _finite(values: np.ndarray, path: Path) -> None:
    good = np.isfinite(values).all(axis=1)
    if not good.all():
        raise DataError(
            f"{np.count_nonzero(~good)} of {len(values)} rows of {shown(path)} hold NaN or infinity, the first is row "
            f"{np.argmin(good)} (from 0): find out why the model produced them, or leave them out"
        )
    zero = ~values.any(axis=1)
    if zero.any():
        raise DataError(
            f"{np.count_nonzero(zero)} of {len(values)} rows of {shown(path)} are zero vectors, whose cosine is "
            f"undefined, the first is row {np.argmax(zero)} (from 0): leave them out and count them as failures"
        )
