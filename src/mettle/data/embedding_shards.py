"""Embeddings in several files: a folder of Parquet files, one for each process that embedded, under one manifest.

    embeddings.parquet/
      part-00000-of-00003.parquet      the rows of the first process, in the order of the data
      part-00001-of-00003.parquet      those of the next, with the same columns
      _manifest.json                   written last: files, rows and sha256 of each, and its own sha256

Rows in the order of the files are the table that one process would have written. Programs that read a folder of Parquet
files as one table read this one as well: they pass over names that begin with an underscore.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mettle.data.image_decoding import quote_name
from mettle.errors import DataError

MANIFEST, MANIFEST_FORMAT = "_manifest.json", 1


@dataclass(frozen=True)
class Shard:
    """One of the files."""

    name: str
    rows: int
    sha256: str

    @classmethod
    def of(cls, name: str, rows: int, content: bytes) -> "Shard":
        """What the manifest says of a file."""
        return cls(name, rows, hashlib.sha256(content).hexdigest())


def shard_name(rank: int, size: int) -> str:
    """The file of one process of several."""
    return f"part-{rank:05d}-of-{size:05d}.parquet"


def manifest_text(shards: Sequence[Shard]) -> str:
    """The manifest of a folder with these files."""
    content = {"format": MANIFEST_FORMAT, "rows": sum(s.rows for s in shards), "files": [asdict(s) for s in shards]}
    return json.dumps(content | {"sha256": _digest(content)}, indent=1) + "\n"


def check_shards(folder: Path) -> list[Path]:
    """The files of a folder, in the order of the rows, each compared with its checksum.

    Raises:
        DataError: there is no manifest, it is damaged, or a file is not the one that was written.
    """
    return [_check_shard(folder, shard) for shard in _read_manifest(folder)]


def _read_manifest(folder: Path) -> list[Shard]:
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{quote_name(folder)} is a folder without {MANIFEST}, so no finished embeddings of several processes: "
            "write them again, or name one file"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        sha = content.pop("sha256")
        if content["format"] != MANIFEST_FORMAT:
            raise DataError(
                f"{quote_name(path)} is of format {content['format']!r}, this version reads {MANIFEST_FORMAT}: write "
                "the embeddings again"
            )
        shards = [Shard(str(one["name"]), int(one["rows"]), str(one["sha256"])) for one in content["files"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise DataError(f"{quote_name(path)} is damaged: write the embeddings again") from problem
    plain = all(Path(s.name).name == s.name and s.name.endswith(".parquet") for s in shards)
    if sha != _digest(content) or not plain or not shards:
        raise DataError(f"{quote_name(path)} is damaged: write the embeddings again")
    return shards


def _check_shard(folder: Path, shard: Shard) -> Path:
    try:
        with (folder / shard.name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as problem:
        reason = problem.strerror or problem
        raise DataError(
            f"cannot read {quote_name(folder / shard.name)}: {reason}; write the embeddings again"
        ) from None
    if found != shard.sha256:
        raise DataError(
            f"{quote_name(folder / shard.name)} is not the file that was written: write the embeddings again"
        )
    return folder / shard.name


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
