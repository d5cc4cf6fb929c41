"""Where an embedder starts: weights of timm, torchvision, a file, another run, or an ONNX graph that stays as it is.

| `model.weights`, `model.backbone` | what is loaded |
|---|---|
| `pretrained = true` | the weights that timm or torchvision has for the backbone |
| `weights = "IMAGENET1K_V1"` | those weights of a `torchvision/` backbone |
| `weights = "file.safetensors"`, `.pth`, `.pt` | a file of named tensors |
| `weights = "runs/other"` | another run of mettle: its backbone, and of the rest what fits |
| `weights = "encoder.onnx"` | a graph, whose features are not trained; the head is |
| `backbone = "hf-hub:…"`, `"local-dir:…"` | a folder of timm's on its hub, or on this machine |

`plan_start` says, before any data are read, what such a start means for the description of the model and for the
images that it wants; `load_start` puts the tensors into an embedder.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from mettle.atomic_files import sha256
from mettle.errors import InputError, MettleError, RecipeError, nearest
from mettle.model import backbones
from mettle.model.preprocess import Preprocess
from mettle.model.weights import hash_state_dict, load_state_dict, read_state_dict

if TYPE_CHECKING:
    from mettle.model.embedder import Embedder, EmbedderSpec

FOLDERS = ("hf-hub:", "local-dir:")  # prefixes of timm's, of a folder with config.json and weights
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
PREFIXES = ("", "module.", "model.", "backbone.", "encoder.", "net.", "module.backbone.", "model.backbone.")
NAMED = 3  # tensors in one message
OF_A_RUN = ("backbone", "width", "depth", "pool", "last_stride")  # what the model of a run hands on


@dataclass(frozen=True)
class LoadedWeights:
    """What an embedder started from.

    Args:
        origin: as the recipe names it.
        sha256: of the file; of the tensors themselves where a library keeps no file of its own.
        left_out: names of tensors that the embedder has no place for, such as those of a classifier.
        sets_normalization: whether the mean and standard deviation of inputs came with them.
    """

    origin: str
    sha256: str
    left_out: tuple[str, ...] = ()
    sets_normalization: bool = False

    def to_json(self) -> dict[str, Any]:
        """For the contract of a run."""
        return asdict(self) | {"left_out": list(self.left_out)}

    def describe(self) -> str:
        """One line."""
        rest = f"; left out: {_name_some(self.left_out)}" if self.left_out else ""
        return f"the network starts from {self.origin} (SHA-256 {self.sha256[:12]}…){rest}"


@dataclass(frozen=True)
class StartPlan:
    """What pretrained weights mean for a recipe.

    Args:
        model: keys of the model that follow in any case.
        suggested: those of a model that the recipe has no backbone of its own for.
        preprocess: how images are prepared.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    suggested: Mapping[str, Any] = field(default_factory=dict)
    preprocess: Preprocess | None = None


def is_timm_folder(backbone: Any) -> bool:
    """Whether a backbone is named by a folder of timm's, on its hub or on this machine."""
    return isinstance(backbone, str) and backbone.removeprefix("timm/").startswith(FOLDERS)


def is_file(name: str) -> bool:
    """Whether a name is that of a file or folder rather than of weights that a library knows."""
    return name.endswith((*SUFFIXES, ".onnx")) or "/" in name or Path(name).expanduser().exists()


def plan_start(spec: "EmbedderSpec") -> StartPlan:
    """What the start of a model that is described so means, without loading its tensors.

    Raises:
        RecipeError: there are no such weights, or they do not go with this backbone.
    """
    name, weights = spec.backbone.removeprefix("timm/"), spec.weights
    if name.startswith(FOLDERS):
        return _plan_folder(spec, name)
    if weights is None and not spec.pretrained:
        return StartPlan()
    if weights is not None and not weights.startswith(FOLDERS) and is_file(weights):
        path = Path(weights).expanduser().absolute()
        if path.is_dir():
            return _plan_run(path)
        if not path.is_file():
            raise RecipeError(f"model.weights: no file {weights!r}: give a .safetensors, .pth or .onnx file, or a run")
        if path.suffix == ".onnx":
            return _plan_graph(spec, path)
        return StartPlan({"weights": str(path)}, preprocess=_known_preprocess(spec))
    if weights is not None and not weights.startswith(FOLDERS) and not name.startswith("torchvision/"):
        raise RecipeError(
            f"model.weights = {weights!r} is no file: give a .safetensors, .pth or .onnx file, the folder of a run, or "
            "weights of a torchvision/ backbone by their name, such as 'IMAGENET1K_V1'"
        )
    return StartPlan(preprocess=_known_preprocess(spec))


