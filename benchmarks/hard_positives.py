"""Do hard positives matter? Difficulty-aware SupCon that acts on positives, beside controls, on held-out identities.

    python benchmarks/hard_positives.py                       glyphs, 6 arms x 8 runs
    python benchmarks/hard_positives.py --arms supcon alpha4-below25 alpha16-below25    other strengths
    python benchmarks/hard_positives.py --market FOLDER       Market-1501 at 64 x 32; FOLDER holds market1501.npz
    python benchmarks/hard_positives.py --table               the tables of the runs that are there, without any run
    python benchmarks/hard_positives.py --table --json OUT    and the numbers behind them, for other programs

Every finished run is one JSON line of ``--output``; what is there is not run again, so the command can be stopped at
any time (or by ``--seconds``) and goes on where it was. Identities of the *training* split only are used, sorted, then
permuted by ``default_rng(7)``: run k, of seed k, holds out every eighth of the glyphs (every fourth person of
Market-1501) from k on, so that its runs 4 to 7 are on the folds of 0 to 3 again, and trains on the rest. Test
identities are never looked at, and nothing was chosen by these runs: the threshold (the median positive of the batch)
and alpha = 4 come from three runs of a ResNet-18 on Market-1501's training people, beta = 10 and quantile = 0.99 are
those of recipe da-supcon.

The effect of an arm is the mean of the paired differences (the same fold, seed, batches and start) to its baseline,
with the 95 % interval of a t distribution over the runs. They share training data, so the interval says how steady the
effect is from run to run, not how it will be on other data.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from strong_loop import describe_effect, hold_out_fold, load_market, read_lines
from torch import Tensor, nn

from mettle.data import Samples, glyphs
from mettle.data.inputs import ImageArray
from mettle.difficulty import AdaptiveThreshold, FixedWeights
from mettle.evaluate import verification
from mettle.losses import SupCon
from mettle.model import embed
from mettle.notes.supcon import ConstantMargin
from mettle.pairs import Tile
from mettle.train import Schedule, load, run_loop
from mettle.train.callbacks import Callback
from mettle.train.from_recipe import GivenObjects, build_method_and_loader
from mettle.train.optim import build_shape

TEMPERATURE = 0.05
ALPHA, MEDIAN = 4.0, 0.5
MARGIN = 0.1  # of a cosine, on every negative


# Arms


class ShuffledPositives(nn.Module):
    """SupCon whose positives have the weights of a difficulty, dealt out to them at random: the same weights, blindly.

    The total, the mean and the distribution of the weights of a batch are those of the difficulty, so what is left of
    its effect is that of a larger step and of noise, not of hardness.
    """

    def __init__(self, temperature: float, difficulty: AdaptiveThreshold, seed: int):
        super().__init__()
        self.temperature, self.difficulty = temperature, difficulty
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch."""
        return self._loss(z, y)(z, y)

    def statistics(self, z: Tensor, y: Tensor, **options: Any) -> Any:
        """What the weights did, drawn once more."""
        with torch.no_grad():
            return self._loss(z, y).statistics(z, y)

    def _loss(self, z: Tensor, y: Tensor) -> SupCon:
        table = weight_table(self.difficulty, z, y)
        positive = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
        values = table[positive]
        table[positive] = values[torch.randperm(len(values), generator=self.generator)]
        return SupCon(
            self.temperature, difficulty=FixedWeights(table, positive_weights="numerator", negatives="weight")
        )


def weight_table(difficulty: AdaptiveThreshold, z: Tensor, y: Tensor) -> Tensor:
    """The weights of all pairs of a batch, once the thresholds follow it."""
    with torch.no_grad():
        difficulty.observe(z, y)
        unit = nn.functional.normalize(z.detach(), dim=1)
        same = y[:, None] == y
        rows = torch.arange(len(y))
        return difficulty.weights(Tile(unit @ unit.T, same, ~same, rows[:, None], rows[None]), {})


def follow_batch(alpha: float, beta: float, positive_quantile: float | None) -> AdaptiveThreshold:
    """Thresholds of each batch alone, as recipe da-supcon takes them."""
    return AdaptiveThreshold(alpha, beta, momentum=0.0, quantile=0.99, positive_quantile=positive_quantile)


@dataclass(frozen=True)
class Arm:
    """A loss, in words, and which other arm it is compared with."""

    words: str
    loss: Callable[[int], nn.Module]  # of a seed
    against: tuple[str, ...] = ("supcon",)


