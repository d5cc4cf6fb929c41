"""From files to batches: one table of samples, its readers, its splits, its order and its augmentation."""

from mettle.data.augment import Augment
from mettle.data.batches import ClassBatches, SampleBatches
from mettle.data.check import Findings, check, screen
from mettle.data.glyphs import glyphs
from mettle.data.loader import Batch, Loader
from mettle.data.samples import Column, Samples
from mettle.data.source import read
from mettle.data.splits import class_disjoint, sample_split, unseen_domain
from mettle.data.tuples import Pairs, Triplets

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
