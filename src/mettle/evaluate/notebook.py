"""Results as notebooks show them: a small table, without the cost of an interval."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from numbers import Integral, Real

STYLE = "text-align:left;padding:1px 12px 1px 0"


def html_table(
    title: str, rows: Iterable[tuple[object, ...]], notes: Iterable[str] = (), columns: Sequence[str] = ()
) -> str:
    """A table of names and values under a title, with notes below.

    Everything is escaped, floats have four digits, and what there is not is a dash.

    Args:
        title: above the table.
        rows: the name of each, and its values.
        notes: below the table, a line each.
        columns: what the values are, where there are several.
    """
    heads = "".join(f'<th style="{STYLE}">{escape(name)}</th>' for name in ("", *columns)) if columns else ""
    body = "".join(_format_row(name, values) for name, *values in rows)
    said = "".join(f"<div><small>{escape(text)}</small></div>" for text in notes)
    caption = f'<caption style="text-align:left"><b>{escape(title)}</b></caption>'
    return f"<table>{caption}{f'<thead><tr>{heads}</tr></thead>' if heads else ''}<tbody>{body}</tbody></table>{said}"


def _format_row(name: object, values: Iterable[object]) -> str:
    cells = "".join(f'<td style="{STYLE}">{escape(_format_value(value))}</td>' for value in values)
    return f'<tr><th style="{STYLE};font-weight:normal">{escape(str(name))}</th>{cells}</tr>'


def _format_value(value: object) -> str:
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return "–"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    return f"{float(value):.4f}" if isinstance(value, Real) else str(value)
