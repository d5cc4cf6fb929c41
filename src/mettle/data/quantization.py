"""Smaller embeddings: cut to their first numbers, or kept with fewer bits for each number.

| precision | what is kept of (n, dim) | bytes a vector | score |
|---|---|---|---|
| ``float32``, ``float16`` | the numbers | 4 dim, 2 dim | cosine |
| ``int8`` | whole numbers to ±127, scaled by the largest of each vector | dim | cosine of these |
| ``int8`` with ranges | steps of 1/255 of the range of each dimension | dim | cosine of what they stand for |
| ``binary`` | the sign of each number, eight to a byte | ⌈dim / 8⌉ | 1 − 2 · Hamming distance / dim |

Embeddings are compared by cosine, so ``int8`` without ranges and ``binary`` do not keep the length of a vector: what
`QuantizedEmbeddings.dequantize` gives has length 1 there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from torch import Tensor

from mettle.errors import InputError, nearest

Precision = Literal["float32", "float16", "int8", "binary"]
LEVELS = 127  # on either side of 0
STEPS = 255  # of a range
ROWS = 256  # compared at one time
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.int32)  # set in a byte


@dataclass(frozen=True, eq=False)
class QuantizedEmbeddings:
    """Embeddings as they are kept.

    Attributes:
        codes: (n, dim) of float32, float16 or int8; of ``binary`` (n, ⌈dim / 8⌉) bytes.
        precision: which of them.
        dim: how many numbers an embedding has.
        ranges: (2, dim), the lowest and the highest number of each dimension, where ``int8`` counts steps of them.
    """

    codes: np.ndarray
    precision: Precision
    dim: int
    ranges: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_precision(self.precision)
        kind = "uint8" if self.precision == "binary" else self.precision
        width = -(-self.dim // 8) if self.precision == "binary" else self.dim
        if self.codes.dtype != kind or self.codes.ndim != 2 or self.codes.shape[1] != width:
            raise InputError(
                f"codes of {self.precision} embeddings of {self.dim} numbers must be {kind} of shape (n, {width}), got "
                f"{self.codes.dtype} of shape {self.codes.shape}"
            )

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def bytes_per_vector(self) -> int:
        """What one vector takes; ranges are kept once for all."""
        return self.codes.shape[1] * self.codes.dtype.itemsize

    def dequantize(self) -> np.ndarray:
        """(n, dim) float32: the vectors that the codes stand for. Their cosines are the scores of the codes."""
        if self.precision == "binary":
            signs = np.unpackbits(self.codes, axis=1, count=self.dim).astype(np.float32)
            return (2 * signs - 1) / np.float32(self.dim**0.5)
        z = self.codes.astype(np.float32)
        if self.ranges is not None:
            low, high = self.ranges
            return (low + (z + 128) * ((high - low) / STEPS)).astype(np.float32)
        return _normalize(z).astype(np.float32) if self.precision == "int8" else z


def quantize_embeddings(embeddings: Any, precision: Precision, *, ranges: Any = None) -> QuantizedEmbeddings:
    """Embeddings with fewer bits for each number.

    Args:
        embeddings: (n, dim) finite numbers, an array or a tensor.
        precision: what is kept of them.
        ranges: of ``int8``: (2, dim) as `measure_ranges` gives them for other embeddings of the model. Numbers outside
            are moved to the nearest end. Worth it where dimensions have very different sizes.

    Raises:
        InputError: NaN, infinity or a vector without a direction, or ranges that do not fit.
    """
    check_precision(precision)
    z = _check_embeddings(embeddings)
    dim = z.shape[1]
    if ranges is not None:
        if precision != "int8":
            raise InputError(f"ranges= are of precision 'int8', not of {precision!r}: leave them out")
        low, high = found = _check_ranges(ranges, dim)
        span = np.where(high > low, high - low, 1).astype(np.float64)
        steps = np.rint((np.clip(z, low, high) - low) / span * STEPS)
        return QuantizedEmbeddings((steps - 128).astype(np.int8), precision, dim, found)
    if precision == "binary":
        return QuantizedEmbeddings(np.packbits(z > 0, axis=1), precision, dim)
    if precision == "int8":
        largest = np.abs(z).max(1, keepdims=True).astype(np.float64)
        return QuantizedEmbeddings(np.rint(z / largest * LEVELS).astype(np.int8), precision, dim)
    largest, limits = np.abs(z).max(1, keepdims=True), np.finfo(precision)
    beyond = ((largest > limits.max) | (largest < limits.tiny))[:, 0]
    if beyond.any():  # only directions count
        z = z.copy()
        z[beyond] = _normalize(z[beyond])
    return QuantizedEmbeddings(z.astype(precision), precision, dim)


def measure_ranges(embeddings: Any) -> np.ndarray:
    """(2, dim) float32: the lowest and the highest number of each dimension, for ``int8`` codes of other embeddings."""
    z = _check_embeddings(embeddings)
    return np.stack([z.min(0), z.max(0)]).astype(np.float32)


def quantized_similarity(a: QuantizedEmbeddings, b: QuantizedEmbeddings) -> np.ndarray:
    """(n, m) float32 scores in [-1, 1] of the codes of two sets of one precision; see the table above.

    Dot products of whole numbers and Hamming distances are exact.
    """
    if (a.precision, a.dim) != (b.precision, b.dim):
        raise InputError(
            f"codes are compared with codes of their kind: got {a.precision} of {a.dim} numbers and {b.precision} of "
            f"{b.dim}"
        )
    same = (a.ranges is None) == (b.ranges is None) and (a.ranges is None or np.array_equal(a.ranges, b.ranges))  # type: ignore[arg-type]
    if not same:
        raise InputError(
            "int8 codes are compared with codes of the same ranges: measure them once and use them for both"
        )
    if a.precision == "binary":
        return (1 - 2 * hamming_distances(a.codes, b.codes) / a.dim).astype(np.float32)
    whole = a.precision == "int8" and a.ranges is None
    left, right = (x.codes if whole else x.dequantize() for x in (a, b))
    left, right = left.astype(np.float64), right.astype(np.float64)  # holds every dot product of int8 exactly
    dots = left @ right.T
    lengths = np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=1)
    if not lengths.all():
        raise InputError("a vector of zeros has no direction: ranges are too wide for these embeddings")
    return (dots / lengths).clip(-1, 1).astype(np.float32)


def hamming_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n, m) int32: in how many bits the rows of two arrays of bytes differ."""
    found = np.empty((len(a), len(b)), np.int32)
    for start in range(0, len(a), ROWS):
        rows = a[start : start + ROWS]
        found[start : start + ROWS] = sum(BITS[x[:, None] ^ y] for x, y in zip(rows.T, b.T, strict=True))
    return found


