"""What is suggested after a first run follows from what was measured."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mettle.data.check import DataProblem, DataReport
from mettle.start import DataAccount, FirstRunPlan, suggest_next
from mettle.start.choose import MOST_EPOCHS
from mettle.train import load
from mettle.train.auto_settings import ImageFacts

REPORT = DataReport(800, {}, {}, {}, "none", 0, ())
ACCOUNT = DataAccount("photos", 800, (4,) * 200, ImageFacts(((120, 130),) * 4), REPORT, 800, False)
PLAN = FirstRunPlan(load("photos").with_values({"data.size": 128, "data.resize": "crop"}), (), 1.0, 100)
BETTER = ({"eer": 0.2, "recall@1": 0.7}, {"eer": 0.1, "recall@1": 0.8})
LEVEL = [{"loss": 1.0}] * 8


def suggest(before=BETTER[0], after=BETTER[1], log=LEVEL, account=ACCOUNT, **keys) -> list[str]:
    plan = replace(PLAN, recipe=PLAN.recipe.with_values({key.replace("_", ".", 1): v for key, v in keys.items()}))
    found = suggest_next(plan, account, before, after, log, Path("runs/start.toml"))
    assert len(found) == 3 and len(set(found)) == 3
    return found


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"after": {"eer": 0.1, "recall@1": 0.7}}, "--set train.rate=3.3e-05"),
        ({"after": {"eer": 0.2, "recall@1": 0.8}}, f"the EER did not fall .* train.epochs={2 * MOST_EPOCHS}"),
        ({"before": None}, "start from pretrained weights"),
        ({"log": [{"loss": 4.0 - 0.4 * k} for k in range(8)]}, "the loss still fell by 36% .* train.epochs=16"),
        ({"account": replace(ACCOUNT, per_label=(4,) * 60)}, "only about 36 labels"),
        ({"account": replace(ACCOUNT, images=ImageFacts(((300, 320),) * 4))}, "--set data.size=256"),
        ({"account": replace(ACCOUNT, images=ImageFacts(((100, 140),) * 4))}, "shows 71% .* data.resize=pad"),
        ({"train_freeze": "layer3"}, "layers up to layer3 did not train"),
        ({"train_freeze": "all", "model_backbone": "onnx"}, "a graph is not trained"),
        ({"train_epochs": 2}, "2 epochs fitted into the time"),
    ],
)
def test_a_finding_is_followed_by_what_answers_it(changes, wanted):
    assert any(re.search(wanted, text) for text in suggest(**changes))
    assert not any(re.search(wanted, text) for text in suggest())


def test_copies_across_the_split_come_first():
    problem = DataProblem("warning", "near", "a.jpg and b.jpg look nearly the same, in train and test")
    copied = replace(ACCOUNT, report=replace(REPORT, problems=(problem,)))
    assert suggest(account=copied)[0].startswith("mend the data first: a.jpg and b.jpg look nearly the same")
    assert "mettle data check photos" in suggest(account=copied)[0]


def test_what_is_not_measurable_suggests_nothing():
    nothing = {"eer": float("nan"), "recall@1": float("nan")}
    assert suggest(before=nothing, after=nothing) == suggest()
