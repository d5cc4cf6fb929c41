"""What happens around the steps of a run: validation, logs, progress, guards, the request to stop, checkpoints.

The training loop calls them in their order, so a run lists them as `mettle.train.from_recipe` does: the guard against
divergence, validation and what follows from it (the best checkpoint, an early end), the log, the guard against collapse
(which lets the last line be logged), progress, the request to stop, and checkpoints last, because a checkpoint holds
what the others remember.
"""

import json
import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from mettle.atomic_files import write_text
from mettle.data.loader import Batch
from mettle.errors import InputError, NumericError, RunError, nearest
from mettle.train import checkpoint
from mettle.train.factory import constructor_arguments
from mettle.train.run_folder import explain_write_errors

if TYPE_CHECKING:
    from mettle.train.trainer import TrainingState

RESOLUTION = 1e-6  # mean cosine distances below are rounding of float32 embeddings that are all the same
WAITED = 0.1  # share of the time that batches may be waited for before it is worth a word


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
        """Call it."""
        self.function(state.step, state.line)


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


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """A model in eval mode; afterwards each of its modules is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


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


class BestCheckpoint(BestTracker):
    """Keeps the weights that validated best in ``best`` of the folder of checkpoints: all networks and losses.

    The best weights at the time of every checkpoint that is kept stay too, so a run can go on from any of them.

    Args:
        folder: of the checkpoints.
        metric: its name in ``state.validation``.
        direction: whether low (``"min"``) or high (``"max"``) values are better.
    """

    def __init__(self, folder: Path, metric: str, direction: Direction):
        super().__init__(metric, direction)
        self.checkpoints, self.folder = folder, folder / "best"

    def on_start(self, state: "TrainingState") -> None:
        """Drop what steps left that are about to be made again."""
        for place in checkpoint.list_checkpoints(self.folder):
            if checkpoint.checkpoint_step(place) > state.step:
                shutil.rmtree(place, ignore_errors=True)
        super().on_start(state)

    def on_better(self, state: "TrainingState") -> None:
        """Save the weights, then drop those that nothing refers to any more."""
        method = state.method
        weights = {name: method.final_module(name).state_dict() for name in method.modules}
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
            method.final_module(name).load_state_dict(state["weights"][name])
        return self.step, self.value


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


class JsonLog(Callback):
    """Appends a line of facts to ``log.jsonl`` every few steps, at the end of every epoch and after a validation.

    A resumed run first drops the lines past the step it resumes from, so the file reads like that of a run that was
    never stopped.
    """

    def __init__(self, folder: Path, every: int = 10):
        self.path, self.every = folder / "log.jsonl", every

    def on_start(self, state: "TrainingState") -> None:
        """Drop later lines; before the first step, write what validation of the untrained model found."""
        lines = [line for line in read_log(self.path) if line["step"] <= state.step] if state.step else []
        lines += [state.line] if state.line else []
        with explain_write_errors(self.path):
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        self._restart(state)

    def on_step(self, state: "TrainingState") -> None:
        """Write a line where one is due."""
        self.waited += sum(batch.waited for batch in state.batches)
        if not (state.is_due(self.every) or state.is_epoch_end or state.is_validated):
            return
        spent = time.perf_counter() - self.began - state.line.get("validation_seconds", 0.0)
        line = state.measure()
        line["seconds_per_step"] = spent / (state.step - self.since)
        line["share_in_model_and_loss"] = 1 - self.waited / spent
        with explain_write_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._restart(state)

    def _restart(self, state: "TrainingState") -> None:
        self.began, self.waited, self.since = time.perf_counter(), 0.0, state.step


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that a killed process left unfinished is dropped."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


class TensorBoard(Callback):
    """Mirrors the numbers of the lines that `JsonLog` wrote, where TensorBoard is installed."""

    def __init__(self, folder: Path):
        self.folder, self.board = folder / "tensorboard", None

    def on_start(self, state: "TrainingState") -> None:
        """Open the board."""
        with suppress(ImportError), explain_write_errors(self.folder):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.folder))
        self._mirror(state)

    def on_step(self, state: "TrainingState") -> None:
        """Mirror a line."""
        if "seconds_per_step" in state.line:
            self._mirror(state)

    def _mirror(self, state: "TrainingState") -> None:
        if self.board is None:
            return
        with explain_write_errors(self.folder):
            for name, value in state.line.items():
                if isinstance(value, int | float) and name != "step":
                    self.board.add_scalar(name, value, state.step)

    def on_end(self, state: "TrainingState") -> None:
        """Flush it."""
        if self.board is not None:
            with explain_write_errors(self.folder):
                self.board.close()


class DivergenceGuard(Callback):
    """Ends a run of which several steps in a row were refused, because a loss or a gradient was not finite."""

    def __init__(self, checkpoints: Path | None = None):
        self.checkpoints, self.skipped = checkpoints, 0

    def on_step(self, state: "TrainingState") -> None:
        """Count refused steps."""
        result, most = state.result, state.method.max_skipped_steps
        assert result is not None
        self.skipped = 0 if result.applied else self.skipped + 1
        if self.skipped >= most:
            ids = state.batch.ids[:8].tolist()
            there = "" if self.checkpoints is None else f"; {checkpoint.describe_latest(self.checkpoints)}"
            raise NumericError(
                f"training diverged: loss {result.loss} and gradient norm {result.gradient} at step {state.step}, "
                f"{most} steps in a row (samples {ids}...). Lower train.rate or set train.clip, under "
                f"another --name{there}"
            )

    def state_dict(self) -> dict[str, Any]:
        """How many steps in a row were refused."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.skipped = state["skipped"]


