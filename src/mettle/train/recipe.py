"""A recipe: the typed, frozen description of a run. Written in TOML, overridden by ``--set table.key=value``.

Unknown keys and wrong types are errors that name the nearest known key; the run folder keeps the recipe that
rebuilds the run.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import tomli_w
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from mettle import losses
from mettle.errors import InputError, RecipeError, nearest
from mettle.model import EmbedderSpec
from mettle.train.agreement import finite, fitting, heard
from mettle.train.auto_settings import AUTO_KEYS
from mettle.train.factory import INNER, arguments, built
from mettle.train.methods.base import compares
from mettle.train.methods.synthesis import Synthesis
from mettle.train.recipe_files import describe_call, recipe_title
from mettle.train.recipe_files import shipped as shipped
from mettle.train.tables import Batches, Biased, Data, Judge, Optimise, Table, Twice

SAME_CLASS = "same-class"  # instead of a path: pairs or triplets made from the labels
LARGEST = 1 << 20  # bytes of a recipe
SEEDS = 2**62  # so that a seed and the few that are counted up from it stay whole numbers of 64 bits
SIZES = {"num_classes": 3, "dim": 8}  # with which a loss can be built before the data and the model are known
STORED = "stored"  # where a recipe comes from: a run that was trained with it


class Recipe(Table):
    """Everything that decides a run."""

    seed: int = 0
    auto: list[str] = Field(default_factory=list)  # keys that may be chosen from the data, see auto_settings
    data: Data = Field(default_factory=Data)  # type: ignore[arg-type]
    batch: Batches = Field(default_factory=Batches)  # type: ignore[arg-type]
    model: dict[str, Any] = Field(default_factory=dict)
    loss: dict[str, Any] = Field(default_factory=lambda: {"kind": "SupCon"})
    biased: Biased = Field(default_factory=Biased)  # type: ignore[arg-type]
    synthesis: dict[str, Any] = Field(default_factory=dict)  # of method hardness-aware
    jtt: Twice = Field(default_factory=Twice)  # type: ignore[arg-type]
    train: Optimise = Field(default_factory=Optimise)  # type: ignore[arg-type]
    evaluate: Judge = Field(default_factory=Judge)  # type: ignore[arg-type]

    @field_validator("auto")
    @classmethod
    def _known_keys(cls, value: list[str]) -> list[str]:
        for key in value:
            if key not in AUTO_KEYS:
                raise ValueError(f"{key!r} cannot be chosen from the data{nearest(key, AUTO_KEYS)}")
        return value

    @field_validator("seed")
    @classmethod
    def _counted(cls, value: int, info: ValidationInfo) -> int:
        """A run that is there may have any of 64 bits: earlier versions began with those too."""
        if not (-(2**63) <= value < 2**63 if info.context == STORED else 0 <= value < SEEDS):
            raise ValueError("a whole number from 0 to below 2^62 is wanted")
        return value

    def with_values(self, values: Mapping[str, Any]) -> "Recipe":
        """The recipe with other values of these keys, such as ``batch.classes``, checked as a whole."""
        content = self.model_dump(mode="json")
        for key, value in values.items():
            table, _, name = key.rpartition(".")
            (content[table] if table else content)[name] = value
        return _checked(content, STORED)

    def value(self, key: str) -> Any:
        """The value of a key such as ``batch.classes``; None where the recipe does not say."""
        table, _, name = key.partition(".")
        found = getattr(self, table)
        return found.get(name) if isinstance(found, Mapping) else getattr(found, name)

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
        return recipe_title(self.model_dump())

    def takes(self) -> str:
        """What the loss is over: ``pairs`` or ``triplets`` of a table; empty where labels say it."""
        return getattr(getattr(losses, str(self.loss.get("kind")), None), "takes", "")

    def toml(self) -> str:
        """The recipe as text that reads back to itself, without the tables of methods that it does not use."""
        used = {"biased": compares(self.criterion()), "jtt": self.train.method == "jtt", "synthesis": self.synthesis}
        unused = {table for table, is_used in used.items() if not is_used}
        return tomli_w.dumps(_present(self.model_dump(mode="json", exclude=unused)))


def load(
    source: str | Path,
    overrides: Iterable[str] = (),
    *,
    resumed: bool = False,
    say: Callable[[str], None] = lambda note: None,
    **tables: Mapping[str, Any],
) -> Recipe:
    """A shipped recipe by name or a file by path, with ``table.key=value`` overrides applied.

    An override of a ``kind`` (``loss.kind=ArcFace``) leaves out the keys of the recipe's own kind that the new one does
    not take; ``say`` gets a note about each.

    ``resumed``: it is that of a run to be continued, which may hold what a new run may not.
    """
    known = shipped()
    path = known.get(str(source), Path(source))
    if not path.is_file():
        hint = nearest(str(source), known)
        raise RecipeError(f"no recipe {str(source)!r}: neither a shipped one nor a file{hint}")
    content = _content(path)
    _check_tables(content)  # before anything is put into them
    for key, table in tables.items():
        content.setdefault(key, {}).update(table)
    overrides = list(overrides)
    for note in _leave_out_keys(content, overrides):
        say(note)
    keys = [_apply(content, override) for override in overrides]
    written = {*keys, *(f"{key}.{name}" for key, table in tables.items() for name in table)}
    if str(source) not in known:  # in a file of one's own, every key that is there was meant
        written |= {f"{key}.{name}" for key, table in content.items() if isinstance(table, Mapping) for name in table}
    content.setdefault("auto", [key for key in AUTO_KEYS if key not in written])
    recipe = _checked(content, STORED) if resumed else parse(content)
    heard(recipe, keys)
    return recipe


def as_recipe(given: Any) -> Recipe:
    """A recipe as callers give it: itself, the name of a shipped one, or the path of a file."""
    if isinstance(given, Recipe):
        return given
    if isinstance(given, str | Path):
        return load(given)
    wanted = "a Recipe, the name of a shipped one or the path of a TOML file"
    raise InputError(f"recipe= must be {wanted}, got {type(given).__name__}; mettle.train.load reads one with changes")


def stored_recipe(path: Path) -> Recipe:
    """The recipe of a run that is there, also where a run of today could not begin with it."""
    if not path.is_file():
        raise RecipeError(f"no recipe {str(path)!r}: the folder of its run is damaged")
    return _checked(_content(path), STORED)


def _content(path: Path) -> dict[str, Any]:
    """What a recipe file holds, unchecked."""
    if path.stat().st_size > LARGEST:
        raise RecipeError(f"{path} has {path.stat().st_size} bytes: a recipe is a page, at most {LARGEST}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark before the text
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from None


def parse(content: Mapping[str, Any]) -> Recipe:
    """Check a parsed recipe, tables of the model and the loss included."""
    return _checked(content)


def _check_tables(content: Mapping[str, Any]) -> None:
    """Refuse a plain value where a table is wanted."""
    for key in Recipe.model_fields:
        if key not in ("seed", "auto") and not isinstance(content.get(key, {}), Mapping):
            wanted = f"a table is wanted, [{key}] with its keys below it or --set {key}.<key>=..."
            raise RecipeError(f"recipe key {key}: {wanted}, got {content[key]!r}")


def _checked(content: Mapping[str, Any], context: object = None) -> Recipe:
    finite(content)
    _check_tables(content)
    try:
        recipe = Recipe.model_validate(content, context=context)
    except ValidationError as error:
        raise RecipeError(_message(error)) from None
    recipe.spec()
    recipe.criterion()
    fitting(recipe)
    return recipe


def _apply(content: dict[str, Any], override: str) -> str:
    """Set one key, and name it."""
    key, value = _read_override(override)
    *tables, last = key.split(".")
    place = content
    for table in tables:
        place = place.setdefault(table, {})
        if not isinstance(place, dict):
            raise RecipeError(f"--set {key}: {table!r} is a value, not a table")
    place[last] = value
    return key


def _read_override(override: str) -> tuple[str, Any]:
    """The key and the value, which is read as TOML, and as plain text where it is no TOML."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise RecipeError(f"--set takes table.key=value, got {override!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()


def _leave_out_keys(content: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Take keys of the recipe's own loss or difficulty out of it, where an override names another kind.

    What stays are keys that the new kind takes with these values, so that a temperature or a difficulty is kept where
    it can be. Keys that are overridden themselves are not touched: those that do not apply are errors.
    """
    given = dict(map(_read_override, overrides))
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
                shown = describe_call(value) if isinstance(value, Mapping) else repr(value)
                notes.append(f"{where}.{name} = {shown} of the recipe does not apply to {kind} and was left out")
    return notes


def _takes_key(module: ModuleType, kind: str, name: str, value: Any, where: str) -> bool:
    """Whether a loss or difficulty has such an argument and takes this value for it, everything else at its default."""
    taken = arguments(getattr(module, kind))
    if name not in taken:
        return False
    needed = [p for p in taken.values() if p.default is p.empty and p.name not in (*SIZES, name)]
    if needed:  # it cannot be tried by itself; what is wrong with it is told when all keys are there
        return True
    try:
        built(module, {"kind": kind, name: value}, where, SIZES)
    except RecipeError:
        return False
    return True


def _message(error: ValidationError) -> str:
    """The first problem, in one line, with the nearest known key where a key is unknown."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        table: Any = Recipe
        for part in first["loc"][:-1]:
            table = table.model_fields[str(part)].annotation
        return f"unknown recipe key {key!r}{nearest(str(first['loc'][-1]), table.model_fields)}"
    problem = first["msg"].lower().removeprefix("value error, ")
    return f"recipe key {key}: {problem}, got {first['input']!r}"


def _present(value: Any) -> Any:
    """TOML has no null: leave such keys out, they are the defaults."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return value


__all__ = [
    "Batches",
    "Biased",
    "Data",
    "Judge",
    "Optimise",
    "Recipe",
    "Twice",
    "as_recipe",
    "load",
    "parse",
    "shipped",
    "stored_recipe",
]
