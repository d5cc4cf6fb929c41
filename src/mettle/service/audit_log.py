"""The audit trail: who did what to whom, when, and how it ended; append-only, and chained so that a change shows.

One line of JSON per event:

    {"n": 7, "at": "2031-05-04T10:20:30.123456Z", "who": "front desk", "what": "verify", "subject": "5f1c…",
     "outcome": "match", "request": "…", "before": "<mark of line 6>", "mark": "<this line's>"}

A mark is an HMAC over the line and the mark before it, under a secret that lies beside the trail (``.key``): without it
no line can be changed, added or taken out unseen. Its ``.head`` remembers a late line, so that a trail cut off before
that line shows too, and is not continued. The subject is an HMAC of the identity, so the trail names nobody, yet all
uses of one person can be found. Templates, pictures and scores are never written.

A line is on disk before `append` returns. What a crash leaves unfinished at the end was never acknowledged: it is cut
off at the next start, and a note in the trail says so.
"""

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mettle.errors import DataError, GalleryLocked, GalleryUnavailable, InputError
from mettle.service.private_files import read_secret, write_secret

START = "0" * 64  # the mark before the first line
HEAD_EVERY = 64  # lines between two writings of the head
KEY, HEAD = ".key", ".head"
_SECRET, _OLD_SECRET = 48, 32  # bytes


