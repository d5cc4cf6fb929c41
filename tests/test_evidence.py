"""A study of benchmarks/evidence from its file to a row of its table: pool, package loop, probes, report."""

import csv
import gzip
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.evidence import report, tabular  # noqa: E402
from benchmarks.evidence.worker_pool import Limits, run_study  # noqa: E402

from mettle.model import Embedder, EmbedderSpec  # noqa: E402

METHODS = ("wcl", "raw")
PAGE = report.PAGES["tables"]


def write_table(path: Path, rows: int = 240) -> None:
    """Random rows in the format of the published tables: numbers, text, and the columns y, g and split."""
    random = np.random.default_rng(0)
    y, g = random.integers(0, 2, rows), random.integers(0, 2, rows)
    split = np.resize([0, 0, 1, 2], rows)
    numbers = random.normal(size=(rows, 3)) + y[:, None]
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt", newline="") as file:
        out = csv.writer(file)
        out.writerow(["age", "priors", "days", "charge", "sex", "y", "g", "split"])
        for k in range(rows):
            out.writerow([*numbers[k].round(4), "FM"[k % 3 // 2], "m", y[k], g[k], split[k]])


def build_small_network(shape: tuple[int, ...]) -> Embedder:
    """Few features, so that the probes are quick."""
    return Embedder(EmbedderSpec("mlp", width=4, depth=1, head="mlp", dim=8), shape)


def run_small_study(data: Path, folder: Path, seeds: list[int]) -> dict:
    """The study of tables on one of them, a few steps of each method, in this process."""
    quick = tabular.tabular_study(quick=True)
    study = replace(
        quick,
        setting=replace(quick.setting, network=build_small_network),
        tables=("compas",),
        methods={f"compas {name}": ({},) for name in METHODS},
        workers=0,
    )
    cache = folder / "cache"
    cache.mkdir(parents=True)
    study.prepare(data, cache, quick=True)
    limits = Limits(time.perf_counter(), seconds=60, deadline=120)
    run_study(study, seeds, cache, "cpu", True, limits, folder / "record.json")
    return json.loads((folder / "record.json").read_text())


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("evidence")
    write_table(folder / "data/tabular_fairness/compas.csv.gz")
    return [run_small_study(folder / "data", folder / name, seeds) for name, seeds in (("a", [0, 1]), ("b", [0]))]


def test_a_study_yields_the_rows_of_its_table(records):
    record = records[0]
    assert record["errors"] == [] and record["not_run"] == []
    assert len(record["jobs"]) == 2 * len(METHODS)
    rows = report.collect_rows(record)
    assert set(rows) == {"compas wcl", "compas biased", "compas raw"}
    assert all(set(by) == {0, 1} and set(PAGE.metrics) <= set(by[0]) for by in rows.values())
    own = {name.removeprefix("compas "): by for name, by in rows.items()}
    lines = report.means_table(own, PAGE.words, PAGE.metrics).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {PAGE.words[k]}" for k in PAGE.words if k in own]
    assert "not run" not in "".join(lines)
    trained = [job for job in record["jobs"] if "trace" in job]
    assert all([line["step"] for line in job["trace"]] == [1, 2, 3, 4] for job in trained)
    assert all(job["epochs"] == 4 for job in trained)  # 120 training rows hold one batch of 64


def test_two_runs_of_a_study_agree(records):
    first, second = ({(job["method"], job["seed"]): job for job in record["jobs"]} for record in records)
    assert set(second) == {(f"compas {name}", 0) for name in METHODS}
    for key, job in second.items():
        assert job["rows"] == first[key]["rows"]
        assert job.get("trace") == first[key].get("trace")
    losses = {job["trace"][-1]["loss"] for job in first.values() if "trace" in job}
    assert len(losses) == 2  # another seed is another run
