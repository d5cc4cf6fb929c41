"""Calibrations that a gallery keeps: used in answers, noticed when stale, never half, and added to older galleries."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import killed
import numpy as np
import pytest
from proxy import Proxy
from storage_fixtures import PATIENT, FileShelf, ServerShelf, units
from test_sqlite import copied, log_bytes, log_path

from command_line import mettle, refused
from mettle import Gallery
from mettle.errors import GalleryError, InputError
from mettle.evaluate.calibration import count_allowed_errors, pairs_needed
from mettle.gallery.calibration import (
    GalleryCalibration,
    count_pairs,
    lowest_rate,
    people_needed,
)
from mettle.gallery.storage.postgres import PostgresStorage

DIM, MADE = 16, {0.1: 0.4, 1e-3: 0.7}  # thresholds that a gallery is made with, and that independent rows keep


def crowd(people: int, seed: int = 0, templates: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(people, templates, DIM))


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request, folder):
    """Where a gallery of either kind may be made."""
    if request.param == "sqlite":
        return str(folder / "people.mettle")
    return ServerShelf(request.getfixturevalue("postgres")).url


@pytest.fixture
def gallery(where):
    with Gallery.open(where, dim=DIM, thresholds=MADE) as opened:
        opened.enrol_many((f"p{i}", rows) for i, rows in enumerate(crowd(40)))
        yield opened


def test_a_kept_calibration_is_used_after_reopening_and_until_it_is_forgotten(gallery, where):
    probe = crowd(1, 9)[0]
    table = gallery.calibrate((0.1, 0.01, 1e-6))
    assert table["0.01"]["threshold"] and table["1e-06"]["threshold"] is None
    here = gallery.verify("p3", probe, far=0.01)
    gallery.close()
    with Gallery.open(where) as again:
        assert again.verify("p3", probe, far=0.01) == here
        for far in (0.1, 0.01):
            for answer in (again.verify("p3", probe, far=far), again.identify(probe, far=far)):
                assert (answer.threshold, answer.far, answer.per) == (table[repr(far)]["threshold"], far, "person")
                assert "40 people enrolled" in answer.basis and "stale" not in answer.basis
        assert again.verify("p3", probe, far=0.1).false_accepts == pytest.approx(0.1)
        kept = again.info().calibration
        assert (kept["people"], kept["templates"], kept["rates"]) == (40, 40, [0.01, 0.1])
        assert (kept["model"], kept["fusion"], kept["stale"], kept["came"], kept["gone"]) == (None, "best", None, 0, 0)
        assert 0 < kept["sequence"] < again.info().sequence, "keeping it was a change of its own"
        assert again.notes == [] and again.check() == []
        assert again.forget_calibration() and not again.forget_calibration()
        assert again.info().calibration is None
        assert again.verify("p3", probe, far=0.1).threshold == MADE[0.1]
        with pytest.raises(InputError, match="no threshold was measured"):
            again.verify("p3", probe, far=0.01)
    with Gallery.open(where) as last:
        assert last.verify("p3", probe, far=0.1).per == "comparison"


def test_thresholds_go_before_each_other_in_one_order(gallery, where):
    probe = crowd(1, 9)[0]
    table = gallery.calibrate((0.1, 0.01))
    usual = gallery.verify("p3", probe)
    assert (usual.far, usual.threshold, usual.per) == (1e-3, MADE[1e-3], "comparison"), "calibrating loosens nothing"
    assert "calibrated for 0.01, 0.1 per person, not for this rate" in usual.basis
    by_hand = gallery.verify("p3", probe, threshold=0.123)
    assert (by_hand.threshold, by_hand.far, by_hand.per) == (0.123, None, None)
    assert set(gallery.info().thresholds) == {"0.1", "0.01", "0.001"}
    gallery.close()
    with Gallery.open(where, thresholds={0.1: 0.05}) as other:
        assert other.verify("p3", probe, far=0.1).threshold == 0.05, "given now goes before what is kept"
        with pytest.raises(InputError, match="known are 0.1:"):
            other.verify("p3", probe, far=0.01)
    with Gallery.open(where) as again:
        assert again.verify("p3", probe, far=0.1).threshold == table["0.1"]["threshold"]
        assert again.decision_threshold(far=0.01).threshold == table["0.01"]["threshold"]
        again.calibrate(0.2)
        assert again.info().calibration["rates"] == [0.2], "the new one takes the place of the former"
        assert again.verify("p3", probe, far=0.1).threshold == MADE[0.1]


def near(rng, count: int, templates: int = 4) -> np.ndarray:
    """(count, templates, DIM) rows of people who all resemble each other, strangers among them."""
    return np.ones(DIM) + 0.5 * rng.normal(size=(count, templates, DIM))


@pytest.mark.parametrize("rule", ["best", "mean"])
def test_no_answer_claims_what_the_calibration_contradicts(where, rule):
    rng = np.random.default_rng(0)
    strangers = near(rng, 200, 1)[:, 0]
    with Gallery.open(where, dim=DIM, fusion=rule, thresholds={0.02: 0.5, 1e-3: 0.6, 1e-4: 0.999}) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(near(rng, 60)))
        before = gallery.verify("p3", strangers[0])
        assert before.threshold == 0.6 and before.false_accepts < 0.01
        assert np.mean([gallery.verify("p3", row).match for row in strangers]) > 0.9, "or there is nothing to see"
        table = gallery.calibrate((0.1, 0.01))
        assert min(entry["threshold"] for entry in table.values()) > 0.6
        for far in (1e-3, 0.02):  # 0.004 and 0.08 of strangers at most, it said
            for ask in (gallery.verify, lambda _, row, far: gallery.identify(row, far=far)):
                with pytest.raises(InputError, match=f"far={far:g} is contradicted by the calibration; known are") as e:
                    ask("p3", strangers[0], far=far)
                assert "not measured" not in str(e.value) and "\n" not in str(e.value)
            told = gallery.info().thresholds[repr(far)]
            assert (told["threshold"], told["status"]) == (None, "contradicted by the calibration")
        assert gallery.verify("p3", strangers[0], far=1e-4).threshold == 0.999, "nothing speaks against this one"
        for far in (None, 0.01, 0.1):
            answers = [gallery.verify(f"p{i % 60}", row, far=far) for i, row in enumerate(strangers)]
            bound = answers[0].false_accepts
            assert np.mean([one.match for one in answers]) <= bound + 3 * np.sqrt(bound / len(strangers))
        gallery.forget_calibration()
        assert gallery.verify("p3", strangers[0]).threshold == 0.6


def test_without_the_usual_rate_the_lowest_calibrated_is_usual(tmp_path):
    rng = np.random.default_rng(0)
    with Gallery.open(tmp_path / "g", dim=DIM, thresholds={1e-3: 0.6}) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(near(rng, 60)))
        table = gallery.calibrate((0.1, 0.01))
        usual = gallery.decision_threshold()
        assert (usual.far, usual.per, usual.threshold) == (0.01, "person", table["0.01"]["threshold"])
    said = mettle("gallery", "info", tmp_path / "g")
    assert "false-accept rate 0.001 per comparison: contradicted by the calibration\n" in said
    assert "without --far at 0.01 per person" in mettle("gallery", "calibrate", tmp_path / "g", "--far", 0.01)


def test_a_rate_per_person_is_contradicted_without_counting_templates(tmp_path):
    rng, entry = np.random.default_rng(0), {"threshold": 0.6, "per": "person", "templates": 4.0}
    with Gallery.open(tmp_path / "g", dim=DIM, thresholds={0.009: entry, 0.05: entry}) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(near(rng, 60)))
        gallery.calibrate(0.01)
        assert gallery.decision_threshold(far=0.05).threshold == 0.6, "0.05 is more than was measured"
        with pytest.raises(InputError, match=r"far=0.009 is contradicted"):
            gallery.decision_threshold(far=0.009)


def test_whoever_has_the_gallery_open_sees_it_at_once(gallery, where):
    probe = crowd(1, 9)[0]
    with Gallery.open(where, read_only=True) as reader:
        assert reader.verify("p1", probe, far=0.1).threshold == MADE[0.1]
        table = gallery.calibrate(0.1)
        assert reader.verify("p1", probe, far=0.1).threshold == table["0.1"]["threshold"]
        assert reader.identify(probe, far=0.1).per == "person"
        gallery.forget_calibration()
        assert reader.identify(probe, far=0.1).threshold == MADE[0.1]
        with pytest.raises(GalleryError, match="reading"):
            reader.calibrate(0.1)
        with pytest.raises(GalleryError, match="reading"):
            reader.forget_calibration()
        assert reader.calibrate(0.1, keep=False)["0.1"]["threshold"] == table["0.1"]["threshold"]
        assert gallery.info().calibration is None


def test_where_nothing_can_be_measured_the_former_stays(gallery):
    gallery.calibrate(0.1)
    kept, sequence = gallery.info().calibration, gallery.info().sequence
    assert gallery.calibrate(1e-6)["1e-06"]["threshold"] is None
    assert gallery.info().calibration == kept and gallery.info().sequence == sequence


def test_stale_is_what_the_rule_says(tmp_path):
    """Enrolling, replacing and deleting at random, against sets of what was there."""
    rng, rows = random.Random(3), iter(crowd(4000, 1)[:, 0])
    seen = set()
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        live: dict[str, set[int]] = {}
        for i in range(30):
            live[f"p{i}"] = set(gallery.enrol(f"p{i}", [next(rows), next(rows)]).numbers)
        for _ in range(4):
            gallery.calibrate(0.1)
            measured, people = set().union(*live.values()), len(live)
            for _ in range(14):
                name, act = f"p{rng.randrange(45)}", rng.random()
                if act < 0.4 and name in live and len(live) > 5:
                    gallery.delete(name)
                    del live[name]
                elif act < 0.6 and name in live:
                    live[name] = set(gallery.enrol(name, next(rows), replace=True).numbers)
                else:
                    live[name] = live.get(name, set()) | set(gallery.enrol(name, next(rows)).numbers)
                now = set().union(*live.values())
                came, gone = len(now - measured), len(measured - now)
                stale = came > len(measured) / 10 or gone > len(measured) / 10 or abs(len(live) - people) > people / 10
                told = gallery.info().calibration
                assert (told["came"], told["gone"], told["stale"] is not None) == (came, gone, stale)
                answer = gallery.identify(next(rows), far=0.1)
                assert ("stale" in answer.basis and "calibrate again" in answer.basis) is stale
                assert len(gallery.notes) == stale
                assert answer.per == "person", "a stale one is used, and says so"
                seen.add(stale)
    assert seen == {True, False}


def test_many_people_with_few_templates_make_it_stale_too(tmp_path):
    rows = iter(crowd(2000, 2)[:, 0])
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        for i in range(10):
            gallery.enrol(f"p{i}", [next(rows) for _ in range(100)])
        gallery.calibrate(0.1)
        gallery.enrol("one", next(rows))
        assert gallery.info().calibration["stale"] is None
        gallery.enrol("two", next(rows))
        assert "12 are enrolled now" in gallery.info().calibration["stale"]


@pytest.mark.parametrize("other", [{"fusion": "mean"}, {"model": "ab" * 32}])
def test_a_calibration_of_something_else_is_never_used(gallery, other):
    table = {"0.1": {"threshold": 0.01, "per": "person", "templates": 1.0}}
    facts = {"fusion": "best", "model": None} | other
    gallery._storage.keep_calibration(GalleryCalibration(table, 40, 40, gallery.info().sequence, **facts))
    answer = gallery.verify("p1", crowd(1, 9)[0], far=0.1)
    assert answer.threshold == MADE[0.1] and "calibrate again" in answer.basis and answer.per == "comparison"
    assert len(gallery.notes) == 1 and next(iter(other)) in gallery.notes[0]
    gallery.calibrate(0.1)
    assert gallery.notes == [] and gallery.verify("p1", crowd(1, 9)[0], far=0.1).per == "person"


@pytest.mark.parametrize(
    "damage", ["replace(value, '0.', '0.0')", "'{}'", "'[]'", "'nonsense'", "substr(value, 1, 99)"]
)
def test_a_damaged_calibration_answers_nothing_and_is_healed(shelf, damage):
    shelf.create().close()
    place = shelf.url if shelf.kind == "postgresql" else shelf.path.parent
    with Gallery.open(place) as gallery:
        gallery.enrol_many((f"p{i}", units(i, 1)) for i in range(12))
        gallery.calibrate(0.1)
        assert gallery.check() == []
    for heal in (lambda gallery: gallery.forget_calibration(), lambda gallery: gallery.calibrate(0.1)):
        shelf.sql(f"UPDATE metadata SET value = {damage} WHERE key = 'calibration'")
        with Gallery.open(place) as gallery:
            for ask in (gallery.decision_threshold, lambda: gallery.identify(units(9, 1), far=0.1)):
                with pytest.raises(GalleryError, match="calibration in the storage is damaged") as told:
                    ask()
                assert "\n" not in str(told.value)
            assert gallery.verify("p1", units(1, 1), threshold=0.5).match, "a threshold by hand needs none"
            told = gallery.info()
            assert (told.identities, told.calibration, told.thresholds) == (12, None, {})
            assert "damaged" in gallery.notes[0] and any("damaged" in line for line in gallery.check())
            heal(gallery)
            assert gallery.check() == gallery.notes == []
            gallery.calibrate(0.1)


def test_info_shows_what_a_damaged_calibration_keeps_from_use(tmp_path):
    with Gallery.open(tmp_path / "g", dim=DIM, thresholds=MADE) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(crowd(40)))
        gallery.calibrate(0.1)
    with sqlite3.connect(tmp_path / "g" / "record.sqlite") as storage:
        storage.execute("UPDATE metadata SET value = '{}' WHERE key = 'calibration'")
    storage.close()
    with Gallery.open(tmp_path / "g") as gallery:
        told = gallery.info().thresholds
        assert {float(rate): entry["threshold"] for rate, entry in told.items()} == MADE
        assert all("damaged" in entry["remark"] for entry in told.values()) and "damaged" in gallery.notes[0]
    with Gallery.open(tmp_path / "g", thresholds={0.1: 0.3}) as gallery:
        assert gallery.info().thresholds == {"0.1": {"threshold": 0.3}}
        assert gallery.verify("p1", crowd(1)[0], far=0.1).threshold == 0.3, "those given now need no calibration"


def test_snapshots_take_it_along(folder):
    with Gallery.open(folder / "g", dim=DIM) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(crowd(40)))
        table = gallery.calibrate(0.1)
        gallery.snapshot(folder / "copy")
        gallery.forget_calibration()
    with Gallery.open(folder / "copy") as copy:
        assert copy.identify(crowd(1, 9)[0], far=0.1).threshold == table["0.1"]["threshold"]
        assert copy.check() == []


def test_a_move_takes_it_along_with_what_had_changed_since(gallery, where, folder, postgres):
    gallery.calibrate(0.1)
    gallery.enrol_many((f"new {i}", rows) for i, rows in enumerate(crowd(3, 4)))
    gallery.delete("p0")
    told = gallery.info().calibration
    assert (told["came"], told["gone"], told["stale"]) == (3, 1, None)
    threshold = gallery.decision_threshold(far=0.1).threshold
    gallery.close()
    target = ServerShelf(postgres).url if not where.startswith("postgresql") else str(folder / "moved")
    Gallery.move(where, target)
    with Gallery.open(target) as moved:
        assert moved.decision_threshold(far=0.1).threshold == threshold
        here = moved.info().calibration
        assert here | {"sequence": 0} == told | {"sequence": 0} and here["sequence"] == 1
        moved.enrol("one more", crowd(1, 5)[0])
        moved.delete("p1")
        here = moved.info().calibration
        assert (here["came"], here["gone"], here["stale"]) == (4, 2, None)
        moved.enrol("and one more", crowd(1, 6)[0])
        assert moved.info().calibration["stale"] and moved.check() == []


@pytest.mark.parametrize("carried", [False, True])
def test_a_move_into_an_emptied_gallery_leaves_nothing_of_its_former_calibration(gallery, where, folder, carried):
    gallery.calibrate(0.1)
    for name in list(gallery.ids()):
        gallery.delete(name)
    gallery.close()
    with Gallery.open(folder / "source", dim=DIM, thresholds=MADE) as source:
        source.enrol_many((f"q{i}", rows) for i, rows in enumerate(crowd(30, 8)))
        if carried:
            table = source.calibrate(0.1)
    Gallery.move(folder / "source", where)
    with Gallery.open(where) as moved:
        assert moved.check() == moved.notes == []
        if carried:
            assert moved.info().calibration["people"] == 30
            assert moved.decision_threshold(far=0.1).threshold == table["0.1"]["threshold"]
        else:
            assert moved.info().calibration is None and moved.decision_threshold(far=0.1).threshold == MADE[0.1]


KEEPER = """
import sys
sys.path.insert(0, sys.argv[1])
import killed
from pathlib import Path
from mettle.gallery.storage.postgres import PostgresStorage
from mettle.gallery.storage.sqlite import SqliteStorage
place = sys.argv[2]
storage = PostgresStorage.open(place) if place.startswith("postgresql") else SqliteStorage.open(Path(place))
for seed in range(int(sys.argv[3]), 1_000_000):
    storage.keep_calibration(killed.calibration(seed))
    print(seed, flush=True)
