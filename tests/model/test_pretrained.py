"""Where an embedder starts: files, runs, graphs and libraries, what does not fit, and what the images are to be."""

import hashlib
import json
import socket
from urllib.error import URLError

import numpy as np
import onnx
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import nn

import mettle
from mettle.errors import InputError, RecipeError
from mettle.losses import SupCon
from mettle.model import Embedder, EmbedderSpec, backbones, plan_start
from mettle.model.backbones import build_backbone, import_timm, import_torchvision
from mettle.train import train
from mettle.train.recipe import parse_recipe

SHAPE = (3, 32, 32)


@pytest.fixture(autouse=True)
def unplugged(tmp_path, monkeypatch):
    """No network, and empty caches."""

    def refuse(request, timeout):
        raise URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr(backbones, "urlopen", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))


def saved_network(path, name="resnet18", seed=5, **changes):
    """Weights of a whole classifier of torchvision, with its names, in a file."""
    torch.manual_seed(seed)
    net = import_torchvision().models.get_model(name, weights=None)
    state = {key: changes.get(key, tensor) for key, tensor in net.state_dict().items()}
    state = {key: tensor for key, tensor in state.items() if tensor is not None}
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return net.eval()


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_file_is_loaded_and_its_hash_and_its_head_are_told(tmp_path, suffix):
    path = tmp_path / f"net.{suffix}"
    net = saved_network(path)
    model = Embedder(EmbedderSpec("torchvision/resnet18", weights=str(path)), SHAPE)
    assert model.pretrained.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert set(model.pretrained.left_out) == {"fc.weight", "fc.bias"}
    assert f"left out: {', '.join(model.pretrained.left_out)}" in model.pretrained.describe()
    x = torch.rand(2, *SHAPE)
    wanted = net.fc(model.pool(model.backbone.eval()(x)))
    assert torch.allclose(wanted, net(x), atol=1e-5)
    assert Embedder(model.spec, SHAPE, load_pretrained=False).pretrained is None


@pytest.mark.parametrize(
    "name",
    [
        "mobilenet_v2",
        "shufflenet_v2_x0_5",
        "mnasnet0_5",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("googlenet", "densenet121", "regnet_y_400mf", "swin_t")),
    ],
)
def test_networks_of_torchvision_give_what_their_classifier_sees(name):
    torch.manual_seed(0)
    options = {"aux_logits": False, "init_weights": False, "transform_input": True} if name == "googlenet" else {}
    net = import_torchvision().models.get_model(name, weights=None, **options).eval()
    found = build_backbone(f"torchvision/{name}", (3, 64, 64), 1, 1).eval()
    state = found.state_dict()
    assert set(state) <= set(net.state_dict()), "tensors keep their names"
    found.load_state_dict({key: net.state_dict()[key] for key in state})
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        features = found(x)
        features = features.mean((2, 3)) if features.ndim == 4 else features
        head = next(getattr(net, part) for part in ("classifier", "fc", "head") if hasattr(net, part))
        assert torch.allclose(head(features), net(x), atol=1e-4)


def test_networks_of_torchvision_that_cannot_be_are_refused():
    with pytest.raises(RecipeError, match="torchvision has no model 'mobilenet_v4'; did you mean 'mobilenet_v2'"):
        build_backbone("torchvision/mobilenet_v4", SHAPE, 1, 1)
    with pytest.raises(RecipeError, match="set data.channels = 3"):
        build_backbone("torchvision/mobilenet_v2", (1, 32, 32), 1, 1)
    with pytest.raises(
        RecipeError, match="'torchvision/alexnet' takes no images of 16 x 16 pixels: .*set data.size"
    ) as caught:
        build_backbone("torchvision/alexnet", (3, 16, 16), 1, 1)
    assert "\n" not in str(caught.value)


