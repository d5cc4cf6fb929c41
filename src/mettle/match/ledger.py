"""What every SQL record does alike: the verbs of `Record` over transactions that a database gives.

`sqlite` and `postgres` say how a transaction is made (`_read`, `_write`, `_reading`); `statements` says what is done
in it; here is which statements make a verb, so that both kinds obey the same laws by the same lines.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace as replaced
from typing import Any, TypeVar

import numpy as np

from mettle.errors import UnknownIdentity
from mettle.match import calibration, content, restore, statements, twins
from mettle.match.calibration import Calibration, Standing
from mettle.match.content import Tally
from mettle.match.record import Binding, Changes, Receipt, Size, Templates
from mettle.match.statements import Session, Tombstone

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
        return self._read(lambda session: statements.counter(session)[0])

    def size(self) -> Size:
        """How much is enrolled now."""
        return self._read(statements.size)

    @property
    def identity(self) -> str:
        """Which record this is: a name that a copy of it shares and no other record has."""
        return content.pseudonym(self._salt, "record")

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
        checked = [(content.name(identity), content.vectors(v, self._binding.dim)) for identity, v in people]
        verb, name = "replace" if replace else "enrol", self._named(request)
        asked = self._asked(verb, " ".join(who for who, _ in checked))
        alike = {asked, *(self._asked(verb, other) for other in former)}

        def work(session: Session) -> Receipt:
            if known := statements.served(session, name, alike):
                return known
            sequence, first, _ = statements.counter(session)
            sequence, number, cleared, skipped = sequence + 1, first, set(), 0
            for identity, rows in checked:
                owner, has = statements.owner_of(session, identity), rows[:0]
                if owner is None:
                    owner = session.rows("INSERT INTO identities (name) VALUES (?) RETURNING id", identity)[0][0]
                elif replace and identity not in cleared:
                    statements.remove(session, owner, sequence, content.pseudonym(self._salt, identity), number)
                elif distinct:
                    has = self._of(session, identity).vectors
                cleared.add(identity)
                if distinct:
                    given, rows = len(rows), twins.new_rows(rows, has)
                    skipped += given - len(rows)
                placed = [(number + i, owner, identity, row) for i, row in enumerate(rows)]
                statements.insert(session, placed, sequence)
                number += len(rows)
            receipt = Receipt(sequence, tuple(range(first, number)), skipped=skipped)
            return statements.acknowledge(session, name, asked, receipt, number)

        receipt = self._write(work, named=name is not None)
        return receipt if request is not None else replaced(receipt, repeated=False)

    def delete(self, identity: str, *, request: str | None = None, former: Sequence[str] = ()) -> Receipt:
        """Remove an identity and all its templates; the receipt has their numbers."""
        names = [*(content.name(other) for other in former), content.name(identity)]
        asked, name = {each: self._asked("delete", each) for each in names}, self._named(request)

        def work(session: Session) -> Receipt:
            if known := statements.served(session, name, asked.values()):
                return known
            owners = ((each, statements.owner_of(session, each)) for each in names)
            who, owner = next((found for found in owners if found[1] is not None), (identity, None))
            if owner is None:
                raise UnknownIdentity(f"nobody called {identity!r:.80} is enrolled: nothing was deleted")
            sequence, number, _ = statements.counter(session)
            numbers = statements.remove(session, owner, sequence + 1, content.pseudonym(self._salt, who), number)
            session.rows("DELETE FROM identities WHERE id = ?", owner)
            return statements.acknowledge(session, name, asked[who], Receipt(sequence + 1, numbers), number)

        receipt = self._write(work, named=name is not None)
        return receipt if request is not None else replaced(receipt, repeated=False)

    def has(self, identity: str) -> bool:
        """Whether somebody is enrolled under exactly this name."""
        identity = content.name(identity)
        return self._read(lambda session: statements.owner_of(session, identity) is not None)

    def standing(self) -> Standing | None:
        """The calibration that is kept, and what has changed since."""
        return self._read(statements.standing)

    def calibrate(self, found: Calibration | None) -> Receipt:
        """Keep a calibration instead of the former one, or none; the same one again is no change."""
        text, tried = None if found is None else calibration.to_json(found), False

        def work(session: Session) -> Receipt:
            nonlocal tried
            sequence, number, _ = statements.counter(session)
            if statements.kept_calibration(session) == text:
                return Receipt(sequence, (), repeated=not tried)  # or it was this call, and the line broke after it
            tried = True
            statements.keep_calibration(session, text)
            return statements.acknowledge(session, None, "", Receipt(sequence + 1, ()), number)

        return self._write(work, named=True)

    def templates(self, identity: str) -> Templates:
        """All templates of an identity; none: empty."""
        identity = content.name(identity)
        return self._read(lambda session: self._of(session, identity))

    def _of(self, session: Session, identity: str) -> Templates:
        found = session.rows(f"{statements.ROWS} WHERE i.name = ? ORDER BY t.number", identity)
        return statements.as_templates(session, found, self._binding.dim)

    def names(self, numbers: np.ndarray) -> list[str | None]:
        """Whose templates these are; None for those that are not there."""
        wanted = [int(number) for number in numbers]

        def work(session: Session) -> dict[int, str]:
            found: dict[int, str] = {}
            for start in range(0, len(wanted), statements.PAGE):
                page = wanted[start : start + statements.PAGE]
                marks = ", ".join("?" * len(page))
                found |= session.rows(
                    "SELECT t.number, i.name FROM templates t JOIN identities i ON i.id = t.identity "
                    f"WHERE t.number IN ({marks})",
                    *page,
                )
            return found

        found = self._read(work)
        return [found.get(number) for number in wanted]

    def ids(self) -> Iterator[str]:
        """All identities, sorted by code point; read in pages, so that nothing is held while the caller works."""
        last = ""
        while True:
            sql = f"SELECT name FROM identities WHERE name > ? ORDER BY name LIMIT {statements.PAGE}"
            page = self._read(lambda session, last=last, sql=sql: session.rows(sql, last))
            yield from (row[0] for row in page)
            if len(page) < statements.PAGE:
                return
            last = page[-1][0]

    def scan(self, *, batch: int = 65536) -> Iterator[Templates]:
        """All templates in the order of their numbers, as of one moment."""
        with self._reading() as session:
            for rows in session.each(f"{statements.ROWS} ORDER BY t.number", batch):
                yield statements.as_templates(session, rows, self._binding.dim)

    def changes(self, after: int) -> Changes | None:
        """What happened after a sequence number; None where the record no longer remembers, or has not got so far."""
        after = int(after)

        def work(session: Session) -> Changes | None:
            sequence, _, floor = statements.counter(session)
            if not floor <= after <= sequence:
                return None
            gone = session.rows("SELECT number FROM removals WHERE sequence > ? ORDER BY +number", after)
            new = session.rows(f"{statements.ROWS} WHERE t.sequence > ? ORDER BY +t.number", after)
            removed = np.fromiter((row[0] for row in gone), np.int64, len(gone))
            return Changes(sequence, removed, statements.as_templates(session, new, self._binding.dim))

        return self._read(work)

    def digest(self) -> str:
        """A checksum over all live templates that does not depend on numbers, order or kind of record."""
        tally = Tally(self._binding.dim)
        for part in self.scan(batch=8192):
            tally.add(part.identities, part.vectors)
        return tally.content().digest

    def check(self) -> list[str]:
        """What is wrong with the record, in words."""
        return self._read(lambda session: statements.findings(session, self._binding.dim))[: statements.FINDINGS]

    def tombstones(self, after: int = 0) -> tuple[Tombstone, ...]:
        """What was removed after a sequence number; keep it apart from backups, and `apply` it to a restored one."""
        sql = "SELECT sequence, person, number FROM tombstones WHERE sequence > ? ORDER BY sequence"
        return self._read(lambda session: tuple(Tombstone(*row) for row in session.rows(sql, int(after))))

    def apply(self, tombstones: Sequence[Tombstone]) -> Receipt:
        """Remove from a restored backup what was removed after the backup was made; the receipt has the numbers.

        Views of the lost history are not taken for views of this record: `changes` answers None to them.
        """
        return self._write(lambda session: restore.bury(session, self._salt, tombstones))

    def load(self, scan: restore.Scan, agree: restore.Agree, calibrated: Calibration | None = None) -> Receipt:
        """Fill an empty record in one change; ``agree`` sees what came and what is here and may still refuse."""
        return self._write(lambda session: restore.fill(session, self._binding.dim, scan, agree, calibrated))

    def _asked(self, verb: str, identity: str) -> str:
        """What is asked, as a hash."""
        return content.pseudonym(self._salt, f"{verb} {identity}")

    def _named(self, request: str | None) -> str | None:
        """Under which name it is asked."""
        return self._nameless() if request is None else content.name(request, "request")
