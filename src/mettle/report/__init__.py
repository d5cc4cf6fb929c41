"""Pages: one run as a card with figures and its hardest pairs, several runs side by side, an audit of embeddings."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mettle.report.audit_page import write_audit
    from mettle.report.comparison_page import write_comparison
    from mettle.report.run_page import write_report

__all__ = ["write_audit", "write_comparison", "write_report"]
_HOMES = {"write_audit": "audit_page", "write_comparison": "comparison_page", "write_report": "run_page"}


def __getattr__(name: str) -> Any:  # an audit needs no training, and a comparison no models: each loads what it needs
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"mettle.report.{_HOMES[name]}"), name)
