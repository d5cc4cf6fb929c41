"""Two runs on the same people: every number side by side, with the interval of the difference."""

from typing import Any

from mettle.errors import InputError, MettleError
from mettle.evaluate import compare
from mettle.report.format import format_rate
from mettle.workbench.lazy_run import LazyRun

RETRIEVAL = (("recall@1", "Recall@1"), ("map_at_r", "MAP@R"))


def compare_runs(first: LazyRun, second: LazyRun) -> list[dict[str, Any]]:
    """One row a number: both values, first − second, its interval, and whether it leaves out 0.

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
    wanted = [("eer", "EER", True), ("auc", "AUC", False)]
    wanted += [(f"tar@{far!r}", f"TAR at FAR {format_rate(far)}", False) for far in fars]
    rows = [_row(*verified, name, title, lower) for name, title, lower in wanted]
    rows += [_row(*retrieved, name, title, False) for name, title in RETRIEVAL]
    told = [row for row in rows if row is not None]
    if not told:
        raise InputError("too few test identities for the interval of a difference: at least 6 are needed")
    return told


def _row(a: Any, b: Any, name: str, title: str, lower: bool) -> dict[str, Any] | None:
    """One number, or None where it cannot be measured on so few samples."""
    try:
        found = compare(a, b, name)
    except MettleError:
        return None
    better = "" if not found.decided else "first" if (found.difference < 0) == lower else "second"
    return {
        "name": title,
        "share": name != "auc",
        "lower": lower,
        "first": found.first,
        "second": found.second,
        "difference": found.difference,
        "low": found.interval.low,
        "high": found.interval.high,
        "better": better,
    }
