"""An index on disk: a copy that may be thrown away, trusted only under its checksums.

    index/
      numbers-<sha>.bin   int64, little endian      raw arrays; their shape and type are in the manifest
      vectors-<sha>.bin   float32 or float16
      engine-<sha>.bin    what Faiss made of them, for approximate kinds
      manifest.json       written last: length and sha256 of each file, what the index is, and its own sha256

A file is read once into memory, its checksum is taken there, and only then does Faiss see those bytes. Whatever does
not fit is `IndexMismatch`: the gallery then builds the index again from its storage. Removed templates are
never written.
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
from mettle.gallery.index.approximate import KINDS, ApproximateIndex, SearchParams
from mettle.gallery.index.base import Index
from mettle.gallery.index.exact import ExactIndex, VectorTable
from mettle.gallery.index.faiss_index import from_bytes
from mettle.gallery.index.selection import IndexBenchmark

MANIFEST, MANIFEST_FORMAT = "manifest.json", 1


LONGEST = 1 << 20  # bytes of a manifest


PRIVATE = 0o600  # templates are biometric data: for their owner, unless the owner says otherwise


_NAME = re.compile(r"(numbers|vectors|engine)-[0-9a-f]{64}\.bin")


class IndexMismatch(GalleryError):
    """What is on disk is not the index that was asked for: absent, damaged, or of something else. Build it again."""


@dataclass(frozen=True)
class IndexManifest:
    """What an index on disk is a view of."""

    sequence: int  # of the storage when it was written; -1 in what is expected: any
    count: int
    dim: int
    metric: str
    model: str | None
    fusion: str
    kind: str
    measured: IndexBenchmark | None = None
    storage: str | None = None  # which storage, where storages have an identity of their own
    template_sum: int = 0  # of the checksums of its templates in the storage


@dataclass(frozen=True, eq=False)
class LoadedIndex:
    """An index from disk. It may be older than the storage: what happened after ``sequence`` is still to be applied."""

    index: Index
    sequence: int
    measured: IndexBenchmark | None
    template_sum: int = 0  # of the checksums of its templates in the storage


def save_index(folder: Path, index: Index, facts: IndexManifest, mode: int = PRIVATE) -> None:
    """Keep an index in ``folder``; the former one stays valid until the new one is complete, and is then removed.

    ``mode``: who may read its files.
    """
    folder, index = Path(folder), index.compact()
    if not isinstance(index, ExactIndex | ApproximateIndex):
        raise GalleryError(f"an index of type {type(index).__name__} cannot be kept on disk")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and none is followed in a gallery")
        remove_leftovers(folder)
        files = {name: _write_array(folder, name, array, mode) for name, array in _index_arrays(index)}
        content = {
            "format": MANIFEST_FORMAT,
            "facts": _as_json(facts) | {"kind": index.kind, "count": len(index), "dim": index.dim},
            "effort": None if isinstance(index, ExactIndex) else asdict(index.effort),
            "files": files,
        }
        write_text(folder / MANIFEST, json.dumps(content | {"sha256": _file_digest(content)}, indent=1), mode)
        kept = {entry["name"] for entry in files.values()}
        for file in folder.iterdir():
            if _NAME.fullmatch(file.name) and file.name not in kept:
                file.unlink(missing_ok=True)
    except OSError as error:
        raise GalleryUnavailable(
            f"the index cannot be kept in {folder}: {error.strerror or error}; nothing is lost, make room and try again"
        ) from error


def load_index(folder: Path, expected: IndexManifest) -> LoadedIndex:
    """The index in ``folder``, if it is a sound view of what is expected.

    Dimension, metric, model, fusion and storage must be the expected ones. Where a sequence is expected, the view may
    be older but not newer, and at the same sequence it must hold as many templates.

    Raises:
        Stale: anything is off.
    """
    folder = Path(folder)
    try:
        content = _read_manifest(folder)
        facts = content["facts"]
        _check_manifest(facts, expected)
        files = {name: _read_array(folder, name, entry) for name, entry in content["files"].items()}
        index = _build_index(facts, content["effort"], files)
        measured = None if facts["measured"] is None else IndexBenchmark.from_dict(facts["measured"])
        return LoadedIndex(index, int(facts["sequence"]), measured, int(facts["template_sum"]))
    except IndexMismatch:
        raise
    except OSError as error:
        raise IndexMismatch(f"{folder} cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError, RecursionError) as error:
        raise IndexMismatch(f"{folder} holds no index that this version can read: {type(error).__name__}") from error


def restrict_modes(folder: Path, mode: int) -> list[str]:
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


def _index_arrays(index: ExactIndex | ApproximateIndex) -> list[tuple[str, np.ndarray]]:
    arrays = [("numbers", index.rows.numbers), ("vectors", index.rows.vectors)]
    return arrays if isinstance(index, ExactIndex) else [*arrays, ("engine", index.engine.to_bytes())]


def _write_array(folder: Path, name: str, array: np.ndarray, mode: int = PRIVATE) -> dict[str, Any]:
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    raw = array.reshape(-1).view(np.uint8)
    sha = hashlib.sha256(raw.data).hexdigest()
    entry = {"name": f"{name}-{sha}.bin", "bytes": raw.nbytes, "sha256": sha}
    write_bytes(folder / entry["name"], raw.data, mode)  # as it lies in memory: no second copy
    return entry | {"dtype": array.dtype.name, "shape": list(array.shape)}


def _as_json(facts: IndexManifest) -> dict[str, Any]:
    return vars(facts) | {"measured": None if facts.measured is None else facts.measured.as_dict()}


def _file_digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        with open_unlinked(path) as file:
            text = file.read(LONGEST + 1)
    except FileNotFoundError:
        raise IndexMismatch(f"{folder} holds no {MANIFEST}") from None
    if len(text) > LONGEST:
        raise IndexMismatch(f"{path} is too long to be one of ours")
    try:
        content = json.loads(text.decode())
        sha = content.pop("sha256")
    except (ValueError, AttributeError, KeyError, RecursionError) as error:
        raise IndexMismatch(f"{path} is damaged") from error
    if content.get("format") != MANIFEST_FORMAT:
        raise IndexMismatch(f"{path} is of format {content.get('format')!r}, this version reads {MANIFEST_FORMAT}")
    if sha != _file_digest(content):
        raise IndexMismatch(f"{path} does not have its checksum")
    return content


def _check_manifest(facts: dict[str, Any], expected: IndexManifest) -> None:
    for name in ("dim", "metric", "model", "fusion", "storage"):
        if facts[name] != getattr(expected, name):
            raise IndexMismatch(
                f"the index on disk has {name} {facts[name]!r}, the gallery {getattr(expected, name)!r}"
            )
    if expected.sequence < 0:
        return
    if facts["sequence"] > expected.sequence:
        raise IndexMismatch(f"the index on disk is newer ({facts['sequence']}) than the storage ({expected.sequence})")
    if facts["sequence"] == expected.sequence and facts["count"] != expected.count:
        raise IndexMismatch(f"the index on disk holds {facts['count']} templates, the storage {expected.count}")
    if facts["sequence"] == expected.sequence and facts["template_sum"] != expected.template_sum:
        raise IndexMismatch("the index on disk holds other templates than the storage")


def _read_array(folder: Path, name: str, entry: dict[str, Any]) -> np.ndarray:
    """The array in a file whose length and checksum are those of the manifest."""
    if not _NAME.fullmatch(entry["name"]) or not entry["name"].startswith(name + "-"):
        raise IndexMismatch(f"{folder / MANIFEST} names a file that is not ours")
    path = folder / entry["name"]
    try:
        with open_unlinked(path) as file:
            if (size := os.fstat(file.fileno()).st_size) != entry["bytes"]:
                raise IndexMismatch(f"{path} has {size} bytes instead of {entry['bytes']}")
            raw = np.empty(size, np.uint8)
            got = file.readinto(raw.data)  # type: ignore[attr-defined]
    except FileNotFoundError:
        raise IndexMismatch(f"{path} is not there") from None
    if got != len(raw) or hashlib.sha256(raw.data).hexdigest() != entry["sha256"]:
        raise IndexMismatch(f"{path} does not have its checksum")
    return raw.view(np.dtype(entry["dtype"]).newbyteorder("<")).reshape(entry["shape"])


def _build_index(facts: dict[str, Any], effort: dict[str, int] | None, files: dict[str, np.ndarray]) -> Index:
    kind, count, dim = facts["kind"], facts["count"], facts["dim"]
    numbers, vectors = files["numbers"], files["vectors"]
    dtype = np.float32 if kind == "exact" else KINDS[kind].dtype
    if (
        numbers.dtype != np.int64
        or numbers.shape != (count,)
        or vectors.dtype != dtype
        or vectors.shape != (count, dim)
    ):
        raise IndexMismatch("the files of the index on disk do not belong together")
    rows = VectorTable.from_arrays(numbers, vectors)
    if kind == "exact":
        return ExactIndex(dim, rows)
    engine = from_bytes(files["engine"])
    if len(engine) != count or engine.native.d != dim:
        raise IndexMismatch("the files of the index on disk do not belong together")
    assert effort is not None
    return ApproximateIndex(kind, rows, engine, SearchParams(**effort))
