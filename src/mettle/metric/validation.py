"""What a user can get wrong, said in one line. Scikit-learn's own refusals keep their words and become `InputError`."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from mettle.errors import InputError, nearest

METHODS = ("learned", "likelihood_ratio", "within_class", "covariance")
REACH = 1e150  # its square is a float64, and so is that of its inverse


class WrongType(InputError, TypeError):
    """What scikit-learn refuses with a TypeError: sparse matrices, objects that are no numbers."""


@contextmanager
def as_input_error() -> Iterator[None]:
    """Let scikit-learn judge, and raise its verdict as ours."""
    try:
        yield
    except ValueError as e:
        raise InputError(str(e)) from e
    except TypeError as e:
        raise WrongType(str(e)) from e


def require(condition: bool, message: str) -> None:
    """Refuse an argument."""
    if not condition:
        raise InputError(message)


def check_numbers(given: dict[str, Any]) -> None:
    """Refuse ``n_components``, ``max_iter``, ``penalty`` and ``tol`` that no metric can be fitted with."""
    if given.get("n_components") is not None:
        check_count("n_components", given["n_components"])
    check_count("max_iter", given.get("max_iter", 1))
    for name in ("penalty", "tol"):
        value = given.get(name, 0)
        require(_is_between(value, 0, np.finfo(float).max), f"{name} must be at least 0, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Refuse what is no whole number from 1 on."""
    require(isinstance(value, Integral) and int(value) >= 1, f"{name} must be at least 1, got {value!r}")


def check_share(name: str, value: Any) -> None:
    """Refuse what is no number from 0 to 1."""
    require(_is_between(value, 0, 1), f"{name} must be from 0 to 1, got {value!r}")


def check_components(n_components: int | None, n_features: int) -> None:
    """Refuse more rows than features."""
    require(
        n_components is None or n_components <= n_features,
        f"n_components={n_components} is more than the {n_features} features of X",
    )


def check_mahalanobis(given: dict[str, Any]) -> None:
    """Refuse what the constructor of `Mahalanobis` stored, when it comes to fitting."""
    method, loss, batch = given["method"], given["loss"], given["batch"]
    require(method in METHODS, f"no method {method!r}{nearest(str(method), METHODS)}")
    check_numbers(given)
    shrinkage = given["shrinkage"]
    auto = isinstance(shrinkage, str) and shrinkage == "auto"
    two = isinstance(shrinkage, (tuple, list)) and len(shrinkage) == 2 and method in ("learned", "likelihood_ratio")
    amounts = list(shrinkage) if two else [shrinkage]
    require(
        auto or all(_is_between(amount, 0, 1) for amount in amounts),
        f"shrinkage must be 'auto' or from 0 to 1 (two numbers for a likelihood ratio), got {shrinkage!r}",
    )
    for name, words in (("standardize", True), ("early_stopping", False)):
        value = given[name]
        known = isinstance(value, (bool, np.bool_)) or (words and isinstance(value, str) and value == "auto")
        require(known, f"{name} must be True or False{' or auto' if words else ''}, got {value!r}")
    sizes = isinstance(batch, (tuple, list)) and len(batch) == 2
    sizes = sizes and all(isinstance(v, Integral) and int(v) >= 2 for v in batch)
    require(
        batch is None or sizes or (isinstance(batch, str) and batch == "auto"),
        f"batch must be 'auto', None or (classes, samples), each at least 2, got {batch!r}",
    )
    require(loss is None or callable(loss), f"loss must be a pairwise loss, a callable or None, got {loss!r}")
    require(
        not (isinstance(loss, torch.nn.Module) and any(True for _ in loss.parameters())),
        f"{type(loss).__name__} has parameters of its own, which would never be trained: use a pairwise loss",
    )


def check_range(points: np.ndarray) -> None:
    """Refuse features whose variance, or its inverse, no float64 can hold; those that never vary have none."""
    with np.errstate(over="ignore"):
        reach = points.max(0) - points.min(0)
    odd = np.flatnonzero((reach > 0) & ~((reach > 1 / REACH) & (reach < REACH)))
    if len(odd):
        raise InputError(
            f"X must vary by more than {1 / REACH:g} and less than {REACH:g} in every feature that varies at all: "
            f"feature {odd[0]} varies by {reach[odd[0]]:.3g}, whose square is no number; change its unit, which "
            "changes no distance"
        )


def check_target(y: Any, n: int, estimator: str, instead: str = "") -> np.ndarray:
    """(n,) what is known of n examples."""
    if y is None:
        remedy = f"give labels, or {instead}" if instead else "give labels"
        raise InputError(f"{estimator} requires y to be passed, but the target y is None: {remedy}")
    with as_input_error():
        y = column_or_1d(y, warn=True)
    require(len(y) == n, f"X and y have inconsistent numbers of samples: {n} and {len(y)}")
    return y


def encode_labels(y: np.ndarray, *, least_classes: int) -> np.ndarray:
    """Labels of any kind as 0 .. C − 1."""
    with as_input_error():
        check_classification_targets(y)
    found = np.unique(y, return_inverse=True)[1].astype(np.int64)
    counts = np.bincount(found)
    require(
        int(counts.max()) >= 2, f"every label in y occurs once among {len(y)}: some class needs two or more samples"
    )
    require(
        len(counts) >= least_classes,
        f"y holds one class only ({y[0]!r}): learning needs two or more, to tell apart",
    )
    return found


def encode_pair_labels(y: np.ndarray) -> np.ndarray:
    """1 for alike and 0 for not, from {0, 1}, {−1, 1} or booleans."""
    kinds = set(np.unique(y).tolist())
    require(
        kinds in ({0, 1}, {-1, 1}),
        f"y of pairs must hold 1 for alike and 0 (or -1) for not, both of them; got {sorted(kinds, key=str)[:5]}",
    )
    return (y == 1).astype(np.int64)


def _is_between(value: Any, low: float, high: float) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high
