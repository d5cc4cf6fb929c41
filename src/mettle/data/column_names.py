"""What columns and arrays are called, for every reader: tables, NPZ files, and embeddings that are audited.

| what | names, the first that is there; capitals do not matter |
|---|---|
| who or what a sample is | ``label``, ``labels``, ``y``, ``identity`` |
| how it was taken | ``domain``, ``camera``, ``device``, ``session`` |
| its number | ``id``, ``ids`` |
| its split | ``split``, ``subset`` |
| its picture file | ``path``, ``image_path``, ``image``, ``img_path``, ``img``, ``filename``, ``file_name``, ``file_path``, ``filepath``, ``file``, ``picture``, ``photo`` |
"""  # noqa: E501

from collections.abc import Iterable, Sequence

LABELS = ("label", "labels", "y", "identity")
DOMAINS = ("domain", "camera", "device", "session")
IDS = ("id", "ids")
SPLIT = ("split", "subset")
PICTURES = ("path", "image_path", "image", "img_path", "img", "filename", "file_name", "file_path", "filepath", "file")
PICTURES += ("picture", "photo")


def find_columns(columns: Iterable[str], usual: Sequence[str]) -> list[str]:
    """The columns that have one of the usual names, in the order of those; as written here before other capitals."""
    columns = list(columns)
    found = [name for name in usual if name in columns]
    lowered = [column for name in usual for column in columns if column.lower() == name and column != name]
    return [*found, *lowered]


def find_column(columns: Iterable[str], usual: Sequence[str]) -> str | None:
    """The first of `find_columns`, or None."""
    return next(iter(find_columns(columns, usual)), None)
