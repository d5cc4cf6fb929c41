"""A gallery as its users hold it: enrol, verify, identify, delete, reopen."""

import io
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mettle import Gallery
from mettle.errors import GalleryError, GalleryLocked, InputError, UnknownIdentity
from mettle.gallery import IndexSpec
from mettle.gallery.scoring import FUSION_RULES
from small_runs import Small, small_run

DIM = 24
THRESHOLDS = {1e-3: 0.6}  # which independent directions of this length exceed once in a thousand


def units(count: int, seed: int = 0, dim: int = DIM) -> np.ndarray:
    found = np.random.default_rng(seed).normal(size=(count, dim))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def near(row: np.ndarray, seed: int = 0, far: float = 0.1) -> np.ndarray:
    """Somebody's next template: a little off, and of another length."""
    return 3 * (row + far * units(1, seed + 1000, len(row))[0])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Small:
    return small_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def other_trained(tmp_path_factory) -> Small:
    return small_run(tmp_path_factory.mktemp("runs"), seed=1)


@pytest.fixture
def gallery(tmp_path):
    with Gallery.open(tmp_path / "people.mettle", dim=DIM, thresholds=THRESHOLDS) as opened:
        yield opened


@pytest.fixture
def full(gallery):
    """20 people with 1 to 3 templates."""
    for i, row in enumerate(units(20)):
        gallery.enrol(f"person {i:02d}", np.stack([near(row, 10 * i + j) for j in range(1 + i % 3)]))
    return gallery


def test_somebody_enrolled_is_verified_and_identified(full):
    probe = near(units(20)[7], 5)
    answer = full.verify("person 07", probe)
    assert answer.match
    assert answer.score >= answer.threshold
    assert answer.templates == 2
    assert 0 < answer.far < 1
    found = full.identify(probe, k=3)
    assert found.match == "person 07"
    assert found.verdict == "match: person 07"
    assert next(c.identity for c in found.candidates) == "person 07"
    assert len(found.candidates) == 3
    assert found.candidates[0].score == pytest.approx(answer.score, abs=1e-5)
    assert (found.identities, found.templates) == (20, 39)
    assert found.false_matches == pytest.approx(39 * found.far), "every template is a chance"
    assert answer.false_accepts == pytest.approx(2 * answer.far)


def test_somebody_unknown_gets_no_match(full):
    found = full.identify(units(1, 99)[0])
    assert found.match is None
    assert found.verdict == "no match"
    assert len(found.candidates) == 5
    assert not any(c.match for c in found.candidates)


def test_g12_an_empty_gallery_and_more_candidates_than_people(gallery):
    assert gallery.identify(units(1)[0]).candidates == ()
    assert gallery.identify(units(1)[0]).match is None
    gallery.enrol("anna", units(3))
    found = gallery.identify(units(3)[0], k=50)
    assert [c.identity for c in found.candidates] == ["anna"]
    assert len(gallery) == 1


def test_candidates_are_different_people_even_where_one_has_many_templates(gallery):
    base = units(3)
    gallery.enrol("many", np.stack([near(base[0], i, 0.02) for i in range(60)]))
    gallery.enrol("one", base[1])
    gallery.enrol("two", base[2])
    found = gallery.identify(base[0], k=3)
    assert next(c.identity for c in found.candidates) == "many"
    assert sorted(c.identity for c in found.candidates) == ["many", "one", "two"]


@pytest.mark.parametrize("rule", FUSION_RULES)
def test_identification_agrees_with_verification_under_every_rule(tmp_path, rule):
    rng = np.random.default_rng(4)
    with Gallery.open(tmp_path / "g", dim=DIM, fusion=rule) as gallery:
        for i, row in enumerate(units(12)):
            gallery.enrol(f"p{i}", np.stack([near(row, 7 * i + j, 0.5) for j in range(1 + i % 4)]))
        gallery.delete("p3")
        gallery.enrol("p4", near(units(12)[4], 900), replace=True)
        gallery.enrol("p5", near(units(12)[5], 901))
        for probe in rng.normal(size=(8, DIM)):
            found = gallery.identify(probe, k=11)
            scores = {name: gallery.verify(name, probe).score for name in gallery.ids()}
            assert {c.identity for c in found.candidates} == set(scores)
            for candidate in found.candidates:
                assert candidate.score == pytest.approx(scores[candidate.identity], abs=2e-6)
            assert found.candidates[0].score == pytest.approx(max(scores.values()), abs=2e-6)


