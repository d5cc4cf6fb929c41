"""The one engine for everything quadratic.

loss.reductions ─┐                         ┌─ reference  whole matrix, plain autograd
                 ├─ interface ─ dispatch ──┼─ tiled      O(n · tile) memory, own backward pass
difficulty ──────┘                         └─ kernels    Triton, where there is a GPU and a declared kernel spec
"""

from mettle.pairs.declarations import Traits, iterate_parts
from mettle.pairs.diagnostics import PairStatistics, pair_statistics, pair_weights
from mettle.pairs.dispatch import PairOutput, pair_loss
from mettle.pairs.distributed import across_ranks
from mettle.pairs.index_tuples import IndexPairs, IndexTriplets, list_pairs, list_triplets
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
    CircleSpec,
    ExponentialWeights,
    HardestWeights,
    HingeSpec,
    KernelSpec,
    KernelWeights,
    LinearWeights,
    MarginSpec,
    MultiSimilarityWeights,
    NoKernel,
    RelativeWeights,
    SoftmaxSpec,
    TwoSidedSpec,
)
from mettle.pairs.memory_queue import Queue
from mettle.pairs.pair_list import as_pair_list_loss
from mettle.pairs.similarity import distance, safe_sqrt, squared_distance

__all__ = [
    "BatchHardSpec",
    "CircleSpec",
    "Difficulty",
    "ExponentialWeights",
    "HardestWeights",
    "HingeSpec",
    "IndexPairs",
    "IndexTriplets",
    "KernelSpec",
    "KernelWeights",
    "LinearWeights",
    "MarginSpec",
    "Mask",
    "Measure",
    "MultiSimilarityWeights",
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
    "TwoSidedSpec",
    "across_ranks",
    "as_pair_list_loss",
    "distance",
    "gather_over",
    "iterate_parts",
    "list_pairs",
    "list_triplets",
    "logsumexp_over",
    "max_over",
    "pair_loss",
    "pair_statistics",
    "pair_weights",
    "safe_sqrt",
    "squared_distance",
    "sum_over",
]
