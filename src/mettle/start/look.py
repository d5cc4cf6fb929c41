"""What is in a folder of photographs and what this machine can do, before anything is chosen."""

import os
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mettle.data import check, read
from mettle.data.check import DataReport
from mettle.data.dataset import NO_SPLIT
from mettle.data.splits import identity_disjoint_split
from mettle.errors import DataError
from mettle.train.auto_settings import ImageFacts, measure_images, resolve_device

MOST_CHECKED = 4000  # images that copies are looked for among: more would take minutes
SHOWN = 3  # problems in the account


@dataclass(frozen=True)
class DataAccount:
    """What was seen in the data.

    Attributes:
        source: where they are.
        samples: how many.
        per_label: how many of each label, ascending.
        images: their sizes.
        report: what `mettle.data.check` found among up to `MOST_CHECKED` of them.
        checked: how many these were.
        has_split: whether the data say themselves what is for the test.
    """

    source: str
    samples: int
    per_label: tuple[int, ...]
    images: ImageFacts
    report: DataReport
    checked: int
    has_split: bool

    @property
    def kept_by_crop(self) -> float:
        """The share of an image that a square from its center keeps, for half of the images at least."""
        return statistics.median(min(size) / max(size) for size in self.images.sizes)

    def lines(self) -> list[str]:
        """A short account, one fact a line."""
        few, many, middle = self.per_label[0], self.per_label[-1], statistics.median(self.per_label)
        sides = [min(size) for size in self.images.sizes]
        split = "a split of their own" if self.has_split else "no split: three in ten labels are kept for the test"
        found = [
            f"{self.samples:,} images of {len(self.per_label):,} labels, {few} to {many} of each (median {middle:g}); "
            f"{split}",
            f"{self.images.distinct:,} {'size' if self.images.distinct == 1 else 'sizes'}"
            f"{' or more' if len(sides) < self.samples else ''}, short sides "
            f"{min(sides)} to {max(sides)} pixels (median {self.images.median_short_side}); a square from the center "
            f"keeps {self.kept_by_crop:.0%} of an image{', all in grey' if self.images.grey else ''}",
        ]
        among = "" if self.checked == self.samples else f" among {self.checked:,} of them"
        errors, warnings = self.report.count("error"), self.report.count("warning")
        if not errors + warnings:
            return [*found, f"no copies, near-copies or other problems{among}"]
        remedy = f"`mettle data check {shlex.quote(self.source)}` lists all"
        found.append(f"{errors} errors and {warnings} warnings{among}; {remedy}")
        return found + [f"  {problem}" for problem in self.report.problems[:SHOWN]]


def look_at_data(source: str, cache: Path | None = None, **columns: str | None) -> DataAccount:
    """Read the images of a source, count them and look for copies.

    Raises:
        DataError: nothing can be trained on them; one line says why.
    """
    try:
        return _look(source, cache, columns)
    except DataError as problem:
        raise DataError(f"{problem}; `mettle data check {shlex.quote(source)}` says more") from None


def _look(source: str, cache: Path | None, columns: Mapping[str, Any]) -> DataAccount:
    samples = read(source, policy="trust", cache=cache, **columns)
    if samples.inputs.kind != "image":
        raise DataError(f"{source} has rows of numbers, `mettle start` takes images: use `mettle train supcon --data`")
    counts = np.bincount(samples.labels)
    counts = np.sort(counts[counts > 0])
    if len(counts) == 1:
        raise DataError(
            f"all {len(samples):,} images have one label: there is nothing to tell apart. Give the folder that holds "
            "the folders of the labels"
        )
    has_split = bool((samples.split != NO_SPLIT).any())
    samples = samples if has_split else identity_disjoint_split(samples)
    trained = np.bincount(samples.part("train").labels) if has_split else counts
    if int((trained >= 2).sum()) < 2:
        raise DataError("fewer than two labels have two images to train on: pairs of images of one label are needed")
    part = samples.take(_evenly_spaced(len(samples)))
    report = check(part, policy="skip", limit=SHOWN)
    return DataAccount(
        source, len(samples), tuple(counts.tolist()), measure_images(samples.inputs), report, len(part), has_split
    )


def _evenly_spaced(count: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, MOST_CHECKED)).astype(np.int64))


def describe_machine() -> str:
    """What trains here, in one line."""
    if resolve_device("auto") == "cuda":
        return f"one GPU ({torch.cuda.get_device_name()})"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    used = "" if threads == cores else f", of which torch uses {threads}"
    return f"no GPU, {cores} CPU {'core' if cores == 1 else 'cores'}{used}"
