"""The door: what is refused, in which words, and what passes unharmed."""

import numpy as np
import pytest
import torch

from mettle.errors import InputError, MettleError
from mettle.evaluate import NotMeasurable, from_scores, retrieval, verification
from mettle.evaluate.inputs import check_embeddings, check_scores

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
Y = np.array([0, 0, 1, 1, 2, 2])


def spoiled(value, at=(3, 1)):
    x = X.copy()
    x[at] = value
    return x


def zeroed(row):
    x = X.copy()
    x[row] = 0
    return x


BAD = {
    "E1 one NaN": (spoiled(np.nan), Y, "row 3"),
    "E1 infinity": (spoiled(np.inf), Y, "row 3"),
    "E1 all NaN": (np.full_like(X, np.nan), Y, "6 of 6 rows"),
    "zero vector": (zeroed(4), Y, "row 4"),
    "empty": (X[:0], Y[:0], "non-empty"),
    "no columns": (X[:, :0], Y, "non-empty"),
    "vector": (X[0], Y, "shape"),
    "short labels": (X, Y[:5], "one entry per embedding"),
    "column of labels": (X, Y[:, None], "one entry per embedding"),
    "float labels": (X, Y.astype(float), "integers"),
    "missing labels": (X, np.array([None, *Y.astype(str)[1:]], object), "got None at position 0"),
    "labels of one text": (X, np.array([1, "1", *Y.tolist()[2:]], object), "told apart by their text"),
    "bool labels": (X, Y > 0, "integers"),
    "complex": (X + 1j, Y, "real numbers"),
    "text": (X.astype(str), Y, "real numbers"),
    "ragged": ([[1.0], [1.0, 2.0]], Y, "array or a tensor"),
    "labels beyond int64": (X, Y.astype(np.uint64) + np.uint64(2**63), "int64"),
}


@pytest.mark.parametrize("metric", [verification, retrieval])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case, metric):
    x, y, words = BAD[case]
    with pytest.raises(InputError, match=words) as caught:
        metric(x, y)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("side", ["queries", "gallery"])
def test_E1_nan_on_either_side_of_a_gallery_is_refused(side):
    bad, good = (spoiled(np.nan), Y), (X, Y)
    probe, gallery = (bad, good) if side == "queries" else (good, bad)
    for metric in (verification, retrieval):
        with pytest.raises(InputError, match="NaN"):
            metric(*probe, gallery=gallery)


@pytest.mark.parametrize("y", [np.zeros(6, int), np.arange(6)], ids=["one class", "no genuine"])
def test_E2_one_kind_of_pairs_is_refused(y):
    with pytest.raises(InputError, match="genuine and impostor"):
        verification(X, y)


def test_E2_domains_that_leave_one_kind_are_refused():
    domains = np.array([0, 1, 0, 1, 0, 1])
    with pytest.raises(InputError, match="0 genuine"):
        verification(X, Y, domains=domains, trials="within")


@pytest.mark.parametrize("target", [np.ones(4, int), np.zeros(4, int)])
def test_E2_scores_of_one_kind_are_refused(target):
    with pytest.raises(InputError, match="genuine and impostor"):
        from_scores(np.arange(4.0), target)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_E1_scores_that_are_nan_or_plus_infinity_are_refused(bad):
    with pytest.raises(InputError, match="position 2"):
        from_scores([0.1, 0.2, bad, 0.3], [0, 1, 0, 1])


def test_scores_of_wrong_shape_or_target_are_refused():
    for scores, target in [
        ([[0.1]], [1]),
        ([0.1, 0.2], [1]),
        ([0.1, 0.2], [1, 2]),
        ([0.1, 0.2], [0.0, 1.0]),
        (["a", "b"], [0, 1]),
        ([], []),
    ]:
        with pytest.raises(InputError):
            from_scores(scores, np.asarray(target))


