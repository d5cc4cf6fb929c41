"""Just train twice (Liu et al. 2021): find what a first classifier gets wrong, then train another on more of that."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mettle.data.batches import SampleBatches
from mettle.data.samples import Samples
from mettle.model import Embedder, embed


@dataclass(frozen=True, eq=False)
class Repeated:
    """Batches of ``size`` samples; in an epoch sample ``positions[k]`` comes once for every k.

    Copies of a sample are changed alike within an epoch, and anew in the next.
    """

    positions: np.ndarray
    size: int
    seed: int = 0

    def epoch(self, number: int) -> tuple[np.ndarray, ...]:
        """All batches of this epoch."""
        order = SampleBatches(len(self.positions), self.size, self.seed)
        return tuple(self.positions[batch] for batch in order.epoch(number))


@torch.no_grad()
def mistakes(model: Embedder, loss: Any, classes: torch.Tensor, samples: Samples) -> np.ndarray:
    """Positions of the samples that a classifier gets wrong, in eval mode and without augmentation."""
    z = torch.from_numpy(embed(model, samples)).to(loss.vectors().device)
    if getattr(loss, "unit_features", True):
        z = nn.functional.normalize(z, dim=1)
    bias = getattr(loss, "bias", None)
    logits = z @ loss.vectors().to(z.dtype).T + (0 if bias is None else bias)
    said = classes.cpu().numpy()[logits.argmax(1).cpu().numpy()]
    return np.flatnonzero(said != samples.labels)


def repeated(count: int, wrong: np.ndarray, copies: int) -> np.ndarray:
    """Every sample once, and those that were wrong ``copies`` times more."""
    return np.concatenate([np.arange(count), np.repeat(wrong, copies)])
