import base64
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from tables import make_results

from mettle.data.dataset import Column
from mettle.evaluate import plots
from mettle.evaluate.verification import from_scores
from mettle.report import embedding_map, training_plots


def svg(address: str) -> str:
    head, _, body = address.partition(",")
    assert head == "data:image/svg+xml;base64"
    text = base64.b64decode(body).decode()
    assert ET.fromstring(text).tag.endswith("svg")
    return text


def drawn(seed: int = 0):
    rng = np.random.default_rng(seed)
    scores = np.concatenate([rng.normal(0.7, 0.1, 200), rng.normal(0.1, 0.2, 2000)])
    return from_scores(scores, np.repeat([1, 0], [200, 2000]))


def test_figures_are_the_same_bytes_every_time():
    v = drawn()
    curves = {"in-domain": v.roc.subsample(64), "cross-domain": v.roc.subsample(64)}
    first, second = plots.plot_roc(curves), plots.plot_roc(curves)
    assert first == second
    assert first != plots.plot_roc(curves, baseline=drawn(1).roc.subsample(64))


def test_users_style_neither_enters_nor_is_touched():
    curves = {"all": drawn().roc.subsample(64)}
    plain = plots.plot_roc(curves)
    with matplotlib.rc_context({"text.usetex": True, "font.size": 30, "axes.facecolor": "black"}):
        assert plots.plot_roc(curves) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_operating_points_and_intervals_are_drawn():
    curves = {"all": drawn().roc.subsample(64)}
    point = {"fmr": 0.01, "tar": 0.9, "interval": None}
    plain, dots = plots.plot_roc(curves), plots.plot_roc(curves, [point])
    whiskers = plots.plot_roc(curves, [point | {"interval": {"low": 0.8, "high": 0.95}}])
    assert len({plain, dots, whiskers}) == 3
    assert plots.plot_roc(curves, [point | {"tar": None, "fmr": None}]) == plain


def test_perfect_scores_can_be_drawn():
    v = from_scores([0.9, 0.9, 0.1, 0.1], [1, 1, 0, 0])
    svg(plots.plot_roc({"all": v.roc.subsample(64)}))
    svg(plots.plot_histograms({"all": v.histogram(20)}, {}))


def test_histograms_draw_every_threshold():
    h = {"in-domain": drawn().histogram(40), "cross-domain": drawn(1).histogram(40)}
    none, one, two = (svg(plots.plot_histograms(h, t)) for t in ({}, {"1 %": 0.4}, {"1 %": 0.4, "10 %": 0.399}))
    assert none.count("stroke-dasharray") == 0
    assert one.count("stroke-dasharray") == 2  # one in each panel
    assert two.count("stroke-dasharray") == 4


def test_map_takes_whole_identities():
    labels = np.repeat(np.arange(50), 30)
    chosen = embedding_map.sample_identities(labels, 1000, 0)
    values, counts = np.unique(labels[chosen], return_counts=True)
    assert 900 < len(chosen) <= 1000
    assert (counts == 30).all()
    assert not np.array_equal(values, np.arange(len(values)))  # drawn, not the first ones
    assert len(embedding_map.sample_identities(np.repeat([0, 1], 5000), 1000, 0)) == 1000


def test_map_marks_scattered_before_compact_identities():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 20)
    centre = np.eye(10)[labels]
    unit = centre + rng.normal(0, 0.02 * 1.5 ** labels[:, None], (200, 10))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    assert embedding_map._marked_identities(unit, labels) == [9, 8, 7, 2, 1, 0]


def test_map_tells_domains_and_is_reproducible():
    found = make_results("domains")
    layout = embedding_map.compute_layout(found)
    first = embedding_map.plot_map(layout)
    assert first == embedding_map.plot_map(embedding_map.compute_layout(found))
    assert [one.name for one in layout.colorings] == ["domain", "class"]
    assert [name for *_, name in first.legend] == ["0", "1", "2"]
    assert len({(colour, shape) for colour, shape, _ in first.legend}) == 3
    assert (first.points, first.identities, len(first.marked)) == (90, 15, 6)
    assert len(set(found.samples.labels[list(first.marked)])) == 6


