"""The card of a run: everything a reader must know, as a plain dictionary and as Markdown.

    metrics.json, recipe, contract ─ card ─┬─ markdown ─ card.md
                                           └─ report.html

The page shows the texts of the card, so the two cannot disagree.

The card of a run as Markdown.

The probes of a run in words and tables, for its card and its page.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from mettle import __version__
from mettle.atomic_files import sha256
from mettle.evaluate.bootstrap import TOO_FEW
from mettle.report.caveats import describe_changed_data, going_by_names, training_verdict, warnings
from mettle.report.format import GAP, NONE, band, called, ends, percent, rate, realised
from mettle.report.metric_tables import bars, rows, tiles
from mettle.train.run_folder import RunFolder

NAMES = {"E_d": "E_d, the model", "E_b": "E_b, the biased encoder", "model": "this model"}
FEW = 10  # samples; a (class, group) with fewer says little


def card(run: RunFolder, metrics: Mapping[str, Any], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Everything the report says in words and numbers.

    Args:
        run: the run.
        metrics: what `evaluate_run` measured, or the content of ``metrics.json``.
        notes: further warnings, such as files that were left out.
    """
    ways = metrics["scenarios"]
    headline = called(list(ways)[-1])
    return {
        "run": run.name,
        "title": metrics["title"],
        "about": about(metrics),
        "headline": headline,
        "tiles": tiles(metrics),
        "bars": bars(metrics),
        "scenarios": [{"name": called(name), "title": way["title"]} for name, way in ways.items()],
        "rows": rows(metrics),
        "thresholds": thresholds(metrics),
        "probe": probe_card(metrics),
        "verdict": training_verdict(metrics),
        "warnings": [*warnings(metrics), *describe_changed_data(run, metrics), *notes],
        "recipe": run.recipe.to_toml(),
        "commands": commands(run),
        "provenance": provenance(run, metrics),
    }


def about(metrics: Mapping[str, Any]) -> str:
    """What the test was, in one or two sentences."""
    data, ways = metrics["data"], metrics["scenarios"]
    known, trained, how = data["shared_identities"], data["training_identities"], going_by_names(data)
    if known is None:
        who = "whether they were trained on is not known"
    elif known == 0:
        who = f"none of them was trained on{how} (open set)"
    else:
        kind = "closed" if known == data["test_identities"] else "mixed"
        who = f"{known:,} of them were also trained on{how} ({kind} set)"
    start = "Tested" if trained is None else f"Trained on {trained:,} identities, tested"
    text = f"{start} on {data['test_samples']:,} samples of {data['test_identities']:,} identities: {who}."
    new = data.get("unseen_domains") or []
    if new:
        text += f" The test also has {_listed(new)}, which {_are(new)} not in the training data{how}."
    name, way = list(ways.items())[-1]
    return f"{text} Headline numbers are {name}: {way['title']}." if name != "all" else text


