"""Embeddings in a file, with everything needed to judge them later."""

from io import BytesIO
from pathlib import Path

import numpy as np

from mettle.data.samples import ROLES, SPLITS, Samples
from mettle.durable import write_bytes
from mettle.model.embed import embed
from mettle.model.embedder import Embedder


def write_embeddings(model: Embedder, samples: Samples, path: Path) -> str:
    """Write an NPZ with ``embeddings``, ``ids``, ``label``, ``label_names``, ``split``, ``role`` and all columns."""
    z = embed(model, samples)
    arrays: dict[str, np.ndarray] = {
        "embeddings": z,
        "ids": samples.ids,
        "label": samples.labels,
        "label_names": np.asarray(samples.label.names),
        "split": np.asarray([SPLITS[code] if code >= 0 else "" for code in samples.split]),
        "role": np.asarray([ROLES[code] for code in samples.role]),
    }
    arrays |= {name: column.values().astype(str) for name, column in samples.columns().items()}
    buffer = BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_bytes(path, buffer.getvalue())
    return f"{path}: {len(z)} embeddings of dimension {z.shape[1]}"
