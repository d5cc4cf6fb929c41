"""The training loop: one page, meant to be read and copied.

Every batch is a pure function of (seed, step) and the learning rate a pure function of the step, so a run that is
stopped after any step and resumed is bit for bit the run that was not.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
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
from mettle.train.method import Method, StepResult

COLLAPSED = 0.98  # mean cosine of a batch: all embeddings point one way
FLAT = 3  # log lines in a row that may show a collapse before the run stops


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
    log: Callable[[dict[str, Any]], None] = lambda line: None,
    progress: Callable[[int, dict[str, Any]], None] = lambda step, line: None,
) -> bool:
    """Train from step ``start``; returns whether the run reached its end (and was not asked to stop).

    ``log`` gets a line of facts every ``pace.log_every`` steps and at the end of every epoch, ``progress`` every step.
    """
    guard, began, waited, since = Guard(method.patience, folder / "checkpoints"), time.perf_counter(), 0.0, start
    with stop_requests() as stopping:
        for batch, last in zip(loader.batches(start, pace.steps), epoch_ends(loader, start), strict=False):
            rate = pace.at(batch.step)
            share = batch.step / pace.steps
            result = method.step(batch, rate, share)
            guard.step(result, batch)
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
                line |= {"gradient": result.gradient, "mean_cosine": alike} | facts | profile
                log(line)
                if due:  # short epochs do not make a collapse of fewer steps
                    guard.spread(alike, done)
                began, waited, since = time.perf_counter(), 0.0, done
            progress(done, line)
            asked = stopping()  # once: a request that comes between two looks would end the run without a checkpoint
            if done % pace.checkpoint_every == 0 or done == pace.steps or asked:
                state = {"method": method.state(), "random": checkpoint.random_state()}
                checkpoint.save(folder / "checkpoints", done, state)
            if asked and done < pace.steps:
                return False
    return True


def epoch_ends(loader: Loader, start: int) -> Iterator[bool]:
    """For every step from ``start`` on, whether it is the last of its epoch."""
    ahead = pairwise(loader.epochs())
    return (epoch != following for (_, epoch, _), (_, following, _) in islice(ahead, start, None))


class Guard:
    """Stops a run that has nothing more to give, and says why in plain words."""

    def __init__(self, patience: int, checkpoints: Path) -> None:
        self.patience, self.checkpoints, self.refused, self.flat = patience, checkpoints, 0, 0

    def step(self, result: StepResult, batch: Batch) -> None:
        """A step whose loss or gradient is not finite was not applied; several in a row end the run."""
        self.refused = 0 if result.applied else self.refused + 1
        if self.refused >= self.patience:
            ids = batch.ids[:8].tolist()
            raise NumericError(
                f"training diverged: loss {result.loss} and gradient norm {result.gradient} at step {batch.step + 1}, "
                f"{self.patience} steps in a row (samples {ids}...). Lower train.rate or set train.clip, under "
                f"another --name; {checkpoint.newest(self.checkpoints)}"
            )

    def spread(self, alike: float, step: int) -> None:
        """All embeddings alike is a collapse: the loss looks calm and nothing is learned."""
        self.flat = self.flat + 1 if alike > COLLAPSED else 0
        if self.flat >= FLAT:
            raise NumericError(
                f"the embeddings collapsed: at step {step} the samples of a batch have a mean cosine of {alike:.3f}. "
                "Lower train.rate, raise loss.temperature, or weigh hard pairs less"
            )


def mean_cosine(z: Tensor) -> float:
    """Mean cosine over the pairs of a batch, from the length of its mean vector: 1 when all point one way."""
    n, unit = len(z), torch.nn.functional.normalize(z.detach().float())
    return float((unit.sum(0).square().sum() - n) / (n * (n - 1))) if n > 1 else 0.0


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
