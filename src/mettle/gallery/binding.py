"""Which model a gallery belongs to, and the copy of that model on disk."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mettle.atomic_files import open_unlinked, write_bytes
from mettle.errors import GalleryError, InputError, RunError
from mettle.gallery.scoring import check_rule
from mettle.gallery.thresholds import as_thresholds

if TYPE_CHECKING:
    from mettle.train.run_folder import RunFolder


@dataclass(frozen=True)
class Binding:
    """What the templates of a gallery are; a gallery is bound once and refuses templates of anything else."""

    dim: int
    model: str | None = None  # sha256 of the weights; None: embeddings from elsewhere
    preprocessing: str | None = None  # the contract's input, as sorted JSON
    fusion: str = "best"
    thresholds: Mapping[str, Any] = field(default_factory=dict)  # as in contract.json, by false-accept rate
    metric: str = "cosine"


MAX_DIM = 65536


FILES = ("run.json", "recipe.toml", "contract.json")  # what embeds a picture, beside the network itself


NETWORKS = ("graph.onnx", "model.safetensors")  # the first that the contract names


def contract_of(model: Any) -> dict[str, Any]:
    """What an embedding of a model is: of a run, or of any object with ``embed`` and a ``contract``."""
    found: Any = model.contract
    contract: Any = found() if callable(found) else found
    return contract


def binding_of(contract: dict[str, Any], fusion: str, thresholds: dict[str, Any]) -> Binding:
    """What a gallery of this model is bound to."""
    try:
        # What a table's columns are called was not always kept; the weights say which model it is.
        way = {key: value for key, value in contract["input"].items() if key != "columns"}
        return Binding(
            dim=int(contract["dim"]),
            model=str(contract["weights"]),
            preprocessing=json.dumps(way, sort_keys=True),
            fusion=fusion,
            thresholds=thresholds or as_thresholds(contract.get("thresholds")),
            metric=str(contract["metric"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise RunError(f"the model's contract.json is damaged ({problem}): train or copy the run again") from None


def offered_binding(
    run: "RunFolder | None", dim: int | None, fusion: str | None, thresholds: Mapping[Any, Any] | None
) -> Binding | None:
    """What a new gallery would be bound to; None where nothing says how long its embeddings are."""
    rule, given = check_rule("best" if fusion is None else fusion), as_thresholds(thresholds)
    if run is not None:
        return binding_of(contract_of(run), rule, given)
    if dim is None:
        return None
    if not isinstance(dim, int | np.integer) or isinstance(dim, bool) or not 1 <= dim <= MAX_DIM:
        raise InputError(f"dim must be a whole number between 1 and {MAX_DIM}, got {dim!r}")
    return Binding(int(dim), fusion=rule, thresholds=given)


def check_same(bound: Binding, offered: Binding, where: str) -> None:
    """Refuse a model whose embeddings are not those of the gallery."""
    if bound.model is None:
        raise GalleryError(f"{where} holds embeddings from elsewhere: open it without a model, and give embeddings")
    for name, what in (("dim", "dimension"), ("model", "weights"), ("preprocessing", "input"), ("metric", "metric")):
        mine, other = getattr(bound, name), getattr(offered, name)
        if mine != other:
            raise GalleryError(
                f"{where} is bound to a model with another {what} ({_shorten_value(mine)}, not "
                f"{_shorten_value(other)}): scores of two models cannot be compared. Open it with its own model, or "
                "enrol everybody anew in a new gallery"
            )


def copy_model(run: "RunFolder", folder: Path) -> dict[str, str]:
    """Keep what embeds a picture beside the templates, so that the gallery opens alone; returns SHA-256 by file."""
    if not hasattr(run, "folder"):
        return {}  # an object of somebody else: whoever opens the gallery brings it along
    run.model()  # refuses weights that are not those of the contract
    network = next(name for name in NETWORKS if name in run.contract()["files"])
    return copy_files(run.folder, folder, (*FILES, network))


def copy_files(source: Path, folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Copy files into a folder; returns the SHA-256 of what was written, by name."""
    folder.mkdir(exist_ok=True)
    digests = {}
    for name in names:
        content = (source / name).read_bytes()
        write_bytes(folder / name, content)
        digests[name] = hashlib.sha256(content).hexdigest()
    return digests


def find_damaged_files(folder: Path, digests: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Which files of the copy of the model are not as they were written, in words."""
    found = []
    for name in names:
        try:
            with open_unlinked(folder / name) as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == digests[name]
        except OSError as error:
            found.append(f"{folder / name} cannot be read ({error.strerror or error}): restore a snapshot")
            continue
        if not same:
            found.append(f"{folder / name} is not as it was written: restore a snapshot, or open it with model=RUN")
    return found


def _shorten_value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"


def binding_to_json(binding: Binding) -> str:
    """The binding as text to be kept in the storage."""
    if not isinstance(binding.dim, int) or binding.dim < 1:
        raise InputError(f"dim of a gallery must be a whole number above 0, got {binding.dim!r}")
    try:
        return json.dumps({**asdict(binding), "thresholds": dict(binding.thresholds)}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"thresholds of a gallery must be plain numbers and texts: {error}") from None


def binding_from_json(text: str) -> Binding:
    """The binding that `binding_to_json` wrote; values that none can have are refused."""
    try:
        found = json.loads(text)
        binding = Binding(**found)
        texts = (binding.model, binding.preprocessing)
        if type(binding.dim) is not int or not 1 <= binding.dim <= MAX_DIM or binding.metric != "cosine":
            raise ValueError
        if any(value is not None and not isinstance(value, str) for value in texts):
            raise ValueError
        check_rule(binding.fusion)
        as_thresholds(binding.thresholds)
        return binding
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise GalleryError(
            "the storage does not say what its templates are: it is damaged, restore a snapshot"
        ) from None


def _kept_contract(folder: Path) -> dict[str, Any]:
    """What the run says of its model that a gallery keeps beside its templates, without importing torch."""
    try:
        return json.loads((folder / "contract.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return _open_run(folder).contract()  # which says what is wrong with it


def _find_run(model: "str | Path | RunFolder | None") -> "RunFolder | None":
    if model is None or (hasattr(model, "contract") and hasattr(model, "embed")):
        return model  # type: ignore[return-value]
    if not isinstance(model, str | PathLike):
        raise InputError(
            f"model must be a run, its folder, or an object with embed and contract: got {type(model).__name__}"
        )
    return _open_run(model)


def _open_run(folder: str | Path) -> "RunFolder":
    from mettle.train.run_folder import open_run_folder

    return open_run_folder(folder)
