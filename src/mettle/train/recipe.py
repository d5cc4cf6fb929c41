"""A recipe: the typed, frozen description of a run. Written in TOML, overridden by ``--set table.key=value``.

Unknown keys and wrong types are errors that name the nearest known key; the run folder keeps the recipe that
rebuilds the run.
"""

import math
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from torch import nn

from mettle import losses
from mettle.errors import InputError, RecipeError, nearest
from mettle.losses import PairwiseLoss
from mettle.model import EmbedderSpec
from mettle.model.neck import check_neck
from mettle.model.pretrained import is_timm_folder
from mettle.train.auto_settings import AUTO_KEYS
from mettle.train.factory import (
    INNER,
    Foreign,
    build,
    call_factory,
    constructor_arguments,
    import_object,
    is_import_path,
)
from mettle.train.lora import LoraSettings
from mettle.train.methods.base import (
    LEAVE_SPARSE,
    NO_NECK,
    check_queue,
    takes_after,
    uses_second_encoder,
    wants_sparse_grad,
)
from mettle.train.methods.distillation import NO_TEACHER, DistillationSettings
from mettle.train.methods.hardness_aware import Synthesis
from mettle.train.methods.past_embeddings import QueueSettings
from mettle.train.methods.tuple_layouts import tuple_layout
from mettle.train.methods.two_encoder import default_biased_loss
from mettle.train.optim import build_optimizer, build_shape
from mettle.train.recipe_files import (
    builtin_recipes,
    find_recipe,
    format_call,
    merge_tables,
    read_recipe_chain,
    read_recipe_file,
    recipe_title,
)

SAME_CLASS = "same-class"  # instead of a path: pairs or triplets made from the labels
SEEDS = 2**62  # so that a seed and the few that are counted up from it stay whole numbers of 64 bits
SIZES = {"num_classes": 3, "dim": 8}  # with which a loss can be built before the data and the model are known


