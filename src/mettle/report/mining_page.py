"""What was mined, on one page: the account of every rule, copies under two labels, the hardest pairs with pictures."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mettle import __version__
from mettle.atomic_files import write_text
from mettle.mining import Account, MinedTriplets
from mettle.report.format import format_percent
from mettle.report.page import check_page_path, render_page

SHOWN = 24  # pairs in a list
MEANINGS = {
    "copies": "equal to the anchor number for number, under another label",
    "margin": "not less similar than the positive by the margin",
    "relative margin": "not less similar than the positive by that share of its similarity",
    "maximum score": "too similar to be believed",
    "minimum score": "easy anyway",
    "second model": "too similar to the anchor for another model",
}


def write_mining_page(
    mined: MinedTriplets,
    path: Path | str,
    describe: Callable[[int], Mapping[str, Any]],
    *,
    name: str,
    about: str,
    notes: Sequence[str] = (),
    command: Sequence[str] = (),
) -> Path:
    """Write the page.

    Args:
        mined: what was mined.
        path: of the page.
        describe: the ``name``, ``label``, ``domain`` and ``picture`` of a row.
        name: of the set.
        about: what the set is, in a sentence or two.
        notes: what to know before the examples are used.
        command: the command line that made it, to be shown on the page.
    """
    page = check_page_path(path)
    lists = {"negatives": mined.hardest_negatives(SHOWN), "positives": mined.hardest_positives(SHOWN)}
    shown = {
        kind: [_describe_pair(row, describe) for row in zip(found.first, found.second, found.scores, strict=True)]
        for kind, found in lists.items()
    }
    copies = [_describe_pair((a, b, 1.0), describe) for a, b in mined.copies[:SHOWN]]
    text = render_page(
        "mining.html.j2",
        name=name,
        about=about,
        notes=notes,
        account=mined.account,
        candidates=_describe_candidates(mined.account),
        search=str(mined.search),
        copies=copies,
        copied=len(np.unique(mined.copies)),
        command=shlex.join(command),
        version=__version__,
        shown=SHOWN,
        **shown,
    )
    write_text(page, text)
    return page


def _describe_candidates(account: Account) -> list[dict[str, str]]:
    """What became of the candidates: a row for each rule, and for what is left."""
    rows = [(name, count, MEANINGS[name]) for name, count in account.dropped.items()]
    rows += [("taken", account.mined, "the negatives of the table"), ("spare", account.spare, "would do as well")]
    of = max(account.candidates, 1)
    return [
        {"name": name, "count": f"{count:,}", "share": format_percent(count / of, 1), "meaning": meaning}
        for name, count, meaning in rows
    ]


def _describe_pair(row: tuple[Any, Any, Any], describe: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
    first, second, score = row
    sides = [describe(int(at)) for at in (first, second)]
    return {"score": f"{score:.3f}", "verdict": "", "wrong": False, "sides": sides}
