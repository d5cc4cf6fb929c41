"""The fused engine on one GPU, against what the same GPU can do at best and against others, in one run.

    python benchmarks/gpu.py OUT             all rows of the table: OUT/gpu.json, OUT/gpu.png (some minutes)
    python benchmarks/gpu.py OUT --quick     without the rivals and the largest batches
    python benchmarks/gpu.py OUT --draw      the picture again, from OUT/gpu.json
    python benchmarks/gpu.py OUT --tune      times candidates for the table of tile sizes instead

Times are forward + backward from raw embeddings, CUDA events, medians; memory is the peak above the inputs. Rivals:
torch.compile of the plain formula, and pytorch-metric-learning where it can be imported (PYTHONPATH will do).
"""

import json
import multiprocessing
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from mettle.difficulty import Importance, Relative, Threshold
from mettle.losses import InfoNCE, SupCon, Triplet
from mettle.pairs.fused import fused_form
from mettle.pairs.fused.table import Choice, Shape, choice

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


def form_of(loss, z, biased=None):
    return fused_form(loss, loss.difficulty, SimpleNamespace(z=z, ref=None, biased=biased, ids=None))


def mettle(loss, z, y, biased=None, **how):
    """A step of forward + backward."""
    from mettle.pairs.fused.call import fused

    form = form_of(loss, z, biased)

    def step():
        return torch.autograd.grad(fused(form, z, y, biased=biased, **how).mean, z)

    return step


def plain(z, y, temperature=0.1):
    """SupCon as one would write it."""
    z = torch.nn.functional.normalize(z)
    x = z @ z.T / temperature
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)
    pos = (y[:, None] == y[None]) & ~own
    log_p = x - torch.logsumexp(x.masked_fill(own, -torch.inf), 1, keepdim=True)
    return (-(log_p * pos).sum(1) / pos.sum(1)).mean()


