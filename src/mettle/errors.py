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

A message names what came, what was wanted and what to do, in one line. The command line prints that line and
exits with status 2; a traceback that reaches a user is a bug in mettle.
"""

from collections.abc import Iterable
from difflib import get_close_matches


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


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant: ``"; did you mean 'SupCon'?"``, or list them all."""
    known = sorted(known)
    close = get_close_matches(name, known, n=1, cutoff=0.5) or get_close_matches(
        name.lower(), [k.lower() for k in known], n=1, cutoff=0.5
    )
    if close:
        meant = next(k for k in known if k.lower() == close[0].lower())
        return f"; did you mean {meant!r}?"
    return f"; known are {', '.join(known)}" if known else ""
