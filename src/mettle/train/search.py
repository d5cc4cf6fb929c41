"""The record of a search over values of recipe keys: ``trials.jsonl``, one line for each trial, is the truth."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mettle.errors import RunError
from mettle.train.callbacks import Direction
from mettle.train.recipe import Range
from mettle.train.run_folder import explain_write_errors

TRIALS = "trials.jsonl"
EDGE = 0.05  # share of a range at either end; a best value in it says that the range is too narrow


@dataclass(frozen=True)
class FoldResult:
    """What was measured while training on one fold.

    Attributes:
        metric: of the weights that the run keeps; None where it did not get there.
        step: that they are of.
        steps: (step, value) of every validation, None where the value was not finite; step 0 is the untrained network.
    """

    metric: float | None
    step: int | None
    steps: tuple[tuple[int, float | None], ...] = ()


@dataclass(frozen=True)
class Trial:
    """One trial of a search.

    Attributes:
        number: counted from 1.
        state: a pruned trial was stopped early because others were better at that point; a failed one raised an error.
        values: of the keys that the search decides.
        metric: mean over the folds; None unless finished.
        folds: one result, or one for each fold.
        seconds: that it took in the process that ended it.
        seed: of its training, the same for all trials.
        data: fingerprint of the samples.
        reason: why it failed.
    """

    number: int
    state: Literal["finished", "pruned", "failed"]
    values: Mapping[str, Any]
    metric: float | None = None
    folds: tuple[FoldResult, ...] = ()
    seconds: float = 0.0
    seed: int = 0
    data: str = ""
    reason: str = ""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Trial":
        """Read a line of the record."""
        folds = [
            FoldResult(one["metric"], one["step"], tuple((step, value) for step, value in one["steps"]))
            for one in content["folds"]
        ]
        return cls(**{**content, "folds": tuple(folds)})


@contextmanager
def open_record(folder: Path) -> Iterator[BinaryIO]:
    """The record, to append to, locked for this process; a line that a killed process left unfinished is cut off.

    Raises:
        RunError: another process is searching there.
    """
    path = folder / TRIALS
    with explain_write_errors(path), path.open("a+b") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another process is searching in {folder}: wait until it ends, or choose another --name"
            ) from None
        except (ImportError, OSError):  # not on every system, not on every disk
            pass
        file.seek(0)
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
        yield file


def append_trial(file: BinaryIO, trial: Trial) -> None:
    """Write a line that is on the disk when this returns."""
    file.write(json.dumps(asdict(trial), allow_nan=False).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def read_trials(folder: Path) -> list[Trial]:
    """The finished, pruned and failed trials of a search, in their order."""
    path = folder / TRIALS
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as problem:
        raise RunError(f"{path} cannot be read: {' '.join(str(problem).split())[:200]}") from None
    found = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            trial = Trial.from_json(json.loads(line))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise RunError(f"{path}:{number} is no line of a search: the file is damaged") from None
        if trial.number != number:
            raise RunError(f"{path}:{number} is of trial {trial.number}, not {number}: the file is damaged")
        found.append(trial)
    return found


def best_trial(trials: Sequence[Trial], direction: Direction) -> Trial | None:
    """The finished trial with the best value, of equal ones the earliest; None where none is finished."""
    sign = 1 if direction == "min" else -1
    finished = [trial for trial in trials if trial.metric is not None and math.isfinite(trial.metric)]
    return min(finished, key=lambda trial: (sign * (trial.metric or 0.0), trial.number), default=None)


def describe_edges(ranges: Mapping[str, Range], values: Mapping[str, Any]) -> list[str]:
    """A line for each value that lies at an end of its range: a better one may lie beyond."""
    lines = []
    for key, value in values.items():
        at = ranges[key].position(value)
        if at is None or EDGE < at < 1 - EDGE:
            continue
        where = "lower" if at <= EDGE else "upper"
        if ranges[key].choices is None:
            low, high = ranges[key].low, ranges[key].high
            place = f"within {100 * EDGE:g} % of the {where} end of its range, {low:g} to {high:g}"
        else:
            place = f"the {'lowest' if where == 'lower' else 'highest'} of its choices"
        lines.append(f"the best {key}, {value:.4g}, is {place}: a better one may lie beyond, so widen it")
    return lines
