"""What is wrong with a data set, found before a run is spent on it.

| finding | severity |
|---|---|
| a picture that cannot be decoded, a number that is not finite | error; a warning once it is left out |
| the same content, or one path, under two labels | error |
| the same content in two splits | error: leakage |
| a label in train and in test where ``disjoint=True`` says that none should be | error |
| nearly the same picture in two splits | warning |
| the same content, or one path, twice under one label | warning |
| a label with one sample, or none | warning |
| paths or labels that differ only in case, pictures of several sizes, constant columns | warning |

Equal rows of a table are never more than a warning: two people may well share all their attributes.

Nearly the same means: 64-bit difference hashes (a bit says whether a pixel of a 9 x 8 miniature is darker
than its right neighbour) at most 2 bits apart *and* 16 x 16 miniatures correlated by at least 0.995. The
second test is there because pictures that are mostly empty, such as drawings, have nearly equal hashes.
"""

import hashlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from mettle.data.decode import shown
from mettle.data.images import ImageFiles, PackedImages, in_threads, picture
from mettle.data.samples import NO_SPLIT, SPLITS, Inputs, Samples
from mettle.errors import DataError, InputError

Policy = Literal["fail", "skip", "trust"]
Severity = Literal["error", "warning"]
Item = TypeVar("Item")
TOLERANCE = 0.01
NEAR_BITS, NEAR_MATCH = 2, 0.995
BANDS = ((0, 21), (21, 21), (42, 22))  # hashes 2 bits apart agree in at least one of three bands
CROWD = 1000  # of more pictures than this with one band in common, only the first are compared


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where."""

    severity: Severity
    kind: str
    text: str
    id: int | None = None
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"


@dataclass(frozen=True)
class Findings:
    """What `check` found: counts and problems.

    Attributes:
        samples: How many there are.
        splits: Samples per split; ``none`` for those without one.
        labels: Samples per label.
        domains: Samples per domain.
        protocol: ``open-set`` when train and test share no label, ``closed-set`` when train has every label
            of test, ``mixed`` in between, ``none`` without both splits.
        shared_labels: How many labels are in train and in test.
        problems: Errors first; at most ``limit`` of a kind, then one that says how many more there are.
    """

    samples: int
    splits: Mapping[str, int]
    labels: Mapping[str, int]
    domains: Mapping[str, int]
    protocol: str
    shared_labels: int
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that must be solved."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def gate(self) -> None:
        """Raise a `DataError` with the first error when there is any."""
        texts = [problem.text for problem in self.errors]
        if texts:
            raise DataError(f"{texts[0]}{f' (and {len(texts) - 1} more)' if len(texts) > 1 else ''}")


_NOTHING = np.empty(0, np.uint8)


class _Seen(NamedTuple):
    """What one look at an item showed."""

    bad: str | None = None
    digest: bytes = b""
    shape: tuple[int, ...] = ()
    hash: int = 0
    small: np.ndarray = _NOTHING


def check(
    samples: Samples,
    *,
    policy: Policy = "fail",
    limit: int = 20,
    disjoint: bool = False,
    tolerance: float = TOLERANCE,
) -> Findings:
    """Look at every sample and report.

    Args:
        samples: What to look at.
        policy: About items that cannot be read: ``fail`` raises, ``skip`` reports them as left out but raises
            when they are more than ``tolerance``, ``trust`` reports them as errors and never raises.
        limit: The most problems to list of one kind.
        disjoint: Whether train and test are meant to have no label in common.
        tolerance: The largest share of items that ``skip`` puts up with.

    Raises:
        DataError: Items cannot be read, by policy. All other errors are in the result: see `Findings.gate`.
    """
    seen = _look(samples, closely=True)
    bad = {i: one.bad for i, one in enumerate(seen) if one.bad is not None}
    _judge(samples, bad, policy, tolerance, limit)
    shared, protocol = _overlap(samples)
    severity: Severity = "warning" if policy == "skip" else "error"
    problems = [_problem(samples, severity, "unreadable", text, i) for i, text in bad.items()]
    if disjoint and shared:
        names = ", ".join(shown(samples.label.names[code]) for code in shared[:3])
        text = f"{len(shared)} labels are in train and in test: {names}{' and more' if len(shared) > 3 else ''}"
        problems.append(Problem("error", "overlap", text))
    problems += [*_copies(samples, seen), *_near_copies(samples, seen), *_classes(samples), *_cases(samples)]
    problems += [*_sizes(seen), *_constant_columns(samples)]
    domains = {} if samples.domain is None else Counter(samples.domain.values().tolist())
    return Findings(
        samples=len(samples),
        splits=Counter("none" if code == NO_SPLIT else SPLITS[code] for code in samples.split.tolist()),
        labels=Counter(samples.label.values().tolist()),
        domains=domains,
        protocol=protocol,
        shared_labels=len(shared),
        problems=_shortened(problems, limit),
    )


def screen(samples: Samples, policy: Policy = "fail", *, tolerance: float = TOLERANCE, limit: int = 20) -> Samples:
    """The samples that can be read.

    Args:
        samples: What to look at; pictures are decoded once, rows are searched for non-finite numbers.
        policy: ``fail`` raises at any bad item; ``skip`` leaves bad ones out, a line each in ``skipped``,
            but raises when they are more than ``tolerance``; ``trust`` does not look.
        tolerance: The largest share of items that ``skip`` puts up with.
        limit: The most bad items to list in an error.

    Raises:
        DataError: There are bad items, by policy.
    """
    if policy == "trust" or (samples.inputs.kind == "image" and samples.inputs.resident):
        return samples
    bad = {i: one.bad for i, one in enumerate(_look(samples)) if one.bad is not None}
    _judge(samples, bad, policy, tolerance, limit)
    if not bad:
        return samples
    kept = samples.take(np.setdiff1d(np.arange(len(samples)), list(bad)))
    take = getattr(kept.inputs, "take", None)
    if take is not None:  # bad items must not come back when the inputs are held in memory as a whole
        kept = replace(kept, inputs=take(kept.at), at=np.arange(len(kept), dtype=np.int64))
    return replace(kept, skipped=(*samples.skipped, *bad.values()))


def _judge(samples: Samples, bad: Mapping[int, str], policy: Policy, tolerance: float, limit: int) -> None:
    """Raise what the policy wants raised about unreadable items."""
    if policy not in ("fail", "skip", "trust"):
        raise InputError(f"policy must be fail, skip or trust, got {policy!r}")
    if not bad or policy == "trust":
        return
    what = f"{len(bad)} of {len(samples)} {'pictures' if samples.inputs.kind == 'image' else 'rows'}"
    texts = list(bad.values())
    if policy == "fail":
        raise DataError(f"{what} cannot be used, first: {texts[0]}; repair or remove it, or pass policy='skip'")
    if len(bad) > tolerance * len(samples):
        more = f"; and {len(bad) - limit} more" if len(bad) > limit else ""
        raise DataError(f"{what} cannot be used, over the {tolerance:.0%} limit: {'; '.join(texts[:limit])}{more}")


def _look(samples: Samples, closely: bool = False) -> list[_Seen]:
    """One look at every item, in threads; ``closely`` for hashes and miniatures as well."""

    def look(at: range) -> list[_Seen]:
        if samples.inputs.kind == "row":
            return _look_at_rows(samples.inputs, samples.at[at.start : at.stop], closely)
        return [_look_at_picture(samples.inputs, int(i), closely) for i in samples.at[at.start : at.stop]]

    return [seen for part in in_threads(look, len(samples)) for seen in part]


def _look_at_picture(inputs: Inputs, i: int, closely: bool) -> _Seen:
    try:
        if isinstance(inputs, ImageFiles | PackedImages):
            content = inputs.content(i)
            pixels = picture(inputs, i, content)
        else:
            pixels = inputs.read(np.array([i]))[0]
            content = pixels.tobytes()
    except DataError as problem:
        return _Seen(str(problem))
    if not closely:
        return _Seen(shape=pixels.shape)
    image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]).convert("L")
    tiny = np.asarray(image.resize((9, 8), Image.Resampling.BOX), np.int16)
    bits = int.from_bytes(np.packbits(tiny[:, :-1] < tiny[:, 1:]).tobytes(), "big")
    small = np.asarray(image.resize((16, 16), Image.Resampling.BOX))
    return _Seen(None, hashlib.sha256(content).digest(), pixels.shape, bits, small)


def _look_at_rows(inputs: Inputs, at: np.ndarray, closely: bool) -> list[_Seen]:
    rows = inputs.read(at)
    seen = [_Seen(digest=hashlib.sha256(row.tobytes()).digest() if closely else b"") for row in rows]
    names: Any = getattr(inputs, "names", ()) or range(rows.shape[1])
    odd = ~np.isfinite(rows)
    for i in np.flatnonzero(odd.any(1)).tolist():
        column = int(odd[i].argmax())
        seen[i] = _Seen(f"row {at[i] + 1}, column {names[column]!r}: {rows[i, column]} is not finite")
    return seen


def _copies(samples: Samples, seen: list[_Seen]) -> Iterator[Problem]:
    """The same content more than once: conflict, leakage, or merely a copy."""
    grave: Severity = "error" if samples.inputs.kind == "image" else "warning"
    good = (i for i, one in enumerate(seen) if one.bad is None)
    for group in _grouped(good, lambda i: seen[i].digest):
        labels = {int(samples.labels[i]): i for i in reversed(group)}
        splits = {int(samples.split[i]): i for i in reversed(group) if samples.split[i] != NO_SPLIT}
        if len(labels) > 1:
            a, b = sorted(labels.values())[:2]
            names = " and ".join(shown(samples.label.names[samples.labels[i]]) for i in (a, b))
            yield _problem(samples, grave, "conflict", f"{_both(samples, a, b)}, under the labels {names}", a)
        if len(splits) > 1:
            a, b = sorted(splits.values())[:2]
            names = f"{SPLITS[samples.split[a]]} and {SPLITS[samples.split[b]]}"
            yield _problem(samples, grave, "leakage", f"{_both(samples, a, b)}, in {names}", a)
        if len(labels) == 1 and len(splits) < 2:
            yield _problem(samples, "warning", "copy", _both(samples, group[0], group[1]), group[0])


def _near_copies(samples: Samples, seen: list[_Seen]) -> Iterator[Problem]:
    """Pictures of different splits that look alike."""
    at = np.flatnonzero([one.small.size > 0 for one in seen] & (samples.split != NO_SPLIT))
    splits = samples.split[at]
    if len(np.unique(splits)) < 2:
        return
    hashes = np.array([seen[i].hash for i in at], np.uint64)
    small = np.stack([seen[i].small for i in at]).reshape(len(at), -1).astype(np.float32)
    small -= small.mean(1, keepdims=True)
    small /= np.maximum(np.linalg.norm(small, axis=1, keepdims=True), 1e-6)
    pairs: set[tuple[int, int]] = set()
    for start, width in BANDS:
        band = (hashes >> np.uint64(start)) & np.uint64((1 << width) - 1)
        for group in _grouped(range(len(at)), lambda i, band=band: int(band[i])):
            parts = [np.array(part) for part in _grouped(group, lambda i: int(splits[i]), least=1)]
            for a, b in combinations(parts, 2):
                pairs.update(_alike(a[:CROWD], b[:CROWD], hashes, small))
    for a, b in sorted((int(at[i]), int(at[j])) for i, j in pairs):
        if seen[a].digest != seen[b].digest:
            names = f"{SPLITS[samples.split[a]]} and {SPLITS[samples.split[b]]}"
            text = f"{_called(samples, a)} and {_called(samples, b)} look nearly the same, in {names}"
            yield _problem(samples, "warning", "near", text, a)


def _alike(a: np.ndarray, b: np.ndarray, hashes: np.ndarray, small: np.ndarray) -> Iterator[tuple[int, int]]:
    """Pairs, one of each list, with close hashes and matching miniatures."""
    apart = hashes[a][:, None] ^ hashes[b][None, :]
    bits = np.unpackbits(apart.view(np.uint8).reshape(len(a), len(b), 8), axis=2).sum(2)
    i, j = np.nonzero(bits <= NEAR_BITS)
    i, j = a[i], b[j]
    alike = np.einsum("nd,nd->n", small[i], small[j]) >= NEAR_MATCH
    yield from zip(np.minimum(i, j)[alike].tolist(), np.maximum(i, j)[alike].tolist(), strict=True)


def _classes(samples: Samples) -> Iterator[Problem]:
    counts = np.bincount(samples.labels, minlength=len(samples.label.names))
    whole = len(samples) == len(samples.inputs)  # a part of a table lacks labels by right
    for code in np.flatnonzero(counts == 0).tolist() if whole else []:
        yield Problem("warning", "empty", f"label {shown(samples.label.names[code])} has no sample")
    for code in np.flatnonzero(counts == 1).tolist():
        i = int(np.flatnonzero(samples.labels == code)[0])
        text = f"label {shown(samples.label.names[code])} has one sample, {_called(samples, i)}: it has no pair"
        yield _problem(samples, "warning", "single", text, i)


def _cases(samples: Samples) -> Iterator[Problem]:
    """Names that a file system without case, or a hasty eye, takes for one."""
    paths = samples.inputs.paths if isinstance(samples.inputs, ImageFiles) else ()
    for what, names in (
        ("paths", sorted({paths[i] for i in samples.at}) if paths else ()),
        ("labels", samples.label.names),
    ):
        for group in _grouped(names, lambda name: unicodedata.normalize("NFC", name).casefold()):
            text = f"{what} {shown(group[0])} and {shown(group[1])} differ only in case or accents' spelling"
            yield Problem("warning", "case", text, file=group[0] if what == "paths" else None)


def _sizes(seen: list[_Seen]) -> Iterator[Problem]:
    sizes = Counter(one.shape[:2] for one in seen if one.shape)
    if len(sizes) > 1:
        (h, w), most = sizes.most_common(1)[0]
        text = f"pictures come in {len(sizes)} sizes ({most} are {h} x {w}): give one size (data.size in a recipe)"
        yield Problem("warning", "sizes", text)


def _constant_columns(samples: Samples) -> Iterator[Problem]:
    if samples.inputs.kind != "row" or len(samples) < 2:
        return
    rows = samples.read(np.arange(len(samples)))
    names: Any = getattr(samples.inputs, "names", ()) or range(rows.shape[1])
    for column in np.flatnonzero((rows == rows[0]).all(0)).tolist():
        yield Problem("warning", "constant", f"column {names[column]!r} is {rows[0, column]:g} in every row")


def _overlap(samples: Samples) -> tuple[list[int], str]:
    """Label codes that are in train and in test, and what such a split is called."""
    train, test = (set(samples.labels[samples.split == SPLITS.index(name)].tolist()) for name in ("train", "test"))
    shared = sorted(train & test)
    if not train or not test:
        return shared, "none"
    return shared, "open-set" if not shared else "closed-set" if test <= train else "mixed"


def _shortened(problems: list[Problem], limit: int) -> tuple[Problem, ...]:
    """Errors first; of each kind the first few and a count of the rest."""
    kept: list[Problem] = []
    for kind in _grouped(problems, lambda problem: (problem.severity, problem.kind), least=1):
        kept += kind[:limit]
        if len(kind) > limit:
            kept.append(Problem(kind[0].severity, kind[0].kind, f"and {len(kind) - limit} more of: {kind[0].text}"))
    return tuple(sorted(kept, key=lambda problem: problem.severity != "error"))


def _grouped(items: Iterable[Item], key: Callable[[Item], Hashable], least: int = 2) -> list[list[Item]]:
    """Items with one key, as lists of at least so many, in order of first sight."""
    groups: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return [group for group in groups.values() if len(group) >= least]


def _problem(samples: Samples, severity: Severity, kind: str, text: str, i: int) -> Problem:
    file = samples.inputs.name(int(samples.at[i])) if isinstance(samples.inputs, ImageFiles) else None
    return Problem(severity, kind, text, int(samples.ids[i]), file)


def _called(samples: Samples, i: int) -> str:
    at, inputs = int(samples.at[i]), samples.inputs
    if isinstance(inputs, ImageFiles):
        return shown(inputs.name(at))
    return f"row {at + 1}" if inputs.kind == "row" else f"picture {at}"


def _both(samples: Samples, a: int, b: int) -> str:
    first, second = _called(samples, a), _called(samples, b)
    return f"{first} is listed twice" if first == second else f"{first} and {second} have the same content"
