"""The audit of a file of embeddings: one page that needs nothing else, and one JSON with every number on it.

The tables of an audit's page: numbers of ``audit.json`` as a reader sees them, "–" where there is none.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mettle import __version__
from mettle.atomic_files import write_text
from mettle.data.dataset import Samples
from mettle.data.embeddings import Embedded
from mettle.data.image_decoding import decode_image
from mettle.data.inputs import FeatureArray
from mettle.errors import DataError, InputError, RunError
from mettle.evaluate import plots
from mettle.evaluate.audit import Audit
from mettle.evaluate.groups import Groups
from mettle.evaluate.plots import plot_det, plot_group_curves
from mettle.evaluate.run.scenarios import ScenarioResults
from mettle.evaluate.scoring.cosine import normalize_rows
from mettle.report.caveats import rank_audit_caveats
from mettle.report.embedding_map import POINTS, compute_layout, map_panes
from mettle.report.format import (
    NONE,
    format_interval,
    format_measured_rate,
    format_percent,
    format_rate,
    scenario_title,
)
from mettle.report.metric_tables import headline_tiles, scenario_rows
from mettle.report.page import render_page
from mettle.report.pair_cards import LARGE, encode_thumbnail

SHOWN = 12  # pairs, suspects and classes on the page; the JSON has more
LARGE_PICTURE = 224  # pixels a side of what is looked at one by one
WIDE_GAP = 0.01  # of EER, between the worst and the best group, that is worth collecting samples for
PAGES = (".html", ".htm")
FILES = (".json", ".md", ".pdf", ".txt", ".csv", ".npz", ".xml")  # what is no name of a folder


def write_audit(found: Audit, output: Path | str, command: Sequence[str] = ()) -> Path:
    """Write a page and its numbers: ``audit.html`` and ``audit.json`` in a folder, or ``x.html`` and ``x.json``.

    Args:
        found: the audit.
        output: a folder, which is made if it is not there, or the page itself where the name ends in ``.html``.
        command: the command line that made it, to be shown on the page.

    Raises:
        InputError: the name is that of another kind of file.
        RunError: the folder cannot be made.
    """
    page = audit_page_path(output)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RunError(f"cannot make the folder {page.parent}: {problem.strerror}; choose another --output") from None
    facts = {**found.summary(), "warnings": list(rank_audit_caveats(found))}
    numbers = page.with_suffix(".json")
    text = render_page("audit.html.j2", **describe_audit(found, facts, command, numbers.name))
    write_text(numbers, json.dumps(facts, indent=1, allow_nan=False, ensure_ascii=False))
    write_text(page, text)
    return page


def audit_page_path(output: Path | str) -> Path:
    """Where the page of an audit goes: the output itself where it is named ``.html``, else into that folder."""
    output = Path(output)
    if output.is_dir():
        return output / "audit.html"
    if output.suffix.lower() in PAGES:
        return output
    if output.is_file() or output.suffix.lower() in FILES:
        raise InputError(
            f"an audit is written to a folder, or to a page named .html with its numbers in .json beside it: got "
            f"{output}; name {output.with_suffix('.html')}, say"
        )
    return output / "audit.html"


def describe_audit(
    found: Audit, facts: Mapping[str, Any], command: Sequence[str] = (), numbers: str = "audit.json"
) -> dict[str, Any]:
    """Everything on the page, as text and pictures; ``numbers`` is the file that has more."""
    metrics = {"scenarios": {k: _fill_retrieval(scenario) for k, scenario in facts["scenarios"].items()}}
    headline, caveats = list(found.ways)[-1], rank_audit_caveats(found)
    return {
        "name": Path(found.table.origin).name,
        "about": _describe_data(found, facts),
        "warnings": list(caveats),
        "decisive": list(caveats.decisive),
        "steps": next_steps(found, facts),
        "images": found.table.images is not None,
        "folder": "" if found.table.images is None else str(found.table.folder.resolve()),
        "headline": scenario_title(headline),
        "tiles": [{**t, "name": t["name"].replace("EER, all", "EER, all pairs")} for t in headline_tiles(metrics)],
        "scenarios": [{"name": scenario_title(k), "title": scenario.title} for k, scenario in found.ways.items()],
        "rows": scenario_rows(metrics),
        **_plot_curves(found, facts["scenarios"][headline]["verification"]["tar"]),
        "matrix": domain_table(facts["domains"]),
        "points": operating_point_rows(facts, headline),
        "carried": transfer_rows(facts),
        "groups": [group_table(key, g, facts["groups"][key]) for key, g in found.groups.items()],
        "slices": [slice_table(key, facts["slices"][key]) for key in found.slices],
        "identification": identification_table(facts["identification"]),
        "clustering": clustering_table(facts["clustering"]),
        "probe": probe_table(facts["probe"]),
        "geometry": geometry_table(facts["geometry"]),
        "labels": _label_errors(found, facts),
        "twins": [{**t, "suspicion": f"{t['suspicion']:+.3f}"} for t in facts["same_subject"][:SHOWN]],
        "positives": _pair_rows(found, "genuine"),
        "negatives": _pair_rows(found, "impostor"),
        "decision": _decision_threshold(found),
        "confusion": [
            {**c, "error": format_percent(c["error"], 1), "share": format_percent(c["share"], 1)}
            for c in facts["confusion"][:SHOWN]
            if c["error"] > 0
        ],
        "map": _map_section(found),
        "limits": [*facts["limits"], *_describe_limits(found, numbers)],
        "missing": facts["missing"],
        "command": shlex.join(command),
        "version": __version__,
    }


def _fill_retrieval(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario that was not ranked has no retrieval numbers."""
    return {**scenario, "retrieval": scenario["retrieval"] or {"metrics": {}, "queries": 0, "warnings": []}}


