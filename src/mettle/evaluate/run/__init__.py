"""Evaluation of a run: its model on the test split in every scenario, its probes, and on the validation split."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mettle.evaluate.run.evaluate import Evaluation, evaluate_run, split_for_thresholds

__all__ = ["Evaluation", "evaluate_run", "split_for_thresholds"]


def __getattr__(name: str) -> Any:  # evaluate itself exports ValidationScore from here, and needs no training for it
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("mettle.evaluate.run.evaluate"), name)
