"""Labels may be text or any hashable objects: every number is the one that integer codes of them give."""

from pathlib import PurePosixPath

import numpy as np
import pytest

from mettle import evaluate
from mettle.errors import DataError, InputError
from mettle.evaluate import protocol

WHO = np.repeat(np.arange(10), 6)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 8))[WHO] + 0.7 * RNG.normal(size=(60, 8))
PLACE = np.tile([0, 1, 2], 20)
TEXTS = np.array([f"person {k:02}" for k in range(10)])  # ascending, as the codes are
KINDS = {
    "str": TEXTS[WHO],
    "list": TEXTS[WHO].tolist(),
    "bytes": TEXTS.astype("S")[WHO],
    "objects": np.array([PurePosixPath(text) for text in TEXTS], object)[WHO],
    "integer objects": WHO.astype(object),
}
ODD, EVEN = slice(1, None, 2), slice(0, None, 2)


def _two_sides(x, y, d):
    y = np.asarray(y)
    enrolled = np.flatnonzero(WHO[EVEN] < 7) * 2  # three people are unknown
    found = evaluate.identification((x[enrolled], y[enrolled]), (x[ODD], y[ODD]))
    return [found.rank_1, found.tpir(0.5), found.interval("rank@1")]


def _probe(x, y, d):
    y = np.asarray(y)
    found = evaluate.probe((x[EVEN], y[EVEN]), (x[ODD], y[ODD]))
    return [found.linear.accuracy, found.knn.accuracy, list(found.linear.per_class.values())]


def _verified(v):
    return [v.eer, v.auc, v.tar(0.1), v.interval("eer"), v.genuine, v.impostor]


def _scores(x, y, d):
    y = np.asarray(y)
    i, j = np.triu_indices(len(y), 1)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    pairs = np.empty((len(i), 2), y.dtype)
    pairs[:, 0], pairs[:, 1] = y[i], y[j]
    return _verified(evaluate.from_scores((unit @ unit.T)[i, j], WHO[i] == WHO[j], pairs))


def _carried(x, y, d):
    y, first = np.asarray(y), WHO < 5
    there, here = (evaluate.verification(x[at], y[at]) for at in (first, ~first))
    return [evaluate.calibrate(there, 0.1).transfer(here).fmr]


