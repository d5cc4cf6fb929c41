"""Pages: templates that are filled with escaped text, and where a page goes."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mettle.errors import RunError


def render_page(template: str, **facts: Any) -> str:
    """Fill a template; whatever is inserted is escaped."""
    return _template_environment().get_template(template).render(**facts)


def check_page_path(path: Path | str) -> Path:
    """Where a page goes; a folder that is not there is an error now, not after everything is drawn."""
    path = Path(path)
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path}: there is no folder {path.parent}; make it, or choose another --output")
    return path


@cache
def _template_environment() -> Environment:
    return Environment(
        loader=PackageLoader("mettle.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
