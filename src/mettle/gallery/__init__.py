"""Enrolled people and who is who: `Gallery`, its record, its index and its answers.

Names are loaded when they are first used, so that a record can be opened without waiting for an index library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mettle.gallery.audit import Audited
    from mettle.gallery.binding import Binding
    from mettle.gallery.gallery import Gallery
    from mettle.gallery.index.selection import Measured, Wanted
    from mettle.gallery.results import Candidate, Identified, Info, Receipt, Verified

_HOMES = {
    "Audited": "audit",
    "Binding": "binding",
    "Candidate": "results",
    "Gallery": "gallery",
    "Identified": "results",
    "Info": "results",
    "Measured": "index.selection",
    "Receipt": "results",
    "Verified": "results",
    "Wanted": "index.selection",
}
__all__ = [
    "Audited",
    "Binding",
    "Candidate",
    "Gallery",
    "Identified",
    "Info",
    "Measured",
    "Receipt",
    "Verified",
    "Wanted",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'mettle.gallery' has no attribute {name!r}")
    return getattr(import_module(f"mettle.gallery.{_HOMES[name]}"), name)
