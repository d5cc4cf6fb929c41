"""What an audit says of embeddings in use: strangers at the door, clusters, simple classifiers."""

import numpy as np

from mettle.errors import InputError
from mettle.evaluate import plan
from mettle.evaluate.clustering import Clustering, clustering
from mettle.evaluate.identification import Identification
from mettle.evaluate.partial import Parts, affordable
from mettle.evaluate.probe import Probe, probe
from mettle.evaluate.table import Embedded

PAIRED = 10_000_000  # rows x clusters of one k-means, and of all its seeds together
FITTED = 200_000_000  # rows x labels x dimension of a linear probe


def identified(x: np.ndarray, y: np.ndarray, seed: int) -> Identification:
    """Half of the people enrolled with one sample each, the others strangers."""
    ids = np.arange(len(y))
    found = plan.known_unknown(ids, y, known=0.5, k=1, seed=seed).run(x, y, ids)
    assert isinstance(found, Identification)
    return found


def clustered(x: np.ndarray, y: np.ndarray, seed: int, part: Parts) -> Clustering:
    """k-means, on fewer identities and from fewer seeds where rows x clusters would take minutes."""
    at = affordable(y, PAIRED, seed)
    seeds = int(np.clip(PAIRED // (len(at) * len(np.unique(y[at]))), 1, 5))
    if len(at) < len(y):
        part.limits.append(f"Clustering rests on {len(at):,} rows of {len(np.unique(y[at])):,} identities.")
    return clustering(x[at], y[at], seeds=seeds, seed=seed)


def probed(table: Embedded, seed: int, part: Parts) -> Probe:
    """A linear and a kNN probe, fitted on the rows of the training split and judged on those of the test split."""
    if table.split is None or not {0, 2} <= set(np.unique(table.split).tolist()):
        raise InputError(
            "the file has no column split with train and test: a probe is fitted on some samples of every label and "
            "judged on others, and only you know which were trained on"
        )
    y = table.label.codes
    train, test = table.split == 0, table.split == 2
    both = np.intersect1d(y[train], y[test])
    if len(both) < 2:
        raise InputError(
            f"{len(both)} labels are in train and in test: a probe is a closed-set task, and people never seen in "
            "training are judged by verification"
        )
    keep = np.isin(y, both) & (train | test)
    at = np.flatnonzero(keep)[affordable(y[keep], FITTED // table.values.shape[1], seed)]
    if not keep[test].all() or len(at) < keep.sum():
        rows, of = np.count_nonzero(test[at]), np.count_nonzero(test)
        part.limits.append(f"Probes are judged on {rows:,} of {of:,} test rows, of {len(np.unique(y[at])):,} labels.")
    one, two = (at[table.split[at] == code] for code in (0, 2))
    return probe(*((table.values[at], y[at], None, table.ids[at]) for at in (one, two)))
