"""`Pairs` and `Triplets`: what is known of samples two or three at a time, where no class says it.

| column of a pair table | meaning |
|---|---|
| ``first``, ``second`` | the two samples |
| ``target`` | how alike they are: a grade, or 1 for "same" and 0 for "different" |
| ``weight`` | how often the pair counts (optional): 0 = absent, 2 = as if it were listed twice |
| ``split`` | train, val or test (optional); without it, the split that both samples are in |

A triplet table has ``anchor``, ``positive``, ``negative`` and the two optional columns: the anchor is more like the
positive than like the negative. Tables are CSV (or ``.csv.gz``) or Parquet; other columns are passed over.

A cell names a sample of a source as the source does: a picture by its path (relative to the root of a folder, or as a
manifest writes it; absolute paths work too), anything by its id: the ``id`` column or array where there is one, else
the row, counted from 0. Tables keep ids, which survive every subset of the samples.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from mettle.data.relatives import same_class
from mettle.data.samples import Samples
from mettle.data.tuple_table import Tuples


@dataclass(frozen=True, eq=False)
class Pairs(Tuples):
    """Pairs of samples, each with how alike they are. Build them with :meth:`of`, or read them with :meth:`read`."""

    roles: ClassVar[tuple[str, ...]] = ("first", "second")
    noun: ClassVar[str] = "pair"

    @classmethod
    def of(
        cls,
        first: Iterable[int],
        second: Iterable[int],
        target: Iterable[float],
        *,
        weight: Iterable[float] | None = None,
        split: Iterable[object] | None = None,
        origin: str = "",
    ) -> Self:
        """Pairs of sample ids."""
        return cls._build([first, second], target, weight, split, origin)

    @classmethod
    def read(cls, path: str | Path, samples: Samples) -> Self:
        """A CSV or Parquet table; its cells name samples of ``samples``, see the top of this page.

        Raises:
            DataError: the table does not fit; one line says where and why.
        """
        return cls._from_file(path, samples, graded=True)

    @classmethod
    def same_class(cls, samples: Samples, *, each: int = 1, seed: int = 0) -> Self:
        """Pairs from labels: in its own split every sample meets ``each`` of its class (target 1), as many others (0).

        A pure function of the samples and the seed.
        """
        anchor, positive, negative, split = same_class(samples, each, seed)
        n = len(anchor)
        members = [np.tile(anchor, 2), np.concatenate([positive, negative])]
        target = np.repeat([1.0, 0.0], n)
        return cls._build(members, target, None, np.tile(split, 2), f"same-class pairs of {samples.origin}")


@dataclass(frozen=True, eq=False)
class Triplets(Tuples):
    """Triplets of samples: the anchor is more like the positive than like the negative."""

    roles: ClassVar[tuple[str, ...]] = ("anchor", "positive", "negative")
    noun: ClassVar[str] = "triplet"

    @classmethod
    def of(
        cls,
        anchor: Iterable[int],
        positive: Iterable[int],
        negative: Iterable[int],
        *,
        weight: Iterable[float] | None = None,
        split: Iterable[object] | None = None,
        origin: str = "",
    ) -> Self:
        """Triplets of sample ids."""
        return cls._build([anchor, positive, negative], None, weight, split, origin)

    @classmethod
    def read(cls, path: str | Path, samples: Samples) -> Self:
        """A CSV or Parquet table; its cells name samples of ``samples``, see the top of this page.

        Raises:
            DataError: the table does not fit; one line says where and why.
        """
        return cls._from_file(path, samples, graded=False)

    @classmethod
    def same_class(cls, samples: Samples, *, each: int = 1, seed: int = 0) -> Self:
        """Triplets from labels: every sample is anchor of ``each`` triplets, of its class and of another, in its split.

        A pure function of the samples and the seed.
        """
        *members, split = same_class(samples, each, seed)
        return cls._build(members, None, None, split, f"same-class triplets of {samples.origin}")


__all__ = ["Pairs", "Triplets", "Tuples"]
