"""The tensors of a model in a file: written all or nothing, loaded only if they are what was written.

A file of weights is named by its hash. Where one is loaded, its size is checked before it is read, so that a file that
somebody put there cannot fill the memory, and its hash before it is used, so that no other weights take its place.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from mettle.atomic_files import write_bytes
from mettle.errors import InputError, RunError

if TYPE_CHECKING:
    from mettle.model.embedder import EmbeddingModel


class SavedWeights(NamedTuple):
    """What identifies a file of weights."""

    sha256: str
    size: int  # bytes


def save_state_dict(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> SavedWeights:
    """Write tensors as safetensors, replacing what is there, all or nothing.

    Raises:
        OSError: the file cannot be written; what was there before is untouched.
    """
    content = encode_state_dict(state, metadata)
    write_bytes(path, content)
    return SavedWeights(hashlib.sha256(content).hexdigest(), len(content))


def load_state_dict(path: Path, sha256: str | None = None, size: int | None = None) -> dict[str, Tensor]:
    """Read tensors that `save_state_dict` wrote.

    Args:
        path: the file.
        sha256: the hash that it must have.
        size: bytes that it must have.

    Raises:
        RunError: the file is missing, is not the one that is wanted, or holds no tensors.
    """
    content = read_checked(path, sha256, size)
    try:
        return load(content)
    except (SafetensorError, ValueError) as error:
        raise RunError(f"{path} holds no tensors: {' '.join(str(error).split())[:200]}") from None


def read_checked(path: Path, sha256: str | None = None, size: int | None = None) -> bytes:
    """The content of a file, if it has this size, which is looked at before it is read, and this hash."""
    path = Path(path)
    problem = "is missing"
    try:
        found = path.stat().st_size
        if size is not None and found != size:
            raise RunError(
                f"{path} has {found} bytes instead of {size}: it is not the file that was saved; train again"
            )
        content = path.read_bytes()
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            problem = f"cannot be read ({error.strerror})"
        raise RunError(f"{path} {problem}: put it back, or train again") from None
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise RunError(f"{path} is damaged or another file: its content does not match its hash; train again")
    return content


def encode_state_dict(state: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The content of the file that `save_state_dict` writes."""
    return save(separate_tensors(state), metadata=None if metadata is None else dict(metadata))


def separate_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU that share no memory, as safetensors wants them.

    One under two names, as of a module that is part of two others, is there twice.
    """
    seen: set[int] = set()
    tensors = {}
    for name, tensor in state.items():
        found = tensor.detach().contiguous().cpu()
        if found.untyped_storage().data_ptr() in seen:
            found = found.clone()
        seen.add(found.untyped_storage().data_ptr())
        tensors[name] = found
    return tensors


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The named tensors of a file, ``.safetensors`` or a ``state_dict`` that torch saved.

    Of torch's files only tensors are read, never code. A ``state_dict`` may lie inside a checkpoint, under the key
    ``state_dict`` or ``model``.

    Raises:
        InputError: the file holds no tensors.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            state: Any = load(path.read_bytes())
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"no file {str(path)!r}: give the weights as .safetensors or as torch saved them") from None
    except Exception as error:  # whatever such a file makes of a reader
        reason = " ".join(str(error).split())[:160]
        raise InputError(f"cannot read weights from {str(path)!r}: {reason}; give a state_dict of tensors") from None
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{str(path)!r} holds no state_dict: give a file of named tensors")
    return dict(state)


def load_any_weights(module: nn.Module, path: Path) -> None:
    """Put the tensors of a file, see `read_state_dict`, into a module that has all of them and no others.

    Raises:
        InputError: the file holds no tensors, or not those of this module.
    """
    state = read_state_dict(path)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{str(path)!r} does not hold the weights of {type(module).__name__}: {reason}") from None


def hash_state_dict(model: "nn.Module | EmbeddingModel") -> str:
    """The hash that names a model: of its weights, written as a run keeps them, or of the file that it is."""
    content = getattr(model, "content", None)  # a graph of ONNX, which has no tensors of torch
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha256(encode_state_dict(model.state_dict())).hexdigest()


def state_bytes(model: nn.Module) -> int:
    """Bytes that the tensors of a model take, in memory and in a file."""
    return sum(t.numel() * t.element_size() for t in model.state_dict().values())
