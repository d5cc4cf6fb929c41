"""The audit log: who did what to whom, when, and how it ended; append-only, and chained so that a change shows.

One line of JSON per event:

    {"n": 7, "at": "2031-05-04T10:20:30.123456Z", "who": "front desk", "what": "verify", "subject": "5f1c…",
     "outcome": "match", "previous_mac": "<mac of line 6>", "mac": "<this line's>"}

``mac`` is an HMAC-SHA256 over the line and the mac before it, under a secret that lies beside the log (``.key``):
without it no line can be changed, added or taken out unseen. The ``.checkpoint`` remembers a late line under the same
secret, so that a log cut off before that line shows too, and is not continued. Both have mode 0600. A checkpoint is
written first when a log is made, then the secret, then the first line, and only ever after the line that it names: a
crash leaves one that is behind, never one that is ahead or missing. The subject is an HMAC of the identity, so the log
names nobody, yet all uses of one person can be found. Templates, pictures and scores are never written.

A line is on disk before `AuditLog.append` returns. What a crash leaves unfinished at the end was never acknowledged: it
is cut off at the next start, and a note in the log says so.
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

from mettle.errors import DataError, GalleryLocked, GalleryUnavailable, InputError, MettleError
from mettle.service.private_files import read_secret, write_secret

FIRST_MAC = "0" * 64  # before the first line
CHECKPOINT_EVERY = 64  # lines
SECRET_SUFFIX, CHECKPOINT_SUFFIX = ".key", ".checkpoint"
SECRET_BYTES = 32
LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class AuditLogCheck:
    """A log that was read from end to end."""

    lines: int
    problems: tuple[str, ...]  # in words; none: nothing was changed
    torn: int = 0  # bytes at the end that a crash left unfinished; the next start cuts them off

    @property
    def sound(self) -> bool:
        """Whether every line is as it was written and none is missing."""
        return not self.problems


class AuditLog:
    """A log that is open for writing, by one process at a time; safe to use from many threads."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._lock = threading.Lock()
        self._broken = False  # half a line could not be taken back: nothing more is written behind it
        self._missed = 0  # lines that could not be written since the last one that was
        _check_name(self.path)
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            self._file: int | None = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise _open_error(self.path, error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._seal = _create_seal(self.path)
            self._count, self._mac, torn = self._read_end()
            behind = self._check_checkpoint()
            if torn:
                os.ftruncate(self._file, os.fstat(self._file).st_size - torn)
                self.append("-", "start", f"note: cut {torn} bytes that a crash left unfinished")
            if torn or behind:
                self._write_checkpoint()
        except BlockingIOError:
            os.close(self._file)
            raise GalleryLocked(f"another process writes to the audit log {self.path}: give each its own") from None
        except OSError as error:
            os.close(self._file)
            raise _open_error(self.path, error) from None
        except BaseException:
            os.close(self._file)
            raise

    def append(self, who: str, what: str, outcome: str, *, subject: str | None = None, **more: str | int) -> None:
        """Write one line and wait until it is on disk; raises GalleryUnavailable where that cannot be had."""
        with self._lock:
            if self._file is None or self._broken:
                self._missed += 1
                raise GalleryUnavailable("the audit log is closed or cannot be written")
            at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            line: dict[str, Any] = {"n": self._count + 1, "at": at, "who": who, "what": what, "outcome": outcome}
            if subject is not None:
                line["subject"] = self.subject_mac(subject)
            if self._missed:
                line["missed"] = self._missed
            line |= {**more, "previous_mac": self._mac}
            line["mac"] = mac = _line_mac(self._seal, line)
            content = json.dumps(line).encode() + b"\n"
            before = os.fstat(self._file).st_size
            try:
                if os.write(self._file, content) != len(content):
                    raise OSError
                os.fsync(self._file)
            except OSError:
                self._missed += 1
                self._truncate(before)
                raise GalleryUnavailable("the audit log cannot be written: is its disk full?") from None
            self._count, self._mac, self._missed = self._count + 1, mac, 0
            if self._count % CHECKPOINT_EVERY == 0:
                self._write_checkpoint()

    def subject_mac(self, identity: str) -> str:
        """What the log calls an identity."""
        return _subject_mac(self._seal, identity)

    def is_writable(self) -> bool:
        """Whether lines can be written; where the last one could not, another try is made, with a note."""
        if not self._missed:
            return self._file is not None and not self._broken
        try:
            self.append("-", "health", "note: lines can be written again")
        except MettleError:
            return False
        return True

    def close(self) -> None:
        """Remember the last line and let go of the file; may be called twice."""
        with self._lock:
            if self._file is not None:
                if not self._broken:
                    self._write_checkpoint()
                os.close(self._file)
                self._file = None

    def _truncate(self, size: int) -> None:
        """Take back half a line."""
        try:
            os.ftruncate(self._file, size)  # type: ignore[arg-type]
        except OSError:
            self._broken = True

    def _write_checkpoint(self) -> None:
        with suppress(OSError):  # an older checkpoint stays true; the lines themselves are on disk
            self._seal.write_checkpoint(self._count, self._mac)

    def _check_checkpoint(self) -> bool:
        """Refuse to go on where the end was cut off: going on would erase that. Whether the checkpoint is behind."""
        try:
            n, mac = self._seal.read_checkpoint()
            problem = _cut_off(n) if n >= self._count and (n, mac) != (self._count, self._mac) else None
        except DataError as error:
            n, problem = 0, str(error)
        if problem:
            raise DataError(
                f"the audit log {self.path} cannot be continued: {problem}; keep it, its {SECRET_SUFFIX} and its "
                f"{CHECKPOINT_SUFFIX} as evidence, and start a new one under another name"
            )
        return n < self._count

    def _read_end(self) -> tuple[int, str, int]:
        """Number and mac of the last whole line, and how many bytes of an unfinished one follow it."""
        assert self._file is not None
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, min(size, 2 * LONGEST_LINE), max(0, size - 2 * LONGEST_LINE))
        whole, _, rest = tail.rpartition(b"\n")
        if size > 0 and not whole and len(rest) == len(tail) and size > LONGEST_LINE:
            raise DataError(f"{self.path} is not an audit log: keep it aside and start a new one")
        if not whole:
            return 0, FIRST_MAC, len(rest)
        line = _parse_line(whole.rpartition(b"\n")[2])
        if line is None or not _is_equal(line["mac"], _line_mac(self._seal, line)):
            raise DataError(
                f"the last line of the audit log {self.path} was changed: keep it as evidence and start a new one"
            )
        return line["n"], line["mac"], len(rest)


