"""When checkpoints are saved: every few steps and before a stop, and the best by validation.

How one is written and read is in :mod:`mettle.train.checkpoint`.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mettle.errors import RunError
from mettle.train import checkpoint
from mettle.train.callbacks.base import Callback
from mettle.train.callbacks.validation import BestTracker, Direction
from mettle.train.ranks.class_rows import collect_module_state, load_module_state

if TYPE_CHECKING:
    from mettle.train.trainer import TrainingState


class Checkpoint(Callback):
    """Saves the method, the random state and what callbacks remember: every few steps, at the end and before a stop.

    Of several ranks each collects it, because the parts of a method may lie on different ones, and one ``writes``.
    """

    def __init__(self, folder: Path, every: int = 100, *, writes: bool = True):
        self.folder, self.every, self.writes = folder, every, writes

    def on_step(self, state: "TrainingState") -> None:
        """Save where that is due."""
        if state.is_due(self.every) or state.stop_requested:
            remembered = {name: one.state_dict() for name, one in _by_name(state.callbacks).items()}
            content = {
                "method": state.method.state_dict(),
                "random": checkpoint.get_rng_state(),
                "callbacks": {name: own for name, own in remembered.items() if own},
                "position": list(state.batch.next_position),
            }
            if self.writes:
                checkpoint.save_checkpoint(self.folder, state.step, content)

    def restore(self, method: Any, callbacks: Sequence[Callback]) -> tuple[int, tuple[int, int] | None, list[str]]:
        """Put everything back as the newest good checkpoint has it.

        Returns:
            its step and the position of the next batch, 0 and None where there is none, and a line for each damaged one
            that was passed over.
        """
        found = checkpoint.load_latest(self.folder)
        if found is None:
            return 0, None, []
        step, content, passed = found
        try:
            method.load_state_dict(content["method"])
        except RuntimeError as problem:  # of torch: other names or shapes of weights
            said = " ".join(str(problem).split())[:200]
            raise RunError(f"the checkpoints of {self.folder} are of another network or loss: {said}") from None
        checkpoint.set_rng_state(content["random"])
        for name, callback in _by_name(callbacks).items():
            if name in content["callbacks"]:
                callback.load_state_dict(content["callbacks"][name])
        epoch, batch = content["position"]
        return step, (int(epoch), int(batch)), passed


def _by_name(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by the names of their classes, those of one class numbered in their order."""
    found: dict[str, Callback] = {}
    for callback in callbacks:
        name, number = type(callback).__name__, 1
        while (key := name if number == 1 else f"{name} {number}") in found:
            number += 1
        found[key] = callback
    return found


class BestCheckpoint(BestTracker):
    """Keeps the weights that validated best in ``best`` of the folder of checkpoints: all networks and losses.

    The best weights at the time of every checkpoint that is kept stay too, so a run can go on from any of them.

    Args:
        folder: of the checkpoints.
        metric: its name in ``state.validation``.
        direction: whether low (``"min"``) or high (``"max"``) values are better.
        writes: whether this process does so; of several ranks one.
    """

    def __init__(self, folder: Path, metric: str, direction: Direction, *, writes: bool = True):
        super().__init__(metric, direction)
        self.checkpoints, self.folder, self.writes = folder, folder / "best", writes

    def on_start(self, state: "TrainingState") -> None:
        """Drop what steps left that are about to be made again."""
        for place in checkpoint.list_checkpoints(self.folder) if self.writes else ():
            if checkpoint.checkpoint_step(place) > state.step:
                shutil.rmtree(place, ignore_errors=True)
        super().on_start(state)

    def on_better(self, state: "TrainingState") -> None:
        """Save the weights, then drop those that nothing refers to any more."""
        method = state.method
        weights = {name: collect_module_state(method.final_module(name)) for name in method.modules}
        if not self.writes:
            return
        checkpoint.write_checkpoint(self.folder, state.step, {"weights": weights})
        kept = checkpoint.list_checkpoints(self.folder)
        steps = [state.step, *map(checkpoint.checkpoint_step, checkpoint.list_checkpoints(self.checkpoints))]
        needed = {max((p for p in kept if checkpoint.checkpoint_step(p) <= step), default=None) for step in steps}
        for place in kept:
            if place not in needed:
                shutil.rmtree(place, ignore_errors=True)

    def restore_best(self, method: Any) -> tuple[int, float]:
        """Put the best weights into the modules that are to be kept; returns their step and value.

        Raises:
            RunError: no value was finite, or the weights cannot be read.
        """
        if self.step is None or self.value is None:
            raise RunError(f"no validation gave a finite {self.metric}: there are no best weights in {self.folder}")
        _, state = checkpoint.read_checkpoint(self.folder / checkpoint.checkpoint_name(self.step))
        for name in method.modules:
            load_module_state(method.final_module(name), state["weights"][name])
        return self.step, self.value
