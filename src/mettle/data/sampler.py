"""The order of batches: pure functions of (seed, epoch), so any step can be asked for and none remembered."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Protocol

import numpy as np

from mettle.errors import DataError, InputError
from mettle.rng import hashed, shuffled


class Order(Protocol):
    """Batches of one epoch, as arrays of positions."""

    def epoch(self, number: int) -> tuple[np.ndarray, ...]:
        """All batches of this epoch."""
        ...


@dataclass(frozen=True, eq=False)
class ClassBatches:
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
        object.__setattr__(self, "labels", np.asarray(self.labels))
        if self.labels.ndim != 1:
            raise InputError(f"labels must be one per sample, (n,), got shape {self.labels.shape}")
        for name in ("classes", "samples", "seed"):
            whole(getattr(self, name), name)
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

    def epoch(self, number: int) -> tuple[np.ndarray, ...]:
        """All batches of this epoch; the last ones are dropped when too few classes are left to fill a batch."""
        return self._epoch(number)

    @lru_cache(maxsize=2)  # noqa: B019 - the object lives as long as the run, two epochs are all that is kept
    def _epoch(self, number: int) -> tuple[np.ndarray, ...]:
        waiting = deque(self._groups(number))
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

    def _groups(self, number: int) -> list[tuple[int, np.ndarray]]:
        """Each class cut into groups of K shuffled samples; the first group of every class comes before any second."""
        mixed = np.argsort(hashed(self.seed, number, 1, np.arange(len(self.labels))), kind="stable")
        mixed = mixed[np.argsort(self.labels[mixed], kind="stable")]
        labels, starts = np.unique(self.labels[mixed], return_index=True)
        found: list[tuple[int, int, np.ndarray]] = []
        for label, members in zip(labels.tolist(), np.split(mixed, starts[1:]), strict=True):
            if len(members) < 2:
                continue
            whole = max(len(members) // self.samples, 1)
            padded = np.resize(members, whole * self.samples)
            found += [(r, label, group) for r, group in enumerate(padded.reshape(whole, self.samples))]
        place = hashed(self.seed, number, 2, np.array([g[1] for g in found]), np.array([g[0] for g in found]))
        order = np.lexsort((place, np.array([g[0] for g in found])))
        return [(found[k][1], found[k][2]) for k in order]


@dataclass(frozen=True)
class SampleBatches:
    """Batches of ``size`` samples, each sample once per epoch; the incomplete last batch is dropped."""

    count: int
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "size", "seed"):
            whole(getattr(self, name), name)
        if not 2 <= self.size <= self.count:
            raise InputError(f"batch size must be between 2 and the {self.count} samples there are, got {self.size}")

    def epoch(self, number: int) -> tuple[np.ndarray, ...]:
        """All batches of this epoch."""
        order = shuffled(self.count, self.seed, number, stream=3)
        return tuple(np.split(order[: self.count - self.count % self.size], self.count // self.size))


def whole(value: object, name: str, least: int | None = None) -> None:
    """Refuse what is no whole number, or too small a one."""
    if not isinstance(value, Integral) or isinstance(value, bool) or (least is not None and int(value) < least):
        up = "" if least is None else f" from {least} up"
        raise InputError(f"{name} must be a whole number{up}, got {value!r}")
