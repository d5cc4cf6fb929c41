"""The fused engine on one GPU, against what the same GPU can do at best and against others, in one run.

    python benchmarks/gpu.py OUT             all rows of the table: OUT/gpu.json, OUT/gpu.png (some minutes)
    python benchmarks/gpu.py OUT --quick     without the rivals and the largest batches
    python benchmarks/gpu.py OUT --draw      the picture again, from OUT/gpu.json
    python benchmarks/gpu.py OUT small ...   these parts only (small, middle, variants, hardest, counting, classes, ...)

Times are forward + backward from raw embeddings, CUDA events, medians, of steps back to back, as in training, where the
queue of a GPU is never empty; in brackets those of single steps, each waited for. Memory is the peak above the inputs.
Rivals: torch.compile of the formula in two ways of writing it, and pytorch-metric-learning where it can be imported
(PYTHONPATH will do). `tiles.py` times candidates for the table of tile sizes.
"""

import json
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple

import torch

from mettle.difficulty import Importance, Relative, Threshold
from mettle.losses import InfoNCE, SupCon, Triplet
from mettle.pairs.kernels import lower_loss

SUPCON = SupCon(0.1)
VARIANTS = {
    "DA-SupCon": SupCon(0.1, difficulty=Threshold()),
    "InfoNCE": InfoNCE(0.5),
    "debiased": InfoNCE(0.5, 0.1),
    "hard": InfoNCE(0.5, 0.1, Importance(1.0)),
    "relative": InfoNCE(0.5, 0.1, Relative()),
}
HALF, FULL = torch.float16, torch.float32


def batch(n, d, dtype=FULL, each=4):
    generator = torch.Generator("cuda").manual_seed(0)
    z = torch.randn(n, d, generator=generator, device="cuda").to(dtype)
    y = torch.arange(n, device="cuda")[torch.randperm(n, generator=generator, device="cuda")] // each
    return z.requires_grad_(), y


def lower(loss, z, biased=None):
    return lower_loss(loss, loss.difficulty, SimpleNamespace(z=z, ref=None, biased=biased, self_column=None))


def mettle(loss, z, y, biased=None, **how):
    """A step of forward + backward."""
    from mettle.pairs.kernels.function import evaluate_spec

    spec = lower(loss, z, biased)

    def step():
        return torch.autograd.grad(evaluate_spec(spec, z, y, biased=biased, **how).mean, z)

    return step


def plain(z, y, temperature=0.1):
    """SupCon in the leanest way to write it: what a compiler can melt into few passes."""
    z = torch.nn.functional.normalize(z)
    x = z @ z.T / temperature
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)
    pos = (y[:, None] == y[None]) & ~own
    log_p = x - torch.logsumexp(x.masked_fill(own, -torch.inf), 1, keepdim=True)
    return (-(log_p * pos).sum(1) / pos.sum(1)).mean()


def published(z, y, temperature=0.1):
    """SupCon in the manner of its authors' program: float masks, everyone but oneself by a scatter, a maximum off."""
    z = torch.nn.functional.normalize(z)
    x = z @ z.T / temperature
    x = x - x.max(1, keepdim=True).values.detach()
    pos = torch.eq(y[:, None], y[None]).float()
    others = torch.ones_like(pos).scatter(1, torch.arange(len(z), device=z.device)[:, None], 0)
    pos = pos * others
    log_p = x - (x.exp() * others).sum(1, keepdim=True).log()
    return -((pos * log_p).sum(1) / pos.sum(1)).mean()


def experienced(formula):
    """Compiled as torch does it by itself once it has seen batches of several sizes: for any size."""
    rival = torch.compile(formula)
    for n in (1000, 2000):
        rival(*batch(n, 128)).backward()
    return rival


class Time(NamedTuple):
    """Median milliseconds of steps back to back and of single ones, and peak megabytes above what was there."""

    ms: float
    single: float
    mb: float

    def __str__(self):
        return f"{self.ms:.2f} ms ({self.single:.2f})"


def timed(step, most=3.0, least=5):
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    alone = spans(step, most / 2, least, wait=True)
    return Time(spans(step, most / 2, least, wait=False), alone, peak)


def spans(step, most, least, wait):
    """Median milliseconds; ``wait``: the GPU is idle before each step."""
    began = time.time()
    step()
    torch.cuda.synchronize()
    count = max(least, min(50, int(most / max(time.time() - began, 1e-6))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    for a, b in zip(marks[::2], marks[1::2], strict=True):
        a.record()
        step()
        b.record()
        if wait:
            b.synchronize()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2], strict=True))


