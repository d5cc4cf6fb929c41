"""Pictures that look alike: resized, re-encoded, brightened or mirrored copies, found fast among a hundred thousand.

A *look* is the 12 x 12 lowest frequencies (cosine transform) of a 32 x 32 miniature in grey, without the mean, of
length one: size, encoding, brightness and contrast hardly change it. The cosine of two looks is their likeness; from
0.99 on two pictures are near-copies. A mirrored picture has the same look with every second column of frequencies
negated.

Lookup: 16 hashes of up to 20 bits each, a bit saying on which side of a random plane through the middle of all looks a
look lies. Only pictures that share a hash are compared, and near-copies share one of 16 almost surely, unless all
pictures are much alike: where unrelated ones have a cosine of 0.8, one near-copy in twenty is missed. Sets of up to
8,000 and 8,000 pictures are compared in full.

Not found: crops of more than a few per cent, turns, other colours of the same brightness. A picture of one colour has
no look and is like no other.

Test samples whose very content was trained on: found before a run is spent on them, told wherever it is measured.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from mettle.data.dataset import Samples
from mettle.data.image_decoding import shown
from mettle.data.inputs import ImageFiles

SIDE, LOW = 32, 12  # of the miniature; frequencies kept each way
SIZE = LOW * LOW - 1  # numbers in a look
ALIKE = 0.99
FLAT = 1.0  # grey levels: less variation than this is one colour and noise
IN_FULL = 1 << 26  # pairs up to which all are compared
TABLES = 16
MOST = 64  # of one hash that a picture is compared with
_PAIRS = 1 << 18  # compared at a time


class Alike(NamedTuple):
    """A picture of the second set, by position, and the one of the first that it is most like."""

    first: int
    second: int
    likeness: float
    mirrored: bool


def look(pixels: np.ndarray) -> np.ndarray:
    """The look of one picture, (h, w), (h, w, 1) or (h, w, 3) uint8: (143,) float32, zeros where it has none."""
    grey = Image.fromarray(pixels if pixels.ndim == 2 or pixels.shape[2] == 3 else pixels[:, :, 0]).convert("L")
    small = np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float64)
    found = (_COSINES @ small @ _COSINES.T).reshape(-1)[1:]
    length = np.linalg.norm(found)
    return (found / length if length > FLAT * SIDE else np.zeros(SIZE)).astype(np.float32)


def alike(first: np.ndarray, second: np.ndarray, *, least: float = ALIKE) -> list[Alike]:
    """For each picture of the second set the most alike of the first, upright or mirrored, where that is near.

    Args:
        first: (n, 143) looks.
        second: (m, 143) looks.
        least: likeness from which two pictures are near-copies.
    """
    best, at = np.full(len(second), -1.0, np.float32), np.zeros(len(second), np.int64)
    flipped = np.zeros(len(second), bool)
    if len(first) and len(second):
        for mirrored in (False, True):
            score, found = _best(first, second * _MIRROR if mirrored else second, least)
            better = score > best
            best[better], at[better], flipped[better] = score[better], found[better], mirrored
    return [Alike(int(at[j]), int(j), float(best[j]), bool(flipped[j])) for j in np.flatnonzero(best >= least)]


def _best(first: np.ndarray, second: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """The highest likeness of each row of the second set, and to whom; what is below ``least`` may be missed."""
    best, at = np.full(len(second), -1.0, np.float32), np.zeros(len(second), np.int64)
    if len(first) * len(second) <= IN_FULL:
        for start in range(0, len(second), step := max(1, _PAIRS * 16 // len(first))):
            tile = second[start : start + step] @ first.T
            at[start : start + step] = tile.argmax(1)
            best[start : start + step] = tile.max(1)
        return best, at
    rng = np.random.default_rng(0)
    middle = (first.sum(0) + second.sum(0)) / (len(first) + len(second))
    bits = int(np.clip(np.ceil(np.log2(len(first))), 8, 20))
    for _ in range(TABLES):
        planes = rng.normal(size=(SIZE, bits)).astype(np.float32)
        searching = np.flatnonzero(best < least)  # who has found a near-copy looks no further
        one, two = _hashed(first - middle, planes), _hashed(second[searching] - middle, planes)
        order, turn = np.argsort(one, kind="stable"), np.argsort(two, kind="stable")  # so that memory is read in order
        rows, searching = first[order], searching[turn]
        for i, j in _sharing(one[order], two[turn]):
            score = np.einsum("nd,nd->n", rows[i], second[searching[j]])
            top = np.lexsort((score, j))
            top = top[np.append(j[top][1:] != j[top][:-1], True)]  # the highest of each
            i, j, score = order[i[top]], searching[j[top]], score[top]
            better = score > best[j]
            best[j[better]], at[j[better]] = score[better], i[better]
    return best, at


def _hashed(looks: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Which side of each plane every look lies on, as the bits of a number."""
    return (looks @ planes > 0) @ (1 << np.arange(planes.shape[1]))


