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

What nearly the same means is said by :mod:`mettle.data.likeness`.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from mettle.data.images import ImageFiles, PackedImages, in_threads, picture
from mettle.data.likeness import look
from mettle.data.problems import (
    Findings,
    Problem,
    Seen,
    Severity,
    across_splits,
    cases,
    classes,
    constant_columns,
    copies,
    describe_sizes,
    layout,
    near_copies,
    overlap,
    problem,
    shortened,
)
from mettle.data.samples import NO_SPLIT, SPLITS, Inputs, Samples
from mettle.errors import DataError, InputError

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
) -> Findings:
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
        DataError: Items cannot be read, by policy. All other errors are in the result: see `Findings.gate`.
    """
    _one_of(policy, "policy", POLICIES)
    _one_of(near, "near", SEVERITIES)
    seen = _look(samples, closely=True)
    bad = {i: one.bad for i, one in enumerate(seen) if one.bad is not None}
    _judge(samples, bad, policy, tolerance, limit)
    shared, protocol = overlap(samples)
    severity: Severity = "warning" if policy == "skip" else "error"
    problems = [problem(samples, severity, "unreadable", text, i) for i, text in bad.items()]
    spans, notes = across_splits(samples, protocol), samples.notes + describe_sizes(seen)
    if disjoint and shared:
        problems.append(Problem("error", "overlap", spans))
    elif spans and protocol == "closed-set":  # classes are tested by known ones on purpose: a fact, no fault
        notes += (spans,)
    elif spans:
        problems.append(Problem("warning", "overlap", spans))
    problems += [*copies(samples, seen), *near_copies(samples, seen, near), *classes(samples), *cases(samples)]
    problems += [*layout(samples), *constant_columns(samples)]
    domains = {} if samples.domain is None else Counter(samples.domain.values().tolist())
    return Findings(
        samples=len(samples),
        splits=Counter("none" if code == NO_SPLIT else SPLITS[code] for code in samples.split.tolist()),
        labels=Counter(samples.label.values().tolist()),
        domains=domains,
        protocol=protocol,
        shared_labels=len(shared),
        problems=shortened(problems, limit),
        notes=notes,
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
    _one_of(policy, "policy", POLICIES)
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


def _one_of(value: str, name: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InputError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {value!r}")


def _judge(samples: Samples, bad: Mapping[int, str], policy: Policy, tolerance: float, limit: int) -> None:
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


def _look(samples: Samples, closely: bool = False) -> list[Seen]:
    """One look at every item, in threads; ``closely`` for hashes and looks as well."""

    def look(at: range) -> list[Seen]:
        if samples.inputs.kind == "row":
            return _look_at_rows(samples.inputs, samples.at[at.start : at.stop], closely)
        return [_look_at_picture(samples.inputs, int(i), closely) for i in samples.at[at.start : at.stop]]

    return [seen for part in in_threads(look, len(samples)) for seen in part]


def _look_at_picture(inputs: Inputs, i: int, closely: bool) -> Seen:
    try:
        if isinstance(inputs, ImageFiles | PackedImages):
            content = inputs.content(i)
            pixels = picture(inputs, i, content)
        else:
            pixels = inputs.read(np.array([i]))[0]
            content = pixels.tobytes()
    except DataError as problem:
        return Seen(str(problem))
    if not closely:
        return Seen(shape=pixels.shape)
    return Seen(None, hashlib.sha256(content).digest(), pixels.shape, look(pixels))


def _look_at_rows(inputs: Inputs, at: np.ndarray, closely: bool) -> list[Seen]:
    rows = inputs.read(at)
    seen = [Seen(digest=hashlib.sha256(row.tobytes()).digest() if closely else b"") for row in rows]
    names: Any = getattr(inputs, "names", ()) or range(rows.shape[1])
    odd = ~np.isfinite(rows)
    for i in np.flatnonzero(odd.any(1)).tolist():
        column = int(odd[i].argmax())
        seen[i] = Seen(f"row {at[i] + 1}, column {names[column]!r}: {rows[i, column]} is not finite")
    return seen
