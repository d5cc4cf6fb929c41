"""Damage on the disk never opens a gallery: flipped bits, and the attacks that one flipped bit makes."""

import json
import sqlite3
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from storage_fixtures import units

from mettle import Gallery
from mettle.errors import GalleryError, MettleError
from mettle.gallery.binding import Binding, binding_from_json, binding_to_json
from mettle.gallery.storage.integrity import RevisionState

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bit_flips


def test_flipped_bits_never_change_an_answer_silently():
    counts, troubles = bit_flips.run(100, seed=7, processes=1)
    assert troubles == []
    assert counts["same"] > 30 and counts["refused"] > 1 and counts["same"] + counts["refused"] == 100


def test_the_harness_sees_a_wrong_answer(tmp_path):
    dim = bit_flips.make_gallery(tmp_path / "g")
    wanted = bit_flips.ask_everything(tmp_path / "g", dim)
    for what in ("identify", "verify person-07", "ids", "repeated"):
        assert bit_flips.compare(wanted, wanted | {what: "another answer"}) == ("wrong", what)
    assert bit_flips.compare(wanted, wanted | {"ids": GalleryError("damaged")}) == ("refused", "")


@pytest.fixture
def place(shelf):
    """A gallery of twenty people, closed; with a threshold given when it was made."""
    shelf.create(Binding(8, thresholds={"0.001": {"threshold": 0.42}})).close()
    where = shelf.url if shelf.kind == "postgresql" else shelf.path.parent
    with Gallery.open(where) as gallery:
        gallery.enrol_many((f"person-{i:02}", units(i, 2)) for i in range(20))
        gallery.enrol("person-03", units(90, 1), request="r")
    return where


ATTACKS = {
    "a lower threshold": "UPDATE metadata SET value = replace(value, '0.42', '0.02') WHERE key = 'binding'",
    "another name": "UPDATE identities SET name = 'person-66' WHERE name = 'person-07'",
    "another id of an identity": "UPDATE templates SET identity = identity + 1 WHERE number = 15",
    "another vector": "UPDATE templates SET vector = (SELECT vector FROM templates WHERE number = 1) WHERE number = 15",
    "another number": "UPDATE templates SET number = 9999 WHERE number = 15",
    "a template is gone": "DELETE FROM templates WHERE number = 15",
    "a count of templates": "UPDATE identities SET templates = 3 WHERE name = 'person-07'",
    "a later change": "UPDATE revision_state SET sequence = sequence + 1",
    "a count of people": "UPDATE revision_state SET identities = 1",
}


def ask(where) -> list:
    """What the gallery answers about person 07, and about whoever looks like them; an error where it refuses."""
    questions = (
        lambda gallery: asdict(gallery.verify("person-07", units(7, 2)[0])),
        lambda gallery: asdict(gallery.verify("person-07", units(6, 2)[0])),
        lambda gallery: asdict(gallery.identify(units(7, 2)[0])),
        lambda gallery: asdict(gallery.identify(units(500, 1)[0], k=1)),
    )
    answers = []
    for question in questions:
        try:
            with Gallery.open(where, read_only=True) as gallery:
                answers.append(question(gallery))
        except GalleryError as error:
            answers.append(error)
    return answers


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_row_is_refused_where_it_is_read(place, shelf, attack):
    before = ask(place)
    assert before[0]["match"] and before[2]["match"] == "person-07" and not before[1]["match"]
    with Gallery.open(place, read_only=True) as gallery:
        assert gallery.check() == [] and gallery.scrub().problems == ()
    with Gallery.open(place, read_only=True) as gallery:
        shelf.sql(ATTACKS[attack])
        assert gallery.check() and gallery.scrub().problems, "a gallery that is open lists it"
    after = ask(place)
    for now, then in zip(after, before, strict=True):
        # A server searches by itself: a template that is missing there, or not where it was, can only be not found.
        server = shelf.kind == "postgresql" and isinstance(now, dict) and "candidates" in now
        lost = server and now["candidates"][0]["score"] <= then["candidates"][0]["score"]
        assert now == then or "damaged" in str(now) or lost, (now, then)
    assert any(isinstance(now, GalleryError) for now in after)


def test_a_person_who_is_missing_is_not_called_unknown(place, shelf):
    """Rows that are not there cannot fail a checksum of their own: the sums find them."""
    shelf.sql("DELETE FROM templates WHERE number IN (15, 16)")
    shelf.sql("DELETE FROM identities WHERE name = 'person-07'")
    with pytest.raises(GalleryError, match="are there instead of"), Gallery.open(place, read_only=True) as gallery:
        gallery.verify("person-07", units(7, 1)[0])
    with pytest.raises(GalleryError, match="are there instead of"), Gallery.open(place) as gallery:
        gallery.enrol("person-07", units(70, 1))


def test_a_request_that_is_missing_is_not_served_twice(place, shelf):
    shelf.sql("DELETE FROM idempotency_keys WHERE name = 'r'")
    with Gallery.open(place) as gallery, pytest.raises(GalleryError, match="requests|idempotency keys"):
        gallery.delete("person-03", request="r")