ARMS = {
    "supcon": Arm("SupCon", lambda seed: SupCon(TEMPERATURE), ()),
    "negatives": Arm(
        "recipe da-supcon: alpha 1, beta 10",
        lambda seed: SupCon(TEMPERATURE, difficulty=follow_batch(1.0, 10.0, None)),
    ),
    "positives": Arm(
        "alpha 4 below the median positive, beta 0",
        lambda seed: SupCon(TEMPERATURE, difficulty=follow_batch(ALPHA, 0.0, MEDIAN)),
        ("supcon", "shuffled", "margin"),
    ),
    "shuffled": Arm(
        "control: those weights, shuffled over the positives",
        lambda seed: ShuffledPositives(TEMPERATURE, follow_batch(ALPHA, 0.0, MEDIAN), seed),
    ),
    "both": Arm(
        "alpha 4 below the median positive, beta 10",
        lambda seed: SupCon(TEMPERATURE, difficulty=follow_batch(ALPHA, 10.0, MEDIAN)),
        ("supcon", "negatives"),
    ),
    "margin": Arm(
        f"control: a constant margin of {MARGIN} on every negative",
        lambda seed: SupCon(TEMPERATURE, difficulty=ConstantMargin(float(np.exp(MARGIN / TEMPERATURE)))),
    ),
}

SWEEP = {(4.0, 0.1), (4.0, 0.25), (16.0, 0.1), (16.0, 0.25), (16.0, 0.5)}  # alpha, quantile of the batch's positives
ARMS |= {
    f"alpha{alpha:g}-below{100 * share:g}": Arm(
        f"alpha {alpha:g} below the lowest {100 * share:g} % of positives, beta 0",
        lambda seed, alpha=alpha, share=share: SupCon(TEMPERATURE, difficulty=follow_batch(alpha, 0.0, share)),
    )
    for alpha, share in sorted(SWEEP)
}


# Data and runs


@dataclass(frozen=True)
class Setting:
    """Data and the keys of recipe supcon that differ on them."""

    name: str
    keys: Mapping[str, Any]
    runs: int
    every: int  # every so many identities are held out


GLYPHS = Setting("glyphs", {"batch.classes": 32, "batch.samples": 4, "train.steps": 400}, runs=8, every=8)
MARKET = Setting(
    "market1501",
    {
        "batch.classes": 24,
        "batch.samples": 4,
        "batch.augment": "mirror",
        "train.steps": 1000,
    },
    runs=8,
    every=4,
)


def load_glyphs() -> Samples:
    """The training characters; the typeface is the domain."""
    return glyphs().part("train")


def load_small_market(folder: Path) -> Samples:
    """The training people at 64 x 32, the mean of every 2 x 2 pixels; the camera is the domain."""
    samples = load_market(folder)
    images = samples.read(np.arange(len(samples)))
    n, height, width, channels = images.shape
    small = images.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4)).round().astype(np.uint8)
    return replace(samples, inputs=ImageArray(small))


class WeightLog(Callback):
    """What the difficulty did, every so many steps."""

    def __init__(self, every: int):
        self.every, self.lines = every, []

    def on_step(self, state: Any) -> None:
        """Keep the statistics of positives where a line is due."""
        if state.is_due(self.every):
            line = state.step_line.measure()
            names = ("positive_weight", "hard_positives", "negative_weight", "hard_negatives", "loss")
            self.lines.append({"step": state.step} | {name: round(float(line[name]), 4) for name in names})


def run_once(setting: Setting, samples: Samples, arm: str, k: int, steps: int) -> dict[str, Any]:
    """Train and measure; what a line of the output holds."""
    begun = time.perf_counter()
    data = hold_out_fold(samples, k % setting.every, setting.every)
    keys = {"seed": k, "train.steps": steps, "train.device": "cpu"}
    recipe = load("supcon").with_values({**setting.keys, **keys})
    method, loader = build_method_and_loader(recipe, data, given=GivenObjects(samples=data, loss=ARMS[arm].loss(k)))
    log = WeightLog(50)
    run_loop(method, loader, Schedule(steps, recipe.train.rate, build_shape(recipe.train.schedule, 0.2)), [log])
    found = measure(method.final_module(), data.part("test"))
    more = {"seconds": round(time.perf_counter() - begun, 1), "torch": torch.__version__, "log": log.lines}
    return key_of(setting.name, arm, k, steps) | found | more


def measure(model: Any, held_out: Samples) -> dict[str, float]:
    """Verification of the held-out identities in percent, pairs of different domains first."""
    z = embed(model, held_out)
    assert held_out.domain is not None
    domains = held_out.domain.codes
    across = verification(z, held_out.labels, domains=domains, trials="across")
    every = verification(z, held_out.labels)
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    scores = unit @ unit.T
    other = domains[:, None] != domains
    best = np.where(other, scores, -np.inf).argmax(1)
    first = held_out.labels[best] == held_out.labels
    has = (other & (held_out.labels[:, None] == held_out.labels)).any(1)
    return {
        "eer": 100 * float(across.eer),
        "auc": 100 * float(across.auc),
        "tar": 100 * float(across.tar(far=1e-2)),
        "eer_all": 100 * float(every.eer),
        "recall@1": 100 * float(first[has].mean()),
    }


def key_of(data: str, arm: str, run: int, steps: int) -> dict[str, Any]:
    """What a run is known by."""
    return {"data": data, "arm": arm, "run": run, "steps": steps}


# Tables

METRICS = {"eer": "EER", "tar": "TAR at FAR 1e-2", "recall@1": "Recall@1"}


