"""A gallery's record on a PostgreSQL server with pgvector: when one machine is too small, or several must write.

One schema per gallery, any number of writers: a change holds the row of the counter until it is committed, so that
sequence numbers follow each other without a gap in the order of the commits.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mettle.errors import GalleryError, GalleryUnavailable, InputError
from mettle.match import content, schema, statements
from mettle.match.ledger import Ledger, Result
from mettle.match.record import Binding, Receipt
from mettle.match.server import Lost, Server, ServerSession, address
from mettle.match.statements import Session

WIDEST, WIDEST_INDEXED, INLINE = 16000, 2000, 1900  # numbers in a vector: at all, under an index, inside its row
PATIENT = 24 * 3600.0  # seconds for what rewrites or checks everything
KINDS = ("exact", "hnsw")

LACKING = (
    "the PostgreSQL server lacks pgvector ({why}): install it there and let the database's owner run "
    "CREATE EXTENSION vector"
)


class PostgresRecord(Ledger):
    """Templates on a server; made by `create` and opened by `open`. ``?gallery=NAME`` in the URL names the gallery."""

    kind = "postgresql"

    def __init__(self, server: Server, write: bool):
        self._server, self._writes = server, write
        try:
            if not _is_there(server):
                raise GalleryError(
                    f"there is no gallery {server.schema!r} in this database: create it, or look at the URL"
                )
            self._binding, self._salt = self._read(statements.read_facts)
        except BaseException:
            server.close()
            raise

    @classmethod
    def create(cls, url: str, binding: Binding, *, name: str | None = None, timeout: float = 5.0) -> "PostgresRecord":
        """Make a new record and open it for writing; refuses an existing one."""
        url, name = address(url, name)
        content.to_json(binding)
        if binding.dim > WIDEST:
            raise InputError(f"dim of a gallery on PostgreSQL must be at most {WIDEST}, got {binding.dim}")
        server = Server(url, name, write=True, timeout=timeout)
        try:
            _extend(server)
            _build(server, binding)
        except Lost as lost:
            raise lost.error from None
        finally:
            server.close()
        return cls.open(url, name=name, timeout=timeout)

    @classmethod
    def open(cls, url: str, *, name: str | None = None, write: bool = True, timeout: float = 5.0) -> "PostgresRecord":
        """Open a record; no statement may take longer than ``timeout`` seconds."""
        url, name = address(url, name)
        return cls(Server(url, name, write=write, timeout=timeout), write)

    @classmethod
    def exists(cls, url: str, *, name: str | None = None, timeout: float = 5.0) -> bool:
        """Whether there is a gallery of that name."""
        url, name = address(url, name)
        server = Server(url, name, write=False, timeout=timeout)
        try:
            return _is_there(server)
        finally:
            server.close()

    def search(self, probes: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k templates nearest to each probe, found by the server: cosines and numbers, padded by -inf and -1."""
        rows = content.vectors(probes, self._binding.dim, "probes")
        if not isinstance(k, int | np.integer) or k < 1:
            raise InputError(f"k must be a whole number above 0, got {k!r}")
        k = int(k)

        def work(session: Session) -> list[list[tuple]]:
            if self._indexed(session):
                session.rows("SELECT set_config('hnsw.ef_search', ?, true)", str(min(1000, max(100, 2 * k))))
                session.rows("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")
            sql = f"SELECT -(vector <#> ?) AS score, number FROM templates ORDER BY vector <#> ?, number LIMIT {k}"
            packed = [session.pack(row) for row in rows]
            return [session.rows(sql, probe, probe) for probe in packed]

        scores = np.full((len(rows), k), -np.inf, np.float32)
        numbers = np.full((len(rows), k), -1, np.int64)
        for i, found in enumerate(self._read(work)):
            if found:
                scores[i, : len(found)], numbers[i, : len(found)] = zip(*found, strict=True)
        return scores, numbers

    def index(self, kind: str = "hnsw") -> None:
        """Let `search` go through an approximate index ("hnsw"), or through all templates ("exact")."""
        if kind not in KINDS:
            raise InputError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if kind == "hnsw" and self._binding.dim > WIDEST_INDEXED:
            raise InputError(
                f"hnsw takes at most {WIDEST_INDEXED} numbers a template, got {self._binding.dim}: use exact"
            )
        statements = ["DROP INDEX IF EXISTS templates_hnsw"]
        if kind == "hnsw":
            statements.append("CREATE INDEX templates_hnsw ON templates USING hnsw (vector vector_ip_ops)")
        self._maintain(*statements)

    def compact(self) -> None:
        """Rewrite the tables without what was deleted.

        The server's own log and backups keep changes for as long as the server is told to: that is its owner's part.
        """
        self._write(lambda session: (statements.forget(session), Receipt(0, ()))[1], named=True)
        kept = self._maintain(*(f"VACUUM (FULL, VERBOSE) {table}" for table in ("templates", "identities", "requests")))
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
        return self._read(lambda session: int(session.rows(sql, self._server.schema)[0][0]))

    def for_writing(self) -> None:
        """Refuse, where it was opened for reading."""
        if not self._writes:
            raise GalleryError(f"the gallery {self._server.schema!r} was opened for reading: open it for writing")

    def close(self) -> None:
        """Close the connections; may be called twice."""
        self._server.close()

    def _nameless(self) -> str:
        # A name for every change: after a lost connection it tells whether the change was made.
        return f"unnamed {secrets.token_hex(16)}"

    def _indexed(self, session: Session) -> bool:
        sql = "SELECT 1 FROM pg_indexes WHERE schemaname = ? AND indexname = 'templates_hnsw'"
        return bool(session.rows(sql, self._server.schema))

    def _read(self, work: Callable[[Session], Result]) -> Result:
        def attempt() -> Result:
            with self._transaction() as session:
                return work(session)

        return self._twice(attempt, named=True)

    @contextmanager
    def _reading(self) -> Iterator[ServerSession]:
        try:
            with self._transaction() as session:
                yield session
        except Lost as lost:
            raise lost.error from None

    @contextmanager
    def _transaction(self) -> Iterator[ServerSession]:
        with self._server.connection() as connection:
            session = self._server.session(connection)
            session.rows("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield session
            session.rows("COMMIT")

    def _write(self, work: Callable[[Session], Receipt], *, named: bool = False) -> Receipt:
        self.for_writing()

        def attempt() -> Receipt:
            committing = False
            try:
                with self._server.connection() as connection:
                    session = self._server.session(connection)
                    session.rows("BEGIN")
                    session.rows("SELECT 1 FROM counter FOR UPDATE")  # one writer at a time, until the commit
                    receipt = work(session)
                    committing = True
                    session.rows("COMMIT")
                    return receipt
            except Lost as lost:
                raise Lost(lost.error, committing) from None

        return self._twice(attempt, named=named)

    def _twice(self, attempt: Callable[[], Result], *, named: bool) -> Result:
        """Try again once where the connection was lost: after a restart of the server all old ones are dead."""
        unsure = False
        try:
            return attempt()
        except Lost as lost:
            unsure = lost.committing
            if unsure and not named:
                raise self._unsure() from None
            self._server.forget()
        try:
            return attempt()
        except Lost as lost:
            if unsure or lost.committing:
                raise self._unsure() from None
            raise lost.error from None
        except GalleryUnavailable:
            if unsure:
                raise self._unsure() from None
            raise

    def _unsure(self) -> GalleryUnavailable:
        return GalleryUnavailable(
            f"the server of the gallery {self._server.schema!r} went away while it committed: it has made the whole "
            "change or nothing of it; ask again under the same request name"
        )

    def _maintain(self, *statements: str) -> list[str]:
        """Run statements outside transactions, with all the time they need; returns what the server remarked."""
        self.for_writing()
        remarks: list[str] = []

        def attempt() -> None:
            with self._server.connection() as connection:
                session = self._server.session(connection, PATIENT)

                def heard(remark: Any) -> None:
                    remarks.append(" ".join(f"{remark.message_primary} {remark.message_detail}".split()))

                connection.add_notice_handler(heard)
                session.rows("SET statement_timeout = 0")
                try:
                    for statement in statements:
                        session.rows(statement)
                finally:
                    connection.close()  # its settings are not for others

        self._twice(attempt, named=True)
        return remarks


def _is_there(server: Server) -> bool:
    sql = "SELECT count(*) FROM pg_tables WHERE schemaname = ? AND tablename IN ('facts', 'counter', 'templates')"
    try:
        with server.connection() as connection:
            return server.session(connection).rows(sql, server.schema)[0][0] == 3
    except Lost as lost:
        raise lost.error from None


def _extend(server: Server) -> None:
    """See that the database has pgvector and speaks UTF-8."""
    from psycopg import errors

    with server.connection() as connection:
        session = server.session(connection)
        encoding = session.rows("SELECT current_setting('server_encoding')")[0][0]
        if encoding != "UTF8":
            raise GalleryError(f"the database is encoded as {encoding}, names need UTF8: create another database")
        if session.rows("SELECT 1 FROM pg_extension WHERE extname = 'vector'"):
            return
        try:
            session.rows("CREATE EXTENSION IF NOT EXISTS vector")
        except errors.InsufficientPrivilege:
            raise GalleryError(LACKING.format(why="and this user may not add it")) from None
        except (errors.FeatureNotSupported, errors.UndefinedFile, errors.UndefinedObject):
            raise GalleryError(LACKING.format(why="no such extension")) from None
    server.forget()  # connections made before know nothing of vectors


def _build(server: Server, binding: Binding) -> None:
    from psycopg import errors

    storage = "PLAIN" if binding.dim <= INLINE else "EXTERNAL"  # a vector outside its row is slow to scan
    with server.connection() as connection:
        session = server.session(connection)
        session.rows("BEGIN")
        try:
            session.rows(f'CREATE SCHEMA "{server.schema}"')
        except (errors.DuplicateSchema, errors.UniqueViolation):
            raise GalleryError(
                f"the database has a gallery or schema {server.schema!r} already: open it, or choose another name"
            ) from None
        for statement in schema.POSTGRES.format(dim=binding.dim, storage=storage).split(";"):
            if statement.strip():
                session.rows(statement)
        statements.first_rows(session, binding)
        session.rows("COMMIT")
