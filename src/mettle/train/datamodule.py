"""A whole training run: from a recipe to a finished run folder, or on from where one stopped."""

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mettle.data.check import screen
from mettle.data.decode import as_size
from mettle.data.images import ImageFiles, PackedImages, hold
from mettle.data.loader import Loader
from mettle.data.samples import NO_SPLIT, Samples
from mettle.data.source import read
from mettle.data.splits import class_disjoint, unseen_domain
from mettle.data.tuples import Tuples
from mettle.errors import DataError, InputError, MettleError, RunError
from mettle.model import Embedder
from mettle.train import checkpoint, trained
from mettle.train import trainer as loop
from mettle.train.auto_settings import choose_pictures, choose_training
from mettle.train.callbacks import Log
from mettle.train.copies import copies
from mettle.train.from_recipe import assemble as assemble
from mettle.train.from_recipe import new_model as new_model
from mettle.train.from_recipe import pick_device as pick_device
from mettle.train.held_out import held_out
from mettle.train.methods.base import Method, Supervised, start_class_vectors
from mettle.train.methods.jtt import describe_error_set, mistakes
from mettle.train.methods.similarity import named, settled
from mettle.train.methods.two_encoder import TwoEncoder, keep_biased
from mettle.train.recipe import Recipe, as_recipe
from mettle.train.run_folder import Run, create, embedded, finish, keep_classes, open_run, places


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
    samples = resize_samples(recipe, samples)
    policy = "skip" if "data.policy" in recipe.auto and samples.inputs.kind == "image" else recipe.data.policy
    try:
        samples = replace(samples, inputs=hold(samples.inputs))
    except DataError:  # it stops at the first bad picture: how many there are, and what to do, takes a look at all
        samples = screen(samples, policy)
        samples = replace(samples, inputs=hold(samples.inputs))
    if samples.inputs.kind == "row" or not samples.inputs.resident:
        samples = screen(samples, policy)
    samples = _divided(recipe, samples, table) if divide else samples
    return samples, *settled(recipe, table, samples)


def resize_samples(recipe: Recipe, samples: Samples) -> Samples:
    """The samples in the size and channels that are chosen for them, where the recipe leaves these open."""
    inputs: Any = samples.inputs
    chosen = choose_pictures(recipe, inputs, pick_device(recipe.train.device))
    values = {choice.key: choice.value for choice in chosen}
    if not values and (recipe.data.size is not None or not isinstance(inputs, ImageFiles | PackedImages)):
        return samples
    size = values.get("data.size") or recipe.data.size or inputs.shape[:2]
    size = as_size(tuple(size) if isinstance(size, list) else size)
    inputs = inputs.resized(size, values.get("data.channels"), resize=recipe.data.resize or "crop")
    return replace(samples, inputs=inputs, notes=(*samples.notes, *map(str, chosen)))


