"""Where a gallery is: a folder with SQLite inside, or a name on a PostgreSQL server; looked at, opened, made, shown."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from mettle.durable import TEMPORARY, sweep
from mettle.errors import GalleryError, InputError
from mettle.match.embedding import copy_model
from mettle.match.file import told
from mettle.match.postgres import PostgresRecord
from mettle.match.record import Binding
from mettle.match.sqlite import SqliteRecord

if TYPE_CHECKING:
    from mettle.train.artifact import Run

RECORD, INDEX, MODEL = "record.sqlite", "index", "model"
SERVERS = ("postgresql://", "postgres://")


def is_server(where: str | Path) -> bool:
    """Whether this names a server."""
    return str(where).startswith(SERVERS)


def exists(where: str | Path) -> bool:
    """Whether there is a gallery; something else in its place is an error."""
    if "\0" in str(where):
        raise InputError(f"where must be a place, got {str(where)!r:.80}")
    if is_server(where):
        return PostgresRecord.exists(str(where))
    folder = Path(where)
    with told(folder):
        if (folder / RECORD).is_file():
            return True
        if folder.exists() and not folder.is_dir():
            raise GalleryError(f"{folder} is a file, not a gallery: give a folder")
        strangers = [file.name for file in folder.iterdir() if not _ours(file.name)] if folder.exists() else []
    if strangers:
        raise GalleryError(f"{folder} is no gallery: it holds {strangers[0]!r} and no {RECORD}. Choose another folder")
    return False


def _ours(name: str) -> bool:
    """Whether a gallery that was killed while it was made may have left this."""
    return name in (MODEL, INDEX, "lock") or name.startswith(RECORD) or TEMPORARY in name


def reopened(where: str | Path, read_only: bool) -> PostgresRecord | SqliteRecord:
    """The record that is there."""
    if is_server(where):
        return PostgresRecord.open(str(where), write=not read_only)
    record = SqliteRecord.open(Path(where) / RECORD, write=not read_only)
    if not read_only:
        sweep(Path(where))
    return record


def made(where: str | Path, binding: Binding, run: "Run | None") -> PostgresRecord | SqliteRecord:
    """A new record; in a folder, with what embeds pictures for it beside it."""
    if is_server(where):
        return PostgresRecord.create(str(where), binding)
    folder = Path(where)
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if run is not None:
            copy_model(run, folder / MODEL)
    return SqliteRecord.create(folder / RECORD, binding)


def shown(where: str) -> str:
    """A place without its password."""
    if not where.startswith(SERVERS):
        return where
    parts = urlsplit(where)
    login, _, place = parts.netloc.rpartition("@")  # hosts and ports as they are: there may be several
    user = login.partition(":")[0]
    name = dict(parse_qsl(parts.query)).get("gallery")
    return f"{parts.scheme}://{f'{user}@' if user else ''}{place}{parts.path}{f'?gallery={name}' if name else ''}"


def bytes_of(folder: Path) -> int:
    """Size of all files; some may go while they are counted."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total
