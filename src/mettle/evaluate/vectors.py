"""Vectors and columns of a file, as they come: ``.npz``, ``.npy``, ``.parquet`` or ``.csv``; nothing is unpickled."""

import importlib
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mettle.data.column_names import LABELS, find_columns
from mettle.data.image_decoding import quote_name
from mettle.data.sources.npz import decode_text, load_arrays
from mettle.data.sources.text_table import is_integer_text, read_delimited
from mettle.errors import DataError, InputError, MissingExtra, nearest
from mettle.model.quantization import from_arrays

VECTORS = ("embeddings", "embedding", "features", "vectors", "x", "rows")
_NUMBERED = re.compile(r"^(.*?)(\d+)$")
_CHUNK = 4096


class Read(NamedTuple):
    """What a file holds."""

    vectors: np.ndarray
    columns: dict[str, np.ndarray]
    names: Mapping[str, np.ndarray]  # of codes, by column
    unfit: Mapping[str, str] = MappingProxyType({})  # why an array is no column, by its name


def read_vectors(path: Path, wanted: str | None, labels: Path | str | None) -> Read:
    """Vectors and columns of a file.

    Args:
        path: of any kind that is read.
        wanted: the array, column, or prefix of numbered columns that holds the vectors; None for the usual ones.
        labels: with ``.npy``: the file of the labels.
    """
    kind = path.name.lower()
    if not path.is_file():
        raise DataError(f"no file {quote_name(path)}")
    if labels is not None and not kind.endswith(".npy"):
        raise InputError(f"a second file holds the labels of a .npy file, but {quote_name(path)} is none: leave it out")
    if kind.endswith(".npz"):
        return _npz(path, wanted)
    if kind.endswith((".parquet", ".pq")):
        return _parquet(path, wanted)
    if kind.endswith((".csv", ".csv.gz", ".tsv", ".tsv.gz")):
        return _csv(path, wanted)
    if kind.endswith(".npy"):
        return _npy(path, labels)
    raise DataError(
        f"{quote_name(path)} is no file of embeddings: .npz, .parquet, .csv, .tsv (also .gz) and .npy are read"
    )


def _npz(path: Path, wanted: str | None) -> Read:
    arrays = load_arrays(path, largest=16 << 30)
    try:
        decoded = from_arrays(arrays)
    except InputError as problem:
        raise DataError(f"{quote_name(path)}: {problem}") from None
    if decoded is not None:
        about = ("codes", "precision", "dim", "ranges")
        arrays = {n: a for n, a in arrays.items() if n not in about} | {"embeddings": decoded}
    flat = {name: a for name, a in arrays.items() if a.ndim == 2}
    name = wanted if wanted is not None else next((n for n in VECTORS if n in flat), None)
    if name is None and len(flat) == 1:
        name = next(iter(flat))
    if name is None or name not in flat:
        what = "embeddings" if name is None else quote_name(name)
        raise DataError(
            f"no 2-D array {what} in {quote_name(path)}: name it with --embeddings{nearest(name or '', flat)}"
        )
    values = flat[name]
    others = {n: a for n, a in arrays.items() if n != name and not n.endswith("_names")}
    columns = {n: decode_text(a, n) for n, a in others.items() if a.shape == (len(values),)}
    unfit = {n: _misfit(a, len(values)) for n, a in others.items() if n not in columns}
    coded = {n: arrays[f"{n}_names"] for n in columns if f"{n}_names" in arrays}
    if "class_names" in arrays:
        coded |= {n: arrays["class_names"] for n in find_columns(columns, LABELS) if n not in coded}
    return Read(values, columns, coded, unfit)


def _misfit(array: np.ndarray, rows: int) -> str:
    """Why an array is no column, and what to do."""
    said = f"it has shape {array.shape}, not one entry for each of {rows} rows"
    return f"{said}; save it flat, as with .ravel()" if array.size == rows and array.ndim > 1 else said


def _npy(path: Path, labels: Path | str | None) -> Read:
    values = _array(path)
    found: dict[str, np.ndarray] = {}
    unfit: dict[str, str] = {}
    for other in sorted(path.parent.glob("*.npy")) if labels is None else []:
        if other.name == path.name:
            continue
        try:  # a neighbour may be anything: it matters only if it is asked for
            column = _array(other, lazy=True)
            if column.shape == values.shape[:1]:
                found[other.stem] = decode_text(np.asarray(column), other.stem)
            else:
                unfit[other.stem] = _misfit(column, len(values))
        except DataError as problem:
            unfit[other.stem] = str(problem)
    if labels is not None:
        column = _array(Path(labels))
        if column.shape != values.shape[:1]:
            raise DataError(
                f"{quote_name(labels)} must hold one label for each of {len(values)} rows: got shape {column.shape}"
            )
        found[Path(labels).stem] = decode_text(column, Path(labels).stem)
    return Read(values, found, {}, unfit)


