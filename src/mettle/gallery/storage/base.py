"""The record of a gallery: the one place where enrolled templates are the truth.

A record is SQL: `sqlite` (embedded) or `postgres` (a server). Both obey the same laws, which
``tests/gallery/test_storage.py`` runs on either:

    acknowledged  = durable: once `enrol` or `delete` returns, no crash takes it back
    all or none   = a call that raises, or is killed, has changed nothing that a later reader sees
    numbers       = 64-bit, given by the record, never used twice, not even after deletion
    sequence      = +1 per acknowledged change; `changes(after)` tells everything that happened since
    request       = the same request name twice changes nothing the second time and gives the first receipt; a name
                    that was used for another verb or identity is refused
    calibration   = what was measured on the people enrolled; keeping or forgetting it is a change like any other

Anything faster than SQL (an index) is a view that can be thrown away and built again from here.

Records as a whole: what was removed is removed from a restored backup too, and a record is filled from another.

Every function works inside a transaction that its caller has opened.

What every SQL record does alike: the verbs of `Record` over transactions that a database gives.

`sqlite` and `postgres` say how a transaction is made (`_read`, `_write`, `_reading`); `statements` says what is done
in it; here is which statements make a verb, so that both kinds obey the same laws by the same lines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from dataclasses import replace as replaced
from typing import Any, Protocol, TypeVar

import numpy as np

from mettle.errors import GalleryError, UnknownIdentity
from mettle.gallery.binding import Binding
from mettle.gallery.calibration import Calibration, Standing, calibration_to_json
from mettle.gallery.enrolment import select_new_rows
from mettle.gallery.results import Changes, Receipt, Size, Templates
from mettle.gallery.storage.integrity import Content, Tally, check_name, check_vectors, keyed_hash
from mettle.gallery.storage.sql import (
    ALONE,
    FINDINGS,
    PAGE,
    TEMPLATE_ROWS,
    Session,
    Tombstone,
    decode_templates,
    find_damage,
    find_owner,
    find_receipt,
    insert_identities,
    insert_templates,
    read_calibration,
    read_counter,
    read_identities,
    read_size,
    read_standing,
    remove_templates,
    write_calibration,
    write_receipt,
)


class Record(Protocol):
    """Where templates are kept. Vectors given to it are float32 and of unit length: the gallery sees to that."""

    @property
    def binding(self) -> Binding:
        """What its templates are."""
        ...

    @property
    def identity(self) -> str:
        """Which record this is: a name that a copy of it shares and no other record has."""
        ...

    def sequence(self) -> int:
        """Number of the last acknowledged change; 0 for a new record."""
        ...

    def size(self) -> Size:
        """How much is enrolled now."""
        ...

    def enrol(
        self,
        identity: str,
        vectors: np.ndarray,
        *,
        request: str | None = None,
        replace: bool = False,
        distinct: bool = False,
        former: Sequence[str] = (),
    ) -> Receipt:
        """Add (m, dim) templates to an identity.

        With ``replace`` its former ones are removed in the same change; with ``distinct`` those that it has already
        are not added again. ``former``: other spellings under which the same request may have been served before.
        """
        ...

    def enrol_many(
        self, people: Sequence[tuple[str, np.ndarray]], *, replace: bool = False, distinct: bool = False
    ) -> Receipt:
        """The same for several identities in one change."""
        ...

    def delete(self, identity: str, *, request: str | None = None, former: Sequence[str] = ()) -> Receipt:
        """Remove an identity, or of its ``former`` spellings one that is there; UnknownIdentity where there is none."""
        ...

    def has(self, identity: str) -> bool:
        """Whether somebody is enrolled under exactly this name."""
        ...

    def standing(self) -> Standing | None:
        """The calibration that is kept, and what has changed since; None where there is none."""
        ...

    def calibrate(self, found: Calibration | None) -> Receipt:
        """Keep a calibration instead of the former one; None: forget it."""
        ...

    def for_writing(self) -> Any:
        """Refuse, where it was opened for reading."""
        ...

    def templates(self, identity: str) -> Templates:
        """All templates of an identity, read from the record itself; none: empty."""
        ...

    def names(self, numbers: np.ndarray) -> list[str | None]:
        """Whose templates these are; None for those that are not (or no longer) there."""
        ...

    def templates_at(self, numbers: np.ndarray) -> Templates:
        """The templates with these numbers, in the order of their numbers; those that are not there are left out."""
        ...

    def ids(self) -> Iterator[str]:
        """All identities, sorted."""
        ...

    def scan(self, *, batch: int = 65536) -> Iterator[Templates]:
        """All templates in the order of their numbers, as of one moment."""
        ...

    def changes(self, after: int) -> Changes | None:
        """What happened after a sequence number; None where the record no longer remembers (build anew by `scan`)."""
        ...

    def compact(self) -> None:
        """Erase what was deleted from disk: afterwards no byte of a deleted template is in any file of the record."""
        ...

    def check(self) -> list[str]:
        """What is wrong with the record, in words; an empty list is a sound record."""
        ...

    def digest(self) -> str:
        """A checksum over all live templates (identities, numbers of templates per identity, vectors).

        It does not depend on numbers, order of enrolment, or on which kind of record holds them, so equal digests
        mean equal content: the proof of a move.
        """
        ...

    def close(self) -> None:
        """Let go of files, locks and connections; may be called twice."""
        ...


Scan = Callable[[], Iterator[Templates]]


Agree = Callable[[Content, Content], None]


def bury(session: Session, salt: str, tombstones: Sequence[Tombstone]) -> Receipt:
    """Remove what these say was removed; what came after them stays. The receipt has the numbers."""
    sequence, number, _ = read_counter(session)
    known = set(session.rows("SELECT sequence, person FROM tombstones"))
    new = [stone for stone in tombstones if (stone.sequence, stone.person) not in known]
    if not new:
        return Receipt(sequence, (), repeated=True)
    sequence = max(sequence, *(stone.sequence for stone in new)) + 1
    number = max(number, *(stone.number for stone in new))
    people = {keyed_hash(salt, name): owner for owner, name in read_identities(session)}
    gone: list[int] = []
    for stone in new:
        session.rows("INSERT INTO tombstones VALUES (?, ?, ?)", stone.sequence, stone.person, stone.number)
        if (owner := people.get(stone.person)) is not None:
            gone += remove_templates(session, owner, sequence, None, number, before=stone.sequence)
    session.rows(f"DELETE FROM identities AS i WHERE {ALONE}")
    session.rows("UPDATE counter SET floor = ?", sequence)
    return write_receipt(session, None, "", Receipt(sequence, tuple(sorted(gone))), number)


def fill_storage(session: Session, dim: int, scan: Scan, agree: Agree, calibrated: Calibration | None) -> Receipt:
    """Put all of ``scan`` into an empty record; ``agree`` sees what came and what is here and may still refuse."""
    sequence, number, _ = read_counter(session)
    if read_size(session).templates:
        raise GalleryError("the target is not empty: move into a new gallery")
    came, first, owners = Tally(dim), number, {}
    for part in scan():
        came.add(part.identities, part.vectors)
        rows = check_vectors(part.vectors, dim)
        owners |= insert_identities(session, [n for n in dict.fromkeys(part.identities) if n not in owners])
        placed = enumerate(zip(part.identities, rows, strict=True), number)
        insert_templates(session, [(n, owners[name], name, row) for n, (name, row) in placed], sequence + 1)
        number += len(rows)
    here = Tally(dim)
    for rows in session.each(f"{TEMPLATE_ROWS} ORDER BY t.number", 8192):
        part = decode_templates(session, rows, dim)
        here.add(part.identities, part.vectors)
    agree(came.content(), here.content())
    text = None if calibrated is None else calibration_to_json(replace(calibrated, sequence=sequence + 1))
    write_calibration(session, text)  # none, too: one of people who were here before is not theirs
    receipt = Receipt(sequence + 1, tuple(range(first, number)))
    return write_receipt(session, None, "", receipt, number)


Result = TypeVar("Result")


class Ledger(ABC):
    """A record in a database. Subclasses give transactions and say how theirs is made, opened and compacted."""

    kind: str
    _binding: Binding
    _salt: str

    @abstractmethod
    def _read(self, work: Callable[[Session], Result]) -> Result:
        """Run ``work`` in a transaction that reads one moment; it may be run twice."""

    @abstractmethod
    def _write(self, work: Callable[[Session], Receipt], *, named: bool = False) -> Receipt:
        """Run ``work`` alone and commit it durably; ``named``: doing it again after a commit changes nothing."""

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Session]:
        """A transaction that reads one moment for as long as it is held."""

    @abstractmethod
    def for_writing(self) -> Any:
        """Refuse, where it was opened for reading."""

    def _nameless(self) -> str | None:
        """What a request is called that the caller did not name; None: it needs no name."""
        return None

    @property
    def binding(self) -> Binding:
        """What its templates are."""
        return self._binding

    def sequence(self) -> int:
        """Number of the last acknowledged change."""
        return self._read(lambda session: read_counter(session)[0])

    def size(self) -> Size:
        """How much is enrolled now."""
        return self._read(read_size)

    @property
    def identity(self) -> str:
        """Which record this is: a name that a copy of it shares and no other record has."""
        return keyed_hash(self._salt, "record")

    def enrol(
        self,
        identity: str,
        vectors: np.ndarray,
        *,
        request: str | None = None,
        replace: bool = False,
        distinct: bool = False,
        former: Sequence[str] = (),
    ) -> Receipt:
        """Add (m, dim) templates to an identity; the receipt has their numbers."""
        return self._enrol([(identity, vectors)], request, replace, distinct, former)

    def enrol_many(
        self, people: Sequence[tuple[str, np.ndarray]], *, replace: bool = False, distinct: bool = False
    ) -> Receipt:
        """The same for several identities in one change: all of them or, if it fails, none."""
        return self._enrol(people, None, replace, distinct)

    def _enrol(
        self,
        people: Sequence[tuple[str, np.ndarray]],
        request: str | None,
        replace: bool,
        distinct: bool,
        former: Sequence[str] = (),
    ) -> Receipt:
        checked = [(check_name(identity), check_vectors(v, self._binding.dim)) for identity, v in people]
        verb, name = "replace" if replace else "enrol", self._named(request)
        asked = self._asked(verb, " ".join(who for who, _ in checked))
        alike = {asked, *(self._asked(verb, other) for other in former)}

        def work(session: Session) -> Receipt:
            if known := find_receipt(session, name, alike):
                return known
            sequence, first, _ = read_counter(session)
            sequence, number, cleared, skipped = sequence + 1, first, set(), 0
            for identity, rows in checked:
                owner, has = find_owner(session, identity), rows[:0]
                if owner is None:
                    owner = session.rows("INSERT INTO identities (name) VALUES (?) RETURNING id", identity)[0][0]
                elif replace and identity not in cleared:
                    remove_templates(session, owner, sequence, keyed_hash(self._salt, identity), number)
                elif distinct:
                    has = self._of(session, identity).vectors
                cleared.add(identity)
                if distinct:
                    given, rows = len(rows), select_new_rows(rows, has)
                    skipped += given - len(rows)
                placed = [(number + i, owner, identity, row) for i, row in enumerate(rows)]
                insert_templates(session, placed, sequence)
                number += len(rows)
            receipt = Receipt(sequence, tuple(range(first, number)), skipped=skipped)
            return write_receipt(session, name, asked, receipt, number)

        receipt = self._write(work, named=name is not None)
        return receipt if request is not None else replaced(receipt, repeated=False)

    def delete(self, identity: str, *, request: str | None = None, former: Sequence[str] = ()) -> Receipt:
        """Remove an identity and all its templates; the receipt has their numbers."""
        names = [*(check_name(other) for other in former), check_name(identity)]
        asked, name = {each: self._asked("delete", each) for each in names}, self._named(request)

        def work(session: Session) -> Receipt:
            if known := find_receipt(session, name, asked.values()):
                return known
            owners = ((each, find_owner(session, each)) for each in names)
            who, owner = next((found for found in owners if found[1] is not None), (identity, None))
            if owner is None:
                raise UnknownIdentity(f"nobody called {identity!r:.80} is enrolled: nothing was deleted")
            sequence, number, _ = read_counter(session)
            numbers = remove_templates(session, owner, sequence + 1, keyed_hash(self._salt, who), number)
            session.rows("DELETE FROM identities WHERE id = ?", owner)
            return write_receipt(session, name, asked[who], Receipt(sequence + 1, numbers), number)

        receipt = self._write(work, named=name is not None)
        return receipt if request is not None else replaced(receipt, repeated=False)

    def has(self, identity: str) -> bool:
        """Whether somebody is enrolled under exactly this name."""
        identity = check_name(identity)
        return self._read(lambda session: find_owner(session, identity) is not None)

    def standing(self) -> Standing | None:
        """The calibration that is kept, and what has changed since."""
        return self._read(read_standing)

    def calibrate(self, found: Calibration | None) -> Receipt:
        """Keep a calibration instead of the former one, or none; the same one again is no change."""
        text, tried = None if found is None else calibration_to_json(found), False

        def work(session: Session) -> Receipt:
            nonlocal tried
            sequence, number, _ = read_counter(session)
            if read_calibration(session) == text:
                return Receipt(sequence, (), repeated=not tried)  # or it was this call, and the line broke after it
            tried = True
            write_calibration(session, text)
            return write_receipt(session, None, "", Receipt(sequence + 1, ()), number)

        return self._write(work, named=True)

    def templates(self, identity: str) -> Templates:
        """All templates of an identity; none: empty."""
        identity = check_name(identity)
        return self._read(lambda session: self._of(session, identity))

    def _of(self, session: Session, identity: str) -> Templates:
        found = session.rows(f"{TEMPLATE_ROWS} WHERE i.name = ? ORDER BY t.number", identity)
        return decode_templates(session, found, self._binding.dim)

    def names(self, numbers: np.ndarray) -> list[str | None]:
        """Whose templates these are; None for those that are not there."""
        wanted = [int(number) for number in numbers]

        def work(session: Session) -> dict[int, str]:
            found: dict[int, str] = {}
            for start in range(0, len(wanted), PAGE):
                page = wanted[start : start + PAGE]
                marks = ", ".join("?" * len(page))
                found |= session.rows(
                    "SELECT t.number, i.name FROM templates t JOIN identities i ON i.id = t.identity "
                    f"WHERE t.number IN ({marks})",
                    *page,
                )
            return found

        found = self._read(work)
        return [found.get(number) for number in wanted]

    def templates_at(self, numbers: np.ndarray) -> Templates:
        """The templates with these numbers, in the order of their numbers; those that are not there are left out."""
        wanted = sorted({int(number) for number in numbers})

        def work(session: Session) -> list[tuple]:
            found: list[tuple] = []
            for start in range(0, len(wanted), PAGE):
                page = wanted[start : start + PAGE]
                marks = ", ".join("?" * len(page))
                found += session.rows(f"{TEMPLATE_ROWS} WHERE t.number IN ({marks}) ORDER BY t.number", *page)
            return found

        return self._read(lambda session: decode_templates(session, work(session), self._binding.dim))

    def ids(self) -> Iterator[str]:
        """All identities, sorted by code point; read in pages, so that nothing is held while the caller works."""
        last = ""
        while True:
            sql = f"SELECT name FROM identities WHERE name > ? ORDER BY name LIMIT {PAGE}"
            page = self._read(lambda session, last=last, sql=sql: session.rows(sql, last))
            yield from (row[0] for row in page)
            if len(page) < PAGE:
                return
            last = page[-1][0]

    def scan(self, *, batch: int = 65536) -> Iterator[Templates]:
        """All templates in the order of their numbers, as of one moment."""
        with self._reading() as session:
            for rows in session.each(f"{TEMPLATE_ROWS} ORDER BY t.number", batch):
                yield decode_templates(session, rows, self._binding.dim)

    def changes(self, after: int) -> Changes | None:
        """What happened after a sequence number; None where the record no longer remembers, or has not got so far."""
        after = int(after)

        def work(session: Session) -> Changes | None:
            sequence, _, floor = read_counter(session)
            if not floor <= after <= sequence:
                return None
            gone = session.rows("SELECT number FROM removals WHERE sequence > ? ORDER BY +number", after)
            new = session.rows(f"{TEMPLATE_ROWS} WHERE t.sequence > ? ORDER BY +t.number", after)
            removed = np.fromiter((row[0] for row in gone), np.int64, len(gone))
            return Changes(sequence, removed, decode_templates(session, new, self._binding.dim))

        return self._read(work)

    def digest(self) -> str:
        """A checksum over all live templates that does not depend on numbers, order or kind of record."""
        tally = Tally(self._binding.dim)
        for part in self.scan(batch=8192):
            tally.add(part.identities, part.vectors)
        return tally.content().digest

    def check(self) -> list[str]:
        """What is wrong with the record, in words."""
        return self._read(lambda session: find_damage(session, self._binding.dim))[:FINDINGS]

    def tombstones(self, after: int = 0) -> tuple[Tombstone, ...]:
        """What was removed after a sequence number; keep it apart from backups, and `apply` it to a restored one."""
        sql = "SELECT sequence, person, number FROM tombstones WHERE sequence > ? ORDER BY sequence"
        return self._read(lambda session: tuple(Tombstone(*row) for row in session.rows(sql, int(after))))

    def apply(self, tombstones: Sequence[Tombstone]) -> Receipt:
        """Remove from a restored backup what was removed after the backup was made; the receipt has the numbers.

        Views of the lost history are not taken for views of this record: `changes` answers None to them.
        """
        return self._write(lambda session: bury(session, self._salt, tombstones))

    def load(self, scan: Scan, agree: Agree, calibrated: Calibration | None = None) -> Receipt:
        """Fill an empty record in one change; ``agree`` sees what came and what is here and may still refuse."""
        return self._write(lambda session: fill_storage(session, self._binding.dim, scan, agree, calibrated))

    def _asked(self, verb: str, identity: str) -> str:
        """What is asked, as a hash."""
        return keyed_hash(self._salt, f"{verb} {identity}")

    def _named(self, request: str | None) -> str | None:
        """Under which name it is asked."""
        return self._nameless() if request is None else check_name(request, "request")
