"""Backbones by name: our own small ones, and any network of torchvision's and of timm's.

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
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
from mettle.model.frozen_graph import FrozenGraph

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
    file: Path | None = None  # where torch keeps them, for weights that are on no hub


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
    arch = name.partition(".")[0]
    tag = f"{arch}.{config.tag}" if config.tag else arch
    if config.file:
        return Weights(tag, f"the file {config.file}", "", Path(config.file).is_file())
    if config.hf_hub_id:
        return _locate_on_hub(tag, config)
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(config.url).path).name
    return Weights(tag, f"the file {file}", config.url, file.is_file(), file=file)


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


def fetch_from_hub(place: str, names: Sequence[str]) -> Path:
    """The first of these files that a repository of the hub has: out of the hub's cache, else fetched into it.

    Raises:
        RecipeError: it is not in the cache, and nobody answers or the repository does not have it.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants
    except ImportError:
        raise MissingExtra(f"hf-hub:{place} needs huggingface_hub: pip install huggingface_hub") from None
    repository, _, revision = place.partition("@")
    for name in names:
        found = hub.try_to_load_from_cache(repository, name, revision=revision or None)
        if isinstance(found, str):
            return Path(found)
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    remedy = f"connect to a network, or copy the cache folder {folder} (with {names[0]}) from a machine that has it"
    if constants.HF_HUB_OFFLINE:
        raise RecipeError(
            f"hf-hub:{place} is not on this machine and the hub is switched off (HF_HUB_OFFLINE): {remedy}"
        )
    address = hub.hf_hub_url(repository, names[0], revision=revision or None)
    if not is_reachable(address):
        raise RecipeError(
            f"hf-hub:{place} is not on this machine and {urlparse(address).hostname} does not answer: {remedy}"
        )
    reason = ""
    for name in names:
        try:
            return Path(hub.hf_hub_download(repository, name, revision=revision or None))
        except weight_load_errors() as problem:
            reason = reason or " ".join(str(problem).split())[:200]
    raise RecipeError(f"cannot fetch {names[0]} of hf-hub:{place}: {reason}")


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
RESNETS = ("resnet18", "resnet34", "resnet50")
SMALL = 64  # pixels: below this side a ResNet keeps its first layers at full resolution


def build_backbone(name: str, shape: tuple[int, ...], width: int, depth: int, pretrained: bool = False) -> Backbone:
    """A network for inputs of this shape: (c, h, w) to a feature map, or (f,) to features."""
    own = {"convnet": convnet, "mlp": mlp}
    if pretrained and not name.startswith("timm/"):
        raise RecipeError(
            f"model.pretrained needs a timm backbone or one of torchvision, such as 'timm/resnet18' or "
            f"'torchvision/resnet18'; {name!r} starts from scratch, or from a file that model.weights names"
        )
    if name == "onnx":
        return FrozenGraph(width)
    if name in own:
        if (len(shape) == 3) != (name == "convnet"):
            wanted = "convnet" if len(shape) == 3 else "mlp"
            raise RecipeError(f"model.backbone = {name!r} does not fit inputs of shape {shape}: use {wanted!r}")
        return own[name](shape, width, depth)
    if len(shape) != 3:
        raise RecipeError(f"model.backbone = {name!r} takes pictures, the data are rows: use 'mlp'")
    if name in RESNETS:
        return resnet(name, shape)
    if name.startswith("timm/"):
        return from_timm(name.removeprefix("timm/"), shape, pretrained)
    if name.startswith("torchvision/"):
        return from_torchvision(name.removeprefix("torchvision/"), shape)
    raise RecipeError(f"no backbone {name!r}{nearest(name, [*own, *RESNETS, 'timm/<name>', 'torchvision/<name>'])}")


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
    return select_parts(net, [name for name, _ in net.named_children()][:-2])


def select_parts(net: nn.Module, names: Sequence[str]) -> nn.Sequential:
    """Some parts of a network, one after the other, under the names that they have in it."""
    return nn.Sequential(OrderedDict((name, getattr(net, name)) for name in names))


