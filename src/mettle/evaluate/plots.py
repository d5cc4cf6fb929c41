"""ROC, DET and score histograms: for pages as addresses of SVG, for Python and notebooks as a `Plot`.

    curves ─ draw_roc, draw_det, draw_histogram ─┬─ plot_roc, plot_det, plot_histograms   an address, for a page
                                                 └─ plot_verification                     a Plot, for a notebook

Nothing global is drawn on, and the same numbers give the same bytes. Names that users chose (domains, identities, runs)
never enter a figure: they are set in HTML beside it, so that every script and every symbol is shown, and escaped, by
the browser. Labels do not touch: ticks are few, and names of thresholds stand in rows above the axes.
"""

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from scipy.special import ndtri

from mettle.atomic_files import write_bytes
from mettle.errors import InputError, nearest
from mettle.evaluate.groups import Groups
from mettle.evaluate.roc import Histogram, OperatingCurve

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
DET = (0.001, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)
KINDS = ("all", "roc", "det", "scores")
ROWS = 3  # of names above the axes; more thresholds than fit have no name


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """A figure in our style, whatever style the user's own configuration has."""
    with our_style():
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white")


@contextmanager
def our_style() -> Iterator[None]:
    """Our settings of matplotlib, and the user's again afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        for key, value in STYLE.items():
            matplotlib.rcParams[key] = value
        yield


def render_svg(figure: Figure) -> bytes:
    """The figure as SVG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def svg_data_url(figure: Figure) -> str:
    """The figure as a data address for an ``img`` element."""
    return f"data:image/svg+xml;base64,{base64.b64encode(render_svg(figure)).decode()}"


@dataclass(frozen=True, eq=False)
class Plot:
    """A picture of a result: a notebook shows it, `save` writes it, ``figure`` is matplotlib's."""

    figure: Figure

    def __repr__(self) -> str:
        width, height = self.figure.get_size_inches()
        return f"Plot({width:g} x {height:g} inches; save it with .save('plot.svg'))"

    @cached_property
    def svg(self) -> str:
        """The picture as SVG."""
        with our_style():
            return render_svg(self.figure).decode()

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return self.svg[self.svg.index("<svg") :]

    def save(self, path: Path | str) -> Path:
        """Write the picture: ``.svg``, ``.png`` or ``.pdf``, as the name ends.

        Raises:
            InputError: another ending.
        """
        path = Path(path)
        kind = path.suffix.lower().removeprefix(".")
        if kind not in ("svg", "png", "pdf"):
            raise InputError(f"a plot is saved as .svg, .png or .pdf: got {path}; name {path.with_suffix('.svg')}, say")
        if kind == "svg":
            content = self.svg.encode()
        else:
            buffer = io.BytesIO()
            with our_style():
                self.figure.savefig(buffer, format=kind, dpi=200)
            content = buffer.getvalue()
        write_bytes(path, content)
        return path


def plot_verification(
    curve: OperatingCurve, h: Histogram, points: Sequence[Mapping[str, Any]] = (), kind: str = "all"
) -> Plot:
    """ROC, DET and score histograms of one result; see `Verification.plot`.

    Args:
        curve: error rates at all thresholds.
        h: both score distributions.
        points: operating points: each with ``far``, ``fmr``, ``tar``, ``threshold`` and ``interval``.
        kind: ``"roc"``, ``"det"`` or ``"scores"`` alone, or ``"all"`` side by side.
    """
    if kind not in KINDS:
        raise InputError(f"no plot named {kind!r}{nearest(str(kind), KINDS)}")
    chosen = KINDS[1:] if kind == "all" else (kind,)
    with new_figure(5.0 * len(chosen), 3.9) as figure:
        panels = figure.subplots(1, len(chosen), squeeze=False)[0]
        for name, axes in zip(chosen, panels, strict=True):
            if name == "roc":
                draw_roc(axes, {"": curve}, points)
            elif name == "det":
                draw_det(axes, {"": curve})
            else:
                named = {percent_tick(p["far"], 0): p["threshold"] for p in points if p["threshold"] is not None}
                draw_histogram(axes, h, named)
                axes.set_xlabel("score of the pair")
                axes.legend(loc="upper left")
        return Plot(figure)


