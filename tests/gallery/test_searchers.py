"""A gallery with a fusion rule follows its storage: the right rows, in one addition, and whole or not at all."""

import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_fixtures import ServerShelf, units

from mettle.errors import GalleryError, GalleryUnavailable
from mettle.gallery import Gallery, IndexSpec
from mettle.gallery.index.searchers import ReadWriteLock, distinct_identities

DIM = 8


def person(rule: str, templates: np.ndarray, probe: np.ndarray) -> float:
    """The score of a probe by the definition of the rule, in double precision."""
    templates, probe = templates.astype(np.float64), probe.astype(np.float64)
    if rule == "mean":
        return float(np.mean([t @ probe for t in templates]))
    middle = templates.sum(0)
    return float(middle @ probe / np.linalg.norm(middle))


def agrees(gallery: Gallery, rule: str, people: dict[str, np.ndarray]) -> None:
    """Whether answers are those of everybody's own templates."""
    assert gallery.check() == [] and len(gallery) == len(people)
    for probe in units(999, 4):
        wanted = {name: person(rule, rows, probe) for name, rows in people.items()}
        found = gallery.identify(probe, k=50, threshold=0.5).candidates
        assert {c.identity for c in found} == set(wanted)
        np.testing.assert_allclose([c.score for c in found], [wanted[c.identity] for c in found], atol=2e-6)
        np.testing.assert_allclose([c.score for c in found], sorted(wanted.values(), reverse=True), atol=2e-6)


changes = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["enrol", "replace", "delete"]), st.integers(0, 6), st.integers(1, 3)), max_size=6
    ),
    max_size=5,
)


@pytest.mark.parametrize("rule", ["mean", "centroid"])
@given(rounds=changes)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_any_changes_the_rows_are_those_of_the_people(folder, rule, rounds):
    """Some of the changes are told together, some one by one: a round is followed as a whole."""
    seed, people = 0, {}
    where = folder / f"{rule}{len(list(folder.iterdir()))}"
    with Gallery.open(where, dim=DIM, fusion=rule) as gallery:
        for changes in rounds:
            for verb, who, count in changes:
                seed, name = seed + 1, f"p{who}"
                if verb == "delete":
                    if people.pop(name, None) is not None:
                        gallery.delete(name)
                    continue
                rows = units(seed, count, DIM)
                gallery.enrol(name, rows, replace=verb == "replace")
                former = people.get(name, rows[:0]) if verb == "enrol" else rows[:0]
                people[name] = np.concatenate([former, rows])
            agrees(gallery, rule, people)


@pytest.mark.parametrize("kind", ["exact", "scan"])
def test_many_changed_people_are_one_addition(folder, kind):
    """Each addition looks through all numbers of the index, so one for each person took time in the square."""
    rows, new = units(1, 400, DIM), units(2, 200, DIM)
    with Gallery.open(folder / "g", dim=DIM, fusion="mean", wanted=IndexSpec(kind=kind)) as gallery:
        gallery.enrol_many((f"p{i}", row) for i, row in enumerate(rows))
        gallery.reindex()
        gallery.enrol_many((f"p{2 * i}", row) for i, row in enumerate(new))
        gallery.enrol("new", units(3, 1, DIM))
        index, sizes = gallery._search.index, []
        add = index.add
        index.add = lambda numbers, vectors: (sizes.append(len(numbers)), add(numbers, vectors))[1]
        people = {f"p{i}": rows[i : i + 1] for i in range(400)} | {"new": units(3, 1, DIM)}
        people |= {f"p{2 * i}": np.stack([rows[2 * i], row]) for i, row in enumerate(new)}
        for probe in units(4, 5, DIM):
            wanted = sorted((person("mean", theirs, probe) for theirs in people.values()), reverse=True)[:5]
            found = gallery.identify(probe, k=5, threshold=0.5).candidates
            np.testing.assert_allclose([c.score for c in found], wanted, atol=2e-6)
        assert sizes == [201] and len(index) == 401 and gallery.check() == []