def ceilings():
    """TFLOP/s of square products, TB/s of a copy."""
    found, n = {}, 8192
    for name, dtype, tf32 in (("fp16", HALF, 0), ("bf16", torch.bfloat16, 0), ("tf32", FULL, 1), ("fp32", FULL, 0)):
        torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        square = timed(lambda a=a, b=b: a @ b, 1.0)  # alone it is faster: back to back a GPU warms up and slows down
        found[name] = 2 * n**3 / min(square.ms, square.single) / 1e9
    torch.backends.cuda.matmul.allow_tf32 = False
    x = torch.empty(2**28, device="cuda")
    y = torch.empty_like(x)
    found["copy TB/s"] = 2 * x.nbytes / timed(lambda: y.copy_(x), 1.0).ms / 1e9
    return found


def exactly(z, y, temperature=0.1, rows=2048):
    """SupCon's gradient in float64, some anchors at a time."""
    z = z.detach().double().requires_grad_()
    unit = torch.nn.functional.normalize(z)
    found = torch.zeros_like(z)
    for first in range(0, len(z), rows):
        leaf = unit.detach().clone().requires_grad_()
        x = leaf[first : first + rows] @ leaf.T / temperature
        at = torch.arange(first, first + len(x), device=z.device)
        own = at[:, None] == torch.arange(len(z), device=z.device)
        pos = (y[at, None] == y[None]) & ~own
        log_p = x - torch.logsumexp(x.masked_fill(own, -torch.inf), 1, keepdim=True)
        found += torch.autograd.grad((-(log_p * pos).sum(1) / pos.sum(1)).sum() / len(z), leaf)[0]
    return torch.autograd.grad(unit, z, found)[0]


def error(z, y, precision):
    """Relative gradient error against float64."""
    (found,), exact = mettle(SUPCON, z, y, precision=precision)(), exactly(z, y)
    return float((found - exact).norm() / exact.norm())


def rivals(n, d, most=2.0):
    """Milliseconds and megabytes of others; None where they cannot run."""
    found = {}
    z, y = batch(n, d)

    def of(name, loss, tf32=False, autocast=False):
        def step():
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                value = loss(z, y)
            return torch.autograd.grad(value, z)

        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            found[name] = timed(step, most, 3)
        except torch.OutOfMemoryError:
            found[name] = None
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            found[name] = None
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.cuda.empty_cache()

    kinds = (("tf32", {"tf32": True}), ("bf16", {"autocast": True}))
    for (name, formula), (kind, how) in product((("published", published), ("leanest", plain)), kinds):
        of(f"torch.compile {kind}, {name}", torch.compile(formula, dynamic=False), **how)
        torch._dynamo.reset()
    for kind, how in kinds if d == 128 else ():  # behind the others: what it has learned of sizes stays
        of(f"torch.compile {kind}, any size", experienced(published), **how)
        torch._dynamo.reset()
    try:
        from pytorch_metric_learning import losses
    except ImportError:
        print("pytorch-metric-learning is not importable: its rows are left out")
        return found
    of("PML fp32", losses.SupConLoss(0.1))
    of("PML bf16", losses.SupConLoss(0.1), autocast=True)
    return found


def launches(step):
    """Kernels of one step."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kinds = torch.autograd.DeviceType.CUDA
    return [event.name for event in seen.events() if event.device_type == kinds]


def replayed(step):
    """Milliseconds of a captured graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    found = timed(graph.replay, 1.0, 20).ms
    del kept
    return found


class Table:
    """Rows as they come: printed, kept, written."""

    def __init__(self, out):
        self.out, self.rows, self.points, self.facts = out, [], [], {}

    def row(self, case, found, goal, met=None):
        """One line; ``met`` says whether the goal is."""
        self.rows.append({"case": case, "found": found, "goal": goal, "met": met})
        mark = "" if met is None else "met   " if met else "MISSED"
        print(f"{mark:7s}{case:62s} {found:42s} {goal}", flush=True)
        self.write()

    def point(self, n, d, kind, ms, mb):
        """For the picture."""
        self.points.append({"n": n, "d": d, "kind": kind, "ms": ms, "mb": mb})

    def write(self):
        """All that there is so far."""
        kept = {"facts": self.facts, "rows": self.rows, "points": self.points}
        (self.out / "gpu.json").write_text(json.dumps(kept, indent=1))


