"""The rule of Market-1501 against plain loops and against every order of ties; beside the rule that is ours."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from mettle.errors import InputError
from mettle.evaluate import compare, reidentification, retrieval

_spec = importlib.util.spec_from_file_location("oracle_metrics", Path(__file__).parents[1] / "oracles" / "metrics.py")
assert _spec is not None
assert _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)


def cameras(seed, n=60, people=8, d=6, noise=0.8):
    """Queries and a gallery of three cameras; every third of the gallery is a distractor that nobody asks for."""
    rng = np.random.default_rng(seed)
    who = rng.integers(0, people, size=n)
    who[n // 3 :: 3] = -7 - rng.integers(0, 3, size=len(who[n // 3 :: 3]))
    who[: n // 3] %= people
    camera = rng.integers(0, 3, size=n)
    center = rng.normal(size=(people + 20, d))[who % (people + 20)] + 0.7 * rng.normal(size=(3, d))[camera]
    x = center + noise * rng.normal(size=(n, d))
    cut = n // 3
    return (x[:cut], who[:cut], camera[:cut]), (x[cut:], who[cut:], camera[cut:])


def by_loops(query, gallery, names):
    """First place, average precision and the trapezoids of the Market code, query by query; no two scores are equal."""
    found = {name: [] for name in names}
    for vector, who, camera in zip(*query, strict=True):
        ranked = []
        for other, label, place in zip(*gallery, strict=True):
            if label == who and place == camera:
                continue  # the same person in the same camera, and nothing else
            s = np.dot(vector, other) / np.linalg.norm(vector) / np.linalg.norm(other)
            ranked.append((s, label == who))
        ranked = [right for _, right in sorted(ranked, key=lambda item: -item[0])]
        if not any(ranked):
            continue
        hits, before, area, precision, total = 0, 1.0, 0.0, 0.0, sum(ranked)
        for at, right in enumerate(ranked, start=1):
            hits += right
            if right:
                precision += hits / at / total
                area += (before + hits / at) / 2 / total
            before = hits / at
        found["map"].append(precision)
        found["map_trapezoid"].append(area)
        found["recall@1"].append(float(ranked[0]))
        found["recall@5"].append(float(any(ranked[:5])))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_it_equals_plain_loops(seed):
    query, gallery = cameras(seed)
    r = reidentification(query, gallery, k=(1, 5))
    for name, wanted in by_loops(query, gallery, ("map", "map_trapezoid", "recall@1", "recall@5")).items():
        assert r.per_query[name] == pytest.approx(np.array(wanted), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_ties_are_the_mean_over_all_orders(seed):
    rng = np.random.default_rng(seed)
    x, who, camera = rng.choice([-1.0, 1.0], size=(9, 3)), np.arange(9) % 3, rng.integers(0, 2, size=9)
    query, gallery = (x[:3], who[:3], camera[:3]), (x[3:], who[3:], camera[3:])
    lists = [
        [
            (round(float(x[q] @ x[c]), 6), who[c] == who[q])
            for c in range(3, 9)
            if who[c] != who[q] or camera[c] != camera[q]
        ]
        for q in range(3)
    ]
    lists = [one for one in lists if any(right for _, right in one)]
    if not lists:
        return
    r = reidentification(query, gallery, k=(1, 2))
    for name, value in [
        ("map", oracle.average_precision),
        ("map_trapezoid", oracle.trapezoid_precision),
        ("recall@2", lambda one: oracle.recall(one, 2)),
    ]:
        assert r.per_query[name].tolist() == pytest.approx([float(value(one)) for one in lists], abs=1e-12)


def test_distractors_and_others_of_the_own_camera_stay_in_the_gallery():
    query = (np.eye(3)[:1], [7], [1])
    gallery = np.array([[1.0, 0, 0], [1, 0.1, 0], [1, 0.2, 0], [1, 0.9, 0]]), [7, -5, 9, 7], [1, 1, 1, 2]
    official = reidentification(query, gallery, k=1)
    assert official.map == pytest.approx(1 / 3)  # behind a distractor and somebody else of the same camera
    with pytest.raises(InputError, match="two labels"):  # of other cameras there is the right one alone
        retrieval(query[0], query[1], domains=query[2], gallery=(*(np.array(c)[[3]] for c in gallery),), k=1)


def test_ours_and_theirs_have_names_and_are_not_compared():
    query, gallery = cameras(1)
    theirs = reidentification(query, gallery)
    ours = retrieval(query[0], query[1], domains=query[2], gallery=gallery, k=(1, 5, 10), exclude_same_domain=True)
    assert "rule of Market-1501" in theirs.rule and "Market-1501" in repr(theirs) and "rule" in theirs.summary()
    assert ours.rule == "candidates of other domains"
    assert theirs.map < ours.map  # more candidates, and none of them relevant
    with pytest.raises(InputError, match="same queries and the same gallery"):
        compare(theirs, ours, "map")


def test_cameras_are_needed():
    (x, y, _), gallery = cameras(2)
    with pytest.raises(InputError, match="needs cameras"):
        reidentification((x, y), gallery)
