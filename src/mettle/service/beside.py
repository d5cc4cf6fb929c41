"""What lies beside an audit trail: the secret of its marks, and its head, which says how far it has come.

``trail.jsonl`` has ``trail.jsonl.key`` and ``trail.jsonl.head``, of mode 0600. The head is sealed under the secret; it
is written first when a trail is made, then the secret, then the first line, and only ever after the line that it names.
So a crash leaves a head that is behind, never one that is ahead or gone: those mean that somebody cut.

Earlier versions named them ``trail.key`` and ``trail.head``, sealed nothing, and wrote the first head after 64 lines or
at the end. A trail that has these files keeps them. Its secret has 32 bytes; one of 48 asks for a sealed head from the
first line on, and cannot be made into one of 32 without every mark becoming wrong.
"""

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from mettle.errors import DataError, InputError
from mettle.service.secret import read_secret, write_secret

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
    key, head = _names(path)
    if not key.exists():
        raise InputError(f"{key} is missing: without it the trail {path} cannot be checked")
    return Seal(_secret(key), head)


def make_seal(path: Path) -> Seal:
    """The seal of a trail that is to be written; a new one for a new trail. Only for who holds its lock."""
    key, place = _names(path)
    if key.exists():
        return Seal(_secret(key), place)
    if path.stat().st_size:
        raise DataError(f"{key} is missing, so {path} cannot be continued: restore it or start a new trail")
    if _lines_of(place):  # of a trail that was taken away
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


def _lines_of(place: Path) -> int:
    """How many lines a head knows of; one that a crash left before there was a secret knows of none."""
    try:
        return int(json.loads(place.read_bytes())["n"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 1  # whatever it is, it is not ours to overwrite


def _names(path: Path) -> tuple[Path, Path]:
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
