"""Validation while training: what is kept, when a run ends, and that neither a kill nor validation changes a run."""

import math
import os
import random
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mettle.errors import InputError, MettleError, RecipeError
from mettle.evaluate import ValidationScore
from mettle.train import checkpoint, open_run_folder
from mettle.train.callbacks import BestTracker, EarlyStopping, Validation, ValidationResult, read_log
from mettle.train.from_recipe import train
from mettle.train.recipe import parse_recipe

from .conftest import tiny
from .test_from_recipe import KILLED, Stop, content, until, weights

VALUES = {0: 0.5, 2: 0.4, 4: 0.3, 6: 0.35, 8: 0.2, 10: 0.25, 12: 0.2}  # the best is at 8: of equal values the earlier
SELECTED = {"select": "eer", "validate_every": 2, "patience": 2, "steps": 16}


class Scripted:
    """A score whose values are those of a table, in the order of the steps of `VALUES`."""

    def __init__(self, values):
        self.values = iter(values)

    def __call__(self, model, samples, names):
        assert not model.training and not torch.is_grad_enabled() and len(samples)
        return {"eer": next(self.values)}

    def direction(self, name):
        return "min"


def run(source, folder, values=tuple(VALUES.values()), settings=SELECTED, **options):
    return train(tiny(source, **settings), folder, score=Scripted(values), tensorboard=False, **options)


def test_the_best_step_is_kept_and_the_run_ends_early(source, tmp_path):
    found = run(source, tmp_path / "run")
    assert found.finished and found.selection["step"] == 8 and found.selection["stopped_early"]
    assert "the weights of step 8 are kept" in found.notes[-1]
    best = load_file(tmp_path / "run" / "checkpoints" / "best" / "step-00000008" / "state.safetensors")
    kept = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(best[f"weights/model/{name}"], value) for name, value in kept.items())
    last = checkpoint.load_latest(tmp_path / "run" / "checkpoints")
    assert last[0] == 12, "the last checkpoint is that of the early end"
    assert any(not torch.equal(last[1]["method"]["modules"]["model"][name], value) for name, value in kept.items())
    lines = read_log(tmp_path / "run" / "log.jsonl")
    assert {line["step"]: line["val_eer"] for line in lines if "val_eer" in line} == VALUES
    assert lines[-1]["step"] == 12 and "loss" in lines[-1]
    assert open_run_folder(tmp_path / "run").contract()["selection"] == found.selection


def test_class_vectors_and_averages_are_those_of_the_best_step(source, tmp_path):
    recipe = tiny(source, **SELECTED, ema=0.5)
    recipe = parse_recipe(recipe.model_dump() | {"loss": {"kind": "ArcFace", "scale": 16.0, "margin": 0.2}})
    train(recipe, tmp_path / "run", score=Scripted(VALUES.values()), tensorboard=False)
    last = recipe.with_values({"train.select": None, "train.patience": None, "train.validate_every": None})
    train(last, tmp_path / "last", tensorboard=False)
    best = load_file(tmp_path / "run" / "checkpoints" / "best" / "step-00000008" / "state.safetensors")
    kept = load_file(tmp_path / "run" / "classes.safetensors")["vectors"]
    unit = torch.nn.functional.normalize
    assert any(v.shape == kept.shape and torch.allclose(unit(v), unit(kept)) for v in best.values())
    assert not torch.allclose(load_file(tmp_path / "last" / "classes.safetensors")["vectors"], kept)


def test_validation_leaves_training_as_it_was(source, tmp_path):
    """A score that draws random numbers and leaves the model in another mode changes no weight."""

    def score(model, samples, names):
        torch.rand(3), np.random.rand(3), random.random()
        model.train()
        return {"x": 1.0}

    before = random.getstate(), np.random.get_state()[1].tobytes()
    train(tiny(source), tmp_path / "plain", tensorboard=False)
    train(tiny(source, validate_every=1), tmp_path / "run", score=score, tensorboard=False)
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


@pytest.mark.parametrize("cut", [1, 4, 5, 9, 12])
def test_a_resumed_run_selects_and_ends_as_the_whole_one(source, tmp_path, monkeypatch, cut):
    script_values(monkeypatch)
    options = {"score": ValidationScore(), "tensorboard": False}
    train(tiny(source, **SELECTED), tmp_path / "whole", **options)
    with pytest.raises(Stop):
        train(tiny(source, **SELECTED), tmp_path / "run", on_step=until(cut), **options)
    found = train(tiny(source, **SELECTED), tmp_path / "run", resume=True, **options)
    assert found.selection["step"] == 8 and content(tmp_path / "run") == content(tmp_path / "whole")
    again = train(tiny(source, **SELECTED), tmp_path / "run", resume=True, **options)
    assert again.resumed_from == 12 and content(tmp_path / "run") == content(tmp_path / "whole")


