"""Several runs on one page: numbers and maps side by side, what differs between the recipes, training curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import write_text
from mettle.errors import InputError, RunError
from mettle.evaluate import plots
from mettle.evaluate.bootstrap import TOO_FEW
from mettle.evaluate.run.compare_runs import compare_runs
from mettle.evaluate.run.probes import MODEL
from mettle.report import training_plots
from mettle.report.caveats import Caveats, rank_caveats
from mettle.report.embedding_map import NARROW, map_panes, read_maps
from mettle.report.format import NONE, format_percent, format_rate, scenario_title
from mettle.report.headline import (
    MINUS,
    TITLES,
    UNITS,
    format_points,
    format_points_interval,
    question_name,
    question_scenario,
    question_tiles,
    sort_rows,
)
from mettle.report.metric_tables import is_shown, metric_cells, without_repeated_note
from mettle.report.page import check_page_path, render_page
from mettle.report.run_card import describe_test, probe_card
from mettle.train.callbacks import read_log
from mettle.train.run_folder import RunFolder

FORMAT = 1  # of metrics.json


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
    caveats = _collect_caveats(names, measured)
    paired = paired_tables(runs, names, measured)
    return {
        "runs": [
            {"name": name, "title": m["title"], "color": plots.run_color(k), "folder": str(run.folder)}
            for k, (name, m, run) in enumerate(zip(names, measured, runs, strict=True))
        ],
        "about": describe_test(measured[0]) if _is_same_data(measured) else "",
        "warnings": list(caveats),
        "decisive": list(caveats.decisive),
        "paired": paired,
        "verdict": describe_paired(paired) or describe_difference(names, measured),
        "tables": comparison_tables(measured),
        "maps": map_section(runs, names, measured),
        "probes": probe_rows(names, measured),
        "keys": recipe_differences(runs),
        "training": training_plots.plot_training(logs),
    }


def comparison_tables(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of all runs, those of the question that the first run answers first."""
    question = question_name(measured[0])
    tables = [scenario_table(scenario, measured, question) for scenario in reversed(_scenario_names(measured))]
    found = tables if question == "verification" else [question_table(measured, question), *tables]
    return [table for table in found if table["columns"]]


def question_table(measured: Sequence[Mapping[str, Any]], question: str) -> dict[str, Any]:
    """The numbers that the page of each run begins with."""
    found = [{tile["name"]: tile for tile in question_tiles(m, question)} for m in measured]
    title = f"{TITLES[question]}: {question_scenario(measured[0])}"
    return {"name": title, "title": "what the runs are asked", "units": UNITS[question], **_side_by_side(found)}


def scenario_table(
    scenario: str, measured: Sequence[Mapping[str, Any]], question: str = "verification"
) -> dict[str, Any]:
    """One scenario: a row per run, a column per number, the best of each marked, the first drawn to scale."""
    found = []
    for m in measured:
        cells = metric_cells(m["scenarios"][scenario]) if scenario in m["scenarios"] else []
        cells = sort_rows([cell for cell in cells if is_shown(cell, "comparison")], question)
        first = cells[0]["name"] if cells else ""
        found.append({cell["name"]: without_repeated_note(cell, first) for cell in cells})
    return {
        "name": scenario_title(scenario),
        "title": next(m["scenarios"][scenario]["title"] for m in measured if scenario in m["scenarios"]),
        "units": "95 % intervals over test identities.",
        **_side_by_side(found),
    }


