"""The report of a run: one HTML file that needs nothing else, and the card beside it."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mettle.atomic_files import write_text
from mettle.evaluate import plots
from mettle.evaluate.roc import OperatingCurve
from mettle.evaluate.run import Evaluation
from mettle.evaluate.run.scenarios import PIXELS, ScenarioResults, embed_raw_inputs
from mettle.evaluate.run.synthetic_points import synthesize_test_negatives
from mettle.report import pair_cards, training_plots, two_encoders
from mettle.report.embedding_map import NARROW, POINTS, WIDE, MapLayout, map_panes, sample_identities, write_maps
from mettle.report.format import format_rate, scenario_title
from mettle.report.headline import question_name
from mettle.report.page import check_page_path, render_page
from mettle.report.run_card import build_card, card_to_markdown
from mettle.train.callbacks import read_log
from mettle.train.run_folder import RunFolder, is_builtin_source

CHEAP = 3e10  # multiplications that the curve of the raw inputs may cost; it is left out above
BINS = 80


def write_report(run: RunFolder, evaluation: Evaluation, path: Path | str | None = None) -> Path:
    """Write the report of a run.

    Args:
        run: the run.
        evaluation: what `evaluate_run` returned for it.
        path: where the page goes; ``report.html`` in the run folder by default.

    Returns:
        The path of the page. ``card.md`` and ``map.json`` go into the run folder, unless a page of other data
        goes elsewhere.
    """
    page = check_page_path(path if path is not None else run.folder / "report.html")
    facts = build_card(run, evaluation.metrics, _skipped_note(evaluation.results))
    made, why_not = _synthesize(run, evaluation)
    by_class = question_name(evaluation.metrics) == "closed-set"
    maps = two_encoders.encoder_maps(run, evaluation.results, by_class=by_class, synthetic=made)
    write_text(page, render_page("report.html.j2", card=facts, **page_figures(run, evaluation, maps, why_not)))
    if path is None or run.matches_data(evaluation.metrics["data"]["fingerprint"]):
        write_text(run.folder / "card.md", card_to_markdown(facts))
        write_maps(run, maps, evaluation.results, evaluation.metrics)
    return page


def page_figures(
    run: RunFolder, evaluation: Evaluation, maps: Mapping[str, MapLayout], why_no_synthetic: str = ""
) -> dict[str, Any]:
    """Everything on the page that is drawn rather than written."""
    metrics, results = evaluation.metrics, evaluation.results
    log = read_log(run.folder / "log.jsonl")
    decided = pair_cards.choose_threshold(metrics)
    scenario = metrics["scenarios"][results.headline.name]
    found = metrics.get("thresholds", {}).get("set", {})
    lines = {format_rate(float(f)): e["threshold"] for f, e in found.items() if e["threshold"] is not None}
    return {
        "roc": plots.plot_roc(
            {scenario_title(name): v.roc.subsample(256) for name, v in results.verifications.items()},
            scenario["verification"]["tar"],
            _baseline_curve(results) if "baselines" in metrics else None,
        ),
        "histograms": plots.plot_histograms(
            {scenario_title(name): v.histogram(BINS) for name, v in results.verifications.items()}, lines
        ),
        "decision": decided,
        "images": results.samples.inputs.kind == "image",
        "sees": describe_view(run, results),
        "negatives": pair_cards.pair_rows(
            pair_cards.hardest_pairs(results, "impostor"), results.samples, decided, "impostor"
        ),
        "positives": pair_cards.pair_rows(
            pair_cards.hardest_pairs(results, "genuine"), results.samples, decided, "genuine"
        ),
        "map": _map_section(results, maps, why_no_synthetic),
        "training": training_plots.plot_training([log], metrics.get("selection")),
        **_two_encoder_sections(run, evaluation, log),
    }


def describe_view(run: RunFolder, results: ScenarioResults) -> str:
    """What the pictures on the page show of the files: exactly what the network sees. Empty for rows of numbers."""
    if results.samples.inputs.kind != "image":
        return ""
    height, width = results.samples.inputs.shape[:2]
    how = {
        "crop": "scaled with their proportions kept and cropped from the centre",
        "pad": "scaled with their proportions kept and padded with grey",
        "stretch": "stretched, so that proportions may be lost,",
    }
    if is_builtin_source(run.recipe.data.source):
        return f"Pictures are shown as the network sees them, {height} x {width} pixels."
    resize = how[run.recipe.data.resize or "crop"]
    return (
        f"Pictures are shown as the network sees them: {resize} to {height} x {width} pixels (data.size, data.resize)."
    )


def _synthesize(run: RunFolder, evaluation: Evaluation) -> tuple[np.ndarray | None, str]:
    """Synthetic negatives for the map of a hardness-aware run, and why there are none."""
    if evaluation.samples is None or run.recipe.train.method != "hardness-aware":
        return None, ""
    labels = evaluation.results.samples.labels
    return synthesize_test_negatives(run, evaluation.samples, sample_identities(labels, POINTS, 0))


def _map_section(
    results: ScenarioResults, maps: Mapping[str, MapLayout], why_no_synthetic: str
) -> dict[str, Any] | None:
    """The map, those of both encoders where there are two, and the identities they mark."""
    if not maps:
        return None
    first = next(iter(maps.values()))
    rows = [int(first.rows[np.flatnonzero(first.labels == label)[0]]) for label in first.marked]
    titled = {two_encoders.encoder_title(name): one for name, one in maps.items()}
    return {
        "panes": map_panes(titled, WIDE if len(maps) == 1 else NARROW),
        "several": len(maps) > 1,
        "synthetic": 0 if first.synthetic is None else len(first.synthetic),
        "why_no_synthetic": why_no_synthetic,
        "marked": [pair_cards.describe_sample(results.samples, at) for at in rows],
        "points": len(first.rows),
        "identities": len(np.unique(first.labels)),
    }


def _two_encoder_sections(run: RunFolder, evaluation: Evaluation, log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What only a run with a second encoder has; None for all others."""
    if not two_encoders.has_second_encoder(run) or evaluation.samples is None:
        return {"weighed": None, "weights": None}
    return {
        "weighed": two_encoders.negatives_by_difficulty(run, evaluation.samples),
        "weights": two_encoders.weights_by_group(run, evaluation.samples, log),
    }


def _baseline_curve(results: ScenarioResults) -> OperatingCurve | None:
    """The curve of the raw inputs in the headline scenario, where it costs little."""
    scenario, inputs = results.headline, results.samples.inputs
    width = prod(min(side, PIXELS) if inputs.kind == "image" else side for side in inputs.shape)
    other = len(scenario.probe) if scenario.gallery is None else len(scenario.gallery)
    if len(scenario.probe) * other * width > CHEAP:
        return None
    return scenario.verification(embed_raw_inputs(results.samples), results.samples).roc.subsample(256)


def _skipped_note(results: ScenarioResults) -> list[str]:
    left_out = len(results.samples.skipped)
    return [f"{left_out:,} unreadable files were left out of the data."] if left_out else []
