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
from mettle.errors import DataError, MettleError, RecipeError, RunError
from mettle.model import Embedder
from mettle.train import checkpoint, loop, trained
from mettle.train.artifact import Run, create, finish, keep_classes, open_run, places
from mettle.train.copies import copies
from mettle.train.hardness_aware import HardnessAware
from mettle.train.held_out import held_out
from mettle.train.jtt import Again, mistakes, repeated
from mettle.train.log import Log
from mettle.train.method import Method, Supervised, compares
from mettle.train.recipe import Recipe
from mettle.train.similarity import Similarity, named, settled, training_rows
from mettle.train.two_encoder import Attribute, TwoEncoder, keep_biased

POOL = 4096  # training rows that corrupted features are taken from


@dataclass(frozen=True)
class Outcome:
    """What training came to."""

    run: Run
    model: Embedder
    samples: Samples
    finished: bool  # False: asked to stop; a checkpoint is there
    resumed_from: int | None = None
    notes: tuple[str, ...] = ()


def prepare(recipe: Recipe, cache: Path | None = None, *, divide: bool = True, **reading: Any) -> Samples:
    """The data of a recipe, split and ready: pictures of one size, in memory where they fit.

    Args:
        recipe: whose data.
        cache: where embedded data are kept.
        divide: whether data without a split get one, as for training; else they stay without.
        reading: further options of `mettle.data.read`: ``labelled``, ``like``.
    """
    return prepare_tuples(recipe, cache, divide=divide, **reading)[0]


def prepare_tuples(
    recipe: Recipe, cache: Path | None = None, *, divide: bool = True, **reading: Any
) -> tuple[Samples, Tuples | None, tuple[str, ...]]:
    """The same, with the pairs or triplets of the recipe, if it has any, and notes about those that are left out."""
    samples, table = _listed(recipe, cache, **reading)
    samples = replace(samples, inputs=hold(samples.inputs))
    if samples.inputs.kind == "row" or not samples.inputs.resident:
        samples = screen(samples, recipe.data.policy)
    samples = _divided(recipe, samples, table) if divide else samples
    return samples, *settled(recipe, table, samples)


def recognised(run: Run, source: str, cache: Path | None = None) -> bool:
    """Whether this source holds the very data that a run was trained on, told without decoding pictures."""
    try:
        recipe = run.located(source)
        samples, table = _listed(recipe, cache)
        if (run.folder / "contract.json").exists():  # the same numbers under other names are other data
            columns = [one.table() for one in getattr(samples.inputs, "features", ())]
            if run.contract()["input"].get("columns", columns) != columns:
                return False
        return run.made_of(_divided(recipe, samples, table).fingerprint())
    except MettleError:  # not even readable as such
        return False


def _listed(recipe: Recipe, cache: Path | None, **reading: Any) -> tuple[Samples, Tuples | None]:
    """The samples without bad pictures where these are to be skipped, and the pairs or triplets among them."""
    samples = _read(recipe, cache, **reading)
    table = named(recipe.data, samples)  # first: a pair that names a bad picture is left out, no mistake
    return screen(samples, "skip") if recipe.data.policy == "skip" else samples, table


def _read(recipe: Recipe, cache: Path | None, **reading: Any) -> Samples:
    """The samples of a recipe as they stand in its source.

    Nothing is looked at yet: pictures that fit into memory are looked at once, when they are put there.
    """
    data = recipe.data
    options: dict[str, Any] = {
        "label": data.label,
        "domain": data.domain,
        "groups": data.groups,
        "features": data.features,
        "categories": data.categories,
        "missing": data.missing,
        "text": data.text,
        "image": data.image,
        "size": tuple(data.size) if isinstance(data.size, list) else data.size,
        "channels": data.channels,
    }
    return read(data.source, policy="trust", cache=cache, **options, **reading)


def _divided(recipe: Recipe, samples: Samples, table: Tuples | None = None) -> Samples:
    """The samples with a split, theirs or one by identity, and domains that training is to miss kept out of it."""
    data = recipe.data
    if (samples.split == NO_SPLIT).all():
        if table is not None and (table.split != NO_SPLIT).any():
            samples = table.by_identity(samples)
        else:
            samples = class_disjoint(samples, val=data.val, test=data.test, seed=recipe.seed)
    return unseen_domain(samples, data.unseen) if data.unseen else samples


