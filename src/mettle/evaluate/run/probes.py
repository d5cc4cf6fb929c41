"""Probes of a run: what simple classifiers read from the frozen features of its encoders, in eval mode.

| target | where | what is told |
|---|---|---|
| labels | test identities that were trained on | top-1, worst class, worst (class, group), accuracy by group |
| an attribute that a model may fall for | wherever there is such a column, open sets too | accuracy; E_d − E_b |

How one of them is fitted, and its strength chosen, is in :mod:`mettle.evaluate.linear_probe`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mettle.data.dataset import Column, Samples
from mettle.errors import DataError, NumericError
from mettle.evaluate import bootstrap
from mettle.evaluate.linear_probe import ProbeFit, fit_probe
from mettle.model import EmbeddingModel, embed
from mettle.rng import hash_bits
from mettle.train.recipe import EvaluateConfig, Recipe

SLICES = 12  # values that a column may have to be a table of groups
CELLS = 24  # (class, group) cells that are all listed; of more, the worst only
BY_DEFAULT = ("two-encoder", "jtt")  # methods whose claim is about what probes read
OPEN_SET = "not applicable (open set)"
MODEL, BIASED = "E_d", "E_b"
BLOCK = 100  # replicates in memory at a time
OVER_SAMPLES = f"{bootstrap.METHOD.replace('subject', 'test-sample')}, training side fixed"


def wants_probes(recipe: Recipe, samples: Samples) -> bool:
    """Whether probes belong to the evaluation: as the recipe says, else by its method and its data."""
    setup = recipe.evaluate
    if setup.probe is not None:
        return setup.probe
    shared = np.intersect1d(samples.part("train").labels, samples.part("test").labels)
    return recipe.train.method in BY_DEFAULT or setup.spurious is not None or len(shared) > 0


def evaluate_probes(
    setup: EvaluateConfig,
    samples: Samples,
    encoders: Mapping[str, EmbeddingModel],
    baselines: Mapping[str, EmbeddingModel] | None = None,
) -> dict[str, Any]:
    """All probes of all encoders, ready for JSON.

    Args:
        setup: how to evaluate: ``spurious`` names the attribute; without, it is the domain where there is one.
        samples: all splits.
        encoders: by name; the first is the model, a second one is what it is compared with.
        baselines: by name, what there was before training: only labels are read from these.

    Raises:
        DataError: no training samples, no such column, or one group only in a column that was asked for.
    """
    parts = {name: samples.part(name) for name in ("train", "val", "test")}
    if len(parts["train"]) < 2 or len(parts["test"]) == 0:
        raise DataError(
            f"{samples.source_name} has no training or no test split: probes are fitted on one, tried on the other"
        )
    column = None
    if setup.spurious is not None:
        column = samples.column(setup.spurious)
    elif samples.domain is not None:
        column = samples.domain
    parts["train"] = parts["train"].take(subsample_per_class(parts["train"].labels, setup.probe_samples))
    seen = {
        name: {part: embed(model, table, features=True) for part, table in parts.items()}
        for name, model in encoders.items()
    }
    found: dict[str, Any] = {"fitted_on": len(parts["train"]), "features": "what the head sees, eval mode"}
    before = {
        name: {part: embed(model, table, features=True) for part, table in parts.items()}
        for name, model in (baselines or {}).items()
    }
    found["labels"] = _probe_labels(parts, seen, before, setup.spurious or "domain", column)
    if column is not None:
        found["attribute"] = _probe_attribute(
            parts, seen, setup.spurious or "domain", column.names, setup.spurious is not None
        )
    return found


def subsample_per_class(labels: np.ndarray, most: int) -> np.ndarray:
    """At most so many positions: some of every class, and as large a share of each as of the others."""
    if len(labels) <= most:
        return np.arange(len(labels))
    place = hash_bits(0, 29, np.arange(len(labels)))
    mixed = np.lexsort((place, labels))
    _, starts, counts = np.unique(labels[mixed], return_index=True, return_counts=True)
    rank = np.arange(len(labels)) - np.repeat(starts, counts)
    share = rank / np.repeat(counts, counts)  # 0 for the first of every class
    return np.sort(mixed[np.lexsort((place[mixed], share))[:most]])


def _probe_labels(
    parts: Mapping[str, Samples], seen: Mapping, before: Mapping, name: str, column: Column | None
) -> dict[str, Any]:
    """Top-1, worst class and groups of every encoder, on test samples of trained identities.

    The classes are given, so what another test would change are its samples: those are resampled for all intervals.
    """
    codes = {part: table.labels for part, table in parts.items()}
    known = np.isin(codes["test"], codes["train"])
    if not known.any():
        return {"status": f"{OPEN_SET}: no test identity was trained on"}
    if len(np.unique(codes["train"])) < 2:
        return {"status": "not measurable: one class only"}
    found: dict[str, Any] = {"status": "ok", "tested_on": int(known.sum()), "left_out": int((~known).sum())}
    readings, refused = _fit_all(seen, codes)
    if refused:
        return {"status": refused}
    label_names = parts["test"].label.names
    found["encoders"] = {}
    for encoder, one in readings.items():
        told = _summarize_fit(one, label_names)
        told["linear"]["worst_class"]["interval"] = interval_over_samples(one.correct, one.labels)
        told["correct"] = _mark_correct(one, len(codes["test"]))
        told["groups"] = accuracy_by_group(one, parts["test"])
        if column is not None:
            told["worst_group"] = worst_class_group(one, parts, name)
        found["encoders"][encoder] = told
    model = next(iter(readings.values()))
    group = None if column is None else class_group_codes(model, parts, name)
    found |= _paired_gap(readings, None)
    if before:
        fitted, _ = _fit_all(before, codes)  # one that cannot be fitted is no baseline
        found["baselines"] = {
            other: {"accuracy": float(one.correct.mean()), "gain": compare_probes(model, one, group)}
            for other, one in fitted.items()
        }
    return found


def _mark_correct(one: ProbeFit, count: int) -> str:
    """A letter for each test sample: 1 where the linear probe is right, 0 where it is wrong, - where left out."""
    marks = np.full(count, "-")
    marks[one.rows] = np.where(one.correct > 0.5, "1", "0")
    return "".join(marks)


def _probe_attribute(
    parts: Mapping[str, Samples], seen: Mapping, name: str, names: tuple[str, ...], asked: bool
) -> dict[str, Any]:
    """How well an attribute can be read, on test samples with a value that training has."""
    codes = {part: table.column(name).codes for part, table in parts.items()}
    known = np.isin(codes["test"], codes["train"])
    for where, there in (("training", codes["train"]), ("the test split, of those in training", codes["test"][known])):
        groups = np.unique(there)
        if len(groups) < 2:
            only = repr(names[groups[0]]) if len(groups) else "none"
            why = f"column {name!r} has one group only in {where} ({only}): there is nothing to tell apart"
            if asked and where == "training":
                raise DataError(f"{why}. Leave evaluate.spurious out, or name another column")
            return {"name": name, "status": f"not measurable: {why}"}
    readings, refused = _fit_all(seen, codes)
    if refused:
        return {"name": name, "status": refused}
    _, counts = np.unique(codes["test"][known], return_counts=True)
    return {
        "name": name,
        "status": "ok",
        "tested_on": int(known.sum()),
        "left_out": int((~known).sum()),
        "groups": [names[code] for code in np.unique(codes["test"][known])],
        "largest_group": float(counts.max() / counts.sum()),
        "encoders": {encoder: _summarize_fit(one, names) for encoder, one in readings.items()},
        **_paired_gap(readings, parts["test"].labels),
    }


def _fit_all(seen: Mapping, codes: Mapping[str, np.ndarray]) -> tuple[dict[str, ProbeFit], str]:
    """What the probe of every encoder reads, or why one of them cannot be trusted: encoders are compared."""
    found = {}
    for encoder, z in seen.items():
        try:
            found[encoder] = fit_probe(z, codes)
        except NumericError as problem:
            return {}, f"not measurable: {encoder}: {problem}"
    return found, ""


def accuracy_by_group(one: ProbeFit, test: Samples) -> dict[str, list[dict[str, Any]]]:
    """Accuracy by every column with few values."""
    found = {}
    for name, column in test.columns().items():
        codes = column.codes[one.rows]
        values = np.unique(codes)
        if 2 <= len(values) <= SLICES:
            found[name] = [{"name": column.names[value], **_mean_accuracies(one, codes == value)} for value in values]
    return found


def class_group_codes(one: ProbeFit, parts: Mapping[str, Samples], name: str) -> np.ndarray:
    """Which (class, group) each tested sample belongs to, numbered in order."""
    test = parts["test"]
    pair = np.column_stack([test.labels[one.rows], test.column(name).codes[one.rows]])
    return np.unique(pair, axis=0, return_inverse=True)[1].reshape(-1)


def worst_class_group(one: ProbeFit, parts: Mapping[str, Samples], name: str) -> dict[str, Any]:
    """The worst (class, group), and the mean over all of them as common as they are in training."""
    test, column = parts["test"], parts["test"].column(name)
    at = class_group_codes(one, parts, name)
    kinds = np.unique(np.column_stack([test.labels[one.rows], column.codes[one.rows]]), axis=0)
    means = np.bincount(at, weights=one.correct) / np.bincount(at)
    sizes = np.bincount(at)
    rows = [
        {"class": test.label.names[y], "group": column.names[g], "samples": int(n), "linear": float(m)}
        for (y, g), n, m in zip(kinds, sizes, means, strict=True)
    ]
    worst = min(range(len(rows)), key=lambda k: (means[k], -sizes[k], k))
    train = np.column_stack([parts["train"].labels, parts["train"].column(name).codes])
    common = np.array([(train == kind).all(axis=1).sum() for kind in kinds], float)
    adjusted = float(common @ means / common.sum()) if common.sum() else None
    found = {"by": name, **rows[worst], "smallest": int(sizes.min()), "groups": len(rows), "adjusted": adjusted}
    found["interval"] = interval_over_samples(one.correct, at)
    return found | ({"cells": rows} if len(rows) <= CELLS else {})


def lowest_means(correct: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(b,) the mean of the worst group in every replicate, whichever group that is there.

    Args:
        correct: (n,) 1 or 0 for each sample.
        groups: (n,) which group each sample belongs to.
        weights: (b, n) how often each sample is in a replicate.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.unique(groups[order], return_index=True)[1]
    found = np.empty(len(weights))
    for start in range(0, len(weights), BLOCK):
        part = weights[start : start + BLOCK].T[order].astype(np.float64)
        counts = np.add.reduceat(part, starts)
        right = np.add.reduceat(part * correct[order, None], starts)
        found[start : start + BLOCK] = np.where(counts > 0, right / np.maximum(counts, 1), np.inf).min(axis=0)
    return found


def interval_over_samples(correct: np.ndarray, groups: np.ndarray) -> dict[str, Any] | None:
    """The interval of the worst group's mean, test samples resampled and the worst group found anew; None: too few."""

    def interval() -> bootstrap.Interval:
        weights = bootstrap.bootstrap_weights(len(correct), bootstrap.REPLICATES, 0)
        drawn = lowest_means(correct, groups, weights)
        point = float(lowest_means(correct, groups, np.ones((1, len(correct)), np.int8))[0])
        _, sizes = np.unique(groups, return_counts=True)
        return bootstrap.of_rate(drawn, point, weights, 0.95, 0, OVER_SAMPLES, rate=int(sizes.min()))

    return bootstrap.interval_or_none(interval)


