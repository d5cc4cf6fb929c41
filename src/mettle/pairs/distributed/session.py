"""The ranks of one job: how a process joins them, and how a lost one is noticed.

Under ``torchrun`` a process group is made (gloo on CPUs, nccl on GPUs) and left again; one that is there already is
used and stays. A rank that is killed closes its connections, which the others notice in their next exchange; where they
wait without one, as for a GPU, a thread looks for its sign of life.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from mettle.errors import MettleError
from mettle.pairs.distributed.exchange import START_AGAIN, LostRankError, RankGroup
from mettle.pairs.distributed.rendezvous import start_process_group

PERIOD = 1.0  # seconds between two signs of life
SILENCE = 22.0  # without one before a rank counts as lost
GRACE = 5.0  # that its main thread then has to notice it by itself
DONE, PROBLEM = "done", "mettle/problem"
CONNECTION_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@contextmanager
def join_ranks(*, is_launched: bool | None = None, remedy: str = START_AGAIN) -> Iterator[RankGroup]:
    """The ranks of this job, while they work together; inside another call, the same ones.

    A process group that is made here stays for the next call, and is closed where a rank fails: the others then hear of
    it at once.

    Args:
        is_launched: whether this is one of several processes that can meet; by default, whether torchrun started it.
        remedy: what to do where a rank is lost, a sentence.

    Raises:
        MettleError: the processes cannot meet.
        LostRankError: another rank has ended.
    """
    if is_launched is None:
        is_launched = dist.is_available() and dist.is_torchelastic_launched()
    is_own = is_launched and not (dist.is_available() and dist.is_initialized())
    if is_own:
        start_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        atexit.register(_leave_group)
    ranks = RankGroup.current()
    if ranks.size == 1:
        yield ranks
        return
    monitor = RankMonitor(ranks, remedy)
    monitor.start()
    try:
        yield ranks
    except Exception as problem:
        is_lost = isinstance(problem, LostRankError) or is_lost_connection(problem)
        reason = monitor.read_problem() if is_lost else None
        if not is_lost:
            monitor.tell_others(problem)
        if is_own:
            _leave_group()
        if is_lost:
            raise LostRankError(describe_loss(ranks, reason, remedy)) from None
        raise
    finally:
        monitor.stop()


def _leave_group() -> None:
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


class RankMonitor:
    """A thread that gives signs of life of this rank and looks for those of the others, in the store of the job."""

    def __init__(self, ranks: RankGroup, remedy: str = START_AGAIN):
        self.ranks, self.remedy = ranks, remedy
        from torch.distributed.distributed_c10d import _get_default_store  # a build of torch may have none

        shared: Any = _get_default_store()
        self.store = shared.clone()  # a connection of its own: the main thread may wait in another one
        self.store.set_timeout(timedelta(seconds=SILENCE))
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self.thread.start()

    def stop(self) -> None:
        """This rank ends here, and is not to be missed."""
        self.stopped.set()
        self.thread.join(GRACE)
        with suppress(RuntimeError):
            self.store.set(_life_key(self.ranks.rank), DONE)

    def tell_others(self, problem: Exception) -> None:
        """Leave word of what ends this rank, unless another one was first."""
        with suppress(RuntimeError):
            said = f"rank {self.ranks.rank}: {' '.join(str(problem).split())[:500]}"
            self.store.compare_set(PROBLEM, "", said)

    def read_problem(self) -> str | None:
        """What ended another rank, if it said so."""
        with suppress(RuntimeError):
            for _ in range(5):  # the rank that failed may not have said why yet
                if self.store.check([PROBLEM]):
                    return self.store.get(PROBLEM).decode(errors="replace")
                time.sleep(0.1)
        return None

    def _watch(self) -> None:
        seen = {rank: ("", time.monotonic()) for rank in range(self.ranks.size) if rank != self.ranks.rank}
        count = 0
        while not self.stopped.wait(PERIOD):
            count += 1
            try:
                self.store.set(_life_key(self.ranks.rank), str(count))
                for rank, (last, since) in seen.items():
                    sign = self.store.get(_life_key(rank)).decode() if self.store.check([_life_key(rank)]) else ""
                    if sign != last:
                        seen[rank] = sign, time.monotonic()
                    elif sign not in ("", DONE) and time.monotonic() - since > SILENCE:
                        self._give_up(f"rank {rank} has shown no sign of life for {SILENCE:.0f} seconds", rank, sign)
            except RuntimeError:  # the process that holds the store is gone
                self._give_up("the process that the ranks met at is gone")

    def _give_up(self, reason: str, rank: int | None = None, last: str = "") -> None:
        """End this process, unless its main thread notices by itself, or the rank gave another sign meanwhile."""
        if not self.stopped.wait(GRACE):
            if rank is not None and self.store.get(_life_key(rank)).decode() != last:
                return
            print(f"mettle: {describe_loss(self.ranks, reason, self.remedy)}", file=sys.stderr, flush=True)
            os._exit(1)


def _life_key(rank: int) -> str:
    return f"mettle/alive/{rank}"


def is_lost_connection(problem: Exception) -> bool:
    """Whether an error says that another rank cannot be reached any more."""
    is_own = isinstance(problem, MettleError) or not isinstance(problem, RuntimeError)
    return not is_own and (
        isinstance(problem, dist.DistError) or any(sign in str(problem) for sign in CONNECTION_SIGNS)
    )


def describe_loss(ranks: RankGroup, reason: str | None, remedy: str = START_AGAIN) -> str:
    """One line for the ranks that are left."""
    why = "another rank of this job has ended, killed or out of memory" if reason is None else reason
    return f"rank {ranks.rank} of {ranks.size} stops, because {why}. {remedy}"
