"""Every error a user can cause, drawn once.

    MettleError
    ├── InputError      an argument: wrong shape, type, range or device
    │   └── UnknownArgument   no argument has that name; a TypeError too
    ├── UnknownName     a module has nothing of that name; an AttributeError too
    ├── UnknownImport   the same in ``from module import name``; an ImportError too
    ├── DataError       a data set: missing, corrupt, contradictory, leaking
    ├── RecipeError     a recipe or a --set flag: unknown key, wrong type, impossible combination
    ├── RunError        a run folder: absent, incomplete, of another version, already there
    ├── NumericError    a number that must not be trusted: NaN, infinity, collapse
    ├── MissingExtra    an optional part that is not installed
    └── GalleryError    a gallery: absent, damaged, of another model, or its disk or server does not do its part
        ├── UnknownIdentity   nobody of that name is enrolled
        ├── GalleryLocked     another process is writing to it
        └── GalleryUnavailable  disk full, read-only, server down or slow: nothing was changed; try again later
            └── OutcomeUnknown  it failed while it committed: the whole change was made, or nothing of it

A message names what came, what was wanted and what to do, in one line. The command line prints that line and
exits with status 2; a traceback that reaches a user is a bug in mettle.
"""

from collections.abc import Iterable
from difflib import get_close_matches

SHORTEST = 3  # letters of a word that can be recognized although it is misspelt
LISTED = 40  # known names in one message


class MettleError(Exception):
    """Base of every error that mettle raises on purpose."""


class InputError(MettleError, ValueError):
    """An argument has the wrong shape, type, range or device."""


class UnknownArgument(InputError, TypeError):
    """A function or class has no argument of that name."""


class UnknownName(MettleError, AttributeError):
    """A module has nothing of that name."""


class UnknownImport(MettleError, ImportError):
    """A module has nothing of that name to import; no class can be an AttributeError and an ImportError at once."""


class DataError(MettleError):
    """A data set is missing, corrupt, contradictory or leaking."""


class RecipeError(MettleError):
    """A recipe names something unknown or impossible."""


class RunError(MettleError):
    """A run folder is absent, incomplete, of another version, or in the way."""


class NumericError(MettleError, ArithmeticError):
    """A number that must not be trusted: NaN, infinity, collapse."""


class MissingExtra(MettleError, ImportError):
    """An optional part of mettle is not installed."""


class GalleryError(MettleError):
    """A gallery is absent, damaged, bound to another model, or cannot do what was asked."""


class UnknownIdentity(GalleryError, LookupError):
    """Nobody of that name is enrolled."""


class GalleryLocked(GalleryError):
    """Another process is writing to the gallery."""


class GalleryUnavailable(GalleryError):
    """The disk or the server did not do its part; nothing was changed and a later try may succeed."""


class OutcomeUnknown(GalleryUnavailable):
    """It failed while it committed: all of the change was made or nothing; the same request again settles which."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant: ``"; did you mean 'SupCon'?"``, or else which ones are known.

    A name is suggested only where the difference looks like a slip: few edits for its length (capitals do not count),
    or an abbreviation that only one known name begins with. Another word that happens to share letters with a known
    one (``weights`` and ``width``) is answered with the list, which is the better help.
    """
    known = sorted(known)
    lowered = {k.lower(): k for k in reversed(known)}
    typed = name.lower()
    close = get_close_matches(typed, lowered, n=5, cutoff=0.6)  # cheap, and no slip is less alike than that
    slips = [(edit_distance(typed, word), word) for word in close]
    slips = [(edits, word) for edits, word in slips if edits <= _edits_allowed(typed, word)]
    begun = [word for word in lowered if len(typed) >= SHORTEST and word.startswith(typed)]
    if slips:
        return f"; did you mean {lowered[min(slips)[1]]!r}?"
    if len(begun) == 1:
        return f"; did you mean {lowered[begun[0]]!r}?"
    if not known:
        return ""
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    return f"; known are {', '.join(known[:LISTED])}{more}"


def edit_distance(a: str, b: str) -> int:
    """Optimal string alignment: insertions, deletions, substitutions and swaps of neighboring characters."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def _edits_allowed(typed: str, word: str) -> int:
    """How many edits still look like a slip: none in a word of two letters, one up to six, two up to eleven."""
    longer = max(len(typed), len(word))
    return 0 if longer < SHORTEST else 1 if longer < 7 else 2 if longer < 12 else 3
