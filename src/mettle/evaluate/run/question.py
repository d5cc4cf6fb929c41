"""Which question a run answers, and with it the numbers that its pages and the terminal begin with.

| question | when | the first numbers |
|---|---|---|
| ``closed-set`` | every identity of the test split was trained on, and a probe can read their labels | top-1, worst class and worst group of the linear probe, intervals over test samples |
| ``retrieval`` | ``train.select`` is a metric of retrieval; or, without ``train.select``, the loss is one of `RETRIEVAL_LOSSES`, or the method is ``hardness-aware`` | Recall@K, MAP@R, MAP, NMI, F1 |
| ``verification`` | otherwise | EER, TAR at false-accept rates |

The first row that applies is the answer. ``evaluate.question`` in a recipe takes the place of the rule. All numbers are
measured whatever the question is; it decides what is said first, and by which number training has helped or not.
"""  # noqa: E501

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mettle.errors import DataError
from mettle.evaluate.run.validation import MetricName
from mettle.train.recipe import Recipe

QuestionName = Literal["closed-set", "retrieval", "verification"]

RETRIEVAL_LOSSES = (
    "LiftedStructure", "Margin", "MultiSimilarity", "NPair", "ProxyAnchor", "ProxyNCA", "SmoothAP", "SoftTriple",
)  # fmt: skip
"""Losses that their papers measure by Recall@K and NMI alone."""


@dataclass(frozen=True)
class Question:
    """What a run is asked, and why that was chosen."""

    name: QuestionName
    reason: str


def choose_question(recipe: Recipe, metrics: Mapping[str, Any]) -> Question:
    """The question that a run answers.

    Args:
        recipe: of the run.
        metrics: what was measured so far: ``data``, and ``probe`` where there is one.

    Raises:
        DataError: the recipe asks for a closed set, but no test identity was trained on.
    """
    asked = recipe.evaluate.question
    status = metrics.get("probe", {}).get("labels", {}).get("status", "no probe was asked for")
    if asked == "closed-set" and status != "ok":
        raise DataError(
            f'evaluate.question = "closed-set" needs a probe of labels that were trained on, and there is none '
            f"({status}): leave the key out, or set evaluate.probe = true and test on classes of the training split"
        )
    if asked != "auto":
        return Question(asked, "the recipe says so (evaluate.question)")
    data = metrics["data"]
    if status == "ok" and data["shared_identities"] == data["test_identities"]:
        return Question("closed-set", "every identity of the test split was trained on")
    selected = recipe.train.select
    if selected is not None:
        name: QuestionName = "verification" if MetricName.from_name(selected).is_of_pairs else "retrieval"
        return Question(name, f"its weights were selected by {selected}")
    if recipe.train.method == "hardness-aware":
        return Question("retrieval", "hardness-aware metric learning is measured by retrieval")
    kind = str(recipe.loss.get("kind"))
    if kind in RETRIEVAL_LOSSES:
        return Question("retrieval", f"{kind} is measured by retrieval")
    return Question("verification", "identities of the test split are new, and pairs of them are told apart")
