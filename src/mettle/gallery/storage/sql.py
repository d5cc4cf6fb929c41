"""The tables of a storage in both dialects, and the statements that every SQL storage is made of.

    metadata           format, binding, salt, checksums of the model's files; once it was calibrated, calibration
    revision_state     one row, `RevisionState`: last change, next template, and what the other tables hold in all
    identities         id, name, how many templates, and the sum of their checksums
    templates          number, identity, sequence (when it came), vector
    deleted_templates  number, sequence, checksum of the template: templates that were there once
    idempotency_keys   name, request_hash (keyed hash of the question), sequence, numbers, skipped: the receipt that a
                       retry gets

Every row ends with its checksum (`integrity`), which is checked where the row is read. Rows that are missing are found
by the sums: of a person's templates in the identity, of a whole table in the state. Where a name is not found that
would be there, had its index not been damaged, `IndexProof` compares that index with its table first.

Every function works inside a transaction that its caller has opened.
"""

import json
import secrets
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import repeat
from operator import lt
from typing import Any, Protocol, cast

import numpy as np

from mettle.errors import GalleryError, GalleryUnavailable, InputError
from mettle.gallery.binding import Binding, binding_from_json, binding_to_json
from mettle.gallery.calibration import CalibrationStatus, calibration_from_json
from mettle.gallery.results import Receipt, Size, Templates
from mettle.gallery.storage.integrity import (
    FLOATS,
    UNIT,
    RevisionState,
    RowSum,
    check_name,
    damage_error,
    identity_checksums,
    row_checksum,
    template_checksums,
)

_STATE_COLUMNS = [entry.name for entry in fields(RevisionState)]

_TABLES = """
CREATE TABLE metadata (key {text} PRIMARY KEY, value {text} NOT NULL, checksum {int} NOT NULL);
CREATE TABLE revision_state (id {int} PRIMARY KEY CHECK (id = 1), {state}, checksum {int} NOT NULL);
CREATE TABLE identities (id {key} PRIMARY KEY, name {text} NOT NULL UNIQUE, templates {int} NOT NULL,
  template_sum {int} NOT NULL, checksum {int} NOT NULL);
CREATE TABLE templates (number {key} PRIMARY KEY, identity {int} NOT NULL REFERENCES identities (id),
  sequence {int} NOT NULL, checksum {int} NOT NULL, vector {vector} NOT NULL);
CREATE INDEX templates_identity ON templates (identity);
CREATE INDEX templates_sequence ON templates (sequence);
CREATE TABLE deleted_templates (number {key} PRIMARY KEY, sequence {int} NOT NULL, template_checksum {int} NOT NULL,
  checksum {int} NOT NULL);
CREATE INDEX deleted_templates_sequence ON deleted_templates (sequence);
CREATE TABLE idempotency_keys (name {text} PRIMARY KEY, request_hash {text} NOT NULL, sequence {int} NOT NULL,
  numbers {text} NOT NULL, skipped {int} NOT NULL, checksum {int} NOT NULL);
CREATE INDEX idempotency_keys_sequence ON idempotency_keys (sequence);
"""


def table_statements(*, text: str, integer: str, key: str, vector: str) -> list[str]:
    """CREATE statements in a dialect's types."""
    state = ", ".join(f"{name} {integer} NOT NULL" for name in _STATE_COLUMNS)
    made = _TABLES.format(text=text, int=integer, key=key, vector=vector, state=state)
    return [" ".join(part.split()) for part in made.split(";") if part.strip()]


SQLITE_TABLES = table_statements(text="TEXT", integer="INTEGER", key="INTEGER", vector="BLOB")

FORMAT = 1
FIXED = ("format", "binding", "salt", "model_files")  # keys of metadata that never change
REMEMBERED = 100_000  # changes whose deletions and requests survive `compact`
BATCH = 8192  # rows of a query held at one time
PAGE = 500  # values in one statement: every database takes as many
FINDINGS = 100  # lines of `check`: more would help nobody
TEMPLATE_COLUMNS = "t.number, t.identity, t.sequence, t.checksum, t.vector"
IDENTITY_COLUMNS = "i.id, i.name, i.templates, i.template_sum, i.checksum"
OWNED_TEMPLATES = (
    f"SELECT {TEMPLATE_COLUMNS}, i.name, i.templates, i.template_sum, i.checksum "
    "FROM templates t LEFT JOIN identities i ON i.id = t.identity"
)
TEMPLATES_OF = (
    f"SELECT {TEMPLATE_COLUMNS}, {IDENTITY_COLUMNS} FROM identities i "
    "LEFT JOIN templates t ON t.identity = i.id WHERE i.name = ? ORDER BY t.number"
)
STATE = f"SELECT {', '.join(_STATE_COLUMNS)}, checksum FROM revision_state"
STATE_MARK = "SELECT sequence, checksum FROM revision_state"  # tells whether the state is the one read last
SUMS = "count(*), CAST(coalesce(sum(checksum), 0) AS BIGINT)"


