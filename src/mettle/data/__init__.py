"""From files to batches: one table of samples, its readers, its splits, its order and its augmentation."""

from typing import TYPE_CHECKING

from mettle.data.check import Findings, check, screen
from mettle.data.dataset import Column, Samples
from mettle.data.loader import Batch, Loader
from mettle.data.sampler import ClassBatches, SampleBatches
from mettle.data.sources import read
from mettle.data.sources.glyphs import glyphs
from mettle.data.splits import class_disjoint, sample_split, unseen_domain
from mettle.data.transforms import Augment
from mettle.data.tuples import Pairs, Triplets
from mettle.unknown_names import explain_missing_name

__all__ = [
    "Augment",
    "Batch",
    "ClassBatches",
    "Column",
    "Findings",
    "Loader",
    "Pairs",
    "SampleBatches",
    "Samples",
    "Triplets",
    "check",
    "class_disjoint",
    "glyphs",
    "read",
    "sample_split",
    "screen",
    "unseen_domain",
]

_PEERS = {  # what other libraries call it
    "DataLoader": "Loader",
    "DatasetFolder": "read(folder)",
    "ImageFolder": "read(folder)",
    "MPerClassSampler": "ClassBatches",
    "PKSampler": "ClassBatches",
    "RandomIdentitySampler": "ClassBatches",
}

if not TYPE_CHECKING:  # a checker of types should go on refusing what is not there

    def __getattr__(name: str):
        raise explain_missing_name(__name__, name, __all__, _PEERS)
