"""A watch over connections to a server: whoever waits for one that has gone silent is told in time.

Connections to a PostgreSQL server: made when needed, kept by psycopg's pool when idle, cut when the server does not
answer, for which neither the pool nor libpq has a setting: a frozen server keeps acknowledging what it is sent.

Whatever goes wrong comes out as an error of ours, in one line and without the password.

A gallery's storage on a PostgreSQL server with pgvector: when one machine is too small, or several must write.

One schema per gallery, any number of writers: a change holds the row of the counter until it is committed, so that
sequence numbers follow each other without a gap in the order of the commits.
"""

import logging
import math
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import numpy as np

from mettle.errors import GalleryError, GalleryUnavailable, InputError, MettleError, MissingExtra, OutcomeUnknown
from mettle.gallery.binding import Binding, binding_to_json
from mettle.gallery.results import Receipt
from mettle.gallery.storage.base import Result, SqlStorage
from mettle.gallery.storage.integrity import FLOATS, RevisionState, check_vectors
from mettle.gallery.storage.sql import (
    IndexProof,
    Transaction,
    forget_history,
    read_fixed_metadata,
    read_state,
    table_statements,
    write_first_rows,
)

GRACE = 1.0  # seconds after the server should have given up by itself


class Watchdog:
    """Cuts connections whose server has gone silent; its own timeouts do not help when it is frozen or unreachable."""

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Watch nothing, with no thread yet: what a forked child inherits is of no use to it."""
        self._change = threading.Condition()
        self._due: dict[int, tuple[Any, float]] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False

    @contextmanager
    def deadline(self, connection: Any, limit: float) -> Iterator[None]:
        """Cut ``connection`` if the block takes longer than ``limit`` and some grace."""
        with self._change:
            self._due[id(connection)] = (connection, time.monotonic() + limit + GRACE)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="mettle-watch", daemon=True)
                self._thread.start()
            elif len(self._due) == 1:
                self._change.notify()
        try:
            yield
        finally:
            with self._change:
                self._due.pop(id(connection), None)

    def stop(self) -> None:
        """End the thread."""
        with self._change:
            self._stopped = True
            self._change.notify()

    def _watch(self) -> None:
        with self._change:
            while not self._stopped:
                now = time.monotonic()
                for key, (connection, due) in list(self._due.items()):
                    if now > due:
                        _shut_connection(connection)
                        del self._due[key]
                self._change.wait(0.2 if self._due else None)


def _shut_connection(connection: Any) -> None:
    """Shut the line down under the waiting driver, which then reports a lost connection."""
    with suppress(OSError, ValueError, AttributeError):
        handle = os.dup(connection.fileno())
        with socket.socket(fileno=handle) as line:
            line.shutdown(socket.SHUT_RDWR)


def _leave_connection(connection: Any) -> None:
    """Let go of a connection that is another process's: its socket, which both have, stays as it is for the other."""
    if connection.closed:
        return
    with suppress(OSError, ValueError, AttributeError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.dup2(nothing, connection.fileno(), inheritable=False)
        finally:
            os.close(nothing)


LOOK = 0.05  # seconds after which a wait for a connection looks whether none could be made


PATIENT_LOOK = 0.5  # the same, where the server is asked for another one each time and had too many of them


MOST_CONNECTIONS = 64  # of one open gallery; what is asked beyond that waits for one of these, up to the time limit


CROWDED = ("too many connections", "too many clients", "connection slots")  # a server that lets nobody in for now


logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())  # whoever asked is told


DEFAULT_NAME = "mettle"  # name of a gallery where the URL gives none


NAME = re.compile(r"(?!pg_)[A-Za-z_][A-Za-z0-9_-]{0,62}")


RESERVED = {"public", "information_schema"}


UNREADABLE = "the URL of the PostgreSQL gallery cannot be read: look at its special characters and its options"


class ConnectionLost(Exception):
    """The connection broke; ``committing`` when nobody knows whether the change was made."""

    def __init__(self, error: MettleError, committing: bool = False):
        super().__init__(str(error))
        self.error, self.committing = error, committing


