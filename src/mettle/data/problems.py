"""Problems of a data set: one function a kind, each from what a look at the samples showed."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from mettle.data.decode import shown
from mettle.data.images import ImageFiles
from mettle.data.likeness import alike
from mettle.data.samples import NO_SPLIT, SPLITS, Samples
from mettle.errors import DataError

Severity = Literal["error", "warning"]
Item = TypeVar("Item")
_NOTHING = np.empty(0, np.float32)


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


class Seen(NamedTuple):
    """What one look at an item showed; a picture's look is that of :mod:`mettle.data.likeness`."""

    bad: str | None = None
    digest: bytes = b""
    shape: tuple[int, ...] = ()
    look: np.ndarray = _NOTHING


def copies(samples: Samples, seen: list[Seen]) -> Iterator[Problem]:
    """The same content more than once: conflict, leakage, or merely a copy."""
    grave: Severity = "error" if samples.inputs.kind == "image" else "warning"
    good = (i for i, one in enumerate(seen) if one.bad is None)
    for group in _grouped(good, lambda i: seen[i].digest):
        labels = {int(samples.labels[i]): i for i in reversed(group)}
        splits = {int(samples.split[i]): i for i in reversed(group) if samples.split[i] != NO_SPLIT}
        if len(labels) > 1:
            a, b = sorted(labels.values())[:2]
            names = " and ".join(shown(samples.label.names[samples.labels[i]]) for i in (a, b))
            yield problem(samples, grave, "conflict", f"{_both(samples, a, b)}, under the labels {names}", a)
        if len(splits) > 1:
            a, b = sorted(splits.values())[:2]
            names = f"{SPLITS[samples.split[a]]} and {SPLITS[samples.split[b]]}"
            yield problem(samples, grave, "leakage", f"{_both(samples, a, b)}, in {names}", a)
        if len(labels) == 1 and len(splits) < 2:
            yield problem(samples, "warning", "copy", _both(samples, group[0], group[1]), group[0])


def near_copies(samples: Samples, seen: list[Seen], severity: Severity) -> Iterator[Problem]:
    """Pictures of different splits that look alike, each of the later split with the one it is most like."""
    at = np.flatnonzero([one.look.size > 0 for one in seen] & (samples.split != NO_SPLIT))
    parts = [at[samples.split[at] == code] for code in np.unique(samples.split[at])]
    looks = [np.stack([seen[i].look for i in part]) for part in parts]
    for (a, one), (b, two) in combinations(zip(parts, looks, strict=True), 2):
        for pair in alike(one, two):
            i, j = int(a[pair.first]), int(b[pair.second])
            if seen[i].digest != seen[j].digest:
                names = f"{SPLITS[samples.split[i]]} and {SPLITS[samples.split[j]]}"
                how = "mirror images of each other, nearly" if pair.mirrored else "nearly the same"
                text = f"{_called(samples, i)} and {_called(samples, j)} look {how}, in {names}"
                yield problem(samples, severity, "near", text, i)


def classes(samples: Samples) -> Iterator[Problem]:
    """Labels with one sample, or none."""
    counts = np.bincount(samples.labels, minlength=len(samples.label.names))
    whole = len(samples) == len(samples.inputs)  # a part of a table lacks labels by right
    for code in np.flatnonzero(counts == 0).tolist() if whole else []:
        yield Problem("warning", "empty", f"label {shown(samples.label.names[code])} has no sample")
    for code in np.flatnonzero(counts == 1).tolist():
        i = int(np.flatnonzero(samples.labels == code)[0])
        text = f"label {shown(samples.label.names[code])} has one sample, {_called(samples, i)}: it has no pair"
        yield problem(samples, "warning", "single", text, i)


def cases(samples: Samples) -> Iterator[Problem]:
    """Names that a file system without case, or a hasty eye, takes for one."""
    paths = samples.inputs.paths if isinstance(samples.inputs, ImageFiles) else ()
    for what, names in (
        ("paths", sorted({paths[i] for i in samples.at}) if paths else ()),
        ("labels", samples.label.names),
    ):
        for group in _grouped(names, lambda name: unicodedata.normalize("NFC", name).casefold()):
            text = f"{what} {shown(group[0])} and {shown(group[1])} differ only in case or accents' spelling"
            yield Problem("warning", "case", text, file=group[0] if what == "paths" else None)


def sizes(seen: list[Seen]) -> Iterator[Problem]:
    """Pictures of several sizes."""
    known = Counter(one.shape[:2] for one in seen if one.shape)
    if len(known) > 1:
        (h, w), most = known.most_common(1)[0]
        text = f"pictures come in {len(known)} sizes ({most} are {h} x {w}): give one size (data.size in a recipe)"
        yield Problem("warning", "sizes", text)


def constant_columns(samples: Samples) -> Iterator[Problem]:
    """Columns that say nothing."""
    if samples.inputs.kind != "row" or len(samples) < 2:
        return
    rows = samples.read(np.arange(len(samples)))
    names: Any = getattr(samples.inputs, "names", ()) or range(rows.shape[1])
    for column in np.flatnonzero((rows == rows[0]).all(0)).tolist():
        yield Problem("warning", "constant", f"column {names[column]!r} is {rows[0, column]:g} in every row")


def overlap(samples: Samples) -> tuple[list[int], str]:
    """Label codes that are in train and in test, and what such a split is called."""
    train, test = (set(samples.labels[samples.split == SPLITS.index(name)].tolist()) for name in ("train", "test"))
    shared = sorted(train & test)
    if not train or not test:
        return shared, "none"
    return shared, "open-set" if not shared else "closed-set" if test <= train else "mixed"


def shortened(problems: list[Problem], limit: int) -> tuple[Problem, ...]:
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


def problem(samples: Samples, severity: Severity, kind: str, text: str, i: int) -> Problem:
    """A problem with one sample."""
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
