"""The file of an embedded storage: looked at before it is opened, made under another name, its troubles in our words.

One writer at a time: a lock that the kernel takes back when its holder dies, however it dies.

A gallery's storage in one SQLite file: the truth on one machine.

Write-ahead log, ``synchronous=FULL``: a change is on disk when `enrol` or `delete` returns. One process writes (it
holds the `lock` beside the file), any number read; every call of a reader sees the newest acknowledged change.
"""

import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import find_link, make_folder, open_unlinked, remove_leftovers, write_file
from mettle.errors import GalleryError, GalleryLocked, GalleryUnavailable, OutcomeUnknown
from mettle.gallery.binding import Binding
from mettle.gallery.results import Receipt
from mettle.gallery.storage.base import Result, SqlStorage
from mettle.gallery.storage.sql import (
    FINDINGS,
    FORMAT,
    SQLITE_TABLES,
    IndexProof,
    Transaction,
    forget_history,
    list_damage,
    read_fixed_metadata,
    write_first_rows,
)

APPLICATION = 0x4D45544C  # "METL" at byte 68 of the file: tells our files from other SQLite files


LOCK = "lock"


PRIVATE = 0o600


WAIT = 10.0  # seconds for other processes that read or recover


def open_connection(path: Path, mode: str, extra: str = "") -> sqlite3.Connection:
    """A connection that trusts the file with nothing but rows."""
    address = f"{path.absolute().as_uri()}?mode={mode}{extra}"
    connection = sqlite3.connect(address, uri=True, timeout=WAIT, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")  # a file from elsewhere runs no code of its own
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        made = connection.execute("SELECT type, sql FROM sqlite_master").fetchall()
        if any(kind in ("trigger", "view") for kind, _ in made):
            raise GalleryError(f"{path} holds triggers or views, which no gallery has: do not trust it")
        tables = [sql for _, sql in made if sql is not None]
        if set(tables) != set(SQLITE_TABLES) or len(tables) != len(SQLITE_TABLES):
            raise GalleryError(f"{path} does not have the tables of a gallery: it is damaged, restore a snapshot")
        return connection
    except BaseException:
        connection.close()
        raise


def reading_mode(path: Path) -> tuple[str, str]:
    """How a reader opens the file: in a folder that nobody can write to there is no log to look at."""
    if os.access(path.parent, os.W_OK) and os.access(path, os.W_OK):
        return "rw", ""
    log = sibling_file(path, "-wal")
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


def _names_of(path: Path) -> list[str]:
    """What a storage in this file consists of, and the lock beside it."""
    return [path.name, *(path.name + ending for ending in ("-wal", "-shm", "-journal")), LOCK]


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder in which one of our names is a link: it may come from elsewhere, and lead anywhere."""
    if (link := find_link(folder, names)) is not None:
        raise GalleryError(f"{link} is a link or no regular file, and none is followed in a gallery: remove it")


class OpenFiles:
    """The files of storages that this process has open, counted.

    Closing any handle of a file takes back every lock that the process has on it, also those that SQLite holds; another
    process would then take the storage for closed, and remove the log that is being written. So the first bytes of a
    file are looked at only where it is not open already.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, path: Path) -> tuple[int, int]:
        """Count one more; returns what to give to `remove`."""
        with self.lock:
            key = self._key(path)
            self._counts[key] = self._counts.get(key, 0) + 1
            return key

    def remove(self, key: tuple[int, int]) -> None:
        """Count one less."""
        with self.lock:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]

    def holds(self, path: Path) -> bool:
        """Whether it is open; a file that is not there is not."""
        try:
            return self._key(path) in self._counts
        except OSError:
            return False

    def _key(self, path: Path) -> tuple[int, int]:
        found = os.lstat(path)
        return found.st_dev, found.st_ino


_OPEN = OpenFiles()


def check_header(path: Path) -> None:
    """Refuse what is not our file, by its first bytes, before SQLite touches it."""
    with _OPEN.lock:
        if not _OPEN.holds(path):
            _check_header(path)


