"""What the training loop calls: the protocol of callbacks, and one that calls a function."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mettle.train.trainer import TrainingState


class Callback(Protocol):
    """What the loop calls. A subclass overrides what it needs; by default nothing is done.

    ``state`` says where the run stands and takes the requests to stop for now (``state.stop_requested = True``) or to
    finish early (``state.finish_requested = True``, by a callback before the log). An exception ends the run;
    ``on_end`` is called for all callbacks however it ends.
    """

    def on_start(self, state: "TrainingState") -> None:
        """Before the first step of this process."""

    def on_step(self, state: "TrainingState") -> None:
        """After every step."""

    def on_end(self, state: "TrainingState") -> None:
        """After the last step, or an error."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if it had not stopped."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""


class OnStep(Callback):
    """Calls a function with the number of steps done and the log line of the step."""

    def __init__(self, function: Callable[[int, dict[str, Any]], None]):
        self.function = function

    def on_step(self, state: "TrainingState") -> None:
        """Call it, with the loss: a GPU is waited for at every step."""
        self.function(state.step, state.line | {"loss": state.line["loss"]})
