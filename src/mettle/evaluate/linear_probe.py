"""Probes: how much of the labels can a simple classifier read from frozen embeddings?

    linear   logistic regression on unit vectors, fitted until its gradient is 1e-4 of that at the start, or refused
    kNN      each of the k nearest training samples votes with e^{s/T}, or with one vote each; equal scores at the k-th
             place share the votes that are left, equal votes share the credit

Labels are those of the training side (closed set). The worst class is reported beside the mean: a probe can be good on
average and blind to one class.

One probe of one encoder: fitted at several strengths, one chosen by validation, read on the test split once.

Probes are fitted on the training split and their strength is chosen on the validation split (on a tenth of the training
split where that cannot judge them); the test split is looked at once, with that choice. The grid of strengths grows at
either end until the best one lies inside: a weaker and a stronger one have been tried and are no better. Where that
cannot be had, the notes say so. A strength at which the probe does not converge is refused and never chosen.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from mettle.errors import InputError, NumericError
from mettle.evaluate import bootstrap
from mettle.evaluate.bootstrap import ResultPerItem
from mettle.evaluate.diagnostics.duplicates import check_shared_samples
from mettle.evaluate.inputs import EmbeddingSet, check_apart, check_int, check_tuple, share_label_codes
from mettle.evaluate.metrics import ItemMetric, metrics_of, parse_metric, register
from mettle.evaluate.notebook import html_table
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.rng import hash_bits
from mettle.unknown_names import explain_arguments

_CELLS = 1 << 22
CONVERGED = 1e-4  # of the gradient at weights 0: an absolute bound would let many classes or weak probes stop at once
STEPS = 10_000  # of the solver, at most
STRENGTHS = (1.0, 10.0, 100.0)  # tried always
WEAKER = (0.1, 0.01, 1e-3, 1e-4)  # tried while the weakest is the best: few samples and loud noise need them
STRONGER = (1e3, 1e4, 1e5)  # tried while that brings more: features that hardly differ need them
WORK = 1e11  # samples x features x classes x steps that one linear probe may take ...
STEP_RANGE = 1000, 10_000  # ... and it may always take so many steps, and never more than these


@dataclass(frozen=True, eq=False)
class ProbeAccuracy:
    """How often one probe is right.

    Attributes:
        correct: (n,) 1 or 0 for each test sample, between where votes tie.
        labels: (n,) of the test samples, integers or text as they came.
    """

    correct: np.ndarray
    labels: np.ndarray

    def __repr__(self) -> str:
        label, worst = self.worst_class
        return f"ProbeAccuracy({self.accuracy:.4f}, worst class {label}: {worst:.4f})"

    @property
    def accuracy(self) -> float:
        """Share of test samples that are right."""
        return float(self.correct.mean())

    @property
    def per_class(self) -> Mapping[int | str, float]:
        """Accuracy by label."""
        names, at = np.unique(self.labels, return_inverse=True)
        share = np.bincount(at, weights=self.correct) / np.bincount(at)
        return dict(zip(names.tolist(), share.tolist(), strict=True))

    @property
    def worst_class(self) -> tuple[int | str, float]:
        """The label with the lowest accuracy, and that accuracy; the smallest of equal labels."""
        return min(self.per_class.items(), key=lambda item: (item[1], item[0]))

    @property
    def balanced(self) -> float:
        """Mean of the accuracies by label."""
        return float(np.mean(list(self.per_class.values())))


@dataclass(frozen=True, eq=False)
class Probe(ResultPerItem):
    """What the probes found.

    Attributes:
        linear: of the logistic regression.
        knn: of the nearest training samples, whose votes weigh more the nearer they are.
        uniform: of the same neighbours with one vote each.
        warnings: what a reader should know.
    """

    linear: ProbeAccuracy
    knn: ProbeAccuracy
    uniform: ProbeAccuracy
    warnings: tuple[str, ...] = ()

    result = "probe"

    def _repr_html_(self) -> str:
        label, worst = self.linear.worst_class
        rows = [
            ("top-1, linear", self.linear.accuracy),
            ("top-1, kNN", self.knn.accuracy),
            (f"worst class, {label}", worst),
        ]
        return html_table(f"Probe, {len(self.linear.labels):,} test samples", rows, self.warnings)

    def items(self, name: str | tuple[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """1 or 0 for each test sample, each a subject of its own: a closed set has its classes, samples are drawn."""
        metric, at = parse_metric(name, self.result)
        assert isinstance(metric, ItemMetric)
        values = metric.per_item(self, at)
        return values, np.arange(len(values))

    @property
    def method(self) -> str:
        """Test samples are drawn."""
        return f"{bootstrap.METHOD.replace('subject', 'test-sample')}, training side fixed"

    def accuracy(self, name: str) -> ProbeAccuracy:
        """One of them, by the name of its metric."""
        parse_metric(name, self.result)
        return ProbeAccuracy(self.items(name)[0], self.linear.labels)

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        found: dict[str, Any] = {"warnings": list(self.warnings)}
        for metric in metrics_of(self.result):
            one = self.accuracy(metric.key)
            label, worst = one.worst_class
            found[metric.key] = {
                "accuracy": one.accuracy,
                "interval": bootstrap.interval_or_none(lambda n=metric.key: self.interval(n)),
                "balanced": one.balanced,
                "worst_class": {"label": label, "accuracy": worst},
            }
        return found


LINEAR = register(
    ItemMetric(
        "linear",
        "linear probe",
        "share of test samples that a logistic regression on frozen embeddings gets right; one that has not converged "
        "after `iterations` steps (10,000) raises a `NumericError`",
        "probe",
        per_item=lambda found, at: found.linear.correct,
        items="test samples",
        resample="test samples",
    )
)
KNN = register(
    ItemMetric(
        "knn",
        "kNN, weighted",
        "the same of the k nearest training samples, each voting with e^{cosine/T}; equal votes share the credit",
        "probe",
        per_item=lambda found, at: found.knn.correct,
        items="test samples",
        resample="test samples",
    )
)
KNN_UNIFORM = register(
    ItemMetric(
        "knn_uniform",
        "kNN",
        "the same with one vote each; equal scores at the k-th place share the votes that are left",
        "probe",
        per_item=lambda found, at: found.uniform.correct,
        items="test samples",
        resample="test samples",
    )
)


@explain_arguments
def probe(
    train: tuple[Any, ...],
    test: tuple[Any, ...],
    *,
    k: int = 20,
    temperature: float = 0.07,
    strength: float = 1.0,
    iterations: int = STEPS,
) -> Probe:
    """Fit a linear and a kNN probe on one set of embeddings and test them on another.

    Args:
        train: ``(embeddings, labels[, domains[, ids]])``.
        test: the same; its labels must occur in ``train``.
        k: neighbours that vote, at most as many as there are.
        temperature: T of the votes.
        strength: inverse regularisation of the linear probe.
        iterations: at most so many steps of its solver.

    Raises:
        DataError: a sample id on both sides, or, without ids, half of a side on the other.
        InputError: one class only, or a test label that was never trained on.
        NumericError: the linear probe has not converged after ``iterations`` steps: what it reads then is no property
            of the embeddings.

    Example:
        >>> import numpy as np
        >>> p = probe((np.eye(2)[[0, 0, 1, 1]], [0, 0, 1, 1]), ([[9.0, 1.0], [1.0, 9.0]], [0, 1]), k=2)
        >>> p.linear.accuracy, p.knn.worst_class
        (1.0, (0, 1.0))
    """
    a, b, copied = _check_sides(train, test)
    check_int(k, "k", 1)
    check_int(iterations, "iterations", 1)
    if not all(isinstance(value, Real) and 0 < value < np.inf for value in (temperature, strength)):
        raise InputError(f"temperature and strength must be finite and above 0: got {temperature!r}, {strength!r}")
    double = any(r.is_float64 for r in (a, b))
    first, second = ExactUnitVectors.from_rows(a.values, double), ExactUnitVectors.from_rows(b.values, double)
    linear = _fit_linear(first, a, second, b, strength, iterations)
    weighted, uniform = _predict_knn(first, a, second, b, min(k, len(a)), temperature)
    return Probe(*(ProbeAccuracy(v, b.given_labels) for v in (linear, weighted, uniform)), warnings=copied)


@explain_arguments
def knn_accuracy(train: tuple[Any, ...], test: tuple[Any, ...], *, k: int = 1) -> ProbeAccuracy:
    """Share of test samples that most of their k nearest training samples name, one vote each, by cosine.

    Equal votes share the credit, and so do equal scores at the k-th place, whatever the order of rows.

    Args:
        train: ``(embeddings, labels[, domains[, ids]])``.
        test: the same; its labels must occur in ``train``.
        k: neighbours that vote, at most as many as there are.

    Example:
        >>> import numpy as np
        >>> knn_accuracy((np.eye(2)[[0, 0, 1]], [0, 0, 1]), ([[9.0, 1.0], [1.0, 9.0]], [0, 1]), k=1).accuracy
        1.0
    """
    a, b, _ = _check_sides(train, test)
    check_int(k, "k", 1)
    double = any(r.is_float64 for r in (a, b))
    first, second = ExactUnitVectors.from_rows(a.values, double), ExactUnitVectors.from_rows(b.values, double)
    return ProbeAccuracy(_predict_knn(first, a, second, b, min(k, len(a)), 1.0)[1], b.given_labels)


def _check_sides(train: tuple[Any, ...], test: tuple[Any, ...]) -> tuple[EmbeddingSet, EmbeddingSet, tuple[str, ...]]:
    """Both sides of a closed-set task, and what is copied from one to the other."""
    a, b = share_label_codes(check_tuple(train, "train"), check_tuple(test, "test"), "train", "test")
    check_apart(a, b, "train", "test")
    copied = check_shared_samples(a, b, "train", "test")
    strangers = np.setdiff1d(b.given_labels, a.given_labels)
    if len(strangers):
        raise InputError(f"test label {strangers[0]} never occurs in train: a probe is a closed-set task")
    if len(np.unique(a.labels)) < 2:
        raise InputError("train must hold at least two labels: got one, which any probe would guess")
    return a, b, copied


def _fit_linear(
    first: ExactUnitVectors,
    train: EmbeddingSet,
    second: ExactUnitVectors,
    test: EmbeddingSet,
    strength: float,
    iterations: int,
) -> np.ndarray:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    x, spent = first.vectors().astype(np.float64), 0
    # The weights of a weak probe are about strength x samples x gradient: free intercepts must be settled beside them.
    tolerance = CONVERGED * _first_gradient(x, train.labels) * min(1.0, strength * len(x))
    model = LogisticRegression(C=strength, tol=tolerance, warm_start=True)
    while spent < iterations:  # the solver may give up a line search early: it goes on from where it is
        model.set_params(max_iter=iterations - spent)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore", UserWarning)  # many classes of few samples are no mistake here
            warnings.simplefilter("always", ConvergenceWarning)
            model.fit(x, train.labels)
        if not any(issubclass(w.category, ConvergenceWarning) for w in caught):
            return np.asarray(model.predict(second.vectors()) == test.labels, float)
        steps = int(model.n_iter_.max())
        spent += steps
        if steps <= 1:  # no way further down at this precision
            break
    raise NumericError(
        f"the linear probe of strength {strength:g} has not converged after {spent} steps: pass more iterations= or a "
        "smaller strength=; accuracy of an unfinished fit is no property of the embeddings"
    )


def _first_gradient(x: np.ndarray, labels: np.ndarray) -> float:
    """Largest component of the gradient of the mean cross-entropy at weights 0, intercepts included."""
    names, at, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sums = np.zeros((len(names), x.shape[1]))
    np.add.at(sums, at.reshape(-1), x)
    weights = np.abs(sums - x.sum(axis=0) / len(names)).max()
    return float(max(weights, np.abs(counts - len(x) / len(names)).max())) / len(x)


def _predict_knn(
    first: ExactUnitVectors,
    train: EmbeddingSet,
    second: ExactUnitVectors,
    test: EmbeddingSet,
    k: int,
    temperature: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Right or wrong for each test sample, by votes that weigh e^{s/T}, and by one vote each."""
    order = np.argsort(train.labels, kind="stable")
    names, starts = np.unique(train.labels[order], return_index=True)
    sorted_, truth = first.take(order), np.searchsorted(names, test.labels)
    correct = np.empty((2, len(test)))
    step = max(1, _CELLS // len(order))
    for start in range(0, len(test), step):
        part = slice(start, start + step)
        s = second.take(part).cosine(sorted_).astype(np.float64)
        edge = np.partition(s, -k, axis=1)[:, -k, None]
        inside, tied = s > edge, s == edge
        votes = inside + (k - inside.sum(axis=1, keepdims=True)) / tied.sum(axis=1, keepdims=True) * tied
        weights = np.exp((s - s.max(axis=1, keepdims=True)) / temperature)
        for way, weighed in enumerate((votes * weights, votes)):
            total = np.add.reduceat(weighed, starts, axis=1)
            total = np.round(total / total.max(axis=1, keepdims=True), 12)  # sums in another order are equal votes
            winners = total == 1
            right = winners[np.arange(len(total)), truth[part]]
            correct[way, part] = right / winners.sum(axis=1)
    return correct[0], correct[1]


@dataclass(frozen=True, eq=False)
class ProbeFit:
    """What one probe found: on which test rows, with which strength, chosen on what."""

    probe: Probe
    rows: np.ndarray
    strength: float
    chosen_on: str

    @property
    def correct(self) -> np.ndarray:
        """(n,) 1 or 0: which of the tested rows the linear probe gets right."""
        return self.probe.linear.correct

    @property
    def labels(self) -> np.ndarray:
        """(n,) labels of the tested rows."""
        return self.probe.linear.labels


def fit_probe(z: Mapping[str, np.ndarray], codes: Mapping[str, np.ndarray]) -> ProbeFit:
    """Fit at every strength, choose by validation, and tell what the chosen one does on the test split."""
    alive = {part: np.asarray(x.any(axis=1)) for part, x in z.items()}  # a row of zeros has no direction
    at = {part: np.flatnonzero(alive[part]) for part in z}
    known = codes["train"][at["train"]]
    val = at["val"][np.isin(codes["val"][at["val"]], known)]
    enough = len(val) > 1 and 2 * len(val) > len(codes["val"])
    fit = at["train"]
    if enough:
        source, chosen_on = "val", "the validation split"
    else:
        order = fit[np.argsort(hash_bits(0, 31, fit), kind="stable")]
        tenth = max(1, len(order) // 10)
        val, fit = order[:tenth], np.sort(order[tenth:])
        source, chosen_on = "train", "a tenth of the training split"
        val = val[np.isin(codes["train"][val], codes["train"][fit])]
    test = np.flatnonzero(np.isin(codes["test"], codes["train"][fit]))  # dead rows stay: they count as wrong
    live = alive["test"][test]
    first, second = z["train"][fit], np.concatenate([z[source][val], z["test"][test[live]]])
    targets = np.concatenate([codes[source][val], codes["test"][test[live]]])
    classes = len(np.unique(codes["train"][fit]))
    steps = int(np.clip(WORK / (first.size * classes), *STEP_RANGE))
    own = np.arange(len(first) + len(second))  # splits share no samples, though rows of numbers may repeat themselves
    train = first, codes["train"][fit], None, own[: len(first)]
    n = len(val)
    tried: dict[float, Probe] = {}
    right: dict[float, float] = {}
    refused: dict[float, str] = {}

    def try_strength(strength: float) -> bool:
        try:
            found = probe(train, (second, targets, None, own[len(first) :]), strength=strength, iterations=steps)
        except NumericError as problem:
            refused[strength] = str(problem)
            return False
        tried[strength] = found
        right[strength] = float(found.linear.correct[:n].mean()) if n else 0.0
        return True

    for strength in STRENGTHS:
        try_strength(strength)
    for strength in STRONGER:
        if refused or not (n and _is_rising(right, targets[:n])) or not try_strength(strength):
            break
    for strength in WEAKER:
        if tried and not (n and _best_at_edge(right, min(right))):
            break
        try_strength(strength)
    if not tried:
        raise NumericError(f"no linear probe converged: {refused[min(refused)]}")
    inside = sorted(right)[1:-1]
    best = max(right, key=lambda c: (right[c], c in inside, -c))
    chosen = tried[best]
    notes = chosen.warnings
    if best not in inside:
        end, other = ("smallest", "weaker") if best == min(right) else ("greatest", "stronger")
        why = f" that converged within {steps} steps" if refused and end == "greatest" else " tried"
        notes += (f"the probe was best at the {end} strength{why}, {best:g}: a {other} one may read more",)

    def on_test(one: ProbeAccuracy) -> ProbeAccuracy:
        correct = np.zeros(len(test))
        correct[live] = one.correct[n:]
        return ProbeAccuracy(correct, codes["test"][test])

    found = Probe(on_test(chosen.linear), on_test(chosen.knn), on_test(chosen.uniform), notes)
    return ProbeFit(found, test, best, chosen_on)


def _is_rising(right: Mapping[float, float], targets: np.ndarray) -> bool:
    """Whether a stronger probe may read more: the strongest is the best so far, or none read much beyond chance."""
    chance = np.unique(targets, return_counts=True)[1].max() / len(targets)
    return _best_at_edge(right, max(right)) or max(right.values()) < chance + 0.1 * (1 - chance)


def _best_at_edge(right: Mapping[float, float], edge: float) -> bool:
    """Whether the strength at an edge of the grid is better than all others."""
    return all(right[edge] > value for strength, value in right.items() if strength != edge)
