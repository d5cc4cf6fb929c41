"""From a recipe to a run folder: the recipe, what one step does, the loop, checkpoints, the log."""

from mettle.train.artifact import Run, open_run
from mettle.train.method import Method, StepResult, Supervised
from mettle.train.recipe import Recipe, load, shipped
from mettle.train.session import Outcome, prepare, train
from mettle.train.similarity import Similarity

__all__ = [
    "Method",
    "Outcome",
    "Recipe",
    "Run",
    "Similarity",
    "StepResult",
    "Supervised",
    "load",
    "open_run",
    "prepare",
    "shipped",
    "train",
]
