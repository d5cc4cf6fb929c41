"""Speed and memory of the class-vector losses on one CPU thread, against pytorch-metric-learning and plain torch.

    python benchmarks/classes.py            the table and the picture (some minutes, 4 GB)
    python benchmarks/classes.py --quick    up to 10,000 classes, writes nothing

Times are process CPU seconds of forward + backward, medians of rounds in which all take turns: read the ratios. All
have the same class vectors, and PML must give the same value. Memory is measured in a fresh process per implementation
and number of classes: the growth of peak resident memory over a process that holds the class vectors, less their
gradient, and the whole peak of a training step. The last table is kept in RESULTS.md.
"""

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import torch
from record import keep, status

from mettle.losses import ArcFace, CosFace

HERE = Path(__file__).parent
BATCH, DIM = 256, 128
SIZES = (1_000, 10_000, 100_000, 1_000_000)
RIVALS_UP_TO = 100_000  # beyond, one B x C matrix is a gigabyte and they hold eight and more
SAMPLED_FROM = 100_000  # below, a tenth of the classes is little more than the batch itself
GOAL_SPEED, GOAL_MB, GOAL_GB = "3; 2.5 without torch.compile", 120, 4
STEPS = {  # optimisers for the memory of a whole training step
    "mettle ArcFace": ("SGD", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "mettle CosFace, sample 0.1": ("AdamW", lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "mettle CosFace, sample 0.1, sparse": ("SparseAdam", lambda p: torch.optim.SparseAdam(p, lr=1e-3)),
}


class PlainTorch(torch.nn.Module):
    """ArcFace as one would write it: the whole matrix, autograd."""

    def __init__(self, count, dim, scale=64.0, margin=0.5):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(count, dim))
        self.scale, self.margin = scale, torch.tensor(margin)

    def forward(self, z, y):
        """The mean over samples."""
        cosine = torch.nn.functional.normalize(z) @ torch.nn.functional.normalize(self.weight).T
        own = cosine.gather(1, y[:, None])
        sine = (1 - own.square()).clamp(min=1e-7).sqrt()
        moved = own * self.margin.cos() - sine * self.margin.sin()
        kept = own - self.margin * self.margin.sin()
        target = torch.where(own > -self.margin.cos(), moved, kept)
        return torch.nn.functional.cross_entropy(self.scale * cosine.scatter(1, y[:, None], target), y)


def pml(count):
    from pytorch_metric_learning.losses import ArcFaceLoss

    return ArcFaceLoss(count, DIM, margin=0.5 * 180 / torch.pi, scale=64)


MAKE = {
    "mettle ArcFace": lambda count: ArcFace(count, DIM),
    "mettle CosFace": lambda count: CosFace(count, DIM),
    "mettle CosFace, sample 0.1": lambda count: CosFace(count, DIM, sample=0.1),
    "mettle CosFace, sample 0.1, sparse": lambda count: CosFace(count, DIM, sample=0.1, sparse=True),
    "plain torch ArcFace": lambda count: PlainTorch(count, DIM),
    "PML ArcFace": pml,
}


def shown(count):
    """The implementations that are run with this many classes."""
    rivals = {"plain torch ArcFace", "PML ArcFace"} if count > RIVALS_UP_TO else set()
    sampled = {name for name in MAKE if "sample" in name} if count < SAMPLED_FROM else set()
    return [name for name in MAKE if name not in rivals | sampled]


def batch(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, DIM, generator=generator), torch.randint(count, (BATCH,), generator=generator)


def vectors(loss):
    """The parameter that holds the class vectors; PML keeps them as columns."""
    return loss.W if hasattr(loss, "W") else loss.weight


def once(loss, z, y):
    loss.zero_grad(set_to_none=True)
    leaf = z.clone().requires_grad_()
    began = time.process_time()
    loss(leaf, y).backward()
    return time.process_time() - began


def rounds(count):
    """Median CPU seconds of each, taken in turns: a machine that slows down slows all of them."""
    z, y = batch(count)
    made = alike(count)
    for loss in made.values():
        once(loss, z, y)
    compare(made, z, y)
    times = [{name: once(loss, z, y) for name, loss in made.items()} for _ in range(9 if count <= 10_000 else 5)]
    return {name: median(t[name] for t in times) for name in made}


@torch.no_grad()
def alike(count):
    """All implementations with the same class vectors, which those that keep them as rows share."""
    torch.manual_seed(0)
    rows = torch.nn.Parameter(torch.randn(count, DIM))
    made = {}
    for name in shown(count):
        loss = made[name] = MAKE[name](count)
        if hasattr(loss, "W"):
            loss.W.copy_(rows.T)
        else:
            loss.weight = rows
    return made


@torch.no_grad()
def compare(made, z, y):
    """Times of different losses would mean nothing."""
    values = {name: float(loss(z, y)) for name, loss in made.items() if name.endswith("ArcFace")}
    for name, value in values.items():
        if abs(value / values["mettle ArcFace"] - 1) > 1e-4:
            sys.exit(f"{name} gives {value}, mettle {values['mettle ArcFace']}: not the same loss")


def memory(kind, name, count):
    """MB, measured in a process of its own."""
    command = [sys.executable, __file__, kind, name, str(count)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_growth(name, count):
    """Peak of forward + backward beyond the class vectors and whatever gradient is left in the end."""
    torch.set_num_threads(1)
    once(MAKE[name](1_000), *batch(1_000))  # whatever is loaded on first use
    loss, (z, y) = MAKE[name](count), batch(count)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = status("VmRSS")
    once(loss, z, y)
    gradient = vectors(loss).grad
    held = gradient._values().nbytes + gradient._indices().nbytes if gradient.is_sparse else gradient.nbytes
    print((status("VmHWM") - before) / 1024 - held / 2**20)


def measure_step(name, count):
    """Peak of a whole process that makes the loss and trains two steps; the second finds the optimiser's state."""
    torch.set_num_threads(1)
    loss, (z, y) = MAKE[name](count), batch(count)
    optimiser = STEPS[name][1](loss.parameters())
    for _ in range(2):
        once(loss, z, y)
        optimiser.step()
    print(status("VmHWM") / 1024)


def main(sizes):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {"time": {}, "memory": {}, "step": {}}
    for count in sizes:
        for name, seconds in rounds(count).items():
            found["time"].setdefault(name, {})[count] = seconds
            print(f"{name:36} C={count:8} {seconds * 1e3:9.1f} ms", flush=True)
        for name in shown(count):
            found["memory"].setdefault(name, {})[count] = memory("--growth", name, count)
    for name in STEPS:
        found["step"][name] = memory("--step", name, sizes[-1])
    text = table(found, sizes)
    print(text)
    if sizes == SIZES:
        (HERE / "classes.json").write_text(json.dumps(found, indent=1))
        picture(found)
        keep("Class vectors on the CPU", "classes.py", text, "![Time and memory against C](classes.png)")


def table(found, sizes):
    times, most = found["time"], max(count for count in sizes if count <= RIVALS_UP_TO)
    lines = [
        f"| CPU ms, one thread, B = {BATCH}, d = {DIM} | " + " | ".join(f"{count:,}" for count in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for name, row in times.items():
        cells = [f"{row[count] * 1e3:.1f}" if count in row else "" for count in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    base, last = times["mettle ArcFace"], sizes[-1]
    lines += ["", f"At C = {most:,}: mettle ArcFace is {times['PML ArcFace'][most] / base[most]:.1f} times as fast as "]
    lines[-1] += f"PML's (goal: {GOAL_SPEED}) and {times['plain torch ArcFace'][most] / base[most]:.1f} times as fast "
    lines[-1] += "as plain torch."
    for name in (name for name in times if "sample" in name):
        ratios = ", ".join(f"{times['mettle CosFace'][c] / s:.1f} at {c:,}" for c, s in times[name].items())
        lines.append(f"{name} against all classes, times as fast: {ratios}.")
    grown = ", ".join(f"{name} {row[most]:.0f} MB" for name, row in found["memory"].items() if most in row)
    lines.append(f"Peak memory beyond class vectors and their gradient at C = {most:,} (goal: {GOAL_MB} MB): {grown}.")
    peaks = ", ".join(f"{name} with {STEPS[name][0]} {mb / 1024:.2f} GB" for name, mb in found["step"].items())
    lines.append(f"Peak of a process that trains with C = {last:,}, everything included (goal: {GOAL_GB} GB): {peaks}.")
    return "\n".join(lines)


def picture(found):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    labels = "CPU ms", "peak memory beyond class vectors\nand their gradient, MB"
    for axis, key, scale, label in zip(figure.subplots(1, 2), ("time", "memory"), (1e3, 1), labels, strict=True):
        for name, row in found[key].items():
            style = "-o" if name.startswith("mettle") else "--s"
            axis.plot(list(row), [max(v * scale, 0.1) for v in row.values()], style, label=name, markersize=4)
        axis.set(xscale="log", yscale="log", xlabel="C, number of classes", ylabel=label)
        axis.set_xticks(SIZES, [f"{count:,}" for count in SIZES])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(HERE / "classes.png", dpi=110)


if __name__ == "__main__":
    if "--growth" in sys.argv:
        measure_growth(sys.argv[-2], int(sys.argv[-1]))
    elif "--step" in sys.argv:
        measure_step(sys.argv[-2], int(sys.argv[-1]))
    else:
        main(SIZES[:2] if "--quick" in sys.argv else SIZES)
