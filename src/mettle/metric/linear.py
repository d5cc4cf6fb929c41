"""The quadratic form itself, and the factor of a matrix that is given instead of learned."""

from typing import Any

import numpy as np

from mettle.errors import InputError


def squared_form(delta: Any, factor: Any) -> Any:
    """δᵀMδ = ‖Lδ‖² for M = LᵀL: (..., d) differences and an (r, d) factor L give (...), arrays or tensors alike.

    Never below 0, whatever L is. Its gradient in L is 2 L δδᵀ. The square root is a metric, this is not: see
    `Mahalanobis`.
    """
    z = delta @ factor.T
    return (z * z).sum(-1)


def factor_matrix(matrix: Any) -> np.ndarray:
    """L (r, d) with LᵀL = M for a symmetric positive semi-definite M, r its rank, the heaviest direction first."""
    m = np.asarray(matrix, dtype=np.float64)
    if m.ndim != 2 or m.shape[0] != m.shape[1] or not m.size:
        raise InputError(f"a Mahalanobis matrix is square, got shape {m.shape}")
    if not np.isfinite(m).all():
        raise InputError("a Mahalanobis matrix is finite, got NaN or infinity: check where it came from")
    size = np.abs(m).max()
    if np.abs(m - m.T).max() > 1e-8 * size:
        raise InputError(
            "a Mahalanobis matrix is symmetric, this one is not: use (M + M.T) / 2, which has the same form"
        )
    values, vectors = np.linalg.eigh((m + m.T) / 2)
    if values[0] < -1e-8 * size:
        raise InputError(
            f"a Mahalanobis matrix has no negative eigenvalue, the smallest here is {values[0]:.3g}: some squared "
            "distances would be negative. Clip the eigenvalues at 0 to come as near as a metric can"
        )
    kept = np.flatnonzero(values > len(m) * np.finfo(np.float64).eps * size)[::-1]
    if not len(kept):
        raise InputError("a Mahalanobis matrix of zeros puts all points at distance 0: give one that tells some apart")
    return fix_signs(np.sqrt(values[kept])[:, None] * vectors[:, kept].T)


def fix_signs(factor: np.ndarray) -> np.ndarray:
    """Rows turned so that their largest entry is positive: a sign that no library version can flip."""
    largest = np.take_along_axis(factor, np.abs(factor).argmax(1)[:, None], 1)
    return factor * np.where(largest < 0, -1.0, 1.0)
