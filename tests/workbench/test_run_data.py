"""What the workbench computes, against the plainest computation of the same; and what it refuses."""

import json
import struct
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from mettle.evaluate.diagnostics.hard_pairs import PairQuery
from mettle.workbench import pair_search as search
from mettle.workbench import projection as places
from mettle.workbench.lazy_run import LazyValue, pack_arrays
from mettle.workbench.run_data import load_or_compute_arrays
from mettle.workbench.threshold_counts import count_at_thresholds, count_errors, probit, slider_positions
from tests.workbench.runs import drawn

MODES = ("all", "ties", "across", "roles")


def every_pair(scene, passes):
    """All pairs of the scenario of which one side passes, as (i, j, cosine in float64, same label)."""
    z = scene.embeddings.astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    role, found = scene.samples.role, []
    for i in range(len(z)):
        for j in range(len(z)):
            if (role == 1).any():
                compared = role[i] == 1 and role[j] == 2
            else:
                compared = i < j
                if scene.samples.domain is not None:
                    compared = compared and scene.samples.domain.codes[i] != scene.samples.domain.codes[j]
            if compared and (passes[i] or passes[j]):
                found.append((i, j, float(z[i] @ z[j]), bool(scene.label.codes[i] == scene.label.codes[j])))
    return found


def unordered(pairs):
    return {tuple(sorted(pair)) for pair in pairs}


@examples(max_examples=25)
@given(st.sampled_from(MODES), st.integers(0, 99), st.floats(0, 1), st.integers(1, 12))
def test_search_finds_what_looking_at_every_pair_finds(mode, seed, share, count):
    scene = drawn(mode, n=40, seed=seed)
    passes = np.random.default_rng(seed).random(len(scene)) < share
    pairs = every_pair(scene, passes)
    threshold = 0.31373  # no quotient of small whole numbers, which rounded vectors give
    asked = {
        "positives": (PairQuery.hardest("genuine"), [p for p in pairs if p[3]], 1),
        "negatives": (PairQuery.hardest("impostor"), [p for p in pairs if not p[3]], -1),
        "accepts": (search.query_false_accepts(threshold), [p for p in pairs if not p[3] and p[2] >= threshold], 1),
        "rejects": (search.query_false_rejects(threshold), [p for p in pairs if p[3] and p[2] < threshold], -1),
    }
    for wanted, expected, sign in asked.values():
        found = search.find_pairs(scene, wanted, passes, count).pairs
        scores = sorted(sign * p[2] for p in expected)[:count]
        assert [sign * p.score for p in found] == pytest.approx(scores, abs=1e-6)
        known = {tuple(sorted(p[:2])): p[2] for p in expected}
        for p in found:
            assert p.score == pytest.approx(known[tuple(sorted((p.first, p.second)))], abs=1e-6)
        assert len(unordered((p.first, p.second) for p in found)) == len(found)


def test_search_caps_the_same_two_labels_and_says_how_much_it_looked_at(monkeypatch):
    scene = drawn("all", n=60)
    passes = np.ones(60, bool)
    found = search.find_pairs(scene, PairQuery.hardest("impostor"), passes, 12, each=2).pairs
    two = [tuple(sorted(scene.label.codes[[p.first, p.second]])) for p in found]
    assert max(two.count(t) for t in two) <= 2
    whole = search.find_pairs(scene, PairQuery.hardest("impostor"), passes, 5)
    assert whole.looked == 1.0
    monkeypatch.setattr(search, "MOST_PAIRS", 900)
    part = search.find_pairs(scene, PairQuery.hardest("impostor"), passes, 5)
    assert 0.2 < part.looked < 0.5
    assert part.pairs[0].score <= whole.pairs[0].score


