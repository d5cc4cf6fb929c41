"""What people of a gallery may be called: one spelling, and nothing that a list or a terminal cannot show.

A record keeps any name. A gallery takes new ones in Unicode's composed form (NFC), in which "José" is the same text
however it was typed, and finds those that an older version kept in another form.
"""

import unicodedata
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any

from mettle.errors import InputError
from mettle.match import content
from mettle.match.record import IDENTITY_BYTES

MOST_COMPARED = 10_000  # names among which the nearest to a misspelt one is looked for: within a second
_BREAKS = ("Cc", "Zl", "Zp")  # control characters, separators of lines and of paragraphs


def spellings(identity: Any) -> tuple[str, ...]:
    """The names that a text may stand for: as it came, decomposed as some systems type it, and last composed."""
    given = content.name(identity)
    composed, parts = unicodedata.normalize("NFC", given), unicodedata.normalize("NFD", given)
    others = (given, parts) if len(parts.encode()) <= IDENTITY_BYTES else (given,)  # longer ones were never kept
    return *dict.fromkeys(text for text in others if text != composed), composed


def settled(identity: Any, known: Callable[[str], bool]) -> str:
    """The name to enrol somebody under; a name that is in use as it came stays as it is."""
    *former, name = spellings(identity)
    if (old := next((text for text in former if known(text)), None)) is not None:
        return old
    name = content.name(name)
    if wrong := next((letter for letter in name if unicodedata.category(letter) in _BREAKS), None):
        if known(name):
            return name
        raise InputError(f"identity must hold no control characters or line breaks: got {wrong!r} in {name!r:.80}")
    return name


def suggest_name(identity: str, names: Iterable[str]) -> str:
    """Who was probably meant by a name that nobody has: ``"; did you mean 'anna'?"``, or nothing."""
    folded = {name.casefold(): name for name in islice(names, MOST_COMPARED)}
    close = get_close_matches(identity.casefold(), folded, n=1, cutoff=0.7)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""
