"""One door to all data: a name or a path becomes `Samples`."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mettle.data.dataset import Samples
from mettle.data.image_decoding import HEIC_SUFFIXES, SUFFIXES
from mettle.data.sources.feature_columns import Feature
from mettle.data.sources.glyphs import glyphs
from mettle.data.sources.image_folder import read_image, read_image_folder
from mettle.data.sources.manifest import read_manifest
from mettle.data.sources.npz import read_npz
from mettle.data.sources.public_sets import import_public_set as import_public_set
from mettle.data.sources.text_table import SUFFIXES as TABLES
from mettle.data.sources.torch_dataset import PYTHON
from mettle.errors import DataError, InputError, nearest

READERS: Mapping[Callable[..., Samples], str] = {
    read_image_folder: "a folder of pictures",
    read_image: "one picture",
    read_manifest: "a table",
    read_npz: "an .npz file",
}
FLAGS = ("label", "domain", "image", "missing")


def read(
    source: str | Path,
    *,
    policy: str = "fail",
    cache: Path | None = None,
    labeled: bool = True,
    like: Sequence[Mapping[str, Any] | Feature] | None = None,
    **options: Any,
) -> Samples:
    """Read ``glyphs``, ``glyphs:closed``, an image folder, a CSV, TSV or Parquet manifest, or an NPZ file.

    Args:
        source: a name of embedded data, or a path.
        policy: what to do with unreadable pictures: ``fail``, ``skip`` and keep a list, or ``trust`` (do not look).
        cache: where embedded data are kept once drawn.
        labeled: whether every sample needs a label; where not, a picture file or a folder of such is read too, and
            those without a label have the label ``""``: they can be embedded, not trained on.
        like: the columns of a table that a model was trained on, see `read_manifest`; they are matched by name.
        options: of the reader: ``label``, ``domain``, ``groups``, ``size``, ``channels``, ...
    """
    if not isinstance(source, str | os.PathLike):
        wanted = "a path, or the name of embedded data such as 'glyphs'"
        raise InputError(f"source must be {wanted}, got {type(source).__name__}; arrays go into Samples.of")
    name = str(source)
    if name.split(":")[0] == "glyphs" and not Path(name).exists():
        return glyphs(name.partition(":")[2] or "open", cache=cache)
    path = Path(source).expanduser()
    if name.startswith(PYTHON) and not path.exists():
        raise DataError(
            f"the data were a {name.removeprefix(PYTHON)} that was given in Python, which no file holds: give them "
            "again, run.evaluate(data) in Python or --data on the command line"
        )
    if not path.exists():
        raise DataError(
            f"no data at {name!r}: give a folder of pictures, a .csv, .tsv, .parquet or .npz file, or 'glyphs'"
        )
    reader = _choose_reader(path)
    options = {key: value for key, value in options.items() if value is not None}
    known = inspect.signature(reader).parameters
    for key in options:
        if key not in known:
            raise DataError(_explain_option(key, name, reader, known))
    if like and reader is not read_manifest:
        columns = ", ".join(str(one.name if isinstance(one, Feature) else one.get("name")) for one in like[:8])
        raise DataError(f"{name!r} has no named columns, and the model was trained on such ({columns}): give a table")
    options |= {} if labeled else {"labeled": False}
    return reader(path, policy=policy, **options, **({"like": like} if like else {}))


def _explain_option(key: str, name: str, reader: Callable[..., Samples], known: Iterable[str]) -> str:
    """That an option says nothing about such a source, and what to write instead."""
    takes = [one for one in known if one not in ("path", "policy", "labeled", "like", "largest")]
    if not any(key in inspect.signature(one).parameters for one in READERS):
        return f"no option {key!r} of {READERS[reader]}{nearest(key, takes)}"
    why = (
        ", where the names of folders are the labels"
        if reader is read_image_folder and key in ("label", "domain")
        else ""
    )
    flag = f", --{key} on the command line" if key in FLAGS else ""
    remedy = f"leave it out (data.{key} in a recipe{flag}, {key}= in Python)"
    return f"{key} does not apply to {name!r}, {READERS[reader]}{why}: {remedy}; what applies is {', '.join(takes)}"


def _choose_reader(path: Path) -> Callable[..., Samples]:
    if path.is_dir():
        return read_image_folder
    if path.suffix.lower() in SUFFIXES + HEIC_SUFFIXES:
        return read_image
    if path.name.lower().endswith(TABLES):
        return read_manifest
    if path.suffix.lower() == ".npz":
        return read_npz
    raise DataError(f"cannot read {str(path)!r}: wanted a folder, {', '.join(TABLES)} or .npz")
