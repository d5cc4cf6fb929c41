"""ScenarioResults embeddings without a run, runs of two encoders, and the name that must never become markup."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mettle.data.dataset import Samples
from mettle.evaluate.run import Evaluation, evaluate_run
from mettle.evaluate.run.scenarios import ScenarioResults, evaluate_scenarios
from mettle.train import RunFolder, train
from mettle.train.recipe import parse_recipe

HOSTILE = "<script>alert(1)</script>"


@dataclass(frozen=True)
class Made:
    run: RunFolder
    evaluation: Evaluation
    samples: Samples


class Grey:
    """Pictures made of nothing, for tables whose pictures do not matter."""

    kind = "image"
    shape = (8, 8, 1)
    resident = True

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def read(self, at):
        return np.zeros((len(at), 8, 8, 1), np.uint8)

    def fingerprint(self):
        return "grey"


def make_results(mode: str, n: int = 90, labels: int = 15, seed: int = 0) -> ScenarioResults:
    rng = np.random.default_rng(seed)
    y = np.tile(np.arange(labels), n // labels)
    domain = rng.integers(0, 3, n) if mode != "all" else None
    role = np.where(np.arange(n) < n // 2, "query", "gallery") if mode == "roles" else None
    z = rng.normal(size=(labels, 6))[y] + rng.normal(size=(n, 6))
    return evaluate_scenarios(z.astype(np.float32), Samples.of(Grey(n), y, domain=domain, role=role), (1,))


def make_two(folder: Path, source: Path, name: str, weights: str = "pairs") -> Made:
    backbone = "convnet" if "pictures" in source.name else "mlp"
    recipe = parse_recipe(
        {
            "data": {"source": str(source)},
            "batch": {"size": 16, "views": 2, "augment": "mild" if backbone == "convnet" else "rows"},
            "model": {"backbone": backbone, "width": 4, "depth": 2, "dim": 8, "pool": "flatten"},
            "loss": {"kind": "InfoNCE", "prior": 0.1, "difficulty": {"kind": "Relative"}},
            "biased": {"weights": weights},
            "train": {"method": "two-encoder", "steps": 9, "log_every": 1, "device": "cpu"},
            "evaluate": {"ks": [1, 2]},
        }
    )
    outcome = train(recipe, folder / name, tensorboard=False)
    return Made(outcome.run, evaluate_run(outcome.run, outcome.samples, model=outcome.model), outcome.samples)
