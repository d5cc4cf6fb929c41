"""Impostor pairs of a set whose fast score falls into a window, listed by one kernel: pass 2 on a CUDA device.

The kernel is :func:`mettle.pairs.kernels.histograms.list_impostor_pairs`. It splits rows into two bfloat16 halves,
x = h + l with errors of 2⁻⁹ and 2⁻¹⁸ of x, and takes three of four products, so a score is off by

    δ = 3·2⁻¹⁸ + (13/4·d + 64)·2⁻²⁴       halves kept and dropped; 3d products, sixteen to a sum that cuts off 17 bits

where the last term holds normalisation and bins too.
"""

from collections.abc import Sequence

from torch import Tensor

from mettle.pairs.kernels.histograms import ImpostorPairs, list_impostor_pairs

ROOM = 1 << 24  # rows of tiles that are listed; windows that reach more are a matter for torch's products


def slack(d: int) -> float:
    """δ: how far a fast score of either pass can be from the exact one."""
    return 3 * 2.0**-18 + (3.25 * d + 64) * 2.0**-24


def candidates(
    z: Tensor, labels: Tensor, windows: Sequence[tuple[float, float]], room: int = ROOM
) -> list[ImpostorPairs] | None:
    """The impostor pairs i < j with a fast score between two ends, for every window, in no order.

    Args:
        z: (n, d) embeddings, float32.
        labels: (n,) int64, ascending.
        windows: ends, both included.
        room: rows of tiles with such a pair that are listed at most.

    Returns:
        One list for each window, or None where there is no room for all.
    """
    return list_impostor_pairs(z, labels, windows, room // len(windows))
