"""Training under `torchrun` itself: its launchers, its rendezvous, and a rank that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mettle
from tests.free_port import free_port
from tests.train.ranks import rank_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SCRIPT = """
import sys
import torch
import mettle
from mettle.losses import SupCon

torch.manual_seed(0)

run = mettle.fit(
    torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 8)), sys.argv[1], SupCon(), folder=sys.argv[2],
    steps=6, batch=(4, 2), lr=1e-3, device="cpu",
)
assert run.finished
mettle.fit(
    torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 8)), sys.argv[1], SupCon(), folder=sys.argv[2] + "-2",
    steps=6, batch=(4, 2), lr=1e-3, device="cpu",
)
"""


def start(words: list, folder: Path) -> subprocess.Popen:
    paths = [str(Path(mettle.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*map(str, words)], cwd=folder, env=environ, start_new_session=True, **pipes)


def command(name: str, *, steps: int = 6) -> list:
    sets = {"model.width": 4, "model.depth": 2, "train.steps": steps, "train.checkpoint_every": 2, "train.log_every": 1}
    sets |= {"batch.classes": 4, "batch.samples": 2, "train.device": "cpu", "train.collapse_gap": 0}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    return ["-m", "mettle", "train", "da-supcon", "--data", "patterns.npz", "--no-report", "--name", name, *words]


def losses(folder: Path, name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "runs" / name / "log.jsonl").read_text().splitlines()]


def test_two_launchers_that_meet_at_one_rendezvous_train_one_run(tmp_path):
    rank_runs.prepare(tmp_path)
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "one"]
    launchers = [
        start([*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, *meet, *command("two")], tmp_path) for _ in range(2)
    ]
    said = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert sum("run folder: " in one for one in said) == 1  # one rank prints
    alone = start([sys.executable, *command("alone")], tmp_path)
    assert alone.wait(300) == 0, alone.communicate()
    alone.communicate()
    assert losses(tmp_path, "two") == pytest.approx(losses(tmp_path, "alone"), rel=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_under_torchrun_ends_the_job_within_30_seconds(rank, tmp_path):
    rank_runs.prepare(tmp_path)
    job = start([*TORCHRUN, "--nproc-per-node", 2, *command("killed", steps=100_000)], tmp_path)
    try:
        deadline = time.monotonic() + 200
        while not list((tmp_path / "runs" / "killed" / "checkpoints").glob("step-*")):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.2)
        os.kill(worker(rank, tmp_path), signal.SIGKILL)
        began = time.monotonic()
        said = job.communicate(timeout=60)[0]
        assert time.monotonic() - began < 30
    finally:
        job.kill()
    told = [line for line in said.splitlines() if line.startswith("mettle: ")]
    assert len(told) == 1 and f"rank {1 - rank} of 2 stops, because another rank" in told[0], said


def worker(rank: int, folder: Path) -> int:
    """The process of this rank whose working folder this is."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") != str(folder):
                continue
            if f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
        except OSError:
            continue
    raise AssertionError("no such rank")


def test_a_script_with_fit_trains_on_all_ranks_of_torchrun_twice(tmp_path):
    rank_runs.prepare(tmp_path)
    (tmp_path / "own.py").write_text(SCRIPT)
    jobs = [
        start([*TORCHRUN, "--nproc-per-node", 2, "own.py", "patterns.npz", "two"], tmp_path),
        start([sys.executable, "own.py", "patterns.npz", "one"], tmp_path),
    ]
    said = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    logs = [json.loads((tmp_path / name / "log.jsonl").read_text().splitlines()[-1])["loss"] for name in ("two", "one")]
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)
    assert (tmp_path / "two-2" / "contract.json").exists()
