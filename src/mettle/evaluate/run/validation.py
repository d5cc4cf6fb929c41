"""Metrics by name on the validation part, for selection while training.

| name | better | what it is |
|---|---|---|
| ``eer``, ``min_dcf``, ``eer_rocch`` | low | of :func:`verification` over all pairs |
| ``auc``, ``tar@1e-3`` | high | the same; TAR at any false-accept rate |
| ``recall@1``, ``map@r``, ``map``, ``r_precision`` … | high | of :func:`retrieval` among all samples; Recall at any K |
| ``worst eer by domain`` | as ``eer`` | the worst group of any of these by any column; pairs lie inside a group |
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from mettle.data.dataset import Samples
from mettle.errors import InputError, MettleError, nearest
from mettle.evaluate.bootstrap import LEAST
from mettle.evaluate.groups import count_paired_subjects, groups, restrict_to
from mettle.evaluate.inputs import NotMeasurable, check_ints, check_rates
from mettle.evaluate.metrics import Metric, metrics_of, parse_metric
from mettle.evaluate.retrieval import Retrieval, retrieval
from mettle.evaluate.verification import Verification, verification
from mettle.model import embed
from mettle.model.embedder import find_device

SHORT = {"map@r": "map_at_r"}  # how recipes write it
CURVES = ("eer", "recall@1")  # measured along with what is asked for, where they can be


@dataclass(frozen=True)
class MetricName:
    """A metric that was asked for by its name, and the column whose worst group it is of, if any."""

    entry: Metric
    at: float | None = None
    column: str | None = None

    @classmethod
    def from_name(cls, name: str) -> "MetricName":
        """Read a name.

        Raises:
            InputError: no metric has that name; the nearest one is named.
        """
        worst = re.fullmatch(r"worst (\S+) by (.+)", str(name))
        text = worst.group(1) if worst else str(name)
        for result in ("verification", "retrieval"):
            try:
                entry, at = parse_metric(SHORT.get(text, text), result)
            except InputError:
                continue
            if entry.takes == "far" and at is not None:
                check_rates(at, name)
            if entry.takes == "k" and at is not None:
                if not at.is_integer():
                    break
                at = check_ints(int(at), "k")[0]
            if entry.takes != "threshold":
                return cls(entry, at, worst.group(2) if worst else None)
        known = [*SHORT, *(m.example for kind in ("verification", "retrieval") for m in metrics_of(kind))]
        examples = (*known, *(f"worst {one} by domain" for one in known if "worst" in str(name)))
        raise InputError(f"no validation metric named {name!r}{nearest(str(name), examples)}")

    @property
    def metric(self) -> str:
        """The name that results know it by."""
        return self.entry.name_at(self.at)

    @property
    def is_of_pairs(self) -> bool:
        """Whether pairs are told apart, not neighbors ranked."""
        return self.entry.result == "verification"


@dataclass(frozen=True)
class ValidationScore:
    """Measures a model on samples by names of metrics, see :mod:`mettle.evaluate.run.validation`: a score for training.

    Attributes:
        minimum: subjects that a group needs to be the worst one.
    """

    minimum: int = LEAST

    def __call__(self, model: Any, samples: Samples, names: tuple[str, ...] = ()) -> Mapping[str, float]:
        """The value of each metric, and of EER and Recall@1 where they can be measured; NaN where embeddings have one.

        Raises:
            InputError: no metric has that name.
            NotMeasurable: the samples do not allow a metric: too few identities, samples of one, or impostor pairs.
        """
        wanted = {name: MetricName.from_name(name) for name in (*names, *CURVES)}
        z = embed(model, samples)
        if not np.isfinite(z).all():
            return dict.fromkeys(names, float("nan"))
        found: dict[str, float] = {}
        measured = _ValidationPairs(z, samples, find_device(model), self.minimum)
        for name, metric in wanted.items():
            try:
                found[name] = measured.metric_value(metric)
            except MettleError as error:
                if name in names:
                    people = len(np.unique(samples.labels))
                    part = f"the validation part ({len(samples)} samples of {people} identities)"
                    raise NotMeasurable(f"{name} cannot be measured on {part}: {error}") from None
        return found

    def direction(self, name: str) -> Literal["min", "max"]:
        """Whether low or high values of a metric are better."""
        return "min" if MetricName.from_name(name).entry.lower_is_better else "max"


class _ValidationPairs:
    """The pairs and neighbors of one set of embeddings, compared once however many metrics are asked for."""

    def __init__(self, z: np.ndarray, samples: Samples, device: torch.device, minimum: int):
        # Large sets are compared where the model is; the result does not depend on that.
        self.z = torch.from_numpy(z).to(device) if device.type == "cuda" else z
        self.samples, self.minimum = samples, minimum
        self._pairs: Verification | None = None
        self._neighbors: dict[int, Retrieval] = {}

    def metric_value(self, name: MetricName) -> float:
        if name.column is None:
            if name.is_of_pairs:
                return self.pairs.value(name.metric)
            return self._find_neighbors(name).value(name.metric)
        column = self.samples.column(name.column).values()
        if not name.is_of_pairs:
            ranked = groups(self._find_neighbors(name), column, metric=name.metric, minimum=self.minimum)
            return float(ranked.worst.values[name.metric])  # type: ignore[arg-type]
        worst = max if name.entry.lower_is_better else min
        return worst(self._by_group(name.metric, column).values())

    @property
    def pairs(self) -> Verification:
        if self._pairs is None:
            self._pairs = verification(self.z, self.samples.labels, ids=self.samples.ids)
        return self._pairs

    def _by_group(self, metric: str, column: np.ndarray) -> dict[str, float]:
        """A metric among the pairs of each group that has subjects enough for it."""
        found, why = {}, {}
        for group in np.unique(column.astype(str)):
            try:
                own = restrict_to(self.pairs, column.astype(str) == group)
                subjects = min(count_paired_subjects(own))
                if subjects < self.minimum:
                    why[group] = f"{subjects} subjects with genuine and impostor pairs, {self.minimum} are needed"
                else:
                    found[group] = own.value(metric)
            except MettleError as error:
                why[group] = str(error)
        if not found:
            raise NotMeasurable("no group allows it: " + "; ".join(f"{group}: {text}" for group, text in why.items()))
        return found

    def _find_neighbors(self, name: MetricName) -> Retrieval:
        k = 1 if name.at is None else int(name.at)
        if k not in self._neighbors:
            self._neighbors[k] = retrieval(self.z, self.samples.labels, ids=self.samples.ids, k=k)
        return self._neighbors[k]
