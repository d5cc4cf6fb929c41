"""A lock for one writer or many readers: searches run side by side, a change waits for them and they for it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Shared:
    """Readers share, writers exclude; a waiting writer goes before new readers, so that changes are never starved."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = self._waiting = 0
        self._writing = False

    @contextmanager
    def read(self) -> Iterator[None]:
        """Beside other readers."""
        with self._condition:
            self._condition.wait_for(lambda: not self._writing and not self._waiting)
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Alone."""
        with self._condition:
            self._waiting += 1
            try:
                self._condition.wait_for(lambda: not self._writing and not self._readers)
            finally:
                self._waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()