def import_driver() -> Any:
    """The psycopg module, once its pool and pgvector's types are there, too."""
    try:
        import pgvector.psycopg  # noqa: F401
        import psycopg
        import psycopg_pool  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "a gallery on PostgreSQL needs psycopg, psycopg-pool and pgvector: "
            "pip install 'psycopg[binary,pool]' pgvector"
        ) from None
    return psycopg


def parse_address(url: str, name: str | None = None) -> tuple[str, str]:
    """A URL as the driver takes it, and the gallery's name, which ``?gallery=NAME`` may give."""
    if not isinstance(url, str) or not url.startswith(("postgresql://", "postgres://")):
        raise InputError("a PostgreSQL gallery is named by a URL like postgresql://user@host/database?gallery=people")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InputError(UNREADABLE) from None
    query = parse_qsl(parts.query, keep_blank_values=True)
    name = name or dict(query).get("gallery") or DEFAULT_NAME
    if not NAME.fullmatch(name) or name in RESERVED:
        raise InputError(f"a gallery on a server is named by up to 63 letters, digits, - and _, got {name!r:.80}")
    rest = urlencode([(key, value) for key, value in query if key != "gallery"], quote_via=quote)
    return urlunsplit(parts._replace(query=rest)), name


class PostgresServer:
    """A database on a server, and the connections to it."""

    def __init__(self, url: str, schema: str, *, write: bool, timeout: float):
        self._driver = import_driver()
        self.schema, self._write, self._timeout = schema, write, float(timeout)
        if not 0 < self._timeout < float("inf"):
            raise InputError(f"timeout must be a number of seconds above 0, got {timeout!r}")
        try:
            self._conninfo = self._driver.conninfo.conninfo_to_dict(url)
        except Exception:  # the driver's message repeats the URL, password and all
            raise InputError(
                "the URL of the PostgreSQL gallery cannot be read: look at its special characters"
            ) from None
        self._watch = Watchdog()
        self._closed = False
        self._inherited: list[Any] = []  # pools of the process that this one was forked from
        self._start_over()
        SERVERS.add(self)

    def _start_over(self) -> None:
        # How many connections could not be made, when the last one of them and why.
        self._failures, self._failed_at, self._failure = 0, -math.inf, Exception()
        self._made: set[Any] = set()  # connections, in use or idle; closed ones until the next is made
        self._pool = self._make_pool()

    def leave_parent(self) -> None:
        """In a forked child: leave the connections to the parent, whose threads and sockets they are, and make own."""
        for connection in self._made:
            _leave_connection(connection)
        self._inherited.append(self._pool)
        self._watch.start_over()
        self._start_over()

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """A connection for one transaction; a broken one is not kept. Raises `ConnectionLost` where it broke."""
        pool = self._pool
        connection = self._get_connection(pool)
        try:
            yield connection
        except self._driver.Error as error:
            broken = self._give_back(pool, connection)
            told = self.translate_error(error)
            raise (ConnectionLost(told) if broken and isinstance(told, GalleryUnavailable) else told) from None
        except BaseException:
            self._give_back(pool, connection)
            raise
        self._give_back(pool, connection)

    def session(self, connection: Any, limit: float | None = None) -> "PostgresTransaction":
        """Statements on a connection, each of which may take ``limit`` seconds."""
        return PostgresTransaction(connection, self._watch, self._timeout if limit is None else limit)

    def drop_idle_connections(self) -> None:
        """Drop idle connections: after a restart none of them is good."""
        self._pool.drain()

    def close(self) -> None:
        """Close all connections; may be called twice."""
        self._closed = True
        self._pool.close(GRACE)
        self._watch.stop()

    def translate_error(self, error: Exception) -> MettleError:
        """An error of the driver in our words."""
        state = getattr(error, "sqlstate", None) or ""
        text = self._redact_text(str(error))
        where = f"the gallery {self.schema!r}"
        if state.startswith(("08", "53", "57", "58")) or state in ("", "55P03", "25006", "40001", "40P01"):
            return GalleryUnavailable(
                f"the server did not serve {where} ({text}): nothing was changed, try again later"
            )
        if state in ("42P01", "3F000", "42703"):
            return GalleryError(
                f"{where} is not in this database, or is damaged ({text}): look at the URL and its name"
            )
        if state == "42501":
            return GalleryError(f"the server does not allow this on {where} ({text}): ask for the rights")
        return GalleryError(f"the server refused to work on {where} ({text}): restore a backup if this stays")

    def _make_pool(self) -> Any:
        """Connections that are made when somebody waits for one, and kept for the next."""
        from psycopg_pool import ConnectionPool

        server = self

        class ReportedConnection(self._driver.Connection):
            """A connection of which `server` learns why it could not be made: the pool only says that none came."""

            @classmethod
            def connect(cls, conninfo: str = "", **settings: Any) -> Any:
                if time.monotonic() < server._failed_at + LOOK:  # the pool tries twice: a password is sent once
                    raise server._failure
                connection = None
                try:
                    connection = super().connect(conninfo, **settings)
                    server._prepare(connection)
                    server._keep_connection(connection)
                    return connection
                except Exception as error:
                    if connection is not None:
                        connection.close()
                    server._failure, server._failed_at = error, time.monotonic()
                    server._failures += 1
                    raise

        maker = os.getpid()

        class ProcessPool(ConnectionPool):
            """A pool whose threads are ended by the process that started them, and by no child of it."""

            def __del__(self) -> None:
                if os.getpid() == maker:
                    super().__del__()

        settings = {"application_name": "mettle", **self._conninfo, "connect_timeout": max(2, round(self._timeout))}
        return ProcessPool(
            kwargs={**settings, "autocommit": True},
            connection_class=ReportedConnection,
            min_size=0,
            max_size=MOST_CONNECTIONS,
            reconnect_timeout=0,
            open=False,  # its threads are started by the first who asks: after a fork there are none
        )

    def _get_connection(self, pool: Any) -> Any:
        """A connection from the pool, or why there is none as soon as that is known."""
        from psycopg_pool import PoolClosed, PoolTimeout

        failures, due = self._failures, time.monotonic() + max(2, self._timeout) + 2 * GRACE
        wait, crowded = LOOK, False
        while True:
            try:
                if not self._closed:
                    pool.open()
                return pool.getconn(wait)
            except PoolClosed:
                raise GalleryError(f"the gallery {self.schema!r} is closed: open it again") from None
            except PoolTimeout:
                if self._failures > failures:
                    failures, crowded = self._failures, self._is_crowded()
                    if not crowded:
                        raise self._connection_refused(self._failure) from None
                    wait = PATIENT_LOOK
                if time.monotonic() > due:
                    if crowded:
                        raise self._connection_refused(self._failure) from None
                    raise GalleryUnavailable(
                        f"the server gave no connection for the gallery {self.schema!r} in time: try again later"
                    ) from None

    def _keep_connection(self, connection: Any) -> None:
        for made in tuple(self._made):
            if made.closed:
                self._made.discard(made)
        self._made.add(connection)

    def _is_crowded(self) -> bool:
        """Whether the server takes no more connections for now, but we have one that will be given back."""
        text = str(self._failure)
        return any(sign in text for sign in CROWDED) and not all(made.closed for made in tuple(self._made))

    def _prepare(self, connection: Any) -> None:
        session = self.session(connection)
        milliseconds = str(max(1, round(1000 * self._timeout)))
        found = session.execute(
            "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace "
            "WHERE e.extname = 'vector'"
        )
        path = ", ".join(f'"{name}"' for name in [self.schema, found[0][0] if found else "public"])
        session.execute(
            "SELECT set_config('search_path', ?, false), set_config('statement_timeout', ?, false), "
            "set_config('lock_timeout', ?, false), set_config('client_encoding', 'UTF8', false)",
            *(path, milliseconds, milliseconds),
        )
        session.execute(  # an owner's stronger setting stays
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
        )
        if not self._write:
            session.execute("SET default_transaction_read_only = on")
        if found:
            sql = "SELECT oid::int8, typarray::int8 FROM pg_type WHERE oid = to_regtype('vector')"
            if not (types := session.execute(sql)):
                user, place = session.execute("SELECT current_user::text")[0][0], found[0][0]
                raise GalleryError(
                    f"the user {user!r} may not use the schema {place!r}, which pgvector is in: ask for the rights "
                    f'(GRANT USAGE ON SCHEMA "{place}" TO "{user}")'
                )
            _register_vectors(connection, *types[0])

    def _connection_refused(self, error: Exception) -> MettleError:
        """Why there is no connection."""
        if isinstance(error, MettleError):
            return error
        if isinstance(error, UnicodeError):
            return InputError("the URL of the PostgreSQL gallery holds characters that no server takes")
        if getattr(error, "sqlstate", None) and not isinstance(error, self._driver.OperationalError):
            return self.translate_error(error)
        text = str(error)
        user, database = self._conninfo.get("user", "you"), self._conninfo.get("dbname", "")
        if "password" in text or "authentication" in text or "pg_hba" in text or ("role" in text and "exist" in text):
            return GalleryError(
                f"the PostgreSQL server does not let {user!r} in: look at user and password in the URL "
                f"({self._redact_text(text)})"
            )
        if "database" in text and "does not exist" in text:
            return GalleryError(f"the PostgreSQL server has no database {database!r}: create it, or look at the URL")
        return GalleryUnavailable(
            f"no PostgreSQL server answers there: start it, or look at host and port in the URL "
            f"({self._redact_text(text)})"
        )

    def _redact_text(self, text: str) -> str:
        """One line, without secrets."""
        line = " ".join(text.split())
        for key, secret in self._conninfo.items():
            if "password" in key and secret:
                line = line.replace(str(secret), "***").replace(quote(str(secret), safe=""), "***")
        return line if len(line) <= 300 else line[:300] + "..."

    def _give_back(self, pool: Any, connection: Any) -> bool:
        """Keep a connection for the next, its transaction ended; returns whether it was broken."""
        broken = bool(connection.closed)
        if pool is not self._pool:  # the parent's
            return broken
        with suppress(self._driver.Error):
            if not broken and connection.info.transaction_status != self._driver.pq.TransactionStatus.IDLE:
                self.session(connection).execute("ROLLBACK")
        pool.putconn(connection)
        return broken


