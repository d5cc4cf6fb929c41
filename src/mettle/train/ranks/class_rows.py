"""States of modules and optimizers where ranks hold rows of different classes: put together to save, cut to load.

A checkpoint and an artifact hold all classes, so that any number of ranks reads them. Rank 0 gathers them, in the
memory of its host; every rank has to take part.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def is_spread(loss: Any) -> bool:
    """Whether other ranks have class vectors of this loss too."""
    return getattr(loss, "is_spread", False) is True


def collect_module_state(module: nn.Module) -> dict[str, Any]:
    """The state of a module with the rows of all classes, on rank 0."""
    return _change_rows(module, module.state_dict(), lambda loss, x: loss.collect_rows(x))


def load_module_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """The inverse of `collect_module_state`, for any number of ranks."""
    module.load_state_dict(_change_rows(module, state, lambda loss, x: loss.select_rows(x)))


def _change_rows(
    module: nn.Module, state: Mapping[str, Any], change: Callable[[Any, Tensor], Tensor]
) -> dict[str, Any]:
    loss, prefix = (module.module, "module.") if isinstance(module, AveragedModel) else (module, "")
    if not is_spread(loss):
        return dict(state)
    own: Any = loss
    names = {prefix + name for name in own.class_parameters()}
    return {name: change(own, value) if name in names else value for name, value in state.items()}


def collect_optimizer_rows(state: Mapping[str, Any], groups: list[dict[str, Any]], loss: Any) -> dict[str, Any]:
    """The state of an optimizer with what it keeps of the rows of all classes, on rank 0."""
    return _change_optimizer(state, groups, loss, lambda p, x: x.shape == p.shape, lambda x: loss.collect_rows(x))


def select_optimizer_rows(state: Mapping[str, Any], groups: list[dict[str, Any]], loss: Any) -> dict[str, Any]:
    """The inverse of `collect_optimizer_rows`, for any number of ranks."""

    def has_all(p: Tensor, x: Tensor) -> bool:
        each = len(p) // len(loss.class_range)
        return x.ndim == p.ndim and len(x) == each * loss.num_classes and x.shape[1:] == p.shape[1:]

    return _change_optimizer(state, groups, loss, has_all, lambda x: loss.select_rows(x))


def _change_optimizer(
    state: Mapping[str, Any],
    groups: list[dict[str, Any]],
    loss: Any,
    has_rows: Callable[[Tensor, Tensor], bool],
    change: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    if not is_spread(loss):
        return dict(state)
    parameters = [p for group in groups for p in group["params"]]  # numbered in this order
    spread = {k for k, p in enumerate(parameters) if any(p is own for own in loss.class_parameters().values())}
    changed = {
        k: {
            name: change(x) if k in spread and isinstance(x, Tensor) and has_rows(parameters[k], x) else x
            for name, x in kept.items()
        }
        for k, kept in state["state"].items()
    }
    return {**state, "state": changed}
