"""Several losses as one: a weighted sum of them, and a loss with a miner of another library."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from mettle.errors import InputError

Weight = float | Callable[[float], float]


class WeightedSum(nn.Module):
    """L = Σ_k w_k L_k(z, y): several losses on the same embeddings and labels.

    A weight is a number, or a function of the share of training that is done, in [0, 1], which changes it on the way.

    Args:
        losses: callables on (embeddings, labels), by name or in a row; those that are modules are trained, saved and
            moved with the sum.
        weights: one for each, by the same names or in the same order; all 1 by default.
    """

    takes_progress = True

    def __init__(
        self,
        losses: Mapping[str, Callable[..., Tensor]] | Sequence[Callable[..., Tensor]],
        weights: Mapping[str, Weight] | Sequence[Weight] | None = None,
    ):
        super().__init__()
        named = dict(losses) if isinstance(losses, Mapping) else _name_losses(losses)
        if not named:
            raise InputError("WeightedSum needs at least one loss")
        for name, loss in named.items():
            if not callable(loss):
                raise InputError(
                    f"losses[{name!r}] must be callable on (embeddings, labels), got {type(loss).__name__}"
                )
            if getattr(loss, "reduction", None) == "none":
                raise InputError(
                    f"losses[{name!r}] has reduction 'none', and a sum adds one number of each: use 'mean'"
                )
        self.weights = _match_weights(named, weights)
        self.losses = named
        self.parts = nn.ModuleDict({_as_key(name): loss for name, loss in named.items() if isinstance(loss, nn.Module)})

    @property
    def num_classes(self) -> int:
        """Of the losses with one vector per class; an attribute that is not there where no loss has any."""
        found: set[int] = {getattr(loss, "num_classes", -1) for loss in self.losses.values()} - {-1}
        if len(found) > 1:
            raise InputError(
                f"the losses of a sum count {' and '.join(map(str, sorted(found)))} classes: one is wanted"
            )
        for count in found:
            return count
        raise AttributeError("no loss of this sum has class vectors")

    def terms(self, embeddings: Tensor, labels: Tensor, progress: float = 0.0) -> dict[str, Tensor]:
        """The weighted value of every loss, by name."""
        found = {}
        for name, loss in self.losses.items():
            options = {"progress": progress} if getattr(loss, "takes_progress", False) else {}
            found[name] = self.weight(name, progress) * loss(embeddings, labels, **options)
        return found

    def weight(self, name: str, progress: float = 0.0) -> float:
        """The weight of a loss when this share of training is done."""
        weight = self.weights[name]
        return float(weight(progress)) if callable(weight) else weight

    def forward(self, embeddings: Tensor, labels: Tensor, *, progress: float = 0.0) -> Tensor:
        """The weighted sum."""
        return torch.stack([term.reshape(()) for term in self.terms(embeddings, labels, progress).values()]).sum()

    def statistics(self, embeddings: Tensor, labels: Tensor, *, progress: float = 0.0) -> dict[str, Any]:
        """Of every loss its weighted value, and the norm of that value's gradient with respect to the embeddings.

        The norms tell which of the losses moves the embeddings.
        """
        found: dict[str, Any] = {}
        with torch.enable_grad(), _preserve_state(self):
            z = embeddings.detach().requires_grad_()
            for name, term in self.terms(z, labels, progress).items():
                (gradient,) = torch.autograd.grad(term, z, allow_unused=True) if term.requires_grad else (None,)
                found[f"{name} loss"] = float(term.detach())
                found[f"{name} gradient"] = 0.0 if gradient is None else float(gradient.norm())
        return found

    def extra_repr(self) -> str:
        """The weights."""
        return ", ".join(f"{name}: {weight}" for name, weight in self.weights.items())


class MinedLoss(nn.Module):
    """A loss of pytorch-metric-learning with a miner: ``loss(z, y, miner(z, y))``."""

    def __init__(self, loss: Callable[..., Tensor], miner: Callable[[Tensor, Tensor], Any]):
        super().__init__()
        for name, given in (("loss", loss), ("miner", miner)):
            if not callable(given):
                raise InputError(f"{name} must be callable, got {type(given).__name__}")
        self.loss, self.miner = loss, miner

    @property
    def num_classes(self) -> int:
        """That of the loss, where it has class vectors."""
        if not hasattr(self.loss, "num_classes"):
            raise AttributeError("this loss has no class vectors")
        return self.loss.num_classes  # type: ignore[attr-defined]

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of the mined pairs or triplets."""
        return self.loss(embeddings, labels, self.miner(embeddings, labels))


@contextmanager
def _preserve_state(module: nn.Module) -> Iterator[None]:
    """Put what losses remember of the batches they saw (thresholds, centers, generators) back as it was."""
    parts = list(module.modules())
    buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers(recurse=False)]
    extra = [(p, p.get_extra_state()) for p in parts if type(p).get_extra_state is not nn.Module.get_extra_state]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for part, state in extra:
            part.set_extra_state(state)


def _name_losses(losses: Sequence[Callable[..., Tensor]]) -> dict[str, Callable[..., Tensor]]:
    """Losses by the names of their classes, numbered where a name comes again."""
    if not isinstance(losses, Sequence) or isinstance(losses, str):
        raise InputError(f"losses must be several losses, or losses by name, got {type(losses).__name__}")
    found: dict[str, Callable[..., Tensor]] = {}
    for loss in losses:
        name = getattr(loss, "__name__", type(loss).__name__)
        number = sum(known.partition(" ")[0] == name for known in found)
        found[name if not number else f"{name} {number + 1}"] = loss
    return found


def _match_weights(
    losses: Mapping[str, Any], weights: Mapping[str, Weight] | Sequence[Weight] | None
) -> dict[str, Weight]:
    if isinstance(weights, Mapping):
        if set(weights) != set(losses):
            raise InputError(f"weights are for {', '.join(map(repr, weights))}, the losses are {', '.join(losses)}")
        given: list[Weight] = [weights[name] for name in losses]
    else:
        given = list(repeat(1.0, len(losses))) if weights is None else list(weights)
    if len(given) != len(losses):
        raise InputError(f"{len(given)} weights for {len(losses)} losses: one for each is wanted")
    for name, weight in zip(losses, given, strict=True):
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not callable(weight) and not (is_number and 0 <= weight < float("inf")):
            raise InputError(
                f"the weight of {name} must be a number from 0 up, or a function of progress, got {weight!r}"
            )
    return dict(zip(losses, given, strict=True))


def _as_key(name: str) -> str:
    """A name as a module may have it: without dots."""
    return name.replace(".", "_") or "loss"