def test_suspects_are_samples_whose_class_does_not_fit():
    scene = drawn("all", n=60, labels=4)
    z = scene.embeddings.astype(np.float64)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    y = scene.label.codes
    passes = np.arange(60) % 3 > 0
    better = []
    for i in np.flatnonzero(passes):
        own = (y == y[i]) & (np.arange(60) != i)
        others = [z[i] @ z[y == c].mean(0) for c in range(4) if c != y[i]]
        if own.any() and max(others) > z[i] @ z[own].mean(0):
            better.append(i)
    found, total = search.find_label_suspects(scene, passes, 100)
    assert total == len(better) and {s.first for s in found} == set(better)
    for s in found:
        rivals = np.flatnonzero(y == y[s.second])
        assert s.second == rivals[np.argmax(z[rivals] @ z[s.first])] and y[s.second] != y[s.first]


@pytest.mark.parametrize("mode", MODES)
def test_counts_at_every_position_are_those_of_every_pair(mode):
    scene = drawn(mode, n=50)
    found = scene.scenario.verification(scene.embeddings, scene.samples)
    pairs = every_pair(scene, np.ones(50, bool))
    t = count_at_thresholds(_named(scene), found)
    genuine = np.asarray([p[2] for p in pairs if p[3]])
    impostor = np.asarray([p[2] for p in pairs if not p[3]])
    assert (t.genuine, t.impostor) == (len(genuine), len(impostor))
    safe = [k for k, v in enumerate(t.thresholds) if np.abs(np.append(genuine, impostor) - v).min() > 1e-6]
    assert len(safe) > 0.9 * len(t.thresholds)
    for k in safe:
        assert t.accepts[k] == (impostor >= t.thresholds[k]).sum()
        assert t.rejects[k] == (genuine < t.thresholds[k]).sum()
    assert (t.accepts[0], t.rejects[0]) == (len(impostor), 0)
    assert (t.accepts[-1], t.rejects[-1]) == (0, len(genuine))


def test_counts_are_the_same_whether_scores_are_kept_or_not(tmp_path):
    from mettle.evaluate import verification

    scene = drawn("all", n=200, labels=20)
    exact = verification(scene.embeddings, scene.label.codes)
    binned = verification(scene.embeddings, scene.label.codes, mode="histogram")
    assert binned.mode == "histogram" and type(binned.scores) is not type(exact.scores)
    unit = scene.embeddings / np.linalg.norm(scene.embeddings, axis=1, keepdims=True)
    scores = (unit @ unit.T)[np.triu_indices(len(unit), 1)]

    def apart(thresholds):
        """Where no score is so near that the last digit of a product decides on which side it lies."""
        return np.asarray([np.abs(scores - v).min() > 1e-6 for v in thresholds])

    thresholds = slider_positions(-1, 1)
    safe = apart(thresholds)
    assert safe.mean() > 0.9
    for a, b in zip(count_errors(exact, thresholds), count_errors(binned, thresholds), strict=True):
        assert np.array_equal(a[safe], b[safe]) and np.abs(a - b).max() <= 2
    first, second = count_at_thresholds(_named(scene), exact), count_at_thresholds(_named(scene, tmp_path), binned)
    safe = apart(first.thresholds)
    assert np.array_equal(first.accepts[safe], second.accepts[safe])
    assert np.array_equal(first.rejects[safe], second.rejects[safe])
    assert len(list(tmp_path.glob("workbench-counts-*.npz"))) == 1


def _named(scene, folder=None):
    """The scene with a run that has a contract, and a folder, but no more."""
    run = SimpleNamespace(contract=lambda: {"thresholds": {"0.1": {"threshold": 0.25}}}, folder=folder)
    return SimpleNamespace(run=run, key="key")


@given(st.floats(-1, 1), st.floats(0, 2))
def test_positions_are_round_and_enclose_the_scores(low, span):
    high = min(1.0, low + span)
    found = slider_positions(low, high)
    assert found[0] <= low and found[-1] > high
    assert len(found) <= 4003
    assert len(found) >= min(400, 10**6 * (high - low))
    assert (np.diff(found) > 0).all()


