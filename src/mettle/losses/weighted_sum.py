"""Several losses as one: a weighted sum of them, and a loss with a miner of another library."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from mettle.difficulty.settings import validate_numbers
from mettle.errors import InputError, nearest
from mettle.losses.cross_batch_memory import takes_references

Space = Literal["before", "after"]  # a neck, see `mettle.model.neck`


@dataclass(frozen=True)
class WeightSchedule:
    """A weight that moves from ``start`` to ``end`` while training goes from ``since`` to ``until``, shares of it.

    ``linear`` is a straight line, ``cosine`` half a period of one: slow at both ends.
    """

    kind: Literal["linear", "cosine"] = "linear"
    start: float = 1.0
    end: float = 0.0
    since: float = 0.0
    until: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "cosine"):
            raise InputError(f"the kind of a weight must be 'linear' or 'cosine', got {self.kind!r}")
        validate_numbers(start=self.start, end=self.end, since=self.since, until=self.until)
        if min(self.start, self.end) < 0:
            raise InputError(f"a weight moves between numbers from 0 up, got start {self.start} and end {self.end}")
        if not 0 <= self.since < self.until <= 1:
            raise InputError(f"a weight moves while 0 <= since < until <= 1, got {self.since} and {self.until}")

    def __call__(self, progress: float) -> float:
        """The weight when this share of training is done."""
        done = min(max((progress - self.since) / (self.until - self.since), 0.0), 1.0)
        share = done if self.kind == "linear" else (1 - math.cos(math.pi * done)) / 2
        return self.start + share * (self.end - self.start)


Weight = float | Callable[[float], float] | Mapping[str, Any]


class WeightedSum(nn.Module):
    """L = Σ_k w_k L_k(z, y): several losses on the same embeddings and labels.

    A weight is a number, a function of the share of training that is done, in [0, 1], which changes it on the way, or
    the fields of a `WeightSchedule`, which is such a function.

    A model with a neck has two embeddings of a sample. Losses are in the space ``"before"`` it unless ``spaces`` puts
    them ``"after"`` it: L = Σ_before w_k L_k(z, y) + Σ_after w_k L_k(neck(z), y).

    Args:
        losses: callables on (embeddings, labels), by name or in a row; those that are modules are trained, saved and
            moved with the sum.
        weights: one for each, by the same names or in the same order; all 1 by default.
        spaces: likewise; all ``"before"`` by default. Names that are left out are before the neck too.
    """

    takes_progress = True

    def __init__(
        self,
        losses: Mapping[str, Callable[..., Tensor]] | Sequence[Callable[..., Tensor]],
        weights: Mapping[str, Weight] | Sequence[Weight] | None = None,
        spaces: Mapping[str, Space] | Sequence[Space] | None = None,
    ):
        super().__init__()
        named = dict(losses) if isinstance(losses, Mapping) else _name_losses(losses)
        if not named:
            raise InputError(f"{type(self).__name__} needs at least one loss")
        for name, loss in named.items():
            if not callable(loss):
                raise InputError(
                    f"losses[{name!r}] must be callable on (embeddings, labels), got {type(loss).__name__}"
                )
            if getattr(loss, "takes_after", False) is True:
                raise InputError(f"losses[{name!r}] names spaces of its own: put its parts into this sum")
            if getattr(loss, "reduction", None) == "none":
                raise InputError(
                    f"losses[{name!r}] has reduction 'none', and a sum adds one number of each: use 'mean'"
                )
        self.weights = _match_weights(named, weights)
        self.spaces = _match_spaces(named, spaces)
        self.losses = named
        self.parts = nn.ModuleDict({_as_key(name): loss for name, loss in named.items() if isinstance(loss, nn.Module)})

    @property
    def takes_after(self) -> bool:
        """Whether a part is in the space after a neck, so that the call takes the embeddings there as ``after=``."""
        return "after" in self.spaces.values()

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

    @property
    def start_from(self) -> Callable[..., Self]:
        """``start_from(embeddings, labels, centered=False, after=None)``: start class vectors at means of their space.

        An attribute that is not there where no loss has class vectors.
        """
        if not any(hasattr(loss, "start_from") for loss in self.losses.values()):
            raise AttributeError("no loss of this sum has class vectors")
        return self._start_class_vectors

    def _start_class_vectors(
        self, embeddings: Tensor, labels: Tensor, *, centered: bool = False, after: Tensor | None = None
    ) -> Self:
        loss: Any
        for name, loss in self.losses.items():
            if hasattr(loss, "start_from"):
                loss.start_from(self._embeddings_of(name, embeddings, after), labels, centered=centered)
        return self

    def _embeddings_of(self, name: str, embeddings: Tensor, after: Tensor | None) -> Tensor:
        """Those of the space that a loss is in."""
        if self.spaces[name] == "before":
            return embeddings
        if after is None:
            raise InputError(
                f"{name} is in the space after a neck: give after=, the embeddings there; a model has a neck with "
                "neck = 'batchnorm'"
            )
        return after

    @property
    def takes_references(self) -> bool:
        """Whether every loss can compare a batch with a reference set, which is of embeddings before a neck."""
        return not self.takes_after and all(takes_references(loss) for loss in self.losses.values())

    def terms(
        self,
        embeddings: Tensor,
        labels: Tensor,
        progress: float = 0.0,
        after: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """The weighted value of every loss, by name; options are for every one of them, such as ``ref``."""
        found = {}
        for name, loss in self.losses.items():
            more = {"progress": progress} if getattr(loss, "takes_progress", False) else {}
            z = self._embeddings_of(name, embeddings, after)
            value = loss(z, labels, **more, **options)
            if value.numel() != 1:
                raise InputError(f"{name} must give one number, got shape {tuple(value.shape)}: take its mean")
            found[name] = self.weight(name, progress) * value
        return found

    def weight(self, name: str, progress: float = 0.0) -> float:
        """The weight of a loss when this share of training is done."""
        weight = self.weights[name]
        if not callable(weight):
            return weight
        found = float(weight(progress))
        if found < 0 or math.isinf(found):
            raise InputError(
                f"the weight of {name} must be a number from 0 up, its function gives {found} at {progress}"
            )
        return found

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        progress: float = 0.0,
        after: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """The weighted sum.

        ``after`` are the embeddings after the neck, for losses in that space; options are for every loss, such as
        ``ref``.
        """
        terms = self.terms(embeddings, labels, progress, after, **options)
        return torch.stack([term.reshape(()) for term in terms.values()]).sum()

    def statistics(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        progress: float = 0.0,
        neck: Callable[[Tensor], Tensor] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Of every loss its weighted value, and the norm of that value's gradient with respect to the embeddings.

        The norms tell which of the losses moves the embeddings. They are comparable between the two spaces: all are
        with respect to the embeddings before the ``neck``, the function that gives those after it.
        """
        found: dict[str, Any] = {}
        with torch.enable_grad(), _preserve_state(self):
            z = embeddings.detach().requires_grad_()
            after = None if neck is None else neck(z)
            for name, term in self.terms(z, labels, progress, after, **options).items():
                how: dict[str, Any] = {"allow_unused": True, "retain_graph": after is not None}
                (gradient,) = torch.autograd.grad(term, z, **how) if term.requires_grad else (None,)
                found[f"{name} loss"] = float(term.detach())
                found[f"{name} gradient"] = 0.0 if gradient is None else float(gradient.norm())
        return found

    def extra_repr(self) -> str:
        """The weights, and the spaces where there are two."""
        spaces = {name: " after the neck" if space == "after" else "" for name, space in self.spaces.items()}
        return ", ".join(f"{name}: {weight}{spaces[name]}" for name, weight in self.weights.items())


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
) -> dict[str, float | Callable[[float], float]]:
    if isinstance(weights, Mapping):
        if set(weights) != set(losses):
            raise InputError(f"weights are for {', '.join(map(repr, weights))}, the losses are {', '.join(losses)}")
        given: list[Weight] = [weights[name] for name in losses]
    else:
        given = list(repeat(1.0, len(losses))) if weights is None else _as_list(weights, "weights")
    if len(given) != len(losses):
        raise InputError(f"{len(given)} weights for {len(losses)} losses: one for each is wanted")
    return {name: _read_weight(name, weight) for name, weight in zip(losses, given, strict=True)}


