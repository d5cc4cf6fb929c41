"""Tiny runs, trained for a few steps: pictures in two domains with a hostile label, and rows of numbers."""

from pathlib import Path

import numpy as np
import pytest
from tables import HOSTILE, Made, make_two

from mettle.evaluate.run import evaluate_run
from mettle.train import train
from mettle.train.recipe import parse_recipe


def names(count: int) -> np.ndarray:
    """Identities of which the last one, a test identity, carries markup."""
    return np.asarray([f"person {k:02d}" for k in range(count - 1)] + [HOSTILE])


def pictures(path: Path) -> None:
    """20 identities x 2 domains x 4 pictures: 12 to train on, 3 to set thresholds on, 5 to test."""
    rng = np.random.default_rng(0)
    identity = np.repeat(np.arange(20), 8)
    domain = np.tile(np.repeat([0, 1], 4), 20)
    base = rng.integers(0, 256, (20, 12, 12, 1))
    noise = rng.normal(0, 40, (160, 12, 12, 1)) + 30 * domain[:, None, None, None]
    split = np.select([identity < 12, identity < 15], [0, 1], 2)
    np.savez(
        path,
        images=np.clip(base[identity] + noise, 0, 255).astype(np.uint8),
        label=names(20)[identity],
        domain=np.asarray(["indoors", "out & about"])[domain],
        split=split,
    )


def rows(path: Path) -> None:
    """16 identities x 6 rows of numbers, no domains, split by mettle itself."""
    rng = np.random.default_rng(1)
    identity = np.repeat(np.arange(16), 6)
    x = rng.normal(size=(16, 8))[identity] + 0.4 * rng.normal(size=(96, 8))
    np.savez(path, x=x.astype(np.float32), label=identity)


def birds(path: Path) -> None:
    """Two classes in two places, all of them in training and in test: a closed set. One class carries markup."""
    rng = np.random.default_rng(2)
    y, place = rng.integers(0, 2, 240), rng.integers(0, 2, 240)
    x = rng.normal(size=(2, 8))[y] + rng.normal(size=(2, 8))[place] + rng.normal(size=(240, 8))
    names = np.asarray(["duck", HOSTILE])[y]
    split = np.tile([0, 0, 1, 2, 2, 2], 40)
    np.savez(path, x=x.astype(np.float32), label=names, place=np.asarray(["land", "water"])[place], split=split)


def make(folder: Path, source: Path, name: str, seed: int = 0, evaluate: dict | None = None, **loss) -> Made:
    backbone = "convnet" if "pictures" in source.name else "mlp"
    recipe = parse_recipe(
        {
            "seed": seed,
            "data": {"source": str(source)},
            "batch": {"classes": 2 if evaluate else 4, "samples": 2, "augment": "none"},
            "model": {"backbone": backbone, "width": 4, "depth": 2, "dim": 8, "pool": "flatten"},
            "loss": {"kind": "SupCon", "difficulty": {"kind": "Threshold"}} | loss,
            "train": {"steps": 6, "log_every": 1, "device": "cpu"},
            "evaluate": {"ks": [1, 2]} | (evaluate or {}),
        }
    )
    outcome = train(recipe, folder / name, tensorboard=False)
    return Made(outcome.run, evaluate_run(outcome.run, outcome.samples, model=outcome.model), outcome.samples)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def made(folder) -> Made:
    """A run on pictures in two domains."""
    pictures(folder / "pictures.npz")
    return make(folder, folder / "pictures.npz", "one")


@pytest.fixture(scope="session")
def other(folder, made) -> Made:
    """Another run on the same pictures."""
    return make(folder, folder / "pictures.npz", "two", seed=1, temperature=0.2)


@pytest.fixture(scope="session")
def two(folder, made) -> Made:
    """A run of two encoders on the same pictures."""
    return make_two(folder, folder / "pictures.npz", "both")


@pytest.fixture(scope="session")
def table(folder) -> Made:
    """A run on rows of numbers."""
    rows(folder / "rows.npz")
    return make(folder, folder / "rows.npz", "rows")


@pytest.fixture(scope="session")
def closed(folder) -> Made:
    """A run on two classes that are all trained on, with a place that a model may fall for."""
    birds(folder / "birds.npz")
    return make(folder, folder / "birds.npz", "birds", evaluate={"spurious": "place"})


@pytest.fixture(scope="session")
def ranked(folder, made) -> Made:
    """A run whose loss is measured by retrieval, on the pictures in two domains."""
    loss = {"kind": "MultiSimilarity", "difficulty": None}
    return make(folder, folder / "pictures.npz", "ranked", **loss)
