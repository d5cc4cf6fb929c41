"""From the columns of a table to rows of numbers: for the first time, or as a model was trained on them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mettle.data.dataset import Column
from mettle.data.image_decoding import quote_name
from mettle.data.inputs import FeatureArray
from mettle.data.sources.npz import GROUP_VALUES
from mettle.data.sources.text_table import TextTable, parse_number
from mettle.errors import DataError, InputError, nearest


@dataclass(frozen=True)
class Feature:
    """One column of a table, and the numbers it becomes.

    Attributes:
        name: Of the column.
        categories: Of text, in the order of their places; None for a column of numbers.
        coded: Of text: one number, the place of the category, instead of one number per category.
        fill: What a missing number becomes; None where none may be missing.
    """

    name: str
    categories: tuple[str, ...] | None = None
    coded: bool = False
    fill: float | None = None

    @property
    def output_names(self) -> list[str]:
        """What the numbers are called."""
        if self.categories is None or self.coded:
            return [self.name]
        return [f"{self.name}={category}" for category in self.categories]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON can hold it, without what is at its default."""
        found: dict[str, Any] = {"name": self.name}
        if self.categories is not None:
            found |= {"categories": list(self.categories)}
        return found | ({"coded": True} if self.coded else {}) | ({} if self.fill is None else {"fill": self.fill})


def features_from_json(tables: Iterable[Mapping[str, Any] | Feature]) -> tuple[Feature, ...]:
    """Features from what `Feature.to_json` gave.

    Raises:
        DataError: they are not that.
    """
    found = []
    for one in tables:
        if isinstance(one, Mapping):
            try:
                categories = one.get("categories")
                fill = one.get("fill")
                one = Feature(
                    str(one["name"]),
                    None if categories is None else tuple(map(str, categories)),
                    bool(one.get("coded", False)),
                    None if fill is None else float(fill),
                )
            except (KeyError, TypeError, ValueError):
                raise DataError(f"the columns that a model was trained on cannot be read: {str(one)[:80]}") from None
        if not isinstance(one, Feature):
            raise DataError(f"the columns that a model was trained on cannot be read: {str(one)[:80]}")
        found.append(one)
    return tuple(found)


MISSING = frozenset(("", "?", "na", "n/a", "nan", "null", "none"))
MOSTLY = 0.9  # a column with this share of numbers is meant as numbers: the rest are mistakes, not categories
HEAD = 100  # values that are looked at before all are
GAP = (
    "no number; fill it in, or take the mean: data.missing='mean' in a recipe (--set data.missing=mean of train), "
    "--missing mean of data check, missing='mean' in Python"
)
_COMMA = re.compile(r"[+-]?\d+,\d+")


def fit_features(
    table: TextTable,
    names: Sequence[str],
    *,
    categories: Sequence[str] = (),
    text: str = "onehot",
    missing: str = "fail",
    split: np.ndarray | None = None,
) -> FeatureArray:
    """These columns as one array, with what each of them became; options as in `read_manifest`."""
    if text not in ("onehot", "code") or missing not in ("fail", "mean"):
        raise InputError(f"text must be onehot or code, missing fail or mean, got {text!r}, {missing!r}")
    if not names:
        raise DataError(f"{quote_name(table.path)} has neither a column path nor feature columns")
    features, parts = [], []
    for name in names:
        numbers = None if name in categories else _read_numbers(table, name)
        if numbers is None:
            values = _read_texts(table, name, named=name in categories)
            known = Column.of(np.array(values)).names
            feature = Feature(name, known, text == "code")
            if text == "onehot" and len(known) > GROUP_VALUES:
                problem = f"column {quote_name(name)} has {len(known)} distinct texts, over {GROUP_VALUES}"
                remedy = (
                    "choose the features (data.features in a recipe), or data.text='code'; in Python features= or text="
                )
                raise DataError(f"{quote_name(table.path)}: {problem}; {remedy}")
            parts.append(_encode_categories(table, feature, values))
        else:
            feature = Feature(name, fill=_column_mean(table, name, numbers, split) if missing == "mean" else None)
            parts.append(_fill_gaps(table, feature, numbers, GAP))
        features.append(feature)
    return FeatureArray(np.hstack(parts), features=features)