def load_start(model: "Embedder") -> LoadedWeights | None:
    """Put the weights that its description names into an embedder; None where it names none.

    Raises:
        RecipeError: they cannot be had, or are not those of this backbone.
    """
    spec, weights = model.spec, model.spec.weights
    if weights is None:
        if not spec.pretrained:
            return None
        if spec.backbone.startswith("torchvision/"):
            return _load_torchvision(model, spec.backbone, None)
        return LoadedWeights(spec.backbone, _hash_timm(spec.backbone.removeprefix("timm/"), model.backbone))
    if weights.startswith(FOLDERS):
        return _load_file(model, _folder_file(weights), weights)
    if not is_file(weights):
        return _load_torchvision(model, spec.backbone, weights)
    path = Path(weights).expanduser()
    if path.is_dir():
        return _load_run(model, path)
    if path.suffix == ".onnx":
        try:
            content = path.read_bytes()
        except OSError as problem:
            raise RecipeError(f"model.weights: cannot read {weights!r}: {problem.strerror}") from None
        assert isinstance(model.backbone, backbones.FrozenGraph)
        model.backbone.set_graph(content)
        return LoadedWeights(weights, hashlib.sha256(content).hexdigest())
    return _load_file(model, path, weights)


def match_by_name(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Tensors under the names of a network, out of those of a file that may put a prefix before all of them.

    Raises:
        RecipeError: some are missing or of another shape; the first few are named.
    """
    prefix = max(PREFIXES, key=lambda p: sum(f"{p}{name}" in state for name in wanted))
    found = {name: state[f"{prefix}{name}"] for name in wanted if f"{prefix}{name}" in state}
    missing = [name for name in wanted if name not in found and not name.endswith("num_batches_tracked")]
    if missing:
        others = [name for name in state if name.removeprefix(prefix) not in wanted]
        raise RecipeError(
            f"model.weights: {origin} lacks {len(missing)} of the {len(wanted)} tensors of the backbone "
            f"({_name_some(missing)}) and has {len(others)} others ({_name_some(others)}): name the backbone that it "
            "is of, or set model.weights_match = 'order' where only the names differ"
        )
    _check_shapes(found, wanted, origin)
    return found


def match_by_order(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], origin: str) -> dict[str, Tensor]:
    """Tensors under the names of a network, one after the other as they stand in a file; what follows is left out.

    Raises:
        RecipeError: there are fewer, or one is of another shape.
    """
    names = [name for name in wanted if not name.endswith("num_batches_tracked")]
    given = [name for name in state if not name.endswith("num_batches_tracked")]
    if len(given) < len(names):
        raise RecipeError(
            f"model.weights: {origin} has {len(given)} tensors and the backbone {len(names)}: it is of another network"
        )
    found = {name: state[other] for name, other in zip(names, given, strict=False)}
    _check_shapes(found, wanted, origin)
    return found


def _check_shapes(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], origin: str) -> None:
    plain = [name for name in found if not name.endswith("_extra_state")]  # a graph has any number of bytes
    wrong = [name for name in plain if found[name].shape != wanted[name].shape]
    if wrong:
        name = wrong[0]
        raise RecipeError(
            f"model.weights: {len(wrong)} tensors of {origin} have other shapes than those of the backbone, first "
            f"{name}: {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}; name the backbone that it is "
            "of, or give images the size and channels that it was trained with (data.size, data.channels)"
        )


def _name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more if names else "none"


def _load_file(model: "Embedder", path: Path, origin: str) -> LoadedWeights:
    """Load the backbone from a file of named tensors."""
    try:
        state = read_state_dict(path)
    except InputError as problem:
        raise RecipeError(f"model.weights: {problem}") from None
    match = match_by_name if model.spec.weights_match == "name" else match_by_order
    if match is match_by_order and path.suffix == ".safetensors":
        raise RecipeError(
            "model.weights_match = 'order' does not go with a .safetensors file, which keeps no order: give the file "
            "that torch saved, or rename its tensors"
        )
    found = match(state, model.backbone.state_dict(), origin)
    _put_tensors(model.backbone, found)
    used = {id(tensor) for tensor in found.values()}
    left_out = [n for n, t in state.items() if id(t) not in used and not n.endswith("num_batches_tracked")]
    return LoadedWeights(origin, sha256(path), tuple(left_out))


def _load_run(model: "Embedder", folder: Path) -> LoadedWeights:
    """Load the backbone of a run, and of its other parts those that are of the same shape."""
    contract = _read_contract(folder)
    digest = str(contract.get("weights"))
    state = load_state_dict(folder / "model.safetensors", digest)
    trunk = {name: tensor for name, tensor in state.items() if name.startswith("backbone.")}
    if not trunk:
        raise RecipeError(
            f"model.weights: the network of {folder} is not one of mettle's embedders: give its weights as a file"
        )
    found = match_by_name(trunk, model.backbone.state_dict(), str(folder))
    own = model.state_dict()
    rest = {name: t for name, t in state.items() if name not in trunk and name in own and t.shape == own[name].shape}
    inputs = ("input_mean", "input_std")
    sets_normalization = model.spec.mean is None and all(name in rest for name in inputs)
    if not sets_normalization:
        rest = {name: tensor for name, tensor in rest.items() if name not in inputs}
    for part in ("pool", "head", "neck"):  # a part of which some tensors are of another shape does not fit at all
        names = [name for name in own if name.startswith(f"{part}.")]
        if any(name not in rest for name in names):
            rest = {name: tensor for name, tensor in rest.items() if name not in names}
    _put_tensors(model, {f"backbone.{name}": tensor for name, tensor in found.items()} | rest)
    left_out = [name for name in state if name not in trunk and name not in rest and name not in inputs]
    return LoadedWeights(str(folder), digest, tuple(left_out), sets_normalization)


def _put_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put some tensors into a module, and leave the others as they are."""
    module.load_state_dict({**module.state_dict(), **tensors})


def _plan_run(folder: Path) -> StartPlan:
    """The model of a run and the images that it takes."""
    contract = _read_contract(folder)
    described, entry = contract.get("model"), contract.get("input")
    if not isinstance(described, dict) or "class" in described or not isinstance(entry, dict):
        raise RecipeError(
            f"model.weights: the network of {folder} is not one of mettle's embedders: give its weights as a file"
        )
    values = {key: described[key] for key in OF_A_RUN if key in described}
    way = Preprocess.from_contract(entry) if entry.get("kind") == "image" else None
    return StartPlan({"weights": str(folder)}, values, way)


def _read_contract(folder: Path) -> dict[str, Any]:
    path = folder / "contract.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(
            f"model.weights: {str(folder)!r} is no finished run (it has no contract.json): give a run, or a file of "
            "weights"
        ) from None
    except (OSError, ValueError) as problem:
        raise RecipeError(f"model.weights: {path} is damaged: {' '.join(str(problem).split())[:120]}") from None
    return found if isinstance(found, dict) else {}


