"""Manifests: a CSV, TSV (either with ``.gz``) or Parquet table with one sample a row.

| column | meaning |
|---|---|
| ``path`` | a picture file, relative to the manifest's folder or absolute; without it the table is the data |
| ``image``, ``file``, ``filename``, ... | instead of ``path``, where it holds picture files; or ``image=...`` |
| ``label``, ``labels``, ``y``, ``identity`` | who or what, required: the first that is there, or ``label=...`` |
| ``id``, ``ids`` | whole number, unique |
| ``domain``, ``camera``, ``device``, ``session`` | how it was taken: the first that is there, or ``domain=...`` |
| ``split``, ``subset`` | train, val, test (or training, dev, ..., or 0, 1, 2), or empty |
| ``role`` | query, gallery, either, distractor (or 1, 2, 0, 3), or empty |
| ``is_query``, ``is_gallery`` | true or false, instead of ``role`` |

The names are those of :mod:`mettle.data.column_names`, which every reader shares; capitals do not matter.

With pictures, every other column of text with at most 1000 distinct values is a group column, and numbers are
passed over unless ``groups`` names them. Without pictures, ``g`` is the group column unless ``groups`` says
otherwise, and all that is left are features: numbers as they are, text one column per category (sorted). What is
passed over is said in ``notes``. A table for a model that is trained already is read ``like`` the first one.

A manifest is trusted as a script is: its paths may lead anywhere, absolute ones and ``..`` included.

Errors name the line, counted as an editor does: the header is line 1 (in Parquet: the row, from 1).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mettle.data.check import Policy, drop_unreadable
from mettle.data.column_names import DOMAINS, IDS, LABELS, PICTURES, SPLIT, find_column, find_columns
from mettle.data.dataset import NO_SPLIT, SPLIT_WORDS, SPLITS, Column, Inputs, Samples
from mettle.data.image_decoding import Channels, Resize, Sides, image_suffixes, quote_name
from mettle.data.inputs import ImageFiles, describe_root
from mettle.data.sources.feature_columns import (
    MISSING,
    Feature,
    apply_features,
    features_from_json,
    fit_features,
    is_mostly,
)
from mettle.data.sources.npz import GROUP_VALUES, SAY_WHICH, parse_roles, separate_distractors, yes_no_column
from mettle.data.sources.text_table import TextTable, is_integer_text, parse_number, read_table
from mettle.errors import DataError

RESERVED = ("path", "domain", "role", "is_query", "is_gallery")
SPLIT_CODES = {word: SPLITS.index(name) for word, name in SPLIT_WORDS.items()}
SPLIT_CODES |= {"": NO_SPLIT, "-1": NO_SPLIT, "none": NO_SPLIT, "0": 0, "1": 1, "2": 2}
TRUTH = {text: True for text in ("true", "t", "yes", "1", "1.0")} | {
    text: False for text in ("false", "f", "no", "0", "0.0")
}


def read_manifest(
    path: str | Path | TextTable,
    *,
    label: str | None = None,
    domain: str | None = None,
    groups: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    categories: Sequence[str] = (),
    text: Literal["onehot", "code"] = "onehot",
    missing: Literal["fail", "mean"] = "fail",
    size: Sides | None = None,
    resize: Resize = "crop",
    channels: Channels = 3,
    policy: Policy = "fail",
    image: str | None = None,
    like: Sequence[Mapping[str, Any] | Feature] | None = None,
    labeled: bool = True,
) -> Samples:
    """Read a manifest.

    Args:
        path: ``.csv``, ``.tsv``, either with ``.gz``, or ``.parquet`` (which needs pyarrow); or a table in memory.
        label: The column that holds the label; by default ``label``, ``labels``, ``y`` or ``identity``.
        domain: The column that holds the domain; by default ``domain``, ``camera``, ``device`` or ``session``
            when there is one; ``""`` for none.
        groups: The columns to keep as groups, see above.
        features: The columns to use as features, without pictures; by default all that are left.
        categories: Feature columns to treat as text although they hold numbers (codes, say).
        text: Text features as one column per category, or as the number of the category in sorted order.
        missing: What to do about missing numbers: ``fail``, or the ``mean`` of the column (of its train rows,
            where there is a split).
        size: (height, width), or one side, of every picture.
        resize: How they get that size: ``crop`` from the centre, ``pad``, or ``stretch``.
        channels: 1 for grey, 3 for RGB.
        policy: What to do about bad samples, see `mettle.data.drop_unreadable`.
        image: The column of picture files, where the usual names do not fit; ``""`` for none.
        like: Without pictures, the columns that a model was trained on (``samples.inputs.features``, or what its
            contract says): they are found by name and coded as they were; any other column is an error unless
            ``features`` were chosen.
        labeled: Whether every row needs a label; where not, rows without one have the label ``""``.

    Raises:
        DataError: The table does not fit; one line says where and why.
        MissingExtra: Parquet support is not installed.
    """
    table = path if isinstance(path, TextTable) else read_table(Path(path))
    known = labeled or label in table.columns  # rows to embed may lack the column that a run was trained by
    trained = None if like is None else features_from_json(like)
    inner = features if trained is None else [feature.name for feature in trained]
    others = [name for name in table.columns if name not in (inner or ())]  # a feature that was named is nothing else
    who = _choose_column(table, label if known else None, LABELS, "label", others)
    if who is None and labeled:
        raise DataError(
            f"no column label in {quote_name(table.path)}: rename it, {SAY_WHICH}{table.suggest_column('label')}"
        )
    where = None if domain == "" else _choose_column(table, domain, DOMAINS, "domain", others)
    rows = trained is not None or (features is not None and image is None and "path" not in table.columns)
    pictures = None if rows else _find_image_column(table, image)
    taken = {who, where, pictures, find_column(others, IDS), find_split_column(table)}
    kept, notes = _choose_groups(table, groups, taken, pictures is not None, inner)
    if domain is None and where is not None and where.lower() != "domain":
        change = "data.domain in a recipe, --domain, domain= in Python names another, '' none"
        notes += (f"column {quote_name(where)} is taken as the domain: {change}",)
    split, (role, distractor) = read_split_column(table), _read_roles(table)
    free = [name for name in table.columns if name and name not in {*taken, *kept, *RESERVED}]
    inputs: Inputs
    if pictures is not None:
        inputs = ImageFiles(_read_paths(table, pictures, policy), size, channels, table.path.parent, resize)
    elif trained is not None:
        if features is None:
            _refuse_unknown_columns(table, free, [feature.name for feature in trained])
        inputs = apply_features(table, trained)
    else:
        if features is None and image is None:
            _refuse_image_columns(table, free)
        chosen = free if features is None else [table.require_column(name) for name in features]
        inputs = fit_features(table, chosen, categories=categories, text=text, missing=missing, split=split)
    nobody = Column(np.zeros(len(table.lines), np.int64), ("",))
    samples = Samples.of(
        inputs,
        separate_distractors(nobody if who is None else _read_column(table, who, required=labeled), distractor),
        ids=_read_ids(table, find_column(others, IDS)),
        domain=None if where is None else _read_column(table, where),
        groups={name: _read_column(table, name) for name in kept}
        | ({"distractor": yes_no_column(distractor)} if distractor.any() else {}),
        split=split,
        role=role,
        source_name=table.name or str(table.path),
        notes=notes,
    )
    return drop_unreadable(samples, policy)


def _choose_column(
    table: TextTable, wanted: str | None, usual: Sequence[str], what: str, among: Sequence[str] = ()
) -> str | None:
    """The wanted column, or the first of the usual ones that is there ``among`` some."""
    if wanted is not None:
        if wanted not in table.columns:
            raise DataError(
                f"{what}: no column {quote_name(wanted)} in {quote_name(table.path)}{table.suggest_column(wanted)}"
            )
        return wanted
    return find_column(among, usual)


def _find_image_column(table: TextTable, wanted: str | None) -> str | None:
    """The column of picture files, None without one."""
    if wanted is not None:
        return _choose_column(table, wanted, (), "image") if wanted else None
    if "path" in table.columns:
        return "path"
    return next((name for name in find_columns(table.columns, PICTURES) if _has_image_names(table, name)), None)


def _has_image_names(table: TextTable, name: str) -> bool:
    """Whether a column holds names of picture files."""
    return is_mostly(table.columns[name], lambda value: value.strip().lower().endswith(image_suffixes()))


def _refuse_image_columns(table: TextTable, names: Sequence[str]) -> None:
    for name in names:
        if _has_image_names(table, name):
            problem = f"column {quote_name(name)} holds names of picture files, which are no features"
            remedy = f"rename it to path, or set data.image={name!r} (--image on the command line, image= in Python)"
            others = "or choose the features (data.features in a recipe, features= in Python)"
            raise DataError(f"{quote_name(table.path)}: {problem}: {remedy}, {others}")


def _refuse_unknown_columns(table: TextTable, names: Sequence[str], known: Sequence[str]) -> None:
    others = [name for name in names if name not in known]
    if others and all(name in table.columns for name in known):  # else the name that is not there says more
        problem = f"column {quote_name(others[0])} of {quote_name(table.path)} is none that the model was trained on"
        raise DataError(f"{problem} ({_join_names(known)}): take it out of the table")


def _join_names(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _choose_groups(
    table: TextTable,
    wanted: Sequence[str] | None,
    taken: set[str | None],
    pictures: bool,
    features: Sequence[str] | None,
) -> tuple[list[str], tuple[str, ...]]:
    """The group columns, and a note about columns whose use might surprise."""
    if wanted is not None:
        return [table.require_column(name) for name in wanted], ()
    free = [name for name in table.columns if name and name not in taken and name not in RESERVED]
    if not pictures:
        if "g" not in free or "g" in (features or ()):
            return [], ()
        change = "data.groups in a recipe, groups= in Python changes that"
        return ["g"], (f"column 'g' is taken as a group, not as a feature: {change}",)
    numbers = [name for name in free if _is_numeric(table, name)]
    many = [name for name in free if name not in numbers and len(set(table.columns[name])) > GROUP_VALUES]
    why = [(numbers, "numbers"), (many, f"over {GROUP_VALUES} distinct texts")]
    left = [f"{_join_names([quote_name(name) for name in names])} ({reason})" for names, reason in why if names]
    note = f"columns left out: {', '.join(left)}; data.groups in a recipe, groups= in Python keeps those it names"
    return [name for name in free if name not in numbers and name not in many], (note,) if left else ()


def _read_column(table: TextTable, name: str, required: bool = False) -> Column:
    """A column of categories: sorted by value when all are whole numbers, else as text."""
    values = [value.strip() for value in table.columns[name]]
    if required and "" in values:
        raise table.error(values.index(""), name, "empty; every sample needs one")
    if all(is_integer_text(value) for value in values):
        return Column.of(np.array([int(value) for value in values], np.int64))
    return Column.of(np.array(values))


def _read_ids(table: TextTable, name: str | None) -> np.ndarray | None:
    if name is None:
        return None
    seen: dict[int, int] = {}
    for row, value in enumerate(table.columns[name]):
        if not is_integer_text(value.strip()):
            raise table.error(
                row, name, f"{quote_name(value)} is not a whole number; rename the column if it is a name"
            )
        first = seen.setdefault(int(value), row)
        if first != row:
            raise table.error(row, name, f"{value} is already on {table.unit} {table.lines[first]}")
    return np.fromiter(seen, np.int64, len(seen))


def find_split_column(table: TextTable) -> str | None:
    """The column that says the split: ``split``, or ``subset`` where it holds nothing else; None without one."""
    for name in find_columns(table.columns, SPLIT):
        if name == SPLIT[0] or {value.strip().lower() for value in table.columns[name]} <= set(SPLIT_CODES):
            return name
    return None


def read_split_column(table: TextTable) -> np.ndarray | None:
    """Codes of the column of `split_name`, None without one."""
    name = find_split_column(table)
    return None if name is None else _read_codes(table, name, SPLIT_CODES, ", ".join(SPLITS))


def _read_codes(table: TextTable, name: str, code: Mapping[str, int], known: str) -> np.ndarray:
    codes = np.empty(len(table.lines), np.int8)
    for row, value in enumerate(table.columns[name]):
        found = code.get(value.strip().lower())
        if found is None:
            raise table.error(row, name, f"{quote_name(value)} is none of {known}")
        codes[row] = found
    return codes


def _read_roles(table: TextTable) -> tuple[np.ndarray | None, np.ndarray]:
    """Role codes and distractors, from ``role`` or from ``is_query`` and ``is_gallery``."""
    nobody = np.zeros(len(table.lines), bool)
    if "role" in table.columns:
        words = ("either", "query", "gallery", "distractor")
        code = {word: i for i, word in enumerate(words)} | {str(i): i for i in range(4)} | {"": 0, "train": 0}
        return parse_roles(_read_codes(table, "role", code, ", ".join(words)))
    if "is_query" not in table.columns or "is_gallery" not in table.columns:
        return None, nobody
    code = {text: int(value) for text, value in TRUTH.items()} | {word: -1 for word in MISSING}
    query, gallery = (_read_codes(table, name, code, "true, false") for name in ("is_query", "is_gallery"))
    split = read_split_column(table)
    neither = (query == 0) & (gallery == 0) & (True if split is None else split != SPLITS.index("train"))
    if neither.any():
        problem = "neither query nor gallery; leave the row out"
        raise table.error(int(neither.argmax()), "is_query", problem)
    return np.where(query == gallery, 0, np.where(query == 1, 1, np.where(gallery == 1, 2, 0))), nobody


def _read_paths(table: TextTable, column: str, policy: Policy) -> list[str]:
    paths = [value.strip() for value in table.columns[column]]
    for row, path in enumerate(paths):
        if not path:
            raise table.error(row, column, "empty; every row needs a picture")
        if "://" in path:
            raise table.error(row, column, f"{quote_name(path)} is an address; download it and give the file")
        if policy == "fail" and not os.path.lexists(table.path.parent / path):
            raise table.error(row, column, f"no file {quote_name(path)}{describe_root(path, table.path.parent)}")
    return paths


def _is_numeric(table: TextTable, name: str) -> bool:
    """Whether the column holds numbers and gaps only."""
    values = {value.strip().lower() for value in table.columns[name]} - MISSING
    return bool(values) and all(parse_number(value) is not None for value in values)
