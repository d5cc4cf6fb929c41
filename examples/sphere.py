"""Five losses, one small network, two dimensions: where the handwritten digits go.

    python examples/sphere.py [sphere.png]

The same network, first weights and batches for every loss. Dots are embeddings of test digits, lines the class
vectors' directions. One seed, two dimensions: about shapes, not about the best loss. A minute on one core.
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import normalize

from mettle.evaluate.plots import BLUE, SKY, VERMILION, new_figure
from mettle.losses import ArcFace, Center, CosFace, Softmax, SphereFace

SEED, STEPS, BATCH, CLASSES = 0, 1500, 128, 10
# Tol's "muted" colours, told apart by every kind of colour vision; the digits are written as well.
DIGIT = ["#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499", "#777777"]
LOSSES = {  # ten classes on a circle are 36° apart: CosFace can reach a margin of 1 - cos 36° = 0.19 at most
    "Softmax": lambda: Softmax(CLASSES, 2),
    "Softmax + Center, λ = 0.1": lambda: Center(CLASSES, 2, weight=0.1, rate=0.5),
    "SphereFace, m = 4": lambda: SphereFace(CLASSES, 2, margin=4),
    "CosFace, s = 30, m = 0.15": lambda: CosFace(CLASSES, 2, scale=30.0, margin=0.15),
    "ArcFace, s = 30, m = 0.5": lambda: ArcFace(CLASSES, 2, scale=30.0, margin=0.5),
}


def train(build, x, y):
    """A network and a loss after STEPS batches, whose order depends on the seed alone."""
    torch.manual_seed(SEED)
    hidden = [layer for a in (64, 128) for layer in (nn.Linear(a, 128), nn.BatchNorm1d(128), nn.ReLU())]
    network, loss = nn.Sequential(*hidden, nn.Linear(128, 2)), build()
    optimiser = torch.optim.Adam([*network.parameters(), *loss.parameters()], lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for batch in torch.randint(len(x), (STEPS, BATCH), generator=torch.Generator().manual_seed(SEED)):
        optimiser.zero_grad()
        loss(network(x[batch]), y[batch]).backward()
        optimiser.step()
        schedule.step()
    return network.eval(), loss


def spread(z, y):
    """Median angle of a row to the mean direction of its class, and of such a direction to the nearest other one."""
    means = normalize(torch.stack([normalize(z[y == k]).mean(0) for k in range(CLASSES)]))
    within = (normalize(z) * means[y]).sum(1).median()
    between = (means @ means.T).fill_diagonal_(-1).max(1).values.median()
    return tuple(torch.rad2deg(torch.arccos(cosine.clamp(-1, 1))).item() for cosine in (within, between))


def draw(axes, name, loss, z, y):
    """One panel: embeddings around the class directions; returns the angles."""
    accuracy = (loss.predict(z) == y).float().mean().item()
    within, between = spread(z, y)
    z = z / z.norm(dim=1).quantile(0.99)
    for k, (a, b) in enumerate(normalize(loss.vectors()).tolist()):
        axes.plot([0, 1.08 * a], [0, 1.08 * b], color=DIGIT[k], lw=0.9, alpha=0.6, zorder=1)
        axes.scatter(*z[y == k].T.numpy(), s=9, color=DIGIT[k], alpha=0.75, linewidths=0, zorder=2)
        axes.text(1.18 * a, 1.18 * b, str(k), color=DIGIT[k], weight="bold", ha="center", va="center", fontsize=12)
    axes.set(xlim=(-1.27, 1.27), ylim=(-1.27, 1.27), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(name, fontsize=12, weight="bold")
    axes.set_xlabel(f"accuracy {accuracy:.1%} · within {within:.1f}° · between {between:.1f}°")
    return within, between


def main(path="sphere.png"):
    """Train under every loss and write the picture."""
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x.astype(np.float32) / 16, y, test_size=0.3, stratify=y, random_state=SEED)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part) for part in parts)
    with new_figure(12.2, 8.8) as figure:
        figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)
        *panels, last = figure.subplots(2, 3).flat
        for row, (axes, (name, build)) in enumerate(zip(panels, LOSSES.items(), strict=True)):
            network, loss = train(build, x_train, y_train)
            with torch.no_grad():
                angles = spread(network(x_train), y_train)[:1] + draw(axes, name, loss, network(x_test), y_test)
            last.scatter(angles, [row] * 3, s=80, color=[BLUE, SKY, VERMILION])
            last.text(8, row, name.split(",")[0], ha="center", va="center")
        kinds = "within,\ntraining", "within,\ntest", "between,\ntest"
        for x, colour, kind in zip((0.6, 2.1, 33), (BLUE, SKY, VERMILION), kinds, strict=True):
            last.text(x, -0.6, kind, color=colour, ha="center")
        last.set(xscale="log", xlim=(0.2, 90), ylim=(4.6, -1.4), yticks=[], xlabel="median angle, degrees")
        last.set_xticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
        last.minorticks_off()
        last.set_title("Angles within a class and to the next", fontsize=12, weight="bold")
        figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main(*sys.argv[1:])