def test_deviates_exist_only_between_0_and_1():
    found = probit(np.asarray([0.0, 0.5, 1.0, 0.975]))
    assert np.isnan(found[[0, 2]]).all()
    assert found[[1, 3]] == pytest.approx([0, 1.959964], abs=1e-6)


@given(st.lists(st.tuples(st.sampled_from(["f4", "f8", "u4"]), st.integers(0, 9)), max_size=5), st.text(max_size=9))
def test_arrays_come_out_of_the_wire_as_they_went_in(kinds, name):
    given = {f"{k} {name}": np.arange(n, dtype=f"<{kind}") * 3 for k, (kind, n) in enumerate(kinds)}
    body = pack_arrays(given, how=name)
    (size,) = struct.unpack("<I", body[:4])
    header = json.loads(body[4 : 4 + size])
    assert header["how"] == name and (4 + size) % 8 == 0
    for told, array in zip(header["arrays"], given.values(), strict=True):
        start = 4 + size + told["offset"]
        assert start % 8 == 0
        read = np.frombuffer(body, f"<{told['type']}", told["length"], start)
        assert np.array_equal(read, array)


def test_kept_arrays_are_read_again_and_made_again_when_damaged(tmp_path):
    path, made = tmp_path / "kept.npz", []

    def make():
        made.append(1)
        return {"a": np.arange(6.0).reshape(3, 2)}

    wanted = {"a": (3, 2)}
    load_or_compute_arrays(path, wanted, make)
    assert (
        np.array_equal(load_or_compute_arrays(path, wanted, make)["a"], np.arange(6.0).reshape(3, 2)) and len(made) == 1
    )
    content = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(content), 60).tolist():
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        assert np.array_equal(load_or_compute_arrays(path, wanted, make)["a"], np.arange(6.0).reshape(3, 2))
    before = len(made)
    for bad in (b"", b"PK", bytes(content[: len(content) // 2])):
        path.write_bytes(bad)
        load_or_compute_arrays(path, wanted, make)
    assert len(made) == before + 3
    load_or_compute_arrays(path, {"a": (4, 2)}, make)
    assert len(made) == before + 4
    assert load_or_compute_arrays(tmp_path / "no folder" / "x.npz", wanted, make)["a"].shape == (3, 2)


def test_a_map_lies_within_its_square_and_is_the_same_each_time(monkeypatch, tmp_path):
    scene = drawn("all", n=40, run=SimpleNamespace(folder=tmp_path))  # type: ignore[arg-type]
    first = places.tsne_layout(scene)
    assert first.how == "t-SNE" and first.final and first.at.shape == (40, 2)
    assert np.abs(first.at).max() == pytest.approx(1)
    assert np.array_equal(places.tsne_layout(scene).at, first.at)
    (file,) = tmp_path.glob("workbench-map-*.npz")
    file.unlink()
    assert np.array_equal(places.tsne_layout(scene).at, first.at)
    monkeypatch.setattr(places, "MOST_SAMPLES", 39)
    many = places.tsne_layout(scene)
    assert many.how == "PCA" and many.final and np.abs(many.at).max() == pytest.approx(1)
    z = scene.unit.vectors() - scene.unit.vectors().mean(0)
    wide = z @ np.linalg.svd(z, full_matrices=False)[2][:2].T
    for axis in range(2):
        assert abs(np.corrcoef(wide[:, axis], many.at[:, axis])[0, 1]) == pytest.approx(1)


def test_one_point_is_laid_out_without_a_complaint(tmp_path):
    scene = drawn("all", n=30, run=SimpleNamespace(folder=tmp_path))  # type: ignore[arg-type]
    scene.embeddings[:] = 1
    assert np.isfinite(places.tsne_layout(scene).at).all()


def test_once_is_once_for_many_threads():
    calls = []
    once = LazyValue(lambda: calls.append(1) or len(calls))
    threads = [threading.Thread(target=once) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert once() == 1 and calls == [1]
