"""The optional `vision` extra: torchvision and timm, imported only when a recipe asks for them."""

import importlib.util
import sys
from types import ModuleType

import torch

from mettle.errors import MissingExtra

_library: torch.library.Library | None = None  # keeps the operators below alive


def torchvision() -> ModuleType:
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


def timm() -> ModuleType:
    """Import timm (which imports torchvision)."""
    torchvision()
    try:
        import timm
    except ImportError:
        raise MissingExtra("this backbone needs timm: pip install timm") from None
    return timm
