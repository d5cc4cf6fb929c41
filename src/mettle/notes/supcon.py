"""Chapter 1: supervised contrastive learning and its difficulty-aware form (note 000)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mettle.difficulty import Threshold
from mettle.evaluate.plots import BLUE, GREY, INK, ORANGE, new_figure, run_color
from mettle.losses import SupCon
from mettle.model import embed
from mettle.notes.chapter import BuildSettings, Chapter, ChapterSection, Figure, NoteClaim, Table, finish_figure
from mettle.notes.runs import (
    ChapterRun,
    raw_inputs,
    recall_at_1,
    train_recipe,
    untrained_model,
    verify_across,
    within_and_between,
)
from mettle.pairs import Reduction, RowValues, Tile, Traits
from mettle.report.format import format_percent

TITLE = "SupCon and difficulty-aware SupCon"
MARGIN = 0.1  # of a cosine, on every negative of the control
TEMPERATURE = 0.05  # of the recipes
FORMS: tuple[tuple[Literal["hinge", "literal"], str, str], ...] = (("hinge", BLUE, "-"), ("literal", ORANGE, "--"))

CLAIMS = (
    NoteClaim(
        "Difficulty-aware SupCon has a lower EER than SupCon, and a higher AUC",
        "withdrawn",
        "On Market-1501 0.09 points of EER over five seeds, but 0.00 [-0.13, +0.13] over resampled people.",
        "docs/results/market.md",
    ),
    NoteClaim(
        "Difficulty-aware SupCon accepts more genuine pairs at a false-accept rate of 0.1 %",
        "holds",
        "+3.27 ± 0.53 points on Market-1501. A constant margin on every negative gains as much (+3.64 ± 0.66).",
        "docs/results/market.md",
    ),
    NoteClaim(
        "It is the difficulty that helps, more than a constant margin would",
        "not yet decided",
        "-0.37 ± 0.56 points of true-accept rate at 0.1 %: the interval holds 0.",
        "docs/results/market.md",
    ),
    NoteClaim(
        "Hard positives that weigh more make the representation better",
        "not yet decided",
        "On held-out characters of the glyphs alpha = 4 below the median positive changes the EER by "
        "+0.03 [-0.15, +0.22] points, on held-out people of Market-1501 by +0.18 [-0.09, +0.45]; against the same "
        "weights dealt out at random by -0.00 [-0.08, +0.08] and by +0.13 [+0.03, +0.23], for the worse. Four runs "
        "each of a small network; three of a ResNet-18 had pointed the other way.",
        "python benchmarks/hard_positives.py",
    ),
    NoteClaim(
        "As printed, the negative weights act",
        "contradicted",
        "They cannot: the indicator is 0 for every negative. The program of the note's author is another loss.",
        "mettle reproduce literal",
    ),
    NoteClaim(
        "Classes become tighter and lie further apart",
        "not yet decided",
        "No study measured it; on the page of the chapter: one seed.",
    ),
    NoteClaim(
        "EER 7.56 % and AUC 0.982 on smartphones",
        "not yet decided",
        "The data and the split are not public; palms in data that mettle reads were not taken with smartphones.",
        "mettle data import tongji",
    ),
    NoteClaim(
        "Search with Faiss is at least three times as fast",
        "contradicted",
        "Among 10,000 people, on one thread: 1.6 [1.4, 1.8] times as fast as the fastest exact way in NumPy. A loop in "
        "Python is far slower than both.",
        "mettle reproduce search",
    ),
)


@dataclass(frozen=True)
class ConstantMargin:
    """The control: every negative weighs e^(margin / temperature), as if its cosine were higher by the margin."""

    weight: float
    detach = True
    traits = Traits(symmetric=True, trusted=True, self_contained=True, positive_weights="numerator")

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """No row statistics are needed."""
        return {}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        return 1 + (self.weight - 1) * torch.as_tensor(tile.negative).to(tile.similarity)


def build(settings: BuildSettings) -> Chapter:
    """Train the arms and draw what they did."""
    steps = [f"train.steps={settings.choose(60, 400)}"]
    margin = SupCon(TEMPERATURE, difficulty=ConstantMargin(float(np.exp(MARGIN / TEMPERATURE))))
    runs = {
        "SupCon": train_recipe(settings, 1, "supcon", "supcon", steps),
        "DA-SupCon": train_recipe(settings, 1, "da-supcon", "da-supcon", steps),
        "hard positives only": train_recipe(settings, 1, "da-supcon-positives", "da-supcon-positives", steps),
        f"constant margin {MARGIN}": train_recipe(settings, 1, "margin", "supcon", steps, loss=margin),
        "as its author coded it": train_recipe(settings, 1, "da-supcon-author", "da-supcon-author", steps),
    }
    settings.say("measuring unseen characters across typefaces")
    embedded = {name: run.test_embeddings() for name, run in runs.items()}
    return Chapter(
        1,
        TITLE,
        "Note 000. Supervised contrastive learning, weights that grow with how hard a pair is, and recognition of "
        "identities and domains that training never saw.",
        (
            ChapterSection(
                "Weights by difficulty",
                "What the two weights of the note are at every cosine, and the readings of them that mettle has.",
                figures=[_plot_weights()],
            ),
            ChapterSection(
                "Open set, other domain",
                "Characters that training never saw, probed in a typeface that it never saw. Intervals resample "
                "characters; one seed each, which decides nothing between the arms.",
                tables=[_comparison_table(runs, embedded)],
                figures=[_plot_scores(runs, embedded)],
            ),
            ChapterSection(
                "Classes tighter and wider",
                "For every test character the mean cosine of its pictures to their own direction, and the cosine of "
                "that direction to the nearest one of another character.",
                figures=[_plot_tightness(runs, embedded)],
                tables=[_tightness_table(runs, embedded)],
            ),
            ChapterSection(
                "How much the difficulty acts",
                "Mean weights of all positives and negatives of a batch, over training.",
                figures=[_plot_mean_weights(runs)],
            ),
            ChapterSection(
                "What the note says, and what is known", "Verdicts are those of the records.", claims=CLAIMS
            ),
        ),
    )


def _plot_weights() -> Figure:
    cosine = torch.linspace(-1, 1, 401, dtype=torch.float64)[None]
    ones = torch.ones_like(cosine, dtype=torch.bool)
    rows = torch.arange(1)[:, None], torch.arange(401)[None]
    with new_figure(9.0, 3.4) as drawing:
        axes = drawing.subplots(1, 2)
        for panel, positive, title in ((axes[0], ones, "positives, s+ = 0.7"), (axes[1], ~ones, "negatives, s- = 0.3")):
            for form, color, style in FORMS:
                tile = Tile(cosine, positive, ~positive, *rows)
                weight = Threshold(1.0, 2.0, 0.7, 0.3, form=form).weights(tile, {})
                panel.plot(cosine[0], weight[0], color=color, ls=style, lw=2, label=form)
            panel.axhline(1, color=GREY, lw=1)
            panel.set_title(title, loc="left", fontsize=10)
            panel.set(xlabel="cosine of the pair", ylim=(-0.5, 4.2))
        axes[0].set_ylabel("weight")
        axes[0].legend()
        return finish_figure(
            drawing,
            "weights",
            "alpha = 1, beta = 2. Literal: as the note prints them; easy pairs then weigh less than 1. Hinge: only "
            "hard pairs change, as the note describes it.",
            wide=True,
        )


def _comparison_table(runs: dict[str, ChapterRun], embedded: dict[str, np.ndarray]) -> Table:
    first = next(iter(runs.values()))
    part = first.samples.part("test")
    rows = {"raw pictures": raw_inputs(part), "untrained network": embed(untrained_model(first), part), **embedded}
    table = []
    for name, z in rows.items():
        found = verify_across(z, part)
        eer = found.interval("eer", replicates=300)
        table.append(
            [
                name,
                f"{format_percent(found.eer)} [{100 * eer.low:.2f}, {100 * eer.high:.2f}]",
                f"{found.auc:.4f}",
                format_percent(found.tar(far=1e-3), 1),
                f"{recall_at_1(z, part.labels):.1f} %",
            ]
        )
    return Table(["", "EER across typefaces", "AUC across typefaces", "TAR at FAR 0.1 %", "Recall@1, all"], table)


def _plot_scores(runs: dict[str, ChapterRun], embedded: dict[str, np.ndarray]) -> Figure:
    part = next(iter(runs.values())).samples.part("test")
    names = [name for name in embedded if name.startswith(("SupCon", "DA", "constant"))]
    drawn = {name: verify_across(embedded[name], part).histogram() for name in names}
    caption = "Cosines of genuine and impostor pairs across typefaces; what overlaps is confused."
    with new_figure(9.0, 2.8) as drawing:
        for k, (axes, (name, h)) in enumerate(zip(drawing.subplots(1, 3, sharey=True), drawn.items(), strict=True)):
            for counts, color, label in ((h.impostor, ORANGE, "impostor"), (h.genuine, BLUE, "genuine")):
                share = 100 * counts / max(counts.sum(), 1)
                axes.stairs(share, h.edges, color=color, fill=True, alpha=0.35)
                axes.stairs(share, h.edges, color=color, lw=1.4, label=f"{label} pairs")
            axes.set_title(name, loc="left", fontsize=10)
            axes.set(xlabel="cosine", ylabel="" if k else "share of pairs, %")
        drawing.axes[0].legend(loc="upper left", fontsize=8)
        return finish_figure(drawing, "scores", caption, wide=True)


def _plot_tightness(runs: dict[str, ChapterRun], embedded: dict[str, np.ndarray]) -> Figure:
    labels = next(iter(runs.values())).samples.part("test").labels
    edges = np.linspace(0.4, 1, 61)
    with new_figure(9.0, 3.4) as drawing:
        axes = drawing.subplots(1, 2)
        for k, (name, z) in enumerate(embedded.items()):
            for panel, values in zip(axes, within_and_between(z, labels), strict=True):
                counts, _ = np.histogram(values, edges)
                panel.stairs(counts, edges, color=run_color(k), lw=1.6, label=name)
        axes[0].set_title("within a class: right is tighter", loc="left", fontsize=10)
        axes[1].set_title("to the nearest other class: left is wider apart", loc="left", fontsize=10)
        for panel in axes:
            panel.set(xlabel="cosine", ylabel="characters")
        axes[0].legend(fontsize=8, loc="upper left")
        return finish_figure(drawing, "tightness", "Every unseen character once, one line an arm.", wide=True)


def _tightness_table(runs: dict[str, ChapterRun], embedded: dict[str, np.ndarray]) -> Table:
    labels = next(iter(runs.values())).samples.part("test").labels
    rows = []
    for name, z in embedded.items():
        within, between = within_and_between(z, labels)
        rows.append([name, f"{within.mean():.3f}", f"{between.mean():.3f}", f"{(within - between).mean():.3f}"])
    return Table(["", "within (tighter: higher)", "to the nearest (wider: lower)", "difference"], rows)


def _plot_mean_weights(runs: dict[str, ChapterRun]) -> Figure:
    with new_figure(9.0, 3.2) as drawing:
        axes = drawing.subplots(1, 2)
        for k, (name, run) in enumerate(runs.items()):
            for panel, key in zip(axes, ("positive_weight", "negative_weight"), strict=True):
                steps, values = run.log_line(key)
                if values and max(values) > 1:
                    panel.plot(steps, values, color=run_color(k), lw=1.8, label=name)
        for panel, title in zip(axes, ("positives", "negatives"), strict=True):
            panel.axhline(1, color=INK, lw=1, ls=":")
            panel.set_title(title, loc="left", fontsize=10)
            panel.set(xlabel="step", ylabel="mean weight")
            panel.legend(fontsize=8)
        caption = (
            "With alpha = 1 the mean positive weight stays close to 1: that half of the note hardly acts. With alpha = "
            "4 below the median positive it acts; what that is worth is among the claims."
        )
        return finish_figure(drawing, "mean-weights", caption, wide=True)
