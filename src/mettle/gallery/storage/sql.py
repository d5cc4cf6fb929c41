"""The tables of a record in both dialects; `statements` says what stands in them.

Records are out there: whoever changes a table here must bring theirs along, and raise the format in `statements`.

The statements that every SQL record is made of, in words that SQLite and PostgreSQL both speak.

    facts       format, binding, salt; once it was calibrated, calibration
    counter     one row: sequence (last change), number (next template), floor (what came before it is forgotten)
    identities  id, name
    templates   number, identity, sequence (when it came), crc, vector
    removals    number, sequence: templates that were there once
    tombstones  sequence, person (keyed hash of the name), number: for a restored backup
    requests    name, asked (keyed hash of the question), sequence, numbers: the receipt that a retry gets; where
                templates were skipped, a second row under `SKIPPED` and that name, whose numbers are how many

Every function works inside a transaction that its caller has opened.
"""

import json
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mettle.errors import GalleryError, InputError
from mettle.gallery.binding import Binding, binding_from_json, binding_to_json
from mettle.gallery.calibration import Standing, calibration_from_json
from mettle.gallery.results import Receipt, Size, Templates
from mettle.gallery.storage.integrity import FLOATS, IDENTITY_BYTES, check_name, check_vectors, row_checksum

SQLITE_TABLES = """
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE counter (id INTEGER PRIMARY KEY CHECK (id = 1), sequence INTEGER NOT NULL, number INTEGER NOT NULL,
  floor INTEGER NOT NULL);
CREATE TABLE identities (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE templates (number INTEGER PRIMARY KEY, identity INTEGER NOT NULL REFERENCES identities (id),
  sequence INTEGER NOT NULL, crc INTEGER NOT NULL, vector BLOB NOT NULL);
CREATE INDEX templates_identity ON templates (identity);
CREATE INDEX templates_sequence ON templates (sequence);
CREATE TABLE removals (number INTEGER PRIMARY KEY, sequence INTEGER NOT NULL);
CREATE INDEX removals_sequence ON removals (sequence);
CREATE TABLE tombstones (sequence INTEGER NOT NULL, person TEXT NOT NULL, number INTEGER NOT NULL,
  PRIMARY KEY (sequence, person));
CREATE TABLE requests (name TEXT PRIMARY KEY, asked TEXT NOT NULL, sequence INTEGER NOT NULL, numbers TEXT NOT NULL);
CREATE INDEX requests_sequence ON requests (sequence);
"""


POSTGRES_TABLES = """
CREATE TABLE facts (key text PRIMARY KEY, value text NOT NULL);
CREATE TABLE counter (id int PRIMARY KEY CHECK (id = 1), sequence int8 NOT NULL, number int8 NOT NULL,
  floor int8 NOT NULL);
CREATE TABLE identities (id int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text COLLATE "C" NOT NULL UNIQUE);
CREATE TABLE templates (number int8 PRIMARY KEY, identity int8 NOT NULL REFERENCES identities (id),
  sequence int8 NOT NULL, crc int8 NOT NULL, vector vector({dim}) NOT NULL);
ALTER TABLE templates ALTER COLUMN vector SET STORAGE {storage};
CREATE INDEX templates_identity ON templates (identity);
CREATE INDEX templates_sequence ON templates (sequence);
CREATE TABLE removals (number int8 PRIMARY KEY, sequence int8 NOT NULL);
CREATE INDEX removals_sequence ON removals (sequence);
CREATE TABLE tombstones (sequence int8 NOT NULL, person text NOT NULL, number int8 NOT NULL,
  PRIMARY KEY (sequence, person));
CREATE TABLE requests (name text COLLATE "C" PRIMARY KEY, asked text NOT NULL, sequence int8 NOT NULL,
  numbers text NOT NULL);
CREATE INDEX requests_sequence ON requests (sequence);
"""


FORMAT = 2  # the newest that is known


PLAIN, CALIBRATED = 1, 2  # what a record says: the format that a reader must know in order not to answer wrongly


REMEMBERED = 100_000  # changes whose removals and requests survive `compact`


PAGE = 500  # values in one statement: every database takes as many


FINDINGS = 100  # lines of `check`: more would help nobody


# Before the name of a request, in a row of its own: versions that know nothing of it read and write these tables as
# they are. With it a name is longer than any that a caller may give, so it is nobody's request.
SKIPPED = "skipped".ljust(IDENTITY_BYTES)


ALONE = "NOT EXISTS (SELECT 1 FROM templates t WHERE t.identity = i.id)"


TEMPLATE_ROWS = "SELECT t.number, i.name, t.crc, t.vector FROM templates t JOIN identities i ON i.id = t.identity"


