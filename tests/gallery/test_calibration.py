"""How many strangers a gallery takes for somebody, against what its answers say that it does at most."""

import numpy as np
import pytest

from mettle import Gallery
from mettle.errors import GalleryError, InputError
from mettle.evaluate.calibration import count_allowed_errors
from mettle.gallery.scoring import FUSION_RULES
from mettle.gallery.thresholds import DecisionThreshold, false_accept_bound

DIM, PEOPLE = 32, 60


def world(rng, people: int, templates: int, noise: float = 1.0, dim: int = DIM) -> np.ndarray:
    """(people, templates, dim) unit rows: a direction of one's own, and noise."""
    rows = rng.normal(size=(people, dim))[:, None] + noise * rng.normal(size=(people, templates, dim))
    return rows / np.linalg.norm(rows, axis=2, keepdims=True)


def fused(rule: str, probes: np.ndarray, people: np.ndarray) -> np.ndarray:
    """(probes, people) scores by the definitions of the rules."""
    each = np.einsum("pd,ntd->pnt", probes, people)
    if rule == "best":
        return each.max(2)
    return each.mean(2) / (1 if rule == "mean" else np.linalg.norm(people.mean(1), axis=1))


def thresholds(rng, fars=(0.01, 0.001), noise: float = 1.0) -> dict[float, float]:
    """What a contract says: rates of single comparisons among 300 other people."""
    rows = world(rng, 300, 4, noise).reshape(-1, DIM)
    who = np.repeat(np.arange(300), 4)
    scores = (rows @ rows.T)[who[:, None] != who]
    return {far: float(np.quantile(scores, 1 - far)) for far in fars}


@pytest.mark.parametrize("noise", [0.5, 1.0])
@pytest.mark.parametrize("rule", FUSION_RULES)
@pytest.mark.parametrize("templates", [1, 5, 20])
def test_no_more_strangers_are_accepted_than_the_answers_say(tmp_path, rule, templates, noise):
    rng = np.random.default_rng(templates)
    people, strangers, far = world(rng, PEOPLE, templates, noise), world(rng, 800, 1, noise)[:, 0], 0.001
    with Gallery.open(tmp_path / "g", dim=DIM, fusion=rule, thresholds=thresholds(rng, noise=noise)) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(people))
        answers = gallery.identify_many(strangers, far=far)
        one = gallery.verify("p0", strangers[0], far=far)
        for i in range(0, 200, 23):
            found = gallery.verify(f"p{i % PEOPLE}", strangers[i], far=far)
            assert found.score == pytest.approx(fused(rule, strangers[i : i + 1], people)[0, i % PEOPLE], abs=1e-5)
    accepted = fused(rule, strangers, people) >= one.threshold
    named = np.mean([a.match is not None for a in answers])
    assert named == pytest.approx(accepted.any(1).mean(), abs=0.003)
    if rule == "centroid" and templates > 1:  # no template need be near where their centre is
        assert one.false_accepts is None and answers[0].false_matches is None
        return
    room = 3 * np.sqrt(one.false_accepts / accepted.size)
    assert accepted.mean() <= one.false_accepts + room
    assert named <= answers[0].false_matches + 3 * np.sqrt(answers[0].false_matches / len(strangers))
    if rule == "best" and templates == 20:
        assert accepted.mean() > 3 * far, "a rate per comparison is not one per person, or this tests nothing"


@pytest.mark.parametrize("rule", FUSION_RULES)
@pytest.mark.parametrize("templates", [1, 20])
def test_a_calibrated_rate_holds_for_people(tmp_path, rule, templates):
    rng = np.random.default_rng(7)
    people, strangers = world(rng, 150, templates), world(rng, 2000, 1)[:, 0]
    with Gallery.open(tmp_path / "g", dim=DIM, fusion=rule, thresholds=thresholds(rng)) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(people))
        before = gallery.info()
        table = gallery.calibrate((0.1, 0.01, 1e-6), keep=False)
        assert gallery.info() == before, "measuring alone changes nothing"
    assert table["1e-06"]["threshold"] is None and table["1e-06"]["status"] == "not measurable"
    scores = fused(rule, strangers, people)
    with Gallery.open(tmp_path / "g", thresholds=table) as gallery:
        for far in (0.1, 0.01):
            point = gallery.verify("p3", strangers[0], far=far)
            rate = (scores >= point.threshold).mean()
            assert far / 4 < rate < far, "close to what was asked for, and below it"
            assert point.false_accepts == pytest.approx(far)
            found = gallery.identify(strangers[0], far=far)
            assert found.false_matches == pytest.approx(min(1, 150 * far))
            assert "150 people enrolled" in found.basis


