"""An index on disk: a copy that may be thrown away, trusted only under its checksums.

    index/
      numbers-<sha>.bin   int64, little endian      raw arrays; their shape and type are in the manifest
      vectors-<sha>.bin   float32 or float16
      engine-<sha>.bin    what Faiss made of them, for approximate kinds
      manifest.json       written last: length and sha256 of each file, what the index is, and its own sha256

A file is read once into memory, its checksum is taken there, and only then does Faiss see those bytes. Whatever does
not fit is `Stale`: the gallery then builds the index again from its record. Removed templates are never written.
"""

import errno
import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import open_unlinked, remove_leftovers, write_bytes, write_text
from mettle.errors import GalleryError, GalleryUnavailable
from mettle.gallery.index.approximate import KINDS, Approximate, Effort
from mettle.gallery.index.base import Index
from mettle.gallery.index.exact import Exact, Rows
from mettle.gallery.index.faiss_index import parse
from mettle.gallery.index.selection import Measured

MANIFEST, MANIFEST_FORMAT = "manifest.json", 1


LONGEST = 1 << 20  # bytes of a manifest


PRIVATE = 0o600  # templates are biometric data: for their owner, unless the owner says otherwise


_NAME = re.compile(r"(numbers|vectors|engine)-[0-9a-f]{64}\.bin")


class Stale(GalleryError):
    """What is on disk is not the index that was asked for: absent, damaged, or of something else. Build it again."""


@dataclass(frozen=True)
class ViewFacts:
    """What an index on disk is a view of."""

    sequence: int  # of the record when it was written; -1 in what is expected: any
    count: int
    dim: int
    metric: str
    model: str | None
    fusion: str
    kind: str
    measured: Measured | None = None
    record: str | None = None  # which record, where records have an identity of their own
    template_sum: int = 0  # of the checksums of its templates in the record


@dataclass(frozen=True, eq=False)
class Loaded:
    """An index from disk. It may be older than the record: what happened after ``sequence`` is still to be applied."""

    index: Index
    sequence: int
    measured: Measured | None
    template_sum: int = 0  # of the checksums of its templates in the record


def save_index(folder: Path, index: Index, facts: ViewFacts, mode: int = PRIVATE) -> None:
    """Keep an index in ``folder``; the former one stays valid until the new one is complete, and is then removed.

    ``mode``: who may read its files.
    """
    folder, index = Path(folder), index.packed()
    if not isinstance(index, Exact | Approximate):
        raise GalleryError(f"an index of type {type(index).__name__} cannot be kept on disk")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and none is followed in a gallery")
        remove_leftovers(folder)
        files = {name: _written(folder, name, array, mode) for name, array in _arrays(index)}
        content = {
            "format": MANIFEST_FORMAT,
            "facts": _plain(facts) | {"kind": index.kind, "count": len(index), "dim": index.dim},
            "effort": None if isinstance(index, Exact) else asdict(index.effort),
            "files": files,
        }
        write_text(folder / MANIFEST, json.dumps(content | {"sha256": _digest(content)}, indent=1), mode)
        kept = {entry["name"] for entry in files.values()}
        for file in folder.iterdir():
            if _NAME.fullmatch(file.name) and file.name not in kept:
                file.unlink(missing_ok=True)
    except OSError as error:
        raise GalleryUnavailable(
            f"the index cannot be kept in {folder}: {error.strerror or error}; nothing is lost, make room and try again"
        ) from error


