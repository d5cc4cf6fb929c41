"""What an audit says of the people enrolled, against loops over their templates."""

import itertools
import json
import sqlite3
import tracemalloc
from dataclasses import FrozenInstanceError, asdict

import numpy as np
import pytest
from storage_fixtures import units

from command_line import mettle
from mettle import Gallery
from mettle.errors import GalleryError, InputError
from mettle.gallery import audit as module
from mettle.gallery.scoring import FUSION_RULES


def crowd(seed: int, people: int, dim: int = 16, noise: float = 0.7, most: int = 5) -> dict[str, np.ndarray]:
    """People with one to ``most`` templates; two of them share one, and one has a template of somebody else."""
    rng = np.random.default_rng(seed)
    found = {}
    for i in range(people):
        rows = rng.normal(size=dim) + noise * rng.normal(size=(int(rng.integers(1, most + 1)), dim))
        found[f"p{i:02d}"] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found["twin"] = np.concatenate([found["p01"][:1], units(seed + 1, 1, dim)])
    near = found["p02"][0] + 0.02 * rng.normal(size=dim)
    found["mixed"] = np.concatenate(
        [units(seed + 2, 1, dim).repeat(3, 0) + 0.05 * rng.normal(size=(3, dim)), near[None]]
    )
    return {name: rows / np.linalg.norm(rows, axis=1, keepdims=True) for name, rows in found.items()}


def fused(rule: str, probe: np.ndarray, templates: np.ndarray) -> float:
    """Score of a probe with a person, by the words of the rules."""
    each = [float(sum(a * b for a, b in zip(probe, row, strict=True))) for row in templates]
    if rule == "best":
        return max(each)
    mean = sum(templates) / len(templates)
    return sum(each) / len(each) / (1 if rule == "mean" else float(np.sqrt(sum(mean * mean))))


def expected(people: dict[str, np.ndarray], rule: str, threshold: float) -> tuple[dict, dict]:
    """Scores of pairs of people at or above the threshold, and of templates below it with those of their own."""
    pairs, strays = {}, {}
    for a, b in itertools.combinations(sorted(people), 2):
        there = [fused(rule, row, people[b]) for row in people[a]]
        score = max(there + [fused(rule, row, people[a]) for row in people[b]])
        if score >= threshold:
            pairs[a, b] = score
    for name, rows in people.items():
        for i, row in enumerate(rows):
            rest = np.delete(rows, i, axis=0)
            if len(rest) and (score := fused(rule, row, rest)) < threshold:
                others = {who: fused(rule, row, theirs) for who, theirs in people.items() if who != name}
                best = max(others, key=lambda who: others[who])
                strays[name, i] = (score, best, others[best])
    return pairs, strays


def enrolled(where, people: dict[str, np.ndarray], rule: str = "best", **options) -> tuple[Gallery, dict]:
    """A gallery of these people, and which number each template has."""
    first = next(iter(people.values()))
    gallery = Gallery.open(where, dim=first.shape[1], fusion=rule, **options)
    numbers = {}
    for name in np.random.default_rng(0).permutation(sorted(people)):
        for i, number in enumerate(gallery.enrol(str(name), people[name]).numbers):
            numbers[number] = (str(name), i)
    return gallery, numbers


@pytest.mark.parametrize("rule", FUSION_RULES)
@pytest.mark.parametrize(
    ("seed", "threshold", "block"), [(0, 0.62, 1 << 22), (1, 0.5, 64), (2, 0.75, 1), (3, 0.3, 500)]
)
def test_an_audit_finds_what_loops_over_all_templates_find(folder, monkeypatch, rule, seed, threshold, block):
    monkeypatch.setattr(module, "SCORE_BLOCK", block)  # tiles of a few people, of one, and of pieces of one
    people = crowd(seed, 22)
    gallery, numbers = enrolled(folder / "g", people, rule)
    with gallery:
        found = gallery.audit(threshold=threshold, count=1000)
    pairs, strays = expected(people, rule, threshold)
    assert pairs and strays, "or this tests nothing"
    assert (found.people, found.templates) == (24, sum(len(rows) for rows in people.values()))
    assert found.single == sum(len(rows) == 1 for rows in people.values())
    assert (found.threshold, found.far, found.per) == (threshold, None, None) and "given" in found.basis
    assert found.pairs == 24 * 23 // 2 and found.alike_count == len(pairs) and found.stray_count == len(strays)
    assert {(pair.first, pair.second): pair.score for pair in found.alike} == pytest.approx(pairs, abs=1e-5)
    assert [pair.score for pair in found.alike] == sorted((pair.score for pair in found.alike), reverse=True)
    told = {numbers[stray.number]: (stray.score, stray.other, stray.other_score) for stray in found.strays}
    assert told.keys() == strays.keys()
    for at, (score, other, other_score) in told.items():
        assert (score, other_score) == pytest.approx((strays[at][0], strays[at][2]), abs=1e-5)
        assert other == strays[at][1]
    gains = [stray.other_score - stray.score for stray in found.strays]
    assert gains == sorted(gains, reverse=True)
    assert found.problems == () and found.notes == ()


