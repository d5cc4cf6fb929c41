"""Evaluate a run folder: embed its test split, measure, write ``metrics.json`` and the thresholds of the contract."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from mettle.data.samples import Samples
from mettle.durable import write_text
from mettle.errors import DataError
from mettle.evaluate import closed
from mettle.evaluate.protocol import Judged, baseline, judge, raw, summary, thresholds, transfer
from mettle.model import Embedder, embed
from mettle.train.artifact import Run, set_thresholds
from mettle.train.session import new_model
from mettle.train.two_encoder import biased_model


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What was measured, as numbers for the file and as objects for the pictures."""

    metrics: dict[str, Any]
    judged: Judged
    samples: Samples | None = None  # all splits


def evaluate_run(
    run: Run, samples: Samples, *, model: Embedder | None = None, own_data: bool = True, write: bool = True
) -> Evaluation:
    """Measure a run on the test split of ``samples``.

    Args:
        run: the run.
        samples: all splits; training identities are needed to see whether the test is open-set, validation ones to
            set thresholds on.
        model: the trained model, when it is at hand.
        own_data: whether these are the data that the run was trained on; others get metrics, but no new contract.
        write: whether to write ``metrics.json`` (and the thresholds).
    """
    model = model or run.model()
    device = str(next(model.parameters()).device)
    setup = run.recipe.evaluate
    biased = biased_model(run, device) if (run.folder / "biased.safetensors").is_file() else None
    test = samples.part("test")
    if len(test) == 0:
        raise DataError(f"{samples.origin} has no test split: nothing to evaluate on")
    judged = judge(embed(model, test), test, setup.ks)
    metrics: dict[str, Any] = {
        "format": 1,
        "run": run.name,
        "title": run.recipe.title(),
        "data": {"source": samples.origin, "fingerprint": samples.fingerprint(), **_protocol(samples)},
        "weights": run.contract()["weights"],
        "scenarios": summary(judged, setup.fars),
    }
    if setup.baselines:
        untrained = embed(new_model(run.recipe, samples), test) if own_data else None
        metrics["baselines"] = {"raw inputs": baseline(raw(test), test)}
        if untrained is not None:
            metrics["baselines"]["untrained network"] = baseline(untrained, test)
        if biased is not None:
            metrics["baselines"]["biased encoder (E_b)"] = baseline(embed(biased, test), test)
    if closed.wanted(run.recipe, samples):
        encoders = {"model": model} if biased is None else {closed.MODEL: model, closed.BIASED: biased}
        try:
            metrics["probe"] = closed.probes(setup, samples, encoders)
        except DataError as error:  # other data may lack what the run's own had: a training split, a column
            if own_data:
                raise
            metrics["probe"] = {"labels": {"status": f"not measurable: {error}"}}
    if own_data:
        val = samples.part("val")
        enough = len(val) > 1 and len(np.unique(val.labels)) > 1 and len(val) > len(np.unique(val.labels))
        chosen, name = (val, "validation identities") if enough else (test, "test identities: optimistic")
        z = embed(model, val) if enough else judged.embeddings
        found = thresholds(z, chosen, setup.fars, name)
        metrics["thresholds"] = {"set": found, "on test": transfer(judged, found)}
        if write:
            set_thresholds(run, found)
    if write:
        write_text(run.folder / "metrics.json", json.dumps(metrics, indent=1))
    return Evaluation(metrics, judged, samples)


def _protocol(samples: Samples) -> dict[str, Any]:
    """Whether the test is open-set and cross-domain, and how many identities it has."""
    train, test = samples.part("train"), samples.part("test")
    shared = np.intersect1d(train.labels, test.labels)
    facts: dict[str, Any] = {
        "test_samples": len(test),
        "test_identities": len(np.unique(test.labels)),
        "training_identities": len(np.unique(train.labels)),
        "shared_identities": len(shared),
        "protocol": "open set: no test identity was trained on" if len(shared) == 0 else "closed set",
    }
    if samples.domain is not None:
        names = np.asarray(samples.domain.names, dtype=object)
        new = np.setdiff1d(test.domain.codes, train.domain.codes)  # type: ignore[union-attr]
        facts["unseen_domains"] = names[new].tolist()
    return facts