@dataclass(frozen=True)
class _Seal:
    """The secret of a log, and where its checkpoint lies."""

    secret: bytes
    path: Path

    def mac(self, kind: str, content: str) -> str:
        """A keyed hash of something of this kind: nobody without the secret can make it."""
        return hmac.new(self.secret, f"{kind}\0{content}".encode(), hashlib.sha256).hexdigest()

    def write_checkpoint(self, n: int, mac: str) -> None:
        """Remember a line that is on disk."""
        table = {"n": n, "mac": mac, "seal": self.mac("checkpoint", f"{n} {mac}")}
        write_secret(self.path, json.dumps(table).encode())

    def read_checkpoint(self) -> tuple[int, str]:
        """Number and mac of a late line; DataError where there is no checkpoint, or no believing it."""
        unknown = "whether the end was cut off cannot be told"
        try:
            table = json.loads(self.path.read_bytes())
            n, mac, seal = int(table["n"]), str(table["mac"]), str(table.get("seal"))
            made = self.mac("checkpoint", f"{n} {mac}")
        except FileNotFoundError:
            raise DataError(f"{self.path.name} is missing: {unknown}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise DataError(f"{self.path.name} is damaged: {unknown}") from None
        if not _is_equal(seal, made):
            raise DataError(f"{self.path.name} was changed: {unknown}")
        return n, mac


def verify_audit_log(path: Path | str) -> AuditLogCheck:
    """Read a whole log and name every line that was changed, added, moved or taken out."""
    path = Path(path)
    seal, wanted = _open_seal(path), (0, FIRST_MAC)
    problems: list[str] = []
    count, mac, torn, found = 0, FIRST_MAC, 0, FIRST_MAC
    try:
        wanted = seal.read_checkpoint()  # before the lines: a service that runs writes more of them meanwhile
        found = FIRST_MAC if wanted[0] == 0 else ""
    except DataError as error:
        problems.append(str(error))
    for number, raw in enumerate(_read_lines(path), 1):
        if not raw.endswith(b"\n"):
            torn = len(raw)
            break
        line = _parse_line(raw)
        if line is None:
            problems.append(f"line {number} is no line of an audit log")
            count += 1
            continue
        if not _is_equal(line["mac"], _line_mac(seal, line)):
            problems.append(f"line {number} was changed")
        elif line["n"] != count + 1 or line["previous_mac"] != mac:
            problems.append(f"line {number} does not follow the one before it")
        count, mac = line["n"], line["mac"]
        if line["n"] == wanted[0]:
            found = line["mac"]
    if found != wanted[1]:
        problems.append(_cut_off(wanted[0]))
    return AuditLogCheck(count, tuple(problems), torn)


def entries_about(path: Path | str, identity: str) -> Iterator[dict[str, Any]]:
    """Every line about one identity: what a person may ask to see."""
    path = Path(path)
    subject = _subject_mac(_open_seal(path), identity)
    for raw in _read_lines(path):
        line = _parse_line(raw)
        if line is not None and line.get("subject") == subject:
            yield line


def _open_seal(path: Path) -> _Seal:
    """The seal of a log that is only read."""
    secret, checkpoint = _seal_paths(path)
    if not secret.exists():
        raise InputError(f"{secret} is missing: without it the audit log {path} cannot be checked")
    return _Seal(_read_key(secret), checkpoint)


def _create_seal(path: Path) -> _Seal:
    """The seal of a log that is to be written; a new one for a new log. Only for who holds its lock."""
    secret, checkpoint = _seal_paths(path)
    if secret.exists():
        return _Seal(_read_key(secret), checkpoint)
    if path.stat().st_size:
        raise DataError(f"{secret} is missing, so {path} cannot be continued: restore it or start a new log")
    if _names_a_line(checkpoint):  # of a log that was taken away
        raise DataError(f"{checkpoint} belongs to a log that is gone: keep it as evidence and name another new log")
    seal = _Seal(secrets.token_bytes(SECRET_BYTES), checkpoint)
    seal.write_checkpoint(0, FIRST_MAC)
    write_secret(secret, seal.secret)
    return seal


def _read_key(path: Path) -> bytes:
    content = read_secret(path)
    if len(content) != SECRET_BYTES:
        raise DataError(f"{path} is damaged: restore it, or start a new log")
    return content


def _names_a_line(checkpoint: Path) -> bool:
    """Whether a checkpoint knows of a line; one that a crash left before there was a secret does not."""
    try:
        return bool(int(json.loads(checkpoint.read_bytes())["n"]))
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return True  # whatever it is, it is not ours to overwrite


def _seal_paths(path: Path) -> tuple[Path, Path]:
    """Where the secret and the checkpoint of a log lie."""
    _check_name(path)
    return path.with_name(path.name + SECRET_SUFFIX), path.with_name(path.name + CHECKPOINT_SUFFIX)


def _check_name(path: Path) -> None:
    """Refuse a log that is named like what lies beside one."""
    if path.suffix in (SECRET_SUFFIX, CHECKPOINT_SUFFIX):
        raise InputError(
            f"{path} cannot be an audit log: {SECRET_SUFFIX} and {CHECKPOINT_SUFFIX} end what lies beside one; call it "
            f"{path.stem}.jsonl"
        )


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while raw := file.readline(2 * LONGEST_LINE):
                yield raw
    except OSError as error:
        raise InputError(f"the audit log {path} cannot be read: {error.strerror}") from None


def _parse_line(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(line, dict) and all(isinstance(line.get(name), str) for name in ("mac", "previous_mac"))
    return line if whole and isinstance(line.get("n"), int) else None


def _line_mac(seal: _Seal, line: dict[str, Any]) -> str:
    return seal.mac("line", json.dumps({name: value for name, value in line.items() if name != "mac"}, sort_keys=True))


def _subject_mac(seal: _Seal, identity: str) -> str:
    """What the log calls an identity: however its name is spelt, one person."""
    return seal.mac("subject", unicodedata.normalize("NFC", identity))[:32]


def _is_equal(given: str, made: str) -> bool:
    """Whether a hash that was read, which may be any text, is the one that was made."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), made.encode())


def _cut_off(n: int) -> str:
    return f"line {n}, which was written once, is missing: the end was cut off"


def _open_error(path: Path, error: OSError) -> GalleryUnavailable:
    return GalleryUnavailable(f"the audit log {path} cannot be opened: {error.strerror}")