def _plan_graph(spec: "EmbedderSpec", path: Path) -> StartPlan:
    """A graph as a backbone: its shape says what it takes, and what it knows of its preprocessing is followed."""
    from mettle.model.onnx import OnnxEmbedder  # which builds on embedders

    if spec.head == "none":
        raise RecipeError(
            f"model.weights: {path.name} is a graph, which is not trained, and model.head = 'none' leaves nothing else "
            "that could be: set model.head = 'linear' or 'mlp'"
        )
    try:
        graph = OnnxEmbedder(path)
        if graph.dtype != "float32":
            raise InputError(f"the graph takes {graph.dtype}, images and rows are float32")
        way = None
        if len(graph.shape) == 3:
            known = json.loads(graph.metadata.get("preprocess", "{}"))
            own = {key: value for key, value in known.items() if key in ("resize", "crop", "interpolation")}
            way = Preprocess(graph.shape[1:], channels=graph.shape[0], **own)  # type: ignore[arg-type]
    except (InputError, ValueError) as problem:
        raise RecipeError(f"model.weights = {str(path)!r}: {problem}") from None
    zeros, ones = [0.0] * graph.shape[0], [1.0] * graph.shape[0]
    model: dict[str, Any] = {"backbone": "onnx", "width": graph.dim, "weights": str(path)}
    return StartPlan(model | {"mean": zeros, "std": ones}, preprocess=way)


def _plan_folder(spec: "EmbedderSpec", name: str) -> StartPlan:
    """A folder of timm's: its architecture becomes the backbone, and its weights are loaded as a file."""
    source = name if not name.startswith("local-dir:") else f"local-dir:{Path(name[10:]).expanduser().absolute()}"
    if spec.weights is not None:
        raise RecipeError(f"model.backbone = {spec.backbone!r} names its weights already: leave model.weights out")
    config = _read_config(source)
    if config.get("model_args"):
        raise RecipeError(f"model.backbone: {source} asks for arguments of its own ({config['model_args']}): not taken")
    arch = str(config.get("architecture", ""))
    model = {"backbone": f"timm/{arch}", "weights": source, "pretrained": False}
    return StartPlan(model, preprocess=_translate_config(config, arch))


