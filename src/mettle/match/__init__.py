"""Enrolled people and who is who: `Gallery`, its record, its index and its answers.

Names are loaded when they are first used, so that a record can be opened without waiting for an index library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mettle.match.answer import Candidate, Identified, Info, Verified
    from mettle.match.audit import Audited
    from mettle.match.choose import Measured, Wanted
    from mettle.match.gallery import Gallery
    from mettle.match.record import Binding, Receipt

_HOMES = {
    "Audited": "audit",
    "Binding": "record",
    "Candidate": "answer",
    "Gallery": "gallery",
    "Identified": "answer",
    "Info": "answer",
    "Measured": "choose",
    "Receipt": "record",
    "Verified": "answer",
    "Wanted": "choose",
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
        raise AttributeError(f"module 'mettle.match' has no attribute {name!r}")
    return getattr(import_module(f"mettle.match.{_HOMES[name]}"), name)
