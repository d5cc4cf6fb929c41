"""The page for users of pytorch-metric-learning names all of its classes, and what it names here is there."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import mettle

pytest.importorskip("pytorch_metric_learning")

PAGE = (Path(__file__).parents[2] / "docs" / "from-pytorch-metric-learning.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"\b[A-Za-z]\w+\b", " ".join(re.findall(r"`[^`\n]+`", PAGE))))
ROOMS = ("losses", "miners", "distances", "reducers", "samplers", "regularizers", "testers", "trainers")


def public_classes(module):
    return [name for name, x in vars(module).items() if inspect.isclass(x) and not name.startswith("_")]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_class_is_on_the_page(room):
    classes = public_classes(import_module(f"pytorch_metric_learning.{room}"))
    assert len(classes) >= 4
    assert [name for name in classes if name not in NAMED] == []


def test_inference_and_metrics_are_on_the_page():
    inference = import_module("pytorch_metric_learning.utils.inference")
    own = [name for name in public_classes(inference) if getattr(inference, name).__module__ == inference.__name__]
    calculator = import_module("pytorch_metric_learning.utils.accuracy_calculator").AccuracyCalculator()
    wanted = [*own, "AccuracyCalculator", *calculator.get_curr_metrics()]
    assert len(wanted) > 10
    assert [name for name in wanted if name not in NAMED] == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its constructor
def test_sphereface_is_theirs_without_annealing():
    """The other losses that the page calls equal are held to it there and in test_peers.py."""
    torch.manual_seed(0)
    z, y = torch.randn(24, 5, dtype=torch.float64), torch.arange(24) % 6
    theirs = import_module("pytorch_metric_learning.losses").SphereFaceLoss(6, 5).double()
    ours = mettle.losses.SphereFace(6, 5, 4, start=0, floor=0).double()
    ours.weight.data = theirs.W.data.T
    torch.testing.assert_close(ours(z, y), theirs(z, y), rtol=1e-6, atol=1e-9)


def test_what_is_called_not_here_is_not_here():
    """A loss that has come since would still be missing on the page."""
    rows = re.findall(r"^\| `(\w+?)(?:Loss|Miner)?[`(][^|]*\| not here", PAGE, re.MULTILINE)
    assert len(rows) > 15
    assert [name for name in rows if name in mettle.losses.__all__] == []


@pytest.mark.parametrize("room", ["losses", "difficulty"])
def test_what_stands_for_them_is_here(room):
    """Names with a call in the second column of a table are built here."""
    section = PAGE.split("## Losses" if room == "losses" else "## Miners")[1].split("\n## ")[0]
    cells = [line.split(" | ")[1] for line in section.splitlines() if line.startswith("| `")]
    called = {name for cell in cells for name in re.findall(r"`([A-Z]\w+)\(", cell)}
    assert len(called) >= 7
    assert [name for name in called if not hasattr(getattr(mettle, room), name)] == []
