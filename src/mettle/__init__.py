r"""Difficulty-aware metric learning.

    data -> model -> difficulty -> losses -> train -> evaluate -> report
                          \____ pairs: the one engine for everything quadratic ____/

Each word above is a module: ``from mettle import losses``, ``from mettle import evaluate``. They are loaded when
they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mettle import data, difficulty, errors, evaluate, losses, metric, model, pairs, report, train

__all__ = ["data", "difficulty", "errors", "evaluate", "losses", "metric", "model", "pairs", "report", "train"]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in __all__:
        return import_module(f"mettle.{name}")
    raise AttributeError(f"module 'mettle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
