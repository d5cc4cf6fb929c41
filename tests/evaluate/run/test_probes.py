"""Probes of a run against an oracle that fits its own classifiers, and what is refused or said to be impossible."""

import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from mettle.data.dataset import Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import DataError
from mettle.evaluate import linear_probe
from mettle.evaluate.run import evaluate_run, probes
from mettle.model import Embedder, EmbedderSpec
from mettle.train import train
from mettle.train.recipe import EvaluateConfig, load, parse_recipe


def table(n=600, classes=3, seed=0, *, val=True, spurious=0.8):
    """Rows whose class and place both show, the place in most rows of a class its own."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    place = np.where(rng.random(n) < spurious, y % 2, rng.integers(0, 2, n))
    x = rng.normal(size=(classes, 6))[y] + 1.5 * rng.normal(size=(2, 6))[place] + rng.normal(size=(n, 6))
    split = rng.choice([0, 1, 2] if val else [0, 2], n)
    names = np.array(["gull", "duck", "owl", "wren", "tern", "swan", "kite", "rook"])[y]
    groups = {"place": np.array(["land", "water"])[place]}
    return Samples.of(FeatureArray(x.astype(np.float32)), names, ids=np.arange(n) + 2**40, groups=groups, split=split)


def network(seed=0, width=2):
    torch.manual_seed(seed)
    return Embedder(EmbedderSpec("mlp", width=width, depth=1, dim=4), (6,))


def seen(model, samples):
    """Unit features, without `embed`."""
    with torch.no_grad():
        f = model.eval().features(torch.from_numpy(samples.read(np.arange(len(samples))))).numpy()
    return f / np.linalg.norm(f, axis=1, keepdims=True)


def setup(**keys):
    return EvaluateConfig(**({"spurious": "place"} | keys))


def said(strength, train_, y, other):
    return LogisticRegression(C=strength, max_iter=1000).fit(train_, y).predict(other)


def test_every_number_is_that_of_an_own_fit():
    samples, model = table(), network()
    parts = {name: samples.part(name) for name in ("train", "val", "test")}
    f = {name: seen(model, part) for name, part in parts.items()}
    y = {name: part.label.values() for name, part in parts.items()}
    scores = {c: (said(c, f["train"], y["train"], f["val"]) == y["val"]).mean() for c in linear_probe.STRENGTHS}
    best = max(scores, key=scores.get)
    right = said(best, f["train"], y["train"], f["test"]) == y["test"]
    found = probes.evaluate_probes(setup(), samples, {"model": model})
    one = found["labels"]["encoders"]["model"]
    assert (one["strength"], one["chosen_on"]) == (best, "the validation split")
    assert one["linear"]["accuracy"] == pytest.approx(right.mean())
    by_class = {name: right[y["test"] == name].mean() for name in np.unique(y["test"])}
    worst = min(by_class, key=by_class.get)
    told = one["linear"]["worst_class"]
    assert (told["name"], told["accuracy"]) == (worst, pytest.approx(by_class[worst]))
    assert told["interval"]["low"] <= told["accuracy"] <= told["interval"]["high"]
    place = parts["test"].groups["place"].values()
    for row in one["groups"]["place"]:
        inside = place == row["name"]
        assert (row["samples"], row["linear"]) == (inside.sum(), pytest.approx(right[inside].mean()))
    cells = {(c, p): right[(y["test"] == c) & (place == p)] for c in by_class for p in ("land", "water")}
    c, p = min(cells, key=lambda key: cells[key].mean())
    group = one["worst_group"]
    assert (group["class"], group["group"], group["linear"]) == (c, p, pytest.approx(cells[c, p].mean()))
    assert group["smallest"] == min(len(v) for v in cells.values()) and len(group["cells"]) == group["groups"] == 6
    trained = parts["train"].groups["place"].values()
    share = {key: ((y["train"] == key[0]) & (trained == key[1])).sum() for key in cells}
    expected = sum(share[key] * cells[key].mean() for key in cells) / sum(share.values())
    assert group["adjusted"] == pytest.approx(expected)
    attribute = found["attribute"]
    told = said(attribute["encoders"]["model"]["strength"], f["train"], trained, f["test"])
    assert attribute["encoders"]["model"]["linear"]["accuracy"] == pytest.approx((told == place).mean())
    assert attribute["largest_group"] == max((place == p).mean() for p in ("land", "water"))
    json.dumps(found)


def test_strength_is_never_chosen_on_the_test_split():
    """Whatever the test labels are, the choice is the same."""
    samples, model = table(), network()
    rng = np.random.default_rng(1)
    codes = {name: part.labels for name, part in ((n, samples.part(n)) for n in ("train", "val", "test"))}
    z = {name: seen(model, samples.part(name)) for name in codes}
    first = linear_probe.fit_probe(z, codes)
    for _ in range(5):
        mixed = linear_probe.fit_probe(z, codes | {"test": rng.permutation(codes["test"])})
        assert mixed.strength == first.strength


def test_without_a_validation_split_a_tenth_of_training_chooses():
    found = probes.evaluate_probes(setup(), table(val=False), {"model": network()})
    one = found["labels"]["encoders"]["model"]
    assert one["chosen_on"] == "a tenth of the training split" and one["strength"] in linear_probe.STRENGTHS


def test_two_encoders_are_compared_on_the_attribute():
    samples = table(classes=8)
    found = probes.evaluate_probes(setup(), samples, {"E_d": network(0), "E_b": network(1, width=1)})["attribute"]
    d, b = (found["encoders"][name]["linear"]["accuracy"] for name in ("E_d", "E_b"))
    assert found["gap"]["value"] == pytest.approx(d - b)
    assert found["gap"]["interval"]["low"] <= d - b <= found["gap"]["interval"]["high"]
    same = probes.evaluate_probes(setup(), samples, {"E_d": network(0), "E_b": network(0)})["attribute"]
    assert same["gap"]["value"] == 0
    text = " | ".join(probes.describe_probes({"labels": {"status": "ok", "encoders": {}}, "attribute": found}))
    assert "E_d − E_b" in text and f"{100 * (d - b):+.1f} points" in text


def test_an_open_set_has_no_label_probe_but_an_attribute_can_be_read():
    samples = table(classes=5)
    unseen = samples.label.values() == "wren"
    split = np.where(unseen, 2, np.where(samples.split == 2, 0, samples.split))
    opened = Samples.of(samples.inputs, samples.label, groups=dict(samples.groups), split=split)
    found = probes.evaluate_probes(setup(), opened, {"model": network()})
    assert found["labels"] == {"status": "not applicable (open set): no test identity was trained on"}
    assert found["attribute"]["status"] == "ok" and found["attribute"]["left_out"] == 0
    assert "not applicable (open set)" in probes.describe_probes(found)[0]


def test_test_samples_of_unknown_classes_and_groups_are_left_out_and_counted():
    samples = table(classes=4)
    keep = ~((samples.split < 2) & (samples.label.values() == "wren"))
    part = samples.where(keep)
    found = probes.evaluate_probes(setup(), part, {"model": network()})["labels"]
    wrens = int((part.part("test").label.values() == "wren").sum())
    assert found["left_out"] == wrens > 0 and found["tested_on"] == len(part.part("test")) - wrens


def test_a_missing_column_and_a_column_of_one_group_are_refused():
    samples = table()
    with pytest.raises(DataError, match="no column 'palce'"):
        probes.evaluate_probes(setup(spurious="palce"), samples, {"model": network()})
    one = samples.where((samples.split != 0) | (samples.groups["place"].values() == "land"))
    with pytest.raises(DataError, match=r"one group only in training \('land'\).*evaluate\.spurious"):
        probes.evaluate_probes(setup(), one, {"model": network()})
    late = samples.where((samples.split != 2) | (samples.groups["place"].values() == "land"))
    found = probes.evaluate_probes(setup(), late, {"model": network()})
    assert "one group only in the test split" in found["attribute"]["status"]
    assert found["labels"]["status"] == "ok"
    with pytest.raises(DataError, match="no training or no test split"):
        probes.evaluate_probes(setup(), samples.where(samples.split == 2), {"model": network()})


def test_a_dead_feature_row_counts_as_wrong():
    codes = {"train": np.arange(40) % 2, "val": np.arange(8) % 2, "test": np.arange(8) % 2}
    z = {name: np.eye(2, dtype=np.float32)[y] for name, y in codes.items()}
    z["test"][3] = 0
    z["train"][5] = 0
    found = linear_probe.fit_probe(z, codes)
    assert found.probe.linear.correct.tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    assert found.probe.knn.correct[3] == 0


def test_thinning_keeps_every_class_and_its_share():
    labels = np.repeat([0, 1, 2], [9000, 900, 3])
    kept = labels[probes.subsample_per_class(labels, 1000)]
    assert len(kept) == 1000
    assert np.bincount(kept)[2] >= 1
    assert np.bincount(kept)[0] / np.bincount(kept)[1] == pytest.approx(10, rel=0.05)
    assert np.array_equal(probes.subsample_per_class(labels, 10**6), np.arange(len(labels)))
    assert len(np.unique(probes.subsample_per_class(labels, 1000))) == 1000


def test_when_probes_are_made():
    shut, opened = table(), table(classes=5)
    apart = np.where(opened.labels < 3, 0, 2)
    opened = Samples.of(opened.inputs, opened.label, split=apart)
    wcl, supcon = load("wcl"), load("supcon")
    assert probes.wants_probes(wcl, opened) and probes.wants_probes(wcl, shut) and probes.wants_probes(supcon, shut)
    assert not probes.wants_probes(supcon, opened)
    assert probes.wants_probes(load("supcon", ["evaluate.spurious=place"]), opened)
    assert probes.wants_probes(load("supcon", ["evaluate.probe=true"]), opened)
    assert not probes.wants_probes(load("wcl", ["evaluate.probe=false"]), shut)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two encoders on a closed set."""
    folder = tmp_path_factory.mktemp("closed")
    samples = table()
    arrays = {"x": samples.read(np.arange(len(samples))), "label": samples.label.values().astype(str)}
    arrays |= {"split": samples.split.astype(int), "place": samples.groups["place"].values().astype(str)}
    np.savez(folder / "rows.npz", **arrays)
    loss = {"kind": "InfoNCE", "prior": 0.1, "difficulty": {"kind": "Relative"}}
    recipe = {
        "data": {"source": str(folder / "rows.npz")},
        "batch": {"size": 16, "views": 2, "augment": "rows"},
        "model": {"backbone": "mlp", "width": 2, "depth": 1, "dim": 4},
        "loss": loss,
        "train": {"method": "two-encoder", "steps": 6, "device": "cpu"},
        "evaluate": {"spurious": "place"},
    }
    return train(parse_recipe(recipe), folder / "run", tensorboard=False)


def test_a_run_writes_its_probes(finished):
    found = evaluate_run(finished.run, finished.samples, model=finished.model)
    kept = finished.run.metrics()["probe"]
    assert list(kept["labels"]["encoders"]) == ["E_d", "E_b"] and kept["labels"]["status"] == "ok"
    assert kept["attribute"]["name"] == "place" and "gap" in kept["attribute"]
    assert kept == json.loads(json.dumps(found.metrics["probe"]))
    alone = probes.evaluate_probes(finished.run.recipe.evaluate, finished.samples, {"E_d": finished.run.model()})
    assert kept["labels"]["encoders"]["E_d"] == json.loads(json.dumps(alone["labels"]["encoders"]["E_d"]))


def test_other_data_without_the_column_are_measured_all_the_same(finished):
    s = finished.samples
    bare = Samples.of(s.inputs, s.label, split=s.split)
    found = evaluate_run(finished.run, bare, own_data=False, write=False)
    assert "no column 'place'" in found.metrics["probe"]["labels"]["status"]
    with pytest.raises(DataError, match="no column 'place'"):
        probes.evaluate_probes(finished.run.recipe.evaluate, bare, {"model": finished.model})