SERVERS: weakref.WeakSet[PostgresServer] = weakref.WeakSet()  # of this process


def leave_parent() -> None:
    """In a forked child: no server of ours uses what is the parent's."""
    for server in list(SERVERS):
        server.leave_parent()


if hasattr(os, "register_at_fork"):  # not on every system
    os.register_at_fork(after_in_child=leave_parent)


def _register_vectors(connection: Any, oid: int, array_oid: int) -> None:
    """Let a connection take and give vectors of pgvector; None for what is damaged so that it is none."""
    from pgvector.psycopg.vector import VectorBinaryLoader, register_vector_info
    from psycopg.types import TypeInfo

    class SuppressingLoader(VectorBinaryLoader):
        def load(self, data: Any) -> Any:
            with suppress(ValueError):
                return super().load(data)

    register_vector_info(connection, TypeInfo("vector", oid, array_oid))
    connection.adapters.register_loader(oid, SuppressingLoader)


class PostgresTransaction:
    """One transaction on one connection."""

    def __init__(self, connection: Any, watch: Watchdog, limit: float):
        self._connection, self._watch, self._limit = connection, watch, limit

    def execute(self, sql: str, *values: Any) -> list[tuple]:
        """Run a statement and return what it gives."""
        with self._watch.deadline(self._connection, self._limit):
            cursor = self._connection.execute(_replace_markers(sql), values or None, binary=True)
            return cursor.fetchall() if cursor.description else []

    def executemany(self, sql: str, values: Sequence[tuple]) -> None:
        """Run a statement once for each tuple of values."""
        with self._connection.cursor() as cursor:
            for start in range(0, len(values), 1000):
                with self._watch.deadline(self._connection, self._limit):
                    cursor.executemany(_replace_markers(sql), values[start : start + 1000])

    def stream(self, sql: str, batch: int) -> Iterator[list[tuple]]:
        """What a query gives, a part at a time."""
        with self._connection.cursor("mettle_each", binary=True) as cursor:
            with self._watch.deadline(self._connection, self._limit):
                cursor.execute(sql)
            while True:
                with self._watch.deadline(self._connection, self._limit):
                    rows = cursor.fetchmany(batch)
                if not rows:
                    return
                yield rows

    def encode_vector(self, row: np.ndarray) -> Any:
        """A vector as pgvector sends it."""
        from pgvector import Vector

        return Vector(row)

    def decode_vectors(self, blobs: Sequence[Any], dim: int) -> Sequence[bytes]:
        """Vectors as pgvector sends them, as little-endian bytes."""
        rows = (np.empty(0, FLOATS) if vector is None else vector.to_numpy() for vector in blobs)
        return [row.astype(FLOATS, copy=False).tobytes() for row in rows]


