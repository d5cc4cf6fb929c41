"""From a recipe and its samples to what a run needs: the untrained network, the method, the batches, the device."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from mettle.data.augment import preset
from mettle.data.batches import ClassBatches, Order, SampleBatches
from mettle.data.loader import Loader, to_model
from mettle.data.samples import Samples
from mettle.data.tuples import Tuples
from mettle.errors import DataError, RecipeError
from mettle.model import Embedder
from mettle.train.methods.base import Method, Supervised, compares
from mettle.train.methods.hardness_aware import HardnessAware
from mettle.train.methods.jtt import Again, repeated
from mettle.train.methods.similarity import Similarity, training_rows
from mettle.train.methods.two_encoder import Attribute, TwoEncoder
from mettle.train.recipe import Recipe

POOL = 4096  # training rows that corrupted features are taken from


def assemble(
    recipe: Recipe,
    samples: Samples,
    table: Tuples | None = None,
    repeat: np.ndarray | None = None,
    *,
    fetch: bool = True,
) -> tuple[Method, Loader]:
    """The method and the loader of a recipe; everything random in them follows from its seed.

    ``repeat`` are positions of training samples that come ``jtt.copies`` more times in an epoch. ``fetch=False`` asks
    for no pretrained weights: those of a checkpoint are about to take their place.
    """
    part = samples.part("train")
    if len(part) == 0:
        raise DataError(f"{recipe.data.source} has no training samples: its split column says so")
    device = pick_device(recipe.train.device)
    return new_method(recipe, samples, device, fetch), new_loader(recipe, samples, device, table, repeat)


def new_method(recipe: Recipe, samples: Samples, device: str, fetch: bool = True) -> Method:
    """The method of a recipe, with untrained networks on a device."""
    part, setup = samples.part("train"), recipe.train
    torch.manual_seed(recipe.seed)
    model = new_model(recipe, samples, fetch=fetch).to(device)
    precision = setup.precision
    if precision == "auto":
        precision = "bfloat16" if device.startswith("cuda") else "float32"
    classes = torch.from_numpy(np.unique(part.labels)).to(device)
    loss: Any = recipe.criterion(len(classes))
    loss = loss.to(device) if isinstance(loss, nn.Module) else loss
    options: dict[str, Any] = {"weight_decay": setup.weight_decay, "clip": setup.clip, "precision": precision}
    name = recipe.evaluate.spurious
    attribute = Attribute.known(part) if name is None else Attribute.of(part, name)  # told now, not after training
    if setup.method == "hardness-aware":
        return HardnessAware(loss, model, classes=classes, synthesis=recipe.synthesised(), **options)
    if setup.method == "two-encoder":
        options |= {"attribute": attribute, "seed": recipe.seed}
        if compares(loss):
            other = new_model(recipe, samples, recipe.seed + 1, fetch).to(device)
            options |= {"biased": other, "biased_loss": recipe.biased_criterion()}
        return TwoEncoder(model, loss, weights=recipe.biased.weights, pace=recipe.biased.rate, **options)
    if setup.method == "similarity":
        return Similarity(model, loss, loss_rate=setup.loss_rate, **options)
    by_class = classes if hasattr(loss, "num_classes") else None
    return Supervised(model, loss, classes=by_class, loss_rate=setup.loss_rate, **options)


def new_loader(
    recipe: Recipe, samples: Samples, device: str, table: Tuples | None = None, repeat: np.ndarray | None = None
) -> Loader:
    """The batches of a recipe."""
    part, batch, seed = samples.part("train"), recipe.batch, recipe.seed
    size, change = batch.size or batch.classes * batch.samples, preset(batch.augment)
    if part.inputs.kind == "row" and (change.corrupt or change.noise):  # features have their own spread and values
        some = np.unique(np.linspace(0, len(part) - 1, min(len(part), POOL)).astype(np.int64))
        change = replace(change, pool=to_model(part.read(some), device))
    if table is not None:
        rows = training_rows(table, size)
        order: Order = SampleBatches(len(rows), size, seed)
        return Loader(samples, order, change, seed, workers=batch.workers, device=device, tuples=rows)
    if recipe.train.method == "jtt":
        wrong = np.empty(0, np.int64) if repeat is None else repeat
        entries, names = repeated(part, wrong, recipe.jtt.copies)
        order = SampleBatches(len(entries), size, seed)
        return Again(entries, order, change, seed, batch.views, batch.workers, device, names=names)
    if batch.views > 1:
        order = SampleBatches(len(part), size, seed)
    else:
        order = ClassBatches(part.labels, batch.classes, batch.samples, seed)
    return Loader(part, order, change, seed, batch.views, batch.workers, device)


def new_model(recipe: Recipe, samples: Samples, seed: int | None = None, fetch: bool = True) -> Embedder:
    """The untrained network of a recipe, centred on a sample of the training split."""
    part = samples.part("train")
    shape = part.inputs.shape
    torch.manual_seed(recipe.seed if seed is None else seed)
    model = Embedder(recipe.spec(), (shape[2], *shape[:2]) if len(shape) == 3 else shape, fetch=fetch)
    some = np.unique(np.linspace(0, len(part) - 1, min(len(part), 2048)).astype(np.int64))
    model.calibrate(to_model(part.read(some), "cpu"))
    return model


def pick_device(name: str) -> str:
    """``auto`` means CUDA where there is one; a device that this machine does not have is refused."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "cpu"
    here = ["cpu", *(["cuda"] if count else []), *(f"cuda:{k}" for k in range(count))]
    if name not in here:
        seen = f"{count or 'no'} CUDA device{'s' if count > 1 else ''}"
        known = ", ".join(map(repr, here))
        raise RecipeError(f"train.device = {name!r}, but torch sees {seen} here: use 'auto' or one of {known}")
    return name
