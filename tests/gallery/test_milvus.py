"""Search on Milvus: whatever its collection holds, answers are those of the storage. The embedded one stands for it."""

import shutil
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_fixtures import units

from mettle.errors import GalleryUnavailable, InputError, MissingExtra
from mettle.gallery import Gallery, IndexSpec
from mettle.gallery.index import milvus
from mettle.gallery.index.milvus import MilvusSearcher, hide_password

pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")
# What the client and the embedded server leave to the collector of garbage when they are closed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
DIM = 8


@pytest.fixture(scope="module")
def server():
    """One embedded server for all tests; every gallery has a collection of its own."""
    with tempfile.TemporaryDirectory(prefix="mettle-milvus-") as folder:
        yield str(Path(folder) / "milvus.db")


@pytest.fixture
def gallery(folder, server):
    with Gallery.open(folder / "people", dim=DIM, thresholds={1e-3: 0.9}, milvus=server) as opened:
        yield opened


@pytest.fixture
def full(gallery):
    gallery.enrol_many((f"p{i:02d}", row) for i, row in enumerate(units(0, 60)))
    gallery._search.sync()
    return gallery


def ranking(people: dict[str, np.ndarray], probe: np.ndarray) -> list[tuple[str, float]]:
    """Everybody by their best template, in double precision."""
    best = {name: float((rows.astype(np.float64) @ probe.astype(np.float64)).max()) for name, rows in people.items()}
    return sorted(best.items(), key=lambda one: -one[1])


def agrees(gallery: Gallery, people: dict[str, np.ndarray]) -> None:
    for probe in units(999, 3):
        wanted = ranking(people, probe)[:5]
        found = [(c.identity, c.score) for c in gallery.identify(probe, k=5).candidates]
        assert [name for name, _ in found] == [name for name, _ in wanted]
        np.testing.assert_allclose([s for _, s in found], [s for _, s in wanted], atol=2e-6)


changes = st.lists(
    st.tuples(st.sampled_from(["enrol", "replace", "delete"]), st.integers(0, 5), st.integers(1, 3)), max_size=8
)


@given(rounds=st.lists(changes, max_size=3))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_any_changes_answers_are_those_of_the_record(folder, server, rounds):
    seed, people, where = 0, {}, folder / f"g{len(list(folder.iterdir()))}"
    for changed in rounds:
        with Gallery.open(
            where, dim=DIM, thresholds={1e-3: 0.9} if not where.exists() else None, milvus=server
        ) as gallery:
            for verb, who, count in changed:
                seed, name = seed + 1, f"p{who}"
                if verb == "delete":
                    if people.pop(name, None) is not None:
                        gallery.delete(name)
                    continue
                rows = units(seed, count)
                gallery.enrol(name, rows, replace=verb == "replace")
                people[name] = np.concatenate([people.get(name, rows[:0]) if verb == "enrol" else rows[:0], rows])
            agrees(gallery, people)
            assert gallery.check() == []


def test_records_of_both_kinds_are_searched(storage, server):
    search = MilvusSearcher(storage, server)
    rows = units(1, 30)
    receipt = storage.enrol_many([(f"p{i}", rows[i : i + 1]) for i in range(30)])
    storage.delete("p7")
    found = search.find_templates(rows[:9], 4)
    exact = rows[:9] @ rows.T
    exact[:, 7] = -2
    order = np.argsort(-exact, axis=1)[:, :4]
    assert np.array_equal(found.numbers, np.asarray(receipt.numbers)[order])
    np.testing.assert_allclose(found.scores, np.take_along_axis(exact, order, axis=1), atol=1e-6)
    found = search.find_templates(rows[:1], 40)  # more than there are
    assert (found.numbers[0, 29:] == -1).all() and np.isneginf(found.scores[0, 29:]).all() and search.check() == []
    search.close()


def test_an_empty_gallery_finds_nobody(gallery):
    assert gallery.identify(units(1, 1)[0]).candidates == ()
    assert gallery.check() == [] and gallery.info().index["rows"] == 0


def test_what_was_deleted_elsewhere_is_not_found_even_by_a_server_that_still_holds_it(full, monkeypatch):
    probe = units(0, 60)[3]
    assert full.identify(probe).match == "p03"
    monkeypatch.setattr(MilvusSearcher, "sync", lambda self: None)
    full.delete("p03")
    assert full._search.rows() == 60
    assert "p03" not in [c.identity for c in full.identify(probe, k=50).candidates]
    assert len(full.identify(probe, k=59).candidates) == 59, "the row that is in the way costs nobody a place"


def test_what_the_server_says_of_a_number_is_not_believed(full):
    """Rows of another time under numbers of the storage, and under numbers that it never gave."""
    probe, other = units(0, 60)[3], units(5, 2)
    search = full._search
    numbers = full._storage.templates_of("p04").numbers.tolist()
    search._call("upsert", data=[{"number": numbers[0], "vector": probe}, {"number": 10**6, "vector": probe}])
    found = full.identify(probe, k=3)
    assert found.match == "p03" and found.candidates[0].score == pytest.approx(1, abs=1e-6)
    right = float(units(0, 60)[4] @ probe)
    assert all(c.score == pytest.approx(right, abs=1e-6) for c in found.candidates if c.identity == "p04")
    search._call("delete", ids=full._storage.templates_of("p09").numbers.tolist())
    (said,) = full.check()
    assert "Milvus holds 60 rows, and of 60 templates 2 are missing there or differ" in said
    full.reindex()
    assert full.check() == [] and full.identify(units(0, 60)[9]).match == "p09"
    full.enrol("new", other)
    assert full.identify(other[0]).match == "new"


