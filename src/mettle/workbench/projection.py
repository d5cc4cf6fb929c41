"""Where each sample lies on the map: t-SNE for a few thousand, the two main directions for more."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mettle.workbench.run_data import RunData, load_or_compute_arrays

MOST_SAMPLES = 5000  # samples up to which neighbourhoods are laid out; it takes time that grows with them
FEWEST_SAMPLES = 10  # samples below which neighbourhoods mean nothing
SAME_POINT = 1e-6  # components that differ by less are one point: nothing to lay out
SEED = 0


@dataclass(frozen=True, eq=False)
class Layout:
    """Where samples lie.

    Attributes:
        at: (n, 2) float32 within [-1, 1].
        how: by which method.
        final: whether there is nothing better to wait for.
    """

    at: np.ndarray
    how: str
    final: bool


def tsne_layout(data: RunData) -> Layout:
    """The map: neighbourhoods where there are not too many samples, made once and kept beside the run."""
    n = len(data)
    unit = data.unit.vectors()
    near = FEWEST_SAMPLES <= n <= MOST_SAMPLES and float(np.ptp(unit, axis=0).max()) > SAME_POINT
    if not near:
        return pca_layout(data, final=True)
    found = load_or_compute_arrays(
        _cache_path(data), {"place": (n, 2)}, lambda: {"place": _fit_to_square(_neighborhood_layout(unit))}
    )["place"]
    return Layout(np.clip(np.nan_to_num(found), -1, 1).astype(np.float32), "t-SNE", True)


def needs_layout(data: RunData) -> bool:
    """Whether the map has yet to be laid out, which takes seconds to a minute."""
    return FEWEST_SAMPLES <= len(data) <= MOST_SAMPLES and not _cache_path(data).exists()


def pca_layout(data: RunData, *, final: bool = False) -> Layout:
    """The two main directions: at once, whatever the number of samples."""
    return Layout(_fit_to_square(_principal_components(data.unit.vectors())).astype(np.float32), "PCA", final)


def _cache_path(data: RunData) -> Path:
    return data.run.folder / f"workbench-map-{data.key}.npz"


def _neighborhood_layout(unit: np.ndarray) -> np.ndarray:
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # the same map everywhere, and the rest of the service keeps its threads
        perplexity = min(30.0, (len(unit) - 1) / 3)
        made = TSNE(perplexity=perplexity, init="pca", random_state=SEED, max_iter=500)
        return made.fit_transform(_principal_components(unit, 32).astype(np.float32))


def _principal_components(unit: np.ndarray, count: int = 2) -> np.ndarray:
    """Coordinates along the directions of largest variance, each with a fixed sign."""
    centred = unit - unit.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    top = vectors[:, np.argsort(-values, kind="stable")[:count]]
    top = top * np.sign(top[np.abs(top).argmax(axis=0), np.arange(top.shape[1])])
    if top.shape[1] < 2:
        top = np.hstack([top, np.zeros((len(top), 2 - top.shape[1]))])
    return centred @ top


def _fit_to_square(at: np.ndarray) -> np.ndarray:
    """Shifted and scaled, equally in both directions, into the square from -1 to 1."""
    low, high = at.min(axis=0), at.max(axis=0)
    return (at - (low + high) / 2) / max(float((high - low).max()) / 2, 1e-12)
