"""A run folder: what training leaves behind, and the only thing that everything after it reads.

recipe.toml        rebuilds the run
model.safetensors  the weights
contract.json      what an embedding of this model is: dimension, metric, preprocessing, hash of the weights, thresholds
trained.safetensors  who it was trained on: hashes of names
classes.safetensors  the vectors of the training classes, where the loss had such, with their names
biased.safetensors  the second encoder, where there is one
metrics.json       what was measured
log.jsonl          what happened during training
report.html        all of it to look at
map.json           places on the maps, for comparisons
checkpoints/       the last two states of the run
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from mettle.durable import sha256, write_bytes, write_folder, write_text
from mettle.errors import DataError, MettleError, RunError
from mettle.model import Embedder, EmbedderSpec
from mettle.train.recipe import SAME_CLASS, Recipe, stored_recipe

HEADER = 1 << 20  # bytes beside the weights in their file, at most
LARGEST_JSON = 64 << 20
PLACES = ("source", "pairs", "triplets")  # keys of [data] that may be paths
FORMAT = 2  # of the run folder; raised when an older mettle could misread a newer folder


@dataclass(frozen=True)
class Run:
    """One run folder, opened."""

    folder: Path
    recipe: Recipe
    state: Mapping[str, Any]  # run.json: format, data fingerprint, places of the data, versions

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name

    def made_of(self, fingerprint: str) -> bool:
        """Whether data with this fingerprint are those that the run was trained on."""
        return str(self.state.get("data", "")).partition(" ")[0] == fingerprint

    def located(self, source: str | None = None) -> Recipe:
        """The recipe with its data where they are: as the run was trained, else as the recipe names them from here.

        Args:
            source: where the samples are now, if not there.

        Raises:
            DataError: they are in neither place.
        """
        known = self.state.get("paths")
        known = known if isinstance(known, dict) else {}
        found = {} if source is None else {"source": source}
        for key in PLACES:
            typed = getattr(self.recipe.data, key)
            if key in found or typed is None or (key not in known and embedded(typed)):
                continue
            stored = str(known.get(key, ""))
            places = [place for place in (stored, typed) if place and os.path.exists(os.path.expanduser(place))]
            if not places:
                raise DataError(f"no data at {stored or typed!r}: {self._whence(key, typed, stored)}")
            found[key] = places[0]
        return self.recipe.model_copy(update={"data": self.recipe.data.model_copy(update=found)})

    def _whence(self, key: str, typed: str, stored: str) -> str:
        """Where a path that leads nowhere comes from, and what to do."""
        if stored:
            return f"there they were when {self.folder} was trained; put them back, or name their place now (--data)"
        return (
            f"data.{key} of {self.folder / 'recipe.toml'} says {typed!r}, as seen from the folder that the run was "
            "trained in; work there, or name their place now (--data)"
        )

    def contract(self) -> dict[str, Any]:
        """What an embedding of this model is."""
        return _json(self.folder / "contract.json", "the run has not finished training; continue it with --resume")

    def metrics(self) -> dict[str, Any]:
        """What was measured."""
        return _json(self.folder / "metrics.json", f"evaluate it first: mettle evaluate {self.folder}")

    def model(self, device: str = "cpu") -> Embedder:
        """The trained embedder, in eval mode, if its weights are those of the contract."""
        contract, path = self.contract(), self.folder / "model.safetensors"
        try:
            shape = tuple(int(side) for side in contract["input"]["shape"])
            model = Embedder(EmbedderSpec(**contract["model"]), shape, fetch=False)
            weights = contract["weights"]
        except (KeyError, TypeError, ValueError, RuntimeError, MettleError) as problem:
            raise RunError(f"{self.folder / 'contract.json'} describes no model of mettle: {_line(problem)}") from None
        if not path.is_file() or path.stat().st_size > _bytes(model) + HEADER or sha256(path) != weights:
            raise RunError(f"{path} is missing or not the file that contract.json was written for: train again")
        try:
            model.load_state_dict(load_file(path))
        except (SafetensorError, RuntimeError, ValueError) as problem:
            raise RunError(f"{path} does not hold the weights of this model: {_line(problem)}") from None
        return model.to(device).eval()


def embedded(source: str) -> bool:
    """Whether a source of data is a name and not a path."""
    return source == SAME_CLASS or (source.partition(":")[0] == "glyphs" and not Path(source).exists())


def places(recipe: Recipe) -> dict[str, str]:
    """The paths of a recipe as they are from anywhere on this machine, by their keys in ``[data]``."""
    typed = {key: getattr(recipe.data, key) for key in PLACES}
    return {key: str(Path(path).expanduser().absolute()) for key, path in typed.items() if path and not embedded(path)}


def create(folder: Path, recipe: Recipe, facts: Mapping[str, Any]) -> Run:
    """Make a new run folder; one that exists is never touched."""
    if folder.exists():
        raise RunError(f"{folder} is there already: continue it with --resume, or choose another --name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    state = {"format": FORMAT, **facts}

    def fill(place: Path) -> None:
        (place / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
        (place / "run.json").write_text(json.dumps(state, indent=1), encoding="utf-8")

    write_folder(folder, fill)
    return Run(folder, recipe, state)


def open_run(folder: Path | str) -> Run:
    """Open a run folder, if this version of mettle can read it."""
    folder = Path(folder)
    if not (folder / "run.json").is_file():
        where = "no such folder" if not folder.exists() else "no run.json in it"
        raise RunError(f"{folder} is not a run of mettle ({where}): give a folder that `mettle train` wrote")
    state = _json(folder / "run.json", "the folder is damaged")
    if state.get("format") != FORMAT:
        raise RunError(
            f"{folder} was written in run format {state.get('format')}, this version of mettle reads format {FORMAT}: "
            "use the version that wrote it, or train again"
        )
    return Run(folder, stored_recipe(folder / "recipe.toml"), state)


def finish(
    run: Run,
    model: Embedder,
    thresholds: Mapping[str, Any] | None = None,
    columns: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Write the weights and the contract; ``columns`` are those of the table that the rows came from, if any."""
    tensors = {name: t.detach().contiguous().cpu() for name, t in model.state_dict().items()}
    path = run.folder / "model.safetensors"
    write_bytes(path, save(tensors))
    kind = "image" if len(model.shape) == 3 else "row"
    contract = {
        "format": FORMAT,
        "dim": model.spec.dim,
        "metric": "cosine",
        "unit": model.spec.unit,
        "input": {
            "kind": kind,
            "shape": list(model.shape),
            "scaling": "uint8 / 255, resized with antialias; centring and scaling are inside the model"
            if kind == "image"
            else "as read; centring and scaling are inside the model",
            **({"resize": run.recipe.data.resize or "crop"} if kind == "image" else {}),
            **({"columns": list(columns)} if columns else {}),
        },
        "model": vars(model.spec),
        "weights": sha256(path),
        "thresholds": dict(thresholds or {}),
    }
    write_text(run.folder / "contract.json", json.dumps(contract, indent=1))
    return contract


def keep_classes(run: Run, vectors: Tensor, names: Sequence[str]) -> None:
    """Write the class vectors of a finished run and whose they are: a closed-set classifier for its embeddings."""
    content = save({"vectors": vectors.detach().contiguous().cpu()}, metadata={"names": json.dumps(list(names))})
    write_bytes(run.folder / "classes.safetensors", content)


def set_thresholds(run: Run, thresholds: Mapping[str, Any]) -> None:
    """Put measured thresholds into the contract."""
    contract = run.contract() | {"thresholds": dict(thresholds)}
    write_text(run.folder / "contract.json", json.dumps(contract, indent=1))


def _json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise RunError(f"{path} is missing: {remedy}")
    if path.stat().st_size > LARGEST_JSON:
        raise RunError(f"{path} has {path.stat().st_size} bytes, more than any that mettle writes")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {_line(error)}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it holds no table")
    return found


def _bytes(model: Embedder) -> int:
    return sum(t.numel() * t.element_size() for t in model.state_dict().values())


def _line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:200] or type(problem).__name__
