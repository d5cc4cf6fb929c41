"""Any loss over the batch of all ranks, with the value and gradient of one process; results that go between ranks."""

from mettle.pairs.distributed.batch_rows import (
    average_gradients,
    broadcast_tensors,
    broadcast_text,
    gather_batch,
    is_any_rank,
    select_own_rows,
)
from mettle.pairs.distributed.exchange import ALONE, START_AGAIN, LostRankError, RankGroup
from mettle.pairs.distributed.handshake import has_other_ranks
from mettle.pairs.distributed.rendezvous import start_process_group
from mettle.pairs.distributed.session import join_ranks
from mettle.pairs.distributed.wrapper import AcrossRanks, across_ranks

__all__ = [
    "ALONE",
    "START_AGAIN",
    "AcrossRanks",
    "LostRankError",
    "RankGroup",
    "across_ranks",
    "average_gradients",
    "broadcast_tensors",
    "broadcast_text",
    "gather_batch",
    "has_other_ranks",
    "is_any_rank",
    "join_ranks",
    "select_own_rows",
    "start_process_group",
]