def plot_roc(
    curves: Mapping[str, OperatingCurve],
    points: Sequence[Mapping[str, Any]] = (),
    baseline: OperatingCurve | None = None,
) -> str:
    """The address of a picture of `draw_roc`."""
    with new_figure(5.4, 4.0) as figure:
        draw_roc(figure.add_subplot(), curves, points, baseline)
        return svg_data_url(figure)


def draw_roc(
    axes: Axes,
    curves: Mapping[str, OperatingCurve],
    points: Sequence[Mapping[str, Any]] = (),
    baseline: OperatingCurve | None = None,
) -> None:
    """True-accept rate over false-accept rate, the latter on a logarithmic axis.

    Args:
        axes: to draw on.
        curves: one per scenario, by name; the last is the headline and gets the first colour. One name may be empty.
        points: operating points of the headline with their intervals, as in ``metrics.json``.
        baseline: the raw inputs in the headline scenario.
    """
    lowest = 1.0
    for k, (name, curve) in enumerate(reversed(list(curves.items()))):
        look = {"color": COLORS[k], "lw": 2 if k == 0 else 1.6, "ls": DASHES[min(k, 1)]}
        axes.plot(*_log_axis_points(curve), label=name, **look)
        lowest = min(lowest, float(curve.fmr[curve.fmr > 0].min(initial=1.0)))
    if baseline is not None:
        axes.plot(*_log_axis_points(baseline), color=GREY, lw=1.4, ls=":", label=f"raw inputs, {list(curves)[-1]}")
    for point in points:
        if point["tar"] is not None and point["fmr"]:
            _draw_interval(axes, point)
    axes.set(xscale="log", xlim=(min(max(lowest, 1e-6), 0.1), 1), ylim=(0, 1.02))
    axes.set(xlabel="false-accept rate (FAR)", ylabel="true-accept rate (TAR)")
    axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
    _set_log_ticks(axes)
    if any(curves) or baseline is not None:
        axes.legend(loc="best")


def plot_histograms(drawn: Mapping[str, Histogram], thresholds: Mapping[str, float]) -> str:
    """Score distributions of genuine and impostor pairs, one panel per scenario, headline first."""
    with new_figure(5.4, 4.0) as figure:
        panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, h) in zip(panels, reversed(list(drawn.items())), strict=True):
            draw_histogram(axes, h, thresholds, name)
        panels[-1].legend(loc="upper left")
        panels[-1].set_xlabel("cosine of the pair")
        return svg_data_url(figure)


def draw_histogram(axes: Axes, h: Histogram, thresholds: Mapping[str, float], title: str = "") -> None:
    """Score distributions of genuine and impostor pairs, each kind adding up to 100 %, with thresholds by name."""
    for counts, color, label in ((h.impostor, ORANGE, "impostor"), (h.genuine, BLUE, "genuine")):
        share = counts / max(counts.sum(), 1)
        axes.stairs(share, h.edges, color=color, fill=True, alpha=0.3)
        axes.stairs(share, h.edges, color=color, lw=1.4, label=f"{label} pairs")
    axes.set(ylabel="share of pairs", ylim=(0, None))
    axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    rows = _draw_thresholds(axes, thresholds)
    if title:
        axes.set_title(title, loc="left", fontsize=10, pad=4 + 11 * rows)


def run_color(k: int) -> str:
    """The colour of the k-th run of a comparison."""
    return (*COLORS[:6], BLACK)[k % 7]


def _log_axis_points(curve: OperatingCurve) -> tuple[np.ndarray, np.ndarray]:
    """The part of a curve that a logarithmic axis can show."""
    seen = curve.fmr > 0
    return curve.fmr[seen], curve.tar[seen]


