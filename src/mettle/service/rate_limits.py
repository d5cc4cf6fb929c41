"""How much one client may ask for: sizes, times, numbers, and rates that refill."""

import sys
import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any

from mettle.errors import InputError
from mettle.service.errors import ApiError

if TYPE_CHECKING:
    from starlette.requests import Request

    from mettle.service.app import ServiceContext
    from mettle.service.auth import Key

_COUNT = 10**18  # the most that a rate may say


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite_number(value: Any) -> bool:
    """Whether it is a number, and neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class Rate:
    """So many in so many seconds: all at once if nothing was used before, then as they refill."""

    count: int
    seconds: float = 60.0

    def __post_init__(self):
        if not (
            _is_whole(self.count) and 1 <= self.count <= _COUNT and _is_finite_number(self.seconds) and self.seconds > 0
        ):
            raise InputError(
                f"a rate is a whole number from 1 to 10**18 in a finite time above 0 seconds: got {str(self)[:99]}"
            )


@dataclass(frozen=True)
class Limits:
    """What the service takes; every number is a most."""

    body: int = 16 << 20  # bytes of a request with pictures
    json: int = 256 << 10  # bytes of one without: it is parsed where all requests wait
    pixels: int = 64_000_000  # of a picture, by its header: as many as training takes
    parts: int = 24  # of a multipart body, pictures included
    field: int = 4096  # bytes of a part that is no picture
    templates: int = 16  # in one enrolment
    k: int = 50  # candidates
    read_seconds: float = 5.0  # in which a picture must be decoded; all of one request have `work_seconds` together
    read_megabytes: int = 1024  # of memory that decoding a picture may take
    body_seconds: float = 20.0  # from the first byte of a request to its last
    work_seconds: float = 20.0  # from its last byte to the answer
    workers: int = 2  # threads that decode and match
    queue: int = 32  # requests that wait for one
    active: int = 64  # requests in hand, those still arriving included
    per_key: Rate = Rate(600, 60)
    per_target: Rate = Rate(30, 60)  # tries at one identity, by all keys together
    identify_daily: Rate = Rate(20_000, 86_400)  # identifications by one key
    refusals: Rate = Rate(60, 60)  # lines of the audit log about refused requests; the others are counted
    max_wolf_matches: int = 3  # other identities that a new template may match before it is quarantined
    digits: int = 3  # of a score that leaves the service

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, Rate):
                fits, wanted = isinstance(value, Rate), "a Rate, such as Rate(30, 60)"
            elif field.name.endswith("seconds"):
                fits, wanted = _is_finite_number(value) and value > 0, "a finite number above 0"
            else:
                least = 0 if field.name in ("queue", "max_wolf_matches", "digits") else 1
                fits, wanted = _is_whole(value) and value >= least, f"a whole number of at least {least}"
            if not fits:
                raise InputError(f"limits.{field.name} must be {wanted}: got {repr(value)[:80]}")


class RateLimiter:
    """One bucket of tokens per name; safe to use from many threads, and never more than ``most`` buckets."""

    def __init__(self, rate: Rate, *, most: int = 100_000, clock: Callable[[], float] = time.monotonic):
        self._rate, self._most, self._clock = rate, most, clock
        self._full: OrderedDict[Hashable, float] = OrderedDict()  # name -> when its bucket will be full again
        self._lock = threading.Lock()

    def acquire(self, name: Hashable) -> float:
        """Take a token: 0.0 if there was one, else the seconds until there will be."""
        step = self._rate.seconds / self._rate.count
        with self._lock:
            now = self._clock()
            full = max(self._full.get(name, now), now) + step
            wait = full - now - self._rate.seconds
            if wait > 1e-9:
                return wait
            self._full[name] = full
            self._full.move_to_end(name)
            self._drop_full(now)
            return 0.0

    def __len__(self) -> int:
        return len(self._full)

    def _drop_full(self, now: float) -> None:
        """Forget full buckets, which say nothing, a few at each call; beyond ``most`` the longest unused go too."""
        for _ in range(min(2, len(self._full))):  # a step below the clock's resolution leaves a bucket full
            name, full = next(iter(self._full.items()))
            if full > now and len(self._full) <= self._most:
                return
            del self._full[name]


def limit_attempts(request: "Request", context: "ServiceContext", key: "Key", what: str, identity: str) -> None:
    """Name the subject for the audit log, and let nobody be tried too often, whoever tries."""
    full = unicodedata.normalize("NFC", key.qualified_name(identity))  # another spelling is no other person
    request.state.subject = full
    if wait := context.per_target.acquire((what, full)):
        raise ApiError(429, "target-rate", "too many tries at one identity", retry_after=wait)


def charge_identify_quota(context: "ServiceContext", key: "Key") -> None:
    """Count it, unless the key has had all of its day."""
    if wait := context.identify_daily.acquire(key.id):
        raise ApiError(429, "quota", "this key has used up its identifications", retry_after=wait)
