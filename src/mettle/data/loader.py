"""Batches for training: read, put on the device, augmented; the next one is made while this one is used."""

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mettle.data.dataset import Samples
from mettle.data.sampler import Order, whole
from mettle.data.transforms import Augment, to_model
from mettle.data.tuples import Tuples
from mettle.errors import DataError

AHEAD = 2  # batches in preparation while one is in use


@dataclass(frozen=True)
class Batch:
    """Inputs ready for the model. With several views, all of view 0 come first, then all of view 1.

    Of pairs and triplets, all first members come first, then all second ones; targets and weights are theirs.
    """

    inputs: Tensor
    labels: Tensor
    ids: Tensor
    step: int
    epoch: int
    waited: float  # seconds the training step waited for this batch
    target: Tensor | None = None  # one per pair
    weight: Tensor | None = None  # one per pair or triplet


@dataclass(frozen=True, eq=False)
class Loader:
    """Batches by step number; a batch is a pure function of (seed, step)."""

    samples: Samples
    order: Order
    augment: Augment
    seed: int = 0
    views: int = 1
    workers: int = 0  # processes that read and decode; 0 reads in a thread, right when pictures are in memory
    device: str = "cpu"
    tuples: Tuples | None = None  # pairs or triplets of these samples: the order is then one of their rows

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("views", 1)):
            whole(getattr(self, name), name, least)

    def epochs(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """(step, epoch, positions of samples, or of pairs) from the first step on, without end."""
        step = epoch = 0
        while True:
            batches = self.order.epoch(epoch)
            if not batches:
                raise DataError("no full batch can be formed: lower batch.classes or batch.samples")
            for positions in batches:
                yield step, epoch, positions
                step += 1
            epoch += 1

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of steps ``start`` to ``stop`` - 1."""
        how = (self.samples, self._reads_whole)
        readers = _Processes(*how, self.workers) if self.workers else _Thread(*how)
        pending: list[tuple[int, int, np.ndarray, Future]] = []
        plan = (entry for entry in self.epochs() if entry[0] >= start)
        with readers, ThreadPoolExecutor(1) as finisher:
            for step in range(start, stop):
                while len(pending) < AHEAD and step + len(pending) < stop:
                    number, epoch, rows = next(plan)
                    positions = self._positions(rows)
                    with self._alive(positions):
                        raw = readers.submit(positions)
                    ready = finisher.submit(self._finish, raw, positions, epoch)
                    pending.append((number, epoch, rows, ready))
                began = time.perf_counter()
                number, epoch, rows, ready = pending.pop(0)
                inputs, positions = ready.result(), self._positions(rows)
                labels = torch.from_numpy(np.tile(self.samples.labels[positions], self.views))
                ids = torch.from_numpy(np.tile(self.samples.ids[positions], self.views))
                waited = time.perf_counter() - began
                said = self._said(rows)
                yield Batch(inputs, labels.to(self.device), ids.to(self.device), number, epoch, waited, **said)

    @property
    def _reads_whole(self) -> bool:
        """Whether random crops are taken from the whole pictures, not from what evaluation sees of them."""
        return self.augment.crops() and getattr(self.samples.inputs, "whole", None) is not None

    def _positions(self, rows: np.ndarray) -> np.ndarray:
        """Which samples to read for these entries of the order: of tuples, all first members, then all second ones."""
        return rows if self.tuples is None else self._members[rows].T.reshape(-1)

    @cached_property
    def _members(self) -> np.ndarray:
        assert self.tuples is not None
        at = self.tuples.positions(self.samples)
        if (at < 0).any():
            row, role = np.argwhere(at < 0)[0]
            raise self.tuples.error(row, f"sample {self.tuples.members[row, role]} is not among the samples")
        return at

    def _said(self, rows: np.ndarray) -> dict[str, Tensor]:
        """What a table of tuples says of these rows."""
        if self.tuples is None:
            return {}
        said = {"target": self.tuples.target, "weight": self.tuples.weight}
        return {name: torch.from_numpy(c[rows]).float().to(self.device) for name, c in said.items() if c is not None}

    def _finish(self, raw: Future, positions: np.ndarray, epoch: int) -> Tensor:
        with self._alive(positions):
            array, aspect = raw.result()
        x, ids = to_model(array, self.device), self.samples.ids[positions]
        k = 1 if self.tuples is None else len(self.tuples.roles)
        # A sample that is first in one pair and second in another is changed in two ways.
        parts: list[tuple] = list(zip(x.chunk(k), np.split(ids, k), strict=True)) * (self.views if k == 1 else 1)
        how: list[dict] = [{}] * len(parts)
        if aspect is not None:
            sides = torch.from_numpy(aspect).to(self.device).chunk(k) * (self.views if k == 1 else 1)
            how = [{"aspect": part, "size": self.samples.inputs.shape[:2]} for part in sides]
        views = [
            self.augment(*part, seed=self.seed, epoch=epoch, view=v, **more)
            for v, (part, more) in enumerate(zip(parts, how, strict=True))
        ]
        return views[0] if len(views) == 1 else torch.cat(views)

    @contextmanager
    def _alive(self, positions: np.ndarray) -> Iterator[None]:
        """A dead worker is noticed where samples are asked for, or where they are waited for."""
        try:
            yield
        except BrokenProcessPool:
            raise DataError(
                f"a loader worker died while reading samples {self.samples.ids[positions][:4].tolist()}...: "
                "out of memory, or killed from outside. The run can be resumed"
            ) from None


@dataclass(frozen=True, eq=False)
class _Reader:
    """What a batch is made of: inputs, and of whole pictures their width over height."""

    samples: Samples
    whole: bool

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return self.samples.read_whole(positions) if self.whole else (self.samples.read(positions), None)


class _Thread:
    """Reads in one background thread."""

    def __init__(self, samples: Samples, whole: bool):
        self.read, self.pool = _Reader(samples, whole), ThreadPoolExecutor(1)

    def submit(self, positions: np.ndarray) -> Future:
        return self.pool.submit(self.read, positions)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.shutdown(cancel_futures=True)


class _Processes:
    """Reads in processes, started fresh: a fork of a process that has used threads can hang."""

    def __init__(self, samples: Samples, whole: bool, workers: int):
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(workers, context, initializer=_adopt, initargs=(_Reader(samples, whole),))

    def submit(self, positions: np.ndarray) -> Future:
        return self.pool.submit(_read, positions)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.shutdown(cancel_futures=True)


_adopted: _Reader | None = None  # of a worker process


def _adopt(reader: _Reader) -> None:
    global _adopted
    _adopted = reader


def _read(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    assert _adopted is not None
    return _adopted(positions)
