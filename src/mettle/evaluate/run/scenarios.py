"""Judging a trained model on the test split of its data: which pairs are compared, and against which baselines.

| test split has | scenarios |
|---|---|
| queries and a gallery | ``in-domain``: the gallery with itself; ``cross-domain``: queries against the gallery |
| domains | ``in-domain``: pairs of one domain; ``cross-domain``: pairs of two domains |
| neither | ``all``: every pair |

Identities of the test split were never trained on where the split is class-disjoint; the metrics say which it is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mettle.data.dataset import Samples
from mettle.data.transforms import to_input_tensor
from mettle.errors import DataError, MettleError
from mettle.evaluate import inputs
from mettle.evaluate.audit import PAIRED, identities_within_budget
from mettle.evaluate.calibration import apply_threshold
from mettle.evaluate.clustering import clustering
from mettle.evaluate.diagnostics.hard_pairs import Block, HardPair, PairQuery, search_pairs
from mettle.evaluate.inputs import Numbers, Wholes
from mettle.evaluate.retrieval import Retrieval, retrieval
from mettle.evaluate.verification import Verification, verification

UNTRAINED, PRETRAINED, RAW = "untrained network", "pretrained backbone", "raw inputs"  # names of baselines
PIXELS = 32  # side to which pictures are shrunk for the raw-input baseline


@dataclass(frozen=True, eq=False)
class Scenario:
    """One way of pairing the test split."""

    name: str
    title: str
    probe: np.ndarray  # positions in the test split
    gallery: np.ndarray | None = None
    trials: str = "all"

    def verification(self, z: np.ndarray, samples: Samples, across_ranks: bool = False) -> Verification:
        """Genuine against impostor pairs of this scenario."""
        return verification(**self._metric_arguments(z, samples), trials=self.trials, across_ranks=across_ranks)

    def retrieval(self, z: np.ndarray, samples: Samples, ks: Wholes, across_ranks: bool = False) -> Retrieval:
        """Nearest neighbours of this scenario, among the candidates that its pairs are made with."""
        given = self._metric_arguments(z, samples)
        apart, together = self.trials == "across", self.trials == "within"
        given |= {"exclude_same_domain": apart, "only_same_domain": together, "across_ranks": across_ranks}
        return retrieval(**given, k=ks)

    def search_pairs(
        self,
        z: np.ndarray,
        samples: Samples,
        query: PairQuery,
        *,
        count: int,
        each: int | None = None,
        blocks: Iterable[Block] | None = None,
    ) -> list[HardPair]:
        """The first pairs of this scenario that a query is about, by position in the test split.

        Args:
            z: embeddings of the test split.
            samples: the test split.
            query: which pairs come first.
            count: how many.
            each: how many of them may show the same two identities; None: any number.
            blocks: parts of the scenario to look at; by default all of it.
        """
        domains = None if samples.domain is None else samples.domain.codes
        rows = inputs.check_embeddings(z, samples.labels, ids=samples.ids, domains=domains)
        blocks = [(self.probe, self.gallery)] if blocks is None else blocks
        return search_pairs(rows, blocks, query, trials=self.trials, count=count, each=each)

    def fewest_candidates(self, samples: Samples) -> int:
        """Candidates of the query that has fewest among those with a right one."""
        if self.gallery is not None or self.trials == "all" or samples.domain is None:
            return len(self.probe) - 1 if self.gallery is None else len(self.gallery)
        people, domains = samples.labels[self.probe], samples.domain.codes[self.probe]
        size, shots = np.bincount(domains), np.bincount(people)
        cells, own = np.unique(np.stack([people, domains], 1), axis=0, return_counts=True)
        if self.trials == "within":
            there, right = size[cells[:, 1]] - 1, own > 1
        else:
            there, right = len(people) - size[cells[:, 1]], shots[cells[:, 0]] > own
        return int(there[right].min(initial=len(people)))

    def _metric_arguments(self, z: np.ndarray, samples: Samples) -> dict[str, Any]:
        domains = None if samples.domain is None else samples.domain.codes

        def take_rows(at: np.ndarray) -> tuple:
            return z[at], samples.labels[at], None if domains is None else domains[at], samples.ids[at]

        a, b, c, d = take_rows(self.probe)
        found = {"embeddings": a, "labels": b, "domains": c, "ids": d}
        if self.gallery is not None:
            found["gallery"] = take_rows(self.gallery)
        return found


def list_scenarios(samples: Samples) -> tuple[Scenario, ...]:
    """How the samples of a test split can be paired; the hardest way comes last."""
    query, gallery = np.flatnonzero(samples.role == 1), np.flatnonzero(samples.role == 2)
    everything = np.arange(len(samples))
    if len(query) and len(gallery):
        return (
            Scenario("in-domain", "gallery samples with each other", gallery),
            Scenario("cross-domain", "queries against the gallery", query, gallery),
        )
    if samples.domain is not None and len(np.unique(samples.domain.codes)) > 1:
        return (
            Scenario("in-domain", "pairs of one domain", everything, trials="within"),
            Scenario("cross-domain", "pairs of two domains", everything, trials="across"),
        )
    return (Scenario("all", "every pair", everything),)


@dataclass(frozen=True, eq=False)
class ScenarioResults:
    """Everything measured on one set of embeddings."""

    samples: Samples
    embeddings: np.ndarray
    scenarios: tuple[Scenario, ...]
    verifications: Mapping[str, Verification] = field(default_factory=dict)
    retrievals: Mapping[str, Retrieval] = field(default_factory=dict)

    @property
    def headline(self) -> Scenario:
        """The hardest scenario there is: cross-domain before in-domain."""
        return self.scenarios[-1]


def evaluate_scenarios(
    z: np.ndarray, samples: Samples, ks: Wholes = (1, 2, 4, 8), *, fars: Numbers = (), across_ranks: bool = False
) -> ScenarioResults:
    """Verification and retrieval in every scenario that the samples allow.

    ``across_ranks``: all ranks make this call and share the pairs; ``fars`` are rates that are then looked up together.
    """
    if len(samples) == 0:
        raise DataError("the test split is empty: give the data a test split, or let data.test hold out identities")
    paired, chosen = list_scenarios(samples), inputs.check_ints(ks, "ks")
    verifications = {scenario.name: scenario.verification(z, samples, across_ranks) for scenario in paired}
    if across_ranks:
        for v in verifications.values():
            v.refine_at(fars)
    possible = {scenario.name: _possible_ks(chosen, scenario.fewest_candidates(samples)) for scenario in paired}
    retrievals = {
        scenario.name: scenario.retrieval(z, samples, possible[scenario.name], across_ranks) for scenario in paired
    }
    return ScenarioResults(samples, z, paired, verifications, retrievals)


def summarize_scenarios(results: ScenarioResults, fars: Numbers) -> dict[str, Any]:
    """All numbers of all scenarios, with intervals, ready for JSON."""
    rates = inputs.check_rates(fars)
    return {
        scenario.name: {
            "title": scenario.title,
            "verification": results.verifications[scenario.name].summary(rates),
            "retrieval": results.retrievals[scenario.name].summary(),
        }
        for scenario in results.scenarios
    }


def cluster_test_split(results: ScenarioResults, seed: int = 0) -> dict[str, Any]:
    """k-means of the whole test split against its labels, ready for JSON; of some identities where it would take long.

    What cannot be measured is a ``status`` with the reason; otherwise that is "ok".
    """
    y = results.samples.labels
    at = identities_within_budget(y, PAIRED, seed)
    try:
        found = clustering(results.embeddings[at], y[at], seed=seed)
    except MettleError as error:
        return {"status": f"not measurable: {error}"}
    return {"status": "ok", "samples": len(at), **found.summary()}


def evaluate_baseline(
    z: np.ndarray, samples: Samples, *, neighbors: bool = False, across_ranks: bool = False
) -> dict[str, Any]:
    """EER and AUC of other embeddings of the same samples, with ``neighbors`` also Recall@1 and MAP@R; no intervals."""
    found: dict[str, Any] = {}
    for scenario in list_scenarios(samples):
        v = scenario.verification(z, samples, across_ranks)
        found[scenario.name] = {"eer": v.eer, "auc": v.auc}
        if neighbors:
            near = scenario.retrieval(z, samples, (1,), across_ranks)
            found[scenario.name] |= {"recall@1": near.recall[1], "map_at_r": near.map_at_r}
    return found


def embed_raw_inputs(samples: Samples) -> np.ndarray:
    """The inputs themselves as embeddings, centred; pictures shrunk to at most 32 pixels a side."""
    parts = []
    for start in range(0, len(samples), 1024):
        x = to_input_tensor(samples.read(np.arange(start, min(start + 1024, len(samples)))), "cpu")
        if x.ndim == 4:
            size = (min(x.shape[2], PIXELS), min(x.shape[3], PIXELS))
            x = torch.nn.functional.adaptive_avg_pool2d(x, size)
        parts.append(x.float().flatten(1).numpy())
    z = np.concatenate(parts)
    return z - z.mean(0)


def measure_thresholds(z: np.ndarray, samples: Samples, fars: Numbers, measured_on: str) -> dict[str, Any]:
    """Operating thresholds for wanted false-accept rates, from samples kept apart for that.

    Each entry says how many impostor pairs it rests on and how it fares on the very pairs it was set on; an interval
    of the true accept rate goes with it.
    """
    v = verification(z, samples.labels, ids=samples.ids)
    found = {}
    for far in inputs.check_rates(fars):
        point = v.operating_point(far)
        if point.finite_threshold is None:
            found[f"{far:g}"] = {"threshold": None, "status": point.verdict, "impostors": v.impostor}
            continue
        found[f"{far:g}"] = {
            "threshold": point.finite_threshold,
            "status": point.status,
            "fmr": point.fmr,
            "tar": point.tar,
            "tar_interval": _interval_or_none(lambda far=far: v.interval(f"tar@{far!r}")),
            "impostors": v.impostor,
            "measured_on": measured_on,
        }
    return found


def transfer_thresholds(results: ScenarioResults, set_thresholds: Mapping[str, Any]) -> dict[str, Any]:
    """What thresholds that were set elsewhere really do on the test split, per scenario."""
    found: dict[str, Any] = {}
    for scenario in results.scenarios:
        v = results.verifications[scenario.name]
        found[scenario.name] = {}
        for far, entry in set_thresholds.items():
            if entry["threshold"] is None:
                continue
            there = apply_threshold(entry["threshold"], float(far), v, intervals=False)
            found[scenario.name][far] = {"threshold": there.threshold, "fmr": there.fmr, "tar": there.tar}
    return found


def _possible_ks(ks: Sequence[int], candidates: int) -> tuple[int, ...]:
    """The K that are not larger than the number of candidates."""
    return tuple(k for k in ks if k <= candidates) or (1,)


def _interval_or_none(make: Callable[[], Any]) -> list[float] | None:
    try:
        found = make()
    except MettleError:  # too few subjects or impostors
        return None
    return [found.low, found.high]
