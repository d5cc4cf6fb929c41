"""A recipe as a page to read and to edit: every key that decides something, with its reason beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from mettle.atomic_files import write_text
from mettle.errors import RecipeError
from mettle.start.choose import FirstRunPlan
from mettle.start.look import DataAccount, describe_machine
from mettle.train.recipe import Recipe

WIDE = 44  # columns after which a reason stands
REASONS = {
    "seed": "of everything random: the split by labels, the order, the augmentation",
    "data.source": "the images, one folder for each label",
    "data.size": "side in pixels: more shows finer details and takes longer, with the square of it",
    "data.resize": "'crop' keeps proportions and cuts off what sticks out, 'pad' keeps all, 'stretch' squeezes",
    "data.crop": "share of the square that is shown: all of it",
    "data.interpolation": "the filter that the pretrained network was trained with",
    "data.channels": "3 for color, 1 for grey",
    "data.policy": "'skip' leaves unreadable files out and names them, 'fail' stops",
    "data.val": "share of the labels that thresholds are set on",
    "data.test": "share of the labels that are kept for the test: none of their images is trained on",
    "data.label": "the column of labels",
    "data.domain": "the column of devices, cameras or sessions",
    "data.image": "the column of image files",
    "batch.classes": "labels in a batch",
    "batch.samples": "images of each: their pairs attract, all others repel",
    "batch.augment": "random crops that keep at least 70 % of an image, mirrored or not; 'photo' changes more",
    "model.backbone": "the network: any of timm/ or torchvision/, or one of ours",
    "model.weights": "where it starts: a file, a run or an ONNX graph",
    "model.weights_match": "how the tensors of the file find their places",
    "model.pretrained": "whether it starts from the weights that its library has for it",
    "model.mean": "of each channel, as the weights want it",
    "model.std": "likewise",
    "model.width": "channels of the first block; of a graph, numbers that it gives",
    "model.depth": "blocks",
    "model.pool": "how a map becomes one vector: 'average' as in pretraining, 'gem' for things in one corner",
    "model.head": "'linear' behind the features gives shorter embeddings, 'none' the features themselves",
    "model.dim": "numbers of an embedding",
    "loss.kind": "weighs each pair by how hard it is among its neighbors; see docs/losses",
    "train.epochs": "passes over the training images",
    "train.rate": "highest learning rate: low, because pretrained weights want to be moved a little only",
    "train.warmup": "share of the steps in which it rises",
    "train.freeze": "the last layer that is not trained; leave it out to train all of them",
    "train.log_every": "steps between lines of the log",
}
SHOWN = {  # tables in their order, with the keys that are written whatever their value
    "data": ("source", "size", "resize", "val", "test"),
    "batch": ("classes", "samples", "augment"),
    "model": ("backbone", "pool", "head", "dim"),
    "loss": ("kind",),
    "train": ("epochs", "rate", "warmup", "log_every"),
    "evaluate": (),
}


def format_recipe(plan: FirstRunPlan, account: DataAccount) -> str:
    """The text of a recipe file, with comments."""
    reasons = REASONS | {choice.key: choice.reason for choice in plan.choices}
    lines = [
        f"# A recipe for {account.source}, written by `mettle start`. Edit it, then: mettle train THIS_FILE",
        *(f"# {line}" for line in account.lines()),
        f"# machine: {describe_machine()}",
        f"# training is expected to take {plan.minutes:.1f} minutes: {plan.steps:,} steps of {plan.step_seconds:.2f} s",
        "",
        *_format_table({"seed": plan.recipe.seed}, "", reasons),
    ]
    content, usual = plan.recipe.model_dump(mode="json"), Recipe().model_dump(mode="json")
    for table, always in SHOWN.items():
        values = {
            key: value
            for key, value in content[table].items()
            if value is not None and (key in always or table in ("model", "loss") or value != usual[table].get(key))
        }
        values = {
            key: value for key, value in values.items() if f"{table}.{key}" not in _list_implied_keys(plan.recipe)
        }
        if values:
            lines += ["", f"[{table}]", *_format_table(values, f"{table}.", reasons)]
    return "\n".join(lines) + "\n"


def _list_implied_keys(recipe: Recipe) -> tuple[str, ...]:
    """Keys that another one decides: steps follow from epochs, the width and depth are of our own networks."""
    own = recipe.model.get("backbone") in ("convnet", "mlp", "onnx")
    return ("train.steps", *(() if own else ("model.width", "model.depth")))


def _format_table(values: Mapping[str, Any], prefix: str, reasons: Mapping[str, str]) -> Sequence[str]:
    lines = []
    for key, value in values.items():
        line = _format_line(key, value)
        reason = reasons.get(f"{prefix}{key}")
        lines.append(line if reason is None else f"{line:<{WIDE}} # {' '.join(reason.split())}")
    return lines


def _format_line(key: str, value: Any) -> str:
    """One key on one line, tables within too."""
    if isinstance(value, Mapping):
        inner = ", ".join(_format_line(name, one) for name, one in value.items() if one is not None)
        return f"{key} = {{ {inner} }}"
    if isinstance(value, list):
        return f"{key} = [{', '.join(_format_line('', one).removeprefix(' = ') for one in value)}]"
    text = tomli_w.dumps({"x": value}).strip().removeprefix("x = ")
    return f"{key} = {text}"


def write_recipe(plan: FirstRunPlan, account: DataAccount, path: Path) -> None:
    """Write the recipe file; one that is there is not overwritten.

    Raises:
        RecipeError: there is such a file, or no folder for it.
    """
    if path.exists():
        raise RecipeError(f"{path} is there already: train it with `mettle train {path}`, or choose another --name")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, format_recipe(plan, account))
