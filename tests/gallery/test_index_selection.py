"""Which index a gallery gets, and whether what is measured of it is true."""

import json

import numpy as np
import pytest

from mettle.errors import InputError
from mettle.gallery.index.approximate import KINDS
from mettle.gallery.index.exact import ExactIndex
from mettle.gallery.index.selection import (
    IndexBenchmark,
    IndexSpec,
    build_index,
    has_outgrown,
    make_trial,
    measure_index,
)


def unit(x):
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def crowd(people, each, dim=32, seed=0, spread=0.3):
    rng = np.random.default_rng(seed)
    scale = (1.0 + np.arange(dim)) ** -0.4
    centre = rng.standard_normal((people, dim)) * scale
    labels = np.repeat(np.arange(people), each)
    return unit(centre[labels] + spread * rng.standard_normal((len(labels), dim)) * scale), labels


class Losing:
    """An index that never gives out certain numbers, in front of one that does."""

    kind, bytes = "losing", 1

    def __init__(self, index, lost):
        self.index, self.lost, self.dim = index, lost, index.dim

    def __len__(self):
        return len(self.index)

    def search(self, probes, k):
        scores, numbers = self.index.search(probes, min(len(self), k + len(self.lost)))
        out = np.full((len(probes), k), -np.inf, np.float32), np.full((len(probes), k), -1, np.int64)
        for row in range(len(probes)):
            keep = ~np.isin(numbers[row], self.lost)
            out[0][row], out[1][row] = scores[row][keep][:k], numbers[row][keep][:k]
        return out


def exact(vectors, numbers):
    index = ExactIndex(vectors.shape[1])
    index.add(numbers, vectors)
    return index


class TestRule:
    def test_small_is_exact(self):
        x, y = crowd(100, 3)
        built = build_index(x, np.arange(300), labels=y)
        assert built.index.kind == built.measured.kind == "exact"
        assert built.measured.recall_at == {1: 1.0, 10: 1.0}
        assert built.measured.tar_loss == 0.0
        assert len(built.index) == built.measured.size == 300

    def test_exact_where_it_is_quick_enough(self):
        x, _ = crowd(1500, 2)
        assert build_index(x, np.arange(3000), IndexSpec(latency_ms=1e4)).index.kind == "exact"

    def test_approximate_where_exact_is_too_slow(self):
        x, y = crowd(3000, 2)
        built = build_index(x, np.arange(6000), IndexSpec(latency_ms=1e-6), labels=y)
        assert built.index.kind in ("scan", "ivf")
        assert built.measured.recall_at[10] >= 0.99

    def test_compressed_where_memory_is_short(self):
        x, y = crowd(3000, 2)
        built = build_index(x, np.arange(6000), IndexSpec(memory_mb=0.6), labels=y)
        assert built.index.kind == "compressed"
        assert built.index.bytes <= 0.6e6 < exact(x, np.arange(6000)).bytes
        assert built.measured.recall_at[10] >= 0.99

    def test_too_little_memory_for_any_is_said(self):
        x, _ = crowd(3000, 2)
        with pytest.raises(InputError, match=r"memory_mb=0\.1 is too little for 6,000 x 32"):
            build_index(x, np.arange(6000), IndexSpec(memory_mb=0.1))

    def test_exact_where_nothing_else_finds_enough(self, monkeypatch):
        """Directions drawn at random and hardly any effort: no shortlist is good enough for a recall of 1."""
        hardly = {name: type(how)(how.engine, how.dtype, how.ladder[:1]) for name, how in KINDS.items()}
        for name, how in hardly.items():
            monkeypatch.setitem(KINDS, name, how)
        x = unit(np.random.default_rng(0).standard_normal((6000, 48)))
        built = build_index(x, np.arange(6000), IndexSpec(latency_ms=1e-6, recall=1.0))
        assert built.index.kind == "exact"
        assert built.measured.recall_at[10] == 1

    @pytest.mark.parametrize("kind", ["exact", *KINDS])
    def test_a_kind_by_name(self, kind):
        x, y = crowd(1500, 2)
        built = build_index(x, np.arange(3000) + (1 << 50), IndexSpec(kind=kind), labels=y)
        assert built.index.kind == built.measured.kind == kind
        assert built.measured.recall_at[10] >= 0.98
        assert (built.index.search(x[:50], 1)[1][:, 0] == np.arange(50) + (1 << 50)).mean() > 0.97

    def test_more_recall_wanted_takes_more_effort(self):
        x = unit(np.random.default_rng(0).standard_normal((20_000, 16)))
        little = build_index(x, np.arange(20_000), IndexSpec(kind="scan", recall=0.5))
        much = build_index(x, np.arange(20_000), IndexSpec(kind="scan", recall=1.0))
        assert little.index.effort.shortlist < much.index.effort.shortlist
        assert little.measured.recall_at[10] < much.measured.recall_at[10]

    def test_the_index_does_not_hold_the_callers_vectors(self):
        x, _ = crowd(100, 2)
        mine = x.copy()
        built = build_index(mine, np.arange(200))
        mine[:] = 0
        assert (built.index.search(x, 1)[1][:, 0] == np.arange(200)).all()
        built.index.remove(np.arange(5))
        assert (mine == 0).all()

    def test_g12_nothing_enrolled_yet(self):
        built = build_index(np.empty((0, 8), np.float32), np.empty(0, np.int64))
        assert len(built.index) == 0 and built.index.dim == 8
        assert str(built.measured) == "exact index, empty"

    @pytest.mark.parametrize("size", [1, 2, 9, 12])
    def test_hardly_anybody_enrolled(self, size):
        x, y = crowd(size, 1)
        measured = build_index(x, np.arange(size), labels=y).measured
        assert measured.recall_at == {1: 1.0, 10: 1.0} and measured.tar_loss is None

    def test_outgrown(self):
        x, _ = crowd(1500, 2)
        measured = build_index(x, np.arange(3000), IndexSpec(kind="exact")).measured
        assert not has_outgrown(6000, measured) and has_outgrown(6001, measured)


