"""Weights of a model in a file."""

import hashlib

from safetensors.torch import save

from mettle.model.embedder import Embedder


def weights_hash(model: Embedder) -> str:
    """The hash that names a model: of its weights, written as a run keeps them."""
    tensors = {name: t.detach().contiguous().cpu() for name, t in model.state_dict().items()}
    return hashlib.sha256(save(tensors)).hexdigest()
