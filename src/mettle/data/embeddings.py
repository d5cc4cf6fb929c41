"""Embeddings in a file, from any model: the vectors, who each one is, and what else is known about it.

| file | vectors | columns |
|---|---|---|
| ``.npz`` | a 2-D array ``embeddings``, ``features``, ``x``, … | every 1-D array with one entry a row |
| ``.parquet`` | a column of lists, or numbered columns ``e0, e1, …`` | all others |
| a folder of them | as one table: what ``torchrun … -m mettle embed`` writes | all others |
| ``.csv``, ``.csv.gz`` | numbered columns, or one column of lists: ``"[0.1, 0.2]"`` or ``"0.1 0.2"`` | all others |
| ``.npy`` | the array | other ``.npy`` files of the folder, by their names: ``labels.npy``, ``domain.npy``, … |

Labels, domains and groups are whole numbers or text. What cannot be read is refused in one line; nothing is unpickled.

Vectors and columns of a file, as they come: ``.npz``, ``.npy``, ``.parquet`` or ``.csv``; nothing is unpickled.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mettle.data.arrays import check_matrix, check_one_label_per_id, names
from mettle.data.column_names import DOMAINS, IDS, LABELS, PICTURES, SPLIT, find_column, find_columns
from mettle.data.dataset import SPLIT_WORDS, SPLITS, Column
from mettle.data.embedding_shards import check_shards
from mettle.data.image_decoding import quote_name
from mettle.data.parquet import read_parquet_arrays, read_parquet_schema
from mettle.data.quantization import from_arrays
from mettle.data.sources.npz import column_with_names, decode_text, load_arrays
from mettle.data.sources.text_table import is_integer_text, read_delimited
from mettle.errors import DataError, InputError, nearest
from mettle.unknown_names import explain_arguments

MOST_GROUPS = 32  # distinct values from which a column is no group unless it is named
MOST_NAMED = 256  # and if it is named
VECTORS = ("embeddings", "embedding", "features", "vectors", "x", "rows")
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
        check_one_label_per_id(Column.of(known).codes, label.codes)
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
        path: ``.npz``, ``.parquet`` (needs pyarrow), ``.csv``, ``.csv.gz`` or ``.npy``; or a folder of Parquet
            files that several processes wrote.
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
    if path.is_dir() and labels is None:
        return _parquet(path, wanted)
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
    files = check_shards(path) if path.is_dir() else [path]
    schema = read_parquet_schema(files[0])
    used = _which(schema.names, schema.lists, wanted, path)
    values, columns = zip(*(read_parquet_arrays(file, used) for file in files), strict=True)
    if any(set(other) != set(columns[0]) for other in columns):
        raise DataError(f"{quote_name(path)}: its files have different columns; write the embeddings again")
    joined = {name: np.concatenate([other[name] for other in columns]) for name in columns[0]}
    return Read(np.concatenate(values), joined, {})


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
