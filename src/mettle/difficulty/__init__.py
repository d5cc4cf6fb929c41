"""What makes a pair hard. One object, every loss: see `mettle.pairs.contract.Difficulty`."""

from mettle.difficulty.threshold import Threshold

__all__ = ["Threshold"]