def _array(path: Path, lazy: bool = False) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False, mmap_mode="r" if lazy else None)
    except (OSError, ValueError, EOFError) as problem:
        reason = " ".join(str(problem).split())
        if "Object arrays" in reason or "pickle" in reason or "memory-mapped" in reason:
            reason = "it holds Python objects or is no NPY file; save numbers or text"
        raise DataError(f"cannot read {quote_name(path)}: {reason}") from None


def _parquet(path: Path, wanted: str | None) -> Read:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtra("Parquet needs pyarrow: pip install pyarrow") from None
    try:
        table = parquet.read_table(path)
    except Exception as problem:  # its errors have several unrelated bases
        raise DataError(f"cannot read {quote_name(path)}: {' '.join(str(problem).split())[:200]}") from None
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
    return Read(values, columns, {})


def _listed(types: Any, kind: Any) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _lists(column: Any, name: str, path: Path) -> np.ndarray:
    """A column of lists as a matrix."""
    if column.null_count:
        first = next(i for i, value in enumerate(column) if not value.is_valid)
        raise DataError(
            f"{quote_name(path)} column {quote_name(name)}: {column.null_count} rows are empty, the first is {first}"
        )
    flat, n = column.flatten(), len(column)
    width = len(flat) // max(n, 1)
    lengths = np.asarray(column.value_lengths()) if hasattr(column, "value_lengths") else np.full(n, width)
    odd = np.flatnonzero(lengths != lengths[0]) if n else np.empty(0, np.int64)
    if len(odd):
        raise DataError(
            f"{quote_name(path)} column {quote_name(name)}: vectors must be of one length, but row 0 has {lengths[0]} "
            f"numbers and row {odd[0]} has {lengths[odd[0]]}"
        )
    try:
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(n, -1)
    except (ValueError, TypeError) as problem:
        raise DataError(f"{quote_name(path)} column {quote_name(name)} is no list of numbers: {problem}") from None


def _numeric(types: Any, column: Any, name: str, path: Path) -> np.ndarray:
    if not (types.is_integer(column.type) or types.is_floating(column.type)):
        raise DataError(f"{quote_name(path)} column {quote_name(name)} must hold numbers: got {column.type}")
    return column.to_numpy()


def _csv(path: Path, wanted: str | None) -> Read:
    header, rows = read_delimited(path)
    if not header:
        raise DataError(f"{quote_name(path)} is empty")
    used = _which(header, [n for n in header if n in (*VECTORS, wanted)], wanted, path)
    place = {name: i for i, name in enumerate(header)}
    at = [place.pop(name) for name in used]
    rest = list(place.values())
    blocks, block = [], []
    texts: list[list[str]] = [[] for _ in rest]
    for line, row in rows:
        block.append(_vector([row[i] for i in at], used, path, line))
        for kept, i in zip(texts, rest, strict=True):
            kept.append(row[i].strip())
        if len(block) == _CHUNK:
            blocks.append(_stacked(block, blocks, path))
            block = []
    if block:
        blocks.append(_stacked(block, blocks, path))
    if not blocks:
        raise DataError(f"{quote_name(path)} has no rows")
    columns = {header[i]: _typed(kept) for i, kept in zip(rest, texts, strict=True)}
    return Read(np.concatenate(blocks), columns, {})


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
            f"{quote_name(path)} line {line}, column {quote_name(name)}: {quote_name(fields[at], 40)} is not a number"
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
                f"{quote_name(path)}: vectors must be of one length, but row 0 has {width} numbers and row {start + k} "
                f"has {len(row)}"
            )
    return np.asarray(block, np.float64)


def _typed(texts: list[str]) -> np.ndarray:
    """Whole numbers where all are written as such (007 is a name), else text."""
    if all(is_integer_text(t) for t in texts):
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
            raise DataError(
                f"embeddings: no columns {quote_name(wanted)} in {quote_name(path)}{nearest(wanted, known)}"
            )
        return [name for _, name in sorted(families[wanted])]
    usual = next((name for name in VECTORS if name in lists), lists[0] if len(lists) == 1 else None)
    if usual is not None:
        return [usual]
    largest = max(families.values(), key=len, default=[])
    _gapless(largest, path)
    if len(largest) < 2:
        raise DataError(
            f"no embeddings in {quote_name(path)}: number their columns (e0, e1, …), put them into one column "
            "'embedding' as lists, or name it with --embeddings"
        )
    return [name for _, name in sorted(largest)]


def _gapless(family: Sequence[tuple[int, str]], path: Path) -> None:
    """Refuse numbered columns with one missing: vectors without it are other vectors."""
    for (number, name), (after, following) in pairwise(sorted(family)):
        if after != number + 1:
            prefix = _NUMBERED.match(name)
            raise DataError(
                f"{quote_name(path)}: numbered columns go from {quote_name(name)} to {quote_name(following)}; is one "
                "missing? If they are meant so, name them with --embeddings "
                f"{prefix[1] if prefix and prefix[1] else 'PREFIX'}"
            )
