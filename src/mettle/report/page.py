"""The report of a run: one HTML file that needs nothing else, and the card beside it."""

from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mettle.durable import write_text
from mettle.errors import RunError
from mettle.evaluate.curve import Curve
from mettle.evaluate.protocol import PIXELS, Judged, raw
from mettle.evaluate.run import Evaluation
from mettle.report import figures, pairs
from mettle.report.card import card, markdown
from mettle.report.map import embedding_map
from mettle.report.number import called, rate
from mettle.train.artifact import Run
from mettle.train.log import read

CHEAP = 3e10  # multiplications that the curve of the raw inputs may cost; it is left out above
BINS = 80


def write_report(run: Run, evaluation: Evaluation, path: Path | str | None = None) -> Path:
    """Write the report of a run.

    Args:
        run: the run.
        evaluation: what `evaluate_run` returned for it.
        path: where the page goes; ``report.html`` in the run folder by default.

    Returns:
        The path of the page. ``card.md`` goes into the run folder, unless a page of other data
        goes elsewhere.
    """
    page = place(path if path is not None else run.folder / "report.html")
    facts = card(run, evaluation.metrics, _notes(evaluation.judged))
    write_text(page, render("report.html.j2", card=facts, **pictures(run, evaluation)))
    if path is None or run.state.get("data") == evaluation.metrics["data"]["fingerprint"]:
        write_text(run.folder / "card.md", markdown(facts))
    return page


def pictures(run: Run, evaluation: Evaluation) -> dict[str, Any]:
    """Everything on the page that is drawn rather than written."""
    metrics, judged = evaluation.metrics, evaluation.judged
    decided = pairs.decision(metrics)
    way = metrics["scenarios"][judged.headline.name]
    found = metrics.get("thresholds", {}).get("set", {})
    lines = {rate(float(f)): e["threshold"] for f, e in found.items() if e["threshold"] is not None}
    return {
        "roc": figures.roc(
            {called(name): v.roc.thinned(256) for name, v in judged.verifications.items()},
            way["verification"]["tar"],
            _baseline(judged) if "baselines" in metrics else None,
        ),
        "histograms": figures.histograms(
            {called(name): v.histogram(BINS) for name, v in judged.verifications.items()}, lines
        ),
        "decision": decided,
        "images": judged.samples.inputs.kind == "image",
        "negatives": pairs.shown(pairs.hardest(judged, "impostor"), judged.samples, decided, "impostor"),
        "positives": pairs.shown(pairs.hardest(judged, "genuine"), judged.samples, decided, "genuine"),
        "map": _map(judged),
        "training": figures.training([read(run.folder / "log.jsonl")]),
    }


def render(template: str, **facts: Any) -> str:
    """Fill a template; whatever is inserted is escaped."""
    return _environment().get_template(template).render(**facts)


def place(path: Path | str) -> Path:
    """Where a page goes; a folder that is not there is an error now, not after everything is drawn."""
    path = Path(path)
    if not path.parent.is_dir():
        raise RunError(f"cannot write {path}: there is no folder {path.parent}; make it, or choose another --output")
    return path


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("mettle.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _map(judged: Judged) -> dict[str, Any] | None:
    """The map, and beside it the identities it marks."""
    found = embedding_map(judged)
    if found is None:
        return None
    marked = [pairs.side(judged.samples, at) for at in found.marked]
    return {**vars(found), "marked": marked}


def _baseline(judged: Judged) -> Curve | None:
    """The curve of the raw inputs in the headline scenario, where it costs little."""
    way, inputs = judged.headline, judged.samples.inputs
    width = prod(min(side, PIXELS) if inputs.kind == "image" else side for side in inputs.shape)
    other = len(way.probe) if way.gallery is None else len(way.gallery)
    if len(way.probe) * other * width > CHEAP:
        return None
    return way.verification(raw(judged.samples), judged.samples).roc.thinned(256)


def _notes(judged: Judged) -> list[str]:
    left_out = len(judged.samples.skipped)
    return [f"{left_out:,} unreadable files were left out of the data."] if left_out else []