class CollapseGuard(Callback):
    """Ends a run whose embeddings came together, or say nothing of their labels: nothing more is learned.

    The loss of such a run looks calm. It is judged on the last ``patience`` looks after the warm-up, one every few
    steps, because before that many losses draw embeddings together and apart again.

    Args:
        spread: limit of 1 - mean cosine of a batch, as a share of what it was at the first step; 0 never.
        gap: limit of the gap between positive and negative similarity, see `similarity_gap`; 0 never.
        patience: how many looks must show it.
        every: steps between looks.
        warmup: share of the steps before the first look.
    """

    def __init__(
        self, spread: float = 0.01, gap: float = 0.02, patience: int = 5, *, every: int = 10, warmup: float = 0.2
    ):
        self.spread, self.gap, self.patience, self.every, self.warmup = spread, gap, patience, every, warmup
        self.first: float | None = None  # spread at the first step
        self.spreads: list[float] = []  # of the last looks
        self.gaps: list[float] = []

    def on_step(self, state: "TrainingState") -> None:
        """Look at the embeddings where that is due."""
        assert state.result is not None
        if self.first is None and state.result.applied:
            self.first = 1 - mean_cosine(state.result.embeddings)
        if state.is_due(self.every) and state.step > self.warmup * state.schedule.steps:
            line = state.measure()
            self.judge(state.step, line["mean_cosine"], line.get("gap"), state.method.loss)

    def judge(self, step: int, cosine: float, gap: float | None, loss: Any = None) -> None:
        """Take in one more look, and end the run where the last ones show a collapse.

        Args:
            step: steps done.
            cosine: mean cosine of a batch.
            gap: between its positive and negative similarities, where it has both.
            loss: of the run; what it can be told to do otherwise becomes the advice.
        """
        self.spreads = [*self.spreads, 1 - cosine][-self.patience :]
        self.gaps = [*self.gaps, *([] if gap is None else [gap])][-self.patience :]
        reason = self.find_collapse()
        if reason is not None:
            raise NumericError(
                f"the embeddings collapsed: at step {step} {reason}. {collapse_advice(loss)}, under another --name; "
                "train.collapse_spread = 0 and train.collapse_gap = 0 let such a run go on"
            )

    def find_collapse(self) -> str | None:
        """What shows a collapse, in words; None where nothing does.

        The spread of every look must lie below its limit; the gap must do so in the mean of the looks, by two of its
        standard errors, because it is small and noisy where a hard problem is only just being learned.
        """
        if self.spread and self.first is not None and len(self.spreads) >= self.patience:
            last = self.spreads
            if max(last) < RESOLUTION:
                return "all embeddings of a batch are the same vector"
            if max(last) < self.spread * self.first:
                share = f"{last[-1] / self.first:.2g} of the {self.first:.3g} that it was at the first step"
                return f"the spread of a batch (1 - mean cosine) is {last[-1]:.2g}, {share}"
        if self.gap and len(self.gaps) >= self.patience:
            some = torch.tensor(self.gaps, dtype=torch.float64)
            error = float(some.std() / len(some) ** 0.5) if len(some) > 1 else 0.0
            if float(some.mean()) + 2 * error < self.gap:
                distance = f"{100 * (1 - float(some.mean())):.1f} % of that of negative pairs"
                return f"positive pairs are no closer than negative ones: their mean distance is {distance}"
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to be stopped at the same step."""
        return {"first": self.first, "spreads": self.spreads, "gaps": self.gaps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.first, self.spreads, self.gaps = state["first"], list(state["spreads"]), list(state["gaps"])


def collapse_advice(loss: Any) -> str:
    """What to change after a collapse, by recipe keys that this loss has."""
    try:
        keys = constructor_arguments(type(loss))
    except ValueError:  # a plain function has no settings
        keys = {}
    given = {name: getattr(loss, name, None) for name in keys}
    found = ["Lower train.rate", "raise train.warmup"]
    if given.get("temperature") is not None:
        found.append("raise loss.temperature")
    if given.get("mining") == "hardest":
        found.append("set loss.mining to 'semihard'")
    if given.get("difficulty") is not None:
        found.append("weigh hard pairs less in loss.difficulty")
    if "num_classes" in keys and given.get("margin"):
        found.append("lower loss.margin")
    *most, last = found
    return f"{', '.join(most)} or {last}"


def mean_cosine(z: Tensor) -> float:
    """Mean cosine over the pairs of a batch, from the length of its mean vector: 1 when all point one way."""
    n, unit = len(z), _unit_vectors(z)
    return float((unit.sum(0).square().sum() - n) / (n * (n - 1))) if n > 1 else 0.0


def similarity_gap(z: Tensor, batch: Batch, *, by_id: bool = False) -> float | None:
    """How much closer positive pairs of a batch are than negative ones: 1 - (mean distance of the former / the latter).

    Distances are 1 - cosine, so 0 says that labels cannot be seen in the embeddings at all and 1 that positives
    coincide. Positives have one label, or one sample id (``by_id``: the views of a sample); of a table of pairs they
    have a target above the mean. None where a batch lacks one kind or is not finite.
    """
    unit = _unit_vectors(z)
    if batch.weight is None:
        found = _class_distances(unit, (batch.ids if by_id else batch.labels).cpu())
    else:
        found = _tuple_distances(unit.split(len(batch.weight)), None if batch.target is None else batch.target.cpu())
    if found is None or not all(math.isfinite(x) for x in found):
        return None
    positive, negative = found
    return 1 - positive / negative if negative > RESOLUTION else 0.0


def _class_distances(unit: Tensor, labels: Tensor) -> tuple[float, float] | None:
    """Mean distance of the pairs of one label, and of two, from the sums of each label's vectors."""
    _, at, counts = labels.unique(return_inverse=True, return_counts=True)
    n, same = len(unit), int((counts * (counts - 1)).sum())
    other = n * (n - 1) - same
    if not same or not other:
        return None
    sums = unit.new_zeros(len(counts), unit.shape[1]).index_add_(0, at, unit)
    near = float(sums.square().sum()) - n
    far = float(unit.sum(0).square().sum()) - n - near
    return 1 - near / same, 1 - far / other