def _replace_markers(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s") if "?" in sql else sql


MAX_DIM, MAX_INDEXED_DIM, INLINE = 16000, 2000, 1900  # numbers in a vector: at all, under an index, inside its row


PATIENT = 24 * 3600.0  # seconds for what rewrites or checks everything


POSTGRES_INDEXES = ("exact", "hnsw")


LACKING = (
    "the PostgreSQL server lacks pgvector ({why}): install it there and let the database's owner run "
    "CREATE EXTENSION vector"
)


class PostgresStorage(SqlStorage):
    """Templates on a server; made by `create` and opened by `open`. ``?gallery=NAME`` in the URL names the gallery."""

    kind = "postgresql"

    def __init__(self, server: PostgresServer, write: bool):
        self._server, self._writes = server, write
        self._proof = IndexProof()
        try:
            if not _is_there(server):
                raise GalleryError(
                    f"there is no gallery {server.schema!r} in this database: create it, or look at the URL"
                )
            self._fixed = self._run_read(read_fixed_metadata)
        except BaseException:
            server.close()
            raise

    @classmethod
    def create(cls, url: str, binding: Binding, *, name: str | None = None, timeout: float = 5.0) -> "PostgresStorage":
        """Make a new storage and open it for writing; refuses an existing one."""
        url, name = parse_address(url, name)
        binding_to_json(binding)
        if binding.dim > MAX_DIM:
            raise InputError(f"dim of a gallery on PostgreSQL must be at most {MAX_DIM}, got {binding.dim}")
        server = PostgresServer(url, name, write=True, timeout=timeout)
        try:
            _check_extensions(server)
            _create_tables(server, binding)
        except ConnectionLost as lost:
            raise lost.error from None
        finally:
            server.close()
        return cls.open(url, name=name, timeout=timeout)

    @classmethod
    def open(cls, url: str, *, name: str | None = None, write: bool = True, timeout: float = 5.0) -> "PostgresStorage":
        """Open a storage; no statement may take longer than ``timeout`` seconds."""
        url, name = parse_address(url, name)
        return cls(PostgresServer(url, name, write=write, timeout=timeout), write)

    @classmethod
    def exists(cls, url: str, *, name: str | None = None, timeout: float = 5.0) -> bool:
        """Whether there is a gallery of that name."""
        url, name = parse_address(url, name)
        server = PostgresServer(url, name, write=False, timeout=timeout)
        try:
            return _is_there(server)
        finally:
            server.close()

    def search(self, probes: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        """The k templates nearest to each probe, found by the server: cosines and numbers, padded by -inf and -1.

        With them the last change that the server knew of, and how many templates there were.
        """
        rows = check_vectors(probes, self.binding.dim, "probes")
        if not isinstance(k, int | np.integer) or k < 1:
            raise InputError(f"k must be a whole number above 0, got {k!r}")
        k = int(k)

        def work(session: Transaction) -> tuple[RevisionState, list[list[tuple]]]:
            if self._has_index(session):
                session.execute("SELECT set_config('hnsw.ef_search', ?, true)", str(min(1000, max(100, 2 * k))))
                session.execute("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")
            sql = f"SELECT -(vector <#> ?) AS score, number FROM templates ORDER BY vector <#> ?, number LIMIT {k}"
            packed = [session.encode_vector(row) for row in rows]
            return read_state(session), [session.execute(sql, probe, probe) for probe in packed]

        state, best = self._run_read(work)
        scores = np.full((len(rows), k), -np.inf, np.float32)
        numbers = np.full((len(rows), k), -1, np.int64)
        for i, found in enumerate(best):
            if found:
                scores[i, : len(found)], numbers[i, : len(found)] = zip(*found, strict=True)
        return scores, numbers, state.sequence, state.templates

    def set_index(self, kind: str = "hnsw") -> None:
        """Let `search` go through an approximate index ("hnsw"), or through all templates ("exact")."""
        if kind not in POSTGRES_INDEXES:
            raise InputError(f"kind must be one of {', '.join(POSTGRES_INDEXES)}, got {kind!r}")
        if kind == "hnsw" and self.binding.dim > MAX_INDEXED_DIM:
            raise InputError(
                f"hnsw takes at most {MAX_INDEXED_DIM} numbers a template, got {self.binding.dim}: use exact"
            )
        statements = ["DROP INDEX IF EXISTS templates_hnsw"]
        if kind == "hnsw":
            statements.append("CREATE INDEX templates_hnsw ON templates USING hnsw (vector vector_ip_ops)")
        self._run_maintenance(*statements)

    def compact(self) -> None:
        """Rewrite the tables without what was deleted.

        The server's own log and backups keep changes for as long as the server is told to: that is its owner's part.
        """
        self._run_write(lambda session: (forget_history(session), Receipt(0, ()))[1], named=True)
        kept = self._run_maintenance(
            *(f"VACUUM (FULL, VERBOSE) {table}" for table in ("templates", "identities", "idempotency_keys"))
        )
        if any(" dead row versions cannot be removed yet" in line and " 0 dead" not in line for line in kept):
            raise GalleryUnavailable(
                "a transaction somewhere on the server still sees deleted templates: compact again when it ends"
            )

    def bytes(self) -> int:
        """Size of its tables and indexes."""
        sql = (
            "SELECT sum(pg_total_relation_size(c.oid))::int8 FROM pg_class c JOIN pg_namespace n "
            "ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND n.nspname = ?"
        )
        return self._run_read(lambda session: int(session.execute(sql, self._server.schema)[0][0]))

    def for_writing(self) -> None:
        """Refuse, where it was opened for reading."""
        if not self._writes:
            raise GalleryError(f"the gallery {self._server.schema!r} was opened for reading: open it for writing")

    def close(self) -> None:
        """Close the connections; may be called twice."""
        self._server.close()

    def _default_request(self) -> str:
        # A name for every change: after a lost connection it tells whether the change was made.
        return f"unnamed {secrets.token_hex(16)}"

    def _has_index(self, session: Transaction) -> bool:
        sql = "SELECT 1 FROM pg_indexes WHERE schemaname = ? AND indexname = 'templates_hnsw'"
        return bool(session.execute(sql, self._server.schema))

    def _run_read(self, work: Callable[[Transaction], Result]) -> Result:
        def attempt() -> Result:
            with self._transaction() as session:
                return work(session)

        return self._retry_once(attempt, named=True)

    def _run_statement(self, work: Callable[[Transaction], Result]) -> Result:
        def attempt() -> Result:
            with self._server.connection() as connection:
                return work(self._server.session(connection))

        return self._retry_once(attempt, named=True)

    @contextmanager
    def _read_transaction(self) -> Iterator[PostgresTransaction]:
        try:
            with self._transaction() as session:
                yield session
        except ConnectionLost as lost:
            raise lost.error from None

    @contextmanager
    def _transaction(self) -> Iterator[PostgresTransaction]:
        with self._server.connection() as connection:
            session = self._server.session(connection)
            session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield session
            session.execute("COMMIT")

    def _run_write(self, work: Callable[[Transaction], Receipt], *, named: bool = False) -> Receipt:
        self.for_writing()

        def attempt() -> Receipt:
            committing = False
            try:
                with self._server.connection() as connection:
                    session = self._server.session(connection)
                    session.execute("BEGIN")
                    session.execute("SELECT 1 FROM revision_state FOR UPDATE")  # one writer at a time, until the commit
                    receipt = work(session)
                    committing = True
                    session.execute("COMMIT")
                    return receipt
            except ConnectionLost as lost:
                raise ConnectionLost(lost.error, committing) from None

        return self._retry_once(attempt, named=named)

    def _retry_once(self, attempt: Callable[[], Result], *, named: bool) -> Result:
        """Try again once where the connection was lost: after a restart of the server all old ones are dead."""
        unsure = False
        try:
            return attempt()
        except ConnectionLost as lost:
            unsure = lost.committing
            if unsure and not named:
                raise self._outcome_unknown() from None
            self._server.drop_idle_connections()
        try:
            return attempt()
        except ConnectionLost as lost:
            if unsure or lost.committing:
                raise self._outcome_unknown() from None
            raise lost.error from None
        except MettleError:  # no answer of this attempt says what became of the first
            if unsure:
                raise self._outcome_unknown() from None
            raise

    def _outcome_unknown(self) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"the server of the gallery {self._server.schema!r} went away while it committed: it has made the whole "
            "change or nothing of it; ask again under the same request name"
        )

    def _run_maintenance(self, *statements: str) -> list[str]:
        """Run statements outside transactions, with all the time they need; returns what the server remarked."""
        self.for_writing()
        remarks: list[str] = []

        def attempt() -> None:
            with self._server.connection() as connection:
                session = self._server.session(connection, PATIENT)

                def heard(remark: Any) -> None:
                    remarks.append(" ".join(f"{remark.message_primary} {remark.message_detail}".split()))

                connection.add_notice_handler(heard)
                session.execute("SET statement_timeout = 0")
                try:
                    for statement in statements:
                        session.execute(statement)
                finally:
                    connection.close()  # its settings are not for others

        self._retry_once(attempt, named=True)
        return remarks


def _is_there(server: PostgresServer) -> bool:
    names = "'metadata', 'revision_state', 'templates'"
    sql = f"SELECT count(*) FROM pg_tables WHERE schemaname = ? AND tablename IN ({names})"
    try:
        with server.connection() as connection:
            return server.session(connection).execute(sql, server.schema)[0][0] == 3
    except ConnectionLost as lost:
        raise lost.error from None


def _check_extensions(server: PostgresServer) -> None:
    """See that the database has pgvector and speaks UTF-8."""
    from psycopg import errors

    with server.connection() as connection:
        session = server.session(connection)
        encoding = session.execute("SELECT current_setting('server_encoding')")[0][0]
        if encoding != "UTF8":
            raise GalleryError(f"the database is encoded as {encoding}, names need UTF8: create another database")
        if session.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'"):
            return
        try:
            session.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except errors.InsufficientPrivilege:
            raise GalleryError(LACKING.format(why="and this user may not add it")) from None
        except (errors.FeatureNotSupported, errors.UndefinedFile, errors.UndefinedObject):
            raise GalleryError(LACKING.format(why="no such extension")) from None
    server.drop_idle_connections()  # connections made before know nothing of vectors


def _create_tables(server: PostgresServer, binding: Binding) -> None:
    from psycopg import errors

    storage = "PLAIN" if binding.dim <= INLINE else "EXTERNAL"  # a vector outside its row is slow to scan
    with server.connection() as connection:
        session = server.session(connection)
        session.execute("BEGIN")
        try:
            session.execute(f'CREATE SCHEMA "{server.schema}"')
        except (errors.DuplicateSchema, errors.UniqueViolation):
            raise GalleryError(
                f"the database has a gallery or schema {server.schema!r} already: open it, or choose another name"
            ) from None
        names, numbers = 'text COLLATE "C"', "int8"
        for statement in table_statements(text=names, integer=numbers, key=numbers, vector=f"vector({binding.dim})"):
            session.execute(statement)
        session.execute(f"ALTER TABLE templates ALTER COLUMN vector SET STORAGE {storage}")
        write_first_rows(session, binding, {})
        session.execute("COMMIT")
