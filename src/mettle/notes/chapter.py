"""What a chapter is made of: figures, tables, cards and claims in sections, and the settings it is built with."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from matplotlib.figure import Figure as Drawing

from mettle.evaluate.plots import svg_data_url

Verdict = Literal["holds", "contradicted", "not yet decided", "withdrawn"]
T = TypeVar("T")
PIXELS_PER_INCH = 110  # of the PNG files


@dataclass(frozen=True)
class Figure:
    """A picture, for the page and as a file."""

    name: str  # of its file, without ending
    caption: str
    image: str  # data address
    png: bytes
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Text in rows, the first cell of each its heading."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class NoteClaim:
    """What a note or its paper says, what the records say of it, and where they say it."""

    says: str
    verdict: Verdict
    because: str
    record: str = ""  # a page of docs/results, or a command that measures it


@dataclass(frozen=True)
class ChapterSection:
    """One heading of a chapter."""

    title: str
    lede: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    negatives: Sequence[Any] = ()  # cards of anchors with their easiest and hardest negatives
    claims: Sequence[NoteClaim] = ()


@dataclass(frozen=True)
class Chapter:
    """All sections of one note."""

    number: int
    title: str
    about: str
    sections: Sequence[ChapterSection]

    @property
    def figures(self) -> list[Figure]:
        """All figures, in order."""
        return [figure for section in self.sections for figure in section.figures]


@dataclass(frozen=True)
class BuildSettings:
    """Where a chapter is built, for how long it trains, and who hears what it does."""

    folder: Path
    quick: bool = False
    cache: Path | None = None
    say: Callable[[str], None] = field(default=lambda line: None)

    def choose(self, quick: T, full: T) -> T:
        """One value for the quick form and one for the full form."""
        return quick if self.quick else full


def finish_figure(drawing: Drawing, name: str, caption: str, wide: bool = False) -> Figure:
    """The drawing as SVG for the page and as PNG for a file; call it inside of ``new_figure``."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=PIXELS_PER_INCH, metadata={"Software": None})
    return Figure(name, caption, svg_data_url(drawing), buffer.getvalue(), wide)
