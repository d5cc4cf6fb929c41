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
test_embeddings.safetensors  embeddings of the test split, for comparisons
checkpoints/       the last two states of the run

A run has finished when its contract is there: it is written last, and names the hash and the size of all other files
of the artifact.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays
from torch import Tensor, nn

from mettle.atomic_files import TEMPORARY, remove_leftovers, sync_folder, write_bytes, write_folder, write_text
from mettle.data.dataset import Column, Samples
from mettle.data.sources.torch_dataset import PYTHON
from mettle.errors import DataError, InputError, MettleError, RunError
from mettle.model import Embedder, EmbedderSpec, EmbeddingModel, ModuleEmbedder, OnnxEmbedder, Preprocess, embed_items
from mettle.model.onnx import encode_onnx
from mettle.model.weights import SavedWeights, load_state_dict, read_checked, save_state_dict, state_bytes
from mettle.train.checkpoint import describe_write_error
from mettle.train.factory import describe_object
from mettle.train.recipe import SAME_CLASS, Recipe, load_stored_recipe

LARGEST_JSON = 64 << 20
LARGEST_INPUT = 1 << 24  # numbers of one input: a color image of 2364 x 2364 pixels
_NO_MODEL = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, MemoryError, ArithmeticError, MettleError)
PATH_KEYS = ("source", "pairs", "triplets")  # keys of [data] that may be paths
FORMAT = 3  # of the run folder; raised when an older mettle could misread a newer folder
MODEL, BIASED, CLASSES, TRAINED = (f"{name}.safetensors" for name in ("model", "biased", "classes", "trained"))
GRAPH = "graph.onnx"  # the network of a run that mettle cannot build by itself


