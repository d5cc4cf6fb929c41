"""Does relative difficulty help? SimCLR, DCL, HCL, WCL, its controls, its biased encoder and JTT on one data set.

    python -m benchmarks.evidence.two_encoder glyphs:closed --spurious domain --steps 100 --seeds 2
    python -m benchmarks.evidence.two_encoder waterbirds.npz --label y --spurious place --set batch.augment=large

Every method trains on the training split without labels (JTT with them), for the same steps and batches. Then frozen
features in eval mode and a linear probe whose strength is chosen on the validation split, or on a tenth of the training
split where there is none; then one look at the test split: top-1, worst class, weighted kNN, worst (class, group), and
the probe for the spurious attribute itself. Means over seeds with 95 % intervals of Student's t; differences to the
first method are paired by seed.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from benchmarks.evidence.report import format_spread, spread
from benchmarks.evidence.study import probe_parts

from mettle.data import Samples
from mettle.model import Embedder, embed
from mettle.rng import permutation
from mettle.train import load, train

METHODS = ["simclr", "dcl", "hcl", "wcl", "wcl-mean", "wcl-shuffled", "wcl-distance", "jtt"]


def split_for_probes(samples: Samples, most: int) -> dict[str, Samples]:
    """Train, validation and test; a long training split is thinned for the probe."""
    found = {name: samples.part(name) for name in ("train", "val", "test")}
    found = {name: part.take(np.sort(permutation(len(part), 0, 0)[:most])) for name, part in found.items()}
    if len(found["val"]) == 0 or not np.isin(found["val"].labels, found["train"].labels).all():
        order = permutation(len(found["train"]), 0, 1)
        tenth = len(order) // 10
        found["val"], found["train"] = (found["train"].take(np.sort(x)) for x in (order[:tenth], order[tenth:]))
    return found


def measure_features(model: Embedder, parts: dict[str, Samples], spurious: str | None) -> dict[str, float]:
    """What probes read from frozen features."""
    z = {name: embed(model, part, features=True) for name, part in parts.items()}
    p, _ = probe_parts(z, parts)
    row = {"top-1": p.linear.accuracy, "worst class": p.linear.worst_class[1], "kNN": p.knn.accuracy}
    if spurious is not None:
        group = parts["test"].labels * 10_000 + parts["test"].column(spurious).codes
        row["worst group"] = min(p.linear.correct[group == g].mean() for g in np.unique(group))
        row[f"{spurious} probe"] = probe_parts(z, parts, spurious)[0].linear.accuracy
    return row


def run_method(method: str, seed: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train one method with one seed; WCL also yields its biased encoder."""
    keys = [f"seed={seed}", f"train.steps={options.steps}", *options.overrides]
    keys += [f"data.label={options.label}"] if options.label else []
    keys += [f"evaluate.spurious={options.spurious}"] if options.spurious and method != "jtt" else []
    recipe = load(method, keys, data={"source": options.data})
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(recipe, Path(folder) / "run", tensorboard=False)
        if not outcome.finished:
            raise SystemExit("stopped on request")
        parts = split_for_probes(outcome.samples, options.most)
        rows = {method: measure_features(outcome.model, parts, options.spurious)}
        if method == "wcl":
            device = str(next(outcome.model.parameters()).device)
            rows["biased (E_b)"] = measure_features(outcome.run.biased_model(device), parts, options.spurious)
    return rows


def main() -> None:
    """Print the table, and the differences to the first method."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--label")
    parser.add_argument("--spurious")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--most", type=int, default=10_000, help="samples of a split that the probe sees")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    table: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for method in options.methods:
            for name, row in run_method(method, seed, options).items():
                table.setdefault(name, []).append(row)
                print(f"seed {seed} {name}: " + ", ".join(f"{k} {v:.1%}" for k, v in row.items()), flush=True)
    columns = list(next(iter(table.values()))[0])
    print(f"\n| method | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, rows in table.items():
        print(f"| {name} | " + " | ".join(format_spread(spread(r[c] for r in rows)) for c in columns) + " |")
    first = options.methods[0]
    for name, rows in table.items():
        if name != first:
            gaps = [
                format_spread(spread(r[c] - b[c] for r, b in zip(rows, table[first], strict=True))) for c in columns
            ]
            print(f"| {name} − {first} | " + " | ".join(gaps) + " |")


if __name__ == "__main__":
    main()