def cut_embeddings(embeddings: Any, dim: int) -> np.ndarray:
    """(n, dim) float32: the first numbers of each embedding, scaled to length 1.

    A model that was trained by `mettle.losses.Matryoshka` has prefixes that are embeddings by themselves.
    """
    z = _check_embeddings(embeddings)
    if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or not 1 <= dim <= z.shape[1]:
        raise InputError(
            f"dim must be a whole number from 1 to {z.shape[1]}, the length of the embeddings, got {dim!r}"
        )
    return _normalize(_check_embeddings(z[:, :dim])).astype(np.float32)


def check_precision(precision: Any) -> None:
    """Refuse what is no precision."""
    if precision not in get_args(Precision):
        raise InputError(f"no precision {precision!r}{nearest(str(precision), get_args(Precision))}")


def to_arrays(quantized: QuantizedEmbeddings) -> dict[str, np.ndarray]:
    """How a file keeps them: numbers as ``embeddings``, codes by another name, so that nobody reads them as numbers."""
    if quantized.precision in ("float32", "float16"):
        return {"embeddings": quantized.codes}
    found = {"codes": quantized.codes, "precision": np.asarray(quantized.precision), "dim": np.asarray(quantized.dim)}
    return found | ({} if quantized.ranges is None else {"ranges": quantized.ranges})


def from_arrays(arrays: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The embeddings that the codes of a file stand for; None where it holds no codes.

    Raises:
        InputError: what is said about the codes does not fit them.
    """
    if not {"codes", "precision", "dim"} <= set(arrays) or arrays["precision"].ndim or arrays["dim"].ndim:
        return None
    dim = arrays["dim"]
    if dim.dtype.kind not in "iu":
        raise InputError(f"dim of the codes must be a whole number, got {dim.dtype}")
    ranges = None if "ranges" not in arrays else _check_ranges(arrays["ranges"], int(dim))
    return QuantizedEmbeddings(arrays["codes"], str(arrays["precision"]), int(dim), ranges).dequantize()  # type: ignore[arg-type]


def _normalize(z: np.ndarray) -> np.ndarray:
    z = z.astype(np.float64)
    z = z / np.abs(z).max(1, keepdims=True)  # so that no square overflows
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def _check_embeddings(embeddings: Any) -> np.ndarray:
    """(n, dim) float32 or float64, each row finite and with a direction."""
    z = embeddings.detach().float().cpu().numpy() if isinstance(embeddings, Tensor) else np.asarray(embeddings)
    if z.ndim != 2 or z.shape[1] == 0 or z.dtype.kind not in "fiu":
        raise InputError(f"embeddings must be (n, dim) numbers, got {z.dtype} of shape {z.shape}")
    z = z if z.dtype == np.float64 else z.astype(np.float32)
    for bad, what in (
        (~np.isfinite(z).all(1), "NaN or infinity"),
        (~z.any(1), "nothing but zeros, which has no direction"),
    ):
        if bad.any():
            raise InputError(f"embeddings: {np.count_nonzero(bad)} rows hold {what}, the first is row {np.argmax(bad)}")
    return z


def _check_ranges(ranges: Any, dim: int) -> np.ndarray:
    found = np.asarray(ranges, np.float32)
    if found.shape != (2, dim) or not np.isfinite(found).all() or not (found[0] <= found[1]).all():
        raise InputError(
            f"ranges must be the lowest and the highest number of {dim} dimensions, (2, {dim}), in this order"
        )
    return found
