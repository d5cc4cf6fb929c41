"""Mined triplets and pairs as tables that training takes: ``data.triplets`` and ``data.pairs``."""

import csv
import importlib
from collections.abc import Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import write_bytes
from mettle.errors import InputError, MissingExtra
from mettle.mining.triplets import MinedTriplets

DIGITS = 6  # of scores


def write_triplets(mined: MinedTriplets, path: Path | str, names: Sequence[object], labels: Sequence[object]) -> int:
    """Write ``anchor``, ``positive``, ``negative``, their labels and scores; how many rows were written.

    Args:
        mined: what was mined.
        path: of a ``.csv`` or ``.parquet`` file.
        names: what to call every row of the set: the id, or the path, of its sample.
        labels: what to call the label of every row.
    """
    name, label = np.asarray(names), np.asarray(labels)
    columns = {
        "anchor": name[mined.anchors],
        "positive": name[mined.positives],
        "negative": name[mined.negatives],
        "positive_score": mined.positive_scores.round(DIGITS),
        "negative_score": mined.negative_scores.round(DIGITS),
        "anchor_label": label[mined.anchors],
        "negative_label": label[mined.negatives],
    }
    return _write(columns, Path(path))


def write_pairs(mined: MinedTriplets, path: Path | str, names: Sequence[object], labels: Sequence[object]) -> int:
    """Write ``first``, ``second``, ``target``, their labels and score; how many rows were written.

    See :func:`write_triplets` for the arguments. A pair is written once, in whichever order its rows occur.
    """
    name, label, pairs = np.asarray(names), np.asarray(labels), mined.pairs()
    columns = {
        "first": name[pairs.first],
        "second": name[pairs.second],
        "target": pairs.target,
        "score": pairs.scores.round(DIGITS),
        "first_label": label[pairs.first],
        "second_label": label[pairs.second],
    }
    return _write(columns, Path(path))


def check_table_path(path: Path | str) -> None:
    """Refuse a file that cannot be written, before the work."""
    path = Path(path)
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise InputError(f"cannot write {path}: tables are written as .csv or .parquet; choose such an ending")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")


def _write(columns: dict[str, np.ndarray], path: Path) -> int:
    check_table_path(path)
    write_bytes(path, _encode_csv(columns) if path.suffix.lower() == ".csv" else _encode_parquet(columns))
    return len(next(iter(columns.values())))


def _encode_csv(columns: dict[str, np.ndarray]) -> bytes:
    buffer = StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return buffer.getvalue().encode()


def _encode_parquet(columns: dict[str, np.ndarray]) -> bytes:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtra("Parquet needs pyarrow: pip install pyarrow, or write .csv") from None
    buffer = BytesIO()
    parquet.write_table(arrow.table({name: column.tolist() for name, column in columns.items()}), buffer)
    return buffer.getvalue()
