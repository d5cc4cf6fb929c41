"""What is kept in a storage, whichever database keeps it: names, vectors, their checksums and the digest of it all.

Every row carries a CRC-32 of the name of its table, its key and its values, which finds every flipped bit of it, and a
row that stands under another key. `RevisionState` sums these checksums up for each table, so that rows that are
missing, or there twice, are found as well.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np

from mettle.errors import GalleryError, InputError

IDENTITY_BYTES = 512  # longest name of an identity, in UTF-8


UNIT = 1e-3  # how far from 1 the length of a template may be


FLOATS = np.dtype("<f4")  # vectors are kept in one byte order, so files and checksums travel between machines


@dataclass(frozen=True)
class ContentDigest:
    """What a storage holds, in three facts: equal facts mean equal content."""

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


def row_checksum(table: str, *values: str | int | None) -> int:
    """CRC of one row: of the table's name, the key and further values, as text."""
    return zlib.crc32(" ".join([table, *map(str, values)]).encode())


# Identities and templates are read by the thousand. Their numbers go into the checksum as three 64-bit integers behind
# the name of the table, and what follows them is a name or a vector, so that whole columns are summed without a loop.
_pack_numbers = struct.Struct("<3q").pack
_IDENTITIES, _TEMPLATES = zlib.crc32(b"identities"), zlib.crc32(b"templates")


def identity_checksums(
    ids: Iterable[int], templates: Iterable[int], template_sums: Iterable[int], names: Iterable[str]
) -> list[int]:
    """CRC of each identity; raises struct.error, TypeError or UnicodeError for what can stand in no row."""
    heads = map(zlib.crc32, map(_pack_numbers, ids, templates, template_sums), repeat(_IDENTITIES))
    return list(map(zlib.crc32, map(str.encode, names), heads))


def template_checksums(
    numbers: Iterable[int], identities: Iterable[int], sequences: Iterable[int], vectors: Iterable[bytes]
) -> list[int]:
    """CRC of each template; raises struct.error or TypeError for what can stand in no row."""
    heads = map(zlib.crc32, map(_pack_numbers, numbers, identities, sequences), repeat(_TEMPLATES))
    return list(map(zlib.crc32, vectors, heads))


def damage_error(what: str, remedy: str = "restore a snapshot") -> GalleryError:
    """What is raised about a row that is not as it was written."""
    return GalleryError(f"{what}: the storage is damaged, {remedy}")


@dataclass(frozen=True)
class RevisionState:
    """How far a storage has come, and what its tables hold: the one row by which missing rows are found."""

    sequence: int = 0  # of the last change
    next_number: int = 1  # of a template
    next_identity: int = 1
    oldest_sequence: int = 0  # what came before it is forgotten
    identities: int = 0
    identity_sum: int = 0  # of the checksums of all identities, and so on
    templates: int = 0
    template_sum: int = 0
    requests: int = 0
    request_sum: int = 0
    metadata_sum: int = 0
    calibrated_since: int = 0  # the first change after the calibration that is kept was measured; 0: there is none
    added: int = 0  # templates there now that came since

    @classmethod
    @lru_cache(maxsize=64)  # it is read for every question, and changes only with the storage
    def from_row(cls, row: tuple) -> "RevisionState":
        """The state that a row holds: its fields in order, then the checksum."""
        *values, checksum = row
        if any(type(value) is not int for value in row) or row_checksum("revision_state", *values) != checksum:
            raise damage_error("the state of the revision fails its checksum")
        state = cls(*values)
        if min(values) < 0 or not 0 <= state.oldest_sequence <= state.sequence or state.next_number < 1:
            raise damage_error("the state of the revision is out of range")
        return state

    def row(self) -> tuple[int, ...]:
        """What is written: all fields, then the checksum."""
        values = astuple(self)
        return *values, row_checksum("revision_state", *values)


@dataclass
class RowSum:
    """Adds up how many rows there are and their checksums."""

    rows: int = 0
    checksums: int = 0

    def add(self, checksum: int, rows: int = 1) -> None:
        """Count rows whose checksums sum up to this."""
        self.rows += rows
        self.checksums += checksum

    def compare(self, rows: int, checksums: int, what: str) -> None:
        """Refuse other rows than the state says that there are."""
        if (self.rows, self.checksums) != (rows, checksums):
            wrong = (
                f"{self.rows} {what} are there instead of {rows}" if self.rows != rows else f"other {what} are there"
            )
            raise damage_error(wrong)


def keyed_hash(salt: str, text: str) -> str:
    """A keyed hash that stands for a name where the name itself must not be kept."""
    return hashlib.blake2b(text.encode(), key=bytes.fromhex(salt), digest_size=32).hexdigest()


class ContentCounter:
    """Adds up templates in any order to one `ContentDigest`.

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

    def content(self) -> ContentDigest:
        """Everything added so far."""
        facts = f"{self.dim} {len(self._names)} {self._count} {self._sum:064x}"
        return ContentDigest(len(self._names), self._count, hashlib.sha256(facts.encode()).hexdigest())
