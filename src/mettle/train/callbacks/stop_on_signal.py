"""Ctrl-C and SIGTERM: finish the step, save and stop."""

import signal
import threading
from typing import TYPE_CHECKING, Any

from mettle.pairs.distributed import is_any_rank
from mettle.train.callbacks.base import Callback

if TYPE_CHECKING:
    from mettle.train.trainer import TrainingState


class StopOnSignal(Callback):
    """Turns the first SIGTERM or Ctrl-C into "finish this step and save"; the second one ends at once."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.earlier: dict[int, Any] = {}

    def on_start(self, state: "TrainingState") -> None:
        """Take over the signals, in the main thread; others get none."""
        if threading.current_thread() is threading.main_thread():
            self.earlier = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()

    def on_step(self, state: "TrainingState") -> None:
        """Pass the request on.

        It is looked at once a step, before the checkpoint: a request that came between two looks would end the run
        without one. Where several ranks share a batch, all of them stop after the step in which one was asked to.
        """
        asked = state.stop_requested or self.asked.is_set()
        state.stop_requested = asked if state.batch.rank_rows is None else is_any_rank(asked)

    def on_end(self, state: "TrainingState") -> None:
        """Give the signals back."""
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        self.earlier = {}
