"""A wrong argument is one clear line of the package's own, before anything is made or changed."""

from pathlib import Path

import numpy as np
import pytest
from storage_fixtures import units

from mettle.errors import InputError
from mettle.gallery import Gallery, IndexSpec

DIM = 8
NAN = float("nan")


def refused(call, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 300
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": DIM, "fusion": 3}, ["fusion", "3", "best, centroid, mean"]),
        ({"dim": DIM, "fusion": ["mean"]}, ["fusion", "mean"]),
        ({"dim": DIM, "fusion": ""}, ["fusion", "''"]),
        ({"dim": DIM, "thresholds": [1]}, ["thresholds", "list", "{1e-3: 0.42}"]),
        ({"dim": DIM, "thresholds": 0.5}, ["thresholds", "float"]),
        ({"dim": DIM, "thresholds": {10**400: 0.5}}, ["false-accept rates"]),
        ({"dim": DIM, "thresholds": {1e-3: 10**400}}, ["cosine"]),
        ({"dim": DIM, "thresholds": {1e-3: True}}, ["cosine", "True"]),
        ({"model": 3}, ["model", "int"]),
        ({"model": ["runs/a"]}, ["model", "list"]),
        ({"dim": DIM, "wanted": "exact"}, ["wanted", "'exact'", "IndexSpec(kind="]),
        ({"dim": DIM, "wanted": 0}, ["wanted", "0"]),
        ({"dim": DIM, "wanted": {"kind": "exact"}}, ["wanted"]),
        ({"dim": "8"}, ["dim", "'8'"]),
        ({"dim": NAN}, ["dim", "nan"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_opening(tmp_path, options, words):
    refused(lambda: Gallery.open(tmp_path / "g", **options), *words)
    assert not (tmp_path / "g").exists()
    Gallery.open(tmp_path / "g", dim=DIM).close()
    refused(lambda: Gallery.open(tmp_path / "g", **options), *words)
    Gallery.open(tmp_path / "g").close()  # not locked by what was refused


@pytest.mark.parametrize("where", [None, 3, b"people", ["a"], ""], ids=str)
def test_places(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(lambda: Gallery.open(where, dim=DIM), "where")
    refused(lambda: Gallery.move(where, tmp_path / "b"), "where")
    Gallery.open(tmp_path / "a", dim=DIM).close()
    refused(lambda: Gallery.move(tmp_path / "a", where), "where")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"latency_ms": "x"}, "latency_ms"),
        ({"latency_ms": NAN}, "latency_ms"),
        ({"latency_ms": True}, "latency_ms"),
        ({"latency_ms": float("inf")}, "latency_ms"),
        ({"memory_mb": [1]}, "memory_mb"),
        ({"memory_mb": 10**400}, "memory_mb"),
        ({"memory_mb": -1}, "memory_mb"),
        ({"recall": "x"}, "recall"),
        ({"recall": None}, "recall"),
        ({"recall": NAN}, "recall"),
        ({"recall": True}, "recall"),
        ({"recall": 0}, "recall"),
        ({"kind": None}, "kind"),
        ({"kind": ["exact"]}, "kind"),
    ],
    ids=str,
)
def test_what_an_index_should_be_like(options, word):
    refused(lambda: IndexSpec(**options), word)


def test_numbers_of_every_kind_are_numbers():
    assert IndexSpec(latency_ms=np.float32(2), recall=np.float64(0.5), memory_mb=np.int64(3)).memory_mb == 3
    assert IndexSpec(recall=1, latency_ms=10**6).recall == 1


@pytest.mark.parametrize(
    ("people", "words"),
    [
        (None, ["NoneType"]),
        (3, ["int"]),
        ([("a", units(1, 1), 1)], ["tuple of 3", "number 0"]),
        ([("a", units(1, 1)), ("b",)], ["tuple of 1", "number 1"]),
        (["ab"], ["str", "number 0"]),
        ({"ab": units(1, 1)}, ["str", "items()"]),
        ([None], ["NoneType"]),
    ],
    ids=["None", "a number", "three", "one", "a text", "a table", "nothing"],
)
def test_many_people(tmp_path, people, words):
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        refused(lambda: gallery.enrol_many(people), "pairs (identity, templates)", *words)
        assert len(gallery) == 0
        gallery.enrol_many({"ab": units(1, 1)}.items())
        gallery.enrol_many([["b", units(2, 1)]])
        assert list(gallery.ids()) == ["ab", "b"]


def test_an_error_of_the_callers_own_generator_stays_its_own(tmp_path):
    def people():
        yield "a", units(1, 1)
        raise KeyError("mine")

    with Gallery.open(tmp_path / "g", dim=DIM) as gallery, pytest.raises(KeyError, match="mine"):
        gallery.enrol_many(people())


def test_the_other_verbs(tmp_path):
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        gallery.enrol("a", units(1, 1))
        refused(lambda: gallery.enrol("b", [10**400] * DIM), "no float")
        refused(lambda: gallery.snapshot(None), "folder", "None")
        refused(lambda: gallery.snapshot(3), "folder", "3")
        refused(lambda: gallery.reindex("exact"), "wanted", "'exact'")
        refused(lambda: gallery.reindex(0), "wanted")
        refused(lambda: gallery.verify("a", units(1, 1), threshold=True), "threshold", "True")
        refused(lambda: gallery.verify("a", units(1, 1), threshold=10**400), "threshold")
        assert gallery.reindex().kind == "exact" and gallery.check() == [] and len(gallery) == 1
    assert sorted(file.name for file in Path(tmp_path).iterdir()) == ["g"]
