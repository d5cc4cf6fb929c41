"""Whether the gallery answers, asked at most once a second and never by two at a time.

One that has lost the threshold that the service answers at, or whose calibration is damaged, does not.
"""

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mettle.service.point import Point


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
