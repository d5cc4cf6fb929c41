"""Numbers as text, the same everywhere: value, interval, meaning."""

from collections.abc import Mapping
from typing import Any

from mettle.evaluate.bootstrap import TOO_FEW

NONE = "–"
GAP = "\N{NO-BREAK SPACE}"


def format_percent(value: float | None, digits: int = 2) -> str:
    """A share as text: ``4.36 %``."""
    return NONE if value is None else f"{100 * value:.{digits}f}{GAP}%"


def format_rate(value: float | None) -> str:
    """A wanted false-accept rate as text, as short as it can be: ``10 %``, ``0.1 %``."""
    return NONE if value is None else f"{float(f'{100 * value:.3g}'):.10g}{GAP}%"


def format_measured_rate(value: float | None) -> str:
    """A measured rate as text, always three significant digits: ``11.0 %``, ``0.0268 %``."""
    return NONE if value is None else f"{100 * value:#.3g}".rstrip(".") + f"{GAP}%"


def scenario_title(scenario: str) -> str:
    """A scenario's name as readers see it."""
    return "all pairs" if scenario == "all" else scenario


def format_interval(interval: Mapping[str, Any] | None, form: str, factor: float = 100, unit: str = "%") -> str:
    """An interval of a number that is known as text, or why there is none."""
    return format_range(interval["low"], interval["high"], form, factor, unit) if interval else TOO_FEW


def format_range(low: float, high: float, form: str, factor: float, unit: str) -> str:
    """An interval as text: ``3.45–5.44 %``."""
    ends = f"{form.format(factor * low)}–{form.format(factor * high)}"
    return ends + (GAP + unit if unit else "")
