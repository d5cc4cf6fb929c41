"""Threads for the work behind a request: few of them, a short queue before them, and no waiting without end."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from mettle.service.errors import ApiError

if TYPE_CHECKING:
    from mettle.service.handlers import ConfiguredThreshold

    pass


T = TypeVar("T")


class WorkerPool:
    """Runs functions in threads; more than ``workers + queue`` at once, or longer than ``seconds``, is refused.

    A thread cannot be stopped, so a function that takes too long keeps its place until it ends: the queue stays
    bounded whatever happens behind it. What was still waiting when its time was over is never begun.
    """

    def __init__(self, workers: int, queue: int, seconds: float):
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="mettle-match")
        self._most, self._seconds = workers + queue, seconds
        self.pending = 0  # touched by the event loop only

    async def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``, made in a thread."""
        if self.pending >= self._most:
            raise ApiError(503, "busy", "too many requests are waiting; try again", retry_after=1)
        loop = asyncio.get_running_loop()
        future = self._threads.submit(work)
        self.pending += 1
        future.add_done_callback(lambda _: self._schedule_release(loop))
        result = asyncio.wrap_future(future)
        result.add_done_callback(_retrieve_exception)
        try:
            return await asyncio.wait_for(asyncio.shield(result), self._seconds)
        except TimeoutError:
            future.cancel()
            raise ApiError(
                503, "timeout", "the answer took too long; whether a change was made is not known", retry_after=5
            ) from None

    def close(self) -> None:
        """Finish what was begun, drop what was not."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _schedule_release(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self.pending -= 1


def _retrieve_exception(future: asyncio.Future) -> None:
    """See an error that nobody waits for any more, so that asyncio does not complain that it was never seen."""
    if not future.cancelled():
        future.exception()


class ReadinessProbe:
    """A probe of the gallery that cannot pile up, however slow the disk or the server behind it is."""

    def __init__(self, threshold: "ConfiguredThreshold", *, patience: float = 2.0, fresh: float = 1.0):
        self._threshold, self._patience, self._fresh = threshold, patience, fresh
        self._probing: asyncio.Task[bool] | None = None
        self._known: tuple[float, bool] = (-1.0, False)

    async def ready(self) -> bool:
        """Whether the gallery has just answered."""
        when, known = self._known
        if when >= 0 and time.monotonic() - when < self._fresh:
            return known
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(asyncio.to_thread(self._probe))
        try:
            known = await asyncio.wait_for(asyncio.shield(self._probing), self._patience)
        except TimeoutError:
            known = False
        self._known = (time.monotonic(), known)
        return known

    def _probe(self) -> bool:
        try:
            self._threshold.current()
            return len(self._threshold.gallery) >= 0
        except Exception:  # whatever it is, it is not ready
            return False
