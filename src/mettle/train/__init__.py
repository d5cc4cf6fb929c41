"""From a recipe to a run folder: the recipe, what one step does, the loop, checkpoints, the log.

Names are loaded when they are first used: listing the shipped recipes needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mettle.train.datamodule import Outcome, prepare, train
    from mettle.train.methods.base import Method, StepResult, Supervised
    from mettle.train.methods.hardness_aware import HardnessAware
    from mettle.train.methods.similarity import Similarity
    from mettle.train.methods.two_encoder import TwoEncoder
    from mettle.train.recipe import Recipe, load
    from mettle.train.recipe_files import shipped
    from mettle.train.run_folder import Run, open_run

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
    "HardnessAware": "methods.hardness_aware",
    "Method": "methods.base",
    "Outcome": "datamodule",
    "Recipe": "recipe",
    "Run": "run_folder",
    "Similarity": "methods.similarity",
    "StepResult": "methods.base",
    "Supervised": "methods.base",
    "TwoEncoder": "methods.two_encoder",
    "load": "recipe",
    "open_run": "run_folder",
    "prepare": "datamodule",
    "shipped": "recipe_files",
    "train": "datamodule",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mettle.train' has no attribute {name!r}")
    return getattr(import_module(f"mettle.train.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
