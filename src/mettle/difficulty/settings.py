"""The settings of losses and difficulties: validated once, where an object is built, and never changed.

A tensor or a learnable parameter in place of a number would work on one engine, get half of its gradient on another
and none on a third. So it is refused where the object is built.
"""

import dataclasses
import math
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Self, TypeVar, dataclass_transform, get_args, get_origin

from torch import Tensor, nn

from mettle.errors import InputError
from mettle.pairs import Traits

M = TypeVar("M", bound=nn.Module)
NUMBERS = (float, int, float | None, int | None)


def validate_number(name: str, value: Any) -> None:
    """Refuse what is not one finite number."""
    if isinstance(value, Tensor):
        raise InputError(f"{name} must be a number, got a tensor: write float({name})")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, got {value}")


def validate_numbers(**given: Any) -> None:
    """Each of them."""
    for name, value in given.items():
        validate_number(name, value)


def validate_integers(**given: Any) -> None:
    """Each of them must be a whole number: one that counts something."""
    validate_numbers(**given)
    for name, value in given.items():
        if not isinstance(value, Integral):
            raise InputError(f"{name} must be a whole number, got {value!r}")


def validate_difficulty(name: str, value: Any) -> None:
    """Refuse what weighs no pairs: a name, a number, or a class in place of an object of it."""
    if isinstance(value, type):
        raise InputError(f"{name} must be a difficulty, got the class {value.__name__}: write {value.__name__}()")
    if not (callable(getattr(value, "row_statistics", None)) and callable(getattr(value, "weights", None))):
        raise InputError(f"{name} must be a difficulty such as mettle.difficulty.Threshold(), got {value!r}")
    traits = getattr(value, "traits", None)
    if traits is not None and not isinstance(traits, Traits):
        raise InputError(f"traits of a difficulty must be a mettle.pairs.Traits, got {traits!r}")


def validate_fields(built: Any) -> None:
    """The fields of a dataclass: numbers that are numbers, choices that are known ones, and its difficulty."""
    for field in fields(built):
        value = getattr(built, field.name)
        if field.type in NUMBERS and value is not None:
            validate_number(field.name, value)
        validate_choice(field.name, value, field.type)
        if field.name == "difficulty" and not (value is None and field.default is None):
            validate_difficulty(field.name, value)


def validate_choice(name: str, value: Any, annotation: Any) -> None:
    """Refuse a value that the annotation, a ``Literal``, does not allow."""
    choices = literal_choices(annotation)
    if choices and value not in choices:
        raise InputError(f"{name} must be one of {choices}, got {value!r}")


@cache
def literal_choices(annotation: Any) -> tuple[Any, ...]:
    """The values that a ``Literal``, or a ``Literal | None``, allows; none for other types."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    parts = get_args(annotation)
    if len(parts) == 2 and type(None) in parts:
        inner = literal_choices(next(part for part in parts if part is not type(None)))
        return (None, *inner) if inner else ()
    return ()


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
class SettingsModule(nn.Module):
    """A module whose annotated fields are its settings, as those of a dataclass: arguments of its constructor.

    Settings are checked when it is built, printed, and never change; state (running thresholds, a learned temperature,
    a generator) is in ``state_dict``. Modules compare by identity, their ``settings`` by value.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = getattr(cls, "__dataclass_fields__", {})
        for name in known.keys() & vars(cls).keys() - cls.__annotations__.keys():
            if not hasattr(vars(cls)[name], "__get__"):  # a new default, which a dataclass passes over without a type
                cls.__annotations__[name] = known[name].type
                default = dataclasses.field(default=vars(cls)[name], kw_only=known[name].kw_only, repr=known[name].repr)
                setattr(cls, name, default)
        dataclasses.dataclass(cls, eq=False, repr=False)  # type: ignore[call-overload]
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.name in vars(cls):  # a default left on the class would hide a submodule of that name
                delattr(cls, field.name)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: D102
        made = super().__new__(cls)
        nn.Module.__init__(made)  # before fields are set: one of them may be a module
        return made

    def __post_init__(self) -> None:
        """Numbers must be numbers, choices known ones, and a difficulty one."""
        validate_fields(self)
        self.__dict__["_settings_fixed"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_change(name)
        if isinstance(value, Tensor) and name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            self.__dict__[name] = value  # no parameter of the module: it is refused with a message
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_change(name)
        super().__delattr__(name)

    def _refuse_change(self, name: str) -> None:
        if self.__dict__.get("_settings_fixed") and name in self.__dataclass_fields__:  # type: ignore[attr-defined]
            raise dataclasses.FrozenInstanceError(
                f"{name} of {type(self).__name__} cannot be changed once it is built: build another one"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """What it was built with, to be compared by value: its kind, its fields, and the settings of its parts."""
        found: dict[str, Any] = {"kind": type(self).__name__}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.repr:
                value = getattr(self, field.name)
                found[field.name] = getattr(value, "settings", repr(value)) if isinstance(value, nn.Module) else value
        return found

    def __repr__(self) -> str:
        shown = [field for field in dataclasses.fields(self) if field.repr]  # type: ignore[arg-type]
        changed = [f for f in shown if f.kw_only and getattr(self, f.name) != f.default]
        shown = [f for f in shown if not f.kw_only] + changed
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


class WriteOnceModule(nn.Module):
    """A module whose plain attributes are its settings: set once, in the constructor, and then fixed."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and is_setting(name, value):
            raise dataclasses.FrozenInstanceError(
                f"{name} of {type(self).__name__} cannot be changed once it is built: build another one"
            )
        super().__setattr__(name, value)

    @property
    def settings(self) -> dict[str, Any]:
        """What it was built with, to be compared by value: kind, plain attributes, and the settings of its parts."""
        found: dict[str, Any] = {"kind": type(self).__name__}
        found |= {name: value for name, value in vars(self).items() if is_setting(name, value)}
        parts = {name: module for name, module in self._modules.items() if hasattr(module, "settings")}
        return found | {name: module.settings for name, module in parts.items()}  # type: ignore[union-attr]


def is_setting(name: str, value: Any) -> bool:
    """Whether an attribute of a module is a setting: not private, not the training mode, not state."""
    return not name.startswith("_") and name != "training" and not isinstance(value, (Tensor, nn.Module))


def view_with(module: M, **changes: Any) -> M:
    """The same module with some attributes replaced, for one call: whatever is not replaced is shared."""
    view = object.__new__(type(module))
    view.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    view.__dict__.pop("_known_kernel_specs", None)  # what was read off the object as it was
    for name, value in changes.items():
        view.__dict__.pop(name, None)
        view._modules.pop(name, None)
        (view._modules if isinstance(value, nn.Module) else view.__dict__)[name] = value
    return view
