"""The one engine for everything quadratic.

loss.reductions ─┐                         ┌─ reference  whole matrix, plain autograd
                 ├─ interface ─ dispatch ──┼─ tiled      O(n · tile) memory, own backward pass
difficulty ──────┘                         └─ kernels    Triton, where there is a GPU and a declared kernel spec
"""

from mettle.pairs.declarations import Traits
from mettle.pairs.diagnostics import PairStatistics, pair_statistics
from mettle.pairs.dispatch import PairOutput, pair_loss
from mettle.pairs.distributed import across_ranks
from mettle.pairs.interface import (
    Difficulty,
    Mask,
    Measure,
    PairLoss,
    Pass,
    Reduction,
    RowValues,
    Tile,
    gather_over,
    logsumexp_over,
    max_over,
    sum_over,
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
    "PairLoss",
    "PairOutput",
    "PairStatistics",
    "Pass",
    "Queue",
    "Reduction",
    "RelativeWeights",
    "RowValues",
    "SoftmaxSpec",
    "Tile",
    "Traits",
    "across_ranks",
    "gather_over",
    "logsumexp_over",
    "max_over",
    "pair_loss",
    "pair_statistics",
    "sum_over",
]