"""


def test_a_process_killed_while_it_keeps_one_leaves_the_old_or_the_new(shelf):
    shelf.create().close()
    place, rng, last = shelf.url if shelf.kind == "postgresql" else str(shelf.path), random.Random(5), 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(Path(__file__).parent), place, str(last + 1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        spoken = [child.stdout.readline() for _ in range(rng.randint(3, 30))]
        os.kill(child.pid, signal.SIGKILL)
        spoken += child.stdout  # not `communicate`: that forgets lines which were read ahead with the last of these
        child.communicate()
        last = int([line for line in spoken if line.strip()][-1])
        storage = shelf.open()
        assert killed.calibrated(storage) in (last, last + 1), "the last acknowledged, or the one under way"
        assert (
            storage.check() == []
            and storage.keep_calibration(killed.calibration(last + 2)).sequence == storage.sequence()
        )
        last += 2
        storage.close()


def test_power_loss_while_it_is_kept_leaves_the_old_or_the_new(folder):
    """Every length that the log can have between two calibrations."""
    shelf = FileShelf(folder / "g")
    storage = shelf.create()
    storage.enrol("anna", units(1, 1))
    storage.keep_calibration(killed.calibration(1))
    before = log_path(shelf).stat().st_size
    storage.keep_calibration(killed.calibration(2))
    whole = copied(shelf, folder / "whole")
    storage.close()
    content = log_bytes(whole)
    assert len(content) - before > 8192, "it takes several pages, or there is nothing to tear"
    for cut in [*range(before, len(content), 1511), len(content) - 1, len(content)]:
        crashed = copied(whole, folder / "crashed")
        log_path(crashed).write_bytes(content[:cut])
        left = crashed.open()
        assert killed.calibrated(left) == (2 if cut == len(content) else 1), f"log cut at {cut}"
        assert left.check() == []
        left.close()


@pytest.mark.parametrize("fault", ["cut before commit", "cut after commit"])
def test_a_line_cut_while_it_is_kept_or_forgotten_is_survived(postgres, folder, fault):
    shelf, line = ServerShelf(postgres), Proxy(folder, Path(postgres.socket))
    shelf.create().close()
    storage = PostgresStorage.open(postgres.url(shelf.name, host=str(line.folder)), timeout=PATIENT)
    for turn, found in enumerate((killed.calibration(1), killed.calibration(2), None), 1):
        line.fault = fault
        receipt = storage.keep_calibration(found)
        assert line.happened == turn, "the line was not cut: this test saw nothing"
        assert not receipt.repeated and receipt.sequence == storage.sequence() == turn
        assert killed.calibrated(storage) == (None if found is None else turn)
    storage.close()
    line.close()


@pytest.mark.parametrize(("far", "people"), [(0.1, 9), (0.05, 12), (0.01, 25), (0.003, 46), (0.001, 78), (1e-4, 246)])
def test_a_rate_is_measured_from_so_many_people_on(far, people):
    pairs = pairs_needed(far)
    assert (
        count_allowed_errors(far, pairs, conservative=True) == 0
        and count_allowed_errors(far, pairs - 1, conservative=True) == -1
    )
    assert lowest_rate(pairs) <= far < lowest_rate(pairs - 1)
    assert people_needed(far) == people
    assert count_pairs(people) >= pairs > count_pairs(people - 1)


def test_the_command_keeps_shows_and_forgets(tmp_path):
    rows = crowd(40, templates=3)
    table = tmp_path / "z.npz"
    np.savez(table, embeddings=rows.reshape(-1, DIM), label=np.repeat(np.arange(40), 3))
    mettle("gallery", "enrol", tmp_path / "g", "--table", table)
    assert mettle("gallery", "calibrate", tmp_path / "g", "--forget") == "forgotten\n", "the table was calibrated on"
    assert "not kept: answer" in mettle("gallery", "calibrate", tmp_path / "g", "--far", 0.1, "--no-keep")
    assert "not calibrated: no threshold was measured" in mettle("gallery", "info", tmp_path / "g")
    said = mettle("gallery", "calibrate", tmp_path / "g", "--far", 0.1, "--far", 0.00001)
    assert "kept: answers at these rates go by it, and without --far at 0.1 per person" in said
    assert "nothing was kept" in mettle("gallery", "calibrate", tmp_path / "g", "--far", 0.00001)
    said = mettle("gallery", "info", tmp_path / "g")
    assert "calibrated for 0.1 per person on 40 people with 120 templates, after change 3" in said
    assert "since then 0 templates came and 0 went\n" in said and "false-accept rate 0.1 per person: threshold" in said
    np.save(tmp_path / "one.npy", crowd(5, 7)[:, 0])
    for i in range(5):
        mettle("gallery", "enrol", tmp_path / "g", f"new {i}", "--embeddings", tmp_path / "one.npy")
    said = mettle("gallery", "info", tmp_path / "g")
    assert "note: the calibration is stale: measured on 40 people, 45 are enrolled now, 25 templates came" in said
    told = json.loads(mettle("gallery", "info", tmp_path / "g", "--json"))
    assert told["calibration"]["came"] == 25 and "stale" in told["notes"][0]
    assert "alone" in refused("gallery", "calibrate", tmp_path / "g", "--forget", "--far", 0.1)
    assert mettle("gallery", "calibrate", tmp_path / "g", "--forget") == "forgotten\n"
    assert "nothing to forget" in mettle("gallery", "calibrate", tmp_path / "g", "--forget")
    assert json.loads(mettle("gallery", "info", tmp_path / "g", "--json"))["calibration"] is None
