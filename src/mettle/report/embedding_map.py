"""A map of test embeddings: t-SNE of whole identities, coloured by domain, a few identities marked.

    results ─ located ─ Located ─┬─ drawn ─ Map, for a page
                                └─ map.json of a run, for maps of several runs side by side

A marked identity has one number, near most of its samples, and thin lines from there to all of them: a number beside
every sample, or every clump, hides the map of a few large identities.

The samples of a map follow from the labels of the test split alone, so maps of two encoders show the same ones.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from mettle.atomic_files import write_text
from mettle.data.dataset import Column, Samples
from mettle.evaluate.plots import BLACK, COLORS, GREY, INK, new_figure, svg_data_url
from mettle.evaluate.run.scenarios import ScenarioResults
from mettle.evaluate.scoring.cosine import normalize_rows
from mettle.train.run_folder import RunFolder

SHAPES = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"), ("P", "✚"), ("X", "✖"), ("*", "★"))
FORMAT = 1  # of map.json
OTHERS = "others"
VIOLET, MAGENTA = "#7a4fb5", "#c2006b"
COLUMNS = 6  # that a reader may pick from
POINTS = 1000  # of the map
MARKED = 3  # identities marked on the map: so many scattered ones, so many compact ones
NUMBER, DISC = 11, 21  # points: the type of a number, and what two of their discs keep apart
ROOM = 0.05  # of the map's side, around it
STEPS = np.array(  # points: where a number may stand, seen from the middle of its samples
    [(r * np.cos(t), r * np.sin(t)) for r in (0, 16, 22, 30, 40, 55, 75) for t in np.arange(12) * np.pi / 6]
)
WIDE, NARROW = (6.4, 5.2), (5.0, 4.4)  # inches: a map by itself, one of several side by side


@dataclass(frozen=True, eq=False)
class Coloring:
    """What the colours of a map stand for.

    Attributes:
        name: the column, "class" for the labels.
        codes: (n,) colour of each point, into ``names``.
        names: the values; the last may be "others".
    """

    name: str
    codes: np.ndarray
    names: tuple[str, ...]

    def legend(self) -> tuple[tuple[str, str, str], ...]:
        """(colour, shape, value) of all values."""
        return tuple((self.color(c), self.marker(c)[1], name) for c, name in enumerate(self.names) if name)

    def color(self, code: int) -> str:
        """The colour of a code; what stands for all others is grey."""
        return GREY if self._is_rest(code) else (*COLORS[:6], BLACK, VIOLET)[code % 8]

    def marker(self, code: int) -> tuple[str, str]:
        """The shape of a code: for matplotlib, and as a letter."""
        return SHAPES[0 if self._is_rest(code) else code % len(SHAPES)]

    def _is_rest(self, code: int) -> bool:
        return code == len(self.names) - 1 and self.names[code].endswith(f" {OTHERS}")


@dataclass(frozen=True)
class MapFigure:
    """A map of embeddings and what its reader needs beside it."""

    image: str
    legend: tuple[tuple[str, str, str], ...]  # (colour, shape, value)
    marked: tuple[int, ...]  # for each number on the map, the test position of one of its samples
    points: int
    identities: int


@dataclass(frozen=True, eq=False)
class MapLayout:
    """Some test samples and where they lie on a map."""

    place: np.ndarray  # (n, 2)
    rows: np.ndarray  # (n,) test positions
    labels: np.ndarray  # (n,)
    colorings: tuple[Coloring, ...]  # at least one; the first is what a page shows until its reader picks another
    marked: tuple[int, ...]  # labels
    synthetic: np.ndarray | None = None  # (m, 2) places of synthetic samples

    def moved(self, place: np.ndarray) -> "MapLayout":
        """The same samples elsewhere, the same identities marked: the map of another encoder."""
        return MapLayout(place, self.rows, self.labels, self.colorings, self.marked)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, places to a thousandth of the map."""
        return {
            "place": round_positions(self.place),
            "rows": self.rows.tolist(),
            "labels": self.labels.tolist(),
            "colorings": [{"name": c.name, "codes": c.codes.tolist(), "names": list(c.names)} for c in self.colorings],
            "marked": list(self.marked),
            "synthetic": None if self.synthetic is None else round_positions(self.synthetic),
        }

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> "MapLayout":
        """The inverse of :meth:`as_dict`."""
        rows, labels = (np.asarray(kept[name], np.int64) for name in ("rows", "labels"))
        place = np.asarray(kept["place"], float).reshape(-1, 2)
        colorings = tuple(
            Coloring(str(one["name"]), np.asarray(one["codes"], np.int64), tuple(one["names"]))
            for one in kept["colorings"]
        )
        made = kept["synthetic"]
        synthetic = None if made is None else np.asarray(made, float).reshape(-1, 2)
        return cls(place, rows, labels, colorings, tuple(kept["marked"]), synthetic)


