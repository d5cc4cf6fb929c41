"""The tables of an audit's page: numbers of ``audit.json`` as a reader sees them, "–" where there is none."""

from collections.abc import Mapping
from typing import Any

from mettle.evaluate.groups import Groups
from mettle.report.audit_curves import group_curves
from mettle.report.number import NONE, ends, percent, rate, realised


def matrix(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Cells as text, with a shade from 0 for the smallest error to 40 per cent for the largest."""
    if facts is None:
        return None
    known = [v for row in facts["values"] for v in row if v is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = 40 / (high - low) if high > low else 0.0
    cells = [
        [{"text": percent(v), "shade": 0 if v is None else round(step * (v - low))} for v in row]
        for row in facts["values"]
    ]
    worst = max(
        ((v, a, b) for a, row in zip(facts["domains"], facts["values"], strict=True)
         for b, v in zip(facts["domains"], row, strict=True) if v is not None),
        default=None,
    )  # fmt: skip
    said = None if worst is None else {"enrol": worst[1], "probe": worst[2], "text": percent(worst[0])}
    return {"domains": facts["domains"], "cells": cells, "worst": said, "missing": facts["not measurable"]}


def points(facts: Mapping[str, Any], headline: str) -> list[dict[str, str]]:
    """Operating points of the headline."""
    found = []
    for p in sorted(facts["scenarios"][headline]["verification"]["tar"], key=lambda p: -p["far"]):
        found.append(
            {
                "far": rate(p["far"]),
                "threshold": NONE if p["threshold"] is None else f"{p['threshold']:.4f}",
                "fmr": realised(p["fmr"]) if p["fmr"] is not None else NONE,
                "accepts": NONE if p["false_accepts"] is None else f"{p['false_accepts']:,} of {p['impostors']:,}",
                "tar": percent(p["tar"], 1),
                "interval": "" if p["tar"] is None else ends(p["interval"], "{:.1f}"),
                "status": p["verdict"],
            }
        )
    return found


def carried(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Thresholds set on half of the people, as the other half sees them."""
    return [
        {
            "far": rate(c["far"]),
            "threshold": NONE if c["threshold"] is None else f"{c['threshold']:.4f}",
            "fmr": realised(c["fmr"]),
            "interval": _ends(c["fmr_interval"]),
            "ratio": f"{c['ratio']:.2f} x",
            "above": c["fmr"] > c["far"],
            "tar": percent(c["tar"], 1),
            "tar_interval": _ends(c["fnmr_interval"], complement=True),
        }
        for c in facts["thresholds"]
    ]


def _ends(interval: Mapping[str, Any] | None, *, complement: bool = False) -> str:
    if interval and complement:
        return ends({"low": 1 - interval["high"], "high": 1 - interval["low"]}, "{:.1f}")
    return ends(interval, "{:.3g}")


def group(name: str, g: Groups, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One attribute: its table, its curves, and its worst group in words."""
    image, colours = group_curves(g)
    table = []
    for row in sorted(facts["groups"], key=lambda r: (-(r["eer"] if r["eer"] is not None else -1), r["name"])):
        table.append(
            {
                "name": row["name"] or "(empty)",
                "colour": colours.get(row["name"]),
                "samples": f"{row['samples']:,}",
                "subjects": f"{row['subjects']:,}",
                "eer": percent(row["eer"]),
                "interval": "" if row["eer"] is None else ends(row["interval"], "{:.2f}"),
                "fmr": NONE if row["fmr"] is None else realised(row["fmr"]),
                "fnmr": NONE if row["fnmr"] is None else percent(row["fnmr"], 1),
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
        "ranked": len(g.ranked()),
        "minimum": facts["minimum"],
        "at": _at(g),
        "notes": [g.why_not for g in g if g.why_not][:3],
    }


def _at(g: Groups) -> str:
    if g.threshold is None:
        return ""
    said = "where both errors are equal over all pairs" if g.far is None else f"FAR {rate(g.far)} over all pairs"
    return f"{g.threshold:.3f} ({said})"


def sliced(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Samples by how hard they are, or by how many their class has."""
    recall = {r["name"]: r for r in facts["retrieval"]["groups"]}
    table = [
        {
            "name": r["name"],
            "samples": f"{r['samples']:,}",
            "subjects": f"{r['subjects']:,}",
            "eer": percent(r["eer"]),
            "fmr": NONE if r["fmr"] is None else realised(r["fmr"]),
            "fnmr": NONE if r["fnmr"] is None else percent(r["fnmr"], 1),
            "recall": percent(recall.get(r["name"], {}).get("recall@1"), 1),
        }
        for r in sorted(facts["verification"]["groups"], key=_size_order)
    ]
    return {"name": name, "rows": table}


def _size_order(row: Mapping[str, Any]) -> tuple[int, str]:
    """Class sizes by number, "fewer than" first."""
    words = [w for w in row["name"].split() if w.isdigit()]
    first = int(words[0]) if words else 0
    return (0 if row["name"].startswith("fewer") else first), row["name"]


def identification(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Who is found, and how many strangers are let in for that."""
    if facts is None:
        return None
    return {
        "enrolled": f"{facts['enrolled']:,}",
        "unknown": f"{facts['unknown']:,}",
        "rank_1": percent(facts["rank_1"]["value"], 1),
        "interval": _ends(facts["rank_1"]["interval"]),
        "tpir": [
            {
                "fpir": rate(p["fpir"]),
                "text": percent(p["tpir"], 1),
                "interval": "" if p["tpir"] is None else _ends(p["interval"]),
                **_flag(p),
            }
            for p in facts["tpir"]
        ],
    }


def _flag(point: Mapping[str, Any]) -> dict[str, str]:
    return {"status": "" if point["status"] == "ok" else point["status"]}


def clustering(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
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


def probe(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What simple classifiers read from the embeddings."""
    if facts is None:
        return None
    table = [
        {
            "name": name,
            "text": percent(facts[key]["accuracy"], 1),
            "interval": _ends(facts[key]["interval"]),
            "worst": facts[key]["worst_class"]["label"],
            "lowest": percent(facts[key]["worst_class"]["accuracy"], 1),
        }
        for name, key in (("linear", "linear"), ("nearest neighbours", "knn"))
    ]
    return {"samples": f"{facts['samples']:,}", "labels": f"{facts['labels']:,}", "rows": table}


def geometry(facts: Mapping[str, Any] | None) -> dict[str, Any] | None:
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
        ("orphans", percent(facts["orphans"], 1), "samples that are nobody's near neighbour"),
    ]
    return {"verdict": facts["verdict"], "collapsed": facts["collapsed"], "rows": table, "hubs": hubs[:5]}
