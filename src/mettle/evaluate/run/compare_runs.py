"""Two runs on the same test split: the paired difference of every number that their question asks for.

`evaluate_run` leaves the embeddings of the test split in ``test_embeddings.safetensors`` of the run folder, so that runs
can be compared without their data and without embedding anything again:

    save_test_split ─ test_embeddings.safetensors ─ load_test_split ─┬─ compare (subjects resampled)      EER, AUC, TAR, Recall@K
                                                                     └─ compare_correct (samples resampled)   top-1, worst class
"""  # noqa: E501

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mettle.data.dataset import Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import MettleError
from mettle.evaluate.compare import compare
from mettle.evaluate.run.probes import compare_correct
from mettle.evaluate.run.scenarios import ScenarioResults, list_scenarios
from mettle.train.run_folder import RunFolder

FILE = "test_embeddings.safetensors"
MOST_BYTES = 1 << 28  # of embeddings that are kept
MOST_SAMPLES = 20_000  # whose pairs are resampled for a comparison


@dataclass(frozen=True, eq=False)
class TestSplit:
    """What a comparison needs of a test split: embeddings and what is known about each sample, no inputs."""

    __test__ = False  # no test of pytest's

    embeddings: np.ndarray
    samples: Samples
    group: np.ndarray | None  # codes of the column that a model may fall for


@dataclass(frozen=True)
class PairedDifference:
    """One number of two runs on the same test split.

    Attributes:
        metric: its name: ``"eer"``, ``"tar@0.01"``, ``"recall@1"``, ``"top_1"``, ``"worst_group"``.
        first: value of the first run.
        second: value of the second run.
        difference: first − second.
        low: of the 95 % interval of the difference; None where there are too few subjects.
        high: the other end.
    """

    metric: str
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def save_test_split(run: RunFolder, results: ScenarioResults, metrics: Mapping[str, Any], column: str) -> None:
    """Keep the embeddings of the test split beside ``metrics.json``; too many of them are not kept."""
    path, samples = run.folder / FILE, results.samples
    if results.embeddings.nbytes > MOST_BYTES:
        path.unlink(missing_ok=True)
        return
    content = {
        "embeddings": np.ascontiguousarray(results.embeddings),
        "labels": np.ascontiguousarray(samples.labels),
        "ids": np.ascontiguousarray(samples.ids),
        "role": np.ascontiguousarray(samples.role),
    }
    columns = samples.columns()
    for name, found in (("domain", samples.domain), ("group", columns.get(column))):
        if found is not None:
            content[name] = np.ascontiguousarray(found.codes)
    save_file(content, path, {"weights": metrics["weights"], "data": metrics["data"]["fingerprint"]})


def load_test_split(run: RunFolder, metrics: Mapping[str, Any]) -> TestSplit | None:
    """The same again; None where it was not kept, or is of other weights or data."""
    from safetensors import safe_open

    path = run.folder / FILE
    try:
        with safe_open(path, "np") as file:
            if file.metadata() != {"weights": metrics["weights"], "data": metrics["data"]["fingerprint"]}:
                return None
        content = load_file(path)
        z, labels = content["embeddings"], content["labels"]
        unseen = FeatureArray(np.zeros((len(z), 1), np.float32))
        samples = Samples.of(unseen, labels, domain=content.get("domain"))
        samples = replace(samples, role=content["role"], ids=content["ids"])
    except (OSError, KeyError, SafetensorError, MettleError):
        return None
    return TestSplit(z, samples, content.get("group"))


def compare_runs(
    first: RunFolder, second: RunFolder, measured: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> tuple[tuple[PairedDifference, ...], str]:
    """The paired differences of two runs, first − second, and why there are none.

    Args:
        first: a run that was evaluated.
        second: another on the same test split.
        measured: the ``metrics.json`` of both; the question is that of the first.
    """
    if measured[0]["data"]["fingerprint"] != measured[1]["data"]["fingerprint"]:
        return (), "the runs were measured on different data"
    if measured[0]["question"]["name"] == "closed-set":
        return _compare_closed_sets(first, measured)
    splits = [load_test_split(run, m) for run, m in zip((first, second), measured, strict=True)]
    if splits[0] is None or splits[1] is None:
        missing = first if splits[0] is None else second
        return (), f"{missing.name} has kept no embeddings of these weights and data: evaluate it again"
    a, b = splits[0], splits[1]
    if len(a.samples) > MOST_SAMPLES:
        return (), f"the test split has more than {MOST_SAMPLES:,} samples"
    scenario = list_scenarios(a.samples)[-1]
    if measured[0]["question"]["name"] == "retrieval":
        names = ["recall@1", "map_at_r", "map"]
        two: Any = [scenario.retrieval(one.embeddings, one.samples, (1,)) for one in (a, b)]
        values = [[float(one.per_query[name].mean()) for one in two] for name in names]
    else:
        points = measured[0]["scenarios"][scenario.name]["verification"]["tar"]
        names = ["eer", "auc", *(f"tar@{p['far']!r}" for p in points if p["status"] == "ok")]
        two = [scenario.verification(one.embeddings, one.samples) for one in (a, b)]
        values = [[one.value(name) for one in two] for name in names]
    found = []
    for name, (x, y) in zip(names, values, strict=True):
        try:
            band = compare(two[0], two[1], name).interval
            found.append(PairedDifference(name, x, y, x - y, band.low, band.high))
        except MettleError:  # too few subjects
            found.append(PairedDifference(name, x, y, x - y, None, None))
    return tuple(found), ""


def _compare_closed_sets(
    first: RunFolder, measured: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> tuple[tuple[PairedDifference, ...], str]:
    """What the linear probe of one run reads more than that of the other, test samples resampled."""
    told = [m.get("probe", {}).get("labels", {}) for m in measured]
    if any(labels.get("status") != "ok" for labels in told):
        return (), "one of them has no probe of labels"
    rows = [next(iter(labels["encoders"].values()))["correct"] for labels in told]
    split = load_test_split(first, measured[0])
    if split is None:
        return (), f"{first.name} has kept no embeddings of these weights and data: evaluate it again"
    marks = [np.frombuffer(row.encode(), "S1") for row in rows]
    both = np.flatnonzero((marks[0] != b"-") & (marks[1] != b"-"))
    labels = split.samples.labels[both]
    group = None
    if split.group is not None:
        group = np.unique(np.column_stack([labels, split.group[both]]), axis=0, return_inverse=True)[1].reshape(-1)
    a, b = ((mark[both] == b"1").astype(float) for mark in marks)
    found = []
    for name, one in compare_correct(a, b, labels, group).items():
        band = one["interval"] or {"low": None, "high": None}
        found.append(PairedDifference(name, one["first"], one["second"], one["difference"], band["low"], band["high"]))
    return tuple(found), ""
