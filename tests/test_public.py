"""Every public name comes from one place, and what is listed is there."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mettle

ROOT = Path(mettle.__file__).parent
THINGS = {"Gallery", "Run", "adopt", "fit", "mine", "open_run"}  # so often used that the package itself offers them
ROOMS = sorted(set(mettle.__all__) - THINGS - {"errors"})


def test_the_package_lists_its_rooms_and_loads_each():
    assert mettle.__all__ == sorted(mettle.__all__)
    for name in set(mettle.__all__) - THINGS:
        assert getattr(mettle, name).__name__ == f"mettle.{name}"
    assert mettle.Gallery is importlib.import_module("mettle.gallery").Gallery
    assert set(dir(mettle)) >= set(mettle.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="lossse"):
        _ = mettle.lossse


def constants_and_classes_first(name: str) -> tuple[bool, bool, str]:
    return not name.isupper(), not name[0].isupper(), name


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_lists_its_public_names_sorted_and_has_them(name):
    module = importlib.import_module(f"mettle.{name}")
    assert list(module.__all__) in (sorted(module.__all__), sorted(module.__all__, key=constants_and_classes_first))
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.__all__ names {public}, which is not there"


def test_no_public_name_is_offered_by_two_rooms():
    seen: dict[str, str] = {}
    for name in ROOMS:
        for public in importlib.import_module(f"mettle.{name}").__all__:
            assert public not in seen, f"{public} comes from both {seen[public]} and {name}"
            seen[public] = name


@pytest.mark.parametrize("name", ROOMS)
def test_public_things_are_documented(name):
    module = importlib.import_module(f"mettle.{name}")
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert (thing.__doc__ or "").strip(), f"mettle.{name}.{public} has no docstring"


def test_folders_hold_no_drawer_for_odds_and_ends():
    names = {path.stem for path in ROOT.rglob("*.py")}
    assert not names & {"utils", "util", "misc", "common", "helpers"}


def test_help_starts_without_torch():
    code = "import sys; from mettle.cli import app; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_distribution_is_never_called_by_another_projects_name():
    """`mettle` on PyPI is not ours: no file may tell anyone to install it."""
    pattern = re.compile(r"pip install (?:[\"'])?mettle(?!-ml)\b")
    repository = ROOT.parents[1]
    for path in [*repository.glob("*.md"), *repository.glob("docs/**/*.md"), *ROOT.rglob("*.py")]:
        assert not pattern.search(path.read_text(encoding="utf-8")), path


def test_every_module_parses_and_says_what_it_is():
    for path in ROOT.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"
