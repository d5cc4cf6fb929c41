"""A recipe: the typed, frozen description of a run. Written in TOML, overridden by ``--set table.key=value``.

Unknown keys and wrong types are errors that name the nearest known key; the run folder keeps the recipe that
rebuilds the run.
"""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mettle import losses
from mettle.difficulty.synthesis import Synthesis
from mettle.errors import InputError, RecipeError, nearest
from mettle.losses.pairwise import Pairwise
from mettle.model import EmbedderSpec
from mettle.train.build import built, describe, written
from mettle.train.hardness_aware import layout
from mettle.train.method import compares

BY_SAMPLE = ("similarity", "two-encoder", "jtt")  # methods whose batches are samples, pairs or triplets, not classes
LARGEST = 1 << 20  # bytes of a recipe


class Table(BaseModel):
    """A table of a recipe: frozen, no key that is not listed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class Data(Table):
    """Where samples come from and how they are split."""

    source: str = "glyphs"
    size: int | None = Field(None, ge=1)  # side in pixels; None keeps the size of the source
    channels: Literal[1, 3] | None = None
    label: str | None = None  # column names, where the source has columns
    domain: str | None = None
    groups: list[str] | None = None
    features: list[str] | None = None  # of a table: which columns are inputs
    policy: Literal["fail", "skip"] = "fail"  # unreadable pictures
    val: float = Field(0.1, ge=0, lt=1)  # shares of the identities, for a source without a split
    test: float = Field(0.3, gt=0, lt=1)
    unseen: list[str] = []  # domains to keep out of training and to probe with
    pairs: str | None = None  # a table of pairs of the source, or "same-class" (method similarity)
    triplets: str | None = None  # a table of triplets instead


class Batches(Table):
    """What one step sees."""

    classes: int = Field(64, ge=2)
    samples: int = Field(4, ge=2)
    size: int | None = Field(None, ge=2)  # of batches of samples, pairs or triplets; None: classes x samples
    views: int = Field(1, ge=1, le=8)
    augment: str = "mild"
    workers: int = Field(0, ge=0)  # processes that decode; 0 when the pictures fit into memory


class Optimise(Table):
    """How parameters move."""

    method: Literal["supervised", "similarity", "two-encoder", "hardness-aware", "jtt"] = "supervised"
    steps: int = Field(400, ge=1)
    rate: float = Field(2e-3, gt=0)  # highest learning rate
    warmup: float = Field(0.2, ge=0, lt=1)  # share of the steps in which it rises; then it falls as a cosine
    loss_rate: float = Field(1.0, gt=0)  # times that, for parameters of the loss: class vectors are met more seldom
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(0.0, ge=0)  # largest gradient norm; 0 for no limit
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    checkpoint_every: int = Field(100, ge=1)
    log_every: int = Field(10, ge=1)


class Biased(Table):
    """The second encoder of a loss with a ``Relative`` difficulty (method two-encoder)."""

    loss: dict[str, Any] = {"kind": "SelfTriplet"}
    rate: float = Field(1.0, gt=0)  # times train.rate
    weights: Literal["pairs", "mean", "shuffled"] = "pairs"  # the last two are controls


class Twice(Table):
    """The two stages of method jtt."""

    first: float = Field(0.25, gt=0, le=1)  # steps of the first classifier, as a share of train.steps
    copies: int = Field(5, ge=0)  # more of every sample that it gets wrong; 0 = an ordinary classifier, one stage


class Judge(Table):
    """What is measured afterwards."""

    fars: list[float] = [1e-1, 1e-2, 1e-3]
    ks: list[int] = [1, 2, 4, 8]
    baselines: bool = True  # also raw inputs and the untrained network
    spurious: str | None = None  # a column that a model may fall for: background, colour, device
    probe: bool | None = None  # probes of frozen features; None: of closed sets, of two-encoder and jtt, with spurious
    probe_samples: int = Field(5000, ge=10)  # of the training split, that probes are fitted on at most


class Recipe(Table):
    """Everything that decides a run."""

    seed: int = 0
    data: Data = Field(default_factory=Data)  # type: ignore[arg-type]
    batch: Batches = Field(default_factory=Batches)  # type: ignore[arg-type]
    model: dict[str, Any] = {}
    loss: dict[str, Any] = {"kind": "SupCon"}
    biased: Biased = Field(default_factory=Biased)  # type: ignore[arg-type]
    synthesis: dict[str, Any] = {}  # of method hardness-aware
    jtt: Twice = Field(default_factory=Twice)  # type: ignore[arg-type]
    train: Optimise = Field(default_factory=Optimise)  # type: ignore[arg-type]
    evaluate: Judge = Field(default_factory=Judge)  # type: ignore[arg-type]

    def spec(self) -> EmbedderSpec:
        """The model's description."""
        return built(EmbedderSpec, self.model, "model")

    def criterion(self, num_classes: int = 3) -> Any:
        """The loss, with its difficulty; class-vector losses are told how many classes the training data have."""
        return built(losses, self.loss, "loss", {"num_classes": num_classes, "dim": self.spec().dim})

    def biased_criterion(self) -> Any:
        """The loss of the second encoder."""
        return built(losses, self.biased.loss, "biased.loss", {"dim": self.spec().dim})

    def synthesised(self) -> Synthesis:
        """How synthetic negatives are made."""
        return built(Synthesis, self.synthesis, "synthesis")

    def title(self) -> str:
        """One line: what is trained on what."""
        table = f", {self.takes()} {self.data.pairs or self.data.triplets}" if self.takes() else ""
        loss = self.criterion()
        name = describe(loss) if dataclasses.is_dataclass(loss) else written(self.loss)
        name = {"hardness-aware": f"HardnessAware({name})", "jtt": f"JTT({name})"}.get(self.train.method, name)
        if self.biased.weights != "pairs":
            name += f" with {self.biased.weights} weights"
        return f"{name} on {self.data.source}{table}"

    def takes(self) -> str:
        """What the loss is over: ``pairs`` or ``triplets`` of a table; empty where labels say it."""
        return getattr(getattr(losses, str(self.loss.get("kind")), None), "takes", "")

    def toml(self) -> str:
        """The recipe as text that reads back to itself."""
        return tomli_w.dumps(_present(self.model_dump(mode="json")))