def _tuple_distances(members: Sequence[Tensor], target: Tensor | None) -> tuple[float, float] | None:
    """Mean distance of positive and of negative pairs in rows of a table of triplets, or of pairs with targets."""
    distance = [1 - (members[0] * other).sum(1) for other in members[1:]]
    if target is None:
        return float(distance[0].mean()), float(distance[1].mean())
    positive = target > target.double().mean()
    if not bool(positive.any()) or bool(positive.all()):
        return None
    return float(distance[0][positive].mean()), float(distance[0][~positive].mean())


def _unit_vectors(z: Tensor) -> Tensor:
    """Vectors of length 1 on the processor, in float64: differences of nearly equal ones keep their digits."""
    return torch.nn.functional.normalize(z.detach().cpu().double())


class Progress(Callback):
    """A bar on a terminal, a plain line now and then elsewhere; what a difficulty did is told where there is one."""

    def __init__(self, every: int = 10):
        self.every, self.bar, self.task, self.last = every, None, None, {}

    def on_start(self, state: "TrainingState") -> None:
        """Show an empty bar."""
        self.last = {}
        if not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Bar(*columns, TextColumn("{task.description}"))
        self.bar.start()
        self.task = self.bar.add_task("", total=state.schedule.steps, completed=state.step)

    def on_step(self, state: "TrainingState") -> None:
        """Show where the run is."""
        line, step, steps = state.line, state.step, state.schedule.steps
        if self.bar is not None and self.task is not None:
            self.last |= line
            self.bar.update(self.task, completed=step, description=self._text(state, self.last))
        elif "seconds_per_step" in line and state.is_due(5 * self.every):
            left = (steps - step) * line["seconds_per_step"]
            waited = 1 - line["share_in_model_and_loss"]
            slow = f"  waited for data {waited:.0%}" if waited > WAITED else ""
            print(f"step {step}/{steps}  {self._text(state, line)}  {left:.0f} s left{slow}", flush=True)
        elif state.is_validated:
            print(f"step {step}/{steps}  {self._text(state, line)}", flush=True)

    def on_end(self, state: "TrainingState") -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _text(self, state: "TrainingState", line: dict[str, Any]) -> str:
        has_difficulty = getattr(state.method.loss, "difficulty", None) is not None
        found = [f"loss {line['loss']:.3f}", *(describe_difficulty(line) if has_difficulty else ())]
        if state.validation is not None and (state.is_validated or self.bar is not None):
            found.append(describe_validation(state.validation))
        return "  ".join(found)


