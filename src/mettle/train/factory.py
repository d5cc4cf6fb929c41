"""From a table of a recipe to the object it describes: ``{kind = "SupCon", temperature = 0.1, ...}``.

Keys are the arguments of the object's constructor, so whatever a user can write in Python can be written in a recipe,
and nothing else. A table inside a table is built first: a difficulty inside its loss.

An object of somebody else is named by its import path, ``shop.losses:Mine``. A recipe may come from elsewhere, so
reading one imports nothing: `build` gives a `Foreign` in its place, and only `import_object` imports, if the caller
allows its package by name.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from mettle import difficulty, losses
from mettle.errors import MettleError, RecipeError, nearest

INNER = {"difficulty": difficulty, "first": difficulty, "second": difficulty, "base": losses, "loss": losses}
LIST = "losses"  # a list of tables
EXAMPLES = dict.fromkeys(INNER, "Threshold") | {"base": "Softmax", "loss": "SupCon"}


@dataclass(frozen=True)
class Foreign:
    """An object of somebody else that a recipe names, not imported: what can be said about it before training."""

    path: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Refuse to be used: it is only a name."""
        raise RecipeError(f"{self.path} is named by its import path: it is imported for training only")


def is_import_path(name: Any) -> bool:
    """Whether a name is an import path, ``package.module:name``."""
    return isinstance(name, str) and ":" in name


def describe_object(given: Any) -> str:
    """The import path of the class of an object, or of a function itself."""
    kind = given if hasattr(given, "__qualname__") else type(given)
    return f"{kind.__module__}:{kind.__qualname__}"


def import_object(path: str, allowed: Sequence[str], where: str) -> Any:
    """What an import path names, if its package is among those that may be imported.

    Args:
        path: ``package.module:name``, dots in the name included.
        allowed: packages or modules; each allows all below it.
        where: the key in the recipe, for messages.

    Raises:
        RecipeError: it may not be imported, or is not there.
    """
    module, _, name = path.partition(":")
    if not any(module == one or module.startswith(f"{one}.") for one in allowed):
        package = module.partition(".")[0]
        raise RecipeError(
            f"{where} = {path!r} would run code of {module!r}: allow it with --allow-import {package} "
            f"(allow_import=[{package!r}] in Python)"
        )
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever a module does when it is imported
        raise RecipeError(f"{where}: cannot import {module!r}: {type(error).__name__}: {_first_line(error)}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            public = [one for one in vars(found) if not one.startswith("_")]
            raise RecipeError(f"{where}: {module!r} has no {name!r}{nearest(part, public)}")
        found = getattr(found, part)
    return found


def call_factory(factory: Any, table: Mapping[str, Any], where: str, given: Mapping[str, Any]) -> Any:
    """What a foreign class or function makes of the keys of a table and of those given values that it takes."""
    try:
        known = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        raise RecipeError(f"[{where}] {factory!r} is not a class or a function") from None
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for key in table:
        if key not in known and not takes_all:
            raise RecipeError(f"unknown recipe key '{where}.{key}'{nearest(key, known)}")
    try:
        return factory(**table, **{key: value for key, value in given.items() if key in known and key not in table})
    except Exception as error:  # whatever somebody else's code raises
        raise RecipeError(f"[{where}] {type(error).__name__}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def build(source: Any, table: Mapping[str, Any], where: str, given: Mapping[str, Any] | None = None) -> Any:
    """The object that ``table`` describes.

    Args:
        source: its class; or a module, one of whose public names is the ``kind``; or classes by their kind.
        table: the kind, where there is a choice, and the arguments of the constructor.
        where: the key of the table in its recipe, for messages.
        given: arguments that no recipe writes, because the data or the model decide them; they reach whoever takes
            them.
    """
    content = dict(table)
    if not isinstance(source, type) and is_import_path(content.get("kind")):
        return Foreign(content["kind"])
    if isinstance(source, ModuleType):
        source = {name: getattr(source, name) for name in source.__all__}
    if isinstance(source, Mapping):
        source = source[_read_kind(content, source, where)]
    known = constructor_arguments(source)
    for key, module in INNER.items():
        if _takes_number(known, key):  # the base of MultiSimilarity is a number, that of Center a loss
            continue
        if isinstance(content.get(key), Mapping):
            lengths = content.get("dims") if key == "loss" and "dims" in known else None
            content[key] = _build_inner(module, content[key], f"{where}.{key}", given, lengths)
        elif content.get(key) is not None:
            kind = content[key] if content[key] in module.__all__ else EXAMPLES[key]
            wanted = f'a table such as {{ kind = "{kind}" }}, or --set {where}.{key}.kind={kind}'
            raise RecipeError(f"recipe key {where}.{key}: {wanted}, is wanted, got {content[key]!r}")
    if isinstance(content.get(LIST), list):  # the losses of a sum
        content[LIST] = [build(losses, one, f"{where}.{LIST}[{k}]", given) for k, one in enumerate(content[LIST])]
    for key in content:
        if key in (given or {}):
            raise RecipeError(f"{where}.{key} follows from the data and the model: leave it out")
        if key not in known:
            raise RecipeError(f"unknown recipe key '{where}.{key}'{nearest(key, known)}")
    _check_types(source, content, where)
    try:
        return source(**content, **{key: value for key, value in (given or {}).items() if key in known})
    except (MettleError, TypeError, ValueError) as error:
        raise RecipeError(f"[{where}] {error}") from None


def _build_inner(
    module: ModuleType, table: Mapping[str, Any], where: str, given: Mapping[str, Any] | None, lengths: Any
) -> Any:
    """What a table inside a table describes; one for each length of an embedding where there are several."""
    if not isinstance(lengths, list):
        return build(module, table, where, given)
    return [build(module, table, where, {**(given or {}), "dim": length}) for length in lengths]


def _read_kind(content: dict[str, Any], known: Mapping[str, Any], where: str) -> str:
    """Take the kind out of a table."""
    if "kind" not in content:
        raise RecipeError(f"[{where}] needs a kind{nearest('', known)}")
    kind = content.pop("kind")
    if kind not in known:
        raise RecipeError(f"{where}.kind: no {kind!r}{nearest(str(kind), known)}")
    return kind


def constructor_arguments(source: Any) -> dict[str, inspect.Parameter]:
    """What a constructor takes, what it hands on to the class it extends included."""
    own = dict(inspect.signature(source).parameters)
    more = [name for name, parameter in own.items() if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    for name in more:
        del own[name]
    if more and isinstance(source, type):
        own = constructor_arguments(source.__mro__[1]) | own
    return own


def _takes_number(known: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in known and known[name].annotation in (float, int)


def _check_types(source: Any, content: dict[str, Any], where: str) -> None:
    """Refuse a text where a number is wanted, and convert whole numbers to fractions where those are wanted."""
    known = constructor_arguments(source)
    for name, parameter in known.items():
        is_part = name in INNER and not _takes_number(known, name)
        plain = name in content and not is_part and name != LIST and parameter.annotation is not inspect.Parameter.empty
        if not plain:
            continue
        try:
            adapter = TypeAdapter(parameter.annotation, config=ConfigDict(arbitrary_types_allowed=True))
            content[name] = adapter.validate_python(content[name])
        except (PydanticUndefinedAnnotation, PydanticUserError):
            continue  # an annotation of somebody else that only type checkers can read, such as that of MultiStepLR
        except ValidationError as error:
            nearest_miss = max(error.errors(), key=lambda one: len(one["loc"]))  # of the types that it may have
            raise RecipeError(
                f"recipe key {where}.{name}: {nearest_miss['msg'].lower()}, got {content[name]!r}"
            ) from None