@dataclass(frozen=True)
class RunFolder:
    """One run folder, opened."""

    folder: Path
    recipe: Recipe
    state: Mapping[str, Any]  # run.json: format, data fingerprint, places of the data, versions

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.name

    @property
    def has_biased_model(self) -> bool:
        """Whether the run trained a second encoder."""
        return (self.folder / "contract.json").is_file() and BIASED in self.contract()["files"]

    @property
    def is_adopted(self) -> bool:
        """Whether the model was trained elsewhere, on data that nobody here knows."""
        return not self.state.get("data")

    def matches_data(self, fingerprint: str) -> bool:
        """Whether data with this fingerprint are those that the run was trained on."""
        return str(self.state.get("data", "")).partition(" ")[0] == fingerprint

    def recipe_with_data_paths(self, source: str | None = None) -> Recipe:
        """The recipe with its data where they are: as the run was trained, else as the recipe names them from here.

        Args:
            source: where the samples are now, if not there.

        Raises:
            DataError: they are in neither place.
        """
        known = self.state.get("paths")
        known = known if isinstance(known, dict) else {}
        found = {} if source is None else {"source": source}
        for key in PATH_KEYS:
            typed = getattr(self.recipe.data, key)
            if key in found or typed is None or (key not in known and is_builtin_source(typed)):
                continue
            stored = str(known.get(key, ""))
            there = [path for path in (stored, typed) if path and os.path.exists(os.path.expanduser(path))]
            if not there:
                raise DataError(f"no data at {stored or typed!r}: {self._explain_path(key, typed, stored)}")
            found[key] = there[0]
        return self.recipe.model_copy(update={"data": self.recipe.data.model_copy(update=found)})

    def _explain_path(self, key: str, typed: str, stored: str) -> str:
        """Where a path that leads nowhere comes from, and what to do."""
        if stored:
            return f"there they were when {self.folder} was trained; put them back, or name their place now (--data)"
        return (
            f"data.{key} of {self.folder / 'recipe.toml'} says {typed!r}, as seen from the folder that the run was "
            "trained in; work there, or name their place now (--data)"
        )

    def contract(self) -> dict[str, Any]:
        """What an embedding of this model is."""
        path = self.folder / "contract.json"
        found = _read_json(path, "the run has not finished training; continue it with --resume")
        problem = _find_contract_problem(found)
        if problem:
            raise RunError(f"{path} is damaged: {problem}")
        return found

    def metrics(self) -> dict[str, Any]:
        """What was measured."""
        return _read_json(self.folder / "metrics.json", f"evaluate it first: mettle evaluate {self.folder}")

    def model(self, device: str = "cpu") -> EmbeddingModel:
        """The trained embedder, in eval mode, if its weights are those of the contract.

        A network of somebody else is the graph that the run keeps of it: that needs nobody's code, and runs on the CPU.
        """
        if is_foreign(self.contract()):
            return self._load_graph()
        return self._load_embedder(MODEL, device)

    def load_into(self, module: nn.Module) -> ModuleEmbedder:
        """The trained network of somebody else as a module: its weights put into ``module``, which is built like it."""
        contract = self.contract()
        if not is_foreign(contract):
            raise RunError(f"the model of {self.folder} is one of mettle's own: open the run without a model")
        entry, file = contract["input"], contract["files"][MODEL]
        own = self.preprocess if entry.get("mean") is not None else None
        found = ModuleEmbedder(
            module,
            tuple(entry["shape"]),
            dtype=entry["dtype"],
            preprocess=own,
            dim=int(contract["dim"]),
            neck=contract["model"].get("neck", "none"),
            embedding=contract["model"].get("embedding", "before"),
        )
        _load_weights(found, self.folder / MODEL, str(contract["weights"]), int(file["size"]))
        return found.eval()

    @property
    def preprocess(self) -> Preprocess | None:
        """What happens to an image before the model; None where the model takes no images."""
        entry = self.contract()["input"]
        return Preprocess.from_contract(entry) if entry.get("kind") == "image" else None

    def embed(self, items: Any) -> np.ndarray:
        """(n, dim) embeddings of images or of a batch of inputs, see `mettle.model.embed_items`."""
        return embed_items(self._cpu_model, items, self.preprocess)

    @cached_property
    def _cpu_model(self) -> EmbeddingModel:
        return self.model()

    def _load_graph(self) -> OnnxEmbedder:
        """The network as a graph, if it is the one that the contract names."""
        contract, path = self.contract(), self.folder / GRAPH
        if GRAPH not in contract["files"]:
            why = contract["model"].get("graph", "it has no graph.onnx")
            made = contract["model"].get("class", "?")
            remedy = "open the run with it, mettle.open_run(folder, model=...)"
            raise RunError(f"the network of {self.folder} is {made}, and {why}: {remedy}")
        file = contract["files"][GRAPH]
        content = read_checked(path, str(file["sha256"]), int(file["size"]))
        return OnnxEmbedder(content)

    def biased_model(self, device: str = "cpu") -> Embedder:
        """The second encoder, in eval mode, if its weights are those of the contract."""
        if not self.has_biased_model:
            raise RunError(f"{self.folder} has no biased encoder: only runs with a Relative difficulty train one")
        return self._load_embedder(BIASED, device)

    def _load_embedder(self, name: str, device: str) -> Embedder:
        """An embedder as the contract describes it, with the weights of a file that it names."""
        contract, path = self.contract(), self.folder / name
        where = self.folder / "contract.json"
        if name not in contract["files"]:
            raise RunError(f"{where} describes no model of mettle: it names no {name}")
        file = contract["files"][name]
        digest = contract["weights"] if name == MODEL else file["sha256"]
        state = load_state_dict(path, digest, file["size"])  # first: a contract can describe any size, a file has one
        try:
            spec, shape = EmbedderSpec(**contract["model"]), tuple(contract["input"]["shape"])
            model = _build_described(spec, shape, file["size"])
        except _NO_MODEL as problem:
            raise RunError(f"{where} describes no model of mettle: {_one_line(problem)}") from None
        _put_weights(model, state, path)
        return model.to(device).eval()

    def training_identities(self) -> "TrainingIdentities | None":
        """Who the run was trained on; None where the folder does not say."""
        return TrainingIdentities.load(self.folder) if (self.folder / TRAINED).is_file() else None


