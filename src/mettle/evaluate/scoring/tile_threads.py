"""Tiles of pairs on all cores: one thread for each tile, and in it every step on one core.

Where each step of a tile has threads of its own, those of a product wait for the next product with full power while the
step after it, which has others, wants the same cores: two cores then took as long as one.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar

import torch
from threadpoolctl import threadpool_limits

MOST = 8  # threads, each of which holds a tile
LEAST = 1 << 22  # scores from which a thread is worth its start

Item = TypeVar("Item")
Result = TypeVar("Result")


class _ProductsOnOneThread:
    """Products of matrices take one thread while anybody is inside; whoever leaves last gives the others back."""

    def __init__(self) -> None:
        self._lock, self._inside, self._limit = Lock(), 0, None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._limit: Any = threadpool_limits(1, user_api="blas")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._limit.restore_original_limits()


_PRODUCTS = _ProductsOnOneThread()


def count_threads(scores: int) -> int:
    """How many threads so many scores are worth: no more than torch may use."""
    return max(1, min(MOST, torch.get_num_threads(), scores // LEAST))


def map_in_threads(work: Callable[[Item], Result], items: Iterable[Item], count: int) -> Iterator[Result]:
    """``work`` of every item, in their order, on ``count`` threads."""
    if count == 1:
        yield from map(work, items)
        return
    with _PRODUCTS, ThreadPoolExecutor(count, "mettle-tiles", _stay_on_one_core) as threads:
        yield from threads.map(work, items)


@contextmanager
def keep_to_one_core(scores: int) -> Iterator[None]:
    """Every step on one core, in a walk through so many scores that no threads share; few are not worth the change."""
    if count_threads(scores) == 1:
        yield
        return
    torch.get_num_threads()
    with _PRODUCTS, threadpool_limits(1, user_api="openmp"):
        yield


def _stay_on_one_core() -> None:
    """What this thread calls starts no others; that of other threads is as it was."""
    torch.get_num_threads()  # torch chooses a number for each thread when it first needs one, and not again
    threadpool_limits(1, user_api="openmp")
