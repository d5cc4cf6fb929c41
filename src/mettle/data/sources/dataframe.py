"""A DataFrame of pandas or polars: what a manifest is on disk, in memory.

Columns are found by the names of :mod:`mettle.data.column_names`, and mean what they mean in a manifest: with a column
of image files the others are groups, without one the others are features.
"""

import math
from pathlib import Path
from typing import Any

from mettle.data.dataset import Samples
from mettle.data.sources.manifest import read_manifest
from mettle.data.sources.text_table import TextTable
from mettle.data.sources.torch_dataset import PYTHON
from mettle.errors import DataError


def is_dataframe(given: Any) -> bool:
    """Whether this is a DataFrame, of whatever library."""
    return type(given).__name__ == "DataFrame" and hasattr(given, "columns") and hasattr(given, "__getitem__")


def read_dataframe(frame: Any, *, root: Path | str = ".", **options: Any) -> Samples:
    """The samples of a DataFrame.

    Args:
        frame: of pandas or polars.
        root: the folder that relative paths of images start from.
        options: those of `mettle.data.sources.manifest.read_manifest`: ``label``, ``domain``, ``groups``, ...
    """
    if not len(frame):
        raise DataError("the DataFrame has no rows: there is nothing to read")
    columns = {str(name): [_as_text(value) for value in _as_values(frame[name])] for name in frame.columns}
    table = TextTable(Path(root) / "DataFrame", columns, range(len(frame)), "row", f"{PYTHON}DataFrame")
    return read_manifest(table, **options)


def _as_values(column: Any) -> list[Any]:
    return column.to_list() if hasattr(column, "to_list") else list(column)


def _as_text(value: Any) -> str:
    """A cell as a manifest would have it; what is missing is empty."""
    if (
        value is None
        or (isinstance(value, float) and math.isnan(value))
        or type(value).__name__ in ("NAType", "NaTType")
    ):
        return ""
    return str(value)
