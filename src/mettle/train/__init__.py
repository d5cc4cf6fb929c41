"""From a recipe to a run folder: the recipe, what one step does, the loop, checkpoints, the log.

Names are loaded when they are first used: listing the shipped recipes needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mettle.train.callbacks import Callback
    from mettle.train.datamodule import load_run_samples, prepare_samples
    from mettle.train.from_recipe import TrainResult, train
    from mettle.train.gradient_caching import GradientCaching
    from mettle.train.methods.base import LossTerms, Method, StepResult
    from mettle.train.methods.hardness_aware import HardnessAware
    from mettle.train.methods.similarity import Similarity
    from mettle.train.methods.supervised import Supervised
    from mettle.train.methods.two_encoder import TwoEncoder
    from mettle.train.optim import OptimSettings, Schedule
    from mettle.train.recipe import Recipe, load
    from mettle.train.recipe_files import builtin_recipes
    from mettle.train.run_folder import RunFolder, open_run_folder
    from mettle.train.starting_weights import model_of_run
    from mettle.train.trainer import TrainingState, run_loop

_MODULES = {
    "Callback": "callbacks",
    "GradientCaching": "gradient_caching",
    "HardnessAware": "methods.hardness_aware",
    "LossTerms": "methods.base",
    "Method": "methods.base",
    "OptimSettings": "optim",
    "Recipe": "recipe",
    "RunFolder": "run_folder",
    "Schedule": "optim",
    "Similarity": "methods.similarity",
    "StepResult": "methods.base",
    "Supervised": "methods.supervised",
    "TrainResult": "from_recipe",
    "TrainingState": "trainer",
    "TwoEncoder": "methods.two_encoder",
    "builtin_recipes": "recipe_files",
    "run_loop": "trainer",
    "load": "recipe",
    "load_run_samples": "datamodule",
    "model_of_run": "starting_weights",
    "open_run_folder": "run_folder",
    "prepare_samples": "datamodule",
    "train": "from_recipe",
}

__all__ = [
    "Callback",
    "GradientCaching",
    "HardnessAware",
    "LossTerms",
    "Method",
    "OptimSettings",
    "Recipe",
    "RunFolder",
    "Schedule",
    "Similarity",
    "StepResult",
    "Supervised",
    "TrainResult",
    "TrainingState",
    "TwoEncoder",
    "builtin_recipes",
    "load",
    "load_run_samples",
    "model_of_run",
    "open_run_folder",
    "prepare_samples",
    "run_loop",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mettle.train' has no attribute {name!r}")
    return getattr(import_module(f"mettle.train.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
