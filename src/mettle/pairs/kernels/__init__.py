"""Fused kernels for CUDA: losses that declare a kernel spec never hold a matrix, forward or backward.

spec           what a declared spec comes to, and whether the kernels can compute it
config         measured tile sizes, splits of columns, compile-time flags
launch         starting kernels without asking twice
replay         the launches of a small batch, recorded and replayed
operands       embeddings sorted by label, normalized, in the operands' precision; and gradients back
primitives     loads, products, the tile iterator, sums
pair_terms     every function of one pair, beside its derivative
forward        negatives, positives and the loss of each row, the mean
backward       negatives and positives; wide embeddings through memory
function       all of it as one autograd function, and the order of launches
rank_rows      one rank's anchors against the embeddings of all ranks
mining         batch-hard
class_softmax  margin softmax over chunks of classes
nearest_vector its sums where a class has several vectors
margin_loss    margin and loss of each sample
histograms     all-pairs score histograms and lists of pairs, for evaluation

Importing this needs no triton; calling does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.pairs.kernel_spec import NoKernel
from mettle.pairs.kernels.spec import KernelInputs, LoweredSpec, collect_inputs, lower_loss

__all__ = [
    "REQUIRED_SHARED_MEMORY",
    "KernelInputs",
    "KernelResult",
    "LoweredSpec",
    "available",
    "collect_inputs",
    "evaluate_fused",
    "evaluate_fused_rank",
    "explain_unavailable",
    "fused_mean_and_gradient",
    "lower_loss",
]

Reference = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
REQUIRED_TRITON = (3, 6)
REQUIRED_SHARED_MEMORY = 227 << 10  # bytes of a multiprocessor: the tiles were cut for compute capability 9.0


@cache
def available(device: int | None = None) -> bool:
    """Whether triton is installed and, where a GPU is named, whether that holds tiles of the sizes in the table."""
    if find_spec("triton") is None or _triton_is_too_old():
        return False
    if device is None:
        return True
    shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return torch.version.hip is None and shared >= REQUIRED_SHARED_MEMORY


def _triton_is_too_old() -> bool:
    """Whether its builds are called in another way than `launch` does; torch 2.8 and 2.9 bring such a triton along."""
    try:
        return tuple(int(part) for part in version("triton").split(".")[:2]) < REQUIRED_TRITON
    except (PackageNotFoundError, ValueError):  # a nightly build, under another name
        return False


def explain_unavailable(device: torch.device) -> str:
    """Why there are no fused kernels for embeddings on a device; empty where there are."""
    if device.type != "cuda":
        return f"the embeddings are on {device}"
    if available(device.index):
        return ""
    if not available():
        return f"triton {'.'.join(map(str, REQUIRED_TRITON))} or newer is not installed"
    needed = f"{REQUIRED_SHARED_MEMORY >> 10} KB of shared memory per multiprocessor"
    return f"{device} has less than {needed}, or is none of NVIDIA's"


@dataclass(frozen=True)
class KernelResult:
    """One value per anchor, where it is defined, how much it counts, and the mean where it came along."""

    values: Tensor
    defined: Tensor
    anchor_weight: Tensor | None
    mean: Tensor | None


def evaluate_fused(
    loss: Any, difficulty: Any, inputs: KernelInputs, reference: Reference | None = None
) -> KernelResult | NoKernel:
    """Evaluate a loss where the kernels can, else say why they cannot.

    ``reference`` computes values and mean of the same batch with a graph, for second derivatives.
    """
    lowered = lower_loss(loss, difficulty, inputs)
    if isinstance(lowered, NoKernel):
        return lowered
    ref = None if inputs.ref is None or inputs.ref_labels is None else (inputs.ref, inputs.ref_labels)
    if isinstance(lowered, LoweredSpec):
        from mettle.pairs.kernels.function import evaluate_spec

        own = inputs.self_column if isinstance(inputs.self_column, Tensor) else None
        found = evaluate_spec(
            lowered,
            inputs.z,
            inputs.labels,
            ref,
            inputs.biased,
            self_column=own,
            sorted_rows=getattr(loss, "sorted_anchors", False),
            reference=reference,
        )
        return KernelResult(found.values, found.defined, None, found.mean)
    from mettle.pairs.kernels.mining import batch_hard_rows

    rows = batch_hard_rows(loss, inputs.z, inputs.labels, ref)
    values = loss.row_loss(rows)
    for x in (inputs.z, inputs.ref):  # a maximum overlooks NaN; a loss must not
        if x is not None:
            values = values + (x.detach() - x.detach()).sum().to(values.dtype)
    return KernelResult(values, loss.is_defined(rows), loss.anchor_weight(rows), None)


def evaluate_fused_rank(loss: Any, difficulty: Any, inputs: KernelInputs, columns: Any) -> tuple[Tensor, Tensor]:
    """Values of one rank's anchors and where they are defined; ``columns``: `mettle.pairs.dispatch.RankColumns`."""
    from mettle.pairs.kernels.rank_rows import evaluate_rank_rows

    lowered = lower_loss(loss, difficulty, inputs)
    if not isinstance(lowered, LoweredSpec):
        why = lowered.reason if isinstance(lowered, NoKernel) else "it mines the hardest pairs"
        raise InputError(f"the fused kernels cannot compute this loss over ranks, because {why}: use engine='tiled'")
    ref = columns.z, columns.labels
    return evaluate_rank_rows(lowered, inputs.z, inputs.labels, ref, columns.own, columns.gather, inputs.biased)


def fused_mean_and_gradient(
    loss: Any, difficulty: Any, z: Tensor, labels: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """The mean of a batch, its gradient with respect to ``z``, and where values are defined, without autograd.

    None where the kernels do not compute the loss by a formula of rows. ``z`` in half precision has its gradient in
    float32, which nothing has scaled yet.
    """
    if explain_unavailable(z.device):
        return None
    lowered = lower_loss(loss, difficulty, KernelInputs(z, labels))
    if not isinstance(lowered, LoweredSpec):
        return None
    from mettle.pairs.kernels.function import mean_and_gradient

    return mean_and_gradient(lowered, z, labels, with_gradient)
