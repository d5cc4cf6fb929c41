"""From a recipe to a run folder: the recipe, what one step does, the loop, checkpoints, the log."""

from mettle.train.artifact import Run, open_run
from mettle.train.hardness_aware import HardnessAware
from mettle.train.method import Method, StepResult, Supervised
from mettle.train.recipe import Recipe, load, shipped
from mettle.train.session import Outcome, prepare, train
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