def _side_by_side(found: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Columns and rows of a table from the numbers of each run by name."""
    columns = list(dict.fromkeys(name for entries in found for name in entries))
    if not columns:
        return {"columns": [], "rows": [[] for _ in found], "ranges": [], "better": "right"}
    absent = {"text": NONE, "interval": "", "value": None}
    cells = [[dict(entries.get(name, absent)) for name in columns] for entries in found]
    for at in range(len(columns)):
        known = [(row[at]["value"], row[at]["better"]) for row in cells if row[at]["value"] is not None]
        best = (min if known and known[0][1] == "low" else max)((v for v, _ in known), default=None)
        for row in cells:
            row[at]["best"] = row[at]["value"] == best and len(set(known)) > 1
    better = next((row[0]["better"] for row in cells if row[0]["value"] is not None), "high")
    ranges = _interval_bars([row[0] for row in cells])
    return {"columns": columns, "rows": cells, "ranges": ranges, "better": "left" if better == "low" else "right"}


def paired_tables(
    runs: Sequence[RunFolder], names: Sequence[str], measured: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Every run against the first: each number of the question with the paired interval of its difference."""
    tables = []
    for k in range(1, len(runs)):
        found, why_not = compare_runs(runs[0], runs[k], (measured[0], measured[k]))
        rows = [
            {
                "name": _metric_title(one.metric),
                "first": format_percent(one.first),
                "second": format_percent(one.second),
                "difference": format_points(one.second - one.first),
                "interval": TOO_FEW
                if one.low is None or one.high is None
                else format_points_interval({"low": -one.high, "high": -one.low}),
                "decided": one.excludes_zero,
                "better": (one.second < one.first) == (one.metric == "eer"),
            }
            for one in found
        ]
        tables.append({"first": names[0], "second": names[k], "rows": rows, "why_not": why_not})
    return tables


def describe_paired(tables: Sequence[Mapping[str, Any]]) -> str:
    """What the paired differences decide, in plain words; empty where there is none with an interval."""
    told = []
    for table in tables:
        known = [row for row in table["rows"] if row["interval"] != TOO_FEW]
        if not known:
            continue
        row = known[0]
        name = row["name"] if row["name"][:2].isupper() else row["name"][0].lower() + row["name"][1:]
        what = f"{name} of {table['second']} is {row['difference'].lstrip('+' + MINUS)} "
        what += ("higher" if row["difference"].startswith("+") else "lower") + f" than that of {table['first']}"
        ends = f"95 % interval of the difference {row['interval']}"
        said = (": better" if row["better"] else ": worse") if row["decided"] else ", which may be chance"
        told.append(f"{what[0].upper()}{what[1:]} ({ends}){said}.")
    return " ".join(told)


def _metric_title(name: str) -> str:
    """The name of a number as a page calls it."""
    base, _, at = name.partition("@")
    titles = {"eer": "EER", "auc": "AUC", "map_at_r": "MAP@R", "map": "MAP", "recall": f"Recall@{at}"}
    titles |= {"top_1": "Top-1", "worst_class": "Worst class", "worst_group": "Worst group"}
    return f"TAR at FAR {format_rate(float(at))}" if base == "tar" else titles[base]


def describe_difference(names: Sequence[str], measured: Sequence[Mapping[str, Any]]) -> str:
    """Whether the intervals of the first number of the question overlap, the best run against the others, in words."""
    if not _is_same_data(measured):
        return "The runs were measured on different data, so their numbers cannot be compared."
    tiles = [question_tiles(m, question_name(measured[0]))[:1] for m in measured]
    known = [
        (tile["value"], name, (tile["low"], tile["high"]))
        for name, (tile, *_) in ((name, found) for name, found in zip(names, tiles, strict=True) if found)
        if tile["value"] is not None and tile["low"] is not None
    ]
    first = next((tile for found in tiles for tile in found), {"name": "number of the question", "better": "high"})
    if len(known) < 2:
        what = f"an interval of the {first['name']} (there are too few subjects for one)"
        return f"Fewer than two runs have {what}, so nothing can be said about their difference."
    known.sort(key=lambda entry: entry[0], reverse=first["better"] == "high")
    _, best, own = known[0]
    touching = [name for _, name, (low, high) in known[1:] if low <= own[1] and own[0] <= high]
    apart = [name for _, name, _ in known[1:] if name not in touching]
    superlative = "highest" if first["better"] == "high" else "lowest"
    text = f"{best} has the {superlative} {first['name']}, {question_scenario(measured[0])}."
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
        "synthetic": sum(0 if one.synthetic is None else len(one.synthetic) for one in maps.values()),
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


def _collect_caveats(names: Sequence[str], measured: Sequence[Mapping[str, Any]]) -> Caveats:
    """What to know of all runs: what decides first, each sentence with the name of its run."""
    prints = [m["data"]["fingerprint"] for m in measured]
    decisive, others = [], []
    if not _is_same_data(measured):
        told = ", ".join(f"{name}: {value}" for name, value in zip(names, prints, strict=True))
        decisive.append(f"Not comparable: the runs were measured on different data or splits (fingerprints {told}).")
    for name, m in zip(names, measured, strict=True):
        caveats = rank_caveats(m)
        decisive += [f"{name}: {text}" for text in caveats.decisive]
        others += [f"{name}: {text}" for text in caveats.others]
    return Caveats(tuple(decisive), tuple(others))


def _interval_bars(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, float] | None]:
    """Positions in per cent of a common axis for one number of each run and its interval."""
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
