"""What weights mean for a recipe, and for a run that is resumed."""

import json

import numpy as np
import pytest
import torch

from command_line import mettle as run_command
from mettle.errors import RunError
from mettle.model.backbones import build_backbone
from mettle.train import load, open_run_folder, train
from mettle.train.starting_weights import follow_starting_weights


class Halt(Exception):
    pass


def halt(step, line):
    raise Halt


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(4)
    state = build_backbone("torchvision/mobilenet_v2", (3, 32, 32), 1, 1).state_dict()
    torch.save(state, tmp_path / "w.pth")
    return tmp_path / "w.pth"


@pytest.fixture
def keys(source, weights):
    """Overrides that train a network of torchvision on a few patterns."""
    common = ["batch.classes=4", "batch.samples=2", "train.steps=2", "train.device=cpu", "batch.augment=none"]
    model = ["model.backbone=torchvision/mobilenet_v2", f"model.weights={weights}", "model.dim=8"]
    return [f"data.source={source}", "train.collapse_gap=0.0", *common, *model]


def test_open_keys_follow_and_written_ones_stay(keys):
    recipe, chosen, told = follow_starting_weights(load("supcon", keys))
    assert recipe.data.size == 224 and recipe.data.channels == 3 and recipe.data.crop == 0.875
    assert recipe.model["mean"] == [0.485, 0.456, 0.406] and recipe.model["pool"] == "average"
    assert chosen["data.size"] == 224 and "size 224, center crop 0.875, bilinear, mean 0.485" in told[0]
    written = ["data.size=48", "data.resize=pad", "data.interpolation=bicubic", "model.mean=[0.5,0.5,0.5]"]
    recipe, _, _ = follow_starting_weights(
        load("supcon", [*keys, *written, "model.std=[0.5,0.5,0.5]", "model.pool=gem"])
    )
    assert recipe.data.size == 48 and recipe.data.resize == "pad" and recipe.data.crop is None
    assert (
        recipe.data.interpolation == "bicubic" and recipe.model["mean"] == [0.5] * 3 and recipe.model["pool"] == "gem"
    )
    assert follow_starting_weights(load("supcon"))[1:] == ({}, ())


def test_a_run_that_began_from_weights_goes_on_and_notices_others(keys, tmp_path, weights, monkeypatch):
    recipe = load("supcon", [*keys, "data.size=32", "train.checkpoint_every=1"])
    train(recipe, tmp_path / "whole", tensorboard=False)
    folder = tmp_path / "cut"
    with pytest.raises(Halt):
        train(recipe, folder, tensorboard=False, on_step=halt)
    content = weights.read_bytes()
    state = torch.load(weights, weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in state.items()}, weights)
    with pytest.raises(RunError, match="is not the file that the run began from"):
        train(recipe, folder, tensorboard=False, resume=True)
    weights.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    relative = load("supcon", [*keys, "data.size=32", "train.checkpoint_every=1"])
    assert train(relative, folder, tensorboard=False, resume=True).finished
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    contract = json.loads((folder / "contract.json").read_text())
    assert contract["pretrained"]["origin"] == str(weights) and len(contract["pretrained"]["sha256"]) == 64
    weights.unlink()
    assert open_run_folder(folder).model().dim == 8, "a run that is there needs its weights no more"


def test_the_command_line_goes_on_from_a_run(keys, tmp_path, source):
    plain = [f"data.source={source}", "batch.classes=4", "batch.samples=2", "train.steps=1", "train.device=cpu"]
    first = train(
        load("supcon", [*plain, "model.width=4", "model.depth=2", "model.dim=6"]), tmp_path / "a", tensorboard=False
    )
    options = [word for key in plain for word in ("--set", key)]
    where = ["--runs", str(tmp_path), "--name", "b", "--no-report", "--from", str(tmp_path / "a")]
    said = run_command(
        "train", "arcface", *where, *options, "--set", "train.rate=1e-12", "--set", "train.weight_decay=0"
    )
    assert "the network starts from" in said
    second = open_run_folder(tmp_path / "b")
    assert second.contract()["pretrained"]["sha256"] == first.run.contract()["weights"]
    a, b = first.model.state_dict(), second.model().state_dict()
    assert all(np.allclose(a[name], b[name], atol=1e-5) for name in a if name.endswith(("weight", "bias")))
