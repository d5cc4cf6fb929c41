"""Curves that only an audit draws: errors on normal-deviate axes, and one curve for every group."""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from scipy.special import ndtri

from mettle.evaluate.curve import Curve
from mettle.evaluate.groups import Groups
from mettle.report.figures import COLOURS, DASHES, GREY, address, run_colour, sheet

CURVES = 7  # groups in one picture
DET = (0.001, 0.01, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 0.99)


def det(curves: Mapping[str, Curve]) -> str:
    """Miss rate over false-accept rate on normal-deviate axes, where equal error lies on the diagonal."""
    with sheet(5.4, 4.0) as figure:
        axes = figure.add_subplot()
        for k, (name, curve) in enumerate(reversed(list(curves.items()))):
            axes.plot(*curve.probit(), color=COLOURS[k], lw=2 if k == 0 else 1.6, ls=DASHES[min(k, 1)], label=name)
        lowest = min((float(c.fmr[c.fmr > 0].min(initial=0.5)) for c in curves.values()), default=0.5)
        low, high = ndtri(max(min(lowest, 0.05), 1e-4)), ndtri(0.99)
        axes.plot([low, high], [low, high], color=GREY, lw=1, ls=":", label="equal errors")
        axes.set(xlim=(low, ndtri(0.9)), ylim=(ndtri(0.0005), high))
        _deviates(axes)
        axes.set(xlabel="false-accept rate (FAR)", ylabel="false-reject rate")
        axes.legend(loc="best")
        return address(figure)


def _deviates(axes: Axes) -> None:
    """Ticks at round rates."""
    for axis, ticks in ((axes.xaxis, (1e-4, *DET)), (axes.yaxis, DET)):
        axis.set_major_locator(FixedLocator([float(ndtri(t)) for t in ticks]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * _share(value):.4g} %"))


def _share(deviate: float) -> float:
    """The rate behind a normal deviate, as round as the ticks are."""
    return float(f"{0.5 * math.erfc(-deviate / math.sqrt(2)):.3g}")


def group_curves(found: Groups) -> tuple[str | None, dict[str, str]]:
    """ROC curves of the largest groups, and the colour of each; names stay out of the picture."""
    able = sorted((g for g in found if g.verification is not None), key=lambda g: (-g.subjects, g.name))[:CURVES]
    if len(able) < 2:
        return None, {}
    able.sort(key=lambda g: g.name)
    colours = {g.name: run_colour(k) for k, g in enumerate(able)}
    with sheet(5.4, 3.6) as figure:
        axes = figure.add_subplot()
        lowest = 0.1
        for g in able:
            assert g.verification is not None
            curve = g.verification.roc.thinned(128)
            seen = curve.fmr > 0
            lowest = min(lowest, float(curve.fmr[seen].min(initial=0.1)))
            axes.plot(curve.fmr[seen], curve.fnmr[seen], color=colours[g.name], lw=1.8)
            if found.threshold is not None:
                fmr, fnmr = g.verification.rates(found.threshold)
                axes.plot(max(fmr, 1e-9), fnmr, "o", color=colours[g.name], mec="white", ms=7, zorder=3)
        axes.set(xscale="log", xlim=(max(lowest, 1e-5), 1), ylim=(0, None))
        axes.set(xlabel="false-accept rate (FAR)", ylabel="false-reject rate")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.6g} %"))
        return address(figure), colours