def test_calibrated_thresholds_are_those_of_all_scores_of_templates_with_other_people(tmp_path):
    rng = np.random.default_rng(3)
    counts = [1, 4, 2, 3, 5, 1, 2, 2, 6, 1, 3, 2]
    people = [world(rng, 1, n)[0] for n in counts]
    for rule in FUSION_RULES:
        with Gallery.open(tmp_path / rule, dim=DIM, fusion=rule) as gallery:
            for i in rng.permutation(len(people)):
                gallery.enrol(f"person {i}", people[i])
            table = gallery.calibrate(0.2, keep=False)
        scores = [
            fused(rule, people[i][j : j + 1], people[k][None])[0, 0]
            for i in range(len(people))
            for j in range(counts[i])
            for k in range(len(people))
            if k != i
        ]
        entry, pairs = table["0.2"], len(people) * (len(people) - 1) // 2
        assert entry["impostors"] == pairs and entry["templates"] == pytest.approx(sum(counts) / len(counts))
        share = np.mean(np.asarray(scores) >= entry["threshold"])
        assert share == pytest.approx(
            count_allowed_errors(0.2, pairs, conservative=True) / pairs, abs=1.01 / len(scores)
        )


def test_what_may_be_allowed_keeps_the_rate_with_ninety_five_in_a_hundred():
    rng = np.random.default_rng(0)
    for pairs, far in ((200, 0.1), (5000, 0.01), (300, 0.02)):
        allowed = count_allowed_errors(far, pairs, conservative=True)
        draws = np.sort(rng.random((4000, pairs)), axis=1)[:, -1 - allowed]  # scores of strangers are uniform here
        assert np.mean(1 - draws <= far) == pytest.approx(0.95, abs=0.05) and np.mean(1 - draws <= far) > 0.94
    assert count_allowed_errors(0.01, 100, conservative=True) == -1, (
        "a hundred pairs say nothing about one in a hundred"
    )


def test_more_templates_than_at_calibration_are_counted():
    point = DecisionThreshold(0.5, 0.01, "", per="person", templates=4.0)
    assert false_accept_bound(point, "best", 1, 3) == pytest.approx(0.01)
    assert false_accept_bound(point, "best", 1, 8) == pytest.approx(
        0.08
    )  # near-copies at calibration, independent ones later
    assert false_accept_bound(point, "centroid", 10, 40) == pytest.approx(0.1)
    assert false_accept_bound(point, "centroid", 10, 41) is None
    assert false_accept_bound(point, "best", 10, 60) == pytest.approx(0.6)
    assert false_accept_bound(DecisionThreshold(0.5, None, ""), "best", 1, 1) is None
    assert false_accept_bound(DecisionThreshold(0.5, 0.1, ""), "best", 100, 100) == 1.0


def test_what_came_since_a_calibration_counts_and_what_was_measured_stays_measured():
    point = DecisionThreshold(0.5, 0.01, "", per="person", templates=4.0, people=10, came=3)
    assert false_accept_bound(point, "best", 10, 40) == pytest.approx(0.1)
    assert false_accept_bound(point, "best", 10, 43) == pytest.approx(0.13), "10 people, and 3 templates alone"
    assert false_accept_bound(point, "best", 12, 50) == pytest.approx(0.13), "the two who are new are among what came"
    assert false_accept_bound(point, "best", 2, 9) == pytest.approx(0.09) and false_accept_bound(
        point, "best", 1, 5
    ) == pytest.approx(0.05)
    assert false_accept_bound(point, "mean", 10, 43) is None and false_accept_bound(point, "centroid", 10, 43) is None
    rng = np.random.default_rng(0)
    for _ in range(500):
        people, came, before = (int(n) for n in rng.integers(1, 30, size=3))
        templates, mean = people + int(rng.integers(0, 100)), float(rng.uniform(1, 6))
        unknown = DecisionThreshold(0.5, 0.001, "", per="person", templates=mean)
        known = DecisionThreshold(0.5, 0.001, "", per="person", templates=mean, people=before, came=came)
        assert false_accept_bound(known, "best", people, templates) <= false_accept_bound(
            unknown, "best", people, templates
        )


@pytest.mark.parametrize("copies", [0.02, 1.0])
@pytest.mark.parametrize("come", [1, 5, 40])
def test_strangers_who_are_given_a_name_stay_within_the_bound_after_templates_came(tmp_path, come, copies):
    """With ``copies`` near 0 the templates that were measured are near-copies, and those that come are not."""
    rng = np.random.default_rng(come)
    own, strangers = rng.normal(size=(PEOPLE, DIM)), world(rng, 4000, 1)[:, 0]
    first = (own + rng.normal(size=(PEOPLE, DIM)))[:, None] + copies * rng.normal(size=(PEOPLE, 4, DIM))
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(first))
        gallery.calibrate(0.01)
        before = gallery.identify(strangers[0])
        assert before.false_matches == pytest.approx(0.6) and before.templates == 240
        for i in range(come):
            gallery.enrol(f"p{i % 7}", own[i % 7] + rng.normal(size=DIM))
        answers = gallery.identify_many(strangers)
        old = false_accept_bound(
            DecisionThreshold(before.threshold, 0.01, "", per="person", templates=4.0), "best", PEOPLE, 240 + come
        )
    named = np.mean([answer.match is not None for answer in answers])
    bound = answers[0].false_matches
    assert bound == pytest.approx(min(1, 0.01 * (PEOPLE + come))) and old == 1.0, "it was 0.01 for each of 240 and more"
    assert 0.05 < named <= bound


