"""Chapter 2: debiased contrastive learning with difficulty from a second, biased encoder (note 001)."""

from pathlib import Path

import numpy as np
import torch

from mettle.data import Samples, glyphs
from mettle.evaluate import probe
from mettle.evaluate.plots import BLUE, GREY, ORANGE, new_figure, run_color
from mettle.losses import InfoNCE, SelfTriplet
from mettle.model import embed
from mettle.notes.chapter import BuildSettings, Chapter, ChapterSection, Figure, NoteClaim, Table, finish_figure
from mettle.notes.runs import ChapterRun, train_recipe, untrained_model, write_pictures
from mettle.report.embedding_map import tsne
from mettle.report.two_encoders import negatives_by_difficulty

TITLE = "Debiased contrastive learning by difficulty (WCL)"
CHARACTERS, SHOWN = 40, 10  # classes, and those that the maps show
CLASS_COLORS = "tab10"

CLAIMS = (
    NoteClaim(
        "WCL is more accurate than SimCLR, DCL and HCL on CIFAR-10, on average and for the worst class",
        "not yet decided",
        "Two seeds; five are needed. Against HCL -1.70 ± 5.34 points, against DCL -0.13 ± 3.81.",
        "docs/results/cifar.md",
    ),
    NoteClaim(
        "WCL is more accurate than with the same mean weight on every negative",
        "not yet decided",
        "+0.70 ± 1.52 points over two seeds on CIFAR-10.",
        "docs/results/cifar.md",
    ),
    NoteClaim(
        "A classifier on E_b has a larger gap between the average and the worst class",
        "withdrawn",
        "Two seeds, one method beside it, no untrained network, and the rate of E_b was not tuned.",
        "docs/results/cifar.md",
    ),
    NoteClaim(
        "E_b learns next to nothing of the worst class where there are a hundred",
        "withdrawn",
        "The worst class of DCL and of WCL is 0 as well, so the measure says nothing.",
        "docs/results/tiny.md",
    ),
    NoteClaim(
        "WCL raises the accuracy of the worst group on data with a spurious attribute",
        "withdrawn",
        "On coloured digits the worst group of every arm was below that of an untrained network.",
        "docs/results/coloured.md",
    ),
    NoteClaim(
        "Negatives that share the background of their anchor get a higher w",
        "not yet decided",
        "Coloured digits showed the opposite (1.44 for the same, 1.72 for another colour) over two seeds of one "
        "reading of w.",
        "docs/results/coloured.md",
    ),
    NoteClaim(
        "The spurious attribute is read more easily from E_b than from E_d",
        "withdrawn",
        "It was read at the ceiling from nearly every encoder.",
        "docs/results/coloured.md",
    ),
    NoteClaim(
        "JTT is worse than contrastive learning with many classes",
        "not yet decided",
        "JTT is in the chapter's table; no study compares it over seeds with tuned stages.",
    ),
    NoteClaim(
        "On tables WCL is more accurate, and its gap between groups smaller",
        "withdrawn",
        "The prior that all rows were given switches most anchors of DCL off.",
        "docs/results/tables.md",
    ),
    NoteClaim(
        "WCL depends less on its hyperparameters than HCL does on beta", "not yet decided", "No study varied both."
    ),
)


