"""Choosing weights while training: what a run validates on, which step it keeps, when it ends early.

Training does not know metrics. Whoever starts a run passes a `Score`, such as `mettle.evaluate.ValidationScore`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mettle.data.dataset import Samples
from mettle.errors import DataError, InputError
from mettle.pairs.distributed import ALONE, RankGroup
from mettle.train.callbacks import BestCheckpoint, Callback, Direction, EarlyStopping, Validation


class Score(Protocol):
    """Measures a model on samples, and knows which way is better."""

    def __call__(self, model: Any, samples: Samples, names: tuple[str, ...]) -> Mapping[str, float]:
        """A number for each of these metrics, and for others that are worth a curve."""
        ...

    def direction(self, name: str) -> Direction:
        """Whether low or high values of a metric are better."""
        ...


@dataclass(frozen=True)
class Selection:
    """The callbacks that validate a run, keep its best weights and end it early, as far as asked for.

    They come before the log in the list of callbacks.
    """

    validation: Validation
    best: BestCheckpoint | None = None
    stopping: EarlyStopping | None = None

    @property
    def callbacks(self) -> list[Callback]:
        """In the order that they need."""
        return [one for one in (self.validation, self.best, self.stopping) if one is not None]

    def restore_best(self, method: Any) -> dict[str, Any] | None:
        """Put the best weights into the method of a run that has ended, and say where they come from.

        Returns:
            the metric, its direction, value and step, the last step, how many validations were compared and whether the
            run ended early; None where nothing is selected, and the weights stay those of the last step.
        """
        if self.best is None:
            return None
        step, value = self.best.restore_best(method)
        assert self.validation.last is not None
        return {
            "metric": self.best.metric,
            "direction": self.best.direction,
            "value": value,
            "step": step,
            "last_step": self.validation.last.step,
            "last_value": self.validation.last.line()[f"val_{self.best.metric}"],
            "validations": self.best.seen,
            "stopped_early": self.stopping is not None and self.stopping.is_exhausted,
        }


def build_selection(
    score: Score,
    samples: Samples,
    checkpoints: Path,
    *,
    select: str | None = None,
    every: int | None = None,
    patience: int | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    ranks: RankGroup = ALONE,
) -> Selection:
    """The callbacks of a run that is validated on some samples.

    Args:
        score: what measures, see `Score`.
        samples: what is measured on: identities that are not trained on.
        checkpoints: the folder of the run's checkpoints.
        select: the metric whose best value decides which weights are kept; None keeps those of the last step.
        every: steps between validations; None for every epoch.
        patience: validations without a better value that end the run; None never.
        on_note: called with a line for each value that is not finite.
        ranks: of these the first measures and saves.

    Raises:
        DataError: there are no samples.
        InputError: the score does not know the metric, or not which way is better.
    """
    if len(samples) == 0:
        raise DataError(
            "there are no validation samples to select on: set data.val above 0, or mark rows of the table as val in "
            "its split column"
        )
    if patience is not None and select is None:
        raise InputError("patience= needs select=, the metric that has to improve")
    names = () if select is None else (select,)
    measure = ranks.call_on_first(lambda model: {k: float(v) for k, v in score(model, samples, names).items()})
    validation = Validation(measure, every, on_note=on_note)
    if select is None:
        return Selection(validation)
    if not callable(getattr(score, "direction", None)):
        raise InputError(
            "score= must say which way is better: give it a method direction(name) that returns 'min' or 'max', as "
            "mettle.evaluate.ValidationScore has"
        )
    direction = score.direction(select)
    best = BestCheckpoint(checkpoints, select, direction, writes=ranks.is_first)
    return Selection(validation, best, None if patience is None else EarlyStopping(select, direction, patience))


def describe_selection(facts: Mapping[str, Any]) -> str:
    """Where the kept weights come from, in one line."""
    kind = "lowest" if facts["direction"] == "min" else "highest"
    last = "" if facts["last_value"] is None else f"; {facts['last_value']:.4g} at the end"
    early = f", which ended early at step {facts['last_step']}" if facts["stopped_early"] else ""
    return (
        f"the weights of step {facts['step']} are kept: the {kind} {facts['metric']} of {facts['validations']} "
        f"validations, {facts['value']:.4g}{last} of the run{early}"
    )