def test_names_with_a_prefix_are_found_and_others_are_named(tmp_path):
    torch.manual_seed(0)
    own = build_backbone("convnet", SHAPE, 4, 2).state_dict()
    spec = EmbedderSpec(width=4, depth=2, dim=8, weights=str(tmp_path / "w.safetensors"))
    save_file({f"module.{name}": t for name, t in own.items()}, spec.weights)
    found = Embedder(spec, SHAPE).backbone.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
    save_file({f"other{k}": t for k, (name, t) in enumerate(own.items())}, spec.weights)
    with pytest.raises(
        RecipeError, match=r"lacks 10 of the 12 tensors .*\(0.weight, 0.bias|lacks \d+ of the"
    ) as caught:
        Embedder(spec, SHAPE)
    assert "weights_match = 'order'" in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_in_order_under_other_names(tmp_path):
    torch.manual_seed(0)
    own = build_backbone("convnet", SHAPE, 4, 2).state_dict()
    order = {"width": 4, "depth": 2, "dim": 8, "weights": str(tmp_path / "w.pth"), "weights_match": "order"}
    given = {f"_{name}": t for name, t in own.items()} | {"_fc.weight": torch.zeros(10, 8)}
    torch.save(given, order["weights"])
    model = Embedder(EmbedderSpec(**order), SHAPE)
    assert all(torch.equal(model.backbone.state_dict()[name], t) for name, t in own.items())
    assert model.pretrained.left_out == ("_fc.weight",)
    torch.save(dict(reversed(given.items())), order["weights"])
    with pytest.raises(RecipeError, match="have other shapes than those of the backbone, first 0.weight"):
        Embedder(EmbedderSpec(**order), SHAPE)
    save_file(given, tmp_path / "w.safetensors")
    with pytest.raises(RecipeError, match="keeps no order"):
        Embedder(EmbedderSpec(**(order | {"weights": str(tmp_path / "w.safetensors")})), SHAPE)
    torch.save(dict(list(given.items())[:3]), order["weights"])
    with pytest.raises(RecipeError, match="has 3 tensors and the backbone"):
        Embedder(EmbedderSpec(**order), SHAPE)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_files_that_hold_no_tensors_are_one_line(tmp_path, capsys):
    for content, name in ((b"no", "a.safetensors"), (b"no", "a.pth")):
        (tmp_path / name).write_bytes(content)
    torch.save({"a": Evil()}, tmp_path / "b.pth")
    torch.save({"a": 1}, tmp_path / "c.pth")
    for name in ("a.safetensors", "a.pth", "b.pth", "c.pth", "absent.pth"):
        with pytest.raises(RecipeError, match=r"model\.weights: .*(cannot read|no state_dict|no file)") as caught:
            Embedder(EmbedderSpec(weights=str(tmp_path / name)), SHAPE)
        assert "\n" not in str(caught.value)
    assert "executed" not in capsys.readouterr().out


def test_weights_of_torchvision_offline_say_what_would_do(tmp_path):
    spec = EmbedderSpec("torchvision/mobilenet_v2", weights="IMAGENET1K_V1", dim=8)
    with pytest.raises(
        RecipeError, match=r"download\.pytorch\.org does not answer.*mobilenet_v2-b0353104\.pth"
    ) as caught:
        Embedder(spec, SHAPE)
    assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="no 'IMAGENET1K_V3'"):
        Embedder(EmbedderSpec("torchvision/mobilenet_v2", weights="IMAGENET1K_V3"), SHAPE)
    with pytest.raises(RecipeError, match="is no file"):
        plan_start(EmbedderSpec("convnet", weights="IMAGENET1K_V1"))
    (tmp_path / "torch" / "checkpoints").mkdir(parents=True)
    saved_network(tmp_path / "torch" / "checkpoints" / "mobilenet_v2-b0353104.pth", "mobilenet_v2")
    assert Embedder(spec, SHAPE).pretrained.origin == "MobileNet_V2_Weights.IMAGENET1K_V1"


def test_images_are_as_the_weights_had_them(tmp_path):
    saved_network(tmp_path / "w.pth", "mobilenet_v2")
    for spec in (
        EmbedderSpec("torchvision/mobilenet_v2", weights="IMAGENET1K_V1"),
        EmbedderSpec("torchvision/mobilenet_v2", weights=str(tmp_path / "w.pth")),
    ):
        way = plan_start(spec).preprocess
        assert (way.size, way.crop, way.interpolation) == ((224, 224), 0.875, "bilinear")
        assert way.mean == (0.485, 0.456, 0.406) and way.std == (0.229, 0.224, 0.225)
    way = plan_start(EmbedderSpec("timm/resnet18.a1_in1k", pretrained=True)).preprocess
    assert (way.size, way.crop, way.interpolation) == ((224, 224), 0.95, "bicubic")
    assert plan_start(EmbedderSpec("timm/tf_efficientnet_lite0", weights=str(tmp_path / "w.pth"))).preprocess.mean == (
        0.5,
        0.5,
        0.5,
    )
    assert plan_start(EmbedderSpec("convnet", weights=str(tmp_path / "w.pth"))).preprocess is None
    assert plan_start(EmbedderSpec("timm/resnet18")).preprocess is None, "from scratch nothing is asked for"


