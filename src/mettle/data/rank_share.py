"""Which rows of a batch each rank has, where several processes train on one batch together."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mettle.errors import DataError


@dataclass(frozen=True)
class RankShare:
    """This rank's part of every batch: batches are drawn for all ranks and cut into one run of rows for each.

    Runs differ in length by one row at most, longer ones first, and behind each other they are the batch.
    """

    rank: int = 0
    ranks: int = 1

    def split(self, count: int) -> list[slice]:
        """The rows of each rank, out of so many.

        Raises:
            DataError: there are fewer rows than ranks.
        """
        if count < self.ranks:
            raise DataError(
                f"a batch of {count} cannot be dealt to {self.ranks} ranks: raise batch.classes or batch.size, or "
                "start fewer ranks"
            )
        ends = [0, *np.cumsum([count // self.ranks + (rank < count % self.ranks) for rank in range(self.ranks)])]
        return [slice(int(start), int(stop)) for start, stop in pairwise(ends)]

    def own(self, count: int) -> slice:
        """This rank's rows out of so many."""
        return self.split(count)[self.rank]

    def rows(self, count: int, parts: int = 1) -> tuple[np.ndarray, ...] | None:
        """Where in a batch the rows of each rank are, in the order that the rank has them; None for one rank.

        Args:
            count: samples, or tuples, in the batch.
            parts: views of each, or members: the batch has all first ones, then all second ones, and so has each rank.
        """
        if self.ranks == 1:
            return None
        starts = count * np.arange(parts)[:, None]
        return tuple((starts + np.arange(part.start, part.stop)).reshape(-1) for part in self.split(count))
