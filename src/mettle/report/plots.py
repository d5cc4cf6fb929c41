"""Figures as self-contained SVG addresses: nothing global is drawn on, the same numbers give the same bytes.

Names that users chose (domains, identities, runs) never enter a figure: they are set in HTML beside it, so
that every script and every symbol is shown, and escaped, by the browser.

Curves that only an audit draws: errors on normal-deviate axes, and one curve for every group.
"""

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy.special import ndtri

from mettle.evaluate.groups import Groups
from mettle.evaluate.roc import Curve, Histogram

# Okabe and Ito's palette: eight colours that stay apart for every kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, BLACK = COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000",
)  # fmt: skip
GREY, INK = "#8a8a8a", "#222222"
DASHES: tuple[Any, ...] = ("-", (0, (4, 2)))
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.edgecolor": "#777777",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "svg.hashsalt": "mettle",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}
CURVES = 7  # groups in one picture
DET = (0.001, 0.01, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 0.99)


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """A figure in our style, whatever style the user's own configuration has."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        for key, value in STYLE.items():
            matplotlib.rcParams[key] = value
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white")


def svg_data_url(figure: Figure) -> str:
    """The figure as a data address for an ``img`` element."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def plot_roc(
    curves: Mapping[str, Curve], points: Sequence[Mapping[str, Any]] = (), baseline: Curve | None = None
) -> str:
    """True-accept rate over false-accept rate, the latter on a logarithmic axis.

    Args:
        curves: one per scenario, by name; the last is the headline and gets the first colour.
        points: operating points of the headline with their intervals, as in ``metrics.json``.
        baseline: the raw inputs in the headline scenario.
    """
    with new_figure(5.4, 4.0) as figure:
        axes = figure.add_subplot()
        lowest = 1.0
        for k, (name, curve) in enumerate(reversed(list(curves.items()))):
            axes.plot(
                *_log_axis_points(curve), color=COLORS[k], lw=2 if k == 0 else 1.6, ls=DASHES[min(k, 1)], label=name
            )
            lowest = min(lowest, float(curve.fmr[curve.fmr > 0].min(initial=1.0)))
        if baseline is not None:
            axes.plot(*_log_axis_points(baseline), color=GREY, lw=1.4, ls=":", label=f"raw inputs, {list(curves)[-1]}")
        for point in points:
            if point["tar"] is not None and point["fmr"]:
                _draw_interval(axes, point)
        axes.set(xscale="log", xlim=(min(max(lowest, 1e-6), 0.1), 1), ylim=(0, 1.02))
        axes.set(xlabel="false-accept rate (FAR)", ylabel="true-accept rate (TAR)")
        axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
        axes.xaxis.set_major_formatter(FuncFormatter(percent_tick))
        axes.legend(loc="best")
        return svg_data_url(figure)


def plot_histograms(drawn: Mapping[str, Histogram], thresholds: Mapping[str, float]) -> str:
    """Score distributions of genuine and impostor pairs, one panel per scenario, headline first."""
    with new_figure(5.4, 4.0) as figure:
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, h) in zip(panels, reversed(list(drawn.items())), strict=True):
            for counts, color, label in ((h.impostor, ORANGE, "impostor"), (h.genuine, BLUE, "genuine")):
                share = counts / max(counts.sum(), 1)
                axes.stairs(share, h.edges, color=color, fill=True, alpha=0.3)
                axes.stairs(share, h.edges, color=color, lw=1.4, label=f"{label} pairs")
            axes.set_title(name, loc="left", fontsize=10)
            axes.set(ylabel="share of pairs", ylim=(0, None))
            axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            _draw_thresholds(axes, thresholds, (h.edges[-1] - h.edges[0]) / 12)
        panels[-1].legend(loc="upper left")
        panels[-1].set_xlabel("cosine of the pair")
        return svg_data_url(figure)


def run_color(k: int) -> str:
    """The colour of the k-th run of a comparison."""
    return (*COLORS[:6], BLACK)[k % 7]