def fill_settings(recipe: Recipe, samples: Samples, table: Tuples | None = None) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with all that follows from its data and the machine filled in, and a note about each such choice."""
    chosen = choose_training(recipe, samples, pick_device(recipe.train.device), table)
    values = {choice.key: choice.value for choice in chosen} | {"auto": []}
    if samples.inputs.kind == "image" and not embedded(recipe.data.source):
        height, width = samples.inputs.shape[:2]
        values |= {"data.size": height if height == width else [height, width]}
        values |= {"data.resize": recipe.data.resize or "crop", "data.channels": samples.inputs.shape[2]}
    if samples.skipped and "data.policy" in recipe.auto:
        values["data.policy"] = "skip"
    return recipe.with_values(values), tuple(map(str, chosen))


def describe_skipped(samples: Samples) -> tuple[str, ...]:
    """A note about files that were left out because they cannot be read."""
    if not samples.skipped:
        return ()
    files = "1 file that cannot be read was" if len(samples.skipped) == 1 else f"{len(samples.skipped)} files were"
    why = "" if len(samples.skipped) == 1 else " because they cannot be read"
    return (f"{files} left out{why} (--set data.policy=fail stops instead), first: {samples.skipped[0]}",)


def take_over_settings(recipe: Recipe, old: Recipe) -> Recipe:
    """The recipe with what it leaves open as it was chosen when the run that is there began."""
    unsaid = [key for key in ("data.size", "data.resize", "data.channels") if recipe.value(key) is None]
    values = {key: old.value(key) for key in (*recipe.auto, *unsaid)}
    return recipe.with_values({key: value for key, value in values.items() if value is not None} | {"auto": []})


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
        "resize": data.resize,
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
    recipe: Recipe | Path | str,
    folder: Path | str,
    *,
    resume: bool = False,
    cache: Path | None = None,
    progress: Callable[[int, dict[str, Any]], None] = lambda step, line: None,
    tensorboard: bool = True,
    say: Callable[[str], None] = lambda note: None,
    on_start: Callable[[Run], None] = lambda run: None,
) -> Outcome:
    """Train a recipe, or a shipped one by its name or a file by its path, into ``folder``, or continue the run there.

    ``progress`` is called after every step; ``say`` with each note about the data before the first; ``on_start`` once,
    when the run folder is there and training is about to begin.
    """
    recipe, folder = as_recipe(recipe), _as_folder(folder)
    old = open_run(folder) if resume and folder.exists() else None
    if old is not None:
        recipe = take_over_settings(recipe, old.recipe)
    samples, table, left_out = prepare_tuples(recipe if old is None else _continued(old, recipe), cache)
    recipe, settings = fill_settings(recipe, samples, table)
    content = samples.fingerprint() + ("" if table is None else f" {table.fingerprint()}")
    facts = {"data": content, "paths": places(recipe)}
    facts |= {"torch": torch.__version__, "python": platform.python_version()}
    if old is not None and old.state["data"] != facts["data"]:
        raise RunError(f"the data of {folder} have changed since it was started: train again under another --name")
    begun = bool(checkpoint.stored(folder / "checkpoints"))
    method, loader = assemble(recipe, samples, table, fetch=not begun)
    copied, notes = copies(samples), ()
    told = (*samples.notes, *describe_skipped(samples), *settings, *left_out, *([str(copied)] if copied.count else ()))
    for note in told:
        say(note)
    run = old or create(folder, recipe, facts)
    on_start(run)
    trained.keep(run, samples)
    if recipe.train.method == "jtt" and recipe.jtt.copies:
        wrong, notes, done = _first(recipe, run, samples, progress)
        for note in notes:
            say(note)
        if not done:
            return Outcome(run, method.model, samples, False, None if old is None else 0, (*told, *notes))
        method, loader = assemble(recipe, samples, repeat=wrong, fetch=not begun)
    start, passed, done = _fit(recipe, folder, method, loader, samples, progress, tensorboard)
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


def _as_folder(folder: Any) -> Path:
    """The run folder that a caller named."""
    if not isinstance(folder, str | Path):
        raise InputError(f"folder= must be the path of a run folder, got {type(folder).__name__}")
    return Path(folder)


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
    recipe: Recipe,
    folder: Path,
    method: Method,
    loader: Loader,
    samples: Samples,
    progress: Callable,
    tensorboard: bool,
) -> tuple[int, list[str], bool]:
    """The loop, from the newest checkpoint on: where it started, what was passed over, whether it reached its end."""
    start, passed, setup = 0, [], recipe.train
    guard = loop.Guard(loop.Collapse(setup.collapse_spread, setup.collapse_gap, setup.collapse_patience))
    found = checkpoint.latest(folder / "checkpoints")
    if found is not None:
        start, state, passed = found
        method.load_state(state["method"])
        checkpoint.set_random_state(state["random"])
        guard.load_state(state["guard"])
    elif setup.class_vectors == "means":
        start_class_vectors(method, samples.part("train"))
    log = Log(folder, start, tensorboard)
    pace = loop.Pace(setup.steps, setup.rate, setup.warmup, setup.log_every, setup.checkpoint_every)
    try:
        options: dict[str, Any] = {"start": start, "guard": guard, "log": log, "progress": progress}
        return start, passed, loop.run(method, loader, pace, folder=folder, **options)
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
    _, passed, done = _fit(short, folder, method, loader, samples, progress, False)
    part = samples.part("train")
    if not done:
        return np.empty(0, np.int64), tuple(passed), False
    wrong = mistakes(method.model, method.loss, method.classes, part)
    return wrong, (*passed, describe_error_set(len(wrong), len(part), steps)), True


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
