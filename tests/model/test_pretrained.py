"""Pretrained weights are asked for when training begins, and never again: a run opens without a network."""

import numpy as np
import pytest

from mettle.errors import MettleError
from mettle.model.vision import timm
from mettle.train import open_run, train
from mettle.train.recipe import parse
from mettle.train.session import new_model, prepare
from mettle.train.two_encoder import biased_model


@pytest.fixture
def asked(monkeypatch):
    """What timm is asked for; it is there, its weights would have to be fetched."""
    library, found = timm(), []
    create = library.create_model

    def noted(name, *rest, **options):
        found.append(options.pop("pretrained"))
        return create(name, *rest, pretrained=False, **options)

    monkeypatch.setattr(library, "create_model", noted)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    place = tmp_path_factory.mktemp("pictures") / "pictures.npz"
    label = np.repeat(np.arange(6), 4)
    images = np.random.default_rng(0).integers(0, 255, (24, 32, 32, 3), np.uint8)
    np.savez(place, images=images, label=label, split=np.where(label < 4, 0, 2))
    return place


def recipe(source):
    return parse(
        {
            "data": {"source": str(source)},
            "batch": {"size": 4, "views": 2, "augment": "none"},
            "model": {"backbone": "timm/test_resnet", "pretrained": True, "dim": 4},
            "loss": {"kind": "InfoNCE", "difficulty": {"kind": "Relative"}},
            "train": {"method": "two-encoder", "steps": 2, "checkpoint_every": 1, "device": "cpu"},
        }
    )


class Halt(Exception):
    pass


def until(last):
    def progress(step, line):
        if step == last:
            raise Halt

    return progress


def test_weights_are_asked_for_once_when_training_begins(source, tmp_path, asked):
    one = recipe(source)
    with pytest.raises(Halt):  # before the first checkpoint
        train(one, tmp_path / "run", tensorboard=False, progress=until(1))
    assert True in asked
    asked.clear()
    with pytest.raises(Halt):  # nothing to go on from: begun again, with the weights
        train(one, tmp_path / "run", tensorboard=False, progress=until(2), resume=True)
    assert True in asked
    asked.clear()
    train(one, tmp_path / "run", tensorboard=False, resume=True)
    assert asked and True not in asked, "a checkpoint takes their place"
    asked.clear()
    run = open_run(tmp_path / "run")
    model, biased = run.model(), biased_model(run)
    assert asked and True not in asked, "the weights of the run are in its folder"
    assert model.spec.pretrained and biased.spec.pretrained, "what it began with is still told"
    asked.clear()
    new_model(run.recipe, prepare(run.recipe))
    assert True in asked, "the network that training began with"


def test_a_run_that_cannot_reach_anything_opens(source, tmp_path, asked, monkeypatch):
    train(recipe(source), tmp_path / "run", tensorboard=False)
    library = timm()
    create = library.create_model

    def unplugged(name, *rest, **options):
        if options.get("pretrained"):
            raise MettleError("no network")
        return create(name, *rest, **options)

    monkeypatch.setattr(library, "create_model", unplugged)
    run = open_run(tmp_path / "run")
    assert run.model().spec.dim == biased_model(run).spec.dim == 4
