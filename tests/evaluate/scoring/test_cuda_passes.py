"""The kernels of a CUDA device in triton's interpreter: counts and lists equal those of sorted scores."""

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: the fused kernels cannot run", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a GPU is here: tests/gpu runs the same kernels on it", allow_module_level=True)

from mettle.evaluate import verification
from mettle.evaluate.scoring.bins import EvenBins
from mettle.evaluate.scoring.cuda_passes import CudaPasses, impostor_candidates, score_error_bound
from mettle.evaluate.scoring.histogram import count_scores
from mettle.evaluate.scoring.pair_tiles import PairTiles
from mettle.evaluate.scoring.rank_parts import merge_windows, pack_windows
from mettle.pairs.distributed import RankGroup

from .test_histogram import clusters, same

# The interpreter computes with NumPy, which warns where a masked entry divides by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("n", "subjects"), [(2, 2), (37, 5), (50, 50)])
def test_lists_hold_the_impostor_pairs_inside_each_window(n, subjects):
    x, y = clusters(1, n=n, subjects=subjects, d=7)
    x, y = torch.from_numpy(x), torch.from_numpy(y).sort().values
    windows = [(-0.1, 0.2), (-2.0, 2.0), (0.9, 0.95)]
    unit = torch.nn.functional.normalize(x.double())
    score = unit @ unit.T
    found = impostor_candidates(x, y, windows)
    for (low, high), pairs in zip(windows, found, strict=True):
        strangers = (y[:, None] != y[None]).triu(1)
        wanted = (strangers & (score >= low) & (score <= high)).nonzero().tolist()
        assert sorted(torch.stack([pairs.first, pairs.second], 1).tolist()) == wanted
        assert pairs.above == int((strangers & (score > high)).sum())
    assert impostor_candidates(x, y, windows, room=0) is None or n == 2


def test_the_slack_covers_three_products_of_bfloat16_halves():
    """What a tensor core is fed, summed in float64: the split itself must leave room for the summation."""
    rng = np.random.default_rng(0)
    for d in (16, 128, 512):
        x = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(200, d)).astype(np.float32)))
        high = x.bfloat16().float()
        low = (x - high).bfloat16().double()
        high, exact = high.double(), x.double() @ x.double().T
        error = (high @ high.T + high @ low.T + low @ high.T - exact).abs().max()
        assert float(error) < 3 * 2.0**-18 < score_error_bound(d) < 1.3e-4


@pytest.mark.parametrize(("n", "subjects", "d"), [(70, 9, 5), (130, 60, 20), (65, 2, 16)])
def test_fused_kernels_count_alike(monkeypatch, n, subjects, d):
    """Both passes of a CUDA device in triton's interpreter, in odd sizes; ids take out genuine pairs only."""
    x, y = clusters(n, n=n, subjects=subjects, d=d)
    a = verification(x, y, ids=np.arange(n))
    design = PairTiles.from_sets(a.source.probe, None, "all", 64)
    monkeypatch.setattr(CudaPasses, "has_kernels", property(lambda self: True))
    same(a, type(a)(count_scores(design, subjects, exact=False, device=torch.device("cpu")), "all", "histogram"))


@pytest.mark.parametrize("room", [1 << 24, 100])  # of the lists of pairs: with too little, tiles are read instead
def test_the_rows_of_all_ranks_are_those_of_one_process(monkeypatch, room):
    monkeypatch.setattr(CudaPasses, "has_kernels", property(lambda self: True))
    monkeypatch.setattr("mettle.evaluate.scoring.cuda_passes.ALIGNED", 16)
    monkeypatch.setattr("mettle.evaluate.scoring.cuda_passes.impostor_candidates.__defaults__", (room,))
    x, y = clusters(3, n=90, subjects=12, d=5)
    design = PairTiles.from_sets(verification(x, y).source.probe, None, "all", 32)
    bins, windows = EvenBins(-1.0, 1.0), [(-0.2, 0.3), (0.6, 0.7)]
    whole = CudaPasses(design, "cpu")
    parts = [CudaPasses(design, "cpu", RankGroup(rank, 3)) for rank in range(3)]
    assert np.array_equal(sum(part.count_bins(bins) for part in parts), whole.count_bins(bins))
    assert np.array_equal(np.sort(np.concatenate([part.genuine_scores() for part in parts])), whole.genuine_scores())
    merged = merge_windows(windows, [pack_windows(part.refine_windows(windows)) for part in parts])
    for found, wanted in zip(merged, whole.refine_windows(windows), strict=True):
        assert found.above == wanted.above > 0
        assert np.array_equal(found.values, wanted.values) and np.array_equal(found.counts, wanted.counts)


def test_windows_too_full_for_a_list_are_read_from_tiles(monkeypatch):
    """A collapsed model: every score is in every window."""
    x, y = np.ones((40, 3), np.float32), np.arange(40) % 10
    x[:5, 0] = 1.5
    a = verification(x, y)
    monkeypatch.setattr(CudaPasses, "has_kernels", property(lambda self: True))
    monkeypatch.setattr("mettle.evaluate.scoring.cuda_passes.impostor_candidates.__defaults__", (100,))
    design = PairTiles.from_sets(a.source.probe, None, "all", 64)
    b = type(a)(count_scores(design, 10, exact=False, device=torch.device("cpu")), "all", "histogram")
    same(a, b)
    assert len(b.scores.window(0.5, 1.0).values) <= 3
