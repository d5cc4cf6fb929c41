"""A pretrained backbone as it is: found by a name or a file, and built for some images without anything behind it."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from mettle.data.dataset import Samples
from mettle.errors import InputError, MissingExtra, RecipeError
from mettle.model import Embedder
from mettle.model.backbones import import_timm, import_torchvision
from mettle.model.pretrained import SUFFIXES, is_timm_folder
from mettle.train.auto_settings import resolve_device
from mettle.train.recipe import Recipe

LIBRARIES = ("timm/", "torchvision/")
GRAPH = ".onnx"
HASH = re.compile(r"[-_][0-9a-f]{8}$")  # at the end of the names of weights that torch and torchvision publish


def is_backbone(name: str) -> bool:
    """Whether a name is that of pretrained weights and not of a run: of a library, of a folder of timm's, or a file."""
    return name.startswith(LIBRARIES) or is_timm_folder(name) or Path(name).suffix in (*SUFFIXES, GRAPH)


def describe_weights(weights: str, backbone: str | None = None) -> dict[str, Any]:
    """The keys of ``[model]`` of a recipe that starts from these weights.

    Args:
        weights: the name of a library's network (``timm/resnet18.a1_in1k``, ``torchvision/mobilenet_v2``), a file, the
            folder of a run.
        backbone: the network that a file is of; by default told by the name of the file.

    Raises:
        RecipeError: there is no such file, or its name does not say which network it is of.
    """
    if is_timm_folder(weights):
        return {"backbone": weights}
    if weights.startswith(LIBRARIES):
        return {"backbone": weights, "pretrained": True}
    path = Path(weights).expanduser()
    if not path.exists():
        raise RecipeError(
            f"--weights {weights}: no such file or run, and no name of timm (timm/resnet18) or torchvision "
            "(torchvision/resnet18)"
        )
    if path.is_dir() or path.suffix == GRAPH:
        return {"weights": str(path)}
    return {"backbone": backbone or _find_backbone(path), "weights": str(path)}


def _find_backbone(path: Path) -> str:
    """The network that the name of a file of weights begins with: ``mobilenet_v2-b0353104.pth``."""
    stem = HASH.sub("", path.name.removesuffix(path.suffix)).lower()
    for prefix, import_library in zip(("torchvision/", "timm/"), (import_torchvision, import_timm), strict=True):
        try:
            library = import_library()
        except MissingExtra:
            continue
        of_timm = prefix == "timm/"
        known = library.list_models() if of_timm else library.models.list_models(module=library.models)
        for name in (stem, stem.partition(".")[0], stem.partition("-")[0]):
            if name in known:
                return f"{prefix}{name}"
    raise RecipeError(
        f"the name of {path} does not say which network its weights are of: name it with --backbone, such as "
        "--backbone torchvision/mobilenet_v2 or --backbone timm/resnet18"
    )


def build_frozen_backbone(recipe: Recipe, samples: Samples) -> Embedder:
    """The backbone of a recipe with its pretrained weights and nothing behind it: embeddings are its features."""
    shape = samples.inputs.shape
    if samples.inputs.kind != "image":
        raise InputError(f"{samples.source_name} has rows of numbers: a pretrained backbone takes images")
    shape = (shape[2], *shape[:2])
    spec = replace(recipe.spec(), head="none", dim=count_features(recipe, shape), neck="none", embedding="before")
    return Embedder(spec, shape).to(resolve_device(recipe.train.device)).eval()


def count_features(recipe: Recipe, shape: tuple[int, ...]) -> int:
    """How many numbers the backbone of a recipe gives after pooling."""
    spec = replace(recipe.spec(), head="linear", dim=1, neck="none", embedding="before")
    return Embedder(spec, shape, load_pretrained=False).head.in_features  # type: ignore[return-value]
