# pyright: reportMissingImports=false
"""Starting a kernel without asking again what was asked before.

``kernel[grid](...)`` binds its arguments, looks up which build they need and starts it: some 0.1 ms of host time, more
than a small kernel runs. Which build is needed depends on little (types, alignment, whether a number is 1 or a multiple
of 16), so it is remembered here by that, and started directly the next time.
"""

from typing import Any

import torch
import triton
from torch import Tensor

# The builds' calling convention (all arguments in order, compile-time ones included) has been this since:
DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)

_builds: dict[tuple, tuple[Any, tuple]] = {}  # as triton's own cache: for the life of the process


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **flags: Any) -> None:
    """``kernel[grid](*args, **flags)``; ``args`` are the run-time arguments, in order and all of them."""
    if not DIRECT or not hasattr(kernel, "device_caches"):  # an older triton, or its interpreter
        kernel[grid](*args, **flags)
        return
    key = (id(kernel), torch.cuda.current_device(), *map(_kind, args), *flags.items())
    known = _builds.get(key)
    if known is None:
        build = kernel[grid](*args, **flags)
        _builds[key] = build, tuple(flags[name] for name in kernel.arg_names[len(args) :])
        return
    build, rest = known
    build[(*grid, 1, 1)[:3]](*args, *rest)


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
