"""No toy: on the embedded data both methods do what they are for, and the numbers are printed (pytest -s)."""

import time

import numpy as np
import pytest

from mettle.evaluate.run import evaluate_run, probes
from mettle.report import write_report
from mettle.train import callbacks as logs
from mettle.train import load, train


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_glyphs_weights_spread_and_the_encoders_differ_on_typefaces(tmp_path, cache):
    outcome = train(load("wcl"), tmp_path / "run", cache=cache, tensorboard=False)
    lines = logs.read_log(tmp_path / "run" / "log.jsonl")
    spread = [line["weight_std"] for line in lines]
    encoders = {probes.MODEL: outcome.model, probes.BIASED: outcome.run.biased_model()}
    found = probes.evaluate_probes(outcome.run.recipe.evaluate, outcome.samples, encoders)["attribute"]
    reads = {name: one["linear"]["accuracy"] for name, one in found["encoders"].items()}
    gap, band = found["gap"]["value"], found["gap"]["interval"]
    better = max(reads, key=reads.get)
    print(f"\nstd(w) {spread[0]:.3f} at the start, {spread[-1]:.3f} at the end; mean {lines[-1]['weight_mean']:.3f}")
    print("typeface probe: " + ", ".join(f"{name} {value:.1%}" for name, value in reads.items()), end="; ")
    print(f"largest group {found['largest_group']:.1%}")
    print(f"E_d − E_b: {100 * gap:+.1f} points [{100 * band['low']:+.1f}, {100 * band['high']:+.1f}]")
    print(f"{better} reads the typeface better (the method says that E_b should)")
    assert min(spread[-5:]) > 0.02
    assert not band["low"] <= 0 <= band["high"], "the encoders read the typeface alike"
    assert min(reads.values()) > found["largest_group"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["hdml-triplet", "hdml-npair"])
def test_on_glyphs_lambda_travels_and_the_generator_learns(name, tmp_path, cache):
    train(load(name), tmp_path / "run", cache=cache, tensorboard=False)
    lines = logs.read_log(tmp_path / "run" / "log.jsonl")
    levels = [line["lambda"] for line in lines]
    missed = np.mean([line["reconstruction"] for line in lines[-5:]])
    last = lines[-1]
    print(f"\n{name}: lambda {' '.join(f'{x:.2f}' for x in levels[::4])} ... {levels[-1]:.3f}")
    print(f"reconstruction {missed:.3f} of the mean feature's error; synthetic weight {last['weight_synthetic']:.2f}")
    print(f"softmax head: {last['head_real']:.1%} on real, {last['head_synthetic']:.1%} on synthetic features")
    assert levels[0] == 1.0 and any(0.1 <= x <= 0.9 for x in levels)
    assert missed < 1.0, "worse than the mean feature"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    ["simclr", "dcl", "hcl", "wcl", "jtt", "triplet", "triplet-hard", "npair", "hdml-triplet", "hdml-npair"],
)
def test_a_recipe_finishes_within_three_minutes_of_two_cores(name, tmp_path, cache):
    """Training, evaluation and report, in processor time: what else the machine does is no matter."""
    began = time.process_time()
    outcome = train(load(name), tmp_path / "run", cache=cache, tensorboard=False)
    trained = time.process_time()
    found = evaluate_run(outcome.run, outcome.samples, model=outcome.model)
    page = write_report(outcome.run, found)
    spent = time.process_time() - began
    eer = found.metrics["scenarios"]["cross-domain"]["verification"]["eer"]["value"]
    raw = found.metrics["baselines"]["raw inputs"]["cross-domain"]["eer"]
    print(f"\n{name}: {spent / 2:.0f} s on two cores ({(trained - began) / 2:.0f} training)", end=", ")
    print(f"page {page.stat().st_size / 1e6:.1f} MB, cross-domain EER {eer:.2%} (raw inputs {raw:.2%})")
    assert outcome.finished and spent / 2 < 180
    assert eer < raw
