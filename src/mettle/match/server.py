"""Connections to a PostgreSQL server: made when needed, kept when idle, cut when the server does not answer.

Whatever goes wrong comes out as an error of ours, in one line and without the password.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import numpy as np

from mettle.errors import GalleryError, GalleryUnavailable, InputError, MettleError, MissingExtra
from mettle.match.content import FLOATS
from mettle.match.watch import Watch

DEFAULT = "mettle"  # name of a gallery where the URL gives none
NAME = re.compile(r"(?!pg_)[A-Za-z_][A-Za-z0-9_-]{0,62}")
RESERVED = {"public", "information_schema"}
UNREADABLE = "the URL of the PostgreSQL gallery cannot be read: look at its special characters and its options"


class Lost(Exception):
    """The connection broke; ``committing`` when nobody knows whether the change was made."""

    def __init__(self, error: MettleError, committing: bool = False):
        super().__init__(str(error))
        self.error, self.committing = error, committing


@dataclass(frozen=True)
class Packed:
    """A vector in the server's own byte layout."""

    data: bytes


def driver() -> Any:
    """The psycopg module."""
    try:
        import psycopg
    except ImportError:
        raise MissingExtra("a gallery on PostgreSQL needs psycopg: pip install 'psycopg[binary]'") from None
    return psycopg


def address(url: str, name: str | None = None) -> tuple[str, str]:
    """A URL as the driver takes it, and the gallery's name, which ``?gallery=NAME`` may give."""
    if not isinstance(url, str) or not url.startswith(("postgresql://", "postgres://")):
        raise InputError("a PostgreSQL gallery is named by a URL like postgresql://user@host/database?gallery=people")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InputError(UNREADABLE) from None
    query = parse_qsl(parts.query, keep_blank_values=True)
    name = name or dict(query).get("gallery") or DEFAULT
    if not NAME.fullmatch(name) or name in RESERVED:
        raise InputError(f"a gallery on a server is named by up to 63 letters, digits, - and _, got {name!r:.80}")
    rest = urlencode([(key, value) for key, value in query if key != "gallery"], quote_via=quote)
    return urlunsplit(parts._replace(query=rest)), name