def test_a_gallery_that_is_opened_again_takes_in_only_what_is_new(full, folder, server, monkeypatch):
    full.close()
    with Gallery.open(folder / "people") as without:
        without.enrol("new", units(7, 1))
        without.delete("p01")
    written = []
    upsert = MilvusSearcher._upsert
    monkeypatch.setattr(MilvusSearcher, "_upsert", lambda self, t: (written.extend(t.identities), upsert(self, t)))
    with Gallery.open(folder / "people", milvus=server) as again:
        assert again.notes == [] and again.check() == []
        assert written == ["new"] and again.identify(units(7, 1)[0]).match == "new"
        assert again.identify(units(0, 60)[1]).match is None


def test_a_process_that_ends_before_it_noted_how_far_it_came_does_no_harm(full, folder, server, monkeypatch):
    full.identify(units(0, 1)[0])
    monkeypatch.setattr(MilvusSearcher, "_write_revision", lambda self: None)
    full.close()
    monkeypatch.undo()
    with Gallery.open(folder / "people", milvus=server) as again:
        assert again.check() == [] and again._search.rows() == 60


def test_where_the_record_has_forgotten_what_changed_all_is_compared(full, folder, server):
    full.close()
    with Gallery.open(folder / "people") as without:
        without.delete("p02")
        without.enrol("new", units(8, 2))
        without.compact()
    with Gallery.open(folder / "people", milvus=server) as again:
        assert again.check() == [] and again.identify(units(8, 2)[1]).match == "new"
        again.delete("new")
        again.compact()  # the collection is made anew: nothing of deleted people is in it
        assert again.check() == [] and again._search.rows() == 59


def test_a_restored_record_is_not_searched_by_the_rows_of_its_future(full, folder, server):
    full.identify(units(0, 1)[0])
    full.close()
    shutil.copytree(folder / "people", folder / "backup")
    with Gallery.open(folder / "people", milvus=server) as lost:
        lost.enrol("lost", units(20, 1))
        lost.delete("p05")
        lost.identify(units(0, 1)[0])
    shutil.rmtree(folder / "people")
    shutil.copytree(folder / "backup", folder / "people")
    with Gallery.open(folder / "people", milvus=server) as restored:
        assert len(restored.notes) == 1 and "compared with the storage" in restored.notes[0]
        assert restored.check() == [] and restored.identify(units(0, 60)[5]).match == "p05"
        restored.enrol("other", units(21, 1))  # by the number that "lost" had
        assert restored.identify(units(20, 1)[0]).match is None
        assert restored.identify(units(21, 1)[0]).match == "other"


def test_every_kind_of_index_finds_the_same_people(full):
    probes = units(0, 60)
    for kind, name in (("hnsw", "HNSW"), ("ivf", "IVF_FLAT"), ("exact", "FLAT"), ("auto", "AUTOINDEX")):
        full.reindex(IndexSpec(kind=kind))
        assert full.info().index["kind"] == f"Milvus, {name}"
        assert [f.match for f in full.identify_many(probes[:20])] == [f"p{i:02d}" for i in range(20)]
    with pytest.raises(InputError, match="Milvus has the indexes auto, exact, ivf, hnsw"):
        full.reindex(IndexSpec(kind="scan"))
    assert full.check() == []


def test_threads_that_write_and_search_see_nobody_who_is_deleted(full):
    rows, failures = units(30, 20), []

    def write() -> None:
        for i, row in enumerate(rows):
            full.enrol(f"t{i}", row)
            if full.identify(row, k=1).candidates[0].identity != f"t{i}":
                failures.append(f"t{i} was not found")
            full.delete(f"t{i}")
            if full.identify(row, k=1).candidates[0].identity == f"t{i}":
                failures.append(f"t{i} was found after it was deleted")

    def read() -> None:
        for probe in units(0, 60):
            if full.identify(probe, k=1).candidates[0].score < 1 - 1e-5:
                failures.append("somebody who is enrolled was not found")

    threads = [threading.Thread(target=work) for work in (write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and full.check() == []


def test_what_cannot_be_is_said_in_one_line(folder, monkeypatch):
    with pytest.raises(InputError, match="fusion='mean'.*open it without milvus="):
        Gallery.open(folder / "fused", dim=DIM, fusion="mean", milvus=str(folder / "m.db"))
    for address in ("localhost:19530", "/tmp/somewhere", 7):
        with pytest.raises(InputError, match="milvus must be the address of a server"):
            Gallery.open(folder / "g", dim=DIM, milvus=address)
    monkeypatch.setattr(milvus, "PATIENCE", 0.2)
    with pytest.raises(GalleryUnavailable, match="Milvus at http://127.0.0.1:9 cannot be asked") as silent:
        Gallery.open(folder / "g", dim=DIM, milvus="http://anna:hush@127.0.0.1:9")
    assert "hush" not in str(silent.value) and hide_password("https://a:b@h:1/d") == "https://h:1/d"
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(MissingExtra, match="mettle-ml\\[milvus\\]"):
        Gallery.open(folder / "g", dim=DIM, milvus=str(folder / "m.db"))
