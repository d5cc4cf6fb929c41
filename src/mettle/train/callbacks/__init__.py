"""What happens around the steps of a run: validation, logs, progress, guards, the request to stop, checkpoints.

The training loop calls them in their order, so a run lists them as `mettle.train.from_recipe` does: the guard against
divergence, validation and what follows from it (the best checkpoint, an early end), the log, the guard against collapse
(which lets the last line be logged), progress, the request to stop, and checkpoints last, because a checkpoint holds
what the others remember.
"""

from mettle.train.callbacks.base import Callback, OnStep
from mettle.train.callbacks.checkpoints import BestCheckpoint, Checkpoint
from mettle.train.callbacks.guards import CollapseGuard, DivergenceGuard, collapse_advice, mean_cosine, similarity_gap
from mettle.train.callbacks.logs import JsonLog, TensorBoard, read_log
from mettle.train.callbacks.progress import Progress, describe_difficulty
from mettle.train.callbacks.stop_on_signal import StopOnSignal
from mettle.train.callbacks.validation import (
    BestTracker,
    Direction,
    EarlyStopping,
    Validation,
    ValidationResult,
    describe_validation,
)

__all__ = [
    "BestCheckpoint",
    "BestTracker",
    "Callback",
    "Checkpoint",
    "CollapseGuard",
    "Direction",
    "DivergenceGuard",
    "EarlyStopping",
    "JsonLog",
    "OnStep",
    "Progress",
    "StopOnSignal",
    "TensorBoard",
    "Validation",
    "ValidationResult",
    "collapse_advice",
    "describe_difficulty",
    "describe_validation",
    "mean_cosine",
    "read_log",
    "similarity_gap",
]
