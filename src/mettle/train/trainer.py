"""The training loop: one page, meant to be read and copied.

Every batch is a pure function of (seed, step) and the learning rate a pure function of the step, so a run that is
stopped after any step and resumed is bit for bit the run that was not. The loop steps; whatever else there is to do
(logs, guards, checkpoints, a progress bar) is a callback, see `mettle.train.callbacks`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mettle.data.loader import Batch, ForeignLoader, Loader
from mettle.train.callbacks import Callback, ValidationResult, mean_cosine, similarity_gap
from mettle.train.methods.base import Method, StepResult
from mettle.train.optim import Schedule


class LogLine(dict[str, Any]):
    """Facts of one step. While the host is ahead of a GPU the loss is not among them; asking for it reads it."""

    def __init__(self, state: "TrainingState"):
        assert state.result is not None
        known = {"loss": state.result.loss} if state.result.is_read else {}
        super().__init__({"step": state.step, "epoch": state.batch.epoch} | known | {"rate": state.lr})
        self.result, self.batch, self.by_id = state.result, state.batch, state.views > 1

    def __missing__(self, key: str) -> Any:
        if key != "loss":
            raise KeyError(key)
        self["loss"] = self.result.loss
        return self["loss"]

    def measure(self) -> "LogLine":
        """Add the gradient, the shape of the embeddings and what difficulty did, unless they are there."""
        if "gradient" not in self:
            result = self.result
            with result.numbers.computed.reading():
                embeddings = result.embeddings.cpu()
                gap = similarity_gap(embeddings, self.batch, by_id=self.by_id)
                shape = {"mean_cosine": mean_cosine(embeddings)} | ({} if gap is None else {"gap": gap})
                stats = dict(result.lazy_stats())
            self.update({"loss": result.loss, "gradient": result.gradient} | shape | stats)
        return self


@dataclass
class TrainingState:
    """Where a run stands, for callbacks: what they read, and the requests that they may make.

    A run that was asked to stop is not done: it saves and can be resumed. A run that was asked to finish is done with
    this step, as if it had been the last one of the schedule.
    """

    method: Method
    schedule: Schedule
    callbacks: Sequence[Callback] = ()
    views: int = 1
    step: int = 0  # steps done
    lr: float = 0.0  # of the last step, like all that follows
    batches: Sequence[Batch] = ()
    result: StepResult | None = None
    is_epoch_end: bool = False
    line: dict[str, Any] = field(default_factory=dict)  # what a log may say
    logged: Sequence[dict[str, Any]] = ()  # the lines that `JsonLog` wrote after this step, of this one or the last
    validation: ValidationResult | None = None  # the last one, of this step or an earlier one
    stop_requested: bool = False
    finish_requested: bool = False

    @property
    def batch(self) -> Batch:
        """The last batch."""
        return self.batches[-1]

    @property
    def is_last(self) -> bool:
        """Whether nothing is left to do: all steps are done, or the run was asked to finish."""
        return self.step >= self.schedule.steps or self.finish_requested

    @property
    def is_validated(self) -> bool:
        """Whether the model was validated after this very step."""
        return self.validation is not None and self.validation.step == self.step

    def is_due(self, every: int) -> bool:
        """Whether this is a step of those that something is done at, one in ``every`` and the last."""
        return self.step % every == 0 or self.is_last

    @property
    def can_read_later(self) -> bool:
        """Whether numbers of this step should be read after the next one: a GPU that waits for the host does nothing.

        Not where the numbers are needed now, because the run is validated or ends here, nor where the next step
        changes what they are computed from.
        """
        assert self.result is not None
        ends = self.is_last or self.stop_requested or self.is_validated
        return not self.result.is_read and self.result.stays_valid and not ends

    @property
    def step_line(self) -> LogLine:
        """The line of the last step, which can be measured."""
        assert isinstance(self.line, LogLine)
        return self.line


def run_loop(
    method: Method,
    loader: Loader | ForeignLoader,
    schedule: Schedule,
    callbacks: Sequence[Callback] = (),
    *,
    start: int = 0,
    position: tuple[int, int] | None = None,
    accumulate: int = 1,
) -> bool:
    """Train from step ``start``; returns whether the run reached its end (and was not asked to stop).

    ``position`` is ``Batch.next_position`` of the last batch before, where that is known: without it the epochs before
    are drawn to count their batches. Callbacks are called in their order. A step takes ``accumulate`` batches and the
    mean of their gradients.
    """
    state = TrainingState(method, schedule, callbacks, loader.views, start)
    try:
        for callback in callbacks:
            callback.on_start(state)
        stop = start if state.is_last else schedule.steps  # an early end that was saved is an end
        for state.batches in group_batches(loader, start, stop, position, accumulate):
            state.is_epoch_end = any(batch.ends_epoch for batch in state.batches)
            state.lr = schedule.lr_at(state.step)
            state.result = method.step(state.batches, state.lr, state.step / schedule.steps)
            state.step += 1
            state.line, state.logged = LogLine(state), ()
            for callback in callbacks:
                callback.on_step(state)
            if state.stop_requested or state.finish_requested:
                break
    finally:
        for callback in callbacks:
            callback.on_end(state)
    return state.is_last


def group_batches(
    loader: Loader | ForeignLoader, start: int, stop: int, position: tuple[int, int] | None = None, accumulate: int = 1
) -> Iterator[tuple[Batch, ...]]:
    """The batches of steps ``start`` to ``stop`` - 1, so many a step."""
    batches = loader.batches(start * accumulate, stop * accumulate, position)
    while group := tuple(islice(batches, accumulate)):
        yield group


def count_steps(loader: Loader | ForeignLoader, epochs: int, accumulate: int = 1) -> int:
    """How many steps so many epochs have, at least one."""
    return max(1, loader.count_batches(epochs) // accumulate)
