"""The chapters of docs/notes: claims as on their pages, commands that exist, a translation with the same code."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

import mettle
from mettle.notes import TITLES
from mettle.notes.book import MODULES
from mettle.train import load

REPOSITORY = Path(mettle.__file__).parents[2]
NOTES = REPOSITORY / "docs" / "notes"
CHAPTERS = sorted(NOTES.glob("[1-5]-*.md"))
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
VERDICTS = {"holds": "성립", "contradicted": "반박됨", "not yet decided": "미정", "withdrawn": "철회"}


def claims_of(number):
    return importlib.import_module(f"mettle.notes.{MODULES[number]}").CLAIMS


def chapter_path(number):
    return next(path for path in CHAPTERS if path.name.startswith(f"{number}-"))


def claim_rows(text):
    table = text.split("## Claims" if "## Claims" in text else "## 주장")[1]
    return [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]


def test_there_is_a_chapter_for_each_note():
    assert [int(path.name[0]) for path in CHAPTERS] == list(TITLES) == list(MODULES)
    assert all(f"({path.name})" in (NOTES / "README.md").read_text() for path in CHAPTERS)


@pytest.mark.parametrize("number", list(TITLES))
def test_the_table_of_claims_is_that_of_the_page(number):
    rows = claim_rows(chapter_path(number).read_text(encoding="utf-8"))
    claims = claims_of(number)
    assert len(rows) == len(claims) >= 6
    for row, claim in zip(rows, claims, strict=True):
        assert row[0].removeprefix("| ") == claim.says
        assert (row[1], row[2]) == (f"*{claim.verdict}*", claim.because)
        if claim.record.startswith("docs/"):
            assert f"](../results/{Path(claim.record).name})" in row[3]


@pytest.mark.parametrize("number", list(TITLES))
def test_a_record_that_is_named_is_there(number):
    from mettle.cli.reproduce import CLAIMS

    for claim in claims_of(number):
        if claim.record.startswith("docs/"):
            assert (REPOSITORY / claim.record).is_file()
            if claim.verdict == "withdrawn":
                assert "withdrawn" in (REPOSITORY / claim.record).read_text(encoding="utf-8")
        if claim.record.startswith("mettle reproduce"):
            known = CLAIMS[claim.record.split()[-1]]
            assert bool(known.withdrawn) == (claim.verdict == "withdrawn")
        if claim.record.startswith("python "):
            assert (REPOSITORY / claim.record.split()[1]).is_file()
        assert claim.record or claim.verdict == "not yet decided", "only what nobody decided has no record"


@pytest.mark.parametrize("path", CHAPTERS, ids=[path.stem for path in CHAPTERS])
def test_every_section_is_in_the_table_of_contents(path):
    text = path.read_text(encoding="utf-8")
    contents = text.split("\n## ")[0]
    anchors = set(re.findall(r"\(#([\w-]+)\)", contents))
    headings = {
        re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-") for line in text.splitlines() if line[:3] == "## "
    }
    assert anchors <= headings, anchors - headings
    assert headings - anchors <= {"conclusions-of-the-note"}


@pytest.mark.parametrize("path", CHAPTERS, ids=[path.stem for path in CHAPTERS])
def test_the_commands_of_a_chapter_name_recipes_that_load(path):
    code = "".join(text for kind, _, text in FENCE.findall(path.read_text(encoding="utf-8")) if kind == "bash")
    lines = [shlex.split(part) for line in code.splitlines() for part in line.split(" && ")]
    trained = [words for words in lines if words[:2] in (["mettle", "train"], ["mettle", "tune"])]
    assert trained
    for words in trained:
        keys = [words[k + 1] for k, word in enumerate(words) if word == "--set"]
        load(words[2], keys).build_loss(5)


@pytest.mark.parametrize("path", CHAPTERS, ids=[path.stem for path in CHAPTERS])
def test_the_korean_edition_has_the_same_code_figures_and_verdicts(path):
    english = path.read_text(encoding="utf-8")
    korean = (NOTES / "ko" / path.name).read_text(encoding="utf-8")
    assert FENCE.findall(korean) == FENCE.findall(english)
    figures = [re.findall(r"pictures/([\w.-]+)", text) for text in (english, korean)]
    assert figures[0] == figures[1]
    assert english.count("\n## ") == korean.count("\n## ")
    rows = [[row[1].strip("*") for row in claim_rows(text)] for text in (english, korean)]
    assert [VERDICTS[verdict] for verdict in rows[0]] == rows[1]
    prose = FENCE.sub("", korean)
    assert len(re.findall("[가-힣]", prose)) > 0.3 * len(re.findall(r"[^\W\d_]", prose))
