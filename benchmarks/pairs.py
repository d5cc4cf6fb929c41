"""Speed and memory of the pairwise losses on one CPU thread, against pytorch-metric-learning and plain torch.

    python benchmarks/pairs.py            the table and the picture (some minutes)
    python benchmarks/pairs.py --quick    up to N = 2048

Times are process CPU seconds of forward + backward, medians of rounds in which all take turns: read the ratios.
Memory is the growth of peak resident memory in a fresh process per implementation and N. The last table is kept in
RESULTS.md.
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

from mettle.difficulty import Importance, Relative, Threshold
from mettle.losses import InfoNCE, SupCon

HERE = Path(__file__).parent
DIM, EACH = 128, 4
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
MEMORY_AT = (1024, 4096, 8192, 16384)
MEASURED = ("mettle SupCon", "mettle relative (WCL)", "plain torch SupCon", "PML SupCon")


def plain_torch(z, y, temperature=0.1):
    """SupCon as one would write it: the whole matrix, autograd."""
    z = torch.nn.functional.normalize(z)
    x = z @ z.T / temperature
    own = torch.eye(len(z), dtype=torch.bool)
    pos = (y[:, None] == y[None]) & ~own
    log_p = x - torch.logsumexp(x.masked_fill(own, -torch.inf), 1, keepdim=True)
    return (-(log_p * pos).sum(1) / pos.sum(1)).mean()


def pml(name):
    from pytorch_metric_learning import losses

    return {"SupCon": losses.SupConLoss(0.1), "NT-Xent": losses.NTXentLoss(0.5)}[name]


def implementations():
    compiled = torch.compile(plain_torch, dynamic=False)
    second = {}

    def relative(z, y):
        other = second.setdefault(len(z), torch.randn(len(z), DIM, generator=torch.Generator().manual_seed(1)))
        return InfoNCE(0.5, 0.1, Relative())(z, y, biased=other)

    return {
        "mettle SupCon": SupCon(0.1),
        "mettle DA-SupCon": SupCon(0.1, difficulty=Threshold()),
        "mettle debiased (DCL)": InfoNCE(0.5, 0.1),
        "mettle hard (HCL)": InfoNCE(0.5, 0.1, Importance(1.0)),
        "mettle relative (WCL)": relative,
        "plain torch SupCon": plain_torch,
        "torch.compile SupCon": compiled,
        "PML SupCon": pml("SupCon"),
    }


def batch(n, each=EACH):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, DIM, generator=generator)
    y = torch.arange(n)[torch.randperm(n, generator=generator)] // each
    return z, y


def once(loss, z, y):
    leaf = z.clone().requires_grad_()
    began = time.process_time()
    loss(leaf, y).backward()
    return time.process_time() - began


def timed(loss, n, each=EACH):
    z, y = batch(n, each)
    once(loss, z, y)
    return median(once(loss, z, y) for _ in range(3 if n > 4096 else 5))


def memory(name, n):
    """Growth of peak resident memory, MB, in a process of its own."""
    command = [sys.executable, __file__, "--memory", name, str(n)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_memory(name, n):
    torch.set_num_threads(1)
    loss = implementations()[name]
    small = batch(256)
    once(loss, *small)  # whatever is loaded on first use
    z, y = batch(n)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    before = status("VmRSS")
    once(loss, z, y)
    print((status("VmHWM") - before) / 1024)


def main(sizes):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {"time": {}, "memory": {}}
    made = implementations()
    for n in sizes:
        for name, seconds in rounds({k: v for k, v in made.items() if n <= limit(k)}, n).items():
            found["time"].setdefault(name, {})[n] = seconds
            print(f"{name:24} N={n:6} {seconds * 1e3:9.1f} ms", flush=True)
        for name in MEASURED if n in MEMORY_AT else ():
            if n <= limit(name):
                found["memory"].setdefault(name, {})[n] = memory(name, n)
    nt_xent = {"mettle": timed(InfoNCE(0.5), 512, 2), "PML": timed(pml("NT-Xent"), 512, 2)}
    text = table(found, nt_xent, sizes)
    print(text)
    if sizes == SIZES:
        (HERE / "pairs.json").write_text(json.dumps(found, indent=1))
        picture(found)
        keep("PairwiseLoss losses on the CPU", "pairs.py", text, "![Time and memory against N](pairs.png)")


def limit(name):
    """The largest N for which an implementation is run: beyond, rivals take minutes and gigabytes."""
    return 16384 if name.startswith("mettle") else 4096 if "compile" in name else 8192


def rounds(made, n):
    """Median CPU seconds of each, taken in turns: a machine that slows down slows all of them."""
    z, y = batch(n)
    for loss in made.values():
        once(loss, z, y)
    times = [{name: once(loss, z, y) for name, loss in made.items()} for _ in range(9 if n <= 2048 else 3)]
    return {name: median(t[name] for t in times) for name in made}


def table(found, nt_xent, sizes):
    times, most = found["time"], max(n for n in sizes if n <= 8192)
    lines = [
        f"| CPU ms, one thread, d = {DIM} | " + " | ".join(map(str, sizes)) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for name, row in times.items():
        cells = [f"{row[n] * 1e3:.1f}" if n in row else "" for n in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    base, rival = times["mettle SupCon"], times["PML SupCon"]
    lines += ["", f"At N = {most}: mettle SupCon is {rival[most] / base[most]:.1f} times as fast as PML's and "]
    lines[-1] += f"{times['plain torch SupCon'][most] / base[most]:.1f} times as fast as plain torch. "
    for name in ("DA-SupCon", "debiased (DCL)", "hard (HCL)", "relative (WCL)"):
        lines[-1] += f"{name} takes {times[f'mettle {name}'][most] / base[most]:.2f} times SupCon's time. "
    small = [n for n in sizes if n <= 1024]
    ratios = ", ".join(f"{times['plain torch SupCon'][n] / base[n]:.2f} at {n}" for n in small)
    lines.append(f"Small N, plain torch's time over ours: {ratios}.")
    lines.append(f"NT-Xent at N = 512, two per class: {nt_xent['PML'] / nt_xent['mettle']:.0f} times as fast as PML's.")
    grown = ", ".join(f"{name} {row[most]:.0f} MB" for name, row in found["memory"].items())
    lines.append(f"Growth of peak memory at N = {most}: {grown}.")
    return "\n".join(lines)


def picture(found):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axis, key, scale, label in zip(
        figure.subplots(1, 2), ("time", "memory"), (1e3, 1), ("CPU ms", "growth of peak memory, MB"), strict=True
    ):
        for name, row in found[key].items():
            style = "-o" if name.startswith("mettle") else "--s"
            axis.plot(list(row), [max(v * scale, 0.1) for v in row.values()], style, label=name, markersize=4)
        axis.set(xscale="log", yscale="log", xlabel="N", ylabel=label)
        axis.set_xticks(SIZES, [str(n) for n in SIZES])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(HERE / "pairs.png", dpi=110)


if __name__ == "__main__":
    if "--memory" in sys.argv:
        measure_memory(sys.argv[-2], int(sys.argv[-1]))
    else:
        main(SIZES[:3] if "--quick" in sys.argv else SIZES)