class Session(Protocol):
    """One transaction of a database. Values stand as ``?``."""

    def rows(self, sql: str, *values: Any) -> list[tuple]:
        """Run a statement and return what it gives."""
        ...

    def many(self, sql: str, values: Sequence[tuple]) -> None:
        """Run a statement once for each tuple of values."""
        ...

    def each(self, sql: str, batch: int) -> Iterator[list[tuple]]:
        """What a query gives, a part at a time."""
        ...

    def pack(self, row: np.ndarray) -> Any:
        """A vector as this database takes it."""
        ...

    def unpack(self, blob: bytes) -> bytes:
        """A vector as this database gives it, as little-endian float32 bytes."""
        ...


@dataclass(frozen=True)
class Tombstone:
    """Templates of a person that came before this sequence number are gone for good."""

    sequence: int
    person: str  # keyed hash of the name; the key is the record's, so a backup of it has the same
    number: int  # the next template's number at that time


def write_first_rows(session: Session, binding: Binding) -> None:
    """What stands in a new record."""
    facts = {"format": str(PLAIN), "binding": binding_to_json(binding), "salt": secrets.token_hex(32)}
    session.many("INSERT INTO facts VALUES (?, ?)", list(facts.items()))
    session.rows("INSERT INTO counter (id, sequence, number, floor) VALUES (1, 0, 1, 0)")


def read_facts(session: Session) -> tuple[Binding, str]:
    """Binding and salt of a record; refuses one that a newer mettle wrote."""
    facts = dict(session.rows("SELECT key, value FROM facts"))
    written = facts.get("format", "")
    if not written.isdecimal() or int(written) < 1 or "salt" not in facts:
        raise GalleryError("the record does not say its format: it is damaged, restore a snapshot")
    if int(written) > FORMAT:
        raise GalleryError(f"a newer mettle wrote this gallery (format {written}, known is {FORMAT}): upgrade mettle")
    return binding_from_json(facts.get("binding", "")), facts["salt"]


def read_calibration(session: Session) -> str | None:
    """The calibration as it is written, None where there is none."""
    found = session.rows("SELECT value FROM facts WHERE key = 'calibration'")
    return found[0][0] if found else None


def write_calibration(session: Session, text: str | None) -> None:
    """Write a calibration in the place of the former; None: none. Versions that do not know of it refuse the record."""
    session.rows("DELETE FROM facts WHERE key = 'calibration'")
    if text is not None:
        session.rows("INSERT INTO facts (key, value) VALUES ('calibration', ?)", text)
    session.rows("UPDATE facts SET value = ? WHERE key = 'format'", str(PLAIN if text is None else CALIBRATED))


def read_standing(session: Session) -> Standing | None:
    """The calibration, and what has changed since."""
    if (text := read_calibration(session)) is None:
        return None
    found, now = calibration_from_json(text), read_size(session)
    new = session.rows("SELECT count(*) FROM templates WHERE sequence > ?", found.sequence)[0][0]
    return Standing(found, now.identities, now.templates, new)


def forget_history(session: Session) -> None:
    """Drop requests and removals of long ago."""
    sequence = read_counter(session)[0]
    floor = sequence - REMEMBERED
    if floor > 0:
        session.rows("DELETE FROM requests WHERE sequence <= ?", floor)
        session.rows("DELETE FROM removals WHERE sequence <= ?", floor)
        session.rows("UPDATE counter SET floor = ? WHERE floor < ?", floor, floor)


def read_counter(session: Session) -> tuple[int, int, int]:
    """Last sequence number, next number of a template, and where memory begins."""
    return session.rows("SELECT sequence, number, floor FROM counter")[0]  # type: ignore[return-value]


def read_size(session: Session) -> Size:
    """How much is enrolled."""
    sql = "SELECT (SELECT count(*) FROM identities), (SELECT count(*) FROM templates)"
    return Size(*session.rows(sql)[0])


def read_identities(session: Session) -> list[tuple]:
    """All identities with their keys."""
    return session.rows("SELECT id, name FROM identities")


def find_owner(session: Session, identity: str) -> int | None:
    """Key of an identity, None where there is none."""
    found = session.rows("SELECT id FROM identities WHERE name = ?", identity)
    return found[0][0] if found else None


def insert_identities(session: Session, names: Sequence[str]) -> dict[str, int]:
    """Add many new identities; returns their keys."""
    session.many("INSERT INTO identities (name) VALUES (?)", [(check_name(name),) for name in names])
    keys: dict[str, int] = {}
    for start in range(0, len(names), PAGE):
        page = names[start : start + PAGE]
        marks = ", ".join("?" * len(page))
        keys |= session.rows(f"SELECT name, id FROM identities WHERE name IN ({marks})", *page)
    return keys


