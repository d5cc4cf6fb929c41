"""Training curves: what happened step by step, and what difficulty did, one small picture per question."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mettle.evaluate.plots import BLUE, DASHES, GREY, ORANGE, new_figure, percent_tick, run_color, svg_data_url

POINTS = 300  # of one line: more cannot be told apart, and weigh on the page


Log = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """One training figure: which entries of the log, and what they tell."""

    title: str
    caption: str
    lines: tuple[tuple[str, str], ...]  # (key in the log, name in the legend)
    share: bool = False
    spread: str = ""  # key of a standard deviation that is drawn as a band around the first line
    level: tuple[float, str] | None = None  # a value worth comparing with, and its name
    still: float | str | None = None  # lines that never leave this value ("any": their first) tell nothing
    unless: str = ""  # a key whose own panel says it better
    mark: int | None = None  # the step whose weights are kept


PANELS = (
    Panel("Loss", "What is minimised. Flat from the start: nothing is learned.", (("loss", "loss"),)),
    Panel(
        "Loss of the biased encoder",
        "What E_b minimises: views that agree and a batch whose mean vanishes, no more.",
        (("biased_loss", "E_b"),),
    ),
    Panel(
        "Weight of negatives",
        "Relative difficulty w, mean and one standard deviation either way. No spread: the encoders agree, and w is a "
        "constant.",
        (("weight_mean", "mean of w"),),
        spread="weight_std",
        level=(1.5, "equal encoders"),
    ),
    Panel(
        "Weight by group",
        "Mean w of negatives of another class: of the anchor's group, and of another. Apart: w sees the attribute.",
        (("weight_same_group", "same group"), ("weight_other_group", "other group")),
    ),
    Panel(
        "Held up by the floor",
        "Positive pairs whose debiased sum of negatives is at its floor: there, negatives get no gradient.",
        (("clamp_fraction", "share of pairs"),),
        share=True,
        still=0.0,
    ),
    Panel(
        "Pull of negatives (λ)",
        "1 leaves negatives where they are, 0 pulls them as near as the positive. It falls as the metric loss does.",
        (("lambda", "λ"),),
    ),
    Panel(
        "Real and synthetic tuples",
        "How much each kind counts in the metric loss: synthetic ones more as the generator improves.",
        (("weight_real", "real"), ("weight_synthetic", "synthetic")),
        share=True,
    ),
    Panel(
        "Error of the generator",
        "Squared error of reconstructed features, in units of what the mean feature would reach.",
        (("reconstruction", "generator"),),
        level=(1.0, "mean feature"),
    ),
    Panel(
        "Softmax head",
        "Accuracy on features. Synthetic far below real: new points lose their class.",
        (("head_real", "real"), ("head_synthetic", "synthetic")),
        share=True,
    ),
    Panel(
        "Mean similarity",
        "The two should part: same identity up, different identities down.",
        (("positive_similarity", "same identity"), ("negative_similarity", "different identities")),
    ),
    Panel(
        "Hard pairs",
        "Share of pairs whose weight the difficulty raised; it falls as pairs are learned.",
        (("hard_positives", "positives"), ("hard_negatives", "negatives")),
        share=True,
        still=0.0,
        unless="weight_mean",
    ),
    Panel(
        "Mean weight",
        "1 = a pair counts once. High for long: hard pairs dominate the loss.",
        (("positive_weight", "positives"), ("negative_weight", "negatives")),
        still=1.0,
        unless="weight_mean",
    ),
    Panel(
        "Effective negatives",
        "How many negatives an anchor really learns from, once weights are counted.",
        (("effective_negatives", "per anchor"),),
        still="any",
    ),
    Panel(
        "Gradient norm",
        "Spikes: the rate is too high, or a few pairs pull too hard.",
        (("gradient", "norm"),),
    ),
)


def validation_panels(logs: Sequence[Log], selection: Mapping[str, Any] | None = None) -> list[Panel]:
    """A panel for each metric that was measured on the validation part, the one that decided first.

    The name of a column is the user's, so it stands in the caption and not in the figure.
    """
    keys = dict.fromkeys(key for lines in logs for line in lines for key in line if key.startswith("val_"))
    chosen = "" if selection is None else f"val_{selection['metric']}"
    found = []
    for key in sorted(keys, key=lambda key: key != chosen):
        name = key.removeprefix("val_")
        caption = f"{name} on the validation identities; step 0 is the untrained network."
        if key == chosen and selection is not None:
            caption += f" The dot is step {selection['step']:,}, whose weights are kept."
        title = f"Validation: {name.partition(' by ')[0]}{' group' if ' by ' in name else ''}"
        mark = selection["step"] if key == chosen and selection is not None else None
        found.append(Panel(title, caption, ((key, name),), mark=mark))
    return found


def plot_training(logs: Sequence[Log], selection: Mapping[str, Any] | None = None) -> list[dict[str, str]]:
    """Training curves of one run, or of several laid over each other (colour = run, dashes = second line).

    ``selection`` says which step of the one run was chosen, and by what.
    """
    return [
        {"title": panel.title, "caption": panel.caption, "image": _draw_panel(panel, logs)}
        for panel in (*validation_panels(logs, selection), *PANELS)
        if _is_informative(panel, logs)
    ]


def _is_informative(panel: Panel, logs: Sequence[Log]) -> bool:
    """Whether there is a curve, and one that moves."""
    drawn = [log_series(lines, key) for lines in logs for key, _ in panel.lines]
    drawn = [found for found in drawn if len(found) > 1]
    if panel.unless and any(len(log_series(lines, panel.unless)) > 1 for lines in logs):
        return False
    return any(
        panel.still is None or (found[:, 1] != (found[0, 1] if panel.still == "any" else panel.still)).any()
        for found in drawn
    )


def _draw_panel(panel: Panel, logs: Sequence[Log]) -> str:
    several = len(logs) > 1
    named = len(panel.lines) > 1 or panel.level is not None
    with new_figure(4.2, 2.9) as figure:
        axes = figure.add_subplot()
        for k, lines in enumerate(logs):
            for n, (key, _) in enumerate(panel.lines):
                found = log_series(lines, key)
                color = run_color(k) if several else (BLUE, ORANGE)[n]
                if len(found) > 1:
                    axes.plot(*found.T, color=color, ls=DASHES[n], lw=1.7)
                if panel.spread and n == 0:
                    band = log_series(lines, key, panel.spread)
                    axes.fill_between(
                        band[:, 0], band[:, 1] - band[:, 2], band[:, 1] + band[:, 2], color=color, alpha=0.2, lw=0
                    )
                if panel.mark is not None and panel.mark in found[:, 0]:
                    at = found[found[:, 0] == panel.mark][0]
                    axes.axvline(panel.mark, color=GREY, lw=1.0, ls=":")
                    axes.plot(at[0], at[1], "o", color=ORANGE, mec="white", ms=8, zorder=3)
        if panel.level is not None:
            axes.axhline(panel.level[0], color=GREY, lw=1.2, ls=":", label=panel.level[1])
        if named:
            for n, (_, name) in enumerate(panel.lines):
                axes.plot([], [], color="#555555" if several else (BLUE, ORANGE)[n], ls=DASHES[n], label=name)
            axes.legend(fontsize=9, frameon=bool(panel.spread), framealpha=0.85, edgecolor="none")
        axes.set_title(panel.title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if panel.share:
            axes.set_ylim(0, None)
            axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
        return svg_data_url(figure)


def log_series(lines: Log, *keys: str) -> np.ndarray:
    """(n, 1 + keys) steps and finite values of entries of the log, thinned where there are many."""
    rows = ([line["step"], *(line.get(key) for key in keys)] for line in lines)
    kept = [row for row in rows if all(map(_is_finite, row))]
    found = np.asarray(kept, dtype=float).reshape(-1, 1 + len(keys))
    if len(found) > POINTS:
        found = found[np.unique(np.linspace(0, len(found) - 1, POINTS).round().astype(int))]
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
