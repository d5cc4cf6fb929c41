"""What is wrong with a data set, found before a run is spent on it.

| finding | severity |
|---|---|
| a picture that cannot be decoded, a number that is not finite | error; a warning once it is left out |
| the same content, or one path, under two labels | error |
| the same content in two splits | error: leakage |
| a label in two splits | warning; a note where train has all of test; an error by ``disjoint=True`` |
| nearly the same picture, or its mirror image, in two splits | warning, or what ``near`` says |
| the same content, or one path, twice under one label | warning |
| a label with one sample, or none | warning |
| fewer than four labels (unless train has all labels of test), domains that each occur under one label only | warning |
| paths or labels that differ only in case, constant columns | warning |
| pictures of several sizes | note |

Equal rows of a table are never more than a warning: two people may well share all their attributes.

What nearly the same means is said by :mod:`mettle.data.duplicates`.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from mettle.data.dataset import NO_SPLIT, SPLITS, Inputs, Samples
from mettle.data.duplicates import content_hash, find_near_duplicates, image_descriptor
from mettle.data.image_decoding import quote_name
from mettle.data.inputs import (
    MEMORY_LIMIT,
    ImageFiles,
    PackedImages,
    decode_item,
    load_into_memory,
    map_ranges_in_threads,
)
from mettle.errors import DataError, InputError

Severity = Literal["error", "warning"]
Item = TypeVar("Item")
FEW = 4  # labels: two to train on and two to test on
NAMED = 8  # files that one problem names, at most
FIRST = 3  # identities that a line about splits names
PAIRS = (("train", "test"), ("train", "val"), ("val", "test"))
MEANT = {  # what identities in train and in test make of the test
    "mixed": "the test mixes known and new identities, so it is not open-set",
    "closed-set": "the test knows all its identities and says nothing about new ones",
}
THRESHOLDS = "thresholds are set on val, too kindly where its identities are trained or tested on"
_NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True)
class DataProblem:
    """One thing that is wrong, and where."""

    severity: Severity
    kind: str
    text: str
    id: int | None = None
    file: str | None = None
    count: int = 1  # how many of its kind it stands for

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}"


@dataclass(frozen=True)
class DataReport:
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
        notes: What one might not expect and may well want: of the reader's, and that a test is closed-set.
    """

    samples: int
    splits: Mapping[str, int]
    labels: Mapping[str, int]
    domains: Mapping[str, int]
    protocol: str
    shared_labels: int
    problems: tuple[DataProblem, ...]
    notes: tuple[str, ...] = ()

    @property
    def errors(self) -> tuple[DataProblem, ...]:
        """The problems that must be solved."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def count(self, severity: Severity) -> int:
        """How many problems there are, those that are not listed one by one included."""
        return sum(problem.count for problem in self.problems if problem.severity == severity)

    def raise_if_errors(self) -> None:
        """Raise a `DataError` with the first error when there is any."""
        if self.errors:
            more = self.count("error") - 1
            raise DataError(f"{self.errors[0].text}{f' (and {more} more)' if more else ''}")


class ItemScan(NamedTuple):
    """What one look at an item showed; a picture's look is that of :mod:`mettle.data.duplicates`."""

    bad: str | None = None
    digest: bytes = b""
    shape: tuple[int, ...] = ()
    descriptor: np.ndarray = _NOTHING


def duplicate_problems(samples: Samples, seen: list[ItemScan]) -> Iterator[DataProblem]:
    """The same content more than once: conflict, leakage, or merely a copy."""
    grave: Severity = "error" if samples.inputs.kind == "image" else "warning"
    good = (i for i, one in enumerate(seen) if one.bad is None)
    for group in _group_by(good, lambda i: seen[i].digest):
        labels = dict.fromkeys(int(samples.labels[i]) for i in group)
        splits = dict.fromkeys(int(samples.split[i]) for i in group if samples.split[i] != NO_SPLIT)
        first, same = group[0], _describe_same_content(samples, group)
        if len(labels) > 1:
            names = _join_names([quote_name(samples.label.names[code]) for code in labels])
            yield sample_problem(samples, grave, "conflict", f"{same}, under the labels {names}", first)
        if len(splits) > 1:
            names = _join_names([SPLITS[code] for code in splits])
            yield sample_problem(samples, grave, "leakage", f"{same}, in {names}", first)
        if len(labels) == 1 and len(splits) < 2:
            yield sample_problem(samples, "warning", "copy", same, first)


