"""`--milvus` of the commands that search: the answers of the gallery itself, found by a server."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from mettle.gallery import Gallery
from tests.command_line import mettle

DIM = 8
pytestmark = [  # what the client and the embedded server leave behind when they are closed
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    with tempfile.TemporaryDirectory(prefix="mettle-milvus-") as folder:
        yield str(Path(folder) / "milvus.db")


@pytest.fixture
def people(tmp_path):
    """Forty people of one template each, and probes near the first three."""
    rows = np.random.default_rng(0).normal(size=(40, DIM)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    with Gallery.open(tmp_path / "people", dim=DIM, thresholds={1e-3: 0.9}) as gallery:
        gallery.enrol_many((f"p{i:02d}", row) for i, row in enumerate(rows))
    np.save(tmp_path / "probes.npy", rows[:3] + np.float32(0.01))
    return tmp_path / "people"


def identify(people: Path, *words: str) -> list[list[tuple[str, float]]]:
    found = json.loads(
        mettle("gallery", "identify", people, "--embeddings", people.parent / "probes.npy", "--json", *words)
    )
    return [[(c["identity"], c["score"]) for c in answer["candidates"]] for answer in found]


def test_a_server_gives_the_answers_of_the_gallery(people, server, monkeypatch):
    wanted, found = identify(people), identify(people, "--milvus", server)
    for one, other in zip(wanted, found, strict=True):
        assert [name for name, _ in one] == [name for name, _ in other]
        assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-6)
    assert "index kind: Milvus, " in mettle("gallery", "info", people, "--milvus", server)
    assert mettle("gallery", "check", people, "--milvus", server) == "sound\n"
    mettle("gallery", "delete", people, "p01")
    mettle("gallery", "compact", people, "--milvus", server)
    monkeypatch.setenv("METTLE_MILVUS", server)
    mettle("gallery", "index", people, "--kind", "exact")
    assert "index kind: Milvus, FLAT" in mettle("gallery", "info", people, "--milvus", server)
    assert all(name != "p01" for answer in identify(people) for name, _ in answer)


@pytest.mark.parametrize(
    "command", [("gallery", "identify", "{}", "--embeddings", "probes.npy"), ("serve", "--gallery", "{}")]
)
def test_an_address_that_is_none_is_one_line(command, people, monkeypatch):
    monkeypatch.chdir(people.parent)
    said = mettle(*(word.format(people) for word in command), "--milvus", "milvus", status=2)
    assert "milvus must be the address of a server" in said


def test_what_needs_no_search_is_not_stopped_by_the_environment(people, tmp_path, monkeypatch):
    with Gallery.open(tmp_path / "fused", dim=DIM, fusion="mean") as gallery:
        gallery.enrol("anna", np.eye(DIM, dtype=np.float32)[0])
    monkeypatch.setenv("METTLE_MILVUS", "no address")
    for place in (people, tmp_path / "fused"):
        assert "index kind: " in mettle("gallery", "info", place)
        assert mettle("gallery", "check", place) == "sound\n"
    assert mettle("gallery", "compact", tmp_path / "fused") == "compacted\n"
    said = mettle("gallery", "compact", people, status=2)  # the server may hold what is to be erased
    assert "milvus must be the address of a server" in said
    assert "there is no gallery" in mettle("gallery", "compact", tmp_path / "none", status=2)
    monkeypatch.setenv("METTLE_MILVUS", "")
    assert mettle("gallery", "compact", people) == "compacted\n"
