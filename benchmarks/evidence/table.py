"""From the record of a study to numbers with intervals: means over seeds, and differences paired by seed."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

Rows = dict[str, dict[int, dict[str, float]]]  # by row name and seed


class Spread(NamedTuple):
    """A mean over seeds and half the width of its 95 % interval (Student's t; NaN for one seed)."""

    mean: float
    half: float
    seeds: int

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half


def rows_of(record: dict[str, Any]) -> Rows:
    """Every row of every run that was looked at on test data; candidates that were not chosen have none."""
    found: Rows = {}
    for job in record["jobs"]:
        for name, row in (job.get("rows") or {}).items():
            found.setdefault(name, {})[job["seed"]] = row
    return found


def spread(values: Iterable[float]) -> Spread:
    """Mean and interval."""
    x = np.array([v for v in values if np.isfinite(v)])
    if len(x) == 0:
        return Spread(np.nan, np.nan, 0)
    half = float(student.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x))) if len(x) > 1 else np.nan
    return Spread(float(x.mean()), half, len(x))


def mean(rows: Rows, name: str, metric: str) -> Spread:
    """One cell."""
    return spread(row[metric] for row in rows.get(name, {}).values() if metric in row)


def difference(rows: Rows, name: str, base: str, metric: str) -> Spread:
    """Row less base, over the seeds that both have."""
    a, b = rows.get(name, {}), rows.get(base, {})
    both = [s for s in a if s in b and metric in a[s] and metric in b[s]]
    return spread(a[s][metric] - b[s][metric] for s in both)


def shown(x: Spread, scale: float = 100, signed: bool = False) -> str:
    """``12.3 ± 0.4``, in percent unless told otherwise."""
    if x.seeds == 0:
        return "not run"
    digits = 2 if scale == 100 and abs(scale * x.mean) < 10 else 1
    text = f"{scale * x.mean:{'+' if signed else ''}.{digits}f}"
    return text if np.isnan(x.half) else f"{text} ± {scale * x.half:.{digits}f}"


def markdown(head: list[str], lines: Iterable[list[str]]) -> str:
    """A table."""
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)])


def levels(rows: Rows, words: dict[str, str], metrics: list[str], scales: dict[str, float] | None = None) -> str:
    """All rows, means and intervals over seeds."""
    scale = {m: 100.0 for m in metrics} | (scales or {})
    lines = []
    for name, title in words.items():
        if name in rows:
            cells = [shown(mean(rows, name, m), scale[m]) for m in metrics]
            lines.append([title, str(len(rows[name])), *cells])
    return markdown(["", "seeds", *metrics], lines)


def differences(rows: Rows, words: dict[str, str], base: str, metrics: list[str]) -> str:
    """All rows less one of them, paired by seed."""
    lines = [
        [f"{title} − {words[base]}", *(shown(difference(rows, name, base, m), signed=True) for m in metrics)]
        for name, title in words.items()
        if name in rows and name != base
    ]
    return markdown(["", *metrics], lines)


SEEDS = 5  # the interval of two seeds rests on t = 12.7, and one lucky pair of runs decides
WITHDRAWN = "*withdrawn, being measured again*"


def verdict(x: Spread, wanted: int, withdrawn: str = "") -> str:
    """What an interval says of a claim that the difference has this sign; or why the study cannot decide it."""
    if withdrawn:
        return f"{WITHDRAWN}: {withdrawn}"
    if x.seeds < SEEDS or np.isnan(x.half):
        return f"not decided: {x.seeds} seeds, {SEEDS} are needed"
    if x.low <= 0 <= x.high:
        return "not decided: the interval holds 0"
    return "holds" if np.sign(x.mean) == wanted else "contradicted"
