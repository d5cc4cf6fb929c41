"""Laws that every public metric obeys, and peers: where they are right we agree, where they are wrong we refuse.

A metric here is a function of (embeddings, labels) that gives plain numbers.
"""

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle import evaluate
from mettle.errors import MettleError


def _verification(x, y, **options):
    v = evaluate.verification(x, y, **options)
    return {"eer": v.eer, "auc": v.auc, "tar": v.tar(0.1), "dcf": v.min_dcf, "n": [v.genuine, v.impostor]}


def _retrieval(x, y):
    r = evaluate.retrieval(x, y, k=(1, 3))
    return {"recall": list(r.recall.values()), "map": r.map_at_r, "r": r.r_precision, "n": [len(r.queries), r.excluded]}


def _identification(x, y):
    shelf = np.unique(y, return_index=True)[1][: max(1, len(np.unique(y)) - 2)]  # all but two people
    rest = np.setdiff1d(np.arange(len(y)), shelf)
    i = evaluate.identification((x[shelf], y[shelf]), (x[rest], y[rest]))
    return {"rank": [i.rank(1), i.rank(2)], "tpir": i.tpir(0.5)}


def _probe(x, y):
    half = len(y) // 2
    p = evaluate.probe((x[:half], y[:half]), (x[half:], y[half:]), k=3)
    return {"knn": p.knn.accuracy, "worst": p.knn.worst_class[1]}


def _geometry(x, y):
    g = evaluate.geometry(x, y, k=3)
    return {"a": g.alignment, "u": g.uniformity, "hubs": sorted(g.occurrence.tolist())}


def _suspects(x, y):
    return {"first": evaluate.label_errors(x, y).suspicion.tolist()}


METRICS = {
    "verification": _verification,
    "verification in bins": lambda x, y: _verification(x, y, mode="histogram"),
    "retrieval": _retrieval,
    "identification": _identification,
    "probe": _probe,
    "geometry": _geometry,
    "label errors": _suspects,
}
MEASURES = pytest.mark.parametrize("measure", METRICS.values(), ids=list(METRICS))


def people(seed=0, subjects=12, each=4, d=8, noise=0.8):
    rng = np.random.default_rng(seed)
    y = np.tile(np.arange(subjects), each)
    return rng.normal(size=(subjects, d))[y] + noise * rng.normal(size=(len(y), d)), y


def close(a, b):
    assert json.loads(json.dumps(a)).keys() == b.keys()
    for name, value in a.items():
        assert b[name] == pytest.approx(value, abs=1e-9), name


@MEASURES
@pytest.mark.parametrize("seed", range(3))
def test_lengths_rotations_and_names_of_labels_do_not_matter(measure, seed):
    x, y = people(seed)
    base = measure(x, y)
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    close(base, measure(x * rng.uniform(0.1, 10, size=(len(y), 1)), y))
    close(base, measure(x @ turn, y))
    close(base, measure(x, 2**53 + 2 * y))  # one number in float64 for every two
    close(base, measure(x, y.astype(np.int16)))


@MEASURES
def test_tensors_and_arrays_are_one(measure):
    x, y = people()
    if measure in (_identification, _probe):
        close(measure(x, y), measure(torch.from_numpy(x), y))
    else:
        close(measure(x, y), measure(torch.from_numpy(x), torch.from_numpy(y)))


@pytest.mark.parametrize("name", ["verification", "verification in bins", "retrieval", "geometry", "label errors"])
def test_the_order_of_rows_does_not_matter(name):
    x, y = people()
    for seed in range(4):
        mix = np.random.default_rng(seed).permutation(len(y))
        close(METRICS[name](x, y), METRICS[name](x[mix], y[mix]))


@MEASURES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_E1_one_number_that_is_none_is_refused(measure, bad):
    x, y = people()
    for at in [(0, 0), (len(y) - 1, 7), (13, 3)]:
        spoiled = x.copy()
        spoiled[at] = bad
        with pytest.raises(MettleError):
            measure(spoiled, y)
    with pytest.raises(MettleError):
        measure(np.full_like(x, bad), y)


@MEASURES
def test_E2_one_class_zero_vectors_and_nothing_are_refused(measure):
    x, y = people()
    for bad in [(x, np.zeros_like(y)), (x * 0, y), (x[:0], y[:0]), (x, y.astype(float))]:
        with pytest.raises((MettleError, ValueError)) as caught:
            measure(*bad)
        assert isinstance(caught.value, MettleError) or len(bad[0]) == 0


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_number_stays_in_its_range(seed, tied):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(12, 40))
    x = rng.choice([-1.0, 1.0], size=(n, 4)) if tied else rng.normal(size=(n, 4))
    y = np.arange(n) % int(rng.integers(4, 6))
    for measure in (_verification, METRICS["verification in bins"], _retrieval, _identification):
        for name, value in measure(x, y).items():
            if name != "n":
                assert (np.asarray(value) >= -1e-12).all()
                assert (np.asarray(value) <= 1 + 1e-12).all()


def test_pml_gives_all_nan_queries_a_perfect_score_where_we_refuse():
    """Its search answers −1 for a NaN query, and −1 is the last label."""
    _, y = people()
    with pytest.raises(MettleError, match="NaN"):
        evaluate.retrieval(np.full((6, 8), np.nan), np.full(6, y[-1]), gallery=people())


def test_pml_confuses_ids_above_2_to_the_24_where_we_do_not():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pytorch_metric_learning.distances import CosineSimilarity
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
        from pytorch_metric_learning.utils.inference import CustomKNN

        rng = np.random.default_rng(0)
        x = rng.normal(size=(40, 8)).astype(np.float32)
        small = np.repeat(np.arange(20), 2)

        def rival(labels):
            made = AccuracyCalculator(
                include=("precision_at_1",),
                k=1,
                device=torch.device("cpu"),
                knn_func=CustomKNN(CosineSimilarity()),
            )
            return made.get_accuracy(torch.from_numpy(x), torch.from_numpy(labels))["precision_at_1"]

        large = 2**25 + small
        ours = [evaluate.retrieval(x, labels, k=(1,)).recall[1] for labels in (small, large)]
        assert ours[0] == ours[1] == pytest.approx(rival(small), abs=1e-6)
        assert rival(large) != pytest.approx(ours[1], abs=1e-3)


def test_scikit_learn_agrees_on_auc_of_all_pairs_and_warns_or_breaks_on_one_class():
    from sklearn.metrics import roc_auc_score

    x, y = people(5)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    i, j = np.triu_indices(len(y), 1)
    wanted = roc_auc_score(y[i] == y[j], np.round((unit @ unit.T)[i, j], 12))
    for mode in ("exact", "histogram"):
        v = evaluate.verification(x, y, mode=mode)
        assert abs(v.auc - wanted) <= v.bounds["auc"] + 1e-12


def test_E9_distances_passed_as_similarities_are_called_out_loudly():
    x, y = people(6, noise=0.3)
    i, j = np.triu_indices(len(y), 1)
    distance = np.linalg.norm(x[i] - x[j], axis=1)
    v = evaluate.from_scores(distance, (y[i] == y[j]).astype(int))
    assert "orientation" in v.warnings[0]
    turned = evaluate.from_scores(-distance, (y[i] == y[j]).astype(int))
    assert turned.auc == pytest.approx(1 - v.auc, abs=1e-12)
    assert turned.warnings == ()
