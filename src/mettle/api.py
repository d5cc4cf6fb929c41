"""The whole chain in one call: your model, your data and your loss become a run.

    run = mettle.fit(model, data, loss, folder="runs/mine")      trained here
    run = mettle.adopt(model, "runs/theirs", example=batch)      trained elsewhere
    run = mettle.open_run("runs/mine")                           trained earlier

A run is a folder with the weights, a contract and a graph of the network that needs nobody's code. It evaluates,
reports and embeds itself, and a gallery and the service take it as they take a run of `mettle train`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mettle.data.dataset import NO_SPLIT, Samples, join_splits
from mettle.data.loader import ForeignLoader
from mettle.data.sources.dataframe import is_dataframe, read_dataframe
from mettle.data.sources.torch_dataset import (
    ApplyTransform,
    ConvertedItems,
    Denormalize,
    find_input_column,
    read_dataset,
)
from mettle.data.splits import hold_out_identities, identity_disjoint_split
from mettle.data.transforms import Augment, as_array_transform, preserve_generators, to_input_tensor
from mettle.errors import DataError, InputError, MettleError, RunError, nearest
from mettle.evaluate import ValidationScore
from mettle.losses import MinedLoss
from mettle.model import (
    Embedder,
    EmbedderSpec,
    EmbeddingModel,
    ModuleEmbedder,
    Preprocess,
    StartPlan,
    embed_items,
    plan_start,
)
from mettle.model.embedder import find_device
from mettle.model.neck import Neck, Space, check_neck
from mettle.pairs.distributed import RankGroup, join_ranks
from mettle.train.callbacks import Callback, Progress
from mettle.train.datamodule import load_run_samples, prepare_samples
from mettle.train.factory import describe_object
from mettle.train.from_recipe import RESUME, GivenObjects, build_model, evenly_spaced, train
from mettle.train.methods.base import takes_after
from mettle.train.methods.supervised import check_spaces
from mettle.train.optim import SCHEDULES, TORCH_SCHEDULES
from mettle.train.recipe import parse_recipe
from mettle.train.recipe_files import ADOPTED
from mettle.train.run_folder import RunFolder, create_run, open_run_folder, save_artifact, software_versions

if TYPE_CHECKING:  # measuring and reporting need more packages than training does
    from mettle.evaluate.run import Evaluation

EPOCHS = 10  # where nobody says how long
EXAMPLES = 8  # items that a network is tried on
VALIDATION_SHARE = 0.1  # of the training identities, where a metric is to be selected by and no data are given for it


@dataclass(frozen=True, eq=False)
class Run:
    """A run: its folder, and what is at hand of its model and its data.

    Attributes:
        run_folder: the folder, opened.
        finished: whether training reached its end; else `fit` with ``resume=True`` goes on.
        notes: what there was to say about data and settings.
    """

    run_folder: RunFolder
    finished: bool = True
    notes: tuple[str, ...] = ()
    trained_model: EmbeddingModel | None = None
    untrained_model: EmbeddingModel | None = None
    samples: Samples | None = None

    def __repr__(self) -> str:
        state = "" if self.finished else ", not finished"
        return f"Run({str(self.folder)!r}, {self.run_folder.recipe.title()}{state})"

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.run_folder.folder

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.run_folder.name

    def contract(self) -> dict[str, Any]:
        """What an embedding of this model is."""
        return self.run_folder.contract()

    def metrics(self) -> dict[str, Any]:
        """What was measured last."""
        return self.run_folder.metrics()

    def model(self, device: str = "cpu") -> EmbeddingModel:
        """The trained network, in eval mode: the very module where it is at hand, else what the folder holds."""
        if self.trained_model is None:
            return self.run_folder.model(device)
        assert isinstance(self.trained_model, nn.Module)
        return self.trained_model.to(device).eval()

    def embed(self, items: Any) -> np.ndarray:
        """(n, dim) float32 embeddings.

        Args:
            items: images (paths, bytes, Pillow images, uint8 arrays; one or several) where the run knows their
                preprocessing; or a batch of inputs as the network takes them.
        """
        if self.trained_model is None:
            return self.run_folder.embed(items)
        return embed_items(self.trained_model, items, self.run_folder.preprocess)

    def evaluate(self, data: Any = None, *, labels: Any = None, domains: Any = None) -> "Evaluation":
        """Measure the run on its test identities, and set thresholds on its validation identities.

        Args:
            data: other data, all of which are tested on where they have no split; by default the run's own. An adopted
                model has none: the first data that it is given set its thresholds too.
            labels: see `fit`.
            domains: see `fit`.
        """
        from mettle.evaluate.run import evaluate_run

        samples = self._find_samples(data, labels, domains)
        own = data is None or self.run_folder.matches_data(samples.fingerprint())
        device = "cpu" if self.trained_model is None else str(find_device(self.trained_model))
        model = self.model(device)
        return evaluate_run(self.run_folder, samples, model=model, own_data=own, untrained=self.untrained_model)

    def report(self, output: Path | str | None = None, *, evaluation: "Evaluation | None" = None) -> Path:
        """Write the report of the run, ``report.html`` in its folder or ``output``, and say where it is."""
        from mettle.report import write_report

        return write_report(self.run_folder, evaluation or self.evaluate(), output)

    def _find_samples(self, data: Any, labels: Any, domains: Any) -> Samples:
        if data is None:
            return self.samples if self.samples is not None else load_run_samples(self.run_folder, None)
        if isinstance(data, str | PathLike):
            columns = {"label": labels, "domain": domains}
            return load_run_samples(self.run_folder, str(data), columns=columns)
        samples, _ = read_data(data, labels, domains)
        return apply_preprocess(samples, self.run_folder.preprocess)


def open_run(folder: Path | str, model: nn.Module | None = None) -> Run:
    """Open a run that is there.

    Args:
        folder: as `fit`, `adopt` or ``mettle train`` wrote it.
        model: a module built like the one that was trained, to load the weights into. Without it a network of somebody
            else is the graph that the run keeps, which needs no code but runs on the CPU only.
    """
    found = open_run_folder(folder)
    return Run(found, (found.folder / "contract.json").is_file(), (), None if model is None else found.load_into(model))


def adopt(
    model: nn.Module,
    folder: Path | str,
    *,
    example: Any = None,
    preprocess: Any = None,
) -> Run:
    """Make a run of a model that was trained elsewhere.

    ``run.evaluate(data)`` then measures it, and sets its thresholds.

    Args:
        model: from inputs to (n, d) embeddings, with its weights.
        folder: where the run goes; it must not be there yet.
        example: a batch of inputs; not needed with a ``preprocess``.
        preprocess: how images become inputs, see `mettle.model.Preprocess`; without it the run embeds tensors only.
    """
    way, why = _translate(preprocess)
    if example is None and way is None:
        raise InputError(
            "give example=, a batch of inputs of the model, or preprocess=, which says what its images are"
        )
    if example is None:
        assert way is not None
        example = torch.rand(4, *way.shape, generator=torch.Generator().manual_seed(0))
    elif way is not None and isinstance(example, Tensor) and (undo := _denormalize(way)) is not None:
        example = undo(example)
    embedder = model if isinstance(model, Embedder) else ModuleEmbedder.from_example(model, example, preprocess=way)
    x = to_input_tensor(example, "cpu")
    kind = "image" if way is not None or isinstance(embedder, Embedder) else "tensor"
    recipe = parse_recipe(
        {
            "data": {"source": "python:nothing", **_data_table(way)},
            "model": embedder.spec.to_table()
            if isinstance(embedder, Embedder)
            else {"backbone": describe_object(model)},
            "loss": {"kind": ADOPTED},
        }
    )
    run = create_run(_as_folder(folder), recipe, {"data": "", "paths": {}, **software_versions()})
    save_artifact(run, embedder, kind=kind, example=x)
    return Run(run, True, (*why, *_describe_inputs(run)), embedder)


@join_ranks(remedy=RESUME)
def fit(
    model: Any,
    data: Any,
    loss: Any,
    *,
    folder: Path | str,
    val: Any = None,
    test: Any = None,
    labels: Any = None,
    domains: Any = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch: Any = None,
    augment: Any = None,
    preprocess: Any = None,
    neck: Neck = "none",
    embedding: Space = "before",
    weights: str | Path | None = None,
    freeze: str | None = None,
    freeze_epochs: int | None = None,
    layer_decay: float = 1.0,
    lora: int | Mapping[str, Any] | None = None,
    optimizer: str | Mapping[str, Any] = "adamw",
    lr: float | None = None,
    schedule: str | Mapping[str, Any] = "one-cycle",
    ema: float | None = None,
    ema_start: float | None = None,
    distill: float | None = None,
    shard_classes: bool = False,
    select: str | None = None,
    patience: int | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
    device: str = "auto",
    resume: bool = False,
    quiet: bool = False,
) -> Run:
    """Train any network on any data with any loss, into a run folder.

    In a script under ``torchrun`` all its processes train together, and the first one writes the folder and prints.

    Args:
        model: an ``nn.Module`` from inputs to (n, d) embeddings; the name of a timm network (``"timm/resnet18"``) or of
            one of ours (``"convnet"``); an `EmbedderSpec`.
        data: a map-style torch Dataset, a Hugging Face dataset, a DataFrame, `Samples`, a path, or a ``DataLoader``,
            which keeps its own order. Data without a split are divided by identity.
        loss: any callable on (embeddings, labels): ours, one of pytorch-metric-learning, ``(loss, miner)`` of it, a
            `mettle.losses.WeightedSum`; or a table as in a recipe, ``{"kind": "ArcFace", "margin": 0.3}``, which is
            built for the number of training classes.
        folder: the run folder.
        val: validation data, as ``data``; or the share of the identities that become it. By default 0.1; where ``test``
            are data, none, unless ``select`` asks for some.
        test: test data; or the share of the identities, 0.3 by default.
        labels: one for each item of ``data``, or the name of their column. By default ``data.targets`` or
            ``data.labels``, else each item is read once.
        domains: likewise; device, camera, session.
        epochs: passes over the training data; 10 where ``steps`` are not given either.
        steps: optimization steps.
        batch: (classes, samples of each), a number of samples, or keys of ``[batch]`` of a recipe.
        augment: a preset (``"photo"``), an `Augment`, a callable on one image or item (torchvision's v2,
            albumentations), or a `BatchTransform`.
        preprocess: `mettle.model.Preprocess`, a data configuration of timm, or a ``Compose`` of torchvision.
        neck: ``"batchnorm"`` puts one behind the network, for a `WeightedSum` with losses before and after it.
        embedding: which embedding the run is used with where there is a neck, that ``"before"`` or ``"after"`` it.
        weights: what a network that is named starts from: a file, a run, an ONNX graph or weights of torchvision, see
            `mettle.model.pretrained`. Images are then prepared as these weights had them, unless ``preprocess`` says
            otherwise.
        freeze: ``"all"`` of the backbone, or the last layer of the network that does not train.
        freeze_epochs: for how long; by default until the end.
        layer_decay: times the learning rate, for each layer of the backbone from its end on, such as 0.75.
        lora: the rank of additions to the backbone, which trains in no other way then, or a table as in a recipe.
        optimizer: a class of torch.optim by name, or a table ``{"kind": "SGD", "momentum": 0.9}``.
        lr: highest learning rate; by default 0.001, with SGD 0.05.
        schedule: its course by name (``"one-cycle"``, ``"cosine"``, ``"step"``, ``"constant"``, or a class of
            torch.optim.lr_scheduler), or a table.
        ema: decay of a moving average of the weights, which is then what is kept.
        ema_start: share of training before that average begins, such as 0.5.
        distill: how much is learned from the similarities that the moving average gives, such as 1.0.
        shard_classes: whether each process of torchrun holds the vectors of its own classes only, for a loss that is
            named, such as ``{"kind": "ArcFace"}``.
        select: the metric by which the best step is kept, measured on validation identities: ``"tar@1e-3"``.
        patience: evaluations without improvement after which training ends.
        callbacks: further ones, see `mettle.train.Callback`.
        seed: of everything random.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
        resume: whether to go on with the run in ``folder``, if there is one.
        quiet: whether to print no notes and no progress.

    Returns:
        the run; ``run.evaluate()`` and ``run.report()`` measure it.
    """
    notes: list[str] = []
    quiet = quiet or not RankGroup.current().is_first

    def say(note: str) -> None:
        notes.append(note)
        if not quiet:
            print(f"note: {note}", flush=True)

    if epochs is not None and steps is not None:
        raise InputError("give epochs= or steps=, not both")
    if ema_start and not ema:
        raise InputError("ema_start= says when the moving average begins: give ema= too, or leave it out")
    model, started = _follow_weights(model, weights, neck, embedding)
    way, why = _translate(started if preprocess is None else preprocess)
    if started is not None and model.mean is None:
        wanted = started if way is None or way.mean is None else way
        model = replace(model, mean=wanted.mean, std=wanted.std)
    for note in why:
        say(note)
    if epochs is None and steps is None:
        epochs = EPOCHS
    moving = _optimizer_table(optimizer)
    table: dict[str, Any] = {
        "seed": seed,
        "data": _data_table(way),
        "batch": _batch_table(batch, augment),
        "train": {
            "optimizer": moving,
            "schedule": _schedule_table(schedule),
            "rate": lr if lr is not None else 0.05 if moving["kind"] == "SGD" else 1e-3,
            "epochs": epochs,
            "steps": steps,
            "ema": ema or 0.0,
            "ema_start": ema_start or 0.0,
            "distill": distill or 0.0,
            "device": device,
            "shard_classes": shard_classes,
            "select": select,
            "patience": patience,
            "freeze": freeze,
            "freeze_epochs": freeze_epochs,
            "layer_decay": layer_decay,
            "lora": lora,
        },
        "auto": [] if isinstance(batch, tuple | list | int) else ["batch.classes", "batch.size"],
    }
    convert = ApplyTransform(preprocess) if why and preprocess is not None else None
    samples, loader = _prepare_data(table, data, val, test, labels, domains, way, convert, say)
    embedder = _prepare_model(table, model, samples, way, seed, {"neck": neck, "embedding": embedding})
    given_loss = _prepare_loss(table, loss, samples)
    if given_loss is not None:
        check_spaces(embedder, given_loss)
        _try_loss(given_loss, embedder.dim, len(np.unique(samples.part("train").labels)), table["batch"])
    recipe = parse_recipe(_drop_none(table))
    objects = {"samples": samples, "model": embedder, "loss": given_loss, "loader": loader}
    given = GivenObjects(**objects, **_prepare_augment(augment))
    untrained = copy.deepcopy(embedder)
    result = train(
        recipe,
        folder,
        resume=resume,
        callbacks=[*callbacks, *([] if quiet else [Progress(recipe.train.log_every)])],
        on_note=say,
        given=given,
        score=ValidationScore(),
    )
    for note in result.notes:
        if note not in notes:
            notes.append(note)
    if result.finished:
        for note in _describe_inputs(result.run):
            say(note)
    return Run(result.run, result.finished, tuple(notes), result.model, untrained, samples)


def _follow_weights(
    model: Any, weights: str | Path | None, neck: Neck, embedding: Space
) -> tuple[Any, Preprocess | None]:
    """The description of a named network with the weights that it starts from, and how these want their images."""
    if weights is not None and not isinstance(model, str):
        raise InputError(
            "weights= is for a network that is named, such as 'timm/resnet18': say it in EmbedderSpec(weights=...), or "
            "load them into your module"
        )
    if not isinstance(model, str | EmbedderSpec):
        return model, None
    spec = model
    if isinstance(spec, str):
        spec = EmbedderSpec(spec, weights=None if weights is None else str(weights), neck=neck, embedding=embedding)
    plan = plan_start(spec)
    return model if plan == StartPlan() else replace(spec, **plan.model), plan.preprocess


def read_data(
    data: Any,
    labels: Any = None,
    domains: Any = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> tuple[Samples, DataLoader | None]:
    """The samples of an object that holds data, and the DataLoader that it was, if it was one."""
    if isinstance(data, Samples):
        return data, None
    if is_dataframe(data):
        for name, given in (("labels", labels), ("domains", domains)):
            if given is not None and not isinstance(given, str):
                raise InputError(f"{name}= of a DataFrame must be the name of a column, got {type(given).__name__}")
        return read_dataframe(data, label=labels, domain=domains), None
    if isinstance(data, DataLoader):
        is_usual = getattr(data.collate_fn, "__module__", "").startswith("torch.")
        collate = None if is_usual else data.collate_fn
        return read_dataset(data.dataset, labels=labels, domains=domains, collate=collate, on_note=on_note), data
    return read_dataset(data, labels=labels, domains=domains, on_note=on_note), None


def _translate(preprocess: Any) -> tuple[Preprocess | None, tuple[str, ...]]:
    """What is known of the preprocessing, and a note where it is a function that says nothing about itself."""
    if preprocess is None:
        return None, ()
    try:
        return Preprocess.translate(preprocess), ()
    except InputError as error:
        if not callable(preprocess):
            raise
        random = [
            type(step).__name__ for step in getattr(preprocess, "transforms", ()) if "Random" in type(step).__name__
        ]
        if random:
            raise InputError(
                f"preprocess= must do the same to an image every time: {random[0]} belongs in augment="
            ) from None
        return None, (f"preprocess= is applied as it is, but the run cannot keep it: {error}",)


def apply_preprocess(
    samples: Samples, preprocess: Preprocess | None, convert: Callable[[np.ndarray], np.ndarray] | None = None
) -> Samples:
    """Images in the size that the network takes; tensors that are normalized already, back in [0, 1].

    ``convert`` makes inputs of images where nothing else is known of the preprocessing.
    """
    if preprocess is None:
        if convert is None or samples.inputs.kind != "image":
            return samples
        return replace(samples, inputs=ConvertedItems(samples.inputs, convert))
    inputs: Any = samples.inputs
    if inputs.kind == "image":
        ways = {"crop": preprocess.crop, "interpolation": preprocess.interpolation}
        size, channels = preprocess.shape[1:], preprocess.channels
        return replace(samples, inputs=inputs.with_size(size, channels, preprocess.resize, **ways))
    shape = tuple(inputs.shape)
    if shape != preprocess.shape:
        raise InputError(
            f"preprocess= gives images (c, h, w) = {preprocess.shape}, the items of the data have shape {shape}: they "
            "must be images, or what this preprocessing makes of them"
        )
    undo = _denormalize(preprocess)
    return samples if undo is None else replace(samples, inputs=ConvertedItems(inputs, undo))


def _denormalize(preprocess: Preprocess) -> Denormalize | None:
    """What undoes the normalization of a preprocessing; None where it has none."""
    if preprocess.mean is None:
        return None
    mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (preprocess.mean, preprocess.std))
    return Denormalize(mean, std)


def _prepare_data(
    table: dict[str, Any],
    data: Any,
    val: Any,
    test: Any,
    labels: Any,
    domains: Any,
    preprocess: Preprocess | None,
    convert: Callable[[np.ndarray], np.ndarray] | None,
    on_note: Callable[[str], None],
) -> tuple[Samples, ForeignLoader | None]:
    """The samples with a split; what can be said about them goes into the tables of the recipe."""
    shares = {name: given for name, given in (("val", val), ("test", test)) if isinstance(given, float | int)}
    table["data"] |= shares
    loader: DataLoader | None = None
    if isinstance(data, str | PathLike):
        columns = {"source": str(data), "label": labels, "domain": domains}
        table["data"] |= {key: value for key, value in columns.items() if value is not None}
        table["auto"] += [] if preprocess is not None else ["data.size", "data.resize", "data.channels"]
        recipe = parse_recipe(_drop_none({key: table[key] for key in ("seed", "auto", "data")}))
        samples = prepare_samples(recipe, split=(val is None and test is None) or bool(shares))
    else:
        samples, loader = read_data(data, labels, domains, on_note)
        samples = apply_preprocess(samples, preprocess, convert)
        table["data"]["source"] = samples.source_name or "python:Samples"
    parts = {"val": val, "test": test}
    parts = {name: given for name, given in parts.items() if given is not None and name not in shares}
    if parts:
        found = {"train": samples}
        for name, given in parts.items():
            if isinstance(given, str | PathLike):
                raise InputError(
                    f"{name}= must be data like data=, or a share of the identities: got the path {given!r}"
                )
            label, domain = (value if isinstance(value, str) else None for value in (labels, domains))
            found[name] = apply_preprocess(read_data(given, label, domain, on_note)[0], preprocess, convert)
        samples = join_splits(found)
        if "val" not in parts and table["train"].get("select") is not None:
            shares.setdefault("val", VALIDATION_SHARE)
        for name, share in shares.items():
            samples, count = hold_out_identities(samples, name, share, table["seed"])
            if count:
                on_note(f"{count} training identities are kept apart, {name}={share:g} of them")
    elif loader is not None:
        samples = replace(samples, split=np.zeros(len(samples), np.int8))
        on_note(
            "all items of the DataLoader are trained on: give test= (and val=) to have something to measure the run on"
        )
    elif (samples.split == NO_SPLIT).all():
        samples = identity_disjoint_split(samples, **{"seed": table["seed"], **shares})
        counts = [f"{len(np.unique(samples.part(name).labels))} to {verb}" for name, verb in _PARTS]
        on_note(f"the data have no split and were divided by identity: {', '.join(counts)} (val= and test= change it)")
    if len(samples.part("train")) == 0:
        raise DataError("there are no training samples: the split of the data says so")
    if loader is None:
        return samples, None
    on_note("the DataLoader keeps its own order: a resumed run will not be bit-identical")
    first = loader.dataset[0]
    column = find_input_column(first, labels, domains) if isinstance(first, Mapping) else None
    names = (column, labels if isinstance(labels, str) else None)
    undo = None if preprocess is None else _denormalize(preprocess)
    return samples, ForeignLoader(loader, samples.label, names, convert=undo)


_PARTS = (("train", "train on"), ("val", "validate on"), ("test", "test on"))


def _prepare_model(
    table: dict[str, Any],
    model: Any,
    samples: Samples,
    preprocess: Preprocess | None,
    seed: int,
    neck: Mapping[str, Any],
) -> EmbeddingModel:
    """The network, tried on a few items; what it is goes into the recipe."""
    check_neck(**neck)
    described = model.spec if isinstance(model, Embedder) else model
    if isinstance(described, EmbedderSpec) and neck["neck"] not in ("none", described.neck):
        raise InputError(f"neck= is for a network without a description: say it in EmbedderSpec(neck={neck['neck']!r})")
    part = samples.part("train")
    example = to_input_tensor(part.read(evenly_spaced(len(part), EXAMPLES)), "cpu")
    torch.manual_seed(seed)
    if isinstance(model, str):
        model = EmbedderSpec(backbone=model, **neck)
    if isinstance(model, EmbedderSpec):
        model = build_model(parse_recipe({"seed": seed, "model": model.to_table()}), samples)
    if isinstance(model, Embedder):
        table["model"] = model.spec.to_table()
        return model
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model must be an nn.Module, the name of a network or an EmbedderSpec, got {type(model).__name__}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("the model has no parameters that can be trained: mettle.adopt makes a run of it as it is")
    table["model"] = {"backbone": describe_object(model)} | (dict(neck) if neck["neck"] != "none" else {})
    if preprocess is None and part.inputs.kind == "image":  # images as they are: a run of them takes files too
        preprocess = Preprocess(size=tuple(example.shape[2:]), channels=example.shape[1])  # type: ignore[arg-type]
    return ModuleEmbedder.from_example(model, example, preprocess=preprocess, **neck)


def _prepare_loss(table: dict[str, Any], loss: Any, samples: Samples) -> Any:
    """The loss to train with, None where a table of the recipe describes it."""
    if isinstance(loss, str | Mapping):
        table["loss"] = {"kind": loss} if isinstance(loss, str) else dict(loss)
        return None
    if isinstance(loss, tuple) and len(loss) == 2:
        loss = MinedLoss(*loss)
    if not callable(loss):
        raise InputError(f"loss must be callable on (embeddings, labels), got {type(loss).__name__}")
    if isinstance(loss, type):
        raise InputError(f"loss must be an object, got the class {loss.__name__}: call it, {loss.__name__}(...)")
    classes = len(np.unique(samples.part("train").labels))
    known = getattr(loss, "num_classes", None)
    if isinstance(known, int) and known < classes:
        raise InputError(f"the loss has vectors for {known} classes, the training split has {classes}: give it so many")
    table["loss"] = {"kind": describe_object(loss)}
    if isinstance(loss, MinedLoss):
        table["loss"] = {"kind": describe_object(loss.loss), "miner": describe_object(loss.miner)}
    return loss


def _try_loss(loss: Any, dim: int, classes: int, batch: Mapping[str, Any]) -> None:
    """Refuse a loss that cannot be trained with, by one batch of random embeddings; the loss itself stays as it was."""
    each = int(batch.get("samples", 4))
    labels = torch.arange(min(classes, int(batch.get("classes", 32)))).repeat_interleave(each)
    try:
        trial = copy.deepcopy(loss)
    except Exception:  # it holds a lock, a file, a connection: the first step will tell
        return
    with preserve_generators():
        place = find_device(trial) if isinstance(trial, nn.Module) else "cpu"
        z = torch.randn(len(labels), dim, generator=torch.Generator().manual_seed(0)).to(place).requires_grad_()
        options: dict[str, Any] = {"progress": 0.0} if getattr(trial, "takes_progress", False) else {}
        options |= {"after": torch.randn_like(z)} if takes_after(trial) else {}
        try:
            value = trial(z, labels.to(place), **options)
        except MettleError:
            raise
        except Exception as problem:  # whatever somebody else's loss raises
            said = (str(problem).strip() or type(problem).__name__).splitlines()[0][:200]
            raise InputError(f"the loss fails on embeddings of shape {tuple(z.shape)} and labels: {said}") from problem
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the loss must give one number as a tensor, got {got}: take its mean")
    if not value.requires_grad:
        raise InputError("the loss has no gradient: compute it from the embeddings, without detach() or no_grad()")


def _prepare_augment(augment: Any) -> dict[str, Any]:
    """What changes training inputs: one of ours, or a transform of somebody else."""
    if augment is None or isinstance(augment, str):
        return {}
    if isinstance(augment, Augment):
        return {"augment": augment}
    if not callable(augment):
        raise InputError(f"augment must be a preset, an Augment or a callable, got {type(augment).__name__}")
    if type(augment).__module__.partition(".")[0] == "albumentations":
        return {"transform": as_array_transform(augment)}  # type: ignore[arg-type]
    return {"transform": augment}


def _batch_table(batch: Any, augment: Any) -> dict[str, Any]:
    own = {"augment": augment if isinstance(augment, str) else "none"}
    if batch is None:
        return own | {"classes": 32, "samples": 4}
    if isinstance(batch, Mapping):
        return own | dict(batch)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return own | {"classes": int(batch[0]), "samples": int(batch[1])}
    if isinstance(batch, int) and batch >= 4:
        samples = 4 if batch % 4 == 0 and batch >= 8 else 2
        return own | {"classes": batch // samples, "samples": samples}
    raise InputError(
        f"batch must be (classes, samples of each), a number of samples from 4 up or a table, got {batch!r}"
    )


def _optimizer_table(optimizer: str | Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer by its name, in whatever case."""
    table = {"kind": optimizer} if isinstance(optimizer, str) else dict(optimizer)
    known = {name.lower(): name for name in vars(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    kind = str(table.get("kind", "AdamW"))
    if kind.lower() not in known:
        raise InputError(f"optimizer: torch.optim has no {kind!r}{nearest(kind, known.values())}")
    return table | {"kind": known[kind.lower()]}


def _schedule_table(schedule: str | Mapping[str, Any]) -> dict[str, Any]:
    table = {"kind": schedule} if isinstance(schedule, str) else dict(schedule)
    known = {name.lower(): name for name in (*SCHEDULES, *TORCH_SCHEDULES)}
    kind = str(table.get("kind", ""))
    if kind.lower() not in known:
        raise InputError(f"schedule: there is no {kind!r}{nearest(kind, known.values())}")
    return table | {"kind": known[kind.lower()]}


def _data_table(preprocess: Preprocess | None) -> dict[str, Any]:
    if preprocess is None:
        return {}
    way = preprocess.to_json()
    return {key: way[key] for key in ("size", "resize", "crop", "interpolation", "channels") if key in way}


def _describe_inputs(run: RunFolder) -> tuple[str, ...]:
    """What a run cannot do because of how it was given, in words."""
    contract, found = run.contract(), ()
    if contract["input"]["kind"] == "tensor":
        found = ("the run embeds tensors only: give preprocess= so that galleries and the service take image files",)
    why = contract["model"].get("graph")
    if why:
        found += (f"the run can only be opened together with its network, because {why}",)
    return found


def _as_folder(folder: Path | str) -> Path:
    path = Path(folder)
    if path.exists():
        raise RunError(f"{path} is there already: choose another folder")
    return path


def _drop_none(value: Any) -> Any:
    """A recipe has no null: what is None is left to its default."""
    if isinstance(value, Mapping):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    return value