def _read_config(source: str) -> dict[str, Any]:
    path = _folder_file(source, ("config.json",))
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise RecipeError(f"model.backbone: cannot read {path}: {' '.join(str(problem).split())[:120]}") from None
    if not isinstance(found, dict) or "architecture" not in found:
        raise RecipeError(f"model.backbone: {path} names no architecture of timm")
    return found


def _translate_config(config: Mapping[str, Any], arch: str) -> Preprocess | None:
    inner = config.get("pretrained_cfg", config)
    if "input_size" not in inner:
        return _timm_preprocess(arch)
    return Preprocess.translate(inner)


def _folder_file(source: str, names: Sequence[str] = backbones.FILES) -> Path:
    """A file of a folder of timm's: on this machine, in the cache of the hub, or fetched into it."""
    prefix, _, place = source.partition(":")
    if prefix == "local-dir":
        paths = [Path(place) / name for name in names]
        found = next((path for path in paths if path.is_file()), None)
        if found is None:
            raise RecipeError(f"model.backbone: {place} has no {' or '.join(names)}: give a folder that timm wrote")
        return found
    return backbones.fetch_from_hub(place, names)


def _known_preprocess(spec: "EmbedderSpec") -> Preprocess | None:
    """How the networks of a library want their images; None for one of ours, which wants nothing."""
    if spec.weights is not None and spec.weights.startswith(FOLDERS):
        config = _read_config(spec.weights)
        return _translate_config(config, str(config["architecture"]))
    if spec.backbone.startswith("timm/"):
        return _timm_preprocess(spec.backbone.removeprefix("timm/"))
    name = spec.backbone.removeprefix("torchvision/")
    if name == spec.backbone and name not in backbones.RESNETS:
        return None
    known = list(_torchvision_weights(name))
    is_named = spec.weights is not None and not is_file(spec.weights)
    chosen = _find_torchvision(name, spec.weights if is_named else None) if is_named or spec.pretrained else known[0]
    return Preprocess.translate(chosen.transforms())


def _timm_preprocess(name: str) -> Preprocess | None:
    library = backbones.import_timm()
    try:
        config = library.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag, which building the network says better
        return None
    if config is None:
        return None
    try:
        return Preprocess.translate(config.to_dict())
    except MettleError as problem:
        raise RecipeError(f"model.backbone = 'timm/{name}': {problem}") from None


def _hash_timm(name: str, backbone: nn.Module) -> str:
    """The hash of the file that timm's weights were read from; of the tensors, where there is none."""
    place = backbones.locate_weights(backbones.import_timm(), name)
    file = place.options.get("pretrained_cfg_overlay", {}).get("file") or place.file
    return sha256(Path(file)) if file and Path(file).is_file() else hash_state_dict(backbone)


def _torchvision_weights(name: str) -> Any:
    models = backbones.import_torchvision().models
    try:
        return models.get_model_weights(name)
    except ValueError:
        known = models.list_models(module=models)
        raise RecipeError(f"torchvision has no model {name!r}{nearest(name, known)}") from None


def _find_torchvision(name: str, weights: str | None) -> Any:
    """Weights of torchvision by their name, or the best ones."""
    known = _torchvision_weights(name)
    if weights is not None and weights not in known.__members__:
        raise RecipeError(
            f"model.weights: torchvision has no {weights!r} for {name}{nearest(weights, known.__members__)}"
        )
    return known.DEFAULT if weights is None else known[weights]


def _load_torchvision(model: "Embedder", backbone: str, weights: str | None) -> LoadedWeights:
    """Load weights of torchvision from where torch keeps its downloads, or fetch them to there."""
    found = _find_torchvision(backbone.removeprefix("torchvision/"), weights)
    name = Path(urlparse(found.url).path).name
    file = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not file.is_file():
        if not backbones.is_reachable(found.url):
            raise RecipeError(
                f"model.weights: {found} of torchvision is not on this machine and {urlparse(found.url).hostname} does "
                f"not answer: connect to a network, copy the file {file} from a machine that has it, name a file of "
                f"yours with model.weights, or {backbones.FROM_SCRATCH}"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        digest = name.removesuffix(".pth").rpartition("-")[2]
        try:
            torch.hub.download_url_to_file(found.url, str(file), hash_prefix=digest, progress=False)
        except (*backbones.weight_load_errors(), RuntimeError) as problem:
            raise RecipeError(
                f"model.weights: cannot fetch {found.url}: {' '.join(str(problem).split())[:160]}"
            ) from None
    return _load_file(model, file, str(found))
