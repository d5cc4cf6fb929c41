"""Whether the gallery answers, asked at most once a second and never by two at a time."""

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mettle.match.gallery import Gallery


class Health:
    """A probe of the gallery that cannot pile up, however slow the disk or the server behind it is."""

    def __init__(self, gallery: "Gallery", *, patience: float = 2.0, fresh: float = 1.0):
        self._gallery, self._patience, self._fresh = gallery, patience, fresh
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
            return not self._gallery.closed and len(self._gallery) >= 0
        except Exception:  # whatever it is, it is not ready
            return False
