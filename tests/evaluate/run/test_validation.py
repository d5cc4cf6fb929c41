"""Metrics by name on the validation part are those of verification and retrieval, by group too."""

import numpy as np
import pytest
import torch

from mettle.data import Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import InputError
from mettle.evaluate import NotMeasurable, ValidationScore, retrieval, verification
from mettle.model import Embedder, EmbedderSpec, embed

NAMES = ("eer", "auc", "min_dcf", "tar@0.05", "recall@1", "recall@3", "map@r", "r_precision")


@pytest.fixture(scope="module")
def measured():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 6)
    x = rng.normal(size=(20, 5))[labels] + 0.9 * rng.normal(size=(120, 5))
    samples = Samples.of(FeatureArray(x.astype(np.float32)), labels, domain=np.arange(120) % 2)
    torch.manual_seed(0)
    model = Embedder(EmbedderSpec("mlp", width=4, depth=1, dim=6), (5,))
    return model, samples, embed(model, samples)


def oracle(name, z, labels):
    kind, _, at = name.partition("@")
    if kind in ("recall", "map", "r_precision"):
        found = retrieval(z, labels, k=int(at) if kind == "recall" else 1)
        return found.recall[int(at)] if kind == "recall" else found.map_at_r if kind == "map" else found.r_precision
    found = verification(z, labels)
    return found.tar(far=float(at)) if kind == "tar" else getattr(found, name)


def test_values_are_those_of_verification_and_retrieval(measured):
    model, samples, z = measured
    found = ValidationScore()(model, samples, NAMES)
    assert found == {name: oracle(name, z, samples.labels) for name in NAMES}


@pytest.mark.parametrize("name", ["eer", "auc", "min_dcf", "tar@0.05"])
def test_the_worst_group_of_pairs_is_that_of_groups_measured_apart(measured, name):
    model, samples, z = measured
    score = ValidationScore()
    worst = max if score.direction(f"worst {name} by domain") == "min" else min
    sides = [samples.domain.codes == side for side in (0, 1)]
    wanted = worst(oracle(name, z[side], samples.labels[side]) for side in sides)
    assert score(model, samples, (f"worst {name} by domain",))[f"worst {name} by domain"] == wanted


def test_the_worst_group_of_queries_is_that_of_their_means(measured):
    model, samples, z = measured
    each = retrieval(z, samples.labels, k=1).per_query["map_at_r"]
    wanted = min(each[samples.domain.codes == side].mean() for side in (0, 1))
    found = ValidationScore()(model, samples, ("worst map@r by domain",))["worst map@r by domain"]
    assert found == pytest.approx(wanted, abs=1e-15)


def test_directions_and_unknown_names(measured):
    score = ValidationScore()
    assert {name: score.direction(name) for name in ("eer", "worst eer by domain", "min_dcf")} == dict.fromkeys(
        ("eer", "worst eer by domain", "min_dcf"), "min"
    )
    assert {score.direction(name) for name in ("auc", "tar@1e-3", "recall@5", "map@r")} == {"max"}
    for name in ("eeer", "recall@0", "tar@x", "tar@7", "worst by domain", "tar"):
        with pytest.raises(InputError, match=r"."):
            score.direction(name)
    with pytest.raises(InputError, match="did you mean 'eer'"):
        score.direction("eeer")


def test_what_cannot_be_measured_is_refused_and_nan_stays_nan(measured):
    model, samples, _ = measured
    with pytest.raises(NotMeasurable, match="120 samples of 20 identities.*impostor pairs"):
        ValidationScore()(model, samples, ("tar@1e-6",))
    once = samples.take(np.arange(0, 120, 6))
    with pytest.raises(NotMeasurable, match="eer cannot be measured"):
        ValidationScore()(model, once, ("eer",))
    broken = Embedder(EmbedderSpec("mlp", width=4, depth=1, dim=6), (5,))
    with torch.no_grad():
        broken.head.bias.fill_(torch.nan)
    assert np.isnan(ValidationScore()(broken, samples, ("eer",))["eer"])
