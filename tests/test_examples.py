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
CHAINS = {"train_own_model", "match_images", "audit_embeddings"}  # from data to an answer, at most 40 lines each
TOLD = {"mahalanobis", "text_embeddings", "sound_embeddings"} | CHAINS  # print instead of drawing
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
    assert {path.stem for path in SCRIPTS} >= LONG | TOLD | {"boundaries", "logit_curves"}


@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS if path.stem not in LONG | TOLD])
def test_a_quick_example_writes_its_picture(name, tmp_path, monkeypatch):
    script(name, tmp_path / "picture.png", monkeypatch)
    assert_picture(tmp_path / "picture.png")


@pytest.mark.parametrize("name", sorted(TOLD))
def test_a_quick_example_prints_what_it_found(name, tmp_path, monkeypatch, capsys):
    script(name, tmp_path / "made", monkeypatch)
    said = capsys.readouterr().out
    assert len(said.splitlines()) > 2
    expected = {"train_own_model": "match: tile 0", "match_images": "flag-45 -> no match"}
    assert expected.get(name, "") in said
    pages = {"train_own_model": "report.html", "audit_embeddings": "audit.html", "text_embeddings": "audit/audit.html"}
    assert (tmp_path / "made" / pages.get(name, "")).exists() or name == "mahalanobis"


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
    assert len(text.splitlines()) <= (40 if path.stem in CHAINS else 100)