def test_tags_of_timm_are_known(tmp_path):
    with pytest.raises(RecipeError, match="weights resnet18.a1_in1k of timm are not on this machine"):
        Embedder(EmbedderSpec("timm/resnet18.a1_in1k", pretrained=True), SHAPE)
    with pytest.raises(RecipeError, match="timm has no weights 'resnet18.a1_in2k'; did you mean 'a1_in1k'"):
        Embedder(EmbedderSpec("timm/resnet18.a1_in2k", pretrained=True), SHAPE)
    assert Embedder(EmbedderSpec("timm/test_resnet.r160_in1k", dim=4), SHAPE).pretrained is None


def timm_folder(place):
    """A folder as timm writes it: configuration and weights."""
    place.mkdir(parents=True)
    torch.manual_seed(3)
    net = import_timm().create_model("test_resnet")
    save_file({name: t.contiguous() for name, t in net.state_dict().items()}, place / "model.safetensors")
    config = {
        "input_size": [3, 48, 48],
        "mean": [0.4] * 3,
        "std": [0.3] * 3,
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }
    (place / "config.json").write_text(json.dumps({"architecture": "test_resnet", "pretrained_cfg": config}))
    return net


def test_folders_of_timm_here_and_in_the_cache_of_its_hub(tmp_path):
    net = timm_folder(tmp_path / "local")
    cache = tmp_path / "hub" / "models--me--net"
    timm_folder(cache / "snapshots" / "0123abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abc")
    for name in (f"local-dir:{tmp_path / 'local'}", "hf-hub:me/net", "timm/hf-hub:me/net"):
        plan = plan_start(EmbedderSpec(name, dim=4))
        assert plan.preprocess.size == (48, 48) and plan.preprocess.mean == (0.4, 0.4, 0.4)
        model = Embedder(EmbedderSpec(**(plan.model | {"dim": 4})), SHAPE)
        assert model.spec.backbone == "timm/test_resnet"
        assert torch.equal(next(model.backbone.parameters()), next(net.parameters()))
    with pytest.raises(
        RecipeError, match=r"hf-hub:me/other is not on this machine and huggingface\.co does not answer"
    ):
        plan_start(EmbedderSpec("hf-hub:me/other"))
    with pytest.raises(RecipeError, match="has no config.json"):
        plan_start(EmbedderSpec(f"local-dir:{tmp_path}"))
    (tmp_path / "local" / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match="names no architecture"):
        plan_start(EmbedderSpec(f"local-dir:{tmp_path / 'local'}"))


def test_mean_and_std_are_checked_and_used():
    model = Embedder(EmbedderSpec(width=4, dim=4, mean=[0.5] * 3, std=[0.25] * 3), SHAPE)
    model.fit_normalization(torch.rand(8, *SHAPE))
    assert torch.equal(model.input_mean.flatten(), torch.full((3,), 0.5)) and model.has_given_normalization
    assert model.spec.to_table()["mean"] == [0.5] * 3
    with pytest.raises(RecipeError, match="3 and 3 numbers, inputs have 1 channels"):
        Embedder(EmbedderSpec(mean=[0.5] * 3, std=[0.5] * 3), (1, 32, 32))
    for wrong in ({"mean": [0.5]}, {"mean": [0.5], "std": [0.0]}, {"mean": ["a"], "std": [1.0]}):
        with pytest.raises(RecipeError, match=r"model\.(mean|std)"):
            EmbedderSpec(**wrong)
    with pytest.raises(RecipeError, match="say two things"):
        EmbedderSpec("timm/resnet18", pretrained=True, weights="w.pth")


@pytest.fixture
def source(tmp_path):
    label = np.repeat(np.arange(6), 4)
    images = np.random.default_rng(0).integers(0, 255, (24, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "p.npz", images=images, label=label, split=np.where(label < 4, 0, 2))
    return tmp_path / "p.npz"


def recipe(source, **model):
    return parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"classes": 4, "samples": 2, "augment": "none"},
            "model": {"width": 4, "depth": 2, "dim": 8} | model,
            "train": {"steps": 2, "device": "cpu"},
        }
    )


