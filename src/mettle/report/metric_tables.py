"""Numbers of a scenario as tiles, bars and rows of a table: value, interval, meaning."""

from collections.abc import Mapping
from typing import Any

from mettle.evaluate.bootstrap import TOO_FEW
from mettle.evaluate.metrics import Metric, NumberFormat, PairMetric, find_metric, metrics_of
from mettle.report.format import GAP, NONE, format_interval, format_percent, format_rate

HEADLINE_FARS = (1e-2, 1e-3)


def metric_cells(scenario: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All numbers of a scenario in reading order, each with its text, its interval and its meaning."""
    v, r = scenario["verification"], scenario["retrieval"]
    found = []
    for metric in metrics_of("verification", PairMetric):
        if "table" not in metric.shown:
            continue
        for point in sorted(v.get(metric.base) or (), key=lambda p: -p["far"]) if metric.takes == "far" else ():
            entry = _metric_cell(metric, point[metric.base], point["interval"], at=format_rate(point["far"]))
            found.append(entry | {"far": point["far"], "status": point["status"]})
        if not metric.takes and metric.key in v:
            found.append(_metric_cell(metric, v[metric.key]["value"], v[metric.key]["interval"]))
    for key, entry in (r["metrics"] if r else {}).items():
        known = find_metric("retrieval", key)
        if known is not None and "table" in known[0].shown:
            metric, at = known
            found.append(_metric_cell(metric, entry["value"], entry["interval"], at=None if at is None else f"{at:g}"))
    return found


def is_shown(entry: Mapping[str, Any], place: str) -> bool:
    """Whether a number of :func:`metric_cells` is shown in a place beside the table."""
    return place in entry["shown"]


def _metric_cell(
    metric: Metric, value: float | None, interval: Mapping[str, Any] | None, at: str | None = None
) -> dict[str, Any]:
    """One number: as it is, and as text, in the format of its metric."""
    style: NumberFormat = metric.format
    ends = style.template, style.factor, style.unit
    unit = GAP + style.unit if style.unit else ""
    known = {
        "name": metric.title.format(at),
        "text": NONE if value is None else style.template.format(style.factor * value) + unit,
        "interval": "" if value is None else format_interval(interval, *ends),
        "status": "ok",
        "value": value,
        "low": interval["low"] if interval else None,
        "high": interval["high"] if interval else None,
        "better": "low" if metric.lower_is_better else "high",
        "meaning": metric.meaning.format(at),
    }
    everywhere = metric.headline is None or at in {f"{one:g}" for one in metric.headline}
    return known | {"key": metric.key, "shown": sorted(metric.shown) if everywhere else ["table"]}


def without_repeated_note(entry: Mapping[str, Any], first: str = "EER") -> dict[str, Any]:
    """A number for a table, where the row of the ``first`` says for all others why there are no intervals."""
    return {**entry, "interval": "" if entry["interval"] == TOO_FEW and entry["name"] != first else entry["interval"]}


def headline_tiles(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The headline numbers; where there is a second scenario, its EER beside them."""
    (*others, (_, scenario)) = metrics["scenarios"].items()
    known = [entry for entry in metric_cells(scenario) if is_shown(entry, "tile")]
    fars = [n["far"] for n in known if "far" in n]
    wanted = [far for far in HEADLINE_FARS if far in fars] or fars[-2:]
    chosen = [n for n in known if "far" not in n or n["far"] in wanted]
    for entry in chosen:
        if entry.get("status") in ("not measurable", "refused as headline"):
            entry |= {"text": NONE, "interval": "", "meaning": "too few impostor pairs for this rate"}
    for name, other in others[:1]:
        eer = metric_cells(other)[0]
        chosen.append(eer | {"name": f"EER, {name}", "meaning": f"the same error rate for {other['title']}"})
    return chosen


def baseline_bars(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """EER of this model and of the baselines in the headline scenario, with widths for drawing."""
    name = list(metrics["scenarios"])[-1]
    values = {"this model": metrics["scenarios"][name]["verification"]["eer"]["value"]}
    values |= {other: found[name]["eer"] for other, found in reversed(metrics.get("baselines", {}).items())}
    known = [value for value in values.values() if value is not None]
    largest = max(known, default=0.0) or 1.0
    return [
        {"name": other, "text": format_percent(value), "width": 100 * (value or 0) / largest}
        for other, value in values.items()
    ]


def scenario_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of scenarios: one row per number, one cell per scenario."""
    scenarios = metrics["scenarios"]
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for name, scenario in scenarios.items():
        v, r = scenario["verification"], scenario["retrieval"]
        for entry in metric_cells(scenario):
            table.setdefault(entry["name"], {})[name] = without_repeated_note(entry)
        for other, found in metrics.get("baselines", {}).items():
            table.setdefault(f"EER, {other}", {})[name] = plain_cell(format_percent(found[name]["eer"]))
            table.setdefault(f"AUC, {other}", {})[name] = plain_cell(f"{found[name]['auc']:.4f}")
            if "recall@1" in found[name]:
                table.setdefault(f"Recall@1, {other}", {})[name] = plain_cell(
                    format_percent(found[name]["recall@1"], 1)
                )
        table.setdefault("genuine pairs", {})[name] = plain_cell(f"{v['genuine']:,}")
        table.setdefault("impostor pairs", {})[name] = plain_cell(f"{v['impostor']:,}")
        table.setdefault("retrieval queries", {})[name] = plain_cell(f"{r['queries']:,}")
    return [
        {"name": row, "cells": [cells.get(name, plain_cell(NONE)) for name in scenarios]}
        for row, cells in table.items()
    ]


def plain_cell(text: str) -> dict[str, Any]:
    """A cell of the table that is a plain number."""
    return {"text": text, "interval": "", "status": "ok"}
