"""Evaluate a run folder: embed its test split, measure, write ``metrics.json`` and the thresholds of the contract."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mettle.atomic_files import write_text
from mettle.data.dataset import NO_SPLIT, SPLITS, Samples
from mettle.data.duplicates import train_test_duplicates
from mettle.errors import DataError, RunError
from mettle.evaluate.retrieval import Retrieval
from mettle.evaluate.run import probes
from mettle.evaluate.run.compare_runs import save_test_split
from mettle.evaluate.run.question import choose_question
from mettle.evaluate.run.scenarios import (
    PRETRAINED,
    RAW,
    UNTRAINED,
    ScenarioResults,
    cluster_test_split,
    embed_raw_inputs,
    evaluate_baseline,
    evaluate_scenarios,
    measure_thresholds,
    summarize_scenarios,
    transfer_thresholds,
)
from mettle.evaluate.verification import Verification
from mettle.model import EmbeddingModel, embed
from mettle.model.embedder import find_device
from mettle.model.embedding_shards import embed_across_ranks
from mettle.pairs.distributed import ALONE, RankGroup
from mettle.rng import permutation
from mettle.train.from_recipe import build_model
from mettle.train.run_folder import RunFolder, TrainingIdentities, set_thresholds

THRESHOLD_SHARE = 0.3  # of the identities of data without a split, that thresholds of an adopted model are set on


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What was measured, as numbers for the file and as objects for the pictures."""

    metrics: dict[str, Any]
    results: ScenarioResults
    samples: Samples | None = None  # all splits

    def __repr__(self) -> str:
        return f"Evaluation({self.results.headline.name}: {self.verification!r}, {self.retrieval!r})"

    @property
    def verification(self) -> Verification:
        """That of the hardest scenario there is: cross-domain before in-domain."""
        return self.results.verifications[self.results.headline.name]

    @property
    def retrieval(self) -> Retrieval:
        """That of the hardest scenario there is."""
        return self.results.retrievals[self.results.headline.name]


def evaluate_run(
    run: RunFolder,
    samples: Samples,
    *,
    model: EmbeddingModel | None = None,
    own_data: bool = True,
    write: bool = True,
    untrained: EmbeddingModel | None = None,
    across_ranks: bool = False,
) -> Evaluation:
    """Measure a run on the test split of ``samples``.

    Args:
        run: the run.
        samples: all splits; validation identities are needed to set thresholds on.
        model: the trained model, when it is at hand.
        own_data: whether these are the data that the run was trained on; others get metrics, but no new contract.
            Other data without a split are all tested on. An adopted model has no data of its own: thresholds are set on
            some of the identities of whatever it is measured on, and tested on the others.
        write: whether to write ``metrics.json`` (and the thresholds).
        untrained: the network before training, as a baseline, where no recipe can build it.
        across_ranks: share embedding the test split and comparing it with the other ranks of `torch.distributed`: every
            rank makes this call on the same samples and has the result; rank 0 alone writes.

    Raises:
        RunError: ``own_data``, but the data have changed since the run was trained.
    """
    fingerprint = samples.fingerprint()
    same = run.matches_data(fingerprint)
    own_data = own_data or run.is_adopted  # whose own data nobody knows: these set its thresholds
    if own_data and not same and not run.is_adopted:
        raise RunError(
            f"the data of {run.folder} have changed since it was trained (fingerprint {fingerprint}, then "
            f"{run.state.get('data')}), and so may have who is tested: its metrics and thresholds stay as they are. "
            "Measure the data as they are now with --data"
        )
    if run.is_adopted and (samples.split == NO_SPLIT).all():
        samples = split_for_thresholds(samples)
    if not own_data and (samples.split == NO_SPLIT).all():
        samples = replace(samples, split=np.full(len(samples), SPLITS.index("test"), np.int8))
    model = model or run.model()
    device = str(find_device(model))
    setup = run.recipe.evaluate
    biased = run.biased_model(device) if run.has_biased_model else None
    test = samples.part("test")
    if len(test) == 0:
        raise DataError(f"{samples.source_name} has no test split: nothing to evaluate on")
    source = run.recipe.data.source if own_data else samples.source_name  # as it was typed, wherever it was found
    ranks = RankGroup.current() if across_ranks else ALONE
    shared = {"across_ranks": ranks.size > 1}
    z = embed_across_ranks(model, test, ranks)
    results = evaluate_scenarios(z, test, setup.ks, fars=setup.fars, **shared)
    metrics: dict[str, Any] = {
        "format": 1,
        "run": run.name,
        "title": run.recipe.title(),
        "data": {"source": source, "fingerprint": fingerprint, **_describe_protocol(run, samples, same)},
        "weights": run.contract()["weights"],
        **({"selection": run.contract()["selection"]} if "selection" in run.contract() else {}),
        "scenarios": summarize_scenarios(results, setup.fars),
    }
    if setup.baselines and untrained is None and own_data and run.recipe.foreign_model is None:
        untrained = build_model(run.recipe, samples)
    before: dict[str, EmbeddingModel] = {}  # the network before training, by the name of that baseline
    if setup.baselines and own_data and untrained is not None:
        before = {UNTRAINED if getattr(untrained, "pretrained", None) is None else PRETRAINED: untrained}
    if probes.wants_probes(run.recipe, samples):
        encoders = {"model": model} if biased is None else {probes.MODEL: model, probes.BIASED: biased}
        try:
            metrics["probe"] = probes.evaluate_probes(setup, samples, encoders, before)
        except DataError as error:  # other data may lack what the run's own had: a training split, a column
            if own_data:
                raise
            metrics["probe"] = {"labels": {"status": f"not measurable: {error}"}}
    question = choose_question(run.recipe, metrics)
    metrics["question"] = vars(question)
    if setup.baselines:
        near = question.name == "retrieval"
        metrics["baselines"] = {RAW: evaluate_baseline(embed_raw_inputs(test), test, neighbors=near, **shared)}
        for name, network in before.items():  # of a pretrained one the head is new: there were features only
            z = embed_across_ranks(network, test, ranks, features=name == PRETRAINED)
            metrics["baselines"][name] = evaluate_baseline(z, test, neighbors=near or name == PRETRAINED, **shared)
        if biased is not None:
            z = embed_across_ranks(biased, test, ranks)
            metrics["baselines"]["biased encoder (E_b)"] = evaluate_baseline(z, test, neighbors=near, **shared)
    if question.name == "retrieval":
        metrics["clustering"] = cluster_test_split(results)
    if own_data:
        found = _choose_thresholds(model, samples, results, setup.fars, is_selected="selection" in metrics)
        metrics["thresholds"] = {"set": found, "on test": transfer_thresholds(results, found)}
        if write:
            ranks.compute_on_first(lambda: set_thresholds(run, found))
    if write:
        ranks.compute_on_first(lambda: write_text(run.folder / "metrics.json", json.dumps(metrics, indent=1)))
        ranks.compute_on_first(lambda: save_test_split(run, results, metrics, setup.spurious or "domain"))
    return Evaluation(metrics, results, samples)


