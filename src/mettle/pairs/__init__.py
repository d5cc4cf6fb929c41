"""The one engine for everything quadratic.

loss.terms ─┐                          ┌─ dense   whole matrix, plain autograd: the reference
            ├─ contract ─ engine ──────┤
difficulty ─┘                          ├─ tiled   O(n · tile) memory, own backward pass
                                       └─ fused   triton kernels, where there is a GPU and a declared kernel spec
"""

from mettle.pairs.declarations import Traits
from mettle.pairs.diagnostics import PairFacts, pair_facts
from mettle.pairs.dispatch import PairOutput, pair_loss
from mettle.pairs.distributed.wrapper import across_ranks
from mettle.pairs.interface import (
    Acc,
    Difficulty,
    Mask,
    Measure,
    PairLoss,
    Rows,
    Sweep,
    Tile,
    collect,
    lse,
    peak,
    total,
)
from mettle.pairs.kernel_spec import (
    BatchHardSpec,
    ExponentialWeights,
    HardestWeights,
    HingeSpec,
    KernelSpec,
    KernelWeights,
    LinearWeights,
    NoKernel,
    RelativeWeights,
    SoftmaxSpec,
)
from mettle.pairs.memory_queue import Queue

__all__ = [
    "Acc",
    "BatchHardSpec",
    "Difficulty",
    "ExponentialWeights",
    "HardestWeights",
    "HingeSpec",
    "KernelSpec",
    "KernelWeights",
    "LinearWeights",
    "Mask",
    "Measure",
    "NoKernel",
    "PairFacts",
    "PairLoss",
    "PairOutput",
    "Queue",
    "RelativeWeights",
    "Rows",
    "SoftmaxSpec",
    "Sweep",
    "Tile",
    "Traits",
    "across_ranks",
    "collect",
    "lse",
    "pair_facts",
    "pair_loss",
    "peak",
    "total",
]
