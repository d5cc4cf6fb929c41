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
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

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
    row_checksum,
    template_checksum,
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
PAGE = 500  # values in one statement: every database takes as many
FINDINGS = 100  # lines of `check`: more would help nobody
TEMPLATE_COLUMNS = "t.number, t.identity, t.sequence, t.checksum, t.vector"
IDENTITY_COLUMNS = "i.id, i.name, i.templates, i.template_sum, i.checksum"
OWNED_TEMPLATES = (
    f"SELECT {TEMPLATE_COLUMNS}, {IDENTITY_COLUMNS} FROM templates t LEFT JOIN identities i ON i.id = t.identity"
)
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

    def decode_vector(self, blob: bytes) -> bytes:
        """A vector as this database gives it, as little-endian float32 bytes."""
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
        check_identity(row)
        return cls(*row[:4])

    @property
    def checksum(self) -> int:
        """Of the row."""
        return row_checksum("identities", self.id, self.templates, self.template_sum, self.name)


def check_identity(row: Sequence[Any]) -> str:
    """The name in a row of `IDENTITY_COLUMNS`, if the row is as it was written."""
    number, name, templates, total, checksum = row
    text = f"identities {number} {templates} {total} {name}"
    if type(name) is not str or zlib.crc32(text.encode(errors="surrogatepass")) != checksum:
        raise damage_error(f"identity {number} fails its checksum")
    return name


@dataclass
class IndexProof:
    """Which indexes by name were compared with their tables since the storage was opened.

    A row that is read proves itself; one that is not found proves nothing, since the way to it may be damaged. So the
    first time that somebody is not found, all names of the index are read once.
    """

    tables: set[str] = field(default_factory=set)


def prove_identities(session: Transaction, state: RevisionState, proof: IndexProof) -> None:
    """Refuse identities that are not those that were written, or that their names do not lead to."""
    entries = ((row[1], IdentityRow.from_row(row).checksum) for row in _all(session, IDENTITY_COLUMNS, "identities i"))
    _prove(session, proof, "identities", entries, state.identities, state.identity_sum)


def prove_requests(session: Transaction, state: RevisionState, proof: IndexProof) -> None:
    """Refuse requests that are not those that were written, or that their names do not lead to."""
    entries = ((row[0], check_request(row)) for row in _all(session, REQUEST_COLUMNS, "idempotency_keys"))
    _prove(session, proof, "idempotency_keys", entries, state.requests, state.request_sum)


def _prove(
    session: Transaction, proof: IndexProof, table: str, entries: Iterator[tuple[str, int]], rows: int, checksums: int
) -> None:
    if table in proof.tables:
        return
    words, checked, named, listed, last = table.replace("_", " "), RowSum(), RowSum(), RowSum(), ""
    for name, checksum in entries:
        checked.add(checksum)
        named.add(row_checksum(table, name))
    checked.compare(rows, checksums, words)
    for (name,) in _all(session, "name", f"{table} ORDER BY name"):
        if not isinstance(name, str) or name <= last:
            raise damage_error(f"the names in the index of {words} are not in order")
        listed.add(row_checksum(table, name))
        last = name
    listed.compare(named.rows, named.checksums, f"names in the index of {words}")
    proof.tables.add(table)


def _all(session: Transaction, columns: str, source: str) -> Iterator[tuple]:
    for part in session.stream(f"SELECT {columns} FROM {source}", 8192):
        yield from part


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
    rows = session.execute(f"SELECT {', '.join(_STATE_COLUMNS)}, checksum FROM revision_state")
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
    for part in session.stream(f"SELECT {IDENTITY_COLUMNS} FROM identities i", 8192):
        for row in part:
            names[row[0]] = check_identity(row)
            total.add(row[4])
    total.compare(state.identities, state.identity_sum, "identities")
    return names


REQUEST_COLUMNS = "name, request_hash, sequence, numbers, skipped, checksum"


def check_request(row: tuple) -> int:
    """The checksum of a row of `REQUEST_COLUMNS`, if that is the one it carries."""
    *values, checksum = row
    if row_checksum("idempotency_keys", *values) != checksum:
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
    found, size = {}, dim * FLOATS.itemsize
    for number, identity, sequence, checksum, blob, *owner in rows:
        vector = session.decode_vector(blob)
        if owner[0] is None:
            raise damage_error(f"template {number} is nobody's")
        try:
            sound = len(vector) == size and template_checksum(number, identity, sequence, vector) == checksum
        except TypeError:
            sound = False
        if not sound:
            raise damage_error(f"template {number} fails its checksum")
        found[number] = check_identity(owner)
    return found