class TestMeasured:
    def test_g13_what_is_lost_is_counted(self):
        """Half of the probes never find their own person: their recall@1 and their TAR are gone, nobody else's."""
        x, y = crowd(400, 2, spread=0.2)
        numbers = np.arange(800) * 7 + 3
        index = exact(x, numbers)
        test = make_trial(index, y)
        unlucky = set(range(200))
        found = measure_index(Losing(index, numbers[np.isin(y, list(unlucky))]), test)
        probed = y[np.searchsorted(numbers, test.skip)]
        share = np.isin(probed, list(unlucky)).mean()
        own = (x[::2] * x[1::2]).sum(1)
        scores = (x @ x.T)[y[:, None] != y]
        wide = np.quantile(scores, 1 - 1e-3)
        sure = (own > wide + 0.05).mean()  # nearly everybody is accepted by exact search
        assert sure > 0.95
        assert found.tar_loss == pytest.approx(share, abs=0.05)
        assert found.recall_at[1] == pytest.approx(1 - share, abs=0.05)
        assert found.recall_at[10] < 0.65
        assert measure_index(index, test).tar_loss == 0 and measure_index(index, test).recall_at == {1: 1.0, 10: 1.0}

    def test_recall_is_the_share_of_the_true_ten(self):
        x, _ = crowd(300, 1)
        probes = unit(x[:80] + 0.2 * np.random.default_rng(2).standard_normal((80, 32)))
        index, lost = exact(x, np.arange(300)), np.arange(0, 300, 3)
        found = measure_index(Losing(index, lost), make_trial(index, probes=probes))
        hits = first = 0
        for probe in probes:
            true = np.argsort(-(x.astype(np.float64) @ probe))[:10]
            hits += sum(n % 3 != 0 for n in true)
            first += true[0] % 3 != 0
        assert found.recall_at[10] == pytest.approx(hits / 800)
        assert found.recall_at[1] == pytest.approx(first / 80)
        assert found.tar_loss is None  # nobody said whose probes they are

    def test_the_threshold_is_that_of_one_impostor_in_a_thousand(self):
        x, y = crowd(200, 4)
        test = make_trial(exact(x, np.arange(800)), y)
        impostors = (test.probes.astype(np.float64) @ x.T)[test.people.probe[:, None] != y]
        accepted = (impostors >= test.people.threshold).mean()
        assert accepted <= 1e-3
        assert accepted >= 0.9e-3  # and the lowest such

    def test_a_probe_does_not_find_itself(self):
        x, y = crowd(100, 3)
        test = make_trial(exact(x, np.arange(300)), y)
        assert (test.numbers != test.skip[:, None]).all()
        assert (test.scores[:, 0] < 0.99999).all()

    def test_one_template_each_is_measured_with_mixed_probes(self):
        x, y = crowd(300, 1)
        test = make_trial(exact(x, np.arange(300)), y)
        assert (test.numbers[:, 0] == test.people.probe).mean() > 0.9
        assert 0.6 < np.median(test.scores[:, 0]) < 0.95

    def test_one_readable_line_and_json_and_back(self):
        x, y = crowd(500, 2)
        measured = build_index(x, np.arange(1000), IndexSpec(kind="scan"), labels=y).measured
        line = str(measured)
        assert "\n" not in line
        for part in ("scan index of 1,000 x 32", "recall@1 ", "recall@10 ", "TAR lost at FAR 1e-3 ", " ms a probe"):
            assert part in line
        assert IndexBenchmark.from_dict(json.loads(json.dumps(measured.as_dict()))) == measured


class TestWanted:
    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"kind": "hsnw"}, "did you mean 'hnsw'"),
            ({"recall": 0}, "recall"),
            ({"recall": 1.01}, "recall"),
            ({"recall": float("nan")}, "recall"),
            ({"latency_ms": 0}, "latency_ms"),
            ({"latency_ms": float("nan")}, "latency_ms"),
            ({"memory_mb": -5}, "memory_mb"),
            ({"memory_mb": float("inf")}, "memory_mb"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, wrong, said):
        with pytest.raises(InputError, match=said):
            IndexSpec(**wrong)

    def test_shapes_that_do_not_fit_are_refused(self):
        x, y = crowd(10, 2)
        with pytest.raises(InputError, match="labels"):
            build_index(x, np.arange(20), labels=y[:5])
        with pytest.raises(InputError, match="vectors"):
            build_index(x[0], np.arange(20))
        with pytest.raises(InputError, match="one per number"):
            build_index(x, np.arange(19))
