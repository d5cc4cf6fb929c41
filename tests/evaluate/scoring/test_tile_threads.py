"""Tiles on several threads: what one thread finds, bit for bit, and what is ours alone to change."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from mettle.errors import InputError
from mettle.evaluate import bootstrap, retrieval, verification
from mettle.evaluate.scoring import tile_threads
from mettle.evaluate.scoring.bins import EvenBins
from mettle.evaluate.scoring.cpu_passes import FastPasses
from mettle.evaluate.scoring.histogram import HistogramScores
from mettle.evaluate.scoring.scores import SortedScores
from mettle.evaluate.scoring.tile_threads import count_threads, keep_to_one_core, map_in_threads
from mettle.pairs.distributed import RankGroup


@pytest.fixture
def use_threads(monkeypatch):
    """A way to say how many threads there are, and that the smallest tile is worth one."""
    monkeypatch.setattr(tile_threads, "LEAST", 1)
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def tied_rows(rng, n, labels):
    """Vectors of few directions, many of them equal, with as many labels, each of which occurs twice at least."""
    x = rng.integers(-1, 2, size=(n, 3)).astype(np.float32) + np.float32(0.125)
    return x, np.append(np.repeat(np.arange(labels), 2), rng.integers(labels, size=n - 2 * labels))


def products():
    return [found["num_threads"] for found in threadpool_info() if found["user_api"] == "blas"]


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.sampled_from(["all", "within", "across"]), st.booleans(), st.integers(1, 2))
def test_threads_count_as_separate_passes_over_exact_scores(seed, trials, shelf, ranks):
    """Of ties everywhere: bins, windows and errors are those of all scores, and of each rank's share of them."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(30, 90))
    x, y = tied_rows(rng, n, int(rng.integers(2, 12)))
    given = {"domains": rng.integers(0, 2, n), "ids": np.arange(n), "trials": trials}
    if shelf:
        given["gallery"] = (x[::2], y[::2], given["domains"][::2], given["ids"][::2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_threads, "LEAST", 1)
        try:
            patch.setattr(torch, "get_num_threads", lambda: 1)
            plain = verification(x, y, mode="exact", **given)
        except InputError:  # no pair of one kind in these domains
            return
        patch.setattr(torch, "get_num_threads", lambda: 3)
        found = verification(x, y, mode="histogram", chunk=int(rng.integers(1, 20)), **given)
        assert (found.eer, found.eer_bracket) == (plain.eer, plain.eer_bracket)
        assert isinstance(plain.scores, SortedScores)
        assert isinstance(found.scores, HistogramScores)
        impostor, design = plain.scores.impostor, found.scores.design
        assert design is not None
        for tau in np.unique(impostor).tolist():
            assert found.rates(tau) == plain.rates(tau)
        bins, windows = EvenBins(-1.0, 1.0), [(-0.5, 0.25), (0.0, 0.0), (0.9, 1.0)]
        parts = [FastPasses(design, RankGroup(rank, ranks)) for rank in range(ranks)]
        assert np.array_equal(sum(part.count_bins(bins) for part in parts), found.scores.counts)
        seen = [part.refine_windows(windows) for part in parts]
    for (low, high), *pieces in zip(windows, *seen, strict=True):
        inside = impostor[(impostor >= low) & (impostor <= high)]
        values = np.concatenate([np.repeat(piece.values, piece.counts) for piece in pieces])
        assert np.array_equal(np.sort(values), inside)
        assert sum(piece.above for piece in pieces) == np.count_nonzero(impostor > high)


@pytest.mark.parametrize("rule", ["all", "across"])
def test_threads_rank_as_one_does(use_threads, rule):
    rng = np.random.default_rng(0)
    x, y = tied_rows(rng, 400, 60)
    x[200:] += rng.normal(size=(200, 3)).astype(np.float32)
    given = {"ids": np.arange(400), "domains": rng.integers(0, 3, 400), "chunk": 23}
    given |= {"exclude_same_domain": True} if rule == "across" else {}
    found = []
    for threads in (1, 3):
        use_threads(threads)
        found.append(retrieval(x, y, k=(1, 5), **given))
    one, several = found
    assert np.array_equal(one.queries, several.queries)
    assert all(np.array_equal(values, several.per_query[name]) for name, values in one.per_query.items())


@pytest.mark.parametrize("among", ["all rows", "some rows", "sorted scores"])
def test_threads_resample_as_one_does(use_threads, monkeypatch, among):
    monkeypatch.setattr(bootstrap, "MANY", 1 if among == "some rows" else 1 << 27)
    monkeypatch.setattr(bootstrap, "DENSE_SUBJECTS", 1)
    x, y = tied_rows(np.random.default_rng(0), 300, 40)
    found = []
    for threads in (1, 3):
        use_threads(threads)
        mode = "exact" if among == "sorted scores" else "histogram"
        v = verification(x, y, mode=mode, chunk=19, domains=np.arange(300) % 3, trials="across")
        found.append((v.interval("eer"), v.intervals_at(0.25)))
    assert found[0] == found[1]


def test_each_subject_has_the_scores_of_its_pairs(use_threads):
    """Counts by subject and bin against plain loops; a pair stands at both of its subjects."""
    rng = np.random.default_rng(1)
    x, y = tied_rows(rng, 90, 12)
    x[::2] = rng.normal(size=(45, 3))  # so far from the thresholds that fast scores are on the right side of them
    use_threads(3)
    levels = np.asarray([-0.5, 0.1, 0.7], np.float32)
    genuine, impostor = np.zeros((2, 12, 4), np.int64)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for i in range(90):
        for j in range(i + 1, 90):
            at = np.searchsorted(levels, unit[i] @ unit[j], side="right")
            if y[i] == y[j]:
                genuine[y[i], at] += 1
            else:
                impostor[y[i], at] += 1
                impostor[y[j], at] += 1
    for mode in ("exact", "histogram"):
        found = bootstrap.count_by_subject(verification(x, y, mode=mode, chunk=7).scores, levels, False)
        assert np.array_equal(found[0], genuine)
        assert np.array_equal(found[1], impostor)


def test_an_error_in_a_thread_is_that_of_the_first_query(use_threads):
    x, y = tied_rows(np.random.default_rng(0), 120, 20)
    said = []
    for threads in (1, 3):
        use_threads(threads)
        with pytest.raises(InputError, match="exceeds the candidates of query 0,") as error:
            retrieval(x, y, k=(120,), ids=np.arange(120), chunk=7)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_results_come_in_order_and_the_threads_of_others_stay():
    before, inside = products(), []

    def work(k):
        if k < 2:  # another walk begins before this one is over
            assert list(map_in_threads(lambda j: j, range(3), 2)) == [0, 1, 2]
        inside.append((products(), torch.get_num_threads()))
        return k * k

    threads = torch.get_num_threads()
    assert list(map_in_threads(work, range(9), 2)) == [k * k for k in range(9)]
    assert all(set(blas) == {1} and own == 1 for blas, own in inside)
    with pytest.raises(ZeroDivisionError):
        list(map_in_threads(lambda k: 1 // k, range(3), 2))
    abandoned = map_in_threads(work, range(9), 2)
    assert next(abandoned) == 0
    del abandoned
    assert (products(), torch.get_num_threads()) == (before, threads)


def test_a_walk_on_one_core_gives_the_others_back(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    before = threadpool_info()
    for scores, kept in ((tile_threads.LEAST, False), (2 * tile_threads.LEAST, True)):
        with keep_to_one_core(scores), keep_to_one_core(scores):
            assert {found["num_threads"] for found in threadpool_info()} == {1} or not kept
        assert threadpool_info() == before


def test_few_scores_and_one_core_are_no_work_for_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert [count_threads(scores) for scores in (0, tile_threads.LEAST, 3 * tile_threads.LEAST, 10**12)] == [1, 1, 3, 8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert count_threads(10**12) == 1


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 60))
def test_parts_of_a_share_are_the_share(size, count, n):
    for rank in range(size):
        whole = RankGroup(rank, size)
        parts = [part.share(range(n)) for part in whole.split(count)]
        assert sorted(chain.from_iterable(parts)) == list(whole.share(range(n)))


def test_threads_share_the_rounded_sides(use_threads):
    x, y = tied_rows(np.random.default_rng(0), 60, 10)
    design = verification(x, y, mode="histogram", chunk=7).scores.design
    assert design is not None
    use_threads(3)
    sides = FastPasses(design).map_parts(lambda part: part.sides)
    assert len(sides) == 3
    assert sides[0] is not None
    assert all(side is sides[0] for side in sides)
