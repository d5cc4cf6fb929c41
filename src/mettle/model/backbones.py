"""Backbones by name: our own small ones, torchvision's ResNets and anything of timm's."""

from difflib import get_close_matches
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mettle.errors import RecipeError, nearest
from mettle.model.pretrained import load_problems, pretrained_options
from mettle.model.vision import timm, torchvision

Backbone = nn.Module
SMALL = 64  # pixels: below this side a ResNet keeps its first layers at full resolution


def backbone(name: str, shape: tuple[int, ...], width: int, depth: int, pretrained: bool = False) -> Backbone:
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
    net = getattr(torchvision().models, name)(weights=None)
    channels, small = shape[0], min(shape[1:]) <= SMALL
    if small:
        net.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(*list(net.children())[:-2])


def from_timm(name: str, shape: tuple[int, ...], pretrained: bool) -> nn.Module:
    """Any timm model: a feature map, or features pooled its own way where it has no map (transformers)."""
    library = timm()
    known = library.list_models()
    if name not in known:
        close = get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(map(repr, close))}?" if close else f"timm.list_models() lists its {len(known)}"
        raise RecipeError(f"timm has no model {name!r}; {hint}")
    options: dict = {"pretrained": pretrained, "in_chans": shape[0], "num_classes": 0}
    if pretrained:
        options |= pretrained_options(library, name)
    try:
        return _create(library, name, shape, options)
    except load_problems() as problem:
        if not pretrained:
            raise
        reason = " ".join(str(problem).split())[:200]
        raise RecipeError(f"model.pretrained: cannot load the weights of timm/{name}: {reason}") from None


def _create(library: ModuleType, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> nn.Module:
    try:  # transformers must be told the size of the picture
        net = library.create_model(name, global_pool="", img_size=tuple(shape[1:]), **options)
        options["img_size"] = tuple(shape[1:])
    except TypeError:  # networks that take any size have no such argument
        net = library.create_model(name, global_pool="", **options)
    with torch.no_grad():
        is_map = net.eval()(torch.zeros(1, *shape)).ndim == 4
    return net.train() if is_map else library.create_model(name, **options)
