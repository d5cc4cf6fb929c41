"""Fused kernels for CUDA: the losses that have a fused form never hold a matrix, forward or backward.

form      what a declared spec comes to: the form that the kernels are launched with, and its numbers
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

import torch

from mettle.pairs.kernels.spec import Form, find_form, fused_form

__all__ = ["Form", "available", "explain_unavailable", "find_form", "fused_form"]

SHARED = 227 << 10  # bytes of shared memory of a multiprocessor: the tiles were cut for compute capability 9.0


@cache
def available(device: int | None = None) -> bool:
    """Whether triton is installed and, where a GPU is named, whether that holds tiles of the sizes in the table."""
    if find_spec("triton") is None:
        return False
    if device is None:
        return True
    facts = torch.cuda.get_device_properties(device)
    known = getattr(facts, "shared_memory_per_multiprocessor", None)  # of some versions of torch not
    return torch.version.hip is None and (facts.major in (9, 10) if known is None else known >= SHARED)


def explain_unavailable(device: torch.device) -> str:
    """Why there are no fused kernels for embeddings on a device; empty where there are."""
    if device.type != "cuda":
        return f"the embeddings are on {device}"
    if available(device.index):
        return ""
    if not available():
        return "triton is not installed"
    return f"{device} has less than {SHARED >> 10} KB of shared memory per multiprocessor, or is none of NVIDIA's"
