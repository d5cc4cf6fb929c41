"""Chapter 4: center loss and the losses of class vectors on the sphere (note 003)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from mettle.evaluate.plots import BLUE, GREY, INK, VERMILION, new_figure, run_color
from mettle.losses import AdaCos, ArcFace, Center, CosFace, NormFace, Softmax, SphereFace, Triplet
from mettle.notes.chapter import BuildSettings, Chapter, ChapterSection, Figure, NoteClaim, Table, finish_figure
from mettle.notes.runs import recall_at_1

TITLE = "Metric learning on the sphere"
CLASSES, SIDE = 10, 160  # digits; pixels of a side of a map of decisions
KNOWN = 6  # digits that the tables train on; the others are the identities that were never seen
DIGIT_COLORS = (
    "#332288",
    "#88CCEE",
    "#44AA99",
    "#117733",
    "#999933",
    "#DDCC77",
    "#CC6677",
    "#882255",
    "#AA4499",
    "#777777",
)
CLOUDS: dict[str, Callable[[], nn.Module]] = {
    "softmax": lambda: Softmax(CLASSES, 2),
    "Center, λ = 0.1": lambda: Center(CLASSES, 2, weight=0.1),
    "SphereFace, m = 4": lambda: SphereFace(CLASSES, 2, margin=4),
    "CosFace, m = 0.15": lambda: CosFace(CLASSES, 2, scale=30.0, margin=0.15),
    "ArcFace, m = 0.5": lambda: ArcFace(CLASSES, 2, scale=30.0, margin=0.5),
}
RECIPES = ("softmax", "center", "normface", "sphereface", "cosface", "arcface", "adacos")

CLAIMS = (
    NoteClaim(
        "The larger the weight λ of center loss, the tighter the classes",
        "holds",
        "For the spread inside the training classes of a small network, over the seeds of the command; nothing is said "
        "of unseen classes.",
        "mettle reproduce center",
    ),
    NoteClaim(
        "Center loss tells unseen classes apart better than softmax alone", "not yet decided", "No study measured it."
    ),
    NoteClaim(
        "Center loss is sensitive to where its centres start",
        "not yet decided",
        "No study measured it; on the page of the chapter: three starts of one small network.",
    ),
    NoteClaim(
        "SphereFace needs its margin annealed",
        "holds",
        "With the whole margin from the first step a small network hardly trains.",
        "mettle reproduce annealing",
    ),
    NoteClaim(
        "ArcFace is at least as good as CosFace, SphereFace and softmax", "not yet decided", "No study measured it."
    ),
    NoteClaim(
        "With many labelled data ArcFace is best, with few the triplet loss",
        "not yet decided",
        "No study measured it; on the page of the chapter: digits with 5, 20 and 100 samples of a class.",
    ),
    NoteClaim(
        "s and m matter much, and AdaCos finds s by itself",
        "not yet decided",
        "No study measured it; on the page of the chapter: a grid of one small network beside AdaCos.",
    ),
    NoteClaim(
        "ArcFace accepts more than SupCon-like losses at a false-accept rate of 0.1 %",
        "withdrawn",
        "Its candidate was chosen by one metric and judged by another, at the edge of its grid.",
        "docs/results/market.md",
    ),
)


@dataclass(frozen=True)
class Digits:
    """Training and test digits as rows of numbers in [0, 1]."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def build(settings: BuildSettings) -> Chapter:
    """Train the losses on digits and draw what they do on the circle."""
    steps = settings.choose(250, 1500)
    digits = read_digits()
    settings.say(f"training five losses in two dimensions, {steps} steps each")
    seeds = range(settings.choose(2, 5))
    few = settings.choose(150, 400)
    settings.say(f"tables over {len(seeds)} seeds: scale and margin, centres, samples of a class")
    return Chapter(
        4,
        TITLE,
        "Note 003. From softmax over center loss to the margins of SphereFace, CosFace and ArcFace, on handwritten "
        f"digits. The tables train on {KNOWN} digits and measure Recall@1 on the {CLASSES - KNOWN} others.",
        (
            ChapterSection(
                "Clouds in two dimensions",
                "Test digits under five losses, and the region where each loss decides for a digit. The same network, "
                "start and batches. About shapes, not about the best loss.",
                figures=[_plot_clouds(digits, steps)],
            ),
            ChapterSection(
                "ψ and the margins",
                "ψ continues cos(μθ) so that it falls all the way; beside it the target logits of the margins, and "
                "where two classes part under each.",
                figures=[_plot_psi(), _plot_boundaries()],
            ),
            ChapterSection(
                "Center loss: its weight and its start",
                "The spread inside classes, as a share of all spread, on training and on unseen digits.",
                tables=[_center_table(digits, seeds, few)],
            ),
            ChapterSection(
                "Scale and margin, and AdaCos",
                "Recall@1 on digits that were never trained on: mean and lowest to highest over the seeds.",
                tables=[_grid_table(digits, seeds, few)],
                figures=[_plot_adacos(digits, few)],
            ),
            ChapterSection(
                "Much data and little",
                "Recall@1 on digits that were never trained on, by the number of training samples of a class.",
                tables=[_size_table(digits, seeds, few)],
            ),
            ChapterSection(
                "What the note says, and what is known", "Verdicts are those of the records.", claims=CLAIMS
            ),
        ),
    )