def shipped() -> dict[str, Path]:
    """The recipes that come with mettle, by name."""
    folder = files("mettle.train") / "recipes"
    return {p.name.removesuffix(".toml"): Path(str(p)) for p in sorted(folder.iterdir(), key=str) if ".toml" in p.name}


def load(source: str | Path, overrides: Iterable[str] = (), **tables: Mapping[str, Any]) -> Recipe:
    """A shipped recipe by name or a file by path, with ``table.key=value`` overrides applied."""
    known = shipped()
    path = known.get(str(source), Path(source))
    if not path.is_file():
        hint = nearest(str(source), known)
        raise RecipeError(f"no recipe {str(source)!r}: neither a shipped one nor a file{hint}")
    if path.stat().st_size > LARGEST:
        raise RecipeError(f"{path} has {path.stat().st_size} bytes: a recipe is a page, at most {LARGEST}")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from None
    for key, table in tables.items():
        content.setdefault(key, {}).update(table)
    for override in overrides:
        _apply(content, override)
    return parse(content)


def parse(content: Mapping[str, Any]) -> Recipe:
    """Check a parsed recipe, tables of the model and the loss included."""
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(_message(error)) from None
    recipe.spec()
    recipe.criterion()
    _check_method(recipe)
    _check_networks(recipe)
    return recipe


def _check_method(recipe: Recipe) -> None:
    """A loss over pairs or triplets, the method that feeds it and the table it needs come together or not at all."""
    kind, takes, data = recipe.loss.get("kind"), recipe.takes(), recipe.data
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


def _check_networks(recipe: Recipe) -> None:
    """Losses that need a second network or tuples, and the methods that have them, come together or not at all."""
    method, loss, kind = recipe.train.method, recipe.criterion(), recipe.loss.get("kind")
    recipe.biased_criterion()
    recipe.synthesised()
    if compares(loss) and method != "two-encoder":
        raise RecipeError(f"a Relative difficulty needs train.method = 'two-encoder', got {method!r}")
    if method == "two-encoder":
        if recipe.batch.views != 2:
            raise RecipeError("train.method = 'two-encoder' compares two views: set batch.views = 2")
        if not isinstance(loss, Pairwise):
            raise RecipeError(f"train.method = 'two-encoder' needs a loss over the pairs of a batch, got {kind}")
    if recipe.biased != Biased.model_validate({}) and not compares(loss):
        raise RecipeError('[biased] needs a loss with difficulty = { kind = "Relative" } and method two-encoder')
    if recipe.synthesis and method != "hardness-aware":
        raise RecipeError(f"[synthesis] needs train.method = 'hardness-aware', got {method!r}")
    if method == "hardness-aware":
        try:
            layout(loss)
        except InputError as error:
            raise RecipeError(f"[loss] {error}") from None
        if recipe.batch.views != 1:
            raise RecipeError("batch.views does not apply to the tuples of hardness-aware training: leave it out")
    if kind == "NPair" and recipe.batch.samples != 2:
        raise RecipeError(f"NPair needs two samples of every class: set batch.samples = 2, not {recipe.batch.samples}")
    if method == "jtt" and not hasattr(loss, "num_classes"):
        raise RecipeError(f"train.method = 'jtt' needs a loss with one vector per class, such as Softmax, got {kind}")
    if recipe.jtt != Twice.model_validate({}) and method != "jtt":
        raise RecipeError(f"[jtt] needs train.method = 'jtt', got {method!r}")


def _apply(content: dict[str, Any], override: str) -> None:
    """Set one key; the value is read as TOML, and as plain text where it is no TOML."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise RecipeError(f"--set takes table.key=value, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *tables, last = key.strip().split(".")
    place = content
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise RecipeError(f"--set {key}: {table!r} is a value, not a table")
    place[last] = value


def _message(error: ValidationError) -> str:
    """The first problem, in one line, with the nearest known key where a key is unknown."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        table: Any = Recipe
        for part in first["loc"][:-1]:
            table = table.model_fields[str(part)].annotation
        return f"unknown recipe key {key!r}{nearest(str(first['loc'][-1]), table.model_fields)}"
    return f"recipe key {key}: {first['msg'].lower()}, got {first['input']!r}"


def _present(value: Any) -> Any:
    """TOML has no null: leave such keys out, they are the defaults."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return value


__all__ = ["Batches", "Biased", "Data", "Judge", "Optimise", "Recipe", "Twice", "load", "parse", "shipped"]
