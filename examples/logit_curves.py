"""What a margin does to the target logit, over the angle between an embedding and its class vector.

    python examples/logit_curves.py [logit_curves.png]

The curve times the scale (or the embedding's length) stands in the softmax in place of the cosine: the lower
it is, the more is asked of the sample.
"""

import sys

import torch

from mettle.evaluate.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, new_figure
from mettle.losses import ArcFace, CosFace, SphereFace

ANGLE = torch.linspace(0, 180, 3601, dtype=torch.float64)
COSINE = torch.cos(torch.deg2rad(ANGLE))
DASHED = (0, (4, 2))
TURN = 180 - float(torch.rad2deg(torch.tensor(0.5)))  # where the angle and ArcFace's margin make 180 degrees


@torch.no_grad()
def curve(loss):
    """Target cosine after the margin at every angle; nan at a jump, so that no line is drawn across it."""
    value = loss.target(COSINE).clone()
    value[torch.diff(value, prepend=value[:1]).abs() > 0.05] = torch.nan
    return value.numpy()


def label(axes, y, text, colour, x=182.0):
    """The name of a curve, at its right end."""
    axes.text(x, y, text, color=colour, fontsize=9, va="center")


def margins(axes):
    """The published margins side by side."""
    for y, text, colour, style, values in (
        (-0.93, "softmax: cos θ", BLACK, "-", COSINE.numpy()),
        (-1.17, "ArcFace, m = 0.5 (keep)", BLUE, "-", curve(ArcFace(2, 2, margin=0.5))),
        (-1.41, "CosFace, m = 0.35", GREEN, "-", curve(CosFace(2, 2, margin=0.35))),
        (-2.00, "SphereFace, m = 4\nλ = 5", PURPLE, "-", curve(SphereFace(2, 2, margin=4, start=5.0, floor=5.0))),
        (None, "", PURPLE, DASHED, curve(SphereFace(2, 2, margin=4, start=0.0, floor=0.0))),
    ):
        axes.plot(ANGLE, values, color=colour, lw=2, ls=style)
        if text:
            label(axes, y, text, colour)
    label(axes, -2.75, "SphereFace, m = 4, λ = 0\n(−7 at 180°)", PURPLE, x=90)
    axes.set(ylim=(-3.2, 1.1), ylabel="target logit ÷ scale")
    axes.set_title("Margins", loc="left", weight="bold")


def modes(axes):
    """What ArcFace does once the angle and the margin together pass 180 degrees."""
    axes.plot(ANGLE, COSINE, color=GREY, lw=1.2)
    late = TURN < ANGLE
    plain = curve(ArcFace(2, 2, margin=0.5, mode="none"))
    axes.plot(ANGLE[~late], plain[~late], color=BLACK, lw=2)
    for mode, y, colour, style, where in (
        ("none", -0.86, ORANGE, DASHED, late),
        ("easy", -1.00, SKY, (0, (1, 1)), ANGLE > 90),
        ("smooth", -1.13, VERMILION, "-", late),
        ("keep", -1.26, BLUE, "-", late),
    ):
        axes.plot(ANGLE[where], curve(ArcFace(2, 2, margin=0.5, mode=mode))[where], color=colour, lw=2.4, ls=style)
        label(axes, y, mode, colour)
    axes.axvline(TURN, color=GREY, lw=0.9, ls=":")
    axes.text(TURN - 2, 1.04, f"θ + m = 180°\nat θ = {TURN:.1f}°", ha="right", va="top", fontsize=9, color="#555555")
    label(axes, 0.42, "cos θ", GREY, x=70)
    label(axes, -0.12, "cos(θ + m)", BLACK, x=34)
    axes.set(ylim=(-1.6, 1.1))
    axes.set_title("ArcFace beyond 180°, m = 0.5", loc="left", weight="bold")


def main(path="logit_curves.png"):
    """Write the picture."""
    with new_figure(11, 4.3) as figure:
        left, right = figure.subplots(1, 2)
        margins(left)
        modes(right)
        for axes in (left, right):
            axes.set(xlim=(0, 180), xticks=range(0, 181, 30), xlabel="angle θ to the own class vector, degrees")
            axes.title.set_fontsize(12)
        figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main(*sys.argv[1:])