def test_where_the_record_cannot_be_read_the_rows_stay_and_follow_later(folder):
    with Gallery.open(folder / "g", dim=DIM, fusion="mean") as gallery:
        people = {f"p{i}": units(i, 2, DIM) for i in range(5)}
        for name, rows in people.items():
            gallery.enrol(name, rows)
        agrees(gallery, "mean", people)
        gallery.delete("p1")
        people["p3"] = units(50, 1, DIM)
        gallery.enrol("p3", people["p3"], replace=True)
        del people["p1"]
        storage, told = gallery._storage, []
        read = storage.templates_of

        def broken(name):  # the second one asked for: in the middle of what is taken in
            told.append(name)
            if len(told) == 2:
                raise GalleryUnavailable("the disk is gone for a moment")
            return read(name)

        storage.templates_of = broken
        with pytest.raises(GalleryUnavailable):
            gallery.identify(units(1, 1, DIM)[0], threshold=0.5)
        del storage.templates_of
        agrees(gallery, "mean", people)


def test_one_long_name_costs_no_memory_for_every_template(folder):
    """As an array of text, every template would take four bytes for each letter of the longest name."""
    count, peaks = 3000, []
    for longest in ("short", "x" * 512):
        with Gallery.open(folder / longest[:10], dim=DIM) as gallery:
            gallery.enrol_many((longest if i == 0 else f"p{i % 50}", r) for i, r in enumerate(units(1, count, DIM)))
            gallery.reindex(IndexSpec(kind="exact"))  # once for what is only loaded the first time
            tracemalloc.start()
            gallery.reindex(IndexSpec(kind="exact"))
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100 * count, peaks


def test_a_vector_damaged_on_the_server_gets_no_name_that_was_kept(postgres):
    """The server computes the score from what lies on its disk now: the row is checked after every search."""
    shelf, (anna, bert, probe) = ServerShelf(postgres), units(1, 3, DIM)
    with Gallery.open(shelf.url, dim=DIM, thresholds={0.01: 0.9}) as gallery:
        gallery.enrol("anna", anna)
        gallery.enrol("bert", bert)
        assert gallery.identify(bert).match == "bert" and gallery.identify(probe).match is None
        shelf.sql(f"UPDATE templates SET vector = '{probe.tolist()}' WHERE number = 2")
        for _ in range(2):
            with pytest.raises(GalleryError, match="template 2 fails its checksum"):
                gallery.identify(probe)
        shelf.sql(f"UPDATE templates SET vector = '{bert.tolist()}' WHERE number = 2")
        assert gallery.identify(bert).match == "bert"


def test_a_score_that_is_no_number_is_never_given_out():
    numbers, scores = np.array([1, 2, -1]), np.array([0.5, np.nan, -np.inf], np.float32)
    with pytest.raises(GalleryError, match="template 2"):
        distinct_identities(numbers, scores, {1: "anna", 2: "bert"})
    with pytest.raises(GalleryError, match="template 2"):  # though anna has a better row
        distinct_identities(numbers, scores, {1: "anna", 2: "anna"})
    assert distinct_identities(numbers, scores, {1: "anna"}) == [("anna", 0.5)]


def test_a_writer_that_gives_up_lets_readers_go_on():
    lock, asked, served, done = ReadWriteLock(), threading.Event(), threading.Event(), threading.Event()

    def give_up(_condition) -> bool:
        asked.set()
        while not waiting.is_set():
            wait(0.01)
        raise KeyboardInterrupt

    def read() -> None:
        with lock.hold_shared():
            served.set()

    def write() -> None:
        with pytest.raises(KeyboardInterrupt), lock.hold_exclusive():
            pass
        done.set()

    waiting, wait = threading.Event(), lock._condition.wait
    lock._condition.wait_for = give_up
    with lock.hold_shared():
        threading.Thread(target=write, daemon=True).start()
        assert asked.wait(20)
        lock._condition.wait = lambda timeout=None: (timeout is None and waiting.set(), wait(timeout))[1]
        threading.Thread(target=read, daemon=True).start()
        assert done.wait(20) and served.wait(20)
