"""Geometry against sums over pairs, known spectra and planted hubs; collapse named in words."""

import json

import numpy as np
import pytest
import torch

from mettle.errors import InputError
from mettle.evaluate import geometry
from mettle.evaluate.diagnostics.geometry import effective_rank


def cloud(seed, n=90, d=12):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), np.arange(n) % 30


def test_alignment_and_uniformity_equal_sums_over_pairs():
    x, y = cloud(0)
    g = geometry(x, y)
    unit = torch.nn.functional.normalize(torch.from_numpy(x))
    distance = torch.pdist(unit)
    i, j = np.triu_indices(len(y), 1)
    same = torch.from_numpy(y[i] == y[j])
    assert g.alignment == pytest.approx(float((distance[same] ** 2).mean()), abs=1e-9)
    assert g.uniformity == pytest.approx(float(torch.log(torch.exp(-2 * distance**2).mean())), abs=1e-9)
    json.dumps(g.summary(), allow_nan=False)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_effective_rank_counts_equal_directions(rank):
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(16, rank)))[0]
    vectors = np.vstack([basis.T, -basis.T])  # centred, with `rank` equal singular values
    assert effective_rank(vectors) == pytest.approx(rank)
    assert effective_rank(np.ones((5, 4))) == 0


def test_hubness_counts_how_often_one_is_a_neighbour():
    x, y = cloud(1)
    g = geometry(x, y, k=5)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    s = unit @ unit.T
    np.fill_diagonal(s, -2)
    wanted = np.bincount(np.argsort(-s, axis=1)[:, :5].ravel(), minlength=len(y))
    assert np.array_equal(g.occurrence, wanted)
    assert g.occurrence.sum() == 5 * len(y)
    assert g.hubs[0] == np.argmax(wanted)
    with_hub = x + 3
    with_hub[0] = 1  # the middle of everybody
    h = geometry(with_hub, y, k=5)
    assert h.hubs[0] == 0
    assert h.hubness > g.hubness


def test_collapse_is_named_in_words():
    x, y = cloud(2, n=200, d=64)
    assert geometry(x, y).verdict.startswith("no collapse")
    assert not geometry(x, y).collapsed
    flat = geometry(x[:, :2] @ np.random.default_rng(0).normal(size=(2, 64)), y)
    assert flat.verdict.startswith("dimensional collapse: about 2 of 64")
    point = geometry(5 + 0.1 * x, y)
    assert point.verdict.startswith("collapse: all vectors point almost the same way")
    assert point.collapsed
    constant = geometry(np.ones((30, 4)), np.arange(30) % 10)
    assert constant.collapsed
    assert (constant.hubness, constant.effective_rank) == (0, 0)


def test_many_rows_are_thinned_with_a_seed(monkeypatch):
    x, y = cloud(3, n=300)
    whole = geometry(x, y)
    import importlib

    monkeypatch.setattr(importlib.import_module("mettle.evaluate.diagnostics.geometry"), "MOST", 200)
    some = geometry(x, y)
    assert len(some.rows) == 200
    assert some.uniformity == pytest.approx(whole.uniformity, abs=0.1)
    assert np.array_equal(some.rows, geometry(x, y).rows)


def test_what_cannot_be_judged_is_refused():
    for x, y in [(np.eye(3), [0, 1, 2]), (np.eye(3), [0, 0, 0]), (np.full((3, 2), np.inf), [0, 0, 1])]:
        with pytest.raises(InputError):
            geometry(x, y)
    with pytest.raises(InputError, match="k must"):
        geometry(np.eye(3), [0, 0, 1], k=0)
