"""Browser sessions: a key shown once in a header becomes a cookie that scripts cannot read and other sites cannot send.

Sessions live in memory and die with the process. A session is only as good as its key: a key that is revoked or
expires takes its sessions with it.
"""

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

COOKIE = "mettle-session"
SECONDS = 8 * 3600
_MOST = 1000


class Sessions:
    """Which cookie stands for which key."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._known: OrderedDict[str, tuple[str, float]] = OrderedDict()  # hash of the cookie -> key id, end

    def open(self, key: str) -> str:
        """A new cookie for the key of this id."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._known[_hash(token)] = (key, self._clock() + SECONDS)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return token

    def find(self, token: str) -> str | None:
        """The id of the key that a cookie stands for."""
        with self._lock:
            key, end = self._known.get(_hash(token), ("", 0.0))
            return key if key and self._clock() < end else None

    def drop(self, token: str) -> None:
        """End a session."""
        with self._lock:
            self._known.pop(_hash(token), None)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
