"""NPZ files: plain arrays, or encoded pictures packed into one buffer.

| array | meaning |
|---|---|
| ``images``, ``x``, ``rows``, ``embeddings``, ``features`` | the samples: uint8 pictures or (n, f) numbers |
| ``data``, ``offsets``, ``header``, ``trailer`` | instead of these: packed pictures, see `PackedImages` |
| ``label``, ``labels``, ``y``, ``identity`` | who or what: the first that is there, or ``label=...`` |
| ``domain``, ``camera``, ``device``, ``session`` | how it was taken; likewise, or ``domain=...`` |
| ``split``, ``subset`` | 0 train, 1 val, 2 test, -1 none, or these words |
| ``role`` | 0 either, 1 query, 2 gallery, 3 gallery distractor, or these words |
| ``id``, ``ids`` | whole numbers, unique |
| ``path``, ``image``, ``file``, ... | text: the files of the samples, relative to this one's folder or absolute |
| any other whole numbers or text, one per sample, with at most 1000 distinct values | a group column |
| ``class_names``, ``<column>_names`` | names for the codes 0, 1, ... of the label or of that column |

The names that are looked for are those of :mod:`mettle.data.column_names`.

A distractor is nobody in particular, whatever number it carries: each becomes a label of its own, so that no
two of them count as the same person, and the group column ``distractor`` tells them from the rest.

Other arrays are ignored. Nothing is ever unpickled: an array of Python objects is an error.
"""

import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mettle.data.check import Policy, drop_unreadable
from mettle.data.column_names import DOMAINS, IDS, LABELS, PICTURES, SPLIT, find_column
from mettle.data.dataset import ROLES, Column, Inputs, Samples
from mettle.data.image_decoding import Channels, Resize, Sides, quote_name
from mettle.data.inputs import FeatureArray, ImageArray, PackedImages
from mettle.errors import DataError, nearest

Arrays = Mapping[str, np.ndarray]
INPUTS = ("images", "x", "rows", "embeddings", "features")
SAY_WHICH = "or say which: data.label in a recipe (--set data.label=NAME), --label in other commands, label= in Python"
GROUP_VALUES = 1000
MAX_BYTES = 16 << 30
MAX_ARRAYS = 10_000


def read_npz(
    path: str | Path,
    *,
    label: str | None = None,
    domain: str | None = None,
    groups: Sequence[str] | None = None,
    size: Sides | None = None,
    resize: Resize = "crop",
    channels: Channels | None = None,
    policy: Policy | None = None,
    largest: int = MAX_BYTES,
    labeled: bool = True,
) -> Samples:
    """Read an NPZ file.

    Args:
        path: The file.
        label: The array that holds the label, where the usual names do not fit.
        domain: The array that holds the domain; ``""`` for none.
        groups: The arrays to keep as group columns; None for all that can be.
        size: (height, width), or one side, of every picture.
        resize: How they get that size: ``crop`` from the centre, ``pad``, or ``stretch``.
        channels: 1 for grey, 3 for RGB; None as stored (packed pictures: RGB).
        policy: What to do about bad items, see `mettle.data.drop_unreadable`. By default rows must be finite
            and packed pictures are trusted: the file's checksums guard them, and looking decodes them all.
        largest: The most bytes that the arrays may have, unpacked.
        labeled: Whether there must be labels; where not, samples of a file without have the label ``""``.

    Raises:
        DataError: The file or one of its arrays does not fit; one line says which and why.
    """
    path = Path(path)
    arrays = load_arrays(path, largest)
    inputs, used = _build_inputs(arrays, path, size, channels, resize)
    columns = {k: decode_text(v, k) for k, v in arrays.items() if k not in used and v.shape == (len(inputs),)}
    who = _choose_array(columns, arrays, label, LABELS, "label", path)
    if who is None and labeled:
        raise DataError(f"no labels in {quote_name(path)}: name an array label, {SAY_WHICH}{nearest('label', columns)}")
    where = None if domain == "" else _choose_array(columns, arrays, domain, DOMAINS, "domain", path)
    ids = _choose_array(columns, arrays, None, IDS, "id", path)
    texts = [name for name, column in columns.items() if column.dtype.kind == "U" and name not in (who, where)]
    path_array = find_column(texts, PICTURES)
    part = find_column(columns, SPLIT)
    taken = {who, where, ids, part, path_array, "role"}
    if groups is None:
        kept = [name for name in columns if name not in taken and _is_group(columns[name])]
    else:
        kept = [_choose_array(columns, arrays, name, (), "groups", path) or name for name in groups]
    role, distractor = parse_roles(columns["role"]) if "role" in columns else (None, np.zeros(len(inputs), bool))
    if who is None:
        labels = Column(np.zeros(len(inputs), np.int64), ("",))
    else:
        labels = column_with_names(
            columns[who], arrays.get("class_names", arrays.get(f"{who}_names")), _describe_array(who, path)
        )
    return drop_unreadable(
        Samples.of(
            inputs,
            separate_distractors(labels, distractor),
            ids=None if ids is None else columns[ids],
            domain=None
            if where is None
            else column_with_names(columns[where], arrays.get(f"{where}_names"), _describe_array(where, path)),
            groups={
                name: column_with_names(columns[name], arrays.get(f"{name}_names"), _describe_array(name, path))
                for name in kept
            }
            | ({"distractor": yes_no_column(distractor)} if distractor.any() else {}),
            split=None if part is None else columns[part],
            role=role,
            source_name=str(path),
            files=None if path_array is None else columns[path_array],
            root=str(path.parent),
        ),
        policy or ("fail" if inputs.kind == "row" else "trust"),
    )


