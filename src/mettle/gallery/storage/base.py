"""The storage of a gallery: the one place where enrolled templates are the truth.

A storage is SQL: `sqlite` (embedded) or `postgres` (a server). Both obey the same laws, which
``tests/gallery/test_storage.py`` runs on either:

    acknowledged  = durable: once `enrol` or `delete` returns, no crash takes it back
    all or none   = a call that raises, or is killed, has changed nothing that a later reader sees
    numbers       = 64-bit, given by the storage, never used twice, not even after deletion
    sequence      = +1 per acknowledged change; `changes(after)` tells everything that happened since
    request       = the same request name twice changes nothing the second time and gives the first receipt; a name
                    that was used for another verb or identity is refused
    calibration   = what was measured on the people enrolled; keeping or forgetting it is a change like any other

    checked       = every row that an answer rests on is checked where it is read, and missing rows are found: a storage
                    that was damaged on disk refuses to answer rather than answer something else

Anything faster than SQL (an index) is a view that can be thrown away and built again from here.

`sqlite` and `postgres` say how a transaction is made (`_read`, `_write`, `_reading`); `sql` says what is done in it;
here is which statements make a verb, so that both kinds obey the same laws by the same lines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any, Protocol, TypeVar

import numpy as np

from mettle.errors import GalleryError, UnknownIdentity
from mettle.gallery.binding import Binding
from mettle.gallery.calibration import CalibrationStatus, GalleryCalibration, calibration_to_json
from mettle.gallery.enrolment import select_new_rows
from mettle.gallery.results import Changes, Receipt, Size, Templates
from mettle.gallery.storage.integrity import (
    ContentCounter,
    ContentDigest,
    RevisionState,
    RowSum,
    check_name,
    check_vectors,
    damage_error,
    keyed_hash,
)
from mettle.gallery.storage.sql import (
    FINDINGS,
    IDENTITY_COLUMNS,
    OWNED_TEMPLATES,
    PAGE,
    STATE_MARK,
    TEMPLATE_COLUMNS,
    TEMPLATES_OF,
    AddedRows,
    FixedMetadata,
    IdentityRow,
    IndexProof,
    Transaction,
    check_identities,
    check_order,
    checksums_of_rows,
    decode_owned,
    decode_templates,
    find_damage,
    find_identity,
    find_receipt,
    insert_identities,
    insert_templates,
    name_owners,
    read_calibration,
    read_deleted,
    read_identities,
    read_standing,
    read_state,
    remove_templates,
    size_of,
    update_identities,
    write_calibration,
    write_receipt,
)


class Storage(Protocol):
    """Where templates are kept. Vectors given to it are float32 and of unit length: the gallery sees to that."""

    @property
    def binding(self) -> Binding:
        """What its templates are."""
        ...

    @property
    def identity(self) -> str:
        """Which storage this is: a name that a copy of it shares and no other storage has."""
        ...

    def sequence(self) -> int:
        """Number of the last acknowledged change; 0 for a new storage."""
        ...

    def state(self) -> RevisionState:
        """How far it has come, and what it holds."""
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

    def has_identity(self, identity: str) -> bool:
        """Whether somebody is enrolled under exactly this name."""
        ...

    def calibration_status(self) -> CalibrationStatus | None:
        """The calibration that is kept, and what has changed since; None where there is none."""
        ...

    def keep_calibration(self, found: GalleryCalibration | None) -> Receipt:
        """Keep a calibration instead of the former one; None: forget it."""
        ...

    def for_writing(self) -> Any:
        """Refuse, where it was opened for reading."""
        ...

    def templates_of(self, identity: str) -> Templates:
        """All templates of an identity, read from the storage itself; none: empty."""
        ...

    def names_of(self, numbers: np.ndarray) -> list[str | None]:
        """Whose templates these are; None for those that are not (or no longer) there."""
        ...

    def templates_at(self, numbers: np.ndarray) -> Templates:
        """The templates with these numbers, in the order of their numbers; those that are not there are left out."""
        ...

    def owners(self, numbers: Iterable[int], *, anew: bool = False) -> tuple[RevisionState, list[str | None]]:
        """The same, and what the storage held at that moment; ``anew``: rows that were checked are checked again."""
        ...

    def ids(self) -> Iterator[str]:
        """All identities, sorted."""
        ...

    def scan(self, *, batch: int = 65536) -> Iterator[Templates]:
        """All templates in the order of their numbers, as of one moment."""
        ...

    def changes_since(self, after: int) -> Changes | None:
        """What happened after a sequence number; None where the storage no longer remembers (build anew by `scan`)."""
        ...

    def compact(self) -> None:
        """Erase what was deleted from disk: afterwards no byte of a deleted template is in any file of the storage."""
        ...

    @property
    def model_files(self) -> Mapping[str, str]:
        """SHA-256 of the copy of the model that lies beside it."""
        ...

    def inspect(self, work: Callable[[Transaction], Any]) -> Any:
        """Run a function of a transaction that reads one moment."""
        ...

    def forget_pages(self) -> None:
        """Keep nothing of what was read before, so that what is read next is read again."""
        ...

    def check(self) -> list[str]:
        """What is wrong with the storage, in words; an empty list is a sound storage."""
        ...

    def digest(self) -> str:
        """A checksum over all live templates (identities, numbers of templates per identity, vectors).

        It does not depend on numbers, order of enrolment, or on which kind of storage holds them, so equal digests
        mean equal content: the proof of a move.
        """
        ...

    def close(self) -> None:
        """Let go of files, locks and connections; may be called twice."""
        ...


Scan = Callable[[], Iterator[Templates]]


Agree = Callable[[ContentDigest, ContentDigest], None]


def fill_storage(
    session: Transaction, dim: int, scan: Scan, agree: Agree, calibrated: GalleryCalibration | None
) -> Receipt:
    """Put all of ``scan`` into an empty storage; ``agree`` sees what came and what is here and may still refuse."""
    state = read_state(session)
    if state.templates:
        raise GalleryError("the target is not empty: move into a new gallery")
    first, number, sequence = state.next_number, state.next_number, state.sequence + 1
    came, owners, sums, total = ContentCounter(dim), {}, {}, RowSum()
    for part in scan():
        came.add(part.identities, part.vectors)
        rows = check_vectors(part.vectors, dim)
        new = [name for name in dict.fromkeys(part.identities) if name not in owners]
        owners |= {name: state.next_identity + len(owners) + i for i, name in enumerate(new)}
        insert_identities(session, [IdentityRow(owners[name], name, 0, 0) for name in new])
        placed = [
            (number + i, owners[name], row) for i, (name, row) in enumerate(zip(part.identities, rows, strict=True))
        ]
        checksums = checksums_of_rows(placed, sequence)
        insert_templates(session, placed, checksums, sequence)
        for name, checksum in zip(part.identities, checksums, strict=True):
            sums.setdefault(name, RowSum()).add(checksum)
            total.add(checksum)
        number += len(rows)
    people = [IdentityRow(owners[name], name, own.rows, own.checksums) for name, own in sums.items()]
    update_identities(session, people)
    state = replaced(
        state,
        next_number=number,
        next_identity=state.next_identity + len(owners),
        identities=len(people),
        identity_sum=sum(person.checksum for person in people),
        templates=total.rows,
        template_sum=total.checksums,
    )
    here = ContentCounter(dim)
    for part in scan_templates(session, state, dim, 8192):
        here.add(part.identities, part.vectors)
    agree(came.content(), here.content())
    text = None if calibrated is None else calibration_to_json(replaced(calibrated, sequence=sequence))
    state = write_calibration(
        session, state, text, sequence
    )  # none, too: one of people who were here before is not theirs
    return write_receipt(session, None, "", Receipt(sequence, tuple(range(first, number))), state)


def scan_templates(
    session: Transaction, state: RevisionState, dim: int, batch: int, names: Mapping[int, str] | None = None
) -> Iterator[Templates]:
    """All templates in the order of their numbers; refused at the end where any of them is missing.

    ``names`` of all identities by id, where they were checked at this state before.
    """
    names, total = read_identities(session, state) if names is None else names, RowSum()
    for rows in session.stream(f"SELECT {TEMPLATE_COLUMNS} FROM templates t ORDER BY t.number", batch):
        part = decode_templates(session, rows, dim, names)
        total.add(int(part.checksums.sum()), len(rows))
        yield part
    total.compare(state.templates, state.template_sum, "templates")


Result = TypeVar("Result")


KEPT_NAMES = 100_000  # names of all identities, or of owners of templates, that are kept between questions


@dataclass
class CheckedNames:
    """Names that were read and checked at one state of the storage.

    They are used again until the state is another one: what was not changed since is what was checked. What is damaged
    on the disk meanwhile is found by whatever reads it: a change, the next opening, `check`, a scrub.
    """

    state: RevisionState
    mark: tuple[int, int]  # sequence and checksum of the state's row
    owners: dict[int, str] = field(default_factory=dict)  # of templates that were asked for
    names: dict[int, str] | None = None  # of all identities by id


class SqlStorage(ABC):
    """A storage in a database. Subclasses give transactions and say how theirs is made, opened and compacted."""

    kind: str
    _fixed: FixedMetadata
    _proof: IndexProof
    _checked: CheckedNames | None = None

    @abstractmethod
    def _run_read(self, work: Callable[[Transaction], Result]) -> Result:
        """Run ``work`` in a transaction that reads one moment; it may be run twice."""

    @abstractmethod
    def _run_statement(self, work: Callable[[Transaction], Result]) -> Result:
        """Run ``work``, whose one statement reads one moment without a transaction around it; it may be run twice."""

    @abstractmethod
    def _run_write(self, work: Callable[[Transaction], Receipt], *, named: bool = False) -> Receipt:
        """Run ``work`` alone and commit it durably; ``named``: doing it again after a commit changes nothing."""

    @abstractmethod
    def _read_transaction(self) -> AbstractContextManager[Transaction]:
        """A transaction that reads one moment for as long as it is held."""

    @abstractmethod
    def for_writing(self) -> Any:
        """Refuse, where it was opened for reading."""

    def _default_request(self) -> str | None:
        """What a request is called that the caller did not name; None: it needs no name."""
        return None

    @property
    def binding(self) -> Binding:
        """What its templates are."""
        return self._fixed.binding

    @property
    def model_files(self) -> Mapping[str, str]:
        """SHA-256 of the copy of the model that lies beside it."""
        return self._fixed.model_files

    def sequence(self) -> int:
        """Number of the last acknowledged change."""
        return self.state().sequence

    def state(self) -> RevisionState:
        """How far it has come, and what it holds."""
        return self._run_statement(self._read_checked_names).state

    def _read_checked_names(self, session: Transaction) -> CheckedNames:
        """The state, and the names that were checked at it."""
        known, mark = self._checked, session.execute(STATE_MARK)
        if known is None or mark != [known.mark]:
            state = read_state(session)
            known = self._checked = CheckedNames(state, (state.sequence, state.row()[-1]))
        return known

    def size(self) -> Size:
        """How much is enrolled now."""
        return size_of(self.state())

    @property
    def identity(self) -> str:
        """Which storage this is: a name that a copy of it shares and no other storage has."""
        return keyed_hash(self._fixed.salt, "storage")

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
        return self._enrol_people([(identity, vectors)], request, replace, distinct, former)

    def enrol_many(
        self, people: Sequence[tuple[str, np.ndarray]], *, replace: bool = False, distinct: bool = False
    ) -> Receipt:
        """The same for several identities in one change: all of them or, if it fails, none."""
        return self._enrol_people(people, None, replace, distinct)

    def _enrol_people(
        self,
        people: Sequence[tuple[str, np.ndarray]],
        request: str | None,
        replace: bool,
        distinct: bool,
        former: Sequence[str] = (),
    ) -> Receipt:
        checked = [(check_name(identity), check_vectors(v, self.binding.dim)) for identity, v in people]
        verb, name = "replace" if replace else "enrol", self._request_key(request)
        asked = self._request_hash(verb, " ".join(who for who, _ in checked))
        alike = {asked, *(self._request_hash(verb, other) for other in former)}

        def work(session: Transaction) -> Receipt:
            state = read_state(session)
            if known := find_receipt(session, name, alike, state, self._proof):
                return known
            first, skipped, seen = state.next_number, 0, set[str]()
            added = AddedRows(state, state.sequence + 1)
            for identity, rows in checked:
                if identity in seen:  # who is looked up must be there
                    added.write(session)
                owner, has = find_identity(session, identity, added.state, self._proof), rows[:0]
                emptied = owner is not None and replace and identity not in seen
                if owner is not None and emptied:
                    _, added.state = remove_templates(session, owner, added.sequence, added.state)
                elif owner is not None and distinct:
                    has = self._read_templates(session, identity, added.state).vectors
                seen.add(identity)
                if distinct:
                    given, rows = len(rows), select_new_rows(rows, has)
                    skipped += given - len(rows)
                added.add(identity, owner, rows, emptied=emptied)
            state = added.write(session)
            numbers = tuple(range(first, state.next_number))
            return write_receipt(session, name, asked, Receipt(added.sequence, numbers, skipped=skipped), state)

        receipt = self._run_write(work, named=name is not None)
        return receipt if request is not None else replaced(receipt, repeated=False)

    def delete(self, identity: str, *, request: str | None = None, former: Sequence[str] = ()) -> Receipt:
        """Remove an identity and all its templates; the receipt has their numbers."""
        names = [*(check_name(other) for other in former), check_name(identity)]
        asked, name = {each: self._request_hash("delete", each) for each in names}, self._request_key(request)

        def work(session: Transaction) -> Receipt:
            state = read_state(session)
            if known := find_receipt(session, name, asked.values(), state, self._proof):
                return known
            owners = (find_identity(session, each, state, self._proof) for each in names)
            if (owner := next((found for found in owners if found is not None), None)) is None:
                raise UnknownIdentity(f"nobody called {identity!r:.80} is enrolled: nothing was deleted")
            numbers, state = remove_templates(session, owner, state.sequence + 1, state)
            session.execute("DELETE FROM identities WHERE id = ?", owner.id)
            left = state.identity_sum - owner.checksum
            state = replaced(state, identities=state.identities - 1, identity_sum=left)
            return write_receipt(session, name, asked[owner.name], Receipt(state.sequence + 1, numbers), state)

        receipt = self._run_write(work, named=name is not None)
        return receipt if request is not None else replaced(receipt, repeated=False)

    def has_identity(self, identity: str) -> bool:
        """Whether somebody is enrolled under exactly this name."""
        identity = check_name(identity)
        return self._run_read(
            lambda session: find_identity(session, identity, read_state(session), self._proof) is not None
        )

    def calibration_status(self) -> CalibrationStatus | None:
        """The calibration that is kept, and what has changed since."""
        return self._run_read(read_standing)

    def keep_calibration(self, found: GalleryCalibration | None) -> Receipt:
        """Keep a calibration instead of the former one, or none; the same one again is no change."""
        text, tried = None if found is None else calibration_to_json(found), False

        def work(session: Transaction) -> Receipt:
            nonlocal tried
            state = read_state(session)
            try:
                same = read_calibration(session, state) == text
            except GalleryError:  # damaged: whatever it was, this takes its place
                same = False
            if same:
                return Receipt(
                    state.sequence, (), repeated=not tried
                )  # or it was this call, and the line broke after it
            tried = True
            state = write_calibration(session, state, text, 0 if found is None else found.sequence)
            return write_receipt(session, None, "", Receipt(state.sequence + 1, ()), state)

        return self._run_write(work, named=True)

    def templates_of(self, identity: str) -> Templates:
        """All templates of an identity; none: empty."""
        identity = check_name(identity)
        found = self._run_statement(lambda session: self._find_templates(session, identity))
        return found or self._run_read(lambda session: self._read_templates(session, identity))

    def _read_templates(self, session: Transaction, identity: str, state: RevisionState | None = None) -> Templates:
        """All templates of an identity; none, where nobody is called so."""
        if found := self._find_templates(session, identity):
            return found
        find_identity(session, identity, state or read_state(session), self._proof)
        return decode_owned(session, [], self.binding.dim)

    def _find_templates(self, session: Transaction, identity: str) -> Templates | None:
        rows = session.execute(TEMPLATES_OF, identity)
        if not rows:
            return None
        owner = IdentityRow.from_row(rows[0][5:])
        if owner.name != identity:
            raise damage_error(f"the index of names leads from {identity!r:.80} to somebody else")
        own = [row[:5] for row in rows if row[0] is not None]
        found = decode_templates(session, own, self.binding.dim, {owner.id: owner.name})
        total = RowSum(len(own), sum(row[3] for row in own))
        total.compare(owner.templates, owner.template_sum, f"templates of identity {owner.id}")
        return found

    def names_of(self, numbers: np.ndarray) -> list[str | None]:
        """Whose templates these are; None for those that are not there."""
        return self.owners(numbers)[1]

    def owners(self, numbers: Iterable[int], *, anew: bool = False) -> tuple[RevisionState, list[str | None]]:
        """Whose templates these are, None for those that are not there, and what the storage held at that moment.

        ``anew``: no name is taken from memory; every row is read and checked now.
        """
        wanted = [int(number) for number in numbers]

        def work(session: Transaction) -> tuple[RevisionState, list[str | None]]:
            known = self._read_checked_names(session)
            kept = {} if anew else known.owners
            unread = [number for number in wanted if number not in kept]
            found: dict[int, str] = {}
            for start in range(0, len(unread), PAGE):
                page = unread[start : start + PAGE]
                marks = ", ".join("?" * len(page))
                rows = session.execute(f"{OWNED_TEMPLATES} WHERE t.number IN ({marks})", *page)
                found |= name_owners(session, rows, self.binding.dim)
            names = [kept.get(number) or found.get(number) for number in wanted]
            if len(known.owners) + len(found) <= KEPT_NAMES:
                known.owners.update(found)
            return known.state, names

        return self._run_read(work)

    def templates_at(self, numbers: np.ndarray) -> Templates:
        """The templates with these numbers, in the order of their numbers; those that are not there are left out."""
        wanted = sorted({int(number) for number in numbers})

        def work(session: Transaction) -> Templates:
            found: list[tuple] = []
            for start in range(0, len(wanted), PAGE):
                page = wanted[start : start + PAGE]
                marks = ", ".join("?" * len(page))
                found += session.execute(f"{OWNED_TEMPLATES} WHERE t.number IN ({marks}) ORDER BY t.number", *page)
            return decode_owned(session, found, self.binding.dim)

        return self._run_read(work)

    def ids(self) -> Iterator[str]:
        """All identities, sorted by code point; read in pages, so that nothing is held while the caller works."""
        known = self._run_statement(self._read_checked_names)
        if known.names is not None:
            yield from sorted(known.names.values())
            return
        last, total, names = "", RowSum(), dict[int, str]()
        sql = f"SELECT {IDENTITY_COLUMNS} FROM identities i WHERE i.name > ? ORDER BY i.name LIMIT {PAGE}"
        while True:
            now, page = self._run_read(
                lambda session, last=last: (self._read_checked_names(session), session.execute(sql, last))
            )
            found = check_identities(page)
            check_order(found, last, "identities")
            total.add(sum(row[4] for row in page), len(page))
            if known.state.identities <= KEPT_NAMES:
                names.update(zip((row[0] for row in page), found, strict=True))
            yield from found
            last = found[-1] if found else last
            if len(page) < PAGE:
                break
        if now.state == known.state:  # otherwise people came or went meanwhile
            total.compare(now.state.identities, now.state.identity_sum, "identities")
            now.names = names if len(names) == now.state.identities else None

    def scan(self, *, batch: int = 65536) -> Iterator[Templates]:
        """All templates in the order of their numbers, as of one moment; refused at the end if any is missing."""
        with self._read_transaction() as session:
            known = self._read_checked_names(session)
            names = known.names or read_identities(session, known.state)
            if len(names) <= KEPT_NAMES:
                known.names = names
            yield from scan_templates(session, known.state, self.binding.dim, batch, names)

    def changes_since(self, after: int) -> Changes | None:
        """What happened after a sequence number; None where the storage no longer remembers, or has not got so far."""
        after = int(after)

        def work(session: Transaction) -> Changes | None:
            state = read_state(session)
            if not state.oldest_sequence <= after <= state.sequence:
                return None
            numbers, checksums = read_deleted(session, after)
            new = session.execute(f"{OWNED_TEMPLATES} WHERE t.sequence > ? ORDER BY +t.number", after)
            return Changes(
                state.sequence,
                np.asarray(numbers, np.int64),
                decode_owned(session, new, self.binding.dim),
                np.asarray(checksums, np.int64),
                RowSum(state.templates, state.template_sum),
            )

        return self._run_read(work)

    def digest(self) -> str:
        """A checksum over all live templates that does not depend on numbers, order or kind of storage."""
        tally = ContentCounter(self.binding.dim)
        for part in self.scan(batch=8192):
            tally.add(part.identities, part.vectors)
        return tally.content().digest

    def inspect(self, work: Callable[[Transaction], Result]) -> Result:
        """Run ``work`` in a transaction that reads one moment."""
        return self._run_read(work)

    def forget_pages(self) -> None:
        """Keep nothing of what was read before, so that what is read next is read again."""
        self._checked = None

    def check(self) -> list[str]:
        """What is wrong with the storage, in words."""
        self._checked = None
        return self._run_read(lambda session: find_damage(session, self.binding.dim))[:FINDINGS]

    def load_templates(self, scan: Scan, agree: Agree, calibrated: GalleryCalibration | None = None) -> Receipt:
        """Fill an empty storage in one change; ``agree`` sees what came and what is here and may still refuse."""
        return self._run_write(lambda session: fill_storage(session, self.binding.dim, scan, agree, calibrated))

    def _request_hash(self, verb: str, identity: str) -> str:
        """What is asked, as a hash."""
        return keyed_hash(self._fixed.salt, f"{verb} {identity}")

    def _request_key(self, request: str | None) -> str | None:
        """Under which name it is asked."""
        return self._default_request() if request is None else check_name(request, "request")
