"""How a model fares on pairs and triplets that were held out: ``pairs.json`` of a run."""

import json
from typing import Any

import numpy as np
import torch

from mettle.atomic_files import write_text
from mettle.data.dataset import Samples
from mettle.data.tuples import Tuples
from mettle.model import EmbeddingModel, embed
from mettle.train import TrainResult

CHUNK = 1 << 16  # pairs compared at a time


def write_pair_metrics(result: TrainResult) -> tuple[str, ...]:
    """Write ``pairs.json`` and return a line for each split: what the model makes of rows that it was not trained on.

    Nothing is chosen by these numbers. Rows count alike whatever their weight; those of weight 0 are left out. A run
    without a table of pairs or triplets, or one that has not finished, gets none.
    """
    run, loss, table = result.run, result.loss, result.tuples
    if table is None or not result.finished:
        return ()
    found: dict[str, Any] = {"format": 1, "table": table.source_name, "weights": run.contract()["weights"]}
    if hasattr(loss, "threshold"):
        found |= {"threshold": loss.threshold, "scale": loss.scale.item()}
    notes = []
    for name in ("val", "test"):
        rows = table.part(name)
        if len(rows):
            found[name] = measure_tuples(result.model, loss, rows, result.samples)
            shown = (f"{key} {value:.4g}" for key, value in found[name].items() if key != "count")
            notes.append(f"{len(rows)} {name} {table.noun}s: {', '.join(shown)}")
    write_text(run.folder / "pairs.json", json.dumps(found, indent=1))
    return tuple(notes)


@torch.no_grad()
def measure_tuples(model: EmbeddingModel, loss: Any, rows: Tuples, samples: Samples) -> dict[str, float]:
    """The mean loss of these rows, and how well similarities follow what the table says of them.

    pairs      ``spearman``, the rank correlation with the grades; of yes and no, 1 and 0, ``auc`` instead, and
               ``accuracy`` at the learned threshold where the loss has one
    triplets   ``ordered``, the share in the right order, ties counting one half
    """
    at = rows.positions(samples)
    used, place = np.unique(at, return_inverse=True)
    z = torch.from_numpy(embed(model, samples.take(used)))
    device = next(model.parameters()).device
    values, scores = [], []
    for part in np.array_split(np.arange(len(rows)), -(-len(rows) // CHUNK)):
        members = z[torch.from_numpy(place.reshape(at.shape)[part])].to(device).unbind(1)
        if rows.target is None:
            near, far = loss.similarities(*members)
            values.append(loss.from_similarity(near, far))
            scores.append(near - far)
        else:
            scores.append(loss.similarity(*members))
            values.append(loss.from_similarity(scores[-1], torch.from_numpy(rows.target[part]).to(device)))
    score = torch.cat(scores).double().cpu().numpy()
    found = {"count": len(rows), "loss": float(torch.cat(values).mean())}
    if rows.target is None:
        return found | {"ordered": float(((score > 0) + 0.5 * (score == 0)).mean())}
    return found | tuple_metrics(score, rows.target, getattr(loss, "threshold", None))


def tuple_metrics(score: np.ndarray, target: np.ndarray, threshold: float | None = None) -> dict[str, float]:
    """How well scores follow targets; what cannot be said (of a constant, of one kind only) is left out."""
    same = target == 1
    if not (same | (target == 0)).all():
        found = {"spearman": rank_correlation(score, target)}
    else:
        right = None if threshold is None else float(((score > threshold) == same).mean())
        found = {"auc": rank_auc(score, same), "accuracy": right}
    return {name: value for name, value in found.items() if value is not None}


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's rank correlation; None where one side is constant."""
    x, y = (ranks - ranks.mean() for ranks in (_average_ranks(a), _average_ranks(b)))
    size = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / size) if size > 0 else None


def rank_auc(score: np.ndarray, same: np.ndarray) -> float | None:
    """Chance that a "same" pair scores above a "different" one, ties counting one half; None without both kinds."""
    n, m = int(same.sum()), int((~same).sum())
    return float((_average_ranks(score)[same].sum() - n * (n + 1) / 2) / (n * m)) if n and m else None


def _average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, ties sharing their mean."""
    from scipy.stats import rankdata  # most of a second, which every `mettle train` would wait for

    return rankdata(values)
