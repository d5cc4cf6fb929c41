"""Numbers of a scenario as tiles, bars and rows of a table: value, interval, meaning."""

from collections.abc import Mapping
from typing import Any

from mettle.evaluate.bootstrap import TOO_FEW
from mettle.report.format import GAP, NONE, format_interval, format_percent, format_rate

MEANING = {
    "EER": "error rate where false accepts equal false rejects; lower is better",
    "AUC": "chance that a genuine pair scores above an impostor pair",
    "Recall@1": "samples whose nearest neighbour is the right identity",
    "MAP@R": "how purely the nearest neighbours are the right identity",
}
HEADLINE_FARS = (1e-2, 1e-3)


def metric_cells(scenario: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All numbers of a scenario in reading order, each with its text, its interval and its meaning."""
    v, r = scenario["verification"], scenario["retrieval"]
    found = [
        _metric_cell("EER", v["eer"]["value"], v["eer"]["interval"], better="low"),
        _metric_cell("AUC", v["auc"]["value"], v["auc"]["interval"], form="{:.4f}"),
    ]
    for point in sorted(v["tar"], key=lambda p: -p["far"]):
        name = f"TAR at FAR {format_rate(point['far'])}"
        meaning = f"genuine pairs accepted when {format_rate(point['far'])} of impostor pairs are"
        entry = _metric_cell(name, point["tar"], point["interval"], digits=1)
        found.append(entry | {"far": point["far"], "status": point["status"], "meaning": meaning})
    named = {"map": "MAP", "mrr": "MRR", "ndcg": "nDCG", "r_precision": "R-precision", "map_at_r": "MAP@R"}
    for key, entry in r["metrics"].items():
        if key in named or key.startswith("recall@"):  # the others stand in the JSON
            name = named[key] if key in named else key.replace("recall@", "Recall@")
            found.append(_metric_cell(name, entry["value"], entry["interval"], digits=1))
    return found


def _metric_cell(
    name: str,
    value: float | None,
    interval: Mapping[str, Any] | None,
    *,
    better: str = "high",
    form: str = "",
    digits: int = 2,
) -> dict[str, Any]:
    """One number: as it is, and as text; shares in per cent unless a form is given."""
    factor, unit, form = (1, "", form) if form else (100, "%", f"{{:.{digits}f}}")
    text = NONE if value is None else form.format(factor * value) + (GAP + unit if unit else "")
    low, high = (interval["low"], interval["high"]) if interval else (None, None)
    extent = "" if value is None else format_interval(interval, form, factor, unit)
    known = {"value": value, "low": low, "high": high, "better": better, "meaning": MEANING.get(name, "")}
    return {"name": name, "text": text, "interval": extent, "status": "ok", **known}


def without_repeated_note(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A number for a table, where the row of the EER says for all others why there are no intervals."""
    return {**entry, "interval": "" if entry["interval"] == TOO_FEW and entry["name"] != "EER" else entry["interval"]}


def headline_tiles(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The headline numbers; where there is a second scenario, its EER beside them."""
    (*others, (_, scenario)) = metrics["scenarios"].items()
    known = metric_cells(scenario)
    fars = [n["far"] for n in known if "far" in n]
    wanted = [far for far in HEADLINE_FARS if far in fars] or fars[-2:]
    chosen = [n for n in known if n["name"] in MEANING or n.get("far") in wanted]
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