def train(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    cache: Path | None = None,
    progress: Callable[[int, dict[str, Any]], None] = lambda step, line: None,
    tensorboard: bool = True,
    say: Callable[[str], None] = lambda note: None,
) -> Outcome:
    """Train a recipe into ``folder``, or continue the run that is there.

    ``progress`` is called after every step; ``say`` with each note about the data before the first.
    """
    old = open_run(folder) if resume and folder.exists() else None
    samples, table, left_out = prepare_tuples(recipe if old is None else _continued(old, recipe), cache)
    content = samples.fingerprint() + ("" if table is None else f" {table.fingerprint()}")
    facts = {"data": content, "paths": places(recipe)}
    facts |= {"torch": torch.__version__, "python": platform.python_version()}
    if old is not None and old.state["data"] != facts["data"]:
        raise RunError(f"the data of {folder} have changed since it was started: train again under another --name")
    begun = bool(checkpoint.stored(folder / "checkpoints"))
    method, loader = assemble(recipe, samples, table, fetch=not begun)
    copied, notes = copies(samples), ()
    told = (*samples.notes, *left_out, *([str(copied)] if copied.count else ()))
    for note in told:
        say(note)
    run = old or create(folder, recipe, facts)
    trained.keep(run, samples)
    if recipe.train.method == "jtt" and recipe.jtt.copies:
        wrong, notes, done = _first(recipe, run, samples, progress)
        if not done:
            return Outcome(run, method.model, samples, False, None if old is None else 0, (*told, *notes))
        method, loader = assemble(recipe, samples, repeat=wrong, fetch=not begun)
    start, passed, done = _fit(recipe, folder, method, loader, progress, tensorboard)
    notes = (*passed, *told, *notes)
    if done:
        finish(run, method.model, columns=[one.table() for one in getattr(samples.inputs, "features", ())])
        if isinstance(method, Supervised) and method.classes is not None:
            keep_classes(run, method.loss.vectors(), [samples.label.names[code] for code in method.classes.tolist()])
        if isinstance(method, TwoEncoder) and method.biased is not None:
            keep_biased(run, method.biased)
        if table is not None:
            notes += held_out(run, method.model, getattr(method, "loss", None), table, samples)
    return Outcome(run, method.model, samples, done, None if old is None else start, notes)


def _continued(old: Run, recipe: Recipe) -> Recipe:
    """The recipe of a run to go on with, its data found again; another recipe is refused.

    Another source alone is no other recipe: data may have moved, and whether they are the same is seen from them.
    """
    typed, source = old.recipe.data.source, recipe.data.source
    same = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": typed})})
    if same != old.recipe:
        raise RunError(f"{old.folder} was started with another recipe{_difference(old.recipe, same)}")
    return old.located(None if source == typed else source)


def _fit(
    recipe: Recipe, folder: Path, method: Method, loader: Loader, progress: Callable, tensorboard: bool
) -> tuple[int, list[str], bool]:
    """The loop, from the newest checkpoint on: where it started, what was passed over, whether it reached its end."""
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
        return start, passed, loop.run(method, loader, pace, folder=folder, start=start, log=log, progress=progress)
    finally:
        log.close()


def _first(recipe: Recipe, run: Run, samples: Samples, progress: Callable) -> tuple[np.ndarray, tuple[str, ...], bool]:
    """The first classifier of "just train twice", in a folder of its own, and the training samples it gets wrong."""
    steps = max(1, round(recipe.jtt.first * recipe.train.steps))
    short = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})
    folder = run.folder / "first"
    folder.mkdir(exist_ok=True)
    method, loader = assemble(short, samples, fetch=not checkpoint.stored(folder / "checkpoints"))
    assert isinstance(method, Supervised)
    assert method.classes is not None
    _, passed, done = _fit(short, folder, method, loader, progress, False)
    part = samples.part("train")
    wrong = mistakes(method.model, method.loss, method.classes, part) if done else np.empty(0, np.int64)
    said = f"the first classifier ({steps} steps) got {len(wrong)} of {len(part)} training samples wrong"
    return wrong, (*passed, said), done


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


def _difference(old: Recipe, new: Recipe) -> str:
    """Which keys differ, in words."""
    a, b = old.model_dump(), new.model_dump()
    keys = [
        f"{table}.{key}" if isinstance(a[table], dict) else table
        for table in a
        for key in (a[table] | b[table] if isinstance(a[table], dict) else [table])
        if (a[table].get(key) != b[table].get(key) if isinstance(a[table], dict) else a[table] != b[table])
    ]
    remedy = "resume it without naming a recipe, and it keeps its own, or choose another --name"
    return f" ({', '.join(dict.fromkeys(keys))} differ): {remedy}"
