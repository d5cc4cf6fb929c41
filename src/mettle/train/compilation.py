"""Networks compiled by `torch.compile` while they train, in place: names of weights and copies stay as ever."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

RESUMES = (
    "train.compile: what networks compute while they train is compiled. Without it a resumed run is the run that was "
    "not stopped, bit for bit; with it the two are equal up to rounding"
)


@contextmanager
def compile_networks(
    networks: Iterable[nn.Module], on_note: Callable[[str], None] = lambda note: None, backend: str = "inductor"
) -> Iterator[None]:
    """Inside, the backbone of each network is compiled, the wrapped module of somebody else's, or all of it."""
    parts: list[Any] = [find_compiled_part(network) for network in networks]
    for part in parts:
        part._compiled_call_impl = CompiledCall(part, on_note, backend)  # where `nn.Module.compile` puts its own
    try:
        yield
    finally:
        for part in parts:
            part._compiled_call_impl = None


def find_compiled_part(network: nn.Module) -> nn.Module:
    """What does the work of a network, and is called as a module by whatever else it does."""
    parts = (getattr(network, name, None) for name in ("backbone", "module"))
    return next((part for part in parts if isinstance(part, nn.Module)), network)


class CompiledCall:
    """Calls a module: compiled in training mode, as it is in eval mode, whose batches have all sorts of lengths.

    What cannot be compiled is called as it is from then on, which is told in one line.
    """

    def __init__(self, module: Any, on_note: Callable[[str], None], backend: str):
        self.module, self.on_note = module, on_note

        def call(*args: Any, **options: Any) -> Any:  # a frame of our own: those of torch.nn are passed over
            return module._call_impl(*args, **options)

        self.compiled: Any = torch.compile(call, dynamic=False, backend=backend)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """What the module makes of its input."""
        if self.compiled is None or not self.module.training:
            return self.module._call_impl(*args, **options)
        try:
            return self.compiled(*args, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            found = self.module._call_impl(*args, **options)  # an error of the module itself is raised here
            self.compiled = None
            said = " ".join(str(problem).split())[:200]
            self.on_note(f"train.compile: {type(self.module).__name__} trains as it is, it cannot be compiled: {said}")
            return found
