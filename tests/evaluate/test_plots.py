"""Plots of a verification: three kinds, labelled axes, labels that do not touch, the same bytes every time."""

import itertools
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from mettle import evaluate
from mettle.errors import InputError
from mettle.evaluate import plots


def scores(kind: str, seed: int = 0):
    """Scores of several shapes: usual, far apart, nearly equal, of few pairs, of many impostors."""
    rng = np.random.default_rng(seed)
    sizes = {"few": (12, 40), "many": (500, 200_000)}.get(kind, (200, 20_000))
    means = {"apart": (0.9, -0.9), "alike": (0.1, 0.0)}.get(kind, (0.7, 0.1))
    spread = {"narrow": 1e-4}.get(kind, 0.15)
    values = np.concatenate([rng.normal(mean, spread, size) for mean, size in zip(means, sizes, strict=True)])
    return evaluate.from_scores(values, np.repeat([1, 0], sizes))


KINDS = ("usual", "apart", "alike", "few", "many", "narrow")


def touching(figure: Figure) -> list[tuple[str, str]]:
    """Texts of a figure whose boxes overlap as they are drawn."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in shown]
    inside = [(name, box) for name, box in boxes if box.x1 > 0 and box.y1 > 0 and box.width > 0]
    return [(a, b) for (a, x), (b, y) in itertools.combinations(inside, 2) if x.shrunk(0.98, 0.9).overlaps(y)]


def drawn_ticks(figure: Figure) -> None:
    """Hide what lies outside of the limits, as a canvas does."""
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                tick.label1.set_visible(low <= tick.get_loc() <= high)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_never_touch_and_every_axis_has_one(kind):
    figure = scores(kind).plot(fars=(0.1, 0.09, 0.05, 0.01, 0.001, 1e-4)).figure
    drawn_ticks(figure)
    assert touching(figure) == []
    assert len(figure.axes) == 3
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


def test_a_collision_would_be_seen():
    with plots.new_figure(4, 3) as figure:
        figure.text(0.5, 0.5, "one")
        figure.text(0.51, 0.5, "two")
    assert touching(figure) == [("one", "two")]


def test_names_of_close_thresholds_stand_in_rows_and_none_is_lost():
    h = scores("usual").histogram(40)
    with plots.new_figure(5, 4) as figure:
        axes = figure.add_subplot()
        plots.draw_histogram(axes, h, {"10 %": 0.30, "5 %": 0.31, "1 %": 0.32}, "cross-domain")
    assert touching(figure) == []
    assert {"10 %", "5 %", "1 %"} <= {text.get_text() for text in axes.texts}
    assert len({text.xyann[1] for text in axes.texts}) == 3


def test_a_plot_shows_itself_and_is_the_same_every_time(tmp_path):
    v = scores("usual")
    first, second = v.plot(), v.plot()
    assert first.svg == second.svg and ET.fromstring(first._repr_svg_()).tag.endswith("svg")
    assert first._repr_html_().startswith("<svg")
    assert v.plot("roc").svg != v.plot("det").svg and len(v.plot("scores").figure.axes) == 1
    assert first.save(tmp_path / "plot.svg").read_text(encoding="utf-8") == first.svg
    assert first.save(tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="plot.svg"):
        first.save(tmp_path / "plot.jpeg")
    with pytest.raises(InputError, match="'scores'"):
        v.plot("score")


def test_intervals_are_drawn_where_subjects_are_known():
    rng, y = np.random.default_rng(0), np.repeat(np.arange(30), 4)
    v = evaluate.verification(rng.normal(size=(30, 8))[y] + rng.normal(size=(120, 8)), y)
    assert v.plot("roc", fars=0.1, intervals=True).svg != v.plot("roc", fars=0.1).svg