def near_duplicate_problems(samples: Samples, seen: list[ItemScan], severity: Severity) -> Iterator[DataProblem]:
    """Pictures of different splits that look alike, each of the later split with the one it is most like."""
    at = np.flatnonzero([one.descriptor.size > 0 for one in seen] & (samples.split != NO_SPLIT))
    parts = [at[samples.split[at] == code] for code in np.unique(samples.split[at])]
    looks = [np.stack([seen[i].descriptor for i in part]) for part in parts]
    for (a, one), (b, two) in combinations(zip(parts, looks, strict=True), 2):
        for pair in find_near_duplicates(one, two):
            i, j = int(a[pair.first]), int(b[pair.second])
            if seen[i].digest != seen[j].digest:
                names = f"{SPLITS[samples.split[i]]} and {SPLITS[samples.split[j]]}"
                how = "mirror images of each other, nearly" if pair.mirrored else "nearly the same"
                text = f"{_describe_sample(samples, i)} and {_describe_sample(samples, j)} look {how}, in {names}"
                yield sample_problem(samples, severity, "near", text, i)


def class_size_problems(samples: Samples) -> Iterator[DataProblem]:
    """Labels with one sample, or none."""
    counts = np.bincount(samples.labels, minlength=len(samples.label.names))
    whole = len(samples) == len(samples.inputs)  # a part of a table lacks labels by right
    for code in np.flatnonzero(counts == 0).tolist() if whole else []:
        yield DataProblem("warning", "empty", f"label {quote_name(samples.label.names[code])} has no sample")
    place = np.empty(len(counts), np.int64)
    place[samples.labels] = np.arange(len(samples))  # where a label is, for those that are in one place
    for code in np.flatnonzero(counts == 1).tolist():
        i = int(place[code])
        label = quote_name(samples.label.names[code])
        text = f"label {label} has one sample, {_describe_sample(samples, i)}: it has no pair"
        yield sample_problem(samples, "warning", "single", text, i)


def layout_problems(samples: Samples) -> Iterator[DataProblem]:
    """Labels and domains that look as if the folders, or the columns, meant something else."""
    present = np.unique(samples.labels)
    names = (
        _join_names([quote_name(samples.label.names[code]) for code in present.tolist()]) if len(present) else "none"
    )
    if samples.domain is not None:
        pairs = np.unique(np.stack([samples.domain.codes, samples.labels], 1), axis=0)
        domains, counts = np.unique(pairs[:, 0], return_counts=True)
        if len(domains) > 1 and (counts == 1).all():
            domain, label = quote_name(samples.domain.names[pairs[0, 0]]), quote_name(samples.label.names[pairs[0, 1]])
            text = f"each of the {len(domains)} domains occurs under one label only, as {domain} under {label}"
            remedy = "if they are the labels, give the folder that holds them, or such folders in train, val and test"
            yield DataProblem("warning", "layout", f"{text}: {remedy}")
    whole = len(samples) == len(samples.inputs)  # a part of a table may have few by right
    if whole and len(present) < FEW and shared_labels(samples)[1] != "closed-set":
        few = "only 1 label" if len(present) == 1 else f"only {len(present)} labels"
        remedy = "at least 4 are needed to train on some and test on others; check that labels are what they should be"
        yield DataProblem("warning", "few", f"{few} ({names}): {remedy}")


def letter_case_problems(samples: Samples) -> Iterator[DataProblem]:
    """Names that a file system without case, or a hasty eye, takes for one."""
    paths = samples.inputs.paths if isinstance(samples.inputs, ImageFiles) else ()
    for what, names in (
        ("paths", sorted({paths[i] for i in samples.storage_index}) if paths else ()),
        ("labels", samples.label.names),
    ):
        for group in _group_by(names, lambda name: unicodedata.normalize("NFC", name).casefold()):
            text = f"{what} {quote_name(group[0])} and {quote_name(group[1])} differ only in case or accents' spelling"
            yield DataProblem("warning", "case", text, file=group[0] if what == "paths" else None)


