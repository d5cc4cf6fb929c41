"""The card of a run: everything a reader must know, as a plain dictionary and as Markdown.

    metrics.json, recipe, contract ─ card ─┬─ markdown ─ card.md
                                           └─ report.html

The page shows the texts of the card, so the two cannot disagree.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from mettle import __version__
from mettle.atomic_files import sha256
from mettle.evaluate.intervals import LEAST, TOO_FEW
from mettle.evaluate.protocol import PRETRAINED, RAW, UNTRAINED
from mettle.report.markdown import markdown as markdown
from mettle.report.number import MEANING, NONE, band, called, numbers, percent, rate, realised, told_once
from mettle.report.probes import probe_card
from mettle.train.run_folder import RunFolder

FEW_IDENTITIES = 30  # below, a bootstrap over identities is too coarse for its nominal level
COARSE_EER = 0.005  # half the gap between the operating points around the EER; above, a warning
HEADLINE_FARS = (1e-2, 1e-3)


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
        "warnings": [*warnings(metrics), *_changed(run, metrics), *notes],
        "recipe": run.recipe.to_toml(),
        "commands": commands(run),
        "provenance": provenance(run, metrics),
    }


def about(metrics: Mapping[str, Any]) -> str:
    """What the test was, in one or two sentences."""
    data, ways = metrics["data"], metrics["scenarios"]
    known, trained, how = data["shared_identities"], data["training_identities"], _how(data)
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


def tiles(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The headline numbers; where there is a second scenario, its EER beside them."""
    (*others, (_, way)) = metrics["scenarios"].items()
    known = numbers(way)
    fars = [n["far"] for n in known if "far" in n]
    wanted = [far for far in HEADLINE_FARS if far in fars] or fars[-2:]
    chosen = [n for n in known if n["name"] in MEANING or n.get("far") in wanted]
    for entry in chosen:
        if entry.get("status") in ("not measurable", "refused as headline"):
            entry |= {"text": NONE, "interval": "", "meaning": "too few impostor pairs for this rate"}
    for name, other in others[:1]:
        eer = numbers(other)[0]
        chosen.append(eer | {"name": f"EER, {name}", "meaning": f"the same error rate for {other['title']}"})
    return chosen


