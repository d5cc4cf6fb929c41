"""API keys: made once, shown once, kept as salted hashes.

A key is 256 random bits, so one round of SHA-256 with a salt hides it as well as a slow hash would, without giving
strangers a way to keep the processor busy. ``keys.json`` is read again whenever it changes: a revoked key stops
working with the next request. A file that is missing, damaged or readable by others lets nobody in.
"""

import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mettle.errors import InputError, MettleError, nearest
from mettle.service.private_files import read_secret, write_secret

SCOPES = ("delete", "embed", "enrol", "identify", "metrics", "verify", "workbench")
TOKEN = re.compile(r"mettle_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,63}")
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_FORMAT = 1

log = logging.getLogger("mettle.service")


@dataclass(frozen=True)
class Key:
    """What is known of a key; nothing here lets anybody in."""

    id: str
    name: str
    scopes: tuple[str, ...]
    created: float  # seconds since 1970
    expires: float | None = None
    tenant: str | None = None  # its identities are its own: "tenant/identity" in the gallery
    salt: str = ""
    hash: str = ""

    def allows(self, scope: str) -> bool:
        """Whether the key may do this."""
        return scope in self.scopes

    def qualified_name(self, identity: str) -> str:
        """What the gallery calls an identity of this key."""
        return identity if self.tenant is None else f"{self.tenant}/{identity}"

    def local_name(self, identity: str) -> str | None:
        """What this key calls an identity of the gallery; None where it is another tenant's."""
        if self.tenant is None:
            return identity
        prefix = f"{self.tenant}/"
        return identity.removeprefix(prefix) if identity.startswith(prefix) else None


ANYBODY = Key("", "local", SCOPES, 0.0)  # who asks, where no keys are wanted: the user of this machine
_DECOY = Key("", "", (), 0.0, salt="00" * 16, hash="00" * 32)


class Keys:
    """The keys of a file, as they are at this moment."""

    def __init__(self, path: Path | str, *, clock: Callable[[], float] = time.time):
        self.path, self._clock = Path(path), clock
        self._seen: tuple[int, ...] | None = None
        self._keys: dict[str, Key] = {}
        self._keys = _index_by_id(_read_keys(self.path))  # a file that cannot be used is said at start

    def find(self, token: str) -> Key | None:
        """The key of a token; None if it is unknown, wrong or expired, after the same work in each case."""
        shape = TOKEN.fullmatch(token)
        key = self.named(shape[1] if shape else "")
        wanted = key or _DECOY
        right = hmac.compare_digest(_hash(wanted.salt, shape[2] if shape else ""), wanted.hash)
        return key if right else None

    def named(self, id: str) -> Key | None:
        """The key of this id, unless it has expired."""
        key = self._current().get(id)
        return key if key is not None and (key.expires is None or self._clock() < key.expires) else None

    def __len__(self) -> int:
        return len(self._current())

    def _current(self) -> dict[str, Key]:
        try:
            status = self.path.stat()
            seen = (status.st_mtime_ns, status.st_ino, status.st_size, status.st_mode)
            if seen != self._seen:
                self._keys, self._seen = _index_by_id(_read_keys(self.path)), seen
        except (MettleError, OSError):
            if self._keys or self._seen is not None:
                log.error("the file of keys cannot be used: every request is refused")
            self._keys, self._seen = {}, None
        return self._keys


def create_key(
    path: Path | str, name: str, scopes: Iterable[str], *, tenant: str | None = None, days: float | None = None
) -> str:
    """Add a key and return its token: the only time that it can be seen."""
    path = Path(path)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"name of a key: up to 64 letters, digits, spaces and ._@- wanted, got {repr(name)[:80]}")
    wanted = _check_scopes(scopes)
    if tenant is not None and not (isinstance(tenant, str) and _TENANT.fullmatch(tenant)):
        raise InputError(f"tenant of a key: up to 32 small letters, digits and - wanted, got {repr(tenant)[:80]}")
    if tenant is not None and "workbench" in wanted:
        raise InputError("a key of a tenant cannot have the scope workbench: the page shows the whole gallery")
    if days is not None and not (isinstance(days, int | float) and 0 < days < 36_525):
        raise InputError(f"days until a key expires: a number between 0 and 36525 wanted, got {days!r}")
    id, secret, salt, now = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16), time.time()
    expires = None if days is None else now + 86_400 * days
    with _lock_for_writing(path):
        known = list_keys(path) if path.exists() else ()
        if any(key.name == name for key in known):
            raise InputError(f"there is a key named {name!r} already: revoke it first, or choose another name")
        _write_keys(path, (*known, Key(id, name, wanted, now, expires, tenant, salt, _hash(salt, secret))))
    return f"mettle_{id}_{secret}"


