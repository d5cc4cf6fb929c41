"""The file of an embedded record: looked at before it is opened, made under another name, its troubles in our words."""

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mettle.atomic_files import TEMPORARY, sync_folder
from mettle.errors import GalleryError, GalleryUnavailable
from mettle.match.statements import FORMAT

APPLICATION = 0x4D45544C  # "METL" at byte 68 of the file: tells our files from other SQLite files
WAIT = 10.0  # seconds for other processes that read or recover


def connect(path: Path, mode: str, extra: str = "") -> sqlite3.Connection:
    """A connection that trusts the file with nothing but rows."""
    address = f"{path.absolute().as_uri()}?mode={mode}{extra}"
    connection = sqlite3.connect(address, uri=True, timeout=WAIT, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")  # a file from elsewhere runs no code of its own
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        strange = connection.execute("SELECT count(*) FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchone()
        if strange[0]:
            raise GalleryError(f"{path} holds triggers or views, which no gallery has: do not trust it")
        return connection
    except BaseException:
        connection.close()
        raise


def reading_mode(path: Path) -> tuple[str, str]:
    """How a reader opens the file: in a folder that nobody can write to there is no log to look at."""
    if os.access(path.parent, os.W_OK) and os.access(path, os.W_OK):
        return "rw", ""
    log = beside(path, "-wal")
    return "ro", "" if log.exists() and log.stat().st_size else "&immutable=1"


def prepare_writer(connection: sqlite3.Connection) -> None:
    """What makes a commit durable and a deletion real."""
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise GalleryUnavailable(
            "the gallery's file system has no shared memory for a write-ahead log: use a local disk"
        )
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")  # on macOS a plain fsync does not reach the disk
    connection.execute("PRAGMA secure_delete = ON")


def build(path: Path, fill: Callable[[Path], Any]) -> None:
    """Make a file appear complete: under a temporary name, to the disk, then renamed."""
    temporary = path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}-{threading.get_ident()}")
    try:
        # Templates are biometric data: for their owner, unless the owner says otherwise, and from the first byte on.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        fill(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sweep(path: Path) -> None:
    """Remove what killed writers left beside ``path``."""
    for leftover in path.parent.glob(f"{_escaped(path.name)}{TEMPORARY}*"):
        with suppress(OSError):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def look(path: Path) -> None:
    """Refuse what is not our file, by its first bytes, before SQLite touches it."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise GalleryError(f"no gallery at {path}: create one, or look at the path") from None
    if len(head) < 100 or head[:16] != b"SQLite format 3\0" or int.from_bytes(head[68:72]) != APPLICATION:
        raise GalleryError(f"{path} is not a record of a gallery: it is damaged or something else; restore a snapshot")
    if (written := int.from_bytes(head[60:64])) > FORMAT:
        raise GalleryError(f"a newer mettle wrote {path} (format {written}, known is {FORMAT}): upgrade mettle")


def refuse_existing(path: Path) -> None:
    """Nothing is ever made over something else."""
    if path.exists() or path.is_symlink():
        raise GalleryError(f"{path} is there already: open it, or choose another place")


def beside(path: Path, ending: str) -> Path:
    """The log or the shared memory of a file."""
    return path.with_name(path.name + ending)


_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_PASSING = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk reports an error",
    sqlite3.SQLITE_READONLY: "it cannot be written to",
    sqlite3.SQLITE_CANTOPEN: "a file cannot be opened",
    sqlite3.SQLITE_PERM: "permission is denied",
    sqlite3.SQLITE_BUSY: "another process holds it",
    sqlite3.SQLITE_LOCKED: "another process holds it",
    sqlite3.SQLITE_NOMEM: "memory is used up",
}


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Say what the disk did in our words."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _PASSING:
            raise GalleryUnavailable(
                f"{path}: {_PASSING[code]} ({error}); nothing was changed, try again later"
            ) from error
        if code in _DAMAGED or isinstance(error, sqlite3.DatabaseError):
            raise GalleryError(f"{path} is damaged ({error}): restore a snapshot") from error
        raise GalleryError(f"{path} cannot be used ({error}): open it again") from error
    except OSError as error:
        raise GalleryUnavailable(f"{path}: {error.strerror or error}; nothing was changed, try again later") from error
