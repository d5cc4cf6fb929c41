"""The numbers that a page and the terminal begin with: those of the question that the run answers.

| question | first number | beside it |
|---|---|---|
| closed set | top-1 of the linear probe | worst class, worst group, kNN, gains over the network before training |
| retrieval | Recall@1 | MAP@R, MAP, Recall at the largest K, NMI, F1 |
| verification | EER | AUC, TAR, Recall@1, MAP@R |

Which question it is says :mod:`mettle.evaluate.run.question`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mettle.evaluate.bootstrap import TOO_FEW
from mettle.report.format import GAP, NONE, format_interval, format_percent, scenario_title
from mettle.report.metric_tables import baseline_bars, headline_tiles, metric_cells

TITLES = {"closed-set": "closed set", "retrieval": "retrieval", "verification": "verification"}
UNITS = {
    "closed-set": "Intervals resample test samples: how the numbers would move with other samples of the same classes, "
    "not with another training seed.",
    "retrieval": "Intervals resample the identities of the queries: how the numbers would move with other queries, not "
    "with another training seed. NMI and F1 are means over starts of k-means, with their range.",
    "verification": "Intervals resample test identities. They say how the numbers would move with other people or "
    "things, not with another training seed.",
}
RANKED = ("Recall", "MAP", "mAP", "R-precision", "MRR", "nDCG", "precision", "hit rate", "retrieval")  # rows of a table
MINUS = "\N{MINUS SIGN}"
GAINS = {"top_1": "top-1", "worst_class": "worst class", "worst_group": "worst group"}


def question_name(metrics: Mapping[str, Any]) -> str:
    """The question that a run answers, as ``metrics.json`` names it."""
    return metrics["question"]["name"]


def question_tiles(metrics: Mapping[str, Any], question: str | None = None) -> list[dict[str, Any]]:
    """The first numbers of a page, the one that decides first.

    Args:
        metrics: of a run.
        question: another one than its own; of a closed set there is nothing to say where no probe read the labels.
    """
    question = question or question_name(metrics)
    if question == "closed-set" and metrics.get("probe", {}).get("labels", {}).get("status") != "ok":
        return []
    make = {"closed-set": _closed_set_tiles, "retrieval": _retrieval_tiles, "verification": headline_tiles}
    return [{"detail": "", **tile} for tile in make[question](metrics)]


def question_bars(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first number of this model and of the baselines, with widths for drawing."""
    question = question_name(metrics)
    if question == "verification":
        return baseline_bars(metrics)
    if question == "retrieval":
        name = list(metrics["scenarios"])[-1]
        values = {"this model": _recall_at_1(metrics["scenarios"][name])}
        values |= {
            other: found[name].get("recall@1") for other, found in reversed(metrics.get("baselines", {}).items())
        }
    else:
        labels = metrics["probe"]["labels"]
        values = {"this model": _first_encoder(labels)["linear"]["accuracy"]}
        values |= {other: found["accuracy"] for other, found in labels.get("baselines", {}).items()}
    return [
        {"name": other, "text": format_percent(value, 1), "width": 100 * value}
        for other, value in values.items()
        if value is not None
    ]


def question_scenario(metrics: Mapping[str, Any]) -> str:
    """What the first numbers are of: the hardest scenario, or all test samples."""
    return (
        "all test samples" if question_name(metrics) == "closed-set" else scenario_title(list(metrics["scenarios"])[-1])
    )


def sort_rows(rows: Sequence[Mapping[str, Any]], question: str) -> list[Mapping[str, Any]]:
    """Rows of the table of all numbers, those of the question first."""
    if question != "retrieval":
        return list(rows)
    return sorted(rows, key=lambda row: not row["name"].startswith(RANKED))