def test_a_calibration_that_is_missing_is_not_taken_for_none(tmp_path):
    with Gallery.open(tmp_path / "g", dim=8, thresholds={0.1: 0.1}) as gallery:
        gallery.enrol_many((f"p{i}", units(i, 1)) for i in range(12))
        gallery.calibrate(0.1)
        assert gallery.decision_threshold(far=0.1).per == "person"
    with sqlite3.connect(tmp_path / "g" / "record.sqlite") as storage:
        storage.execute("DELETE FROM metadata WHERE key = 'calibration'")
    storage.close()
    with Gallery.open(tmp_path / "g") as gallery:
        with pytest.raises(GalleryError, match="calibration in the storage is damaged"):
            gallery.decision_threshold(far=0.1)
        gallery.forget_calibration()
        assert gallery.decision_threshold(far=0.1).threshold == 0.1 and gallery.check() == []


@pytest.mark.parametrize(
    "field",
    [
        {"dim": 0},
        {"dim": 8.0},
        {"fusion": "worst"},
        {"metric": "euclidean"},
        {"thresholds": {"0.001": {"threshold": 1.5}}},
        {"thresholds": {"7": {"threshold": 0.5}}},
        {"model": 3},
    ],
    ids=str,
)
def test_a_binding_out_of_range_is_refused(field):
    made = json.loads(binding_to_json(Binding(8)))
    with pytest.raises(GalleryError, match="damaged"):
        binding_from_json(json.dumps(made | field))


@pytest.mark.parametrize("field", ["sequence", "identities", "template_sum", "added"])
def test_a_state_out_of_range_is_refused(field):
    with pytest.raises(GalleryError, match="out of range"):
        RevisionState.from_row(replace(RevisionState(), **{field: -1}).row())


def test_a_changed_index_is_built_again(tmp_path):
    with Gallery.open(tmp_path / "g", dim=8) as gallery:
        gallery.enrol_many((f"p{i}", units(i, 1)) for i in range(30))
        gallery.reindex()
        answers = gallery.identify_many(units(3, 4), k=3)
    for file in (tmp_path / "g" / "index").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
        with Gallery.open(tmp_path / "g") as gallery:
            assert gallery.identify_many(units(3, 4), k=3) == answers and "built again" in gallery.notes[0]


def test_check_lists_what_it_finds_and_never_raises(tmp_path):
    """Every row of every table is damaged, one after the other, and `check` of the gallery that was opened before
    tells it."""
    with Gallery.open(tmp_path / "g", dim=8, thresholds={0.1: 0.1}) as gallery:
        gallery.enrol_many((f"p{i}", units(i, 1)) for i in range(12))
        gallery.enrol("p1", units(50, 1), request="r")
        gallery.delete("p2")
        gallery.calibrate(0.1)
        original = (tmp_path / "g" / "record.sqlite").read_bytes()
        assert original
        with sqlite3.connect(tmp_path / "g" / "record.sqlite") as other:
            for table in (
                "metadata",
                "identities",
                "templates",
                "deleted_templates",
                "idempotency_keys",
                "revision_state",
            ):
                column = "value" if table == "metadata" else "checksum"
                other.execute(f"UPDATE {table} SET checksum = checksum + 1 WHERE {column} IS NOT NULL")
                other.commit()
                found = gallery.check()
                assert found and all(isinstance(line, str) and "\n" not in line for line in found), table
                other.execute(f"UPDATE {table} SET checksum = checksum - 1")
                other.commit()
                assert gallery.check() == [], table
        other.close()


def test_a_scrub_runs_while_others_enrol(shelf):
    shelf.create().close()
    where = shelf.url if shelf.kind == "postgresql" else shelf.path.parent
    with Gallery.open(where) as gallery:
        gallery.enrol_many((f"p{i}", units(i, 1)) for i in range(600))
        with Gallery.open(where, read_only=True) as reader:
            storage, seen = reader._storage, []
            inspect = storage.inspect

            def enrolled_between(work):
                gallery.enrol(f"late {len(seen)}", units(len(seen), 2))
                gallery.delete(f"p{len(seen)}")
                seen.append(None)
                return inspect(work)

            storage.inspect = enrolled_between
            report = reader.scrub()
            assert report.problems == () and len(seen) >= 4 and report.identities >= 600 - len(seen)
        with pytest.raises(MettleError):
            gallery.verify("p0", np.ones(8))


@pytest.mark.parametrize("words", [b"templates (sequence)", b"sqlite_autoindex_metadata_1"])
def test_a_schema_that_is_no_text_any_more_is_refused(tmp_path, words):
    """SQLite's own message then repeats the damaged bytes."""
    Gallery.open(tmp_path / "g", dim=8).close()
    content = (tmp_path / "g" / "record.sqlite").read_bytes()
    at = content.index(words) + len(words) - 2
    damaged = content[:at] + bytes([content[at] | 0x80]) + content[at + 1 :]
    (tmp_path / "g" / "record.sqlite").write_bytes(damaged)
    with pytest.raises(GalleryError, match="damaged"):
        Gallery.open(tmp_path / "g")