class Transaction(Protocol):
    """One transaction of a database. Values stand as ``?``."""

    def execute(self, sql: str, *values: Any) -> list[tuple]:
        """Run a statement and return what it gives."""
        ...

    def executemany(self, sql: str, values: Sequence[tuple]) -> None:
        """Run a statement once for each tuple of values."""
        ...

    def stream(self, sql: str, batch: int) -> Iterator[list[tuple]]:
        """What a query gives, a part at a time."""
        ...

    def encode_vector(self, row: np.ndarray) -> Any:
        """A vector as this database takes it."""
        ...

    def decode_vectors(self, blobs: Sequence[bytes], dim: int) -> Sequence[bytes]:
        """Vectors as this database gives them, as little-endian float32 bytes."""
        ...


@dataclass(frozen=True)
class IdentityRow:
    """Somebody enrolled, and what belongs to them."""

    id: int
    name: str
    templates: int
    template_sum: int

    @classmethod
    def from_row(cls, row: tuple) -> "IdentityRow":
        """What a row of `IDENTITY_COLUMNS` says."""
        check_identities([row])
        return cls(*row[:4])

    @property
    def checksum(self) -> int:
        """Of the row."""
        return identity_checksums([self.id], [self.templates], [self.template_sum], [self.name])[0]


def check_identities(rows: Sequence[Sequence[Any]]) -> Sequence[str]:
    """The names in rows of `IDENTITY_COLUMNS`, if all of them are as they were written."""
    return _check_identity_columns(*zip(*rows, strict=True)) if rows else ()


def _check_identity_columns(
    ids: Sequence[int],
    names: Sequence[str],
    templates: Sequence[int],
    template_sums: Sequence[int],
    checksums: Sequence[int],
) -> Sequence[str]:
    try:
        sound = identity_checksums(ids, templates, template_sums, names) == list(checksums)
    except (struct.error, TypeError, UnicodeError):
        sound = False
    if not sound and len(ids) > 1:
        check_each(_check_identity_columns, ids, names, templates, template_sums, checksums)
    if not sound:
        raise damage_error(f"identity {ids[0]} fails its checksum")
    return names


def check_each(check: Callable[..., object], *columns: Sequence[Any]) -> None:
    """Check row by row what failed as a whole, so that the error is of the first row that is damaged."""
    for row in zip(*columns, strict=True):
        check(*((value,) for value in row))


@dataclass
class IndexProof:
    """Which indexes by name were compared with their tables since the storage was opened.

    A row that is read proves itself; one that is not found proves nothing, since the way to it may be damaged. So the
    first time that somebody is not found, all names of the index are read once.
    """

    tables: set[str] = field(default_factory=set)


def prove_identities(session: Transaction, state: RevisionState, proof: IndexProof) -> None:
    """Refuse identities that are not those that were written, or that their names do not lead to."""
    parts = session.stream(f"SELECT {IDENTITY_COLUMNS} FROM identities i", BATCH)
    entries = ((check_identities(part), [row[4] for row in part]) for part in parts)
    _prove(session, proof, "identities", entries, state.identities, state.identity_sum)


def prove_requests(session: Transaction, state: RevisionState, proof: IndexProof) -> None:
    """Refuse requests that are not those that were written, or that their names do not lead to."""
    parts = session.stream(f"SELECT {REQUEST_COLUMNS} FROM idempotency_keys", BATCH)
    entries = (([row[0] for row in part], [check_request(row) for row in part]) for part in parts)
    _prove(session, proof, "idempotency_keys", entries, state.requests, state.request_sum)


