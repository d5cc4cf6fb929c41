"""One run as a card and a static page with figures and its hardest pairs; several runs side by side."""

from mettle.report.comparison import write_comparison
from mettle.report.page import write_report

__all__ = ["write_comparison", "write_report"]
