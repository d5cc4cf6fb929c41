"""A watch over connections to a server: whoever waits for one that has gone silent is told in time."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

GRACE = 1.0  # seconds after the server should have given up by itself


class Watch:
    """Cuts connections whose server has gone silent; its own timeouts do not help when it is frozen or unreachable."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._due: dict[int, tuple[Any, float]] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False

    @contextmanager
    def over(self, connection: Any, limit: float) -> Iterator[None]:
        """Cut ``connection`` if the block takes longer than ``limit`` and some grace."""
        with self._change:
            self._due[id(connection)] = (connection, time.monotonic() + limit + GRACE)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mettle-watch", daemon=True)
                self._thread.start()
            elif len(self._due) == 1:
                self._change.notify()
        try:
            yield
        finally:
            with self._change:
                self._due.pop(id(connection), None)

    def stop(self) -> None:
        """End the thread."""
        with self._change:
            self._stopped = True
            self._change.notify()

    def _run(self) -> None:
        with self._change:
            while not self._stopped:
                now = time.monotonic()
                for key, (connection, due) in list(self._due.items()):
                    if now > due:
                        _cut(connection)
                        del self._due[key]
                self._change.wait(0.2 if self._due else None)


def _cut(connection: Any) -> None:
    """Shut the line down under the waiting driver, which then reports a lost connection."""
    with suppress(OSError, ValueError, AttributeError):
        handle = os.dup(connection.fileno())
        with socket.socket(fileno=handle) as line:
            line.shutdown(socket.SHUT_RDWR)