def test_a_table_given_by_hand_does_not_know_what_came(tmp_path):
    rng = np.random.default_rng(0)
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(world(rng, 60, 4)))
        table = gallery.calibrate(0.01)
        gallery.enrol("p0", world(rng, 1, 1)[0])
        assert gallery.identify(rng.normal(size=DIM), far=0.01).false_matches == pytest.approx(0.61)
        gallery.delete("p1")
        gallery.enrol("p0", world(rng, 1, 4)[0])
        assert gallery.identify(rng.normal(size=DIM), far=0.01).false_matches == pytest.approx(0.65)
    with Gallery.open(tmp_path / "g", thresholds=table) as gallery:
        assert gallery.identify(rng.normal(size=DIM), far=0.01).false_matches == 1.0
    with Gallery.open(tmp_path / "h", dim=DIM, thresholds=table) as gallery:  # its own at one rate, those at another
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(world(rng, 60, 4)))
        gallery.calibrate(0.1)
        gallery.enrol("p0", world(rng, 1, 1)[0])
        assert gallery.identify(rng.normal(size=DIM), far=0.01).false_matches == 1.0


def test_people_under_two_names_are_not_calibrated_away(tmp_path):
    rng = np.random.default_rng(0)
    rows = world(rng, 30, 1)[:, 0]
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        for i, row in enumerate(rows):
            gallery.enrol(f"a{i}", row)
            gallery.enrol(f"b{i}", row)
        assert gallery.calibrate(0.01)["0.01"]["threshold"] is None, "one in sixty is the same person"


def test_calibration_says_what_it_needs(tmp_path):
    rng = np.random.default_rng(0)
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        for count in range(2):
            with pytest.raises(GalleryError, match="two or more"):
                gallery.calibrate()
            gallery.enrol(f"p{count}", world(rng, 1, 2)[0])
        for bad in (0, 2, -0.1, "x", float("nan")):
            with pytest.raises(InputError, match="far"):
                gallery.calibrate([bad])
        for everybody in (1, 1.0, [0.5, 1.0]):
            for keep in (True, False):
                with pytest.raises(InputError, match=r"^fars must be above 0 and below 1: got "):
                    gallery.calibrate(everybody, keep=keep)
        table = gallery.calibrate(0.99)
    Gallery.open(tmp_path / "other", dim=DIM, fusion="mean").close()
    with pytest.raises(InputError, match="fusion"):
        Gallery.open(tmp_path / "other", thresholds=table)


def test_vectors_that_share_a_mean_are_not_taken_for_each_other(tmp_path):
    """Twenty of twenty strangers matched when a threshold was assumed from independent directions."""
    rng = np.random.default_rng(0)

    def draw(people: int, templates: int) -> np.ndarray:
        own = 1 + rng.normal(size=(people, 1, 128))  # cosine 0.5 between any two
        return own + 0.5 * rng.normal(size=(people, templates, 128))

    people, strangers = draw(100, 3), draw(1000, 1)[:, 0]
    with Gallery.open(tmp_path / "g", dim=128) as gallery:
        gallery.enrol_many((f"p{i}", rows) for i, rows in enumerate(people))
        assert {answer.verdict for answer in gallery.identify_many(strangers[:20])} == {"not calibrated"}
        table = gallery.calibrate()
        assert table["0.001"]["impostors"] == 4950
        point = gallery.decision_threshold()
        assert (point.far, point.per) == (0.001, "person") and 0.5 < point.threshold < 0.75
        answers = gallery.identify_many(strangers)
        claimed = [gallery.verify(f"p{i % 100}", row).match for i, row in enumerate(strangers)]
        own = [gallery.verify(f"p{i}", draw_again).match for i, draw_again in enumerate(people[:, 0] + 0.1)]
    assert np.mean(claimed) <= 0.001 + 3 * np.sqrt(0.001 / len(claimed))
    named = np.asarray([answer.match is not None for answer in answers])
    assert named[:20].sum() <= 1 and named.mean() < answers[0].false_matches == pytest.approx(0.1)
    assert np.mean(own) == 1, "and everybody is still known"
