"""The training loop: one page, meant to be read and copied.

Every batch is a pure function of (seed, step) and the learning rate a pure function of the step, so a run that is
stopped after any step and resumed is bit for bit the run that was not.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mettle.data.loader import Batch, Loader
from mettle.errors import NumericError
from mettle.train import checkpoint
from mettle.train.factory import arguments
from mettle.train.methods.base import Method, StepResult

RESOLUTION = 1e-6  # mean cosine distances below are rounding of float32 embeddings that are all the same


@dataclass(frozen=True)
class Pace:
    """How long, how fast, how often."""

    steps: int
    rate: float
    warmup: float = 0.2
    log_every: int = 10
    checkpoint_every: int = 100

    def at(self, step: int) -> float:
        """Learning rate of a step: a straight rise, then half a cosine down to a thousandth."""
        rise = self.warmup * self.steps
        if step < rise:
            return self.rate * (step + 1) / (rise + 1)
        done = (step - rise) / max(self.steps - rise, 1)
        return self.rate * (0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * done)))


def run(
    method: Method,
    loader: Loader,
    pace: Pace,
    *,
    folder: Path,
    start: int = 0,
    guard: "Guard | None" = None,
    log: Callable[[dict[str, Any]], None] = lambda line: None,
    progress: Callable[[int, dict[str, Any]], None] = lambda step, line: None,
) -> bool:
    """Train from step ``start``; returns whether the run reached its end (and was not asked to stop).

    ``log`` gets a line of facts every ``pace.log_every`` steps and at the end of every epoch, ``progress`` every step.
    ``guard`` is that of the checkpoint, where a run goes on from one.
    """
    guard = guard or Guard()
    began, waited, since = time.perf_counter(), 0.0, start
    with stop_requests() as stopping:
        for batch, last in zip(loader.batches(start, pace.steps), epoch_ends(loader, start), strict=False):
            rate = pace.at(batch.step)
            share = batch.step / pace.steps
            result = method.step(batch, rate, share)
            guard.step(result, batch, method.patience, folder / "checkpoints")
            waited += batch.waited
            done = batch.step + 1
            line = {"step": done, "epoch": batch.epoch, "loss": result.loss, "rate": rate}
            due = done % pace.log_every == 0 or done == pace.steps
            if due or last:
                spent = time.perf_counter() - began
                facts = method.facts(result.embeddings, batch, share) | dict(result.facts())
                profile = {
                    "seconds_per_step": spent / (done - since),
                    "share_in_model_and_loss": 1 - waited / spent,
                }
                alike = mean_cosine(result.embeddings)
                gap = similarity_gap(result.embeddings, batch, by_id=loader.views > 1)
                shape = {"mean_cosine": alike} | ({} if gap is None else {"gap": gap})
                line |= {"gradient": result.gradient} | shape | facts | profile
                log(line)
                # Before the end of the warm-up many losses draw embeddings together and apart again. Short epochs do
                # not make a collapse of fewer steps.
                if due and done > pace.warmup * pace.steps:
                    guard.look(done, alike, gap, getattr(method, "loss", None))
                began, waited, since = time.perf_counter(), 0.0, done
            progress(done, line)
            asked = stopping()  # once: a request that comes between two looks would end the run without a checkpoint
            if done % pace.checkpoint_every == 0 or done == pace.steps or asked:
                state = {"method": method.state(), "random": checkpoint.random_state(), "guard": guard.state()}
                checkpoint.save(folder / "checkpoints", done, state)
            if asked and done < pace.steps:
                return False
    return True


def epoch_ends(loader: Loader, start: int) -> Iterator[bool]:
    """For every step from ``start`` on, whether it is the last of its epoch."""
    ahead = pairwise(loader.epochs())
    return (epoch != following for (_, epoch, _), (_, following, _) in islice(ahead, start, None))


@dataclass(frozen=True)
class Collapse:
    """When the embeddings of a run count as collapsed, judged on its last ``patience`` log lines after the warm-up."""

    spread: float = 0.01  # of what it was at the first step: 1 - mean cosine of a batch; 0 never
    gap: float = 0.02  # between positive and negative similarity, see `similarity_gap`; 0 never
    patience: int = 5

    def reason(self, first: float | None, spreads: Sequence[float], gaps: Sequence[float]) -> str | None:
        """What shows a collapse, in words; None where nothing does.

        The spread of every line must lie below its limit; the gap must do so in the mean of the lines, by two of its
        standard errors, because it is small and noisy where a hard problem is only just being learned.
        """
        if self.spread and first is not None and len(spreads) >= self.patience:
            last = spreads[-self.patience :]
            if max(last) < RESOLUTION:
                return "all embeddings of a batch are the same vector"
            if max(last) < self.spread * first:
                share = f"{last[-1] / first:.2g} of the {first:.3g} that it was at the first step"
                return f"the spread of a batch (1 - mean cosine) is {last[-1]:.2g}, {share}"
        if self.gap and len(gaps) >= self.patience:
            some = torch.tensor(gaps[-self.patience :], dtype=torch.float64)
            error = float(some.std() / len(some) ** 0.5) if len(some) > 1 else 0.0
            if float(some.mean()) + 2 * error < self.gap:
                distance = f"{100 * (1 - float(some.mean())):.1f} % of that of negative pairs"
                return f"positive pairs are no closer than negative ones: their mean distance is {distance}"
        return None


class Guard:
    """Stops a run that has nothing more to give, and says why in plain words."""

    def __init__(self, collapse: Collapse | None = None) -> None:
        self.collapse = collapse or Collapse()
        self.refused = 0
        self.first: float | None = None  # spread at the first step
        self.spreads: list[float] = []  # of the last lines
        self.gaps: list[float] = []

    def step(self, result: StepResult, batch: Batch, patience: int, checkpoints: Path) -> None:
        """A step whose loss or gradient is not finite was not applied; several in a row end the run."""
        if self.first is None and result.applied:
            self.first = 1 - mean_cosine(result.embeddings)
        self.refused = 0 if result.applied else self.refused + 1
        if self.refused >= patience:
            ids = batch.ids[:8].tolist()
            raise NumericError(
                f"training diverged: loss {result.loss} and gradient norm {result.gradient} at step {batch.step + 1}, "
                f"{patience} steps in a row (samples {ids}...). Lower train.rate or set train.clip, under "
                f"another --name; {checkpoint.newest(checkpoints)}"
            )

    def look(self, step: int, alike: float, gap: float | None, loss: Any = None) -> None:
        """Embeddings that came together, or that say nothing of their labels: the loss looks calm, nothing is learned.

        Args:
            step: steps done.
            alike: mean cosine of a batch.
            gap: between its positive and negative similarities, where it has both.
            loss: of the run; what it can be told to do otherwise becomes the advice.
        """
        most = self.collapse.patience
        self.spreads = [*self.spreads, 1 - alike][-most:]
        self.gaps = [*self.gaps, *([] if gap is None else [gap])][-most:]
        reason = self.collapse.reason(self.first, self.spreads, self.gaps)
        if reason is not None:
            raise NumericError(
                f"the embeddings collapsed: at step {step} {reason}. {collapse_advice(loss)}, under another --name; "
                "train.collapse_spread = 0 and train.collapse_gap = 0 let such a run go on"
            )

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to be stopped at the same step."""
        return {"refused": self.refused, "first": self.first, "spreads": self.spreads, "gaps": self.gaps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.refused, self.first = state["refused"], state["first"]
        self.spreads, self.gaps = list(state["spreads"]), list(state["gaps"])


def collapse_advice(loss: Any) -> str:
    """What to change after a collapse, by recipe keys that this loss has."""
    try:
        keys = arguments(type(loss))
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
    n, unit = len(z), _directions(z)
    return float((unit.sum(0).square().sum() - n) / (n * (n - 1))) if n > 1 else 0.0


def similarity_gap(z: Tensor, batch: Batch, *, by_id: bool = False) -> float | None:
    """How much closer positive pairs of a batch are than negative ones: 1 - (mean distance of the former / the latter).

    Distances are 1 - cosine, so 0 says that labels cannot be seen in the embeddings at all and 1 that positives
    coincide. Positives have one label, or one sample id (``by_id``: the views of a sample); of a table of pairs they
    have a target above the mean. None where a batch lacks one kind or is not finite.
    """
    unit = _directions(z)
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


def _directions(z: Tensor) -> Tensor:
    """Vectors of length 1 on the processor, in float64: differences of nearly equal ones keep their digits."""
    return torch.nn.functional.normalize(z.detach().cpu().double())


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGTERM or Ctrl-C into "finish this step and save"; the second one ends at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handle(number, frame) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked.is_set
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
