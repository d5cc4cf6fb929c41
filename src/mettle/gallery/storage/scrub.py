"""A scrub: everything that answers rest on is read again, while others read and write.

Damage on a disk shows when a row is read, and some rows are not read for months. A scrub reads all of them, in parts:
each is a transaction of its own that looks at a few hundred people with all that is theirs, and whose sums must agree
with those people's rows. That the tables hold as many rows as they should is compared in one short transaction more.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mettle.gallery.binding import find_damaged_files
from mettle.gallery.storage.integrity import RowSum
from mettle.gallery.storage.sql import (
    FINDINGS,
    IDENTITY_COLUMNS,
    SUMS,
    TEMPLATE_COLUMNS,
    IdentityRow,
    Transaction,
    decode_templates,
    list_damage,
    read_fixed_metadata,
    read_standing,
    read_state,
)

if TYPE_CHECKING:
    from mettle.gallery.storage.base import Storage

PART = 256  # people looked at in one transaction
MODEL = "model"


@dataclass(frozen=True)
class ScrubReport:
    """What a scrub has read, and what was wrong with it, in words."""

    identities: int
    templates: int
    files: int  # of the copy of the model
    seconds: float
    problems: tuple[str, ...]

    def __str__(self) -> str:
        found = f"{len(self.problems)} problems" if self.problems else "sound"
        return (
            f"{self.identities} people, {self.templates} templates, {self.files} files of the model read again in "
            f"{self.seconds:.1f} s: {found}"
        )


def scrub_storage(storage: "Storage", folder: Path | None, pause: float = 0.0) -> ScrubReport:
    """Read all rows of a storage, and the copy of the model in its folder, again."""
    began, found, people, templates, last = time.monotonic(), list[str](), 0, 0, 0
    storage.forget_pages()
    while True:
        part: tuple[int, int, int] | None = None
        with list_damage(found):
            part = storage.inspect(lambda session, last=last: _read_part(session, storage.binding.dim, last, found))
        if part is None:  # the part itself cannot be read: the sums below, and `check`, say what else there is
            break
        last, people, templates = part[0], people + part[1], templates + part[2]
        if part[1] < PART:
            break
        time.sleep(pause)
    storage.inspect(lambda session: _compare_sums(session, found))
    files = storage.model_files if folder is not None else {}
    if folder is not None:
        found += find_damaged_files(folder / MODEL, files, files)
    return ScrubReport(people, templates, len(files), time.monotonic() - began, tuple(found[:FINDINGS]))


def _read_part(session: Transaction, dim: int, after: int, found: list[str]) -> tuple[int, int, int]:
    """Look at the people that follow an id: the last id, how many they are, and how many templates they have."""
    rows = session.execute(
        f"SELECT {IDENTITY_COLUMNS} FROM identities i WHERE i.id > ? ORDER BY i.id LIMIT {PART}", after
    )
    count = 0
    for row in rows:
        with list_damage(found):
            owner = IdentityRow.from_row(row)
            sql = f"SELECT {TEMPLATE_COLUMNS} FROM templates t WHERE t.identity = ? ORDER BY t.number"
            theirs = session.execute(sql, owner.id)
            part = decode_templates(session, theirs, dim, {owner.id: owner.name})
            own = RowSum(len(theirs), int(part.checksums.sum()))
            own.compare(owner.templates, owner.template_sum, f"templates of identity {owner.id}")
            count += len(theirs)
    return rows[-1][0] if rows else after, len(rows), count


def _compare_sums(session: Transaction, found: list[str]) -> None:
    """Whether the tables hold as many rows as they should, and metadata that can be read."""
    with list_damage(found):
        read_fixed_metadata(session)
        read_standing(session)
    with list_damage(found):
        state = read_state(session)
        for table, rows, total in (
            ("identities", state.identities, state.identity_sum),
            ("templates", state.templates, state.template_sum),
            ("idempotency_keys", state.requests, state.request_sum),
        ):
            with list_damage(found):
                RowSum(*session.execute(f"SELECT {SUMS} FROM {table}")[0]).compare(rows, total, table.replace("_", " "))
