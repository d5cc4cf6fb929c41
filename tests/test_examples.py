"""Scripts that are shown are executed: each one writes its picture, or prints its table."""

import importlib.util
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
TOLD = {"mahalanobis"}  # print a table instead of drawing
LONG = {"sphere"}  # these train for a minute: run whole under `slow`, and with a few steps always


def script(name: str, path: Path, monkeypatch) -> None:
    """What `python examples/name.py path` does, in this process, where a warning is an error."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(path)])
    monkeypatch.chdir(path.parent)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def assert_picture(path: Path) -> None:
    """A PNG of a readable size on which something is drawn."""
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) >= 300
        shades = np.asarray(picture.convert("L"))
    dark = (shades < 200).mean()
    assert 0.002 < dark < 0.9, f"{path.name}: {dark:.1%} of it is ink"


def test_there_are_examples_and_the_long_ones_are_among_them():
    assert {path.stem for path in SCRIPTS} >= LONG | {"boundaries", "logit_curves"}


@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS if path.stem not in LONG | TOLD])
def test_a_quick_example_writes_its_picture(name, tmp_path, monkeypatch):
    script(name, tmp_path / "picture.png", monkeypatch)
    assert_picture(tmp_path / "picture.png")


@pytest.mark.parametrize("name", sorted(TOLD))
def test_a_quick_example_prints_its_table(name, tmp_path, monkeypatch, capsys):
    script(name, tmp_path / "unused", monkeypatch)
    assert len(capsys.readouterr().out.splitlines()) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LONG))
def test_a_long_example_writes_its_picture(name, tmp_path, monkeypatch):
    script(name, tmp_path / "picture.png", monkeypatch)
    assert_picture(tmp_path / "picture.png")


@pytest.mark.parametrize("name", sorted(LONG))
def test_a_long_example_runs_for_a_few_steps(name, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STEPS", 3)
    module.main(str(tmp_path / "picture.png"))
    assert_picture(tmp_path / "picture.png")


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_an_example_says_how_to_run_it_and_stays_short(path):
    text = path.read_text(encoding="utf-8")
    assert f"python examples/{path.name}" in text.split('"""')[1], "the docstring shows the command"
    assert len(text.splitlines()) <= 100
