"""The launches of a small batch, remembered with all their arguments.

A training run on a few thousand rows is bound by the host: some two dozen objects, fourteen allocations and ninety
pointers a step, for kernels of a tenth of a millisecond. What these launches need is the same in every step but for the
addresses of its tensors. So a pass is recorded once, every tensor by its number in a table; to replay it, one
allocation holds all that the pass writes for itself, and the kernels get addresses in place of tensors.

Only passes that do nothing but launch kernels, on memory that they fill themselves, can be recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mettle.pairs.kernels.launch import Launch, LaunchCache

ALIGNMENT = 256  # bytes: no less than what torch gives to tensors of their own


class Buffer(NamedTuple):
    """A tensor inside the memory of a pass."""

    offset: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype

    def view(self, memory: Tensor) -> Tensor:
        """The tensor itself."""
        size = self.shape.numel() * self.dtype.itemsize
        return memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class RecordedLaunch(NamedTuple):
    """A launch whose tensors are entries of a table."""

    start: Callable[[tuple, tuple], None]
    select: Callable[[list], tuple]
    floats: tuple[float, ...]


class LaunchRecorder(LaunchCache):
    """A cache, in place of another one, that also writes down what is launched."""

    def __init__(self, cache: LaunchCache) -> None:
        super().__init__()
        self.known, self.decisions = cache.known, cache.decisions
        self.launches: list[tuple[str, tuple, tuple]] = []

    def launch(
        self,
        name: str,
        kernel: Any,
        tensors: tuple,
        plan: Callable[[], Launch],
        floats: tuple[float | Tensor, ...] = (),
    ) -> None:
        """As the other one does."""
        super().launch(name, kernel, tensors, plan, floats)
        self.launches.append((name, tensors, floats))


class RecordedPass:
    """The launches of a pass, and the memory that they need.

    Its table holds the entries of an earlier pass, then tensors that are given in every step, then its own buffers.
    """

    def __init__(self, recorder: LaunchRecorder, earlier: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        self.tensors = [*earlier, *given]  # of the step that is recorded, alive: a freed address may come again
        numbers = {x.data_ptr(): i for i, x in enumerate(self.tensors)}
        buffers, self.size = [], 0
        for _, tensors, _ in recorder.launches:
            for x in tensors:
                if x.data_ptr() not in numbers:
                    numbers[x.data_ptr()] = len(self.tensors)
                    self.tensors.append(x)
                    buffers.append(Buffer(self.size, x.shape, x.dtype))
                    self.size += -(-x.numel() * x.itemsize // ALIGNMENT) * ALIGNMENT
        self.buffers, self.offsets = tuple(buffers), tuple(buffer.offset for buffer in buffers)
        self.launches = tuple(
            RecordedLaunch(recorder.known[name], itemgetter(*(numbers[x.data_ptr()] for x in tensors)), floats)
            for name, tensors, floats in recorder.launches
        )
        recorder.launches.clear()

    def replay(self, earlier: list, given: tuple[Tensor, ...]) -> tuple[list, Tensor]:
        """Launch everything; the table, and the memory that its own buffers lie in."""
        memory = torch.empty(self.size, dtype=torch.uint8, device=given[0].device)
        if memory.is_cuda:
            start = memory.data_ptr()
            table = [*earlier, *[x.data_ptr() for x in given], *[start + offset for offset in self.offsets]]
        else:  # the interpreter wants tensors
            table = [*earlier, *given, *[buffer.view(memory) for buffer in self.buffers]]
        for launch, select, floats in self.launches:
            launch(select(table), floats)
        return table, memory


@dataclass
class RecordedStep:
    """Both passes of a batch with itself, for one spec."""

    spec: Any
    forward: RecordedPass
    backward: dict[torch.dtype, RecordedPass] = field(default_factory=dict)  # by the type of the gradient
