"""The walks of docs/architecture.md name files and functions that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import mettle

ROOT = Path(mettle.__file__).parent
PAGE = (ROOT.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| *(?P<files>[^|]*?) *\| *(?P<names>[^|]*?) *\|[^|]*\|$")
CODE = re.compile(r"`([^`]+)`")


def walked_names(page: str) -> list[tuple[tuple[str, ...], str]]:
    """(files, function) of every row of the tables of files and functions; an empty cell means the files above it."""
    found, files, inside = [], (), False
    for line in page.splitlines():
        row = ROW.match(line)
        if row is None:
            inside = False
        elif row["files"] == "file" and row["names"] == "function":
            inside = True
        elif inside:
            files = tuple(CODE.findall(row["files"])) or files
            found += [(files, name) for name in CODE.findall(row["names"]) if not name.startswith(".")]
    return found


@cache
def defined_names(file: str) -> frozenset[str]:
    """Functions, classes and methods (`Class.method`) of a file, or of all files of a folder; those inherited too."""
    place = ROOT / file
    found: set[str] = set()
    for path in sorted(place.glob("*.py")) if place.is_dir() else [place]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                methods = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
                found |= {f"{node.name}.{part.name}" for part in methods}
    return frozenset(found)


def test_there_are_walks_to_check():
    assert len(walked_names(PAGE)) > 60
    assert PAGE.count("\n## The walk of") == 4


@pytest.mark.parametrize(("files", "name"), walked_names(PAGE), ids=lambda value: str(value))
def test_a_name_on_a_walk_is_in_its_file(files, name):
    assert all((ROOT / file).exists() for file in files)
    assert any(name in defined_names(file) for file in files), f"{name} is not in {', '.join(files)}"


def test_a_stale_name_is_seen():
    page = "| file | function | |\n|---|---|---|\n| `report/page.py` | `render_page` | fills |\n| | `fill_it` | no |\n"
    (file, first), (_, second) = walked_names(page)
    assert first in defined_names(file[0]) and second not in defined_names(file[0])