def test_subjects_that_contradict_the_target_are_refused():
    with pytest.raises(InputError, match="pair 1"):
        check_scores([0.9, 0.1], [1, 0], [[1, 1], [2, 2]])
    with pytest.raises(InputError, match="shape"):
        check_scores([0.9, 0.1], [1, 0], [1, 2])


def test_one_sample_id_with_two_labels_is_refused():
    with pytest.raises(InputError, match="sample id 5 carries two labels"):
        retrieval(X, Y, ids=np.array([1, 5, 5, 2, 3, 4]))
    with pytest.raises(InputError, match="sample id 5 carries two labels"):
        verification(X, Y, ids=np.arange(6), gallery=(X, Y + 1, None, np.arange(6) + 5))


def test_ids_on_one_side_only_are_refused():
    with pytest.raises(InputError, match="both sides"):
        retrieval(X, Y, ids=np.arange(6), gallery=(X, Y))


@pytest.mark.parametrize("gallery", [(X,), X, (X[:, :3], Y)])
def test_a_gallery_of_the_wrong_shape_is_refused(gallery):
    with pytest.raises(InputError, match="gallery"):
        verification(X, Y, gallery=gallery)


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        (np.array([[0, 1]]), "shape"),
        (np.array([[0.0, 1.0, 1.0]]), "integers"),
        (np.empty((0, 3), int), "shape"),
        (np.array([[0, 6, 0]]), "rows 0"),
        (np.array([[-1, 2, 0]]), "rows 0"),
        (np.array([[0, 1, 1], [2, 2, 1]]), "trial 1 compares a sample with itself"),
        (np.array([[0, 1, 1], [0, 2, 1]]), "trial 1 contradicts"),
        ("acros", "did you mean 'across'"),
        ("within", "pass domains"),
    ],
)
def test_trials_that_make_no_sense_are_refused(trials, words):
    with pytest.raises(InputError, match=words):
        verification(X, Y, trials=trials)


def test_domains_are_integers_or_text_of_one_kind():
    with pytest.raises(InputError, match="integers or text"):
        verification(X, Y, domains=np.linspace(0, 1, 6))
    with pytest.raises(InputError, match="one kind"):
        verification(X, Y, domains=list("ababab"), trials="across", gallery=(2 * X, Y, np.arange(6)))


@pytest.mark.parametrize("k", [(), (0,), (1.5,), (True,), "12"])
def test_k_that_is_no_whole_number_is_refused(k):
    with pytest.raises(InputError, match="whole numbers"):
        retrieval(X, Y, k=k)


def test_chunk_must_be_positive():
    for metric in (verification, retrieval):
        with pytest.raises(InputError, match="chunk"):
            metric(X, Y, chunk=0)


def test_float64_stays_float64_and_everything_else_becomes_float32():
    for given, kept in [
        (X, np.float32),
        (X.astype(np.float64), np.float64),
        (X.astype(np.float16), np.float32),
        ((X * 10).astype(int), np.float32),
        (torch.from_numpy(X).bfloat16(), np.float32),
        (torch.from_numpy(X).double().requires_grad_(), np.float64),
        (X.tolist(), np.float64),
    ]:
        assert check_embeddings(given, Y).values.dtype == kept


def test_labels_and_ids_above_2_to_the_24_stay_apart():
    big = 2**53 + np.arange(6) // 2  # neighbours here are one number in float64, let alone float32
    a, b = verification(X, Y), verification(X, big)
    assert (a.eer, a.auc, a.genuine) == (b.eer, b.auc, b.genuine)
    k = (1, 2)
    assert retrieval(X, Y, k=k).recall == retrieval(X, big, k=k, ids=2**53 + np.arange(6)).recall


def test_inputs_are_not_changed():
    x, y = X.copy(), Y.copy()
    verification(x, y).summary()
    retrieval(x, y, k=(1,))
    assert np.array_equal(x, X)
    assert np.array_equal(y, Y)


def test_errors_are_of_the_one_tree():
    assert issubclass(NotMeasurable, MettleError)
