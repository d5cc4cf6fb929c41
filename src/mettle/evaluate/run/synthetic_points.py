"""Synthetic negatives of a hardness-aware run: what its generator makes of test samples at the end of training."""

import numpy as np
import torch

from mettle.data.dataset import Samples
from mettle.data.transforms import to_input_tensor
from mettle.errors import MettleError
from mettle.model import embed
from mettle.rng import permutation
from mettle.train.checkpoint import load_latest
from mettle.train.from_recipe import build_method
from mettle.train.methods.hardness_aware import HardnessAware
from mettle.train.run_folder import RunFolder

CLASSES = 24  # that negatives are made of, at most; two samples of each, which suits every loss
MOST = 200  # points


def synthesize_test_negatives(run: RunFolder, samples: Samples, rows: np.ndarray) -> tuple[np.ndarray | None, str]:
    """(m, dim) embeddings of synthetic negatives, and why there are none.

    Positives, negatives and λ are those of the method: of each class two samples, negatives pulled by the
    last λ, sent through the generator and the head. None are made where the last checkpoint does not hold the weights
    that the run kept, because its generator belongs to another network.

    Args:
        run: the run.
        samples: all splits.
        rows: positions in the test split that may be used.
    """
    if run.recipe.train.method != "hardness-aware":
        return None, ""
    try:
        latest = load_latest(run.folder / "checkpoints")
        if latest is None:
            return None, "no checkpoint is left, and with it no generator"
        method = build_method(run.recipe, samples, "cpu", fetch=False)
        method.load_state_dict(latest[1]["method"])
    except (MettleError, RuntimeError, KeyError) as error:
        return None, f"the generator cannot be read: {error}"
    assert isinstance(method, HardnessAware)
    test = samples.part("test").take(rows)
    at = _choose_tuples(test.labels)
    if len(at) < 4:
        return None, "too few test samples of a class"
    if not np.allclose(embed(method.model, test.take(at[:4])), embed(run.model(), test.take(at[:4])), atol=1e-4):
        return None, "the last checkpoint does not hold the weights that the run kept"
    batch, labels = test.take(at), torch.from_numpy(test.labels[at])
    with torch.no_grad():
        for part in method.modules.values():
            part.eval()
        z = method.embedding(method.model.features(to_input_tensor(batch.read(np.arange(len(at))), "cpu")))
        level = method.plan.pull_level(method.average_metric)
        made, _ = method.tuples.synthesize_negatives(z, method.tuples.tuple_rows(labels), level)
        if method.plan.generator:
            made = method.embedding(method.generator(made))
    spaced = np.unique(np.linspace(0, len(made) - 1, min(MOST, len(made))).round().astype(int))
    return made.numpy()[spaced], ""


def _choose_tuples(labels: np.ndarray) -> np.ndarray:
    """Positions of two samples of each of several classes, class by class."""
    values, counts = np.unique(labels, return_counts=True)
    able = values[counts >= 2]
    able = able[permutation(len(able), 0, 0, stream=43)[:CLASSES]]
    return np.concatenate([np.flatnonzero(labels == value)[:2] for value in able]) if len(able) > 1 else able[:0]