def describe_sizes(seen: list[ItemScan]) -> tuple[str, ...]:
    """A note where pictures come in several sizes: no fault, but something is chosen or cut off."""
    known = Counter(one.shape[:2] for one in seen if one.shape)
    if len(known) > 1:
        (h, w), most = known.most_common(1)[0]
        common = f"{len(known)} sizes ({most} {'is' if most == 1 else 'are'} {h} x {w})"
        keys = "data.size, data.resize in a recipe"
        return (f"pictures come in {common}: by default training chooses one size and crops ({keys})",)
    return ()


def constant_column_problems(samples: Samples) -> Iterator[DataProblem]:
    """Columns that say nothing."""
    if samples.inputs.kind != "row" or len(samples) < 2:
        return
    rows = samples.read(np.arange(len(samples)))
    names: Any = getattr(samples.inputs, "names", ()) or range(rows.shape[1])
    for column in np.flatnonzero((rows == rows[0]).all(0)).tolist():
        yield DataProblem("warning", "constant", f"column {names[column]!r} is {rows[0, column]:g} in every row")


def shared_labels(samples: Samples) -> tuple[list[int], str]:
    """Label codes that are in train and in test, and what such a split is called."""
    train, test = (set(samples.labels[samples.split == SPLITS.index(name)].tolist()) for name in ("train", "test"))
    shared = sorted(train & test)
    if not train or not test:
        return shared, "none"
    return shared, "open-set" if not shared else "closed-set" if test <= train else "mixed"


def describe_shared_identities(samples: Samples, protocol: str) -> str:
    """How many identities are in more than one split, what that makes of the test, what to do; empty where none is."""
    there = {name: np.unique(samples.labels[samples.split == code]) for code, name in enumerate(SPLITS)}
    shared = {pair: np.intersect1d(there[pair[0]], there[pair[1]]) for pair in PAIRS}
    found = [(*pair, codes) for pair, codes in shared.items() if len(codes)]
    if not found:
        return ""
    one, two, codes = found[0]
    names = _join_names([quote_name(samples.label.names[code]) for code in codes.tolist()], FIRST)
    said = f"{one} and {two} share {_count_identities(len(codes))} of {len(there[two])} in {two} ({names})"
    said += "".join(f", {one} and {two} {len(codes)}" for one, two, codes in found[1:])
    remedy = "keep each identity in one split, or leave the split out: training then holds out whole identities"
    return f"{said}: {MEANT.get(protocol, THRESHOLDS)}; for open-set evaluation {remedy}"


def limit_per_kind(problems: list[DataProblem], limit: int) -> tuple[DataProblem, ...]:
    """Errors first; of each kind the first few and a count of the rest."""
    kept: list[DataProblem] = []
    for kind in _group_by(problems, lambda problem: (problem.severity, problem.kind), least=1):
        kept += kind[:limit]
        if len(kind) > limit:
            text = f"and {len(kind) - limit} more of: {kind[0].text}"
            kept.append(DataProblem(kind[0].severity, kind[0].kind, text, count=len(kind) - limit))
    return tuple(sorted(kept, key=lambda problem: problem.severity != "error"))


