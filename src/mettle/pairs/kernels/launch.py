# pyright: reportMissingImports=false
"""Starting a kernel without asking again what was asked before.

``kernel[grid](...)`` binds its arguments, looks up which build they need and starts it: some 0.1 ms of host time, more
than a small kernel runs. Which build is needed depends on little (types, alignment, whether a number is 1 or a multiple
of 16), so it is remembered here by that. And a call that is the same as an earlier one in all but its tensors (the same
loss on the same shapes: every step of a training run) remembers everything else in a `Script`.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from mettle.pairs.kernels.config import parts

# The builds' calling convention (all arguments in order, compile-time ones included) has been this since:
DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
LEAST = 4  # tiles that a part of the columns is worth
MOST_PARTS = 64  # they are added up one after another
START = 3.0  # tiles that a program could do in the time of its beginning and its end
MOST = 512  # scripts that are kept: a run has few shapes, a curriculum has new numbers at every step

Made = tuple[tuple[int, ...], tuple, dict[str, Any]]
"""Grid, numbers and flags of a launch."""

_builds: dict[tuple, tuple[Any, tuple]] = {}  # as triton's own cache: for the life of the process
_scripts: dict[Any, "Script"] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> None:
    """``kernel[grid](*args, **flags)``; ``args`` are the run-time arguments, in order and all of them."""
    _start(kernel, grid, args, flags)


class Script:
    """The launches of calls that are alike, by name."""

    def __init__(self) -> None:
        self.known: dict[str, Callable[..., None]] = {}

    def launch(self, name: str, kernel: Any, tensors: tuple, make: Callable[[], Made]) -> None:
        """`launch`, with grid, numbers and flags made the first time only; tensors come first among the arguments."""
        known = self.known.get(name)
        if known is not None:
            known(*tensors)
            return
        grid, numbers, flags = make()
        build = _start(kernel, grid, (*tensors, *numbers), flags)
        if build is None:
            self.known[name] = lambda *tensors: kernel[grid](*tensors, *numbers, **flags)
            return
        made, rest = build
        run, function, metadata = made.run, made.function, made.packed_metadata
        (x, y, z), rest = _three(grid), (*numbers, *rest)
        device = torch.cuda.current_device()  # a script has one
        stream: Any = driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]

        def again(*tensors: Any) -> None:
            run(x, y, z, stream(device), function, metadata, None, None, None, *tensors, *rest)

        self.known[name] = again


def script(what: tuple, tensors: Iterable[Tensor | None]) -> Script:
    """That of all calls for ``what`` on tensors that look like these: together they say everything that grids, numbers
    and flags depend on. Every tensor begins at a multiple of 16 bytes.
    """
    key = (*what, *(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors))
    found = _scripts.get(key)
    if found is None:
        if len(_scripts) >= MOST:
            _scripts.clear()
        found = _scripts[key] = Script()
    return found


def aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy that begins where kernels want it."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def sides(tma: bool, depth: int, *blocks: tuple[Tensor, Tensor, int]) -> tuple[Any, ...]:
    """Operands of a product in two halves each, from (high, low, rows of a block); as descriptors of blocks or not."""
    if not tma:
        return tuple(x for high, low, _ in blocks for x in (high, low))
    from triton.tools.tensor_descriptor import TensorDescriptor  # newer than the oldest triton we run on

    found = []
    for high, low, rows in blocks:
        one = TensorDescriptor.from_tensor(high, [rows, depth])
        found += [one, one if low is high else TensorDescriptor.from_tensor(low, [rows, depth])]
    return tuple(found)


def flat(x: Tensor) -> Tensor:
    """The same for labels and gradients of rows, which kernels read one after another."""
    return aligned(x.contiguous())


@cache
def multiprocessors(device: int) -> int:
    """How many a GPU has; asked on every launch, so asked once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def divided(blocks: int, tiles: int, device: torch.device, each: int) -> int:
    """Into how many parts to cut the columns so that every multiprocessor gets ``each`` programs, or nearly."""
    if device.type != "cuda":
        return 2 if tiles > 2 else 1
    units = multiprocessors(device.index)
    return max(1, min(each * units // blocks, tiles // LEAST, MOST_PARTS))


@cache
def evened(blocks: int, tiles: int, device: torch.device, beside: int, most: int) -> int:
    """Into how many parts, ``most`` at the most, so that the last programs do not run while others are idle.

    Programs run in waves, ``beside`` each other on every multiprocessor; one takes the time of its tiles and `START`.
    """
    if device.type != "cuda":
        return 2 if tiles > 2 else 1
    places = beside * multiprocessors(device.index)
    most = max(1, min(most, tiles // LEAST, MOST_PARTS))
    times = [parts(blocks * s, places) * (tiles / s + START) for s in range(1, most + 1)]
    nearly = 1.02 * min(times)
    return next(s for s, time in enumerate(times, 1) if time <= nearly)


def _start(kernel: Any, grid: tuple[int, ...], args: tuple, flags: dict[str, Any]) -> tuple[Any, tuple] | None:
    """Start it; its build and compile-time arguments, or None where builds cannot be started directly."""
    if not DIRECT or not hasattr(kernel, "device_caches"):  # an older triton, or its interpreter
        kernel[grid](*args, **flags)
        return None
    key = (id(kernel), torch.cuda.current_device(), *map(_kind, args), *flags.items())
    known = _builds.get(key)
    if known is None:
        build = kernel[grid](*args, **flags)
        known = _builds[key] = build, tuple(flags[name] for name in kernel.arg_names[len(args) :])
    else:
        build, rest = known
        build[_three(grid)](*args, *rest)
    return known


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    return (*grid, 1, 1)[:3]  # type: ignore[return-value]


def _kind(x: Any) -> Any:
    """What a build depends on in a run-time argument."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, bool):
        return "bool"
    if isinstance(x, int):
        return 1 if x == 1 else (x % 16 == 0, -(1 << 31) <= x < 1 << 31)
    if isinstance(x, float):
        return "float"
    return x.base.dtype, *x.block_shape  # a tensor descriptor
