"""One thing that `mettle doctor` looked at, and how to look without falling over what is found."""

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Section = Literal["machine", "needed", "optional", "self-check"]
State = Literal["ok", "note", "missing", "broken"]

LONGEST = 200  # characters of somebody else's error


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: its line, and the same as facts for programs.

    ``broken`` is there and does not work, ``missing`` is optional and not there, ``note`` is worth knowing.
    """

    section: Section
    name: str
    state: State
    said: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"  {self.state:<7}  {self.name:<24}  {self.said}"


def tried(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What this gives, or the error; what packages print and warn of on the way is not part of the report."""
    unheard = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard):
        warnings.simplefilter("ignore")
        try:
            return work(), None
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a package may raise anything when it is imported, SystemExit too
            return None, error


def line(error: object) -> str:
    """An error of somebody else in one line."""
    text = " ".join(str(error).split())
    text = f"{text[:LONGEST]}…" if len(text) > LONGEST else text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
