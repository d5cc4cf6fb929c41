"""A method is what one optimization step does: which networks, which losses; how they are moved is common to all.

A method says what its losses are, in `Method.compute_losses`. Forward passes in half precision, gradients, clipping,
the refusal of steps that are not finite, averages of weights and the state of a checkpoint come from here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from mettle.data.loader import Batch
from mettle.difficulty import Relative
from mettle.errors import InputError
from mettle.losses import takes_references
from mettle.pairs import Queue, iterate_parts
from mettle.pairs.distributed import (
    AcrossRanks,
    across_ranks,
    average_gradients,
    broadcast_tensors,
    gather_batch,
    select_own_rows,
)
from mettle.train.fine_tuning import (
    FrozenLayers,
    describe_frozen,
    describe_groups,
    find_backbone,
    freeze_layers,
    layer_rates,
)
from mettle.train.gradient_caching import cached_forward, describe_batch_norm, has_batch_norm
from mettle.train.lora import add_lora, describe_lora, frozen_norms
from mettle.train.methods.past_embeddings import PastEmbeddings, QueuedBatch, QueueSettings
from mettle.train.optim import (
    MultiOptimizer,
    OptimSettings,
    StepNumbers,
    TensorSnapshot,
    WeightAverage,
    weight_decay_groups,
)
from mettle.train.ranks.class_rows import (
    collect_module_state,
    collect_optimizer_rows,
    is_spread,
    load_module_state,
    select_optimizer_rows,
)
from mettle.train.ranks.forward import forward_on_rank

NO_NECK = "the loss has a part in the space after a neck, and the model has none: set model.neck = 'batchnorm'"
SHARED_OPTIONS = {"progress", "biased"}  # of a loss, with which ranks can share its work
LEAVE_SPARSE = "leave sparse out; sample alone already compares with a share of the classes"


@dataclass(frozen=True)
class LossTerms:
    """The losses of one batch, by the network that each of them trains, and what the log may ask about them."""

    losses: Mapping[str, Tensor]
    embeddings: Tensor  # of the network that becomes the artifact
    statistics: Callable[[Mapping[str, float]], Mapping[str, Any]] = lambda norms: {}  # from the gradient norms
    details: Any = None  # what the method itself wants back in `Method.after_step`
    queued: QueuedBatch | None = None  # what enters the queue of past embeddings, where there is one


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step did. A step whose loss or gradient is not finite changes nothing.

    On a GPU the host may be ahead of the device: to read a number, or whether the step was applied, waits for it.
    """

    numbers: StepNumbers
    embeddings: Tensor  # detached, of the last batch of the step
    lazy_stats: Callable[[], Mapping[str, Any]] = dict  # what difficulty did; worked out only when a line is logged
    stays_valid: bool = False  # whether that is still the same after the next step

    @property
    def loss(self) -> float:
        """The mean loss over the batches of the step; where it was refused, of the network that diverged."""
        return self.numbers.mean_losses[self.numbers.told_network]

    @property
    def gradient(self) -> float:
        """The norm of the gradient, of the same network."""
        return self.numbers.norms[self.numbers.told_network]

    @property
    def applied(self) -> bool:
        """Whether the step was made."""
        return self.numbers.applied

    @property
    def is_read(self) -> bool:
        """Whether the numbers are known to the host."""
        return self.numbers.is_read


class StepSource(Protocol):
    """Makes steps in another way where it can."""

    def step(self, batches: Sequence[Batch], lrs: Mapping[str, float], fraction_done: float) -> StepResult | None:
        """One optimization step; None where it has to be made as ever."""
        ...


