"""The command line as a user meets it: what works, and what one line says when it does not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.command_line import mettle, refused
from tests.train.conftest import make_npz, tiny


def run_process(*arguments: object, status: int) -> subprocess.CompletedProcess:
    """A command in a process of its own, as a shell starts it: for exit statuses and for what goes where."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "mettle", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A small run, trained and reported through the command line."""
    folder = tmp_path_factory.mktemp("cli")
    recipe = folder / "small.toml"
    recipe.write_text(tiny(make_npz(folder / "patterns.npz", classes=24)).to_toml())
    said = mettle("train", recipe, "--runs", folder / "runs")
    assert "EER" in said and "report:" in said
    return folder / "runs" / "small"


def test_train_leaves_the_whole_artifact(run):
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "recipe.toml",
        "model.safetensors",
        "contract.json",
        "metrics.json",
        "log.jsonl",
        "report.html",
        "checkpoints",
    }
    contract = json.loads((run / "contract.json").read_text())
    assert contract["metric"] == "cosine" and contract["dim"] == 8 and contract["thresholds"]
    metrics = json.loads((run / "metrics.json").read_text())
    assert set(metrics["scenarios"]) == {"in-domain", "cross-domain"}
    assert set(metrics["baselines"]) == {"raw inputs", "untrained network"}
    assert metrics["data"]["shared_identities"] == 0


def test_a_taken_name_is_numbered_and_a_given_one_refused(run):
    recipe = run.parents[1] / "small.toml"
    said = mettle("train", recipe, "--runs", run.parent, "--no-report", "--set", "train.steps=1")
    assert f"run folder: {run}-2" in said
    text = refused("train", recipe, "--runs", run.parent, "--name", run.name)
    assert "--resume" in text


def test_evaluate_gives_the_same_numbers_again_and_other_data_others(run, tmp_path):
    before = json.loads((run / "metrics.json").read_text())
    mettle("evaluate", run)
    assert json.loads((run / "metrics.json").read_text()) == before
    other = make_npz(tmp_path / "other.npz", seed=5)
    mettle("evaluate", run, "--data", other, "-o", tmp_path / "other.json")
    found = json.loads((tmp_path / "other.json").read_text())
    assert found["data"]["fingerprint"] != before["data"]["fingerprint"]
    assert json.loads((run / "metrics.json").read_text()) == before


def test_embed_writes_everything_needed_to_judge(run, tmp_path):
    source = run.parents[1] / "patterns.npz"
    mettle("embed", run, source, "-o", tmp_path / "z.npz")
    with np.load(tmp_path / "z.npz", allow_pickle=False) as z, np.load(source) as raw:
        assert z["embeddings"].shape == (len(raw["label"]), 8)
        assert z["label"].tolist() == raw["label"].tolist()
        assert set(z["split"]) == {"train", "val", "test"} and set(z["domain"]) == {"dark", "bright"}
        np.testing.assert_allclose(np.linalg.norm(z["embeddings"], axis=1), 1, atol=1e-5)


def test_export_writes_onnx(run, tmp_path):
    said = mettle("export", run, "--onnx", tmp_path / "m.onnx")
    assert "largest difference" in said and (tmp_path / "m.onnx").stat().st_size > 1000


