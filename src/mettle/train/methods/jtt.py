"""Just train twice (Liu et al. 2021): find what a first classifier gets wrong, then train another on more of that."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mettle.data.draws import hashed
from mettle.data.loader import Batch, Loader
from mettle.data.samples import Samples
from mettle.model import Embedder, embed


@torch.no_grad()
def find_misclassified(model: Embedder, loss: Any, classes: torch.Tensor, samples: Samples) -> np.ndarray:
    """Positions of the samples that a classifier gets wrong, in eval mode and without augmentation."""
    z = torch.from_numpy(embed(model, samples)).to(loss.vectors().device)
    if getattr(loss, "unit_features", True):
        z = nn.functional.normalize(z, dim=1)
    bias = getattr(loss, "bias", None)
    logits = z @ loss.vectors().to(z.dtype).T + (0 if bias is None else bias)
    said = classes.cpu().numpy()[logits.argmax(1).cpu().numpy()]
    return np.flatnonzero(said != samples.labels)


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


def upsample(samples: Samples, wrong: np.ndarray, copies: int) -> tuple[Samples, np.ndarray]:
    """Every sample once, and those at ``wrong`` ``copies`` times more: the entries, and the ids of their samples.

    An entry's own id is what its changes are drawn for: that of the sample, and for its k-th copy a hash of that and k,
    so copies of one sample are changed each in its own way, and a run that is resumed changes them alike.
    """
    positions = np.concatenate([np.arange(len(samples)), np.tile(wrong, copies)])
    number = np.concatenate([np.zeros(len(samples), np.int64), np.repeat(np.arange(1, copies + 1), len(wrong))])
    entries = samples.take(positions)
    drawn = (hashed(entries.ids, number, 23) >> np.uint64(1)).astype(np.int64)
    return replace(entries, ids=np.where(number == 0, entries.ids, drawn)), entries.ids


@dataclass(frozen=True, eq=False)
class UpsampledLoader(Loader):
    """A loader of such entries, whose batches name the samples."""

    names: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # for each entry, the id of its sample

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of steps ``start`` to ``stop`` - 1."""
        order = np.argsort(self.samples.ids, kind="stable")
        own = self.samples.ids[order]
        for batch in super().batches(start, stop):
            at = order[np.searchsorted(own, batch.ids.cpu().numpy())]
            yield replace(batch, ids=torch.from_numpy(self.names[at]).to(batch.ids.device))
