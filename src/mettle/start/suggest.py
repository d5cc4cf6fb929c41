"""What to try next after a first run: what was measured decides, and the order is that of what it is likely to give."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mettle.start.choose import LEAST_KEPT, MOST_EPOCHS, FirstRunPlan
from mettle.start.look import DataAccount

COUNT = 3
GRAPH = "onnx"  # the backbone of recipes that start from a graph
FEW_LABELS = 100  # labels in training under which more of them are likely to be what helps most
STILL_FALLING = 0.05  # share of the loss that the last quarter of the run took off
CUT = 0.85  # share of an image that a crop keeps, below which padding is worth a try


def suggest_next(
    plan: FirstRunPlan,
    account: DataAccount,
    before: Mapping[str, float] | None,
    after: Mapping[str, float],
    log: Sequence[Mapping[str, Any]],
    recipe_file: Path,
) -> list[str]:
    """Three things to try, each with the numbers that speak for it and the command or key that does it.

    Args:
        plan: what was trained.
        account: what was seen in the data.
        before: EER and Recall@1 of the pretrained backbone, None where there was none.
        after: those of the trained run.
        log: lines of the run's log.
        recipe_file: the recipe that was written.
    """
    again = f"mettle train {shlex.quote(str(recipe_file))} --set "
    return list(_suggestions(plan, account, before, after, log, again))[:COUNT]


def _suggestions(
    plan: FirstRunPlan,
    account: DataAccount,
    before: Mapping[str, float] | None,
    after: Mapping[str, float],
    log: Sequence[Mapping[str, Any]],
    again: str,
) -> Iterator[str]:
    recipe, is_graph = plan.recipe, plan.recipe.model.get("backbone") == GRAPH
    epochs, size = recipe.train.epochs or 0, recipe.data.size
    copies = [p for p in account.report.problems if p.kind in ("conflict", "leakage", "near")]
    if copies:
        yield (
            f"mend the data first: {copies[0].text} (`mettle data check {shlex.quote(account.source)}` lists all); "
            "copies between training and test flatter every number"
        )
    if before is None:
        yield (
            "start from pretrained weights (--weights FILE, or --weights timm/NAME where there is a network): on "
            "photographs nothing else gives as much"
        )
    elif is_graph:
        yield (
            "a graph is not trained, only the head behind it: give the weights of the same network as a file "
            "(--weights FILE), and its last layers learn too"
        )
    elif after["recall@1"] <= before["recall@1"]:
        rate = recipe.train.rate / 3
        yield (
            f"Recall@1 did not rise over that of the pretrained backbone ({before['recall@1']:.1%}, now "
            f"{after['recall@1']:.1%}): move its weights less with `{again}train.rate={rate:.1e}`"
        )
    elif after["eer"] >= before["eer"]:
        yield (
            f"the EER did not fall below that of the pretrained backbone ({before['eer']:.2%}, now "
            f"{after['eer']:.2%}): train longer with `{again}train.epochs={2 * epochs}`"
        )
    falling = _late_fall(log)
    if falling > STILL_FALLING:
        yield (
            f"the loss still fell by {falling:.0%} in the last quarter of the run: train longer with "
            f"`{again}train.epochs={2 * epochs}`"
        )
    if not is_graph and isinstance(size, int) and size < account.images.median_short_side:
        larger = min(2 * size, account.images.median_short_side // 32 * 32)
        if larger > size:
            cost = (larger / size) ** 2
            yield (
                f"half of the images have more than {account.images.median_short_side} pixels, the network saw {size}: "
                f"`{again}data.size={larger}`, at {cost:.1f} times the {plan.minutes:.1f} minutes"
            )
    if recipe.data.resize == "crop" and LEAST_KEPT <= account.kept_by_crop < CUT:
        yield (
            f"the square from the center shows {account.kept_by_crop:.0%} of an image: where the thing is cut off, see "
            f"the pairs in the report, show all of it with `{again}data.resize=pad`"
        )
    trained = len(account.per_label) - round(len(account.per_label) * (recipe.data.val + recipe.data.test))
    if trained < FEW_LABELS:
        yield (
            f"only about {trained} labels were trained on: images of other labels of the same kind help recognize new "
            "ones more than further images of these"
        )
    if recipe.train.freeze is not None and not is_graph:
        yield (
            f"layers up to {recipe.train.freeze} did not train: on a GPU, or with more time, train all of them with "
            f"train.layer_decay = 0.8 in place of train.freeze in the recipe"
        )
    if epochs < MOST_EPOCHS:
        yield f"{epochs} epochs fitted into the time: give more with --minutes, or `{again}train.epochs={2 * epochs}`"
    yield f"weigh hard pairs otherwise: `{again}loss.kind=SupCon` or `{again}loss.kind=ProxyAnchor`"
    yield "embed the images and let `mettle audit` list suspected label errors"
    yield f"see how much chance there is in one split and one seed: add --seeds 3 to `{again}train.epochs={epochs}`"


def _late_fall(log: Sequence[Mapping[str, Any]]) -> float:
    """By which share of it the loss fell from the third to the last quarter of a run, on average."""
    losses = [float(line["loss"]) for line in log if "loss" in line]
    quarter = len(losses) // 4
    if quarter == 0:
        return 0.0
    third, last = losses[-2 * quarter : -quarter], losses[-quarter:]
    return 1 - (sum(last) / quarter) / (sum(third) / quarter)
