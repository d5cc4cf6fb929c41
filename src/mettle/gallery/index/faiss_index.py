"""The one door to Faiss: everything untyped stays behind it.

Three engines answer "which rows are probably nearest", by inner product of unit vectors:

    codes   each vector, turned at random, as 4 bits per dimension; all of them are looked at (fast scan)
    cells   the same codes in cells around k-means centres; only the cells nearest to the probe are looked at
    graph   a navigable small-world graph (HNSW) over half-precision vectors

They only append. The number of threads is set for the calling thread and put back after each call. Turning at random
spreads the variance evenly over the dimensions, without which four bits are not enough; see benchmarks/gallery.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from mettle.errors import MissingExtra

try:
    import faiss as untyped
except ImportError:
    raise MissingExtra("galleries need Faiss, which is not installed: pip install 'mettle-ml[gallery]'") from None


faiss: Any = untyped  # its own hints miss much of what it has


TRAIN = 4096  # vectors from which the codes are learnt


ADD_BLOCK = 65536  # rows added at a time


MANY = 32  # probes or rows, from which on several threads pay


_HOME = os.getpid()


_reading = Lock()  # Faiss has one limit for all readers of a process


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Let Faiss use at most so many threads in this thread's calls.

    A forked process gets one: the helpers of its parent did not come along, and Faiss would wait for them for ever.
    """
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(min(count, before) if os.getpid() == _HOME else 1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


@dataclass(frozen=True, eq=False)
class FaissIndex:
    """A Faiss index whose ids are row numbers 0, 1, 2, ... in the order of addition."""

    native: Any

    def __len__(self) -> int:
        return int(self.native.ntotal)

    def append(self, vectors: np.ndarray) -> None:
        """Add rows (n, dim)."""
        with limit_threads(1 if len(vectors) < MANY else 1 << 10):
            for a in range(0, len(vectors), ADD_BLOCK):  # half-precision rows are widened piece by piece
                self.native.add(np.ascontiguousarray(vectors[a : a + ADD_BLOCK], dtype=np.float32))

    def shortlist(self, probes: np.ndarray, count: int, reach: int) -> np.ndarray:
        """Rows (p, count) that are probably nearest, -1 where there are fewer; ``reach`` is the effort of a search."""
        count = min(count, len(self))
        with limit_threads(1 if len(probes) < MANY else 1 << 10):
            params = _search_parameters(self.native, reach, count)
            # Where `faiss.contrib.torch_utils` is imported (pytorch-metric-learning does), search takes no parameters.
            search = getattr(self.native, "search_numpy", self.native.search)
            return search(np.ascontiguousarray(probes, dtype=np.float32), count, params=params)[1]

    def to_bytes(self) -> np.ndarray:
        """All of it as bytes (n,) uint8."""
        return faiss.serialize_index(self.native)


def _search_parameters(native: Any, reach: int, count: int) -> Any:
    inner = faiss.downcast_index(native.index) if isinstance(native, faiss.IndexPreTransform) else native
    if isinstance(inner, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=max(reach, count))
    if isinstance(inner, faiss.IndexIVFPQFastScan):
        return faiss.SearchParametersPreTransform(index_params=faiss.SearchParametersIVF(nprobe=reach))
    return None


def knn(probes: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows (p, k) of the nearest vectors by comparing with all of them, in one thread."""
    with limit_threads(1):
        return faiss.knn(probes, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)


def score_rows(probes: np.ndarray, vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Exact scores (p, m) of chosen rows (p, m), -inf where the row is -1; no vector is copied on the way."""
    probes, vectors = (np.ascontiguousarray(x, np.float32) for x in (probes, vectors))
    rows = np.ascontiguousarray(rows, np.int64)
    scores = np.empty(rows.shape, np.float32)
    pointers = (faiss.swig_ptr(array) for array in (scores, probes, vectors, rows))
    with limit_threads(1 if len(probes) < MANY else 1 << 10):
        faiss.fvec_inner_products_by_idx(*pointers, vectors.shape[1], *rows.shape)
    scores[rows < 0] = -np.inf
    return scores


def from_bytes(content: np.ndarray) -> FaissIndex:
    """An engine from the bytes of `dump`. Only for bytes whose checksum has been compared: Faiss trusts its files."""
    guarded = hasattr(faiss, "set_deserialization_vector_byte_limit")  # from some version on
    with _reading:
        before = faiss.get_deserialization_vector_byte_limit() if guarded else None
        try:
            if guarded:  # no part of it can be longer than the whole
                faiss.set_deserialization_vector_byte_limit(2 * content.nbytes + (1 << 20))
            return FaissIndex(faiss.deserialize_index(content))
        finally:
            if guarded:
                faiss.set_deserialization_vector_byte_limit(before)


def train_codes(vectors: np.ndarray) -> FaissIndex:
    """Four bits per dimension, learnt from some of ``vectors`` (n, dim); empty."""
    dim = vectors.shape[1]
    width = dim + dim % 2
    native = faiss.index_factory(dim, f"RR{width},PQ{width // 2}x4fs", faiss.METRIC_INNER_PRODUCT)
    _silence_clustering(faiss.downcast_index(native.index).pq.cp)
    with limit_threads(1):  # on a busy machine, several threads mostly wait for each other
        native.train(_sample_vectors(vectors, TRAIN))
    return FaissIndex(native)


def train_cells(vectors: np.ndarray) -> FaissIndex:
    """The same codes in about 4·√n cells; empty."""
    dim = vectors.shape[1]
    width, count = dim + dim % 2, count_cells(len(vectors))
    native = faiss.index_factory(dim, f"RR{width},IVF{count},PQ{width // 2}x4fs", faiss.METRIC_INNER_PRODUCT)
    inner = faiss.downcast_index(native.index)
    _silence_clustering(inner.pq.cp)
    _silence_clustering(inner.cp)
    with limit_threads(1):
        native.train(_sample_vectors(vectors, max(TRAIN, 40 * count)))
    return FaissIndex(native)


def build_graph(vectors: np.ndarray) -> FaissIndex:
    """A graph with 32 links a node; empty."""
    dim = vectors.shape[1]
    native = faiss.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_fp16, 32, faiss.METRIC_INNER_PRODUCT)
    native.hnsw.efConstruction = 80
    native.train(_sample_vectors(vectors, TRAIN))
    return FaissIndex(native)


def count_cells(size: int) -> int:
    """How many cells for so many vectors."""
    return max(1, min(size // 40, int(4 * size**0.5)))


def _silence_clustering(clustering: Any) -> None:
    clustering.niter = 10
    clustering.min_points_per_centroid = 1  # a warning otherwise, and few points are what there is


def _sample_vectors(vectors: np.ndarray, count: int) -> np.ndarray:
    """Some of the vectors; where there are too few, directions drawn at random fill up."""
    draw = np.random.default_rng(0)
    if len(vectors) > count:
        return np.ascontiguousarray(vectors[np.sort(draw.choice(len(vectors), count, replace=False))], np.float32)
    filler = draw.standard_normal((max(0, 1024 - len(vectors)), vectors.shape[1]), dtype=np.float32)
    filler /= np.linalg.norm(filler, axis=1, keepdims=True)
    return np.concatenate([np.asarray(vectors, np.float32), filler])
