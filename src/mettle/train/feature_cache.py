"""Features of a frozen backbone, computed once for all of training.

Where a backbone does not train and images are not changed at random, what it makes of an image is the same in every
epoch. The head then learns from a table of features, which takes seconds where images take hours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from mettle.data.inputs import FeatureArray
from mettle.data.loader import ForeignLoader, Loader
from mettle.data.transforms import Augment
from mettle.model import Embedder, embed
from mettle.train.fine_tuning import WHOLE
from mettle.train.methods.base import Method
from mettle.train.methods.supervised import Supervised


@dataclass(frozen=True, eq=False)
class CachedFeatures:
    """A loader of features in place of one of images, and the network that is to take them."""

    loader: Loader
    model: Embedder
    width: int

    def describe(self) -> str:
        """One line."""
        count = len(self.loader.samples)
        return (
            f"the backbone is frozen and nothing changes images at random: its {self.width:,} features of {count:,} "
            "training images were computed once"
        )

    @contextmanager
    def use(self) -> Iterator[Loader]:
        """Let the network take its features in place of images for a while."""
        self.model.takes_features = True
        try:
            yield self.loader
        finally:
            self.model.takes_features = False


def compute_features(method: Method, loader: Loader | ForeignLoader, memory: float) -> CachedFeatures | None:
    """The features of all training images, where they are the same in every epoch and fit into memory.

    Args:
        method: what is about to train.
        loader: of its batches.
        memory: GiB that features may take.
    """
    model = method.model
    if not _is_constant(method) or not isinstance(loader, Loader) or not _gives_same_images(loader):
        return None
    samples = loader.samples
    width = embed(model, samples.take(np.arange(1)), features=True).shape[1]
    if len(samples) * width * 4 > memory * 2**30:
        return None
    found = FeatureArray(embed(model, samples, features=True))
    table = replace(samples, inputs=found, storage_index=np.arange(len(samples), dtype=np.int64))
    return CachedFeatures(replace(loader, samples=table, workers=0), model, width)


def _is_constant(method: Method) -> bool:
    """Whether all that trains comes after the features: head, neck and loss."""
    model, settings = method.model, method.settings
    if not isinstance(method, Supervised) or not isinstance(model, Embedder) or len(model.shape) != 3:
        return False
    queue_looks = method.past is not None and method.past.encoder is not None
    if queue_looks or method.distill is not None:  # an encoder beside the network looks at images
        return False
    frozen = settings.freeze == WHOLE and settings.freeze_share is None
    before = [*model.backbone.parameters(), *model.pool.parameters()]
    return not any(p.requires_grad for p in before) and (frozen or not any(True for _ in model.backbone.parameters()))


def _gives_same_images(loader: Loader) -> bool:
    """Whether a sample is the same image whenever it comes."""
    is_seeded = getattr(loader.samples.inputs, "is_seeded", False)  # images that are drawn anew
    plain = loader.augment == Augment() and loader.transform is None and not is_seeded
    return plain and loader.tuples is None and loader.samples.inputs.kind == "image"
