"""Losses before and after a neck, end to end: what is logged, kept, resumed, opened and refused."""

import json

import pytest
import torch
from torch import nn

import mettle
from mettle.data import Samples, read
from mettle.errors import InputError, RecipeError
from mettle.losses import CosFace, SupCon, Triplet, WeightedSum
from mettle.model import Embedder, EmbedderSpec, embed
from mettle.model.inference import embed_items
from mettle.train import HardnessAware, Supervised, load, open_run_folder
from mettle.train.from_recipe import build_method_and_loader, train
from mettle.train.methods.supervised import start_class_vectors
from mettle.train.recipe import parse_recipe

from .conftest import tiny
from .test_from_recipe import Stop, content, until

LOSS = {
    "kind": "WeightedSum",
    "losses": [{"kind": "SupCon", "temperature": 0.1}, {"kind": "CosFace", "scale": 8.0, "margin": 0.2}],
    "weights": [0.5, {"kind": "linear", "start": 1.0, "end": 0.2}],
    "spaces": ["before", "after"],
}


def two_spaces(source, embedding: str = "before", **train_options):
    table = tiny(source, **train_options).model_dump(mode="json")
    table["model"] |= {"neck": "batchnorm", "embedding": embedding}
    return parse_recipe(table | {"loss": LOSS})


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spaces") / "run"
    train(two_spaces(source, ema=0.9), folder, tensorboard=False)
    return folder


def test_a_resumed_run_with_a_neck_is_bit_identical(source, tmp_path, whole):
    folder, recipe = tmp_path / "run", two_spaces(source, ema=0.9)
    for cut in (3, 8):
        with pytest.raises(Stop):
            train(recipe, folder, resume=folder.exists(), tensorboard=False, on_step=until(cut))
    train(recipe, folder, resume=True, tensorboard=False)
    assert content(folder) == content(whole)


def test_values_and_gradient_norms_of_both_parts_are_logged(whole):
    lines = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    for name in ("SupCon", "CosFace"):
        assert all(line[f"{name} loss"] > 0 and line[f"{name} gradient"] > 0 for line in lines if "loss" in line)


@pytest.mark.parametrize("embedding", ["before", "after"])
def test_the_artifact_embeds_with_the_chosen_one(source, tmp_path, embedding):
    done = train(two_spaces(source, embedding), tmp_path / "run", tensorboard=False)
    run = open_run_folder(tmp_path / "run")
    assert run.contract()["model"]["neck"] == "batchnorm" and run.contract()["model"]["embedding"] == embedding
    model, part = run.model(), done.samples.part("test")
    assert isinstance(model, Embedder) and int(model.neck.norm.num_batches_tracked) == 12
    z, before = embed(model, part), torch.from_numpy(embed(model, part, before_neck=True))
    with torch.no_grad():
        wanted = before if embedding == "before" else model.neck(before)
    torch.testing.assert_close(torch.from_numpy(z), wanted)
    assert torch.equal(torch.from_numpy(embed(done.model.eval(), part)), torch.from_numpy(z))


def test_the_average_of_the_weights_has_buffers_of_its_own_for_the_neck(source):
    method, loader = build_method_and_loader(two_spaces(source, ema=0.9), _samples(source))
    for step, batch in enumerate(loader.batches(0, 3)):
        method.step(batch, 1e-3, step / 3)
    average = method.final_module().neck.norm
    assert not torch.equal(average.running_mean, method.model.neck.norm.running_mean)
    assert average.running_mean.abs().sum() > 0


def test_class_vectors_start_at_means_after_the_neck(source):
    method, _ = build_method_and_loader(two_spaces(source), _samples(source))
    part = _samples(source).part("train")
    before = {name: value.clone() for name, value in method.model.state_dict().items()}
    start_class_vectors(method, part)
    z = torch.from_numpy(embed(method.model, part, before_neck=True))
    scaled = nn.functional.normalize((z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt(), dim=1)
    classes = method.loss.losses["CosFace"]
    for k, label in enumerate(method.classes.tolist()):
        mean = (scaled - scaled.mean(0))[torch.from_numpy(part.labels == label)].mean(0)
        torch.testing.assert_close(classes.weight[k].detach(), mean / mean.norm(), rtol=1e-4, atol=1e-5)
    for name, value in method.model.state_dict().items():
        assert torch.equal(value, before[name])


def _samples(source) -> Samples:
    return read(source)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12 * 12, 6)

    def forward(self, x):
        return self.layer(x.flatten(1))


