"""Records as a whole: what was removed is removed from a restored backup too, and a record is filled from another.

Every function works inside a transaction that its caller has opened.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mettle.errors import GalleryError
from mettle.match import calibration, content, statements
from mettle.match.calibration import Calibration
from mettle.match.content import Content, Tally
from mettle.match.record import Receipt, Templates
from mettle.match.statements import Session, Tombstone

Scan = Callable[[], Iterator[Templates]]
Agree = Callable[[Content, Content], None]


def bury(session: Session, salt: str, tombstones: Sequence[Tombstone]) -> Receipt:
    """Remove what these say was removed; what came after them stays. The receipt has the numbers."""
    sequence, number, _ = statements.counter(session)
    known = set(session.rows("SELECT sequence, person FROM tombstones"))
    new = [stone for stone in tombstones if (stone.sequence, stone.person) not in known]
    if not new:
        return Receipt(sequence, (), repeated=True)
    sequence = max(sequence, *(stone.sequence for stone in new)) + 1
    number = max(number, *(stone.number for stone in new))
    people = {content.pseudonym(salt, name): owner for owner, name in statements.identities(session)}
    gone: list[int] = []
    for stone in new:
        session.rows("INSERT INTO tombstones VALUES (?, ?, ?)", stone.sequence, stone.person, stone.number)
        if (owner := people.get(stone.person)) is not None:
            gone += statements.remove(session, owner, sequence, None, number, before=stone.sequence)
    session.rows(f"DELETE FROM identities AS i WHERE {statements.ALONE}")
    session.rows("UPDATE counter SET floor = ?", sequence)
    return statements.acknowledge(session, None, "", Receipt(sequence, tuple(sorted(gone))), number)


def fill(session: Session, dim: int, scan: Scan, agree: Agree, calibrated: Calibration | None) -> Receipt:
    """Put all of ``scan`` into an empty record; ``agree`` sees what came and what is here and may still refuse."""
    sequence, number, _ = statements.counter(session)
    if statements.size(session).templates:
        raise GalleryError("the target is not empty: move into a new gallery")
    came, first, owners = Tally(dim), number, {}
    for part in scan():
        came.add(part.identities, part.vectors)
        rows = content.vectors(part.vectors, dim)
        owners |= statements.enter(session, [n for n in dict.fromkeys(part.identities) if n not in owners])
        placed = enumerate(zip(part.identities, rows, strict=True), number)
        statements.insert(session, [(n, owners[name], name, row) for n, (name, row) in placed], sequence + 1)
        number += len(rows)
    here = Tally(dim)
    for rows in session.each(f"{statements.ROWS} ORDER BY t.number", 8192):
        part = statements.as_templates(session, rows, dim)
        here.add(part.identities, part.vectors)
    agree(came.content(), here.content())
    text = None if calibrated is None else calibration.to_json(replace(calibrated, sequence=sequence + 1))
    statements.keep_calibration(session, text)  # none, too: one of people who were here before is not theirs
    receipt = Receipt(sequence + 1, tuple(range(first, number)))
    return statements.acknowledge(session, None, "", receipt, number)
