"""Two runs on the same people: every number side by side, with the interval of the difference."""

from typing import Any

from mettle.errors import InputError, MettleError
from mettle.evaluate import compare
from mettle.evaluate.metrics import Metric, PairMetric, metrics_of
from mettle.report.format import format_rate
from mettle.report.headline import sort_rows
from mettle.workbench.lazy_run import LazyRun


def compare_runs(first: LazyRun, second: LazyRun) -> list[dict[str, Any]]:
    """One row a number: both values, first − second, its interval, and whether it leaves out 0.

    Numbers of the question that the first run answers come first, as on its page.

    Raises:
        InputError: the two were not measured on the same test samples.
    """
    a, b = first.data(), second.data()
    if a.samples.fingerprint() != b.samples.fingerprint():
        raise InputError(
            f"{a.run.name} and {b.run.name} were tested on different samples, so their numbers cannot be compared: "
            "choose two runs of one data set and one split"
        )
    verified, retrieved = (first.verification(), second.verification()), (first.retrieval(), second.retrieval())
    fars = sorted(set(a.run.recipe.evaluate.fars) & set(b.run.recipe.evaluate.fars), reverse=True)
    wanted: list[tuple[Any, Metric, float | None]] = []
    for metric in metrics_of("verification", PairMetric):
        if "tile" in metric.shown:
            wanted += [(verified, metric, far) for far in (fars if metric.takes == "far" else [None])]
    for metric in metrics_of("retrieval"):
        if "tile" in metric.shown:
            wanted += [(retrieved, metric, at) for at in metric.headline or [None]]
    rows = [_row(results[0], results[1], metric, at) for results, metric, at in wanted]
    told = [row for row in rows if row is not None]
    if not told:
        raise InputError("too few test identities for the interval of a difference: at least 6 are needed")
    return [dict(row) for row in sort_rows(told, a.question())]


def _row(a: Any, b: Any, metric: Metric, at: float | None) -> dict[str, Any] | None:
    """One number, or None where it cannot be measured on so few samples."""
    lower = metric.lower_is_better
    try:
        found = compare(a, b, metric.key if at is None else (metric.base, at))
    except MettleError:
        return None
    better = "" if not found.excludes_zero else "first" if (found.difference < 0) == lower else "second"
    return {
        "name": metric.title.format(format_rate(at) if metric.takes == "far" else at),
        "share": metric.format.unit == "%",
        "lower": lower,
        "first": found.first,
        "second": found.second,
        "difference": found.difference,
        "low": found.interval.low,
        "high": found.interval.high,
        "better": better,
    }
