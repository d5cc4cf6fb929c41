"""How fast people are found among many, what is lost by it, and how much memory and start-up it costs; on two threads.

    python benchmarks/gallery.py            100,000 x 512, and 1,000,000 x 128 in a process of its own (some minutes)
    python benchmarks/gallery.py --quick    10,000 x 512, and 50,000 x 128
    python benchmarks/gallery.py --index    only what needs no gallery on disk

Naive search is NumPy: all similarities of a probe and a full sort. Everything is timed in turns in one process, as
wall-clock medians: read the ratios. People are drawn as trained embeddings look: directions of falling variance,
cosines of about 0.6 ± 0.1 with oneself and 0 ± 0.07 with others; probes are new pictures of enrolled people. Recall is
the share of the exact ten best that come out, TAR lost is the share of probes that exact search accepts at FAR 1e-3 and
the index does not. The last table is kept in RESULTS.md, the picture in gallery.png.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")

import numpy as np

from mettle.gallery.index.approximate import KINDS, ApproximateIndex
from mettle.gallery.index.exact import ExactIndex
from mettle.gallery.index.selection import IndexSpec, build_index

HERE = Path(__file__).parent
K, BATCH = 10, 64
DECAY, SPREAD = 0.3, 0.8


def unit(x):
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x


def people(identities, each, dim, probes, seed=0):
    """Templates (identities x each, dim), whose they are, probes (p, dim), and whose those are."""
    rng = np.random.default_rng(seed)
    spectrum = ((1 + np.arange(dim)) ** -DECAY).astype(np.float32)

    def directions(n):
        return unit(rng.standard_normal((n, dim), dtype=np.float32) * spectrum)

    def pictures(whose):
        spread = np.float32(SPREAD) * rng.uniform(0.5, 1.5, (len(whose), 1)).astype(np.float32)
        return unit(centre[whose] + spread * directions(len(whose)))

    centre = directions(identities)
    labels, asked = np.repeat(np.arange(identities), each), rng.integers(identities, size=probes)
    return pictures(labels), labels, pictures(asked), asked


def naive(templates, probe):
    scores = templates @ probe
    best = np.argsort(-scores)[:K]
    return scores[best], best


def milliseconds(task, clock=time.perf_counter):
    began = clock()
    value = task()
    return 1e3 * (clock() - began), value


def in_turns(tasks, rounds):
    """All wall-clock times of each task, in ms, taken in turns; the first round warms up."""
    times = {name: [] for name in tasks}
    for turn in range(rounds + 1):
        for name, task in tasks.items():
            spent = milliseconds(lambda task=task, turn=turn: task(turn))[0]
            if turn:
                times[name].append(spent)
    return {name: np.asarray(values) for name, values in times.items()}


def singles(index, probes, clock=time.perf_counter):
    """Wall-clock (or CPU) ms of each probe alone; one probe runs in one thread."""
    index.search(probes[:1], K)
    return np.asarray([milliseconds(lambda q=q: index.search(q[None], K), clock)[0] for q in probes])


def changes(index, x):
    """Median ms of adding one template, and of removing it."""
    fresh, numbers = unit(x[:20] + x[20:40]), np.arange(20) + 10**9
    add = [milliseconds(lambda i=i: index.add(numbers[i : i + 1], fresh[i : i + 1]))[0] for i in range(20)]
    remove = [milliseconds(lambda i=i: index.remove(numbers[i : i + 1]))[0] for i in range(20)]
    return float(np.median(add)), float(np.median(remove))


def judged(index, truth, exact_scores, probes, asked, labels, threshold):
    """Recall@1 and @10 and the loss in TAR of an index whose numbers are rows."""
    scores, numbers = index.search(probes, K)
    first = float((numbers[:, 0] == truth[:, 0]).mean())
    tenth = float((numbers[:, :, None] == truth[:, None, :]).any(1).mean())

    def accepted(scores, numbers):
        return ((labels[np.maximum(numbers, 0)] == asked[:, None]) & (numbers >= 0) & (scores >= threshold)).any(1)

    lost = accepted(exact_scores, truth) & ~accepted(scores, numbers)
    return {
        "recall_1": first,
        "recall_10": tenth,
        "tar": float(accepted(exact_scores, truth).mean()),
        "tar_lost": float(lost.mean()),
    }


def threshold_of(templates, labels, probes, asked):
    some = slice(0, None, max(1, len(labels) // 20_000))
    impostors = np.sort((probes[:300] @ templates[some].T)[asked[:300, None] != labels[some]])
    return float(impostors[-max(1, len(impostors) // 1000)])


def at_size(identities, each, dim, rounds, probes=1000):
    """Naive, exact and the chosen approximate index, in turns."""
    x, labels, p, asked = people(identities, each, dim, probes)
    size, numbers = len(x), np.arange(len(x))
    exact = ExactIndex(dim)
    exact.add(numbers, x)
    began = time.perf_counter()
    built = build_index(x, numbers, IndexSpec(kind="auto" if size >= 100_000 else "scan"), labels=labels)
    built_s = time.perf_counter() - began
    index = built.index
    block = p[:BATCH]

    def one(search):
        return lambda turn: [search(p[(turn * 7 + i) % probes]) for i in range(8)]

    times = in_turns(
        {
            "naive": one(lambda q: naive(x, q)),
            "exact, one": one(lambda q: exact.search(q[None], K)),
            "exact, batch": lambda _: exact.search(block, K),
            "chosen, batch": lambda _: index.search(block, K),
            "naive, batched similarity": lambda _: np.argsort(-(block @ x.T), axis=1)[:, :K],
        },
        rounds,
    )
    per = {name: float(np.median(t)) / (8 if name in ("naive", "exact, one") else BATCH) for name, t in times.items()}
    single, cpu = singles(index, p), singles(index, p, time.thread_time)
    alone = float(np.median(np.asarray([milliseconds(lambda q=q: naive(x, q))[0] for q in p[:40]])))
    scores, truth = exact.search(p, K)
    found = [naive(x, q) for q in block]
    assert np.abs(scores[:BATCH] - np.stack([s for s, _ in found])).max() < 1e-6
    differ = truth[:BATCH] != np.stack([who for _, who in found])
    assert np.abs(np.diff(scores, axis=1)[:BATCH][differ[:, 1:]]).max(initial=0) < 1e-6 or not differ.any()
    return {
        "size": size,
        "dim": dim,
        "identities": identities,
        "kind": index.kind,
        "build_s": built_s,
        "measured": str(built.measured),
        "per_probe_ms": per | {"naive, alone": alone},
        "exact_batch_ratio": per["naive"] / per["exact, batch"],
        "exact_single_ratio": per["naive"] / per["exact, one"],
        "p50": float(np.median(single)),
        "p99": float(np.quantile(single, 0.99)),
        "cpu_p50": float(np.median(cpu)),
        "cpu_p99": float(np.quantile(cpu, 0.99)),
        "approximate_ratio": min(alone, per["naive"]) / float(np.median(single)),
        "approximate_batch_ratio": per["naive"] / per["chosen, batch"],
    } | judged(index, truth, scores, p, asked, labels, threshold_of(x, labels, p, asked))


def kinds(identities, each, dim, probes=500):
    """Every kind at one size: time to build, time of a probe, recall, memory."""
    x, labels, p, asked = people(identities, each, dim, probes)
    exact = ExactIndex(dim)
    exact.add(np.arange(len(x)), x)
    scores, truth = exact.search(p, K)
    threshold, table = threshold_of(x, labels, p, asked), {}
    for kind in ["exact", *KINDS]:
        began = time.perf_counter()
        base = exact if kind == "exact" else ApproximateIndex.build(kind, np.arange(len(x)), x)
        spent = time.perf_counter() - began
        for index in [base] if kind == "exact" else [base.with_params(effort) for effort in KINDS[kind].ladder]:
            found = judged(index, truth, scores, p, asked, labels, threshold)
            if found["recall_10"] >= 0.99:
                break
        size = index.bytes / 1e6  # before it grows
        times, (adding, removing) = singles(index, p[: 50 if kind == "exact" else 300]), changes(index, x)
        table[kind] = found | {
            "build_s": spent,
            "p50": float(np.median(times)),
            "p99": float(np.quantile(times, 0.99)),
            "mb": size,
            "add_ms": adding,
            "remove_ms": removing,
        }
    return table


def memory(key):
    """A line of /proc/self/status, in MB; here because benchmarks/record.py brings torch with it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1000