def _prove(
    session: Transaction,
    proof: IndexProof,
    table: str,
    entries: Iterator[tuple[Sequence[str], Sequence[int]]],
    rows: int,
    checksums: int,
) -> None:
    if table in proof.tables:
        return
    words, checked, named, listed, last = table.replace("_", " "), RowSum(), RowSum(), RowSum(), ""
    for names, sums in entries:
        checked.add(sum(sums), len(sums))
        named.add(sum(map(zlib.crc32, map(str.encode, names))), len(names))
    checked.compare(rows, checksums, words)
    for part in session.stream(f"SELECT name FROM {table} ORDER BY name", BATCH):
        found = [row[0] for row in part]
        check_order(found, last, words)
        listed.add(sum(map(zlib.crc32, map(str.encode, found))), len(found))
        last = found[-1]
    listed.compare(named.rows, named.checksums, f"names in the index of {words}")
    proof.tables.add(table)


def check_order(names: Sequence[Any], last: str, words: str) -> None:
    """Refuse names from an index that do not rise, or do not follow ``last``."""
    if any(type(name) is not str for name in names) or not all(map(lt, [last, *names], names)):
        raise damage_error(f"the names in the index of {words} are not in order")


def write_first_rows(session: Transaction, binding: Binding, model_files: Mapping[str, str]) -> None:
    """What stands in a new storage."""
    texts = (str(FORMAT), binding_to_json(binding), secrets.token_hex(32), json.dumps(dict(model_files)))
    rows = [(key, value, row_checksum("metadata", key, value)) for key, value in zip(FIXED, texts, strict=True)]
    session.executemany("INSERT INTO metadata VALUES (?, ?, ?)", rows)
    state = RevisionState(metadata_sum=sum(row[2] for row in rows))
    marks = ", ".join("?" * (1 + len(state.row())))
    session.execute(f"INSERT INTO revision_state VALUES ({marks})", 1, *state.row())


@dataclass(frozen=True)
class FixedMetadata:
    """What is written once, when a storage is made."""

    binding: Binding
    salt: str  # key of what stands for names where they must not be kept
    model_files: Mapping[str, str]  # SHA-256 of the copy of the model beside the storage


def read_fixed_metadata(session: Transaction) -> FixedMetadata:
    """Binding, salt and the model's files; refuses a storage that another mettle wrote."""
    rows = session.execute("SELECT key, value, checksum FROM metadata")
    entries = {row[0]: _metadata_value(row) for row in rows if row[0] in FIXED}
    written = entries.get("format", "")
    if not written.isdecimal() or len(entries) < len(FIXED):
        raise GalleryError("the storage does not say its format: it is damaged, restore a snapshot")
    if int(written) != FORMAT:
        raise GalleryError(f"a newer mettle wrote this gallery (format {written}, known is {FORMAT}): upgrade mettle")
    return FixedMetadata(binding_from_json(entries["binding"]), entries["salt"], json.loads(entries["model_files"]))


def _metadata_value(row: tuple) -> str:
    key, value, checksum = row
    if not isinstance(value, str) or row_checksum("metadata", key, value) != checksum:
        raise damage_error(f"{key!r:.80} of the metadata fails its checksum")
    return value


def read_calibration(session: Transaction, state: RevisionState) -> str | None:
    """The calibration as it is written, None where there is none; refused where it cannot be told."""
    rows = session.execute("SELECT key, value, checksum FROM metadata")
    try:
        found = {row[0]: _metadata_value(row) for row in rows}
        RowSum(0, sum(row[2] for row in rows)).compare(0, state.metadata_sum, "entries of the metadata")
        if ("calibration" in found) != (state.calibrated_since > 0):
            raise damage_error("the metadata are incomplete")
    except (GalleryError, TypeError):
        raise GalleryError(CALIBRATION_DAMAGED) from None
    return found.get("calibration")


CALIBRATION_DAMAGED = (
    "the calibration in the storage is damaged: calibrate again, or forget it (`mettle gallery calibrate --forget`) to "
    "answer by the model's thresholds"
)


def write_calibration(session: Transaction, state: RevisionState, text: str | None, sequence: int) -> RevisionState:
    """Write a calibration that was measured after change ``sequence`` in the place of the former; None: none."""
    session.execute(f"DELETE FROM metadata WHERE key NOT IN ({', '.join('?' * len(FIXED))})", *FIXED)
    added = 0
    if text is not None:
        checksum = row_checksum("metadata", "calibration", text)
        session.execute("INSERT INTO metadata (key, value, checksum) VALUES ('calibration', ?, ?)", text, checksum)
        added = session.execute("SELECT count(*) FROM templates WHERE sequence > ?", sequence)[0][0]
    total = sum(row[0] for row in session.execute("SELECT checksum FROM metadata"))
    return replace(state, metadata_sum=total, calibrated_since=0 if text is None else sequence + 1, added=added)


