"""The order of batches, as batch samplers of torch: pure functions of (seed, epoch), so nothing has to be remembered.

| sampler | an epoch |
|---|---|
| `PKBatchSampler` | batches of P classes with K samples each |
| `ShuffledBatchSampler` | every sample once, in batches of one size |
| `UpsampledSampler` | every sample once, and some of them several times more |

Each works in anybody's ``DataLoader(dataset, batch_sampler=...)``. As with torch's own ``DistributedSampler``,
``set_epoch`` says which epoch the next pass is; a run that goes on within an epoch also says from which batch:

    sampler.set_epoch(epoch, start=batches_done)
    for batch in loader: ...
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import numpy as np
from torch.utils.data import Sampler

from mettle.errors import DataError, InputError
from mettle.rng import hash_bits, permutation


class EpochBatchSampler(Sampler[list[int]]):
    """What the samplers share. A subclass gives all batches of an epoch by `epoch_batches`."""

    _epoch = 0
    _start = 0

    @abstractmethod
    def epoch_batches(self, epoch: int) -> tuple[np.ndarray, ...]:
        """All batches of this epoch, as arrays of positions."""

    def copy_numbers(self, epoch: int) -> tuple[np.ndarray, ...] | None:
        """For each batch, which copy of its sample every entry is, from 0; None where an epoch has no copies.

        Copies of one sample are augmented each in its own way.
        """
        return None

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Which epoch the next pass goes through, and how many of its batches are left out because they are done."""
        check_integer(epoch, "epoch", 0)
        check_integer(start, "start", 0)
        self._epoch, self._start = int(epoch), int(start)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.epoch_batches(self._epoch)[self._start :]:
            yield batch.tolist()

    def __len__(self) -> int:
        return max(len(self.epoch_batches(self._epoch)) - self._start, 0)


