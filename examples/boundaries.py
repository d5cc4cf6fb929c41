"""Where two classes part under each margin: an embedding at angle θ₁ from one class vector and θ₂ from the other.

    python examples/boundaries.py [boundaries.png]

Training is content with an embedding of class 1 only where target(θ₁) > cos θ₂, with one of class 2 only where
target(θ₂) > cos θ₁. Between the two lies the margin, out of which the embeddings of both classes are pushed.
"""

import sys

import torch

from mettle.evaluate.plots import BLUE, INK, VERMILION, new_figure
from mettle.losses import ArcFace, CosFace, SphereFace

SIDE = torch.linspace(0, 90, 721, dtype=torch.float64)
FIRST, SECOND = (torch.cos(torch.deg2rad(angle)) for angle in torch.meshgrid(SIDE, SIDE, indexing="xy"))
MARGINS = {
    "Modified softmax": ("", CosFace(2, 2, margin=0.0)),
    "SphereFace": ("m = 4, λ = 0", SphereFace(2, 2, margin=4, start=0.0, floor=0.0)),
    "SphereFace ": ("m = 4, λ = 5", SphereFace(2, 2, margin=4, start=5.0, floor=5.0)),
    "CosFace": ("m = 0.35", CosFace(2, 2, margin=0.35)),
    "ArcFace": ("m = 0.5", ArcFace(2, 2, margin=0.5)),
}


@torch.no_grad()
def draw(axes, name, detail, loss):
    """One panel: each class's own region in its colour, the margin grey between them."""
    first, second = loss.target(FIRST) - SECOND, loss.target(SECOND) - FIRST
    axes.set_facecolor("#ececec")
    for win, colour, light in ((first, BLUE, "#cfe3f0"), (second, VERMILION, "#f6dccb")):
        axes.contourf(SIDE, SIDE, win, levels=[0, 99], colors=[light])
        axes.contour(SIDE, SIDE, win, levels=[0], colors=[colour], linewidths=2)
    axes.plot([0, 90], [0, 90], color=INK, lw=1, ls=(0, (4, 3)))
    axes.text(2, 83, "class 1", color=BLUE, weight="bold", fontsize=9)
    axes.text(88, 4, "class 2", color=VERMILION, weight="bold", fontsize=9, ha="right")
    if torch.maximum(first, second).min() < -1e-6:
        axes.text(41, 47, "margin", rotation=45, ha="center", va="center", color="#555555")
    axes.set_title(name, loc="left", weight="bold", fontsize=11)
    axes.set_title(detail, loc="right", fontsize=9, color="#555555")
    axes.set(xlim=(0, 90), ylim=(0, 90), aspect="equal", xticks=range(0, 91, 30), yticks=range(0, 91, 30))
    axes.set_xlabel("angle θ₁ to class 1, degrees")
    axes.grid(False)


def main(path="boundaries.png"):
    """Write the picture."""
    with new_figure(14, 3.3) as figure:
        panels = figure.subplots(1, len(MARGINS), sharey=True)
        for axes, (name, (detail, loss)) in zip(panels, MARGINS.items(), strict=True):
            draw(axes, name, detail, loss)
        panels[0].set_ylabel("angle θ₂ to class 2, degrees")
        figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main(*sys.argv[1:])