def _log_axis_points(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The part of a curve that a logarithmic axis can show."""
    seen = curve.fmr > 0
    return curve.fmr[seen], curve.tar[seen]


def _draw_interval(axes: Axes, point: Mapping[str, Any]) -> None:
    """An operating point and the interval of its true-accept rate."""
    band = point["interval"]
    if band:
        axes.plot([point["fmr"]] * 2, [band["low"], band["high"]], color=BLUE, lw=1.4, solid_capstyle="butt")
    axes.plot(point["fmr"], point["tar"], "o", color=BLUE, mec="white", ms=6)


def _draw_thresholds(axes: Axes, thresholds: Mapping[str, float], gap: float) -> None:
    """Dashed lines, named above the axes where there is room for a name."""
    last = math.inf
    for text, threshold in sorted(thresholds.items(), key=lambda entry: -entry[1]):
        axes.axvline(threshold, color=INK, lw=1, ls=DASHES[1])
        if last - threshold > gap:
            above = axes.get_xaxis_transform()
            axes.text(threshold, 1.02, text, transform=above, ha="center", va="bottom", fontsize=8)
            last = threshold


def percent_tick(value: float, _: int) -> str:
    """A share as the text of a tick."""
    return f"{100 * value:.6g} %"


def plot_det(curves: Mapping[str, Curve]) -> str:
    """Miss rate over false-accept rate on normal-deviate axes, where equal error lies on the diagonal."""
    with new_figure(5.4, 4.0) as figure:
        axes = figure.add_subplot()
        for k, (name, curve) in enumerate(reversed(list(curves.items()))):
            axes.plot(*curve.probit(), color=COLORS[k], lw=2 if k == 0 else 1.6, ls=DASHES[min(k, 1)], label=name)
        lowest = min((float(c.fmr[c.fmr > 0].min(initial=0.5)) for c in curves.values()), default=0.5)
        low, high = ndtri(max(min(lowest, 0.05), 1e-4)), ndtri(0.99)
        axes.plot([low, high], [low, high], color=GREY, lw=1, ls=":", label="equal errors")
        axes.set(xlim=(low, ndtri(0.9)), ylim=(ndtri(0.0005), high))
        _set_deviate_ticks(axes)
        axes.set(xlabel="false-accept rate (FAR)", ylabel="false-reject rate")
        axes.legend(loc="best")
        return svg_data_url(figure)


def _set_deviate_ticks(axes: Axes) -> None:
    """Ticks at round rates."""
    for axis, ticks in ((axes.xaxis, (1e-4, *DET)), (axes.yaxis, DET)):
        axis.set_major_locator(FixedLocator([float(ndtri(t)) for t in ticks]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * _rate_of_deviate(value):.4g} %"))


def _rate_of_deviate(deviate: float) -> float:
    """The rate behind a normal deviate, as round as the ticks are."""
    return float(f"{0.5 * math.erfc(-deviate / math.sqrt(2)):.3g}")


def plot_group_curves(found: Groups) -> tuple[str | None, dict[str, str]]:
    """ROC curves of the largest groups, and the colour of each; names stay out of the picture."""
    able = sorted((g for g in found if g.verification is not None), key=lambda g: (-g.subjects, g.name))[:CURVES]
    if len(able) < 2:
        return None, {}
    able.sort(key=lambda g: g.name)
    colors = {g.name: run_color(k) for k, g in enumerate(able)}
    with new_figure(5.4, 3.6) as figure:
        axes = figure.add_subplot()
        lowest = 0.1
        for g in able:
            assert g.verification is not None
            curve = g.verification.roc.thinned(128)
            seen = curve.fmr > 0
            lowest = min(lowest, float(curve.fmr[seen].min(initial=0.1)))
            axes.plot(curve.fmr[seen], curve.fnmr[seen], color=colors[g.name], lw=1.8)
            if found.threshold is not None:
                fmr, fnmr = g.verification.rates(found.threshold)
                axes.plot(max(fmr, 1e-9), fnmr, "o", color=colors[g.name], mec="white", ms=7, zorder=3)
        axes.set(xscale="log", xlim=(max(lowest, 1e-5), 1), ylim=(0, None))
        axes.set(xlabel="false-accept rate (FAR)", ylabel="false-reject rate")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.6g} %"))
        return svg_data_url(figure), colors
