"""What a run folder keeps: who was trained on, where the data are, the artifact or nothing of it."""

import errno
import json
import resource
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mettle.data import Samples, read
from mettle.data.duplicates import train_test_duplicates
from mettle.data.inputs import FeatureArray, ImageArray
from mettle.errors import DataError, RunError
from mettle.model import weights
from mettle.train import open_run_folder, run_folder, train
from mettle.train.datamodule import is_training_data, prepare_samples
from mettle.train.recipe import parse_recipe
from mettle.train.run_folder import TrainingIdentities, hash_name
from processes import run_mettle

from .conftest import make_npz, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    source = make_npz(folder / "patterns.npz")
    return train(tiny(source, steps=1), folder / "run", tensorboard=False)


def test_a_run_keeps_its_training_identities_and_domains(run):
    found = run.run.training_identities()
    names = [str(k) for k in range(12)]
    assert found.contains(names).tolist() == [k < 6 for k in range(12)]
    assert found.contains_domain(["dark", "bright", "dim"]).tolist() == [True, True, False]
    assert found.identities.dtype == np.int64 and len(found.identities) == 6


def test_no_name_stands_in_the_file(tmp_path):
    rows = np.random.default_rng(0).random((8, 3))
    samples = Samples.of(FeatureArray(rows), np.repeat(["Ada Lovelace", "b", "c", "d"], 2), split=[0] * 4 + [2] * 4)
    TrainingIdentities.from_samples(samples).save(tmp_path)
    content = (tmp_path / "trained.safetensors").read_bytes()
    assert b"Ada" not in content and b"Lovelace" not in content and len(content) < 200


def test_the_two_spellings_of_an_accent_are_one_name():
    assert hash_name("Jose\N{COMBINING ACUTE ACCENT}") == hash_name("Jos\N{LATIN SMALL LETTER E WITH ACUTE}")
    assert hash_name("1") != hash_name("01")
    # Fixed for good: files of one version are read by the next. First eight bytes of SHA-256 of "person 01".
    assert hash_name("person 01") == int.from_bytes(bytes.fromhex("3705b9f18da578b6"), "little", signed=True)


def test_a_folder_without_the_file_says_nothing_and_damage_is_one_line(run, tmp_path):
    shutil.copytree(run.run.folder, tmp_path / "old")
    old, file = open_run_folder(tmp_path / "old"), tmp_path / "old" / "trained.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(RunError, match="damaged"):
        old.training_identities()
    file.unlink()
    assert old.training_identities() is None


def test_a_resumed_run_writes_a_missing_file_again(run, tmp_path):
    shutil.copytree(run.run.folder, tmp_path / "old")
    (tmp_path / "old" / "trained.safetensors").unlink()
    train(run.run.recipe, tmp_path / "old", resume=True, tensorboard=False)
    assert np.array_equal(
        open_run_folder(tmp_path / "old").training_identities().identities, run.run.training_identities().identities
    )


class TestPlace:
    """A run finds its data from anywhere, and says where it looked."""

    @pytest.fixture
    def made(self, tmp_path, monkeypatch):
        (tmp_path / "my data").mkdir()
        make_npz(tmp_path / "my data" / "p.npz")
        monkeypatch.chdir(tmp_path)
        train(tiny(Path("my data/p.npz"), steps=1), tmp_path / "run", tensorboard=False)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        return open_run_folder(tmp_path / "run")

    def test_from_another_folder(self, made):
        assert made.recipe.data.source == "my data/p.npz"  # as it was typed
        assert made.matches_data(prepare_samples(made.recipe_with_data_paths()).fingerprint())
        assert train(made.recipe, made.folder, resume=True, tensorboard=False).finished

    def test_data_that_moved(self, made, tmp_path):
        (tmp_path / "my data").rename(tmp_path / "moved")
        with pytest.raises(DataError, match=r"no data at '.*my data/p.npz': there they were when .*run was trained"):
            made.recipe_with_data_paths()
        assert is_training_data(made, "../moved/p.npz")
        assert made.matches_data(prepare_samples(made.recipe_with_data_paths("../moved/p.npz")).fingerprint())
        moved = made.recipe.model_copy(
            update={"data": made.recipe.data.model_copy(update={"source": "../moved/p.npz"})}
        )
        assert train(moved, made.folder, resume=True, tensorboard=False).finished
        make_npz(tmp_path / "moved" / "p.npz", seed=1)
        with pytest.raises(RunError, match="have changed"):
            train(moved, made.folder, resume=True, tensorboard=False)
        assert not is_training_data(made, "../moved/p.npz")
        assert not is_training_data(made, "nowhere")

    def test_a_run_of_an_older_version_says_where_its_path_comes_from(self, made, tmp_path, monkeypatch):
        state = json.loads((made.folder / "run.json").read_text())
        del state["paths"]
        (made.folder / "run.json").write_text(json.dumps(state))
        old = open_run_folder(made.folder)
        with pytest.raises(DataError, match=r"data\.source of .*recipe\.toml says 'my data/p\.npz', as seen from"):
            old.recipe_with_data_paths()
        monkeypatch.chdir(tmp_path)
        assert old.recipe_with_data_paths().data.source == "my data/p.npz"