def _sharing(one: np.ndarray, two: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions of pairs with one hash, from two ascending lists of hashes, some at a time."""
    low, high = np.searchsorted(one, two, side="left"), np.searchsorted(one, two, side="right")
    count = np.minimum(high - low, MOST)
    for start in range(0, len(two), step := _PAIRS // MOST):
        some = count[start : start + step]
        j = np.repeat(np.arange(start, start + len(some)), some)
        i = np.arange(len(j)) - np.repeat(np.cumsum(some) - some, some) + low[j]
        if len(j):
            yield i, j


def _cosines() -> np.ndarray:
    """The first rows of the orthonormal cosine transform."""
    k, x = np.arange(LOW)[:, None], np.arange(SIDE)[None]
    rows = np.cos(np.pi * k * (2 * x + 1) / (2 * SIDE)) * np.sqrt(2 / SIDE)
    rows[0] /= np.sqrt(2)
    return rows


_COSINES = _cosines()
_MIRROR = np.where(np.arange(LOW * LOW)[1:] % LOW % 2, -1, 1).astype(np.float32)


@dataclass(frozen=True)
class Copies:
    """How many test samples are exact copies of training ones, and the first of them by name."""

    count: int
    tested: int
    test: str = ""
    train: str = ""

    def __str__(self) -> str:
        return (
            f"{self.count:,} of {self.tested:,} test samples are exact copies of training samples (first: {self.test}, "
            f"a copy of {self.train}): what is measured on them flatters the model. `mettle data check` looks for more"
        )


def copies(samples: Samples) -> Copies:
    """Compare the content of the test split with that of the training split: pixels in memory, else bytes of files."""
    train, test = (np.flatnonzero(samples.split == code) for code in (0, 2))
    if len(train) == 0 or len(test) == 0:
        return Copies(0, len(test))
    tested = len(test)
    if isinstance(samples.inputs, ImageFiles):  # equal files have equal sizes: the others need not be read
        sizes = {i: _size(samples, i) for i in (*train.tolist(), *test.tolist())}
        both = {sizes[i] for i in train.tolist()} & {sizes[i] for i in test.tolist()}
        train, test = (np.asarray([i for i in part.tolist() if sizes[i] in both], np.int64) for part in (train, test))
    digest = _digest(samples)
    first: dict[bytes, int] = {}
    for i in train.tolist():
        first.setdefault(digest(i), i)
    pairs = [(i, first[key]) for i in test.tolist() if (key := digest(i)) in first]
    if not pairs:
        return Copies(0, tested)
    return Copies(len(pairs), tested, *(_called(samples, i) for i in pairs[0]))


def _digest(samples: Samples) -> Callable[[int], bytes]:
    """One hash of an item's content."""
    content = getattr(samples.inputs, "content", None)

    def digest(i: int) -> bytes:
        data = samples.read(np.array([i])).tobytes() if content is None else content(int(samples.at[i]))
        return hashlib.blake2b(data, digest_size=16).digest()

    return digest


def _size(samples: Samples, i: int) -> int:
    inputs = samples.inputs
    assert isinstance(inputs, ImageFiles)
    return inputs.path(int(samples.at[i])).stat().st_size


def _called(samples: Samples, i: int) -> str:
    return f"{shown(samples.name(i))} of {shown(samples.label.names[samples.labels[i]])}"