def _set_log_ticks(axes: Axes) -> None:
    """A few ticks at powers of ten."""
    axes.xaxis.set_major_locator(LogLocator(numticks=5))
    axes.xaxis.set_major_formatter(FuncFormatter(percent_tick))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_interval(axes: Axes, point: Mapping[str, Any]) -> None:
    """An operating point and the interval of its true-accept rate."""
    band = point["interval"]
    if band:
        axes.plot([point["fmr"]] * 2, [band["low"], band["high"]], color=BLUE, lw=1.4, solid_capstyle="butt")
    axes.plot(point["fmr"], point["tar"], "o", color=BLUE, mec="white", ms=6)


def _draw_thresholds(axes: Axes, thresholds: Mapping[str, float]) -> int:
    """Dashed lines, named above the axes: in the first row where a name has room. Returns how many rows there are."""
    low, high = axes.get_xlim()
    inner = axes.get_window_extent()
    per_point = (high - low) / (inner.width * 72 / axes.figure.dpi)  # units of the axis in a point
    ends = [math.inf] * ROWS  # where each row is taken, from the right
    used = 0
    for text, threshold in sorted(thresholds.items(), key=lambda entry: -entry[1]):
        axes.axvline(threshold, color=INK, lw=1, ls=DASHES[1])
        half = (TextPath((0, 0), text, size=8).get_extents().width / 2 + 4) * per_point
        row = next((k for k in range(ROWS) if threshold + half < ends[k]), None)
        if row is not None:
            above = axes.get_xaxis_transform()
            place = {"xycoords": above, "textcoords": "offset points", "ha": "center", "va": "bottom"}
            axes.annotate(text, (threshold, 1), (0, 2 + 11 * row), fontsize=8, **place)
            ends[row], used = threshold - half, max(used, row + 1)
    axes.set_xlim(low, high)
    return used


def percent_tick(value: float, _: int) -> str:
    """A share as the text of a tick."""
    return f"{100 * value:.6g} %"


def plot_det(curves: Mapping[str, OperatingCurve]) -> str:
    """The address of a picture of `draw_det`."""
    with new_figure(5.4, 4.0) as figure:
        draw_det(figure.add_subplot(), curves)
        return svg_data_url(figure)


def draw_det(axes: Axes, curves: Mapping[str, OperatingCurve]) -> None:
    """Miss rate over false-accept rate on normal-deviate axes, where equal error lies on the diagonal."""
    for k, (name, curve) in enumerate(reversed(list(curves.items()))):
        look = {"color": COLORS[k], "lw": 2 if k == 0 else 1.6, "ls": DASHES[min(k, 1)]}
        axes.plot(*curve.probit(), label=name or "this result", **look)
    lowest = min((float(c.fmr[c.fmr > 0].min(initial=0.5)) for c in curves.values()), default=0.5)
    low, high = ndtri(max(min(lowest, 0.05), 1e-4)), ndtri(0.99)
    axes.plot([low, high], [low, high], color=GREY, lw=1, ls=":", label="equal errors")
    axes.set(xlim=(low, ndtri(0.9)), ylim=(ndtri(0.0005), high))
    _set_deviate_ticks(axes)
    axes.set(xlabel="false-accept rate (FAR)", ylabel="false-reject rate")
    axes.legend(loc="best")


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
            curve = g.verification.roc.subsample(128)
            seen = curve.fmr > 0
            lowest = min(lowest, float(curve.fmr[seen].min(initial=0.1)))
            axes.plot(curve.fmr[seen], curve.fnmr[seen], color=colors[g.name], lw=1.8)
            if found.threshold is not None:
                fmr, fnmr = g.verification.rates(found.threshold)
                axes.plot(max(fmr, 1e-9), fnmr, "o", color=colors[g.name], mec="white", ms=7, zorder=3)
        axes.set(xscale="log", xlim=(max(lowest, 1e-5), 1), ylim=(0, None))
        axes.set(xlabel="false-accept rate (FAR)", ylabel="false-reject rate")
        axes.yaxis.set_major_formatter(FuncFormatter(percent_tick))
        _set_log_ticks(axes)
        return svg_data_url(figure), colors
