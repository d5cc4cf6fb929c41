"""Several runs on one page: numbers and maps side by side, what differs between the recipes, training curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import write_text
from mettle.errors import InputError, RunError
from mettle.evaluate.run.probes import MODEL
from mettle.report import plots, training_plots
from mettle.report.caveats import list_caveats
from mettle.report.embedding_map import NARROW, map_panes
from mettle.report.format import NONE, scenario_title
from mettle.report.metric_tables import metric_cells, without_repeated_note
from mettle.report.page import check_page_path, render_page
from mettle.report.run_card import describe_test, probe_card
from mettle.report.two_encoders import read_maps
from mettle.train.callbacks import read_log
from mettle.train.run_folder import RunFolder

FORMAT = 1  # of metrics.json
SHOWN = ("EER", "AUC", "Recall@1", "MAP@R")  # beside TAR at every false-accept rate


def write_comparison(runs: Sequence[RunFolder], path: Path | str, over_seeds: Sequence[str] = ()) -> Path:
    """Write a page that compares runs by their ``metrics.json``, ``log.jsonl`` and ``map.json``.

    Args:
        runs: at least two runs that were evaluated.
        path: where the page goes.
        over_seeds: lines about the mean over the runs, where they are one recipe with several seeds.

    Raises:
        RunError: a run has no metrics, or metrics of another version.
    """
    if len(runs) < 2:
        raise InputError(f"a comparison needs at least two runs, got {len(runs)}")
    path = check_page_path(path)
    write_text(path, render_page("comparison.html.j2", over_seeds=over_seeds, **describe_comparison(runs)))
    return path


def describe_comparison(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Everything on the page, as plain values."""
    measured = [_read_metrics(run) for run in runs]
    names = _run_names(runs)
    logs = [read_log(run.folder / "log.jsonl") for run in runs]
    return {
        "runs": [
            {"name": name, "title": m["title"], "color": plots.run_color(k), "folder": str(run.folder)}
            for k, (name, m, run) in enumerate(zip(names, measured, runs, strict=True))
        ],
        "about": describe_test(measured[0]) if _is_same_data(measured) else "",
        "warnings": _collect_caveats(names, measured),
        "verdict": describe_difference(names, measured),
        "tables": [scenario_table(scenario, measured) for scenario in reversed(_scenario_names(measured))],
        "maps": map_section(runs, names, measured),
        "probes": probe_rows(names, measured),
        "keys": recipe_differences(runs),
        "training": training_plots.plot_training(logs),
    }


