"""Optimizers, schedules, groups, averages and accumulation: by name, in every method, resumed bit for bit."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from mettle.data import Augment, Loader, Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import InputError, RecipeError
from mettle.losses import SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.train import Supervised, load, open_run_folder, train
from mettle.train.optim import OPTIMIZERS, SCHEDULES, TORCH_SCHEDULES, Schedule, build_optimizer, build_shape
from mettle.train.recipe import parse_recipe
from mettle.train.trainer import count_steps

from .conftest import tiny
from .methods.test_base import labelled, moved, network
from .test_from_recipe import Stop, content, until

# What every method has, each with a value that changes the outcome.
SETTINGS = {
    "optimizer": {"optimizer": {"kind": "SGD", "momentum": 0.9, "nesterov": True}, "clip": 1.0},
    "schedule": {"schedule": "one-cycle"},
    "torch schedule": {"schedule": {"kind": "StepLR", "step_size": 2, "gamma": 0.5}},
    "clip": {"clip": 0.01, "optimizer": "SGD"},
    "ema": {"ema": 0.5},
    "late ema": {"ema": 0.5, "ema_start": 0.6},
    "accumulate": {"accumulate": 2},
    "backbone": {"backbone_rate": 0.1},
    "layer decay": {"layer_decay": 0.3},
    "freeze": {"freeze": "all"},
    "freeze at first": {"freeze": "4", "freeze_steps": 4},
    "epochs": {"epochs": 2},
}
METHODS = {
    "supervised": ({"kind": "SupCon"}, {"classes": 4, "samples": 2}),
    "class vectors": ({"kind": "ArcFace"}, {"classes": 4, "samples": 2}),
    "similarity": ({"kind": "SimilarityClassification"}, {"size": 8}),
    "two-encoder": ({"kind": "InfoNCE", "difficulty": {"kind": "Relative"}}, {"size": 8, "views": 2}),
    "queue": ({"kind": "SupCon"}, {"classes": 4, "samples": 2, "queue": 20, "queue_start": 0.2}),
    "momentum queue": (
        {"kind": "InfoNCE"},
        {"size": 8, "views": 2, "queue": 100, "queue_encoder": "momentum", "queue_momentum": 0.9},
    ),
    "hardness-aware": ({"kind": "Triplet", "squared": True}, {"classes": 4, "samples": 2}),
    "jtt": ({"kind": "NormFace"}, {"size": 8}),
}


def recipe_of(method, source, **settings):
    loss, batch = METHODS[method]
    name = {"class vectors": "supervised", "queue": "supervised", "momentum queue": "two-encoder"}.get(method, method)
    data = {"source": str(source)} | ({"pairs": "same-class"} if name == "similarity" else {})
    common = {"steps": 6, "checkpoint_every": 2, "log_every": 2, "rate": 1e-2, "collapse_gap": 0.0}
    return parse_recipe(
        {
            "data": data,
            "batch": {**batch, "augment": "mild"},
            "model": {"width": 4, "depth": 2, "dim": 8},
            "loss": loss,
            "train": {"method": name, **common, **settings},
        }
    )


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    """The weights of every method as it is trained without any of the settings."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        name: content(train(recipe_of(name, source), folder / name, tensorboard=False).run.folder)[0]
        for name in METHODS
    }


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_every_setting_and_resumes_with_it(method, setting, source, plain, tmp_path):
    recipe = recipe_of(method, source, **SETTINGS[setting])
    outcome = train(recipe, tmp_path / "whole", tensorboard=False)
    if setting == "epochs":
        assert outcome.run.recipe.train.steps != 6
    whole = content(tmp_path / "whole")
    assert whole[0] != plain[method], "the setting changed what was trained"
    with pytest.raises(Stop):
        train(recipe, tmp_path / "cut", tensorboard=False, on_step=until(3))
    assert train(recipe, tmp_path / "cut", resume=True, tensorboard=False).finished
    assert content(tmp_path / "cut") == whole


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"Muon"}))
def test_every_optimizer_of_torch_trains(name):
    torch.manual_seed(0)
    method = Supervised(network(), SupCon(), optimizer=name)
    before = [p.detach().clone() for p in method.model.parameters()]
    assert all(math.isfinite(loss) for loss in moved(method, labelled, range(3)))
    assert any(not torch.equal(a, b) for a, b in zip(before, method.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("AdamQ", "no 'AdamQ'; did you mean 'Adam'"),
        ("LBFGS", "needs a closure"),
        ({"kind": "SGD", "momentun": 0.9}, "unknown recipe key 'train.optimizer.momentun'; did you mean 'momentum'"),
        ({"kind": "SGD", "lr": 0.1}, "use train.rate"),
        ({"kind": "Adam", "weight_decay": 0.1}, "use train.weight_decay"),
        ({"kind": "SGD", "momentum": "much"}, "train.optimizer.momentum"),
        ({"kind": "SGD", "momentum": -1.0}, "momentum"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused_when_the_recipe_is_read(table, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe({"train": {"optimizer": table}})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("cosin", "did you mean 'cosine'"),
        ("ReduceLROnPlateau", "no 'ReduceLROnPlateau'"),
        ({"kind": "step", "warmup": 0.1}, "use train.warmup"),
        ({"kind": "step", "every": 2.0}, "between 0 and 1"),
        ({"kind": "StepLR"}, "step_size"),
        ({"kind": "StepLR", "step": 3}, "unknown recipe key 'train.schedule.step'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_when_the_recipe_is_read(table, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe({"train": {"schedule": table}})


def test_a_name_alone_and_a_key_alone_are_tables():
    assert parse_recipe({"train": {"optimizer": "SGD"}}).train.optimizer == {"kind": "SGD"}
    recipe = load("supcon", ["train.optimizer.betas=[0.9, 0.99]", "train.schedule=constant"])
    assert recipe.train.optimizer == {"kind": "AdamW", "betas": [0.9, 0.99]}
    assert recipe.train.schedule == {"kind": "constant"}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_stay_between_nothing_and_the_highest_rate(kind):
    schedule = Schedule(50, 0.4, build_shape(kind, 0.2))
    course = [schedule.lr_at(step) for step in range(50)]
    assert max(course) <= 0.4 + 1e-12 and min(course) > 0
    assert max(course) > 0.39


def test_schedules_by_example():
    steps, rate = 10, 1.0
    course = {kind: [build_shape(kind, 0.2).lr_at(k, steps, rate) for k in range(steps)] for kind in SCHEDULES}
    assert course["constant"] == [1.0] * 10
    assert course["step"] == pytest.approx([1.0] * 4 + [0.1] * 3 + [0.01] * 3)
    assert course["cosine"][0] == 1.0 and course["cosine"][5] == pytest.approx(0.001 + 0.999 / 2)
    assert course["warmup-cosine"][:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert course["one-cycle"][0] == pytest.approx(0.04) and course["one-cycle"][-1] == pytest.approx(4e-6)


def test_a_schedule_of_torch_is_what_torch_makes_of_it():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    shape = build_shape("CosineAnnealingLR", 0.0)
    for step in range(12):
        assert shape.lr_at(step, 12, 0.3) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
    assert {"StepLR", "ExponentialLR", "OneCycleLR", "PolynomialLR"} <= set(TORCH_SCHEDULES)


def test_milestones_are_steps_as_torch_counts_them():
    shape = build_shape({"kind": "MultiStepLR", "milestones": [2, 4], "gamma": 0.1}, 0.0)
    assert [shape.lr_at(step, 6, 1.0) for step in range(6)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_groups_decay_matrices_only_and_slow_the_backbone_down():
    model = Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=4), (3,))
    method = Supervised(model, SupCon(), weight_decay=0.1, backbone_rate=0.5)
    backbone = set(model.backbone.parameters())
    for group in method.optimizer.optimizers["model"].param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)
            assert group["lr_scale"] == (0.5 if p in backbone else 1.0)
    moved(method, labelled, range(1))
    rates = {group["lr"] for group in method.optimizer.optimizers["model"].param_groups}
    assert rates == {1e-2, 5e-3}


def test_the_average_of_weights_is_the_formula():
    torch.manual_seed(0)
    method, seen = Supervised(network(), SupCon(), ema=0.8), []
    for k in range(4):
        method.step(labelled(k), 1e-2, 0.0)
        seen.append([p.detach().clone() for p in method.model.parameters()])
    wanted = seen[0]
    for now in seen[1:]:
        wanted = [0.8 * old + 0.2 * new for old, new in zip(wanted, now, strict=True)]
    for a, b in zip(method.final_module().parameters(), wanted, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(InputError, match="ema"):
        Supervised(network(), SupCon(), ema=1.0)
    with pytest.raises(InputError, match="ema_start must be at least 0 and below 1, got 1.5"):
        Supervised(network(), SupCon(), ema=0.9, ema_start=1.5)


def test_an_average_that_begins_late_takes_the_weights_of_its_first_step():
    torch.manual_seed(0)
    method, seen = Supervised(network(), SupCon(), ema=0.8, ema_start=0.5), []
    for k in range(4):
        assert (method.final_module() is method.model) == (k <= 2), "until then it is the network itself"
        method.step(labelled(k), 1e-2, k / 4)
        seen.append([p.detach().clone() for p in method.model.parameters()])
    for a, old, new in zip(method.final_module().parameters(), seen[2], seen[3], strict=True):
        torch.testing.assert_close(a, 0.8 * old + 0.2 * new)


def test_accumulated_batches_give_the_mean_of_their_gradients():
    torch.manual_seed(0)
    method = Supervised(network(), SupCon(), optimizer="SGD", weight_decay=0.0)
    start = [p.detach().clone() for p in method.model.parameters()]
    gradients = []
    for k in range(3):
        loss = method.compute_losses(labelled(k), 0.0).losses["model"]
        gradients.append(torch.autograd.grad(loss, list(method.model.parameters())))
    result = method.step([labelled(k) for k in range(3)], 0.1, 0.0)
    assert result.applied
    for p, old, *own in zip(method.model.parameters(), start, *gradients, strict=True):
        torch.testing.assert_close(p, old - 0.1 * sum(own) / 3)


def test_accumulation_warns_for_losses_over_the_pairs_of_a_batch_only(source, tmp_path):
    for method, warned in (("supervised", True), ("class vectors", False), ("similarity", False)):
        notes = []
        recipe = recipe_of(method, source, accumulate=2)
        train(recipe, tmp_path / method, tensorboard=False, on_note=notes.append)
        assert any("gradient caching" in note for note in notes) == warned


def test_epochs_become_steps_that_the_run_folder_keeps(source, tmp_path):
    recipe = tiny(source, epochs=2)
    outcome = train(recipe, tmp_path / "run", tensorboard=False)
    assert outcome.run.recipe.train.steps == 6  # epochs of three steps
    assert open_run_folder(tmp_path / "run").recipe == outcome.run.recipe
    assert train(recipe, tmp_path / "run", resume=True, tensorboard=False).finished
    with pytest.raises(RecipeError, match="train.epochs = 2 decides"):
        load("supcon", ["train.epochs=2", "train.steps=5"])


def test_steps_of_epochs_are_counted_from_the_order():
    class Sampler:
        def epoch_batches(self, epoch):
            return [None] * (3 + epoch)

    loader = Loader(Samples.of(FeatureArray(np.zeros((4, 2))), [0, 0, 1, 1]), Sampler(), Augment())
    assert [count_steps(loader, 3), count_steps(loader, 3, 5), count_steps(loader, 1, 9)] == [12, 2, 1]


def test_an_optimizer_may_have_no_parameters_to_decay():
    bias = nn.Parameter(torch.zeros(3))
    assert isinstance(build_optimizer("Adam", [{"params": [bias]}]), torch.optim.Adam)
