"""Recipes as they are listed, written into run folders, and handed to training."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from mettle.errors import InputError, RecipeError
from mettle.train import builtin_recipes, load, open_run_folder, train
from mettle.train.recipe import parse_recipe
from mettle.train.recipe_files import builtin_titles, read_recipe_file
from mettle.train.run_folder import is_builtin_source

from .conftest import tiny

METHODS = {"biased": "two-encoder", "synthesis": "hardness-aware", "jtt": "jtt"}


@pytest.mark.parametrize("name", builtin_recipes())
def test_a_title_needs_no_loss_and_only_tables_in_use_are_written(name):
    recipe = load(name)
    assert builtin_titles()[name] == recipe.title()
    content = tomllib.loads(recipe.to_toml())
    assert parse_recipe(content) == recipe
    written = {table for table in METHODS if table in content}
    assert written == {table for table in METHODS if table in read_recipe_file(builtin_recipes()[name])}
    assert all(METHODS[table] == recipe.train.method for table in written)


@pytest.mark.parametrize("kind", [str, Path])
def test_training_takes_names_and_paths(source, tmp_path, kind):
    file = tmp_path / "small.toml"
    file.write_text(tiny(source, steps=1).to_toml())
    run = train(kind(file), kind(tmp_path / "run"), tensorboard=False).run
    kept = load(file).with_values({"data.size": run.recipe.data.size, "data.resize": "crop", "data.channels": 1})
    assert open_run_folder(tmp_path / "run").recipe == run.recipe == kept


def test_other_things_are_refused_in_one_line(source, tmp_path):
    with pytest.raises(InputError, match=r"recipe= must be a Recipe, the name .*, got dict"):
        train({"seed": 1}, tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"folder= must be the path of a run folder, got NoneType"):
        train(tiny(source), None)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="did you mean 'supcon'"):
        train("supconn", tmp_path / "run")
    assert not (tmp_path / "run").exists()


NUMBERS_ONLY = {"wcl-cifar100", "wcl-celeba", "hdml-cars196"}  # differ in numbers from one that is tried, and are large


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in NUMBERS_ONLY else []) for n in builtin_recipes()]
)
def test_every_recipe_takes_its_first_steps(source, tmp_path, name):
    recipe = load(name)
    small = {"data.source": str(source), "model.width": 4, "model.depth": 2, "model.dim": 8, "train.steps": 2}
    small |= {"loss.dims": [2, 8]} if "dims" in recipe.loss else {}
    small |= {"batch.size": 12} if recipe.batch.size else {"batch.classes": 4, "batch.samples": recipe.batch.samples}
    if not is_builtin_source(recipe.data.source):  # names of columns and a size that fit its data, not these
        small |= {
            "data.size": 32,
            "data.label": None,
            "data.groups": None,
            "evaluate.spurious": None,
            "train.epochs": None,
        }
    rows: list[dict] = []
    recipe = recipe.with_values(small)
    done = train(recipe, tmp_path / "run", tensorboard=False, on_step=lambda step, row: rows.append(row))
    assert done.finished and (tmp_path / "run" / "model.safetensors").is_file()
    assert rows and np.isfinite([row["loss"] for row in rows]).all()