def test_many_probes_at_once_are_answered_as_one_by_one(full):
    probes = np.concatenate([units(4, 8), np.stack([near(row, 3) for row in units(20)[:4]])])
    together = full.identify_many(probes, k=4)
    for found, alone in zip(together, [full.identify(probe, k=4) for probe in probes], strict=True):
        assert found.match == alone.match
        assert [c.identity for c in found.candidates] == [c.identity for c in alone.candidates]
        assert [c.score for c in found.candidates] == pytest.approx([c.score for c in alone.candidates], abs=1e-6)
    assert full.identify_many([]) == []


def test_deleted_means_never_found_again(full, tmp_path):
    probe = units(20)[3]
    assert full.identify(probe).match == "person 03"
    full.delete("person 03")
    assert "person 03" not in full
    assert full.identify(probe).match is None
    assert "person 03" not in list(full.ids())
    with pytest.raises(UnknownIdentity, match="person 03"):
        full.verify("person 03", probe)
    with pytest.raises(UnknownIdentity):
        full.delete("person 03")
    full.close()
    with Gallery.open(tmp_path / "people.mettle") as again:
        assert again.identify(probe).match is None


def test_g9_compact_leaves_no_byte_of_a_deleted_template(full, tmp_path):
    secret = full._storage.templates_of("person 05").vectors
    full.reindex()  # its files hold the template as well
    full.delete("person 05")
    full.compact()
    content = [file.read_bytes() for file in (tmp_path / "people.mettle").rglob("*") if file.is_file()]
    assert content
    for row in secret:
        assert not any(row.tobytes()[:16] in part for part in content)
    assert full.check() == []


def test_a_gallery_reopens_without_being_told_what_it_holds(full, tmp_path):
    expected = full.identify(units(20)[2], k=4)
    full.close()
    with Gallery.open(tmp_path / "people.mettle") as again:
        assert again.identify(units(20)[2], k=4) == expected
        assert len(list(again.ids())) == 20
        assert again.notes == []


def test_a_closed_gallery_says_so(gallery):
    gallery.close()
    gallery.close()
    for call in (lambda: gallery.ids(), lambda: gallery.identify(units(1)[0]), lambda: gallery.enrol("a", units(1))):
        with pytest.raises(GalleryError, match="closed"):
            call()


def test_g8_the_same_request_twice_changes_nothing(gallery):
    first = gallery.enrol("anna", units(2), request="r1")
    again = gallery.enrol("anna", units(2), request="r1")
    assert again.numbers == first.numbers
    assert again.repeated
    assert gallery.verify("anna", units(1)[0]).templates == 2


def test_enrolling_again_adds_and_replacing_replaces(gallery):
    gallery.enrol("anna", units(2))
    gallery.enrol("anna", units(1, 5))
    assert gallery.verify("anna", units(1)[0]).templates == 3
    gallery.enrol("anna", units(1, 6), replace=True)
    assert gallery.verify("anna", units(1, 6)[0]).templates == 1
    assert gallery.identify(units(2)[0]).match is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.full(DIM, np.nan), "NaN"),
        (np.full(DIM, np.inf), "NaN or infinity"),
        (np.zeros(DIM), "zero"),
        (np.ones(DIM + 1), "another model"),
        (np.ones((2, 2, DIM)), "another model"),
        (np.ones((0, DIM)), "another model"),
        (np.ones(DIM, np.int64), "floats"),
        ([[1.0] * DIM, [1.0] * (DIM + 1)], "differ in length"),
        ("anna.jpg", "model"),
        (b"x", "model"),
    ],
)
def test_g11_what_is_no_template_is_refused_and_nothing_changes(gallery, bad, message):
    for call in (lambda: gallery.enrol("anna", bad), lambda: gallery.identify(bad)):
        with pytest.raises(InputError, match=message):
            call()
    assert len(gallery) == 0


