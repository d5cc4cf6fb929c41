"""Two runs on one test split: the differences are those of `compare`, from what the run folders have kept."""

from types import SimpleNamespace

import numpy as np
import pytest

from mettle import evaluate
from mettle.data.dataset import Samples
from mettle.data.inputs import FeatureArray
from mettle.evaluate.run.compare_runs import FILE, compare_runs, load_test_split, save_test_split
from mettle.evaluate.run.probes import compare_correct
from mettle.evaluate.run.scenarios import evaluate_scenarios, summarize_scenarios

RNG = np.random.default_rng(0)
Y = np.repeat(np.arange(30), 4) * 7
DOMAIN = np.tile(["a", "b"], 60)
BASE = RNG.normal(size=(30, 8))[Y // 7]
SAMPLES = Samples.of(FeatureArray(np.zeros((120, 1), np.float32)), Y, domain=DOMAIN, ids=np.arange(120) + 1000)


def made(folder, name, noise, question="verification", weights="w"):
    z = (BASE + noise * np.random.default_rng(1).normal(size=BASE.shape)).astype(np.float32)
    results = evaluate_scenarios(z, SAMPLES)
    metrics = {
        "question": {"name": question},
        "weights": weights,
        "data": {"fingerprint": "data"},
        "scenarios": summarize_scenarios(results, (0.1, 0.01)),
    }
    run = SimpleNamespace(folder=folder / name, name=name)
    run.folder.mkdir()
    save_test_split(run, results, metrics, "domain")
    return run, metrics, results


def test_differences_are_those_of_compare(tmp_path):
    (a, first, x), (b, second, y) = (made(tmp_path, name, noise) for name, noise in (("a", 0.5), ("b", 1.0)))
    found, why_not = compare_runs(a, b, (first, second))
    assert why_not == ""
    assert [one.metric for one in found][:3] == ["eer", "auc", "tar@0.1"]
    for one in found:
        direct = evaluate.compare(x.verifications["cross-domain"], y.verifications["cross-domain"], one.metric)
        assert (one.difference, one.low, one.high) == (direct.difference, direct.interval.low, direct.interval.high)
    assert found[0].excludes_zero and found[0].difference < 0
    same, _ = compare_runs(a, a, (first, first))
    assert {one.difference for one in same} == {0.0} and not any(one.excludes_zero for one in same)


def test_retrieval_compares_queries(tmp_path):
    (a, first, x), (b, second, y) = (made(tmp_path, name, s, "retrieval") for name, s in (("a", 0.5), ("b", 1.0)))
    found, _ = compare_runs(a, b, (first, second))
    assert [one.metric for one in found] == ["recall@1", "map_at_r", "map"]
    direct = evaluate.compare(x.retrievals["cross-domain"], y.retrievals["cross-domain"], "map_at_r")
    assert (found[1].low, found[1].high) == (direct.interval.low, direct.interval.high)


def test_a_closed_set_compares_samples_that_both_were_tested_on(tmp_path):
    (a, first, _), (b, second, _) = (made(tmp_path, name, 0.5, "closed-set") for name in ("a", "b"))
    right = [RNG.random(120) < p for p in (0.6, 0.9)]
    marks = [np.where(one, "1", "0") for one in right]
    marks[0][:7] = "-"
    for metrics, mark in ((first, marks[0]), (second, marks[1])):
        encoder = {"model": {"correct": "".join(mark)}}
        metrics["probe"] = {"labels": {"status": "ok", "encoders": encoder}}
    found, _ = compare_runs(a, b, (first, second))
    assert [one.metric for one in found] == ["top_1", "worst_class", "worst_group"]
    direct = compare_correct(right[0][7:].astype(float), right[1][7:].astype(float), Y[7:])["top_1"]
    assert (found[0].difference, found[0].low) == (direct["difference"], direct["interval"]["low"])
    assert found[0].excludes_zero


@pytest.mark.parametrize("change", [{"weights": "others"}, {"data": {"fingerprint": "others"}}])
def test_embeddings_of_other_weights_or_data_are_not_used(tmp_path, change):
    run, metrics, _ = made(tmp_path, "a", 0.5)
    assert load_test_split(run, metrics).embeddings.shape == (120, 8)
    assert load_test_split(run, metrics | change) is None
    found, why_not = compare_runs(run, run, (metrics | change,) * 2)
    assert found == () and "evaluate it again" in why_not


def test_damaged_or_missing_files_are_told(tmp_path):
    run, metrics, _ = made(tmp_path, "a", 0.5)
    (run.folder / FILE).write_bytes(b"no tensors")
    assert load_test_split(run, metrics) is None
    (run.folder / FILE).unlink()
    assert "a has kept no embeddings" in compare_runs(run, run, (metrics, metrics))[1]