def revoke_key(path: Path | str, name: str) -> Key:
    """Take a key out of the file; running services refuse it from their next request on."""
    path = Path(path)
    with _lock_for_writing(path):
        known = list_keys(path)
        key = next((key for key in known if key.name == name), None)
        if key is None:
            raise InputError(f"no key is named {repr(name)[:80]}{nearest(str(name), [key.name for key in known])}")
        _write_keys(path, tuple(other for other in known if other is not key))
    return key


def list_keys(path: Path | str) -> tuple[Key, ...]:
    """Every key of the file, in the order of creation."""
    return _read_keys(Path(path))


def _check_scopes(given: Iterable[str]) -> tuple[str, ...]:
    """Known scopes, each once, in order."""
    listed = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not listed:
        raise InputError(f"scopes of a key: at least one of {', '.join(SCOPES)} in a list, got {repr(given)[:80]}")
    for scope in listed:
        if scope not in SCOPES:
            raise InputError(f"unknown scope {repr(scope)[:80]}{nearest(str(scope), SCOPES)}")
    return tuple(sorted(set(listed)))


def _hash(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()


def _index_by_id(keys: Iterable[Key]) -> dict[str, Key]:
    return {key.id: key for key in keys}


def _read_keys(path: Path) -> tuple[Key, ...]:
    try:
        content = read_secret(path)
    except FileNotFoundError:
        raise InputError(
            f"there is no file of keys at {path}: make one with its first key, `mettle keys create {path} NAME --scope "
            "identify`"
        ) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    try:
        table = json.loads(content)
        if table["format"] != _FORMAT:
            raise ValueError
        return tuple(_parse_key(entry) for entry in table["keys"])
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{path} is not a file of keys, or is damaged: restore it, or make it anew") from None


def _parse_key(entry: dict[str, Any]) -> Key:
    fields: dict[str, Any] = {**entry, "scopes": tuple(entry["scopes"])}
    key = Key(**fields)
    sound = len(bytes.fromhex(key.salt)) >= 16 and len(bytes.fromhex(key.hash)) == 32 and set(key.scopes) <= set(SCOPES)
    times = isinstance(key.created, int | float) and isinstance(key.expires, int | float | None)
    tenant = key.tenant is None or _TENANT.fullmatch(key.tenant)
    if not (sound and times and tenant and re.fullmatch("[0-9a-f]{12}", key.id) and _NAME.fullmatch(key.name)):
        raise ValueError
    return key


def _write_keys(path: Path, keys: Iterable[Key]) -> None:
    table = {"format": _FORMAT, "keys": [asdict(key) for key in keys]}
    write_secret(path, json.dumps(table, indent=1).encode())


@contextmanager
def _lock_for_writing(path: Path) -> Iterator[None]:
    """One writer at a time: the folder itself is locked, and freed by the kernel if the process dies."""
    try:
        handle = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot keep keys in {path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    finally:
        os.close(handle)


COOKIE = "mettle-session"
SESSION_SECONDS = 8 * 3600
_MOST_SESSIONS = 1000


class Sessions:
    """Which cookie stands for which key."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._known: OrderedDict[str, tuple[str, float]] = OrderedDict()  # hash of the cookie -> key id, end

    def open(self, key: str) -> str:
        """A new cookie for the key of this id."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._known[_hash_cookie(token)] = (key, self._clock() + SESSION_SECONDS)
            while len(self._known) > _MOST_SESSIONS:
                self._known.popitem(last=False)
        return token

    def find(self, token: str) -> str | None:
        """The id of the key that a cookie stands for."""
        with self._lock:
            key, end = self._known.get(_hash_cookie(token), ("", 0.0))
            return key if key and self._clock() < end else None

    def drop(self, token: str) -> None:
        """End a session."""
        with self._lock:
            self._known.pop(_hash_cookie(token), None)


def _hash_cookie(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