MEASURES = {
    "verification": lambda x, y, d: _verified(evaluate.verification(x, y)),
    "across": lambda x, y, d: _verified(evaluate.verification(x, y, domains=d, trials="across")),
    "with a gallery": lambda x, y, d: _verified(
        evaluate.verification(x[EVEN], np.asarray(y)[EVEN], gallery=(x[ODD], np.asarray(y)[ODD]))
    ),
    "listed trials": lambda x, y, d: _verified(
        evaluate.verification(x, y, trials=np.array([[a, b, WHO[a] == WHO[b]] for a in range(60) for b in range(a)]))
    ),
    "scores": _scores,
    "retrieval": lambda x, y, d: [evaluate.retrieval(x, y).recall, evaluate.retrieval(x, y).interval("recall@1")],
    "retrieval in a gallery": lambda x, y, d: [
        evaluate.retrieval(x[EVEN], np.asarray(y)[EVEN], gallery=(x[ODD], np.asarray(y)[ODD])).map_at_r
    ],
    "identification": _two_sides,
    "clustering": lambda x, y, d: [evaluate.clustering(x, y, seeds=2).summary()],
    "probe": _probe,
    "groups": lambda x, y, d: [evaluate.groups(evaluate.verification(x, y), d, minimum=2).summary()],
    "matrix": lambda x, y, d: [evaluate.domain_matrix(x, y, d).values()],
    "calibrate": _carried,
    "geometry": lambda x, y, d: [evaluate.geometry(x, y, k=3).summary()],
    "label errors": lambda x, y, d: [evaluate.label_errors(x, y).order.tolist()],
    "same subject": lambda x, y, d: [[t.suspicion for t in evaluate.same_subject(x, y, near=None)]],
    "hardest": lambda x, y, d: [evaluate.hardest_pairs(x, y, "impostor")],
    "confusion": lambda x, y, d: [[(c.error, c.share) for c in evaluate.confusion(x, y)]],
    "difficulty": lambda x, y, d: [evaluate.sample_difficulty(x, y).tolist()],
    "class size": lambda x, y, d: [evaluate.class_size(y).tolist()],
    "plan": lambda x, y, d: [protocol.class_disjoint(np.arange(60), y), protocol.known_unknown(np.arange(60), y)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("measure", MEASURES)
def test_text_gives_what_codes_give(measure, kind):
    assert MEASURES[measure](X, KINDS[kind], PLACE) == MEASURES[measure](X, WHO, PLACE)


@pytest.mark.parametrize("kind", ["str", "objects"])
def test_domains_and_groups_are_named_in_the_same_way(kind):
    named = KINDS[kind][PLACE * 6]
    assert _verified(evaluate.verification(X, WHO, domains=named, trials="across")) == _verified(
        evaluate.verification(X, WHO, domains=PLACE, trials="across")
    )
    ours, codes = (evaluate.groups(evaluate.verification(X, WHO), g, minimum=2) for g in (named, PLACE))
    assert [g.values for g in ours] == [g.values for g in codes]
    assert [g.name for g in ours] == TEXTS[:3].tolist()


def test_answers_name_people_as_they_came():
    y = KINDS["str"]
    assert evaluate.confusion(X, y)[0].label in TEXTS
    assert evaluate.label_errors(X, y).suggested[0] in TEXTS
    assert evaluate.same_subject(X, y, near=None)[0].first in TEXTS
    assert evaluate.probe((X[EVEN], y[EVEN]), (X[ODD], y[ODD])).linear.worst_class[0] in TEXTS


def test_people_on_both_sides_are_found_by_their_names():
    y = KINDS["str"]
    set_on = evaluate.calibrate(evaluate.verification(X[WHO < 5], y[WHO < 5]), 0.1)
    set_on.transfer(evaluate.verification(X[WHO >= 5], y[WHO >= 5]))  # codes 0 to 4 on either side, but other people
    with pytest.raises(DataError, match="first is person 04"):
        set_on.transfer(evaluate.verification(X[WHO >= 4], y[WHO >= 4]))


def test_results_on_other_people_are_not_compared():
    first = evaluate.verification(X, KINDS["str"])
    assert evaluate.compare(first, evaluate.verification(X + 0.1, KINDS["str"])).name == "eer"
    with pytest.raises(InputError, match="labels"):
        evaluate.compare(first, evaluate.verification(X, np.char.add(KINDS["str"], "!")))


def test_sides_of_two_kinds_are_refused():
    with pytest.raises(InputError, match="of one kind on both sides: those of the gallery are text"):
        evaluate.verification(X[EVEN], WHO[EVEN], gallery=(X[ODD], KINDS["str"][ODD]))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda: evaluate.verification(X, WHO), ["Verification(eer=0.", "auc=0.", "genuine=150, impostor=1620"]),
        (lambda: evaluate.identification((X[EVEN], WHO[EVEN]), (X[ODD], WHO[ODD])), ["rank_1=0.", "unknown=0"]),
        (lambda: evaluate.groups(evaluate.verification(X, WHO), PLACE, minimum=2), ["eer: worst='", "groups=3"]),
        (lambda: evaluate.domain_matrix(X, WHO, PLACE), ["domains=3, measured=9 of 9, highest eer 0."]),
        (lambda: evaluate.audit(X, WHO), ["Audit(eer=0.", "samples=60, identities=10"]),
    ],
)
def test_a_result_prints_as_one_line_with_its_numbers(result, words):
    said = repr(result())
    assert all(word in said for word in words) and "\n" not in said and len(said) < 200, said
