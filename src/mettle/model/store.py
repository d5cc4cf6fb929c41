"""Embeddings in a file, with everything needed to judge them later.

| array | meaning |
|---|---|
| ``embeddings`` | (n, dim) float32 |
| ``ids``, ``role`` | of every sample |
| ``label``, ``label_names`` | codes and their names, where the samples have labels |
| ``split`` | where the samples have one |
| ``path`` | the file of every sample, absolute, where they came from files |
| ``model`` | one text: the hash of the weights, as in the contract of the run |
| any other | the domain and the groups of the samples, by their names (``name_`` where a name above is taken) |
"""

import hashlib
from io import BytesIO
from pathlib import Path

import numpy as np
from safetensors.torch import save

from mettle.data.samples import NO_SPLIT, ROLES, SPLITS, Samples
from mettle.durable import write_bytes
from mettle.errors import InputError
from mettle.model.embed import embed
from mettle.model.embedder import Embedder

OWN = frozenset(("embeddings", "ids", "role", "label", "label_names", "split", "path", "model"))


def write_embeddings(model: Embedder, samples: Samples, path: Path, *, weights: str | None = None) -> str:
    """Embed samples into an NPZ file; see above for what is in it.

    Args:
        model: What embeds.
        samples: What is embedded.
        path: The file to write.
        weights: The hash of the model's weights, as its contract has it; worked out where it is not given.

    Raises:
        InputError: There is no folder for the file; nothing has been embedded then.
    """
    check_place(path)
    z = embed(model, samples)
    arrays: dict[str, np.ndarray] = {
        "embeddings": z,
        "ids": samples.ids,
        "role": np.asarray([ROLES[code] for code in samples.role]),
        "model": np.asarray(weights or weights_hash(model)),
    }
    if any(samples.label.names):
        arrays |= {"label": samples.labels, "label_names": np.asarray(samples.label.names)}
    if (samples.split != NO_SPLIT).any():
        arrays["split"] = np.asarray([SPLITS[code] if code >= 0 else "" for code in samples.split])
    paths = samples.paths()
    if paths is not None:  # a name that is no text is written so that it can at least be read
        arrays["path"] = np.asarray([str(p).encode("utf-8", "backslashreplace").decode() for p in paths])
    for name, column in samples.columns().items():
        arrays[f"{name}_" if name in OWN else name] = column.values().astype(str)
    buffer = BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_bytes(path, buffer.getvalue())
    return f"{path}: {len(z)} embeddings of dimension {z.shape[1]}"


def weights_hash(model: Embedder) -> str:
    """The hash that names a model: of its weights, written as a run keeps them."""
    tensors = {name: t.detach().contiguous().cpu() for name, t in model.state_dict().items()}
    return hashlib.sha256(save(tensors)).hexdigest()


def check_place(path: Path) -> None:
    """Refuse a file that cannot be made, before the work that would fill it."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}; make it, or choose another place")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")