def read_standing(session: Transaction) -> CalibrationStatus | None:
    """The calibration, and what has changed since."""
    state = read_state(session)
    if (text := read_calibration(session, state)) is None:
        return None
    return CalibrationStatus(calibration_from_json(text), state.identities, state.templates, state.added)


def read_state(session: Transaction) -> RevisionState:
    """How far the storage has come and what it holds."""
    rows = session.execute(STATE)
    if len(rows) != 1:
        raise damage_error("the state of the revision is missing")
    return RevisionState.from_row(rows[0])


def write_state(session: Transaction, state: RevisionState) -> None:
    """Write how far the storage has come."""
    assigned = ", ".join(f"{name} = ?" for name in [*_STATE_COLUMNS, "checksum"])
    session.execute(f"UPDATE revision_state SET {assigned}", *state.row())


def forget_history(session: Transaction) -> None:
    """Drop requests and deletions of long ago."""
    state = read_state(session)
    oldest = state.sequence - REMEMBERED
    if oldest <= 0:
        return
    rows, total = session.execute(f"SELECT {SUMS} FROM idempotency_keys WHERE sequence <= ?", oldest)[0]
    session.execute("DELETE FROM idempotency_keys WHERE sequence <= ?", oldest)
    session.execute("DELETE FROM deleted_templates WHERE sequence <= ?", oldest)
    state = replace(state, requests=state.requests - rows, request_sum=state.request_sum - total)
    write_state(session, replace(state, oldest_sequence=max(oldest, state.oldest_sequence)))


def size_of(state: RevisionState) -> Size:
    """How much is enrolled."""
    return Size(state.identities, state.templates)


def find_identity(session: Transaction, name: str, state: RevisionState, proof: IndexProof) -> IdentityRow | None:
    """Whoever is enrolled under exactly this name, None where nobody is."""
    found = session.execute(f"SELECT {IDENTITY_COLUMNS} FROM identities i WHERE i.name = ?", name)
    if not found:
        prove_identities(session, state, proof)
        return None
    row = IdentityRow.from_row(found[0])
    if row.name != name:
        raise damage_error(f"the index of names leads from {name!r:.80} to somebody else")
    return row


def insert_identities(session: Transaction, rows: Sequence[IdentityRow]) -> None:
    """Add new identities."""
    values = [(row.id, check_name(row.name), row.templates, row.template_sum, row.checksum) for row in rows]
    session.executemany(
        "INSERT INTO identities (id, name, templates, template_sum, checksum) VALUES (?, ?, ?, ?, ?)", values
    )


def update_identities(session: Transaction, rows: Sequence[IdentityRow]) -> None:
    """Write what belongs to identities that are there."""
    values = [(row.templates, row.template_sum, row.checksum, row.id) for row in rows]
    session.executemany("UPDATE identities SET templates = ?, template_sum = ?, checksum = ? WHERE id = ?", values)


def read_identities(session: Transaction, state: RevisionState) -> dict[int, str]:
    """All names by id, and none of them missing."""
    names, total = {}, RowSum()
    for part in session.stream(f"SELECT {IDENTITY_COLUMNS} FROM identities i", BATCH):
        names |= zip((row[0] for row in part), check_identities(part), strict=True)
        total.add(sum(row[4] for row in part), len(part))
    total.compare(state.identities, state.identity_sum, "identities")
    return names


REQUEST_COLUMNS = "name, request_hash, sequence, numbers, skipped, checksum"


def check_request(row: tuple) -> int:
    """The checksum of a row of `REQUEST_COLUMNS`, if that is the one it carries."""
    *values, checksum = row
    if type(values[0]) is not str or row_checksum("idempotency_keys", *values) != checksum:
        raise damage_error(f"request {values[0]!r:.80} fails its checksum")
    return checksum


