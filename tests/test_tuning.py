"""Searches: what a trial is judged on, what a killed search goes on from, and what its record and its page say."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from PIL import Image

from command_line import mettle, refused
from mettle import tuning
from mettle.data import Samples
from mettle.data.inputs import ImageArray
from mettle.errors import MettleError, MissingExtra, RunError
from mettle.evaluate import ValidationScore
from mettle.report import search_page as page
from mettle.train import load, train
from mettle.train.recipe import Range, parse_recipe
from mettle.train.search import FoldResult, Trial, best_trial, describe_edges, read_trials
from mettle.tuning import tune
from train.conftest import make_npz, tiny

RATE = {"low": 1e-4, "high": 1e-2, "log": True}
RANGES = {"train.rate": RATE, "loss.temperature": {"low": 0.05, "high": 0.5}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_npz(tmp_path_factory.mktemp("data") / "patterns.npz")


def searched(source, ranges=RANGES, train=None, **settings):
    content = tiny(source, **{"steps": 2, **(train or {})}).model_dump()
    return parse_recipe(content | {"tune": {"ranges": ranges, "trials": 2, **settings}})


def told(trials):
    """What two searches must have in common: all but the time that they took."""
    return [replace(trial, seconds=0.0) for trial in trials]


@pytest.fixture
def no_page(monkeypatch):
    """Figures take longer than a quick search."""
    monkeypatch.setattr(tuning, "write_search_page", lambda *args, **options: None)


@pytest.fixture
def pretended(monkeypatch, no_page):
    """Training that is a formula: the metric falls with the steps towards the distance of the rate from 1e-3."""
    trained = []

    def pretend(recipe, place, *, callbacks, given, **options):
        place.mkdir(parents=True, exist_ok=True)
        trained.append(recipe)
        goal = abs(np.log10(recipe.train.rate) + 3) / 4 + given.samples.part("val").ids.mean() * 1e-4
        lines = [{"step": step, "val_eer": goal + 0.2 / (1 + step)} for step in range(10)]
        for line in lines:
            with (place / "log.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            values = {"eer": line["val_eer"]}
            state = SimpleNamespace(
                step=line["step"], is_validated=line["step"] > 0, validation=SimpleNamespace(values=values)
            )
            for callback in callbacks:
                callback.on_step(state)
        return SimpleNamespace(finished=True, selection=None)

    monkeypatch.setattr(tuning, "train", pretend)
    return trained


def test_a_search_finds_the_best_trial_and_a_recipe_that_trains(source, tmp_path):
    recipe, notes = searched(source), []
    found = tune(recipe, tmp_path / "search", on_note=notes.append)
    lines = [json.loads(line) for line in (tmp_path / "search" / "trials.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2] and found.finished
    assert tuple(read_trials(tmp_path / "search")) == found.trials
    metrics = [line["metric"] for line in lines]
    assert found.best.metric == min(metrics) and found.best == found.trials[metrics.index(min(metrics))]
    for line in lines:
        assert [step for step, _ in line["folds"][0]["steps"]] == [0, 2] and line["metric"] == line["folds"][0][
            "metric"
        ]
        assert set(line["values"]) == set(RANGES) and 1e-4 <= line["values"]["train.rate"] <= 1e-2
    best = load(tmp_path / "search" / "best.toml")
    assert best.train.rate == found.best.values["train.rate"] and not best.tune.ranges
    assert best.model_dump() == recipe.with_values({**found.best.values, "tune": {}}).model_dump()
    assert load(tmp_path / "search" / "tune.toml").model_dump() == recipe.model_dump()
    assert not (tmp_path / "search" / "trials").exists(), "runs of trials are removed"
    again = best.with_values({"train.select": "eer", "train.validate_every": 2})
    kept = train(again, tmp_path / "run", score=ValidationScore(), tensorboard=False)
    assert kept.selection["last_value"] == found.best.metric, "the recipe trains the very model that was measured"
    assert sum(note.startswith("trial ") for note in notes) == 2
    text = found.page.read_text()
    assert "train.rate" in text and f"{found.best.metric:.4g}" in text and "http" not in text.partition("<body>")[2]


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, (1, 3)),
        ({"method": "halving"}, (1, 4, 9)),
        ({"method": "tpe"}, (11, 13)),  # it draws at random up to the tenth
        ({"method": "halving", "folds": 2}, (2, 6)),
    ],
)
def test_a_search_in_pieces_is_the_whole_search(source, tmp_path, pretended, settings, counts):
    recipe = searched(source, trials=counts[-1], **settings)
    whole = tune(recipe, tmp_path / "whole")
    pieces = [tune(recipe, tmp_path / "pieces", trials=n, resume=True) for n in counts]
    assert all(one.finished for one in pieces) and tuple(len(one.trials) for one in pieces) == counts
    assert told(pieces[-1].trials) == told(whole.trials)
    assert (tmp_path / "pieces" / "best.toml").read_text() == (tmp_path / "whole" / "best.toml").read_text()
    states = {trial.state for trial in whole.trials}
    assert states == ({"finished", "pruned"} if settings.get("method") == "halving" else {"finished"})
    other = tune(recipe.with_values({"seed": 1}), tmp_path / "other", trials=1)
    assert other.trials[0].values != whole.trials[0].values


def test_a_budget_of_time_ends_after_the_trial_under_way(source, tmp_path, pretended):
    found = tune(searched(source), tmp_path / "search", seconds=1e-9)
    assert len(found.trials) == 1 and not found.finished and not found.interrupted
    assert len(tune(searched(source), tmp_path / "search", seconds=1e9, resume=True).trials) == 2


def test_a_request_to_stop_leaves_the_trial_under_way_to_the_next_call(source, tmp_path, monkeypatch, pretended):
    recipe, finish = searched(source), tuning.train
    monkeypatch.setattr(tuning, "train", lambda *args, **options: SimpleNamespace(finished=False))
    found = tune(recipe, tmp_path / "search")
    assert found.interrupted and not found.finished and found.trials == () and found.best is None
    monkeypatch.setattr(tuning, "train", finish)
    assert told(tune(recipe, tmp_path / "search", resume=True).trials) == told(tune(recipe, tmp_path / "whole").trials)


def test_halving_prunes_what_is_worse_at_a_rung(source, tmp_path, pretended):
    """The rule, by hand: of n trials at a rung, one in three goes on, and the best always does."""
    found = tune(searched(source, method="halving", trials=20), tmp_path / "search")
    rungs = {1: [], 3: [], 9: []}
    for trial in found.trials:
        values = dict(trial.folds[0].steps)
        for step, seen in rungs.items():
            seen.append(values[step])
            if values[step] > sorted(seen)[max(1, len(seen) // 3) - 1]:
                assert trial.state == "pruned" and max(values) == step
                break
        else:
            assert trial.state == "finished" and max(values) == 9
    assert found.best.metric == min(trial.metric for trial in found.trials if trial.state == "finished")


def test_the_parzen_estimator_learns_from_the_record(source, tmp_path, pretended):
    ranges = {"train.rate": {"low": 1e-6, "high": 1.0, "log": True}}
    found = tune(searched(source, ranges, method="tpe", trials=24), tmp_path / "search")
    distances = [trial.metric for trial in found.trials]
    assert np.mean(distances[14:]) < 0.7 * np.mean(distances[:10]), "later trials are nearer to the best rate"


def test_folds_are_averaged_and_each_has_its_own_identities(source, tmp_path, pretended):
    found = tune(searched(source, folds=3), tmp_path / "search")
    for trial in found.trials:
        values = [fold.metric for fold in trial.folds]
        assert len(set(values)) == 3, "the formula tells folds apart by their samples"
        assert trial.metric == pytest.approx(np.mean(values))
        low, high = page.fold_interval(trial)
        assert low <= trial.metric <= high


class Hostile:
    """Pictures that may not be read for some samples."""

    kind, is_in_memory = "image", True

    def __init__(self, array, forbidden):
        self.inputs, self.forbidden = ImageArray(array), forbidden

    shape = property(lambda self: self.inputs.shape)

    def __len__(self):
        return len(self.inputs)

    def read(self, at):
        assert not self.forbidden[np.asarray(at)].any(), "a sample was read that the search must not see"
        return self.inputs.read(at)

    def fingerprint(self):
        return "hostile"


@pytest.mark.parametrize("folds", [0, 2])
def test_test_identities_are_never_read(source, tmp_path, no_page, folds):
    with np.load(source) as arrays:
        images, label, split = arrays["images"], arrays["label"], arrays["split"]
    forbidden = split == 2 if folds == 0 else split > 0  # folds leave the validation identities alone too
    samples = Samples.of(Hostile(images, forbidden), label, split=split)
    with pytest.raises(AssertionError):
        samples.read(np.flatnonzero(forbidden)[:1])
    recipe = searched(source, folds=folds, trials=1).with_values({"batch.classes": 3})
    found = tune(recipe, tmp_path / "search", samples=samples)
    assert found.best is not None and len(found.best.folds) == max(folds, 1)


def test_files_of_test_identities_are_not_opened(tmp_path, no_page):
    """A test picture that is no picture, in a source with its own split, is met by training and not by a search."""
    rng = np.random.default_rng(0)
    for split, people in (("train", range(6)), ("val", range(6, 9)), ("test", range(9, 12))):
        for person in people:
            folder = tmp_path / "data" / split / str(person)
            folder.mkdir(parents=True)
            for k in range(4):
                base = np.full((12, 12), 20 * person, np.uint8) + rng.integers(0, 15, (12, 12), np.uint8)
                Image.fromarray(base).save(folder / f"{k}.png")
    (tmp_path / "data" / "test" / "9" / "0.png").write_bytes(b"no picture")
    recipe = searched(tmp_path / "data", trials=1).with_values({"data.size": 12, "data.channels": 1})
    assert tune(recipe, tmp_path / "search").best is not None
    with pytest.raises(MettleError, match="cannot"):
        train(recipe, tmp_path / "run")


def test_a_trial_that_fails_is_recorded_and_the_search_goes_on(source, tmp_path, no_page):
    ranges = {"batch.classes": {"choices": [4, 40]}}
    found = tune(searched(source, ranges, trials=5), tmp_path / "search")
    states = {trial.values["batch.classes"]: (trial.state, trial.reason) for trial in found.trials}
    assert states[4] == ("finished", "") and states[40][0] == "failed" and "batches of 40 classes" in states[40][1]
    with pytest.raises(RunError, match="5 trials failed one after the other, .*batches of 4. classes"):
        tune(searched(source, {"batch.classes": {"choices": [40, 41]}}, trials=9), tmp_path / "none")
    assert len(read_trials(tmp_path / "none")) == 5 and not (tmp_path / "none" / "best.toml").exists()


KILLED = textwrap.dedent(
    """
    import optuna, os, signal, sys, torch  # what is imported here is not imported by every child
    from mettle import tuning
    from mettle.train import load, train
    from mettle.train.callbacks import JsonLog

    def search(point):
        def kill_at(here):
            if here == point:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_step(self, state):
            log(self, state)
            kill_at(f"{self.path.parent.parent.name}/{self.path.parent.name} step {state.step}")

        def append_trial(file, trial):
            if point == f"half of {trial.number}":
                file.write(b'{"number": 1')
                file.flush()
            kill_at(f"half of {trial.number}")
            append(file, trial)
            kill_at(f"after {trial.number}")

        log, JsonLog.on_step = JsonLog.on_step, on_step
        append, tuning.append_trial = tuning.append_trial, append_trial
        tuning.write_search_page = lambda *args, **options: None
        tuning.tune(load(sys.argv[1]), sys.argv[2], resume=True)

    torch.set_num_threads(1)
    for point in (*sys.argv[3:], ""):
        child = os.fork()
        if child == 0:
            search(point)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            print(f"killed at {point}", flush=True)
        elif status:
            sys.exit(f"failed at {point}")
    """
)


def test_a_search_killed_at_four_points_finds_what_the_whole_one_finds(source, tmp_path, no_page):
    recipe = searched(source, folds=2, method="halving", train={"steps": 3, "checkpoint_every": 1})
    recipe = recipe.with_values({"batch.classes": 3})
    whole = tune(recipe, tmp_path / "whole")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    (tmp_path / "killed.py").write_text(KILLED)
    points = ("00001/fold-1 step 2", "half of 1", "after 1", "00002/fold-0 step 1")
    command = [sys.executable, tmp_path / "killed.py", tmp_path / "recipe.toml", tmp_path / "search", *points]
    ran = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert [point for point in points if f"killed at {point}\n" in ran.stdout] == list(points), ran.stdout
    assert told(read_trials(tmp_path / "search")) == told(whole.trials)
    assert (tmp_path / "search" / "best.toml").read_text() == (tmp_path / "whole" / "best.toml").read_text()
    assert not (tmp_path / "search" / "trials").exists()


def test_a_folder_that_is_there_is_continued_only_with_its_own_recipe_and_data(source, tmp_path, pretended):
    folder, recipe = tmp_path / "search", searched(source)
    tune(recipe, folder)
    with pytest.raises(RunError, match="is there already"):
        tune(recipe, folder)
    with pytest.raises(RunError, match="another recipe"):
        tune(recipe.with_values({"tune.method": "tpe"}), folder, resume=True)
    other = make_npz(tmp_path / "other.npz", seed=1)
    with pytest.raises(RunError, match="data of .* have changed"):
        tune(recipe.with_values({"data.source": str(other)}), folder, resume=True)
    moved = make_npz(tmp_path / "moved.npz")
    assert len(tune(recipe.with_values({"data.source": str(moved)}), folder, resume=True).trials) == 2
    from mettle.train.search import open_record

    with open_record(folder), pytest.raises(RunError, match="another process is searching"):
        tune(recipe, folder, resume=True)
    with (folder / "trials.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(RunError, match=r"trials\.jsonl:3 is no line"):
        tune(recipe, folder, resume=True)


@pytest.mark.parametrize(
    ("ranges", "settings", "wanted"),
    [
        ({}, {}, "nothing to search"),
        ({"train.rat": RATE}, {}, r"unknown recipe key 'train\.rat'; did you mean 'rate'"),
        ({"train.rate": {"low": -1.0, "high": 1.0}}, {}, r"train\.rate = -1\.0 is not possible"),
        ({"batch.classes": {"low": 2, "high": 5}}, {}, "whole numbers give low, high and step"),
        ({"loss.kind": {"choices": ["SupCon", "SupCo"]}}, {}, "did you mean 'SupCon'"),
        ({"data.val": {"low": 0.1, "high": 0.2}}, {}, "decides what trials are compared on"),
        ({"seed": {"low": 0, "high": 9, "step": 1}}, {}, "decides what trials are compared on"),
        ({"train.rate": {"low": 1.0, "hihg": 2.0}}, {}, r"'tune\.ranges\.train\.rate\.hihg'; did you mean 'high'"),
        ({"train.rate": {"low": 1.0}}, {}, "low and high are wanted, or choices"),
        ({"train.rate": {"low": "1", "high": 2}}, {}, "a number is wanted, got '1'"),
        ({"train.rate": {"low": 2, "high": 1}}, {}, "low must be below high"),
        ({"train.rate": {"low": 0, "high": 1, "log": True}}, {}, "needs low above 0"),
        ({"train.rate": {"low": 0.0, "high": 1.0, "step": 0.3}}, {}, "in whole steps"),
        ({"train.rate": {"low": 0.1, "high": 1.0, "choices": [1]}}, {}, "not both"),
        ({"train.rate": {"choices": [1, 1]}}, {}, "different values"),
        (RANGES, {"method": "grid"}, r"tune\.method"),
        (RANGES, {"folds": 1}, "0 is wanted, or at least 2 folds"),
        (RANGES, {"folds": 5}, "6 training identities are too few for 5 folds"),
        (RANGES, {"metric": "err"}, "no validation metric named 'err'; did you mean 'eer'"),
        (RANGES, {"metric": "tar@1e-4"}, "tar@1e-4 cannot be measured on the validation part"),
        (RANGES, {"trial": 3}, r"unknown recipe key 'tune\.trial'; did you mean 'trials'"),
    ],
)
def test_what_cannot_be_searched_is_one_line_before_anything_is_written(source, tmp_path, ranges, settings, wanted):
    with pytest.raises(MettleError, match=wanted) as caught:
        tune(searched(source, ranges, **settings), tmp_path / "search")
    assert "\n" not in str(caught.value) and not (tmp_path / "search").exists()


def test_other_code_is_imported_only_where_that_is_allowed(source, tmp_path):
    recipe = searched(source).with_values({"model": {"backbone": "shop.nets:make"}})
    with pytest.raises(MettleError, match="--allow-import shop"):
        tune(recipe, tmp_path / "search")
    assert not (tmp_path / "search").exists()


def test_halving_with_epochs_says_how_often_to_validate(source, tmp_path):
    with pytest.raises(MettleError, match=r"train\.validate_every"):
        tune(searched(source, method="halving", train={"epochs": 2}), tmp_path / "search")


def test_data_without_validation_identities_need_folds(source, tmp_path):
    with np.load(source) as arrays:
        arrays = dict(arrays)
    np.savez(tmp_path / "none.npz", **arrays | {"split": np.where(arrays["split"] == 1, 2, arrays["split"])})
    with pytest.raises(MettleError, match=r"set tune\.folds to 2 or more"):
        tune(searched(tmp_path / "none.npz"), tmp_path / "search")


def test_a_kind_that_is_searched_decides_which_ranges_apply(source, tmp_path, pretended):
    ranges = {
        "loss.scale": {"low": 8.0, "high": 32.0},
        "loss.kind": {"choices": ["SupCon", "NormFace"]},
        "loss.difficulty.alpha": {"low": 0.5, "high": 2.0},
        "loss": {"choices": [{"kind": "SupCon", "temperature": 0.1}, {"kind": "Triplet"}]},
    }
    whole = ranges.pop("loss")
    found = tune(searched(source, ranges, trials=8), tmp_path / "search")
    seen = {trial.values["loss.kind"]: set(trial.values) for trial in found.trials}
    assert seen == {"SupCon": {"loss.kind", "loss.difficulty.alpha"}, "NormFace": set(ranges)}
    for recipe, trial in zip(pretended, found.trials, strict=True):
        assert recipe.loss["kind"] == trial.values["loss.kind"]
        assert ("temperature" in recipe.loss) == (recipe.loss["kind"] == "SupCon")
    tables = tune(searched(source, {"loss": whole}, trials=6), tmp_path / "tables")
    assert {recipe.loss["kind"] for recipe in pretended[8:]} == {"SupCon", "Triplet"}
    assert tables.recipe.loss == tables.best.values["loss"]


def test_ranges_may_be_written_with_and_without_quotes(tmp_path):
    quoted = 'train = { steps = 3 }\n[tune.ranges]\n"loss.difficulty.alpha" = { low = 1, high = 2.5 }\n'
    plain = "train = { steps = 3 }\n[tune.ranges]\nloss.difficulty.alpha = { low = 1, high = 2.5 }\n"
    found = []
    for text in (quoted, plain):
        (tmp_path / "r.toml").write_text(
            f'seed = 3\n{text}[loss]\nkind = "SupCon"\ndifficulty = {{kind = "Threshold"}}\n'
        )
        found.append(load(tmp_path / "r.toml"))
        (tmp_path / "again.toml").write_text(found[-1].to_toml())
        assert load(tmp_path / "again.toml").tune == found[-1].tune
    assert found[0] == found[1] and found[0].tune.ranges["loss.difficulty.alpha"].low == 1
    assert "[tune" not in found[0].with_values({"tune": {}}).to_toml()


@pytest.mark.parametrize(
    ("table", "value", "place"),
    [
        (RATE, 1.2e-4, "within 5 % of the lower end"),
        (RATE, 1.3e-4, None),  # linear in the logarithm: 0.2 of a decade is 10 % of two
        (RATE, 9e-3, "within 5 % of the upper end"),
        ({"low": 0.0, "high": 1.0}, 0.94, None),
        ({"low": 0.0, "high": 1.0}, 0.96, "upper end"),
        ({"low": 1, "high": 8, "step": 1}, 1, "lower end"),
        ({"low": 1, "high": 8, "step": 1}, 2, None),
        ({"choices": [16, 32, 64]}, 64, "highest of its choices"),
        ({"choices": [64, 32, 16]}, 16, "lowest of its choices"),
        ({"choices": [16, 32, 64]}, 32, None),
        ({"choices": [32, 16, 64]}, 64, None),  # in no order
        ({"choices": ["a", "b"]}, "b", None),
        ({"choices": [False, True]}, True, None),
    ],
)
def test_a_best_value_at_the_end_of_its_range_is_told(table, value, place):
    lines = describe_edges({"x.y": Range.model_validate(table)}, {"x.y": value})
    assert len(lines) == (place is not None)
    assert not lines or (place in lines[0] and "widen it" in lines[0] and "x.y" in lines[0])


def test_of_equal_trials_the_earlier_is_the_best_and_pruned_ones_never_are():
    fold = FoldResult(None, None, ((3, 0.01),))
    trials = [Trial(1, "finished", {}, 0.3), Trial(2, "finished", {}, 0.2), Trial(3, "finished", {}, 0.2)]
    trials += [Trial(4, "pruned", {}, folds=(fold,)), Trial(5, "failed", {}, reason="?")]
    assert best_trial(trials, "min").number == 2 and best_trial(trials, "max").number == 1
    assert best_trial(trials[3:], "min") is None


def test_the_page_shows_every_kind_of_trial_and_warns(source, tmp_path):
    ranges = {**RANGES, "loss.note": {"choices": ["<b>", {"kind": "SupCon"}]}}
    recipe = searched(source, ranges, trials=9, folds=2)
    folds = (FoldResult(0.1, 2, ((0, 0.5), (2, 0.1))), FoldResult(0.2, 2, ((0, 0.5), (2, 0.2))))
    values = {"train.rate": 9.9e-3, "loss.temperature": 0.2, "loss.note": "<b>"}
    trials = [
        Trial(1, "finished", values, 0.15, folds),
        Trial(2, "finished", {**values, "train.rate": 1e-3, "loss.note": {"kind": "SupCon"}}, 0.16, folds),
        Trial(3, "pruned", values, folds=(FoldResult(None, None, ((0, 0.5), (2, 0.4))),)),
        Trial(4, "failed", values, reason="training diverged: <i>nan</i>"),
    ]
    text = page.write_search_page(recipe, trials, tmp_path / "tune.html", direction="min").read_text()
    assert "train.rate, 0.0099, is within 5 % of the upper end" in text and "widen it" in text
    assert "5 of 9 trials are missing" in text and "1 of 4 trials failed" in text
    assert "2 finished, 1 pruned, 1 failed" in text and "0.15" in text and "2 folds of the training identities" in text
    assert "<b>" not in text.replace("<b>mettle</b>", "").replace('<b class="mono">', "") and "<i>" not in text
    assert text.count("data:image/svg+xml") == 4
    empty = page.write_search_page(recipe, trials[3:], tmp_path / "none.html", direction="min").read_text()
    assert "no trial is finished" in empty.lower()


def test_a_missing_optuna_names_the_extra(source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"pip install 'mettle-ml\[tune\]'"):
        tune(searched(source), tmp_path / "search")


def test_the_verbosity_of_optuna_stays_what_it_was(source, tmp_path, pretended):
    before = optuna.logging.get_verbosity()
    tune(searched(source), tmp_path / "search")
    assert optuna.logging.get_verbosity() == before


def test_the_command_searches_and_continues(source, tmp_path, monkeypatch, pretended):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(searched(source).to_toml())
    said = mettle("tune", "r.toml", "--name", "s", "--seconds", "0.000001")
    assert "trial 1 of 2" in said and "continue with: mettle tune --name s --resume" in said
    said = mettle("tune", "--name", "s", "--resume", "--trials", "3", "--seconds", "100")
    assert "trial 3 of 3" in said and "best: trial " in said and "next: mettle train runs/s/best.toml" in said
    assert "is there already" in refused("tune", "r.toml", "--name", "s")
    assert "name the recipe" in refused("tune")
    assert "no search" in refused("tune", "--name", "t", "--resume")
    assert "nothing to search" in refused("tune", "supcon", "--name", "u")
    said = mettle("tune", "r.toml", "--set", "tune.ranges.train.weight_decay={low=0.0, high=0.1}", "--trials", "1")
    assert "weight_decay" in said and (tmp_path / "runs" / "tune-r" / "best.toml").is_file()
