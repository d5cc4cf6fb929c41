"""What a metric is: one entry that value, interval, table rows, pages and the table of the docs follow from.

An entry stands beside the formula it declares and is registered when that module is imported:

    result            declared in                            a value comes from
    verification      :mod:`mettle.evaluate.roc`             the scores of all pairs
    retrieval         :mod:`mettle.evaluate.ranking_metrics` one number per query
    identification    :mod:`mettle.evaluate.identification`  one number per mated probe
    clustering        :mod:`mettle.evaluate.clustering`      one number per seed
    probe             :mod:`mettle.evaluate.linear_probe`    one number per test sample
    few_shot          :mod:`mettle.evaluate.few_shot`        one number per episode

A metric is asked for by name, with what it takes after an ``@``: ``"eer"``, ``"tar@1e-3"`` or ``("tar", 1e-3)``,
``"recall@5"``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mettle.errors import InputError, nearest

RESULTS = ("verification", "retrieval", "identification", "clustering", "probe", "few_shot")
PLACES = ("table", "tile", "comparison", "terminal")  # rows of a page, its first numbers, columns, lines of a command
EXAMPLES = {"far": "1e-3", "fpir": "0.01", "k": "1", "threshold": "0.5"}  # of what comes after the @


@dataclass(frozen=True)
class NumberFormat:
    """How a number is written: times a factor, with so many digits and a unit."""

    factor: float
    digits: int
    unit: str = ""

    @property
    def template(self) -> str:
        """For ``str.format``, of the number times the factor."""
        return f"{{:.{self.digits}f}}"


PERCENT_1, PERCENT_2, DECIMAL_4 = NumberFormat(100, 1, "%"), NumberFormat(100, 2, "%"), NumberFormat(1, 4)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        key: its name; ``"tar@far"`` takes a false-accept rate.
        title: what a row or a column is called; ``{}`` stands for what the metric takes.
        definition: of the docs, in one clause.
        result: which result it belongs to.
        meaning: for readers of a page, in one clause; by default none.
        lower_is_better: whether a low value is good.
        limits: the lowest and the highest value that there can be.
        format: how it is written.
        shown: where, beside the JSON: some of ``PLACES``.
        headline: for which of what it takes it is shown outside of tables; None for all.
    """

    key: str
    title: str
    definition: str
    result: str
    meaning: str = ""
    lower_is_better: bool = False
    limits: tuple[float, float] = (0.0, 1.0)
    format: NumberFormat = PERCENT_1
    shown: frozenset[str] = frozenset({"table"})
    headline: tuple[float, ...] | None = None

    @property
    def base(self) -> str:
        """The key without what it takes."""
        return self.key.partition("@")[0]

    @property
    def takes(self) -> str:
        """What it takes (``"far"``, ``"k"``, ``"threshold"``), or nothing."""
        return self.key.partition("@")[2]

    @property
    def example(self) -> str:
        """A name to ask for it by."""
        return f"{self.base}@{EXAMPLES[self.takes]}" if self.takes else self.key

    @property
    def resampling_unit(self) -> str:
        """What an interval draws anew, or nothing where there is no interval."""
        return ""

    def name_at(self, at: float | None = None) -> str:
        """Its name with what it takes."""
        return self.key if at is None else f"{self.base}@{at!r}"


@dataclass(frozen=True)
class PairMetric(Metric):
    """A metric of the scores of all pairs.

    Attributes:
        value: from a :class:`mettle.evaluate.scoring.scores.ScoreStore` and what the metric takes.
        replicates: the same of every resample of the subjects, from :class:`mettle.evaluate.roc.WeightedCurves`; None
            where what it takes is a threshold, which stays as it is.
        bound: how far the value of a histogram can be from the exact one; None where there it is exact too.
        rests_on: subjects that count: those with ``"genuine"`` pairs, with ``"impostor"`` pairs, or the ``"fewer"``.
    """

    value: Callable[[Any, Any], float] = lambda scores, at: float("nan")
    replicates: Callable[[Any, Any], np.ndarray] | None = None
    bound: Callable[[Any, Any], float] | None = None
    rests_on: str = "fewer"

    @property
    def resampling_unit(self) -> str:
        """Subjects on both sides of a pair."""
        return "subjects"


