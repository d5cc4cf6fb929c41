"""Backbones by name: our own small ones, torchvision's ResNets and anything of timm's.

Pretrained weights of timm's models: where they are on this machine, and one line where they cannot be had.

timm fetches weights from a hub, whose library tries for more than a minute before it gives up. So the hub's own cache
is looked into first: weights that are there are loaded from their file, without any question to the network; for
others somebody must answer at the address that they would come from.

The optional `vision` extra: torchvision and timm, imported only when a recipe asks for them.
"""

import importlib.util
import ssl
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

import torch
from safetensors import SafetensorError
from torch import nn

from mettle.errors import MissingExtra, RecipeError, nearest

_library: torch.library.Library | None = None  # keeps the operators below alive


def import_torchvision() -> ModuleType:
    """Import torchvision, also where it was built for CUDA and torch was not.

    Such a pair is what a plain install beside a CPU build of torch gives. Its C++ part cannot load, and the import
    then fails over two operators that only detection models use; declaring them is enough for everything else.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise MissingExtra("this backbone needs torchvision: pip install torchvision")
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        global _library
        for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            _library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision


def import_timm() -> ModuleType:
    """Import timm (which imports torchvision)."""
    import_torchvision()
    try:
        import timm
    except ImportError:
        raise MissingExtra("this backbone needs timm: pip install timm") from None
    return timm


PATIENCE = 8.0  # seconds in which a server must answer
FILES = ("model.safetensors", "pytorch_model.bin")  # as timm looks for them in a repository of its hub, in this order
FROM_SCRATCH = "leave model.pretrained out to train from scratch"


@dataclass(frozen=True)
class Weights:
    """Where the pretrained weights of a model come from, and where they are kept."""

    tag: str  # as timm names them: the model and how it was trained
    place: str  # what would have to be there, in words: a file, or a folder of the hub's cache
    address: str  # from where they are fetched; empty where that is switched off
    is_here: bool
    options: Mapping[str, Any] = field(default_factory=dict)  # of ``timm.create_model``, to load them from their file


def pretrained_options(library: ModuleType, name: str) -> dict[str, Any]:
    """Further arguments of ``timm.create_model(name, pretrained=True)``, so that weights that are here are not fetched.

    Raises:
        RecipeError: timm has no weights for this model, or they are not here and nobody answers where they come from.
    """
    weights = locate_weights(library, name)
    if not weights.is_here and not (weights.address and is_reachable(weights.address)):
        host = urlparse(weights.address).hostname
        why = f"{host} does not answer" if host else "the hub is switched off (HF_HUB_OFFLINE)"
        raise RecipeError(
            f"model.pretrained: the weights {weights.tag} of timm are not on this machine and {why}: connect to a "
            f"network, copy {weights.place} from a machine that has it, or {FROM_SCRATCH}"
        )
    return dict(weights.options)


def locate_weights(library: ModuleType, name: str) -> Weights:
    """Where timm would take the pretrained weights of a model from, and whether they are on this machine."""
    config = library.get_pretrained_cfg(name)
    if config is None or not (config.hf_hub_id or config.url or config.file):
        raise RecipeError(f"model.pretrained: timm has no pretrained weights for {name!r}; {FROM_SCRATCH}")
    tag = f"{name}.{config.tag}" if config.tag else name
    if config.file:
        return Weights(tag, f"the file {config.file}", "", Path(config.file).is_file())
    if config.hf_hub_id:
        return _locate_on_hub(tag, config)
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(config.url).path).name
    return Weights(tag, f"the file {file}", config.url, file.is_file())


def _locate_on_hub(tag: str, config: Any) -> Weights:
    import huggingface_hub as hub  # timm needs it too

    repository, _, revision = str(config.hf_hub_id).partition("@")
    names = (config.hf_hub_filename,) if config.hf_hub_filename else FILES
    paths = [hub.try_to_load_from_cache(repository, name, revision=revision or None) for name in names]
    found = next((path for path in paths if isinstance(path, str)), None)
    folder = Path(hub.constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    address = "" if hub.constants.HF_HUB_OFFLINE else hub.hf_hub_url(repository, names[0], revision=revision or None)
    options: dict[str, Any] = {}
    if found is not None:
        # A file of the hub is a plain one, also of models whose first weights, at another address, were not.
        options = {"pretrained_cfg_overlay": {"file": found, "custom_load": config.custom_load == "hf"}}
    return Weights(tag, f"the cache folder {folder} (with {names[0]})", address, found is not None, options)


def weight_load_errors() -> tuple[type[Exception], ...]:
    """What may go wrong while weights are fetched or read: a network that fails, a file that is damaged."""
    try:
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        return OSError, SafetensorError
    # Its first base is that of the HTTP library it is built on, whose other errors are no OSError in new versions.
    return OSError, SafetensorError, HfHubHTTPError.__bases__[0]


def is_reachable(address: str) -> bool:
    """Whether somebody answers there within a few seconds, whatever the answer is."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urlopen(Request(address, method="HEAD"), timeout=PATIENCE).close()
        except HTTPError:  # an answer as well: a redirection that needs another method, a file that has moved
            pass
        except URLError as problem:
            if not isinstance(problem.reason, ssl.SSLError):  # certificates are for whoever fetches to judge
                return
        except (OSError, ValueError):
            return
        answered.set()

    # In a thread, because a search for the name of a host keeps to no time limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answered.is_set()