def cluster_rows(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """NMI, AMI and F1 of clusters against labels, each with its range over starts; empty where there are none."""
    found = metrics.get("clustering")
    if not found or found["status"] != "ok":
        return []
    return [
        {
            "name": name.upper(),
            "value": entry["value"],
            "ends": entry["range"] if len(found["seeds"]) > 1 else None,
            "text": f"{entry['value']:.3f}",
            "range": f"{entry['range'][0]:.3f}–{entry['range'][1]:.3f} over starts" if len(found["seeds"]) > 1 else "",
        }
        for name, entry in found["metrics"].items()
    ]


def gain_rows(labels: Mapping[str, Any]) -> list[dict[str, str]]:
    """What training brought on a closed set: each number of the model, of a baseline, and their paired difference."""
    before = labels.get("baselines", {})
    return [
        {
            "name": GAINS[key] if len(before) == 1 else f"{GAINS[key]}, {other}",
            "first": format_percent(gain["first"], 1),
            "second": format_percent(gain["second"], 1),
            "difference": format_points(gain["difference"]),
            "interval": format_points_interval(gain["interval"]),
        }
        for other, found in before.items()
        for key, gain in found["gain"].items()
    ]


def format_points(value: float, unit: str = f"{GAP}points") -> str:
    """A difference of shares as text: ``+3.4 points``."""
    return f"{100 * value:+.1f}{unit}".replace("-", MINUS)


def format_points_interval(interval: Mapping[str, Any] | None) -> str:
    """The interval of a difference of shares as text: ``+0.5 to +6.2``."""
    if interval is None:
        return TOO_FEW
    return f"{100 * interval['low']:+.1f} to {100 * interval['high']:+.1f}".replace("-", MINUS)


def headline_lines(metrics: Mapping[str, Any]) -> list[str]:
    """The numbers of the question for a terminal; empty for verification, whose scenarios say it all."""
    question = question_name(metrics)
    if question == "verification":
        return []
    tiles = [tile for tile in question_tiles(metrics) if tile["text"] != NONE]
    told = []
    for tile in tiles:
        detail = f" ({tile['detail']})" if tile["detail"] else ""
        extent = f" [{tile['interval']}]" if tile["interval"] else ""
        told.append(f"{tile['name']}{detail} {tile['text']}{extent}")
    return [" ".join(f"{TITLES[question]:<13} {'  '.join(told)}".split(GAP))]


def _tile(
    name: str, value: float, ends: Sequence[float] | None, text: str, interval: str, meaning: str, detail: str = ""
) -> dict[str, Any]:
    low, high = ends or (None, None)
    return {
        "name": name,
        "text": text,
        "interval": interval,
        "meaning": meaning,
        "detail": detail,
        "value": value,
        "low": low,
        "high": high,
        "better": "high",
    }


def _share_tile(name: str, value: float, interval: Mapping[str, Any] | None, meaning: str, detail: str = "") -> dict:
    text, extent = format_percent(value, 1), format_interval(interval, "{:.1f}")
    return _tile(name, value, _ends(interval), text, extent, meaning, detail)


def _ends(interval: Mapping[str, Any] | None) -> tuple[float, float] | None:
    return None if interval is None else (interval["low"], interval["high"])


def _first_encoder(labels: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(labels["encoders"].values()))


def _closed_set_tiles(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    labels = metrics["probe"]["labels"]
    one = _first_encoder(labels)
    linear, worst = one["linear"], one["linear"]["worst_class"]
    found = [
        _share_tile(
            "Top-1, linear probe",
            linear["accuracy"],
            linear["interval"],
            "test samples whose class a linear classifier on frozen embeddings gets right",
        ),
        _share_tile(
            "Worst class", worst["accuracy"], worst["interval"], "top-1 of the class with the lowest", worst["name"]
        ),
    ]
    if "worst_group" in one:
        cell = one["worst_group"]
        detail = f"{cell['class']} / {cell['group']}, n = {cell['samples']:,}"
        meaning = f"top-1 of the (class, {cell['by']}) with the lowest"
        found.append(_share_tile("Worst group", cell["linear"], cell["interval"], meaning, detail))
    meaning = "the same by a vote of the 20 nearest training samples"
    found.append(_share_tile("Top-1, kNN", one["knn"]["accuracy"], one["knn"]["interval"], meaning))
    for other, before in list(labels.get("baselines", {}).items())[:1]:
        for key in ("top_1", "worst_group" if "worst_group" in before["gain"] else "worst_class"):
            gain = before["gain"][key]
            meaning = f"against the {other}, the same test samples in both"
            text, extent = format_points(gain["difference"], ""), format_points_interval(gain["interval"])
            name = f"Gain in points, {GAINS[key]}"
            found.append(_tile(name, gain["difference"], _ends(gain["interval"]), text, extent, meaning))
    return found


def _retrieval_tiles(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    (*others, (_, scenario)) = metrics["scenarios"].items()
    known = {cell["name"]: cell for cell in metric_cells(scenario)}
    recalls = [name for name in known if name.startswith("Recall@")]
    wanted = [recalls[0], "MAP@R", "MAP", "mAP", *([recalls[-1]] if len(recalls) > 1 else [])]
    said = {
        "MAP": "average precision over the whole ranking, mean over queries",
        "mAP": "average precision over the whole ranking, mean over queries",
        recalls[-1]: f"samples with the right identity among their {recalls[-1].partition('@')[2]} nearest",
    }
    found = [{**known[name], "meaning": known[name]["meaning"] or said[name]} for name in wanted if name in known]
    clusters = {row["name"]: row for row in cluster_rows(metrics)}
    meanings = {
        "NMI": "k-means clusters against labels; grows with the number of clusters",
        "F1": "pairs of one cluster against pairs of one label",
    }
    for name, meaning in meanings.items():
        if name in clusters:
            one = clusters[name]
            found.append(_tile(name, one["value"], one["ends"], one["text"], one["range"], meaning))
    for name, other in others[:1]:
        cell = next(cell for cell in metric_cells(other) if cell["name"] == recalls[0])
        found.append({**cell, "name": f"{recalls[0]}, {name}", "meaning": f"the same for {other['title']}"})
    return found


def _recall_at_1(scenario: Mapping[str, Any]) -> float | None:
    return scenario["retrieval"]["metrics"].get("recall@1", {}).get("value")
