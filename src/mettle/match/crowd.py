"""Many people at once: some hundreds of them become one durable change."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mettle.match.naming import settled
from mettle.match.record import Receipt, Record

TOGETHER, ROWS = 256, 16384  # people, and about as many templates, of one change


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
    for identity, templates in people:
        name, made = settled(identity, record.has), vectors(templates)
        pending.setdefault(name, []).append(made)
        rows += len(made)
        if len(pending) == TOGETHER or rows >= ROWS:
            send()
            rows = 0
    send()
    return receipts
