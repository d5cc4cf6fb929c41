"""A small, quick training set and recipe."""

from pathlib import Path

import numpy as np
import pytest

from mettle.train.recipe import Recipe, parse_recipe


def make_npz(path: Path, *, classes: int = 12, each: int = 6, seed: int = 0) -> Path:
    """Pictures whose class is a coarse pattern and whose domain is their brightness."""
    rng = np.random.default_rng(seed)
    patterns = rng.random((classes, 4, 4))
    label = np.repeat(np.arange(classes), each)
    big = np.kron(patterns[label], np.ones((1, 3, 3)))
    noisy = big * 180 + rng.normal(0, 12, big.shape) + 20 * (np.arange(len(label)) % 2)[:, None, None]
    images = noisy.clip(0, 255).astype(np.uint8)
    split = np.where(label < classes // 2, 0, np.where(label < classes // 2 + 2, 1, 2))
    domain = np.where(np.arange(len(label)) % 2 == 0, "dark", "bright")
    np.savez(path, images=images, label=label, split=split, domain=domain)
    return path


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    return make_npz(tmp_path_factory.mktemp("data") / "patterns.npz")


@pytest.fixture
def recipe(source) -> Recipe:
    return tiny(source)


def tiny(source: Path, **train) -> Recipe:
    return parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"classes": 4, "samples": 3, "augment": "mild"},
            "model": {"width": 4, "depth": 2, "dim": 8},
            "loss": {"kind": "SupCon", "temperature": 0.1, "difficulty": {"kind": "Threshold"}},
            "train": {"steps": 12, "checkpoint_every": 2, "log_every": 3, **train},
        }
    )
