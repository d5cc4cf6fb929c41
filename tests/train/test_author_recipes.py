"""Recipes in the forms that authors coded: what they are, and that they train."""

import re
import tomllib
from pathlib import Path

import pytest

import mettle
from mettle.difficulty import Threshold
from mettle.train import builtin_recipes, load, train
from mettle.train.callbacks import read_log
from mettle.train.recipe import Recipe, parse_recipe

from .conftest import make_npz


def test_difficulty_aware_supcon_as_its_author_coded_it_trains(tmp_path):
    source = make_npz(tmp_path / "data.npz")
    small = ["batch.classes=5", "batch.samples=2", "model.width=4", "model.dim=8", "train.steps=10"]
    recipe = load("da-supcon-author", [*small, f"data.source={source}"])
    loss = recipe.build_loss(5)
    assert (loss.temperature, loss.neg_weight, loss.normalise, loss.push_factor) == (0.07, "linear", "weight", 0.3)
    assert loss.difficulty == Threshold(1.0, 1.0, 0.1, 0.7)
    assert train(recipe, tmp_path / "run", tensorboard=False).finished


@pytest.mark.parametrize("name", ["da-supcon-author", "wcl-author", "hdml-supcon", "hdml-contrastive"])
def test_the_recipes_have_titles(name):
    assert name in builtin_recipes() and load(name).title().endswith("on glyphs")


def test_the_published_settings_of_the_page_train(tmp_path):
    """The block of docs/two-networks.md in which alpha = 90 has the units of the paper."""
    page = (Path(mettle.__file__).parents[2] / "docs" / "two-networks.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "l2 = 5e-3" in one]
    content = tomllib.loads(block)
    plan = Recipe.model_validate(content).build_synthesis()
    assert (plan.alpha, plan.alpha_mode, plan.javg, plan.window, plan.norm_rows) == (
        90,
        "absolute",
        "repo",
        64,
        "synthetic",
    )
    content["data"] = {"source": str(make_npz(tmp_path / "data.npz"))}
    content["batch"] |= {"classes": 5, "augment": "mild"}
    content["model"] |= {"width": 4, "depth": 2, "dim": 8}
    content["train"] |= {"steps": 3}
    assert train(parse_recipe(content), tmp_path / "run", tensorboard=False).finished


@pytest.mark.parametrize("name", ["hdml-supcon", "hdml-contrastive"])
def test_synthesis_around_pairwise_losses_trains(name, tmp_path):
    source = make_npz(tmp_path / "data.npz")
    small = [
        "batch.classes=5",
        "model.width=4",
        "model.dim=8",
        "train.steps=10",
        "synthesis.window=3",
        "train.log_every=1",
    ]
    train(load(name, [*small, f"data.source={source}"]), tmp_path / "run", tensorboard=False)
    levels = [line["lambda"] for line in read_log(tmp_path / "run" / "log.jsonl")]
    assert levels[0] == 1.0 and 0 < levels[-1] < 1.0