class Method(ABC):
    """Networks, the losses that train them, and the step.

    A subclass hands its networks to ``__init__`` and says in :meth:`compute_losses` what their losses are. The network
    ``"model"`` becomes the artifact. Losses and difficulties with a state of their own (an ``nn.Module``) are trained,
    saved and resumed with the network that they belong to.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        losses: Mapping[str, Any],
        settings: OptimSettings | None = None,
        *,
        no_decay: Collection[str] = (),
        queue: QueueSettings | None = None,
    ):
        """Put the optimizers together.

        Args:
            networks: by name; ``"model"`` is one of them.
            losses: by the name of the network that they train.
            settings: how the networks are moved.
            no_decay: networks whose weights do not decay.
            queue: of past embeddings, for a pairwise loss that takes a reference set.
        """
        for loss in losses.values():
            if getattr(loss, "reduction", None) == "none":
                raise InputError(
                    f"{type(loss).__name__} has reduction 'none', and training needs one number: use 'mean' or 'sum'"
                )
        if queue is not None:
            check_queue(losses.get("model"))
        self.settings = settings = settings or OptimSettings()
        self.model: Any = networks["model"]
        self.loss: Any = losses.get("model")
        parts = {name: trainable_parts({_mark(name): loss}) for name, loss in losses.items()}
        everything = trainable_parts({_mark(name): loss for name, loss in losses.items()})
        self.modules: dict[str, nn.Module] = {**networks, **everything}
        parameters, groups = {}, {}
        self.frozen: dict[str, FrozenLayers] = {}
        self.adapted: dict[str, tuple[str, ...]] = {}  # layers with an addition of LoRA
        for name, network in networks.items():
            own_parts = [part for key, part in everything.items() if key in parts.get(name, {})]
            own = list(dict.fromkeys(p for part in own_parts for p in part.parameters()))
            decay = 0.0 if name in no_decay else settings.weight_decay
            if settings.lora is not None and (name == "model" or find_backbone(network) is not None):
                self.adapted[name] = add_lora(network, settings.lora)
                self.frozen[name] = FrozenLayers(frozen_norms(network), ())
            if settings.freeze is not None and (name == "model" or find_backbone(network) is not None):
                self.frozen[name] = freeze_layers(network, settings.freeze, settings.freeze_share)
            parameters[name] = [*network.parameters(), *own]
            groups[name] = _network_groups(network, decay, settings)
            groups[name] += weight_decay_groups(own, decay, settings.loss_rate, "loss")
        device = next(self.model.parameters()).device.type
        self.optimizer = MultiOptimizer(parameters, groups, device=device, settings=settings)
        self.max_skipped_steps = self.optimizer.max_skipped_steps
        averaged = {name: module for name, module in self.modules.items() if any(True for _ in module.parameters())}
        self.average = WeightAverage(averaged, settings.ema) if settings.ema else None
        self.past = None if queue is None else PastEmbeddings(self.model, queue, settings.cached)
        if self.past is not None:
            self.modules["past"] = self.past
        self.recorder: StepSource | None = None  # `step_graph.record_steps` puts one here
        self._across: dict[int, AcrossRanks] = {}  # losses that several ranks compute together, by their identity
        self._has_own_queue = any(isinstance(part, Queue) for loss in everything.values() for part in loss.modules())

    @abstractmethod
    def compute_losses(self, batch: Batch, fraction_done: float) -> LossTerms:
        """The losses of a batch, with gradient; ``fraction_done`` is the share of training that is done."""

    def run_network(self, network: Any, batch: Batch, forward: Callable[[Any], Tensor] | None = None) -> Tensor:
        """What a network, or one of its methods, gives for a batch: in micro-batches, where gradients are cached."""
        return self.gather_rows(lambda inputs: cached_forward(network, inputs, self.settings.cached, forward), batch)

    def gather_rows(self, compute: Callable[[Any], Tensor], batch: Batch) -> Tensor:
        """What a function makes of a batch: one row for each of its rows, whichever rank has its input."""
        if batch.rank_rows is None:
            return compute(batch.inputs)
        # The second pass of gradient caching comes later, and ranks may have different numbers of micro-batches.
        synchronize = self.settings.sync_batchnorm and not self.settings.cached
        with forward_on_rank(batch.inputs.device, sync_batchnorm=synchronize):
            own = compute(batch.inputs)
        return gather_batch(own, batch.rank_rows)

    def embed_keys(self, batch: Batch) -> Tensor | None:
        """What the momentum encoder of a queue makes of a batch; None where there is none."""
        past = self.past
        return None if past is None or past.encoder is None else self.gather_rows(past.embed_keys, batch)

    def call_loss(self, loss: Any, embeddings: Tensor, labels: Tensor, batch: Batch, **options: Any) -> Tensor:
        """``loss(embeddings, labels, **options)`` of a whole batch; each rank does its part where the loss allows."""
        if batch.rank_rows is None or not set(options) <= SHARED_OPTIONS:
            return loss(embeddings, labels, **options)
        across = loss if is_spread(loss) else self._across.setdefault(id(loss), across_ranks(loss))
        if not is_spread(loss) and across.how == "replicated":
            return loss(embeddings, labels, **options)
        own = torch.from_numpy(batch.rank_rows[dist.get_rank()]).to(labels.device)
        if "biased" in options:
            options["biased"] = options["biased"][own]
        return across(select_own_rows(embeddings, batch.rank_rows), labels[own], **options)

    def step(self, batches: Batch | Sequence[Batch], lr: float, fraction_done: float) -> StepResult:
        """One optimization step at this learning rate, unless something is not finite.

        Of several batches the mean gradient is taken, each batch with pairs of its own.
        """
        batches = [batches] if isinstance(batches, Batch) else batches
        lrs = self.learning_rates(lr)
        found = None if self.recorder is None else self.recorder.step(batches, lrs, fraction_done)
        return self.make_step(batches, lrs, fraction_done) if found is None else found

    def make_step(
        self, batches: Sequence[Batch], lrs: Mapping[str, float | Tensor], fraction_done: float
    ) -> StepResult:
        """One optimization step, launched one kernel after the other; rates are numbers, or tensors on the device."""
        for module in self.modules.values():
            module.train()
        for frozen in self.frozen.values():
            frozen.update(fraction_done)
        self.optimizer.zero_grad()
        # What forward passes change, and a refused step must not: statistics of norms, thresholds that follow the data.
        before = TensorSnapshot(
            buffer for module in self.modules.values() if module is not self.past for buffer in module.buffers()
        )
        found = []
        for batch in batches:
            terms = self.compute_losses(batch, fraction_done)
            self.optimizer.backward(terms.losses, len(batches))
            found.append(terms)
        if batches[0].rank_rows is not None:
            self._join_ranks()
        last, read = found[-1], self.must_read(fraction_done)
        numbers = self.optimizer.step([terms.losses for terms in found], lrs, read=read)
        if not read:
            before.restore(numbers.refused)
            carried = TensorSnapshot(self._carried_tensors())
            self._finish_step(found, fraction_done)
            carried.restore(numbers.refused)
        elif numbers.applied:
            self._finish_step(found, fraction_done)
        else:
            before.restore()
        # Not all of the terms: what waits to be logged would keep the graph of autograd alive.
        stats, stay = partial(_read_statistics, last.statistics, numbers), self.statistics_stay_valid
        return StepResult(numbers, last.embeddings.detach(), stats, stay)

    def _join_ranks(self) -> None:
        """After the backward passes of all ranks: the gradient of the whole batch, and one set of statistics."""
        average_gradients(p for own in self.optimizer.parameters.values() for p in own)
        if not self.settings.sync_batchnorm or self.settings.cached:
            broadcast_tensors(buffer for module in self.modules.values() for buffer in module.buffers())

    @property
    def statistics_stay_valid(self) -> bool:
        """Whether statistics of a step follow from its tensors alone, and not from what the next step changes too."""
        return False

    def _finish_step(self, terms: Sequence[LossTerms], fraction_done: float) -> None:
        self.after_step(terms)
        if self.average is not None and fraction_done >= self.settings.ema_start:
            self.average.update(self.modules)

    def must_read(self, fraction_done: float) -> bool:
        """Whether the host has to know that a step is made before it goes on; it always does on a processor.

        So it is where something is about to begin (optimizer states, averages), where a queue fills up, and where a
        method remembers more of a step than tensors: one with an `after_step` of its own.
        """
        if self.optimizer.must_read or type(self).after_step is not Method.after_step or self._has_own_queue:
            return True
        is_filling = self.past is not None and not self.past.queue.is_known_full()
        is_due = self.average is not None and fraction_done >= self.settings.ema_start
        return is_filling or (self.average is not None and is_due and not self.average.has_begun)

    def find_stage(self, fraction_done: float) -> tuple[bool, ...]:
        """What is on and off at this share of training: steps of one stage do the same things."""
        is_due = self.average is not None and fraction_done >= self.settings.ema_start
        return (is_due, *(frozen.is_frozen(fraction_done) for frozen in self.frozen.values()))

    def _carried_tensors(self) -> Iterator[Tensor]:
        """What the end of a step changes."""
        if self.past is not None:
            yield from self.past.changing_tensors()
        if self.average is not None:
            yield from self.average.tensors()

    def learning_rates(self, lr: float) -> dict[str, float]:
        """The learning rate of each network, where that of the run is ``lr``."""
        return dict.fromkeys(self.optimizer.optimizers, lr)

    def after_step(self, terms: Sequence[LossTerms]) -> None:
        """What a method remembers of a step that was applied: its batches, where there is a queue."""
        if self.past is not None:
            self.past.update(self.model, [one.queued for one in terms if one.queued is not None])

    def autocast(self) -> torch.autocast:
        """For the forward passes of the networks; losses are computed outside."""
        return self.optimizer.autocast()

    def describe_training(self) -> tuple[str, ...]:
        """Lines: micro-batches, what is frozen, the groups of optimizers where a backbone trains in its own way."""
        settings, lines = self.settings, []
        if settings.cached and any(has_batch_norm(self.modules[name]) for name in self.optimizer.optimizers):
            lines.append(describe_batch_norm(settings.cached))
        for name, layers in self.adapted.items():
            assert settings.lora is not None
            lines.append(describe_lora(self.modules[name], layers, settings.lora))
        for name, frozen in self.frozen.items() if settings.freeze is not None else ():
            lines.append(describe_frozen(frozen, str(settings.freeze), self.modules[name]))
        if self.frozen or settings.layer_decay != 1 or settings.backbone_rate != 1:
            for optimizer in self.optimizer.optimizers.values():
                lines.append(describe_groups(type(optimizer).__name__, optimizer.param_groups))
        return tuple(lines)

    def final_module(self, name: str = "model") -> Any:
        """A network or loss as it is to be kept: its moving average, where there is one and it has begun."""
        averages = {} if self.average is None or not self.average.has_begun else self.average.averages
        return averages[name].module if name in averages else self.modules.get(name, getattr(self, name, None))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs: networks, losses, optimizers, averages."""
        return {
            "modules": {name: collect_module_state(module) for name, module in self.modules.items()},
            "optimizer": self._change_optimizer_rows(self.optimizer.state_dict(), collect_optimizer_rows),
            "average": {} if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name, module in self.modules.items():
            load_module_state(module, state["modules"][name])
        self.optimizer.load_state_dict(self._change_optimizer_rows(state["optimizer"], select_optimizer_rows))
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    def _change_optimizer_rows(self, state: Mapping[str, Any], change: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """The state of the optimizers with other rows of class vectors, where ranks hold different ones."""
        optimizers = {
            name: change(own, self.optimizer.optimizers[name].param_groups, self.loss)
            for name, own in state["optimizers"].items()
        }
        return {**state, "optimizers": optimizers}


def _read_statistics(
    statistics: Callable[[Mapping[str, float]], Mapping[str, Any]], numbers: StepNumbers
) -> Mapping[str, Any]:
    return statistics(numbers.norms)


def _mark(network: str) -> str:
    """What the names of a loss begin with in checkpoints."""
    return "" if network == "model" else f"{network} "


def _network_groups(network: nn.Module, weight_decay: float, settings: OptimSettings) -> list[dict[str, Any]]:
    """The parameter groups of a network; its backbone has some of its own where it learns at another pace.

    What is frozen for all of training is in none of them.
    """
    backbone, rate = find_backbone(network), settings.backbone_rate
    if not hasattr(network, "backbone"):  # of a module of somebody else nobody knows what its head is
        rate = 1.0
    moved = [p for p in network.parameters() if p.requires_grad]
    if backbone is None or (rate == 1 and settings.layer_decay == 1):
        return weight_decay_groups(moved, weight_decay)
    inside = set(backbone.parameters())
    layers = [("backbone", list(backbone.parameters()), 1.0)]
    if settings.layer_decay != 1:
        layers = [(f"backbone {name}", own, scale) for name, own, scale in layer_rates(backbone, settings.layer_decay)]
    groups = []
    for name, own, scale in layers:
        groups += weight_decay_groups([p for p in own if p in set(moved)], weight_decay, rate * scale, name)
    return groups + weight_decay_groups([p for p in moved if p not in inside], weight_decay, name="head")


def trainable_parts(losses: Mapping[str, Any]) -> dict[str, nn.Module]:
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


def progress_option(loss: Any, fraction_done: float) -> dict[str, float]:
    """The progress of training, for a loss that takes it: a curriculum may still be fading in."""
    return {"progress": fraction_done} if getattr(loss, "takes_progress", False) else {}


def takes_after(loss: Any) -> bool:
    """Whether a loss is called with the embeddings after a neck too, ``loss(before, labels, after=after)``."""
    return getattr(loss, "takes_after", False) is True


def check_classes(classes: Tensor) -> None:
    """Numbering looks labels up in a sorted list, so a list that is not sorted would number them wrongly."""
    is_list = isinstance(classes, Tensor) and classes.ndim == 1 and not classes.is_floating_point()
    if not is_list or not bool((classes[1:] > classes[:-1]).all()):
        raise InputError("classes= must be the labels that occur in training, whole numbers, each once, sorted")


def class_indices(labels: Tensor, classes: Tensor) -> Tensor:
    """The place of every label among the classes.

    A label that is none of them is an error, told at once on a processor. A GPU would stand still for the question:
    there it becomes -1, which losses refuse when they come to it.
    """
    index = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    unknown = classes[index] != labels
    if labels.is_cuda:
        return index.masked_fill(unknown, -1)
    if bool(unknown.any()):
        label = labels[unknown][0].item()
        raise InputError(
            f"label {label} is none of the {len(classes)} classes that training began with: pass them all as classes="
        )
    return index


def wants_sparse_grad(loss: Any) -> bool:
    """Whether a loss asks for sparse gradients of its own parameters."""
    return isinstance(loss, nn.Module) and any(getattr(part, "sparse", False) is True for part in loss.modules())


def uses_second_encoder(loss: Any) -> bool:
    """Whether a loss looks at a second encoder."""
    return any(isinstance(part, Relative) for part in iterate_parts(getattr(loss, "difficulty", None)))


def check_queue(loss: Any) -> None:
    """Refuse a loss that cannot compare a batch with past embeddings."""
    if uses_second_encoder(loss):
        raise InputError(
            "a queue does not go with a Relative difficulty, which would need past embeddings of the second encoder "
            "too: leave the queue out, or choose another difficulty"
        )
    if not takes_references(loss):
        raise InputError(
            f"{type(loss).__name__} cannot compare a batch with a queue of past embeddings: leave the queue out, or "
            "choose a pairwise loss with a form against a reference set, such as SupCon, InfoNCE or Contrastive"
        )
