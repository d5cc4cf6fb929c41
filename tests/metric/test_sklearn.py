"""Manners: scikit-learn's own checks, and the tools that users put an estimator into."""

import importlib.util
import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks

from mettle.losses import Contrastive, SupCon
from mettle.metric import Mahalanobis

MEMBERS = {
    "learned": Mahalanobis(),
    "low rank": Mahalanobis(n_components=1),
    "batches": Mahalanobis(batch=(2, 4)),
    "within_class": Mahalanobis("within_class"),
    "covariance": Mahalanobis("covariance"),
}
# Left out with reason: it skips itself unless SciPy was told by an environment variable to take other arrays.
LEFT_OUT = {"check_array_api_input"}
MORE = [  # applicable, but not among those that scikit-learn runs on strangers by itself
    estimator_checks.check_transformer_get_feature_names_out,
    estimator_checks.check_set_output_transform,
]
if importlib.util.find_spec("pandas"):
    MORE += [
        estimator_checks.check_dataframe_column_names_consistency,
        estimator_checks.check_transformer_get_feature_names_out_pandas,
        estimator_checks.check_set_output_transform_pandas,
        estimator_checks.check_global_output_transform_pandas,
    ]


def checks():
    for name, estimator in MEMBERS.items():
        for k, (member, check) in enumerate(estimator_checks.estimator_checks_generator(estimator)):
            title = getattr(check, "func", check).__name__
            if title not in LEFT_OUT:
                yield pytest.param(member, check, id=f"{name}-{k}-{title}")


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # the checks allow a few iterations only
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_scikit_learn_finds_no_fault(estimator, check):
    check(estimator)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:X (has|does not have valid) feature names")  # they mix tables and arrays
@pytest.mark.parametrize("check", MORE, ids=lambda check: check.__name__)
@pytest.mark.parametrize("method", ["learned", "covariance"])
def test_names_and_tables_come_out_as_scikit_learn_wants(method, check):
    check("Mahalanobis", Mahalanobis(method))


def test_the_checks_are_many():
    assert len(list(checks())) > 200


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


def test_it_works_in_a_pipeline_under_cross_validation(iris):
    scores = cross_val_score(make_pipeline(Mahalanobis(), KNeighborsClassifier(5)), *iris, cv=3)
    assert scores.mean() > 0.9


def test_it_can_be_searched_over(iris):
    grid = {
        "mahalanobis__method": ["covariance", "within_class", "learned"],
        "mahalanobis__loss": [None, Contrastive(normalise=False), SupCon(0.1)],
        "mahalanobis__n_components": [2],
    }
    pipeline = make_pipeline(Mahalanobis(), KNeighborsClassifier(5))
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(*iris)
    assert search.best_score_ > 0.9 and search.best_estimator_[0].components_.shape == (2, 4)


def test_pairs_can_be_cross_validated_too(iris):
    x, y = iris
    rng = np.random.default_rng(0)
    i, j = rng.integers(0, len(x), (2, 300))
    pairs, alike = np.stack([x[i], x[j]], axis=1), (y[i] == y[j]).astype(int)

    def auc(metric, pairs, alike):
        s = metric.pair_score(pairs)
        near, far = s[alike == 1], s[alike == 0]
        return (near[:, None] > far[None]).mean()

    assert cross_val_score(Mahalanobis(), pairs, alike, cv=3, scoring=auc).mean() > 0.95


def test_a_clone_is_unfitted_with_equal_parameters(iris):
    fitted = Mahalanobis("within_class", n_components=2, shrinkage=0.1, loss=SupCon(0.2)).fit(*iris)
    copy = clone(fitted)
    found, wanted = copy.get_params(), fitted.get_params()
    assert found.pop("loss").settings == wanted.pop("loss").settings and found == wanted
    with pytest.raises(NotFittedError):
        copy.transform(iris[0])


def test_pickling_keeps_the_metric(iris):
    fitted = Mahalanobis("within_class").fit(*iris)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).transform(iris[0]), fitted.transform(iris[0]))


def test_names_of_the_outputs(iris):
    fitted = Mahalanobis("within_class", n_components=3).fit(*iris)
    assert list(fitted.get_feature_names_out()) == ["mahalanobis0", "mahalanobis1", "mahalanobis2"]


if importlib.util.find_spec("pandas"):

    def test_tables_keep_their_index_and_pairs_need_no_names(iris):
        import pandas

        table = pandas.DataFrame(iris[0], columns=list("abcd"), index=np.arange(150) + 7)
        fitted = Mahalanobis("within_class", n_components=2).set_output(transform="pandas").fit(table, iris[1])
        found = fitted.transform(table)
        assert list(found.columns) == ["mahalanobis0", "mahalanobis1"] and list(found.index) == list(table.index)
        assert list(fitted.feature_names_in_) == list("abcd")
        assert fitted.pair_distance(iris[0][:20].reshape(10, 2, 4)).shape == (10,)


def test_a_search_cut_short_says_so(iris):
    with pytest.warns(ConvergenceWarning, match="raise max_iter"):
        fitted = Mahalanobis(max_iter=2, early_stopping=False).fit(*iris)
    assert fitted.n_iter_ == 2


def test_strings_are_labels_and_integers_are_numbers(iris):
    x, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    plain, named = Mahalanobis().fit(x, y), Mahalanobis().fit((x * 10).round().astype(int), names)
    np.testing.assert_allclose(
        plain.pair_distance(x[:50], x[50:100]), named.pair_distance(*(10 * x[:50], 10 * x[50:100]))
    )
