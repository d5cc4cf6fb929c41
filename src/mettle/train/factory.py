"""From a table of a recipe to the object it describes: ``{kind = "SupCon", temperature = 0.1, ...}``.

Keys are the arguments of the object's constructor, so whatever a user can write in Python can be written in a recipe,
and nothing else. A table inside a table is built first: a difficulty inside its loss.
"""

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mettle import difficulty, losses
from mettle.errors import MettleError, RecipeError, nearest

INNER = {"difficulty": difficulty, "first": difficulty, "second": difficulty, "base": losses}
EXAMPLES = dict.fromkeys(INNER, "Threshold") | {"base": "Softmax"}


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
    if isinstance(source, ModuleType):
        source = {name: getattr(source, name) for name in source.__all__}
    if isinstance(source, Mapping):
        source = source[_read_kind(content, source, where)]
    known = constructor_arguments(source)
    for key, module in INNER.items():
        if _takes_number(known, key):  # the base of MultiSimilarity is a number, that of Center a loss
            continue
        if isinstance(content.get(key), Mapping):
            content[key] = build(module, content[key], f"{where}.{key}", given)
        elif content.get(key) is not None:
            kind = content[key] if content[key] in module.__all__ else EXAMPLES[key]
            wanted = f'a table such as {{ kind = "{kind}" }}, or --set {where}.{key}.kind={kind}'
            raise RecipeError(f"recipe key {where}.{key}: {wanted}, is wanted, got {content[key]!r}")
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
        plain = name in content and not is_part and parameter.annotation is not inspect.Parameter.empty
        if not plain:
            continue
        try:
            adapter = TypeAdapter(parameter.annotation, config=ConfigDict(arbitrary_types_allowed=True))
            content[name] = adapter.validate_python(content[name])
        except ValidationError as error:
            first = error.errors()[0]
            raise RecipeError(f"recipe key {where}.{name}: {first['msg'].lower()}, got {content[name]!r}") from None