def split_for_thresholds(samples: Samples) -> Samples:
    """Some identities to set thresholds on, as the validation part, and the others to test them."""
    present = np.unique(samples.labels)
    chosen = present[permutation(len(present), 0, 0, stream=17)[: max(2, round(THRESHOLD_SHARE * len(present)))]]
    split = np.where(np.isin(samples.labels, chosen), SPLITS.index("val"), SPLITS.index("test")).astype(np.int8)
    return replace(samples, split=split)


def _choose_thresholds(
    model: EmbeddingModel, samples: Samples, results: ScenarioResults, fars: Sequence[float], *, is_selected: bool
) -> dict[str, Any]:
    """Operating thresholds, set on the validation identities where there are enough of them."""
    val = samples.part("val")
    people = len(np.unique(val.labels))
    if people > 1 and len(val) > people:
        also = ": they also chose the step whose weights are kept" if is_selected else ""
        return measure_thresholds(embed(model, val), val, fars, f"validation identities{also}")
    return measure_thresholds(results.embeddings, results.samples, fars, "test identities: optimistic")


def _describe_protocol(run: RunFolder, samples: Samples, same: bool) -> dict[str, Any]:
    """Whether the test is open-set and cross-domain, and how many identities it has.

    Who was trained on is what the run kept; the ``same`` data as in training, split as then, tell it by themselves.
    """
    test = samples.part("test")
    seen = TrainingIdentities.from_samples(samples) if same else run.training_identities()
    names = [samples.label.names[code] for code in np.unique(test.labels)]
    shared = None if seen is None else int(seen.contains(names).sum())
    facts: dict[str, Any] = {
        "test_samples": len(test),
        "test_identities": len(names),
        "training_identities": None if seen is None else len(seen.identities),
        "shared_identities": shared,
        "by_names": not same,  # of other data only names can be compared, and equal ones may be chance
        "protocol": _protocol_title(shared, len(names), same),
    }
    if same:
        facts["copied_samples"] = vars(train_test_duplicates(samples))
    if test.domain is not None and seen is not None and seen.domains is not None:
        domains = [test.domain.names[code] for code in np.unique(test.domain.codes)]
        known = seen.contains_domain(domains)
        facts["unseen_domains"] = [name for name, there in zip(domains, known, strict=True) if not there]
    return facts


def _protocol_title(shared: int | None, tested: int, same: bool) -> str:
    """What such a test is called."""
    how = "trained on" if same else "trained on, going by names"
    if shared is None:
        return "open or closed set unknown: the run does not say who it was trained on"
    if shared == 0:
        return f"open set: no test identity was {how}"
    if shared == tested:
        return f"closed set: every test identity was {how}"
    return f"mixed set: {shared} of {tested} test identities were {how}"
