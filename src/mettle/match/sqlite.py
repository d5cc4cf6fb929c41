"""A gallery's record in one SQLite file: the truth on one machine.

Write-ahead log, ``synchronous=FULL``: a change is on disk when `enrol` or `delete` returns. One process writes (it
holds the `lock` beside the file), any number read; every call of a reader sees the newest acknowledged change.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from mettle.errors import GalleryError, GalleryUnavailable
from mettle.match import file, schema, statements
from mettle.match.ledger import Ledger, Result
from mettle.match.lock import Lock
from mettle.match.record import Binding, Receipt
from mettle.match.statements import Session

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
        try:
            if lock is not None:
                file.sweep(path)
                with file.told(path):
                    self._writer = file.connect(path, "rw")
                    file.prepare_writer(self._writer)
            self._binding, self._salt = self._read(statements.read_facts)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, binding: Binding) -> "SqliteRecord":
        """Make a new record and open it for writing; refuses an existing one."""
        path = Path(path)
        file.refuse_existing(path)
        with file.told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock.take(path.parent / "lock")
        try:
            file.refuse_existing(path)  # somebody may have been faster
            file.sweep(path)
            with file.told(path):
                for leftover in (file.beside(path, "-wal"), file.beside(path, "-shm")):
                    leftover.unlink(missing_ok=True)  # of a removed record: must not be played into this one
                file.build(path, lambda temporary: _fill(temporary, binding))
        except BaseException:
            lock.release()
            raise
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path, *, write: bool = True) -> "SqliteRecord":
        """Open a record; with ``write`` no other process can write until it is closed."""
        path = Path(path)
        with file.told(path):
            file.look(path)
        return cls(path, Lock.take(path.parent / "lock") if write else None)

    def compact(self) -> None:
        """Rewrite the file without what was deleted, and empty the log: no byte of it stays in any file."""
        with self._mutex, file.told(self.path):
            connection = self.for_writing()
            _transact(connection, statements.forget)
            connection.execute("VACUUM")
            busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise GalleryUnavailable(
                f"{self.path} is being read, so deleted templates stay in its log: compact again when scans are done"
            )

    def snapshot(self, path: Path) -> None:
        """Write a copy as of now to ``path``: complete or not there at all. It holds nothing that was deleted."""
        path = Path(path)
        if path.is_dir() or file.beside(path, "-wal").exists() or (path.exists() and path.samefile(self.path)):
            raise GalleryError(f"{path} is a folder or a gallery in use: write the snapshot to another place")
        self._for_reading()
        with file.told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        file.sweep(path)
        with file.told(path):
            connection = file.connect(self.path, *file.reading_mode(self.path))
            try:
                file.build(path, lambda temporary: connection.execute("VACUUM INTO ?", (str(temporary.absolute()),)))
            finally:
                connection.close()

    def check(self) -> list[str]:
        """What is wrong with the file or its rows, in words."""
        try:
            pragmas = self._read(lambda s: s.rows("PRAGMA integrity_check") + s.rows("PRAGMA foreign_key_check"))
            found = [f"{self.path.name}: {row[0]}" for row in pragmas if row[0] != "ok"]
            return (found + super().check())[: statements.FINDINGS]
        except GalleryUnavailable:
            raise
        except GalleryError as error:
            return [str(error)]

    def bytes(self) -> int:
        """Size of its files."""
        files = [self.path, file.beside(self.path, "-wal"), file.beside(self.path, "-shm")]
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
        with file.told(self.path):
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
        mode, extra = file.reading_mode(self.path)
        connection = file.connect(self.path, mode, extra)
        connection.execute("PRAGMA query_only = ON")
        return connection, not extra

    def _write(self, work: Callable[[Session], Receipt], *, named: bool = False) -> Receipt:
        with self._mutex, file.told(self.path):
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


def _fill(temporary: Path, binding: Binding) -> None:
    connection = sqlite3.connect(temporary.absolute(), isolation_level=None)  # "file:..." would be an address
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute(f"PRAGMA application_id = {file.APPLICATION}")
        connection.execute(f"PRAGMA user_version = {statements.PLAIN}")
        connection.executescript(schema.SQLITE)
        _transact(connection, lambda session: statements.first_rows(session, binding))
    finally:
        connection.close()
