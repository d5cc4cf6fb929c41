"""A method is what one optimisation step does: which networks, which optimisers, which losses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mettle.data.loader import Batch
from mettle.data.samples import Samples
from mettle.difficulty import Relative
from mettle.errors import InputError
from mettle.model import Embedder, embed
from mettle.pairs import iterate_parts
from mettle.train.optim import decayed, half

START_SAMPLES = 16  # of a class at most, for the mean that its vector starts at
LEAVE_SPARSE = "leave sparse out; sample alone already compares with a share of the classes"


@dataclass(frozen=True)
class StepResult:
    """What a step did. A step whose loss or gradient is not finite changes nothing."""

    loss: float
    gradient: float  # norm
    applied: bool
    embeddings: Tensor  # detached, for the facts
    facts: Callable[[], Mapping[str, Any]] = dict  # what only the step knows; asked for when it is logged


class Method(Protocol):
    """What the loop needs of a method."""

    model: Embedder  # the network that becomes the artifact
    patience: int  # steps in a row that may be refused before the run is given up

    def step(self, batch: Batch, rate: float, progress: float) -> StepResult:
        """One optimisation step at this learning rate, with this share of training done."""
        ...

    def facts(self, embeddings: Tensor, batch: Batch, progress: float) -> dict[str, Any]:
        """What difficulty did, for the log."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Put everything back."""
        ...