@dataclass(frozen=True)
class ItemMetric(Metric):
    """A metric that has one number per item, and their mean as its value.

    Attributes:
        per_item: the numbers, from what the result measured of its items and what the metric takes.
        items: what they are numbers of.
        resample: what an interval draws anew; nothing where items are repetitions, which have a range.
    """

    per_item: Callable[[Any, Any], Any] = lambda measured, at: np.empty(0)
    items: str = "queries"
    resample: str = ""

    @property
    def resampling_unit(self) -> str:
        """The subjects of queries, test samples, classes."""
        return self.resample


METRICS: dict[tuple[str, str], Metric] = {}  # by result and key, in reading order
M = TypeVar("M", bound=Metric)


def register(metric: M) -> M:
    """Make a metric known: from now on results of its kind have it.

    Raises:
        InputError: there is one of that name, or a result, a place or something taken that does not exist.
    """
    if metric.result not in RESULTS:
        raise InputError(f"no result named {metric.result!r}{nearest(metric.result, RESULTS)}")
    strange = sorted(metric.shown - set(PLACES))
    if strange:
        raise InputError(f"a metric is shown in {', '.join(PLACES)}: got {strange[0]!r}")
    if metric.takes and metric.takes not in EXAMPLES:
        raise InputError(f"a metric takes one of {', '.join(EXAMPLES)}: got {metric.takes!r}")
    known = METRICS.get((metric.result, metric.key))
    if known is not None:
        raise InputError(f"{metric.result} has a metric {metric.key!r} already: {known.title}")
    METRICS[metric.result, metric.key] = metric
    return metric


@contextmanager
def register_temporarily(metric: Metric) -> Iterator[None]:
    """A metric of somebody else's is known for as long as the block lasts; results keep what they measured."""
    register(metric)
    try:
        yield
    finally:
        del METRICS[metric.result, metric.key]


def metrics_of(result: str, kind: type = Metric) -> tuple[Any, ...]:
    """The metrics of a result, in reading order."""
    return tuple(metric for (of, _), metric in METRICS.items() if of == result and isinstance(metric, kind))


def find_metric(result: str, name: str) -> tuple[Metric, float | None] | None:
    """A metric by its name in JSON, and what stands after the ``@``; None where no entry has it."""
    for metric in metrics_of(result):
        base, _, at = name.partition("@")
        if metric.key == name and not metric.takes:
            return metric, None
        if metric.takes and at and base == metric.base:
            number = float(at)
            return metric, int(number) if metric.takes == "k" else number
    return None


def parse_metric(name: str | tuple[str, float], result: str) -> tuple[Metric, float | None]:
    """The metric that a name asks for, and what it takes, None where it takes nothing.

    Raises:
        InputError: the result has no such metric, or what stands after the ``@`` is no number.
    """
    known = metrics_of(result)
    if isinstance(name, tuple) and len(name) == 2:
        base, at = name
    else:
        base, _, text = str(name).partition("@")
        at = _parse_number(base, text, known) if text else None
    for metric in known:
        if metric.base == base and bool(metric.takes) == (at is not None):
            return metric, at
    raise InputError(f"{result} has no metric named {name!r}{nearest(str(name), [m.example for m in known])}")


def _parse_number(base: str, text: str, known: Iterable[Metric]) -> float:
    try:
        return float(text)
    except ValueError:
        able = sorted((metric for metric in known if metric.takes), key=lambda metric: metric.base != base)
        raise InputError(
            f"what follows the @ must be a number, as in {able[0].example if able else ''!r}: got {text!r}"
        ) from None


def markdown_table() -> str:
    """The table in ``docs/evaluation.md``: every metric, and what its interval is over."""
    lines = ["| result | name | number | definition | better | interval over |", "|---|---|---|---|---|---|"]
    for metric in (metric for result in RESULTS for metric in metrics_of(result)):
        title = metric.title.format("K" if metric.takes == "k" else "").rstrip()
        better = "low" if metric.lower_is_better else "high"
        over = metric.resampling_unit or f"none; range over {getattr(metric, 'items', 'repetitions')}"
        cells = (metric.result, f"`{metric.key}`", title, metric.definition, better, over)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