def _find_contract_problem(contract: Mapping[str, Any]) -> str:
    """What is wrong with the form of a contract; empty: nothing."""
    for name, kind in (("dim", int), ("input", dict), ("model", dict), ("weights", str), ("files", dict)):
        if not isinstance(contract.get(name), kind):
            return f"its entry {name!r} is missing or of another kind"
    shape = contract["input"].get("shape")
    if not isinstance(shape, list) or not all(isinstance(side, int) and side > 0 for side in shape):
        return "the shape of its input is no list of whole numbers above 0"
    for file in contract["files"].values():
        if (
            not isinstance(file, dict)
            or not isinstance(file.get("sha256"), str)
            or not isinstance(file.get("size"), int)
        ):
            return "a file has no hash or no size"
    return ""


def _build_described(spec: EmbedderSpec, shape: tuple[int, ...], size: int) -> Embedder:
    """The embedder that a contract describes, if a file of so many bytes can hold its weights.

    A few bytes of a contract can describe any size, so the model is first made without memory, on torch's device
    "meta".
    """
    if math.prod(shape) > LARGEST_INPUT:
        raise InputError(f"inputs of shape {shape} have more than {LARGEST_INPUT} numbers")
    try:
        with torch.device("meta"):
            wanted = state_bytes(Embedder(spec, shape, load_pretrained=False))
    except (RuntimeError, NotImplementedError):  # a network of another library that computes while it is built
        wanted = 0
    if wanted > size:
        raise InputError(f"it takes {wanted} bytes, and the file of its weights has {size}")
    return Embedder(spec, shape, load_pretrained=False)


def _load_weights(model: nn.Module, path: Path, digest: str, size: int) -> None:
    """Put the tensors of a file into a network, if it is the file that is wanted and they fit."""
    _put_weights(model, load_state_dict(path, digest, size), path)