class TestCopies:
    def test_of_pixels(self):
        pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4), np.uint8)
        pixels[4], pixels[5] = pixels[0], pixels[3]  # 3 is for validation: nothing was trained on it
        samples = Samples.of(ImageArray(pixels), [0, 0, 1, 2, 3, 3], split=[0, 0, 0, 1, 2, 2])
        found = train_test_duplicates(samples)
        assert (found.count, found.tested) == (1, 2)
        assert "1 of 2 test samples are exact copies" in str(found) and "of '3'" in str(found)

    def test_of_rows(self):
        rows = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [5.0, 6.0]])
        assert train_test_duplicates(Samples.of(FeatureArray(rows), [0, 0, 1, 1], split=[0, 0, 2, 2])).count == 1

    def test_of_files_names_them(self, tmp_path):
        rng = np.random.default_rng(0)
        for part, label in (("train", "a"), ("test", "b")):
            (tmp_path / part / label).mkdir(parents=True)
            for k in range(3):
                file = tmp_path / part / label / f"{k}.png"
                Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8)).save(file)
        samples = read(tmp_path)
        assert not samples.inputs.is_in_memory and train_test_duplicates(samples).count == 0
        shutil.copy(tmp_path / "train" / "a" / "1.png", tmp_path / "test" / "b" / "2.png")
        found = train_test_duplicates(read(tmp_path))
        assert found.count == 1 and "2.png" in found.test and "1.png" in found.train

    def test_none_without_both_sides(self):
        samples = Samples.of(FeatureArray(np.ones((4, 2))), [0, 0, 1, 1], split=[2, 2, 2, 2])
        assert train_test_duplicates(samples).count == 0

    def test_training_says_so_before_the_first_step(self, tmp_path):
        """Also where the split is one that training makes: no label of the copies tells where they will land."""
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (48, 6, 6), np.uint8)
        images[:] = images[0]
        np.savez(tmp_path / "same.npz", images=images, label=np.repeat(np.arange(12), 4))
        heard, steps = [], []

        def progress(step, line):
            steps.append(list(heard))

        outcome = train(
            tiny(tmp_path / "same.npz", steps=1),
            tmp_path / "run",
            tensorboard=False,
            on_note=heard.append,
            on_step=progress,
        )
        assert steps == [heard] and any("exact copies of training samples" in note for note in heard)
        assert set(heard) <= set(outcome.notes)


def two_encoders(source):
    loss = {"kind": "InfoNCE", "difficulty": {"kind": "Relative"}}
    return parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"size": 8, "views": 2},
            "model": {"width": 4, "depth": 2, "dim": 8},
            "loss": loss,
            "train": {"method": "two-encoder", "steps": 2, "collapse_gap": 0.0},
        }
    )


def test_a_second_encoder_that_was_swapped_is_refused(source, tmp_path):
    run = train(two_encoders(source), tmp_path / "run", tensorboard=False).run
    assert run.has_biased_model and run.biased_model().spec == run.model().spec
    weights, biased = tmp_path / "run" / "model.safetensors", tmp_path / "run" / "biased.safetensors"
    kept = biased.read_bytes()
    for other in (weights.read_bytes(), kept[:-1] + b"\x07", kept + b"\x00", b""):
        biased.write_bytes(other)
        with pytest.raises(RunError, match="biased.safetensors (is damaged or another file|has .* bytes instead of)"):
            open_run_folder(tmp_path / "run").biased_model()
    biased.unlink()
    with pytest.raises(RunError, match="biased.safetensors is missing"):
        run.biased_model()


@pytest.mark.parametrize("call", range(3))
def test_an_artifact_that_cannot_be_written_leaves_nothing_of_itself(call, source, tmp_path, monkeypatch):
    """The disk is full at the model, at the second encoder, or at the contract; there is room again for the resume."""
    recipe, real, calls = two_encoders(source), weights.write_bytes, iter(range(10))

    def full(path, content, mode=None):
        if path.parent.name.startswith("artifact.mettle-tmp") and next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, content, mode)

    monkeypatch.setattr(weights, "write_bytes", full)
    monkeypatch.setattr(run_folder, "write_text", lambda path, text: full(path, text.encode()))
    with pytest.raises(RunError, match=r"could not write to .*: No space left on device\. .* --resume") as caught:
        train(recipe, tmp_path / "run", tensorboard=False)
    assert "\n" not in str(caught.value)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"recipe.toml", "run.json", "trained.safetensors", "log.jsonl", "checkpoints"}
    monkeypatch.undo()
    done = train(recipe, tmp_path / "run", resume=True, tensorboard=False)
    assert done.finished and done.run.biased_model() and done.run.model()


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("limit", [300, 2500])
def test_a_file_that_cannot_grow_is_one_line(limit, source, tmp_path):
    """The system itself refuses to write more: at the recipe, or at the log and checkpoints."""
    (tmp_path / "r.toml").write_text(tiny(source, steps=12, log_every=1).to_toml())
    words = ["train", str(tmp_path / "r.toml"), "--runs", str(tmp_path / "runs"), "--name", "a", "--no-report"]
    done = run_mettle(*words, before=partial(limit_files, limit))
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr
    assert "could not write" in done.stderr and "File too large" in done.stderr
    assert not list((tmp_path / "runs").glob("**/*.mettle-tmp-*"))
