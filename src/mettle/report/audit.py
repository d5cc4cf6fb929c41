"""The audit of a file of embeddings: one page that needs nothing else, and one JSON with every number on it."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mettle import __version__
from mettle.atomic_files import write_text
from mettle.data.dataset import Samples
from mettle.data.image_decoding import decode_image
from mettle.data.inputs import FeatureArray
from mettle.errors import DataError, InputError, RunError
from mettle.evaluate.audit import Audit
from mettle.evaluate.protocol import Judged
from mettle.evaluate.table import Embedded
from mettle.report import audit_tables as tables
from mettle.report import figures
from mettle.report.audit_curves import det
from mettle.report.card import rows, tiles
from mettle.report.map import POINTS, embedding_map
from mettle.report.number import called, percent, rate
from mettle.report.page import render
from mettle.report.pairs import thumbnail

SHOWN = 12  # pairs, suspects and classes on the page; the JSON has more
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
    facts, numbers = found.summary(), page.with_suffix(".json")
    text = render("audit.html.j2", **contents(found, facts, command, numbers.name))
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


def contents(
    found: Audit, facts: Mapping[str, Any], command: Sequence[str] = (), numbers: str = "audit.json"
) -> dict[str, Any]:
    """Everything on the page, as text and pictures; ``numbers`` is the file that has more."""
    metrics = {"scenarios": {k: _complete(way) for k, way in facts["scenarios"].items()}}
    headline = list(found.ways)[-1]
    return {
        "name": Path(found.table.origin).name,
        "about": _about(found, facts),
        "warnings": facts["warnings"],
        "headline": called(headline),
        "tiles": [{**t, "name": t["name"].replace("EER, all", "EER, all pairs")} for t in tiles(metrics)],
        "scenarios": [{"name": called(k), "title": way.title} for k, way in found.ways.items()],
        "rows": rows(metrics),
        **_curves(found, facts["scenarios"][headline]["verification"]["tar"]),
        "matrix": tables.matrix(facts["domains"]),
        "points": tables.points(facts, headline),
        "carried": tables.carried(facts),
        "groups": [tables.group(key, g, facts["groups"][key]) for key, g in found.groups.items()],
        "slices": [tables.sliced(key, facts["slices"][key]) for key in found.slices],
        "identification": tables.identification(facts["identification"]),
        "clustering": tables.clustering(facts["clustering"]),
        "probe": tables.probe(facts["probe"]),
        "geometry": tables.geometry(facts["geometry"]),
        "labels": _labels(found, facts),
        "twins": [{**t, "suspicion": f"{t['suspicion']:+.3f}"} for t in facts["same_subject"][:SHOWN]],
        "positives": _pairs(found, "genuine"),
        "negatives": _pairs(found, "impostor"),
        "decision": _decision(found),
        "confusion": [
            {**c, "error": percent(c["error"], 1), "share": percent(c["share"], 1)}
            for c in facts["confusion"][:SHOWN]
            if c["error"] > 0
        ],
        "map": _map(found),
        "limits": [*facts["limits"], *_memory(found, numbers)],
        "missing": facts["missing"],
        "command": shlex.join(command),
        "version": __version__,
    }


def _complete(way: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario that was not ranked has no retrieval numbers."""
    return {**way, "retrieval": way["retrieval"] or {"metrics": {}, "queries": 0, "warnings": []}}


def _about(found: Audit, facts: Mapping[str, Any]) -> str:
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


def _curves(found: Audit, points: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    drawn = {called(k): way.verification.roc.thinned(256) for k, way in found.ways.items()}
    v = found.headline.verification
    known = {rate(p["far"]): p["threshold"] for p in points if p["threshold"] is not None}
    return {
        "roc": figures.roc(drawn, points),
        "det": det(drawn),
        "histograms": figures.histograms({called(list(found.ways)[-1]): v.histogram(80)}, known),
    }


def _map(found: Audit) -> dict[str, Any] | None:
    t = found.table
    unseen = FeatureArray(np.zeros((len(t), 1), np.float32))  # a map needs labels and embeddings, no inputs
    samples = Samples.of(unseen, t.label, domain=t.domain)
    drawn = embedding_map(Judged(samples, t.values, ()))
    if drawn is None:
        return None
    return {**vars(drawn), "marked": [describe_row(found.table, at) for at in drawn.marked], "all": len(t)}


def _labels(found: Audit, facts: Mapping[str, Any]) -> dict[str, Any]:
    ranked = facts["label_errors"]["ranked"][:SHOWN]
    estimate = facts["label_errors"]["estimate"]
    return {
        "count": facts["label_errors"]["better_elsewhere"],
        "said": "" if estimate is None else f"{estimate['said'][0].upper()}{estimate['said'][1:]}",
        "rows": [
            {
                **describe_row(found.table, r["row"]),
                "suggested": r["suggested"],
                "suspicion": f"{r['suspicion']:+.3f}",
                "above_cut": r["above_cut"],
            }
            for r in ranked
        ],
    }


def _decision(found: Audit) -> dict[str, str] | None:
    """The threshold that the hardest pairs are shown against: the lowest rate that can be relied on."""
    v = found.ways["all"].verification
    points = [v.operating_point(far) for far in found.fars]
    good = [p for p in points if p.usable is not None and p.status != "not measurable"]
    if not good:
        return None
    point = min(good, key=lambda p: p.far)
    return {"value": repr(point.threshold), "threshold": f"{point.threshold:.3f}", "far": rate(point.far)}


def _pairs(found: Audit, kind: str) -> list[dict[str, Any]]:
    decided = _decision(found)
    shown = []
    for pair in found.hardest[kind][:SHOWN]:
        accepted = None if decided is None else pair.score >= float(decided["value"])
        verdict = {None: "", True: "accepted", False: "rejected"}[accepted]
        wrong = accepted is not None and accepted == (kind == "impostor")
        sides = [describe_row(found.table, at) for at in (pair.first, pair.second)]
        shown.append({"score": f"{pair.score:.3f}", "verdict": verdict, "wrong": wrong, "sides": sides})
    return shown


def describe_row(table: Embedded, at: int) -> dict[str, Any]:
    """One row: what to call it, its names, its picture if there is one that can be read."""
    domain = "" if table.domain is None else table.domain.names[table.domain.codes[at]]
    return {
        "name": table.called(at),
        "label": table.label.names[table.label.codes[at]],
        "domain": domain,
        "picture": _make_thumbnail(table, at),
    }


def _make_thumbnail(table: Embedded, at: int) -> str | None:
    if table.images is None or not table.images[at] or "://" in table.images[at]:
        return None
    try:
        return thumbnail(decode_image(table.folder / str(table.images[at])))
    except DataError:
        return None


def _memory(found: Audit, numbers: str) -> list[str]:
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
