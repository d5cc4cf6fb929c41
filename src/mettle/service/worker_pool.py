"""Threads for the work behind a request: few of them, a short queue before them, and no waiting without end."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from mettle.service.errors import ApiError

if TYPE_CHECKING:
    from mettle.service.app import ServiceContext

T = TypeVar("T")
log = logging.getLogger("mettle.service")


class WorkerPool:
    """Runs functions in threads; more than ``workers + queue`` at once, or longer than ``seconds``, is refused.

    A thread cannot be stopped, so a function that takes too long keeps its place until it ends: the queue stays
    bounded whatever happens behind it. What was still waiting when its time was over is never begun.
    """

    def __init__(self, workers: int, queue: int, seconds: float):
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="mettle-match")
        self._most, self._seconds = workers + queue, seconds
        self.pending = 0  # touched by the event loop only

    @property
    def has_room(self) -> bool:
        """Whether one more request would be taken."""
        return self.pending < self._most

    async def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``, made in a thread."""
        if not self.has_room:
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
    """A probe of all that an answer needs, which cannot pile up, however slow the disk or the server behind it is.

    Ready is a service whose gallery answers, whose audit log can be written, whose threads have room for a request, and
    which has processes to decode pictures with, where it takes pictures. What is not ready is said in the log.
    """

    def __init__(self, context: "ServiceContext", *, patience: float = 2.0, fresh: float = 1.0):
        self._context, self._patience, self._fresh = context, patience, fresh
        self._probing: asyncio.Task[tuple[str, ...]] | None = None
        self._known: tuple[float, tuple[str, ...]] = (-1.0, ())

    async def ready(self) -> bool:
        """Whether everything has just answered."""
        when, missing = self._known
        if when < 0 or time.monotonic() - when >= self._fresh:
            before, missing = missing, await self._find_missing()
            if missing != before:
                log.warning("not ready: %s", ", ".join(missing)) if missing else log.warning("ready again")
            self._known = (time.monotonic(), missing)
        return not missing and self._context.pool.has_room

    async def _find_missing(self) -> tuple[str, ...]:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(asyncio.to_thread(self._probe))
        try:
            return await asyncio.wait_for(asyncio.shield(self._probing), self._patience)
        except TimeoutError:
            return ("an answer in time",)

    def _probe(self) -> tuple[str, ...]:
        context = self._context
        checks: dict[str, Callable[[], bool]] = {"the gallery": self._gallery_answers}
        if context.audit_log is not None:
            checks["the audit log"] = context.audit_log.is_writable
        if context.pictures:
            checks["the processes that decode pictures"] = lambda: context.readers.is_ready
        return tuple(name for name, check in checks.items() if not _holds(check))

    def _gallery_answers(self) -> bool:
        self._context.threshold.current()
        return len(self._context.gallery) >= 0


def _holds(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except Exception:  # whatever it is, it is not ready
        return False
