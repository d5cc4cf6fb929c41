"""Speed and memory of evaluation on one CPU thread, against scikit-learn and pytorch-metric-learning, in one process.

    python benchmarks/evaluate.py            N = 8192, and 60,000 rows in a process of its own (some minutes)
    python benchmarks/evaluate.py --quick    N = 2048, and 12,000 rows
    python benchmarks/evaluate.py --cuda     N = 100,000 on the GPU

Times are process CPU seconds, medians of rounds in which all take turns: read the ratios. scikit-learn and
pytorch-metric-learning (PML) get unit vectors and, for roc_curve, ready-made pairs for nothing. PML searches with Faiss
where that is installed, otherwise with its own torch search. The last table is kept in RESULTS.md.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from record import keep, status

from mettle import evaluate

HERE = Path(__file__).parent
DIM, EACH, NOISE = 128, 8, 1.8


def people(n, dim=DIM, each=EACH, seed=0):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(n // each), each)
    x = rng.standard_normal((n // each, dim), dtype=np.float32)[y]
    return x + np.float32(NOISE) * rng.standard_normal((n, dim), dtype=np.float32), y


def seconds(task):
    began = time.process_time()
    value = task()
    return time.process_time() - began, value


def in_turns(tasks, rounds):
    """Median CPU seconds of each task, and its value, taken in turns."""
    runs = [{name: seconds(task) for name, task in tasks.items()} for _ in range(rounds)]
    return {name: (median(r[name][0] for r in runs), runs[-1][name][1]) for name in tasks}


def verification(n, rounds):
    from sklearn.metrics import roc_auc_score, roc_curve

    x, y = people(n)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    i, j = np.triu_indices(n, 1)
    scores, target = (unit @ unit.T)[i, j], y[i] == y[j]
    del i, j

    def ours(mode):
        v = evaluate.verification(x, y, mode=mode)
        return v.eer, v.auc

    def rival():
        fpr, tpr, _ = roc_curve(target, scores)
        at = np.argmin(np.abs(fpr - (1 - tpr)))
        return float((fpr[at] + 1 - tpr[at]) / 2), float(np.trapezoid(tpr, fpr))

    found = in_turns({"exact": lambda: ours("exact"), "histogram": lambda: ours("histogram"), "rival": rival}, rounds)
    exact, counted = found["exact"][1], found["histogram"][1]
    assert counted[0] == exact[0]
    assert abs(counted[1] - exact[1]) < 1e-5
    assert abs(exact[1] - roc_auc_score(target, scores)) < 1e-6
    return {name: value for name, (value, _) in found.items()}


def retrieval(n, rounds):
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    x, y = people(n)
    unit, label = torch.nn.functional.normalize(torch.from_numpy(x)), torch.from_numpy(y)
    with_faiss = importlib.util.find_spec("faiss") is not None
    search = {} if with_faiss else {"knn_func": CustomKNN(CosineSimilarity(), batch_size=1024)}
    names = ("precision_at_1", "r_precision", "mean_average_precision_at_r")

    def pml(k):
        made = AccuracyCalculator(include=names, k=k, device=torch.device("cpu"), **search)
        return made.get_accuracy(unit, label)

    def ours():
        return evaluate.retrieval(x, y, k=(1,))

    found = in_turns({"mettle": ours, "PML, smallest k": lambda: pml("max_bin_count")}, rounds)
    r, p = found["mettle"][1], found["PML, smallest k"][1]
    assert abs(r.map_at_r - p["mean_average_precision_at_r"]) < 1e-6
    slow = seconds(lambda: pml(None))[0]
    return {name: value for name, (value, _) in found.items()} | {"PML, default k": slow, "faiss": with_faiss}


def bootstrap(n):
    x, y = people(n)
    v = evaluate.verification(x, y)
    assert v.eer > 0
    return seconds(lambda: (v.interval("eer"), v.interval("tar@1e-3")))[0]


def large(n):
    """CPU and wall seconds and peak memory, in a process of its own."""
    command = [sys.executable, __file__, "--large", str(n)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure_large(n):
    x, y = people(n)
    before, wall = status("VmRSS"), time.time()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
    cpu, (v, eer, auc) = seconds(lambda: (v := evaluate.verification(x, y), v.eer, v.auc))
    peak = status("VmHWM")
    print(
        json.dumps(
            {
                "n": n,
                "pairs": v.genuine + v.impostor,
                "cpu": cpu,
                "wall": time.time() - wall,
                "growth_mb": (peak - before) / 1024,
                "peak_mb": peak / 1024,
                "eer": eer,
                "auc": auc,
                "auc_bound": v.bounds["auc"],
            }
        )
    )


def cuda(n):
    """Wall seconds from embeddings on the GPU to EER and AUC, best of five after one to warm up."""
    x, y = people(n)
    on = torch.from_numpy(x).cuda()

    def once():
        torch.cuda.synchronize()
        began = time.time()
        v = evaluate.verification(on, y)
        mid = time.time()
        values = v.eer, v.auc
        return time.time() - began, mid - began, values

    runs = [once() for _ in range(6)][1:]
    best = min(runs, key=lambda r: r[0])
    print(f"CUDA N={n}: {best[0]:.3f} s in all, {best[1]:.3f} s to the histogram, EER {best[2][0]:.6f}")
    if n <= 20_000:
        v = evaluate.verification(x, y, mode="exact")
        assert (v.eer, abs(v.auc - best[2][1]) < 1e-5) == (best[2][0], True)
    return best[0]


def main(quick):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    n, rounds = (2048, 3) if quick else (8192, 3)
    v, r = verification(n, rounds), retrieval(n, rounds)
    drawn, big = bootstrap(n), large(12_000 if quick else 60_000)
    search = "Faiss" if r["faiss"] else "its torch search"
    lines = [
        f"| N = {n}, d = {DIM}, {EACH} per subject | CPU s | times as fast |",
        "|---|---|---|",
        f"| scikit-learn roc_curve, pairs given | {v['rival']:.2f} | 1 |",
        f"| EER + AUC, exact | {v['exact']:.2f} | {v['rival'] / v['exact']:.0f} |",
        f"| EER + AUC, histogram | {v['histogram']:.2f} | {v['rival'] / v['histogram']:.0f} |",
        f"| PML AccuracyCalculator, default k, {search} | {r['PML, default k']:.2f} | |",
        f"| PML AccuracyCalculator, smallest k, {search} | {r['PML, smallest k']:.2f} | 1 |",
        f"| retrieval: P@1, R-precision, MAP@R | {r['mettle']:.2f} | {r['PML, smallest k'] / r['mettle']:.1f} "
        f"({r['PML, default k'] / r['mettle']:.0f} of the default) |",
        f"| 1,000 subject resamples: EER and TAR | {drawn:.2f} | |",
        "",
        f"N = {big['n']}, {big['pairs'] / 1e9:.2f} billion pairs: EER + AUC in {big['cpu']:.1f} CPU s "
        f"({big['wall']:.1f} s), peak memory {big['peak_mb']:.0f} MB, {big['growth_mb']:.0f} MB more than before. "
        f"EER is exact, AUC within {big['auc_bound']:.0e}.",
    ]
    text = "\n".join(lines)
    print(text)
    if not quick:
        (HERE / "evaluate.json").write_text(json.dumps({"verification": v, "retrieval": r, "large": big}, indent=1))
        keep("Evaluation on the CPU", "evaluate.py", text)


if __name__ == "__main__":
    if "--large" in sys.argv:
        measure_large(int(sys.argv[-1]))
    elif "--cuda" in sys.argv:
        for size in (20_000, 100_000):
            cuda(size)
    else:
        main("--quick" in sys.argv)
