"""From a recipe to a run folder: the recipe, what one step does, the loop, checkpoints, the log.

Names are loaded when they are first used: listing the shipped recipes needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mettle.train.artifact import Run, open_run
    from mettle.train.hardness_aware import HardnessAware
    from mettle.train.method import Method, StepResult, Supervised
    from mettle.train.recipe import Recipe, load
    from mettle.train.session import Outcome, prepare, train
    from mettle.train.shipped_recipes import shipped
    from mettle.train.similarity import Similarity
    from mettle.train.two_encoder import TwoEncoder

__all__ = [
    "HardnessAware",
    "Method",
    "Outcome",
    "Recipe",
    "Run",
    "Similarity",
    "StepResult",
    "Supervised",
    "TwoEncoder",
    "load",
    "open_run",
    "prepare",
    "shipped",
    "train",
]

_MODULES = {
    "HardnessAware": "hardness_aware",
    "Method": "method",
    "Outcome": "session",
    "Recipe": "recipe",
    "Run": "artifact",
    "Similarity": "similarity",
    "StepResult": "method",
    "Supervised": "method",
    "TwoEncoder": "two_encoder",
    "load": "recipe",
    "open_run": "artifact",
    "prepare": "session",
    "shipped": "shipped_recipes",
    "train": "session",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mettle.train' has no attribute {name!r}")
    return getattr(import_module(f"mettle.train.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