Backbone = nn.Module
SMALL = 64  # pixels: below this side a ResNet keeps its first layers at full resolution


def build_backbone(name: str, shape: tuple[int, ...], width: int, depth: int, pretrained: bool = False) -> Backbone:
    """A network for inputs of this shape: (c, h, w) to a feature map, or (f,) to features."""
    own = {"convnet": convnet, "mlp": mlp}
    resnets = ("resnet18", "resnet34", "resnet50")
    if pretrained and not name.startswith("timm/"):
        raise RecipeError(
            f"model.pretrained needs a timm backbone, such as 'timm/resnet18'; {name!r} starts from scratch"
        )
    if name in own:
        if (len(shape) == 3) != (name == "convnet"):
            wanted = "convnet" if len(shape) == 3 else "mlp"
            raise RecipeError(f"model.backbone = {name!r} does not fit inputs of shape {shape}: use {wanted!r}")
        return own[name](shape, width, depth)
    if len(shape) != 3:
        raise RecipeError(f"model.backbone = {name!r} takes pictures, the data are rows: use 'mlp'")
    if name in resnets:
        return resnet(name, shape)
    if name.startswith("timm/"):
        return from_timm(name.removeprefix("timm/"), shape, pretrained)
    raise RecipeError(f"no backbone {name!r}{nearest(name, [*own, *resnets, 'timm/<name>'])}")


def convnet(shape: tuple[int, ...], width: int, depth: int) -> nn.Module:
    """Blocks of 3x3 convolution, batch norm, ReLU and halving; the width doubles from block to block."""
    layers: list[nn.Module] = []
    channels, side = shape[0], min(shape[1:])
    for block in range(depth):
        out = width * 2**block
        layers += [
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        ]
        if side >= 2:
            layers.append(nn.MaxPool2d(2))
            side //= 2
        channels = out
    return nn.Sequential(*layers)


def mlp(shape: tuple[int, ...], width: int, depth: int) -> nn.Module:
    """Layers of ``8 * width`` units with batch norm and ReLU."""
    layers: list[nn.Module] = []
    features, units = shape[0], 8 * width
    for _ in range(depth):
        layers += [nn.Linear(features, units), nn.BatchNorm1d(units), nn.ReLU(inplace=True)]
        features = units
    return nn.Sequential(*layers)


def resnet(name: str, shape: tuple[int, ...]) -> nn.Module:
    """Torchvision's ResNet without its classifier; small pictures get a 3x3 stem without pooling."""
    net = getattr(import_torchvision().models, name)(weights=None)
    channels, small = shape[0], min(shape[1:]) <= SMALL
    if small:
        net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(*list(net.children())[:-2])


def from_timm(name: str, shape: tuple[int, ...], pretrained: bool) -> nn.Module:
    """Any timm model: a feature map, or features pooled its own way where it has no map (transformers)."""
    library = import_timm()
    known = library.list_models()
    if name not in known:
        close = get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(map(repr, close))}?" if close else f"timm.list_models() lists its {len(known)}"
        raise RecipeError(f"timm has no model {name!r}; {hint}")
    options: dict = {"pretrained": pretrained, "in_chans": shape[0], "num_classes": 0}
    if pretrained:
        options |= pretrained_options(library, name)
    try:
        return _create_timm(library, name, shape, options)
    except weight_load_errors() as problem:
        if not pretrained:
            raise
        reason = " ".join(str(problem).split())[:200]
        raise RecipeError(f"model.pretrained: cannot load the weights of timm/{name}: {reason}") from None


def _create_timm(library: ModuleType, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> nn.Module:
    try:  # transformers must be told the size of the picture
        net = library.create_model(name, global_pool="", img_size=tuple(shape[1:]), **options)
        options["img_size"] = tuple(shape[1:])
    except TypeError:  # networks that take any size have no such argument
        net = library.create_model(name, global_pool="", **options)
    with torch.no_grad():
        is_map = net.eval()(torch.zeros(1, *shape)).ndim == 4
    return net.train() if is_map else library.create_model(name, **options)
