"""Embeddings of a whole table, in eval mode, batch by batch.

Embeddings in a file, with everything needed to judge them later: NPZ, Parquet or CSV, by the ending of its name.

| array or column | meaning |
|---|---|
| ``embeddings`` | (n, dim) float32, or float16 |
| ``codes``, ``precision``, ``dim`` | in their place, where they are kept as ``int8`` or ``binary`` |
| ``ids``, ``role`` | of every sample |
| ``label``, ``label_names`` | codes and their names, where the samples have labels |
| ``split`` | where the samples have one |
| ``path`` | the file of every sample, absolute, where they came from files |
| ``model`` | one text: the hash of the weights, as in the contract of the run |
| any other | the domain and the groups of the samples, by their names (``name_`` where a name above is taken) |

In tables (Parquet, CSV) ``label`` holds the names themselves, ``model`` is the same in every row, and ``embeddings``
is a column of lists: in CSV numbers with spaces between them. `mettle.evaluate.read_embeddings` reads all three alike.
"""

import csv
import importlib
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mettle.atomic_files import write_bytes
from mettle.data.dataset import NO_SPLIT, ROLES, SPLITS, Samples
from mettle.data.quantization import Precision, check_precision, cut_embeddings, quantize_embeddings, to_arrays
from mettle.data.transforms import to_input_tensor
from mettle.errors import InputError, MissingExtra
from mettle.model.embedder import EmbeddingModel, eval_mode, find_device
from mettle.model.preprocess import Preprocess
from mettle.model.weights import hash_state_dict

BATCH = 512  # rows that are embedded at a time


@torch.inference_mode()
def embed(
    model: EmbeddingModel,
    samples: Samples,
    *,
    batch: int = BATCH,
    features: bool = False,
    before_neck: bool = False,
) -> np.ndarray:
    """(n, dim) float32 embeddings in the order of the table.

    ``features`` gives what the head sees instead, ``before_neck`` the embeddings that losses see: before a neck, if
    there is one, whichever of the two the model is used with, and of each image alone, without its mirror image. The
    model is left in the mode it was in.
    """
    device = str(find_device(model))
    function = model.features if features else model
    if before_neck:
        function = getattr(model, "before_neck", model)
    parts = []
    with eval_mode(model):
        for start in range(0, len(samples), batch):
            positions = np.arange(start, min(start + batch, len(samples)))
            x = to_input_tensor(samples.read(positions), device)
            parts.append(function(x).float().cpu().numpy())
    return np.concatenate(parts) if parts else np.empty((0, model.dim), np.float32)


def embed_items(model: EmbeddingModel, items: Any, preprocess: Preprocess | None, *, batch: int = 256) -> np.ndarray:
    """(n, dim) float32 embeddings of what a user holds.

    Args:
        model: what embeds.
        items: images, where there is a ``preprocess``: paths, bytes, Pillow images or uint8 arrays, one or several. Or
            a batch of inputs as the network takes them: floats, or whole numbers such as token ids.
        preprocess: how images become inputs.
        batch: how many are embedded at a time.

    Raises:
        InputError: these are neither images that the model takes nor a batch of its inputs.
    """
    x: Any = items
    is_array = isinstance(items, torch.Tensor | np.ndarray)
    if is_array and str(items.dtype).removeprefix("torch.") != "uint8":
        if tuple(x.shape[1:]) != tuple(model.shape) or not len(x):
            wanted = ("n", *model.shape)
            raise InputError(f"a batch of inputs ({', '.join(map(str, wanted))}) is wanted, got shape {tuple(x.shape)}")
    elif preprocess is None:
        shape = tuple(model.shape)
        raise InputError(
            f"this model takes batches of inputs of shape {shape}, got {type(items).__name__}: it does not know how "
            "images become inputs; train or adopt it with preprocess="
        )
    else:
        several = items.ndim == 4 if is_array else isinstance(items, Sequence) and not isinstance(items, str | bytes)
        x = preprocess.stack(items if several else [items])
    device = str(find_device(model))
    with eval_mode(model), torch.inference_mode():
        parts = [model(to_input_tensor(x[k : k + batch], device)).float().cpu() for k in range(0, len(x), batch)]
    return torch.cat(parts).numpy()


OWN = frozenset(
    ("embeddings", "codes", "precision", "dim", "ids", "role", "label", "label_names", "split", "path", "model")
)