class Section(BaseModel):
    """A table of a recipe: frozen, no key that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class DataConfig(Section):
    """Where samples come from and how they are split."""

    source: str = "glyphs"
    size: int | list[int] | None = None  # side in pixels, or [height, width]; None: one that fits, see auto_settings
    resize: Literal["crop", "pad", "stretch"] | None = None  # how images get that size; None: crop from the center
    channels: Literal[1, 3] | None = None
    crop: float | None = Field(None, gt=0, le=1)  # share of the sides that a center crop keeps; None: all that fits
    interpolation: Literal["bilinear", "bicubic", "nearest", "lanczos", "box"] | None = None  # None: bilinear
    label: str | None = None  # column names, where the source has columns
    domain: str | None = None
    groups: list[str] | None = None
    features: list[str] | None = None  # of a table: which columns are inputs
    categories: list[str] | None = None  # of those, which hold names even where they look like numbers
    missing: Literal["fail", "mean"] | None = None  # what an empty cell is
    text: Literal["onehot", "code"] | None = None  # how names become inputs
    image: str | None = None  # the column of image files, where it has an unusual name
    policy: Literal["fail", "skip"] = "fail"  # unreadable images
    memory: float = Field(2.0, ge=0)  # GiB that decoded images may take; more of them are decoded when they are read
    val: float = Field(0.1, ge=0, lt=1)  # shares of the identities, for a source without a split
    test: float = Field(0.3, gt=0, lt=1)
    split_seed: int | None = Field(None, ge=0)  # of that division; None: seed. Runs of several seeds share one
    unseen: list[str] = []  # domains to keep out of training and to probe with
    pairs: str | None = None  # a table of pairs of the source, or "same-class" (method similarity)
    triplets: str | None = None  # a table of triplets instead

    @field_validator("size", mode="plain")
    @classmethod
    def _sides(cls, value: Any) -> int | list[int] | None:
        """By hand: of a value that may be of two kinds a library reports two problems."""
        sides = list(value) if isinstance(value, list | tuple) else [value, value]
        if value is not None and (len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides)):
            raise ValueError("a side in pixels is wanted, or [height, width]")
        return sides if isinstance(value, list | tuple) else value


class BatchConfig(Section):
    """What one step sees."""

    classes: int = Field(64, ge=2)
    samples: int = Field(4, ge=2)
    size: int | None = Field(None, ge=2)  # of batches of samples, pairs or triplets; None: classes x samples
    views: int = Field(1, ge=1, le=8)
    augment: str = "mild"
    workers: int = Field(0, ge=0)  # processes that decode; 0 when the images fit into memory
    cached: int = Field(0, ge=0)  # samples of a micro-batch, in which networks run by gradient caching; 0: all at once
    queue: int = Field(0, ge=0)  # past embeddings that a batch is compared with too; 0 for none
    queue_encoder: Literal["same", "momentum"] = "same"  # whose: of the network, or of a moving average of it
    queue_momentum: float = Field(0.999, ge=0, lt=1)  # how much of that average stays in a step
    queue_start: float = Field(0.0, ge=0, lt=1)  # share of the steps before it is used; it is filled from the first

    def queue_settings(self) -> QueueSettings | None:
        """The queue of past embeddings, None where there is none."""
        if not self.queue:
            return None
        return QueueSettings(self.queue, self.queue_encoder, self.queue_momentum, self.queue_start)


class TrainConfig(Section):
    """How parameters move."""

    method: Literal["supervised", "similarity", "two-encoder", "hardness-aware", "jtt"] = "supervised"
    steps: int = Field(400, ge=1)
    epochs: int | None = Field(None, ge=1)  # instead of steps, which then follow from the data
    rate: float = Field(2e-3, gt=0)  # highest learning rate
    schedule: dict[str, Any] = Field({"kind": "warmup-cosine"}, validate_default=True)  # its course, see optim
    warmup: float = Field(0.2, ge=0, lt=1)  # share of the steps in which it rises, and before the first collapse
    optimizer: dict[str, Any] = Field({"kind": "AdamW"}, validate_default=True)  # any class of torch.optim
    backbone_rate: float = Field(1.0, gt=0)  # times that, for the backbone: pretrained ones want less
    layer_decay: float = Field(1.0, gt=0, le=1)  # times that, for each layer of the backbone from its end on
    freeze: str | None = None  # "all" of the backbone, or its last layer that does not train
    freeze_epochs: int | None = Field(None, ge=1)  # for which it is frozen; None: as freeze_steps says
    freeze_steps: int | None = Field(None, ge=1)  # likewise in steps; None: for all of training
    lora: dict[str, Any] | None = None  # additions of low rank to a frozen backbone; a number is their rank
    loss_rate: float = Field(1.0, gt=0)  # times that, for parameters of the loss: class vectors are met more seldom
    class_vectors: Literal["means", "random"] = "means"  # where those start: class means of the untrained network
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(0.0, ge=0)  # largest gradient norm; 0 for no limit
    ema: float = Field(0.0, ge=0, lt=1)  # of the moving average of all weights, which is kept; 0 for none
    ema_start: float = Field(0.0, ge=0, lt=1)  # share of the steps before that average begins
    distill: float = Field(0.0, ge=0)  # times the distance to the similarities of that average; 0 for none
    distill_temperature: float = Field(0.1, gt=0)  # of both similarities
    compile: bool = False  # what networks compute in training, by torch.compile
    cuda_graph: bool = False  # whether like steps are recorded once, and replayed in one launch
    shard_classes: bool = False  # whether every rank holds the vectors of its own classes only, out of all
    sync_batchnorm: bool = True  # over ranks, where several train; else each normalizes its own rows
    accumulate: int = Field(1, ge=1)  # batches in a step; their gradients are averaged
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    select: str | None = None  # the metric on validation identities whose best step is kept; None: the last step is
    validate_every: int | None = Field(None, ge=1)  # steps; None: every epoch where select is set, else never
    patience: int | None = Field(None, ge=1)  # validations without a better value that end the run
    checkpoint_every: int = Field(100, ge=1)
    log_every: int = Field(10, ge=1)
    collapse_spread: float = Field(0.01, ge=0, lt=1)  # stop below this share of the first batch's 1 - mean cosine
    collapse_gap: float = Field(0.02, ge=0, lt=1)  # stop where positives are closer than negatives by less; 0 never
    collapse_patience: int = Field(5, ge=1)  # log lines after the warm-up that must show it

    def distillation_settings(self) -> DistillationSettings | None:
        """How much is learned from the moving average, None for nothing."""
        return DistillationSettings(self.distill, self.distill_temperature) if self.distill else None

    @field_validator("lora", mode="before")
    @classmethod
    def _rank(cls, value: Any) -> Any:
        """A rank alone is a table of that rank."""
        return {"rank": value} if type(value) is int else value

    @field_validator("schedule", "optimizer", mode="before")
    @classmethod
    def _named(cls, value: Any, info: ValidationInfo) -> Any:
        """A name alone is a table of that kind; a table without a kind is of the usual one."""
        usual = {"schedule": "warmup-cosine", "optimizer": "AdamW"}[str(info.field_name)]
        return (
            {"kind": value} if isinstance(value, str) else {"kind": usual} | value if isinstance(value, dict) else value
        )


class BiasedConfig(Section):
    """The second encoder of a loss with a ``Relative`` difficulty (method two-encoder)."""

    loss: dict[str, Any] | None = None  # None: SelfTriplet with the prior of the first encoder's loss
    rate: float = Field(1.0, gt=0)  # times train.rate
    weights: Literal["pairs", "mean", "shuffled"] = "pairs"  # the last two are controls


class JTTConfig(Section):
    """The two stages of method jtt."""

    first: float = Field(0.25, gt=0, le=1)  # steps of the first classifier, as a share of train.steps
    copies: int = Field(5, ge=0)  # more of every sample that it gets wrong; 0 = an ordinary classifier, one stage


class EvaluateConfig(Section):
    """What is measured afterwards."""

    fars: list[Annotated[float, Field(gt=0, lt=1)]] = Field([1e-1, 1e-2, 1e-3], min_length=1)
    ks: list[Annotated[int, Field(ge=1)]] = Field([1, 2, 4, 8], min_length=1)
    baselines: bool = True  # also raw inputs and the untrained network
    spurious: str | None = None  # a column that a model may fall for: background, color, device
    question: Literal["auto", "closed-set", "retrieval", "verification"] = (
        "auto"  # what leads, see evaluate.run.question
    )
    probe: bool | None = None  # probes of frozen features; None: of closed sets, of two-encoder and jtt, with spurious
    probe_samples: int = Field(5000, ge=10)  # of the training split, that probes are fitted on at most

    @field_validator("fars", "ks", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        """One number is a list of one."""
        return [value] if type(value) in (int, float) else value


class Range(Section):
    """The values that a search may give a key: numbers from ``low`` to ``high``, or a list of ``choices``.

    Whole numbers are those of a range whose ``low``, ``high`` and ``step`` are whole.
    """

    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = None  # between the values; None: any number
    log: bool = False  # drawn evenly on a logarithmic scale
    choices: list[Any] | None = None  # values of any kind, tables included

    @field_validator("low", "high", "step", mode="plain")
    @classmethod
    def _number(cls, value: Any) -> int | float | None:
        if value is not None and type(value) not in (int, float):
            raise ValueError("a number is wanted")
        return value

    @model_validator(mode="after")
    def _complete(self) -> "Range":
        if self.choices is not None:
            if (self.low, self.high, self.step, self.log) != (None, None, None, False):
                raise ValueError("either choices or low and high are wanted, not both")
            if not self.choices or any(value in self.choices[:k] for k, value in enumerate(self.choices)):
                raise ValueError("choices must be a list of different values")
            return self
        if self.low is None or self.high is None:
            raise ValueError("low and high are wanted, or choices")
        if not self.low < self.high:
            raise ValueError("low must be below high")
        if self.log and self.low <= 0:
            raise ValueError("log = true needs low above 0")
        if self.step is not None:
            count = (self.high - self.low) / self.step if self.step > 0 else 0.0
            if not self.step > 0 or abs(count - round(count)) > 1e-9 * count:
                raise ValueError("step must be above 0 and lead from low to high in whole steps")
            if self.log and not (self.is_whole and self.step == 1):
                raise ValueError("log = true takes no step but the 1 of whole numbers")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return all(type(value) is int for value in (self.low, self.high, self.step))

    @property
    def ends(self) -> tuple[int | float, int | float]:
        """The lowest and the highest value of a range of numbers."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    def examples(self) -> list[Any]:
        """All choices; or both ends and, where any number will do, one between them."""
        if self.choices is not None:
            return list(self.choices)
        low, high = self.ends
        return [low, high] if self.step is not None else [low, low + 0.382 * (high - low), high]

    def position(self, value: Any) -> float | None:
        """Where a value lies from the lower end (0) to the upper end (1); None among choices that have no order."""
        if self.choices is not None:
            numbers = [c for c in self.choices if type(c) in (int, float)]
            if len(numbers) < max(2, len(self.choices)) or numbers not in (sorted(numbers), sorted(numbers)[::-1]):
                return None
            return sorted(numbers).index(value) / (len(numbers) - 1)
        low, high = self.ends
        return math.log(value / low) / math.log(high / low) if self.log else (value - low) / (high - low)


