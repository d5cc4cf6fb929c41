"""`log.jsonl`: one line of facts every few steps, always; TensorBoard beside it where that is installed."""

import json
from pathlib import Path
from typing import Any

from mettle.durable import write_text


class Log:
    """Appends lines to ``log.jsonl`` and mirrors their numbers to TensorBoard.

    A resumed run first drops the lines past the step it resumes from, so the file reads like that of a run that was
    never stopped.
    """

    def __init__(self, folder: Path, start: int = 0, tensorboard: bool = True):
        self.path = folder / "log.jsonl"
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in read(self.path) if line["step"] <= start))
        self.board = _board(folder) if tensorboard else None

    def __call__(self, line: dict[str, Any]) -> None:
        """Write one line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.board is not None:
            for name, value in line.items():
                if isinstance(value, int | float) and name != "step":
                    self.board.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Flush TensorBoard."""
        if self.board is not None:
            self.board.close()


def read(path: Path) -> list[dict[str, Any]]:
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


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))