def timed(step, most=3.0, least=5):
    """Median milliseconds and peak megabytes above what was there."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    found, began = [], time.time()
    while len(found) < least or (time.time() - began < most and len(found) < 30):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        step()
        b.record()
        b.synchronize()
        found.append(a.elapsed_time(b))
        if time.time() - began > 4 * most:
            break
    return median(found), peak


def ceilings():
    """TFLOP/s of square products, TB/s of a copy."""
    found, n = {}, 8192
    for name, dtype, tf32 in (("fp16", HALF, 0), ("bf16", torch.bfloat16, 0), ("tf32", FULL, 1), ("fp32", FULL, 0)):
        torch.backends.cuda.matmul.allow_tf32 = bool(tf32)
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        found[name] = 2 * n**3 / timed(lambda a=a, b=b: a @ b, 1.0)[0] / 1e9
    torch.backends.cuda.matmul.allow_tf32 = False
    x = torch.empty(2**28, device="cuda")
    y = torch.empty_like(x)
    found["copy TB/s"] = 2 * x.nbytes / timed(lambda: y.copy_(x), 1.0)[0] / 1e9
    return found


def errors(d, mode, n=4096):
    """Relative gradient error against float64."""
    z, y = batch(n, d)
    (a,) = mettle(SUPCON, z, y, mode=mode)()
    exact = z.detach().double().requires_grad_()
    (b,) = torch.autograd.grad(plain(exact, y), exact)
    return float((a - b).norm() / b.norm())


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

    of("torch.compile tf32", torch.compile(plain, dynamic=False), tf32=True)
    torch._dynamo.reset()
    of("torch.compile bf16", torch.compile(plain, dynamic=False), autocast=True)
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
    found = timed(graph.replay, 1.0, 20)[0]
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
    for n, d, dtype in product((1024, 4096), (128,), (FULL, HALF)):
        z, y = batch(n, d, dtype)
        step = mettle(SUPCON, z, y)
        ms, graph, names = timed(step, 1.0)[0], replayed(step), launches(step)
        public = timed(lambda z=z, y=y: torch.autograd.grad(SUPCON(z, y), z), 1.0)[0]
        name = f"SupCon n={n} d={d} {str(dtype)[6:]}"
        table.facts[f"launches {name}"] = names
        goal = "<= 8 launches, not slower than compile; graph <= 0.25 ms" if n == 4096 else "<= 8 launches"
        found = f"{len(names)} launches, {ms:.3f} ms (as SupCon()(z, y) {public:.3f}), graph {graph:.3f} ms"
        met = len(names) <= 8 and (n != 4096 or graph <= 0.25)
        if not quick and dtype == FULL:
            torch.backends.cuda.matmul.allow_tf32 = True
            rival = torch.compile(plain, dynamic=False)
            other = timed(lambda z=z, y=y, rival=rival: torch.autograd.grad(rival(z, y), z), 1.0)[0]
            torch.backends.cuda.matmul.allow_tf32 = False
            torch._dynamo.reset()
            found, met = f"{found}, compile {other:.3f} ms", met and public <= other
        table.row(name, found, goal, met)


def middle(table, quick):
    for d in (128, 512):
        others = {} if quick else rivals(32768, d)
        for name, found in others.items():
            shown = "does not run" if found is None else f"{found[0]:.1f} ms, {found[1] / 1024:.2f} GB"
            table.row(f"{name}, SupCon n=32k d={d}", shown, "")
            if found:
                table.point(32768, d, name, *found)
        for dtype, mode in ((FULL, "split"), (HALF, "half")):
            z, y = batch(32768, d, dtype)
            ms, mb = timed(mettle(SUPCON, z, y))
            kind = "fp32" if mode == "split" else "bf16"
            times, parts, met = {}, [], True
            wanted = {
                (128, "split"): (25, 4), (128, "half"): (40, 6), (512, "split"): (10, 0), (512, "half"): (14, 0),
            }[d, mode]  # fmt: skip
            for rival, least in zip(
                (f"PML {kind}", f"torch.compile {'tf32' if mode == 'split' else kind}"), wanted, strict=True
            ):
                if others.get(rival):
                    times[rival] = others[rival][0] / ms
                    parts.append(f"{times[rival]:.1f}x {rival}")
                    met = met and times[rival] >= least
            error = errors(d, mode)
            parts.append(f"error {error:.1e}")
            met = met and error <= (2e-6 if mode == "split" else 1e-4)
            goal = f">= {wanted[0]}x PML, >= {wanted[1]}x compile, error <= {'2e-6' if mode == 'split' else '1e-4'}"
            table.row(f"SupCon n=32k d={d} {mode}: {ms:.2f} ms, {mb:.0f} MB", ", ".join(parts), goal, met)


def large(table, tops, quick):
    sizes = (32768, 65536) if quick else (8192, 16384, 32768, 65536, 131072)
    for d, n in product((128, 256, 512), sizes):
        for dtype, mode in ((HALF, "half"), (FULL, "split")):
            if mode == "split" and n > 65536:
                continue
            z, y = batch(n, d, dtype)
            ms, mb = timed(mettle(SUPCON, z, y), 1.5)
            table.point(n, d, mode, ms, mb)
            room = 8 * n * d * 4 / 2**20 + 64
            rate = 6 * n * n * d / ms / 1e9
            share = rate / tops["fp16"] * (1 if mode == "half" else 3)
            met = None
            if n >= 65536:
                met = mb <= room and (mode != "half" or share >= 0.7)
            table.row(
                f"SupCon n={n // 1024}k d={d} {mode}",
                f"{ms:.2f} ms, {rate:.0f} TF = {share:.0%}, {mb:.0f} of {room:.0f} MB",
                ">= 70 % of GEMM, <= 8 n d floats + 64 MB",
                met,
            )
            del z, y
            torch.cuda.empty_cache()


def giant(table):
    z, y = batch(1 << 20, 128, HALF)
    ms, mb = timed(mettle(SUPCON, z, y), 3.0, 2)
    table.point(1 << 20, 128, "half", ms, mb)
    met = ms <= 1500 and mb <= 4.5 * 1024
    table.row("SupCon n=1M d=128 half", f"{ms:.0f} ms, {mb / 1024:.2f} GB", "<= 1.5 s, <= 4.5 GB", met)


def variants(table):
    for n, dtype in product((32768,), (HALF, FULL)):
        z, y = batch(n, 128, dtype)
        other = torch.randn(n, 128, device="cuda").to(dtype)
        base = timed(mettle(SUPCON, z, y))[0]
        for name, loss in VARIANTS.items():
            biased = (other, other) if name == "relative" else None
            ms = timed(mettle(loss, z, y, biased))[0]
            most = 2.6 if name == "relative" else 1.35
            case = f"{name} n=32k d=128 {str(dtype)[6:]}"
            table.row(case, f"{ms:.2f} ms = {ms / base:.2f}x SupCon", f"<= {most}x", ms / base <= most)


def hardest(table, quick):
    from mettle.pairs.fused.peak import hardest_rows

    loss, (z, y) = Triplet(0.2, "hardest"), batch(32768, 128)

    def step():
        return torch.autograd.grad(loss.finish(hardest_rows(loss, z, y)).mean(), z)

    ms, mb = timed(step)
    found, met = f"{ms:.2f} ms, {mb:.0f} MB", None
    try:
        from pytorch_metric_learning import losses, miners
    except ImportError:
        quick = True
    if not quick:
        mine, rival = miners.BatchHardMiner(), losses.TripletMarginLoss(0.2)

        def other():
            return torch.autograd.grad(rival(z, y, mine(z, y)), z)

        there = timed(other, 2.0, 3)[0]
        found, met = f"{found}, {there / ms:.1f}x PML fp32", there / ms >= 30
    table.row("batch-hard triplet n=32k d=128 float32", found, ">= 30x PML", met)


def counting(table):
    from mettle.pairs.fused.counts import score_counts, topk

    z, y = batch(100_000, 128)
    z = z.detach()
    ms, mb = timed(lambda: score_counts(z, y), 2.0, 3)
    genuine, impostor = score_counts(z, y)
    pairs = 100_000 * 99_999 // 2
    whole = int(genuine.sum()) + int(impostor.sum()) == pairs and int(genuine.sum()) == 100_000 * 3 // 2
    met = ms < 300 and whole
    table.row("all-pairs score histogram n=100k d=128", f"{ms:.0f} ms, {mb:.0f} MB, complete: {whole}", "< 300 ms", met)
    ms, _ = timed(lambda: topk(z[:50_000], z[:50_000], 10), 1.0, 2)
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

            ms, mb = timed(step, 2.0, 3)
            floor = 8 * b * c * share * d / tops["fp16"] / 1e9
            extra = mb - c * d * 4 / 2**20
            met = ms <= 2 * floor and extra <= 1024 if dtype == HALF and c == 1_000_000 and share == 1 else None
            table.row(
                f"ArcFace B={b} C={c} d={d} {str(dtype)[6:]}" + (f" sample {share}" if share < 1 else ""),
                f"{ms:.2f} ms = {ms / floor:.1f}x the floor, {extra:.0f} MB beyond the gradient",
                "<= 2x, <= 1 GB" if met is not None else "",
                met,
            )
            del loss, z, y
            torch.cuda.empty_cache()


def picture(table, tops):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    kinds = sorted({(p["d"], p["kind"]) for p in table.points if p["kind"] in ("half", "split")})
    for d, kind in kinds:
        found = sorted((p["n"], p["ms"], p["mb"]) for p in table.points if (p["d"], p["kind"]) == (d, kind))
        n, ms, mb = zip(*found, strict=True)
        style = "o-" if kind == "half" else "s--"
        (line,) = left.plot(n, ms, style, label=f"d = {d}, {kind}", markersize=4)
        right.plot(n, mb, style, color=line.get_color(), markersize=4)
        if kind == "half":
            floor = [6 * k * k * d / tops["fp16"] / 1e9 for k in n]
            left.plot(n, floor, ":", color=line.get_color(), linewidth=1)
            right.plot(n, [8 * k * d * 4 / 2**20 + 64 for k in n], ":", color=line.get_color(), linewidth=1)
    others = sorted({p["kind"] for p in table.points} - {"half", "split"})
    for mark, kind in zip("vx^+", others, strict=False):
        found = [p for p in table.points if p["kind"] == kind]
        for axis, key in ((left, "ms"), (right, "mb")):
            axis.plot([p["n"] for p in found], [p[key] for p in found], mark, color="0.35", markersize=6, label=kind)
    for axis, name in ((left, "milliseconds, forward + backward"), (right, "peak MB above the inputs")):
        axis.set(xscale="log", yscale="log", xlabel="batch n", ylabel=name)
        axis.grid(alpha=0.3)
    left.legend(fontsize=7, title="d = 128 and 512 for others", title_fontsize=7)
    left.set_title("SupCon; dotted: 6 n² d at the GEMM rate of the same run", fontsize=8)
    right.set_title("dotted: 8 n d floats + 64 MB", fontsize=8)
    figure.savefig(table.out / "gpu.png", dpi=150)


def candidates(mode, d):
    """Ways of cutting worth a try: (pass, choice)."""
    given = choice(mode, d)
    deep = 64 if d > 256 or (mode == "split" and d > 128) else d
    sizes = ((128, 128, 8), (128, 64, 4), (64, 128, 4), (128, 256, 8)) if mode == "half" else (
        (128, 128, 8), (128, 64, 8), (64, 64, 4))  # fmt: skip
    forward = [
        Shape(m, n, deep, w, s, tma=t, half=given.forward.half)
        for (m, n, w), s, t in product(sizes, (2, 3) if deep == d else (3, 4), (False, True))
    ]
    forward += [replace(given.forward, half=not given.forward.half)]
    forward += [replace(given.forward, flat=True)] if deep < d else []
    found = [("forward", replace(given, forward=shape)) for shape in forward]
    if d <= 256:
        sizes = ((64, 128, 4), (64, 64, 4), (128, 128, 8), (128, 64, 8))
        found += [
            ("backward", Choice(given.forward, Shape(m, n, d, w, s, tma=t), written=False))
            for (m, n, w), s, t in product(sizes, (1, 2) if d > 128 else (2, 3), (False, True))
        ]
    if d >= 256:
        found += [
            ("backward", Choice(given.forward, Shape(128, n, k, 8, s, tma=t), written=True))
            for n, k, s, t in product((128, 256) if mode == "half" else (128,), (64,), (3, 4), (False, True))
        ]
    return found


def tried(job):
    """One candidate: milliseconds, or why not. With few rows it only compiles, in a process of its own."""
    mode, d, which, cut, n = job
    from mettle.pairs.fused.plan import Plan

    try:
        z, y = batch(n, d)
        plan = Plan(form_of(SUPCON, z), y, None, None, mode, cut)
        plan.forward(z.detach(), None)
        one = torch.ones((), device="cuda")

        def step():
            if which == "forward":
                return plan._sums("plain", False)
            return plan.backward(None, one, z, None, True, False)

        step()
        torch.cuda.synchronize()
        return None if n <= 2048 else timed(step, 0.15, 3)[0]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"


def tune(out, workers=14, n=32768):
    """Compile all candidates in parallel, then time them one by one."""
    cases = list(product(("half", "split"), (128, 256, 512)))
    jobs = [(mode, d, *found) for mode, d in cases for found in candidates(mode, d)]
    print(len(jobs), "candidates", flush=True)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        refused = pool.map(tried, [(*job, 1024) for job in jobs], chunksize=1)
    found, lines = [], []
    for job, why in zip(jobs, refused, strict=True):
        ms = why or tried((*job, n))
        if isinstance(ms, float):
            found.append((*job, ms))
        else:
            lines.append(f"refused {job}: {ms}")
    for (mode, d), which in product(cases, ("forward", "backward")):
        mine = sorted((f for f in found if f[:3] == (mode, d, which)), key=lambda f: f[4])
        for f in mine[:5]:
            shape = f[3].forward if which == "forward" else f[3].backward
            rate = n * n * d * (2 if which == "forward" else 4) / f[4] / 1e9
            written = " written" if which == "backward" and f[3].written else ""
            lines.append(f"{mode} d={d} {which}: {f[4]:.3f} ms {rate:.0f} TF {shape}{written}")
            print(lines[-1], flush=True)
    (out / "tune.txt").write_text("\n".join(lines) + "\n")


def main():
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    quick = "--quick" in sys.argv
    if "--tune" in sys.argv:
        tune(out)
        return
    if "--draw" in sys.argv:
        kept = json.loads((out / "gpu.json").read_text())
        picture(SimpleNamespace(points=kept["points"], out=out), kept["facts"]["ceilings"])
        return
    table = Table(out)
    tops = ceilings()
    table.facts |= {"ceilings": tops, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print({name: round(value, 1) for name, value in tops.items()}, flush=True)
    parts = [
        lambda: small(table, quick),
        lambda: middle(table, quick),
        lambda: variants(table),
        lambda: hardest(table, quick),
        lambda: counting(table),
        lambda: classes(table, tops),
        lambda: large(table, tops, quick),
        *([] if quick else [lambda: giant(table)]),
        lambda: picture(table, tops),
    ]
    for part in parts:
        try:
            part()
        except Exception as error:  # one row must not cost the others
            print(f"failed: {type(error).__name__}: {str(error)[:500]}", flush=True)
        torch.cuda.empty_cache()
    table.write()


if __name__ == "__main__":
    main()
