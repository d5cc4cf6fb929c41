"""From files to batches: one table of samples, its readers, its splits, its order and its augmentation."""

from typing import TYPE_CHECKING

from mettle.data.check import DataReport, check, drop_unreadable
from mettle.data.dataset import Column, Samples
from mettle.data.loader import Batch, Loader
from mettle.data.sampler import EpochBatchSampler, PKBatchSampler, ShuffledBatchSampler, UpsampledSampler
from mettle.data.sources import read
from mettle.data.sources.glyphs import glyphs
from mettle.data.splits import hold_out_domains, identity_disjoint_split, sample_split
from mettle.data.transforms import Augment, BatchTransform
from mettle.data.tuples import Pairs, Triplets
from mettle.unknown_names import explain_missing_name

__all__ = [
    "Augment",
    "Batch",
    "BatchTransform",
    "Column",
    "DataReport",
    "EpochBatchSampler",
    "Loader",
    "PKBatchSampler",
    "Pairs",
    "Samples",
    "ShuffledBatchSampler",
    "Triplets",
    "UpsampledSampler",
    "check",
    "drop_unreadable",
    "glyphs",
    "hold_out_domains",
    "identity_disjoint_split",
    "read",
    "sample_split",
]

_PEERS = {  # what other libraries call it
    "DataLoader": "Loader",
    "DatasetFolder": "read(folder)",
    "ImageFolder": "read(folder)",
    "MPerClassSampler": "PKBatchSampler",
    "PKSampler": "PKBatchSampler",
    "RandomIdentitySampler": "PKBatchSampler",
}

if not TYPE_CHECKING:  # a checker of types should go on refusing what is not there

    def __getattr__(name: str):
        raise explain_missing_name(__name__, name, __all__, _PEERS)
