"""`mettle audit -o`: a page where a page is named, a folder where a folder is, and what it says of labels."""

import json

import numpy as np
import pytest

from tests.command_line import mettle, refused


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Eight labels of six rows, one of them wrong."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(8), 6)
    x = rng.normal(size=(8, 16))[y] + 0.2 * rng.normal(size=(48, 16))
    y[5] = 3
    path = tmp_path_factory.mktemp("audited") / "vectors.npz"
    np.savez(path, embeddings=x.astype(np.float32), label=y)
    return path


def test_a_page_is_written_where_one_is_named(file, tmp_path):
    page = tmp_path / "new" / "judged.html"
    said = mettle("audit", file, "-o", page)
    assert f"audit: {page}" in said
    assert page.is_file() and page.read_text().startswith("<!")
    assert sorted(p.name for p in page.parent.iterdir()) == ["judged.html", "judged.json"]
    facts = json.loads(page.with_suffix(".json").read_text())
    assert facts["samples"] == 48 and "judged.json has more" in page.read_text()
    found = facts["label_errors"]
    assert found["estimate"]["wrong"] == 1 and found["ranked"][0]["row"] == 5 and found["ranked"][0]["above_cut"]
    assert "labels: about 1 label is wrong (0 to 3): look at the first 1" in said


def test_a_folder_is_made_where_a_folder_is_named(file, tmp_path):
    assert f"audit: {tmp_path / 'run.v2' / 'audit.html'}" in mettle("audit", file, "-o", tmp_path / "run.v2")
    assert sorted(p.name for p in (tmp_path / "run.v2").iterdir()) == ["audit.html", "audit.json"]


def test_another_kind_of_file_is_refused_before_the_work(file, tmp_path):
    said = refused("audit", file, "-o", tmp_path / "x.json")
    assert "a page named .html with its numbers in .json beside it: got" in said and said.endswith("x.html, say")
    taken = tmp_path / "taken"
    taken.write_text("something else")
    assert f"got {taken}" in refused("audit", file, "-o", taken)
    assert taken.read_text() == "something else"