def find_receipt(session: Session, request: str | None, asked: Collection[str]) -> Receipt | None:
    """The receipt of a request that was served before, for any of these questions: spellings of one name."""
    if request is None:
        return None
    kept = "SELECT asked, sequence, numbers FROM requests WHERE name = ?"
    found = session.rows(kept, request)
    if not found:
        return None
    question, sequence, numbers = found[0]
    if question not in asked:
        raise InputError(f"request {request!r:.80} was used before for something else: give every request its own name")
    told = session.rows(kept, SKIPPED + request)
    skipped = json.loads(told[0][2])[0] if told else 0
    return Receipt(sequence, tuple(json.loads(numbers)), repeated=True, skipped=skipped)


def write_receipt(session: Session, request: str | None, asked: str, receipt: Receipt, number: int) -> Receipt:
    """Write down that a change was made, and for whom."""
    session.rows("UPDATE counter SET sequence = ?, number = ?", receipt.sequence, number)
    if request is not None:
        kept = "INSERT INTO requests VALUES (?, ?, ?, ?)"
        session.rows(kept, request, asked, receipt.sequence, json.dumps(receipt.numbers))
        if receipt.skipped:
            session.rows(kept, SKIPPED + request, asked, receipt.sequence, json.dumps([receipt.skipped]))
    return receipt


def insert_templates(session: Session, rows: list[tuple[int, int, str, np.ndarray]], sequence: int) -> None:
    """Add templates: number, key and name of the identity, vector."""
    session.many(
        "INSERT INTO templates (number, identity, sequence, crc, vector) VALUES (?, ?, ?, ?, ?)",
        [
            (number, owner, sequence, row_checksum(number, name, row.tobytes()), session.pack(row))
            for number, owner, name, row in rows
        ],
    )


def remove_templates(
    session: Session, owner: int, sequence: int, person: str | None, number: int, before: int | None = None
) -> tuple[int, ...]:
    """Take the templates of one identity away (those that came before ``before``) and remember that they were there."""
    limit = sequence if before is None else before
    chosen = "identity = ? AND sequence < ?"
    gone = session.rows(f"SELECT number FROM templates WHERE {chosen} ORDER BY number", owner, limit)
    session.many("INSERT INTO removals (number, sequence) VALUES (?, ?)", [(row[0], sequence) for row in gone])
    session.rows(f"DELETE FROM templates WHERE {chosen}", owner, limit)
    if person is not None:
        session.rows("INSERT INTO tombstones VALUES (?, ?, ?)", sequence, person, number)
    return tuple(row[0] for row in gone)


def decode_templates(session: Session, rows: list[tuple], dim: int) -> Templates:
    """Rows as arrays; a row that fails its checksum is never given out."""
    blobs = []
    for number, name, crc, blob in rows:
        vector = session.unpack(blob)
        if len(vector) != dim * FLOATS.itemsize or row_checksum(number, name, vector) != crc:
            raise GalleryError(f"template {number} fails its checksum: the record is damaged, restore a snapshot")
        blobs.append(vector)
    vectors = np.frombuffer(b"".join(blobs), FLOATS).reshape(-1, dim).astype(np.float32)
    numbers = np.fromiter((row[0] for row in rows), np.int64, len(rows))
    return Templates(numbers, tuple(row[1] for row in rows), vectors)


def find_damage(session: Session, dim: int) -> list[str]:
    """What is wrong with rows and counts, in words."""
    found = []
    sequence, number, _ = read_counter(session)
    for rows in session.each(f"{TEMPLATE_ROWS} ORDER BY t.number", 8192):
        for row in rows:
            try:
                check_vectors(decode_templates(session, [row], dim).vectors, dim)
            except GalleryError as error:
                found.append(str(error))
            except InputError:
                found.append(f"template {row[0]} is not of unit length")
    try:
        kept = read_standing(session)
        if kept is not None and kept.calibration.sequence > sequence:
            found.append("the calibration comes from a change that was never made: calibrate again, or forget it")
    except GalleryError as error:
        found.append(str(error))
    rules = {
        f"identities i WHERE {ALONE}": "identities have no template",
        "templates t WHERE NOT EXISTS (SELECT 1 FROM identities i WHERE i.id = t.identity)": "templates are nobody's",
        f"templates WHERE number >= {number} OR number < 1": "templates have a number that was never given",
        f"templates WHERE sequence > {sequence}": "templates come from changes that were never made",
        "removals r WHERE EXISTS (SELECT 1 FROM templates t WHERE t.number = r.number)": "removed templates are there",
    }
    for rule, trouble in rules.items():
        if count := session.rows(f"SELECT count(*) FROM {rule}")[0][0]:
            found.append(f"{count} {trouble}: restore a snapshot")
    return found
