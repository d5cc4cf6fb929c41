"""Chapter 5: hardness-aware deep metric learning, synthetic negatives that get harder (note 004)."""

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mettle.data import Samples
from mettle.evaluate import clustering, few_shot, retrieval
from mettle.evaluate.plots import BLUE, GREEN, INK, ORANGE, PURPLE, VERMILION, new_figure, run_color
from mettle.model import embed
from mettle.notes.chapter import BuildSettings, Chapter, ChapterSection, Figure, NoteClaim, Table, finish_figure
from mettle.notes.runs import ChapterRun, train_recipe, untrained_model
from mettle.report.embedding_map import tsne
from mettle.train.methods.tuple_layouts import pull_negatives

TITLE = "Hardness-aware deep metric learning (HDML)"
CHARACTERS = 60  # test identities that are measured
EPISODES, WAYS, SHOTS = 200, 5, (1, 5)

CLAIMS = (
    NoteClaim(
        "HDML is better than the triplet loss that it is put around",
        "withdrawn",
        "R@1 -3.28 ± 1.21 on CUB-200: three seeds of 700 steps, the learning rate at an edge of its grid.",
        "docs/results/birds.md",
    ),
    NoteClaim(
        "HDML is better than the hardest triplets",
        "withdrawn",
        "The control had not learned: its R@1 of 2.41 is below that of an untrained network, 3.46.",
        "docs/results/birds.md",
    ),
    NoteClaim(
        "HDML is better than the N-pair loss that it is put around",
        "withdrawn",
        "HDML (N-pair) had not learned: its R@1 of 4.05 is below that of plain pixels, 5.65.",
        "docs/results/birds.md",
    ),
    NoteClaim(
        "The gain is larger on CUB-200 and Cars196 than on Stanford Online Products",
        "not yet decided",
        "No run on Cars196 or on the products, both of which mettle data import reads.",
    ),
    NoteClaim(
        "Without the softmax loss the gain is gone, without the reconstruction part of it stays",
        "not yet decided",
        "No study measured it; on the page of the chapter: one seed of each.",
    ),
    NoteClaim(
        "alpha about 90 is best",
        "not yet decided",
        "No study measured it; on the page of the chapter: one seed of each value.",
    ),
    NoteClaim(
        "Negatives get harder as training goes on",
        "not yet decided",
        "λ falls in the chapter's run; in one study it fell for triplets and rose for N-pairs.",
        "docs/results/birds.md",
    ),
    NoteClaim(
        "Synthetic points keep their label", "not yet decided", "The log has the softmax head's accuracy on them."
    ),
    NoteClaim(
        "It generalises better to classes with few or no samples",
        "not yet decided",
        "Every test is on unseen classes; on the page of the chapter: five-way episodes with one and five samples.",
    ),
    NoteClaim(
        "It costs more to train",
        "not yet decided",
        "The benchmark measures it on your machine; no result is kept.",
        "python benchmarks/training.py hdml",
    ),
)


def build(settings: BuildSettings) -> Chapter:
    """Train HDML around two losses, its controls and its ablations."""
    steps = settings.choose(80, 400)
    keys = [f"train.steps={steps}", "synthesis.window=10"]
    triplet = [*keys, "batch.classes=64"]
    arms: dict[str, tuple[str, list[str]]] = {
        "HDML (triplet)": ("hdml-triplet", triplet),
        "triplet, the same tuples": ("hdml-triplet", [*triplet, "synthesis.beta=0"]),
        "HDML (N-pair)": ("hdml-npair", keys),
        "N-pair, the same tuples": ("hdml-npair", [*keys, "synthesis.beta=0"]),
    }
    ablations = {
        "without the softmax loss": ["synthesis.soft=0"],
        "without the reconstruction": ["synthesis.soft=1"],
        "fixed λ = 0.5": ["synthesis.level=0.5"],
        "generator without augmentor (λ = 1)": ["synthesis.level=1"],
        "augmentor without generator": ["synthesis.generator=false"],
    }
    arms |= {name: ("hdml-triplet", [*triplet, *more]) for name, more in ablations.items()}
    for alpha in settings.choose((0.03, 1.0), (0.01, 0.03, 0.3, 1.0)):
        arms[f"alpha = {alpha:g} (others: 0.1)"] = ("hdml-triplet", [*triplet, f"synthesis.alpha={alpha}"])
    runs = {name: train_recipe(settings, 5, _folder_name(name), *arm) for name, arm in arms.items()}
    settings.say("measuring unseen characters")
    main = runs["HDML (triplet)"]
    part = _test_part(main.samples)
    embedded = {"untrained network": embed(untrained_model(main), part)}
    embedded |= {name: embed(run.model, part) for name, run in runs.items()}
    return Chapter(
        5,
        TITLE,
        "Note 004. Negatives that are pulled towards their anchors in the embedding space, as far as training bears, "
        "and a generator that keeps their label.",
        (
            ChapterSection(
                "Architecture",
                "One embedding layer for real and for synthetic features; arrows are forward passes.",
                figures=[_plot_architecture()],
            ),
            ChapterSection(
                "λ, weights and losses over time",
                "As the metric loss falls, λ falls and negatives come nearer; as the generator improves, synthetic "
                "tuples count more.",
                figures=[_plot_levels(runs), _plot_losses(runs["HDML (triplet)"])],
            ),
            ChapterSection(
                "Synthetic points on the map",
                "t-SNE of unseen characters, with negatives pulled to half of their way (λ = 0.5) and sent through "
                "generator and embedding layer.",
                figures=[_plot_synthetic(main, part)],
            ),
            ChapterSection(
                "NMI and Recall@K, controls and ablations",
                f"{CHARACTERS} characters that were never trained on. One seed each, which decides nothing.",
                tables=[_metric_table(embedded, part)],
            ),
            ChapterSection(
                "Few samples of a class",
                f"{EPISODES} episodes of {WAYS} unseen characters: share of queries whose nearest class mean is "
                "right. Intervals resample characters.",
                tables=[_episode_table(embedded, part)],
            ),
            ChapterSection(
                "What the note says, and what is known", "Verdicts are those of the records.", claims=CLAIMS
            ),
        ),
    )