def find_receipt(
    session: Transaction, request: str | None, asked: Collection[str], state: RevisionState, proof: IndexProof
) -> Receipt | None:
    """The receipt of a request that was served before, for any of these questions: spellings of one name."""
    if request is None:
        return None
    found = session.execute(f"SELECT {REQUEST_COLUMNS} FROM idempotency_keys WHERE name = ?", request)
    if not found:
        prove_requests(session, state, proof)
        return None
    check_request(found[0])
    name, question, sequence, numbers, skipped, _ = found[0]
    if name != request:
        raise damage_error(f"the index of requests leads from {request!r:.80} to another")
    if question not in asked:
        raise InputError(f"request {request!r:.80} was used before for something else: give every request its own name")
    return Receipt(sequence, tuple(json.loads(numbers)), repeated=True, skipped=skipped)


def write_receipt(
    session: Transaction, request: str | None, asked: str, receipt: Receipt, state: RevisionState
) -> Receipt:
    """Write down that a change was made, for whom, and what the storage holds now."""
    state = replace(state, sequence=receipt.sequence)
    if request is not None:
        row = (request, asked, receipt.sequence, json.dumps(receipt.numbers), receipt.skipped)
        checksum = row_checksum("idempotency_keys", *row)
        session.execute("INSERT INTO idempotency_keys VALUES (?, ?, ?, ?, ?, ?)", *row, checksum)
        state = replace(state, requests=state.requests + 1, request_sum=state.request_sum + checksum)
    write_state(session, state)
    return receipt


def insert_templates(
    session: Transaction, rows: Sequence[tuple[int, int, np.ndarray]], checksums: Sequence[int], sequence: int
) -> None:
    """Add templates: number, id of the identity, vector."""
    session.executemany(
        "INSERT INTO templates (number, identity, sequence, checksum, vector) VALUES (?, ?, ?, ?, ?)",
        [
            (number, owner, sequence, checksum, session.encode_vector(row))
            for (number, owner, row), checksum in zip(rows, checksums, strict=True)
        ],
    )


def checksums_of_rows(rows: Sequence[tuple[int, int, np.ndarray]], sequence: int) -> list[int]:
    """Checksums of templates that are added: number, id of the identity, vector."""
    numbers, owners, vectors = zip(*rows, strict=True) if rows else ((), (), ())
    return template_checksums(numbers, owners, repeat(sequence), (row.tobytes() for row in vectors))


class AddedRows:
    """Templates of a change, and whose they are, that are written together: one statement for each table."""

    def __init__(self, state: RevisionState, sequence: int):
        self.state, self.sequence = state, sequence  # as written; of the change
        self._new: list[IdentityRow] = []
        self._grown: list[tuple[IdentityRow, int, bool]] = []  # as written, how many templates came, whether instead
        self._rows: list[tuple[int, int, np.ndarray]] = []

    def add(self, name: str, owner: IdentityRow | None, vectors: np.ndarray, *, emptied: bool = False) -> None:
        """Take in the templates of one identity: a new one without an owner, ``emptied`` one whose own were removed."""
        if owner is None:
            owner = IdentityRow(self.state.next_identity + len(self._new), name, 0, 0)
            self._new.append(owner)
        number = self.state.next_number + len(self._rows)
        self._rows += [(number + i, owner.id, row) for i, row in enumerate(vectors)]
        if len(vectors) or emptied:
            self._grown.append((owner, len(vectors), emptied))

    def write(self, session: Transaction) -> RevisionState:
        """Write all of it; returns the state with it."""
        checksums, at, now = checksums_of_rows(self._rows, self.sequence), 0, list[IdentityRow]()
        for owner, count, emptied in self._grown:
            templates, total = (0, 0) if emptied else (owner.templates, owner.template_sum)
            total += sum(checksums[at : at + count])
            now.append(IdentityRow(owner.id, owner.name, templates + count, total))
            at += count
        new = {owner.id for owner in self._new}
        insert_identities(session, [row for row in now if row.id in new])
        update_identities(session, [row for row in now if row.id not in new])
        insert_templates(session, self._rows, checksums, self.sequence)
        before = sum(owner.checksum for owner, _, _ in self._grown if owner.id not in new)
        self.state = replace(
            self.state,
            next_number=self.state.next_number + len(checksums),
            next_identity=self.state.next_identity + len(new),
            identities=self.state.identities + len(new),
            identity_sum=self.state.identity_sum + sum(row.checksum for row in now) - before,
            templates=self.state.templates + len(checksums),
            template_sum=self.state.template_sum + sum(checksums),
            added=self.state.added + (len(checksums) if self.state.calibrated_since else 0),
        )
        self._new, self._grown, self._rows = [], [], []
        return self.state