def compute_layout(
    results: ScenarioResults,
    points: int = POINTS,
    seed: int = 0,
    *,
    by_class: bool = False,
    synthetic: np.ndarray | None = None,
) -> MapLayout | None:
    """Where some test identities lie; None where there is too little to draw.

    Args:
        results: of the test split.
        points: at most so many samples.
        seed: of the draw and of t-SNE.
        by_class: colours stand for classes at first, not for the first column.
        synthetic: (m, dim) embeddings that are no samples, placed on the same map.
    """
    chosen = sample_identities(results.samples.labels, points, seed)
    unit = normalize_rows(results.embeddings[chosen]).astype(np.float32)
    labels = results.samples.labels[chosen]
    if len(chosen) < 10 or not has_spread(unit):
        return None
    marked = tuple(_marked_identities(unit, labels))
    colorings = list_colorings(results.samples.take(chosen), marked, by_class=by_class)
    both = unit if synthetic is None else np.concatenate([unit, normalize_rows(synthetic).astype(np.float32)])
    place = tsne(both, seed)
    made = None if synthetic is None else place[len(unit) :]
    return MapLayout(place[: len(unit)], chosen, labels, colorings, marked, made)


def list_colorings(samples: Samples, marked: Sequence[int], *, by_class: bool = False) -> tuple[Coloring, ...]:
    """What points can be coloured by: the domain, the class, every other column of a few values.

    Classes too many for as many colours are coloured where they are marked; the rest is grey.
    """
    labels = samples.labels
    values = np.unique(labels)
    if len(values) <= len(SHAPES):
        names = tuple(str(samples.label.names[value]) for value in values)
        own = Coloring("class", np.searchsorted(values, labels), names)
    else:
        codes = np.full(len(labels), len(marked))
        for code, label in enumerate(marked):
            codes[labels == label] = code
        names = tuple(str(samples.label.names[label]) for label in marked)
        own = Coloring("class", codes, (*names, f"{len(values) - len(marked):,} {OTHERS}"))
    columns = samples.columns()
    found = [_fold_column(name, column) for name, column in columns.items() if len(np.unique(column.codes)) > 1]
    order = [own, *found] if by_class or "domain" not in columns else [*found[:1], own, *found[1:]]
    return tuple(order[:COLUMNS])


def layout_of_same_samples(first: MapLayout, embeddings: np.ndarray, seed: int = 0) -> MapLayout | None:
    """The map of another encoder's embeddings of the same samples, ``first.rows``, with the same marks."""
    unit = normalize_rows(embeddings).astype(np.float32)
    return first.moved(tsne(unit, seed)) if has_spread(unit) else None