def compare_probes(first: ProbeFit, second: ProbeFit, group: np.ndarray | None = None) -> dict[str, Any]:
    """What one encoder's probe reads more than another's, on the same test samples, with paired intervals over samples.

    Returns:
        ``top_1`` and ``worst_class``, and ``worst_group`` where groups are given; each has ``first``, ``second``,
        ``difference`` and its ``interval``, None where there are too few samples.
    """
    if not np.array_equal(first.rows, second.rows):
        raise DataError("two probes are compared on the same test samples: these were tested on others")
    return compare_correct(first.correct, second.correct, first.labels, group)


def compare_correct(
    first: np.ndarray, second: np.ndarray, labels: np.ndarray, group: np.ndarray | None = None
) -> dict[str, Any]:
    """The same of two classifiers, given which of the same test samples each gets right: (n,) 1 or 0."""
    slices = {"top_1": np.zeros(len(labels), np.int64), "worst_class": labels}
    if group is not None:
        slices["worst_group"] = group
    found = {}
    for name, kinds in slices.items():
        whole = np.ones((1, len(labels)), np.int8)
        a, b = (float(lowest_means(one, kinds, whole)[0]) for one in (first, second))

        def interval(kinds: np.ndarray = kinds, difference: float = a - b) -> bootstrap.Interval:
            weights = bootstrap.bootstrap_weights(len(labels), bootstrap.REPLICATES, 0)
            drawn = lowest_means(first, kinds, weights) - lowest_means(second, kinds, weights)
            return bootstrap.bca_interval(drawn, difference, weights, 0.95, 0, f"paired {OVER_SAMPLES}")

        found[name] = {"first": a, "second": b, "difference": a - b, "interval": bootstrap.interval_or_none(interval)}
    return found