class Server:
    """A database on a server, and the connections to it."""

    def __init__(self, url: str, schema: str, *, write: bool, timeout: float):
        self._driver = driver()
        self.schema, self._write, self._timeout = schema, write, float(timeout)
        if not 0 < self._timeout < float("inf"):
            raise InputError(f"timeout must be a number of seconds above 0, got {timeout!r}")
        try:
            self._conninfo = self._driver.conninfo.conninfo_to_dict(url)
        except Exception:  # the driver's message repeats the URL, password and all
            raise InputError(
                "the URL of the PostgreSQL gallery cannot be read: look at its special characters"
            ) from None
        self._watch = Watch()
        self._mutex = threading.Lock()
        self._idle: list[Any] = []
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """A connection for one transaction; a broken one is not kept. Raises `Lost` where it broke."""
        with self._mutex:
            if self._closed:
                raise GalleryError(f"the gallery {self.schema!r} is closed: open it again")
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            yield connection
        except self._driver.Error as error:
            broken = self._give_back(connection)
            told = self.told(error)
            raise (Lost(told) if broken and isinstance(told, GalleryUnavailable) else told) from None
        except BaseException:
            self._give_back(connection)
            raise
        self._give_back(connection)

    def session(self, connection: Any, limit: float | None = None) -> "ServerSession":
        """Statements on a connection, each of which may take ``limit`` seconds."""
        return ServerSession(connection, self._watch, self._timeout if limit is None else limit)

    def forget(self) -> None:
        """Drop idle connections: after a restart none of them is good."""
        with self._mutex:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._discard(connection)

    def close(self) -> None:
        """Close all connections; may be called twice."""
        with self._mutex:
            self._closed = True
        self.forget()
        self._watch.stop()

    def told(self, error: Exception) -> MettleError:
        """An error of the driver in our words."""
        state = getattr(error, "sqlstate", None) or ""
        text = self._clean(str(error))
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

    def _connect(self) -> Any:
        settings = {**self._conninfo, "connect_timeout": max(2, round(self._timeout))}
        settings.setdefault("application_name", "mettle")
        try:
            connection = self._driver.connect(**settings, autocommit=True)
        except self._driver.Error as error:
            raise self._refused(str(error)) from None
        except UnicodeError:
            raise InputError("the URL of the PostgreSQL gallery holds characters that no server takes") from None
        try:
            self._prepare(connection)
        except self._driver.Error as error:
            self._discard(connection)
            raise self.told(error) from None
        except BaseException:
            self._discard(connection)
            raise
        return connection

    def _prepare(self, connection: Any) -> None:
        session = self.session(connection)
        milliseconds = str(max(1, round(1000 * self._timeout)))
        found = session.rows(
            "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace "
            "WHERE e.extname = 'vector'"
        )
        path = ", ".join(f'"{name}"' for name in [self.schema, found[0][0] if found else "public"])
        session.rows(
            "SELECT set_config('search_path', ?, false), set_config('statement_timeout', ?, false), "
            "set_config('lock_timeout', ?, false), set_config('client_encoding', 'UTF8', false)",
            *(path, milliseconds, milliseconds),
        )
        session.rows(  # an owner's stronger setting stays
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
        )
        if not self._write:
            session.rows("SET default_transaction_read_only = on")
        if found:
            oid = session.rows("SELECT oid::int8 FROM pg_type WHERE oid = to_regtype('vector')")[0][0]
            kind = {"oid": oid, "format": self._driver.pq.Format.BINARY, "dump": lambda _, packed: packed.data}
            connection.adapters.register_dumper(Packed, type("PackedDumper", (self._driver.adapt.Dumper,), kind))

    def _refused(self, text: str) -> MettleError:
        """Why there is no connection."""
        user, database = self._conninfo.get("user", "you"), self._conninfo.get("dbname", "")
        if "password" in text or "authentication" in text or "pg_hba" in text or ("role" in text and "exist" in text):
            return GalleryError(
                f"the PostgreSQL server does not let {user!r} in: look at user and password in the URL "
                f"({self._clean(text)})"
            )
        if "database" in text and "does not exist" in text:
            return GalleryError(f"the PostgreSQL server has no database {database!r}: create it, or look at the URL")
        return GalleryUnavailable(
            f"no PostgreSQL server answers there: start it, or look at host and port in the URL ({self._clean(text)})"
        )

    def _clean(self, text: str) -> str:
        """One line, without secrets."""
        line = " ".join(text.split())
        for key, secret in self._conninfo.items():
            if "password" in key and secret:
                line = line.replace(str(secret), "***").replace(quote(str(secret), safe=""), "***")
        return line if len(line) <= 300 else line[:300] + "..."

    def _give_back(self, connection: Any) -> bool:
        """Keep a connection for the next, its transaction ended; returns whether it was broken."""
        broken = bool(connection.closed)
        with suppress(self._driver.Error):
            if not broken and connection.info.transaction_status != self._driver.pq.TransactionStatus.IDLE:
                self.session(connection).rows("ROLLBACK")
        with self._mutex:
            if not self._closed and not connection.closed:
                self._idle.append(connection)
                return broken
        self._discard(connection)
        return broken

    def _discard(self, connection: Any) -> None:
        with suppress(Exception):
            connection.close()


class ServerSession:
    """One transaction on one connection."""

    def __init__(self, connection: Any, watch: Watch, limit: float):
        self._connection, self._watch, self._limit = connection, watch, limit

    def rows(self, sql: str, *values: Any) -> list[tuple]:
        """Run a statement and return what it gives."""
        with self._watch.over(self._connection, self._limit):
            cursor = self._connection.execute(_marks(sql), values or None, binary=True)
            return cursor.fetchall() if cursor.description else []

    def many(self, sql: str, values: Sequence[tuple]) -> None:
        """Run a statement once for each tuple of values."""
        with self._connection.cursor() as cursor:
            for start in range(0, len(values), 1000):
                with self._watch.over(self._connection, self._limit):
                    cursor.executemany(_marks(sql), values[start : start + 1000])

    def each(self, sql: str, batch: int) -> Iterator[list[tuple]]:
        """What a query gives, a part at a time."""
        with self._connection.cursor("mettle_each", binary=True) as cursor:
            with self._watch.over(self._connection, self._limit):
                cursor.execute(sql)
            while True:
                with self._watch.over(self._connection, self._limit):
                    rows = cursor.fetchmany(batch)
                if not rows:
                    return
                yield rows

    def pack(self, row: np.ndarray) -> Packed:
        """A vector as pgvector sends it: count, zero, big-endian numbers."""
        return Packed(len(row).to_bytes(2, "big") + b"\0\0" + row.astype(">f4").tobytes())

    def unpack(self, blob: bytes) -> bytes:
        """A vector as pgvector sends it, as little-endian bytes."""
        return np.frombuffer(blob, ">f4", offset=4).astype(FLOATS).tobytes()


def _marks(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s") if "?" in sql else sql
