"""Few-shot classification: n classes, k samples of each to learn from, and who the others are.

In an episode, classes are drawn, and of each class samples to learn from (shots) and samples to name (queries). A class
is the mean of its shots' unit vectors, and a query is given to the class whose mean is nearest by cosine; equal scores
share the credit. Classes come up in many episodes, so episodes are no independent draws: an interval resamples
*classes*, not episodes, and does not shrink to nothing with more of these.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mettle.errors import InputError
from mettle.evaluate import bootstrap
from mettle.evaluate.bootstrap import ResultPerItem
from mettle.evaluate.inputs import check_embeddings, check_int
from mettle.evaluate.metrics import ItemMetric, parse_metric, register
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.unknown_names import explain_arguments


@dataclass(frozen=True, eq=False)
class FewShot(ResultPerItem):
    """What the episodes found.

    Attributes:
        correct: (episodes, ways) share of the queries of each class that are right.
        classes: (episodes, ways) codes of the classes drawn.
        ways: classes in an episode.
        shots: samples of each to learn from.
        queries: samples of each to name.
        left_out: labels with too few samples.
    """

    correct: np.ndarray
    classes: np.ndarray
    ways: int
    shots: int
    queries: int
    left_out: int = 0

    result = "few_shot"

    def __repr__(self) -> str:
        said = f"ways={self.ways}, shots={self.shots}, episodes={len(self.correct)}"
        return f"FewShot(accuracy={self.accuracy:.4f}, {said})"

    @property
    def accuracy(self) -> float:
        """Share of queries that are right, over all episodes."""
        return float(self.correct.mean())

    @property
    def per_episode(self) -> np.ndarray:
        """The accuracy of each episode."""
        return self.correct.mean(axis=1)

    def items(self, name: str | tuple[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """One number for each class of each episode, and which class that is."""
        metric, at = parse_metric(name, self.result)
        assert isinstance(metric, ItemMetric)
        return metric.per_item(self, at).ravel(), self.classes.ravel()

    @property
    def method(self) -> str:
        """Classes are drawn."""
        return bootstrap.METHOD.replace("subject", "class")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader should know before trusting the numbers."""
        if not self.left_out:
            return ()
        need = self.shots + self.queries
        return (f"{self.left_out} labels have fewer than {need} samples (shots + queries) and are in no episode",)

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        return {
            "ways": self.ways,
            "shots": self.shots,
            "queries": self.queries,
            "episodes": len(self.correct),
            "classes": len(np.unique(self.classes)),
            "metrics": {
                "accuracy": {
                    "value": self.accuracy,
                    "interval": bootstrap.interval_or_none(lambda: self.interval("accuracy")),
                }
            },
            "warnings": list(self.warnings),
        }


@explain_arguments
def few_shot(
    embeddings: Any,
    labels: Any,
    *,
    ways: int = 5,
    shots: int = 1,
    queries: int = 15,
    episodes: int = 600,
    seed: int = 0,
) -> FewShot:
    """Name samples of classes that are known by a few samples each.

    Args:
        embeddings: (n, d) array or tensor.
        labels: (n,) integers or text.
        ways: classes in an episode.
        shots: samples of each to learn from.
        queries: samples of each to name, others than the shots.
        episodes: how many.
        seed: of the episodes.

    Raises:
        InputError: fewer labels than ``ways`` have ``shots + queries`` samples.

    Example:
        >>> import numpy as np
        >>> few_shot(np.eye(3)[[0, 0, 1, 1, 2, 2]], [5, 5, 6, 6, 7, 7], ways=2, queries=1, episodes=10).accuracy
        1.0
    """
    rows = check_embeddings(embeddings, labels)
    for name, value, least in (("ways", ways, 2), ("shots", shots, 1), ("queries", queries, 1)):
        check_int(value, name, least)
    check_int(episodes, "episodes", 1)
    check_int(seed, "seed", 0)
    names, code, counts = np.unique(rows.labels, return_inverse=True, return_counts=True)
    able = np.flatnonzero(counts >= shots + queries)
    if len(able) < ways:
        raise InputError(
            f"{ways} ways need as many labels with {shots + queries} samples (shots + queries): got {len(able)}"
        )
    unit = ExactUnitVectors.from_rows(rows.values)
    vectors = unit.vectors()
    members = np.split(np.argsort(code.reshape(-1), kind="stable"), np.cumsum(counts)[:-1])
    rng = np.random.default_rng(seed)
    correct, classes = np.empty((episodes, ways)), np.empty((episodes, ways), np.int64)
    for episode in range(episodes):
        chosen = rng.choice(able, ways, replace=False)
        drawn = np.stack([rng.permutation(members[one])[: shots + queries] for one in chosen])
        means = vectors[drawn[:, :shots]].mean(axis=1)
        if not means.any(axis=1).all():
            raise InputError("the shots of a class cancel out: opposite vectors have no mean direction; use more shots")
        s = unit.take(drawn[:, shots:].ravel()).cosine(ExactUnitVectors.from_rows(means, rows.is_float64))
        best = s == s.max(axis=1, keepdims=True)
        truth = np.repeat(np.arange(ways), queries)
        credit = best[np.arange(len(s)), truth] / best.sum(axis=1)
        correct[episode], classes[episode] = credit.reshape(ways, queries).mean(axis=1), chosen
    return FewShot(correct, classes, ways, shots, queries, len(names) - len(able))


ACCURACY = register(
    ItemMetric(
        "accuracy",
        "few-shot accuracy",
        "share of queries whose class has the nearest mean of shots, in episodes of n classes with k shots each",
        "few_shot",
        per_item=lambda found, at: found.correct,
        items="classes of episodes",
        resample="classes",
    )
)
