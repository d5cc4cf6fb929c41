"""Whole optimization steps as CUDA graphs: recorded once, then launched in one go.

A step of a small network is some hundred kernels that run for less time than the host needs to launch them. A graph
launches all of them at once: forward and backward pass, the loss, the refusal of what is not finite, the optimizer and
the moving average. What changes from step to step is read from memory: the batch, and the learning rate.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mettle.data.loader import Batch
from mettle.losses import PairwiseLoss
from mettle.pairs import iterate_parts
from mettle.train.device_reads import StreamPoint
from mettle.train.methods.base import Method, StepResult
from mettle.train.methods.supervised import Supervised
from mettle.train.optim import StepNumbers

WARM = 3  # steps of a kind that are made as ever: optimizer states begin, kernels are compiled and chosen
MOST = 4  # graphs, one for each shape of a batch and stage of a run; each keeps the memory of a step
RESUMES = (
    "train.cuda_graph: like steps are recorded once and replayed. Without it a resumed run is the run that was not "
    "stopped, bit for bit; with it the two are equal up to rounding"
)


@contextmanager
def record_steps(method: Method, on_note: Callable[[str], None] = lambda note: None) -> Iterator[None]:
    """Inside, steps of the method are recorded and replayed where they can be; where not, one line says why."""
    method.recorder = StepRecorder(method, on_note)
    try:
        yield
    finally:
        method.recorder = None


def explain_unrecordable(method: Method) -> str | None:
    """Why steps of a method cannot be recorded; None where they can."""
    optimizer = method.optimizer
    if optimizer.device != "cuda":
        return f"there is no CUDA graph on {optimizer.device}"
    if not optimizer.decides_on_device:
        return "the optimizer is not a fused one (Adam, AdamW or SGD)"
    if optimizer.scaler.is_enabled():
        return "float16 scales losses on the host: use bfloat16 or float32"
    if method.settings.cached:
        return "gradient caching replays random numbers, whose state is kept on the host"
    if not isinstance(method, Supervised):
        return f"{type(method).__name__} decides things on the host in every step"
    if (
        not method.statistics_stay_valid
        or method.distill is not None
        or getattr(method.model, "neck", None) is not None
    ):
        return "the loss, a neck, a queue or a distillation has a state of its own"
    if follows_progress(method.loss):
        return "the loss may follow the progress of training"
    return None


def follows_progress(loss: Any) -> bool:
    """Whether a loss does other things as training goes on, as far as can be told."""
    if isinstance(loss, PairwiseLoss):
        return any(hasattr(part, "at") for part in iterate_parts(getattr(loss, "difficulty", None)))
    return getattr(loss, "takes_progress", False)


class StepRecorder:
    """Replays the steps of a method, each kind of step from a graph of its own."""

    def __init__(self, method: Method, on_note: Callable[[str], None]):
        self.method, self.on_note = method, on_note
        self.graphs: dict[Any, _RecordedStep] = {}
        self.made: Counter[Any] = Counter()  # steps of a kind that has no graph
        self._give_up(explain_unrecordable(method))

    def _give_up(self, reason: str | None) -> None:
        self.is_off = reason is not None
        if reason is not None:
            self.on_note(f"train.cuda_graph: steps are launched one kernel after the other, because {reason}")

    def step(self, batches: Sequence[Batch], lrs: Mapping[str, float], fraction_done: float) -> StepResult | None:
        """One optimization step; None where it has to be made as ever."""
        if self.is_off or len(batches) != 1 or self.method.must_read(fraction_done):
            return None
        if batches[0].rank_rows is not None:
            self._give_up("several ranks share a batch")
            return None
        batch, stage = batches[0], self.method.find_stage(fraction_done)
        if batch.target is not None or batch.weight is not None:
            return None
        key = (stage, batch.inputs.shape, batch.inputs.dtype)
        if key not in self.graphs:
            self.made[key] += 1
            if self.made[key] <= WARM or len(self.graphs) == MOST:
                return None
            try:
                self.graphs[key] = _RecordedStep(self.method, batch, lrs, fraction_done)
            except torch.OutOfMemoryError:
                raise
            except Exception as problem:  # what cannot be captured is told in many ways
                self._give_up(" ".join(str(problem).split())[:200])
                return None
        return self.graphs[key].replay(batch, lrs)


class _RecordedStep:
    """One step in memory of its own."""

    def __init__(self, method: Any, batch: Batch, lrs: Mapping[str, float], fraction_done: float):
        self.method = method
        self.batch = replace(batch, inputs=batch.inputs.clone(), labels=batch.labels.clone(), ids=batch.ids.clone())
        self.lrs = {name: torch.zeros((), device=batch.inputs.device) for name in lrs}
        self.graph = torch.cuda.CUDAGraph()
        # Of this thread alone: the loader's, which prepares the next batches, goes on while this step is recorded.
        capture = torch.cuda.graph(self.graph, capture_error_mode="thread_local")
        with capturable_optimizers(method.optimizer.optimizers), capture:
            self.result: StepResult = method.make_step([self.batch], self.lrs, fraction_done)

    def replay(self, batch: Batch, lrs: Mapping[str, float]) -> StepResult:
        """The step of another batch of the same shape."""
        for mine, given in ((self.batch.inputs, batch.inputs), (self.batch.labels, batch.labels)):
            mine.copy_(given, non_blocking=True)
        self.batch.ids.copy_(batch.ids, non_blocking=True)
        for name, lr in lrs.items():
            self.lrs[name].fill_(lr)
        self.graph.replay()
        self.method.optimizer.set_learning_rates(lrs)  # as a checkpoint has them
        kept = self.result.numbers
        seen, embeddings = kept.seen.clone(), self.result.embeddings.clone()
        losses = [dict(zip(kept.losses[0], seen[len(kept.networks) :].unbind(), strict=True))]
        numbers = StepNumbers(kept.networks, seen, losses, kept.refused, StreamPoint(seen.device))
        return StepResult(numbers, embeddings, partial(self.method.statistics, embeddings, batch, {}), stays_valid=True)


@contextmanager
def capturable_optimizers(optimizers: Mapping[str, torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, optimizers take learning rates that are tensors; afterwards their groups are what they were."""
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    before = [(group["lr"], group.get("capturable")) for group in groups]
    for group in groups:
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, (lr, capturable) in zip(groups, before, strict=True):
            group["lr"] = lr
            if capturable is not None:
                group["capturable"] = capturable
