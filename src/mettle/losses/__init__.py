"""One loss, one short file; its docstring is the formula."""

from mettle.losses.supcon import DASupCon, SupCon

__all__ = ["DASupCon", "SupCon"]
