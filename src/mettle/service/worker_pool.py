"""Threads for the work behind a request: few of them, a short queue before them, and no waiting without end."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from mettle.service.errors import Refusal

if TYPE_CHECKING:
    from mettle.service.handlers import Point


T = TypeVar("T")


class Pool:
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
            raise Refusal(503, "busy", "too many requests are waiting; try again", retry_after=1)
        loop = asyncio.get_running_loop()
        future = self._threads.submit(work)
        self.pending += 1
        future.add_done_callback(lambda _: self._finished(loop))
        result = asyncio.wrap_future(future)
        result.add_done_callback(_look)
        try:
            return await asyncio.wait_for(asyncio.shield(result), self._seconds)
        except TimeoutError:
            future.cancel()
            raise Refusal(
                503, "timeout", "the answer took too long; whether a change was made is not known", retry_after=5
            ) from None

    def close(self) -> None:
        """Finish what was begun, drop what was not."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _finished(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        self.pending -= 1


def _look(future: asyncio.Future) -> None:
    """See an error that nobody waits for any more, so that asyncio does not complain that it was never seen."""
    if not future.cancelled():
        future.exception()


class Health:
    """A probe of the gallery that cannot pile up, however slow the disk or the server behind it is."""

    def __init__(self, point: "Point", *, patience: float = 2.0, fresh: float = 1.0):
        self._point, self._patience, self._fresh = point, patience, fresh
        self._asked: asyncio.Task[bool] | None = None
        self._known: tuple[float, bool] = (-1.0, False)

    async def ready(self) -> bool:
        """Whether the gallery has just answered."""
        when, known = self._known
        if when >= 0 and time.monotonic() - when < self._fresh:
            return known
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(asyncio.to_thread(self._ask))
        try:
            known = await asyncio.wait_for(asyncio.shield(self._asked), self._patience)
        except TimeoutError:
            known = False
        self._known = (time.monotonic(), known)
        return known

    def _ask(self) -> bool:
        try:
            self._point.now()
            return len(self._point.gallery) >= 0
        except Exception:  # whatever it is, it is not ready
            return False
