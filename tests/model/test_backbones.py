"""Pretrained weights are asked for when training begins, and never again: a run opens without a network."""

import http.server
import socket
import threading
import time
from types import SimpleNamespace
from urllib.error import URLError

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mettle.errors import MettleError, RecipeError
from mettle.model import Embedder, EmbedderSpec, backbones
from mettle.model.backbones import import_timm
from mettle.train import open_run_folder, train
from mettle.train.datamodule import prepare_samples
from mettle.train.from_recipe import build_model
from mettle.train.recipe import parse_recipe


@pytest.fixture
def asked(monkeypatch):
    """What timm is asked for; it is there, its weights would have to be fetched."""
    library, found = import_timm(), []
    create = library.create_model

    def noted(name, *rest, **options):
        found.append(options.pop("pretrained"))
        return create(name, *rest, pretrained=False, **options)

    monkeypatch.setattr(library, "create_model", noted)
    monkeypatch.setattr(backbones, "is_reachable", lambda address: True)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    place = tmp_path_factory.mktemp("pictures") / "pictures.npz"
    label = np.repeat(np.arange(6), 4)
    images = np.random.default_rng(0).integers(0, 255, (24, 32, 32, 3), np.uint8)
    np.savez(place, images=images, label=label, split=np.where(label < 4, 0, 2))
    return place


def recipe(source):
    return parse_recipe(
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
        train(one, tmp_path / "run", tensorboard=False, on_step=until(1))
    assert True in asked
    asked.clear()
    with pytest.raises(Halt):  # nothing to go on from: begun again, with the weights
        train(one, tmp_path / "run", tensorboard=False, on_step=until(2), resume=True)
    assert True in asked
    asked.clear()
    train(one, tmp_path / "run", tensorboard=False, resume=True)
    assert asked and True not in asked, "a checkpoint takes their place"
    asked.clear()
    run = open_run_folder(tmp_path / "run")
    model, biased = run.model(), run.biased_model()
    assert asked and True not in asked, "the weights of the run are in its folder"
    assert model.spec.pretrained and biased.spec.pretrained, "what it began with is still told"
    asked.clear()
    build_model(run.recipe, prepare_samples(run.recipe))
    assert True in asked, "the network that training began with"


def test_a_run_that_cannot_reach_anything_opens(source, tmp_path, asked, monkeypatch):
    train(recipe(source), tmp_path / "run", tensorboard=False)
    library = import_timm()
    create = library.create_model

    def unplugged(name, *rest, **options):
        if options.get("pretrained"):
            raise MettleError("no network")
        return create(name, *rest, **options)

    monkeypatch.setattr(library, "create_model", unplugged)
    run = open_run_folder(tmp_path / "run")
    assert run.model().dim == run.biased_model().dim == 4


SPEC = EmbedderSpec(backbone="timm/test_resnet", pretrained=True, dim=4)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub, and no network."""

    def unplugged(request, timeout):
        raise URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(backbones, "urlopen", unplugged)
    return tmp_path / "hub"


def test_without_a_network_one_line_says_at_once_what_would_do(hub):
    import_timm()  # its import takes seconds
    began = time.monotonic()
    with pytest.raises(RecipeError) as caught:
        Embedder(SPEC, (3, 32, 32))
    assert time.monotonic() - began < 5, "a hub's retries take a minute"
    said = str(caught.value)
    assert "test_resnet.r160_in1k" in said and "does not answer" in said and "train from scratch" in said
    assert f"{hub / 'models--timm--test_resnet.r160_in1k'} (with model.safetensors)" in said and "\n" not in said
    assert Embedder(SPEC, (3, 32, 32), load_pretrained=False)


def test_a_hub_that_is_switched_off_is_told(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="switched off"):
        Embedder(SPEC, (3, 32, 32))


def cached(hub, content=None):
    """Weights of timm's model as the hub's cache keeps them."""
    folder = hub / "models--timm--test_resnet.r160_in1k"
    file = folder / "snapshots" / "0123abc" / "model.safetensors"
    for place in (file.parent, folder / "refs"):
        place.mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abc")
    weights = import_timm().create_model("test_resnet").state_dict()
    if content is None:
        save_file({name: t.contiguous() for name, t in weights.items()}, file)
    else:
        file.write_bytes(content)
    return weights


def test_weights_in_the_cache_are_loaded_without_a_network(hub, monkeypatch):
    weights = cached(hub)

    def connected(*address):
        raise AssertionError("asked the network for weights that are here")

    monkeypatch.setattr(socket, "getaddrinfo", connected)
    found = Embedder(SPEC, (3, 32, 32)).backbone.state_dict()
    assert found and all(torch.equal(value, weights[name]) for name, value in found.items())


def test_damaged_weights_are_one_line(hub):
    cached(hub, b"no weights")
    with pytest.raises(RecipeError, match="cannot load the weights of timm/test_resnet") as caught:
        Embedder(SPEC, (3, 32, 32))
    assert "\n" not in str(caught.value)


def library(**config):
    empty = dict.fromkeys(("hf_hub_id", "hf_hub_filename", "url", "file", "tag", "custom_load"))
    return SimpleNamespace(get_pretrained_cfg=lambda name: SimpleNamespace(**empty | config))


def test_weights_from_an_address_are_looked_for_where_torch_keeps_them(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    one = library(url="https://weights.invalid/releases/net-1234.pth", tag="first")
    file = tmp_path / "torch" / "checkpoints" / "net-1234.pth"
    with pytest.raises(RecipeError, match=rf"weights net\.first .* weights\.invalid does not answer.* file {file} "):
        backbones.pretrained_options(one, "net")
    file.parent.mkdir(parents=True)
    file.touch()
    assert backbones.pretrained_options(one, "net") == {}
    with pytest.raises(RecipeError, match="timm has no pretrained weights for 'net'"):
        backbones.pretrained_options(library(), "net")


class Refusing(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_error(404)

    def log_message(self, *words):
        pass


def test_any_answer_shows_that_there_is_a_network(monkeypatch):
    monkeypatch.setattr(backbones, "PATIENCE", 0.5)
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/x"
        assert backbones.is_reachable(address)
        server.shutdown()
    assert not backbones.is_reachable(address)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not backbones.is_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}/x")
