"""Whatever is shown is executed: Python blocks and `mettle` lines of the pages, and docstring examples."""

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mettle
import mettle.train
from command_line import mettle as run_command
from mettle.data import glyphs
from mettle.model.backbones import import_torchvision
from tests.cli.test_ranks import no_processes

REPOSITORY = Path(mettle.__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
TRANSLATED = REPOSITORY / "docs" / "notes" / "ko"  # the same blocks, see tests/notes/test_chapters.py: not run again
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return FENCE.findall(page.read_text(encoding="utf-8"))


def mettle_lines(found: list[tuple[str, str, str]]) -> list[list[str]]:
    """The words of every `mettle` line in blocks that are to be run."""
    code = [text for kind, flags, text in found if kind == "bash" and "norun" not in flags]
    lines = [shlex.split(line, comments=True) for text in code for line in text.replace("\\\n", " ").splitlines()]
    return [words for words in lines if words and words[0] == "mettle"]


def test_pages_hold_something_to_run():
    kinds = [kind for page in PAGES for kind, _, _ in blocks(page)]
    assert kinds.count("python") >= 3 and kinds.count("bash") >= 3


@pytest.fixture
def few_glyphs(tmp_path, monkeypatch):
    """A tenth of the embedded data: what a page does does not depend on how many characters there are."""
    module = sys.modules[glyphs.__module__]
    shared, dejavu = module.shared_characters()
    greek = shared[(shared >= 0x391) & (shared < 0x3C9)]
    shared = np.union1d(greek, shared[::7])
    monkeypatch.setattr(module, "shared_characters", lambda: (shared, np.union1d(shared, dejavu[::20])))
    monkeypatch.setattr(module, "HELD_OUT", {"test": 24, "val": 12})
    monkeypatch.setenv("METTLE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def narrow_networks(monkeypatch):
    """What a page does does not depend on how wide a network is, where the page itself does not say so."""
    load = mettle.train.load
    monkeypatch.setattr(
        mettle.train, "load", lambda source, keys=(), **more: load(source, ["model.width=4", *keys], **more)
    )


# Commands of these pages use what their blocks make.
IN_ORDER = [REPOSITORY / "docs" / name for name in ("getting-started.md", "train.md", "fine-tuning.md")]
APART = [page for page in PAGES if page not in IN_ORDER and page.parent != TRANSLATED]


@pytest.mark.parametrize("page", APART, ids=[str(page.relative_to(REPOSITORY)) for page in APART])
def test_python_blocks_run(page, few_glyphs, tmp_path, monkeypatch):
    """Blocks of one page run in order and share their names, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": "__main__"}
    for block in blocks(page):
        run_python(block, page, space)


@pytest.mark.parametrize("page", IN_ORDER, ids=[page.stem for page in IN_ORDER])
def test_a_page_runs_in_order(page, narrow_networks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import_torchvision()  # as users have it: its own operators are not beside every CPU build of torch
    monkeypatch.syspath_prepend(tmp_path)  # a module that a page writes is found as from a shell in that folder
    space: dict = {"__name__": "__main__"}
    for block in blocks(page):
        run_python(block, page, space)
        run_mettle_lines([block])
    made = {
        "getting-started": ("runs/first/report.html", "audit.html"),
        "train": ("runs/tiles/report.html", "tiles.mettle"),
        "fine-tuning": ("runs/birds/report.html", "runs/deeper/contract.json"),
    }
    assert [name for name in made[page.stem] if not (tmp_path / name).exists()] == []


def run_python(block: tuple[str, str, str], page: Path, space: dict) -> None:
    """Run a Python block, unless it is marked as one that needs what the tests do not have."""
    kind, flags, code = block
    if kind == "python" and "norun" not in flags:
        exec(compile(code, str(page), "exec"), space)


WITH_COMMANDS = [page for page in APART if any(mettle_lines([block]) for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=[str(page.relative_to(REPOSITORY)) for page in WITH_COMMANDS])
def test_mettle_lines_run(page, few_glyphs, narrow_networks, tmp_path, monkeypatch):
    """`mettle` lines run in order in one folder; a page keeps them quick by itself, with --set train.steps=..."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mettle.cli.ranks.start_children", no_processes)  # real ones are in tests.cli.test_ranks
    run_mettle_lines(blocks(page))


def run_mettle_lines(found: list[tuple[str, str, str]]) -> None:
    for line in mettle_lines(found):
        run_command(*line[1:])


def test_the_command_of_the_pages_is_installed():
    """The one process here: a page says `mettle`, and that leads to the command line."""
    command = [str(Path(sys.executable).parent / "mettle"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"mettle {mettle.__version__}\n")


def test_make_targets_and_extras_that_are_named_exist():
    makefile = (REPOSITORY / "Makefile").read_text()
    extras = (REPOSITORY / "pyproject.toml").read_text()
    for page in PAGES:
        code = "".join(code for kind, _, code in blocks(page) if kind == "bash")
        for target in re.findall(r"^make ([\w-]+)", code, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: no make target {target}"
        for names in re.findall(r"pip install \"\.\[([\w,]+)\]", code):
            for name in names.split(","):
                assert re.search(rf"^{name}\s*=", extras, re.MULTILINE), f"{page.name}: no extra {name}"


def test_links_between_pages_lead_somewhere():
    broken = [
        f"{page.name} links to {target}, which is not there"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_first_block_of_the_readme_is_the_demo():
    kind, _, code = blocks(REPOSITORY / "README.md")[0]
    assert (kind, code.strip()) == ("bash", "make demo")


MODULES = [name for _, name, _ in pkgutil.walk_packages(mettle.__path__, "mettle.") if name != "mettle.__main__"]


def test_docstring_examples_run():
    assert len(MODULES) > 100
    found = {name: doctest.testmod(importlib.import_module(name)) for name in MODULES}
    assert [name for name, result in found.items() if result.failed] == []
    assert sum(result.attempted for result in found.values()) > 30