def from_torchvision(name: str, shape: tuple[int, ...]) -> nn.Module:
    """A classifier of torchvision without its last layers: a feature map, or features where it has no map.

    Its tensors keep their names, so that weights that torchvision or somebody else saved for it fit.
    """
    models = import_torchvision().models
    known = models.list_models(module=models)
    if name not in known:
        raise RecipeError(f"torchvision has no model {name!r}{nearest(name, known)}")
    if shape[0] != 3:
        raise RecipeError(
            f"model.backbone = 'torchvision/{name}' takes images with 3 channels, got {shape[0]}: set data.channels = 3"
        )
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # Their weights were trained on another scale than those of all others, and the network converts to it.
        options = {"aux_logits": False, "init_weights": True, "transform_input": True}
    if name.startswith("vit_") and shape[1] == shape[2]:  # these must be told the size of the image
        options = {"image_size": shape[1]}
    try:
        found = _cut_classifier(name, models.get_model(name, weights=None, **options))
        with torch.no_grad():
            found.eval()(torch.zeros(1, *shape))
    except (RuntimeError, ValueError, AssertionError) as problem:
        reason = " ".join(str(problem).split())[:160]
        raise RecipeError(
            f"model.backbone = 'torchvision/{name}' takes no images of {shape[1]} x {shape[2]} pixels: {reason}; set "
            "data.size, such as to 224"
        ) from None
    return found.train()


def _cut_classifier(name: str, net: Any) -> nn.Module:
    """A network of torchvision without what comes after its feature map, or without its last layer."""
    parts = dict(net.named_children())
    if name.startswith("densenet"):
        return nn.Sequential(OrderedDict(features=net.features, relu=nn.ReLU(inplace=True)))
    for names in FEATURE_MAPS:
        if all(part in parts for part in names):
            return select_parts(net, names)
    last = next(part for part in ("classifier", "heads", "fc", "head") if part in parts)
    setattr(net, last, nn.Identity())
    return net


# What torchvision's networks call their layers before pooling, the longer lists first.
FEATURE_MAPS = (
    ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"),  # ResNet, ResNeXt, Wide ResNet
    ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5"),  # ShuffleNet
    ("features", "norm", "permute"),  # Swin
    ("stem", "trunk_output"),  # RegNet
    ("features",),  # AlexNet, VGG, SqueezeNet, MobileNet, EfficientNet, ConvNeXt
    ("layers",),  # MNASNet
)


def remove_last_stride(net: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Let the last stage of a ResNet keep the resolution of the one before (Luo et al. 2019), in place.

    Only strides change, so the weights stay those that were loaded.

    Raises:
        RecipeError: this is no such network, or its map does not become twice as high and wide.
    """
    stage = getattr(net, "layer4", None)  # as timm and torchvision name it
    kinds = (nn.Conv2d, nn.AvgPool2d)
    strided = [part for part in ([] if stage is None else stage.modules()) if isinstance(part, kinds)]
    strided = [part for part in strided if part.stride not in (1, (1, 1))]
    if not strided:
        raise RecipeError(
            f"model.last_stride = 1 is for ResNets, {name!r} has no last stage with a stride to remove: leave it out"
        )
    example = torch.zeros(1, *shape)
    with torch.no_grad():
        before = net.eval()(example).shape[2:]
        for part in strided:
            part.stride = (1, 1)
            if isinstance(part, nn.AvgPool2d):  # of a shortcut: at full resolution there is nothing to average
                part.kernel_size = (1, 1)
        try:
            after = tuple(net(example).shape[2:])
        except RuntimeError:  # a stage that halves its map in another way too
            after = (0, 0)
    if any(new not in (2 * old, 2 * old - 1) for old, new in zip(before, after, strict=True)):
        raise RecipeError(
            f"model.last_stride = 1: {name!r} halves its map in a way that cannot be undone: leave it out"
        )
    net.train()


def from_timm(name: str, shape: tuple[int, ...], pretrained: bool) -> nn.Module:
    """Any timm model: a feature map, or features pooled its own way where it has no map (transformers)."""
    library = import_timm()
    known = library.list_models()
    arch, _, tag = name.partition(".")
    if arch not in known:
        close = get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(map(repr, close))}?" if close else f"timm.list_models() lists its {len(known)}"
        raise RecipeError(f"timm has no model {name!r}; {hint}")
    tags = [one.partition(".")[2] for one in library.list_pretrained(f"{arch}.*")]
    if tag and tag not in tags:
        raise RecipeError(f"timm has no weights {name!r}{nearest(tag, tags)}")
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
