"""Class-vector losses through the trainer: numbering, state, export."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from mettle.data import Augment, Loader, PKBatchSampler, Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import RecipeError
from mettle.losses import ArcFace, Center, NormFace
from mettle.model import Embedder, EmbedderSpec
from mettle.model.inference import embed
from mettle.train import Supervised, load
from mettle.train.datamodule import prepare_samples
from mettle.train.from_recipe import build_method_and_loader, train
from mettle.train.methods.supervised import spread_over_classes, start_class_vectors
from mettle.train.optim import Schedule
from mettle.train.recipe import parse_recipe

from ..conftest import make_npz, tiny
from ..test_from_recipe import Stop, content, until

KINDS = {
    "arcface": {"kind": "ArcFace", "scale": 16.0, "margin": 0.2},
    "sampled": {"kind": "CosFace", "scale": 16.0, "sample": 0.5},
    "adacos": {"kind": "AdaCos"},
    "sphereface": {"kind": "SphereFace", "margin": 2},
    "center": {"kind": "Center", "weight": 0.01, "base": {"kind": "NormFace", "scale": 8.0}},
    "hard": {"kind": "CosFace", "difficulty": {"kind": "Threshold", "beta": 1.0}},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_npz(tmp_path_factory.mktemp("data") / "small.npz")


def recipe(source, kind, **settings):
    plain = tiny(source, **settings).model_dump()
    return parse_recipe(plain | {"loss": KINDS[kind], "train": plain["train"] | {"loss_rate": 2.0}})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_and_a_resumed_run_is_bit_identical(source, tmp_path, kind):
    whole = train(recipe(source, kind), tmp_path / "whole", tensorboard=False)
    assert whole.finished
    with pytest.raises(Stop):
        train(recipe(source, kind), tmp_path / "cut", tensorboard=False, on_step=until(6))
    train(recipe(source, kind), tmp_path / "cut", tensorboard=False, resume=True)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_labels_of_training_are_numbered_and_vectors_are_kept_with_their_names(source, tmp_path):
    outcome = train(recipe(source, "arcface", steps=80, rate=1e-2), tmp_path / "run", tensorboard=False)
    part = outcome.samples.part("train")
    with safe_open(tmp_path / "run" / "classes.safetensors", "pt") as file:
        vectors, names = file.get_tensor("vectors"), json.loads(file.metadata()["names"])
    assert names == [part.label.names[k] for k in sorted(set(part.labels.tolist()))]
    assert len(names) < len(part.label.names)  # test identities have no vector
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(names)))
    found = (torch.from_numpy(embed(outcome.model, part)) @ vectors.T).argmax(1)
    right = [names[k] == name for k, name in zip(found.tolist(), part.label.values(), strict=True)]
    assert sum(right) / len(right) > 2 / len(names)


def test_class_vectors_learn_at_their_own_pace(source):
    method, _ = build_method_and_loader(recipe(source, "arcface"), prepare_samples(recipe(source, "arcface")))
    groups = method.optimizer.optimizers["model"].param_groups
    assert {group["lr_scale"] for group in groups} == {1.0, 2.0}
    assert sum(len(group["params"]) for group in groups) == len(method.optimizer.parameters["model"])


def test_class_vectors_start_at_the_class_means_unless_the_recipe_says_otherwise(source, tmp_path, monkeypatch):
    found = {}
    for start in ("means", "random"):
        plain = recipe(source, "arcface", steps=1, rate=1e-9, class_vectors=start)
        outcome = train(plain, tmp_path / start, tensorboard=False)
        with safe_open(tmp_path / start / "classes.safetensors", "pt") as file:
            vectors = file.get_tensor("vectors")
        part = outcome.samples.part("train")
        z, y = (
            torch.from_numpy(embed(outcome.model, part)),
            torch.from_numpy(np.unique(part.labels, return_inverse=True)[1]),
        )
        means = torch.stack([z[y == k].mean(0) for k in range(len(vectors))]) - z.mean(0)
        found[start] = torch.nn.functional.cosine_similarity(vectors, means).min().item()
    assert found["means"] > 0.9 > found["random"]  # one step of batch norms lies between
    with pytest.raises(RecipeError, match="train.class_vectors"):
        recipe(source, "arcface", class_vectors="zeros")


def test_at_most_so_many_samples_of_a_class_evenly_spaced():
    labels = np.array([7] * 10 + [3] * 2 + [7] * 10 + [5])
    assert spread_over_classes(labels, 4).tolist() == [0, 5, 10, 11, 12, 17, 22]
    assert spread_over_classes(labels, 100).tolist() == list(range(23))


def test_many_classes_that_are_met_a_few_times_are_learned_from_the_first_steps_on():
    """300 classes, each met about three times: from random vectors the network ends below where it started."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(400), 4)
    hidden = rng.normal(size=(400, 6))[labels] + 0.5 * rng.normal(size=(1600, 6))
    x = np.hstack([hidden, 2 * rng.normal(size=(1600, 6))]) @ rng.normal(size=(12, 24)) + 3
    samples = Samples.of(FeatureArray(x.astype(np.float32)), labels)
    seen, held_out = samples.where(labels < 300), samples.where(labels >= 300)
    found = {}
    for start in ("means", "random"):
        torch.manual_seed(0)
        model = Embedder(EmbedderSpec("mlp", width=8, depth=2, dim=16), (24,))
        found["untrained"] = nearest_is_same(embed(model, held_out), held_out.labels)
        method = Supervised(model, ArcFace(300, 16, scale=16, margin=0.3), classes=torch.arange(300), loss_rate=3)
        if start == "means":
            start_class_vectors(method, seen)
        schedule = Schedule(30, 2e-3)
        for batch in Loader(seen, PKBatchSampler(seen.labels, 32, 4), Augment()).batches(0, schedule.steps):
            method.step(batch, schedule.lr_at(batch.step), batch.step / schedule.steps)
        found[start] = nearest_is_same(embed(model, held_out), held_out.labels)
    assert found["means"] > found["untrained"] + 0.05
    assert found["means"] > found["random"] + 0.05


def nearest_is_same(z: np.ndarray, labels: np.ndarray) -> float:
    """Share of samples whose nearest other one has their label."""
    s = z @ z.T - 3 * np.eye(len(z))
    return float((labels[s.argmax(1)] == labels).mean())


def test_a_recipe_builds_what_python_would(source):
    loss = recipe(source, "center").build_loss(7)
    assert isinstance(loss, Center) and isinstance(loss.base, NormFace) and tuple(loss.weight.shape) == (7, 8)
    assert isinstance(load("arcface").build_loss(11), ArcFace)
    assert "ArcFace(scale=16.0, margin=0.2)" in recipe(source, "arcface").title()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("loss.num_classes=5", "follows from the data"),
        ("loss.dim=5", "follows from the data"),
        ("loss.sampel=0.5", "did you mean 'sample'"),
        ("loss.margin=9", "margin is an angle"),
        ("loss.mode=hard", "recipe key loss.mode"),
    ],
)
def test_mistakes_are_one_line(key, says):
    with pytest.raises(RecipeError, match=says):
        load("arcface", [key])
