"""Starting a kernel without asking again what was asked before.

``kernel[grid](...)`` binds its arguments, looks up which build they need and starts it: some 0.1 ms of host time, more
than a small kernel runs. Which build is needed depends on little (types, alignment, whether a number is 1 or a multiple
of 16), so it is remembered here by that. And a call that is the same as an earlier one in all but its tensors and its
floats (the same kind of loss on the same shapes: every step of a training run) remembers everything else in a
`LaunchCache`.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

Decision = TypeVar("Decision")

MOST_CACHES = 512  # a run has few shapes

_builds: dict[tuple, tuple[Any, tuple]] = {}  # as triton's own cache: for the life of the process
_caches: dict[Any, "LaunchCache"] = {}


class Launch(NamedTuple):
    """What shapes and settings decide about a launch: grid, whole numbers among the arguments, and flags."""

    grid: tuple[int, ...]
    integers: tuple[int, ...]
    constexprs: dict[str, Any]


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constexprs: Any) -> None:
    """``kernel[grid](*args, **constexprs)``; ``args`` are the run-time arguments, in order and all of them."""
    _start_build(kernel, grid, args, constexprs)


class LaunchCache:
    """The launches of calls that are alike, by name, and what was decided about them."""

    def __init__(self) -> None:
        self.known: dict[str, Callable[[tuple, tuple], None]] = {}
        self.decisions: dict[str, Any] = {}
        # Of the fused loss of small batches (`replay`):
        self.recorded_step: Any = None
        self.last_spec: Any = None  # of the call before: what changes in every step is not worth recording
        self.may_replay = True

    def decide(self, name: str, make: Callable[[], Decision]) -> Decision:
        """What ``make`` returned the first time: anything that follows from settings and shapes alone."""
        found = self.decisions.get(name)
        if found is None:
            found = self.decisions[name] = make()
        return found

    def launch(
        self,
        name: str,
        kernel: Any,
        tensors: tuple,
        plan: Callable[[], Launch],
        floats: tuple[float | Tensor, ...] = (),
    ) -> None:
        """Start a kernel; the plan is made the first time only.

        The kernel's arguments are its tensors, whole numbers, floats and flags, in this order. Tensors and floats are
        new in every call: a threshold that adapts, or a curriculum, changes nothing that is remembered. In place of a
        float there may be a tensor that holds one, always the same of them in calls that are alike.
        """
        known = self.known.get(name)
        if known is not None:
            known(tensors, floats)
            return
        grid, integers, constexprs = plan()
        build = _start_build(kernel, grid, (*tensors, *integers, *floats), constexprs)
        if build is None:

            def interpret(tensors: tuple, floats: tuple) -> None:
                kernel[grid](*tensors, *integers, *floats, **constexprs)

            self.known[name] = interpret
            return
        made, rest = build
        run, function, metadata = made.run, made.function, made.packed_metadata
        x, y, z = _three(grid)
        device = torch.cuda.current_device()  # a cache has one
        stream: Any = driver.active.get_current_stream  # pyright: ignore[reportAttributeAccessIssue]

        def start(tensors: tuple, floats: tuple) -> None:
            run(x, y, z, stream(device), function, metadata, None, None, None, *tensors, *integers, *floats, *rest)

        self.known[name] = start


def find_launch_cache(settings: tuple, tensors: Iterable[Tensor | None]) -> LaunchCache:
    """That of all calls with these settings on tensors that look like these.

    Together they must say everything that grids, whole numbers and flags depend on; floats that are passed at launch
    have no place in the settings. Every tensor begins at a multiple of 16 bytes.
    """
    key = (*settings, *(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors))
    found = _caches.get(key)
    if found is None:
        if len(_caches) >= MOST_CACHES:
            _caches.clear()
        found = _caches[key] = LaunchCache()
    return found


def align_tensor(x: Tensor) -> Tensor:
    """The tensor, or a copy that begins where kernels want it."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def flatten_tensor(x: Tensor) -> Tensor:
    """The same for labels and gradients of rows, which kernels read one after another."""
    return align_tensor(x.contiguous())


def tensor_descriptors(use_tma: bool, block_k: int, *blocks: tuple[Tensor, Tensor, int]) -> tuple[Any, ...]:
    """The two operands of a product in two halves each, from (hi, lo, rows of a block); as descriptors or not."""
    if not use_tma:
        (a, a_lo, _), (b, b_lo, _) = blocks
        return a, a_lo, b, b_lo
    found = []
    for hi, lo, rows in blocks:
        one = TensorDescriptor.from_tensor(hi, [rows, block_k])
        found += [one, one if lo is hi else TensorDescriptor.from_tensor(lo, [rows, block_k])]
    return tuple(found)


def _start_build(
    kernel: Any, grid: tuple[int, ...], args: tuple, constexprs: dict[str, Any]
) -> tuple[Any, tuple] | None:
    """Start it; its build and compile-time arguments, or None in the interpreter, which has no builds."""
    if not hasattr(kernel, "device_caches"):
        kernel[grid](*args, **constexprs)
        return None
    key = (id(kernel), torch.cuda.current_device(), *map(_specialization, args), *constexprs.items())
    known = _builds.get(key)
    if known is None:
        build = kernel[grid](*args, **constexprs)
        # The builds' calling convention: all arguments in order, compile-time ones included.
        known = _builds[key] = build, tuple(constexprs[name] for name in kernel.arg_names[len(args) :])
    else:
        build, rest = known
        build[_three(grid)](*args, *rest)
    return known


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    return (*grid, 1, 1)[:3]  # type: ignore[return-value]


def _specialization(x: Any) -> Any:
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
