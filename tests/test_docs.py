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
from test_cli_ranks import no_processes

REPOSITORY = Path(mettle.__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
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


IN_ORDER = REPOSITORY / "docs" / "getting-started.md"  # its commands use what its Python blocks make
APART = [page for page in PAGES if page != IN_ORDER]


@pytest.mark.parametrize("page", APART, ids=[str(page.relative_to(REPOSITORY)) for page in APART])
def test_python_blocks_run(page, few_glyphs, tmp_path, monkeypatch):
    """Blocks of one page run in order and share their names, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": "__main__"}
    for kind, _, code in blocks(page):
        if kind == "python":
            exec(compile(code, str(page), "exec"), space)


def test_the_first_hour_runs_in_order(narrow_networks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space: dict = {"__name__": "__main__"}
    for block in blocks(IN_ORDER):
        if block[0] == "python":
            exec(compile(block[2], str(IN_ORDER), "exec"), space)
        run_mettle_lines([block])
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert (tmp_path / "audit.html").is_file()


WITH_COMMANDS = [page for page in APART if any(mettle_lines([block]) for block in blocks(page))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=[str(page.relative_to(REPOSITORY)) for page in WITH_COMMANDS])
def test_mettle_lines_run(page, few_glyphs, narrow_networks, tmp_path, monkeypatch):
    """`mettle` lines run in order in one folder; a page keeps them quick by itself, with --set train.steps=..."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mettle.cli.ranks.started", no_processes)  # real ones are in test_cli_ranks
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
