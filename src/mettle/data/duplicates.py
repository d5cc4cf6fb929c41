"""Samples with the same content, and images that look alike; for checks, for training and for evaluation.

Exact duplicates have one hash of their bytes: of a file, or of the pixels or numbers in memory.

Near duplicates are resized, re-encoded, brightened or mirrored copies, found fast among a hundred thousand. The
*descriptor* of an image is the 12 x 12 lowest frequencies (cosine transform) of a 32 x 32 miniature in grey,
without the mean, of length one: size, encoding, brightness and contrast hardly change it. From a cosine of 0.99 on
two images are near duplicates. A mirrored image has the same descriptor with every second column of frequencies
negated.

Lookup: 16 hashes of up to 20 bits each, a bit saying on which side of a random plane through the middle of all
descriptors one lies. Only images that share a hash are compared, and near duplicates share one of 16 almost surely,
unless all images are much alike: where unrelated ones have a cosine of 0.8, one near duplicate in twenty is missed.
Sets of up to 8,000 and 8,000 images are compared in full.

Not found: crops of more than a few per cent, turns, other colors of the same brightness. An image of one color has no
descriptor and is like no other.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from mettle.data.dataset import Samples
from mettle.data.image_decoding import quote_name
from mettle.data.inputs import ImageFiles

SIDE, LOW = 32, 12  # of the miniature; frequencies kept each way
DESCRIPTOR_SIZE = LOW * LOW - 1  # numbers in a descriptor
NEAR_DUPLICATE = 0.99
FLAT = 1.0  # grey levels: less variation than this is one colour and noise
IN_FULL = 1 << 26  # pairs up to which all are compared
TABLES = 16
MOST = 64  # of one hash that a image is compared with
_PAIRS = 1 << 18  # compared at a time
_FOUND = "_train_test_duplicates"  # attribute of a table that holds what was found in it


class NearDuplicate(NamedTuple):
    """A image of the second set, by position, and the one of the first that it is most like."""

    first: int
    second: int
    similarity: float
    mirrored: bool


def image_descriptor(pixels: np.ndarray) -> np.ndarray:
    """The descriptor of one image, (h, w), (h, w, 1) or (h, w, 3) uint8: (143,) float32, zeros where it has none."""
    grey = Image.fromarray(pixels if pixels.ndim == 2 or pixels.shape[2] == 3 else pixels[:, :, 0]).convert("L")
    small = np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float64)
    found = (_COSINES @ small @ _COSINES.T).reshape(-1)[1:]
    length = np.linalg.norm(found)
    return (found / length if length > FLAT * SIDE else np.zeros(DESCRIPTOR_SIZE)).astype(np.float32)


def find_near_duplicates(
    first: np.ndarray, second: np.ndarray, *, least: float = NEAR_DUPLICATE
) -> list[NearDuplicate]:
    """For each image of the second set the most alike of the first, upright or mirrored, where that is near.

    Args:
        first: (n, 143) descriptors.
        second: (m, 143) descriptors.
        least: similarity from which two images are near duplicates.
    """
    best, at = np.full(len(second), -1.0, np.float32), np.zeros(len(second), np.int64)
    flipped = np.zeros(len(second), bool)
    if len(first) and len(second):
        for mirrored in (False, True):
            score, found = _best_matches(first, second * _MIRROR if mirrored else second, least)
            better = score > best
            best[better], at[better], flipped[better] = score[better], found[better], mirrored
    return [NearDuplicate(int(at[j]), int(j), float(best[j]), bool(flipped[j])) for j in np.flatnonzero(best >= least)]


def _best_matches(first: np.ndarray, second: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """The highest similarity of each row of the second set, and to whom; what is below ``least`` may be missed."""
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
        planes = rng.normal(size=(DESCRIPTOR_SIZE, bits)).astype(np.float32)
        searching = np.flatnonzero(best < least)  # who has found a near duplicate searches no further
        one, two = _hash_descriptors(first - middle, planes), _hash_descriptors(second[searching] - middle, planes)
        order, turn = np.argsort(one, kind="stable"), np.argsort(two, kind="stable")  # so that memory is read in order
        rows, searching = first[order], searching[turn]
        for i, j in _pairs_in_buckets(one[order], two[turn]):
            score = np.einsum("nd,nd->n", rows[i], second[searching[j]])
            top = np.lexsort((score, j))
            top = top[np.append(j[top][1:] != j[top][:-1], True)]  # the highest of each
            i, j, score = order[i[top]], searching[j[top]], score[top]
            better = score > best[j]
            best[j[better]], at[j[better]] = score[better], i[better]
    return best, at


def _hash_descriptors(descriptors: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Which side of each plane every descriptor lies on, as the bits of a number."""
    return (descriptors @ planes > 0) @ (1 << np.arange(planes.shape[1]))