def small(table, quick):
    for n, d, dtype in product((1024, 2048, 4096), (128,), (FULL, HALF)):
        z, y = batch(n, d, dtype)
        step = mettle(SUPCON, z, y)
        graph, names = replayed(step), launches(step)
        name = f"SupCon n={n} d={d} {str(dtype)[6:]}"
        table.facts[f"launches {name}"] = names
        found, met = f"{len(names)} launches, graph {graph:.3f} ms", len(names) <= 8 and (n != 4096 or graph <= 0.25)
        if not quick:
            ours, other, wins = beside(z, y, tf32=dtype == FULL)
            found = f"{found}, SupCon()(z, y) {ours:.2f} ms, torch.compile {other:.2f} ms, faster in {wins} rounds"
            met = met and ours <= other
        goal = "<= 8 launches, not slower than compile" + ("; graph <= 0.25 ms" if n == 4096 else "")
        table.row(name, found, goal, met)


def beside(z, y, tf32, rounds=9):
    """Steps of the public loss and of torch.compile in turns, because a host's speed wanders: medians, and who won."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    rival = torch.compile(plain, dynamic=False)
    steps = [lambda: torch.autograd.grad(SUPCON(z, y), z), lambda: torch.autograd.grad(rival(z, y), z)]
    for step in steps:
        for _ in range(5):
            step()
    found = [[spans(step, 0.1, 30, wait=False) for step in steps] for _ in range(rounds)]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    ours, theirs = (median(column) for column in zip(*found, strict=True))
    return ours, theirs, f"{sum(a <= b for a, b in found)} of {rounds}"


WANTED = {(128, "bf16x3"): (25, 4), (128, "fp16"): (40, 6), (512, "bf16x3"): (10, 0), (512, "fp16"): (14, 0)}


def middle(table, quick):
    for d in (128, 512):
        others = {} if quick else rivals(32768, d)
        for name, found in others.items():
            shown = "does not run" if found is None else f"{found}, {found.mb / 1024:.2f} GB"
            table.row(f"{name}, SupCon n=32k d={d}", shown, "")
            if found:
                table.point(32768, d, name, found.ms, found.mb)
        for dtype, precision in ((FULL, "bf16x3"), (HALF, "fp16")):
            z, y = batch(32768, d, dtype)
            ours = timed(mettle(SUPCON, z, y))
            many, times = WANTED[d, precision]
            kinds = ("fp32", "tf32") if precision == "bf16x3" else ("bf16", "bf16")
            goals = {  # set where torch.compile took batches of any size: 18.9 ms in tf32, 14.9 in bf16
                f"PML {kinds[0]}": many, f"torch.compile {kinds[1]}, any size": times,
                f"torch.compile {kinds[1]}, published": 0, f"torch.compile {kinds[1]}, leanest": 0,
            }  # fmt: skip
            ratios = {name: others[name].ms / ours.ms for name in goals if others.get(name)}
            wrong, most = error(batch(32768, d)[0], y, precision), 2e-6 if precision == "bf16x3" else 1e-4
            met = wrong <= most and all(ratio >= goals[name] for name, ratio in ratios.items())
            met = met if all(name in ratios for name, least in goals.items() if least) else None
            parts = [f"{ratio:.1f}x {name}" for name, ratio in ratios.items()] + [f"error {wrong:.1e}"]
            goal = f">= {many}x PML, " + (f">= {times}x compile, " if times else "") + f"error <= {most:.0e}"
            table.row(f"SupCon n=32k d={d} {precision}: {ours}, {ours.mb:.0f} MB", ", ".join(parts), goal, met)


def odd(table, tops):
    """Batches as they come, not of a power of two."""
    for n, (dtype, precision) in product((6000, 9001, 17000, 24000, 40001, 50000), ((HALF, "fp16"), (FULL, "bf16x3"))):
        z, y = batch(n, 128, dtype)
        ours = timed(mettle(SUPCON, z, y), 0.6)
        rate = 6 * n * n * 128 / ours.ms / 1e9
        share = rate / tops["fp16"] * (1 if precision == "fp16" else 3)
        table.row(f"SupCon n={n} d=128 {precision}", f"{ours}, {rate:.0f} TF = {share:.0%}, {ours.mb:.0f} MB", "")


def common(table):
    """Errors where all embeddings have much in common: what positives and negatives send is nearly the same then."""
    for n, d, cosine in product((32768,), (128, 256, 512), (0.0, 0.5, 0.9)):
        z, y = batch(n, d)
        size = (cosine / (1 - cosine)) ** 0.5
        z = (z.detach() + size * torch.randn(1, d, device="cuda")).requires_grad_()
        found = ", ".join(f"{precision} {error(z, y, precision):.1e}" for precision in ("bf16x3", "fp16"))
        table.row(f"gradient error n=32k d={d}, cosines around {cosine}", found, "")


def large(table, tops, quick):
    sizes = (32768, 65536) if quick else (8192, 16384, 32768, 65536, 131072)
    for d, n in product((128, 256, 512), sizes):
        for dtype, precision in ((HALF, "fp16"), (FULL, "bf16x3")):
            if precision == "bf16x3" and n > 65536:
                continue
            z, y = batch(n, d, dtype)
            ours = timed(mettle(SUPCON, z, y), 1.0)
            mb = ours.mb
            table.point(n, d, precision, ours.ms, mb)
            room = 8 * n * d * 4 / 2**20 + 64
            rate = 6 * n * n * d / ours.ms / 1e9
            share = rate / tops["fp16"] * (1 if precision == "fp16" else 3)
            met = None
            if n >= 65536:
                met = mb <= room and (precision != "fp16" or share >= 0.7)
            table.row(
                f"SupCon n={n // 1024}k d={d} {precision}",
                f"{ours}, {rate:.0f} TF = {share:.0%}, {mb:.0f} of {room:.0f} MB",
                ">= 70 % of GEMM, <= 8 n d floats + 64 MB",
                met,
            )
            del z, y
            torch.cuda.empty_cache()


def giant(table):
    z, y = batch(1 << 20, 128, HALF)
    ms, _, mb = timed(mettle(SUPCON, z, y), 3.0, 2)
    table.point(1 << 20, 128, "fp16", ms, mb)
    met = ms <= 1500 and mb <= 4.5 * 1024
    table.row("SupCon n=1M d=128 half", f"{ms:.0f} ms, {mb / 1024:.2f} GB", "<= 1.5 s, <= 4.5 GB", met)


def variants(table):
    for n, dtype in product((32768,), (HALF, FULL)):
        z, y = batch(n, 128, dtype)
        other = torch.randn(n, 128, device="cuda").to(dtype)
        base = timed(mettle(SUPCON, z, y))
        for name, loss in VARIANTS.items():
            biased = (other, other) if name == "relative" else None
            ours = timed(mettle(loss, z, y, biased))
            most, ratio = 2.6 if name == "relative" else 1.35, ours.ms / base.ms
            case = f"{name} n=32k d=128 {str(dtype)[6:]}"
            found = f"{ours} = {ratio:.2f}x SupCon ({ours.single / base.single:.2f}x)"
            table.row(case, found, f"<= {most}x", ratio <= most)


def hardest(table, quick):
    from mettle.pairs.kernels.mining import batch_hard_rows

    loss, (z, y) = Triplet(0.2, "hardest"), batch(32768, 128)

    def step():
        return torch.autograd.grad(loss.row_loss(batch_hard_rows(loss, z, y)).mean(), z)

    ours = timed(step)
    ms, met = ours.ms, None
    found = f"{ours}, {ours.mb:.0f} MB"
    try:
        from pytorch_metric_learning import losses, miners
    except ImportError:
        quick = True
    if not quick:
        mine, rival = miners.BatchHardMiner(), losses.TripletMarginLoss(0.2)

        def other():
            return torch.autograd.grad(rival(z, y, mine(z, y)), z)

        there = timed(other, 2.0, 3).ms
        found, met = f"{found}, {there / ms:.1f}x PML fp32", there / ms >= 30
    table.row("batch-hard triplet n=32k d=128 float32", found, ">= 30x PML", met)


def counting(table):
    from mettle.pairs.kernels.histograms import score_histogram
    from mettle.pairs.similarity import topk

    z, y = batch(100_000, 128)
    z = z.detach()
    ms, _, mb = timed(lambda: score_histogram(z, y), 2.0, 3)
    genuine, impostor = score_histogram(z, y)
    pairs = 100_000 * 99_999 // 2
    whole = int(genuine.sum()) + int(impostor.sum()) == pairs and int(genuine.sum()) == 100_000 * 3 // 2
    met = ms < 300 and whole
    table.row("all-pairs score histogram n=100k d=128", f"{ms:.0f} ms, {mb:.0f} MB, complete: {whole}", "< 300 ms", met)
    ms = timed(lambda: topk(z[:50_000], z[:50_000], 10), 1.0, 2).ms
    table.row("10 neighbours n=50k d=128", f"{ms:.0f} ms", "")


def classes(table, tops):
    from mettle.losses import ArcFace

    for b, c, d, share in ((1024, 100_000, 512, 1.0), (1024, 1_000_000, 512, 1.0), (1024, 1_000_000, 512, 0.1)):
        for dtype in (HALF, FULL):
            loss = ArcFace(c, d, sample=share).to("cuda")
            z = torch.randn(b, d, device="cuda", dtype=dtype, requires_grad=True)
            y = torch.randint(0, c, (b,), device="cuda")

            def step(loss=loss, z=z, y=y):
                return torch.autograd.grad(loss(z, y), (z, loss.weight))

            ours = timed(step, 2.0, 3)
            ms, mb = ours.ms, ours.mb
            floor = 8 * b * c * share * d / tops["fp16"] / 1e9
            extra = mb - c * d * 4 / 2**20
            met = ms <= 2 * floor and extra <= 1024 if dtype == HALF and c == 1_000_000 and share == 1 else None
            table.row(
                f"ArcFace B={b} C={c} d={d} {str(dtype)[6:]}" + (f" sample {share}" if share < 1 else ""),
                f"{ours} = {ms / floor:.2f}x the floor, {extra:.0f} MB beyond the gradient",
                "<= 2x, <= 1 GB" if met is not None else "",
                met,
            )
            del loss, z, y
            torch.cuda.empty_cache()


def picture(table, tops):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), constrained_layout=True)
    kinds = sorted({(p["d"], p["kind"]) for p in table.points if p["kind"] in ("fp16", "bf16x3")})
    for d, kind in kinds:
        found = sorted((p["n"], p["ms"], p["mb"]) for p in table.points if (p["d"], p["kind"]) == (d, kind))
        n, ms, mb = zip(*found, strict=True)
        style = "o-" if kind == "fp16" else "s--"
        (line,) = left.plot(n, ms, style, label=f"d = {d}, {kind}", markersize=4)
        right.plot(n, mb, style, color=line.get_color(), markersize=4)
        if kind == "fp16":
            floor = [6 * k * k * d / tops["fp16"] / 1e9 for k in n]
            left.plot(n, floor, ":", color=line.get_color(), linewidth=1)
            right.plot(n, [8 * k * d * 4 / 2**20 + 64 for k in n], ":", color=line.get_color(), linewidth=1)
    others = sorted({p["kind"] for p in table.points} - {"fp16", "bf16x3"})
    for mark, kind in zip("vx^+*Dsp1P", others, strict=False):
        found = [p for p in table.points if p["kind"] == kind]
        for axis, key in ((left, "ms"), (right, "mb")):
            axis.plot([p["n"] for p in found], [p[key] for p in found], mark, color="0.35", markersize=6, label=kind)
    for axis, name in ((left, "milliseconds, forward + backward"), (right, "peak MB above the inputs")):
        axis.set(xscale="log", yscale="log", xlabel="batch n", ylabel=name)
        axis.grid(alpha=0.3)
    names = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    figure.legend(names.values(), names, loc="outside right center", fontsize=7, title="others: d = 128 and 512",
                  title_fontsize=7)  # fmt: skip
    left.set_title("SupCon; dotted: 6 n² d at the GEMM rate of the same run", fontsize=8)
    right.set_title("dotted: 8 n d floats + 64 MB", fontsize=8)
    figure.savefig(table.out / "gpu.png", dpi=150)


def main():
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    quick = "--quick" in sys.argv
    if "--draw" in sys.argv:
        kept = json.loads((out / "gpu.json").read_text())
        picture(SimpleNamespace(points=kept["points"], out=out), kept["facts"]["ceilings"])
        return
    table = Table(out)
    tops = ceilings()
    table.facts |= {"ceilings": tops, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print({name: round(value, 1) for name, value in tops.items()}, flush=True)
    parts = {
        "small": lambda: small(table, quick),
        "middle": lambda: middle(table, quick),
        "variants": lambda: variants(table),
        "hardest": lambda: hardest(table, quick),
        "counting": lambda: counting(table),
        "classes": lambda: classes(table, tops),
        "odd": lambda: odd(table, tops),
        "common": lambda: None if quick else common(table),
        "large": lambda: large(table, tops, quick),
        "giant": lambda: None if quick else giant(table),
        "picture": lambda: picture(table, tops),
    }
    wanted = [word for word in sys.argv[2:] if word in parts] or list(parts)
    for name in wanted:
        try:
            parts[name]()
        except Exception as error:  # one row must not cost the others
            print(f"failed: {type(error).__name__}: {str(error)[:500]}", flush=True)
        torch.cuda.empty_cache()
    table.write()


if __name__ == "__main__":
    main()
