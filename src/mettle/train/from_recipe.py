"""From a recipe to a finished run folder, or on from where one stopped; and its parts: model, method, loader."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mettle.data.dataset import Samples
from mettle.data.duplicates import train_test_duplicates
from mettle.data.loader import ForeignLoader, Loader
from mettle.data.rank_share import RankShare
from mettle.data.sampler import EpochBatchSampler, PKBatchSampler, ShuffledBatchSampler, UpsampledSampler
from mettle.data.transforms import Augment, find_preset, to_input_tensor
from mettle.data.tuples import Tuples
from mettle.errors import DataError, InputError, RecipeError, RunError
from mettle.losses import PairwiseLoss
from mettle.model import Embedder, EmbeddingModel, ModuleEmbedder
from mettle.pairs.distributed import ALONE, RankGroup, broadcast_tensors, join_ranks
from mettle.train import checkpoint, step_graph
from mettle.train.auto_settings import resolve_device
from mettle.train.callbacks import (
    Callback,
    Checkpoint,
    CollapseGuard,
    DivergenceGuard,
    JsonLog,
    OnStep,
    StopOnSignal,
    TensorBoard,
)
from mettle.train.compilation import RESUMES, compile_networks
from mettle.train.datamodule import describe_skipped, fill_settings, prepare_training_data, take_over_settings
from mettle.train.feature_cache import compute_features
from mettle.train.lora import merge_lora
from mettle.train.methods.base import Method, uses_second_encoder
from mettle.train.methods.hardness_aware import HardnessAware
from mettle.train.methods.jtt import describe_error_set, find_misclassified
from mettle.train.methods.similarity import Similarity
from mettle.train.methods.supervised import Supervised, start_class_vectors
from mettle.train.methods.two_encoder import SpuriousAttribute, TwoEncoder
from mettle.train.optim import Schedule, build_shape
from mettle.train.ranks.class_rows import is_spread
from mettle.train.recipe import Recipe, as_recipe
from mettle.train.run_folder import (
    RunFolder,
    TrainingIdentities,
    create_run,
    data_paths,
    open_run_folder,
    save_artifact,
    software_versions,
)
from mettle.train.selection import Score, Selection, build_selection, describe_selection
from mettle.train.starting_weights import (
    check_same_weights,
    describe_start,
    follow_starting_weights,
    take_over_starting_weights,
)
from mettle.train.trainer import count_steps, run_loop

POOL = 4096  # training rows that corrupted features are taken from
RESUME = "The run continues from its last checkpoint with --resume (resume=True), on any number of ranks"
CALIBRATION = 2048  # training samples that inputs are centered on


@dataclass(frozen=True, eq=False)
class GivenObjects:
    """What a caller made, each in the place of what a recipe describes; None where the recipe is to decide."""

    samples: Samples | None = None  # with a split
    tuples: Tuples | None = None  # pairs or triplets of these samples, with their splits
    model: EmbeddingModel | None = None
    loss: Any = None
    loader: ForeignLoader | None = None  # of the training split
    augment: Augment | None = None
    transform: Callable[[Tensor], Any] | None = None


@dataclass(frozen=True)
class TrainResult:
    """What training came to."""

    run: RunFolder
    model: EmbeddingModel
    samples: Samples
    finished: bool  # False: asked to stop; a checkpoint is there
    resumed_from: int | None = None
    notes: tuple[str, ...] = ()
    loss: Any = None  # as trained, where it learns something itself
    tuples: Tuples | None = None  # the pairs or triplets of the recipe, with their splits
    selection: Mapping[str, Any] | None = None  # which step the weights are of, see `Selection.restore_best`


def train(
    recipe: Recipe | Path | str,
    folder: Path | str,
    *,
    resume: bool = False,
    cache: Path | None = None,
    score: Score | None = None,
    callbacks: Sequence[Callback] = (),
    on_step: Callable[[int, dict[str, Any]], None] | None = None,
    tensorboard: bool = True,
    on_note: Callable[[str], None] = lambda note: None,
    on_start: Callable[[RunFolder], None] = lambda run: None,
    allow_import: Sequence[str] = (),
    given: GivenObjects | None = None,
) -> TrainResult:
    """Train a recipe, or a shipped one by its name or a file by its path, into ``folder``, or continue the run there.

    Args:
        recipe: what to train.
        folder: the run folder, which must not exist unless the run in it is to go on.
        resume: whether to continue the run in ``folder``, if there is one.
        cache: where embedded data are kept.
        score: what measures a model on the validation samples, for a recipe with ``train.select`` or
            ``train.validate_every``: `mettle.evaluate.ValidationScore`, or a `Score` of your own.
        callbacks: what else is called around every step, see `mettle.train.callbacks`.
        on_step: called after every step with the number of steps done and the log line.
        tensorboard: whether to write for TensorBoard too, where it is installed.
        on_note: called with each note about the data before the first step.
        on_start: called once, when the run folder is there and training is about to begin.
        allow_import: packages that networks and losses which the recipe names by an import path may come from.
        given: objects that take the place of what the recipe describes.
    """
    recipe, folder = as_recipe(recipe), _as_folder(folder)
    with join_ranks(remedy=RESUME) as ranks:
        folder = Path(ranks.broadcast(str(folder)))
        notes: dict[str, Any] = {"on_note": on_note, "on_start": on_start} if ranks.is_first else {}
        options: dict[str, Any] = {"resume": resume, "cache": cache, "score": score, "tensorboard": tensorboard}
        options |= {"callbacks": [*callbacks, *([] if on_step is None else [OnStep(on_step)])]}
        return _train(recipe, folder, ranks, given or GivenObjects(), allow_import=allow_import, **options, **notes)


def _train(
    recipe: Recipe,
    folder: Path,
    ranks: RankGroup,
    given: GivenObjects,
    *,
    resume: bool,
    cache: Path | None,
    score: Score | None,
    callbacks: Sequence[Callback],
    tensorboard: bool,
    allow_import: Sequence[str],
    on_note: Callable[[str], None] = lambda note: None,
    on_start: Callable[[RunFolder], None] = lambda run: None,
) -> TrainResult:
    """What `train` does, as one of its ranks."""
    asked, told_start = recipe, ()
    chosen_start: dict[str, Any] = {}
    _check_ranks(recipe, ranks, given)
    old = open_run_folder(folder) if ranks.broadcast(resume and folder.exists()) else None
    if old is not None:
        recipe = take_over_starting_weights(recipe, old.state.get("start"))
        recipe = take_over_settings(recipe, old.recipe)
    elif given.model is None:
        recipe, chosen_start, told_start = follow_starting_weights(recipe)
    located = recipe if old is None else _check_same_recipe(old, recipe)
    if given.samples is None:
        samples, tuples, left_out = prepare_training_data(located, cache)
    else:
        samples, tuples, left_out = given.samples, given.tuples, ()
    recipe, settings = fill_settings(recipe, samples, tuples)
    fingerprint = samples.fingerprint() + ("" if tuples is None else f" {tuples.fingerprint()}")
    if old is not None and old.state["data"] != fingerprint:
        raise RunError(f"the data of {folder} have changed since it was started: train again under another --name")
    has_begun = ranks.broadcast(bool(checkpoint.list_checkpoints(folder / "checkpoints")))
    options: dict[str, Any] = {"fetch": not has_begun, "allow_import": allow_import, "given": given, "ranks": ranks}
    method, loader = build_method_and_loader(recipe, samples, tuples, **options)
    if recipe.train.epochs is not None:
        steps = count_steps(loader, recipe.train.epochs, recipe.train.accumulate)
        recipe = recipe.with_values({"train.steps": steps})
    selection = _build_selection(recipe, folder, samples, score, on_note, ranks)
    if selection is not None and not has_begun:
        selection.validation.measure_untrained(method)
    duplicates = train_test_duplicates(samples)
    loaded = getattr(method.model, "pretrained", None)
    told_start += (() if loaded is None else (loaded.describe(),)) + method.describe_training()
    if old is not None:
        check_same_weights(old.state.get("start"), loaded)
    told = (
        *told_start,
        *samples.notes,
        *describe_skipped(samples),
        *settings,
        *left_out,
        *_describe_accumulation(recipe),
    )
    told += (str(duplicates),) if duplicates.count else ()
    for note in told:
        on_note(note)
    facts: dict[str, Any] = {"data": fingerprint, "paths": data_paths(recipe), **software_versions()}
    facts |= {} if loaded is None else {"start": describe_start(asked, chosen_start, loaded)}
    run = old or (create_run(folder, recipe, facts) if ranks.is_first else RunFolder(folder, recipe, facts))
    on_start(run)
    if ranks.is_first:
        TrainingIdentities.from_samples(samples).save(folder)
    notes: tuple[str, ...] = ()
    if recipe.train.method == "jtt" and recipe.jtt.copies:
        wrong, notes, done = _train_identification_model(recipe, run, samples, callbacks, on_note, ranks)
        for note in notes:
            on_note(note)
        if not done:
            return TrainResult(run, method.model, samples, False, None if old is None else 0, (*told, *notes))
        method, loader = build_method_and_loader(recipe, samples, misclassified=wrong, **options)
    own = [*callbacks, TensorBoard(folder)] if tensorboard and ranks.is_first else callbacks
    cached = compute_features(method, loader, recipe.data.memory)
    told += () if cached is None else (cached.describe(),)
    if cached is not None:
        on_note(cached.describe())
    with nullcontext(loader) if cached is None else cached.use() as batches:
        start, passed, done = _fit_in_folder(recipe, folder, method, batches, samples, own, selection, on_note, ranks)
    model, loss, chosen = method.final_module(), method.final_module("loss"), None
    if done:
        ranks.wait()  # until the best weights are written
        chosen = None if selection is None else selection.restore_best(method)
        if recipe.train.lora is not None:
            merge_lora(model)
        classes = _collect_classes(method, samples)
        if ranks.is_first:
            _save_result(run, method, samples, chosen, classes)
        ranks.wait()
    notes = (*passed, *told, *notes, *(() if chosen is None else (describe_selection(chosen),)))
    return TrainResult(run, model, samples, done, None if old is None else start, notes, loss, tuples, chosen)


def _check_ranks(recipe: Recipe, ranks: RankGroup, given: GivenObjects) -> None:
    """Refuse what several ranks cannot do together."""
    if ranks.size == 1:
        return
    if given.loader is not None:
        raise InputError(
            f"a DataLoader draws its batches for one process, and here are {ranks.size} ranks: give its data set, so "
            "that batches are drawn for all ranks together"
        )
    held = getattr(given.loss, "class_range", None)
    if held is not None and held.ranks != ranks.size:
        raise InputError(
            f"the loss holds the classes of {held.ranks} ranks, and here are {ranks.size}: name it, as in "
            'loss={"kind": "ArcFace"}, with shard_classes=True, and it is made when the ranks have met'
        )
    parts = given.loss.modules() if isinstance(given.loss, nn.Module) else ()
    if any(is_spread(part) for part in parts if part is not given.loss):
        raise InputError(
            "a part of the loss holds the classes of one rank only, and a checkpoint would hold no others: give a loss "
            "of samples against classes alone, with shard_classes=True"
        )
    if recipe.train.compile:
        raise RecipeError("train.compile does not go with several ranks: leave it out")


def _build_selection(
    recipe: Recipe,
    folder: Path,
    samples: Samples,
    score: Score | None,
    on_note: Callable[[str], None],
    ranks: RankGroup,
) -> Selection | None:
    """What validates the run, where its recipe asks for that."""
    setup = recipe.train
    if setup.select is None and setup.validate_every is None:
        return None
    if score is None:
        key = "select" if setup.select is not None else "validate_every"
        raise RecipeError(f"train.{key} needs a score: pass score=mettle.evaluate.ValidationScore() to train")
    options: dict[str, Any] = {"select": setup.select, "every": setup.validate_every, "patience": setup.patience}
    options |= {"on_note": on_note, "ranks": ranks}
    return build_selection(score, samples.part("val"), folder / "checkpoints", **options)


def _as_folder(folder: Any) -> Path:
    """The run folder that a caller named."""
    if not isinstance(folder, str | Path):
        raise InputError(f"folder= must be the path of a run folder, got {type(folder).__name__}")
    return Path(folder)


def _check_same_recipe(old: RunFolder, recipe: Recipe) -> Recipe:
    """The recipe of a run to go on with, its data found again; another recipe is refused.

    Another source alone is no other recipe: data may have moved, and whether they are the same is seen from them.
    """
    typed, source = old.recipe.data.source, recipe.data.source
    same = recipe.model_copy(update={"data": recipe.data.model_copy(update={"source": typed})})
    if same.model_dump() != old.recipe.model_dump():
        raise RunError(f"{old.folder} was started with another recipe{_describe_difference(old.recipe, same)}")
    return old.recipe_with_data_paths(None if source == typed else source)


def _describe_difference(old: Recipe, new: Recipe) -> str:
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


def _describe_accumulation(recipe: Recipe) -> tuple[str, ...]:
    """A warning where accumulated batches are taken for a larger batch, which they are not for losses over pairs."""
    count, loss = recipe.train.accumulate, recipe.loss_template
    if count == 1 or recipe.batch.queue or not isinstance(loss, PairwiseLoss):
        return ()
    return (
        f"train.accumulate = {count} averages the gradients of {count} batches, and {type(loss).__name__} compares the "
        f"samples of one batch only: it sees no more negatives than before, unlike a batch {count} times as large. "
        "Raise batch.classes or batch.size instead, with gradient caching (batch.cached = 64) where memory is short",
    )


def _fit_in_folder(
    recipe: Recipe,
    folder: Path,
    method: Method,
    loader: Loader | ForeignLoader,
    samples: Samples,
    callbacks: Sequence[Callback],
    selection: Selection | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    ranks: RankGroup = ALONE,
) -> tuple[int, list[str], bool]:
    """The loop, from the newest checkpoint on: where it started, what was passed over, whether it reached its end."""
    setup, checkpoints = recipe.train, folder / "checkpoints"
    collapse: dict[str, Any] = {"every": setup.log_every, "warmup": setup.warmup, "loss_keys": recipe.loss_keys}
    saving = Checkpoint(checkpoints, setup.checkpoint_every, writes=ranks.is_first)
    everything = [
        DivergenceGuard(checkpoints, setup.log_every),
        *(() if selection is None else selection.callbacks),
        *([JsonLog(folder, setup.log_every)] if ranks.is_first else ()),
        CollapseGuard(setup.collapse_spread, setup.collapse_gap, setup.collapse_patience, **collapse),
        *callbacks,
        StopOnSignal(),
        saving,
    ]
    start, position, passed = saving.restore(method, everything)
    if start != ranks.broadcast(start):
        raise RunError(
            f"rank {ranks.rank} finds the checkpoint of step {start} in {checkpoints}, rank 0 another: put the run on "
            "a file system that all machines share"
        )
    if start == 0 and setup.class_vectors == "means":
        start_class_vectors(method, samples.part("train"))
    if ranks.size > 1:
        broadcast_tensors(x for part in method.modules.values() for x in (*part.parameters(), *part.buffers()))
    schedule = Schedule(setup.steps, setup.rate, build_shape(setup.schedule, setup.warmup))
    networks = [method.modules[name] for name in method.optimizer.optimizers] if setup.compile else []
    if networks:
        on_note(RESUMES)
    options: dict[str, Any] = {"start": start, "position": position, "accumulate": setup.accumulate}
    if setup.cuda_graph:
        on_note(step_graph.RESUMES)
    recording = step_graph.record_steps(method, on_note) if setup.cuda_graph else nullcontext()
    with compile_networks(networks, on_note), recording:
        done = run_loop(method, loader, schedule, everything, **options)
    return start, passed, done


def _train_identification_model(
    recipe: Recipe,
    run: RunFolder,
    samples: Samples,
    callbacks: Sequence[Callback],
    on_note: Callable[[str], None],
    ranks: RankGroup,
) -> tuple[np.ndarray, tuple[str, ...], bool]:
    """The first classifier of "just train twice", in a folder of its own, and the training samples it gets wrong."""
    steps = max(1, round(recipe.jtt.first * recipe.train.steps))
    short = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})})
    folder = run.folder / "first"
    if ranks.is_first:
        folder.mkdir(exist_ok=True)
    has_begun = ranks.broadcast(bool(checkpoint.list_checkpoints(folder / "checkpoints")))
    method, loader = build_method_and_loader(short, samples, fetch=not has_begun, ranks=ranks)
    assert isinstance(method, Supervised)
    assert method.classes is not None
    more: dict[str, Any] = {"on_note": on_note, "ranks": ranks}
    _, passed, done = _fit_in_folder(short, folder, method, loader, samples, callbacks, **more)
    part = samples.part("train")
    if not done:
        return np.empty(0, np.int64), tuple(passed), False
    wrong = find_misclassified(method.final_module(), method.final_module("loss"), method.classes, part)
    wrong = np.asarray(ranks.broadcast(wrong.tolist()), np.int64)
    return wrong, (*passed, describe_error_set(len(wrong), len(part), steps)), True


def _collect_classes(method: Method, samples: Samples) -> tuple[Tensor, list[str]] | None:
    """The class vectors of a run, where it has any, and the names of their classes; every rank has to take part."""
    if not isinstance(method, Supervised) or method.classes is None or not hasattr(method.loss, "vectors"):
        return None
    names = [samples.label.names[code] for code in method.classes.tolist()]
    loss = method.final_module("loss")  # that of somebody else, or a sum, tells no vectors
    if not hasattr(loss, "vectors"):
        return None
    return loss.collect_rows(loss.vectors()) if is_spread(loss) else loss.vectors(), names


def _save_result(
    run: RunFolder,
    method: Method,
    samples: Samples,
    selection: Mapping[str, Any] | None,
    classes: tuple[Tensor, list[str]] | None,
) -> None:
    """Write the artifact of a run that reached its end."""
    biased = None
    if isinstance(method, TwoEncoder) and method.biased is not None:
        biased = method.final_module("biased")
    columns = [one.to_json() for one in getattr(samples.inputs, "features", ())]
    part = samples.part("train")
    example = to_input_tensor(part.read(evenly_spaced(len(part), 8)), "cpu")
    options: dict[str, Any] = {"biased": biased, "classes": classes, "columns": columns, "selection": selection}
    save_artifact(run, method.final_module(), kind=samples.inputs.kind, example=example, **options)


def build_method_and_loader(
    recipe: Recipe,
    samples: Samples,
    tuples: Tuples | None = None,
    misclassified: np.ndarray | None = None,
    *,
    fetch: bool = True,
    allow_import: Sequence[str] = (),
    given: GivenObjects | None = None,
    ranks: RankGroup = ALONE,
) -> tuple[Method, Loader | ForeignLoader]:
    """The method and the loader of a recipe; everything random in them follows from its seed.

    ``misclassified`` are positions of training samples that come ``jtt.copies`` more times in an epoch. ``fetch=False``
    asks for no pretrained weights: those of a checkpoint are about to take their place. ``allow_import`` and ``given``
    are those of `train`; of several ``ranks``, each has a device and a part of every batch.
    """
    given = given or GivenObjects()
    part = samples.part("train")
    if len(part) == 0:
        raise DataError(f"{recipe.data.source} has no training samples: its split column says so")
    device = ranks.choose_device(resolve_device(recipe.train.device))
    if given.loader is not None:
        loader: Loader | ForeignLoader = replace(given.loader, device=device)
    else:
        loader = build_loader(recipe, samples, device, tuples, misclassified, given)
        loader = replace(loader, share=RankShare(ranks.rank, ranks.size), keep_raw=recipe.batch.cached > 0)
    share = _freeze_share(recipe, loader)
    return build_method(recipe, samples, device, fetch, allow_import, given, share), loader


def _freeze_share(recipe: Recipe, loader: Loader | ForeignLoader) -> float | None:
    """The share of the steps for which a part of the backbone is frozen; None for all of them, or where none is."""
    setup = recipe.train
    if setup.freeze_epochs is None and setup.freeze_steps is None:
        return None
    frozen, steps = setup.freeze_steps, setup.steps
    if setup.freeze_epochs is not None:
        frozen = count_steps(loader, setup.freeze_epochs, setup.accumulate)
    if setup.epochs is not None:
        steps = count_steps(loader, setup.epochs, setup.accumulate)
    assert frozen is not None
    return frozen / steps


def build_method(
    recipe: Recipe,
    samples: Samples,
    device: str,
    fetch: bool = True,
    allow_import: Sequence[str] = (),
    given: GivenObjects | None = None,
    freeze_share: float | None = None,
) -> Method:
    """The method of a recipe, with untrained networks on a device.

    ``freeze_share`` is the share of the steps for which what ``train.freeze`` names does not train; None: all of them.
    """
    part, setup, given = samples.part("train"), recipe.train, given or GivenObjects()
    torch.manual_seed(recipe.seed)
    model: Any = given.model or build_model(recipe, samples, fetch=fetch, allow_import=allow_import)
    model = model.to(device)
    precision = setup.precision
    if precision == "auto":
        precision = "bfloat16" if device.startswith("cuda") else "float32"
    classes = torch.from_numpy(np.unique(part.labels)).to(device)
    loss: Any = given.loss
    if loss is None and setup.shard_classes:
        loss = recipe.build_sharded_loss(len(classes), model.dim)
    elif loss is None:
        loss = recipe.build_loss(len(classes), model.dim, allow_import)
    if isinstance(loss, nn.Module):
        loss = loss.to(device, torch.float32) if device == "mps" else loss.to(device)  # which has no float64
    keys = ("optimizer", "weight_decay", "backbone_rate", "loss_rate", "clip", "ema", "ema_start")
    keys += ("freeze", "layer_decay", "sync_batchnorm")
    options: dict[str, Any] = {key: getattr(setup, key) for key in keys}
    options |= {"precision": precision, "freeze_share": freeze_share, "lora": recipe.build_lora()}
    options |= {"cached": recipe.batch.cached}
    name = recipe.evaluate.spurious
    # For every method: a column that is not there, or says nothing, is told now and not after training.
    attribute = None if name is None else SpuriousAttribute.from_column(part, name)
    if setup.method == "hardness-aware":
        return HardnessAware(loss, model, classes=classes, synthesis=recipe.build_synthesis(), **options)
    if setup.method == "two-encoder":
        options |= {
            "attribute": attribute or SpuriousAttribute.from_domain(part),
            "seed": recipe.seed,
            "lr_scale": recipe.biased.rate,
        }
        if uses_second_encoder(loss):
            other = build_model(recipe, samples, recipe.seed + 1, fetch, allow_import).to(device)
            options |= {"biased": other, "biased_loss": recipe.build_biased_loss()}
        return TwoEncoder(model, loss, weights=recipe.biased.weights, queue=recipe.batch.queue_settings(), **options)
    if setup.method == "similarity":
        return Similarity(model, loss, **options)
    by_class = classes if hasattr(loss, "num_classes") else None
    queue, distill = recipe.batch.queue_settings(), setup.distillation_settings()
    return Supervised(model, loss, classes=by_class, queue=queue, distill=distill, **options)


def build_loader(
    recipe: Recipe,
    samples: Samples,
    device: str,
    tuples: Tuples | None = None,
    misclassified: np.ndarray | None = None,
    given: GivenObjects | None = None,
) -> Loader:
    """The batches of a recipe."""
    part, batch, seed, given = samples.part("train"), recipe.batch, recipe.seed, given or GivenObjects()
    size, augment = batch.size or batch.classes * batch.samples, given.augment or find_preset(batch.augment)
    if part.inputs.kind == "row" and (augment.corrupt or augment.noise):  # features have their own spread and values
        augment = replace(augment, pool=to_input_tensor(part.read(evenly_spaced(len(part), POOL)), device))
    if tuples is not None:
        rows = _training_tuples(tuples, size)
        order: EpochBatchSampler = ShuffledBatchSampler(len(rows), size, seed)
        return Loader(samples, order, augment, seed, workers=batch.workers, device=device, tuples=rows)
    if recipe.train.method == "jtt":
        wrong = np.empty(0, np.int64) if misclassified is None else misclassified
        order = UpsampledSampler(len(part), wrong, recipe.jtt.copies, size, seed)
    elif batch.views > 1:
        order = ShuffledBatchSampler(len(part), size, seed)
    else:
        order = PKBatchSampler(part.labels, batch.classes, batch.samples, seed)
    return Loader(part, order, augment, seed, batch.views, batch.workers, device, transform=given.transform)


def _training_tuples(tuples: Tuples, size: int) -> Tuples:
    """The pairs or triplets to train on, if they fill a batch."""
    rows = tuples.part("train")
    if len(rows) < size:
        few = f"{len(rows)} training {tuples.noun}s, fewer than the {size} of a batch"
        raise DataError(f"{tuples.source_name} has {few}: lower batch.size, or check the split")
    return rows


def build_model(
    recipe: Recipe,
    samples: Samples,
    seed: int | None = None,
    fetch: bool = True,
    allow_import: Sequence[str] = (),
) -> EmbeddingModel:
    """The untrained network of a recipe; one of ours is centered on a sample of the training split."""
    part = samples.part("train")
    is_image, shape = part.inputs.kind == "image", part.inputs.shape
    shape = (shape[2], *shape[:2]) if is_image else shape
    torch.manual_seed(recipe.seed if seed is None else seed)
    if recipe.foreign_model is not None:
        module = recipe.build_foreign_model(shape, allow_import)
        return ModuleEmbedder.from_example(module, part.read(evenly_spaced(len(part), 4)), **recipe.neck)
    model = Embedder(recipe.spec(), shape, load_pretrained=fetch)
    model.fit_normalization(to_input_tensor(part.read(evenly_spaced(len(part), CALIBRATION)), "cpu"))
    return model


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """At most so many positions out of ``count``, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
