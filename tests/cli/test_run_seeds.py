"""`mettle train --seeds`: one recipe, several seeds, one split; a mean with an interval over the seeds."""

import json
import shutil

import numpy as np
import pytest
from scipy import stats

from tests.command_line import mettle, refused


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rng = np.random.default_rng(0)
    identity = np.repeat(np.arange(16), 6)
    images = np.clip(rng.integers(60, 200, (16, 10, 10, 1))[identity] + rng.normal(0, 40, (96, 10, 10, 1)), 0, 255)
    path = tmp_path_factory.mktemp("seeds") / "images.npz"
    np.savez(path, images=images.astype(np.uint8), label=identity)
    return path


KEYS = ("train.steps=3", "batch.classes=4", "batch.samples=2", "model.width=4", "model.depth=2", "train.device=cpu")


def train(source, runs, *more):
    keys = [word for key in KEYS for word in ("--set", key)]
    return mettle("train", "supcon", "--data", source, "--runs", runs, "--name", "s", *keys, *more)


def test_the_mean_over_seeds_has_its_interval_and_a_lost_seed_is_trained_again(source, tmp_path):
    said = train(source, tmp_path, "--seeds", 2)
    told = json.loads((tmp_path / "s" / "seeds.json").read_text())
    assert told["seeds"] == [0, 1] and (tmp_path / "s" / "seeds.html").is_file() and "seeds.html" in said
    values, data = [], set()
    for seed in (0, 1):
        metrics = json.loads((tmp_path / "s" / f"seed-{seed}" / "metrics.json").read_text())
        values.append(metrics["scenarios"]["all"]["verification"]["eer"]["value"])
        data.add(metrics["data"]["fingerprint"])  # of which the split is a part
    assert len(data) == 1
    text = json.dumps(told)
    mean, half = np.mean(values), stats.t.ppf(0.975, 1) * np.std(values, ddof=1) / np.sqrt(2)
    numbers = [float(x) for x in _numbers(told)]
    assert min(abs(x - mean) for x in numbers) < 1e-9, text
    assert half == pytest.approx(0) or min(abs(x - (mean - half)) for x in numbers) < 1e-9, text
    shutil.rmtree(tmp_path / "s" / "seed-1")
    again = mettle("train", "--runs", tmp_path, "--name", "s", "--resume")
    assert "done already" in again
    assert json.loads((tmp_path / "s" / "seeds.json").read_text()) == told


def _numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [x for item in value for x in _numbers(item)]
    return [value] if isinstance(value, float) else []


def test_what_goes_wrong_with_seeds_is_one_line(source, tmp_path):
    assert "leave out --no-report" in refused("train", "supcon", "--seeds", "2", "--no-report", "--runs", tmp_path)
    (tmp_path / "s").mkdir()
    assert "choose another --name" in refused(
        "train", "supcon", "--seeds", "2", "--data", source, "--runs", tmp_path, "--name", "s"
    )
