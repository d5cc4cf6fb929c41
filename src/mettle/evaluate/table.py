"""Embeddings in a file, from any model: the vectors, who each one is, and what else is known about it.

| file | vectors | columns |
|---|---|---|
| ``.npz`` | a 2-D array ``embeddings``, ``features``, ``x``, … | every 1-D array with one entry a row |
| ``.parquet`` | a column of lists, or numbered columns ``e0, e1, …`` | all others |
| ``.csv``, ``.csv.gz`` | numbered columns, or one column of lists: ``"[0.1, 0.2]"`` or ``"0.1 0.2"`` | all others |
| ``.npy`` | the array | other ``.npy`` files of the folder, by their names: ``labels.npy``, ``domain.npy``, … |

Labels, domains and groups are whole numbers or text. What cannot be read is refused in one line; nothing is unpickled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mettle.data.column_names import DOMAINS, IDS, LABELS, PICTURES, SPLIT, find_column
from mettle.data.dataset import SPLIT_WORDS, SPLITS, Column
from mettle.data.image_decoding import quote_name
from mettle.data.sources.npz import column_with_names
from mettle.errors import DataError, InputError, nearest
from mettle.evaluate.checks import Rows, check_matrix, names, one_label_per_id
from mettle.evaluate.vectors import read_vectors
from mettle.unknown_names import explain_arguments

MOST_GROUPS = 32  # distinct values from which a column is no group unless it is named
MOST_NAMED = 256  # and if it is named


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
        split: (n,) 0 train, 1 val, 2 test, -1 none of them; None where no column says.
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
    split: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        embeddings: Any,
        labels: Any,
        *,
        domains: Any = None,
        groups: Mapping[str, Any] | None = None,
        ids: Any = None,
    ) -> "Embedded":
        """Arrays or tensors as a table: (n, d) numbers, and for each row a whole number or text.

        Raises:
            InputError: non-finite or zero vectors, wrong shapes, columns of another length or of floats.
        """
        if not (groups is None or isinstance(groups, Mapping)):
            raise InputError(f"groups must map names to columns, as in {{'hand': hands}}: got {type(groups).__name__}")
        values = check_matrix(embeddings)
        n = len(values)
        label = Column.of(names(labels, "labels", n))
        domain = None if domains is None else Column.of(names(domains, "domains", n))
        sliced = {str(key): Column.of(names(column, f"groups[{key!r}]", n)) for key, column in (groups or {}).items()}
        known = np.arange(n) if ids is None else names(ids, "ids", n)
        one_label_per_id(Rows(values, label.codes, Column.of(known).codes))
        several = domain is not None and len(domain.names) > 1
        return cls(
            values,
            label,
            Column.of(known).codes,
            known.astype(str),
            domain if several else None,
            sliced,
            origin="arrays",
            columns={"label": "labels", "domain": "domains" if several else None, "groups": list(sliced)},
        )

    def __len__(self) -> int:
        return len(self.values)

    def called(self, at: int) -> str:
        """What to call a row: its picture's path where it has one, else its id or number."""
        return str(self.images[at]) if self.images is not None and self.images[at] else str(self.names[at])


@explain_arguments
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
        path: ``.npz``, ``.parquet`` (needs pyarrow), ``.csv``, ``.csv.gz`` or ``.npy``.
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
    values, columns, names, unfit = read_vectors(path, embeddings, labels)
    if len(values) == 0:
        raise DataError(f"{quote_name(path)} has no rows: its embeddings have shape {values.shape}")
    if labels is not None:
        label = Path(labels).stem
    keep = np.ones(len(values), bool)
    for text in where:
        keep &= _holds(text, columns, names, path, unfit)
    if not keep.any():
        raise DataError(f"no row of {quote_name(path)} has {' and '.join(where)}")
    if not keep.all():
        values, columns = values[keep], {name: column[keep] for name, column in columns.items()}
    try:
        values = check_matrix(values)
    except InputError as problem:
        raise DataError(f"{quote_name(path)}: {problem}") from None
    return _table(path, values, columns, names, unfit, label, domain, groups, image)


