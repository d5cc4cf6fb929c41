"""Figures as self-contained SVG addresses: nothing global is drawn on, the same numbers give the same bytes.

Names that users chose (domains, identities, runs) never enter a figure: they are set in HTML beside it, so
that every script and every symbol is shown, and escaped, by the browser.
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
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mettle.evaluate.curve import Curve, Histogram

# Okabe and Ito's palette: eight colours that stay apart for every kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, BLACK = COLOURS = (
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


@contextmanager
def sheet(width: float, height: float) -> Iterator[Figure]:
    """A figure in our style, whatever style the user's own configuration has."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        for key, value in STYLE.items():
            matplotlib.rcParams[key] = value
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white")


def address(figure: Figure) -> str:
    """The figure as a data address for an ``img`` element."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def roc(curves: Mapping[str, Curve], points: Sequence[Mapping[str, Any]] = (), baseline: Curve | None = None) -> str:
    """True-accept rate over false-accept rate, the latter on a logarithmic axis.

    Args:
        curves: one per scenario, by name; the last is the headline and gets the first colour.
        points: operating points of the headline with their intervals, as in ``metrics.json``.
        baseline: the raw inputs in the headline scenario.
    """
    with sheet(5.4, 4.0) as figure:
        axes = figure.add_subplot()
        lowest = 1.0
        for k, (name, curve) in enumerate(reversed(list(curves.items()))):
            axes.plot(*_path(curve), color=COLOURS[k], lw=2 if k == 0 else 1.6, ls=DASHES[min(k, 1)], label=name)
            lowest = min(lowest, float(curve.fmr[curve.fmr > 0].min(initial=1.0)))
        if baseline is not None:
            axes.plot(*_path(baseline), color=GREY, lw=1.4, ls=":", label=f"raw inputs, {list(curves)[-1]}")
        for point in points:
            if point["tar"] is not None and point["fmr"]:
                _whisker(axes, point)
        axes.set(xscale="log", xlim=(min(max(lowest, 1e-6), 0.1), 1), ylim=(0, 1.02))
        axes.set(xlabel="false-accept rate (FAR)", ylabel="true-accept rate (TAR)")
        axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
        axes.xaxis.set_major_formatter(FuncFormatter(percent_tick))
        axes.legend(loc="best")
        return address(figure)


def histograms(drawn: Mapping[str, Histogram], thresholds: Mapping[str, float]) -> str:
    """Score distributions of genuine and impostor pairs, one panel per scenario, headline first."""
    with sheet(5.4, 4.0) as figure:
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, h) in zip(panels, reversed(list(drawn.items())), strict=True):
            for counts, colour, label in ((h.impostor, ORANGE, "impostor"), (h.genuine, BLUE, "genuine")):
                share = counts / max(counts.sum(), 1)
                axes.stairs(share, h.edges, color=colour, fill=True, alpha=0.3)
                axes.stairs(share, h.edges, color=colour, lw=1.4, label=f"{label} pairs")
            axes.set_title(name, loc="left", fontsize=10)
            axes.set(ylabel="share of pairs", ylim=(0, None))
            axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            _thresholds(axes, thresholds, (h.edges[-1] - h.edges[0]) / 12)
        panels[-1].legend(loc="upper left")
        panels[-1].set_xlabel("cosine of the pair")
        return address(figure)


def run_colour(k: int) -> str:
    """The colour of the k-th run of a comparison."""
    return (*COLOURS[:6], BLACK)[k % 7]


def _path(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The part of a curve that a logarithmic axis can show."""
    seen = curve.fmr > 0
    return curve.fmr[seen], curve.tar[seen]


def _whisker(axes: Axes, point: Mapping[str, Any]) -> None:
    """An operating point and the interval of its true-accept rate."""
    band = point["interval"]
    if band:
        axes.plot([point["fmr"]] * 2, [band["low"], band["high"]], color=BLUE, lw=1.4, solid_capstyle="butt")
    axes.plot(point["fmr"], point["tar"], "o", color=BLUE, mec="white", ms=6)


def _thresholds(axes: Axes, thresholds: Mapping[str, float], gap: float) -> None:
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
