"""A tiny trained run on pictures, made in a second: for tests of everything that starts from a run."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mettle.data.dataset import Samples
from mettle.evaluate.run import evaluate_run
from mettle.train import RunFolder, train
from mettle.train.recipe import parse_recipe


@dataclass(frozen=True)
class Small:
    run: RunFolder
    samples: Samples


def small_run(folder: Path, name: str = "small", *, seed: int = 0, dim: int = 8, steps: int = 30) -> Small:
    """20 identities x 8 grey pictures of 12 x 12: 12 identities to train on, 3 to set thresholds on, 5 to test."""
    rng = np.random.default_rng(0)
    identity = np.repeat(np.arange(20), 8)
    base = rng.integers(0, 256, (20, 12, 12, 1))
    noise = rng.normal(0, 40, (160, 12, 12, 1))
    source = folder / "pictures.npz"
    np.savez(
        source,
        images=np.clip(base[identity] + noise, 0, 255).astype(np.uint8),
        label=np.asarray([f"person {k:02d}" for k in range(20)])[identity],
        split=np.select([identity < 12, identity < 15], [0, 1], 2),
    )
    recipe = parse_recipe(
        {
            "seed": seed,
            "data": {"source": str(source)},
            "batch": {"classes": 6, "samples": 4, "augment": "none"},
            "model": {"backbone": "convnet", "width": 4, "depth": 2, "dim": dim, "pool": "flatten"},
            "loss": {"kind": "SupCon", "difficulty": {"kind": "Threshold"}},
            "train": {"steps": steps, "log_every": 5, "device": "cpu"},
            "evaluate": {"ks": [1, 2]},
        }
    )
    outcome = train(recipe, folder / name, tensorboard=False)
    evaluate_run(outcome.run, outcome.samples, model=outcome.model)
    return Small(outcome.run, outcome.samples)