def test_report_compares_runs(run, tmp_path):
    recipe = run.parents[1] / "small.toml"
    mettle("train", recipe, "--runs", tmp_path, "--name", "b", "--set", "loss.temperature=0.3")
    mettle("report", run, tmp_path / "b", "-o", tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "loss.temperature" in page


def test_a_process_prints_and_ends_with_status_0():
    done = run_process("recipes", status=0)
    assert "da-supcon" in done.stdout and done.stderr == ""


def test_a_process_that_is_refused_says_why_in_one_line_and_ends_with_status_2(tmp_path):
    done = run_process("train", "supcon", "--set", "train.setps=3", "--runs", tmp_path / "x", status=2)
    assert done.stdout == "" and done.stderr.startswith("mettle: ") and done.stderr.count("\n") == 1, done.stderr
    assert "did you mean 'steps'" in done.stderr


class TestBadInput:
    def test_unknown_recipe_key(self, run):
        assert "did you mean 'steps'" in refused("train", "supcon", "--set", "train.setps=3", "--runs", run / "x")
        assert not (run / "x").exists()

    def test_unknown_recipe(self):
        assert "did you mean 'supcon'" in refused("train", "supconn")

    def test_missing_folder(self, tmp_path):
        assert "no data at" in refused("train", "supcon", "--data", tmp_path / "nowhere", "--runs", tmp_path / "runs")
        assert not (tmp_path / "runs").exists()

    def test_one_image_classes(self, tmp_path):
        for k in range(6):
            (tmp_path / "d" / str(k)).mkdir(parents=True)
            Image.fromarray(np.full((8, 8, 3), 40 * k, np.uint8)).save(tmp_path / "d" / str(k) / "a.png")
        text = refused("train", "supcon", "--data", tmp_path / "d", "--runs", tmp_path / "runs")
        assert "two or more samples" in text

    def test_corrupt_image(self, tmp_path):
        self.folder(tmp_path / "d")
        (tmp_path / "d" / "0" / "0.png").write_bytes(b"<html>not a picture</html>")
        told = ("--set", "data.policy=fail")  # without, it is left out and named
        text = refused("train", "supcon", "--data", tmp_path / "d", "--runs", tmp_path / "runs", *told)
        assert "0.png" in text and not (tmp_path / "runs").exists()
        assert "data.policy='skip'" in text

    def test_corrupt_image_is_listed_with_policy_skip(self, tmp_path):
        self.folder(tmp_path / "d", each=30)
        (tmp_path / "d" / "0" / "0.png").write_bytes(b"")
        told = ("--set", "data.policy=fail")
        text = refused("train", "supcon", "--data", tmp_path / "d", "--runs", tmp_path / "runs", *told)
        assert "or leave it out: data.policy='skip' in a recipe (--set data.policy=skip of train" in text
        options = [
            "--set",
            "data.policy=skip",
            "--set",
            "batch.classes=3",
            "--set",
            "train.steps=1",
            "--no-report",
        ]
        mettle("train", "supcon", "--data", tmp_path / "d", "--runs", tmp_path / "runs", *options)

    def test_run_folder_of_another_version(self, run, tmp_path):
        shutil.copytree(run, tmp_path / "old")
        state = json.loads((tmp_path / "old" / "run.json").read_text())
        (tmp_path / "old" / "run.json").write_text(json.dumps(state | {"format": 0}))
        for command in ("evaluate", "report"):
            assert "run format 0" in refused(command, tmp_path / "old")

    def test_not_a_run_folder(self, tmp_path):
        assert "not a run of mettle" in refused("evaluate", tmp_path)

    def test_a_run_that_never_finished(self, run, tmp_path):
        shutil.copytree(run, tmp_path / "half")
        (tmp_path / "half" / "contract.json").unlink()
        assert "--resume" in refused("evaluate", tmp_path / "half")

    def test_cuda_where_there_is_none(self, run):
        import torch

        if torch.cuda.is_available():
            return
        recipe = run.parents[1] / "small.toml"
        assert "no CUDA device" in refused("train", recipe, "--set", "train.device=cuda", "--runs", run / "x")

    @staticmethod
    def folder(root: Path, each: int = 4) -> None:
        rng = np.random.default_rng(0)
        for k in range(10):
            (root / str(k)).mkdir(parents=True)
            for j in range(each):
                Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(root / str(k) / f"{j}.png")


class TestDataCheck:
    def test_good_data(self, run):
        text = mettle("data", "check", run.parents[1] / "patterns.npz")
        assert "open-set" in text and "0 errors" in text

    def test_leakage_duplicates_and_bad_files_are_listed(self, tmp_path):
        TestBadInput.folder(tmp_path / "train")
        shutil.copytree(tmp_path / "train" / "0", tmp_path / "test" / "9")
        (tmp_path / "train" / "3" / "2.png").write_bytes(b"oops")
        said = mettle("data", "check", tmp_path, status=1)
        assert "2.png" in said and "errors" in said and "0 errors" not in said

    def test_a_bad_manifest_names_its_line(self, tmp_path):
        (tmp_path / "m.csv").write_text("path,label\na.png,x\nb.png\n")
        assert "3" in refused("data", "check", tmp_path / "m.csv")


def test_a_folder_that_is_gone_is_told_before_anything_starts(tmp_path):
    """Numerical libraries that start in such a folder end the process without a word."""
    folder = tmp_path / "gone"
    folder.mkdir()
    command = f'cd "{folder}" && rmdir "{folder}" && "{sys.executable}" -m mettle recipes'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["mettle: this folder is gone: change to one that exists"]
