"""Many people at once: some hundreds of them become one durable change."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mettle.errors import InputError
from mettle.match.naming import settled
from mettle.match.record import Receipt, Record

TOGETHER, ROWS = 256, 16384  # people, and about as many templates, of one change
WANTED = "people must be pairs (identity, templates), of a dict its items()"


def enrol_crowd(
    record: Record, people: Iterable[tuple[str, Any]], vectors: Callable[[Any], np.ndarray], *, replace: bool
) -> list[Receipt]:
    """Enrol (identity, templates) of many, one receipt a change; ``vectors`` makes unit rows of templates."""
    receipts: list[Receipt] = []
    seen: set[str] = set()
    pending: dict[str, list[np.ndarray]] = {}  # whoever comes several times is looked up once

    def send() -> None:
        theirs = [(name, np.concatenate(parts)) for name, parts in pending.items()]
        new = [person for person in theirs if person[0] not in seen]
        again = [person for person in theirs if person[0] in seen]  # theirs from before is of this call: it stays
        for some, anew in ((new, replace), (again, False)):
            if some:
                receipts.append(record.enrol_many(some, replace=anew, distinct=True))
        seen.update(pending)
        pending.clear()

    rows = 0
    for identity, templates in _pairs(people):
        name, made = settled(identity, record.has), vectors(templates)
        pending.setdefault(name, []).append(made)
        rows += len(made)
        if len(pending) == TOGETHER or rows >= ROWS:
            send()
            rows = 0
    send()
    return receipts


def _pairs(people: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What was given, if it is pairs."""
    try:
        given = iter(people)
    except TypeError:
        raise InputError(f"{WANTED}: got {type(people).__name__}") from None
    for place, person in enumerate(given):
        if not isinstance(person, tuple | list) or len(person) != 2:
            many = f" of {len(person)}" if isinstance(person, tuple | list) else ""
            raise InputError(f"{WANTED}: got {type(person).__name__}{many} as number {place} (from 0)")
        yield person[0], person[1]
