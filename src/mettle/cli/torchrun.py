"""A command as one of several processes that `torchrun` started."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import Any

from mettle.errors import InputError, MettleError

PATIENCE = timedelta(days=1)  # parts take long; a process that is gone is noticed at once


def is_rank() -> bool:
    """Whether torchrun started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1") or 1) > 1 and "RANK" in os.environ


@contextmanager
def join_rank_group() -> Iterator[Any]:
    """Meet the other processes of torchrun; the `RankGroup` of one process where there are none.

    Rank 0 prints, the others say errors only. Each takes the GPU of its number, where there are GPUs.
    """
    from mettle.pairs.distributed import ALONE, RankGroup

    if not is_rank():
        yield ALONE
        return
    import torch
    from torch import distributed as dist

    if not dist.is_available():
        raise InputError("this build of torch has no torch.distributed: install another build, or start one process")
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    before = signal.signal(signal.SIGTERM, _end_with_others)
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
        ranks = RankGroup.current()
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stdout if ranks.is_first else nowhere):
            yield ranks
        dist.destroy_process_group()
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_with_others(*_: Any) -> None:
    """How torchrun ends the processes that are left when one of them has failed."""
    raise MettleError(
        "ended by torchrun, because another rank has failed or the job was stopped: nothing was completed; look at "
        "what the other rank said, and start all of them again"
    )