def test_what_is_planted_stands_first(shelf_place):
    people = crowd(5, 40, dim=32, noise=0.4)
    gallery, numbers = enrolled(shelf_place, people, thresholds={1e-3: 0.6})
    with gallery:
        found = gallery.audit(count=3)
        again = gallery.audit(far=1e-3, count=3)
    assert found == again and (found.far, found.per) == (1e-3, "comparison")
    assert (found.alike[0].first, found.alike[0].second, found.alike[0].same) == ("p01", "twin", True)
    assert found.alike[0].score == pytest.approx(1) and found.same_count == 1
    assert (found.alike[1].first, found.alike[1].second, found.alike[1].same) == ("mixed", "p02", False)
    assert numbers[found.strays[0].number] == ("mixed", 3) and found.strays[0].other == "p02"
    assert found.strays[0].identity == "mixed" and found.strays[0].other_score > 0.9 > found.strays[0].score
    assert len(found.alike) <= 3 and found.alike_count >= len(found.alike)
    with pytest.raises(FrozenInstanceError):
        found.people = 1  # type: ignore[misc]


@pytest.fixture(params=["sqlite", "postgresql"])
def shelf_place(request, folder):
    """Where a gallery of either kind may be made."""
    return folder / "g" if request.param == "sqlite" else request.getfixturevalue("postgres").url("audited")


def test_an_equal_template_is_told_even_where_the_threshold_is_out_of_reach(folder):
    gallery, _ = enrolled(folder / "g", {"a": units(0, 2), "b": units(0, 1), "c": units(9, 1)})
    with gallery:
        found = gallery.audit(threshold=1.0)
    assert (found.alike_count, found.same_count, found.alike[0].same) == (1, 1, True)


def test_everybody_the_same_is_counted_and_not_listed_at_length(folder):
    rng = np.random.default_rng(0)
    nearly = units(0, 1) + 1e-9 * rng.normal(size=(60, 8))
    gallery, _ = enrolled(folder / "g", {f"p{i}": row[None] for i, row in enumerate(nearly)})
    with gallery:
        found = gallery.audit(count=5)
    assert found.alike_count == found.same_count == found.pairs == 60 * 59 // 2 and len(found.alike) == 5