def test_tiny_and_huge_vectors_keep_their_direction(gallery):
    row = units(1)[0].astype(np.float64)
    gallery.enrol("anna", row * 1e-300)
    assert gallery.verify("anna", row * 1e300).score == pytest.approx(1)


def test_tensors_lists_and_arrays_are_all_embeddings(gallery):
    row = units(1)[0]
    rows = units(5)
    gallery.enrol("anna", torch.from_numpy(row).requires_grad_())
    gallery.enrol("anna", rows[1].tolist())
    gallery.enrol("anna", [rows[2], rows[3].astype(np.float64)])
    gallery.enrol("anna", torch.from_numpy(rows[4]).to(torch.bfloat16).float())
    assert gallery.verify("anna", row).templates == 5


def test_what_somebody_has_already_is_not_enrolled_again(gallery):
    rows = units(3)
    assert gallery.enrol("anna", rows[:2]).skipped == 0
    again = gallery.enrol(
        "anna", np.concatenate([7 * rows[:2], rows, rows[2:]])
    )  # the same at another length, and twice
    assert (len(again.numbers), again.skipped) == (1, 5)
    assert gallery.verify("anna", rows[0]).templates == 3
    assert gallery.enrol("ben", rows).skipped == 0, "somebody else may look the same"
    many = gallery.enrol_many([("anna", rows), ("carl", rows[:1]), ("carl", rows[:1])])
    assert sum(r.skipped for r in many) == 4 and sum(len(r.numbers) for r in many) == 1
    assert gallery.enrol("anna", rows[:2], replace=True).skipped == 0
    assert gallery.info().templates == 2 + 3 + 1
    assert gallery.check() == []


def test_rounding_does_not_make_a_new_template_but_a_small_change_does(gallery):
    row = units(1)[0]
    gallery.enrol("anna", row)
    assert gallery.enrol("anna", np.nextafter(row, np.float32(2))).skipped == 1
    assert gallery.enrol("anna", row + np.float32(1e-4) * units(1, 1)[0]).skipped == 0


def test_s5_odd_names_are_data(gallery, tmp_path):
    names = ["../x", "a/b", "%2e%2e", "‮right to left", "漢字", "' OR 1=1 --", "<b>", "."]
    for name, row in zip(names, units(len(names)), strict=True):
        gallery.enrol(name, row)
        assert gallery.identify(row).match == name
    assert sorted(gallery.ids()) == sorted(names)
    assert {p.name for p in tmp_path.iterdir()} == {"people.mettle"}
    for bad in ("", "x" * 600, "nul\0", "\ud800", 7, None, "tab\tand\nbreak", "\x1b[31m", "two\u2028lines", "\x85"):
        with pytest.raises(InputError):
            gallery.enrol(bad, units(1))
        with pytest.raises(InputError):
            gallery.enrol_many([(bad, units(1))])


def test_a_name_is_one_person_however_its_letters_are_composed(gallery):
    composed, parts = "Jos\u00e9", "Jose\u0301"
    rows = units(2)
    gallery.enrol(parts, rows[0])
    gallery.enrol(composed, rows[1])
    assert list(gallery.ids()) == [composed]
    for name in (composed, parts):
        assert gallery.verify(name, rows[0]).templates == 2
        assert name in gallery
    gallery.delete(parts)
    assert len(gallery) == 0


def test_names_that_an_older_version_took_are_still_found_added_to_and_deleted(tmp_path):
    rows, old = units(2), ["Jose\u0301", "two\nlines"]
    with Gallery.open(tmp_path / "old", dim=DIM) as gallery:
        for name in old:
            gallery._storage.enrol(name, rows[:1])
    with Gallery.open(tmp_path / "old") as gallery:
        for name in old:
            gallery.enrol(name, rows[1])
            assert gallery.verify(name, rows[0]).templates == 2
        assert sorted(gallery.ids()) == sorted(old)
        composed = "Jos\u00e9"  # typed on another machine: the same person
        gallery.enrol(composed, units(3)[2])
        assert composed in gallery and gallery.verify(composed, rows[0]).templates == 3
        assert sorted(gallery.ids()) == sorted(old)
        for name in (composed, old[1]):
            gallery.delete(name)
        assert len(gallery) == 0