def remove_templates(
    session: Transaction, owner: IdentityRow, sequence: int, state: RevisionState
) -> tuple[tuple[int, ...], RevisionState]:
    """Take all templates of one identity away and remember that they were there."""
    chosen = "SELECT number, sequence, checksum FROM templates WHERE identity = ? ORDER BY number"
    gone = session.execute(chosen, owner.id)
    total = sum(row[2] for row in gone)
    RowSum(len(gone), total).compare(owner.templates, owner.template_sum, f"templates of identity {owner.id}")
    session.executemany(
        "INSERT INTO deleted_templates (number, sequence, template_checksum, checksum) VALUES (?, ?, ?, ?)",
        [
            (number, sequence, checksum, row_checksum("deleted_templates", number, sequence, checksum))
            for number, _, checksum in gone
        ],
    )
    session.execute("DELETE FROM templates WHERE identity = ?", owner.id)
    return tuple(row[0] for row in gone), replace(
        state,
        templates=state.templates - len(gone),
        template_sum=state.template_sum - total,
        added=state.added - sum(0 < state.calibrated_since <= row[1] for row in gone),
    )


def read_deleted(session: Transaction, after: int) -> tuple[list[int], list[int]]:
    """Numbers and checksums of templates that were deleted after a change."""
    columns = "number, sequence, template_checksum, checksum"
    gone = session.execute(f"SELECT {columns} FROM deleted_templates WHERE sequence > ? ORDER BY +number", after)
    for *values, checksum in gone:
        if row_checksum("deleted_templates", *values) != checksum:
            raise damage_error(f"deleted template {values[0]} fails its checksum")
    return [row[0] for row in gone], [row[2] for row in gone]


def name_owners(session: Transaction, rows: Sequence[tuple], dim: int) -> dict[int, str]:
    """Whose templates rows of `OWNED_TEMPLATES` are, by number, if both the template and the owner are as written."""
    if not rows:
        return {}
    columns = list(zip(*rows, strict=True))
    _check_templates(session, dim, *columns[:5])
    return dict(zip(columns[0], _check_owners(columns), strict=True))


def decode_owned(session: Transaction, rows: Sequence[tuple], dim: int) -> Templates:
    """Rows of `OWNED_TEMPLATES` as arrays; a row, or an owner, that fails its checksum is never given out."""
    columns = list(zip(*rows, strict=True)) or [()] * 9
    return _decode_columns(session, dim, columns[:5], _check_owners(columns))


def decode_templates(session: Transaction, rows: Sequence[tuple], dim: int, names: Mapping[int, str]) -> Templates:
    """Rows of `TEMPLATE_COLUMNS` as arrays; a row that fails its checksum is never given out."""
    columns = list(zip(*rows, strict=True)) or [()] * 5
    return _decode_columns(session, dim, columns, tuple(map(names.get, columns[1])))


def _check_owners(columns: Sequence[tuple]) -> Sequence[str]:
    """The names in columns of `OWNED_TEMPLATES`."""
    numbers, identities, names = columns[0], columns[1], columns[5]
    if None in names:
        raise damage_error(f"template {numbers[names.index(None)]} is nobody's")
    return _check_identity_columns(identities, *columns[5:])


def _check_templates(
    session: Transaction,
    dim: int,
    numbers: Sequence[int],
    identities: Sequence[int],
    sequences: Sequence[int],
    checksums: Sequence[int],
    blobs: Sequence[Any],
) -> Sequence[bytes]:
    """The vectors in columns of `TEMPLATE_COLUMNS`, if all rows are as they were written."""
    vectors = session.decode_vectors(blobs, dim)
    try:
        sound = template_checksums(numbers, identities, sequences, vectors) == list(checksums)
        sound = sound and {*map(len, vectors)} <= {dim * FLOATS.itemsize}
    except (struct.error, TypeError):
        sound = False
    if not sound and len(numbers) > 1:
        check_each(partial(_check_templates, session, dim), numbers, identities, sequences, checksums, blobs)
    if not sound:
        raise damage_error(f"template {numbers[0]} fails its checksum")
    return vectors


