"""A recipe for a folder of photographs: `photos`, with what follows from the data, the machine and the time.

The loss, the batch and the learning rate are those of `photos`. What is chosen here is the size of the images, how much
of the network trains, and for how many epochs: as many as fit into the minutes that were given, by the time that a step
takes on this machine.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mettle.data.dataset import Samples
from mettle.model import Embedder
from mettle.model.embedder import eval_mode
from mettle.start.look import DataAccount
from mettle.train import Schedule, load, run_loop
from mettle.train.auto_settings import Choice, choose_training, resolve_device
from mettle.train.callbacks import OnStep
from mettle.train.datamodule import fill_settings
from mettle.train.fine_tuning import list_layers
from mettle.train.from_recipe import build_method_and_loader
from mettle.train.recipe import Recipe
from mettle.train.trainer import count_steps

BASE = "photos"
SIDE = {"cpu": 128, "cuda": 224}  # pixels: what a pretrained network still recognizes, and what trains in minutes
LEAST_KEPT = 0.5  # share of an image that a square from its center must keep, else images are padded
TIMED_STEPS = 6  # the fastest counts: what else the machine does at the moment slows some down
TRAINING_SHARE = 0.55  # of the minutes that are left: measuring and reporting take the rest, and machines vary
MOST_EPOCHS = 8  # of fine-tuning: later ones fit the training labels, and no others
MOST_EPOCHS_FROM_SCRATCH = 60
FROM_SCRATCH = {"train.rate": 1e-3}  # a network that knows nothing yet may move faster


@dataclass(frozen=True)
class FirstRunPlan:
    """A recipe, why each of its keys is as it is, and what its training will take.

    Attributes:
        recipe: complete.
        choices: what was chosen for these data and this machine.
        step_seconds: what one step takes here.
        steps: how many there are.
    """

    recipe: Recipe
    choices: tuple[Choice, ...]
    step_seconds: float
    steps: int

    @property
    def minutes(self) -> float:
        """What training is expected to take."""
        return self.steps * self.step_seconds / 60


def describe_recipe(source: str, model: Mapping[str, Any], account: DataAccount, **columns: str | None) -> Recipe:
    """The recipe before anything is timed: `photos` on these data, from these weights, in a size for this machine.

    Args:
        source: of the data.
        model: keys of ``[model]`` that say where the network starts; none where it starts from nothing.
        account: what was seen in the data.
        columns: of a table of images: ``label``, ``domain``, ``image``.
    """
    data = {"source": source, **{key: name for key, name in columns.items() if name is not None}}
    overrides = [] if model else [f"{key}={value}" for key, value in FROM_SCRATCH.items()]
    return load(BASE, overrides, data=data | choose_images(model, account), model=model)


def choose_images(model: Mapping[str, Any], account: DataAccount) -> dict[str, Any]:
    """Size and framing of the images, as keys of ``[data]``."""
    resize = "crop" if account.kept_by_crop >= LEAST_KEPT else "pad"
    if not model or ("weights" in model and "backbone" not in model):  # others say the size: auto_settings, a run
        return {"resize": resize}
    side = SIDE["cuda" if resolve_device("auto").startswith("cuda") else "cpu"]
    return {"size": side, "resize": resize, "crop": 1.0}


def choose_recipe(recipe: Recipe, model: Embedder | None, samples: Samples, minutes: float) -> FirstRunPlan:
    """What trains, for how long: a step is timed on this machine.

    Args:
        recipe: as `describe_recipe` gives it, with what follows from the weights filled in.
        model: the pretrained network that it starts from, without a head; None from scratch.
        samples: the data, with their split.
        minutes: for training, measuring and the report.
    """
    choices = choose_training(recipe, samples, resolve_device(recipe.train.device))
    recipe = fill_settings(recipe, samples)[0]
    if model is not None:
        layers = _choose_layers(recipe, model)
        choices, recipe = choices + layers, recipe.with_values({choice.key: choice.value for choice in layers})
    else:
        choices.append(Choice("train.rate", recipe.train.rate, "highest learning rate: nothing was learned before"))
    step_seconds, epoch_steps = time_step(recipe, samples)
    most = MOST_EPOCHS if model is not None else MOST_EPOCHS_FROM_SCRATCH
    fitting = int(60 * minutes * TRAINING_SHARE / (step_seconds * epoch_steps))
    epochs = max(1, min(most, fitting))
    limit = f"what fits into {minutes:.1f} minutes" if fitting < most else "more of them rarely help"
    choices.append(
        Choice("train.epochs", epochs, f"passes of {epoch_steps} steps, {step_seconds:.2f} s each here: {limit}")
    )
    return FirstRunPlan(
        recipe.with_values({"train.epochs": epochs}), tuple(choices), step_seconds, epochs * epoch_steps
    )


def _choose_layers(recipe: Recipe, model: Embedder) -> list[Choice]:
    """The head, and which layers train."""
    layers = [name for name, _ in list_layers(model.backbone)]
    if not any(p.requires_grad for p in model.backbone.parameters()):
        return [
            Choice("train.freeze", "all", "the graph is not trained, the head is"),
            Choice("train.rate", FROM_SCRATCH["train.rate"], "highest learning rate: a new head knows nothing yet"),
        ]
    found = [
        Choice("model.head", "none", "the features themselves are the embedding, so training starts where they are"),
        Choice("model.dim", model.dim, "as many numbers as the backbone gives"),
    ]
    if resolve_device(recipe.train.device).startswith("cuda"):
        return found
    stage = find_last_stage(model)
    if stage is not None:
        last = f"the last {len(layers) - stage.before} of {len(layers)} layers train"
        why = f"{last}: without a GPU that is what minutes allow"
        found.append(Choice("train.freeze", stage.frozen, why))
    return found


class LastStage(NamedTuple):
    """Where the last stage of a backbone begins."""

    before: int  # layers
    frozen: str  # the module that ends before it


def find_last_stage(model: Embedder) -> LastStage | None:
    """The layers after the map was made smaller for the last time; of a transformer the last third.

    None where the backbone is a single stage.
    """
    layers = [name for name, _ in list_layers(model.backbone)]
    modules, sizes = dict(model.backbone.named_modules()), {}
    blocks = [_find_block(name, after) for name, after in pairwise([*layers, ""])]

    def remember(name: str) -> Any:
        def hook(module: nn.Module, given: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.ndim == 4:
                sizes[name] = tuple(out.shape[2:])

        return hook

    hooks = [modules[name].register_forward_hook(remember(name)) for name in blocks if name in modules]
    device = next(model.parameters()).device
    try:
        with eval_mode(model), torch.no_grad():
            model.features(torch.zeros(1, *model.shape, device=device))
    finally:
        for hook in hooks:
            hook.remove()
    if len(sizes) < len(blocks) / 2:  # tokens instead of maps
        before = 2 * len(blocks) // 3
    else:
        last = next(sizes[name] for name in reversed(blocks) if name in sizes)
        before = max((k + 1 for k, name in enumerate(blocks) if sizes.get(name, last) != last), default=0)
    return LastStage(before, blocks[before - 1]) if before and blocks[before - 1] in modules else None


def _find_block(layer: str, after: str) -> str:
    """The largest module that holds a layer and not the next one: ``layer3`` for layer3.1.conv1 before layer4.0."""
    parts = layer.split(".")
    names = [".".join(parts[: k + 1]) for k in range(len(parts))]
    return next((name for name in names if after and not f"{after}.".startswith(f"{name}.")), layer)


def time_step(recipe: Recipe, samples: Samples) -> tuple[float, int]:
    """Seconds of one step of training on this machine, and how many steps an epoch has; nothing is kept of it."""
    method, loader = build_method_and_loader(recipe, samples)
    ends: list[float] = []
    clock = OnStep(lambda step, line: ends.append(time.perf_counter()))
    run_loop(method, loader, Schedule(TIMED_STEPS, recipe.train.rate), [clock])
    fastest = min(after - before for before, after in pairwise(ends))
    return fastest, count_steps(loader, 1)