def scenario_table(scenario: str, measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One scenario: a row per run, a column per number, the best of each marked, EER drawn to scale."""
    found = [
        {
            n["name"]: without_repeated_note(n)
            for n in metric_cells(m["scenarios"][scenario])
            if n["name"] in SHOWN or "far" in n
        }
        if scenario in m["scenarios"]
        else {}
        for m in measured
    ]
    columns = list(dict.fromkeys(name for entries in found for name in entries))
    absent = {"text": NONE, "interval": "", "value": None}
    cells = [[dict(entries.get(name, absent)) for name in columns] for entries in found]
    for at in range(len(columns)):
        known = [(row[at]["value"], row[at]["better"]) for row in cells if row[at]["value"] is not None]
        best = (min if known and known[0][1] == "low" else max)((v for v, _ in known), default=None)
        for row in cells:
            row[at]["best"] = row[at]["value"] == best and len(set(known)) > 1
    title = next(m["scenarios"][scenario]["title"] for m in measured if scenario in m["scenarios"])
    return {
        "name": scenario_title(scenario),
        "title": title,
        "columns": columns,
        "rows": cells,
        "ranges": _interval_bars(found),
    }


def describe_difference(names: Sequence[str], measured: Sequence[Mapping[str, Any]]) -> str:
    """Whether the intervals of the best run's EER overlap with those of the others, in plain words."""
    if not _is_same_data(measured):
        return "The runs were measured on different data, so their numbers cannot be compared."
    scenario = _scenario_names(measured)[-1]
    found = []
    for name, m in zip(names, measured, strict=True):
        eer = m["scenarios"].get(scenario, {}).get("verification", {}).get("eer", {})
        if eer.get("value") is not None and eer.get("interval"):
            found.append((eer["value"], name, eer["interval"]))
    if len(found) < 2:
        return (
            "Fewer than two runs have an EER with an interval (there are too few subjects for one), so nothing can be "
            "said about their difference."
        )
    found.sort(key=lambda entry: entry[0])
    _, first, own = found[0]
    touching = [name for _, name, band in found[1:] if band["low"] <= own["high"] and own["low"] <= band["high"]]
    apart = [name for _, name, _ in found[1:] if name not in touching]
    text = f"{first} has the lowest EER, {scenario_title(scenario)}."
    if touching:
        text += f" Its interval overlaps with {_join_names('that', touching)}, so the intervals do not separate them."
    if apart:
        text += f" It does not overlap with {_join_names('that', apart)}."
    return text


def recipe_differences(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Recipe keys that are not the same in all runs, with the value of each run."""
    flat = [_flatten_keys(run.recipe.model_dump(mode="json")) for run in runs]
    keys = sorted({key for values in flat for key in values})
    return [
        {"key": key, "values": ["" if values.get(key) is None else str(values[key]) for values in flat]}
        for key in keys
        if any(values.get(key) != flat[0].get(key) for values in flat)
    ]


def map_section(
    runs: Sequence[RunFolder], names: Sequence[str], measured: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """One t-SNE map per encoder, of the same samples, marked as for the first run that has one.

    Maps come from ``map.json``, which a run's own report leaves behind; runs without one are named.
    """
    kept = [read_maps(run, m) for run, m in zip(runs, measured, strict=True)]
    shown = [found for found in kept if found is not None]
    if not shown:
        return None
    locations, marked_names = shown[0]
    first = next(iter(locations.values()))
    maps, missing = {}, []
    for name, found in zip(names, kept, strict=True):
        if found is None or not np.array_equal(next(iter(found[0].values())).rows, first.rows):
            missing.append(name)
            continue
        for encoder, one in found[0].items():
            maps[name if encoder in ("model", MODEL) else f"{name}, {encoder}"] = one
    return {
        "panes": map_panes(maps, NARROW, first.marked),
        "several": True,
        "synthetic": 0,
        "missing": missing,
        "marked": marked_names,
        "points": len(first.rows),
        "identities": len(np.unique(first.labels)),
    }


def probe_rows(names: Sequence[str], measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What probes read from the encoders of all runs, a table per target."""
    tables: dict[str, dict[str, Any]] = {}
    for name, m in zip(names, measured, strict=True):
        for target in (probe_card(m) or {"targets": []})["targets"]:
            for row in target["rows"]:
                table = tables.setdefault(target["title"], {"title": target["title"], "columns": [], "rows": []})
                table["columns"] = max(table["columns"], target["columns"], key=len)
                table["rows"].append({"name": f"{name}: {row['name']}", "cells": row["cells"]})
    none = {"text": NONE, "interval": ""}
    for table in tables.values():  # a run without groups has fewer cells
        for row in table["rows"]:
            row["cells"] = row["cells"] + [none] * (len(table["columns"]) - len(row["cells"]))
    return list(tables.values())


def _read_metrics(run: RunFolder) -> dict[str, Any]:
    found = run.metrics()
    if found.get("format") != FORMAT:
        raise RunError(
            f"{run.folder / 'metrics.json'} has format {found.get('format')}, this version of mettle reads "
            f"{FORMAT}: evaluate it again: mettle evaluate {run.folder}"
        )
    return found


def _is_same_data(measured: Sequence[Mapping[str, Any]]) -> bool:
    return len({m["data"]["fingerprint"] for m in measured}) == 1


def _run_names(runs: Sequence[RunFolder]) -> list[str]:
    """The folders' names, or their paths where two are called the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _scenario_names(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """All scenarios of all runs, the hardest last."""
    order = ["all", "in-domain", "cross-domain"]
    known = dict.fromkeys(scenario for m in measured for scenario in m["scenarios"])
    return sorted(known, key=lambda scenario: order.index(scenario) if scenario in order else len(order))


def _collect_caveats(names: Sequence[str], measured: Sequence[Mapping[str, Any]]) -> list[str]:
    prints = [m["data"]["fingerprint"] for m in measured]
    found = []
    if not _is_same_data(measured):
        told = ", ".join(f"{name}: {value}" for name, value in zip(names, prints, strict=True))
        found.append(f"Not comparable: the runs were measured on different data or splits (fingerprints {told}).")
    for name, m in zip(names, measured, strict=True):
        found += [f"{name}: {text}" for text in list_caveats(m)]
    return found


def _interval_bars(found: Sequence[Mapping[str, Any]]) -> list[dict[str, float] | None]:
    """Positions in per cent of a common axis for each run's EER and its interval."""
    entries = [row.get("EER", {"value": None}) for row in found]
    ends = [e[end] for e in entries for end in ("low", "value", "high") if e.get(end) is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.01

    def at(value: float) -> float:
        return 100 * (value - low + margin) / (high - low + 2 * margin)

    return [
        None
        if e["value"] is None
        else {
            "dot": at(e["value"]),
            "left": at(e["value"] if e["low"] is None else e["low"]),
            "right": at(e["value"] if e["high"] is None else e["high"]),
        }
        for e in entries
    ]


def _flatten_keys(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flatten_keys(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {prefix + key: item}
    return found


def _join_names(word: str, names: Sequence[str]) -> str:
    joined = names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    return f"{word if len(names) == 1 else 'those'} of {joined}"
