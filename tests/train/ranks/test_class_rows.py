"""Class vectors that are spread over ranks, in the trainer: the run of one process that holds all of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mettle.errors import InputError, RecipeError
from mettle.losses import ArcFace, shard_classes
from mettle.train import train
from mettle.train.callbacks import Callback
from mettle.train.from_recipe import GivenObjects
from tests.processes import Forked
from tests.train.ranks import rank_runs

pytestmark = pytest.mark.timeout(600)
STEPS, CUT = 12, 5
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw": {"optimizer": "AdamW", "clip": 0.05, "ema": 0.8, "ema_start": 0.2},
}


@dataclass
class Stop(Callback):
    """Ends a run after a step, or not."""

    after: int | None

    def on_step(self, state):
        state.stop_requested = state.stop_requested or state.step == self.after


class Part(torch.nn.Module):
    """A loss that has one with spread classes inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, z, y):
        return self.inner(z, y)


def work(rank: int, ranks: int, folder: Path, jobs: list[tuple[str, str, bool, int | None]]) -> None:
    """Train the runs one after the other: name, settings, whether classes are spread, and after which step to stop."""
    torch.set_num_threads(1)
    made_before = shard_classes(ArcFace, 8, 8)  # before the ranks meet
    if ranks > 1:
        meeting = f"file://{folder}/meeting {ranks} {jobs[0][0]}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    for name, settings, is_spread, stop in jobs:
        more = {"steps": STEPS, "checkpoint_every": 2, "log_every": 1, "shard_classes": is_spread}
        recipe = rank_runs.make_recipe(folder, "arcface", **SETTINGS[settings], **more)
        found = train(recipe, folder / name, resume=True, tensorboard=False, callbacks=[Stop(stop)])
        assert found.finished == (stop is None)
        if is_spread:
            rows = len(found.loss.weight)
            assert rows == len(range(rank * 8 // ranks, (rank + 1) * 8 // ranks)), rows
    if ranks > 1:
        recipe = rank_runs.make_recipe(folder, "arcface", steps=2)
        with pytest.raises(InputError, match=f"holds the classes of 1 ranks, and here are {ranks}: name it"):
            train(recipe, folder / "refused", tensorboard=False, given=GivenObjects(loss=made_before))
        part = Part(shard_classes(ArcFace, 8, 8))
        with pytest.raises(InputError, match="a part of the loss holds the classes of one rank only"):
            train(recipe, folder / "refused", tensorboard=False, given=GivenObjects(loss=part))
        dist.destroy_process_group()


def run(folder: Path, ranks: int, *jobs: tuple[str, str, bool, int | None]) -> None:
    started = [Forked(work, rank, ranks, folder, list(jobs)) for rank in range(ranks)]
    said = [process.communicate(timeout=300) for process in started]
    assert not any(process.returncode for process in started), said


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """All vectors in one process; spread over one, over two, and over two that go on as three, and as one."""
    folder = tmp_path_factory.mktemp("runs")
    rank_runs.prepare(folder)
    names = list(SETTINGS)
    run(folder, 1, *[(f"whole {s}", s, False, None) for s in names], *[(f"1 {s}", s, True, None) for s in names])
    cut = [(f"{name} {s}", s, True, CUT) for s in names for name in ("2 3", "2 1")]
    run(folder, 2, *[(f"2 {s}", s, True, None) for s in names], *cut)
    run(folder, 3, *[(f"2 3 {s}", s, True, None) for s in names])
    run(folder, 1, *[(f"2 1 {s}", s, True, None) for s in names])
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """What a run keeps: the network, and the vectors of all classes."""
    assert (folder / "classes.safetensors").exists()
    return {str(p.name): torch.cat([x.flatten() for x in load_file(p).values()]) for p in folder.glob("*.safetensors")}


@pytest.mark.parametrize("name", ["1", "2", "2 3", "2 1"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_run_with_spread_classes_is_that_with_all_of_them(runs, name, settings):
    wanted, found = runs / f"whole {settings}", runs / f"{name} {settings}"
    assert len(losses(found)) == STEPS
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-4)
    kept, expected = saved(found), saved(wanted)
    assert kept.keys() == expected.keys()
    for key, x in expected.items():
        torch.testing.assert_close(kept[key], x, rtol=0, atol=1e-5 if settings == "sgd" else 1e-3)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_checkpoint_holds_all_classes(runs, settings):
    states = [load_file(last / "state.safetensors") for last in (latest(runs / f"{r} {settings}") for r in ("1", "2"))]
    assert {key: x.shape for key, x in states[0].items()} == {key: x.shape for key, x in states[1].items()}


def latest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("case", "more", "said"),
    [
        ("supcon", {}, "shard_classes takes a class of mettle.losses with class vectors"),
        ("jtt", {}, "needs train.method = 'supervised'"),
        ("arcface", {"precision": "float16"}, "does not go with float16"),
        ("arcface", {"optimizer": "Adafactor"}, "looks at all rows of a matrix"),
        ("arcface", {"own_loss": {"kind": "ArcFace", "label_smoothing": 0.1}}, "label_smoothing does not go with"),
        ("arcface", {"own_loss": {"kind": "ProxyAnchor"}}, "looks at all class vectors at once"),
    ],
)
def test_where_it_does_not_apply_is_one_line(case, more, said, tmp_path):
    with pytest.raises(RecipeError, match="train.shard_classes") as caught:
        rank_runs.make_recipe(tmp_path, case, shard_classes=True, **more)
    assert said in str(caught.value) and "\n" not in str(caught.value)