def bars(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """EER of this model and of the baselines in the headline scenario, with widths for drawing."""
    name = list(metrics["scenarios"])[-1]
    values = {"this model": metrics["scenarios"][name]["verification"]["eer"]["value"]}
    values |= {other: found[name]["eer"] for other, found in reversed(metrics.get("baselines", {}).items())}
    known = [value for value in values.values() if value is not None]
    largest = max(known, default=0.0) or 1.0
    return [
        {"name": other, "text": percent(value), "width": 100 * (value or 0) / largest}
        for other, value in values.items()
    ]


def rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of scenarios: one row per number, one cell per scenario."""
    ways = metrics["scenarios"]
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for name, way in ways.items():
        v, r = way["verification"], way["retrieval"]
        for entry in numbers(way):
            table.setdefault(entry["name"], {})[name] = told_once(entry)
        for other, found in metrics.get("baselines", {}).items():
            table.setdefault(f"EER, {other}", {})[name] = _cell(percent(found[name]["eer"]))
            table.setdefault(f"AUC, {other}", {})[name] = _cell(f"{found[name]['auc']:.4f}")
            if "recall@1" in found[name]:
                table.setdefault(f"Recall@1, {other}", {})[name] = _cell(percent(found[name]["recall@1"], 1))
        table.setdefault("genuine pairs", {})[name] = _cell(f"{v['genuine']:,}")
        table.setdefault("impostor pairs", {})[name] = _cell(f"{v['impostor']:,}")
        table.setdefault("retrieval queries", {})[name] = _cell(f"{r['queries']:,}")
    return [{"name": row, "cells": [cells.get(name, _cell(NONE)) for name in ways]} for row, cells in table.items()]


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


def warnings(metrics: Mapping[str, Any]) -> list[str]:
    """What a reader should know before trusting the numbers, most serious first: that training has not helped leads."""
    data, verdict = metrics["data"], training_verdict(metrics)
    raw = _compare_baseline(metrics, RAW, "Raw inputs do as well")
    found = [text for text in (verdict, raw) if text]
    if data["shared_identities"] is None:
        found.append(
            "Open or closed set unknown: the run does not say who it was trained on. Where test identities were among "
            "them, the numbers say nothing about new ones."
        )
    elif data["shared_identities"]:
        kind, told = "Mixed", "mix known and new"
        if data["shared_identities"] == data["test_identities"]:
            kind, told = "Closed", "say nothing about new"
        chance = " Equal names may be chance." if _how(data) else ""
        found.append(
            f"{kind} set: {data['shared_identities']:,} of {data['test_identities']:,} test identities were "
            f"also trained on{_how(data)}. The numbers {told} identities.{chance}"
        )
    copied = data.get("copied_samples") or {"count": 0}
    if copied["count"]:
        found.append(
            f"{copied['count']:,} of {copied['tested']:,} test samples are exact copies of training samples (first: "
            f"{copied['test']}, a copy of {copied['train']}): what is measured on them flatters the model."
        )
    if data["test_identities"] < LEAST:
        found.append(
            f"Only {data['test_identities']} test identities: too few for any interval, which needs {LEAST}; the "
            "numbers may be far from those of other people or things."
        )
    elif data["test_identities"] < FEW_IDENTITIES:
        found.append(
            f"Only {data['test_identities']} test identities: intervals over identities are rough, and "
            "probably too short."
        )
    entries = metrics.get("thresholds", {}).get("set", {}).values()
    if any("optimistic" in entry.get("measured_on", "") for entry in entries):
        found.append("Thresholds were set on the test identities themselves, so what they do on test is optimistic.")
    found += describe_choice(metrics)
    for key, way in metrics["scenarios"].items():
        name, v = called(key), way["verification"]
        if v["eer"]["value"] is None:
            found.append(f"{name}: EER is not measurable.")
        elif v["eer"]["half_gap"] > COARSE_EER:
            found.append(f"{name}: EER is known to ±{percent(v['eer']['half_gap'])} only: few distinct scores.")
        for point in v["tar"]:
            if point["status"] != "ok":
                allowed = point["far"] * point["impostors"]
                found.append(
                    f"{name}: TAR at FAR {rate(point['far'])} is {point['status']}: {point['impostors']:,} "
                    f"impostor pairs allow {allowed:.3g} false accepts, 30 are wanted."
                )
        found += [f"{name}: {text}." for text in dict.fromkeys(v["warnings"] + way["retrieval"]["warnings"])]
    if len(metrics["scenarios"]) == 1:
        found.append("The data name no domains, so nothing here says how the model does across devices or sessions.")
    return found


def describe_choice(metrics: Mapping[str, Any]) -> list[str]:
    """What selection on the validation identities means for the numbers; nothing where nothing was selected."""
    chosen = metrics.get("selection")
    if not chosen:
        return []
    best = "lowest" if chosen["direction"] == "min" else "highest"
    return [
        f"The weights are those of step {chosen['step']:,}, with the {best} {chosen['metric']} of "
        f"{chosen['validations']:,} validations. The validation identities chose them and thresholds were set on the "
        "same identities, so the TAR measured there is optimistic; test identities took no part."
    ]


def training_verdict(metrics: Mapping[str, Any]) -> str:
    """That the network, or its pretrained backbone, was as good before training; empty where training has helped."""
    texts = [_compare_baseline(metrics, name, "Training has not helped") for name in (UNTRAINED, PRETRAINED)]
    return " ".join(text for text in texts if text)


def _compare_baseline(metrics: Mapping[str, Any], baseline: str, said: str) -> str:
    """That a baseline does at least as well as the model, and where; empty where it does not, or no error is left."""
    found = []
    for name, way in metrics["scenarios"].items():
        own = way["verification"]["eer"]["value"]
        other = metrics.get("baselines", {}).get(baseline, {}).get(name, {}).get("eer")
        if own and _is_beaten(own, other):
            found.append(f"{called(name)}, EER {percent(own)} of this model against {percent(other)} of the {baseline}")
    return f"{said}: {'; '.join(found)}." if found else ""


def _is_beaten(own: float | None, other: float | None) -> bool:
    return own is not None and other is not None and other <= own


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


def _how(data: Mapping[str, Any]) -> str:
    """What to add to "trained on" where only names tell it: of data that the run was not trained on."""
    return ", going by names" if data.get("by_names") else ""


def _changed(run: RunFolder, metrics: Mapping[str, Any]) -> list[str]:
    """A warning where the model was tested on other data than it was trained for."""
    if run.state.get("data") is None or run.matches_data(metrics["data"]["fingerprint"]):
        return []
    return [
        f"These are not the data as they were in training (fingerprint {metrics['data']['fingerprint']} now, "
        f"{run.state['data']} then): other data, or the same ones changed."
    ]


def _listed(names: Sequence[str]) -> str:
    quoted = [f"“{name}”" for name in names[:4]] + ([f"{len(names) - 4} more"] if len(names) > 4 else [])
    word = "the domain " if len(names) == 1 else "the domains "
    return word + (quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " and " + quoted[-1])


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _cell(text: str) -> dict[str, Any]:
    """A cell of the table that is a plain number."""
    return {"text": text, "interval": "", "status": "ok"}
