"""Laws of every registered metric, and that one entry is all that a new one needs.

``python tests/evaluate/test_metrics.py --write`` writes the table of docs/evaluation.md.
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mettle import evaluate
from mettle.errors import InputError, MettleError
from mettle.evaluate import NotMeasurable
from mettle.evaluate.metrics import (
    METRICS,
    ItemMetric,
    Metric,
    PairMetric,
    markdown_table,
    parse_metric,
    register,
    register_temporarily,
)
from mettle.evaluate.roc import least_cost
from mettle.report.comparison_page import scenario_table
from mettle.report.metric_tables import metric_cells

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
TABLE = re.compile(r"(<!-- metrics: [^\n]* -->\n).*?(<!-- /metrics -->)", re.DOTALL)
AT = {"far": 0.1, "fpir": 0.5, "k": 1, "threshold": 0.3}
EVERY = pytest.mark.parametrize("metric", METRICS.values(), ids=["-".join(key) for key in METRICS])
PAIRS = [metric for metric in METRICS.values() if isinstance(metric, PairMetric)]


def people(noise, seed=0, subjects=24, each=5, d=12):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(subjects), each)
    return rng.normal(size=(subjects, d))[y] + noise * rng.normal(size=(len(y), d)), y


def measure(result, x, y, order=None):
    """A result of a kind; where order matters to what is split, it is the samples that are split, not places."""
    at = np.arange(len(y)) if order is None else order
    first = at[at % 5 == 0]
    shelf, rest = first[y[first] < 16], at[at % 5 != 0]
    if result == "verification":
        return evaluate.verification(x[at], y[at])
    if result == "retrieval":
        return evaluate.retrieval(x[at], y[at], k=1)
    if result == "identification":
        return evaluate.identification((x[shelf], y[shelf]), (x[rest], y[rest]))
    if result == "clustering":
        return evaluate.clustering(x[at], y[at], seeds=2)
    if result == "probe":
        train = at[at % 5 < 2]
        test = np.setdiff1d(at, train, assume_unique=True)
        return evaluate.probe((x[train], y[train]), (x[test], y[test]), k=3)
    return evaluate.few_shot(x[at], y[at], queries=2, episodes=60)


@cache
def measured(result, noise=1.0):
    return measure(result, *people(noise))


def name_of(metric):
    return (metric.base, AT[metric.takes]) if metric.takes else metric.key


def text_of(metric):
    return metric.name_at(AT[metric.takes]) if metric.takes else metric.key


@EVERY
def test_values_stay_in_their_limits_and_low_noise_is_better(metric):
    good, bad = (measured(metric.result, noise).value(name_of(metric)) for noise in (0.4, 3.0))
    assert all(metric.limits[0] <= value <= metric.limits[1] for value in (good, bad))
    if metric.takes == "threshold":  # at one threshold, whatever the scores are, one error may fall and the other rise
        looser, stricter = (measured("verification").value((metric.base, tau)) for tau in (0.0, 0.6))
        assert (looser > stricter) == (metric.rests_on == "impostor")
    else:
        assert (good < bad) == metric.lower_is_better
        assert good != bad


@EVERY
def test_a_name_with_what_it_takes_is_one_in_either_form(metric):
    assert parse_metric(text_of(metric), metric.result)[0] is metric
    assert measured(metric.result).value(text_of(metric)) == measured(metric.result).value(name_of(metric))
    with pytest.raises(InputError, match="no metric named"):
        measured(metric.result).value("not a metric")


ORDERED = [m for m in METRICS.values() if m.result not in ("clustering", "few_shot")]  # these two draw positions


@pytest.mark.parametrize("metric", ORDERED, ids=[metric.key for metric in ORDERED])
def test_the_order_of_rows_does_not_matter(metric):
    x, y = people(1.0)
    mixed = measure(metric.result, x, y, np.random.default_rng(1).permutation(len(y)))
    assert mixed.value(name_of(metric)) == pytest.approx(measured(metric.result).value(name_of(metric)), abs=1e-9)


@EVERY
def test_an_interval_holds_the_value_and_few_subjects_have_none(metric):
    result = measured(metric.result)
    if not metric.resampling_unit:
        low, high = result.range(metric.key)
        assert low <= result.value(metric.key) <= high
        return
    found = result.interval(name_of(metric), replicates=200)
    assert metric.limits[0] <= found.low <= result.value(name_of(metric)) <= found.high <= metric.limits[1]
    assert found.low < found.high
    assert found == result.interval(name_of(metric), replicates=200)
    if metric.result in ("verification", "retrieval"):
        few = measure(metric.result, *people(1.0, subjects=5))
        with pytest.raises(NotMeasurable):
            few.interval(name_of(metric))


@EVERY
def test_a_summary_is_json_and_holds_the_value(metric):
    facts = json.loads(json.dumps(_summary(metric.result), allow_nan=False))
    value = measured(metric.result).value(name_of(metric))
    if metric.takes in ("far", "fpir"):
        point = next(p for p in facts[metric.base] if p[metric.takes] == AT[metric.takes])
        assert (point[metric.base], "interval" in point) == (pytest.approx(value), True)
    elif metric.takes != "threshold":
        entry = facts.get(text_of(metric)) or facts["metrics"][text_of(metric)]
        assert entry.get("value", entry.get("accuracy")) == pytest.approx(value)
        assert "interval" in entry or "range" in entry


@cache
def _summary(result):
    options = {"verification": [(0.1,)], "identification": [(0.5,)]}.get(result, [])
    return measured(result).summary(*options)


@EVERY
def test_a_page_shows_what_says_it_is_shown(metric):
    if metric.result not in ("verification", "retrieval"):
        return
    scenario = {"verification": _summary("verification"), "retrieval": _summary("retrieval")}
    title = {cell["key"]: cell["name"] for cell in metric_cells(scenario)}.get(metric.key)
    assert (title is not None) == ("table" in metric.shown)
    table = scenario_table("all", [{"scenarios": {"all": {**scenario, "title": "every pair"}}}] * 2)
    assert (title in table["columns"]) == ("comparison" in metric.shown)


@EVERY
def test_groups_and_comparisons_have_it(metric):
    y = people(1.0)[1]
    if metric.result in ("verification", "retrieval", "probe") and metric.takes not in ("far", "threshold"):
        rows = len(y) if metric.result != "probe" else len(measured("probe").linear.labels)
        side = np.where(np.arange(rows) < rows // 2, "a", "b")
        found = evaluate.groups(measured(metric.result), side, metric=text_of(metric), minimum=2)
        worst = (max if metric.lower_is_better else min)(g.values[text_of(metric)] for g in found)
        assert found.worst.values[text_of(metric)] == worst
        own = found.worst.interval(text_of(metric), replicates=100)
        assert own.low <= worst <= own.high
    if metric.result in ("verification", "retrieval", "probe") and metric.takes != "threshold":
        good, bad = (measured(metric.result, noise) for noise in (0.4, 3.0))
        assert evaluate.compare(good, bad, name_of(metric), replicates=100).excludes_zero
        assert (evaluate.compare(good, bad, name_of(metric), replicates=100).difference < 0) == metric.lower_is_better


@pytest.mark.parametrize("metric", PAIRS, ids=[metric.key for metric in PAIRS])
def test_a_histogram_keeps_to_the_bound(metric):
    x, y = people(1.0)
    bins = evaluate.verification(x, y, mode="histogram")
    bound = metric.bound(bins.scores, None) if metric.bound else 0.0
    assert abs(bins.value(name_of(metric)) - measured("verification").value(name_of(metric))) <= bound + 1e-12


@pytest.mark.parametrize("result", sorted({metric.result for metric in METRICS.values()}))
def test_nan_never_gives_a_number(result):
    x, y = people(1.0)
    x[17, 3] = np.nan
    with pytest.raises(MettleError):
        measure(result, x, y)


def test_the_table_of_the_docs_is_that_of_the_registry():
    assert TABLE.search(PAGE.read_text()).group(0).split("\n", 1)[1].removesuffix("<!-- /metrics -->") == (
        markdown_table() + "\n"
    ), "write it anew: python tests/evaluate/test_metrics.py --write"


def half_errors(fmr, fnmr):
    return (fmr + fnmr) / 2


HTER = PairMetric(
    "min_hter",
    "least HTER",
    "least (FMR + FNMR) / 2",
    "verification",
    lower_is_better=True,
    shown=frozenset({"table", "comparison"}),
    value=lambda scores, at: least_cost(scores, half_errors).value,
    replicates=lambda curves, at: half_errors(*curves.error_rates).min(axis=1),
)
FIRST_PLACE = ItemMetric(
    "alone@k",
    "first among {}",
    "whether one of the K nearest is relevant in every order of ties",
    "retrieval",
    per_item=lambda ties, k: (ties.leading[0] + ties.leading[1] - ties.leading[2] < k).astype(float),
    resample="subjects of queries",
)


def test_one_entry_is_all_that_a_new_metric_needs():
    x, y = people(1.0)
    with register_temporarily(HTER), register_temporarily(FIRST_PLACE):
        v, r = evaluate.verification(x, y), evaluate.retrieval(x, y, k=(1, 2))
        thresholds = np.unique(v.scores.genuine)
        assert v.value("min_hter") == min(sum(v.rates(tau)) / 2 for tau in thresholds)
        assert v.interval("min_hter").low < v.value("min_hter") < v.interval("min_hter").high
        assert r.value("alone@2") == r.pessimistic[2]
        facts = {"verification": v.summary(), "retrieval": r.summary()}
        assert facts["verification"]["min_hter"]["value"] == v.value("min_hter")
        names = [cell["name"] for cell in metric_cells(facts)]
        assert {"least HTER", "first among 1", "first among 2"} <= set(names)
        two = [{"scenarios": {"all": {**facts, "title": "every pair"}}}] * 2
        assert "least HTER" in scenario_table("all", two)["columns"]
        assert "min_hter" in evaluate.groups(v, y % 2, minimum=5)["0"].values
        assert "| `min_hter` | least HTER |" in markdown_table()
        worse = evaluate.verification(people(2.0)[0], y)
        assert evaluate.compare(v, worse, "min_hter").difference < 0
    with pytest.raises(InputError, match="no metric named 'min_hter'"):
        v.value("min_hter")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"key": "eer"}, "has a metric 'eer' already"),
        ({"result": "verifcation"}, "did you mean 'verification'"),
        ({"shown": frozenset({"tabel"})}, "'tabel'"),
        ({"key": "x@y"}, "takes one of"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(change, problem):
    with pytest.raises(InputError, match=problem):
        register(Metric(**{"key": "new", "title": "", "definition": "", "result": "verification"} | change))


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(TABLE.sub(lambda found: f"{found.group(1)}{markdown_table()}\n{found.group(2)}", PAGE.read_text()))