def script_values(monkeypatch):
    measure = Validation._measure

    def scripted(self, method, step):
        found = measure(self, method, step)
        return replace(found, values={**found.values, "eer": VALUES[step]})

    monkeypatch.setattr(Validation, "_measure", scripted)


def test_a_run_with_selection_killed_at_eight_points_resumes_bit_for_bit(source, tmp_path, monkeypatch):
    script_values(monkeypatch)
    recipe = tiny(source, **SELECTED, ema=0.9)
    train(recipe, tmp_path / "whole", score=ValidationScore(), tensorboard=False)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    (tmp_path / "killed.py").write_text(SCRIPTED + KILLED)
    points = ("best 0", "step 1", "best 2", "best 4", "save 6", "best 8", "step 11", "end")
    command = [sys.executable, tmp_path / "killed.py", tmp_path / "recipe.toml", tmp_path / "run", *points]
    ran = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert [point for point in points if f"killed at {point}\n" in ran.stdout] == list(points), ran.stdout
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    best = [folder / "checkpoints" / "best" / "step-00000008" for folder in (tmp_path / "run", tmp_path / "whole")]
    assert [(place / "manifest.json").read_text() for place in best] == 2 * [(best[0] / "manifest.json").read_text()]


SCRIPTED = textwrap.dedent(
    f"""
    from dataclasses import replace
    from mettle.train.callbacks import Validation

    VALUES = {VALUES}
    measure = Validation._measure

    def scripted(self, method, step):
        found = measure(self, method, step)
        return replace(found, values={{**found.values, "eer": VALUES[step]}})

    Validation._measure = scripted
    """
)


class State:
    """What a tracker looks at."""

    is_validated, method, finish_requested = True, None, False

    def __init__(self, step, value):
        self.step, self.validation = step, ValidationResult(step, {"eer": value})


@pytest.mark.parametrize("direction", ["min", "max"])
def test_nan_never_wins_and_ties_keep_the_earlier(direction):
    tracker, sign = BestTracker("eer", direction), 1 if direction == "min" else -1
    values = [math.nan, 3, math.inf * -sign, 2, 2, math.nan, 4]
    for step, value in enumerate(values, 1):
        tracker.on_step(State(step, value * sign if math.isfinite(value) else value))
    assert (tracker.step, tracker.value, tracker.waited, tracker.seen) == (4, 2 * sign, 3, 7)
    with pytest.raises(InputError, match="no metric 'eerr'; did you mean 'eer'"):
        BestTracker("eerr", direction).on_step(State(1, 0.5))


def test_patience_counts_validations_without_a_better_value():
    stopping = EarlyStopping("eer", "min", patience=2)
    asked = []
    for step, value in enumerate([3.0, 2.0, 2.0, 1.0, math.nan, 1.5], 1):
        state = State(step, value)
        stopping.on_step(state)
        asked.append(state.finish_requested)
    assert asked == [False] * 5 + [True]


def test_a_value_that_is_not_finite_is_told_and_logged_as_null(source, tmp_path):
    notes = []
    found = run(source, tmp_path / "run", [0.5, math.nan, 0.4, *[0.6] * 9], on_note=notes.append)
    assert found.selection["step"] == 4 and any("step 2: eer is nan" in note for note in notes)
    lines = {line["step"]: line for line in read_log(tmp_path / "run" / "log.jsonl")}
    assert lines[2]["val_eer"] is None
    with pytest.raises(MettleError, match="untrained model: eer is nan"):
        run(source, tmp_path / "other", [math.nan])


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"select": "earr"}, "no validation metric named 'earr'"),
        ({"select": "tar@1e-4"}, "tar@1e-4 cannot be measured on the validation part .* impostor pairs"),
        ({"select": "worst eer by place"}, "no column 'place'"),
        ({"select": "worst eer by domain"}, "no group allows it"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is_written(source, tmp_path, settings, wanted):
    with pytest.raises(MettleError, match=wanted):
        train(tiny(source, **settings), tmp_path / "run", score=ValidationScore(), tensorboard=False)
    assert not (tmp_path / "run").exists()


def test_selection_needs_a_score_and_validation_samples_and_patience_a_metric(source, tmp_path):
    with pytest.raises(RecipeError, match="needs a score"):
        train(tiny(source, select="eer"), tmp_path / "run", tensorboard=False)
    with pytest.raises(RecipeError, match=r"train\.patience needs train\.select"):
        tiny(source, patience=3)
    with np.load(source) as arrays:
        arrays = dict(arrays)
    np.savez(tmp_path / "none.npz", **arrays | {"split": np.where(arrays["split"] == 1, 2, arrays["split"])})
    with pytest.raises(MettleError, match="no validation samples"):
        train(tiny(tmp_path / "none.npz", select="eer"), tmp_path / "run", score=ValidationScore())
    assert not (tmp_path / "run").exists()