def test_a_module_of_ones_own_gets_a_neck(source, tmp_path):
    pytest.importorskip("onnxscript")
    loss = WeightedSum([SupCon(0.2), CosFace(6, 6, scale=8.0)], spaces=["before", "after"])
    options = {"folder": tmp_path / "run", "steps": 4, "batch": (4, 3), "quiet": True, "device": "cpu"}
    run = mettle.fit(Net(), read(source), loss, neck="batchnorm", embedding="after", **options)
    assert run.contract()["model"]["neck"] == "batchnorm"
    x = torch.rand(5, 1, 12, 12)
    wanted = embed_items(run.model(), x, None)
    opened = mettle.open_run(tmp_path / "run", Net())
    assert (opened.embed(x) == wanted).all()
    torch.testing.assert_close(
        torch.from_numpy(mettle.open_run(tmp_path / "run").embed(x)), torch.from_numpy(wanted), rtol=1e-3, atol=1e-4
    )
    with torch.no_grad():
        torch.testing.assert_close(opened.model().neck(opened.model().before_neck(x)), torch.from_numpy(wanted))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model.neck": "none"}, "after a neck, and the model has none: set model.neck = 'batchnorm'"),
        ({"model.neck": "none", "model.embedding": "after"}, "model.embedding = 'after' needs a neck"),
        ({"loss.spaces": ["before", "behind"]}, "'before' or 'after'"),
        (
            {"loss": {"kind": "Triplet"}, "train.method": "hardness-aware"},
            "model.neck needs train.method = 'supervised', got 'hardness-aware'",
        ),
        ({"model.backbone": "shop:Net", "model.neck": "batch"}, "model.neck = 'batch' is not known"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(source, values, said):
    with pytest.raises(RecipeError, match=said):
        two_spaces(source).with_values(values)


def test_a_neck_that_nothing_uses_and_one_that_is_missing_are_refused(source):
    with pytest.raises(InputError, match="nothing uses the neck"):
        Supervised(Embedder(EmbedderSpec("mlp", dim=4, neck="batchnorm"), (6,)), SupCon())
    with pytest.raises(InputError, match="has none: set model.neck"):
        Supervised(Embedder(EmbedderSpec("mlp", dim=4), (6,)), WeightedSum([SupCon()], spaces=["after"]))


def test_a_neck_is_asked_for_in_one_place(source, tmp_path):
    options = {"folder": tmp_path / "run", "steps": 2, "batch": (4, 3), "quiet": True, "device": "cpu"}
    spec = EmbedderSpec("mlp", width=1, depth=1, dim=4)
    with pytest.raises(InputError, match=r"EmbedderSpec\(neck='batchnorm'\)"):
        mettle.fit(spec, read(source), SupCon(), neck="batchnorm", **options)
    with pytest.raises(InputError, match="nothing uses the neck"):
        mettle.fit(Net(), read(source), SupCon(), neck="batchnorm", **options)
    assert not (tmp_path / "run").exists()
    model = Embedder(EmbedderSpec("mlp", dim=4, neck="batchnorm"), (6,))
    with pytest.raises(InputError, match="HardnessAware takes a model without a neck"):
        HardnessAware(Triplet(), model, classes=torch.arange(3))


def test_frozen_parameters_of_a_network_are_left_alone(source, tmp_path):
    net = Net()
    net.layer.bias.requires_grad_(False)
    before = net.layer.bias.clone()
    mettle.fit(net, read(source), SupCon(), folder=tmp_path / "run", steps=2, batch=(4, 3), quiet=True, device="cpu")
    assert torch.equal(net.layer.bias, before)


def test_the_shipped_recipe_is_the_one_of_the_page():
    recipe = load("two-spaces")
    assert recipe.loss_template.takes_after and recipe.spec().neck == "batchnorm"
    assert "DASupCon" not in recipe.title() and "CosFace(scale=24.0, margin=0.2)" in recipe.title()