def _decode_columns(session: Transaction, dim: int, columns: Sequence[tuple], names: Sequence[str | None]) -> Templates:
    """Columns of `TEMPLATE_COLUMNS`, and whose they are, as arrays."""
    vectors = np.frombuffer(bytearray().join(_check_templates(session, dim, *columns)), FLOATS).reshape(-1, dim)
    numbers, _, _, checksums, _ = columns
    if None in names:
        raise damage_error(f"template {numbers[names.index(None)]} is nobody's")
    off = np.abs(np.einsum("nd,nd->n", vectors, vectors) - 1)
    if not off.max(initial=0) <= 2 * UNIT:  # written so that NaN is wrong too
        raise damage_error(f"template {numbers[np.flatnonzero(~(off <= 2 * UNIT))[0]]} is not of unit length")
    as_ints = np.array([numbers, checksums], np.int64)
    whose = cast(tuple[str, ...], tuple(names))
    return Templates(as_ints[0], whose, vectors.astype(np.float32, copy=False), as_ints[1])


def find_damage(session: Transaction, dim: int) -> list[str]:
    """What is wrong with rows and sums, in words; never raises for a damaged row."""
    found: list[str] = []
    state = _listed(found, lambda: read_state(session))
    _listed(found, lambda: read_fixed_metadata(session))
    known: dict[int, IdentityRow] = {}
    total = RowSum()
    for part in session.stream(f"SELECT {IDENTITY_COLUMNS} FROM identities i", BATCH):
        rows = _sound_rows(found, part, check_identities)
        known |= {row[0]: IdentityRow(*row[:4]) for row in rows}
        total.add(sum(row[4] for row in part if isinstance(row[4], int)), len(part))
    if state is not None:
        _listed(found, lambda: total.compare(state.identities, state.identity_sum, "identities"))
    names, total = {number: row.name for number, row in known.items()}, RowSum()
    late, counts, sums = 0, dict.fromkeys(known, 0), dict.fromkeys(known, 0)
    for part in session.stream(f"SELECT {TEMPLATE_COLUMNS} FROM templates t ORDER BY t.number", BATCH):
        for number, owner, sequence, checksum, _ in _sound_rows(
            found, part, lambda rows: decode_templates(session, rows, dim, names)
        ):
            counts[owner] += 1
            sums[owner] += checksum
            late += state is not None and not (0 < number < state.next_number and sequence <= state.sequence)
    total.add(sum(sums.values()), sum(counts.values()))
    if late:
        found.append(f"{late} templates come from changes that were never made: restore a snapshot")
    if state is not None:
        _listed(found, lambda: total.compare(state.templates, state.template_sum, "templates"))
    for owner in known.values():
        here = RowSum(counts[owner.id], sums[owner.id])
        if here != RowSum(owner.templates, owner.template_sum):
            with list_damage(found):
                here.compare(owner.templates, owner.template_sum, f"templates of identity {owner.id}")
        if not here.rows and not owner.templates:
            found.append(f"identity {owner.id} has no template: restore a snapshot")
    if state is not None:
        _find_damaged_history(session, state, found)
    return found


def _sound_rows(found: list[str], rows: Sequence[tuple], check: Callable[[Sequence[tuple]], object]) -> Sequence[tuple]:
    """The rows that pass a check, tried as a whole first; what is wrong with the others is listed."""
    try:
        check(rows)
        return rows
    except GalleryUnavailable:
        raise
    except GalleryError:
        return [row for row in rows if _listed(found, lambda row=row: check([row])) is not None]


def _find_damaged_history(session: Transaction, state: RevisionState, found: list[str]) -> None:
    """Damage of calibration, requests and deletions, and of the indexes by name."""
    proof = IndexProof()
    _listed(found, lambda: prove_identities(session, state, proof))
    _listed(found, lambda: prove_requests(session, state, proof))
    _listed(found, lambda: read_deleted(session, -1))
    standing = _listed(found, lambda: read_standing(session))
    if standing is not None and standing.calibration.sequence > state.sequence:
        found.append("the calibration comes from a change that was never made: calibrate again, or forget it")
    there = "deleted_templates d WHERE EXISTS (SELECT 1 FROM templates t WHERE t.number = d.number)"
    if count := session.execute(f"SELECT count(*) FROM {there}")[0][0]:
        found.append(f"{count} deleted templates are there: restore a snapshot")


@contextmanager
def list_damage(found: list[str]) -> Iterator[None]:
    """Add the damage that is found in the block to a list, instead of raising it."""
    try:
        yield
    except GalleryUnavailable:
        raise
    except GalleryError as problem:
        if str(problem) not in found:
            found.append(str(problem))


def _listed(found: list[str], look: Any) -> Any:
    """What ``look`` gives, None where it finds damage, which is listed."""
    with list_damage(found):
        return look()
