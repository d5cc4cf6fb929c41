"""Runs of earlier versions, whose recipes nobody could begin with today: they open, and are judged and shown."""

import json

import numpy as np
import pytest

from command_line import mettle, refused
from mettle.errors import RecipeError
from mettle.evaluate.run import evaluate_run
from mettle.train import load, open_run, prepare, train

from .conftest import make_npz, tiny


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Trained with the seed -1, as was allowed, on data that the seed divides."""
    folder = tmp_path_factory.mktemp("earlier")
    whole = np.load(make_npz(folder / "whole.npz", classes=20))
    np.savez(folder / "patterns.npz", **{name: whole[name] for name in ("images", "label", "domain")})
    recipe = tiny(folder / "patterns.npz", steps=4).model_copy(update={"seed": -1})
    outcome = train(recipe, folder / "run", tensorboard=False)
    evaluate_run(outcome.run, outcome.samples, model=outcome.model)
    assert "seed = -1\n" in (folder / "run" / "recipe.toml").read_text()
    return folder / "run"


def test_a_run_with_a_negative_seed_opens_with_its_own_split(earlier):
    run = open_run(earlier)
    assert run.recipe.seed == -1
    samples = prepare(run.located())
    assert run.made_of(samples.fingerprint())
    found = evaluate_run(run, samples, write=False).metrics
    assert found["scenarios"] == json.loads((earlier / "metrics.json").read_text())["scenarios"]


def test_every_command_that_starts_from_it_works(earlier):
    assert "EER" in mettle("evaluate", earlier)
    mettle("report", earlier)
    assert (earlier / "report.html").is_file()


def test_it_can_be_taken_up_again(earlier):
    said = mettle("train", "--runs", earlier.parent, "--name", earlier.name, "--resume", "--no-report")
    assert "seed" not in said


def test_nothing_new_begins_with_it(earlier):
    with pytest.raises(RecipeError, match="recipe key seed: a whole number from 0 .* is wanted, got -1"):
        load(earlier / "recipe.toml")
    assert "recipe key seed" in refused("train", earlier / "recipe.toml", "--runs", earlier.parent, "--name", "again")


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, '"a"'])
def test_a_seed_that_no_version_took_is_refused_in_one_line(earlier, seed, tmp_path):
    for name in ("run.json", "contract.json", "model.safetensors"):
        (tmp_path / name).write_bytes((earlier / name).read_bytes())
    (tmp_path / "recipe.toml").write_text((earlier / "recipe.toml").read_text().replace("seed = -1", f"seed = {seed}"))
    with pytest.raises(RecipeError, match="recipe key seed"):
        open_run(tmp_path)