def _pairs_in_buckets(one: np.ndarray, two: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions of pairs with one hash, from two ascending lists of hashes, some at a time."""
    low, high = np.searchsorted(one, two, side="left"), np.searchsorted(one, two, side="right")
    count = np.minimum(high - low, MOST)
    for start in range(0, len(two), step := _PAIRS // MOST):
        some = count[start : start + step]
        j = np.repeat(np.arange(start, start + len(some)), some)
        i = np.arange(len(j)) - np.repeat(np.cumsum(some) - some, some) + low[j]
        if len(j):
            yield i, j


def _cosine_basis() -> np.ndarray:
    """The first rows of the orthonormal cosine transform."""
    k, x = np.arange(LOW)[:, None], np.arange(SIDE)[None]
    rows = np.cos(np.pi * k * (2 * x + 1) / (2 * SIDE)) * np.sqrt(2 / SIDE)
    rows[0] /= np.sqrt(2)
    return rows


_COSINES = _cosine_basis()
_MIRROR = np.where(np.arange(LOW * LOW)[1:] % LOW % 2, -1, 1).astype(np.float32)


@dataclass(frozen=True)
class TrainTestDuplicates:
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


def content_hash(content: bytes) -> bytes:
    """The hash by which two contents are taken for the same."""
    return hashlib.sha256(content).digest()


def train_test_duplicates(samples: Samples) -> TrainTestDuplicates:
    """Compare the content of the test split with that of the training split: pixels in memory, else bytes of files.

    A table is immutable, so what was found is kept with it: training and then evaluation hash its content once.
    """
    found = samples.__dict__.get(_FOUND)
    if found is None:
        found = samples.__dict__[_FOUND] = _compare_splits(samples)  # past the frozen fields, as a cached property does
    return found


def _compare_splits(samples: Samples) -> TrainTestDuplicates:
    train, test = (np.flatnonzero(samples.split == code) for code in (0, 2))
    if len(train) == 0 or len(test) == 0:
        return TrainTestDuplicates(0, len(test))
    tested = len(test)
    if isinstance(samples.inputs, ImageFiles):  # equal files have equal sizes: the others need not be read
        sizes = {i: _file_size(samples, i) for i in (*train.tolist(), *test.tolist())}
        both = {sizes[i] for i in train.tolist()} & {sizes[i] for i in test.tolist()}
        train, test = (np.asarray([i for i in part.tolist() if sizes[i] in both], np.int64) for part in (train, test))
    digest = _content_hasher(samples)
    first: dict[bytes, int] = {}
    for i in train.tolist():
        first.setdefault(digest(i), i)
    pairs = [(i, first[key]) for i in test.tolist() if (key := digest(i)) in first]
    if not pairs:
        return TrainTestDuplicates(0, tested)
    return TrainTestDuplicates(len(pairs), tested, *(_describe_sample(samples, i) for i in pairs[0]))


def _content_hasher(samples: Samples) -> Callable[[int], bytes]:
    """One hash of an item's content."""
    content = getattr(samples.inputs, "content", None)

    def digest(i: int) -> bytes:
        data = samples.read(np.array([i])).tobytes() if content is None else content(int(samples.storage_index[i]))
        return content_hash(data)

    return digest


def _file_size(samples: Samples, i: int) -> int:
    inputs = samples.inputs
    assert isinstance(inputs, ImageFiles)
    return inputs.path(int(samples.storage_index[i])).stat().st_size


def _describe_sample(samples: Samples, i: int) -> str:
    return f"{quote_name(samples.name(i))} of {quote_name(samples.label.names[samples.labels[i]])}"