def _folder_name(name: str) -> str:
    kept = "".join(c if c.isalnum() or c in " .-" else "" for c in name.replace("λ", "lambda"))
    return "-".join(kept.lower().split())


def _test_part(samples: Samples) -> Samples:
    """All pictures of some test characters, in the typefaces of the gallery."""
    test = samples.part("test")
    names = np.unique(test.labels)
    chosen = names[:: max(1, len(names) // CHARACTERS)][:CHARACTERS]
    return test.take(np.flatnonzero(np.isin(test.labels, chosen)))


def _plot_architecture() -> Figure:
    boxes = {  # text: (x, y, colour)
        "picture": (0.0, 1.0, INK),
        "backbone": (1.5, 1.0, BLUE),
        "features y": (3.0, 1.0, INK),
        "embedding\nlayer": (4.5, 1.0, BLUE),
        "embedding z": (6.0, 1.0, INK),
        "augmentor: ẑ⁻\ntowards z": (7.6, 1.0, ORANGE),
        "generator": (7.6, -0.6, GREEN),
        "synthetic\nfeatures ỹ": (6.0, -0.6, INK),
        "embedding\nlayer ": (4.5, -0.6, BLUE),
        "J(T̃)": (3.0, -0.6, VERMILION),
        "J(T)": (6.0, 2.3, VERMILION),
        "softmax head": (3.0, 2.3, PURPLE),
        "class term ": (7.6, -1.9, PURPLE),
    }
    arrows = [
        ("picture", "backbone"), ("backbone", "features y"), ("features y", "embedding\nlayer"),
        ("embedding\nlayer", "embedding z"), ("embedding z", "augmentor: ẑ⁻\ntowards z"), ("embedding z", "J(T)"),
        ("augmentor: ẑ⁻\ntowards z", "generator"), ("generator", "synthetic\nfeatures ỹ"),
        ("synthetic\nfeatures ỹ", "embedding\nlayer "), ("embedding\nlayer ", "J(T̃)"), ("features y", "softmax head"),
        ("generator", "class term "),
    ]  # fmt: skip
    with new_figure(10.0, 4.0) as drawing:
        axes = drawing.add_subplot()
        for text, (x, y, color) in boxes.items():
            axes.add_patch(
                FancyBboxPatch((x - 0.55, y - 0.32), 1.1, 0.64, boxstyle="round,pad=0.05", fc="white", ec=color, lw=1.6)
            )
            axes.text(x, y, text.strip(), ha="center", va="center", fontsize=9)
        for a, b in arrows:
            start, end = (np.asarray(boxes[name][:2], float) for name in (a, b))
            along = (end - start) / np.linalg.norm(end - start)
            room = np.asarray([0.62, 0.4]) * along
            axes.add_patch(
                FancyArrowPatch(
                    tuple(start + room), tuple(end - room), arrowstyle="-|>", mutation_scale=12, color="#777777"
                )
            )
        axes.set(xlim=(-0.8, 8.5), ylim=(-2.4, 2.8))
        axes.axis("off")
        caption = (
            "The two embedding layers are one. J_metric = w J(T) + (1 − w) J(T̃), w = e^(−β / J_gen), trains the blue "
            "ones; J_gen, the reconstruction of y and the class term, trains the generator; the softmax head learns "
            "from y alone."
        )
        return finish_figure(drawing, "architecture", caption, wide=True)


def _plot_levels(runs: Mapping[str, ChapterRun]) -> Figure:
    with new_figure(5.4, 3.4) as drawing:
        axes = drawing.add_subplot()
        for k, name in enumerate(("HDML (triplet)", "HDML (N-pair)")):
            axes.plot(*runs[name].log_line("lambda"), color=run_color(k), lw=2, label=f"λ, {name}")
            axes.plot(
                *runs[name].log_line("weight_synthetic"),
                color=run_color(k),
                lw=1.4,
                ls="--",
                label="weight of synthetic",
            )
        axes.set(xlabel="step", ylim=(-0.03, 1.05))
        axes.legend(fontsize=8)
        return finish_figure(
            drawing, "levels", "λ = 1 leaves negatives where they are, 0 pulls them next to the positive."
        )


def _plot_losses(run: ChapterRun) -> Figure:
    with new_figure(5.4, 3.4) as drawing:
        axes = drawing.add_subplot()
        names = {"j_avg": "J_avg", "loss_synthetic": "J(T̃)", "j_gen": "J_gen", "reconstruction": "reconstruction"}
        for k, (key, name) in enumerate(names.items()):
            steps, values = run.log_line(key)
            if values and max(values) > 0:
                axes.plot(steps, np.asarray(values) / values[0], color=run_color(k), lw=1.8, label=name)
        axes.set(xlabel="step", ylabel="times its first value", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend(fontsize=8)
        return finish_figure(drawing, "losses", "Losses of HDML (triplet), each in units of its first value.")


@torch.no_grad()
def synthesize(
    run: ChapterRun, z: np.ndarray, labels: np.ndarray, level: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of synthetic negatives of some anchors, and the labels that they are to keep."""
    rng = np.random.default_rng(seed)
    anchors, positives, negatives = [], [], []
    for label in np.unique(labels):
        own, others = np.flatnonzero(labels == label), np.flatnonzero(labels != label)
        anchors.append(own[0])
        positives.append(own[-1])
        negatives.append(rng.choice(others))
    points = torch.from_numpy(z)
    pulled = pull_negatives(points[anchors], points[positives], points[negatives], level)
    method = run.method
    method.generator.eval()
    method.model.eval()
    return method.embedding(method.generator(pulled)).numpy(), labels[negatives]


def _plot_synthetic(run: ChapterRun, part: Samples) -> Figure:
    names = np.unique(part.labels)[::6][:10]
    few = part.take(np.flatnonzero(np.isin(part.labels, names)))
    z = embed(run.model, few)
    made, kept = zip(*(synthesize(run, z, few.labels, 0.5, seed) for seed in range(4)), strict=True)
    synthetic, labels = np.concatenate(made), np.concatenate(kept)
    everything = np.concatenate([z, synthetic])
    place = tsne(everything / np.linalg.norm(everything, axis=1, keepdims=True), 0)
    import matplotlib

    colors = matplotlib.colormaps["tab10"]
    with new_figure(6.4, 4.4) as drawing:
        axes = drawing.add_subplot()
        axes.scatter(*place[: len(z)].T, c=colors(np.searchsorted(names, few.labels) % 10), s=14, lw=0, alpha=0.6)
        axes.scatter(
            *place[len(z) :].T, c=colors(np.searchsorted(names, labels) % 10), s=60, marker="*", ec=INK, lw=0.6
        )
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        caption = (
            "Dots: pictures, a colour is a character. Stars: synthetic points, in the colour of the label they keep."
        )
        return finish_figure(drawing, "synthetic", caption)


def _metric_table(embedded: Mapping[str, np.ndarray], part: Samples) -> Table:
    rows = []
    for name, z in embedded.items():
        recall = retrieval(z, part.labels, k=(1, 2, 4, 8)).recall
        nmi = clustering(z, part.labels, seeds=1).nmi
        rows.append([name, f"{100 * nmi:.1f}", *(f"{100 * recall[k]:.1f}" for k in (1, 2, 4, 8))])
    return Table(["", "NMI, %", "R@1, %", "R@2, %", "R@4, %", "R@8, %"], rows)


def _episode_table(embedded: Mapping[str, np.ndarray], part: Samples) -> Table:
    rows = []
    for name, z in embedded.items():
        if name.startswith(("untrained", "HDML", "triplet", "N-pair")):
            cells = []
            for shots in SHOTS:
                found = few_shot(z, part.labels, ways=WAYS, shots=shots, queries=5, episodes=EPISODES)
                band = found.interval("accuracy", replicates=300)
                cells.append(f"{100 * found.accuracy:.1f} [{100 * band.low:.1f}, {100 * band.high:.1f}]")
            rows.append([name, *cells])
    return Table(["accuracy, %", *(f"{WAYS}-way {shots}-shot" for shots in SHOTS)], rows)
