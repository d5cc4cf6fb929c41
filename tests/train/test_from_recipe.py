"""Training end to end on a small set: resume, refusal, guards."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from mettle.atomic_files import sha256
from mettle.errors import NumericError, RunError
from mettle.train import callbacks as logs
from mettle.train import checkpoint, open_run_folder
from mettle.train.from_recipe import train
from mettle.train.recipe import parse_recipe

from .conftest import make_npz, tiny


class Stop(Exception):
    """A crash in the middle of a run."""


def until(last: int):
    def progress(step: int, line: dict) -> None:
        if step == last:
            raise Stop

    return progress


def weights(folder: Path) -> str:
    return sha256(folder / "model.safetensors")


def content(folder: Path) -> tuple:
    """Everything that must be equal: weights, the whole last checkpoint, what was logged (but for times)."""
    step, state, _ = checkpoint.load_latest(folder / "checkpoints")
    tensors, rest = checkpoint.flatten_state(state)
    lines = [{k: v for k, v in line.items() if k not in TIMES} for line in logs.read_log(folder / "log.jsonl")]
    return (
        weights(folder),
        step,
        {k: v.numpy().tobytes() for k, v in tensors.items()},
        json.dumps(rest),
        lines,
    )


TIMES = ("seconds_per_step", "share_in_model_and_loss", "validation_seconds")


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(tiny(source), folder, tensorboard=False)
    return content(folder)


def test_two_runs_of_one_seed_are_identical(source, tmp_path, whole):
    train(tiny(source), tmp_path / "again", tensorboard=False)
    assert content(tmp_path / "again") == whole


def test_another_seed_gives_another_run(source, tmp_path, whole):
    other = tiny(source).model_copy(update={"seed": 1})
    train(other, tmp_path / "other", tensorboard=False)
    assert content(tmp_path / "other")[0] != whole[0]


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 8, 11])
def test_T4_a_resumed_run_is_bit_identical(source, tmp_path, whole, cut):
    folder, recipe = tmp_path / "run", tiny(source)
    with pytest.raises(Stop):
        train(recipe, folder, tensorboard=False, on_step=until(cut))
    outcome = train(recipe, folder, resume=True, tensorboard=False)
    assert outcome.resumed_from == (cut - 1) // 2 * 2 and outcome.finished
    assert content(folder) == whole


def test_T4_three_resumes_in_a_row(source, tmp_path, whole):
    folder, recipe = tmp_path / "run", tiny(source)
    for cut in (3, 4, 9, 11):
        with pytest.raises(Stop):
            train(recipe, folder, resume=folder.exists(), tensorboard=False, on_step=until(cut))
    train(recipe, folder, resume=True, tensorboard=False)
    assert content(folder) == whole


def test_T6_resuming_at_an_epoch_end_repeats_and_drops_nothing(source, tmp_path, whole):
    folder, recipe = tmp_path / "run", tiny(source, checkpoint_every=1)
    epochs = [line["epoch"] for line in whole[4]]
    assert len(set(epochs)) > 2, "the run must cross epochs for this test to mean anything"
    for cut in range(1, 12):
        with pytest.raises(Stop):
            train(recipe, folder, resume=folder.exists(), tensorboard=False, on_step=until(cut))
    train(recipe, folder, resume=True, tensorboard=False)
    assert weights(folder) == whole[0] and content(folder)[4] == whole[4]


def test_T5_workers_change_nothing(tmp_path, whole):
    """Pictures from files, decoded by workers, are those decoded in a thread."""
    from mettle.data import Loader, ShuffledBatchSampler, read
    from mettle.data.transforms import find_preset

    folder = image_folder(tmp_path / "pictures")
    samples = read(folder)
    assert not samples.inputs.is_in_memory
    order = ShuffledBatchSampler(len(samples), 4, seed=3)
    hashes = []
    for workers in (0, 1, 2):
        loader = Loader(samples, order, find_preset("photo"), seed=3, views=2, workers=workers)
        hashes.append([batch.inputs.numpy().tobytes() for batch in loader.batches(1, 5)])
    assert hashes[0] == hashes[1] == hashes[2]


@pytest.mark.parametrize("noticed", [False, True])
def test_T12_a_dead_worker_is_named_not_waited_for(tmp_path, noticed):
    from mettle.data import Loader, ShuffledBatchSampler, read
    from mettle.data.transforms import find_preset
    from mettle.errors import DataError

    samples = read(image_folder(tmp_path / "pictures"))
    loader = Loader(samples, ShuffledBatchSampler(len(samples), 4), find_preset("none"), workers=1)
    batches = loader.batches(0, 500)
    next(batches)
    import multiprocessing

    for child in multiprocessing.active_children():
        child.kill()
    if noticed:  # before the next samples are asked for
        time.sleep(1)
    with pytest.raises(DataError, match="worker died"):
        list(batches)


def image_folder(root: Path, labels: str = "abc", each: int = 4) -> Path:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in labels:
        (root / label).mkdir(parents=True)
        for k in range(each):
            Image.fromarray(rng.integers(0, 255, (20, 20, 3), np.uint8)).save(root / label / f"{k}.png")
    return root


def test_an_existing_run_is_never_touched(source, tmp_path):
    folder = tmp_path / "run"
    train(tiny(source, steps=2), folder, tensorboard=False)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(RunError, match="there already"):
        train(tiny(source, steps=2), folder, tensorboard=False)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_T8_a_changed_recipe_or_changed_data_are_refused(source, tmp_path):
    folder, copy = tmp_path / "run", tmp_path / "data.npz"
    shutil.copy(source, copy)
    recipe = tiny(copy)
    with pytest.raises(Stop):
        train(recipe, folder, tensorboard=False, on_step=until(5))
    with pytest.raises(RunError, match=r"train\.rate differ"):
        train(tiny(copy, rate=0.5), folder, resume=True, tensorboard=False)
    make_npz(copy, seed=9)
    with pytest.raises(RunError, match="data of .* have changed"):
        train(recipe, folder, resume=True, tensorboard=False)


def test_a_run_of_another_format_is_refused_in_one_line(source, tmp_path):
    folder = tmp_path / "run"
    train(tiny(source, steps=1), folder, tensorboard=False)
    state = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(RunError, match="run format 99"):
        open_run_folder(folder)
    with pytest.raises(RunError, match="not a run"):
        open_run_folder(tmp_path / "nothing")


def test_weights_that_are_not_those_of_the_contract_are_refused(source, tmp_path):
    folder = tmp_path / "run"
    train(tiny(source, steps=1), folder, tensorboard=False)
    open_run_folder(folder).model()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    with pytest.raises(RunError, match="instead of|another file"):
        open_run_folder(folder).model()


def test_T9_a_diverging_run_stops_in_plain_words_and_keeps_its_checkpoint(source, tmp_path, monkeypatch):
    from mettle.losses import SupCon

    calls = iter(range(100))

    def broken(self, z, y, **options):
        value = original(self, z, y, **options)
        return value * float("nan") if next(calls) >= 5 else value

    original = SupCon.__call__
    monkeypatch.setattr(SupCon, "__call__", broken)
    with pytest.raises(NumericError, match="diverged") as caught:
        train(tiny(source), tmp_path / "run", tensorboard=False)
    assert "samples [" in str(caught.value) and "step 8" in str(caught.value)
    assert "the checkpoint of step 6 is kept" in str(caught.value)
    step, state, _ = checkpoint.load_latest(tmp_path / "run" / "checkpoints")
    assert step == 6  # steps 6 to 8 were refused; the state at 6 is that of 5
    assert all(torch.isfinite(t).all() for t in checkpoint.flatten_state(state)[0].values() if t.is_floating_point())


def test_a_run_that_diverges_before_its_first_checkpoint_does_not_speak_of_one(source, tmp_path, monkeypatch):
    from mettle.losses import SupCon

    original = SupCon.__call__
    monkeypatch.setattr(SupCon, "__call__", lambda self, z, y, **more: original(self, z, y, **more) * float("nan"))
    with pytest.raises(NumericError, match="diverged.*no checkpoint was written yet"):
        train(tiny(source, checkpoint_every=100), tmp_path / "run", tensorboard=False)
    assert checkpoint.load_latest(tmp_path / "run" / "checkpoints") is None


def test_a_collapse_is_named(source, tmp_path, monkeypatch):
    from mettle.model import Embedder

    def constant(self, x):
        return torch.ones(len(x), self.dim) + 0 * self.head(self.features(x))

    monkeypatch.setattr(Embedder, "forward", constant)
    with pytest.raises(NumericError, match="collapsed"):
        train(tiny(source, log_every=1), tmp_path / "run", tensorboard=False)


def test_T11_a_polite_signal_saves_and_stops(source, tmp_path):
    folder, recipe = tmp_path / "run", tiny(source, checkpoint_every=1000)
    sent = threading.Event()

    def progress(step: int, line: dict) -> None:
        if step == 4 and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = train(recipe, folder, tensorboard=False, on_step=progress)
    assert not outcome.finished
    step, _, _ = checkpoint.load_latest(folder / "checkpoints")
    assert step in (4, 5)
    assert train(recipe, folder, resume=True, tensorboard=False).finished


def test_the_log_says_what_difficulty_did_and_where_time_went(whole, source, tmp_path):
    folder = tmp_path / "run"
    train(tiny(source), folder, tensorboard=True)
    lines = logs.read_log(folder / "log.jsonl")
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    for key in ("loss", "hard_positives", "hard_negatives", "effective_negatives", *TIMES[:2]):
        assert key in lines[-1]
    assert 0 < lines[-1]["share_in_model_and_loss"] <= 1
    assert list((folder / "tensorboard").iterdir())


def test_every_epoch_ends_with_a_line_of_facts(source, tmp_path):
    train(tiny(source, log_every=5), tmp_path / "run", tensorboard=False)
    lines = logs.read_log(tmp_path / "run" / "log.jsonl")
    assert [line["step"] for line in lines] == [3, 5, 6, 9, 10, 12]  # epochs of three steps
    assert [line["epoch"] for line in lines] == [0, 1, 1, 2, 3, 3]
    assert all("hard_negatives" in line for line in lines)


def test_lines_at_epoch_ends_survive_a_resume(source, tmp_path):
    recipe = tiny(source, log_every=100)
    train(recipe, tmp_path / "whole", tensorboard=False)
    for cut in (3, 4, 8):
        with pytest.raises(Stop):
            train(recipe, tmp_path / "run", resume=(tmp_path / "run").exists(), tensorboard=False, on_step=until(cut))
    train(recipe, tmp_path / "run", resume=True, tensorboard=False)
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    assert [line["step"] for line in content(tmp_path / "run")[4]] == [3, 6, 9, 12]


SIX_POINTS = ("step 1", "save 2", "step 5", "save 6", "step 9", "end")


@pytest.mark.parametrize(
    ("workers", "points"),
    # Every process that has workers loads torch for them anew, so all six points with workers are for `make test-slow`.
    [(0, SIX_POINTS), (2, ("save 6",)), pytest.param(2, SIX_POINTS, marks=pytest.mark.slow)],
)
def test_T1_training_killed_at_six_points_resumes_bit_for_bit(tmp_path, workers, points):
    """Real processes, killed with SIGKILL in or after a step, each continued by the next."""
    content_of = {"data": {"source": str(image_folder(tmp_path / "images", "abcdefgh", 8)), "size": 16, "val": 0.0}}
    content_of |= {"batch": {"classes": 2, "samples": 3, "augment": "photo", "workers": workers}}
    content_of |= {"model": {"width": 4, "depth": 2, "dim": 8}, "loss": {"kind": "SupCon", "temperature": 0.1}}
    content_of |= {"train": {"steps": 14, "checkpoint_every": 2, "log_every": 3, "ema": 0.9, "collapse_gap": 0.0}}
    recipe = parse_recipe(content_of)
    train(recipe, tmp_path / "whole", tensorboard=False)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, tmp_path / "killed.py", tmp_path / "recipe.toml", tmp_path / "run", *points]
    with (tmp_path / "said").open("w") as said:  # no pipe: workers of a killed process would keep it open
        options = {"stdout": said, "stderr": said, "start_new_session": True}
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **options)
        try:
            code = process.wait(600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    text = (tmp_path / "said").read_text()
    assert code == 0, text
    assert [point for point in points if f"killed at {point}\n" in text] == list(points), text
    assert content(tmp_path / "run") == content(tmp_path / "whole")


KILLED = textwrap.dedent(
    """
    import os, signal, sys, torch
    import torch._dynamo  # which every child would load at its first step
    from mettle.evaluate import ValidationScore
    from mettle.train import checkpoint, from_recipe, load

    def train(point):
        def kill_at(here):
            if here == point:
                os.kill(os.getpid(), signal.SIGKILL)

        def save_checkpoint(folder, step, state):
            if point == f"save {step}":  # half of it is written
                (folder / f"step-{step:08d}.mettle-tmp-0").mkdir(parents=True)
            kill_at(f"save {step}")
            return save(folder, step, state)

        def write_checkpoint(folder, step, state):
            if folder.name == "best":
                kill_at(f"best {step}")
            return write(folder, step, state)

        def save_artifact(*args, **options):
            kill_at("end")
            return finish(*args, **options)

        save, checkpoint.save_checkpoint = checkpoint.save_checkpoint, save_checkpoint
        write, checkpoint.write_checkpoint = checkpoint.write_checkpoint, write_checkpoint
        finish, from_recipe.save_artifact = from_recipe.save_artifact, save_artifact
        recipe, folder = load(sys.argv[1]), sys.argv[2]
        options = {"tensorboard": False, "score": ValidationScore()}
        from_recipe.train(recipe, folder, resume=True, on_step=lambda step, line: kill_at(f"step {step}"), **options)

    if __name__ == "__main__":  # workers are started afresh and read this file too
        torch.set_num_threads(1)
        for point in (*sys.argv[3:], ""):  # forked, because starting torch takes longer than all of it
            child = os.fork()
            if child == 0:
                train(point)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                print(f"killed at {point}", flush=True)
            elif status:
                sys.exit(f"failed at {point}")
    """
)