@pytest.mark.parametrize(
    "where",
    ["mysql://x/y", "sqlite:///foo.db", "http://x/y", "file://", "file:///tmp/x", "mysql:/x/y", "S3://bucket/x", ""],
)
def test_addresses_of_what_is_no_gallery_make_no_folders(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make in (lambda: Gallery.open(where, dim=4), lambda: Gallery.open(Path(where) if where else "", dim=4)):
        with pytest.raises(InputError, match="folder"):
            make()
    with Gallery.open("people", dim=4):
        pass
    with pytest.raises(InputError, match="folder"):
        Gallery.move("people", where)
    assert [p.name for p in tmp_path.iterdir()] == ["people"]


def test_the_address_of_a_server_is_one_in_any_letters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GalleryError) as told:  # nobody listens there: it was asked, and no folder was made
        Gallery.open("POSTGRESQL://anna:hush@127.0.0.1:1/people", dim=4)
    assert "hush" not in str(told.value)
    with pytest.raises(InputError, match="as text"):
        Gallery.open(Path("postgresql://127.0.0.1:1/people"), dim=4)
    assert list(tmp_path.iterdir()) == []


def test_a_new_gallery_needs_to_know_what_it_holds(tmp_path):
    with pytest.raises(GalleryError, match="model=RUN or dim=N"):
        Gallery.open(tmp_path / "new")
    with pytest.raises(GalleryError, match="no gallery"):
        Gallery.open(tmp_path / "new", dim=4, create=False)
    for bad in (0, -1, 2.5, True, 10**9):
        with pytest.raises(InputError, match="dim"):
            Gallery.open(tmp_path / "new", dim=bad)
    assert not (tmp_path / "new").exists()


def test_what_is_no_gallery_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(GalleryError, match="notes.txt"):
        Gallery.open(tmp_path, dim=4)
    with pytest.raises(GalleryError, match="a file"):
        Gallery.open(tmp_path / "notes.txt", dim=4)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_gallery_refuses_to_be_reopened_as_something_else(gallery, tmp_path):
    gallery.close()
    with pytest.raises(GalleryError, match="length 24"):
        Gallery.open(tmp_path / "people.mettle", dim=8)
    with pytest.raises(GalleryError, match="fusion='best'"):
        Gallery.open(tmp_path / "people.mettle", fusion="mean")


def test_g6_one_writer_and_many_readers(full, tmp_path):
    path = tmp_path / "people.mettle"
    with pytest.raises(GalleryLocked):
        Gallery.open(path)
    with Gallery.open(path, read_only=True) as reader:
        row = units(1, 77)[0]
        assert reader.identify(row).match is None
        full.enrol("late", row)
        assert reader.identify(row).match == "late"  # at once, without being told
        full.delete("late")
        assert reader.identify(row).match is None
        with pytest.raises(GalleryError):
            reader.enrol("nobody", row)


def test_g5_leftovers_of_a_killed_process_are_no_obstacle(full, tmp_path):
    path = tmp_path / "people.mettle"
    full.close()
    (path / "index.mettle-tmp-7").mkdir()
    (path / "contract.json.mettle-tmp-1").write_bytes(b"half")
    (path / "index" / "unknown").write_bytes(b"?") if (path / "index").is_dir() else None
    with Gallery.open(path) as again:
        assert len(again) == 20
    assert not (path / "index.mettle-tmp-7").exists()


