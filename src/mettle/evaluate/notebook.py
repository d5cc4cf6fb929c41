"""Results as notebooks show them: a small table, without the cost of an interval."""

from collections.abc import Iterable
from html import escape


def html_table(title: str, rows: Iterable[tuple[str, object]], notes: Iterable[str] = ()) -> str:
    """A table of names and values under a title, with notes below; everything is escaped, floats have four digits."""
    style = "text-align:left;padding:1px 12px 1px 0"
    body = "".join(
        f'<tr><th style="{style};font-weight:normal">{escape(str(name))}</th>'
        f'<td style="{style}">{escape(_format_value(value))}</td></tr>'
        for name, value in rows
    )
    said = "".join(f"<div><small>{escape(text)}</small></div>" for text in notes)
    return (
        f'<table><caption style="text-align:left"><b>{escape(title)}</b></caption><tbody>{body}</tbody></table>{said}'
    )


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