@pytest.mark.parametrize("rule", FUSION_RULES)
def test_beyond_what_can_be_looked_at_some_people_are_compared_with_everybody(folder, monkeypatch, rule):
    people = crowd(3, 30)
    monkeypatch.setattr(module, "SCORES", 1500)
    monkeypatch.setattr(module, "SCORE_BLOCK", 300)
    gallery, numbers = enrolled(folder / "g", people, rule)
    with gallery:
        found = gallery.audit(threshold=0.4, count=1000)
        assert found == gallery.audit(threshold=0.4, count=1000)
    pairs, strays = expected(people, rule, 0.4)
    assert 31 <= found.pairs < 32 * 31 // 2
    assert {numbers[stray.number] for stray in found.strays} == strays.keys(), "these take no time: all are found"
    known = {frozenset(pair): score for pair, score in pairs.items()}
    for pair in found.alike:
        assert pair.score == pytest.approx(known[frozenset((pair.first, pair.second))], abs=1e-5)
    share, whole = found.alike_count / found.pairs, len(pairs) / (32 * 31 // 2)
    assert share == pytest.approx(whole, abs=4 * np.sqrt(whole / found.pairs))
    assert found.alike_count == len(found.alike) == len({frozenset((p.first, p.second)) for p in found.alike})


def test_memory_does_not_grow_with_the_pairs(folder):
    rng = np.random.default_rng(0)
    gallery = Gallery.open(folder / "g", dim=8)
    with gallery:
        gallery.enrol_many((f"p{i}", rng.normal(size=8)) for i in range(8_000))
        tracemalloc.start()
        try:
            found = gallery.audit(threshold=0.5)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert found.pairs == 8_000 * 7_999 // 2 and found.alike_count > 100_000
    assert peak < 150e6, f"{peak / 1e6:.0f} MB; all scores would take {8_000**2 * 4 / 1e6:.0f}"


def test_a_gallery_with_nobody_or_one_person(folder):
    with Gallery.open(folder / "g", dim=8) as gallery:
        found = gallery.audit()
        assert (found.people, found.templates, found.pairs, found.alike, found.strays) == (0, 0, 0, (), ())
        gallery.enrol("anna", np.eye(8)[:2])
        found = gallery.audit(threshold=0.5)
    assert (found.people, found.single, found.pairs, found.alike_count) == (1, 0, 0, 0)
    assert found.stray_count == 2 and found.strays[0].other is None and found.strays[0].other_score is None
    with pytest.raises(GalleryError, match="closed"):
        gallery.audit()


@pytest.mark.parametrize("bad", [0, -1, 1001, 1.5, True, "20"])
def test_a_list_of_no_length_is_refused(folder, bad):
    with Gallery.open(folder / "g", dim=8) as gallery, pytest.raises(InputError, match="^count must be between 1"):
        gallery.audit(count=bad)


def test_what_has_become_stale_or_wrong_is_told(folder):
    with Gallery.open(folder / "g", dim=8) as gallery:
        gallery.enrol_many((f"p{i}", row) for i, row in enumerate(units(0, 40)))
        gallery.calibrate(0.1)
        gallery.enrol_many((f"q{i}", row) for i, row in enumerate(units(1, 40)))
        found = gallery.audit()
        assert (found.far, found.per) == (0.1, "person")
        assert any("stale" in note for note in found.notes)
        gallery._search.index.remove(np.array([3]))  # type: ignore[attr-defined]
        assert "lacks 1 of 80" in gallery.audit().problems[0]


def test_from_the_command_line(folder):
    people = crowd(5, 10, dim=32, noise=0.4)
    people["o'brien"] = people["p03"]
    gallery, _ = enrolled(folder / "g", {"x": units(0, 1, 32)}, thresholds={1e-3: 0.6})
    gallery.delete("x")
    gallery.close()
    assert "nobody is enrolled" in mettle("gallery", "audit", folder / "g")
    with Gallery.open(folder / "g") as gallery:
        gallery.enrol_many(people.items())
    said = mettle("gallery", "audit", folder / "g", "--count", 2)
    assert f"13 people, {sum(map(len, people.values()))} templates" in said
    assert "at threshold 0.6000 (false-accept rate 0.001 a comparison; given when the gallery was made)" in said
    assert "  +1.0000  \"o'brien\"  'p03'  same template" in said and "; the first 2:" in said
    assert "storage and index: sound" in said
    told = json.loads(mettle("gallery", "audit", folder / "g", "--json", "--threshold", 0.6))
    with Gallery.open(folder / "g", read_only=True) as gallery:
        assert told == json.loads(json.dumps(asdict(gallery.audit(threshold=0.6))))
    assert "no threshold was measured" in mettle("gallery", "audit", folder / "g", "--far", 0.5, status=2)
    assert "no gallery" in mettle("gallery", "audit", folder / "none", status=2)


def test_damage_ends_with_another_status(folder):
    gallery, _ = enrolled(folder / "g", {f"p{i}": row[None] for i, row in enumerate(units(0, 5))})
    gallery.close()
    with sqlite3.connect(folder / "g" / "record.sqlite") as storage:
        storage.execute("INSERT INTO deleted_templates VALUES (2, 1, 0, 0)")
    storage.close()
    assert "storage and index: 2 problems" in mettle("gallery", "audit", folder / "g", status=1)
    with sqlite3.connect(folder / "g" / "record.sqlite") as storage:
        storage.execute("UPDATE templates SET checksum = checksum + 1 WHERE number = 3")
    storage.close()
    assert "template 3 fails its checksum" in mettle("gallery", "audit", folder / "g", status=2)


def test_without_a_threshold_only_shared_templates_are_told(tmp_path):
    rows = np.random.default_rng(0).normal(size=(6, 2, 8))
    with Gallery.open(tmp_path / "g", dim=8) as gallery:
        gallery.enrol_many((f"p{i}", theirs) for i, theirs in enumerate(rows))
        gallery.enrol("twin", rows[3, 1])
        found = gallery.audit()
        assert found.threshold is None and found.far is None and "no threshold was measured" in found.basis
        assert (found.people, found.templates, found.pairs) == (7, 13, 21)
        assert found.alike_count == found.same_count == 1
        assert [(a.first, a.second, a.same) for a in found.alike] == [("p3", "twin", True)]
        assert found.stray_count == 0 and found.strays == ()
    said = mettle("gallery", "audit", tmp_path / "g")
    assert "not calibrated, so only pairs that share a template are told" in said
    assert "1 pairs of people of 21 share a template:" in said and "do not match" not in said
