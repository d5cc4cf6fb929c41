"""Test samples whose very content was trained on: found before a run is spent on them, told wherever it is measured."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mettle.data.decode import shown
from mettle.data.images import ImageFiles
from mettle.data.samples import Samples


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
