"""How ranks meet, and how one that is lost, or that never came, is told by the others."""

import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from free_port import free_port
from mettle.errors import MettleError
from mettle.pairs.distributed import RankGroup, session
from mettle.pairs.distributed.rendezvous import explain_problem, start_process_group
from mettle.pairs.distributed.session import describe_loss, is_lost_connection
from processes import Finished, Forked, run_mettle, start_mettle

pytestmark = pytest.mark.timeout(300)
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def stop_breathing(rank: int, folder: Path) -> None:
    """Rank 1 stands still with open connections, as in a GPU that hangs; rank 0 waits for it."""
    session.SILENCE, session.GRACE, session.PERIOD = 1.5, 0.5, 0.2
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    with session.join_ranks() as ranks:
        time.sleep(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        ranks.wait()


def test_a_rank_that_shows_no_sign_of_life_ends_the_others(tmp_path):
    first, second = (Forked(stop_breathing, rank, tmp_path) for rank in range(2))
    try:
        said = first.communicate(timeout=60)[1]
    finally:
        second.kill()
        second.communicate(timeout=60)
    assert first.returncode == 1
    assert said.startswith("mettle: rank 0 of 2 stops, because rank 1 has shown no sign of life")
    assert "start all of them again" in said


def test_a_rank_that_gives_a_sign_after_all_is_not_given_up(monkeypatch):
    monkeypatch.setattr(session, "GRACE", 0.0)
    monitor = session.RankMonitor.__new__(session.RankMonitor)
    monitor.ranks, monitor.remedy, monitor.stopped = RankGroup(0, 2), "", threading.Event()
    monitor.store = SimpleNamespace(get=lambda key: b"8")
    monitor._give_up("rank 1 has shown no sign of life for 22 seconds", 1, "7")
    monkeypatch.setattr(session.os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        monitor._give_up("rank 1 has shown no sign of life for 22 seconds", 1, "8")


def fail_alone(rank: int, folder: Path) -> None:
    """Rank 1 has a problem of its own."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        with session.join_ranks() as ranks:
            ranks.wait()  # both have met: a rank that ends before has never been one of the job
            if rank == 1:
                raise MettleError("the file x.png cannot be read")
            ranks.wait()
    except MettleError as problem:
        print(problem, flush=True)
        os._exit(2)


def test_an_error_of_one_rank_is_told_by_the_others(tmp_path):
    said = [one.communicate(timeout=60)[0] for one in [Forked(fail_alone, rank, tmp_path) for rank in range(2)]]
    assert said[1] == "the file x.png cannot be read\n"
    assert said[0].startswith("rank 0 of 2 stops, because rank 1: the file x.png cannot be read. Nothing was completed")


def test_errors_of_lost_connections_are_told_from_others():
    for said in ("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1", "NCCL error: remote"):
        assert is_lost_connection(RuntimeError(said))
    assert not is_lost_connection(RuntimeError("shapes do not match")) and not is_lost_connection(ValueError("gloo"))
    assert not is_lost_connection(MettleError("gloo"))
    assert "because rank 2 has shown" in describe_loss(RankGroup(0, 3), "rank 2 has shown no sign of life")


def told_by_torchrun(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    """The variables of rank 0 of 2, but for these."""
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in (told | changed).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)


COMMANDS = {
    "train": ("train", "da-supcon", "--data", "glyphs"),
    "embed": ("embed", "run", "glyphs", "-o", "z.parquet"),
    "evaluate": ("evaluate", "run"),
    "audit": ("audit", "z.parquet"),
}


def hurry() -> None:
    """Wait two seconds for other ranks, not minutes."""
    meet = session.start_process_group

    def start_soon(backend: str) -> None:
        meet(backend, rendezvous_timeout=timedelta(seconds=2))

    session.start_process_group = start_soon


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_in_one_line_that_a_variable_is_missing(command, monkeypatch, tmp_path):
    told_by_torchrun(monkeypatch, MASTER_ADDR=None)
    (tmp_path / "run").mkdir()
    said = run_mettle(*COMMANDS[command], cwd=tmp_path)
    assert_one_line(said, "cannot meet: MASTER_ADDR is not set: start with torchrun")


def test_a_port_that_is_taken_is_told_with_what_to_do(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        told_by_torchrun(monkeypatch, MASTER_PORT=str(other.getsockname()[1]))
        said = run_mettle("train", "da-supcon", "--data", "glyphs", cwd=tmp_path)
    assert_one_line(said, "is taken by another program or job: choose a free one, with torchrun --master-port")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_never_comes_is_told_after_a_while(rank, monkeypatch, tmp_path):
    told_by_torchrun(monkeypatch, RANK=rank)
    started = start_mettle("evaluate", "run", before=hurry, cwd=tmp_path)
    out, err = started.communicate(timeout=60)
    expected = {"0": "not all of them came in time", "1": "nobody answers where they are to meet"}[rank]
    assert_one_line(Finished(started.wait(), out, err), expected)
    assert "start all of them again" in err


def assert_one_line(said: Finished, expected: str) -> None:
    """One error of mettle, at the end, and no traceback; the C++ of torch may print what it likes before it."""
    lines = said.stderr.splitlines()
    assert said.returncode == 2 and "Traceback" not in said.stderr, said
    assert [line for line in lines if line.startswith("mettle: ")] == lines[-1:] and expected in lines[-1], said


def come(rank: int, size: int, folder: Path) -> None:
    try:
        place = f"file://{folder}/meeting"
        start_process_group("gloo", where=place, rank=rank, size=size, rendezvous_timeout=timedelta(seconds=3))
        print("met", RankGroup.current().size, flush=True)
        RankGroup.current().wait()
        dist.destroy_process_group()
    except MettleError as problem:
        print(problem, flush=True)


@pytest.mark.parametrize(
    ("ranks", "size", "said"),
    [
        ((0, 1), 2, ("met 2", "met 2")),
        ((0, 2), 3, ("did not come (1): look at what", "did not come (1): look at what")),
        ((0, 3), 2, ("did not come (1): look at what", "is rank 3 of 2, and ranks count from 0")),
    ],
)
def test_all_ranks_meet_or_each_says_who_did_not_come(ranks, size, said, tmp_path):
    started = [Forked(come, rank, size, tmp_path) for rank in ranks]
    for one, expected in zip(started, said, strict=True):
        assert expected in one.communicate(timeout=60)[0]


def test_two_processes_of_one_rank_are_told(tmp_path):
    said = [one.communicate(timeout=60)[0] for one in [Forked(come, 0, 2, tmp_path) for _ in range(2)]]
    assert sum("both are rank 0: give every process a RANK of its own" in one for one in said) == 1


def test_what_torch_says_is_told_as_what_a_user_can_change():
    told = {
        "environment variable RANK expected, but not set": "RANK is not set: start with torchrun",
        "invalid literal for int() with base 10: 'two'": "must be whole numbers",
        "The addresses of (nowhere, 29500) cannot be retrieved (gai error: -2)": "correct MASTER_ADDR",
        "something new\nException raised from f at g.cpp:1": "something new: look at what the other processes said",
    }
    for said, expected in told.items():
        assert expected in explain_problem(RuntimeError(said)) and "\n" not in explain_problem(RuntimeError(said))