def read_digits() -> Digits:
    """The handwritten digits that scikit-learn carries, three tenths of them for testing."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x.astype(np.float32) / 16, y, test_size=0.3, stratify=y, random_state=0)
    x, x_test, y, y_test = (torch.from_numpy(part) for part in parts)
    return Digits(x, y, x_test, y_test)


def train_on_digits(
    loss: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int,
    dim: int = 2,
    seed: int = 0,
    watch: Callable[[], Any] | None = None,
) -> tuple[nn.Module, list[Any]]:
    """A small network after so many batches of 128, and what ``watch`` returned after each."""
    torch.manual_seed(seed)
    hidden = [layer for a in (64, 128) for layer in (nn.Linear(a, 128), nn.BatchNorm1d(128), nn.ReLU())]
    network = nn.Sequential(*hidden, nn.Linear(128, dim))
    optimizer = torch.optim.Adam([*network.parameters(), *loss.parameters()], lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    seen = []
    for batch in torch.randint(len(x), (steps, 128), generator=torch.Generator().manual_seed(seed)):
        optimizer.zero_grad()
        loss(network(x[batch]), y[batch]).backward()
        optimizer.step()
        schedule.step()
        if watch is not None:
            seen.append(watch())
    return network.eval(), seen


@torch.no_grad()
def _embed(network: nn.Module, x: Tensor) -> np.ndarray:
    return network(x).numpy()


def _plot_clouds(digits: Digits, steps: int) -> Figure:
    with new_figure(12.6, 3.0) as drawing:
        for axes, (name, make) in zip(drawing.subplots(1, len(CLOUDS)), CLOUDS.items(), strict=True):
            torch.manual_seed(0)
            loss: Any = make()
            network, _ = train_on_digits(loss, digits.x, digits.y, steps)
            z = _embed(network, digits.x_test)
            reach = float(np.quantile(np.linalg.norm(z, axis=1), 0.98)) * 1.1
            side = torch.linspace(-reach, reach, SIDE)
            plane = torch.cartesian_prod(side, side)
            with torch.no_grad():
                region = loss.predict(plane).view(SIDE, SIDE).T.numpy()
                right = float((loss.predict(torch.from_numpy(z)) == digits.y_test).float().mean())
            for k, color in enumerate(DIGIT_COLORS):
                axes.contourf(side, side, region == k, levels=[0.5, 1.5], colors=[color], alpha=0.16)
                axes.scatter(*z[digits.y_test.numpy() == k].T, s=5, color=color, lw=0)
            axes.set_title(name, fontsize=10)
            axes.set_xlabel(f"{100 * right:.1f} % right", fontsize=9)
            axes.set(xticks=[], yticks=[], aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach))
            axes.grid(False)
        return finish_figure(
            drawing, "clouds", "A colour is a digit; behind the dots the regions of decision.", wide=True
        )


@torch.no_grad()
def _plot_psi() -> Figure:
    angle = torch.linspace(0, 180, 721, dtype=torch.float64)
    cosine = torch.cos(torch.deg2rad(angle))
    with new_figure(9.0, 3.4) as drawing:
        left, right = drawing.subplots(1, 2)
        for k, margin in enumerate((1, 2, 3, 4)):
            psi = SphereFace(2, 2, margin=margin).psi(cosine)
            left.plot(angle, psi, color=run_color(k), lw=1.8, label=f"ψ, μ = {margin}")
            left.plot(angle, torch.cos(margin * torch.deg2rad(angle)), color=run_color(k), lw=0.8, ls=":")
        left.set_title("ψ(θ); dotted: cos(μθ)", loc="left", fontsize=10)
        for k, (name, loss) in enumerate(_margins().items()):
            right.plot(angle, loss.target(cosine), color=run_color(k), lw=1.8, label=name)
        right.set_title("target logit ÷ scale", loc="left", fontsize=10)
        right.set(ylim=(-3.2, 1.1))
        for axes in (left, right):
            axes.set(xlabel="angle to the own class, degrees", xticks=range(0, 181, 45))
            axes.legend(fontsize=8)
        return finish_figure(drawing, "psi", "ψ falls from 1 to 1 − 2μ without turning back.", wide=True)


def _margins() -> dict[str, Any]:
    return {
        "modified softmax": SphereFace(2, 2, margin=1, start=0.0, floor=0.0),
        "SphereFace, m = 4": SphereFace(2, 2, margin=4, start=0.0, floor=0.0),
        "CosFace, m = 0.35": CosFace(2, 2, margin=0.35),
        "ArcFace, m = 0.5": ArcFace(2, 2, margin=0.5),
    }


@torch.no_grad()
def _plot_boundaries() -> Figure:
    side = torch.linspace(0, 90, 361, dtype=torch.float64)
    first, second = (torch.cos(torch.deg2rad(angle)) for angle in torch.meshgrid(side, side, indexing="xy"))
    with new_figure(11.0, 3.0) as drawing:
        for k, (axes, (name, loss)) in enumerate(
            zip(drawing.subplots(1, 4, sharey=True), _margins().items(), strict=True)
        ):
            axes.set_facecolor("#ececec")
            wins = (loss.target(first) - second, BLUE), (loss.target(second) - first, VERMILION)
            for win, color in wins:
                axes.contourf(side, side, win, levels=[0, 99], colors=[color], alpha=0.25)
                axes.contour(side, side, win, levels=[0], colors=[color], linewidths=1.8)
            axes.plot([0, 90], [0, 90], color=INK, lw=0.8, ls="--")
            axes.set_title(name, fontsize=10)
            axes.set(aspect="equal", xticks=range(0, 91, 45), yticks=range(0, 91, 45), xlabel="θ to class 1")
            axes.set_ylabel("" if k else "θ to class 2")
        caption = "Blue: training is content with a sample of class 1 here; red: with one of class 2; grey: the margin."
        return finish_figure(drawing, "boundaries", caption, wide=True)


def _judge(
    make: Callable[[], nn.Module], digits: Digits, seeds: Sequence[int], steps: int, per_class: int | None = None
) -> list[float]:
    """Recall@1 in percent on digits never trained on, one for each seed."""
    found = []
    for seed in seeds:
        order = torch.randperm(len(digits.y), generator=torch.Generator().manual_seed(seed))
        rows = torch.cat([order[digits.y[order] == k][:per_class] for k in range(KNOWN)])
        torch.manual_seed(seed)
        network, _ = train_on_digits(make(), digits.x[rows], digits.y[rows], steps, dim=16, seed=seed)
        unseen = digits.y_test >= KNOWN
        found.append(recall_at_1(_embed(network, digits.x_test[unseen]), digits.y_test[unseen].numpy()))
    return found


def _spread_text(values: Sequence[float]) -> str:
    return f"{np.mean(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def _grid_table(digits: Digits, seeds: Sequence[int], steps: int) -> Table:
    margins = (0.0, 0.2, 0.5)
    rows = []
    for scale in (2.0, 8.0, 32.0):
        cells = [
            _judge(lambda s=scale, m=m: ArcFace(KNOWN, 16, scale=s, margin=m), digits, seeds, steps) for m in margins
        ]
        rows.append([f"ArcFace, s = {scale:g}", *map(_spread_text, cells)])
    found = _judge(lambda: AdaCos(KNOWN, 16), digits, seeds, steps)
    rows.append(["AdaCos (no margin, its own s)", _spread_text(found), "–", "–"])
    return Table(["Recall@1, %", *(f"m = {m:g}" for m in margins)], rows)


def _size_table(digits: Digits, seeds: Sequence[int], steps: int) -> Table:
    losses = {
        "softmax": lambda: Softmax(KNOWN, 16),
        "NormFace": lambda: NormFace(KNOWN, 16, scale=8.0),
        "ArcFace": lambda: ArcFace(KNOWN, 16, scale=8.0, margin=0.3),
        "Triplet": lambda: Triplet(0.2),
    }
    sizes = (5, 20, 100)
    rows = [
        [name, *(_spread_text(_judge(make, digits, seeds, steps, size)) for size in sizes)]
        for name, make in losses.items()
    ]
    return Table(["Recall@1, %", *(f"{size} samples a class" for size in sizes)], rows)


def _center_table(digits: Digits, seeds: Sequence[int], steps: int) -> Table:
    known, unseen = digits.y < KNOWN, digits.y_test >= KNOWN
    x, y = digits.x[known], digits.y[known]
    arms: dict[str, tuple[float, str]] = {
        "λ = 0 (softmax)": (0.0, "zero"),
        "λ = 0.01": (0.01, "zero"),
        "λ = 0.1": (0.1, "zero"),
        "λ = 1": (1.0, "zero"),
        "λ = 0.1, centres start far away": (0.1, "far"),
        "λ = 0.1, centres start at the class means": (0.1, "means"),
    }
    rows = []
    for name, (weight, start) in arms.items():
        found = []
        for seed in seeds:
            torch.manual_seed(seed)
            loss = Center(KNOWN, 16, weight=weight)
            if start == "far":
                loss.centres.copy_(20 * torch.randn(KNOWN, 16))
            elif start == "means":
                torch.manual_seed(seed)
                network, _ = train_on_digits(Softmax(KNOWN, 16), x, y, 1, dim=16, seed=seed)
                with torch.no_grad():
                    loss.start_from(network(x), y)
            network, _ = train_on_digits(loss, x, y, steps, dim=16, seed=seed)
            z, other = _embed(network, x), _embed(network, digits.x_test[unseen])
            labels = digits.y_test[unseen].numpy()
            found.append((within_share(z, y.numpy()), within_share(other, labels), recall_at_1(other, labels)))
        means = np.mean(found, axis=0)
        rows.append([name, f"{means[0]:.3f}", f"{means[1]:.3f}", _spread_text([row[2] for row in found])])
    return Table(
        ["Center loss", "spread, training digits", "spread, unseen digits", "Recall@1, unseen digits, %"], rows
    )


def within_share(z: np.ndarray, labels: np.ndarray) -> float:
    """Variance about the class means, as a share of all variance."""
    inside = sum(((z[labels == k] - z[labels == k].mean(0)) ** 2).sum() for k in np.unique(labels))
    return float(inside / ((z - z.mean(0)) ** 2).sum())


def _plot_adacos(digits: Digits, steps: int) -> Figure:
    known = digits.y < KNOWN
    with new_figure(5.4, 3.2) as drawing:
        axes = drawing.add_subplot()
        for k, dynamic in enumerate((True, False)):
            torch.manual_seed(0)
            loss: Any = AdaCos(KNOWN, 16, dynamic=dynamic)
            _, scales = train_on_digits(
                loss, digits.x[known], digits.y[known], steps, dim=16, watch=lambda loss=loss: float(loss.scale)
            )
            axes.plot(scales, color=run_color(k), lw=1.8, label="dynamic" if dynamic else "fixed, √2 ln(C − 1)")
        axes.axhline(0, color=GREY, lw=0.8)
        axes.set(xlabel="step", ylabel="scale s")
        axes.legend()
        return finish_figure(drawing, "adacos", "The scale that AdaCos takes by itself.")