def map_panes(
    maps: Mapping[str, MapLayout], size: tuple[float, float] = WIDE, marked: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """The same maps once for each column that the first of them can be coloured by.

    Returns:
        by column: its name, the figure of each map by name, and the legend.
    """
    first = next(iter(maps.values()))
    return [
        {
            "name": coloring.name,
            "images": {name: plot_map(one, size, marked, coloring).image for name, one in maps.items()},
            "legend": coloring.legend(),
        }
        for coloring in first.colorings
    ]


def plot_map(
    found: MapLayout,
    size: tuple[float, float] = WIDE,
    marked: Sequence[int] | None = None,
    coloring: Coloring | None = None,
) -> MapFigure:
    """The picture of a map, coloured by its first column unless another is given."""
    place, labels = found.place, found.labels
    coloring = coloring or found.colorings[0]
    codes = coloring.codes
    marked = found.marked if marked is None else marked
    ringed = np.isin(labels, marked)
    line = 0 if ringed.all() else 1  # rings around everything tell nothing apart
    hubs = _place_numbers([_find_medoid(place[labels == label]) for label in marked], place, size)
    with new_figure(*size) as figure:
        axes = figure.add_subplot()
        for label, hub in zip(marked, hubs, strict=True):
            _draw_spokes(axes, hub, place[labels == label])
        for code in range(len(coloring.names)):
            look = {"c": coloring.color(code), "marker": coloring.marker(code)[0]}
            others, own = (place[(codes == code) & part] for part in (~ringed, ringed))
            axes.scatter(*others.T, s=16, lw=0, alpha=0.75, zorder=2, **look)
            axes.scatter(*own.T, s=30, lw=line, ec=INK, zorder=3, **look)
        if found.synthetic is not None:
            axes.plot(*found.synthetic.T, "x", color=MAGENTA, ms=5, mew=1.1, alpha=0.8, zorder=2.5)
        for number, (x, y) in enumerate(hubs.tolist(), 1):
            disc = {"boxstyle": "circle,pad=0.25", "fc": "white", "ec": INK, "lw": 1.2}
            where = {"ha": "center", "va": "center", "zorder": 4}
            axes.text(x, y, str(number), fontsize=NUMBER, fontweight="bold", bbox=disc, **where)
        axes.margins(ROOM)
        axes.set(xticks=[], yticks=[])
        for spine in axes.spines.values():
            spine.set_visible(False)
        image = svg_data_url(figure)
    first = tuple(int(found.rows[np.flatnonzero(labels == label)[0]]) for label in marked)
    return MapFigure(image, coloring.legend(), first, len(labels), len(np.unique(labels)))


def write_maps(
    run: RunFolder, found: Mapping[str, MapLayout], results: ScenarioResults, metrics: Mapping[str, Any]
) -> None:
    """Write ``map.json``: places on the maps, so that runs can be laid side by side without their data."""
    path = run.folder / "map.json"
    if not found:
        path.unlink(missing_ok=True)
        return
    first, *others = found.items()
    marked = [results.samples.label.names[label] for label in first[1].marked]
    content = {
        "format": FORMAT,
        "weights": metrics["weights"],
        "data": metrics["data"]["fingerprint"],
        "first": first[0],
        **first[1].as_dict(),
        "marked_names": marked,
        "others": {name: round_positions(one.place) for name, one in others},
    }
    write_text(path, json.dumps(content, separators=(",", ":")))


def read_maps(run: RunFolder, metrics: Mapping[str, Any]) -> tuple[dict[str, MapLayout], list[str]] | None:
    """The maps in ``map.json`` and the names of the marked identities, if they are of these weights and these data."""
    try:
        kept = json.loads((run.folder / "map.json").read_text(encoding="utf-8"))
        current = (FORMAT, metrics["weights"], metrics["data"]["fingerprint"])
        if (kept["format"], kept["weights"], kept["data"]) != current:
            return None
        first = MapLayout.of(kept)
        places = {name: np.asarray(place, float).reshape(-1, 2) for name, place in kept["others"].items()}
        if any(len(place) != len(first.rows) for place in (first.place, *places.values())):
            return None
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return {kept["first"]: first} | {name: first.moved(place) for name, place in places.items()}, kept["marked_names"]


def round_positions(place: np.ndarray) -> list[list[float]]:
    """Places to a thousandth of the map's side."""
    digits = int(np.ceil(3 - np.log10(max(float(np.ptp(place)), 1e-9))))
    return np.round(place.astype(float), digits).tolist()


def has_spread(unit: np.ndarray) -> bool:
    """Whether there is more than one point."""
    return bool(np.ptp(unit, axis=0).max() >= 1e-6)


def sample_identities(labels: np.ndarray, points: int, seed: int) -> np.ndarray:
    """Positions of whole identities, drawn at random, at most ``points`` of them in all."""
    drawn = np.random.default_rng(seed)
    values, counts = np.unique(labels, return_counts=True)
    order = drawn.permutation(len(values))
    fits = order[np.cumsum(counts[order]) <= points]
    if len(fits) < min(2, len(values)):  # identities larger than the map: some samples of all
        return np.sort(drawn.permutation(len(labels))[:points])
    return np.flatnonzero(np.isin(labels, values[fits]))


def tsne(unit: np.ndarray, seed: int) -> np.ndarray:
    """(n, 2) places, the same on every machine."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    # On so few points threads cost more than they bring, and one thread gives the same map everywhere.
    with threadpool_limits(1):
        perplexity = min(30.0, (len(unit) - 1) / 3)
        return TSNE(perplexity=perplexity, init="pca", random_state=seed, max_iter=500).fit_transform(unit)


def _find_medoid(place: np.ndarray) -> np.ndarray:
    """The one of these points that is nearest to all of them: in the largest clump, whatever strays."""
    return place[_pairwise_distances(place, place).sum(1).argmin()]


def _place_numbers(middles: Sequence[np.ndarray], place: np.ndarray, size: tuple[float, float]) -> np.ndarray:
    """Where numbers stand: near their middles, off each other, and off the samples where there is room."""
    low, span = place.min(0), np.maximum(np.ptp(place, axis=0), 1e-9)
    sides = np.asarray(size) * 72 * (1 - 2 * ROOM)  # in points, as discs are
    points, found = (place - low) / span * sides, np.empty((0, 2))
    for middle in middles:
        tried = (middle - low) / span * sides + STEPS
        touched = (_pairwise_distances(tried, found) < DISC).sum(1)
        outside = ((tried < 0) | (tried > sides)).any(1)
        hidden = (_pairwise_distances(tried, points) < DISC / 2 + 3).sum(1)
        cost = 1e4 * touched + 1e3 * outside + hidden + np.linalg.norm(STEPS, axis=1) / 20
        found = np.vstack([found, tried[cost.argmin()]])
    return low + found / sides * span


def _pairwise_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.linalg.norm(a[:, None] - b, axis=2)


def _draw_spokes(axes: Axes, hub: np.ndarray, place: np.ndarray) -> None:
    """Thin lines from a number to all samples of its identity; the more there are, the fainter."""
    lines = np.stack([np.broadcast_to(hub, place.shape), place], axis=1)
    alpha = max(0.15, 0.5 - len(place) / 150)
    axes.add_collection(LineCollection(list(lines), colors=INK, lw=0.6, alpha=alpha, zorder=1))


def _fold_column(name: str, column: Column) -> Coloring:
    """A colour per value: the most frequent ones, then the rest."""
    values, counts = np.unique(column.codes, return_counts=True)
    top = np.sort(values if len(values) <= len(SHAPES) else values[np.argsort(-counts, kind="stable")][:7])
    codes = np.full(len(column.codes), len(top))
    for code, value in enumerate(top):
        codes[column.codes == value] = code
    rest = () if len(top) == len(values) else (f"{len(values) - len(top)} {OTHERS}",)
    return Coloring(name, codes, (*(str(column.names[value]) for value in top), *rest))


def _marked_identities(unit: np.ndarray, labels: np.ndarray) -> list[int]:
    """The most scattered and the most compact identities, by mean cosine among their own samples."""
    spread = {}
    for label in np.unique(labels):
        own = unit[labels == label]
        if len(own) > 1:
            spread[int(label)] = (float(np.square(own.sum(0)).sum()) - len(own)) / (len(own) * (len(own) - 1))
    order = sorted(spread, key=lambda label: (spread[label], label))
    return order if len(order) <= 2 * MARKED else order[:MARKED] + order[-MARKED:]
