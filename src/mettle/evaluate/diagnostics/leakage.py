"""The leakage gate: what must not be on both sides of a split, and a run that fails if it is.

A leak is the same sample id, the same file (by hash of its bytes), the same subject where sides must be disjoint, or,
where embeddings are given, a near-duplicate: cosine ≥ 0.98 across the sides. Where looks of the pictures are given
(:mod:`mettle.data.duplicates`), a resized, re-encoded, brightened or mirrored copy is found too; since two pictures may
well look alike by right, that is reported and fails only if asked to.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from mettle.data.arrays import as_names, to_numpy
from mettle.data.duplicates import DESCRIPTOR_SIZE, content_hash, find_near_duplicates, image_descriptor
from mettle.data.image_decoding import decode_image
from mettle.errors import DataError, InputError
from mettle.evaluate.inputs import check_embeddings
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.unknown_names import explain_arguments

NEAR = 0.98
LISTED = 10_000  # near-duplicates that are listed one by one
_CELLS = 1 << 22
_NAMED = 3  # leaks of one kind that a message names


@dataclass(frozen=True)
class Leak:
    """One thing found on both sides.

    Attributes:
        kind: "id", "hash", "subject", "near-duplicate" or "look".
        what: the id, hash or label; for near-duplicates and looks the two positions.
        count: how many it stands for: 1, but of more near-duplicates than are listed the last stands for the rest.
    """

    kind: str
    what: Any
    count: int = 1


@dataclass(frozen=True, eq=False)
class SplitSide:
    """One side of a split; what is None is not checked."""

    ids: Any = None
    subjects: Any = None
    hashes: Any = None
    embeddings: Any = None
    looks: Any = None


@explain_arguments
def find_leakage(
    first: SplitSide, second: SplitSide, *, disjoint_subjects: bool = True, near: float = NEAR
) -> tuple[Leak, ...]:
    """Everything that is on both sides; of near-duplicates 10,000 are listed, by position, and all are counted.

    Args:
        first: one side.
        second: the other.
        disjoint_subjects: whether one subject on both sides is a leak.
        near: cosine from which two embeddings are near-duplicates, from -1 to 1.
    """
    if not isinstance(near, Real) or not -1 <= near <= 1:
        raise InputError(f"near must be a cosine from -1 to 1: got {near!r}; {NEAR} is usual")
    found: list[Leak] = []
    columns = [("id", "ids"), ("hash", "hashes")] + ([("subject", "subjects")] if disjoint_subjects else [])
    for kind, column in columns:
        a, b = getattr(first, column), getattr(second, column)
        if a is None or b is None:
            continue
        one, two = (as_names(to_numpy(side, column), column) for side in (a, b))
        if (one.dtype.kind in "iu") != (two.dtype.kind in "iu"):
            raise InputError(f"{column} must be of one kind on both sides: got {one.dtype} and {two.dtype}")
        found += [Leak(kind, v.item()) for v in np.intersect1d(one, two)]
    if first.embeddings is not None and second.embeddings is not None:
        found += _find_near_duplicates(first.embeddings, second.embeddings, near)
    if first.looks is not None and second.looks is not None:
        one, two = (_check_image_hashes(side.looks) for side in (first, second))
        found += [Leak("look", (pair.first, pair.second)) for pair in find_near_duplicates(one, two)]
    return tuple(found)


@explain_arguments
def assert_no_leakage(
    first: SplitSide,
    second: SplitSide,
    *,
    names: tuple[str, str] = ("train", "test"),
    disjoint_subjects: bool = True,
    fail_on_similar: bool = False,
) -> tuple[Leak, ...]:
    """Fail if anything leaks between two sides.

    Args:
        first: one side.
        second: the other.
        names: of the sides, for the message.
        disjoint_subjects: whether one subject on both sides is a leak.
        fail_on_similar: whether pictures that look alike are leaks too.

    Returns:
        Pictures that look alike, where that is no leak.

    Raises:
        DataError: names the kinds of leaks, how many, and the first few.

    Example:
        >>> assert_no_leakage(SplitSide(ids=[1, 2], subjects=[7, 8]), SplitSide(ids=[3], subjects=[9]))
        ()
    """
    found = find_leakage(first, second, disjoint_subjects=disjoint_subjects)
    grave = [leak for leak in found if fail_on_similar or leak.kind != "look"]
    if not grave:
        return found
    words = []
    for kind in dict.fromkeys(leak.kind for leak in grave):
        those = [leak for leak in grave if leak.kind == kind]
        which, count = [str(leak.what) for leak in those[:_NAMED]], sum(leak.count for leak in those)
        words.append(f"{count} with the same {kind} ({', '.join(which)}{', …' if count > _NAMED else ''})")
    raise DataError(
        f"leak between {names[0]} and {names[1]}: {'; '.join(words)}. Take them out of one side: numbers measured on "
        "what was trained on say nothing"
    )


@explain_arguments
def file_hashes(paths: Iterable[Path | str]) -> list[str]:
    """SHA-256 of the bytes of each file."""
    found = []
    for path in paths:
        try:
            found.append(content_hash(Path(path).read_bytes()).hex())
        except OSError as e:
            raise DataError(f"cannot read {path} to compare it: {e.strerror}") from e
    return found


@explain_arguments
def picture_looks(paths: Iterable[Path | str]) -> np.ndarray:
    """(n, 143) look of each picture file, for :class:`Part`."""
    found = [image_descriptor(decode_image(Path(path), channels=1)) for path in paths]
    return np.stack(found) if found else np.empty((0, DESCRIPTOR_SIZE), np.float32)


def _check_image_hashes(given: Any) -> np.ndarray:
    a = to_numpy(given, "looks")
    if a.ndim != 2 or a.shape[1] != DESCRIPTOR_SIZE or a.dtype.kind != "f" or not np.isfinite(a).all():
        raise InputError(
            f"looks must be finite (n, {DESCRIPTOR_SIZE}) numbers, from picture_looks: got shape {a.shape}, {a.dtype}"
        )
    return a.astype(np.float32)


def _find_near_duplicates(a: Any, b: Any, near: float) -> list[Leak]:
    values = [to_numpy(v, "embeddings") for v in (a, b)]
    rows = [check_embeddings(v, np.arange(len(v))) for v in values]
    units = [ExactUnitVectors.from_rows(r.values, False) for r in rows]
    listed: list[tuple[int, int]] = []
    count = 0
    for start in range(0, len(units[0]), step := max(1, min(512, _CELLS // len(units[1])))):
        close = units[0].take(slice(start, start + step)).cosine(units[1]) >= near
        count += int(np.count_nonzero(close))
        if len(listed) < LISTED:
            i, j = (side[: LISTED - len(listed)].tolist() for side in np.nonzero(close))
            listed += [(start + a, b) for a, b in zip(i, j, strict=True)]
    found = [Leak("near-duplicate", pair) for pair in listed]
    return [*found[:-1], replace(found[-1], count=1 + count - len(found))] if found else []
