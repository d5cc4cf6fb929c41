"""What is kept in a record, whichever database keeps it: names, vectors, their checksums and the digest of it all."""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mettle.errors import InputError

IDENTITY_BYTES = 512  # longest name of an identity, in UTF-8


UNIT = 1e-3  # how far from 1 the length of a template may be


FLOATS = np.dtype("<f4")  # vectors are kept in one byte order, so files and checksums travel between machines


@dataclass(frozen=True)
class Content:
    """What a record holds, in three facts: equal facts mean equal content."""

    identities: int
    templates: int
    digest: str


def check_name(text: Any, argument: str = "identity") -> str:
    """Refuse what cannot be a name; anything else is data, kept as it came."""
    if not isinstance(text, str):
        raise InputError(f"{argument} must be text, got {type(text).__name__}")
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise InputError(f"{argument} holds half of a surrogate pair, which is not a character: {text!r:.80}") from None
    if not 1 <= length <= IDENTITY_BYTES:
        raise InputError(f"{argument} must be 1 to {IDENTITY_BYTES} bytes of UTF-8, got {length}")
    if "\0" in text:
        raise InputError(f"{argument} must not hold a NUL character: {text!r:.80}")
    return str(text)  # subclasses are not for databases


def check_vectors(given: Any, dim: int, argument: str = "vectors") -> np.ndarray:
    """(m, dim) finite float32 rows of unit length, or a refusal."""
    array = np.asarray(given)
    if array.dtype.kind != "f" or array.ndim != 2 or array.shape[1] != dim or not len(array):
        raise InputError(f"{argument} must be (m, {dim}) floats with m >= 1, got {array.dtype} {array.shape}")
    array = np.ascontiguousarray(array, dtype=FLOATS)
    length = np.linalg.norm(array.astype(np.float64), axis=1)
    wrong = np.flatnonzero(~(np.abs(length - 1) <= UNIT))  # written so that NaN is wrong too
    if len(wrong):
        raise InputError(f"{argument}[{wrong[0]}] must be finite and of length 1, its length is {length[wrong[0]]:.6g}")
    return array


def row_checksum(number: int, identity: str, vector: bytes) -> int:
    """CRC of one row; it covers whose template this is, so rows that were swapped are found too."""
    return zlib.crc32(vector, zlib.crc32(f"{number} {identity}".encode()))


def keyed_hash(salt: str, text: str) -> str:
    """A keyed hash that stands for a name where the name itself must not be kept."""
    return hashlib.blake2b(text.encode(), key=bytes.fromhex(salt), digest_size=32).hexdigest()


class Tally:
    """Adds up templates in any order to one `Content`.

    The sum of one SHA-256 per template is the same for any order, and a template that is there twice counts twice.
    """

    def __init__(self, dim: int):
        self.dim = dim
        self._names: set[str] = set()
        self._count = 0
        self._sum = 0

    def add(self, identities: Sequence[str], rows: np.ndarray) -> None:
        """Count (n, dim) rows of these identities."""
        for identity, row in zip(identities, np.ascontiguousarray(rows, dtype=FLOATS), strict=True):
            text = identity.encode()
            hashed = hashlib.sha256(len(text).to_bytes(4, "little") + text + row.tobytes()).digest()
            self._sum = (self._sum + int.from_bytes(hashed, "little")) % (1 << 256)
        self._names.update(identities)
        self._count += len(rows)

    def content(self) -> Content:
        """Everything added so far."""
        facts = f"{self.dim} {len(self._names)} {self._count} {self._sum:064x}"
        return Content(len(self._names), self._count, hashlib.sha256(facts.encode()).hexdigest())
