"""LoRA by peft: additions train, the rest stays, runs resume, and what is saved needs no peft."""

import sys

import numpy as np
import pytest
import torch

from mettle.errors import RecipeError
from mettle.model import Embedder, EmbedderSpec
from mettle.model.backbones import import_torchvision
from mettle.train import open_run_folder, train
from mettle.train.lora import LoraSettings, add_lora, import_peft, merge_lora
from mettle.train.recipe import parse_recipe

import_torchvision()  # which peft imports, and which does not import by itself beside every build of torch
pytest.importorskip("peft")


class Halt(Exception):
    pass


def halt(step, line):
    if step == 3:
        raise Halt


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(8), 5)
    tiles = rng.integers(0, 255, (8, 16, 16, 3))
    images = (tiles[label] + rng.normal(0, 20, (40, 16, 16, 3))).clip(0, 255).astype(np.uint8)
    np.savez(tmp_path / "p.npz", images=images, label=label, split=np.where(label < 5, 0, 2))
    return tmp_path / "p.npz"


def recipe(source, **settings):
    common = {"steps": 6, "checkpoint_every": 2, "device": "cpu", "collapse_gap": 0.0, "rate": 1e-2}
    return parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"classes": 4, "samples": 2, "augment": "none"},
            "model": {"width": 4, "depth": 2, "dim": 8},
            "train": {**common, "lora": {"rank": 2, "alpha": 4.0}, **settings},
        }
    )


def embedder(**spec):
    torch.manual_seed(0)
    return Embedder(EmbedderSpec(**({"width": 4, "depth": 2, "dim": 8} | spec)), (3, 16, 16)).eval()


def test_additions_start_at_nothing_and_are_merged_without_a_trace():
    import_peft()
    model, x = embedder(), torch.rand(3, 3, 16, 16)
    plain, names = model(x), set(model.state_dict())
    assert add_lora(model, LoraSettings(rank=2)) == ("0", "4")
    assert torch.allclose(model(x), plain, atol=1e-6)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name or name.startswith("head.") for name in trained)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    changed = model(x)
    assert not torch.allclose(changed, plain, atol=1e-3)
    merge_lora(model)
    assert torch.allclose(model(x), changed, atol=1e-5) and set(model.state_dict()) == names


@pytest.mark.parametrize("settings", [{}, {"ema": 0.5}, {"layer_decay": 0.5}])
def test_a_run_with_lora_resumes_bit_for_bit_and_needs_no_peft(source, tmp_path, monkeypatch, settings):
    one, told = recipe(source, **settings), []
    whole = train(one, tmp_path / "whole", tensorboard=False, on_note=told.append)
    assert any(note.startswith("LoRA of rank 2 on 2 layers") for note in told)
    with pytest.raises(Halt):
        train(one, tmp_path / "cut", tensorboard=False, on_step=halt)
    assert train(one, tmp_path / "cut", tensorboard=False, resume=True).finished
    content = (tmp_path / "whole/model.safetensors").read_bytes()
    assert (tmp_path / "cut/model.safetensors").read_bytes() == content
    monkeypatch.setitem(sys.modules, "peft", None)
    found, before = open_run_folder(tmp_path / "whole").model(), embedder()
    x = torch.rand(2, 3, 16, 16)
    assert torch.allclose(found(x), whole.model.eval()(x), atol=1e-6)
    for name, tensor in found.state_dict().items():
        if name.startswith("backbone.") and "running" in name:
            assert torch.equal(tensor, before.state_dict()[name]), "statistics stay"
    assert not torch.equal(found.state_dict()["backbone.0.weight"], before.state_dict()["backbone.0.weight"])


def test_layers_by_name():
    assert add_lora(embedder(), LoraSettings(rank=2, targets=["4"])) == ("4",)
    with pytest.raises(RecipeError, match="no linear layer or convolution named"):
        add_lora(embedder(), LoraSettings(targets=["qkv"]))