def _check_header(path: Path) -> None:
    try:
        with open_unlinked(path) as file:
            head = file.read(100)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise GalleryError(f"no gallery at {path}: create one, or look at the path") from None
    if len(head) < 100 or head[:16] != b"SQLite format 3\0" or int.from_bytes(head[68:72]) != APPLICATION:
        raise GalleryError(f"{path} is not a storage of a gallery: it is damaged or something else; restore a snapshot")
    if (written := int.from_bytes(head[60:64])) > FORMAT:
        raise GalleryError(f"a newer mettle wrote {path} (format {written}, known is {FORMAT}): upgrade mettle")


def refuse_existing(path: Path) -> None:
    """Nothing is ever made over something else."""
    if path.exists() or path.is_symlink():
        raise GalleryError(f"{path} is there already: open it, or choose another place")


def sibling_file(path: Path, ending: str) -> Path:
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


def describe_error(error: sqlite3.Error) -> str:
    """What the disk did, in our words and SQLite's."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return f"{_PASSING.get(code, 'the disk failed')} ({error})"


class ErrorTranslation:
    """Say what the disk did in our words."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None:
        """Nothing is done before."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Raise the error in our words, where it is one of the disk."""
        if error is not None and (told := _translate_error(error, self._path)) is not None:
            raise told from error


def _translate_error(error: BaseException, path: Path) -> GalleryError | None:
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _PASSING:
            return GalleryUnavailable(f"{path}: {describe_error(error)}; nothing was changed, try again later")
        if code in _DAMAGED or isinstance(error, sqlite3.DatabaseError):
            return GalleryError(f"{path} is damaged ({error}): restore a snapshot")
        return GalleryError(f"{path} cannot be used ({error}): open it again")
    if isinstance(error, UnicodeDecodeError):  # text of SQLite's that repeats damaged bytes of the file
        return GalleryError(f"{path} is damaged (it holds text that is not UTF-8): restore a snapshot")
    if isinstance(error, OSError):
        return GalleryUnavailable(f"{path}: {error.strerror or error}; nothing was changed, try again later")
    return None


class FolderLock:
    """The write lock of a gallery's folder. The file stays; what counts is who holds a `flock` on it."""

    def __init__(self, handle: int):
        self._handle: int | None = handle
        # A forked child shares the open file and would keep the lock after its parent died.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (lock := this()) and lock.release())

    @classmethod
    def acquire(cls, path: Path) -> "FolderLock":
        """Take the lock at once, or raise GalleryLocked that names the holder."""
        import fcntl  # not on every system; reading a gallery needs no lock

        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            handle = os.open(path, flags, 0o600)
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


class SqliteTransaction:
    """One transaction on one connection."""

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection

    def execute(self, sql: str, *values: Any) -> list[tuple]:
        """Run a statement and return what it gives."""
        return self._connection.execute(sql, values).fetchall()

    def executemany(self, sql: str, values: Sequence[tuple]) -> None:
        """Run a statement once for each tuple of values."""
        self._connection.executemany(sql, values)

    def stream(self, sql: str, batch: int) -> Iterator[list[tuple]]:
        """What a query gives, a part at a time."""
        cursor = self._connection.execute(sql)
        while rows := cursor.fetchmany(batch):
            yield rows

    def encode_vector(self, row: np.ndarray) -> bytes:
        """A vector as this database takes it."""
        return row.tobytes()

    def decode_vectors(self, blobs: Sequence[bytes], dim: int) -> Sequence[bytes]:
        """Vectors as this database gives them: as they are."""
        return blobs