def describe_validation(found: ValidationResult) -> str:
    """What a validation found, in words."""
    return f"validation at step {found.step}: {', '.join(f'{name} {x:.4g}' for name, x in found.values.items())}"


def describe_difficulty(line: dict[str, Any]) -> list[str]:
    """What a difficulty did to the pairs of a log line, in words: whom it weighed up or left out, and by how much."""
    found = []
    for side in ("positive", "negative"):
        if f"hard_{side}s" not in line:
            continue
        hard, kept, weight = line[f"hard_{side}s"], line[f"kept_{side}s"], line[f"{side}_weight"]
        if hard:
            found.append(f"hard {side}s {_whole_percent(hard)} (mean weight of all {side}s {weight:.2f})")
        elif kept < 1:  # mining: weights are 0 or 1
            found.append(f"{side}s kept {_whole_percent(kept)}")
        elif weight < 1:
            found.append(f"{side}s weighted down (mean weight {weight:.2f})")
        else:
            found.append(f"no hard {side}s")
    return [", ".join(found)] if found else []


def _whole_percent(value: float) -> str:
    """A share in whole per cent, unless that would hide that there is one."""
    return "<1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"


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
        without one.
        """
        state.stop_requested = state.stop_requested or self.asked.is_set()

    def on_end(self, state: "TrainingState") -> None:
        """Give the signals back."""
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        self.earlier = {}


class Checkpoint(Callback):
    """Saves the method, the random state and what callbacks remember: every few steps, at the end and before a stop."""

    def __init__(self, folder: Path, every: int = 100):
        self.folder, self.every = folder, every

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
