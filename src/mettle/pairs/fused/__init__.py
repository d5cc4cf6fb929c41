"""Fused kernels for CUDA: the losses that have a fused form never hold a matrix, forward or backward.

form      which (loss, difficulty) has a fused form, and its numbers
table     tile sizes by precision and width
prepare   rows sorted by label, normalised, in the operands' precision; and the way back
tile      what happens on one tile
far       the negatives: everything quadratic
near      the positives and the end of each row
written   gradients of wide embeddings, through blocks in memory
launch    starting kernels without asking twice
plan      one call: what is launched, in which order
call      all of it as one autograd function
peak      batch-hard mining
counts    all-pairs score histograms and running neighbours, for evaluation
own       samples and their own classes: what happens once per row
classes   margin softmax over chunks of classes
door      what the engine asks

Importing this needs no triton; calling does.
"""

from functools import cache
from importlib.util import find_spec

from mettle.pairs.fused.form import Form, fused_form

__all__ = ["Form", "available", "fused_form"]


@cache
def available() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None