class SqliteStorage(SqlStorage):
    """Templates in a file; made by `create` and opened by `open`."""

    kind = "sqlite"

    def __init__(self, path: Path, lock: FolderLock | None):
        self.path = path
        self._lock = lock
        self._mutex = threading.Lock()  # one change at a time
        self._idle: list[sqlite3.Connection] = []  # readers, one per thread that reads at the same time
        self._writer: sqlite3.Connection | None = None
        self._closed = False
        self._proof = IndexProof()
        self._file: tuple[int, int] | None = None
        self._unsettled = False  # whether a change whose commit failed may still be in the log
        try:
            with ErrorTranslation(path):
                self._file = _OPEN.add(path)
            if lock is not None:
                with ErrorTranslation(path):
                    remove_leftovers(path.parent)
                    self._writer = open_connection(path, "rw")
                    prepare_writer(self._writer)
            self._fixed = self._run_read(read_fixed_metadata)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, binding: Binding, model_files: Mapping[str, str] | None = None) -> "SqliteStorage":
        """Make a new storage and open it for writing; refuses an existing one.

        ``model_files``: SHA-256 of the copy of the model that lies beside it.
        """
        path = Path(path)
        refuse_existing(path)
        with ErrorTranslation(path):
            make_folder(path.parent)
        refuse_links(path.parent, _names_of(path))
        lock = FolderLock.acquire(path.parent / LOCK)
        try:
            refuse_existing(path)  # somebody may have been faster
            with ErrorTranslation(path):
                for leftover in (sibling_file(path, "-wal"), sibling_file(path, "-shm")):
                    leftover.unlink(missing_ok=True)  # of a removed storage: must not be played into this one
                # Templates are biometric data: from the first byte on for their owner, who may say otherwise.
                write_file(path, lambda temporary: _create_tables(temporary, binding, model_files or {}), PRIVATE)
        except GalleryUnavailable as error:
            lock.release()
            if path.exists():  # it has its name already: only whether a power loss takes that back is not known
                raise OutcomeUnknown(f"{path} was made, but may be lost when the power fails: open it again") from error
            raise
        except BaseException:
            lock.release()
            raise
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path, *, write: bool = True) -> "SqliteStorage":
        """Open a storage; with ``write`` no other process can write until it is closed."""
        path = Path(path)
        refuse_links(path.parent, _names_of(path))
        with ErrorTranslation(path):
            check_header(path)
        return cls(path, FolderLock.acquire(path.parent / LOCK) if write else None)

    def compact(self) -> None:
        """Rewrite the file without what was deleted, and empty the log: no byte of it stays in any file."""
        with self._mutex, ErrorTranslation(self.path):
            connection = self.for_writing()
            with suppress(_CommitError):  # made or not, it loses nothing, and what follows tells
                _run_transaction(connection, forget_history)
            connection.execute("VACUUM")
            busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise GalleryUnavailable(
                f"{self.path} is being read, so deleted templates stay in its log: compact again when scans are done"
            )

    def snapshot(self, path: Path) -> None:
        """Write a copy as of now to ``path``: complete or not there at all. It holds nothing that was deleted."""
        path = Path(path)
        if path.is_dir() or sibling_file(path, "-wal").exists() or (path.exists() and path.samefile(self.path)):
            raise GalleryError(f"{path} is a folder or a gallery in use: write the snapshot to another place")
        self._for_reading()
        with ErrorTranslation(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with ErrorTranslation(path):
            connection = open_connection(self.path, *reading_mode(self.path))
            try:
                write_file(path, lambda place: connection.execute("VACUUM INTO ?", (str(place.absolute()),)), PRIVATE)
            finally:
                connection.close()

    def check(self) -> list[str]:
        """What is wrong with the file or its rows, in words."""
        found: list[str] = []
        for pragma in ("integrity_check", "foreign_key_check"):
            with list_damage(found):
                rows = self._run_read(lambda session, pragma=pragma: session.execute(f"PRAGMA {pragma}"))
                found += [f"{self.path.name}: {row[0]}" for row in rows if row[0] != "ok"]
        with list_damage(found):
            found += super().check()
        return found[:FINDINGS]

    def forget_pages(self) -> None:
        """Close the connections that read, each of which keeps pages, and forget the names that were checked."""
        super().forget_pages()
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def bytes(self) -> int:
        """Size of its files."""
        files = [self.path, sibling_file(self.path, "-wal"), sibling_file(self.path, "-shm")]
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
            file, self._file = self._file, None
            if file is not None:
                _OPEN.remove(file)
            if self._lock is not None:
                self._lock.release()

    def _run_read(self, work: Callable[[Transaction], Result]) -> Result:
        with self._read_transaction() as session:
            return work(session)

    def _run_statement(self, work: Callable[[Transaction], Result]) -> Result:
        self._for_reading()
        with ErrorTranslation(self.path):
            connection, keep = self._borrow_connection()
            try:
                result = work(SqliteTransaction(connection))
            except BaseException:
                connection.close()
                raise
            self._return_connection(connection, keep)
            return result

    @contextmanager
    def _read_transaction(self) -> Iterator[SqliteTransaction]:
        self._for_reading()
        with ErrorTranslation(self.path):
            connection, keep = self._borrow_connection()
            try:
                connection.execute("BEGIN")
                yield SqliteTransaction(connection)
                connection.execute("ROLLBACK")
            except BaseException:
                connection.close()
                raise
            self._return_connection(connection, keep)

    def _borrow_connection(self) -> tuple[sqlite3.Connection, bool]:
        """A connection to read by, and whether it may be used again: an immutable one misses what others write."""
        try:
            return self._idle.pop(), True
        except IndexError:
            mode, extra = reading_mode(self.path)
        connection = open_connection(self.path, mode, extra)
        connection.execute("PRAGMA query_only = ON")
        return connection, not extra

    def _return_connection(self, connection: sqlite3.Connection, keep: bool) -> None:
        if self._closed or not keep:
            connection.close()
        else:
            self._idle.append(connection)

    def _run_write(self, work: Callable[[Transaction], Receipt], *, named: bool = False) -> Receipt:
        with self._mutex, ErrorTranslation(self.path):
            connection, before = self.for_writing(), -1

            def note_sequence(session: Transaction) -> Receipt:
                nonlocal before
                before = session.execute("SELECT sequence FROM revision_state")[0][0]
                return work(session)

            try:
                receipt = _run_transaction(connection, note_sequence)
                self._unsettled = False
                return receipt
            except _CommitError as failed:
                # On a full disk the last page of the change, which makes it whole, was not written.
                full = getattr(failed.error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
                if not full or self._unsettled:  # a change before this one may still be in the log
                    self._settle(connection, before, failed.error)
                raise failed.error from None

    def _settle(self, connection: sqlite3.Connection, before: int, error: sqlite3.Error) -> None:
        """Find out what became of a change whose commit failed; returns where it is sure that it was not made.

        The log may hold the whole change although it was never known to be on the disk, and the next opening would
        play it back. Another commit, of nothing, is written over it: once that is on the disk, the change is not.
        """
        try:
            connection.execute("BEGIN IMMEDIATE")
            now = connection.execute("SELECT sequence FROM revision_state").fetchone()[0]
            connection.execute("UPDATE revision_state SET id = 1")
            connection.execute("COMMIT")
        except sqlite3.Error:
            now = None
            _roll_back(connection)
        self._unsettled = now != before
        if self._unsettled:
            raise OutcomeUnknown(
                f"{self.path}: {describe_error(error)} while the change was committed: all of it was made or nothing; "
                "ask again, under the same request name if it had one, which settles it"
            ) from error

    def for_writing(self) -> sqlite3.Connection:
        """The connection that writes; refuses where it was opened for reading."""
        self._for_reading()
        if self._writer is None:
            raise GalleryError(f"{self.path} was opened for reading: open it for writing to change it")
        return self._writer

    def _for_reading(self) -> None:
        if self._closed:
            raise GalleryError(f"{self.path} is closed: open it again")


class _CommitError(Exception):
    """Everything was done, and then it could not be committed."""

    def __init__(self, error: sqlite3.Error):
        super().__init__(str(error))
        self.error = error


def _run_transaction(connection: sqlite3.Connection, work: Callable[[Transaction], Result]) -> Result:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(SqliteTransaction(connection))
    except BaseException:
        _roll_back(connection)
        raise
    try:
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        _roll_back(connection)
        raise _CommitError(error) from error
    return result


def _roll_back(connection: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _create_tables(temporary: Path, binding: Binding, model_files: Mapping[str, str]) -> None:
    connection = sqlite3.connect(temporary.absolute(), isolation_level=None)  # "file:..." would be an address
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")

        def make_tables(session: Transaction) -> None:
            for statement in SQLITE_TABLES:
                session.execute(statement)
            write_first_rows(session, binding, model_files)

        try:
            _run_transaction(connection, make_tables)
        except _CommitError as failed:  # nobody knows this file yet
            raise failed.error from None
    finally:
        connection.close()