def parse_roles(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Role codes, and which samples are distractors, from codes 0 to 3 or from words."""
    words = (*ROLES, "distractor")
    if values.dtype.kind not in "iu":
        code = {word: i for i, word in enumerate(words)} | {"": 0, "train": 0}
        texts = [str(value).strip().lower() for value in values]
        unknown = [text for text in texts if text not in code]
        if unknown:
            raise DataError(f"role must be one of {', '.join(words)}, got {quote_name(unknown[0])}")
        values = np.array([code[text] for text in texts], np.int8)
    bad = np.flatnonzero((values < 0) | (values > 3))
    if len(bad):
        raise DataError(f"role codes are 0 to 3 ({', '.join(words)}), got {values[bad[0]]} at position {bad[0]}")
    return np.where(values == 3, ROLES.index("gallery"), values).astype(np.int8), values == 3


def separate_distractors(labels: Column, distractor: np.ndarray) -> Column:
    """Labels in which every distractor is a label of its own, after all others."""
    if not distractor.any():
        return labels
    at = np.flatnonzero(distractor)
    codes = labels.codes.copy()
    others, codes[~distractor] = np.unique(labels.codes[~distractor], return_inverse=True)
    codes[at] = len(others) + np.arange(len(at))
    return Column(codes, (*(labels.names[i] for i in others), *(f"distractor {i}" for i in at)))


def yes_no_column(mask: np.ndarray) -> Column:
    """A column of ``no`` and ``yes``."""
    return Column(mask.astype(np.int64), ("no", "yes"))


def _describe_array(name: str, path: Path) -> str:
    return f"the array {quote_name(name)} of {quote_name(path)}"


def column_with_names(values: np.ndarray, names: np.ndarray | None, what: str = "the column") -> Column:
    """A column; its codes get names when there is one for every code."""
    if names is None or names.ndim != 1 or names.dtype.kind not in "US" or values.dtype.kind not in "iu":
        return Column.of(values, what)
    if len(values) and (values.min() < 0 or values.max() >= len(names)):
        return Column.of(values, what)
    texts = [str(name) for name in decode_text(names, "names")]
    # Two classes may be called the same (both cranes of ImageNet): the number keeps them apart.
    times = Counter(texts)
    texts = [f"{text} ({i})" if times[text] > 1 else text for i, text in enumerate(texts)]
    return Column(values.astype(np.int64), tuple(texts))


def load_arrays(path: Path, largest: int) -> Arrays:
    """All arrays of the file, with nothing unpickled and nothing larger than it says."""
    if not path.is_file():
        raise DataError(f"no file {quote_name(path)}")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        total = sum(entry.file_size for entry in entries)
        if total > largest or len(entries) > MAX_ARRAYS:
            raise DataError(f"{quote_name(path)} unpacks to {total} bytes in {len(entries)} arrays: over the limit")
        with np.load(path, allow_pickle=False) as file:
            return {name: _load_array(file, name, path) for name in file.files}
    except DataError:
        raise
    except Exception as problem:  # what zipfile and NumPy make of a damaged file has a dozen types
        raise DataError(f"{quote_name(path)} is not a readable NPZ file ({' '.join(str(problem).split())})") from None


def _load_array(file: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    try:
        array = file[name]
    except Exception as problem:  # a header is read by Python's own parser, which has errors of its own
        reason = " ".join(str(problem).split())[:200] or type(problem).__name__
        if "Object arrays" in reason:
            reason = "it holds Python objects; save whole numbers, numbers or text"
        raise DataError(f"cannot read the array {quote_name(name)} of {quote_name(path)}: {reason}") from None
    if not isinstance(array, np.ndarray):  # a member that is no array comes back as bytes
        raise DataError(f"{quote_name(name)} in {quote_name(path)} is not an array")
    if not holds_text(array):
        raise DataError(f"the array {quote_name(name)} of {quote_name(path)} holds characters that do not exist")
    return array


def holds_text(array: np.ndarray) -> bool:
    """Whether all characters of an array of texts are some: NumPy reads any number of four bytes as one."""
    if array.dtype.kind != "U" or not array.size or not array.dtype.itemsize:
        return True
    codes = np.ascontiguousarray(array).reshape(-1).view(f"{array.dtype.str[0]}u4")
    return bool(codes.max() <= 0x10FFFF and not ((codes >= 0xD800) & (codes <= 0xDFFF)).any())


def _build_inputs(
    arrays: Arrays, path: Path, size: Sides | None, channels: Channels | None, resize: Resize
) -> tuple[Inputs, tuple[str, ...]]:
    """The samples themselves, and the arrays they used up."""
    if "offsets" in arrays and "data" in arrays:
        ends = [arrays[name].tobytes() if name in arrays else b"" for name in ("header", "trailer")]
        how = {"size": size, "channels": channels or 3, "resize": resize}
        inputs = PackedImages(arrays["data"], arrays["offsets"], *ends, **how)  # type: ignore[arg-type]
        return inputs, ("data", "offsets", "header", "trailer")
    name = next((name for name in INPUTS if name in arrays), None)
    if name is None:
        raise DataError(f"no samples in {quote_name(path)}: name an array {', '.join(INPUTS)}, or pack pictures")
    array = arrays[name]
    if array.ndim == 2 and name != "images":
        return FeatureArray(array), (name,)
    images = ImageArray(array)
    return (images if size is None and channels is None else images.with_size(size, channels, resize)), (name,)


def _choose_array(
    columns: Arrays, arrays: Arrays, wanted: str | None, usual: tuple[str, ...], what: str, path: Path
) -> str | None:
    """The wanted column, or the first of the usual names; wrong names and lengths are errors."""
    name = wanted if wanted is not None else find_column(arrays, usual)
    if name is None or name in columns:
        return name
    if name in arrays:
        shape = arrays[name].shape
        raise DataError(
            f"{what}: the array {quote_name(name)} of {quote_name(path)} has shape {shape}, not one entry a sample"
        )
    raise DataError(f"{what}: no array {quote_name(name)} in {quote_name(path)}{nearest(name, columns)}")


def _is_group(values: np.ndarray) -> bool:
    return values.dtype.kind in "iubU" and len(np.unique(values)) <= GROUP_VALUES


def decode_text(values: np.ndarray, name: str) -> np.ndarray:
    """Byte strings as text; everything else as it is."""
    if values.dtype.kind != "S":
        return values
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError:
        raise DataError(f"the text in the array {quote_name(name)} is not UTF-8") from None