def test_a_run_is_gone_on_from_and_the_contract_tells_it(source, tmp_path):
    first = train(recipe(source), tmp_path / "a", tensorboard=False)
    told = []
    again = recipe(source, dim=6, weights=str(tmp_path / "a")).with_values(
        {"train.rate": 1e-9, "train.weight_decay": 0.0}
    )
    second = train(again, tmp_path / "b", tensorboard=False, on_note=told.append)
    contract = second.run.contract()
    assert contract["pretrained"]["sha256"] == first.run.contract()["weights"]
    assert set(contract["pretrained"]["left_out"]) == {"head.weight", "head.bias"}, "another length of embeddings"
    assert any("starts from" in note and "left out: head." in note for note in told)
    a, b = first.model.state_dict(), second.model.state_dict()
    assert torch.allclose(a["backbone.0.weight"], b["backbone.0.weight"], atol=1e-6)
    assert torch.equal(a["input_mean"], b["input_mean"])
    with pytest.raises(RecipeError, match="no finished run"):
        plan_start(EmbedderSpec(weights=str(tmp_path)))


def write_graph(path, features=12):
    """An encoder as a graph: pixels times a matrix."""
    matrix = np.random.default_rng(0).normal(size=(3 * 32 * 32, features)).astype(np.float32)
    nodes = [
        onnx.helper.make_node("Flatten", ["input"], ["flat"]),
        onnx.helper.make_node("MatMul", ["flat", "matrix"], ["embedding"]),
    ]
    given = onnx.helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, ["batch", *SHAPE])
    found = onnx.helper.make_tensor_value_info("embedding", onnx.TensorProto.FLOAT, ["batch", features])
    graph = onnx.helper.make_graph(nodes, "encoder", [given], [found], [onnx.numpy_helper.from_array(matrix, "matrix")])
    opset = onnx.helper.make_opsetid("", 17)
    path.write_bytes(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString())
    return torch.from_numpy(matrix)


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_a_graph_is_an_encoder_that_stays_as_it_is(source, tmp_path, ema):
    matrix = write_graph(tmp_path / "encoder.onnx")
    one = recipe(source, weights=str(tmp_path / "encoder.onnx"), head="linear").with_values({"train.ema": ema})
    found = train(one, tmp_path / "run", tensorboard=False)
    x = torch.rand(3, *SHAPE)
    with torch.no_grad():
        features = found.model.features(x)
        assert torch.allclose(features, x.flatten(1) @ matrix, atol=1e-3)
        wanted = nn.functional.normalize(found.model.head(features), dim=1)
        (tmp_path / "encoder.onnx").unlink()
        assert torch.allclose(found.run.model()(x), wanted, atol=1e-6), "the run holds the graph"
    assert found.run.contract()["model"]["width"] == 12


def test_graphs_that_cannot_be_are_one_line(tmp_path):
    write_graph(tmp_path / "encoder.onnx")
    with pytest.raises(RecipeError, match="nothing else that could be"):
        plan_start(EmbedderSpec(weights=str(tmp_path / "encoder.onnx"), head="none"))
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(RecipeError, match="no ONNX"):
        plan_start(EmbedderSpec(weights=str(tmp_path / "bad.onnx")))


def test_fit_starts_from_weights_and_prepares_images_as_they_had_them(tmp_path):
    saved_network(tmp_path / "w.pth", "mobilenet_v2")
    images = [(np.full((32, 32, 3), 8 * k, np.uint8), k // 3) for k in range(18)]
    told = {"folder": tmp_path / "run", "steps": 1, "batch": (2, 2), "device": "cpu", "quiet": True, "freeze": "all"}
    model = "torchvision/mobilenet_v2"
    labels = [label for _, label in images]
    run = mettle.fit(model, images, SupCon(), labels=labels, weights=tmp_path / "w.pth", **told)
    contract = run.run_folder.contract()
    assert contract["pretrained"]["origin"].endswith("w.pth") and contract["model"]["mean"] == [0.485, 0.456, 0.406]
    assert any("whole backbone is frozen" in note for note in run.notes)
    with pytest.raises(InputError, match="weights= is for a network that is named"):
        mettle.fit(nn.Linear(3, 3), images, SupCon(), weights="w.pth", **told)