@dataclass(eq=False)
class PKBatchSampler(EpochBatchSampler):
    """Batches of ``classes`` identities with ``samples`` samples each (P x K).

    In an epoch every sample of a class with at least two is used once, but for what does not fill a group of K; a
    class with fewer than K samples repeats some. No class occurs twice in a batch. Classes with one sample cannot
    form a pair and are left out.
    """

    labels: np.ndarray
    classes: int
    samples: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.labels = np.asarray(self.labels)
        if self.labels.ndim != 1:
            raise InputError(f"labels must be one per sample, (n,), got shape {self.labels.shape}")
        for name in ("classes", "samples", "seed"):
            check_integer(getattr(self, name), name)
        if self.classes < 2 or self.samples < 2:
            raise InputError(
                f"a batch needs at least 2 classes of 2 samples, got classes={self.classes}, samples={self.samples}"
            )
        usable = int((np.unique(self.labels, return_counts=True)[1] >= 2).sum())
        if usable < self.classes:
            raise DataError(
                f"batches of {self.classes} classes need as many classes with two or more samples, the training split "
                f"has {usable}: lower batch.classes, or check the labels and the split"
            )

    def epoch_batches(self, epoch: int) -> tuple[np.ndarray, ...]:
        """All batches of this epoch; the last ones are dropped when too few classes are left to fill a batch."""
        return self._fill_batches(epoch)

    @lru_cache(maxsize=2)  # noqa: B019 - the object lives as long as the run, two epochs are all that is kept
    def _fill_batches(self, epoch: int) -> tuple[np.ndarray, ...]:
        waiting = deque(self._class_groups(epoch))
        batches, batch, taken, passed = [], [], set(), 0
        while waiting and passed < len(waiting):
            label, group = waiting.popleft()
            if label in taken:  # keep it for the next batch
                waiting.append((label, group))
                passed += 1
                continue
            batch.append(group)
            taken.add(label)
            passed = 0
            if len(batch) == self.classes:
                batches.append(np.concatenate(batch))
                batch, taken = [], set()
        return tuple(batches)

    def _class_groups(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """Each class cut into groups of K shuffled samples; the first group of every class comes before any second."""
        mixed = np.argsort(hash_bits(self.seed, epoch, 1, np.arange(len(self.labels))), kind="stable")
        mixed = mixed[np.argsort(self.labels[mixed], kind="stable")]
        labels, starts = np.unique(self.labels[mixed], return_index=True)
        found: list[tuple[int, int, np.ndarray]] = []
        for label, members in zip(labels.tolist(), np.split(mixed, starts[1:]), strict=True):
            if len(members) < 2:
                continue
            groups = max(len(members) // self.samples, 1)
            count = groups * self.samples
            padded = members[:count] if len(members) >= count else np.resize(members, count)
            found += [(r, label, group) for r, group in enumerate(padded.reshape(groups, self.samples))]
        place = hash_bits(self.seed, epoch, 2, np.array([g[1] for g in found]), np.array([g[0] for g in found]))
        order = np.lexsort((place, np.array([g[0] for g in found])))
        return [(found[k][1], found[k][2]) for k in order]


@dataclass(eq=False)
class ShuffledBatchSampler(EpochBatchSampler):
    """Batches of ``size`` samples, each sample once per epoch; the incomplete last batch is dropped."""

    count: int
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "size", "seed"):
            check_integer(getattr(self, name), name)
        if not 2 <= self.size <= self.count:
            raise InputError(f"batch size must be between 2 and the {self.count} samples there are, got {self.size}")

    def epoch_batches(self, epoch: int) -> tuple[np.ndarray, ...]:
        """All batches of this epoch."""
        order = permutation(self.count, self.seed, epoch, stream=3)
        return tuple(np.split(order[: self.count - self.count % self.size], self.count // self.size))

    def __len__(self) -> int:
        return max(self.count // self.size - self._start, 0)


@dataclass(eq=False)
class UpsampledSampler(EpochBatchSampler):
    """Batches of ``size`` from every sample once and those at the positions ``repeated`` ``copies`` times more."""

    count: int
    repeated: np.ndarray
    copies: int
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("copies", 0)):
            check_integer(getattr(self, name), name, least)
        self.repeated = np.asarray(self.repeated, np.int64)
        if self.repeated.ndim != 1 or ((self.repeated < 0) | (self.repeated >= self.count)).any():
            raise InputError(f"repeated must be positions of the {self.count} samples there are, from 0 to count - 1")
        self.positions, self.copy_number = upsample(self.count, self.repeated, self.copies)
        self._entries = ShuffledBatchSampler(len(self.positions), self.size, self.seed)

    def epoch_batches(self, epoch: int) -> tuple[np.ndarray, ...]:
        """All batches of this epoch."""
        return tuple(self.positions[entries] for entries in self._entries.epoch_batches(epoch))

    def copy_numbers(self, epoch: int) -> tuple[np.ndarray, ...]:
        """0 for a sample itself, k for its k-th copy."""
        return tuple(self.copy_number[entries] for entries in self._entries.epoch_batches(epoch))

    def __len__(self) -> int:
        return max(len(self.positions) // self.size - self._start, 0)


def upsample(count: int, repeated: np.ndarray, copies: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions 0 to ``count`` - 1 and then ``copies`` times those of ``repeated``; and which copy each of them is."""
    positions = np.concatenate([np.arange(count), np.tile(repeated, copies)])
    number = np.concatenate([np.zeros(count, np.int64), np.repeat(np.arange(1, copies + 1), len(repeated))])
    return positions, number


def check_integer(value: object, name: str, least: int | None = None) -> None:
    """Refuse what is no whole number, or too small a one."""
    if not isinstance(value, Integral) or isinstance(value, bool) or (least is not None and int(value) < least):
        up = "" if least is None else f" from {least} up"
        raise InputError(f"{name} must be a whole number{up}, got {value!r}")
