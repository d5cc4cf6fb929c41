"""A whole training run: from a recipe to a finished run folder, or on from where one stopped."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mettle.data.augment import preset
from mettle.data.batches import ClassBatches, Order, SampleBatches
from mettle.data.check import screen
from mettle.data.images import hold
from mettle.data.loader import Loader, to_model
from mettle.data.samples import NO_SPLIT, Samples
from mettle.data.source import read
from mettle.data.splits import class_disjoint, unseen_domain
from mettle.data.tuples import Tuples
from mettle.errors import DataError, RecipeError, RunError
from mettle.model import Embedder
from mettle.train import checkpoint, loop
from mettle.train.artifact import Run, create, finish, keep_classes, open_run
from mettle.train.held_out import held_out
from mettle.train.log import Log
from mettle.train.method import Method, Supervised
from mettle.train.recipe import Recipe
from mettle.train.similarity import Similarity, named, settled, training_rows


@dataclass(frozen=True)
class Outcome:
    """What training came to."""

    run: Run
    model: Embedder
    samples: Samples
    finished: bool  # False: asked to stop; a checkpoint is there
    resumed_from: int | None = None
    notes: tuple[str, ...] = ()


def prepare(recipe: Recipe, cache: Path | None = None) -> Samples:
    """The data of a recipe, split and ready: pictures of one size, in memory where they fit."""
    return prepare_tuples(recipe, cache)[0]


def prepare_tuples(recipe: Recipe, cache: Path | None = None) -> tuple[Samples, Tuples | None, tuple[str, ...]]:
    """The same, with the pairs or triplets of the recipe, if it has any, and notes about those that are left out."""
    data = recipe.data
    options: dict[str, Any] = {
        "label": data.label,
        "domain": data.domain,
        "groups": data.groups,
        "features": data.features,
        "size": None if data.size is None else (data.size, data.size),
        "channels": data.channels,
    }
    # Under "fail", pictures that fit into memory are looked at once, when they are put there.
    samples = read(data.source, policy="trust", cache=cache, **options)
    table = named(data, samples)  # before bad pictures are left out: a pair that names one is left out, no mistake
    samples = screen(samples, "skip") if data.policy == "skip" else samples
    samples = replace(samples, inputs=hold(samples.inputs))
    if samples.inputs.kind == "row" or not samples.inputs.resident:
        samples = screen(samples, data.policy)
    if (samples.split == NO_SPLIT).all():
        if table is not None and (table.split != NO_SPLIT).any():
            samples = table.by_identity(samples)
        else:
            samples = class_disjoint(samples, val=data.val, test=data.test, seed=recipe.seed)
    if data.unseen:
        samples = unseen_domain(samples, data.unseen)
    return samples, *settled(recipe, table, samples)


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    cache: Path | None = None,
    progress: Callable[[int, dict[str, Any]], None] = lambda step, line: None,
    tensorboard: bool = True,
) -> Outcome:
    """Train a recipe into ``folder``, or continue the run that is there."""
    old = open_run(folder) if resume and folder.exists() else None
    if old is not None and old.recipe != recipe:
        raise RunError(f"{folder} was started with another recipe{_difference(old.recipe, recipe)}")
    samples, table, left_out = prepare_tuples(recipe, cache)
    content = samples.fingerprint() + ("" if table is None else f" {table.fingerprint()}")
    facts = {"data": content, "torch": torch.__version__, "python": platform.python_version()}
    if old is not None and old.state["data"] != facts["data"]:
        raise RunError(f"the data of {folder} have changed since it was started: train again under another --name")
    method, loader = assemble(recipe, samples, table)
    run = old or create(folder, recipe, facts)
    start, passed = 0, []
    found = checkpoint.latest(folder / "checkpoints")
    if found is not None:
        start, state, passed = found
        method.load_state(state["method"])
        checkpoint.set_random_state(state["random"])
    log = Log(folder, start, tensorboard)
    setup = recipe.train
    pace = loop.Pace(setup.steps, setup.rate, setup.warmup, setup.log_every, setup.checkpoint_every)
    try:
        done = loop.run(method, loader, pace, folder=folder, start=start, log=log, progress=progress)
    finally:
        log.close()
    notes = (*passed, *left_out)
    if done:
        finish(run, method.model)
        if isinstance(method, Supervised) and method.classes is not None:
            keep_classes(run, method.loss.vectors(), [samples.label.names[code] for code in method.classes.tolist()])
        if table is not None:
            notes += held_out(run, method.model, getattr(method, "loss", None), table, samples)
    return Outcome(run, method.model, samples, done, None if old is None else start, notes)


def assemble(recipe: Recipe, samples: Samples, table: Tuples | None = None) -> tuple[Method, Loader]:
    """The method and the loader of a recipe; everything random in them follows from its seed."""
    part = samples.part("train")
    if len(part) == 0:
        raise DataError(f"{recipe.data.source} has no training samples: its split column says so")
    device = pick_device(recipe.train.device)
    torch.manual_seed(recipe.seed)
    model = new_model(recipe, samples).to(device)
    precision = recipe.train.precision
    if precision == "auto":
        precision = "bfloat16" if device.startswith("cuda") else "float32"
    setup, batch = recipe.train, recipe.batch
    classes = torch.from_numpy(np.unique(part.labels)).to(device)
    loss = recipe.criterion(len(classes))
    loss = loss.to(device) if isinstance(loss, nn.Module) else loss
    options: dict[str, Any] = {"weight_decay": setup.weight_decay, "loss_rate": setup.loss_rate}
    options |= {"clip": setup.clip, "precision": precision}
    if table is None:
        method = Supervised(model, loss, classes=classes if hasattr(loss, "num_classes") else None, **options)
    else:
        method = Similarity(model, loss, **options)
    if table is not None:
        size = batch.size or batch.classes * batch.samples
        rows = training_rows(table, size)
        order: Order = SampleBatches(len(rows), size, recipe.seed)
        given = (samples, order, preset(batch.augment), recipe.seed)
        return method, Loader(*given, workers=batch.workers, device=device, tuples=rows)
    order = ClassBatches(part.labels, batch.classes, batch.samples, recipe.seed)
    if batch.views > 1:
        order = SampleBatches(len(part), batch.classes * batch.samples, recipe.seed)
    return method, Loader(part, order, preset(batch.augment), recipe.seed, batch.views, batch.workers, device)


def new_model(recipe: Recipe, samples: Samples) -> Embedder:
    """The untrained network of a recipe, centred on a sample of the training split."""
    part = samples.part("train")
    shape = part.inputs.shape
    torch.manual_seed(recipe.seed)
    model = Embedder(recipe.spec(), (shape[2], *shape[:2]) if len(shape) == 3 else shape)
    some = np.unique(np.linspace(0, len(part) - 1, min(len(part), 2048)).astype(np.int64))
    model.calibrate(to_model(part.read(some), "cpu"))
    return model


def pick_device(name: str) -> str:
    """``auto`` means CUDA where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RecipeError(f"train.device = {name!r}, but torch sees no CUDA device: use 'cpu' or 'auto'")
    return name


def _difference(old: Recipe, new: Recipe) -> str:
    """Which keys differ, in words."""
    a, b = old.model_dump(), new.model_dump()
    keys = [
        f"{table}.{key}" if isinstance(a[table], dict) else table
        for table in a
        for key in (a[table] | b[table] if isinstance(a[table], dict) else [table])
        if (a[table].get(key) != b[table].get(key) if isinstance(a[table], dict) else a[table] != b[table])
    ]
    return f" ({', '.join(dict.fromkeys(keys))} differ): resume with the same recipe, or choose another --name"