def decode_owned(session: Transaction, rows: Sequence[tuple], dim: int) -> Templates:
    """Rows of `OWNED_TEMPLATES` as arrays; a row, or an owner, that fails its checksum is never given out."""
    names: dict[int, str] = {}
    for row in rows:
        if row[1] not in names:
            if row[5] is None:
                raise damage_error(f"template {row[0]} is nobody's")
            names[row[5]] = check_identity(row[5:])
    return decode_templates(session, [row[:5] for row in rows], dim, names)


def decode_templates(session: Transaction, rows: Sequence[tuple], dim: int, names: Mapping[int, str]) -> Templates:
    """Rows of `TEMPLATE_COLUMNS` as arrays; a row that fails its checksum is never given out."""
    blobs, whose, size, unpack, crc32 = [], [], dim * FLOATS.itemsize, session.decode_vector, zlib.crc32
    for number, identity, sequence, checksum, blob in rows:
        vector = unpack(blob)
        try:  # `template_checksum`, in place: this is done for every template of a gallery
            sound = crc32(vector, crc32(b"templates %d %d %d " % (number, identity, sequence))) == checksum
        except TypeError:
            sound = False
        if not sound or len(vector) != size:
            raise damage_error(f"template {number} fails its checksum")
        if (name := names.get(identity)) is None:
            raise damage_error(f"template {number} is nobody's")
        blobs.append(vector)
        whose.append(name)
    vectors = np.frombuffer(b"".join(blobs), FLOATS).reshape(-1, dim).astype(np.float32)
    length = np.einsum("nd,nd->n", vectors, vectors)
    wrong = np.flatnonzero(~(np.abs(length - 1) <= 2 * UNIT))  # written so that NaN is wrong too
    if len(wrong):
        raise damage_error(f"template {rows[wrong[0]][0]} is not of unit length")
    numbers = np.fromiter((row[0] for row in rows), np.int64, len(rows))
    checksums = np.fromiter((row[3] for row in rows), np.int64, len(rows))
    return Templates(numbers, tuple(whose), vectors, checksums)


def find_damage(session: Transaction, dim: int) -> list[str]:
    """What is wrong with rows and sums, in words; never raises for a damaged row."""
    found: list[str] = []
    state = _listed(found, lambda: read_state(session))
    _listed(found, lambda: read_fixed_metadata(session))
    known: dict[int, IdentityRow] = {}
    owned: dict[int, RowSum] = {}
    total = RowSum()
    for row in session.execute(f"SELECT {IDENTITY_COLUMNS} FROM identities i"):
        owner = _listed(found, lambda row=row: IdentityRow.from_row(row))
        if owner is not None:
            known[owner.id] = owner
        total.add(row[4] if isinstance(row[4], int) else 0)
    if state is not None:
        _listed(found, lambda: total.compare(state.identities, state.identity_sum, "identities"))
    names, total = {number: row.name for number, row in known.items()}, RowSum()
    late = 0
    for part in session.stream(f"SELECT {TEMPLATE_COLUMNS} FROM templates t ORDER BY t.number", 8192):
        for row in part:
            if _listed(found, lambda row=row: decode_templates(session, [row], dim, names)) is None:
                continue
            owned.setdefault(row[1], RowSum()).add(row[3])
            total.add(row[3])
            late += state is not None and not (0 < row[0] < state.next_number and row[2] <= state.sequence)
    if late:
        found.append(f"{late} templates come from changes that were never made: restore a snapshot")
    if state is not None:
        _listed(found, lambda: total.compare(state.templates, state.template_sum, "templates"))
    for owner in known.values():
        here = owned.get(owner.id, RowSum())
        what = f"templates of identity {owner.id}"
        _listed(found, lambda h=here, o=owner, w=what: h.compare(o.templates, o.template_sum, w))
        if not here.rows and not owner.templates:
            found.append(f"identity {owner.id} has no template: restore a snapshot")
    if state is not None:
        _find_damaged_history(session, state, found)
    return found


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
