"""Ranks train into one run folder: who writes, what a killed rank leaves, on how many ranks a run goes on."""

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mettle.errors import MettleError
from mettle.pairs.distributed import RankGroup
from mettle.train import train
from mettle.train.callbacks import Callback
from tests.processes import Forked
from tests.train.ranks import rank_runs

pytestmark = pytest.mark.timeout(600)
STEPS, CUT, KILLED = 12, 5, 7


@dataclass
class Watch(Callback):
    """Notes whose batches were trained on, and ends the run or a rank of it after a step."""

    stop: int | None = None
    kill: tuple[int, int] | None = None  # (step, rank)

    def __post_init__(self):
        self.ids = []

    def on_step(self, state):
        assert state.result is not None
        self.ids.append([state.step, state.batch.ids.tolist(), len(state.batch.inputs), state.result.loss])
        state.stop_requested = state.stop_requested or (state.step == self.stop and RankGroup.current().rank == 1)
        if self.kill == (state.step, RankGroup.current().rank):
            os.kill(os.getpid(), signal.SIGKILL)


def work(rank: int, ranks: int, folder: Path, jobs: list[tuple[str, dict]]) -> None:
    """Train the runs one after the other."""
    torch.set_num_threads(1)
    if ranks > 1:
        meeting = f"file://{folder}/meeting {ranks} {jobs[0][0]}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    for name, options in jobs:
        watch = Watch(**options)
        recipe = rank_runs.make_recipe(folder, "supcon", steps=STEPS, checkpoint_every=2, log_every=1)
        try:
            found = train(recipe, folder / name, resume=True, tensorboard=False, callbacks=[watch])
        except MettleError as problem:
            print(f"refused after {time.time()}: {problem}", flush=True)
            os._exit(3)
        said = {"ids": watch.ids, "finished": found.finished, "resumed_from": found.resumed_from}
        (folder / f"{name} {ranks} {rank}.json").write_text(json.dumps(said))


def run(folder: Path, ranks: int, *jobs: tuple[str, dict], fails: bool = False) -> list:
    started = [Forked(work, rank, ranks, folder, list(jobs)) for rank in range(ranks)]
    said = [process.communicate(timeout=300) for process in started]
    assert fails or not any(process.returncode for process in started), said
    return [(process.returncode, out, err) for process, (out, err) in zip(started, said, strict=True)]


def told(folder: Path, name: str, ranks: int, rank: int = 0) -> dict:
    return json.loads((folder / f"{name} {ranks} {rank}.json").read_text())


def weights(folder: Path) -> torch.Tensor:
    return torch.cat([x.double().flatten() for x in load_file(folder / "model.safetensors").values()])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """One process; two ranks that are stopped, and go on as three; three ranks of which one is killed."""
    folder = tmp_path_factory.mktemp("runs")
    rank_runs.prepare(folder)
    run(folder, 1, ("alone", {}))
    run(folder, 2, ("cut", {"stop": CUT}))
    began = time.time()
    killed = run(folder, 3, ("cut", {}), ("whole", {}), ("killed", {"kill": (KILLED, 1)}), fails=True)
    (folder / "killed.json").write_text(json.dumps([killed, began]))
    run(folder, 3, ("killed", {}))
    return folder


def test_a_run_goes_on_with_the_same_batches_on_another_number_of_ranks(runs):
    alone, first, then = told(runs, "alone", 1), told(runs, "cut", 2), told(runs, "cut", 3)
    assert not first["finished"] and then["finished"] and then["resumed_from"] == CUT
    both = first["ids"] + then["ids"]
    assert [line[:2] for line in both] == [line[:2] for line in alone["ids"]]
    assert [line[2] for line in both] == [4] * CUT + [3] * (STEPS - CUT)  # of 8 rows: halves, then 3 + 3 + 2
    assert [line[3] for line in both] == pytest.approx([line[3] for line in alone["ids"]], rel=1e-4)
    torch.testing.assert_close(weights(runs / "cut"), weights(runs / "alone"), rtol=0, atol=1e-5)


def test_a_rank_that_was_asked_to_stop_stops_all_of_them(runs):
    assert all(len(told(runs, "cut", 2, rank)["ids"]) == CUT for rank in range(2))


def test_one_rank_writes_a_folder_like_that_of_one_process(runs):
    files = [{str(p.relative_to(runs / name)) for p in (runs / name).rglob("*")} for name in ("alone", "whole")]
    assert files[0] == files[1]
    logs = [
        [json.loads(line) for line in (runs / name / "log.jsonl").read_text().splitlines()]
        for name in ("alone", "whole")
    ]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]] == [*range(1, STEPS + 1)]
    assert [set(line) for line in logs[0]] == [set(line) for line in logs[1]]


def test_a_killed_rank_ends_the_job_with_one_line_and_the_run_goes_on_exactly(runs):
    (first, second, third), _ = json.loads((runs / "killed.json").read_text())
    assert second[0] == -signal.SIGKILL
    for rank, (status, out, err) in ((0, first), (2, third)):
        assert status == 3, err
        line = out.strip().splitlines()[-1]
        assert f"rank {rank} of 3 stops, because another rank of this job has ended" in line and "--resume" in line
    assert told(runs, "killed", 3)["resumed_from"] == KILLED - 1  # the checkpoint before
    assert (runs / "killed" / "model.safetensors").read_bytes() == (runs / "whole" / "model.safetensors").read_bytes()