def _table(
    path: Path,
    values: np.ndarray,
    columns: dict[str, np.ndarray],
    names: Mapping[str, np.ndarray],
    unfit: Mapping[str, str],
    label: str | None,
    domain: str | None,
    groups: Sequence[str] | None,
    image: str | None,
) -> Embedded:
    """Which column is what."""
    who = _choose(columns, label, LABELS, "label", path, unfit)
    if who is None:
        odd = find_column(unfit, LABELS)
        if odd is not None:
            raise DataError(f"no labels in {quote_name(path)}: {quote_name(odd)} cannot be used, for {unfit[odd]}")
        if path.suffix.lower() == ".npy":
            raise DataError(f"no labels in {quote_name(path)}: name the .npy file that holds them after it")
        raise DataError(
            f"no labels in {quote_name(path)}: say which column holds them with --label{nearest('', columns)}"
        )
    where = None if domain == "" else _choose(columns, domain, DOMAINS, "domain", path, unfit)
    if who in (where, *(groups or ())):
        what = "domain" if who == where else "group"
        raise DataError(
            f"{what}: column {quote_name(who)} of {quote_name(path)} holds the labels: within it every pair is of one "
            f"label; choose another --{what}"
        )
    among = columns
    if image is None:  # a number is no picture, and neither are the labels
        among = {name: a for name, a in columns.items() if a.dtype.kind == "U" and name not in (who, where)}
    picture = None if image == "" else _choose(among, image, PICTURES, "image", path, unfit)
    number = _choose(columns, None, IDS, "id", path, unfit)
    taken = {who, where, picture, number}
    if groups is None:
        free = [name for name in columns if name not in taken and _sliceable(columns[name])]
    else:
        free = [name for name in groups if _choose(columns, name, (), "group", path, unfit)]
        for name in free:
            _few(columns[name], name, path)
    labels = _column(columns[who], names.get(who), who, path, required=True)
    shape = None if where is None else _column(columns[where], names.get(where), where, path)
    called = np.arange(len(values)).astype(str) if number is None else columns[number].astype(str)
    return Embedded(
        values,
        labels,
        np.arange(len(values)) if number is None else Column.of(columns[number], f"column {quote_name(number)}").codes,
        called,
        shape if shape is not None and len(np.unique(shape.codes)) > 1 else None,
        {name: _column(columns[name], names.get(name), name, path) for name in free},
        None if picture is None else columns[picture].astype(str),
        path.parent,
        str(path),
        {"label": who, "domain": where, "groups": free, "image": picture, "id": number},
        _splits(columns, names),
    )


def _splits(columns: Mapping[str, np.ndarray], names: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Codes of a column ``split`` or ``subset``, whose values are words or the codes 0, 1 and 2."""
    name = find_column(columns, SPLIT)
    if name is None or columns[name].dtype.kind not in "iuU":
        return None
    words = {word: SPLITS.index(name) for word, name in SPLIT_WORDS.items()}
    words |= {str(code): code for code in range(len(SPLITS))}
    column = column_with_names(columns[name], names.get(name))
    return np.asarray([words.get(str(value).strip().lower(), -1) for value in column.names])[column.codes]


def _choose(
    columns: Mapping[str, Any],
    wanted: str | None,
    usual: Sequence[str],
    what: str,
    path: Path,
    unfit: Mapping[str, str],
) -> str | None:
    """The wanted column, or the first of the usual ones that is there."""
    if wanted is None:
        return find_column(columns, usual)
    if wanted in unfit:
        raise DataError(f"{what}: {quote_name(wanted)} of {quote_name(path)} cannot be used, for {unfit[wanted]}")
    if wanted not in columns:
        raise DataError(f"{what}: no column {quote_name(wanted)} in {quote_name(path)}{nearest(wanted, columns)}")
    return wanted


def _column(values: np.ndarray, names: np.ndarray | None, name: str, path: Path, required: bool = False) -> Column:
    if values.dtype.kind not in "iubU":
        raise DataError(
            f"column {quote_name(name)} of {quote_name(path)} must hold whole numbers or text: got {values.dtype}; "
            "save codes as integers"
        )
    if required and values.dtype.kind == "U":
        empty = np.char.str_len(np.char.strip(values)) == 0
        if empty.any():
            raise DataError(
                f"{np.count_nonzero(empty)} of {len(values)} rows of {quote_name(path)} have no label, the first is "
                f"row {np.argmax(empty)} (from 0): fill column {quote_name(name)} or leave the rows out"
            )
    return column_with_names(values, names)


def _sliceable(values: np.ndarray) -> bool:
    return values.dtype.kind in "iubU" and 2 <= len(np.unique(values)) <= MOST_GROUPS


def _few(values: np.ndarray, name: str, path: Path) -> None:
    count = len(np.unique(values))
    if count > MOST_NAMED:
        raise DataError(
            f"group: column {quote_name(name)} of {quote_name(path)} has {count} distinct values, over {MOST_NAMED}"
        )


def _holds(
    text: str,
    columns: Mapping[str, np.ndarray],
    names: Mapping[str, np.ndarray],
    path: Path,
    unfit: Mapping[str, str],
) -> np.ndarray:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"where must be column=value, as in split=test: got {text!r}")
    _choose(columns, name, (), "where", path, unfit)
    if columns[name].dtype.kind == "f":  # NaN is no name, but a row that has it may well be left out
        return columns[name].astype(str) == value
    return column_with_names(columns[name], names.get(name)).values().astype(str) == value
