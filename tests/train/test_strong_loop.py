"""The pieces of a strong loop in whole runs: resumed, kept in the contract, with a network of somebody else."""

import numpy as np
import pytest
import torch
from torch import nn

import mettle
from mettle.data import Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import InputError, RecipeError
from mettle.train import train
from mettle.train.recipe import parse_recipe

from .test_from_recipe import Stop, content, until


def test_the_whole_strong_loop_is_resumed_bit_for_bit(source, tmp_path):
    strong = {
        "data": {"source": str(source)},
        "batch": {"classes": 4, "samples": 2, "augment": "mild+reid"},
        "model": {"width": 4, "depth": 2, "dim": 8, "pool": "gem", "flip": True, "neck": "batchnorm"},
        "loss": {
            "kind": "WeightedSum",
            "losses": [{"kind": "Triplet"}, {"kind": "CosFace", "label_smoothing": 0.1}],
            "spaces": ["before", "after"],
        },
        "train": {"steps": 6, "checkpoint_every": 2, "log_every": 2, "rate": 1e-2, "collapse_gap": 0.0}
        | {"ema": 0.5, "ema_start": 0.3, "distill": 1.0},
    }
    recipe = parse_recipe(strong)
    train(recipe, tmp_path / "whole", tensorboard=False)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "cut", tensorboard=False, on_step=until(3))
    assert train(recipe, tmp_path / "cut", resume=True, tensorboard=False).finished
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    other = parse_recipe(strong | {"train": strong["train"] | {"distill": 0.0}})
    train(other, tmp_path / "plain", tensorboard=False)
    assert content(tmp_path / "plain")[0] != content(tmp_path / "whole")[0], "the teacher changed what was learned"


def recipe_with(source, **model):
    return parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"classes": 4, "samples": 2, "augment": "none"},
            "model": {"width": 4, "depth": 2, "dim": 8, **model},
            "loss": {"kind": "ArcFace", "scale": 16.0},
            "train": {"steps": 3, "rate": 1e-2, "collapse_gap": 0.0},
        }
    )


def test_flip_averaging_is_of_the_contract_and_not_of_training(source, tmp_path):
    runs = {
        flip: train(recipe_with(source, flip=flip), tmp_path / str(flip), tensorboard=False).run
        for flip in (False, True)
    }
    assert runs[True].contract()["model"]["flip"] is True and "flip" not in runs[False].contract()["model"]
    weights = [run.model().state_dict() for run in runs.values()]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]), "the same network was trained"
    shape = runs[True].contract()["input"]["shape"]
    picture = np.random.default_rng(0).integers(0, 255, [s for s in shape if s > 3], np.uint8)
    both = [run.embed([picture, picture[:, ::-1].copy()]) for run in runs.values()]
    assert np.allclose(both[1][0], both[1][1], atol=1e-6) and not np.allclose(both[0][0], both[0][1], atol=1e-3)


class Rows(nn.Module):
    """A network of somebody else."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.linear = nn.Linear(6, width)

    def forward(self, x):
        return nn.functional.normalize(self.linear(x), dim=1)


def test_a_network_of_somebody_else_is_averaged_late_and_taught_too(tmp_path):
    rng = np.random.default_rng(0)
    samples = Samples.of(FeatureArray(rng.normal(size=(80, 6)).astype(np.float32)), np.repeat(np.arange(20), 4))
    found = {}
    for distill in (0.0, 5.0):
        torch.manual_seed(0)
        options = {"ema": 0.8, "ema_start": 0.3, "distill": distill, "steps": 8, "batch": (6, 3), "quiet": True}
        run = mettle.fit(Rows(), samples, "SupCon", folder=tmp_path / str(distill), **options)
        found[distill] = run.model().state_dict()["module.linear.weight"]
        assert (run.run_folder.recipe.train.ema_start, run.run_folder.recipe.train.distill) == (0.3, distill)
    assert not torch.equal(found[0.0], found[5.0])
    with pytest.raises(InputError, match="ema_start= says when"):
        mettle.fit(Rows(), samples, "SupCon", folder=tmp_path / "late", ema_start=0.5)


@pytest.mark.parametrize("key", ["flip", "last_stride"])
def test_a_class_of_somebody_else_refuses_what_is_of_our_networks(key):
    recipe = parse_recipe({"model": {"backbone": f"{__name__}:Rows", key: 1}})
    with pytest.raises(RecipeError, match=f"unknown recipe key 'model.{key}'"):
        recipe.build_foreign_model((6,), [__name__.partition(".")[0]])