def _mean_accuracies(one: ProbeFit, inside: np.ndarray) -> dict[str, Any]:
    linear, knn = (getattr(one.probe, kind).correct[inside] for kind in ("linear", "knn"))
    return {"samples": int(inside.sum()), "linear": float(linear.mean()), "knn": float(knn.mean())}


def _summarize_fit(one: ProbeFit, names: tuple[str, ...]) -> dict[str, Any]:
    """The numbers of a probe, its worst class by name."""
    found = one.probe.summary()
    for kind in ("linear", "knn"):
        worst = found[kind]["worst_class"]
        worst["name"] = names[worst.pop("label")]
    return {**found, "strength": one.strength, "chosen_on": one.chosen_on}


def _paired_gap(readings: Mapping[str, ProbeFit], subjects: np.ndarray | None) -> dict[str, Any]:
    """How much more the linear probe reads from the first encoder than from the second.

    ``subjects`` are the identities of the test split, which are resampled; None resamples test samples.
    """
    if len(readings) < 2:
        return {}
    first, second = list(readings.values())[:2]
    gains = first.correct - second.correct
    units = np.arange(len(gains)) if subjects is None else subjects[first.rows]
    who, at = np.unique(units, return_inverse=True)
    method = OVER_SAMPLES if subjects is None else f"{bootstrap.METHOD}, training side fixed"
    point = float(gains.mean())

    def interval() -> bootstrap.Interval:
        weights = bootstrap.bootstrap_weights(len(who), bootstrap.REPLICATES, 0)
        totals, counts = np.bincount(at.reshape(-1), weights=gains), np.bincount(at.reshape(-1))
        drawn = bootstrap.weighted_sums(weights, totals) / bootstrap.weighted_sums(weights, counts)
        return bootstrap.bca_interval(drawn, point, weights, 0.95, 0, f"paired {method}")

    return {"gap": {"value": point, "interval": bootstrap.interval_or_none(interval)}}


