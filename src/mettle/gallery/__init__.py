"""Enrolled people and who is who: `Gallery`, its storage, its index and its answers.

Names are loaded when they are first used, so that a storage can be opened without waiting for an index library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mettle.gallery.audit import GalleryAudit
    from mettle.gallery.binding import Binding
    from mettle.gallery.gallery import Gallery
    from mettle.gallery.index.selection import IndexBenchmark, IndexSpec
    from mettle.gallery.results import Candidate, IdentifyResult, Info, Receipt, VerifyResult

_HOMES = {
    "GalleryAudit": "audit",
    "Binding": "binding",
    "Candidate": "results",
    "Gallery": "gallery",
    "IdentifyResult": "results",
    "Info": "results",
    "IndexBenchmark": "index.selection",
    "Receipt": "results",
    "VerifyResult": "results",
    "IndexSpec": "index.selection",
}
__all__ = [
    "Binding",
    "Candidate",
    "Gallery",
    "GalleryAudit",
    "IdentifyResult",
    "IndexBenchmark",
    "IndexSpec",
    "Info",
    "Receipt",
    "VerifyResult",
]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'mettle.gallery' has no attribute {name!r}")
    return getattr(import_module(f"mettle.gallery.{_HOMES[name]}"), name)