def write_embeddings(
    model: EmbeddingModel,
    samples: Samples,
    path: Path,
    *,
    weights: str | None = None,
    dim: int | None = None,
    precision: Precision = "float32",
) -> str:
    """Embed samples into a file; see above for what is in it.

    Args:
        model: What embeds.
        samples: What is embedded.
        path: The file to write; its ending says which kind.
        weights: The hash of the model's weights, as its contract has it; worked out where it is not given.
        dim: How many of the first numbers of each embedding are kept, see `cut_embeddings`; by default all.
        precision: How they are kept, see `quantize_embeddings`; others than float32 in ``.npz`` only.

    Raises:
        InputError: There is no folder for the file, files with this ending are not written, or not in this precision;
            nothing has been embedded then.
        MissingExtra: Parquet support is not installed.
    """
    check_output_path(path)
    encode = choose_encoder(path, precision)
    check_dim(dim, model)
    z = embed(model, samples)
    z = z if dim is None else cut_embeddings(z, dim)
    quantized = None if precision == "float32" else quantize_embeddings(z, precision)
    arrays = {"embeddings": z} if quantized is None else to_arrays(quantized)
    write_bytes(path, encode(arrays | describe_rows(samples, weights or hash_state_dict(model))))
    size = "" if quantized is None else f", {precision}: {quantized.bytes_per_vector} bytes each"
    return f"{path}: {len(z)} embeddings of dimension {z.shape[1]}{size}"


def check_dim(dim: int | None, model: EmbeddingModel) -> None:
    """Refuse to cut embeddings to a length that they do not have."""
    if dim is not None and not 1 <= dim <= model.dim:
        raise InputError(f"dim must be from 1 to {model.dim}, the length of the embeddings, got {dim}")


def describe_rows(samples: Samples, weights: str) -> dict[str, np.ndarray]:
    """What a file of embeddings says of every row, see above; ``weights`` is the hash of the model's."""
    arrays: dict[str, np.ndarray] = {
        "ids": samples.ids,
        "role": np.asarray([ROLES[code] for code in samples.role], str),
        "model": np.asarray(weights),
    }
    if any(samples.label.names):
        arrays |= {"label": samples.labels, "label_names": np.asarray(samples.label.names)}
    if (samples.split != NO_SPLIT).any():
        arrays["split"] = np.asarray([SPLITS[code] if code >= 0 else "" for code in samples.split], str)
    paths = samples.paths()
    if paths is not None:  # a name that is no text is written so that it can at least be read
        arrays["path"] = np.asarray([str(p).encode("utf-8", "backslashreplace").decode() for p in paths], str)
    for name, column in samples.columns().items():
        arrays[f"{name}_" if name in OWN else name] = column.values().astype(str)
    return arrays


def choose_encoder(path: Path, precision: Precision = "float32") -> Callable[[Mapping[str, np.ndarray]], bytes]:
    """What turns arrays into the content of a file with this name; refuses endings that are not written."""
    kind = Path(path).suffix.lower()
    check_precision(precision)
    if precision != "float32" and kind != ".npz":
        raise InputError(f"cannot write {path}: embeddings of precision {precision!r} are written as .npz")
    if kind in (".parquet", ".pq"):
        try:
            arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
        except ImportError:
            raise MissingExtra("Parquet needs pyarrow: pip install pyarrow, or write .npz") from None
        return lambda arrays: _encode_parquet(arrays, arrow, parquet)
    if kind not in ENCODERS:
        raise InputError(
            f"cannot write {path}: embeddings are written as .npz, .parquet or .csv; choose such an ending"
        )
    return ENCODERS[kind]


def _encode_npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    buffer = BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _encode_csv(arrays: Mapping[str, np.ndarray]) -> bytes:
    columns = _as_columns(arrays)
    vectors = columns.pop("embeddings")
    buffer = StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*columns, "embeddings"])
    for row, vector in zip(zip(*(c.tolist() for c in columns.values()), strict=True), vectors, strict=True):
        writer.writerow([*row, " ".join(map(str, vector))])  # the fewest digits that read back to the same float32
    return buffer.getvalue().encode()


def _encode_parquet(arrays: Mapping[str, np.ndarray], arrow: Any, parquet: Any) -> bytes:
    columns: dict[str, Any] = _as_columns(arrays)
    z = columns["embeddings"]
    columns["embeddings"] = arrow.FixedSizeListArray.from_arrays(arrow.array(z.ravel()), z.shape[1])
    buffer = BytesIO()
    parquet.write_table(arrow.table(columns), buffer)
    return buffer.getvalue()


def _as_columns(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One entry for each row: names instead of codes, and what is said once for all rows in each of them."""
    columns = {name: array for name, array in arrays.items() if name != "label_names"}
    if "label" in columns:
        columns["label"] = arrays["label_names"][columns["label"]]
    columns["model"] = np.full(len(columns["ids"]), columns["model"])
    return columns


ENCODERS = {".npz": _encode_npz, ".csv": _encode_csv}


def check_output_path(path: Path) -> None:
    """Refuse a file that cannot be made, before the work that would fill it."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}; make it, or choose another place")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")