def apply_features(table: TextTable, features: Sequence[Feature]) -> FeatureArray:
    """The columns that a model was trained on, found by name; categories keep the places they had.

    Raises:
        DataError: a column is not there, a number is none, a category is new.
    """
    parts = []
    gap = "no number; fill it in: the model was trained without gaps here, so nothing stands for one"
    for feature in features:
        name = feature.name
        if name not in table.columns:
            problem = f"no column {quote_name(name)} in {quote_name(table.path)}, which the model was trained on"
            raise DataError(f"{problem}{table.suggest_column(name)}")
        if feature.categories is None:
            numbers, odd = _parse_numbers(table, name)
            if odd:
                problem = (
                    f"{quote_name(table.columns[name][odd[0]])} is not a number; the model was trained on numbers here"
                )
                raise table.error(odd[0], name, problem)
            parts.append(_fill_gaps(table, feature, numbers, gap))
        else:
            named = any(_COMMA.fullmatch(category) for category in feature.categories)
            parts.append(_encode_categories(table, feature, _read_texts(table, name, named=named)))
    return FeatureArray(np.hstack(parts), features=features)


def is_mostly(values: Sequence[str], holds: Callable[[str], bool]) -> bool:
    """Whether something holds for most of the values, missing ones aside."""
    known = [value for value in values[:HEAD] if value.strip().lower() not in MISSING]
    if sum(map(holds, known)) < 0.5 * len(known):  # spares a look at all of most columns
        return False
    known = [value for value in values if value.strip().lower() not in MISSING]
    return bool(known) and sum(map(holds, known)) >= MOSTLY * len(known)


def _read_texts(table: TextTable, name: str, named: bool) -> list[str]:
    """A column of text without the blanks around it; numbers with a decimal comma are none unless they were named."""
    values = [value.strip() for value in table.columns[name]]
    if not named and is_mostly(values, lambda value: _COMMA.fullmatch(value) is not None):
        row = next(i for i, value in enumerate(values) if _COMMA.fullmatch(value))
        point = values[row].replace(",", ".")
        remedy = f"write {point}, or set data.categories=[{name!r}] (in Python categories=) if it is a name"
        raise table.error(row, name, f"{quote_name(values[row])} has a decimal comma; {remedy}")
    return values


def _encode_categories(table: TextTable, feature: Feature, values: Sequence[str]) -> np.ndarray:
    """One column per category, or the place of each."""
    place = {category: i for i, category in enumerate(feature.categories or ())}
    for row, value in enumerate(values):
        if value not in place:
            problem = f"{quote_name(value)} is a category that the model was not trained on"
            raise table.error(row, feature.name, f"{problem}{nearest(value, list(place)[:50])}")
    codes = np.array([place[value] for value in values], np.int64)
    return codes[:, None].astype(np.float32) if feature.coded else np.eye(len(place), dtype=np.float32)[codes]


def _column_mean(table: TextTable, name: str, numbers: np.ndarray, split: np.ndarray | None) -> float:
    """The mean of a column, over its train rows where there are such."""
    gaps = np.isnan(numbers)
    known = ~gaps if split is None or not (split == 0).any() else ~gaps & (split == 0)
    if not known.any():
        raise table.error(int(gaps.argmax()), name, "no number in any train row to take the mean of")
    return float(numbers[known].mean())


def _fill_gaps(table: TextTable, feature: Feature, numbers: np.ndarray, problem: str) -> np.ndarray:
    """The numbers without gaps, as one column of float32; ``problem`` is what to say about a gap that stays."""
    gaps = np.isnan(numbers)
    if gaps.any():
        if feature.fill is None:
            raise table.error(int(gaps.argmax()), feature.name, problem)
        numbers = np.where(gaps, feature.fill, numbers)
    large = np.abs(numbers) > np.finfo(np.float32).max
    if large.any():
        raise table.error(int(large.argmax()), feature.name, f"{numbers[large][0]:g} is too large, or not finite")
    return numbers.astype(np.float32)[:, None]


def _read_numbers(table: TextTable, name: str) -> np.ndarray | None:
    """The column as numbers, NaN where one is missing; None when it is text."""
    numbers, odd = _parse_numbers(table, name)
    counted = int((~np.isnan(numbers)).sum())
    if not counted or len(odd) > (1 - MOSTLY) * (counted + len(odd)):
        return None
    if odd:
        problem = f"{quote_name(table.columns[name][odd[0]])} is not a number, though most of the column is"
        remedy = f"correct it, or set data.categories=[{name!r}] (in Python categories=)"
        raise table.error(odd[0], name, f"{problem}; {remedy}")
    return numbers


def _parse_numbers(table: TextTable, name: str) -> tuple[np.ndarray, list[int]]:
    """The numbers of a column, NaN where there is none, and the rows that hold something else."""
    odd: list[int] = []
    numbers = np.full(len(table.lines), np.nan)
    for row, value in enumerate(table.columns[name]):
        if value.strip().lower() not in MISSING:
            read = parse_number(value)
            if read is None:
                odd.append(row)
            else:
                numbers[row] = read
    return numbers, odd
