"""The file of an embedded record: looked at before it is opened, made under another name, its troubles in our words.

One writer at a time: a lock that the kernel takes back when its holder dies, however it dies.

A gallery's record in one SQLite file: the truth on one machine.

Write-ahead log, ``synchronous=FULL``: a change is on disk when `enrol` or `delete` returns. One process writes (it
holds the `lock` beside the file), any number read; every call of a reader sees the newest acknowledged change.
"""

import os
import shutil
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import TEMPORARY, sync_folder
from mettle.errors import GalleryError, GalleryLocked, GalleryUnavailable
from mettle.gallery.binding import Binding
from mettle.gallery.results import Receipt
from mettle.gallery.storage.base import Ledger, Result
from mettle.gallery.storage.sql import (
    FINDINGS,
    FORMAT,
    SQLITE_TABLES,
    IndexProof,
    Session,
    forget_history,
    list_damage,
    read_fixed_metadata,
    write_first_rows,
)

APPLICATION = 0x4D45544C  # "METL" at byte 68 of the file: tells our files from other SQLite files


WAIT = 10.0  # seconds for other processes that read or recover


def open_connection(path: Path, mode: str, extra: str = "") -> sqlite3.Connection:
    """A connection that trusts the file with nothing but rows."""
    address = f"{path.absolute().as_uri()}?mode={mode}{extra}"
    connection = sqlite3.connect(address, uri=True, timeout=WAIT, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")  # a file from elsewhere runs no code of its own
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        kinds = [row[0] for row in connection.execute("SELECT type FROM sqlite_master")]
        if "trigger" in kinds or "view" in kinds:
            raise GalleryError(f"{path} holds triggers or views, which no gallery has: do not trust it")
        tables = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        if {row[0] for row in tables} != set(SQLITE_TABLES) or len(tables) != len(SQLITE_TABLES):
            raise GalleryError(f"{path} does not have the tables of a gallery: it is damaged, restore a snapshot")
        return connection
    except BaseException:
        connection.close()
        raise


def reading_mode(path: Path) -> tuple[str, str]:
    """How a reader opens the file: in a folder that nobody can write to there is no log to look at."""
    if os.access(path.parent, os.W_OK) and os.access(path, os.W_OK):
        return "rw", ""
    log = sibling(path, "-wal")
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


def build_file(path: Path, fill: Callable[[Path], Any]) -> None:
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


def sweep_temporaries(path: Path) -> None:
    """Remove what killed writers left beside ``path``."""
    for leftover in path.parent.glob(f"{_escaped(path.name)}{TEMPORARY}*"):
        with suppress(OSError):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def check_header(path: Path) -> None:
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


def sibling(path: Path, ending: str) -> Path:
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
def translate_errors(path: Path) -> Iterator[None]:
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


class Lock:
    """The write lock of a gallery's folder. The file stays; what counts is who holds a `flock` on it."""

    def __init__(self, handle: int):
        self._handle: int | None = handle
        # A forked child shares the open file and would keep the lock after its parent died.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (lock := this()) and lock.release())

    @classmethod
    def take(cls, path: Path) -> "Lock":
        """Take the lock at once, or raise GalleryLocked that names the holder."""
        import fcntl  # not on every system; reading a gallery needs no lock

        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise GalleryUnavailable(
                f"cannot write to the gallery in {path.parent}: {error.strerror}; free the disk or its permissions, "
                "or open it read-only"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip()
            os.close(handle)
            who = f"process {holder}" if holder.isdigit() else "another process"
            if holder == str(os.getpid()):
                who = f"this process ({holder})"
            raise GalleryLocked(
                f"{who} is writing to the gallery in {path.parent}: close it there first, or leave the change to it; "
                "in Python, read_only=True reads beside it"
            ) from None
        try:  # only for the message above; a full disk is no reason to refuse
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass
        return cls(handle)

    def release(self) -> None:
        """Give it back; may be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


PAGE_BYTES = 8192  # three templates of 512 numbers


class SqliteSession:
    """One transaction on one connection."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection

    def rows(self, sql: str, *values: Any) -> list[tuple]:
        """Run a statement and return what it gives."""
        return self._connection.execute(sql, values).fetchall()

    def many(self, sql: str, values: Sequence[tuple]) -> None:
        """Run a statement once for each tuple of values."""
        self._connection.executemany(sql, values)

    def each(self, sql: str, batch: int) -> Iterator[list[tuple]]:
        """What a query gives, a part at a time."""
        cursor = self._connection.execute(sql)
        while rows := cursor.fetchmany(batch):
            yield rows

    def pack(self, row: np.ndarray) -> bytes:
        """A vector as this database takes it."""
        return row.tobytes()

    def unpack(self, blob: bytes) -> bytes:
        """A vector as this database gives it."""
        return blob if isinstance(blob, bytes) else b""


class SqliteRecord(Ledger):
    """Templates in a file; made by `create` and opened by `open`."""

    kind = "sqlite"

    def __init__(self, path: Path, lock: Lock | None):
        self.path = path
        self._lock = lock
        self._mutex = threading.Lock()  # one change at a time
        self._idle: list[sqlite3.Connection] = []  # readers, one per thread that reads at the same time
        self._writer: sqlite3.Connection | None = None
        self._closed = False
        self._proof = IndexProof()
        try:
            if lock is not None:
                sweep_temporaries(path)
                with translate_errors(path):
                    self._writer = open_connection(path, "rw")
                    prepare_writer(self._writer)
            self._fixed = self._read(read_fixed_metadata)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, binding: Binding, model_files: Mapping[str, str] | None = None) -> "SqliteRecord":
        """Make a new record and open it for writing; refuses an existing one.

        ``model_files``: SHA-256 of the copy of the model that lies beside it.
        """
        path = Path(path)
        refuse_existing(path)
        with translate_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock.take(path.parent / "lock")
        try:
            refuse_existing(path)  # somebody may have been faster
            sweep_temporaries(path)
            with translate_errors(path):
                for leftover in (sibling(path, "-wal"), sibling(path, "-shm")):
                    leftover.unlink(missing_ok=True)  # of a removed record: must not be played into this one
                build_file(path, lambda temporary: _fill(temporary, binding, model_files or {}))
        except BaseException:
            lock.release()
            raise
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path, *, write: bool = True) -> "SqliteRecord":
        """Open a record; with ``write`` no other process can write until it is closed."""
        path = Path(path)
        with translate_errors(path):
            check_header(path)
        return cls(path, Lock.take(path.parent / "lock") if write else None)

    def compact(self) -> None:
        """Rewrite the file without what was deleted, and empty the log: no byte of it stays in any file."""
        with self._mutex, translate_errors(self.path):
            connection = self.for_writing()
            _transact(connection, forget_history)
            connection.execute("VACUUM")
            busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise GalleryUnavailable(
                f"{self.path} is being read, so deleted templates stay in its log: compact again when scans are done"
            )

    def snapshot(self, path: Path) -> None:
        """Write a copy as of now to ``path``: complete or not there at all. It holds nothing that was deleted."""
        path = Path(path)
        if path.is_dir() or sibling(path, "-wal").exists() or (path.exists() and path.samefile(self.path)):
            raise GalleryError(f"{path} is a folder or a gallery in use: write the snapshot to another place")
        self._for_reading()
        with translate_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(path)
        with translate_errors(path):
            connection = open_connection(self.path, *reading_mode(self.path))
            try:
                build_file(path, lambda temporary: connection.execute("VACUUM INTO ?", (str(temporary.absolute()),)))
            finally:
                connection.close()

    def check(self) -> list[str]:
        """What is wrong with the file or its rows, in words."""
        found: list[str] = []
        for pragma in ("integrity_check", "foreign_key_check"):
            with list_damage(found):
                rows = self._read(lambda session, pragma=pragma: session.rows(f"PRAGMA {pragma}"))
                found += [f"{self.path.name}: {row[0]}" for row in rows if row[0] != "ok"]
        with list_damage(found):
            found += super().check()
        return found[:FINDINGS]

    def forget_pages(self) -> None:
        """Close the connections that read: each keeps pages."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def bytes(self) -> int:
        """Size of its files."""
        files = [self.path, sibling(self.path, "-wal"), sibling(self.path, "-shm")]
        return sum(part.stat().st_size for part in files if part.exists())

    def close(self) -> None:
        """Let go of the files and the lock; may be called twice."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
            writer, self._writer = self._writer, None
            for connection in [*idle, *([writer] if writer else [])]:
                with suppress(sqlite3.Error):  # a full disk: the log stays and is read at the next opening
                    connection.close()
            if self._lock is not None:
                self._lock.release()

    def _read(self, work: Callable[[Session], Result]) -> Result:
        with self._reading() as session:
            return work(session)

    @contextmanager
    def _reading(self) -> Iterator[SqliteSession]:
        self._for_reading()
        with translate_errors(self.path):
            connection, keep = self._borrow()
            try:
                connection.execute("BEGIN")
                yield SqliteSession(connection)
                connection.execute("ROLLBACK")
            except BaseException:
                connection.close()
                raise
            if self._closed or not keep:
                connection.close()
            else:
                self._idle.append(connection)

    def _borrow(self) -> tuple[sqlite3.Connection, bool]:
        """A connection to read by, and whether it may be used again: an immutable one misses what others write."""
        with suppress(IndexError):
            return self._idle.pop(), True
        mode, extra = reading_mode(self.path)
        connection = open_connection(self.path, mode, extra)
        connection.execute("PRAGMA query_only = ON")
        return connection, not extra

    def _write(self, work: Callable[[Session], Receipt], *, named: bool = False) -> Receipt:
        with self._mutex, translate_errors(self.path):
            return _transact(self.for_writing(), work)

    def for_writing(self) -> sqlite3.Connection:
        """The connection that writes; refuses where it was opened for reading."""
        self._for_reading()
        if self._writer is None:
            raise GalleryError(f"{self.path} was opened for reading: open it for writing to change it")
        return self._writer

    def _for_reading(self) -> None:
        if self._closed:
            raise GalleryError(f"{self.path} is closed: open it again")


def _transact(connection: sqlite3.Connection, work: Callable[[Session], Result]) -> Result:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(SqliteSession(connection))
        connection.execute("COMMIT")
        return result
    except BaseException:
        with suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        raise


def _fill(temporary: Path, binding: Binding, model_files: Mapping[str, str]) -> None:
    connection = sqlite3.connect(temporary.absolute(), isolation_level=None)  # "file:..." would be an address
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        for statement in SQLITE_TABLES:
            connection.execute(statement)
        _transact(connection, lambda session: write_first_rows(session, binding, model_files))
    finally:
        connection.close()
