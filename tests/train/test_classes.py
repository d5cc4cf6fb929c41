"""Class-vector losses through the trainer: numbering, state, export."""

import json

import pytest
import torch
from safetensors import safe_open

from mettle.errors import RecipeError
from mettle.losses import ArcFace, Center, NormFace
from mettle.model.embed import embed
from mettle.train import load
from mettle.train.recipe import parse
from mettle.train.session import assemble, prepare, train

from .conftest import make_npz, tiny
from .test_session import Stop, content, until

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
    return parse(plain | {"loss": KINDS[kind], "train": plain["train"] | {"loss_rate": 2.0}})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_and_a_resumed_run_is_bit_identical(source, tmp_path, kind):
    whole = train(recipe(source, kind), tmp_path / "whole", tensorboard=False)
    assert whole.finished
    with pytest.raises(Stop):
        train(recipe(source, kind), tmp_path / "cut", tensorboard=False, progress=until(6))
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
    method, _ = assemble(recipe(source, "arcface"), prepare(recipe(source, "arcface")))
    assert {group["pace"] for group in method.optimiser.param_groups} == {1.0, 2.0}
    assert sum(len(group["params"]) for group in method.optimiser.param_groups) == len(method.parameters)


def test_a_recipe_builds_what_python_would(source):
    loss = recipe(source, "center").criterion(7)
    assert isinstance(loss, Center) and isinstance(loss.base, NormFace) and tuple(loss.weight.shape) == (7, 8)
    assert isinstance(load("arcface").criterion(11), ArcFace)
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