def select_runs(lines: Iterable[Mapping[str, Any]], setting: Setting, steps: int) -> dict[str, dict[int, Any]]:
    """The runs of a setting by arm and number."""
    found: dict[str, dict[int, Any]] = {}
    for line in lines:
        if (line["data"], line["steps"]) == (setting.name, steps) and line["arm"] in ARMS:
            found.setdefault(line["arm"], {})[line["run"]] = line
    return {name: found[name] for name in ARMS if name in found}


def difference_lists(runs: Mapping[str, Mapping[int, Any]], arm: str, base: str, metric: str) -> list[float]:
    """Arm minus baseline, run by run where both are there."""
    own, other = runs.get(arm, {}), runs.get(base, {})
    return [own[k][metric] - other[k][metric] for k in sorted(own) if k in other]


def log_mean(run: Mapping[str, Any], name: str) -> float:
    """The mean of a number over the lines of a run's log."""
    return float(np.mean([line[name] for line in run["log"]]))


def write_table(runs: Mapping[str, Mapping[int, Any]]) -> str:
    """Means and what the weights did, then effects with their intervals, as Markdown."""
    rows = [
        "| arm | runs | " + " | ".join(METRICS.values()) + " | mean positive weight | hard positives |",
        "|---|---:|" + "---:|" * (len(METRICS) + 2),
    ]
    for arm, own in runs.items():
        means = [f"{np.mean([run[metric] for run in own.values()]):.2f}" for metric in METRICS]
        weight = np.mean([log_mean(run, "positive_weight") for run in own.values()])
        hard = 100 * np.mean([log_mean(run, "hard_positives") for run in own.values()])
        rows.append(f"| {ARMS[arm].words} | {len(own)} | {' | '.join(means)} | {weight:.3f} | {hard:.0f} % |")
    rows += [
        "",
        "| arm | against | pairs | " + " | ".join(METRICS.values()) + " |",
        "|---|---|---:|" + "---|" * len(METRICS),
    ]
    for arm in runs:
        for base in ARMS[arm].against:
            both = {metric: difference_lists(runs, arm, base, metric) for metric in METRICS}
            if both["eer"]:
                effects = " | ".join(describe_effect(values) for values in both.values())
                rows.append(f"| {ARMS[arm].words} | {ARMS[base].words} | {len(both['eer'])} | {effects} |")
    return "\n".join(rows)


def summarize(runs: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
    """The same numbers for other programs: every run, every difference."""
    arms = {
        arm: {
            "words": ARMS[arm].words,
            "runs": sorted(own),
            **{metric: [round(own[k][metric], 4) for k in sorted(own)] for metric in (*METRICS, "auc", "eer_all")},
            "positive_weight": round(float(np.mean([log_mean(run, "positive_weight") for run in own.values()])), 4),
            "hard_positives": round(float(np.mean([log_mean(run, "hard_positives") for run in own.values()])), 4),
        }
        for arm, own in runs.items()
    }
    effects = [
        {
            "arm": arm,
            "against": base,
            "metric": metric,
            "differences": [round(x, 4) for x in values],
            "text": describe_effect(values),
        }
        for arm in runs
        for base in ARMS[arm].against
        for metric in METRICS
        if (values := difference_lists(runs, arm, base, metric))
    ]
    return {"arms": arms, "effects": effects}


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--market", type=Path, help="the folder of market1501.npz; without it, glyphs")
    parser.add_argument(
        "--output", type=Path, default=Path("hard_positives.jsonl"), help="a line for every finished run"
    )
    usual = [arm for arm in ARMS if "-" not in arm]
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=usual, help="only these")
    parser.add_argument("--runs", type=int, help="the first so many of every arm")
    parser.add_argument("--steps", type=int, help="optimization steps of every run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other run after so long")
    parser.add_argument("--table", action="store_true", help="print the tables of all settings only")
    parser.add_argument("--json", type=Path, help="where the numbers of the tables are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.table:
        setting = MARKET if options.market else GLYPHS
        steps, count = options.steps or setting.keys["train.steps"], options.runs or setting.runs
        begun = time.perf_counter()
        done = [tuple(line.get(key) for key in key_of("", "", 0, 0)) for line in read_lines(options.output)]
        jobs = [(arm, k) for k in range(count) for arm in options.arms]
        jobs = [job for job in jobs if tuple(key_of(setting.name, *job, steps).values()) not in done]
        samples = load_small_market(options.market) if options.market else load_glyphs()
        for arm, k in jobs:
            if time.perf_counter() - begun > options.seconds:
                break
            line = run_once(setting, samples, arm, k, steps)
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps({key: value for key, value in line.items() if key != "log"}), flush=True)
    tables = {}
    for setting in (GLYPHS, MARKET):
        steps = options.steps or setting.keys["train.steps"]
        runs = select_runs(read_lines(options.output), setting, steps)
        if runs:
            print(f"\n{setting.name}, {steps} steps\n\n{write_table(runs)}")
            tables[setting.name] = {"steps": steps} | summarize(runs)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
