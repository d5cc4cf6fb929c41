"""Embeddings of a whole table, in eval mode, batch by batch."""

import numpy as np
import torch

from mettle.data.loader import to_model
from mettle.data.samples import Samples
from mettle.model.embedder import Embedder


@torch.inference_mode()
def embed(model: Embedder, samples: Samples, *, batch: int = 512, features: bool = False) -> np.ndarray:
    """(n, dim) float32 embeddings in the order of the table; ``features`` gives what the head sees instead.

    The model is left in the mode it was in.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        parts = []
        for start in range(0, len(samples), batch):
            positions = np.arange(start, min(start + batch, len(samples)))
            x = to_model(samples.read(positions), str(device))
            parts.append((model.features(x) if features else model(x)).float().cpu().numpy())
    finally:
        model.train(training)
    return np.concatenate(parts) if parts else np.empty((0, model.spec.dim), np.float32)
