"""The probes of a run in words and tables, for its card and its page."""

from collections.abc import Mapping
from typing import Any

from mettle.evaluate.intervals import TOO_FEW
from mettle.report.number import GAP, NONE, ends, percent

NAMES = {"E_d": "E_d, the model", "E_b": "E_b, the biased encoder", "model": "this model"}
FEW = 10  # samples; a (class, group) with fewer says little


def probe_card(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Tables of what probes read from frozen features; None where none were asked for."""
    found = metrics.get("probe")
    if not found:
        return None
    targets = [_labels(found["labels"])]
    if "attribute" in found:
        targets.append(_attribute(found["attribute"]))
    return {"about": about(found), "targets": targets, "groups": _groups(found["labels"])}


def about(found: Mapping[str, Any]) -> str:
    """How the probes were made."""
    text = "A linear classifier and a vote of the 20 nearest training samples, on frozen features"
    if "fitted_on" not in found:
        return text + "."
    text += f" (what the head sees, eval mode) of {found['fitted_on']:,} training samples."
    fitted = [target for target in (found["labels"], found.get("attribute")) if target and target["status"] == "ok"]
    chosen = sorted({one["chosen_on"] for target in fitted for one in target["encoders"].values()})
    return text + (f" Strength of the linear one chosen on {' and '.join(chosen)}, never on test." if chosen else "")


def _labels(target: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "title": "Who or what it is",
        "head": "",
        "status": target["status"],
        "columns": [],
        "rows": [],
    }
    if target["status"] != "ok":
        return shown | {"notes": []}
    encoders = target["encoders"]
    grouped = any("worst_group" in one for one in encoders.values())
    shown["columns"] = ["top-1, linear", "top-1, kNN", "worst class"] + (["worst (class, group)", "adjusted"] * grouped)
    notes = _tested(target)
    for name, one in encoders.items():
        worst = one["linear"]["worst_class"]
        cells = [_top(one["linear"]), _top(one["knn"]), _cell(percent(worst["accuracy"], 1), worst["name"])]
        if "worst_group" in one:
            cell = one["worst_group"]
            cells.append(_cell(percent(cell["linear"], 1), f"{cell['class']} / {cell['group']}, n = {cell['samples']}"))
            cells.append(_cell(percent(cell["adjusted"], 1)))
        shown["rows"].append({"name": NAMES.get(name, name), "cells": cells})
        notes += [f"{NAMES.get(name, name)}: {text}." for text in one["warnings"]]
    if grouped:
        cell = next(iter(encoders.values()))["worst_group"]
        notes.append(f"Groups: {cell['groups']:,} of (class, {cell['by']}). Adjusted: as common as in training.")
        if cell["smallest"] < FEW:
            notes.append(f"The smallest of them has {cell['smallest']} test samples: the worst group is partly chance.")
    return shown | {"notes": notes + _gap(target)}


def _attribute(target: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"title": f"The attribute “{target['name']}”", "head": "", "status": target["status"]}
    if target["status"] != "ok":
        return shown | {"columns": [], "rows": [], "notes": []}
    shown["columns"] = ["top-1, linear", "top-1, kNN", "worst group"]
    shown["rows"] = []
    notes = _tested(target)
    for name, one in target["encoders"].items():
        worst = one["linear"]["worst_class"]
        cells = [_top(one["linear"]), _top(one["knn"]), _cell(percent(worst["accuracy"], 1), worst["name"])]
        shown["rows"].append({"name": NAMES.get(name, name), "cells": cells})
        notes += [f"{NAMES.get(name, name)}: {text}." for text in one["warnings"]]
    guess = percent(target["largest_group"], 1)
    notes.append(f"Guessing the largest of {len(target['groups'])} groups would be right {guess} of the time.")
    return shown | {"notes": notes + _gap(target)}


def _groups(target: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Accuracy of the linear probe by every column with few values, an encoder a column."""
    if target["status"] != "ok":
        return []
    encoders = target["encoders"]
    first = next(iter(encoders.values()))["groups"]
    return [
        {
            "title": column,
            "head": column,
            "notes": [],
            "columns": ["test samples", *(NAMES.get(name, name) for name in encoders)],
            "rows": [
                {
                    "name": row["name"],
                    "cells": [
                        _cell(f"{row['samples']:,}"),
                        *(_cell(percent(one["groups"][column][k]["linear"], 1)) for one in encoders.values()),
                    ],
                }
                for k, row in enumerate(rows)
            ],
        }
        for column, rows in first.items()
    ]


def _tested(target: Mapping[str, Any]) -> list[str]:
    text = f"Tested on {target['tested_on']:,} samples"
    if target["left_out"]:
        return [f"{text}; {target['left_out']:,} have a value that training never saw and are left out."]
    return [text + "."]


def _gap(target: Mapping[str, Any]) -> list[str]:
    gap = target.get("gap")
    if gap is None:
        return []
    first, second = list(target["encoders"])[:2]
    extent = f" ({TOO_FEW})"
    if gap["interval"]:
        low, high = gap["interval"]["low"], gap["interval"]["high"]
        extent = f" (95 % interval {100 * low:+.1f} to {100 * high:+.1f})"
    more = "more" if gap["value"] >= 0 else "less"
    points = f"{abs(100 * gap['value']):.1f}{GAP}points"
    return [f"The linear probe reads {points} {more} from {first} than from {second}{extent}."]


def _top(one: Mapping[str, Any]) -> dict[str, str]:
    return _cell(percent(one["accuracy"], 1), ends(one["interval"], "{:.1f}"))


def _cell(text: str, small: str = "") -> dict[str, str]:
    return {"text": text or NONE, "interval": small, "status": "ok"}
