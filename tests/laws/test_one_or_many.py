"""Whatever takes several rates, ranks, thresholds or cuts takes one, as a list of one; what is none of them is refused.

The members are found by reading the signatures of the room, so that a new one cannot be forgotten here.
"""

import importlib
import inspect
import json
import pkgutil
import re

import numpy as np
import pytest
import torch

from mettle import evaluate
from mettle.data.dataset import Samples
from mettle.data.inputs import FeatureArray
from mettle.errors import InputError
from mettle.evaluate.run import scenarios

RNG = np.random.default_rng(0)
Y = np.repeat(np.arange(12), 4)
X = RNG.normal(size=(12, 6))[Y] + 0.8 * RNG.normal(size=(48, 6))
SAMPLES = Samples.of(FeatureArray(X.astype(np.float32)), Y)
IDENTIFIED = evaluate.identification((X[::4], Y[::4]), (X[1::2] + 0.1, np.where(Y[1::2] < 8, Y[1::2], 99)))


def _at(thresholds):
    v = evaluate.verification(X, Y)
    v.resample_at(thresholds)
    return [key[0] for key in v._kept]


def _looked(**options):
    v = evaluate.verification(X, Y, mode="histogram")
    v.refine_at(**{"fars": (), **options})
    return [v.scores.is_refined, v.rates(0.3), v.operating_point(0.1).threshold]


def scenario_numbers(ks, fars):
    return scenarios.summarize_scenarios(scenarios.evaluate_scenarios(X, SAMPLES, ks), fars)


MEMBERS = {
    "verification.Verification.summary fars": (lambda n: evaluate.verification(X, Y).summary(n), 0.1),
    "verification.Verification.plot fars": (lambda n: evaluate.verification(X, Y).plot("roc", fars=n).svg, 0.1),
    "verification.Verification.refine_at fars": (lambda n: _looked(fars=n), 0.1),
    "verification.Verification.refine_at thresholds": (lambda n: _looked(thresholds=n), 0.3),
    "verification.Verification.resample_at thresholds": (_at, 0.3),
    "identification.Identification.summary fpirs": (IDENTIFIED.summary, 0.5),
    "run.scenarios.evaluate_scenarios ks": (lambda n: scenario_numbers(n, [0.1]), 2),
    "run.scenarios.Scenario.retrieval ks": (
        lambda n: scenarios.list_scenarios(SAMPLES)[0].retrieval(X, SAMPLES, n).summary(),
        2,
    ),
    "run.scenarios.summarize_scenarios fars": (lambda n: scenario_numbers((1, 2, 4, 8), n), 0.1),
    "run.scenarios.measure_thresholds fars": (lambda n: scenarios.measure_thresholds(X, SAMPLES, n, "these"), 0.1),
    "audit.audit fars": (lambda n: evaluate.audit(X, Y, fars=n, most=40).summary(), 0.1),
    "retrieval.retrieval k": (lambda n: evaluate.retrieval(X, Y, k=n).summary(), 3),
    "retrieval.retrieval_from_scores k": (
        lambda n: evaluate.retrieval_from_scores(X @ X.T, Y, k=n).summary(),
        3,
    ),
    "retrieval.reidentification k": (
        lambda n: evaluate.reidentification((X, Y, Y * 0), (X, Y, Y * 0 + 1), k=n).summary(),
        3,
    ),
    "groups.class_size edges": (lambda n: evaluate.class_size(Y, n).tolist(), 4),
}
HUGE = pytest.param(10**400, id="beyond floats")
EVERY = pytest.mark.parametrize(("call", "one"), MEMBERS.values(), ids=list(MEMBERS))


def plain(found):
    return json.loads(json.dumps(found))


@EVERY
def test_one_is_a_list_of_one_whatever_holds_it(call, one):
    wanted = plain(call([one]))
    kind = np.float64 if isinstance(one, float) else np.int64
    for same in (one, (one,), {one}, iter([one]), kind(one), np.array(one), np.array([one]), [kind(one)]):
        assert plain(call(same)) == wanted
    assert plain(call(torch.tensor([one], dtype=torch.float64 if isinstance(one, float) else torch.int64))) == wanted


@EVERY
@pytest.mark.parametrize(
    "bad", ["a", "1", None, True, [None], [True], [[0.1]], float("nan"), {0.1: 2}, [0.1, "b"], HUGE]
)
def test_what_is_no_number_is_refused_in_one_line(call, one, bad):
    with pytest.raises(InputError, match=r"^(fars|fpirs|ks|k|thresholds|edges) must be .*: got .*") as caught:
        call(bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fars", [1, [0.1, 1.0]])
def test_an_audit_has_no_threshold_that_accepts_everybody(fars):
    with pytest.raises(InputError, match=r"^fars must be above 0 and below 1: got "):
        evaluate.audit(X, Y, fars=fars)


def test_a_rate_in_an_array_has_its_interval():
    """Its name is made of the rate, which must be written as a number is."""
    v = evaluate.verification(X, Y)
    given, listed = (v.summary(fars)["tar"][0]["interval"] for fars in (np.array([0.1]), [0.1]))
    assert given == listed is not None


INNER = {  # behind one of those doors
    "ranking_metrics.all_metrics ks",
    "bootstrap.mean_interval values",  # the mean of one value has no interval
    "bootstrap.at_thresholds thresholds",
    "scoring.scores.ScoreStore.refine accepts",
    "scoring.scores.ScoreStore.refine thresholds",
    "scoring.scores.SortedScores.refine accepts",
    "scoring.scores.SortedScores.refine thresholds",
    "scoring.histogram.HistogramScores.refine accepts",
    "scoring.histogram.HistogramScores.refine thresholds",
    "scoring.pair_tiles.PairTiles.excluded_mask shape",
    "run.scenarios.evaluate_scenarios fars",
    "protocol.SampleIndex.positions_of ids",
    "protocol.SampleIndex.metric_arguments ids",
    "protocol.SampleIndex.leakage_side ids",
}


def test_every_function_of_the_room_that_takes_several_is_a_member():
    several = re.compile(r"(Sequence|Iterable|tuple|list)\[(int|float)\b(?!, (int|float))")
    found = set()
    for part in pkgutil.walk_packages(evaluate.__path__, "mettle.evaluate."):
        module = importlib.import_module(part.name)
        for path, call in _calls(module):
            for argument in inspect.signature(call).parameters.values():
                if several.search(str(argument.annotation)):
                    found.add(f"{part.name.removeprefix('mettle.evaluate.')}.{path} {argument.name}")
    assert found == set(MEMBERS) | INNER


def _calls(module):
    """Public functions and methods that a module defines."""
    for name, item in vars(module).items():
        if getattr(item, "__module__", "") != module.__name__ or name.startswith("_"):
            continue
        if inspect.isfunction(item):
            yield name, item
        elif inspect.isclass(item):
            yield from ((f"{name}.{n}", f) for n, f in vars(item).items() if inspect.isfunction(f) and n[0] != "_")
