"""What pretrained weights mean for a recipe: keys that follow from them, unless the recipe says otherwise.

A network that was trained elsewhere wants its images as it had them: size, crop, filter, mean and standard deviation.
They become keys of the recipe before any data are read, so that the run folder holds them and nothing asks again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mettle.errors import RunError
from mettle.model import LoadedWeights, StartPlan, plan_start
from mettle.train.recipe import Recipe
from mettle.train.run_folder import open_run_folder

ASKED = ("backbone", "weights", "pretrained")  # keys of the model that say where it starts
HANDED_ON = ("backbone", "width", "depth", "pool", "last_stride", "head", "dim", "unit", "flip")  # of a run's network
SHAPE = ("width", "depth", "last_stride")  # those that belong to a backbone
POOL = "average"  # where a recipe's own was chosen for another backbone


def follow_starting_weights(recipe: Recipe) -> tuple[Recipe, dict[str, Any], tuple[str, ...]]:
    """The recipe with what follows from its pretrained weights, these values by their keys, and notes about them."""
    if recipe.foreign_model is not None:
        return recipe, {}, ()
    plan = plan_start(recipe.spec())
    if plan == StartPlan():
        return recipe, {}, ()
    values = _choose_values(recipe, plan)
    found = recipe.with_values(values)
    return found, values, _describe_inputs(found, plan)


def model_of_run(folder: Path) -> dict[str, Any]:
    """Keys of a recipe's model that make it the network of a run, which it starts from: for `load`.

    What the run knows of a neck is left to the recipe, whose loss has to go with it.
    """
    described = open_run_folder(folder).contract()["model"]
    if "class" in described:
        raise RunError(
            f"the network of {folder} is {described['class']}, which no recipe can build: begin with another"
        )
    return {key: described[key] for key in HANDED_ON if key in described} | {"weights": str(folder)}


def take_over_starting_weights(recipe: Recipe, stored: Any) -> Recipe:
    """The recipe of a run to go on with, with what followed when the run began from the weights that it names.

    Args:
        recipe: as it is given now.
        stored: what `describe_start` wrote into the folder.
    """
    if not isinstance(stored, Mapping) or stored.get("asked") != _select_asked_keys(recipe):
        return recipe
    return recipe.with_values({key: value for key, value in stored["chosen"].items() if _is_open(recipe, key)})


def describe_start(asked: Recipe, chosen: Mapping[str, Any], loaded: LoadedWeights) -> dict[str, Any]:
    """For ``run.json``: what was asked for, what followed from it, and what was loaded."""
    return {"asked": _select_asked_keys(asked), "chosen": dict(chosen), "loaded": loaded.to_json()}


def check_same_weights(stored: Any, loaded: LoadedWeights | None) -> None:
    """Refuse to begin a run again from other weights than it began from."""
    known = stored.get("loaded", {}).get("sha256") if isinstance(stored, Mapping) else None
    if known is not None and loaded is not None and loaded.sha256 != known:
        raise RunError(
            f"{loaded.origin} is not the file that the run began from (SHA-256 {loaded.sha256[:12]}…, then "
            f"{known[:12]}…): put that back, or train again under another --name"
        )


def _select_asked_keys(recipe: Recipe) -> dict[str, Any]:
    return {key: recipe.model[key] for key in ASKED if key in recipe.model}


def _is_open(recipe: Recipe, key: str) -> bool:
    """Whether a recipe leaves a key to be chosen; where the network starts is always written out in full."""
    is_start = key in [f"model.{name}" for name in (*ASKED, *SHAPE)]
    return is_start or recipe.value(key) is None or key in recipe.auto


def _choose_values(recipe: Recipe, plan: StartPlan) -> dict[str, Any]:
    """What the recipe leaves open, by key."""
    has_own = "backbone" in recipe.model and "model.backbone" not in recipe.auto
    table = dict(plan.model) if has_own else {**plan.suggested, **plan.model}
    found: dict[str, Any] = {f"model.{key}": value for key, value in table.items()}
    way = plan.preprocess
    if way is not None:
        height, width = way.shape[1:]
        found |= {"data.size": height if height == width else [height, width], "data.channels": way.channels}
        found |= {"data.resize": way.resize, "data.interpolation": way.interpolation}
        found |= {"data.crop": way.crop} if recipe.data.resize in (None, way.resize) else {}
        if way.mean is not None and way.std is not None:
            found |= {"model.mean": list(way.mean), "model.std": list(way.std)}
    if "model.pool" in recipe.auto and recipe.model.get("pool") == "flatten":
        found.setdefault("model.pool", POOL)
    if recipe.model.get("mean") is not None:
        found = {key: value for key, value in found.items() if key not in ("model.mean", "model.std")}
    return {key: value for key, value in found.items() if value is not None and _is_open(recipe, key)}


def _describe_inputs(recipe: Recipe, plan: StartPlan) -> tuple[str, ...]:
    way, data = plan.preprocess, recipe.data
    if way is None:
        return ()
    crop = "" if data.crop is None else f", center crop {data.crop:.4g}"
    scale = ""
    if recipe.model.get("mean") is not None:
        mean, std = (", ".join(f"{value:.4g}" for value in recipe.model[key]) for key in ("mean", "std"))
        scale = f", mean {mean}, std {std}"
    return (
        f"images as the weights of {recipe.model['backbone']} want them: size {data.size}{crop}, {data.interpolation}"
        f"{scale} (--set data.size=... and so on change it)",
    )