def build(settings: BuildSettings) -> Chapter:
    """Train SimCLR, DCL, HCL, WCL with its controls and JTT on characters whose typeface gives them away."""
    data = write_biased_glyphs(settings)
    steps = settings.choose(60, 400)
    keys = [f"data.source={data}", f"train.steps={steps}", "evaluate.spurious=domain"]
    recipes = {"SimCLR": "simclr", "DCL": "dcl", "HCL": "hcl", "WCL": "wcl"}
    recipes |= {"WCL, mean weight": "wcl-mean", "WCL, shuffled weights": "wcl-shuffled", "JTT": "jtt"}
    more = {"JTT": ["batch.size=128", "jtt.first=0.5"]}
    runs = {
        name: train_recipe(settings, 2, recipe, recipe, [*keys, *more.get(name, [])])
        for name, recipe in recipes.items()
    }
    settings.say("probing frozen features")
    wcl = runs["WCL"]
    models = {"untrained": untrained_model(wcl)} | {name: run.model for name, run in runs.items()}
    models |= {"WCL, E_b": wcl.run.biased_model()}
    weighed = negatives_by_difficulty(wcl.run, wcl.samples)
    return Chapter(
        2,
        TITLE,
        "Note 001. Contrastive learning without labels, false and easy negatives, and a second encoder that is biased "
        f"on purpose. {CHARACTERS} characters; in training nearly every one is set in a typeface of its own, in the "
        "test every typeface is as common: the typeface is to these characters what the background is to waterbirds.",
        (
            ChapterSection(
                "Two encoders and their two losses",
                "How hard a negative is pushed at each cosine: E_b pushes all alike, E_d the similar ones.",
                figures=[_plot_push()],
            ),
            ChapterSection(
                "What can be read from frozen features",
                "A linear probe on frozen features. Aligned: test pictures in the typeface of their character in "
                "training; conflicting: all others. One seed, which decides nothing.",
                tables=[_probe_table(models, wcl.samples)],
            ),
            ChapterSection(
                "t-SNE of the test split, by class",
                f"The same {SHOWN} characters for every encoder; a colour is a character.",
                figures=[_plot_maps({k: v for k, v in models.items() if k in MAPS}, wcl.samples)],
            ),
            ChapterSection(
                "The five easiest and the five hardest negatives by w",
                "High w: hard for E_d and easy for E_b."
                + (
                    ""
                    if weighed is None
                    else f" w = {weighed['mean']} ± {weighed['spread']} over all pairs shown to both."
                ),
                negatives=() if weighed is None else weighed["anchors"],
            ),
            ChapterSection(
                "w while it trains", "Its mean, and its spread over the negatives.", figures=[_plot_weights(runs)]
            ),
            ChapterSection(
                "What the note says, and what is known", "Verdicts are those of the records.", claims=CLAIMS
            ),
        ),
    )


MAPS = ("SimCLR", "DCL", "HCL", "WCL", "WCL, E_b")


