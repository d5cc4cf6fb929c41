"""From a folder of photographs to a first report: look at the data, choose a recipe, measure the backbone as it is.

The command ``mettle start`` puts the pieces together; training, evaluation and the report are those of every run.
"""

from mettle.start.backbone import build_frozen_backbone, describe_weights, is_backbone
from mettle.start.choose import FirstRunPlan, choose_recipe, describe_recipe
from mettle.start.look import DataAccount, describe_machine, look_at_data
from mettle.start.recipe_text import write_recipe
from mettle.start.suggest import suggest_next

__all__ = [
    "DataAccount",
    "FirstRunPlan",
    "build_frozen_backbone",
    "choose_recipe",
    "describe_machine",
    "describe_recipe",
    "describe_weights",
    "is_backbone",
    "look_at_data",
    "suggest_next",
    "write_recipe",
]
