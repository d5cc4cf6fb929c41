"""A command as one of several processes that `torchrun` started."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from mettle.errors import InputError, MettleError


def is_rank() -> bool:
    """Whether torchrun, or whatever sets the same variables, started this process beside others."""
    count = os.environ.get("WORLD_SIZE", "1") or "1"
    if "RANK" not in os.environ:
        return False
    if not count.isdecimal():
        raise InputError(f"WORLD_SIZE must be a whole number, as torchrun sets it: got {count!r}")
    return int(count) > 1


@contextmanager
def join_ranks_quietly(remedy: str | None = None, *, takes_gpu: bool = True) -> Iterator[Any]:
    """Meet the other processes of torchrun; the `RankGroup` of one process where there are none.

    Rank 0 prints, the others say errors only.

    Args:
        remedy: what to do where the job ends before its time, a sentence.
        takes_gpu: whether each takes the GPU of its number, where there are GPUs.
    """
    from mettle.pairs.distributed import START_AGAIN, RankGroup, join_ranks

    if not is_rank():
        yield RankGroup.current()
        return
    import torch

    remedy = remedy or START_AGAIN
    if takes_gpu and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    joined = join_ranks(is_launched=True, remedy=remedy)
    with _raise_on_sigterm(remedy), joined as ranks, open(os.devnull, "w", encoding="utf-8") as nowhere:
        with redirect_stdout(sys.stdout if ranks.is_first else nowhere):
            yield ranks
        ranks.wait()  # the process that holds their meeting place may not leave before the others are done


@contextmanager
def _raise_on_sigterm(remedy: str) -> Iterator[None]:
    """Inside, the way in which torchrun ends processes that are left when one of them has failed is an error."""

    def end(*_: Any) -> None:
        if sys.exc_info()[1] is not None:  # an error ends this process already, and says more
            return
        raise MettleError(f"ended by torchrun, because another rank has failed or the job was stopped. {remedy}")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