def write_biased_glyphs(settings: BuildSettings) -> Path:
    """Characters whose typeface gives them away in training: eight pictures in one family, one in another."""
    path = settings.folder / "data" / "biased-glyphs.npz"
    if path.is_file():
        return path
    samples = glyphs("closed", cache=settings.cache)
    chosen = np.unique(samples.labels)[:: len(np.unique(samples.labels)) // CHARACTERS][:CHARACTERS]
    assert samples.domain is not None
    family, aligned = samples.domain.codes, np.zeros(len(samples), bool)
    keep = []
    for k, label in enumerate(chosen.tolist()):
        own = samples.labels == label
        aligned[own] = family[own] == k % len(samples.domain.names)
        training = np.flatnonzero(own & (samples.split == 0))
        keep += [
            training[aligned[training]],
            training[~aligned[training]][k % 8 :: 24][:1],
            np.flatnonzero(own & (samples.split == 2)),
        ]
    rows = np.concatenate(keep)
    split = np.where(samples.split[rows] == 0, "train", "test")
    return write_pictures(
        path,
        samples,
        rows,
        split,
        domain=samples.domain.take(rows).values().astype(str),
        aligned=aligned[rows].astype(int),
    )


def _plot_push() -> Figure:
    """The gradient of both losses with respect to the cosine of one negative, by autograd."""
    cosine = torch.linspace(-0.95, 0.95, 77, dtype=torch.float64)
    with new_figure(5.4, 3.2) as drawing:
        axes = drawing.add_subplot()
        for loss, name, color in (
            (InfoNCE(0.5), "InfoNCE (E_d)", BLUE),
            (SelfTriplet(form="mean"), "self-supervised triplet (E_b)", ORANGE),
        ):
            push = [_push_at(loss, float(c)) for c in cosine]
            axes.plot(cosine, np.asarray(push) / np.mean(push), color=color, lw=2, label=name)
        axes.set(xlabel="cosine of anchor and negative", ylabel="push, mean = 1", ylim=(0, None))
        axes.legend()
        return finish_figure(
            drawing,
            "push",
            "On the sphere the triplet loss is linear in the cosine: near and far negatives are pushed alike, so "
            "whatever separates most of them is enough.",
        )


def _push_at(loss: InfoNCE | SelfTriplet, cosine: float) -> float:
    """dL/ds of one of four negatives at this cosine, the others at 0."""
    z = torch.eye(6, dtype=torch.float64)
    z[1] = z[0]  # the positive
    z[2] = cosine * torch.eye(6, dtype=torch.float64)[0] + (1 - cosine**2) ** 0.5 * torch.eye(6, dtype=torch.float64)[2]
    z.requires_grad_()
    labels = torch.tensor([0, 0, 1, 2, 3, 4])
    (gradient,) = torch.autograd.grad(loss.per_anchor(z, labels)[0], z)
    direction = torch.zeros(6, dtype=torch.float64)
    direction[0] = 1.0
    tangent = direction - cosine * z[2].detach()
    return float(gradient[2] @ tangent) / float(tangent @ tangent)


def _probe_table(models: dict, samples: Samples) -> Table:
    train, test = samples.part("train"), samples.part("test")
    aligned = test.groups["aligned"].values().astype(int) == 1
    rows = []
    for name, model in models.items():
        features = [embed(model, part, features=True) for part in (train, test)]
        found = probe((features[0], train.labels), (features[1], test.labels), strength=1.0)
        right = found.linear.correct
        shares = (right.mean(), found.linear.worst_class[1], right[aligned].mean(), right[~aligned].mean())
        rows.append([name, *(f"{100 * float(x):.1f} %" for x in shares)])
    return Table(["", "top-1", "worst class", "aligned", "conflicting"], rows)


def _plot_maps(models: dict, samples: Samples) -> Figure:
    import matplotlib

    test = samples.part("test")
    names = np.unique(test.labels)
    shown = names[:: max(1, len(names) // SHOWN)][:SHOWN]
    part = test.take(np.flatnonzero(np.isin(test.labels, shown)))
    colors = matplotlib.colormaps[CLASS_COLORS](np.searchsorted(shown, part.labels) % 10)
    with new_figure(12.0, 2.9) as drawing:
        for axes, (name, model) in zip(drawing.subplots(1, len(models)), models.items(), strict=True):
            z = embed(model, part)
            place = tsne(z / np.linalg.norm(z, axis=1, keepdims=True), 0)
            axes.scatter(*place.T, c=colors, s=16, lw=0)
            axes.set_title(name.replace("WCL, ", ""), fontsize=11)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        return finish_figure(drawing, "maps", "Embeddings of the test split; one seed, one map each.", wide=True)


def _plot_weights(runs: dict[str, ChapterRun]) -> Figure:
    with new_figure(5.4, 3.2) as drawing:
        axes = drawing.add_subplot()
        for k, name in enumerate(("WCL", "WCL, mean weight", "WCL, shuffled weights")):
            steps, mean = runs[name].log_line("weight_mean")
            _, spread = runs[name].log_line("weight_std")
            low, high = np.subtract(mean, spread), np.add(mean, spread)
            axes.fill_between(steps, low, high, color=run_color(k), alpha=0.15, lw=0)
            axes.plot(steps, mean, color=run_color(k), lw=1.8, label=name)
        axes.axhline(1.5, color=GREY, lw=1, ls=":")
        axes.set(xlabel="step", ylabel="w of negatives")
        axes.legend(fontsize=8)
        return finish_figure(
            drawing, "w", "Mean of w and one standard deviation either way; dotted: equal encoders, 1.5."
        )