def thresholds(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each threshold was set for and what it does on the test split."""
    found = metrics.get("thresholds")
    if not found:
        return []
    table = []
    for far, entry in found["set"].items():
        done = []
        for name, points in found["on test"].items():
            point = points.get(far, {"far": None, "tar": None})
            above = point["far"] is not None and point["far"] > float(far)
            text = {"far": realised(point["far"]), "tar": percent(point["tar"], 1)}
            done.append({"scenario": called(name), "above": above, **text})
        value, ends = entry["threshold"], entry.get("tar_interval")
        extent = band(ends[0], ends[1], "{:.1f}", 100, "%") if ends else TOO_FEW
        table.append(
            {
                "far": rate(float(far)),
                "threshold": f"{value:.4f}" if value is not None else entry["status"],
                "measured_on": entry.get("measured_on", NONE),
                "impostors": f"{entry['impostors']:,}",
                "tar": percent(entry.get("tar"), 1),
                "interval": extent if entry.get("tar") is not None else "",
                "test": done,
            }
        )
    return table


def commands(run: RunFolder) -> list[dict[str, str]]:
    """The command lines that make this run and its report again."""
    folder, again = run.folder, f"{run.name}-again"
    recipe = ["mettle", "train", str(folder / "recipe.toml"), "--runs", str(folder.parent), "--name", again]
    return [
        {"what": "train the same recipe again, under another name", "line": shlex.join(recipe)},
        {"what": "measure this run again", "line": shlex.join(["mettle", "evaluate", str(folder)])},
        {"what": "write this page again", "line": shlex.join(["mettle", "report", str(folder)])},
        {
            "what": "compare the two runs",
            "line": shlex.join(["mettle", "report", str(folder), str(folder.parent / again), "-o", "comparison.html"]),
        },
    ]


def provenance(run: RunFolder, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Versions and hashes."""
    found = [
        ("data", str(metrics["data"]["source"])),
        ("data fingerprint", metrics["data"]["fingerprint"]),
        ("weights (SHA-256)", metrics["weights"]),
        ("recipe.toml (SHA-256)", sha256(run.folder / "recipe.toml")),
        ("seed", str(run.recipe.seed)),
    ]
    found += [(f"{name}, in training", str(run.state[name])) for name in ("torch", "python") if name in run.state]
    return [*found, ("mettle, for this report", __version__)]


def _listed(names: Sequence[str]) -> str:
    quoted = [f"“{name}”" for name in names[:4]] + ([f"{len(names) - 4} more"] if len(names) > 4 else [])
    word = "the domain " if len(names) == 1 else "the domains "
    return word + (quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1])


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def markdown(facts: Mapping[str, Any]) -> str:
    """The card as Markdown."""
    names = [way["name"] for way in facts["scenarios"]]
    lines = [f"# {_plain(facts['title'])}", "", _plain(facts["about"]), ""]
    if facts["warnings"]:
        lines += [*(_warning(text, text == facts["verdict"]) for text in facts["warnings"]), ""]
    lines += ["## Headline", "", f"95 % intervals over test identities; {facts['headline']}.", ""]
    lines += _table(["", "value", "interval"], [[t["name"], t["text"], t["interval"]] for t in facts["tiles"]])
    lines += ["## All numbers", ""]
    shown = [[row["name"], *(_joined(cell) for cell in row["cells"])] for row in facts["rows"]]
    lines += _table(["", *names], shown)
    if facts["thresholds"]:
        lines += ["## Thresholds", "", "Accept a pair when its cosine is at least the threshold.", ""]
        head = ["FAR wanted", "threshold", "measured on", *(f"{name}: FAR, TAR on test" for name in names)]
        body = [
            [t["far"], t["threshold"], t["measured_on"], *(f"{p['far']}, {p['tar']}" for p in t["test"])]
            for t in facts["thresholds"]
        ]
        lines += _table(head, body)
    lines += _probes(facts["probe"])
    lines += ["## Again", "", "```sh", *(f"{c['line']}  # {c['what']}" for c in facts["commands"]), "```", ""]
    lines += ["## Recipe", "", "```toml", facts["recipe"].rstrip(), "```", "", "## Provenance", ""]
    lines += [f"- {name}: `{value}`" for name, value in facts["provenance"]]
    return "\n".join(lines) + "\n"


def _warning(text: str, decisive: bool) -> str:
    """A warning as a quotation; one that decides about all the rest is bold."""
    return f"> **{_plain(text)}**\n>" if decisive else f"> **Warning.** {_plain(text)}\n>"


def _probes(found: Mapping[str, Any] | None) -> list[str]:
    """What probes read from frozen features, as Markdown."""
    if found is None:
        return []
    lines = ["## Probes", "", _plain(found["about"]), ""]
    for target in [*found["targets"], *found["groups"]]:
        status = "" if target["rows"] else f": {_plain(target['status'])}"
        lines += [f"**{_plain(target['title'])}**{status}", ""]
        if target["rows"]:
            body = [[row["name"], *map(_joined, row["cells"])] for row in target["rows"]]
            lines += _table(["", *target["columns"]], body)
        lines += [*(f"- {_plain(text)}" for text in target.get("notes", [])), ""]
    return lines


def _joined(cell: Mapping[str, Any]) -> str:
    return f"{cell['text']} ({cell['interval']})" if cell["interval"] else cell["text"]


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    marks = ["---"] + ["---:"] * (len(head) - 1)
    return [f"| {' | '.join(_plain(cell) for cell in row)} |" for row in (head, marks, *body)] + [""]


def _plain(text: str) -> str:
    """Text that cannot break out of a Markdown line or cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def probe_card(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Tables of what probes read from frozen features; None where none were asked for."""
    found = metrics.get("probe")
    if not found:
        return None
    targets = [_labels(found["labels"])]
    if "attribute" in found:
        targets.append(_attribute(found["attribute"]))
    return {"about": describe_probes(found), "targets": targets, "groups": _groups(found["labels"])}


def describe_probes(found: Mapping[str, Any]) -> str:
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
