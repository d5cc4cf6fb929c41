"""Evaluation of a run folder: the model on the test split of its data, in every scenario; its probes."""

from mettle.evaluate.run.evaluate import Evaluation, evaluate_run, split_for_thresholds

__all__ = ["Evaluation", "evaluate_run", "split_for_thresholds"]
