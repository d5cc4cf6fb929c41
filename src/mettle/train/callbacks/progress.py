"""What a run says on the terminal while it trains."""

import sys
from typing import TYPE_CHECKING, Any

from mettle.train.callbacks.base import Callback
from mettle.train.callbacks.validation import describe_validation

if TYPE_CHECKING:
    from mettle.train.trainer import TrainingState

WAITED = 0.1  # share of the time that batches may be waited for before it is worth a word


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
        step, steps = state.step, state.schedule.steps
        if self.bar is not None and self.task is not None:
            for line in (state.line, *state.logged):
                self.last |= line
            self.bar.update(self.task, completed=step, description=self._text(state, self.last))
            return
        for line in state.logged:
            if line["step"] % (5 * self.every) == 0 or line["step"] == steps or state.is_last:
                left = (steps - line["step"]) * line["seconds_per_step"]
                waited = 1 - line["share_in_model_and_loss"]
                slow = f"  waited for data {waited:.0%}" if waited > WAITED else ""
                print(f"step {line['step']}/{steps}  {self._text(state, line)}  {left:.0f} s left{slow}", flush=True)
            elif state.is_validated:
                print(f"step {line['step']}/{steps}  {self._text(state, line)}", flush=True)

    def on_end(self, state: "TrainingState") -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _text(self, state: "TrainingState", line: dict[str, Any]) -> str:
        has_difficulty = getattr(state.method.loss, "difficulty", None) is not None
        loss = [f"loss {line['loss']:.3f}"] if "loss" in line else []  # not yet read from a GPU
        found = [*loss, *(describe_difficulty(line) if has_difficulty else ())]
        if state.validation is not None and (state.is_validated or self.bar is not None):
            found.append(describe_validation(state.validation))
        return "  ".join(found)


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
