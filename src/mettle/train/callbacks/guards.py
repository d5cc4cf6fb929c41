"""Ending a run that learns nothing more: divergence, and the collapse of embeddings."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mettle.data.loader import Batch
from mettle.errors import NumericError
from mettle.train import checkpoint
from mettle.train.callbacks.base import Callback
from mettle.train.factory import constructor_arguments
from mettle.train.optim import StepNumbers

if TYPE_CHECKING:
    from mettle.train.trainer import LogLine, TrainingState

RESOLUTION = 1e-6  # mean cosine distances below are rounding of float32 embeddings that are all the same


@dataclass(frozen=True, eq=False)
class _WaitingStep:
    """What `DivergenceGuard` says of a step, should it have been refused."""

    step: int
    numbers: StepNumbers
    ids: Tensor
    most: int

    def describe(self) -> str:
        """The step, the samples and what was not finite."""
        network = self.numbers.told_network
        loss, gradient = self.numbers.mean_losses[network], self.numbers.norms[network]
        which = "" if network == "model" else f" of network {network!r}"
        return (
            f"training diverged: loss {loss} and gradient norm {gradient}{which} at step {self.step}, "
            f"{self.most} steps in a row (samples {self.ids.tolist()}...)"
        )


class DivergenceGuard(Callback):
    """Ends a run of which several steps in a row were refused, because a loss or a gradient was not finite.

    While the host is ahead of a GPU, the run ends a few steps after the one that the error is about.
    """

    def __init__(self, checkpoints: Path | None = None, every: int = 10):
        """``every`` so many steps a GPU is asked what became of them; elsewhere each step is looked at when done."""
        self.checkpoints, self.every, self.skipped = checkpoints, every, 0
        self.waiting: list[_WaitingStep] = []  # done, and not looked at yet

    def on_step(self, state: "TrainingState") -> None:
        """Count refused steps."""
        result = state.result
        assert result is not None
        self.waiting.append(
            _WaitingStep(state.step, result.numbers, state.batch.ids[:8], state.method.max_skipped_steps)
        )
        if result.is_read or state.is_due(self.every) or state.stop_requested:
            self.look(but_last=state.can_read_later)

    def look(self, but_last: bool = False) -> None:
        """Judge the steps that wait for it, each as if it had been looked at when it was done.

        Args:
            but_last: leave out the last one, which a GPU may be busy with.

        Raises:
            NumericError: so many in a row were refused that the run has diverged.
        """
        count = len(self.waiting) - but_last
        waiting, self.waiting = self.waiting[:count], self.waiting[count:]
        for one in waiting:
            self.skipped = 0 if one.numbers.applied else self.skipped + 1
            if self.skipped >= one.most:
                there = "" if self.checkpoints is None else f"; {checkpoint.describe_latest(self.checkpoints)}"
                raise NumericError(f"{one.describe()}. Lower train.rate or set train.clip, under another --name{there}")

    def state_dict(self) -> dict[str, Any]:
        """How many steps in a row were refused."""
        self.look()
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
        loss_keys: what the loss can be told in a recipe, for the advice; by default the arguments of its class.
    """

    def __init__(
        self,
        spread: float = 0.01,
        gap: float = 0.02,
        patience: int = 5,
        *,
        every: int = 10,
        warmup: float = 0.2,
        loss_keys: Collection[str] | None = None,
    ):
        self.spread, self.gap, self.patience, self.every, self.warmup = spread, gap, patience, every, warmup
        self.loss_keys = loss_keys
        self.first: float | None = None  # spread at the first step
        self.waiting: list[tuple[LogLine, Any]] = []  # a line that is due, and the loss of the run
        self.spreads: list[float] = []  # of the last looks
        self.gaps: list[float] = []

    def on_step(self, state: "TrainingState") -> None:
        """Look at the embeddings where that is due; at those of a GPU that is behind, while the next step runs."""
        assert state.result is not None
        self.look()
        if self.first is None and state.result.applied:
            self.first = 1 - mean_cosine(state.result.embeddings)
        if state.is_due(self.every) and state.step > self.warmup * state.schedule.steps:
            self.waiting = [(state.step_line, state.method.loss)]
            if not state.can_read_later:
                self.look()

    def look(self) -> None:
        """Judge the line that waits for it.

        Raises:
            NumericError: the embeddings have collapsed.
        """
        waiting, self.waiting = self.waiting, []
        for line, loss in waiting:
            line.measure()
            self.judge(line["step"], line["mean_cosine"], line.get("gap"), loss)

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
                f"the embeddings collapsed: at step {step} {reason}. {collapse_advice(loss, self.loss_keys)}, under "
                "another --name; train.collapse_spread = 0 and train.collapse_gap = 0 let such a run go on"
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
        self.look()
        return {"first": self.first, "spreads": self.spreads, "gaps": self.gaps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.first, self.spreads, self.gaps = state["first"], list(state["spreads"]), list(state["gaps"])


def collapse_advice(loss: Any, keys: Collection[str] | None = None) -> str:
    """What to change after a collapse, by recipe keys that this loss has: ``keys``, or the arguments of its class."""
    if keys is None:
        try:
            keys = constructor_arguments(type(loss))
        except ValueError:  # a plain function has no settings
            keys = ()
    found = ["Lower train.rate", "raise train.warmup"]
    if "temperature" in keys and getattr(loss, "temperature", None) is not None:
        found.append("raise loss.temperature")
    if "mining" in keys and getattr(loss, "mining", None) == "hardest":
        found.append("set loss.mining to 'semihard'")
    if getattr(loss, "difficulty", None) is not None:
        # `DASupCon` makes its difficulty from keys of its own.
        found.append(f"weigh hard pairs less{' in loss.difficulty' if 'difficulty' in keys else ''}")
    if "num_classes" in keys and getattr(loss, "margin", None):
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
    # Rows of one label side by side: index_add_ took ten times as long, and more on more cores.
    begins = np.cumsum(counts.numpy()) - counts.numpy()
    sums = np.add.reduceat(unit[at.argsort()].numpy(), begins)
    near = float(np.square(sums).sum()) - n
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