def _group_by(items: Iterable[Item], key: Callable[[Item], Hashable], least: int = 2) -> list[list[Item]]:
    """Items with one key, as lists of at least so many, in order of first sight."""
    groups: dict[Hashable, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return [group for group in groups.values() if len(group) >= least]


def sample_problem(samples: Samples, severity: Severity, kind: str, text: str, i: int) -> DataProblem:
    """A problem with one sample."""
    file = samples.inputs.name(int(samples.storage_index[i])) if isinstance(samples.inputs, ImageFiles) else None
    return DataProblem(severity, kind, text, int(samples.ids[i]), file)


def _describe_sample(samples: Samples, i: int) -> str:
    at, inputs = int(samples.storage_index[i]), samples.inputs
    if isinstance(inputs, ImageFiles):
        return quote_name(inputs.name(at))
    return f"row {at + 1}" if inputs.kind == "row" else f"picture {at}"


def _describe_same_content(samples: Samples, group: list[int]) -> str:
    """That these have the same content, all of them named unless they are very many."""
    names = list(dict.fromkeys(_describe_sample(samples, i) for i in group))
    times = {2: "twice"}.get(len(group), f"{len(group)} times")
    return f"{names[0]} is listed {times}" if len(names) == 1 else f"{_join_names(names)} have the same content"


def _count_identities(count: int) -> str:
    return "1 identity" if count == 1 else f"{count} identities"


def _join_names(names: list[str], most: int = NAMED) -> str:
    """``a, b and c``; of very many the first few and a count."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


Policy = Literal["fail", "skip", "trust"]
POLICIES = get_args(Policy)
SEVERITIES = get_args(Severity)
TOLERANCE = 0.1  # share of bad items that `skip` leaves out: more is a fault of the set, not of some files


def check(
    samples: Samples,
    *,
    policy: Policy = "fail",
    limit: int = 20,
    disjoint: bool = False,
    tolerance: float = TOLERANCE,
    near: Severity = "warning",
) -> DataReport:
    """Look at every sample and report.

    Args:
        samples: What to look at.
        policy: About items that cannot be read: ``fail`` raises, ``skip`` reports them as left out but raises
            when they are more than ``tolerance``, ``trust`` reports them as errors and never raises.
        limit: The most problems to list of one kind.
        disjoint: Whether train and test are meant to have no label in common.
        tolerance: The largest share of items that ``skip`` puts up with.
        near: How grave nearly the same picture in two splits is.

    Raises:
        InputError: A policy or a severity that is none.
        DataError: Items cannot be read, by policy. All other errors are in the result, see
            `DataReport.raise_if_errors`.
    """
    _check_choice(policy, "policy", POLICIES)
    _check_choice(near, "near", SEVERITIES)
    seen = _scan_items(samples, closely=True)
    bad = {i: one.bad for i, one in enumerate(seen) if one.bad is not None}
    _apply_policy(samples, bad, policy, tolerance, limit)
    shared, protocol = shared_labels(samples)
    severity: Severity = "warning" if policy == "skip" else "error"
    problems = [sample_problem(samples, severity, "unreadable", text, i) for i, text in bad.items()]
    spans, notes = describe_shared_identities(samples, protocol), samples.notes + describe_sizes(seen)
    if disjoint and shared:
        problems.append(DataProblem("error", "overlap", spans))
    elif spans and protocol == "closed-set":  # classes are tested by known ones on purpose: a fact, no fault
        notes += (spans,)
    elif spans:
        problems.append(DataProblem("warning", "overlap", spans))
    problems += [
        *duplicate_problems(samples, seen),
        *near_duplicate_problems(samples, seen, near),
        *class_size_problems(samples),
        *letter_case_problems(samples),
    ]
    problems += [*layout_problems(samples), *constant_column_problems(samples)]
    domains = {} if samples.domain is None else Counter(samples.domain.values().tolist())
    return DataReport(
        samples=len(samples),
        splits=Counter("none" if code == NO_SPLIT else SPLITS[code] for code in samples.split.tolist()),
        labels=Counter(samples.label.values().tolist()),
        domains=domains,
        protocol=protocol,
        shared_labels=len(shared),
        problems=limit_per_kind(problems, limit),
        notes=notes,
    )


def drop_unreadable(
    samples: Samples, policy: Policy = "fail", *, tolerance: float = TOLERANCE, limit: int = 20
) -> Samples:
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
    _check_choice(policy, "policy", POLICIES)
    if policy == "trust" or (samples.inputs.kind == "image" and samples.inputs.is_in_memory):
        return samples
    bad = {i: one.bad for i, one in enumerate(_scan_items(samples)) if one.bad is not None}
    _apply_policy(samples, bad, policy, tolerance, limit)
    if not bad:
        return samples
    kept = samples.take(np.setdiff1d(np.arange(len(samples)), list(bad)))
    take = getattr(kept.inputs, "take", None)
    if take is not None:  # bad items must not come back when the inputs are held in memory as a whole
        kept = replace(kept, inputs=take(kept.storage_index), storage_index=np.arange(len(kept), dtype=np.int64))
    return replace(kept, skipped=(*samples.skipped, *bad.values()))


def load_readable(samples: Samples, policy: Policy = "fail", *, limit_bytes: int = MEMORY_LIMIT) -> Samples:
    """The samples that can be read, their images decoded into memory where they fit the limit.

    Every image is decoded once: what is held in memory is known to be readable, and only where decoding stops at a bad
    one are all of them looked at, to say how many there are and what to do.
    """
    try:
        samples = replace(samples, inputs=load_into_memory(samples.inputs, limit_bytes))
    except DataError:
        samples = drop_unreadable(samples, policy)
        samples = replace(samples, inputs=load_into_memory(samples.inputs, limit_bytes))
    is_known = samples.inputs.kind == "image" and samples.inputs.is_in_memory
    return samples if is_known else drop_unreadable(samples, policy)


def _check_choice(value: str, name: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {value!r}")


def _apply_policy(samples: Samples, bad: Mapping[int, str], policy: Policy, tolerance: float, limit: int) -> None:
    """Raise what the policy wants raised about unreadable items."""
    if not bad or policy == "trust":
        return
    what = f"{len(bad)} of {len(samples)} {'pictures' if samples.inputs.kind == 'image' else 'rows'}"
    texts = list(bad.values())
    if policy == "fail":
        it = "it" if len(bad) == 1 else "them"
        remedy = f"repair or remove {it}"
        if len(bad) > tolerance * len(samples):
            remedy += f" (data.policy='skip' will not do: it leaves out {tolerance:.0%} at most)"
        else:
            how = "--set data.policy=skip of train, --policy skip of data check, policy='skip' in Python"
            remedy += f", or leave {it} out: data.policy='skip' in a recipe ({how})"
        raise DataError(f"{what} cannot be used, first: {texts[0]}; {remedy}")
    if len(bad) > tolerance * len(samples):
        more = f"; and {len(bad) - limit} more" if len(bad) > limit else ""
        found = f"{'; '.join(texts[:limit])}{more}"
        raise DataError(f"{what} cannot be used, over the {tolerance:.0%} limit: {found}; repair or remove them")


def _scan_items(samples: Samples, closely: bool = False) -> list[ItemScan]:
    """One look at every item, in threads; ``closely`` for hashes and descriptors as well."""

    def image_descriptor(at: range) -> list[ItemScan]:
        if samples.inputs.kind == "row":
            return _scan_rows(samples.inputs, samples.storage_index[at.start : at.stop], closely)
        return [_scan_image(samples.inputs, int(i), closely) for i in samples.storage_index[at.start : at.stop]]

    return [seen for part in map_ranges_in_threads(image_descriptor, len(samples)) for seen in part]


def _scan_image(inputs: Inputs, i: int, closely: bool) -> ItemScan:
    try:
        if isinstance(inputs, ImageFiles | PackedImages):
            content = inputs.content(i)
            pixels = decode_item(inputs, i, content)
        else:
            pixels = inputs.read(np.array([i]))[0]
            content = pixels.tobytes()
    except DataError as problem:
        return ItemScan(str(problem))
    if not closely:
        return ItemScan(shape=pixels.shape)
    return ItemScan(None, content_hash(content), pixels.shape, image_descriptor(pixels))


def _scan_rows(inputs: Inputs, at: np.ndarray, closely: bool) -> list[ItemScan]:
    rows = inputs.read(at)
    seen = [ItemScan(digest=content_hash(row.tobytes()) if closely else b"") for row in rows]
    names: Any = getattr(inputs, "names", ()) or range(rows.shape[1])
    odd = ~np.isfinite(rows)
    for i in np.flatnonzero(odd.any(1)).tolist():
        column = int(odd[i].argmax())
        seen[i] = ItemScan(f"row {at[i] + 1}, column {names[column]!r}: {rows[i, column]} is not finite")
    return seen