def load_index(folder: Path, expected: ViewFacts) -> Loaded:
    """The index in ``folder``, if it is a sound view of what is expected.

    Dimension, metric, model, fusion and record must be the expected ones. Where a sequence is expected, the view may be
    older but not newer, and at the same sequence it must hold as many templates.

    Raises:
        Stale: anything is off.
    """
    folder = Path(folder)
    try:
        content = _manifest(folder)
        facts = content["facts"]
        _compare(facts, expected)
        files = {name: _read(folder, name, entry) for name, entry in content["files"].items()}
        index = _index(facts, content["effort"], files)
        measured = None if facts["measured"] is None else Measured.from_dict(facts["measured"])
        return Loaded(index, int(facts["sequence"]), measured, int(facts["template_sum"]))
    except Stale:
        raise
    except OSError as error:
        raise Stale(f"{folder} cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError, RecursionError) as error:
        raise Stale(f"{folder} holds no index that this version can read: {type(error).__name__}") from error


def tighten(folder: Path, mode: int) -> list[str]:
    """Take from the files of an index what ``mode`` does not allow: older versions let everybody read them.

    Returns what could not be done, in words.
    """
    try:
        ours = [file for file in folder.iterdir() if file.name == MANIFEST or _NAME.match(file.name)]
    except OSError:  # there is none, or `load` says why it cannot be read
        return []
    for file in ours:
        try:
            allowed = file.stat(follow_symlinks=False).st_mode
            if stat.S_ISREG(allowed) and allowed & 0o777 & ~mode:
                file.chmod(allowed & mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            return [f"others may read templates in {folder} ({error.strerror or error}): let its owner chmod 600 *"]
    return []


def _arrays(index: Exact | Approximate) -> list[tuple[str, np.ndarray]]:
    arrays = [("numbers", index.rows.numbers), ("vectors", index.rows.vectors)]
    return arrays if isinstance(index, Exact) else [*arrays, ("engine", index.engine.dump())]


def _written(folder: Path, name: str, array: np.ndarray, mode: int = PRIVATE) -> dict[str, Any]:
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    raw = array.reshape(-1).view(np.uint8)
    sha = hashlib.sha256(raw.data).hexdigest()
    entry = {"name": f"{name}-{sha}.bin", "bytes": raw.nbytes, "sha256": sha}
    write_bytes(folder / entry["name"], raw.data, mode)  # as it lies in memory: no second copy
    return entry | {"dtype": array.dtype.name, "shape": list(array.shape)}


def _plain(facts: ViewFacts) -> dict[str, Any]:
    return vars(facts) | {"measured": None if facts.measured is None else facts.measured.as_dict()}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        with open_unlinked(path) as file:
            text = file.read(LONGEST + 1)
    except FileNotFoundError:
        raise Stale(f"{folder} holds no {MANIFEST}") from None
    if len(text) > LONGEST:
        raise Stale(f"{path} is too long to be one of ours")
    try:
        content = json.loads(text.decode())
        sha = content.pop("sha256")
    except (ValueError, AttributeError, KeyError, RecursionError) as error:
        raise Stale(f"{path} is damaged") from error
    if content.get("format") != MANIFEST_FORMAT:
        raise Stale(f"{path} is of format {content.get('format')!r}, this version reads {MANIFEST_FORMAT}")
    if sha != _digest(content):
        raise Stale(f"{path} does not have its checksum")
    return content


def _compare(facts: dict[str, Any], expected: ViewFacts) -> None:
    for name in ("dim", "metric", "model", "fusion", "record"):
        if facts[name] != getattr(expected, name):
            raise Stale(f"the index on disk has {name} {facts[name]!r}, the gallery {getattr(expected, name)!r}")
    if expected.sequence < 0:
        return
    if facts["sequence"] > expected.sequence:
        raise Stale(f"the index on disk is newer ({facts['sequence']}) than the record ({expected.sequence})")
    if facts["sequence"] == expected.sequence and facts["count"] != expected.count:
        raise Stale(f"the index on disk holds {facts['count']} templates, the record {expected.count}")
    if facts["sequence"] == expected.sequence and facts["template_sum"] != expected.template_sum:
        raise Stale("the index on disk holds other templates than the record")


def _read(folder: Path, name: str, entry: dict[str, Any]) -> np.ndarray:
    """The array in a file whose length and checksum are those of the manifest."""
    if not _NAME.fullmatch(entry["name"]) or not entry["name"].startswith(name + "-"):
        raise Stale(f"{folder / MANIFEST} names a file that is not ours")
    path = folder / entry["name"]
    try:
        with open_unlinked(path) as file:
            if (size := os.fstat(file.fileno()).st_size) != entry["bytes"]:
                raise Stale(f"{path} has {size} bytes instead of {entry['bytes']}")
            raw = np.empty(size, np.uint8)
            got = file.readinto(raw.data)  # type: ignore[attr-defined]
    except FileNotFoundError:
        raise Stale(f"{path} is not there") from None
    if got != len(raw) or hashlib.sha256(raw.data).hexdigest() != entry["sha256"]:
        raise Stale(f"{path} does not have its checksum")
    return raw.view(np.dtype(entry["dtype"]).newbyteorder("<")).reshape(entry["shape"])


def _index(facts: dict[str, Any], effort: dict[str, int] | None, files: dict[str, np.ndarray]) -> Index:
    kind, count, dim = facts["kind"], facts["count"], facts["dim"]
    numbers, vectors = files["numbers"], files["vectors"]
    dtype = np.float32 if kind == "exact" else KINDS[kind].dtype
    if (
        numbers.dtype != np.int64
        or numbers.shape != (count,)
        or vectors.dtype != dtype
        or vectors.shape != (count, dim)
    ):
        raise Stale("the files of the index on disk do not belong together")
    rows = Rows.of(numbers, vectors)
    if kind == "exact":
        return Exact(dim, rows)
    engine = parse(files["engine"])
    if len(engine) != count or engine.native.d != dim:
        raise Stale("the files of the index on disk do not belong together")
    assert effort is not None
    return Approximate(kind, rows, engine, Effort(**effort))
