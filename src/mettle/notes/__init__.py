"""The five notes that mettle implements, rebuilt: a chapter's runs, figures, tables and verdicts on one page."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mettle.notes.book import TITLES, build_chapter
    from mettle.notes.chapter import Chapter, NoteClaim

__all__ = ["TITLES", "Chapter", "NoteClaim", "build_chapter"]
_HOMES = {"TITLES": "book", "Chapter": "chapter", "Claim": "chapter", "build_chapter": "book"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"mettle.notes.{_HOMES[name]}"), name)
