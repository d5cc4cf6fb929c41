"""Any loss over the batch of all ranks, with the value and gradient of one process; results that go between ranks."""

from mettle.pairs.distributed.exchange import ALONE, Ranks
from mettle.pairs.distributed.wrapper import AcrossRanks, across_ranks

__all__ = ["ALONE", "AcrossRanks", "Ranks", "across_ranks"]
