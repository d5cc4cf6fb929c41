r"""Difficulty-aware metric learning.

    data -> model -> difficulty -> losses -> train -> evaluate -> gallery -> mining -> report
                          \____ pairs: the one engine for everything quadratic ____/

Each word above is a module: ``from mettle import losses``, ``from mettle import evaluate``. `fit` trains your model on
your data with your loss, `adopt` takes a model that was trained elsewhere, `open_run` opens a `Run` that is there, and
`Gallery` is who is enrolled under its model. They are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mettle import (
        data,
        difficulty,
        errors,
        evaluate,
        gallery,
        losses,
        metric,
        mining,
        model,
        pairs,
        report,
        service,
        train,
        tuning,
    )
    from mettle.api import Run, adopt, fit, open_run
    from mettle.gallery import Gallery
    from mettle.mining import mine

__all__ = [
    "Gallery",
    "Run",
    "adopt",
    "data",
    "difficulty",
    "errors",
    "evaluate",
    "fit",
    "gallery",
    "losses",
    "metric",
    "mine",
    "mining",
    "model",
    "open_run",
    "pairs",
    "report",
    "service",
    "train",
    "tuning",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "Gallery":
        return import_module("mettle.gallery.gallery").Gallery
    if name == "mine":
        return import_module("mettle.mining").mine
    if name in ("Run", "adopt", "fit", "open_run"):
        return getattr(import_module("mettle.api"), name)
    if name in __all__:
        return import_module(f"mettle.{name}")
    raise AttributeError(f"module 'mettle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
