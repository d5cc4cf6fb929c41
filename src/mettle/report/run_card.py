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
from mettle.report.caveats import describe_changed_data, names_only_note, rank_caveats
from mettle.report.format import (
    GAP,
    NONE,
    format_interval,
    format_measured_rate,
    format_percent,
    format_range,
    format_rate,
    scenario_title,
)
from mettle.report.headline import (
    TITLES,
    UNITS,
    cluster_rows,
    gain_rows,
    question_bars,
    question_name,
    question_scenario,
    question_tiles,
    sort_rows,
)
from mettle.report.metric_tables import scenario_rows
from mettle.train.run_folder import RunFolder

NAMES = {"E_d": "E_d, the model", "E_b": "E_b, the biased encoder", "model": "this model"}
FEW = 10  # samples; a (class, group) with fewer says little


def build_card(run: RunFolder, metrics: Mapping[str, Any], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Everything the report says in words and numbers.

    Args:
        run: the run.
        metrics: what `evaluate_run` measured, or the content of ``metrics.json``.
        notes: further warnings, such as files that were left out.
    """
    scenarios, question = metrics["scenarios"], question_name(metrics)
    caveats, labels = rank_caveats(metrics), metrics.get("probe", {}).get("labels", {})
    decisive = [*caveats.decisive, *describe_changed_data(run, metrics)]
    return {
        "run": run.name,
        "title": metrics["title"],
        "about": describe_test(metrics),
        "question": {**metrics["question"], "title": TITLES[question]},
        "headline": question_scenario(metrics),
        "scenario": scenario_title(list(scenarios)[-1]),
        "tiles": question_tiles(metrics),
        "units": UNITS[question],
        "bars": question_bars(metrics),
        "scenarios": [
            {"name": scenario_title(name), "title": scenario["title"]} for name, scenario in scenarios.items()
        ],
        "rows": sort_rows(scenario_rows(metrics), question),
        "clusters": cluster_rows(metrics),
        "gains": gain_rows(labels),
        "thresholds": threshold_rows(metrics),
        "probe": probe_card(metrics),
        "warnings": [*decisive, *caveats.others, *notes],
        "decisive": decisive,
        "recipe": run.recipe.to_toml(),
        "commands": reproduction_commands(run),
        "provenance": list_provenance(run, metrics),
    }


def describe_test(metrics: Mapping[str, Any]) -> str:
    """What the test was, in one or two sentences."""
    data, scenarios = metrics["data"], metrics["scenarios"]
    known, trained, how = data["shared_identities"], data["training_identities"], names_only_note(data)
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
        text += f" The test also has {_quote_names(new)}, which {_is_or_are(new)} not in the training data{how}."
    name, scenario = list(scenarios.items())[-1]
    return f"{text} Headline numbers are {name}: {scenario['title']}." if name != "all" else text


def threshold_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
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
            text = {"far": format_measured_rate(point["far"]), "tar": format_percent(point["tar"], 1)}
            done.append({"scenario": scenario_title(name), "above": above, **text})
        value, ends = entry["threshold"], entry.get("tar_interval")
        extent = format_range(ends[0], ends[1], "{:.1f}", 100, "%") if ends else TOO_FEW
        table.append(
            {
                "far": format_rate(float(far)),
                "threshold": f"{value:.4f}" if value is not None else entry["status"],
                "measured_on": entry.get("measured_on", NONE),
                "impostors": f"{entry['impostors']:,}",
                "tar": format_percent(entry.get("tar"), 1),
                "interval": extent if entry.get("tar") is not None else "",
                "test": done,
            }
        )
    return table


def reproduction_commands(run: RunFolder) -> list[dict[str, str]]:
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


def list_provenance(run: RunFolder, metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
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


def _quote_names(names: Sequence[str]) -> str:
    quoted = [f"“{name}”" for name in names[:4]] + ([f"{len(names) - 4} more"] if len(names) > 4 else [])
    word = "the domain " if len(names) == 1 else "the domains "
    return word + (quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1])


def _is_or_are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def card_to_markdown(facts: Mapping[str, Any]) -> str:
    """The card as Markdown."""
    names = [scenario["name"] for scenario in facts["scenarios"]]
    lines = [f"# {_escape_text(facts['title'])}", "", _escape_text(facts["about"]), ""]
    lines += [_quote_warning(text, text in facts["decisive"]) for text in facts["warnings"]]
    lines += [
        "",
        "## Headline",
        "",
        f"{facts['question']['title'].capitalize()}, {facts['headline']}. {facts['units']}",
        "",
    ]
    named = [t["name"] + (f" ({t['detail']})" if t["detail"] else "") for t in facts["tiles"]]
    body = [[name, t["text"], t["interval"]] for name, t in zip(named, facts["tiles"], strict=True)]
    lines += _table_lines(["", "value", "95 % interval"], body)
    if facts["gains"]:
        lines += ["## What training brought", "", "Linear probe, the same test samples, paired intervals.", ""]
        body = [[g["name"], g["first"], g["second"], g["difference"], g["interval"]] for g in facts["gains"]]
        lines += _table_lines(["", "this model", "before training", "difference", "95 % interval"], body)
    lines += ["## All numbers", ""]
    shown = [[row["name"], *(_join_cell(cell) for cell in row["cells"])] for row in facts["rows"]]
    lines += _table_lines(["", *names], shown)
    if facts["clusters"]:
        lines += ["## Clusters against labels", ""]
        lines += _table_lines(["", "value", "range"], [[c["name"], c["text"], c["range"]] for c in facts["clusters"]])
    if facts["thresholds"]:
        lines += ["## Thresholds", "", "Accept a pair when its cosine is at least the threshold.", ""]
        head = ["FAR wanted", "threshold", "measured on", *(f"{name}: FAR, TAR on test" for name in names)]
        body = [
            [t["far"], t["threshold"], t["measured_on"], *(f"{p['far']}, {p['tar']}" for p in t["test"])]
            for t in facts["thresholds"]
        ]
        lines += _table_lines(head, body)
    lines += _probe_lines(facts["probe"])
    lines += ["## Again", "", "```sh", *(f"{c['line']}  # {c['what']}" for c in facts["commands"]), "```", ""]
    lines += ["## Recipe", "", "```toml", facts["recipe"].rstrip(), "```", "", "## Provenance", ""]
    lines += [f"- {name}: `{value}`" for name, value in facts["provenance"]]
    return "\n".join(lines) + "\n"


def _quote_warning(text: str, decisive: bool) -> str:
    """A warning as a quotation; one that decides about all the rest is bold."""
    return f"> **{_escape_text(text)}**\n>" if decisive else f"> **Warning.** {_escape_text(text)}\n>"


def _probe_lines(found: Mapping[str, Any] | None) -> list[str]:
    """What probes read from frozen features, as Markdown."""
    if found is None:
        return []
    lines = ["## Probes", "", _escape_text(found["about"]), ""]
    for target in [*found["targets"], *found["groups"]]:
        status = "" if target["rows"] else f": {_escape_text(target['status'])}"
        lines += [f"**{_escape_text(target['title'])}**{status}", ""]
        if target["rows"]:
            body = [[row["name"], *map(_join_cell, row["cells"])] for row in target["rows"]]
            lines += _table_lines(["", *target["columns"]], body)
        lines += [*(f"- {_escape_text(text)}" for text in target.get("notes", [])), ""]
    return lines


def _join_cell(cell: Mapping[str, Any]) -> str:
    return f"{cell['text']} ({cell['interval']})" if cell["interval"] else cell["text"]


def _table_lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    marks = ["---"] + ["---:"] * (len(head) - 1)
    return [f"| {' | '.join(_escape_text(cell) for cell in row)} |" for row in (head, marks, *body)] + [""]


def _escape_text(text: str) -> str:
    """Text that cannot break out of a Markdown line or cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def probe_card(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Tables of what probes read from frozen features; None where none were asked for."""
    found = metrics.get("probe")
    if not found:
        return None
    targets = [_label_probe(found["labels"])]
    if "attribute" in found:
        targets.append(_attribute_probe(found["attribute"]))
    return {"about": describe_probes(found), "targets": targets, "groups": _group_tables(found["labels"])}


def describe_probes(found: Mapping[str, Any]) -> str:
    """How the probes were made."""
    text = "A linear classifier and a vote of the 20 nearest training samples, on frozen features"
    if "fitted_on" not in found:
        return text + "."
    text += f" (what the head sees, eval mode) of {found['fitted_on']:,} training samples."
    fitted = [target for target in (found["labels"], found.get("attribute")) if target and target["status"] == "ok"]
    chosen = sorted({one["chosen_on"] for target in fitted for one in target["encoders"].values()})
    return text + (f" Strength of the linear one chosen on {' and '.join(chosen)}, never on test." if chosen else "")


def _label_probe(target: Mapping[str, Any]) -> dict[str, Any]:
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
    notes = _tested_note(target)
    for name, one in encoders.items():
        worst = one["linear"]["worst_class"]
        cells = [
            _accuracy_cell(one["linear"]),
            _accuracy_cell(one["knn"]),
            _text_cell(format_percent(worst["accuracy"], 1), worst["name"]),
        ]
        if "worst_group" in one:
            cell = one["worst_group"]
            cells.append(
                _text_cell(
                    format_percent(cell["linear"], 1), f"{cell['class']} / {cell['group']}, n = {cell['samples']}"
                )
            )
            cells.append(_text_cell(format_percent(cell["adjusted"], 1)))
        shown["rows"].append({"name": NAMES.get(name, name), "cells": cells})
        notes += [f"{NAMES.get(name, name)}: {text}." for text in one["warnings"]]
    if grouped:
        cell = next(iter(encoders.values()))["worst_group"]
        notes.append(f"Groups: {cell['groups']:,} of (class, {cell['by']}). Adjusted: as common as in training.")
        if cell["smallest"] < FEW:
            notes.append(f"The smallest of them has {cell['smallest']} test samples: the worst group is partly chance.")
    return shown | {"notes": notes + _gap_note(target)}


def _attribute_probe(target: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"title": f"The attribute “{target['name']}”", "head": "", "status": target["status"]}
    if target["status"] != "ok":
        return shown | {"columns": [], "rows": [], "notes": []}
    shown["columns"] = ["top-1, linear", "top-1, kNN", "worst group"]
    shown["rows"] = []
    notes = _tested_note(target)
    for name, one in target["encoders"].items():
        worst = one["linear"]["worst_class"]
        cells = [
            _accuracy_cell(one["linear"]),
            _accuracy_cell(one["knn"]),
            _text_cell(format_percent(worst["accuracy"], 1), worst["name"]),
        ]
        shown["rows"].append({"name": NAMES.get(name, name), "cells": cells})
        notes += [f"{NAMES.get(name, name)}: {text}." for text in one["warnings"]]
    guess = format_percent(target["largest_group"], 1)
    notes.append(f"Guessing the largest of {len(target['groups'])} groups would be right {guess} of the time.")
    return shown | {"notes": notes + _gap_note(target)}


def _group_tables(target: Mapping[str, Any]) -> list[dict[str, Any]]:
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
                        _text_cell(f"{row['samples']:,}"),
                        *(
                            _text_cell(format_percent(one["groups"][column][k]["linear"], 1))
                            for one in encoders.values()
                        ),
                    ],
                }
                for k, row in enumerate(rows)
            ],
        }
        for column, rows in first.items()
    ]


def _tested_note(target: Mapping[str, Any]) -> list[str]:
    text = f"Tested on {target['tested_on']:,} samples"
    if target["left_out"]:
        return [f"{text}; {target['left_out']:,} have a value that training never saw and are left out."]
    return [text + "."]


def _gap_note(target: Mapping[str, Any]) -> list[str]:
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


def _accuracy_cell(one: Mapping[str, Any]) -> dict[str, str]:
    return _text_cell(format_percent(one["accuracy"], 1), format_interval(one["interval"], "{:.1f}"))


def _text_cell(text: str, small: str = "") -> dict[str, str]:
    return {"text": text or NONE, "interval": small, "status": "ok"}
