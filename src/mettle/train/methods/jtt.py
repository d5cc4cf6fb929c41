"""Just train twice (Liu et al. 2021): find what a first classifier gets wrong, then train another on more of that."""

from typing import Any

import numpy as np
import torch

from mettle.data.dataset import Samples
from mettle.model import Embedder, embed


@torch.no_grad()
def find_misclassified(model: Embedder, loss: Any, classes: torch.Tensor, samples: Samples) -> np.ndarray:
    """Positions of the samples that a classifier gets wrong, in eval mode and without augmentation."""
    said = loss.predict(torch.from_numpy(embed(model, samples)).to(loss.weight.device)).cpu().numpy()
    return np.flatnonzero(classes.cpu().numpy()[said] != samples.labels)


def describe_error_set(wrong: int, total: int, steps: int) -> str:
    """How many training samples the first classifier gets wrong, and what to change where repeating them means little.

    The method rests on a minority that a classifier fails on. Repeated alike, most of the data are the data.
    """
    share = 100 * wrong / total
    said = f"the first classifier ({steps} steps) got {wrong} of {total} training samples wrong ({share:.1f} %)"
    if wrong == 0:
        why = "there is nothing to repeat, so the second training is plain training"
        return f"{said}: {why}. Lower jtt.first so that the first classifier stops earlier, or use another method"
    if 2 * wrong > total:
        why = "copies of most samples change little, so the second training is close to plain training"
        return f"{said}: {why}. Raise jtt.first or train.steps until fewer than half are wrong"
    return said
