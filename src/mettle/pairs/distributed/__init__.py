"""Any loss over the batch of all ranks, with the value and gradient of one process."""

from mettle.pairs.distributed.wrapper import AcrossRanks, across_ranks

__all__ = ["AcrossRanks", "across_ranks"]