def measure_large(size, dim=128):
    """A compressed index in a process that holds nothing else: memory while it is built and while it is searched."""
    x, labels, p, _ = people(size // 2, 2, dim, 500)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    began = time.perf_counter()
    built = build_index(x, np.arange(size), IndexSpec(memory_mb=1000, latency_ms=1), labels=labels)
    spent, built_peak = time.perf_counter() - began, memory("VmHWM")
    scores, truth = exact_best(x, p)
    del x, labels
    index = built.index
    Path("/proc/self/clear_refs").write_text("5")
    times = singles(index, p)
    found, numbers = index.search(p, K)
    print(
        json.dumps(
            {
                "size": size,
                "dim": dim,
                "kind": index.kind,
                "build_s": spent,
                "index_mb": index.bytes / 1e6,
                "rss_mb": memory("VmRSS"),
                "search_peak_mb": memory("VmHWM"),
                "build_peak_mb": built_peak,
                "p50": float(np.median(times)),
                "p99": float(np.quantile(times, 0.99)),
                "recall_1": float((numbers[:, 0] == truth[:, 0]).mean()),
                "recall_10": float((numbers[:, :, None] == truth[:, None, :]).any(1).mean()),
                "score_error": float(np.abs(found[:, 0] - scores[:, 0])[numbers[:, 0] == truth[:, 0]].max()),
            }
        )
    )


def exact_best(x, probes):
    """The ten best of all rows, in plain NumPy and little memory."""
    scores, rows = [], []
    for probe in probes:
        all_of = x @ probe
        best = np.argpartition(all_of, len(x) - K)[-K:]
        best = best[np.argsort(-all_of[best])]
        rows.append(best)
        scores.append(all_of[best])
    return np.stack(scores), np.stack(rows)


def child(*arguments):
    command = [sys.executable, __file__, *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def through_gallery(identities, dim, probes=1000):
    """The library as users call it: time of an identification, what it adds to Faiss, and the start after a kill."""
    from mettle import Gallery

    x, _, p, asked = people(identities, 1, dim, probes)
    folder = Path(tempfile.mkdtemp(prefix="gallery-"))
    place = folder / "people.mettle"
    try:
        gallery = Gallery.open(place, dim=dim, wanted=IndexSpec(kind="scan"))
        began = time.perf_counter()
        gallery.enrol_many((f"person {i}", vector[None]) for i, vector in enumerate(x))
        enrolled = time.perf_counter() - began
        began = time.perf_counter()
        measured = gallery.reindex()
        indexed = time.perf_counter() - began
        index = gallery._search.index
        bare = index.engine
        length, reach = index.effort.shortlist, index.effort.reach
        names, times = [], {"bare": [], "index": [], "gallery": []}
        for q in p:
            times["bare"].append(milliseconds(lambda q=q: bare.shortlist(q[None], length, reach))[0])
            times["index"].append(milliseconds(lambda q=q: index.search(q[None], K))[0])
            spent, answer = milliseconds(lambda q=q: gallery.identify(q, k=5, threshold=0.3))
            times["gallery"].append(spent)
            names.append(answer.candidates[0].identity)
        adding = [
            milliseconds(lambda i=i: gallery.enrol(f"late {i}", p[i]))[0]
            + milliseconds(lambda i=i: gallery.identify(p[i], k=1, threshold=0.3))[0]
            for i in range(20)
        ]
        assert gallery.identify(p[3], k=1, threshold=0.3).match == "late 3"
        gallery.close()
        ready = child("--open", place)
        assert ready["identities"] == identities + 20
        killed = killed_and_opened(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {name: float(np.median(t)) for name, t in times.items()}
    right = np.mean([name == f"person {i}" for name, i in zip(names, asked, strict=True)])
    return {
        "identities": identities,
        "dim": dim,
        "kind": index.kind,
        "measured": str(measured),
        "enrol_s": enrolled,
        "reindex_s": indexed,
        "bare_p50": found["bare"],
        "index_p50": found["index"],
        "p50": found["gallery"],
        "p99": float(np.quantile(times["gallery"], 0.99)),
        "overhead_ms": found["gallery"] - found["bare"],
        "rank_1": float(right),
        "enrol_and_find_ms": float(np.median(adding)),
        "open_s": ready["open_s"],
        "open_after_kill_s": killed["open_s"],
    }


def killed_and_opened(place):
    """Kill a process in the middle of enrolments, then open what it leaves."""
    with subprocess.Popen(
        [sys.executable, __file__, "--enrol", str(place)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(30):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
    found = child("--open", place)
    assert found["late"] >= last + 1, "an acknowledged person is lost"
    return found


def enrol_until_killed(place):
    from mettle import Gallery

    gallery = Gallery.open(place)
    rng = np.random.default_rng(os.getpid())
    for i in range(10**6):
        gallery.enrol(f"killed {i}", rng.standard_normal(gallery.binding.dim))
        print(i, flush=True)


def open_once(place):
    from mettle import Gallery

    began = time.perf_counter()
    gallery = Gallery.open(place)
    probe = np.ones(gallery.binding.dim, np.float32)
    gallery.identify(probe, threshold=0.3)  # opened is when it answers
    spent = time.perf_counter() - began
    late = sum(name.startswith("killed ") for name in gallery.ids())
    print(json.dumps({"open_s": spent, "identities": len(gallery), "late": late, "notes": gallery.notes}))


def picture(curve, table, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = [row["size"] for row in curve]
    for name, label in (
        ("naive", "naive (NumPy, full sort)"),
        ("exact, one", "exact"),
        ("exact, batch", "exact, 64 at once"),
    ):
        left.plot(sizes, [row["per_probe_ms"][name] for row in curve], marker="o", label=label)
    left.plot(sizes, [row["p50"] for row in curve], marker="s", lw=2.5, label="scan, p50")
    left.plot(sizes, [row["p99"] for row in curve], marker="s", ls=":", label="scan, p99")
    for row in curve:
        left.annotate(
            f"{row['recall_10']:.3f}",
            (row["size"], row["p50"]),
            (0, -13),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    left.axhline(5, color="grey", lw=0.8, ls="--")
    left.set(
        xscale="log",
        yscale="log",
        xlabel="templates",
        ylabel="ms a probe",
        title=f"Latency, {curve[-1]['dim']} dimensions (recall@10 below)",
    )
    left.legend(fontsize=8, loc="upper left", framealpha=0.6)
    left.set_ylim(0.08, 300)
    for turn, (kind, row) in enumerate(sorted(table.items(), key=lambda item: item[1]["p50"])):
        at = row["p50"], row["recall_10"]
        right.scatter(*at, s=40 + row["mb"] / 4, alpha=0.7)
        text, shift = f"{kind}, built in {row['build_s']:.0f} s", (0, 12 if turn % 2 else -18)
        right.annotate(text, at, shift, textcoords="offset points", ha="center", fontsize=8)
    right.set(
        xscale="log",
        xlabel="ms a probe (p50)",
        ylabel="recall@10",
        title=f"Kinds at {sizes[-1]:,} templates (area: memory)",
    )
    right.margins(0.25)
    figure.savefig(path, dpi=110)


def main(quick, index_only):
    sizes = (1000, 3000, 10_000) if quick else (1000, 3000, 10_000, 30_000, 100_000)
    largest, dim, rounds = sizes[-1], 512, 5
    curve = [at_size(n, 1, dim, rounds, 300 if quick else 1000) for n in sizes]
    several = at_size(largest // 5, 5, dim, rounds, 300 if quick else 1000)
    table = kinds(largest, 1, dim)
    large = child("--large", 50_000 if quick else 1_000_000)
    result = {"curve": curve, "several": several, "kinds": table, "large": large}
    if not index_only:
        result["gallery"] = through_gallery(largest, dim, 300 if quick else 1000)
    text = report(result)
    print(text)
    if quick:
        picture(curve, table, Path(tempfile.gettempdir()) / "gallery-quick.png")
        return
    (HERE / "gallery.json").write_text(json.dumps(result, indent=1))
    picture(curve, table, HERE / "gallery.png")
    if not index_only:
        from record import keep

        keep("Gallery", "gallery.py", text, "![latency against size, and recall](gallery.png)", threads="two threads")


def report(result):
    row, several, large = result["curve"][-1], result["several"], result["large"]
    per = row["per_probe_ms"]
    lines = [
        f"| {row['size']:,} people x {row['dim']} | ms a probe | times as fast as naive | goal |",
        "|---|---|---|---|",
        f"| naive: NumPy similarity, full sort | {per['naive']:.2f} | 1 | |",
        f"| naive, similarity of 64 at once | {per['naive, batched similarity']:.2f} "
        f"| {per['naive'] / per['naive, batched similarity']:.1f} | |",
        f"| exact, 64 at once: the same ten | {per['exact, batch']:.2f} | {row['exact_batch_ratio']:.1f} | 3 |",
        f"| exact, one by one | {per['exact, one']:.2f} | {row['exact_single_ratio']:.1f} | |",
        f"| {row['kind']}, one by one | {row['p50']:.2f} (p99 {row['p99']:.2f}) "
        f"| {row['approximate_ratio']:.0f} | 10 |",
        f"| {row['kind']}, 64 at once | {per['chosen, batch']:.2f} | {row['approximate_batch_ratio']:.0f} | |",
    ]
    if "gallery" in result:
        g = result["gallery"]
        lines.append(
            f"| `Gallery.identify` | {g['p50']:.2f} (p99 {g['p99']:.2f}) | {per['naive'] / g['p50']:.0f} | 5 (20) ms |"
        )
    lines += [
        "",
        f"{row['kind']} against exact search: recall@1 {row['recall_1']:.4f}, recall@10 {row['recall_10']:.4f} "
        f"(goal 0.99), TAR at FAR 1e-3 {row['tar']:.4f}, of which lost {row['tar_lost']:.4f}; built and measured in "
        f"{row['build_s']:.1f} s. With five templates a person: recall@1 {several['recall_1']:.4f}, recall@10 "
        f"{several['recall_10']:.4f}, lost {several['tar_lost']:.4f}, {several['p50']:.2f} ms "
        f"(p99 {several['p99']:.2f}). CPU time of a {row['kind']} search: {row['cpu_p50']:.2f} ms "
        f"(p99 {row['cpu_p99']:.2f}).",
        "",
        "| kind | built in s | ms a probe (p99) | recall@1 | recall@10 | TAR lost | MB | add, ms | remove, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, k in result["kinds"].items():
        lines.append(
            f"| {kind} | {k['build_s']:.1f} | {k['p50']:.2f} ({k['p99']:.2f}) | {k['recall_1']:.4f} "
            f"| {k['recall_10']:.4f} | {k['tar_lost']:.4f} | {k['mb']:.0f} | {k['add_ms']:.2f} | {k['remove_ms']:.2f} |"
        )
    lines += [
        "",
        f"{large['size']:,} x {large['dim']}, {large['kind']}: the index takes {large['index_mb']:.0f} MB, the whole "
        f"process {large['rss_mb']:.0f} MB while it searches (peak {large['search_peak_mb']:.0f}; goal 1,000); "
        f"{large['p50']:.2f} ms a probe (p99 {large['p99']:.2f}), recall@1 {large['recall_1']:.4f}, recall@10 "
        f"{large['recall_10']:.4f}; built in {large['build_s']:.0f} s.",
    ]
    if "gallery" in result:
        g = result["gallery"]
        lines += [
            "",
            f"`Gallery` adds {g['overhead_ms']:.2f} ms to bare Faiss ({g['bare_p50']:.2f} ms; goal 1). It opens in "
            f"{g['open_s']:.1f} s, and in {g['open_after_kill_s']:.1f} s after kill -9 during enrolment (goal 10). "
            f"Enrolling one person durably and finding them takes {g['enrol_and_find_ms']:.1f} ms; all were enrolled "
            f"in {g['enrol_s']:.0f} s and indexed in {g['reindex_s']:.0f} s.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--large" in sys.argv:
        measure_large(int(sys.argv[-1]))
    elif "--enrol" in sys.argv:
        enrol_until_killed(sys.argv[-1])
    elif "--open" in sys.argv:
        open_once(sys.argv[-1])
    else:
        main("--quick" in sys.argv, "--index" in sys.argv)