def test_g4_a_damaged_index_is_built_again_and_said(full, tmp_path):
    path = tmp_path / "people.mettle"
    full.reindex()
    full.close()
    victim = max((path / "index").iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    with Gallery.open(path) as again:
        assert "built again" in again.notes[0]
        assert again.identify(units(20)[4]).match == "person 04"


def test_an_index_older_than_the_record_catches_up(full, tmp_path):
    path = tmp_path / "people.mettle"
    full.reindex()
    full.close()
    shutil.copytree(path / "index", tmp_path / "old")
    with Gallery.open(path) as later:
        later.delete("person 01")
        later.enrol("new", units(1, 50))
    shutil.rmtree(path / "index")
    shutil.copytree(tmp_path / "old", path / "index")
    with Gallery.open(path) as again:
        assert again.identify(units(1, 50)[0]).match == "new"
        assert again.identify(units(20)[1]).match is None
        assert again.check() == []


def test_g7_readers_and_writers_in_threads_see_some_serial_order(gallery):
    rows, wrong = units(40), []
    for i in range(0, 40, 2):
        gallery.enrol(f"p{i}", rows[i])

    def change(start: int) -> None:
        for i in range(start, 40, 4):
            gallery.enrol(f"p{i}", rows[i])
            if gallery.identify(rows[i], k=1).match != f"p{i}":
                wrong.append(f"p{i} not found after it was enrolled")
            gallery.delete(f"p{i}")
            if gallery.identify(rows[i], k=1).match == f"p{i}":
                wrong.append(f"p{i} found after it was deleted")

    def look() -> None:
        for _ in range(20):
            for i in range(0, 40, 8):
                if gallery.identify(rows[i], k=2).match != f"p{i}":
                    wrong.append(f"p{i} lost")

    threads = [threading.Thread(target=change, args=(k,)) for k in (1, 3)] + [
        threading.Thread(target=look) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(gallery) == 20
    assert gallery.check() == []


def test_info_says_what_a_reader_wants_to_know(full):
    info = full.info()
    assert (info.kind, info.identities, info.dim, info.fusion) == ("sqlite", 20, DIM, "best")
    assert info.templates == sum(1 + i % 3 for i in range(20))
    assert info.bytes > 0
    assert info.index["kind"] == "exact"


def test_thresholds_given_when_it_was_made_are_kept(tmp_path):
    with Gallery.open(tmp_path / "g", dim=DIM, thresholds={1e-2: 0.35, 1e-3: 0.5}) as gallery:
        gallery.enrol("anna", units(1))
    with Gallery.open(tmp_path / "g") as again:
        assert again.verify("anna", units(1)[0]).threshold == 0.5
        assert again.verify("anna", units(1)[0], far=1e-2).threshold == 0.35
        zero = again.identify(-units(1)[0], threshold=-1)
        assert zero.match == "anna"  # an explicit threshold is honoured, however low
        assert zero.far is None


@pytest.mark.parametrize("k", [0, -1, 1001])
def test_a_number_of_candidates_that_makes_no_sense_is_refused(full, k):
    with pytest.raises(InputError, match="k must be"):
        full.identify(units(1)[0], k=k)


def test_many_people_are_enrolled_in_few_changes(gallery):
    rows = units(600)
    receipts = gallery.enrol_many((f"p{i:03d}", row) for i, row in enumerate(rows))
    assert len(receipts) == 3
    assert len(gallery) == 600
    assert gallery.identify(rows[599]).match == "p599"


def test_a_person_who_comes_row_by_row_is_looked_up_in_few_changes(gallery):
    """Every change reads what the person has, so one change for each few rows would take time that is quadratic."""
    rows = units(3000)
    gallery.enrol("anna", rows[:10])
    receipts = gallery.enrol_many([("anna", row) for row in rows] + [("ben", rows[0]), ("anna", rows[1])])
    assert len(receipts) == 1
    assert (len(receipts[0].numbers), receipts[0].skipped) == (2990 + 1, 11)
    assert gallery.info().templates == 3001


def test_a_snapshot_opens_as_a_gallery(full, tmp_path):
    full.snapshot(tmp_path / "copy")
    full.delete("person 00")
    with Gallery.open(tmp_path / "copy") as copy:
        assert len(copy) == 20
        assert copy.identify(units(20)[0]).match == "person 00"
    with pytest.raises(GalleryError, match="there already"):
        full.snapshot(tmp_path / "copy")


def test_an_index_of_another_kind_finds_the_same_people(full):
    for kind in ("exact", "hnsw"):
        measured = full.reindex(IndexSpec(kind=kind))
        assert kind in str(measured)
        assert full.identify(units(20)[9]).match == "person 09"


def test_an_index_that_cannot_be_built_changes_nothing(full, tmp_path):
    full.identify(units(1)[0])
    new = units(1, 61)[0]
    full.enrol("new", new)
    full.delete("person 02")
    with pytest.raises(InputError, match="memory_mb"):
        full.reindex(IndexSpec(memory_mb=1e-6))
    for gallery in (full, None):
        if gallery is None:
            full.close()
            gallery = Gallery.open(tmp_path / "people.mettle")
        assert gallery.identify(new).match == "new"
        assert gallery.identify(units(20)[2]).match is None
        assert gallery.check() == []
    gallery.close()


def test_g9_a_restored_record_is_never_read_by_the_index_of_its_future(tmp_path):
    path, rows = tmp_path / "g", units(8, 70)
    with Gallery.open(path, dim=DIM, thresholds=THRESHOLDS) as gallery:
        gallery.enrol("a", rows[0])
        gallery.snapshot(tmp_path / "backup")
        gallery.enrol("eve", rows[1])
        gallery.enrol("eve 2", rows[2])
        gallery.identify(rows[0])
    for name in ("record.sqlite", "record.sqlite-wal", "record.sqlite-shm"):
        (path / name).unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup" / "record.sqlite", path / "record.sqlite")
    with Gallery.open(path) as restored:
        assert "newer" in restored.notes[0]
        for i, name in enumerate(("mallory", "bob", "carl")):
            restored.enrol(name, rows[3 + i])
        shutil.copytree(path, tmp_path / "killed")
    with Gallery.open(tmp_path / "killed") as again:
        assert again.identify(rows[1]).match is None
        assert again.identify(rows[3]).match == "mallory"
        assert again.check() == []


def test_the_kind_of_index_that_was_chosen_stays(full, tmp_path):
    full.identify(units(1)[0])
    full.close()
    with Gallery.open(tmp_path / "people.mettle") as again:
        again.reindex(IndexSpec(kind="scan"))
    with Gallery.open(tmp_path / "people.mettle") as later:
        assert later.info().index["kind"] == "scan"
        later.compact()
    assert (tmp_path / "people.mettle" / "index" / "manifest.json").is_file()


def test_replacing_somebody_never_hides_them(gallery):
    rows = units(2)
    gallery.enrol("anna", rows[0])
    gallery.enrol("ben", rows[1])
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            gallery.enrol("anna", rows[0], replace=True)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        found = {gallery.identify(rows[0], k=1).match for _ in range(300)}
    finally:
        stop.set()
        thread.join()
    assert found == {"anna"}


def test_the_same_person_twice_in_one_call_keeps_both(gallery):
    gallery.enrol("p0", units(1, 3))
    people = [(f"p{i % 300}", row) for i, row in enumerate(units(600))]
    gallery.enrol_many(people, replace=True)
    assert gallery.verify("p0", units(1)[0]).templates == 2
    assert gallery.info().templates == 600


def test_a_move_that_failed_can_be_tried_again(full, tmp_path, monkeypatch):
    from mettle.gallery.storage import transfer

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_check_equal", lambda *_: (_ for _ in ()).throw(GalleryError("the source changed")))
        with pytest.raises(GalleryError, match="changed"):
            Gallery.move(tmp_path / "people.mettle", tmp_path / "target")
    assert Gallery.move(tmp_path / "people.mettle", tmp_path / "target").identities == 20
    with pytest.raises(GalleryError, match="already"):
        Gallery.move(tmp_path / "people.mettle", tmp_path / "target")


def test_half_precision_tensors_are_embeddings(gallery):
    row = torch.from_numpy(units(1)[0])
    gallery.enrol("anna", row.to(torch.bfloat16))
    assert gallery.verify("anna", row.half()).score > 0.99
    assert "" not in gallery


@pytest.mark.parametrize(
    ("options", "message"),
    [({"thresholds": {1e-3: "high"}}, "cosine"), ({"thresholds": {1e-3: None}}, "cosine")],
)
def test_thresholds_that_are_no_numbers_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        Gallery.open(tmp_path / "g", dim=4, **options)


def test_questions_that_are_no_numbers_are_refused(full):
    for options in ({"k": "5"}, {"far": "x"}, {"threshold": "x"}, {"k": True}):
        with pytest.raises(InputError):
            full.identify(units(1)[0], **options)


def test_any_rate_can_have_a_threshold(tmp_path):
    with Gallery.open(tmp_path / "g", dim=DIM, thresholds={1 / 3000: 0.4}) as gallery:
        gallery.enrol("anna", units(1))
        assert gallery.verify("anna", units(1)[0], far=1 / 3000).threshold == 0.4


@pytest.mark.parametrize("where", ["x" * 300, "a\0b", "/proc/nope", "/dev/null/g"])
def test_places_that_cannot_be_are_one_clear_error(where):
    with pytest.raises((GalleryError, InputError)):
        Gallery.open(where, dim=4)


def test_a_servers_password_is_never_shown():
    from mettle.gallery.storage.location import redact_location

    assert redact_location("postgresql://u:secret@h1:5432,h2:5432/db") == "postgresql://u@h1:5432,h2:5432/db"
    hidden = redact_location("postgresql://u@h/db?gallery=door&password=hunter2")
    assert hidden == "postgresql://u@h/db?gallery=door"


class TestWithModel:
    """Pictures in: the model of a run makes the templates."""

    @pytest.fixture
    def opened(self, trained, tmp_path):
        with Gallery.open(tmp_path / "people.mettle", model=trained.run.folder) as gallery:
            yield gallery

    def test_all_forms_of_a_picture_give_one_template(self, opened, trained, tmp_path):
        array = trained.samples.read(np.array([0]))[0]
        picture = Image.fromarray(array[..., 0])
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        (tmp_path / "a.png").write_bytes(buffer.getvalue())
        forms = [array, array[..., 0], picture, buffer.getvalue(), tmp_path / "a.png", str(tmp_path / "a.png")]
        vectors = [opened.embed(form) for form in forms]
        for vector in vectors[1:]:
            assert np.array_equal(vector, vectors[0])
        assert np.allclose(opened.embed(forms), np.concatenate(vectors), atol=1e-6)

    def test_a_gallery_embeds_as_evaluation_does(self, opened, trained):
        from mettle.model.inference import embed

        test = trained.samples.part("test")
        expected = embed(trained.run.model(), test)
        found = opened.embed(list(test.read(np.arange(len(test)))))
        assert np.allclose(found, expected, atol=1e-6)

    def test_it_reopens_alone_and_answers_at_the_contracts_threshold(self, opened, trained, tmp_path):
        test = trained.samples.part("test")
        opened.enrol("somebody", test.read(np.array([0]))[0])
        opened.close()
        known = {k: v for k, v in trained.run.contract()["thresholds"].items() if v["threshold"] is not None}
        with Gallery.open(tmp_path / "people.mettle") as again:
            for far, entry in known.items():
                answer = again.verify("somebody", test.read(np.array([0]))[0], far=float(far))
                assert answer.score == pytest.approx(1)
                assert answer.threshold == entry["threshold"]
                assert answer.basis.startswith(entry["measured_on"])
                assert ("uncertain" in answer.basis) == (entry["status"] != "ok")

    def test_thresholds_given_by_hand_win_over_the_contracts(self, opened, trained, tmp_path):
        with Gallery.open(tmp_path / "own", model=trained.run.folder, thresholds={1e-3: 0.987}) as gallery:
            gallery.enrol("anna", units(1, dim=8))
        for options in ({}, {"model": trained.run.folder}):
            with Gallery.open(tmp_path / "own", **options) as again:
                assert again.verify("anna", units(1, dim=8)[0]).threshold == 0.987

    def test_a_snapshot_takes_the_model_along(self, opened, trained, tmp_path):
        picture = trained.samples.read(np.array([0]))[0]
        opened.enrol("anna", picture)
        with Gallery.open(opened.snapshot(tmp_path / "copy")) as copy:
            assert copy.verify("anna", picture).score == pytest.approx(1)
        with pytest.raises(GalleryError):
            opened.snapshot("/proc/nope/x")

    def test_g10_another_model_in_the_gallerys_own_folder_is_refused(self, opened, other_trained, tmp_path):
        opened.close()
        shutil.rmtree(tmp_path / "people.mettle" / "model")
        shutil.copytree(other_trained.run.folder, tmp_path / "people.mettle" / "model")
        with pytest.raises(GalleryError, match="not as it was written"):
            Gallery.open(tmp_path / "people.mettle")

    def test_g10_another_model_is_refused(self, opened, other_trained, tmp_path):
        opened.close()
        with pytest.raises(GalleryError, match="another weights|another dimension"):
            Gallery.open(tmp_path / "people.mettle", model=other_trained.run.folder)
        with Gallery.open(tmp_path / "plain", dim=DIM) as plain:
            plain.enrol("anna", units(1))
        with pytest.raises(GalleryError, match="elsewhere"):
            Gallery.open(tmp_path / "plain", model=other_trained.run.folder)
        with pytest.raises(InputError, match="not both"):
            Gallery.open(tmp_path / "new", model=other_trained.run.folder, dim=8)

    def test_a_changed_weight_in_the_kept_model_is_noticed(self, opened, tmp_path):
        opened.close()
        weights = tmp_path / "people.mettle" / "model" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(bytes(content))
        with Gallery.open(tmp_path / "people.mettle") as again, pytest.raises(Exception, match="another file"):
            again.embed(np.zeros((12, 12), np.uint8))

    def test_a_broken_picture_is_one_clear_error(self, opened, tmp_path):
        from mettle.errors import DataError

        with pytest.raises(DataError, match="not a JPEG"):
            opened.enrol("anna", b"<html>")
        with pytest.raises(DataError, match="No such file"):
            opened.enrol("anna", tmp_path / "none.png")
        assert len(opened) == 0


def test_without_a_threshold_there_are_scores_and_candidates_and_no_match(tmp_path):
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        for i, row in enumerate(units(5)):
            gallery.enrol(f"p{i}", row)
        for options in ({}, {"far": 0.01}):
            answer, found = gallery.verify("p2", units(5)[2], **options), gallery.identify(units(5)[2], k=3, **options)
            assert answer.verdict == found.verdict == "not calibrated"
            assert answer.match is False and answer.score == pytest.approx(1)
            assert found.match is None and found.candidates[0].identity == "p2" and len(found.candidates) == 3
            assert not any(candidate.match for candidate in found.candidates)
            for said in (answer, found):
                assert said.threshold is None and said.far is None and said.per is None
                assert "`mettle gallery calibrate`" in said.basis and "threshold=" in said.basis
            assert answer.false_accepts is None and found.false_matches is None
        assert gallery.verify("p2", units(5)[2], threshold=0.5).verdict == "match: p2"
        assert gallery.identify(units(5)[2], threshold=0.5).match == "p2"
        assert gallery.identify(units(1, 77)[0], threshold=0.99).verdict == "no match"


def test_a_misspelt_name_is_answered_with_the_nearest(full):
    for ask in (lambda name, **more: full.verify(name, units(1)[0], **more), full.delete):
        with pytest.raises(UnknownIdentity, match="nobody called 'Persn 07' .*; did you mean 'person 07'\\?$"):
            ask("Persn 07")
        with pytest.raises(UnknownIdentity, match="enrolled[^;]*$"):
            ask("Persn 07", suggest=False)
        with pytest.raises(UnknownIdentity, match="enrolled[^;]*$"):
            ask("zoe")
