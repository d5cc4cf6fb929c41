"""Checkpoints: a folder per step, safetensors and JSON, complete or not there at all.

    checkpoints/step-00000200/state.safetensors   every tensor: networks, optimizers, random state
                              state.json          every plain number, and the hash of the tensors
                              manifest.json       written last: the hashes of both
    checkpoints/best/step-00000160/               the same files: the weights that validated best, see `BestCheckpoint`

A folder appears by a rename, so a process killed while writing leaves the earlier ones untouched. Reading checks
hashes; a damaged checkpoint is passed over, aloud, for the one before. The last two are kept.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mettle.atomic_files import remove_leftovers, sha256, write_folder
from mettle.errors import RunError
from mettle.model.weights import separate_tensors

KEEP_LAST = 2


def save_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write the state after ``step`` steps, then drop all but the last two checkpoints."""
    place = write_checkpoint(folder, step, state)
    for old in list_checkpoints(folder)[:-KEEP_LAST]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def write_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Write the state after ``step`` steps beside the checkpoints that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    tensors, rest = flatten_state(state)
    place = folder / checkpoint_name(step)
    if place.exists():  # the same step again, after a resume: identical by construction, but perhaps damaged
        shutil.rmtree(place)

    def fill(temporary: Path) -> None:
        save_file(separate_tensors(tensors), temporary / "state.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step, "state": rest}))
        hashes = {name: sha256(temporary / name) for name in ("state.safetensors", "state.json")}
        (temporary / "manifest.json").write_text(json.dumps(hashes))

    try:
        write_folder(place, fill)
    except (OSError, SafetensorError) as error:
        why = describe_write_error(error)
        raise RunError(
            f"could not write a checkpoint to {place}: {why}. Earlier checkpoints are intact: make room, then continue "
            "with --resume"
        ) from None
    return place


def describe_write_error(error: Exception) -> str:
    """What the system said, in words: safetensors wraps it into a message of its own."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r'message: "([^"]*)"', str(error))
    return found.group(1) if found else " ".join(str(error).split())


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and p.name[5:].isdigit())


def checkpoint_name(step: int) -> str:
    """The name of the folder of a checkpoint."""
    return f"step-{step:08d}"


def checkpoint_step(place: Path) -> int:
    """How many steps were done when a checkpoint was written."""
    return int(place.name[5:])


def describe_latest(folder: Path) -> str:
    """What there is to continue from, in words."""
    found = list_checkpoints(folder)
    return f"the checkpoint of step {checkpoint_step(found[-1])} is kept" if found else "no checkpoint was written yet"


def load_latest(folder: Path) -> tuple[int, dict[str, Any], list[str]] | None:
    """The newest good checkpoint: its step, its state, and a line for each damaged one that was passed over."""
    passed: list[str] = []
    for place in reversed(list_checkpoints(folder)):
        try:
            step, state = read_checkpoint(place)
            return step, state, passed
        except RunError as error:
            passed.append(str(error))
    if passed:
        raise RunError(f"no checkpoint in {folder} can be read: {passed[0]}. Start the run again under another name")
    return None


def read_checkpoint(place: Path) -> tuple[int, dict[str, Any]]:
    """One checkpoint, if its hashes agree."""
    try:
        hashes = json.loads((place / "manifest.json").read_text())
        for name in ("state.safetensors", "state.json"):
            if sha256(place / name) != hashes[name]:
                raise RunError(f"{place / name} is damaged: its content does not match its hash")
        tensors = load_file(place / "state.safetensors")
        content = json.loads((place / "state.json").read_text())
        return int(content["step"]), restore_state(tensors, content["state"])
    except RunError:
        raise
    except Exception as error:  # what a damaged file makes of its readers has many types
        said = " ".join(str(error).split())[:200]
        raise RunError(f"{place} is damaged: {type(error).__name__}: {said}") from None


def flatten_state(state: Any, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """Split a nested state into named tensors and JSON with ``{"tensor": name}`` in their places."""
    if isinstance(state, Tensor):
        return {prefix: state}, {"tensor": prefix}
    if isinstance(state, Mapping):
        tensors: dict[str, Tensor] = {}
        entries = []
        for key, value in state.items():
            found, rest = flatten_state(value, f"{prefix}/{key}" if prefix else str(key))
            tensors |= found
            entries.append([key, rest])
        return tensors, {"map": entries}  # pairs, because JSON would turn the whole-number keys of optimizers into text
    if isinstance(state, list | tuple):
        tensors, items = {}, []
        for k, value in enumerate(state):
            found, rest = flatten_state(value, f"{prefix}/{k}")
            tensors |= found
            items.append(rest)
        return tensors, {"list": items}
    return {}, {"value": state}


def restore_state(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """The inverse of `flatten_state`."""
    (kind, content), *_ = rest.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "map":
        return {key: restore_state(tensors, value) for key, value in content}
    if kind == "list":
        return [restore_state(tensors, value) for value in content]
    return content


def get_rng_state() -> dict[str, Tensor]:
    """State of torch's generators, for whatever draws from them (dropout, say)."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"cuda:{k}": state for k, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Put torch's generators back; generators of absent devices are left out."""
    torch.set_rng_state(state["cpu"])
    for k in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda:{k}" in state:
            torch.cuda.set_rng_state(state[f"cuda:{k}"], k)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Leave the generators of torch, NumPy and Python as they were, whatever is drawn from them inside."""
    before, array, plain = get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        set_rng_state(before)
        np.random.set_state(array)
        random.setstate(plain)
