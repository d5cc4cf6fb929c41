"""The log of a run: lines of JSON, mirrored to TensorBoard."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mettle.atomic_files import write_text
from mettle.errors import RunError
from mettle.train.callbacks.base import Callback
from mettle.train.run_folder import explain_write_errors

if TYPE_CHECKING:
    from mettle.train.trainer import LogLine, TrainingState


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
        self.waiting: list[tuple[LogLine, float]] = []
        self.began, self.waited, self.since = time.perf_counter(), 0.0, state.step

    def on_step(self, state: "TrainingState") -> None:
        """Write a line where one is due; of a GPU that is behind, while the next step runs."""
        written = [self._write()] if self.waiting else []
        self.waited += sum(batch.waited for batch in state.batches)
        if state.is_due(self.every) or state.is_epoch_end or state.is_validated:
            self.waiting = [(state.step_line, self.waited)]
            self.waited = 0.0
            if not state.can_read_later:
                written.append(self._write())
        state.logged = written

    def on_end(self, state: "TrainingState") -> None:
        """Write the line that waits."""
        if self.waiting:
            self._write()

    def state_dict(self) -> dict[str, Any]:
        """Nothing; a line that waits is written, for whoever resumes from here does not write it."""
        if self.waiting:
            self._write()
        return {}

    def _write(self) -> "LogLine":
        [(line, waited)], self.waiting = self.waiting, []
        line["loss"]  # waits for a GPU that is behind, so that its time is counted
        spent = time.perf_counter() - self.began - line.get("validation_seconds", 0.0)
        line.measure()
        line["seconds_per_step"] = spent / (line["step"] - self.since)
        line["share_in_model_and_loss"] = 1 - waited / spent
        with explain_write_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.began, self.since = time.perf_counter(), line["step"]
        return line


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last line that a killed process left unfinished is dropped."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise RunError(f"{path} cannot be read: {' '.join(str(problem).split())[:200]}") from None
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
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
        if state.line:
            self._mirror(state.line)

    def on_step(self, state: "TrainingState") -> None:
        """Mirror what was written."""
        for line in state.logged:
            self._mirror(line)

    def _mirror(self, line: dict[str, Any]) -> None:
        if self.board is None:
            return
        with explain_write_errors(self.folder):
            for name, value in line.items():
                if isinstance(value, int | float) and name != "step":
                    self.board.add_scalar(name, value, line["step"])

    def on_end(self, state: "TrainingState") -> None:
        """Flush it."""
        if self.board is not None:
            with explain_write_errors(self.folder):
                self.board.close()
