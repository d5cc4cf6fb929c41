"""Manifests: a CSV (or ``.csv.gz``) or Parquet table with one sample a row.

| column | meaning |
|---|---|
| ``path`` | a picture file, relative to the manifest's folder or absolute; without it the table is the data |
| ``label``, else ``y`` | who or what, required; ``label="identity"`` takes another column |
| ``id`` | whole number, unique |
| ``domain`` | how it was taken |
| ``split`` | train, val, test (or 0, 1, 2), or empty |
| ``role`` | query, gallery, either, distractor (or 1, 2, 0, 3), or empty |
| ``is_query``, ``is_gallery`` | true or false, instead of ``role`` |

With pictures, every other column of text with at most 1000 distinct values is a group column, and numbers are
passed over unless ``groups`` names them. Without pictures, ``g`` is the group column unless ``groups`` says
otherwise, and all that is left are features: numbers as they are, text one column per category (sorted).

A manifest is trusted as a script is: its paths may lead anywhere, absolute ones and ``..`` included.

Errors name the line, counted as an editor does: the header is line 1 (in Parquet: the row, from 1).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from mettle.data.arrays import GROUP_VALUES, apart, roles, yes_no
from mettle.data.check import Policy, screen
from mettle.data.decode import Channels, shown
from mettle.data.images import ImageFiles, Rows, Size
from mettle.data.samples import NO_SPLIT, SPLITS, Column, Inputs, Samples
from mettle.data.table import Table, number, read_table, whole
from mettle.errors import DataError, InputError, nearest

MISSING = frozenset(("", "?", "na", "n/a", "nan", "null", "none"))
MOSTLY = 0.9  # a column with this share of numbers is meant as numbers: the rest are mistakes, not categories
RESERVED = ("path", "id", "domain", "split", "role", "is_query", "is_gallery")
TRUTH = {text: True for text in ("true", "t", "yes", "1", "1.0")} | {
    text: False for text in ("false", "f", "no", "0", "0.0")
}


def read_manifest(
    path: str | Path,
    *,
    label: str | None = None,
    domain: str | None = None,
    groups: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    categories: Sequence[str] = (),
    text: Literal["onehot", "code"] = "onehot",
    missing: Literal["fail", "mean"] = "fail",
    size: Size | None = None,
    channels: Channels = 3,
    policy: Policy = "fail",
) -> Samples:
    """Read a manifest.

    Args:
        path: ``.csv``, ``.csv.gz`` or ``.parquet`` (which needs ``mettle-ml[parquet]``).
        label: The column that holds the label; by default ``label``, else ``y``.
        domain: The column that holds the domain; by default ``domain`` when there is one.
        groups: The columns to keep as groups, see above.
        features: The columns to use as features, without pictures; by default all that are left.
        categories: Feature columns to treat as text although they hold numbers (codes, say).
        text: Text features as one column per category, or as the number of the category in sorted order.
        missing: What to do about missing numbers: ``fail``, or the ``mean`` of the column (of its train rows,
            where there is a split).
        size: (height, width) to stretch pictures to.
        channels: 1 for grey, 3 for RGB.
        policy: What to do about bad samples, see `mettle.data.check.screen`.

    Raises:
        DataError: The table does not fit; one line says where and why.
        MissingExtra: Parquet support is not installed.
    """
    table = read_table(Path(path))
    who = _name(table, label, ("label", "y"), "label")
    if who is None:
        raise DataError(f"no column label in {shown(path)}: pass label=...{nearest('', table.columns)}")
    where = _name(table, domain, ("domain",), "domain")
    pictures = "path" in table.columns
    kept = _groups(table, groups, {who, where}, pictures)
    split, (role, distractor) = split_column(table), _roles(table)
    taken = {who, where, *kept, *RESERVED}
    inputs: Inputs
    if pictures:
        inputs = ImageFiles(_paths(table, policy), size, channels, table.path.parent)
    else:
        chosen = [name for name in table.columns if name and name not in taken] if features is None else features
        inputs = _rows(table, [table.known(name) for name in chosen], categories, text, missing, split)
    samples = Samples.of(
        inputs,
        apart(_column(table, who, required=True), distractor),
        ids=_ids(table),
        domain=None if where is None else _column(table, where),
        groups={name: _column(table, name) for name in kept}
        | ({"distractor": yes_no(distractor)} if distractor.any() else {}),
        split=split,
        role=role,
        origin=str(path),
    )
    return screen(samples, policy)


def _name(table: Table, wanted: str | None, usual: Sequence[str], what: str) -> str | None:
    """The wanted column, or the first of the usual ones that is there."""
    if wanted is not None:
        if wanted not in table.columns:
            known = nearest(wanted, table.columns)
            raise DataError(f"{what}: no column {shown(wanted)} in {shown(table.path)}{known}")
        return wanted
    return next((name for name in usual if name in table.columns), None)


def _groups(table: Table, wanted: Sequence[str] | None, taken: set[str | None], pictures: bool) -> list[str]:
    if wanted is not None:
        return [table.known(name) for name in wanted]
    free = [name for name in table.columns if name and name not in taken and name not in RESERVED]
    if not pictures:
        return ["g"] if "g" in free else []
    return [name for name in free if len(set(table.columns[name])) <= GROUP_VALUES and not _is_numeric(table, name)]


def _column(table: Table, name: str, required: bool = False) -> Column:
    """A column of categories: sorted by value when all are whole numbers, else as text."""
    values = [value.strip() for value in table.columns[name]]
    if required and "" in values:
        raise table.error(values.index(""), name, "empty; every sample needs one")
    if all(whole(value) for value in values):
        return Column.of(np.array([int(value) for value in values], np.int64))
    return Column.of(np.array(values))


def _ids(table: Table) -> np.ndarray | None:
    if "id" not in table.columns:
        return None
    seen: dict[int, int] = {}
    for row, value in enumerate(table.columns["id"]):
        if not whole(value.strip()):
            raise table.error(row, "id", f"{shown(value)} is not a whole number; rename the column if it is a name")
        first = seen.setdefault(int(value), row)
        if first != row:
            raise table.error(row, "id", f"{value} is already on {table.unit} {table.lines[first]}")
    return np.fromiter(seen, np.int64, len(seen))


def split_column(table: Table) -> np.ndarray | None:
    """Codes of the column ``split``, None without one."""
    if "split" not in table.columns:
        return None
    code = {name: i for i, name in enumerate(SPLITS)} | {"": NO_SPLIT, "-1": NO_SPLIT, "0": 0, "1": 1, "2": 2}
    return _coded(table, "split", code | {"valid": 1, "validation": 1, "none": NO_SPLIT}, ", ".join(SPLITS))


def _coded(table: Table, name: str, code: Mapping[str, int], known: str) -> np.ndarray:
    codes = np.empty(len(table.lines), np.int8)
    for row, value in enumerate(table.columns[name]):
        found = code.get(value.strip().lower())
        if found is None:
            raise table.error(row, name, f"{shown(value)} is none of {known}")
        codes[row] = found
    return codes


def _roles(table: Table) -> tuple[np.ndarray | None, np.ndarray]:
    """Role codes and distractors, from ``role`` or from ``is_query`` and ``is_gallery``."""
    nobody = np.zeros(len(table.lines), bool)
    if "role" in table.columns:
        words = ("either", "query", "gallery", "distractor")
        code = {word: i for i, word in enumerate(words)} | {str(i): i for i in range(4)} | {"": 0, "train": 0}
        return roles(_coded(table, "role", code, ", ".join(words)))
    if "is_query" not in table.columns or "is_gallery" not in table.columns:
        return None, nobody
    code = {text: int(value) for text, value in TRUTH.items()} | {word: -1 for word in MISSING}
    query, gallery = (_coded(table, name, code, "true, false") for name in ("is_query", "is_gallery"))
    split = split_column(table)
    neither = (query == 0) & (gallery == 0) & (True if split is None else split != SPLITS.index("train"))
    if neither.any():
        problem = "neither query nor gallery; leave the row out"
        raise table.error(int(neither.argmax()), "is_query", problem)
    return np.where(query == gallery, 0, np.where(query == 1, 1, np.where(gallery == 1, 2, 0))), nobody


def _paths(table: Table, policy: Policy) -> list[str]:
    paths = [value.strip() for value in table.columns["path"]]
    for row, path in enumerate(paths):
        if not path:
            raise table.error(row, "path", "empty; every row needs a picture")
        if "://" in path:
            raise table.error(row, "path", f"{shown(path)} is an address; download it and give the file")
        if policy == "fail" and not os.path.lexists(table.path.parent / path):
            raise table.error(row, "path", f"no file {shown(path)}; paths start from the manifest's folder")
    return paths


def _rows(
    table: Table,
    names: Sequence[str],
    categories: Sequence[str],
    text: str,
    missing: str,
    split: np.ndarray | None,
) -> Rows:
    """The feature columns as one array."""
    if text not in ("onehot", "code") or missing not in ("fail", "mean"):
        raise InputError(f"text must be onehot or code, missing fail or mean, got {text!r}, {missing!r}")
    if not names:
        raise DataError(f"{shown(table.path)} has neither a column path nor feature columns")
    parts, titles = [], []
    for name in names:
        numbers = None if name in categories else _numbers(table, name)
        if numbers is not None:
            parts.append(_filled(table, name, numbers, missing, split)[:, None])
            titles.append(name)
            continue
        column = Column.of(np.array([value.strip() for value in table.columns[name]]))
        if text == "code":
            parts.append(column.codes[:, None].astype(np.float32))
            titles.append(name)
        elif len(column.names) <= GROUP_VALUES:
            parts.append(np.eye(len(column.names), dtype=np.float32)[column.codes])
            titles += [f"{name}={category}" for category in column.names]
        else:
            problem = f"column {shown(name)} has {len(column.names)} distinct texts, over {GROUP_VALUES}"
            raise DataError(f"{shown(table.path)}: {problem}; choose features=..., or pass text='code'")
    return Rows(np.hstack(parts), titles)


def _filled(table: Table, name: str, numbers: np.ndarray, missing: str, split: np.ndarray | None) -> np.ndarray:
    """The numbers without gaps, as float32."""
    gaps = np.isnan(numbers)
    if gaps.any():
        if missing == "fail":
            raise table.error(int(gaps.argmax()), name, "no number; fill it in, or pass missing='mean'")
        known = ~gaps if split is None or not (split == 0).any() else ~gaps & (split == 0)
        if not known.any():
            raise table.error(int(gaps.argmax()), name, "no number in any train row to take the mean of")
        numbers = np.where(gaps, numbers[known].mean(), numbers)
    large = np.abs(numbers) > np.finfo(np.float32).max
    if large.any():
        raise table.error(int(large.argmax()), name, f"{numbers[large][0]:g} is too large, or not finite")
    return numbers.astype(np.float32)


def _numbers(table: Table, name: str) -> np.ndarray | None:
    """The column as numbers, NaN where one is missing; None when it is text."""
    odd: list[int] = []
    numbers = np.full(len(table.lines), np.nan)
    for row, value in enumerate(table.columns[name]):
        if value.strip().lower() not in MISSING:
            read = number(value)
            if read is None:
                odd.append(row)
            else:
                numbers[row] = read
    counted = int((~np.isnan(numbers)).sum())
    if not counted or len(odd) > (1 - MOSTLY) * (counted + len(odd)):
        return None
    if odd:
        first = odd[0]
        problem = f"{shown(table.columns[name][first])} is not a number, though most of the column is"
        raise table.error(first, name, f"{problem}; correct it, or pass categories=[{name!r}]")
    return numbers


def _is_numeric(table: Table, name: str) -> bool:
    """Whether the column holds numbers and gaps only."""
    values = {value.strip().lower() for value in table.columns[name]} - MISSING
    return bool(values) and all(number(value) is not None for value in values)
