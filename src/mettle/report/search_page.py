"""The page of a search: its best trials, the metric against each range, and which ranges are too narrow."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from mettle.atomic_files import write_text
from mettle.evaluate.bootstrap import mean_interval
from mettle.evaluate.plots import BLUE, GREY, ORANGE, VERMILION, new_figure, svg_data_url
from mettle.report.format import NONE
from mettle.report.page import check_page_path, render_page
from mettle.train.callbacks import Direction
from mettle.train.recipe import Range, Recipe
from mettle.train.recipe_files import format_call
from mettle.train.search import Trial, best_trial, describe_edges

SHOWN = 10  # trials in the table
REASONS = 10  # failed trials that are listed


def fold_interval(trial: Trial) -> tuple[float, float] | None:
    """The 95 % interval of the mean over folds (Student's t); None without folds."""
    values = [fold.metric for fold in trial.folds if fold.metric is not None]
    if trial.metric is None or len(values) < 2:
        return None
    mean, half = mean_interval(values)
    return max(0.0, mean - half), min(1.0, mean + half)  # all metrics are rates


def describe_trial(trial: Trial, metric: str) -> str:
    """What a trial came to, in one line."""
    settings = _describe_values(trial.values)
    if trial.state == "failed":
        return f"failed with {settings}: {trial.reason}"
    if trial.state == "pruned":
        step, value = trial.folds[-1].steps[-1]
        found = f"pruned at step {step}, {metric} {NONE if value is None else f'{value:.4g}'}"
        return f"{found}, with {settings}, {trial.seconds:.1f} s"
    band = fold_interval(trial)
    spread = "" if band is None else f" [{band[0]:.4g}, {band[1]:.4g}] over {len(trial.folds)} folds"
    return f"{metric} {trial.metric:.4g}{spread} with {settings}, {trial.seconds:.1f} s"


def _describe_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {format_value(value)}" for key, value in values.items())


def format_value(value: Any) -> str:
    """A value of a recipe key as text."""
    if isinstance(value, Mapping):
        return format_call(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_search_page(recipe: Recipe, trials: Sequence[Trial], path: Path, *, direction: Direction) -> Path:
    """Write the page of a search.

    Args:
        recipe: with its table ``[tune]``.
        trials: all that there are, in their order.
        path: where the page goes.
        direction: whether low or high values of the metric are better.
    """
    page, settings, best = check_page_path(path), recipe.tune, best_trial(trials, direction)
    counts = {state: sum(trial.state == state for trial in trials) for state in ("finished", "pruned", "failed")}
    ranked = sorted(
        (trial for trial in trials if trial.metric is not None),
        key=lambda trial: ((trial.metric or 0.0) * (1 if direction == "min" else -1), trial.number),
    )
    facts: dict[str, Any] = {
        "name": page.parent.name,
        "recipe": str(page.parent / "best.toml"),
        "title": recipe.title(),
        "settings": settings,
        "counts": counts,
        "total": len(trials),
        "seconds": sum(trial.seconds for trial in trials),
        "direction": direction,
        "seed": recipe.seed,
        "best": None if best is None else _trial_row(best, settings.ranges),
        "warnings": _collect_warnings(recipe, trials, best),
        "keys": list(settings.ranges),
        "ranges": {key: _describe_range(one) for key, one in settings.ranges.items()},
        "rows": [_trial_row(trial, settings.ranges) for trial in ranked[:SHOWN]],
        "progress": _draw_progress(trials, settings.metric, direction) if ranked else "",
        "figures": [
            {"key": key, "image": _draw_range(key, one, trials, best), "legend": _choice_names(one)}
            for key, one in settings.ranges.items()
            if any(_shown_value(trial) is not None and key in trial.values for trial in trials)
        ],
        "failed": [
            {"number": trial.number, "text": _describe_values(trial.values), "reason": trial.reason}
            for trial in [trial for trial in trials if trial.state == "failed"][:REASONS]
        ],
    }
    write_text(page, render_page("search.html.j2", **facts))
    return page


def _collect_warnings(recipe: Recipe, trials: Sequence[Trial], best: Trial | None) -> list[str]:
    found = [] if best is None else describe_edges(recipe.tune.ranges, best.values)
    missing, failed = recipe.tune.trials - len(trials), sum(trial.state == "failed" for trial in trials)
    if missing > 0:
        found.append(f"the search is not finished: {missing} of {recipe.tune.trials} trials are missing")
    if failed:
        found.append(f"{failed} of {len(trials)} trials failed; the reasons are below")
    if best is None:
        found.append("no trial is finished, so there is no best one")
    return [text[0].upper() + text[1:] for text in found]


def _trial_row(trial: Trial, ranges: Mapping[str, Range]) -> dict[str, Any]:
    """A trial as a row of the table."""
    band = fold_interval(trial)
    steps = sorted({fold.step for fold in trial.folds if fold.step is not None})
    return {
        "number": trial.number,
        "text": NONE if trial.metric is None else f"{trial.metric:.4g}",
        "interval": "" if band is None else f"{band[0]:.4g}–{band[1]:.4g}",
        "values": [format_value(trial.values[key]) if key in trial.values else NONE for key in ranges],
        "step": " to ".join(f"{step:,}" for step in dict.fromkeys((steps[0], steps[-1]))) if steps else NONE,
        "seconds": f"{trial.seconds:,.1f}",
    }


def _describe_range(one: Range) -> str:
    if one.choices is not None:
        return ", ".join(map(format_value, one.choices))
    step = "" if one.step is None else f", step {one.step:g}"
    return f"{one.low:g} to {one.high:g}{step}{', logarithmic' if one.log else ''}"


def _choice_names(one: Range) -> list[str]:
    """The names of choices that are no numbers, which stand beside a figure and not in it."""
    names = [format_value(choice) for choice in one.choices or ()]
    return [] if all(type(choice) in (int, float) for choice in one.choices or ()) else names


def _shown_value(trial: Trial) -> float | None:
    """The metric of a finished trial, or the last value of a pruned one."""
    if trial.state == "pruned":
        return trial.folds[-1].steps[-1][1] if trial.folds and trial.folds[-1].steps else None
    return trial.metric


def _draw_progress(trials: Sequence[Trial], metric: str, direction: Direction) -> str:
    """Every trial in its order, and the best value so far."""
    with new_figure(5.4, 3.2) as figure:
        axes = figure.add_subplot()
        finished = [(trial.number, trial.metric) for trial in trials if trial.metric is not None]
        x, y = np.asarray(finished, float).T
        better = np.minimum.accumulate(y) if direction == "min" else np.maximum.accumulate(y)
        axes.step([*x, len(trials)], [*better, better[-1]], where="post", color=ORANGE, lw=1.8, label="best so far")
        axes.plot(x, y, "o", color=BLUE, ms=5, mec="white", mew=0.6, label="finished")
        _draw_pruned(axes, [(trial.number, trial) for trial in trials])
        failed = [trial.number for trial in trials if trial.state == "failed"]
        if failed:
            axes.plot(failed, [0.03] * len(failed), "|", color=VERMILION, ms=9, mew=1.8, label="failed",
                      transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set(xlabel="trial", ylabel=metric.partition(" by ")[0])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.legend(fontsize=9)
        return svg_data_url(figure)


def _draw_range(key: str, one: Range, trials: Sequence[Trial], best: Trial | None) -> str:
    """The metric against the values of one key."""
    with new_figure(4.2, 2.9) as figure:
        axes = figure.add_subplot()
        shown = [(_axis_position(one, trial.values[key]), trial) for trial in trials if key in trial.values]
        finished = [(x, trial.metric) for x, trial in shown if trial.metric is not None]
        if finished:
            axes.plot(*np.asarray(finished, float).T, "o", color=BLUE, ms=5, mec="white", mew=0.6)
        _draw_pruned(axes, shown)
        if best is not None and best.metric is not None and key in best.values:
            axes.plot(
                _axis_position(one, best.values[key]), best.metric, "o", color=ORANGE, mec="white", ms=9, zorder=3
            )
        if one.choices is not None:
            names = [f"{c:g}" for c in one.choices if type(c) in (int, float)]
            at = range(1, len(one.choices) + 1)
            axes.set_xticks(at, names if len(names) == len(one.choices) else [str(k) for k in at])
            axes.set_xlim(0.5, len(one.choices) + 0.5)
        else:
            if one.log:
                axes.set_xscale("log")
                is_wide = one.ends[1] / one.ends[0] > 50
                axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.xaxis.set_minor_formatter(NullFormatter())
            for end in one.ends:
                axes.axvline(end, color=GREY, lw=1.0, ls=":")
        return svg_data_url(figure)


def _draw_pruned(axes: Any, shown: Sequence[tuple[float, Trial]]) -> None:
    points = [(x, _shown_value(trial)) for x, trial in shown if trial.state == "pruned"]
    points = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
    if points:
        axes.plot(*np.asarray(points, float).T, "x", color=GREY, ms=5, label="pruned")


def _axis_position(one: Range, value: Any) -> float:
    return float(value) if one.choices is None else one.choices.index(value) + 1