class TuneConfig(Section):
    """A search over values of other keys, see :mod:`mettle.tuning`."""

    ranges: dict[str, Range] = {}
    metric: str = "eer"  # on the validation identities, or on those of a fold
    trials: int = Field(20, ge=1)
    method: Literal["random", "halving", "tpe"] = "random"
    folds: int = Field(0, ge=0)  # of the training identities to validate on; 0: the validation identities
    seconds: float | None = Field(None, gt=0)  # after which a call begins no other trial; None: no limit

    @field_validator("ranges", mode="before")
    @classmethod
    def _by_dotted_key(cls, value: Any) -> Any:
        """Keys may be written with quotes, ``"train.rate" = {...}``, or without, which TOML reads as tables."""
        return _flatten_ranges(value) if isinstance(value, Mapping) else value

    @field_validator("folds")
    @classmethod
    def _several(cls, value: int) -> int:
        if value == 1:
            raise ValueError("0 is wanted, or at least 2 folds")
        return value


def _flatten_ranges(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Ranges by the whole name of their key."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        is_table = isinstance(value, Mapping) and value and not set(value) & set(Range.model_fields)
        if is_table and all(isinstance(inner, Mapping) for inner in value.values()):
            found |= _flatten_ranges(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


class Recipe(Section):
    """Everything that decides a run."""

    seed: int = 0
    auto: list[str] = Field(default_factory=list)  # keys that may be chosen from the data, see auto_settings
    data: DataConfig = Field(default_factory=DataConfig)  # type: ignore[arg-type]
    batch: BatchConfig = Field(default_factory=BatchConfig)  # type: ignore[arg-type]
    model: dict[str, Any] = Field(default_factory=dict)
    loss: dict[str, Any] = Field(default_factory=lambda: {"kind": "SupCon"})
    biased: BiasedConfig = Field(default_factory=BiasedConfig)  # type: ignore[arg-type]
    synthesis: dict[str, Any] = Field(default_factory=dict)  # of method hardness-aware
    jtt: JTTConfig = Field(default_factory=JTTConfig)  # type: ignore[arg-type]
    train: TrainConfig = Field(default_factory=TrainConfig)  # type: ignore[arg-type]
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)  # type: ignore[arg-type]
    tune: TuneConfig = Field(default_factory=TuneConfig)  # type: ignore[arg-type]

    @field_validator("auto")
    @classmethod
    def _known_keys(cls, value: list[str]) -> list[str]:
        for key in value:
            if key not in AUTO_KEYS:
                raise ValueError(f"{key!r} cannot be chosen from the data{nearest(key, AUTO_KEYS)}")
        return value

    @field_validator("seed")
    @classmethod
    def _in_range(cls, value: int) -> int:
        if not 0 <= value < SEEDS:
            raise ValueError("a whole number from 0 to below 2^62 is wanted")
        return value

    def with_values(self, values: Mapping[str, Any]) -> "Recipe":
        """The recipe with other values of these keys, such as ``batch.classes``, checked as a whole.

        Where one of them is another ``kind`` of loss or difficulty, keys that it does not take are left out.
        """
        content = self.model_dump(mode="json")
        _leave_out_keys(content, values)
        for key, value in values.items():
            _set_key(content, key, value)
        return parse_recipe(content)

    def value(self, key: str) -> Any:
        """The value of a key such as ``batch.classes``; None where the recipe does not say."""
        table, _, name = key.partition(".")
        found = getattr(self, table)
        return found.get(name) if isinstance(found, Mapping) else getattr(found, name)

    @property
    def foreign_model(self) -> str | None:
        """The import path of a network of somebody else; None where `spec` describes one of ours."""
        backbone = self.model.get("backbone")
        return backbone if is_import_path(backbone) and not is_timm_folder(backbone) else None

    @property
    def neck(self) -> dict[str, Any]:
        """What is put behind a network of either kind, and which embedding is then used: for `ModuleEmbedder`."""
        return {"neck": self.model.get("neck", "none"), "embedding": self.model.get("embedding", "before")}

    def spec(self) -> EmbedderSpec:
        """The model's description."""
        if self.foreign_model is not None:
            raise RecipeError(f"model.backbone = {self.foreign_model!r} is a network of its own, without a description")
        return build(EmbedderSpec, self.model, "model")

    def build_foreign_model(self, shape: Sequence[int], allow_import: Sequence[str]) -> nn.Module:
        """The network that ``model.backbone`` names: other keys of the table are arguments of its class or factory.

        Args:
            shape: of one input, for factories that take it.
            allow_import: packages that may be imported.
        """
        assert self.foreign_model is not None
        factory = import_object(self.foreign_model, allow_import, "model.backbone")
        table = {key: value for key, value in self.model.items() if key not in ("backbone", "neck", "embedding")}
        found = call_factory(factory, table, "model", {"shape": tuple(shape)})
        if not isinstance(found, nn.Module):
            raise RecipeError(f"model.backbone = {self.foreign_model!r} gives no nn.Module: {type(found).__name__}")
        return found

    @cached_property
    def loss_template(self) -> Any:
        """The loss, to ask what it is and what it needs; the one to train with is built for the data."""
        return self.build_loss()

    @property
    def loss_keys(self) -> Collection[str] | None:
        """What the table of the loss may hold; None for a loss of somebody else."""
        kind = self.loss["kind"]
        return None if is_import_path(kind) else constructor_arguments(getattr(losses, kind))

    def build_loss(
        self, num_classes: int = 3, dim: int | None = None, allow_import: Sequence[str] | None = None
    ) -> Any:
        """The loss, with its difficulty; class-vector losses are told how many classes the training data have.

        Args:
            num_classes: of the training data.
            dim: length of the embeddings; by default what the recipe says.
            allow_import: packages that a loss of somebody else may be imported from; None imports none, and gives a
                `Foreign` in its place.
        """
        given = {"num_classes": num_classes, "dim": self._dim if dim is None else dim}
        if is_import_path(self.loss.get("kind")) and allow_import is not None:
            factory = import_object(self.loss["kind"], allow_import, "loss.kind")
            found = call_factory(factory, {k: v for k, v in self.loss.items() if k != "kind"}, "loss", given)
            if not callable(found):
                raise RecipeError(f"loss.kind = {self.loss['kind']!r} gives nothing to call: {type(found).__name__}")
            return found
        return build(losses, self.loss, "loss", given)

    def build_sharded_loss(self, num_classes: int, dim: int) -> Any:
        """The loss, each rank with the vectors of its own classes; every rank has to call it."""
        options = {key: value for key, value in self.loss.items() if key != "kind"}
        return losses.shard_classes(getattr(losses, self.loss["kind"]), num_classes, dim, **options)

    @property
    def _dim(self) -> int:
        """The length of embeddings, or any one where only a foreign network knows it."""
        return SIZES["dim"] if self.foreign_model is not None else self.spec().dim

    def build_biased_loss(self) -> Any:
        """The loss of the second encoder."""
        if self.biased.loss is None:
            return default_biased_loss(self.loss_template)
        return build(losses, self.biased.loss, "biased.loss", {"dim": self._dim})

    def build_synthesis(self) -> Synthesis:
        """How synthetic negatives are made."""
        return build(Synthesis, self.synthesis, "synthesis")

    def build_lora(self) -> LoraSettings | None:
        """Additions of low rank, None where there are none."""
        return None if self.train.lora is None else build(LoraSettings, self.train.lora, "train.lora")

    def title(self) -> str:
        """One line: what is trained on what."""
        return recipe_title(self.model_dump())

    def tuple_kind(self) -> str:
        """What the loss is over: ``pairs`` or ``triplets`` of a table; empty where labels say it."""
        return getattr(getattr(losses, str(self.loss.get("kind")), None), "takes", "")

    def to_toml(self) -> str:
        """The recipe as text that reads back to itself, without the tables of methods that it does not use."""
        used = {
            "biased": uses_second_encoder(self.loss_template),
            "jtt": self.train.method == "jtt",
            "synthesis": self.synthesis,
            "tune": self.tune.ranges,
        }
        unused = {table for table, is_used in used.items() if not is_used}
        return tomli_w.dumps(_drop_missing(self.model_dump(mode="json", exclude=unused)))


def load(
    source: str | Path,
    overrides: Iterable[str] = (),
    *,
    on_note: Callable[[str], None] = lambda note: None,
    **tables: Mapping[str, Any],
) -> Recipe:
    """A shipped recipe by name or a file by path, with ``table.key=value`` overrides applied.

    An override of a ``kind`` (``loss.kind=ArcFace``) leaves out the keys of the recipe's own kind that the new one does
    not take; ``on_note`` gets a note about each.
    """
    shipped = set(builtin_recipes().values())
    chain = read_recipe_chain(find_recipe(source))
    for part, _ in chain:
        _check_tables(part)  # before anything is put into them
    content = merge_tables(*[part for part, _ in reversed(chain)])
    for key, table in tables.items():
        content.setdefault(key, {}).update(table)
    given = dict(map(_read_override, overrides))
    for note in _leave_out_keys(content, given):
        on_note(note)
    for key, value in given.items():
        _set_key(content, key, value)
    written = {*given, *(f"{key}.{name}" for key, table in tables.items() for name in table)}
    for part, path in chain:  # in files of one's own, every key that is there was meant
        if path not in shipped:
            written |= {f"{key}.{name}" for key, table in part.items() if isinstance(table, Mapping) for name in table}
    if all(path in shipped for part, path in chain if "auto" in part):
        content["auto"] = [key for key in content.get("auto", AUTO_KEYS) if key not in written]
    recipe = parse_recipe(content)
    check_overrides_used(recipe, given)
    return recipe


def as_recipe(given: Any) -> Recipe:
    """A recipe as callers give it: itself, the name of a shipped one, or the path of a file."""
    if isinstance(given, Recipe):
        return given
    if isinstance(given, str | Path):
        return load(given)
    wanted = "a Recipe, the name of a shipped one or the path of a TOML file"
    raise InputError(f"recipe= must be {wanted}, got {type(given).__name__}; mettle.train.load reads one with changes")


def load_stored_recipe(path: Path) -> Recipe:
    """The recipe of a run that is there."""
    if not path.is_file():
        raise RecipeError(f"no recipe {str(path)!r}: the folder of its run is damaged")
    return parse_recipe(read_recipe_file(path))


def parse_recipe(content: Mapping[str, Any]) -> Recipe:
    """Check the tables of a recipe, those of the model and the loss included."""
    check_finite(content)
    _check_tables(content)
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(_describe_error(error)) from None
    check_compatible(recipe)
    return recipe


def _check_tables(content: Mapping[str, Any]) -> None:
    """Refuse a plain value where a table is wanted."""
    for key in Recipe.model_fields:
        if key not in ("seed", "auto") and not isinstance(content.get(key, {}), Mapping):
            wanted = f"a table is wanted, [{key}] with its keys below it or --set {key}.<key>=..."
            raise RecipeError(f"recipe key {key}: {wanted}, got {content[key]!r}")


def _set_key(content: dict[str, Any], key: str, value: Any) -> None:
    """Set one key, such as ``loss.difficulty.alpha``."""
    *tables, last = key.split(".")
    place = content
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise RecipeError(f"recipe key {key}: {table!r} is a value, not a table")
    place[last] = value


def _read_override(override: str) -> tuple[str, Any]:
    """The key and the value, which is read as TOML, and as plain text where it is no TOML."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise RecipeError(f"--set takes table.key=value, got {override!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()


def _leave_out_keys(content: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Take keys of the recipe's own loss or difficulty out of it, where an override names another kind.

    What stays are keys that the new kind takes with these values, so that a temperature or a difficulty is kept where
    it can be. Keys that are overridden themselves are not touched: those that do not apply are errors.
    """
    notes = []
    for key, kind in given.items():
        *tables, last = key.split(".")
        if last != "kind" or tables[:1] not in (["loss"], ["biased"]):
            continue
        place: Any = content
        for table in tables:
            place = place.get(table) if isinstance(place, Mapping) else None
        module = INNER.get(tables[-1], losses)
        if not isinstance(place, dict) or place.get("kind") == kind or kind not in module.__all__:
            continue
        where = ".".join(tables)
        for name in [name for name in place if name != "kind" and f"{where}.{name}" not in given]:
            if not _takes_key(module, str(kind), name, place[name], where):
                value = place.pop(name)
                text = format_call(value) if isinstance(value, Mapping) else repr(value)
                notes.append(f"{where}.{name} = {text} of the recipe does not apply to {kind} and was left out")
    return notes


def is_applicable(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a key means anything where these are the kinds of losses and difficulties: ``loss.kind = ArcFace``."""
    parts = key.split(".")
    for k, name in enumerate(parts[1:], 1):
        kind, module = str(values.get(".".join([*parts[:k], "kind"]))), INNER.get(parts[k - 1], losses)
        if name != "kind" and kind in module.__all__ and name not in constructor_arguments(getattr(module, kind)):
            return False
    return True


def _takes_key(module: ModuleType, kind: str, name: str, value: Any, where: str) -> bool:
    """Whether a loss or difficulty has such an argument and takes this value for it, everything else at its default."""
    taken = constructor_arguments(getattr(module, kind))
    if name not in taken:
        return False
    needed = [p for p in taken.values() if p.default is p.empty and p.name not in (*SIZES, name)]
    if needed:  # it cannot be tried by itself; what is wrong with it is told when all keys are there
        return True
    try:
        build(module, {"kind": kind, name: value}, where, SIZES)
    except RecipeError:
        return False
    return True


def _describe_error(error: ValidationError) -> str:
    """The first problem, in one line, with the nearest known key where a key is unknown."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        table: Any = Recipe
        for part in first["loc"][:-1]:  # a field, or a key of a dict of tables
            table = table.model_fields[str(part)].annotation if hasattr(table, "model_fields") else get_args(table)[1]
        return f"unknown recipe key {key!r}{nearest(str(first['loc'][-1]), table.model_fields)}"
    problem = first["msg"].lower().removeprefix("value error, ")
    return f"recipe key {key}: {problem}, got {first['input']!r}"


def _drop_missing(value: Any) -> Any:
    """TOML has no null: leave such keys out, they are the defaults."""
    if isinstance(value, dict):
        return {key: _drop_missing(item) for key, item in value.items() if item is not None}
    return value


BY_SAMPLE = ("similarity", "two-encoder", "jtt")  # methods whose batches are samples, pairs or triplets, not classes


def check_compatible(recipe: Recipe) -> None:
    """Refuse a recipe whose loss, method and data do not go together."""
    _check_method(recipe)
    _check_networks(recipe)
    _check_queue(recipe)
    _check_distillation(recipe)
    _check_selection(recipe)
    _check_freezing(recipe)
    _check_sharding(recipe)


def _check_sharding(recipe: Recipe) -> None:
    """Class vectors are spread over ranks for one method, and for losses of samples against classes."""
    setup, kind = recipe.train, recipe.loss.get("kind")
    if not setup.shard_classes:
        return
    if setup.method != "supervised":
        raise RecipeError(f"train.shard_classes needs train.method = 'supervised', got {setup.method!r}: leave it out")
    if setup.precision == "float16":
        raise RecipeError("train.shard_classes does not go with float16, whose scale ranks share: set bfloat16")
    if (name := setup.optimizer["kind"]) in ("Adafactor", "Muon"):
        raise RecipeError(
            f"train.shard_classes does not go with {name}, which looks at all rows of a matrix: set AdamW or SGD"
        )
    try:
        losses.check_shardable(getattr(losses, str(kind), None), recipe.loss)
    except InputError as error:
        raise RecipeError(f"train.shard_classes with {kind}: {error}") from None


def _check_method(recipe: Recipe) -> None:
    """A loss over pairs or triplets, the method that feeds it and the table it needs come together or not at all."""
    kind, takes, data = recipe.loss.get("kind"), recipe.tuple_kind(), recipe.data
    given = [name for name in ("pairs", "triplets") if getattr(data, name) is not None]
    if recipe.train.method == "similarity":
        if not takes:
            known = [name for name in losses.__all__ if hasattr(getattr(losses, name), "takes")]
            raise RecipeError(f"train.method = 'similarity' needs a loss over pairs or triplets: {', '.join(known)}")
        if given != [takes]:
            came = " and ".join(f"data.{name}" for name in given) or "none"
            raise RecipeError(f"{kind} needs data.{takes} (a table, or 'same-class') and no other: got {came}")
        if recipe.batch.views > 1:
            raise RecipeError("batch.views does not apply to pairs and triplets: leave it out")
    elif takes:
        raise RecipeError(f"{kind} needs train.method = 'similarity', got {recipe.train.method!r}")
    elif given:
        raise RecipeError(f"data.{given[0]} needs train.method = 'similarity', got {recipe.train.method!r}")
    elif recipe.batch.size and recipe.train.method not in BY_SAMPLE:
        raise RecipeError(f"batch.size needs train.method = {' or '.join(map(repr, BY_SAMPLE))}: set batch.classes")


QUEUE_AVERAGE = "batch.queue_momentum"
QUEUE_METHODS = ("supervised", "two-encoder")  # whose losses are over the pairs of a batch


def _check_queue(recipe: Recipe) -> None:
    """A queue of past embeddings needs a method and a loss that compare pairs; a foreign loss is asked when built."""
    batch, method = recipe.batch, recipe.train.method
    if not batch.queue:
        return
    if method not in QUEUE_METHODS:
        raise RecipeError(
            f"batch.queue needs train.method = {' or '.join(map(repr, QUEUE_METHODS))}, got {method!r}: leave it out"
        )
    if not isinstance(recipe.loss_template, Foreign):
        try:
            check_queue(recipe.loss_template)
        except InputError as error:
            raise RecipeError(f"batch.queue = {batch.queue}: {error}") from None


def _check_distillation(recipe: Recipe) -> None:
    """The teacher of a distillation is the moving average of the one network that is trained."""
    setup = recipe.train
    if setup.distill and setup.method != "supervised":
        raise RecipeError(f"train.distill needs train.method = 'supervised', got {setup.method!r}: leave it out")
    if setup.distill and not setup.ema:
        raise RecipeError(f"train.distill = {setup.distill:g}: {NO_TEACHER}")


def _check_selection(recipe: Recipe) -> None:
    """Patience is with a metric."""
    if recipe.train.patience is not None and recipe.train.select is None:
        raise RecipeError("train.patience needs train.select, the metric that has to improve, such as 'eer'")


def _check_freezing(recipe: Recipe) -> None:
    """How long something is frozen is said once, and of something."""
    setup = recipe.train
    if setup.lora is not None:
        recipe.build_lora()
        if setup.freeze is not None:
            raise RecipeError("train.lora freezes the backbone by itself: leave train.freeze out")
    given = [key for key in ("freeze_epochs", "freeze_steps") if getattr(setup, key) is not None]
    if given and setup.freeze is None:
        raise RecipeError(
            f"train.{given[0]} needs train.freeze: 'all', or the last layer of the backbone that is frozen"
        )
    if len(given) == 2:
        raise RecipeError("train.freeze_epochs and train.freeze_steps say the same thing: leave one of them out")


def _check_networks(recipe: Recipe) -> None:
    """Losses that need a second network or tuples, and the methods that have them, come together or not at all."""
    method, loss, kind = recipe.train.method, recipe.loss_template, recipe.loss.get("kind")
    recipe.build_biased_loss()
    recipe.build_synthesis()
    build_shape(recipe.train.schedule, recipe.train.warmup)
    build_optimizer(recipe.train.optimizer, [{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    if uses_second_encoder(loss) and method != "two-encoder":
        raise RecipeError(f"a Relative difficulty needs train.method = 'two-encoder', got {method!r}")
    if method == "two-encoder":
        if recipe.batch.views != 2:
            raise RecipeError("train.method = 'two-encoder' compares two views: set batch.views = 2")
        if not isinstance(loss, PairwiseLoss):
            raise RecipeError(f"train.method = 'two-encoder' needs a loss over the pairs of a batch, got {kind}")
    if recipe.biased != type(recipe.biased).model_validate({}) and not uses_second_encoder(loss):
        raise RecipeError('[biased] needs a loss with difficulty = { kind = "Relative" } and method two-encoder')
    if recipe.synthesis and method != "hardness-aware":
        raise RecipeError(f"[synthesis] needs train.method = 'hardness-aware', got {method!r}")
    if method == "hardness-aware":
        try:
            if not is_import_path(kind):  # known when training begins
                tuple_layout(loss)
        except InputError as error:
            raise RecipeError(f"[loss] {error}") from None
        if recipe.batch.views != 1:
            raise RecipeError("batch.views does not apply to the tuples of hardness-aware training: leave it out")
    check_neck(**recipe.neck)
    has_neck = recipe.neck["neck"] != "none"
    if has_neck and method != "supervised":
        raise RecipeError(f"model.neck needs train.method = 'supervised', got {method!r}: leave it out")
    if not has_neck and takes_after(loss):
        raise RecipeError(f"[loss] {NO_NECK}")
    if wants_sparse_grad(loss):
        raise RecipeError(
            f"loss.sparse = true is for optimizers of your own, those of torch take dense gradients: {LEAVE_SPARSE}"
        )
    if kind == "NPair" and recipe.batch.samples != 2:
        raise RecipeError(f"NPair needs two samples of every class: set batch.samples = 2, not {recipe.batch.samples}")
    if method == "jtt" and not hasattr(loss, "predict"):
        raise RecipeError(f"train.method = 'jtt' needs a loss with one vector per class, such as Softmax, got {kind}")
    if recipe.jtt != type(recipe.jtt).model_validate({}) and method != "jtt":
        raise RecipeError(f"[jtt] needs train.method = 'jtt', got {method!r}")


def check_finite(content: Any, key: str = "") -> None:
    """TOML can write inf and nan; no key of a recipe means anything by them."""
    if isinstance(content, float) and not math.isfinite(content):
        raise RecipeError(f"recipe key {key}: a finite number is wanted, got {content}")
    inner = content.items() if isinstance(content, Mapping) else ()
    inner = enumerate(content) if isinstance(content, list | tuple) else inner
    for name, value in inner:
        check_finite(value, f"{key}.{name}" if key else str(name))


def check_overrides_used(recipe: Recipe, keys: Iterable[str]) -> None:
    """An override that decides nothing is a mistake; in a file the same keys are how a run folder writes defaults."""
    for key in keys:
        if key == "train.steps" and recipe.train.epochs is not None:
            raise RecipeError(f"{key} changes nothing here: train.epochs = {recipe.train.epochs} decides. Leave it out")
        for name, needed in (("ema_start", "ema"), ("distill_temperature", "distill")):
            if key == f"train.{name}" and not getattr(recipe.train, needed):
                raise RecipeError(f"{key} changes nothing here: it needs train.{needed}. Set that too, or leave it out")
        if key == "train.class_vectors" and not hasattr(recipe.loss_template, "start_from"):
            raise RecipeError(
                f"{key} changes nothing here: {recipe.loss.get('kind')} has no class vectors. Leave it out"
            )
        has_average = recipe.batch.queue > 0 and recipe.batch.queue_encoder == "momentum"
        if key.startswith("batch.queue_") and not (recipe.batch.queue and (has_average or key != QUEUE_AVERAGE)):
            needed = "batch.queue_encoder = 'momentum'" if recipe.batch.queue else "batch.queue, a number of embeddings"
            raise RecipeError(f"{key} changes nothing here: it needs {needed}. Set that too, or leave it out")
        by_size = recipe.train.method in BY_SAMPLE and recipe.batch.size is not None
        if key in ("batch.classes", "batch.samples") and by_size:
            raise RecipeError(
                f"{key} changes nothing here: batches of train.method = {recipe.train.method!r} have batch.size = "
                f"{recipe.batch.size} samples. Set batch.size instead"
            )
