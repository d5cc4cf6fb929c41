"""How the processes of one job meet, and what keeps them from it, in one line that says what to do.

All of them come to one store, say which rank they are, and wait until every rank has come; then a process group is
made. `torch.distributed` names its own parts in its errors; here they are told as what a user can change.
"""

import os
import re
import socket
import time
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from mettle.errors import InputError, MettleError

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)  # until all ranks have come
PATIENCE = timedelta(days=1)  # for a message of another rank: parts take long, and who is gone is noticed at once
VARIABLES = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
AGAIN = "look at what the other processes said, and start all of them again"
SHOWN = 200  # letters of what torch said
# What torch says, and what it means.
REASONS = {
    r"environment variable (\w+) expected": rf"\1 is not set: start with torchrun, which sets {VARIABLES}, or set all",
    r"invalid literal for int|port must have value": f"of {VARIABLES} all but the address must be whole numbers: set "
    "them as torchrun does",
    r"EADDRINUSE|address already in use|failed to listen": "the port they are to meet at is taken by another program "
    "or job: choose a free one, with torchrun --master-port (--rdzv-endpoint HOST:PORT on several machines), or in "
    "MASTER_PORT",
    r"gai error|cannot be retrieved|not known": "no machine has the name they are to meet at: correct MASTER_ADDR, or "
    "--rdzv-endpoint HOST:PORT of torchrun",
    r"waiting for clients": f"not all of them came in time: {AGAIN}",
    r"trying to connect|refused|onnection reset|Broken pipe|recv|closed": "nobody answers where they are to meet, "
    f"because another rank has ended, or has another MASTER_ADDR or MASTER_PORT: {AGAIN}",
}


def start_process_group(
    backend: str,
    *,
    where: str = "env://",
    rank: int = -1,
    size: int = -1,
    rendezvous_timeout: timedelta = RENDEZVOUS_TIMEOUT,
    patience: timedelta = PATIENCE,
) -> None:
    """Meet the other processes of this job, and make the process group of all.

    Args:
        backend: of `torch.distributed`.
        where: they meet, as ``init_method`` of ``torch.distributed.init_process_group``: by default, where the
            variables of the environment say that torchrun has set.
        rank: which this is; by default what the environment says.
        size: how many there are; likewise.
        rendezvous_timeout: how long to wait for the others.
        patience: how long, later on, to wait for a message.

    Raises:
        MettleError: they cannot meet.
    """
    if not dist.is_available():
        raise InputError("this build of torch has no torch.distributed: install another build, or start one process")
    try:
        store, rank, size = next(dist.rendezvous(where, rank, size, timeout=rendezvous_timeout))
        store.set_timeout(rendezvous_timeout)
        _wait_for_all(store, rank, size, rendezvous_timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    except (RuntimeError, ValueError, OSError) as problem:
        if isinstance(problem, MettleError):
            raise
        raise MettleError(f"the processes of this job cannot meet: {explain_problem(problem)}") from None


def _wait_for_all(store: Any, rank: int, size: int, rendezvous_timeout: timedelta) -> None:
    """Until every rank has come; in steps of Python, so that a signal ends it."""
    if not 0 <= rank < size:
        raise InputError(
            f"this process is rank {rank} of {size}, and ranks count from 0: set RANK below WORLD_SIZE, as "
            "torchrun does"
        )
    mine = f"process {os.getpid()} of {socket.gethostname()}"
    other = store.compare_set(_presence_key(rank), "", mine).decode(errors="replace")
    if other != mine:
        raise InputError(
            f"{mine} and {other} both are rank {rank}: give every process a RANK of its own, and every job a "
            "MASTER_PORT of its own"
        )
    seconds, missing = rendezvous_timeout.total_seconds(), set(range(size))
    deadline = time.monotonic() + seconds
    while missing := {one for one in missing if not store.check([_presence_key(one)])}:
        if time.monotonic() > deadline:
            first = ", ".join(map(str, sorted(missing)[:8]))
            raise MettleError(
                f"rank {rank} of {size} has waited {seconds:.0f} seconds for ranks that did not come ({first}): {AGAIN}"
            )
        time.sleep(0.05)


def _presence_key(rank: int) -> str:
    return f"mettle/here/{rank}"


def explain_problem(problem: Exception) -> str:
    """Why processes cannot meet, and what to do, from what torch said."""
    said = " ".join(str(problem).partition("Exception raised from")[0].split())[:SHOWN]
    for sign, reason in REASONS.items():
        if found := re.search(sign, said, re.IGNORECASE):
            return f"{found.expand(reason)} (torch: {said})"
    return f"{said}: {AGAIN}"
