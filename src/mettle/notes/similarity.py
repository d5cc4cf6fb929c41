"""Chapter 3: similarity learning, metrics, Siamese and triplet networks, the contrastive loss (note 002)."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from mettle.data import glyphs
from mettle.evaluate import verification
from mettle.evaluate.plots import BLUE, INK, ORANGE, VERMILION, new_figure, run_color
from mettle.losses import Contrastive
from mettle.metric import Mahalanobis, check_axioms
from mettle.model import embed
from mettle.notes.chapter import BuildSettings, Chapter, ChapterSection, Figure, NoteClaim, Table, finish_figure
from mettle.notes.runs import (
    ChapterRun,
    raw_inputs,
    recall_at_1,
    train_recipe,
    untrained_model,
    within_and_between,
    write_pictures,
)
from mettle.report.format import format_percent

TITLE = "Similarity learning and metric learning"
FORMS: tuple[tuple[Literal["squared", "hadsell", "linear"], str], ...] = (
    ("squared", BLUE),
    ("hadsell", ORANGE),
    ("linear", VERMILION),
)
CHARACTERS = 120  # of the small set that this chapter trains on
LOSSES = {
    "regression": "similarity-regression",
    "classification": "similarity-classification",
    "ranking": "similarity-ranking",
    "Siamese network": "siamese",
    "triplet network": "triplet-network",
    "contrastive, as the note prints it": "contrastive-squared",
    "contrastive, positive margin": "contrastive-positive-margin",
    "contrastive, that margin 0": "contrastive-positive-margin --set loss.positive=0",
}

CLAIMS = (
    NoteClaim(
        "Ranking needs no similarity of any pair to be known, and learns better than the other two",
        "not yet decided",
        "That it needs none is so by construction; which of the three is better was never measured over seeds.",
    ),
    NoteClaim(
        "A learned metric beats Euclidean distance on raw features",
        "withdrawn",
        "One estimator at its defaults, without whitening, LDA, NCA and a deep network as controls.",
        "mettle reproduce metric",
    ),
    NoteClaim(
        "In many dimensions a network is needed to find the manifold on which distances mean something",
        "not yet decided",
        "On the page of the chapter: raw pictures beside networks. No study compares them with learned linear metrics.",
    ),
    NoteClaim(
        "f(x, y) = (x - y)' M (x - y) is a metric",
        "contradicted",
        "It breaks the triangle inequality. Its square root is one where M has full rank.",
        "mettle.metric.check_axioms",
    ),
    NoteClaim(
        "A positive margin keeps positives from falling into one point",
        "not yet decided",
        "No study measured it; on the page of the chapter: one seed with and without.",
    ),
    NoteClaim(
        "The push of margin² - d² fades for strangers that nearly coincide",
        "holds",
        "By its gradient, which is 2 d; that of (margin - d)² does not fade.",
        "mettle reproduce stall",
    ),
)


def build(settings: BuildSettings) -> Chapter:
    """Train the three kinds of similarity learning, the two networks and the contrastive losses."""
    data = write_few_glyphs(settings)
    keys = [f"data.source={data}", f"train.steps={settings.choose(25, 400)}", "train.rate=1e-3"]
    runs = {}
    for name, words in LOSSES.items():
        recipe, *more = words.split(" --set ")
        batch = ["batch.classes=32"] if recipe.startswith("contrastive") else ["batch.size=64"]
        runs[name] = train_recipe(settings, 3, words.replace(" --set ", "-"), recipe, [*keys, *batch, *more])
    settings.say("measuring unseen characters")
    return Chapter(
        3,
        TITLE,
        "Note 002. Grades, same or different, which of two is closer: three ways to say what is alike. What makes a "
        "distance a metric, which ones are learned, and the contrastive loss with its margins.",
        (
            ChapterSection(
                "Three kinds of similarity learning, two networks, one loss",
                f"The same network and as many steps on pairs or triplets of {CHARACTERS} characters, measured on "
                "characters that were never trained on. One seed, which decides nothing.",
                tables=[_run_table(runs)],
            ),
            ChapterSection(
                "Is it a metric?",
                "The four axioms, checked on 60 points in three dimensions; a counterexample where one fails.",
                tables=[_axiom_table()],
                figures=[_plot_unit_circles()],
            ),
            ChapterSection(
                "The contrastive loss",
                "Its two hinges for each of its forms, and what a positive margin leaves of the spread inside classes.",
                figures=[_plot_hinges(), _plot_spread(runs)],
            ),
            ChapterSection(
                "What the note says, and what is known", "Verdicts are those of the records.", claims=CLAIMS
            ),
        ),
    )


def write_few_glyphs(settings: BuildSettings) -> Path:
    """A few characters of the embedded set, with its open split."""
    path = settings.folder / "data" / "few-glyphs.npz"
    if path.is_file():
        return path
    samples = glyphs(cache=settings.cache)
    keep = []
    for split, count in ((0, CHARACTERS * 5 // 8), (1, CHARACTERS // 8), (2, CHARACTERS // 4)):
        labels = np.unique(samples.labels[samples.split == split])
        keep.append(np.flatnonzero(np.isin(samples.labels, labels[:: len(labels) // count][:count])))
    rows = np.concatenate(keep)
    split = np.asarray(["train", "val", "test"])[samples.split[rows]]
    return write_pictures(path, samples, rows, split)


def _pair_metric(run: ChapterRun) -> str:
    """What the run says of held-out pairs or triplets."""
    path = run.run.folder / "pairs.json"
    if not path.is_file():
        return "–"
    test = json.loads(path.read_text(encoding="utf-8"))["test"]
    for key, text in (("auc", "AUC {:.3f}"), ("ordered", "{:.1%} of triplets in order"), ("spearman", "rho {:.3f}")):
        if test.get(key) is not None:
            return text.format(test[key])
    return "–"


def _run_table(runs: dict[str, ChapterRun]) -> Table:
    first = next(iter(runs.values()))
    part = first.samples.part("test")
    embedded = {"raw pictures": raw_inputs(part), "untrained network": embed(untrained_model(first), part)}
    embedded |= {name: run.test_embeddings() for name, run in runs.items()}
    rows = []
    for name, z in embedded.items():
        rows.append(
            [
                name,
                f"mettle train {LOSSES[name]}" if name in LOSSES else "",
                _pair_metric(runs[name]) if name in runs else "–",
                format_percent(verification(z, part.labels).eer),
                f"{recall_at_1(z, part.labels):.1f} %",
            ]
        )
    return Table(["", "command", "held-out pairs", "EER", "Recall@1"], rows)


def _axiom_table() -> Table:
    points = np.random.default_rng(0).normal(size=(60, 3))
    points[-3:] = [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    full, flat = np.diag([4.0, 1.0, 0.25]), np.diag([4.0, 1.0, 0.0])
    distances = {
        "Euclidean": lambda a, b: float(np.linalg.norm(a - b)),
        "Manhattan": lambda a, b: float(np.abs(a - b).sum()),
        "(x - y)' M (x - y), as the note prints it": lambda a, b: float((a - b) @ full @ (a - b)),
        "its square root, M of full rank": lambda a, b: float(np.sqrt((a - b) @ full @ (a - b))),
        "its square root, M of rank 2": lambda a, b: float(np.sqrt((a - b) @ flat @ (a - b))),
        "1 - cosine": lambda a, b: float(1 - a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12)),
    }
    rows = []
    for name, distance in distances.items():
        with_axis = np.vstack([points, [[0.0, 0.0, 1.0], [0.0, 0.0, 3.0]]])
        found = check_axioms(distance, with_axis)
        broken = [axiom.replace("_", " ") for axiom, example in found.counterexamples.items() if example is not None]
        kind = "a metric" if found.is_metric else "a pseudo-metric" if found.is_pseudo_metric else "no metric"
        rows.append([name, kind, ", ".join(broken) or "none"])
    return Table(["distance", "on these points", "axioms that fail"], rows)


def _plot_unit_circles() -> Figure:
    angle = np.linspace(0, 2 * np.pi, 400)
    around = np.stack([np.cos(angle), np.sin(angle)], 1)
    metric = Mahalanobis.from_matrix([[2.0, 0.9], [0.9, 0.7]])
    lengths = {
        "Euclidean": np.linalg.norm(around, axis=1),
        "Manhattan": np.abs(around).sum(1),
        "Mahalanobis": metric.pair_distance(around, np.zeros_like(around)),
    }
    with new_figure(4.4, 3.6) as drawing:
        axes = drawing.add_subplot()
        for (name, length), color in zip(lengths.items(), (BLUE, ORANGE, VERMILION), strict=True):
            axes.plot(*(around / length[:, None]).T, color=color, lw=2, label=name)
        axes.set(aspect="equal", xlabel="x", ylabel="y")
        axes.legend(fontsize=8, loc="upper right")
        return finish_figure(
            drawing, "circles", "All points at distance 1 from the origin. M = [[2, 0.9], [0.9, 0.7]]."
        )


def _plot_hinges() -> Figure:
    distance = torch.linspace(0.001, 1.6, 161, dtype=torch.float64)
    with new_figure(6.4, 3.4) as drawing:
        axes = drawing.subplots(1, 2, sharey=True)
        for form, color in FORMS:
            for margin, style in ((0.0, "-"), (0.4, "--")):
                loss = Contrastive(margin, 1.0, form, normalise=False)
                axes[0].plot(
                    distance, [_pair_loss(loss, float(d), True) for d in distance], color=color, ls=style, lw=1.8
                )
            values = [_pair_loss(Contrastive(0.0, 1.0, form, normalise=False), float(d), False) for d in distance]
            axes[1].plot(distance, values, color=color, lw=1.8, label=form)
        axes[0].set_title("positive pair; dashed: positive margin 0.4", loc="left", fontsize=9)
        axes[1].set_title("negative pair, margin 1", loc="left", fontsize=9)
        for panel in axes:
            panel.set(xlabel="distance d", ylim=(0, 1.6))
        axes[0].set_ylabel("loss of the pair")
        axes[1].legend(fontsize=8)
        return finish_figure(drawing, "hinges", "Beyond the margin a negative pair costs nothing in any form.")


def _pair_loss(loss: Contrastive, distance: float, positive: bool) -> float:
    """The value of one pair alone: two points of one class, or each with a twin in its place."""
    if positive:
        z = torch.tensor([[0.0], [distance]], dtype=torch.float64)
        return float(loss(z, torch.tensor([0, 0])))
    z = torch.tensor([[0.0], [0.0], [distance], [distance]], dtype=torch.float64)
    return float(loss(z, torch.tensor([0, 0, 1, 1])))


def _plot_spread(runs: dict[str, ChapterRun]) -> Figure:
    with new_figure(5.4, 3.4) as drawing:
        axes = drawing.add_subplot()
        for k, name in enumerate(name for name in runs if name.startswith("contrastive")):
            part = runs[name].samples.part("test")
            within, _ = within_and_between(runs[name].test_embeddings(), part.labels)
            counts, edges = np.histogram(within, np.linspace(0.4, 1, 31))
            axes.stairs(counts, edges, color=run_color(k), lw=1.8, label=name)
        axes.axvline(1, color=INK, lw=1, ls=":")
        axes.set(xlabel="mean cosine of a class to its own direction", ylabel="characters")
        axes.legend(fontsize=8, loc="upper left")
        return finish_figure(drawing, "spread", "Unseen characters. At the right end a class is one point.")
