"""Parquet files by pyarrow: their columns as texts, or as numbers and matrices of vectors.

Every error about a file is a `DataError` of one line, whatever pyarrow calls it. Where a `ReaderPool` is active,
pyarrow runs in one of its processes: 63 kB of Parquet can unpack to gigabytes.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mettle.data.image_decoding import quote_name
from mettle.data.reader_pool import call_reader
from mettle.errors import DataError, MettleError, MissingExtra

_MODULES = ("pyarrow.parquet",)
_TEXT_BYTES = 64  # of memory that a short text takes as an object of Python
_MOST_CELLS = 1 << 30  # of a file: more is no table of samples


class ParquetSchema(NamedTuple):
    """The columns of a file."""

    names: list[str]
    lists: list[str]  # those whose values are lists


def read_parquet_schema(path: Path) -> ParquetSchema:
    """Which columns a file has."""
    return ParquetSchema(*_call(_read_schema, path))


def read_parquet_texts(path: Path) -> tuple[dict[str, list[str]], int]:
    """Every column as texts, empty where a value is missing, and the number of rows."""
    columns, count = _call(_read_texts, path)
    return columns, count


def read_parquet_arrays(path: Path, vectors: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Vectors from one column of lists, or from numbered columns; and all other columns that are no lists."""
    values, columns = _call(_read_arrays, path, list(vectors))
    return values, columns


def _call(function: Callable, path: Path, *more: Any) -> Any:
    try:
        size = path.stat().st_size
        return call_reader(function, path, *more, size=size, modules=_MODULES)
    except (OSError, MemoryError) as problem:
        raise _unreadable(path, problem) from None
    except DataError as problem:  # of the processes that read, which do not know of which file they speak
        if str(path) in str(problem) or quote_name(path) in str(problem):
            raise
        raise type(problem)(f"cannot read {quote_name(path)}: {problem}") from None


def _open(path: Path) -> tuple[Any, Any]:
    """pyarrow, and the file; nothing but its schema is read."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtra("Parquet needs pyarrow: pip install pyarrow") from None
    file = _read(path, lambda: parquet.ParquetFile(path))
    names = [str(name) for name in file.schema_arrow.names]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise DataError(f"{quote_name(path)}: two columns are called {quote_name(twice)}")
    if file.metadata.num_rows * max(1, len(names)) > _MOST_CELLS:
        raise DataError(f"{quote_name(path)} says that it has {file.metadata.num_rows} rows: more than are read")
    return arrow, file


def _read(path: Path, read: Callable[[], Any]) -> Any:
    """What pyarrow gives; its errors have several unrelated bases."""
    try:
        return read()
    except (MemoryError, MettleError):
        raise
    except Exception as problem:
        raise _unreadable(path, problem) from None


def _unreadable(path: Path, problem: Exception) -> DataError:
    said = " ".join(str(problem).split())[:200] or type(problem).__name__
    return DataError(f"cannot read {quote_name(path)}: {said}")


def _read_schema(path: Path) -> tuple[list[str], list[str]]:
    arrow, file = _open(path)
    schema = file.schema_arrow
    return list(schema.names), [name for name in schema.names if _is_list(arrow.types, schema.field(name).type)]


def _read_texts(path: Path) -> tuple[dict[str, list[str]], int]:
    _, file = _open(path)
    table = _read(path, lambda: file.read(use_threads=False))
    return {name: _as_texts(path, table[name], name) for name in table.column_names}, table.num_rows


def _read_arrays(path: Path, vectors: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    arrow, file = _open(path)
    types, lists = arrow.types, _read_schema(path)[1]
    table = _read(path, lambda: file.read(use_threads=False))
    if vectors[0] in lists:
        values = _as_matrix(_read(path, lambda: table[vectors[0]].combine_chunks()), vectors[0], path)
    else:
        values = np.column_stack([_as_numbers(types, table[name], name, path) for name in vectors])
    columns = {}
    for name in table.column_names:
        column = table[name]
        if name in vectors or name in lists:
            continue
        if (types.is_integer(column.type) and not column.null_count) or types.is_floating(column.type):
            columns[name] = _read(path, column.to_numpy)
        else:
            columns[name] = np.asarray(_as_texts(path, column, name), str)
    return values, columns


def _as_texts(path: Path, column: Any, name: str) -> list[str]:
    """The values of a column as one writes them."""

    def cast() -> list[str]:
        texts = column.cast("string")
        if _TEXT_BYTES * len(texts) + texts.nbytes > 4 << 30:
            raise MemoryError
        return texts.fill_null("").to_pylist()

    try:
        return cast()
    except MemoryError:
        raise
    except Exception as problem:  # a structure, a list, bytes that are no text
        said = " ".join(str(problem).split())[:160]
        raise DataError(f"{quote_name(path)} column {quote_name(name)} is no column of texts: {said}") from None


def _is_list(types: Any, kind: Any) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _as_matrix(column: Any, name: str, path: Path) -> np.ndarray:
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
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(n, width if n else 0)
    except MemoryError:
        raise
    except Exception as problem:
        said = " ".join(str(problem).split())[:160]
        raise DataError(f"{quote_name(path)} column {quote_name(name)} is no list of numbers: {said}") from None


def _as_numbers(types: Any, column: Any, name: str, path: Path) -> np.ndarray:
    if not (types.is_integer(column.type) or types.is_floating(column.type)):
        raise DataError(f"{quote_name(path)} column {quote_name(name)} must hold numbers: got {column.type}")
    return _read(path, column.to_numpy)