class Supervised:
    """One embedder, one loss on its embeddings and labels, one optimiser.

    The loss may be any callable ``loss(embeddings, labels)``; a loss or a difficulty with state of its own (an
    ``nn.Module``) is trained, saved and resumed with the model. A loss with one vector per class numbers its classes
    from 0: ``classes`` are the labels that occur in training, in order.
    """

    def __init__(
        self,
        model: Embedder,
        loss: Any,
        *,
        classes: Tensor | None = None,
        weight_decay: float = 0.01,
        loss_rate: float = 1.0,
        clip: float = 0.0,
        precision: str = "float32",
    ):
        if takes_sparse(loss):
            raise InputError(f"AdamW, which moves these parameters, takes no sparse gradients: {LEAVE_SPARSE}")
        if classes is not None:
            check_classes(classes)
        self.model, self.loss, self.clip, self.classes = model, loss, clip, classes
        others = stateful({"": loss})
        self.modules: dict[str, nn.Module] = {"model": model, **others}
        own = list(dict.fromkeys(p for module in others.values() for p in module.parameters()))
        self.parameters = [*model.parameters(), *own]
        groups = decayed(list(model.parameters()), weight_decay, pace=1.0) + decayed(own, weight_decay, pace=loss_rate)
        self.optimiser = torch.optim.AdamW(groups, lr=1e-3)
        self.device = next(model.parameters()).device.type
        self.dtype = half(precision)
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.dtype is torch.float16)
        # A loss scale that starts too high is lowered by refusing steps: that is no divergence yet.
        self.patience = 20 if self.scaler.is_enabled() else 3

    def step(self, batch: Batch, rate: float, progress: float) -> StepResult:
        """Forward, backward, and a step unless something is not finite."""
        for module in self.modules.values():
            module.train()
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["pace"]
        with torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None):
            embeddings = self.model(batch.inputs)
        loss = self.value(embeddings, batch, progress)
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimiser)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip or torch.inf)
        value, size = loss.item(), norm.item()
        applied = bool(torch.isfinite(loss) & torch.isfinite(norm))
        if applied:
            self.scaler.step(self.optimiser)
        if self.scaler.is_enabled():
            self.scaler.update()
        return StepResult(value, size, applied, embeddings.detach())

    def value(self, embeddings: Tensor, batch: Batch, progress: float) -> Tensor:
        """The loss of a batch, a scalar with gradient."""
        return self.loss(embeddings, self.numbered(batch.labels), **progress_option(self.loss, progress))

    def numbered(self, labels: Tensor) -> Tensor:
        """Labels as the loss counts them."""
        return labels if self.classes is None else numbered(labels, self.classes)

    def facts(self, embeddings: Tensor, batch: Batch, progress: float) -> dict[str, Any]:
        """The facts of the loss, where it has any."""
        if not hasattr(self.loss, "statistics"):
            return {}
        options = progress_option(self.loss, progress)
        facts = self.loss.statistics(embeddings, self.numbered(batch.labels), **options)
        return facts.as_dict() if hasattr(facts, "as_dict") else dict(facts)

    def state(self) -> dict[str, Any]:
        """Networks, optimiser, loss scale."""
        return {
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "optimiser": self.optimiser.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.scaler.load_state_dict(state["scaler"])


def start_class_vectors(method: Method, samples: Samples) -> None:
    """Start the class vectors of a loss, if it has any, at the class means of the network as it is.

    Vectors at random tell the network nothing until each has been met a few times; with many classes it first learns
    to put all samples in one place. The means are centered, see `ClassVectors.start_from`, and of at most
    `START_SAMPLES` samples of a class.
    """
    if not isinstance(method, Supervised) or method.classes is None or not hasattr(method.loss, "start_from"):
        return
    some = samples.take(spread_over_classes(samples.labels, START_SAMPLES))
    z = torch.from_numpy(embed(method.model, some)).to(method.classes.device)
    if not bool(torch.isfinite(z).all()):
        return  # the first step says what is broken
    labels = torch.from_numpy(some.labels).to(method.classes.device)
    method.loss.start_from(z, method.numbered(labels), centered=True)


def spread_over_classes(labels: np.ndarray, most: int) -> np.ndarray:
    """Positions of at most ``most`` samples of every class, evenly spaced over the class, in order."""
    order = np.argsort(labels, kind="stable")
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    count = np.repeat(counts, counts)
    place = np.arange(len(labels)) - np.repeat(first, counts)
    slot = place * most // count
    chosen = (count <= most) | (place == 0) | (slot != (place - 1) * most // count)
    return np.sort(order[chosen])


def stateful(losses: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The losses and difficulties that have a state of their own, by the names that checkpoints know them by.

    A difficulty that is part of its loss already, or of another one, is not named again: its tensors are saved once.
    """
    found: dict[str, nn.Module] = {}
    known: set[nn.Module] = set()
    for mark, loss in losses.items():
        parts = {f"{mark}loss": loss}
        parts |= {
            f"{mark}difficulty {k}": one for k, one in enumerate(iterate_parts(getattr(loss, "difficulty", None)))
        }
        for name, part in parts.items():
            if isinstance(part, nn.Module) and part not in known and has_state(part):
                found[name] = part
                known |= set(part.modules())
    return found


def has_state(module: nn.Module) -> bool:
    """Whether there is anything of a module to save."""
    return any(not isinstance(value, Tensor) or value.numel() > 0 for value in module.state_dict().values())


def progress_option(loss: Any, progress: float) -> dict[str, float]:
    """The progress of training, for a loss that takes it: a curriculum may still be fading in."""
    return {"progress": progress} if getattr(loss, "takes_progress", False) else {}


def check_classes(classes: Tensor) -> None:
    """Numbering looks labels up in a sorted list, so a list that is not sorted would number them wrongly."""
    whole = isinstance(classes, Tensor) and classes.ndim == 1 and not classes.is_floating_point()
    if not whole or not bool((classes[1:] > classes[:-1]).all()):
        raise InputError("classes= must be the labels that occur in training, whole numbers, each once, sorted")


def numbered(labels: Tensor, classes: Tensor) -> Tensor:
    """The place of every label among the classes.

    A label that is none of them is an error, told at once on a processor. A GPU would stand still for the question:
    there it becomes -1, which losses refuse when they come to it.
    """
    place = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    strange = classes[place] != labels
    if labels.is_cuda:
        return place.masked_fill(strange, -1)
    if bool(strange.any()):
        label = labels[strange][0].item()
        raise InputError(
            f"label {label} is none of the {len(classes)} classes that training began with: pass them all as classes="
        )
    return place


def takes_sparse(loss: Any) -> bool:
    """Whether a loss asks for sparse gradients of its own parameters."""
    return isinstance(loss, nn.Module) and any(getattr(part, "sparse", False) is True for part in loss.modules())


def compares(loss: Any) -> bool:
    """Whether a loss looks at a second encoder."""
    return any(isinstance(part, Relative) for part in iterate_parts(getattr(loss, "difficulty", None)))