def describe_probes(found: Mapping[str, Any] | None) -> list[str]:
    """The probes in words, a line each, for a terminal."""
    if not found:
        return []
    told = []
    for title, target in (("labels", found["labels"]), (None, found.get("attribute"))):
        if target is None:
            continue
        title = title or target["name"]
        if target["status"] != "ok":
            told.append(f"probe for {title}: {target['status']}")
            continue
        for encoder, one in target["encoders"].items():
            extent = _format_interval(one["linear"]["interval"])
            text = f"probe for {title}, {encoder}: top-1 {one['linear']['accuracy']:.1%}{extent}"
            text += f", kNN {one['knn']['accuracy']:.1%}"
            if title == "labels":
                worst = one["linear"]["worst_class"]
                text += f", worst class {worst['name']} {worst['accuracy']:.1%}"
                if "worst_group" in one:
                    cell = one["worst_group"]
                    text += f", worst group {cell['class']} / {cell['group']} {cell['linear']:.1%}"
            else:
                text += f" (largest group {target['largest_group']:.1%})"
            told.append(text)
        if "gap" in target:
            gap = target["gap"]
            a, b = list(target["encoders"])[:2]
            told.append(
                f"probe for {title}, {a} − {b}: {100 * gap['value']:+.1f} points"
                f"{_format_interval(gap['interval'], 100)}"
            )
    return told


def _format_interval(interval: Mapping[str, Any] | None, points: int = 0) -> str:
    if not interval:
        return f" ({bootstrap.TOO_FEW})"
    low, high = interval["low"], interval["high"]
    return f" [{points * low:+.1f}, {points * high:+.1f}]" if points else f" [{low:.1%}, {high:.1%}]"