def _read_weight(name: str, weight: Any) -> Any:
    """A number or a function of progress."""
    if isinstance(weight, Mapping):
        known = [field.name for field in fields(WeightSchedule)]
        for key in weight:
            if key not in known:
                raise InputError(f"the weight of {name} has no {key!r}{nearest(str(key), known)}")
        return WeightSchedule(**weight)
    if callable(weight):
        return weight
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not (is_number and 0 <= weight < float("inf")):
        raise InputError(
            f"the weight of {name} must be a number from 0 up, a function of progress, or a table such as "
            f"{{ kind = 'linear', start = 1.0, end = 0.2 }}, got {weight!r}"
        )
    return weight


def _match_spaces(losses: Mapping[str, Any], spaces: Mapping[str, Space] | Sequence[Space] | None) -> dict[str, Space]:
    known = get_args(Space)
    if isinstance(spaces, Mapping):
        for name in spaces:
            if name not in losses:
                raise InputError(f"spaces names {name!r}, the losses are {', '.join(losses)}")
        given: list[Any] = [spaces.get(name, "before") for name in losses]
    else:
        given = list(repeat("before", len(losses))) if spaces is None else _as_list(spaces, "spaces")
    if len(given) != len(losses):
        raise InputError(f"{len(given)} spaces for {len(losses)} losses: one for each is wanted")
    for name, space in zip(losses, given, strict=True):
        if space not in known:
            raise InputError(f"the space of {name} must be 'before' or 'after', got {space!r}")
    return dict(zip(losses, given, strict=True))


def _as_list(given: Any, name: str) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(f"{name} must be a list with one entry for each loss, or a table by name, got {given!r}")
    return list(given)


def _as_key(name: str) -> str:
    """A name as a module may have it: without dots."""
    return name.replace(".", "_") or "loss"