def _put_weights(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as problem:
        raise RunError(f"{path} does not hold the weights of this model: {_one_line(problem)}") from None


def is_foreign(contract: Mapping[str, Any]) -> bool:
    """Whether the model of a contract is a network of somebody else."""
    return isinstance(contract.get("model"), dict) and "class" in contract["model"]


def is_builtin_source(source: str) -> bool:
    """Whether a source of data is a name and not a path: of embedded data, or of an object of Python."""
    is_name = source.partition(":")[0] == "glyphs" and not Path(source).exists()
    return source == SAME_CLASS or source.startswith(PYTHON) or is_name


def data_paths(recipe: Recipe) -> dict[str, str]:
    """The paths of a recipe as they are from anywhere on this machine, by their keys in ``[data]``."""
    typed = {key: getattr(recipe.data, key) for key in PATH_KEYS}
    return {
        key: str(Path(path).expanduser().absolute())
        for key, path in typed.items()
        if path and not is_builtin_source(path)
    }


def software_versions() -> dict[str, str]:
    """What a run was made with, for ``run.json``."""
    return {"torch": torch.__version__, "python": platform.python_version()}


def create_run(folder: Path, recipe: Recipe, facts: Mapping[str, Any]) -> RunFolder:
    """Make a new run folder; one that exists is never touched."""
    if folder.exists():
        raise RunError(f"{folder} is there already: continue it with --resume, or choose another --name")
    state = {"format": FORMAT, **facts}

    def fill(place: Path) -> None:
        (place / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
        (place / "run.json").write_text(json.dumps(state, indent=1), encoding="utf-8")

    with explain_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_folder(folder, fill)
    return RunFolder(folder, recipe, state)


def open_run_folder(folder: Path | str) -> RunFolder:
    """Open a run folder, if this version of mettle can read it."""
    folder = Path(folder)
    if not (folder / "run.json").is_file():
        where = "no such folder" if not folder.exists() else "no run.json in it"
        raise RunError(f"{folder} is not a run of mettle ({where}): give a folder that `mettle train` wrote")
    state = _read_json(folder / "run.json", "the folder is damaged")
    if state.get("format") != FORMAT:
        raise RunError(
            f"{folder} was written in run format {state.get('format')}, this version of mettle reads format {FORMAT}: "
            "use the version that wrote it, or train again"
        )
    return RunFolder(folder, load_stored_recipe(folder / "recipe.toml"), state)


def save_artifact(
    run: RunFolder,
    model: EmbeddingModel,
    *,
    kind: str = "",
    example: Tensor | None = None,
    biased: EmbeddingModel | None = None,
    classes: tuple[Tensor, Sequence[str]] | None = None,
    columns: Sequence[Mapping[str, Any]] = (),
    selection: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write what training came to; where that fails, nothing of it is there.

    All files are written beside their places first, and the contract is put in its place last.

    Args:
        run: the run.
        model: the trained embedder.
        kind: of the inputs, ``"image"``, ``"row"`` or ``"tensor"``; by default what their shape says.
        example: a batch of inputs, with which the graph of a network of somebody else is traced and checked.
        biased: the second encoder, built like the first.
        classes: the class vectors of the loss and whose they are: a closed-set classifier for the embeddings.
        columns: those of the table that the rows came from, if any.
        selection: which step the weights are of and what it was chosen by, where it is not the last one.

    Returns:
        the contract.
    """
    staged = run.folder / f"artifact{TEMPORARY}0"
    with explain_write_errors(run.folder):
        remove_leftovers(run.folder)
        staged.mkdir()
        try:
            files = {MODEL: save_state_dict(staged / MODEL, model.state_dict())}
            if biased is not None:
                files[BIASED] = save_state_dict(staged / BIASED, biased.state_dict())
            if classes is not None:
                vectors, names = classes
                told = {"names": json.dumps(list(names))}
                files[CLASSES] = save_state_dict(staged / CLASSES, {"vectors": vectors}, told)
            graph = ""
            if isinstance(model, ModuleEmbedder):
                saved, graph = _save_graph(staged / GRAPH, model, example)
                files |= {} if saved is None else {GRAPH: saved}
            contract = _make_contract(run, model, files, columns, kind, graph)
            contract |= {} if selection is None else {"selection": dict(selection)}
            write_text(staged / "contract.json", json.dumps(contract, indent=1))
            for name in (*files, "contract.json"):
                os.replace(staged / name, run.folder / name)
            sync_folder(run.folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return contract


def _save_graph(path: Path, model: ModuleEmbedder, example: Tensor | None) -> tuple[SavedWeights | None, str]:
    """Write the network as a graph; where it has none, why, in words."""
    about = {} if model.preprocess is None else {"preprocess": json.dumps(model.preprocess.to_json())}
    try:
        content, _ = encode_onnx(model, example=example, metadata=about)
    except MettleError as problem:  # no exporter here, or an operation that ONNX does not have
        return None, f"it has no graph.onnx ({_one_line(problem)})"
    write_bytes(path, content)
    return SavedWeights(hashlib.sha256(content).hexdigest(), len(content)), ""


def _make_contract(
    run: RunFolder,
    model: EmbeddingModel,
    files: Mapping[str, tuple[str, int]],
    columns: Sequence[Mapping[str, Any]],
    kind: str,
    graph: str,
) -> dict[str, Any]:
    kind = kind or ("image" if len(model.shape) == 3 else "row")
    entry: dict[str, Any] = {"kind": kind, "shape": list(model.shape)}
    inside = "centring and scaling are inside the model"
    entry["scaling"] = f"uint8 / 255, resized with antialias; {inside}" if kind == "image" else f"as read; {inside}"
    if isinstance(model, ModuleEmbedder):
        entry |= {"dtype": model.dtype, "kind": "image" if model.preprocess is not None else kind}
        described: dict[str, Any] = {"class": describe_object(model.module)} | ({"graph": graph} if graph else {})
        described |= {} if model.neck is None else {"neck": "batchnorm", "embedding": model.embedding}
        way = {} if model.preprocess is None else model.preprocess.to_json()
        entry |= {key: value for key, value in way.items() if key not in ("size", "channels")}
    else:
        assert isinstance(model, Embedder)
        described = model.spec.to_table()
        data = run.recipe.data
        ways = {"resize": data.resize or "crop", "crop": data.crop, "interpolation": data.interpolation}
        entry |= {key: value for key, value in ways.items() if value is not None} if kind == "image" else {}
    return {
        "format": FORMAT,
        "dim": model.dim,
        "metric": "cosine",
        "unit": isinstance(model, Embedder) and model.spec.unit,
        "input": entry | ({"columns": list(columns)} if columns else {}),
        "model": described,
        "weights": files[MODEL][0],
        **_describe_origin(run),
        "files": {name: {"sha256": digest, "size": size} for name, (digest, size) in files.items()},
        "thresholds": {},
    }


def _describe_origin(run: RunFolder) -> dict[str, Any]:
    """The pretrained weights that training began from, where there were some: their origin and their hash."""
    start = run.state.get("start")
    return {} if not isinstance(start, Mapping) else {"pretrained": start["loaded"]}


def set_thresholds(run: RunFolder, thresholds: Mapping[str, Any]) -> None:
    """Put measured thresholds into the contract."""
    contract = run.contract() | {"thresholds": dict(thresholds)}
    write_text(run.folder / "contract.json", json.dumps(contract, indent=1))


@dataclass(frozen=True, eq=False)
class TrainingIdentities:
    """Who a model was trained on: ``trained.safetensors`` of a run, so that "never trained on" can be checked later.

    Hashes of the names of the training identities and domains, sorted; no domains where the data have none. Equal names
    have equal hashes on every machine, the file is eight bytes a name, and nobody's name stands in it.
    """

    identities: np.ndarray
    domains: np.ndarray | None = None

    @classmethod
    def from_samples(cls, samples: Samples) -> "TrainingIdentities":
        """Those of the training split."""
        part = samples.part("train")
        return cls(_hash_names_in_use(part.label), None if part.domain is None else _hash_names_in_use(part.domain))

    @classmethod
    def load(cls, folder: Path) -> "TrainingIdentities":
        """Those of a run folder."""
        path = folder / TRAINED
        try:
            arrays = load_arrays(path)
            found = cls(arrays["identities"], arrays.get("domains"))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as problem:
            raise RunError(
                f"{path} is damaged ({type(problem).__name__}): remove it, and train again to have it"
            ) from None
        for one in (found.identities, found.domains):
            if one is not None and (one.dtype != np.int64 or one.ndim != 1):
                raise RunError(f"{path} is damaged (no list of 64-bit hashes): remove it, and train again to have it")
        return found

    def save(self, folder: Path) -> None:
        """Write them into a run folder, unless they are there already."""
        path = folder / TRAINED
        if not path.is_file():
            arrays = {"identities": self.identities} | ({} if self.domains is None else {"domains": self.domains})
            with explain_write_errors(path):
                write_bytes(path, save_arrays(arrays))

    def contains(self, names: Iterable[str]) -> np.ndarray:
        """For each name of an identity, whether it occurred in training."""
        return _contains(self.identities, names)

    def contains_domain(self, names: Iterable[str]) -> np.ndarray:
        """For each name of a domain, whether it occurred in training."""
        return _contains(np.empty(0, np.int64) if self.domains is None else self.domains, names)


def _contains(known: np.ndarray, names: Iterable[str]) -> np.ndarray:
    return np.isin(np.asarray([hash_name(name) for name in names], np.int64), known)


def hash_name(name: str) -> int:
    """64 bits of SHA-256, signed; the two ways to write an accent give the same."""
    content = unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)


def _hash_names_in_use(column: Column) -> np.ndarray:
    return np.unique(np.asarray([hash_name(column.names[code]) for code in np.unique(column.codes)], np.int64))


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn what the system says while files are written, such as that the disk is full, into one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, MettleError):
            raise
        why = describe_write_error(error)
        raise RunError(
            f"could not write to {path}: {why}. What was there before is intact: make room or get leave to write, then "
            "continue with --resume"
        ) from None


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise RunError(f"{path} is missing: {remedy}")
    if path.stat().st_size > LARGEST_JSON:
        raise RunError(f"{path} has {path.stat().st_size} bytes, more than any that mettle writes")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {_one_line(error)}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it holds no table")
    return found


def _one_line(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:200] or type(problem).__name__