def clouds(identities: int, each: int, noise: float, domains: int, seed: int = 0) -> embedding_map.MapLayout:
    """Some identities on a map, by hand: the first two lie in one place."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(identities), each)
    centres = rng.uniform(-50, 50, (identities, 2))
    centres[1] = centres[0]
    place = centres[labels] + rng.normal(0, noise, (len(labels), 2))
    codes, names = rng.integers(0, domains, len(labels)), tuple(f"d{k}" for k in range(domains))
    colorings = (embedding_map.Coloring("domain", codes, names),)
    return embedding_map.MapLayout(place, np.arange(len(labels)), labels, colorings, tuple(range(min(6, identities))))


def discs_and_samples(image: str) -> tuple[np.ndarray, np.ndarray]:
    """(centre x, centre y, radius) of every number on a map, and (x, y) of every sample, as a browser draws them."""
    drawing = base64.b64decode(image.partition("base64,")[2]).decode()
    discs = []
    for path in re.findall(r'<g id="text_\d+">\s*<g id="patch_\d+">\s*<path d="([^"]*)"', drawing):
        xy = np.array(re.findall(r"[-\d.]+", path), float).reshape(-1, 2)
        discs.append([*(xy.min(0) + xy.max(0)) / 2, np.ptp(xy, axis=0).max() / 2])
    samples = re.findall(r'<use [^>]*x="([-\d.]+)" y="([-\d.]+)"', drawing)
    return np.array(discs), np.array(samples, float)


@pytest.mark.parametrize("size", [embedding_map.WIDE, embedding_map.NARROW])
@pytest.mark.parametrize(
    ("identities", "each", "noise", "domains"),
    [(2, 6, 1, 1), (3, 200, 30, 2), (4, 60, 12, 3), (6, 8, 3, 1), (6, 100, 0, 2), (30, 10, 25, 4)],
)
def test_a_marked_identity_has_one_number_and_no_two_touch(identities, each, noise, domains, size):
    for seed in range(2):
        found = clouds(identities, each, noise, domains, seed)
        discs, samples = discs_and_samples(embedding_map.plot_map(found, size).image)
        assert len(discs) == len(found.marked) and len(samples) == identities * each
        apart = np.linalg.norm(discs[:, None, :2] - discs[:, :2], axis=2) + 1e9 * np.eye(len(discs))
        assert apart.min() > 2 * discs[:, 2].max() + 1
        room = np.asarray(size) * 72
        assert (discs[:, :2] - discs[:, 2:] > 0).all() and (discs[:, :2] + discs[:, 2:] < room).all()


def test_numbers_hide_no_sample_where_there_is_room():
    discs, samples = discs_and_samples(embedding_map.plot_map(clouds(5, 6, 4, 1)).image)
    away = np.linalg.norm(discs[:, None, :2] - samples, axis=2) - discs[:, 2:]
    assert away.min() > 0


def test_many_domains_are_folded_into_the_rest():
    found = make_results("domains")
    domain = Column.of(np.arange(90) % 11)
    many = replace(found, samples=replace(found.samples, domain=domain))
    domain, own = embedding_map.compute_layout(many).colorings
    legend = domain.legend()
    assert len(legend) == 8 and len({color for color, *_ in legend}) == 8
    assert legend[-1][2] == "4 others" and legend[-1][0] == plots.GREY
    assert own.names[-1] == "9 others" and own.color(6) == plots.GREY  # of 15 classes, six are marked


def test_synthetic_points_share_the_map_and_are_no_samples():
    found = make_results("domains")
    made = found.embeddings[:7] + 0.01
    layout = embedding_map.compute_layout(found, synthetic=made)
    assert layout.synthetic.shape == (7, 2) and len(layout.place) == 90
    near = np.linalg.norm(layout.place[:, None] - layout.synthetic, axis=2).argmin(0)
    assert (near == np.arange(7)).mean() > 0.5  # each lies where the sample lies that it was made of
    back = embedding_map.MapLayout.of(layout.as_dict())
    np.testing.assert_allclose(back.synthetic, layout.synthetic, atol=1e-3 * np.ptp(layout.place))
    assert embedding_map.plot_map(layout).image != embedding_map.plot_map(replace(layout, synthetic=None)).image


def test_nothing_to_map():
    assert embedding_map.compute_layout(make_results("all", n=8, labels=4)) is None
    found = make_results("all")
    assert embedding_map.compute_layout(replace(found, embeddings=np.ones_like(found.embeddings))) is None


LINES = [{"step": s, "loss": 2.0 / s, "hard_positives": 0.5, "hard_negatives": 0.1 * s} for s in range(1, 6)]


def test_training_draws_what_the_log_has():
    assert [f["title"] for f in training_plots.plot_training([LINES])] == ["Loss", "Hard pairs"]
    assert training_plots.plot_training([[]]) == []
    assert training_plots.plot_training([LINES[:1]]) == []  # one point is no curve


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "text"])
def test_training_leaves_out_what_is_no_number(value):
    broken = [*LINES, {"step": 6, "loss": value}]
    assert training_plots.plot_training([broken])[0] == training_plots.plot_training([LINES])[0]


def test_runs_are_laid_over_each_other():
    other = [line | {"loss": line["loss"] + 1} for line in LINES]
    both = svg(training_plots.plot_training([LINES, other])[0]["image"])
    assert plots.run_color(0).lower() in both.lower()
    assert plots.run_color(1).lower() in both.lower()
    assert plots.run_color(1).lower() not in svg(training_plots.plot_training([LINES])[0]["image"]).lower()


WCL = [
    {"step": s, "weight_mean": 1.5, "weight_std": 0.1, "clamp_fraction": 0.0, "hard_negatives": 1.0, "biased_loss": -s}
    for s in range(1, 6)
]
HDML = [
    {"step": s, "lambda": 1 / s, "weight_real": 1 / s, "weight_synthetic": 1 - 1 / s, "reconstruction": 0.5}
    | {"hard_positives": 0.0, "hard_negatives": 0.0, "positive_weight": 1.0, "negative_weight": 1.0}
    for s in range(1, 6)
]


def test_what_difficulty_did_is_drawn_and_what_tells_nothing_is_not():
    titles = [f["title"] for f in training_plots.plot_training([WCL])]
    assert titles == ["Loss of the biased encoder", "Weight of negatives"]
    held = [line | {"clamp_fraction": 0.2} for line in WCL]
    assert "Held up by the floor" in [f["title"] for f in training_plots.plot_training([held])]
    steady = [line | {"effective_negatives": 39.0} for line in HDML]
    titles = [f["title"] for f in training_plots.plot_training([steady])]
    assert titles == ["Pull of negatives (λ)", "Real and synthetic tuples", "Error of the generator"]
    moving = [line | {"effective_negatives": 39.0 + line["step"]} for line in HDML]
    assert training_plots.plot_training([moving])[-1]["title"] == "Effective negatives"


def test_the_band_is_one_standard_deviation_either_way():
    (with_band,) = [f["image"] for f in training_plots.plot_training([WCL]) if f["title"] == "Weight of negatives"]
    thin = [{**line, "weight_std": 0.0} for line in WCL]
    (without,) = [f["image"] for f in training_plots.plot_training([thin]) if f["title"] == "Weight of negatives"]
    assert with_band != without
    assert np.array_equal(training_plots.log_series(WCL, "weight_mean", "weight_std")[0], [1, 1.5, 0.1])


def test_long_logs_stay_light():
    lines = [{"step": s, "loss": float(np.sin(s))} for s in range(1, 50_001)]
    found = training_plots.log_series(lines, "loss")
    assert len(found) == training_plots.POINTS and found[0, 0] == 1 and found[-1, 0] == 50_000
    assert len(training_plots.plot_training([lines])[0]["image"]) < 60_000
