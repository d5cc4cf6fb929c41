"""Stand-ins for packages that mettle needs and that a machine with a GPU may not have.

Import this module before anything of mettle. Where pydantic is missing, recipes are read by `PlainModel`, which fills
in defaults and checks little: the recipes that benchmarks read were checked where pydantic is installed. What is
imported from any other missing package can be named and inherited from, but not called: no number ever comes out of a
stand-in.
"""

import copy
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

PACKAGES = ("PIL", "pydantic", "safetensors", "scipy", "sklearn", "tomli_w")


class Missing(type):
    """The class of stand-ins: attributes are stand-ins as well, and a call says which package is missing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stand_in(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Refuse."""
        raise ImportError(f"{cls.__name__} is needed, and {cls.__name__.partition('.')[0]} is not installed here")


def make_stand_in(name: str) -> Any:
    """A class of this name, which may stand in an ``except`` clause and among the bases of a class."""
    return Missing(name, (Exception,), {})


class MissingModule(types.ModuleType):
    """A module all of whose names are stand-ins."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make_stand_in(f"{self.__name__}.{name}")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of packages that are missing."""

    def __init__(self, names: Collection[str]):
        self.missing = {name for name in names if not is_installed(name)}

    def find_spec(self, fullname, path=None, target=None):
        """Only for these packages."""
        if fullname.partition(".")[0] in self.missing:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        """A module of stand-ins, with the plain classes in place of those of pydantic."""
        module = MissingModule(spec.name)
        if spec.name == "pydantic":
            vars(module).update(PYDANTIC)
        return module

    def exec_module(self, module):
        """Nothing to do."""


def is_installed(name: str) -> bool:
    """Whether a package can be found."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


class InvalidValue(ValueError):
    """A value that a recipe must not have, in place of pydantic's ``ValidationError``."""

    def errors(self) -> list[dict[str, Any]]:
        """The one problem, as pydantic tells it."""
        return [{"type": "value_error", "loc": (self.args[0],), "msg": self.args[1], "input": self.args[2]}]


class PlainField:
    """What is known of a key: its type and its default."""

    def __init__(self, default: Any = ..., *, default_factory: Callable[[], Any] | None = None, **limits: Any):
        self.default, self.default_factory, self.limits, self.annotation = default, default_factory, limits, Any

    def make_default(self) -> Any:
        """A default of its own for every table."""
        return copy.deepcopy(self.default) if self.default_factory is None else self.default_factory()


class PlainValidator:
    """A method that reads the value of some keys."""

    def __init__(self, names: tuple[str, ...], mode: str, function: Any):
        self.names, self.mode, self.function = names, mode, getattr(function, "__func__", function)

    def read(self, cls: type, name: str, value: Any) -> Any:
        """The value as the method returns it."""
        more = [types.SimpleNamespace(field_name=name)] if len(inspect.signature(self.function).parameters) > 2 else []
        return self.function(cls, value, *more)


class PlainModel:
    """A frozen table of keys with defaults; numbers are not checked against their limits."""

    model_fields: typing.ClassVar[dict[str, PlainField]] = {}

    def __init_subclass__(cls) -> None:
        cls.model_fields = dict(cls.model_fields)
        for name, annotation in inspect.get_annotations(cls).items():
            default = cls.__dict__.get(name, ...)
            field = default if isinstance(default, PlainField) else PlainField(default)
            field.annotation = annotation
            cls.model_fields[name] = field

    def __init__(self, **content: Any):
        validators = [one for one in vars(type(self)).values() if isinstance(one, PlainValidator)]
        for name in content.keys() - self.model_fields.keys():
            raise InvalidValue(name, "there is no such key", content[name])
        for name, field in self.model_fields.items():
            value = content[name] if name in content else field.make_default()
            try:
                for one in validators:
                    if name in one.names and one.mode != "after":
                        value = one.read(type(self), name, value)
                value = convert(value, field.annotation)
                for one in validators:
                    if name in one.names and one.mode == "after":
                        value = one.read(type(self), name, value)
            except ValueError as error:
                raise InvalidValue(name, str(error), value) from None
            vars(self)[name] = value

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainModel) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def model_validate(cls, content: Mapping[str, Any]) -> "PlainModel":
        """The table that holds these values."""
        return cls(**content)

    def model_dump(self, mode: str = "python", exclude: Collection[str] = ()) -> dict[str, Any]:
        """All values in plain dicts."""
        return {name: dump(vars(self)[name]) for name in self.model_fields if name not in exclude}

    def model_copy(self, update: Mapping[str, Any]) -> "PlainModel":
        """The table with other values, unchecked."""
        return type(self)(**{name: vars(self)[name] for name in self.model_fields} | dict(update))


def convert(value: Any, annotation: Any) -> Any:
    """A value as pydantic hands it on: tables for dicts, fractions for whole numbers where those are wanted."""
    if isinstance(annotation, type) and issubclass(annotation, PlainModel) and isinstance(value, Mapping):
        return annotation(**value)
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if type(value) is int and float in options and int not in options:
        return float(value)
    if isinstance(value, list) and any(typing.get_origin(one) is tuple for one in options):
        return tuple(value)
    return value


def dump(value: Any) -> Any:
    """Tables as dicts, at any depth, and copies of all that could be changed."""
    if isinstance(value, PlainModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: dump(item) for key, item in value.items()}
    return [dump(item) for item in value] if isinstance(value, list) else value


class PlainAdapter:
    """Takes an argument of a constructor as it is written."""

    def __init__(self, annotation: Any, config: Any = None):
        self.annotation = annotation

    def validate_python(self, value: Any) -> Any:
        """The value, converted but not checked."""
        return convert(value, self.annotation)


PYDANTIC = {
    "BaseModel": PlainModel,
    "ConfigDict": dict,
    "Field": PlainField,
    "TypeAdapter": PlainAdapter,
    "ValidationError": InvalidValue,
    "ValidationInfo": Any,
    "field_validator": lambda *names, mode="after": lambda function: PlainValidator(names, mode, function),
    "model_validator": lambda mode: lambda function: function,
}

MISSING = StandIns(PACKAGES)
sys.meta_path.append(MISSING)