def _describe_data(found: Audit, facts: Mapping[str, Any]) -> str:
    t = found.table
    text = (
        f"{facts['samples']:,} embeddings of dimension {facts['dimension']} with {facts['identities']:,} labels "
        f"(column “{t.columns.get('label') or 'label'}”)."
    )
    if t.domain is not None:
        text += (
            f" {len(np.unique(t.domain.codes)):,} domains (“{t.columns.get('domain') or 'domain'}”); headline "
            "numbers compare pairs of two domains."
        )
    v = found.ways["all"].verification
    how = "" if v.mode == "exact" else ", impostors counted in bins and looked into where it matters"
    return f"{text} Similarity is the cosine; {v.genuine + v.impostor:,} pairs were compared{how}."


def _plot_curves(found: Audit, points: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    drawn = {scenario_title(k): scenario.verification.roc.subsample(256) for k, scenario in found.ways.items()}
    v = found.headline.verification
    known = {format_rate(p["far"]): p["threshold"] for p in points if p["threshold"] is not None}
    return {
        "roc": plots.plot_roc(drawn, points),
        "det": plot_det(drawn),
        "histograms": plots.plot_histograms({scenario_title(list(found.ways)[-1]): v.histogram(80)}, known),
    }


def _map_section(found: Audit) -> dict[str, Any] | None:
    t = found.table
    unseen = FeatureArray(np.zeros((len(t), 1), np.float32))  # a map needs labels and embeddings, no inputs
    samples = Samples.of(unseen, t.label, domain=t.domain, groups=dict(t.groups))
    layout = compute_layout(ScenarioResults(samples, t.values, ()))
    if layout is None:
        return None
    rows = [int(layout.rows[np.flatnonzero(layout.labels == label)[0]]) for label in layout.marked]
    return {
        "panes": map_panes({"": layout}),
        "several": False,
        "synthetic": 0,
        "marked": [describe_row(t, at) for at in rows],
        "points": len(layout.rows),
        "identities": len(np.unique(layout.labels)),
        "all": len(t),
    }


def next_steps(found: Audit, facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a reader should do with what was found, in the order in which it pays; each with the section it is about."""
    steps: list[tuple[str, str]] = []
    if found.geometry is not None and found.geometry.collapsed:
        steps.append(
            ("geometry", "The embeddings have collapsed: mend the training or the export first, then audit again.")
        )
    if found.copies.rows:
        text = f"Leave one of each of {found.copies.vectors:,} copied vectors, or give copies one id"
        steps.append(("", f"{text} ({found.copies.rows:,} rows): the first are under “copies” in the JSON."))
    listed = 0 if found.label_errors is None else found.label_errors.noise.listed
    if listed:
        steps.append(
            ("label-errors", f"Look at the {listed:,} samples above the cut and correct the labels that are wrong.")
        )
    if found.same_subject:
        pairs = f"{len(found.same_subject):,} pair{'s' if len(found.same_subject) > 1 else ''} of labels"
        steps.append(("same-subject", f"Decide for {pairs} whether each is one subject, and merge those that are."))
    if any(pair["wrong"] for pair in _pair_rows(found, "impostor", pictures=False)):
        text = "Look at the hardest negatives that the threshold accepts: a wrong label, or what the model confuses."
        steps.append(("hardest", text))
    for key, group in found.groups.items():
        g = facts["groups"][key]
        if g["worst"] and len(group.rank_groups()) > 1 and g["gap"] > WIDE_GAP:
            text = (
                f"Collect more samples of {g['worst']} ({key}): its EER is {100 * g['gap']:.2f} points above the best."
            )
            steps.append(("groups", text))
    carried = [c for c in facts["thresholds"] if c["threshold"] is not None]
    if carried:
        last = carried[-1]
        text = f"For FAR {format_rate(last['far'])} start from the threshold {last['threshold']:.4f}"
        steps.append(
            ("thresholds", f"{text}: on other identities it let in {last['ratio']:.2f} times what was wanted.")
        )
    else:
        steps.append(
            ("thresholds", "Add identities before a threshold is set: there are too few to tell whether it holds.")
        )
    return [{"anchor": anchor, "text": text} for anchor, text in steps]


def _label_errors(found: Audit, facts: Mapping[str, Any]) -> dict[str, Any]:
    ranked = facts["label_errors"]["ranked"][:SHOWN]
    estimate = facts["label_errors"]["estimate"]
    suspects = found.label_errors
    return {
        "count": facts["label_errors"]["better_elsewhere"],
        "said": "" if estimate is None else f"{estimate['said'][0].upper()}{estimate['said'][1:]}",
        "rows": [
            {
                **describe_row(found.table, r["row"], LARGE_PICTURE),
                "suggested": r["suggested"],
                "suspicion": f"{r['suspicion']:+.3f}",
                "above_cut": r["above_cut"],
                "likes": [
                    describe_row(found.table, at)
                    for at in nearest_of_label(found.table, r["row"], suspects.suggested[k])
                ],
            }
            for k, r in enumerate(ranked)
            if suspects is not None
        ],
    }


def nearest_of_label(table: Embedded, row: int, label: int, count: int = 3) -> list[int]:
    """Positions of the rows of a label that are nearest to a row by cosine, nearest first."""
    at = np.flatnonzero(table.label.codes == label)
    score = normalize_rows(table.values[at]) @ normalize_rows(table.values[[row]])[0]
    return at[np.argsort(-score, kind="stable")[:count]].tolist()


def _decision_threshold(found: Audit) -> dict[str, str] | None:
    """The threshold that the hardest pairs are shown against: the lowest rate that can be relied on."""
    v = found.ways["all"].verification
    points = [v.operating_point(far) for far in found.fars]
    good = [p for p in points if p.finite_threshold is not None and p.status != "not measurable"]
    if not good:
        return None
    point = min(good, key=lambda p: p.far)
    return {"value": repr(point.threshold), "threshold": f"{point.threshold:.3f}", "far": format_rate(point.far)}


def _pair_rows(found: Audit, kind: str, *, pictures: bool = True) -> list[dict[str, Any]]:
    size = LARGE_PICTURE if pictures else 0
    decided = _decision_threshold(found)
    shown = []
    for pair in found.hardest[kind][:SHOWN]:
        accepted = None if decided is None else pair.score >= float(decided["value"])
        verdict = {None: "", True: "accepted", False: "rejected"}[accepted]
        wrong = accepted is not None and accepted == (kind == "impostor")
        sides = [describe_row(found.table, at, size) for at in (pair.first, pair.second)]
        shown.append({"score": f"{pair.score:.3f}", "verdict": verdict, "wrong": wrong, "sides": sides})
    return shown


def describe_row(table: Embedded, at: int, largest: int = LARGE) -> dict[str, Any]:
    """One row: what to call it, its names, its picture (``largest`` pixels a side, 0 for none) if it can be read."""
    domain = "" if table.domain is None else table.domain.names[table.domain.codes[at]]
    return {
        "name": table.called(at),
        "label": table.label.names[table.label.codes[at]],
        "domain": domain,
        "picture": _make_thumbnail(table, at, largest) if largest else None,
    }


def _make_thumbnail(table: Embedded, at: int, largest: int) -> str | None:
    if table.images is None or not table.images[at] or "://" in table.images[at]:
        return None
    try:
        return encode_thumbnail(decode_image(table.folder / str(table.images[at])), largest)
    except DataError:
        return None


def _describe_limits(found: Audit, numbers: str) -> list[str]:
    """What the page itself leaves out."""
    said = [
        f"The map shows at most {POINTS:,} samples, whole identities drawn at random.",
        f"Lists on this page stop at {SHOWN} entries; {numbers} has more.",
        "Scores of at most 256 MiB are kept; more pairs are counted, with EER, TAR and thresholds exact all the same.",
    ]
    v = found.ways["all"].verification
    if v.mode != "exact":
        said.append(f"AUC rests on bins: it is within {v.bounds['auc']:.1e} of the exact one.")
    return said


def domain_table(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Cells as text, with a shade from 0 for the smallest error to 40 per cent for the largest."""
    if facts is None:
        return None
    known = [v for row in facts["values"] for v in row if v is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = 40 / (high - low) if high > low else 0.0
    cells = [
        [{"text": format_percent(v), "shade": 0 if v is None else round(step * (v - low))} for v in row]
        for row in facts["values"]
    ]
    worst = max(
        ((v, a, b) for a, row in zip(facts["domains"], facts["values"], strict=True)
         for b, v in zip(facts["domains"], row, strict=True) if v is not None),
        default=None,
    )  # fmt: skip
    said = None if worst is None else {"enrol": worst[1], "probe": worst[2], "text": format_percent(worst[0])}
    return {"domains": facts["domains"], "cells": cells, "worst": said, "missing": facts["not measurable"]}


def operating_point_rows(facts: Mapping[str, Any], headline: str) -> list[dict[str, str]]:
    """Operating points of the headline."""
    found = []
    for p in sorted(facts["scenarios"][headline]["verification"]["tar"], key=lambda p: -p["far"]):
        found.append(
            {
                "far": format_rate(p["far"]),
                "threshold": NONE if p["threshold"] is None else f"{p['threshold']:.4f}",
                "fmr": format_measured_rate(p["fmr"]) if p["fmr"] is not None else NONE,
                "accepts": NONE if p["false_accepts"] is None else f"{p['false_accepts']:,} of {p['impostors']:,}",
                "tar": format_percent(p["tar"], 1),
                "interval": "" if p["tar"] is None else format_interval(p["interval"], "{:.1f}"),
                "status": p["verdict"],
            }
        )
    return found


def transfer_rows(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Thresholds set on half of the people, as the other half sees them."""
    return [
        {
            "far": format_rate(c["far"]),
            "threshold": NONE if c["threshold"] is None else f"{c['threshold']:.4f}",
            "fmr": format_measured_rate(c["fmr"]),
            "interval": _format_ends(c["fmr_interval"]),
            "ratio": f"{c['ratio']:.2f} x",
            "above": c["fmr"] > c["far"],
            "tar": format_percent(c["tar"], 1),
            "tar_interval": _format_ends(c["fnmr_interval"], complement=True),
        }
        for c in facts["thresholds"]
    ]


def _format_ends(interval: Mapping[str, Any] | None, *, complement: bool = False) -> str:
    if interval and complement:
        return format_interval({"low": 1 - interval["high"], "high": 1 - interval["low"]}, "{:.1f}")
    return format_interval(interval, "{:.3g}")


def group_table(name: str, g: Groups, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One attribute: its table, its curves, and its worst group in words."""
    image, colors = plot_group_curves(g)
    table = []
    for row in sorted(facts["groups"], key=lambda r: (-(r["eer"] if r["eer"] is not None else -1), r["name"])):
        table.append(
            {
                "name": row["name"] or "(empty)",
                "color": colors.get(row["name"]),
                "samples": f"{row['samples']:,}",
                "subjects": f"{row['subjects']:,}",
                "eer": format_percent(row["eer"]),
                "interval": "" if row["eer"] is None else format_interval(row["interval"], "{:.2f}"),
                "fmr": NONE if row["fmr"] is None else format_measured_rate(row["fmr"]),
                "fnmr": NONE if row["fnmr"] is None else format_percent(row["fnmr"], 1),
                "worst": row["name"] == facts["worst"],
                "small": row["subjects"] < facts["minimum"],
            }
        )
    return {
        "name": name,
        "image": image,
        "rows": table,
        "worst": facts["worst"],
        "gap": f"{100 * facts['gap']:.2f} points",
        "ranked": len(g.rank_groups()),
        "minimum": facts["minimum"],
        "at": _describe_threshold(g),
        "notes": [g.why_not for g in g if g.why_not][:3],
    }


def _describe_threshold(g: Groups) -> str:
    if g.threshold is None:
        return ""
    said = "where both errors are equal over all pairs" if g.far is None else f"FAR {format_rate(g.far)} over all pairs"
    return f"{g.threshold:.3f} ({said})"


def slice_table(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Samples by how hard they are, or by how many their class has."""
    recall = {r["name"]: r for r in facts["retrieval"]["groups"]}
    table = [
        {
            "name": r["name"],
            "samples": f"{r['samples']:,}",
            "subjects": f"{r['subjects']:,}",
            "eer": format_percent(r["eer"]),
            "fmr": NONE if r["fmr"] is None else format_measured_rate(r["fmr"]),
            "fnmr": NONE if r["fnmr"] is None else format_percent(r["fnmr"], 1),
            "recall": format_percent(recall.get(r["name"], {}).get("recall@1"), 1),
        }
        for r in sorted(facts["verification"]["groups"], key=_size_order)
    ]
    return {"name": name, "rows": table}


def _size_order(row: Mapping[str, Any]) -> tuple[int, str]:
    """Class sizes by number, "fewer than" first."""
    words = [w for w in row["name"].split() if w.isdigit()]
    first = int(words[0]) if words else 0
    return (0 if row["name"].startswith("fewer") else first), row["name"]


def identification_table(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Who is found, and how many strangers are let in for that."""
    if facts is None:
        return None
    return {
        "enrolled": f"{facts['enrolled']:,}",
        "unknown": f"{facts['unknown']:,}",
        "rank_1": format_percent(facts["metrics"]["rank@1"]["value"], 1),
        "interval": _format_ends(facts["metrics"]["rank@1"]["interval"]),
        "tpir": [
            {
                "fpir": format_rate(p["fpir"]),
                "text": format_percent(p["tpir"], 1),
                "interval": "" if p["tpir"] is None else _format_ends(p["interval"]),
                **_status_flag(p),
            }
            for p in facts["tpir"]
        ],
    }


def _status_flag(point: Mapping[str, Any]) -> dict[str, str]:
    return {"status": "" if point["status"] == "ok" else point["status"]}


def clustering_table(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """How far clusters are the labels."""
    if facts is None:
        return None
    metrics = [
        {
            "name": name.upper(),
            "text": f"{m['value']:.3f}",
            "range": f"{m['range'][0]:.3f}–{m['range'][1]:.3f}" if len(facts["seeds"]) > 1 else "",
        }
        for name, m in facts["metrics"].items()
    ]
    return {"clusters": f"{facts['clusters']:,}", "seeds": len(facts["seeds"]), "metrics": metrics}


def probe_table(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What simple classifiers read from the embeddings."""
    if facts is None:
        return None
    table = [
        {
            "name": name,
            "text": format_percent(facts[key]["accuracy"], 1),
            "interval": _format_ends(facts[key]["interval"]),
            "worst": facts[key]["worst_class"]["label"],
            "lowest": format_percent(facts[key]["worst_class"]["accuracy"], 1),
        }
        for name, key in (("linear", "linear"), ("nearest neighbours", "knn"))
    ]
    return {"samples": f"{facts['samples']:,}", "labels": f"{facts['labels']:,}", "rows": table}


def geometry_table(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """How the embeddings lie, each number with what it means."""
    if facts is None:
        return None
    k, most = facts["k"], facts["largest_hub"]
    hubs = [{"image": "", **h} for h in facts["hubs"]]
    skew = facts["hubness"]
    said = (
        "no hubs to speak of" if skew < 1 else "some hubs" if skew < 3 else "strong hubs: a few samples are near to all"
    )
    table = [
        ("effective rank", f"{facts['effective_rank']:.1f} of {facts['dimension']}", "directions that are really used"),
        ("mean cosine of strangers", f"{facts['strangers']:+.3f}", "near 0 is even, near 1 is collapse"),
        ("alignment", f"{facts['alignment']:.3f}", "mean squared distance of relatives; 0 is closest"),
        ("uniformity", f"{facts['uniformity']:.3f}", "log mean potential of all pairs; lower is more even"),
        ("hubness", f"{skew:.2f}", f"skewness of how often a sample is among {k} nearest: {said}"),
        ("largest hub", f"{most:,.0f}", f"times among the {k} nearest of others; {k} on average"),
        ("orphans", format_percent(facts["orphans"], 1), "samples that are nobody's near neighbour"),
    ]
    return {"verdict": facts["verdict"], "collapsed": facts["collapsed"], "rows": table, "hubs": hubs[:5]}
