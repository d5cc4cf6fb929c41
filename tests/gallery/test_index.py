"""Laws of every kind of index, against plain NumPy sums in float64."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import faiss
import numpy as np
import pytest

from mettle.errors import InputError
from mettle.gallery.index.approximate import ApproximateIndex, SearchParams
from mettle.gallery.index.exact import ExactIndex
from mettle.gallery.index.faiss_index import limit_threads

EFFORT = {
    "scan": SearchParams(128),
    "compressed": SearchParams(128),
    "ivf": SearchParams(128, 64),
    "hnsw": SearchParams(64, 256),
}
KINDS = ["exact", *EFFORT]
TOLERANCE = {"compressed": 5e-4}


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def crowd(people=600, each=5, dim=24, seed=0, spread=0.35):
    """Unit vectors in clusters, a power-law spectrum, far from centred at the origin: like trained embeddings."""
    rng = np.random.default_rng(seed)
    scale = (1.0 + np.arange(dim)) ** -0.5
    centre = rng.standard_normal((people, dim)) * scale + 0.2
    x = np.repeat(centre, each, 0) + spread * rng.standard_normal((people * each, dim)) * scale
    return unit(x)


def make(kind, numbers, vectors, effort=None):
    if kind == "exact":
        index = ExactIndex(vectors.shape[1])
        index.add(numbers, vectors)
        return index
    return ApproximateIndex.build(kind, numbers, vectors, effort or EFFORT[kind])


def oracle(vectors, numbers, probe):
    """All (score, number) in float64, best first."""
    scores = vectors.astype(np.float64) @ probe.astype(np.float64)
    return sorted(zip(scores.tolist(), numbers.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1]))


def assert_true(kind, found, vectors, numbers, probes, k):
    """What came out is there, once, with its exact score, best first; the rest is padding at the end."""
    scores, who = found
    assert scores.shape == who.shape == (len(probes), k)
    assert scores.dtype == np.float32 and who.dtype == np.int64
    row = {int(n): i for i, n in enumerate(numbers)}
    for s, w, probe in zip(scores, who, probes, strict=True):
        count = min(k, len(numbers))
        assert (w[:count] >= 0).all() and (w[count:] == -1).all()
        assert np.isfinite(s[:count]).all() and np.isneginf(s[count:]).all()
        assert len(set(w[:count].tolist())) == count
        assert (np.diff(s[:count]) <= 0).all()
        true = [float(np.dot(vectors[row[int(n)]].astype(np.float64), probe.astype(np.float64))) for n in w[:count]]
        np.testing.assert_allclose(s[:count], true, atol=TOLERANCE.get(kind, 1e-6))


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def world():
    vectors = crowd()
    rng = np.random.default_rng(1)
    numbers = np.sort(rng.choice(1 << 40, len(vectors), replace=False)) + (1 << 61)
    probes = unit(vectors[rng.choice(len(vectors), 60)] + 0.1 * rng.standard_normal((60, vectors.shape[1])))
    return vectors, numbers, probes


class TestLaws:
    def test_scores_are_exact_and_numbers_stay_64_bit(self, kind, world):
        vectors, numbers, probes = world
        assert_true(kind, make(kind, numbers, vectors).search(probes, 7), vectors, numbers, probes, 7)

    def test_g13_nearly_all_of_the_true_best_come_out(self, kind, world):
        vectors, numbers, probes = world
        scores, who = make(kind, numbers, vectors).search(probes, 10)
        hits = 0
        for s, w, probe in zip(scores, who, probes, strict=True):
            true = oracle(vectors, numbers, probe)[:10]
            hits += len({n for _, n in true} & set(w.tolist()))
            if kind == "exact":  # identical, up to ties within 1e-6
                np.testing.assert_allclose(s, [score for score, _ in true], atol=1e-6)
        assert hits >= (600 if kind == "exact" else 590)

    def test_one_by_one_is_as_together(self, kind, world):
        vectors, numbers, probes = world
        index = make(kind, numbers, vectors)
        together, alone = index.search(probes, 5), [index.search(probe[None], 5) for probe in probes]
        np.testing.assert_allclose(together[0], np.concatenate([s for s, _ in alone]), atol=2e-6)
        assert (together[1] != np.concatenate([w for _, w in alone])).mean() < 0.01

    def test_equal_scores_come_by_rising_number(self, kind):
        vectors = np.repeat(crowd(40, 1), 3, 0)
        numbers = np.random.default_rng(0).permutation(len(vectors))
        scores, who = make(kind, numbers, vectors).search(vectors[::3], 3)
        for s, w in zip(scores, who, strict=True):
            for a in range(2):
                assert s[a] > s[a + 1] or w[a] < w[a + 1]

    def test_g12_empty_gives_padding_only(self, kind, world):
        vectors, numbers, probes = world
        index = make(kind, numbers[:0], vectors[:0])
        assert len(index) == 0
        for k in (1, 4):
            scores, who = index.search(probes, k)
            assert scores.shape == who.shape == (60, k)
            assert np.isneginf(scores).all() and (who == -1).all()
        assert index.remove(numbers) == 0

    @pytest.mark.parametrize("size", [1, 2, 5, 31, 200])
    def test_g12_more_asked_for_than_there_is(self, kind, world, size):
        vectors, numbers, probes = world
        index = make(kind, numbers[:size], vectors[:size])
        for k in (size, size + 1, 3 * size + 40):
            assert_true(kind, index.search(probes[:9], k), vectors[:size], numbers[:size], probes[:9], k)

    def test_many_candidates_of_many(self, kind, world):
        vectors, numbers, probes = world
        assert_true(kind, make(kind, numbers, vectors).search(probes[:3], 2999), vectors, numbers, probes[:3], 2999)

    def test_no_probes_no_answers(self, kind, world):
        vectors, numbers, probes = world
        scores, who = make(kind, numbers, vectors).search(probes[:0], 3)
        assert scores.shape == who.shape == (0, 3)

    def test_added_comes_out_at_once(self, kind, world):
        vectors, numbers, _ = world
        index = make(kind, numbers[:2000], vectors[:2000])
        for i in range(2000, 2040):
            index.add(numbers[i : i + 1], vectors[i : i + 1])
            scores, who = index.search(vectors[i : i + 1], 1)
            assert who[0, 0] == numbers[i]
            assert scores[0, 0] == pytest.approx(1, abs=5e-4)
        index.add(numbers[2040:], vectors[2040:])
        assert len(index) == 3000
        assert (index.search(vectors[2990:], 1)[1][:, 0] == numbers[2990:]).all()

    def test_removed_never_comes_out_and_k_still_do(self, kind, world):
        """Even where everything near the probe was removed."""
        vectors, numbers, probes = world
        index = make(kind, numbers, vectors)
        for probe in probes[:4]:
            near = np.asarray([n for _, n in oracle(vectors, numbers, probe)[:300]])
            there = index.contains_ids(near)
            assert index.remove(near) == there.sum()
            assert index.remove(near) == 0
            assert not index.contains_ids(near).any()
            left = index.contains_ids(numbers)
            assert len(index) == left.sum()
            found = index.search(probes, 10)
            assert_true(kind, found, vectors[left], numbers[left], probes, 10)
            true = oracle(vectors[left], numbers[left], probe)[:10]
            at = int(np.flatnonzero((probes == probe).all(1))[0])
            assert len({n for _, n in true} & set(found[1][at].tolist())) >= 9

    def test_nearly_everything_removed(self, kind, world):
        vectors, numbers, probes = world
        index = make(kind, numbers, vectors)
        rng = np.random.default_rng(3)
        left = np.ones(len(numbers), bool)
        for part in np.array_split(rng.permutation(len(numbers))[:-5], 40):
            assert index.remove(numbers[part]) == len(part)
            left[part] = False
            assert_true(kind, index.search(probes[:5], 6), vectors[left], numbers[left], probes[:5], 6)
        assert len(index) == 5
        assert index.remove(numbers) == 5
        assert (index.search(probes, 2)[1] == -1).all()

    def test_a_number_may_return_with_another_vector(self, kind, world):
        vectors, numbers, _ = world
        index = make(kind, numbers[:900], vectors[:900])
        index.remove(numbers[[5, 7, 899]])
        index.add(numbers[[899, 5]], vectors[[1000, 1001]])
        assert len(index) == 899
        assert index.search(vectors[[1000, 1001]], 1)[1][:, 0].tolist() == numbers[[899, 5]].tolist()
        assert numbers[5] not in index.search(vectors[[5]], 5)[1]
        assert index.remove(numbers[[899]]) == 1
        assert not index.contains_ids(numbers[[899]]).any()

    def test_numbers_in_any_order(self, kind, world):
        vectors, numbers, probes = world
        mixed = np.random.default_rng(5).permutation(numbers)
        index = make(kind, mixed[:1500], vectors[:1500])
        index.add(mixed[1500:], vectors[1500:])
        assert index.remove(mixed[::2]) == 1500
        assert index.contains_ids(mixed).tolist() == [i % 2 == 1 for i in range(3000)]
        assert_true(kind, index.search(probes, 5), vectors[1::2], mixed[1::2], probes, 5)

    @pytest.mark.parametrize("seed", range(3))
    def test_as_a_dict_through_a_long_history(self, kind, seed):
        """Adding, removing, packing and searching in any order; a dict is the truth."""
        rng = np.random.default_rng(seed)
        pool = crowd(400, 3, dim=16, seed=seed)
        index, truth, fresh = make(kind, np.empty(0, np.int64), pool[:0]), {}, 1
        for step in range(120):
            if rng.random() < 0.6:
                count = int(rng.choice([1, 1, 2, 60]))
                numbers, rows = np.arange(fresh, fresh + count), rng.integers(len(pool), size=count)
                fresh += count
                index.add(numbers, pool[rows])
                truth |= dict(zip(numbers.tolist(), rows.tolist(), strict=True))
            elif truth:
                gone = rng.choice(list(truth), min(len(truth), int(rng.choice([1, 3, 50]))), replace=False)
                unknown = np.append(gone, [fresh + 10, 0])
                assert index.remove(unknown) == len(gone)
                truth = {n: r for n, r in truth.items() if n not in set(gone.tolist())}
            if step % 40 == 39:
                index = index.compact()
            assert len(index) == len(truth)
            numbers = np.asarray(list(truth), np.int64)
            vectors, probes = pool[list(truth.values())], pool[rng.integers(len(pool), size=3)]
            assert_true(kind, index.search(probes, 4), vectors, numbers, probes, 4)
            assert index.contains_ids(np.arange(fresh)).tolist() == [n in truth for n in range(fresh)]

    def test_packed_keeps_nothing_of_what_was_removed(self, kind, world):
        vectors, numbers, probes = world
        index = make(kind, numbers, vectors)
        index.remove(numbers[:700])
        before = index.search(probes, 5)
        packed = index.compact()
        assert len(packed) == 2300 and packed.rows.count == 2300 and packed.rows.dead == 0
        assert not packed.contains_ids(numbers[:700]).any()
        if kind != "exact":
            assert len(packed.engine) == 2300
        after = packed.search(probes, 5)
        assert (before[1] != after[1]).mean() < 0.02
        kept = packed.rows.vectors.astype(np.float32)
        for vector in vectors[:700:50]:
            assert np.abs(kept - vector).max(1).min() > 1e-3

    def test_a_removed_vector_is_gone_from_the_rows_at_once(self, kind, world):
        vectors, numbers, _ = world
        index = make(kind, numbers, vectors)
        index.remove(numbers[10:20])
        table = index.rows._vectors.astype(np.float32)
        for vector in vectors[10:20]:
            assert np.abs(table - vector).max(1).min() > 1e-3

    def test_what_was_removed_does_not_pile_up(self, kind):
        vectors = crowd(300, 4, dim=8)
        index, at = make(kind, np.arange(1200), vectors), 1200
        for _ in range(12):
            index.remove(np.arange(at - 1200, at - 200))
            index.add(np.arange(at, at + 1000), vectors[:1000])
            at += 1000
            assert len(index) == 1200
            assert index.rows.count <= 2 * 1200 + 1024

    def test_what_is_lent_is_neither_kept_nor_changed(self, kind, world):
        vectors, numbers, probes = world
        mine, own = vectors[:500].copy(), numbers[:500].copy()
        index = make(kind, own, mine)
        before = index.search(probes, 3)
        mine[:], own[:] = 0, 7
        lent = probes.copy()
        after = index.search(lent, 3)
        np.testing.assert_array_equal(before[1], after[1])
        np.testing.assert_array_equal(lent, probes)
        index.remove(numbers[:100])
        assert (mine == 0).all()

    @pytest.mark.parametrize("dim", [1, 2, 3, 7, 33, 130])
    def test_any_dimension(self, kind, dim):
        vectors = unit(np.random.default_rng(dim).standard_normal((700, dim)))
        index = make(kind, np.arange(700), vectors)
        assert_true(kind, index.search(vectors[:5], 3), vectors, np.arange(700), vectors[:5], 3)

    def test_searches_run_side_by_side(self, kind, world):
        vectors, numbers, probes = world
        index = make(kind, numbers, vectors)
        expected = index.search(probes, 5)
        with ThreadPoolExecutor(8) as pool:
            for scores, who in pool.map(lambda _: index.search(probes, 5), range(24)):
                np.testing.assert_allclose(scores, expected[0], atol=2e-6)
                assert (who != expected[1]).mean() < 0.01

    def test_the_number_of_threads_is_left_alone(self, kind, world):
        vectors, numbers, probes = world
        before = faiss.omp_get_max_threads()
        index = make(kind, numbers, vectors)
        index.search(probes[:1], 3)
        index.search(probes, 3)
        index.add(np.asarray([1]), vectors[:1])
        assert faiss.omp_get_max_threads() == before
        with pytest.raises(InputError):
            index.search(probes, 0)
        assert faiss.omp_get_max_threads() == before

    def test_memory_is_about_what_it_says(self, kind, world):
        vectors, numbers, _ = world
        size = make(kind, numbers, vectors).bytes
        floor = vectors.nbytes // (2 if kind == "compressed" else 1)
        assert floor <= size <= 3 * floor + 400 * len(numbers)


class TestRefusals:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_probe_that_is_no_number_is_refused(self, kind, world, bad):
        vectors, numbers, probes = world
        probes = probes.copy()
        probes[3, 2] = bad
        with pytest.raises(InputError, match="finite"):
            make(kind, numbers, vectors).search(probes, 3)

    @pytest.mark.parametrize("k", [0, -1, True, 2.0, None])
    def test_k_is_a_whole_number_from_one_on(self, kind, world, k):
        vectors, numbers, probes = world
        with pytest.raises(InputError, match="k must"):
            make(kind, numbers[:50], vectors[:50]).search(probes, k)

    def test_probes_have_the_right_shape(self, kind, world):
        vectors, numbers, probes = world
        index = make(kind, numbers[:50], vectors[:50])
        for wrong in (probes[0], probes[:, :-1], probes[None]):
            with pytest.raises(InputError, match=r"\(p, 24\)"):
                index.search(wrong, 1)

    @pytest.mark.parametrize("spoil", [np.nan, np.inf, 5.0])
    def test_what_is_longer_than_one_or_broken_is_refused_and_nothing_is_added(self, kind, world, spoil):
        vectors, numbers, probes = world
        index = make(kind, numbers[:50], vectors[:50])
        wrong = vectors[50:55].copy()
        wrong[2] = spoil
        with pytest.raises(InputError, match="unit length"):
            index.add(numbers[50:55], wrong)
        assert len(index) == 50
        assert_true(kind, index.search(probes[:4], 60), vectors[:50], numbers[:50], probes[:4], 60)

    def test_numbers_are_new_distinct_whole_and_not_negative(self, kind, world):
        vectors, numbers, _ = world
        index = make(kind, numbers[:50], vectors[:50])
        for wrong in ([numbers[3]], [1, 1], [-1], [0.5], [[4]]):
            wrong = np.asarray(wrong)
            with pytest.raises(InputError, match="numbers"):
                index.add(wrong, vectors[: max(1, wrong.size)])
        with pytest.raises(InputError, match="one per number"):
            index.add(np.arange(3), vectors[:2])
        assert len(index) == 50

    def test_an_unknown_kind_is_named(self, world):
        vectors, numbers, _ = world
        with pytest.raises(InputError, match="hnsw"):
            ApproximateIndex.build("hnws", numbers, vectors)

    def test_too_many_dimensions_for_codes(self):
        with pytest.raises(InputError, match="4096"):
            ApproximateIndex.build("scan", np.arange(1), np.eye(1, 5000, dtype=np.float32))


def test_threads_are_put_back_after_an_error():
    before = faiss.omp_get_max_threads()
    with pytest.raises(ZeroDivisionError), limit_threads(1):
        assert 1 / (faiss.omp_get_max_threads() - 1)
    assert faiss.omp_get_max_threads() == before


def test_other_threads_keep_their_number_of_threads():
    before = faiss.omp_get_max_threads()
    with limit_threads(1), ThreadPoolExecutor(1) as pool:
        assert pool.submit(faiss.omp_get_max_threads).result() == before


def test_a_forked_process_searches_too():
    """Faiss in a child of a process in which it ran on several threads waits for ever, unless it is given one."""
    code = """
import os, sys
import numpy as np
from mettle.gallery.index.approximate import ApproximateIndex, SearchParams
x = np.random.default_rng(0).standard_normal((3000, 16)).astype(np.float32)
x /= np.linalg.norm(x, axis=1, keepdims=True)
index = ApproximateIndex.build("scan", np.arange(3000), x, SearchParams(64))
mine = index.search(x[:64], 5)[1]
child = os.fork()
if not child:
    same = (index.search(x[:64], 5)[1] == mine).all() and (index.search(x[:1], 5)[1] == mine[:1]).all()
    os._exit(0 if same else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    env = dict(os.environ, OMP_NUM_THREADS="2")
    with subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True) as parent:
        try:
            assert parent.wait(200) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)  # also a child that waits for ever


def test_an_index_needs_no_torch():
    code = (
        "import sys, mettle.gallery.index.persistence, mettle.gallery.index.selection\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
