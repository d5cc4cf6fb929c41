"""Arrays and tensors from anywhere, checked: matrices of embeddings, integers, names, one for each row.

What cannot be used is refused with one line: non-finite numbers, zero vectors, floats as names, missing values.
"""

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from mettle.errors import InputError

MISSING = ("NAType", "NaTType")  # what pandas and others put where a value is missing


def check_matrix(embeddings: Any, side: str = "") -> np.ndarray:
    """A sound (n, d) matrix in main memory, float64 if that came, else float32: finite, no zero vectors."""
    values = to_numpy(embeddings, f"{side}embeddings")
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"{side}embeddings must be a non-empty (n, d) matrix: got shape {values.shape}")
    if values.dtype.kind not in "fiu":
        raise InputError(f"{side}embeddings must be real numbers: got dtype {values.dtype}")
    if values.dtype != np.float64:
        values = values.astype(np.float32, copy=False)
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        raise InputError(
            f"{side}embeddings must be finite: {np.count_nonzero(~finite)} of {len(values)} rows hold NaN or "
            f"infinity, the first is row {np.argmin(finite)}; find out why the model produced them"
        )
    zero = ~values.any(axis=1)
    if zero.any():
        raise InputError(
            f"{side}embeddings must not be zero vectors (their cosine is undefined): {np.count_nonzero(zero)} of "
            f"{len(values)} rows are zero vectors, the first is row {np.argmax(zero)}; drop them and count them as "
            "failed templates"
        )
    return values


def check_one_label_per_id(ids: np.ndarray, labels: np.ndarray) -> None:
    """Refuse a sample id that carries two labels."""
    order = np.lexsort((labels, ids))
    ids, labels = ids[order], labels[order]
    clash = (ids[1:] == ids[:-1]) & (labels[1:] != labels[:-1])
    if clash.any():
        at = int(np.argmax(clash))
        raise InputError(
            f"sample id {ids[at]} carries two labels, {labels[at]} and {labels[at + 1]}: one id is one sample"
        )


def integers(values: Any, name: str, n: int) -> np.ndarray:
    """One int64 per row, whatever integer type came; never through floats, so ids above 2^24 stay exact."""
    a = to_numpy(values, name)
    if a.dtype.kind not in "iu":
        raise InputError(
            f"{name} must be integers: got dtype {a.dtype}; code other values with "
            f"numpy.unique(values, return_inverse=True)[1]"
        )
    return as_int64(check_one_per_row(a, name, n), name)


def as_int64(a: np.ndarray, name: str) -> np.ndarray:
    """Integers as int64; those of uint64 that are too large would turn negative."""
    if a.dtype == np.uint64 and a.size and a.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name} must fit in int64: got {a.max()}")
    return a.astype(np.int64)


def names(values: Any, name: str, n: int) -> np.ndarray:
    """One integer or text per row, from integers, text or any hashable objects.

    Objects are named by their ``str``, which must differ where they do. Floats are refused because NaN and rounding
    make bad names, and so is what stands for a missing value.
    """
    return as_names(check_one_per_row(to_numpy(values, name), name, n), name)


def as_names(a: np.ndarray, name: str) -> np.ndarray:
    """An array of any shape as integers or text; see :func:`names`."""
    if a.dtype.kind in "iuU":
        return a
    if a.dtype.kind == "S":
        try:
            return np.char.decode(a, "utf-8")
        except UnicodeDecodeError as e:
            raise InputError(f"{name} must be UTF-8 where they are bytes: {e}") from e
    if a.dtype.kind == "T":  # strings of variable width
        return a.astype(str)
    if a.dtype.kind != "O":
        raise InputError(f"{name} must be integers or text: got dtype {a.dtype}; code numbers as integers")
    flat = a.ravel().tolist()
    if all(isinstance(v, Integral) and not isinstance(v, bool) for v in flat):
        return np.asarray(flat, np.int64).reshape(a.shape)
    for at, value in enumerate(flat):
        if value is None or type(value).__name__ in MISSING or isinstance(value, Real) > isinstance(value, Integral):
            raise InputError(f"{name} must be integers or text: got {value!r} at position {at}")
    texts = [v if isinstance(v, str) else v.decode() if isinstance(v, bytes) else str(v) for v in flat]
    try:
        distinct = len(set(flat))
    except TypeError as e:
        raise InputError(f"{name} must be integers, text or hashable objects: {e}") from e
    if len(set(texts)) != distinct:
        raise InputError(
            f"{name} must be told apart by their text: {distinct} different values have {len(set(texts))} texts; "
            "code them as integers"
        )
    return np.asarray(texts, str).reshape(a.shape)


def to_numpy(values: Any, name: str) -> np.ndarray:
    """A NumPy view or copy of an array, a tensor on any device, or a sequence."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as e:
        raise InputError(f"{name} must be an array or a tensor: got {type(values).__name__} ({e})") from e


def check_one_per_row(a: np.ndarray, name: str, n: int) -> np.ndarray:
    """Refuse a column that has not one entry per embedding."""
    if a.shape != (n,):
        raise InputError(f"{name} must have one entry per embedding: got shape {a.shape} for {n} embeddings")
    return a
