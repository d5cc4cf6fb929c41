"""Measuring a run on its validation part while it trains, and ending it when that no longer improves."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from mettle.errors import InputError, NumericError, nearest
from mettle.model.embedder import eval_mode
from mettle.train import checkpoint
from mettle.train.callbacks.base import Callback

if TYPE_CHECKING:
    from mettle.train.trainer import TrainingState

Direction = Literal["min", "max"]  # which values of a metric are better


@dataclass(frozen=True)
class ValidationResult:
    """What was measured on the validation part: the steps done by then, the values, and how long it took."""

    step: int
    values: Mapping[str, float]
    seconds: float = 0.0

    def line(self) -> dict[str, Any]:
        """What a log says of it. JSON has no NaN: such values are null."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        return {f"val_{name}": value for name, value in finite.items()} | {"validation_seconds": self.seconds}


class Validation(Callback):
    """Measures the model as it would be kept, on data that it is not trained on, every so often.

    Values go into the log as ``val_<name>`` and into ``state.validation``, for the callbacks that follow. The model is
    in eval mode and without gradient meanwhile, and training draws the same random numbers as without validation.

    Args:
        score: measures a model: a number by the name of each metric.
        every: steps between validations; None for the end of every epoch. The last step is always validated, and so is
            the untrained model, as step 0.
        on_note: called with a line for each value that is not finite.
    """

    def __init__(
        self,
        score: Callable[[Any], Mapping[str, float]],
        every: int | None = None,
        *,
        on_note: Callable[[str], None] = lambda note: None,
    ):
        self.score, self.every, self.on_note = score, every, on_note
        self.last: ValidationResult | None = None

    def measure_untrained(self, method: Any) -> ValidationResult:
        """Measure the model before the first step, so that what cannot be measured is told before anything is written.

        Raises:
            NumericError: a value is not finite.
        """
        self.last = self._measure(method, 0)
        broken = [name for name, value in self.last.values.items() if not math.isfinite(value)]
        if broken:
            raise NumericError(
                f"validation of the untrained model: {broken[0]} is {self.last.values[broken[0]]}. Look for inputs or "
                "weights that are not finite"
            )
        return self.last

    def on_start(self, state: "TrainingState") -> None:
        """Validate the untrained model, unless that was done already."""
        if state.step == 0:
            self.last = self.last if self.last is not None and self.last.step == 0 else self._measure(state.method, 0)
            state.line = {"step": 0, "epoch": 0} | self.last.line()
        state.validation = self.last

    def on_step(self, state: "TrainingState") -> None:
        """Validate where that is due."""
        is_due = state.is_epoch_end or state.is_last if self.every is None else state.is_due(self.every)
        if is_due:
            state.validation = self.last = self._measure(state.method, state.step)
            state.line |= self.last.line()

    def _measure(self, method: Any, step: int) -> ValidationResult:
        began, model = time.perf_counter(), method.final_module()
        with checkpoint.preserve_rng_state(), eval_mode(model), torch.no_grad():
            values = {name: float(value) for name, value in self.score(model).items()}
        for name, value in values.items():
            if not math.isfinite(value):
                self.on_note(f"validation at step {step}: {name} is {value}, which is never the best value")
        return ValidationResult(step, values, time.perf_counter() - began)

    def state_dict(self) -> dict[str, Any]:
        """The last validation."""
        return {} if self.last is None else asdict(self.last) | {"seconds": 0.0}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.last = ValidationResult(**state)


def describe_validation(found: ValidationResult) -> str:
    """What a validation found, in words."""
    return f"validation at step {found.step}: {', '.join(f'{name} {x:.4g}' for name, x in found.values.items())}"


class BestTracker(Callback):
    """Follows one metric over the validations of a run: its best value, and how many validations ago that was.

    Of equal values the earlier one is the best; a value that is not finite never is.

    Args:
        metric: its name in ``state.validation``.
        direction: whether low (``"min"``) or high (``"max"``) values are better.
    """

    def __init__(self, metric: str, direction: Direction):
        if direction not in ("min", "max"):
            raise InputError(f"direction= must be 'min' or 'max', got {direction!r}")
        self.metric, self.direction = metric, direction
        self.step: int | None = None  # of the best value
        self.value: float | None = None
        self.waited = 0  # validations since then
        self.seen = 0  # validations in all

    def on_start(self, state: "TrainingState") -> None:
        """Take in the validation of the untrained model."""
        if state.step == 0 and state.is_validated:
            self._take_in(state)

    def on_step(self, state: "TrainingState") -> None:
        """Take in a validation."""
        if state.is_validated:
            self._take_in(state)

    def _take_in(self, state: "TrainingState") -> None:
        assert state.validation is not None
        values = state.validation.values
        if self.metric not in values:
            raise InputError(f"validation has no metric {self.metric!r}{nearest(self.metric, values)}")
        value = values[self.metric]
        self.seen += 1
        is_first = self.value is None and math.isfinite(value)
        if is_first or (self.value is not None and self.is_better(value, self.value)):
            self.step, self.value, self.waited = state.step, value, 0
            self.on_better(state)
        else:
            self.waited += 1

    def is_better(self, value: float, other: float) -> bool:
        """Whether a value is better than another one."""
        return math.isfinite(value) and (value < other if self.direction == "min" else value > other)

    def on_better(self, state: "TrainingState") -> None:
        """What is done where a value is the best so far."""

    def state_dict(self) -> dict[str, Any]:
        """The best value, and since when."""
        return {"step": self.step, "value": self.value, "waited": self.waited, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.step, self.value, self.waited, self.seen = (state[key] for key in ("step", "value", "waited", "seen"))


class EarlyStopping(BestTracker):
    """Finishes a run that has not improved for so many validations. That is an end, as after the last step.

    Args:
        metric: its name in ``state.validation``.
        direction: whether low (``"min"``) or high (``"max"``) values are better.
        patience: validations without a better value that end the run.
    """

    def __init__(self, metric: str, direction: Direction, patience: int):
        super().__init__(metric, direction)
        if not isinstance(patience, int) or patience < 1:
            raise InputError(f"patience= must be a whole number of validations from 1 up, got {patience!r}")
        self.patience = patience

    @property
    def is_exhausted(self) -> bool:
        """Whether the last validations were all without a better value."""
        return self.waited >= self.patience

    def on_start(self, state: "TrainingState") -> None:
        """Finish at once where the run that is resumed had ended."""
        super().on_start(state)
        state.finish_requested = state.finish_requested or self.is_exhausted

    def on_step(self, state: "TrainingState") -> None:
        """Finish where patience is at its end."""
        super().on_step(state)
        state.finish_requested = state.finish_requested or self.is_exhausted