@dataclass(frozen=True)
class Seal:
    """The secret of a trail, and where its head lies."""

    secret: bytes
    place: Path

    def sealed(self, kind: str, content: str) -> str:
        """A keyed hash of something of this kind: nobody without the secret can make it."""
        return hmac.new(self.secret, f"{kind}\0{content}".encode(), hashlib.sha256).hexdigest()

    def write(self, n: int, mark: str) -> None:
        """Remember a line that is on disk."""
        head = {"n": n, "mark": mark, "seal": self.sealed("head", f"{n} {mark}")}
        write_secret(self.place, json.dumps(head).encode())

    def head(self) -> tuple[int, str] | None:
        """Number and mark of a late line; None where there is no head, DataError where there is no believing it."""
        try:
            head = json.loads(self.place.read_bytes())
            n, mark, seal = int(head["n"]), str(head["mark"]), head.get("seal")
            made = self.sealed("head", f"{n} {mark}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise DataError(f"{self.place.name} is damaged: whether the end was cut off cannot be told") from None
        if (self._asks or seal is not None) and not alike(str(seal), made):
            raise DataError(f"{self.place.name} was changed: whether the end was cut off cannot be told")
        return n, mark

    def gone(self, count: int) -> str | None:
        """What is to be said of a head that is not there though a trail of so many lines must have one."""
        if self.place.exists() or not (self._asks or count >= HEAD_EVERY):
            return None
        return f"{self.place.name} is missing: whether the end was cut off cannot be told"

    @property
    def _asks(self) -> bool:
        return len(self.secret) == _SECRET


def alike(given: str, made: str) -> bool:
    """Whether a hash that was read, which may be any text, is the one that was made."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), made.encode())


def cut(n: int) -> str:
    """What is to be said of a line that the head knows and the trail does not have."""
    return f"line {n}, which was written once, is missing: the end was cut off"


def read_seal(path: Path) -> Seal:
    """The seal of a trail that is only read."""
    key, head = _seal_paths(path)
    if not key.exists():
        raise InputError(f"{key} is missing: without it the trail {path} cannot be checked")
    return Seal(_secret(key), head)


def make_seal(path: Path) -> Seal:
    """The seal of a trail that is to be written; a new one for a new trail. Only for who holds its lock."""
    key, place = _seal_paths(path)
    if key.exists():
        return Seal(_secret(key), place)
    if path.stat().st_size:
        raise DataError(f"{key} is missing, so {path} cannot be continued: restore it or start a new trail")
    if _count_head(place):  # of a trail that was taken away
        raise DataError(f"{place} belongs to a trail that is gone: keep it as evidence and name another new trail")
    seal = Seal(secrets.token_bytes(_SECRET), place)
    seal.write(0, START)
    write_secret(key, seal.secret)
    return seal


def refuse_name(path: Path) -> None:
    """Refuse a trail that is named like what lies beside one."""
    if path.suffix in (KEY, HEAD):
        raise InputError(
            f"{path} cannot be an audit trail: {KEY} and {HEAD} end what lies beside one; call it {path.stem}.jsonl"
        )


def _secret(key: Path) -> bytes:
    content = read_secret(key)
    if len(content) not in (_SECRET, _OLD_SECRET):
        raise DataError(f"{key} is damaged: restore it, or start a new trail")
    return content


def _count_head(place: Path) -> int:
    """How many lines a head knows of; one that a crash left before there was a secret knows of none."""
    try:
        return int(json.loads(place.read_bytes())["n"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 1  # whatever it is, it is not ours to overwrite


def _seal_paths(path: Path) -> tuple[Path, Path]:
    """Where the secret and the head of a trail lie: under its whole name, or as earlier versions had it."""
    refuse_name(path)
    key, head = (path.with_name(path.name + end) for end in (KEY, HEAD))
    old_key, old_head = (path.with_name(path.stem + end) for end in (KEY, HEAD))
    if key.exists() or not old_key.exists():
        return key, head
    # Trails of one stem used to share these files: those of another trail are not for a new one.
    own = (path.exists() and os.path.getsize(path)) or not any(
        other.stem == path.stem and other.suffix not in (KEY, HEAD) and other.name != path.name
        for other in path.parent.iterdir()
    )
    return (old_key, old_head) if own else (key, head)


_TAIL = 1 << 16  # no line is longer


@dataclass(frozen=True)
class Checked:
    """A trail that was read from end to end."""

    lines: int
    problems: tuple[str, ...]  # in words; none: nothing was changed
    torn: int = 0  # bytes at the end that a crash left unfinished; the next start cuts them off

    @property
    def sound(self) -> bool:
        """Whether every line is as it was written and none is missing."""
        return not self.problems


class Trail:
    """A trail that is open for writing, by one process at a time; safe to use from many threads."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._lock = threading.Lock()
        self._broken = False
        refuse_name(self.path)
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            self._file: int | None = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise _unopened(self.path, error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._seal = make_seal(self.path)
            self._count, self._mark, torn = self._last()
            behind = self._check_head()
            if torn:
                os.ftruncate(self._file, os.fstat(self._file).st_size - torn)
                self.append("-", "start", f"note: cut {torn} bytes that a crash left unfinished")
            if torn or behind:
                self._write_head()
        except BlockingIOError:
            os.close(self._file)
            raise GalleryLocked(f"another process writes to the audit trail {self.path}: give each its own") from None
        except OSError as error:
            os.close(self._file)
            raise _unopened(self.path, error) from None
        except BaseException:
            os.close(self._file)
            raise

    def append(self, who: str, what: str, outcome: str, *, subject: str | None = None, **more: str | int) -> None:
        """Write one line and wait until it is on disk; raises GalleryUnavailable where that cannot be had."""
        with self._lock:
            if self._file is None or self._broken:
                raise GalleryUnavailable("the audit trail is closed or cannot be written")
            at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            line: dict[str, Any] = {"n": self._count + 1, "at": at, "who": who, "what": what, "outcome": outcome}
            if subject is not None:
                line["subject"] = self.subject(subject)
            line |= {**more, "before": self._mark}
            line["mark"] = mark = _mark(self._seal, line)
            content = json.dumps(line).encode() + b"\n"
            before = os.fstat(self._file).st_size
            try:
                if os.write(self._file, content) != len(content):
                    raise OSError
                os.fsync(self._file)
            except OSError:
                self._undo(before)
                raise GalleryUnavailable("the audit trail cannot be written: is its disk full?") from None
            self._count, self._mark = self._count + 1, mark
            if self._count % HEAD_EVERY == 0:
                self._write_head()

    def subject(self, identity: str) -> str:
        """What the trail calls an identity."""
        return _subject(self._seal, identity)

    def close(self) -> None:
        """Remember the last line and let go of the file; may be called twice."""
        with self._lock:
            if self._file is not None:
                if not self._broken:
                    self._write_head()
                os.close(self._file)
                self._file = None

    def _undo(self, size: int) -> None:
        """Take back half a line; where even that fails, nothing more is written behind it."""
        try:
            os.ftruncate(self._file, size)  # type: ignore[arg-type]
        except OSError:
            self._broken = True

    def _write_head(self) -> None:
        with suppress(OSError):  # an older head stays true; the lines themselves are on disk
            self._seal.write(self._count, self._mark)

    def _check_head(self) -> bool:
        """Refuse to go on where the end was cut off: going on would erase that. Whether the head is behind the end."""
        try:
            head = self._seal.head()
            problem = self._seal.gone(self._count)
            if head is not None and head[0] >= self._count and head != (self._count, self._mark):
                problem = cut(head[0])
        except DataError as error:
            head, problem = None, str(error)
        if problem:
            raise DataError(
                f"the audit trail {self.path} cannot be continued: {problem}; keep it, its .key and its .head as "
                "evidence, and start a new one under another name"
            )
        return head is None or head[0] < self._count

    def _last(self) -> tuple[int, str, int]:
        """Number and mark of the last whole line, and how many bytes of an unfinished one follow it."""
        assert self._file is not None
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, min(size, 2 * _TAIL), max(0, size - 2 * _TAIL))
        whole, _, rest = tail.rpartition(b"\n")
        if size > 0 and not whole and len(rest) == len(tail) and size > _TAIL:
            raise DataError(f"{self.path} is not an audit trail: keep it aside and start a new one")
        if not whole:
            return 0, START, len(rest)
        line = _parsed(whole.rpartition(b"\n")[2])
        if line is None or not alike(line["mark"], _mark(self._seal, line)):
            raise DataError(
                f"the last line of the audit trail {self.path} was changed: keep it as evidence and start a new one"
            )
        return line["n"], line["mark"], len(rest)


def verify_trail(path: Path | str) -> Checked:
    """Read a whole trail and name every line that was changed, added, moved or taken out."""
    path = Path(path)
    seal, wanted = read_seal(path), None
    problems: list[str] = []
    count, mark, torn, marks = 0, START, 0, {0: START}
    try:
        wanted = seal.head()  # before the lines: a service that runs writes more of them meanwhile
    except DataError as error:
        problems.append(str(error))
    for number, raw in enumerate(_lines(path), 1):
        if not raw.endswith(b"\n"):
            torn = len(raw)
            break
        line = _parsed(raw)
        if line is None:
            problems.append(f"line {number} is no line of a trail")
            count += 1
            continue
        if not alike(line["mark"], _mark(seal, line)):
            problems.append(f"line {number} was changed")
        elif line["n"] != count + 1 or line["before"] != mark:
            problems.append(f"line {number} does not follow the one before it")
        count, mark = line["n"], line["mark"]
        if wanted and line["n"] == wanted[0]:
            marks[wanted[0]] = line["mark"]
    if wanted and marks.get(wanted[0]) != wanted[1]:
        problems.append(cut(wanted[0]))
    if gone := seal.gone(count):
        problems.append(gone)
    return Checked(count, tuple(problems), torn)


def uses(path: Path | str, identity: str) -> Iterator[dict[str, Any]]:
    """Every line about one identity: what a person may ask to see."""
    path = Path(path)
    seal = read_seal(path)
    wanted = {_subject(seal, identity), _hashed(seal, identity)}  # older trails have names as they were typed
    for raw in _lines(path):
        line = _parsed(raw)
        if line is not None and line.get("subject") in wanted:
            yield line


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while raw := file.readline(2 * _TAIL):
                yield raw
    except OSError as error:
        raise InputError(f"the trail {path} cannot be read: {error.strerror}") from None


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(line, dict) and all(isinstance(line.get(name), str) for name in ("mark", "before"))
    return line if whole and isinstance(line.get("n"), int) else None


def _mark(seal: Seal, line: dict[str, Any]) -> str:
    return seal.sealed(
        "line", json.dumps({name: value for name, value in line.items() if name != "mark"}, sort_keys=True)
    )


def _subject(seal: Seal, identity: str) -> str:
    return _hashed(seal, unicodedata.normalize("NFC", identity))  # however it is spelt, one person


def _hashed(seal: Seal, identity: str) -> str:
    return seal.sealed("subject", identity)[:32]


def _unopened(path: Path, error: OSError) -> GalleryUnavailable:
    return GalleryUnavailable(f"the audit trail {path} cannot be opened: {error.strerror}")
