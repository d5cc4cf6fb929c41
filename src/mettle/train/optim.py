"""How parameters move: optimizers and schedules by name, parameter groups, the step in mixed precision, averages.

A schedule is a pure function of the step, so a resumed run needs nothing to know its learning rate. An optimizer is any
class of `torch.optim` that steps from gradients alone; a schedule is one of the few below or any class of
`torch.optim.lr_scheduler`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mettle.errors import InputError, RecipeError, nearest
from mettle.train.device_reads import StreamPoint
from mettle.train.factory import build, constructor_arguments
from mettle.train.gradient_caching import check_rows
from mettle.train.lora import LoraSettings
from mettle.train.ranks.class_rows import collect_module_state, load_module_state

# These need the loss again and again, sparse gradients, or more than one network's worth of care.
NOT_STEPPED = {
    "Optimizer": "is only the base of all",
    "LBFGS": "needs a closure",
    "SparseAdam": "wants sparse gradients",
}
FUSED = ("Adam", "AdamW", "SGD")  # steps in one kernel on CUDA, which leaves all as it is where it is told so
OPTIMIZERS: dict[str, Any] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in NOT_STEPPED
}


@dataclass(frozen=True)
class OptimSettings:
    """How the networks of a method are moved; the same for every method.

    Args:
        optimizer: a class of `torch.optim` by its name, or a table with its ``kind`` and further arguments.
        weight_decay: of matrices and kernels; biases and norms have none.
        backbone_rate: times the learning rate, for the backbone of every embedder.
        loss_rate: times the learning rate, for parameters of the loss.
        clip: largest gradient norm of a network; 0 for no limit.
        precision: of the forward passes: ``float32``, ``bfloat16`` or ``float16``.
        ema: how much of the moving average of all weights stays in a step, such as 0.999; 0 for no average.
        ema_start: share of training before the average begins; until then the weights themselves are in its place.
        freeze: the last layer of the backbone that does not train, or ``"all"`` of it; None where everything does.
        freeze_share: of training, from its beginning, for which it is frozen; None for all of it.
        layer_decay: times the learning rate, for each layer of the backbone from its end on, see `fine_tuning`.
        lora: additions of low rank to the backbone, which trains in no other way then; None for none.
        sync_batchnorm: whether batch norms take the statistics of the rows of all ranks, where there are several; else
            each rank takes those of its own rows, and rank 0 says what is kept.
        cached: inputs of a micro-batch, in which networks run by gradient caching; 0 for the whole batch at once.
    """

    optimizer: str | Mapping[str, Any] = "AdamW"
    weight_decay: float = 0.01
    backbone_rate: float = 1.0
    loss_rate: float = 1.0
    clip: float = 0.0
    precision: str = "float32"
    ema: float = 0.0
    ema_start: float = 0.0
    freeze: str | None = None
    freeze_share: float | None = None
    layer_decay: float = 1.0
    lora: LoraSettings | None = None
    sync_batchnorm: bool = True
    cached: int = 0

    def __post_init__(self) -> None:
        for name in ("ema", "ema_start"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.cached:
            check_rows(self.cached)
        if self.lora is not None and self.freeze is not None:
            raise InputError("LoRA freezes the backbone by itself: leave freeze out")
        if not 0 < self.layer_decay <= 1:
            raise InputError(f"layer_decay must be above 0 and at most 1, got {self.layer_decay}")


def build_optimizer(table: str | Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that a table describes, over these parameter groups."""
    table = {"kind": table} if isinstance(table, str) else dict(table)
    kind = str(table.get("kind"))
    if kind in NOT_STEPPED:
        raise RecipeError(
            f"train.optimizer.kind: {kind} {NOT_STEPPED[kind]}: choose one that steps from dense gradients"
        )
    for key, instead in (("lr", "train.rate"), ("weight_decay", "train.weight_decay")):
        if key in table:
            raise RecipeError(f"train.optimizer.{key} is not set here: use {instead}")
    # A learning rate for the start: schedules write it anew before every step.
    return build(OPTIMIZERS, table, "train.optimizer", {"params": [dict(group) for group in groups], "lr": 1e-3})


def weight_decay_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float, lr_scale: float = 1.0, name: str = "network"
) -> list[dict[str, Any]]:
    """Parameter groups: weight decay for matrices and kernels, none for biases and norms."""
    parameters = list(parameters)
    both = {"lr_scale": lr_scale, "name": name}
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay, **both},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, **both},
    ]
    return [group for group in groups if group["params"]]


def fuse_optimizer(table: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """A table with ``fused``, one kernel for all parameters, where torch has that and the table does not say how."""
    known = {"kind": table} if isinstance(table, str) else dict(table)
    is_open = not {"fused", "foreach", "capturable", "differentiable"} & set(known)
    return {**known, "fused": True} if known.get("kind") in FUSED and is_open else table


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer takes ``found_inf``, a tensor that tells it to change nothing."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and bool(optimizer.defaults.get("fused"))


def _keep_implementation(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer for this one, which may be fused where that was not: on another device, say."""
    own = [{key: group[key] for key in ("fused", "foreach") if key in group} for group in optimizer.param_groups]
    groups = [group | (own[k] if k < len(own) else {}) for k, group in enumerate(state["param_groups"])]
    return {**state, "param_groups": groups}


def _match_layout(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the layout of its parameter; strides of dimensions of one do not count."""
    pairs = zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
    if all(a == b for size, a, b in pairs if size > 1):
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


@dataclass(frozen=True, eq=False)
class StepNumbers:
    """The losses and gradient norms of a step, by network, where they were computed: to read one waits for that step.

    A step is refused, as a whole, where any of them is not finite.
    """

    networks: tuple[str, ...]  # whose norms come first in `seen`
    seen: Tensor  # all norms, then all losses, in float32
    losses: Sequence[Mapping[str, Tensor]]  # of every batch
    refused: Tensor  # whether the step was, a scalar
    computed: StreamPoint  # when they all were

    @classmethod
    def from_tensors(cls, norms: Mapping[str, Tensor], losses: Sequence[Mapping[str, Tensor]]) -> "StepNumbers":
        """From the norms of networks, and the losses of every batch of the step."""
        losses = [{name: loss.detach() for name, loss in batch.items()} for batch in losses]
        values = [loss for batch in losses for loss in batch.values()]
        place = values[0].device
        seen = torch.stack([x.to(place).float() for x in (*norms.values(), *values)])
        return cls(tuple(norms), seen, losses, ~torch.isfinite(seen).all(), StreamPoint(place))

    @property
    def is_read(self) -> bool:
        """Whether to ask for a number costs nothing any more."""
        return "_values" in vars(self)

    @cached_property
    def _values(self) -> list[float]:
        with self.computed.reading():
            return self.seen.tolist()

    @cached_property
    def applied(self) -> bool:
        """Whether the step was made."""
        return all(math.isfinite(value) for value in self._values)

    @property
    def norms(self) -> dict[str, float]:
        """The norm of each network's gradient."""
        return dict(zip(self.networks, self._values, strict=False))

    @cached_property
    def mean_losses(self) -> dict[str, float]:
        """The mean loss over the batches, by network."""
        with self.computed.reading():
            values = [{name: loss.item() for name, loss in batch.items()} for batch in self.losses]
        return {name: sum(batch[name] for batch in values) / len(values) for name in values[-1]}

    @cached_property
    def told_network(self) -> str:
        """The network to tell about: where a step was refused, one that diverged."""
        losses, norms = self.mean_losses, self.norms
        broken = [name for name in losses if not (math.isfinite(losses[name]) and math.isfinite(norms[name]))]
        return broken[0] if broken and "model" not in broken else "model"


class TensorSnapshot:
    """Copies of tensors, to be put back where a step was refused; the tensors stay the same objects."""

    def __init__(self, tensors: Iterable[Tensor]):
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in dict.fromkeys(tensors):
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self.groups = list(groups.values())
        self.copies = [_flatten(group) for group in self.groups]

    @torch.no_grad()
    def restore(self, refused: Tensor | None = None) -> None:
        """Put the copies back; with ``refused``, a scalar on the device, where that says so."""
        for group, before in zip(self.groups, self.copies, strict=True):
            chosen = before if refused is None else torch.where(refused, before, _flatten(group))
            parts = chosen.split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [part.view(tensor.shape) for part, tensor in zip(parts, group, strict=True)])


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class MultiOptimizer:
    """One optimizer per network: every loss moves its own network only, and all of them move or none does.

    Gradients are taken of each loss with respect to its own parameters and nothing else, so a loss may pass through
    another network without training it, and no graph needs to be cut for that.
    """

    def __init__(
        self,
        parameters: Mapping[str, Sequence[nn.Parameter]],
        groups: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        *,
        device: str,
        settings: OptimSettings | None = None,
    ):
        """``groups`` are the parameter groups of networks that have others than matrices and the rest."""
        settings = settings or OptimSettings()
        self.clip, self.device, groups = settings.clip, device, groups or {}
        self.parameters = {name: list(own) for name, own in parameters.items()}
        self.optimizers = {}
        table = settings.optimizer if device != "cuda" else fuse_optimizer(settings.optimizer)
        for name, own in self.parameters.items():
            found = groups[name] if name in groups else weight_decay_groups(own, settings.weight_decay)
            self.optimizers[name] = build_optimizer(table, found)
        self.is_fused = all(_is_fused(optimizer) for optimizer in self.optimizers.values())
        # Whether steps are refused on the device, without the host asking for each of them: see `step`.
        self.decides_on_device = device == "cuda" and self.is_fused
        self.stepped: set[nn.Parameter] = set()  # in a step that the host decided: their optimizer states are there
        self.dtype = autocast_dtype(settings.precision)
        self.scaler = torch.amp.GradScaler(device, enabled=self.dtype is torch.float16)
        # A loss scale that starts too high is lowered by refusing steps: that is no divergence yet.
        self.max_skipped_steps = 20 if self.scaler.is_enabled() else 3

    def autocast(self) -> torch.autocast:
        """For the forward passes of the networks; losses are computed outside."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def backward(self, losses: Mapping[str, Tensor], batches: int = 1) -> None:
        """Add the gradient of each loss to its own parameters, as one of so many batches that make up a step."""
        for k, (name, loss) in enumerate(losses.items()):
            own = [p for p in self.parameters[name] if p.requires_grad]  # some may be frozen
            keep = k < len(losses) - 1  # losses may share a graph
            scaled = self.scaler.scale(loss if batches == 1 else loss / batches)
            found = torch.autograd.grad(scaled, own, retain_graph=keep, allow_unused=True)
            for p, g in zip(own, found, strict=True):
                if g is not None and self.is_fused:  # one kernel over all parameters wants one layout of each
                    g = _match_layout(g, p)
                p.grad = g if p.grad is None else p.grad if g is None else p.grad + g

    @property
    def must_read(self) -> bool:
        """Whether the next step has to be decided by the host: a parameter has no state yet that could be kept."""
        stepped = self.stepped
        return not self.decides_on_device or any(
            p not in stepped and p.grad is not None for own in self.parameters.values() for p in own
        )

    def step(
        self, losses: Sequence[Mapping[str, Tensor]], lrs: Mapping[str, float | Tensor], *, read: bool = True
    ) -> "StepNumbers":
        """A step of all networks, unless a loss or a gradient is not finite.

        Args:
            losses: those of every batch of the step, by network.
            lrs: the learning rate of each network; groups scale it.
            read: whether to wait for the device and decide here. Otherwise fused optimizers are handed the decision as
                a tensor, and what they do is the same bit for bit.

        Returns:
            the norms of gradients and the losses, and whether the step was made; reading them may wait for the device.
        """
        norms = {}
        self.set_learning_rates(lrs)
        for name, optimizer in self.optimizers.items():
            self.scaler.unscale_(optimizer)
            norms[name] = self._clip(self.parameters[name])
        numbers = StepNumbers.from_tensors(norms, losses)
        if not read:
            refused = numbers.refused.float()
            for optimizer in self.optimizers.values():
                optimizer.found_inf = refused  # type: ignore[attr-defined] - as `GradScaler` tells fused optimizers
                optimizer.step()
                del optimizer.found_inf  # type: ignore[attr-defined]
        elif numbers.applied:
            for optimizer in self.optimizers.values():
                self.scaler.step(optimizer)
            if self.decides_on_device:
                self.stepped.update(p for own in self.parameters.values() for p in own if p.grad is not None)
        if self.scaler.is_enabled():
            self.scaler.update()
        return numbers

    def set_learning_rates(self, lrs: Mapping[str, float | Tensor]) -> None:
        """The learning rate of each network; its groups scale it."""
        for name, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = lrs[name] * group["lr_scale"]

    def _clip(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The norm of their gradient, which is scaled down to the limit where there is one."""
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and not is_sharded(p)])
        if any(map(is_sharded, parameters)):  # every rank has a part of these, and all of the others
            own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and is_sharded(p)])
            square = own.square()
            dist.all_reduce(square)
            norm = (norm.square() + square).sqrt()
        if self.clip:
            nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """All optimizers and the loss scale."""
        optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {"optimizers": optimizers, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(_keep_implementation(state["optimizers"][name], optimizer))
        self.scaler.load_state_dict(state["scaler"])


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether every rank holds another part of it."""
    return getattr(parameter, "is_sharded", False)


class WeightAverage:
    """Exponential moving averages of the weights of modules, their buffers included."""

    def __init__(self, modules: Mapping[str, nn.Module], decay: float):
        self.average = get_ema_multi_avg_fn(decay)
        self.averages = {name: AveragedModel(module, use_buffers=True) for name, module in modules.items()}
        self.has_begun = False
        for average in self.averages.values():  # counted where the weights are: a count elsewhere is waited for
            average.n_averaged = average.n_averaged.to(next(average.module.parameters()).device)

    @torch.no_grad()
    def update(self, modules: Mapping[str, nn.Module]) -> None:
        """Take in the weights after a step; the first are taken as they are."""
        for name, average in self.averages.items():
            groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
            for own, new in zip(_weights(average.module), _weights(modules[name]), strict=True):
                groups.setdefault((own.device, own.dtype), []).append((own, new))
            for pairs in groups.values():
                own, new = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
                if self.has_begun:
                    self.average(own, new, average.n_averaged)
                else:
                    torch._foreach_copy_(own, new)
            average.n_averaged += 1
        self.has_begun = True

    def tensors(self) -> Iterator[Tensor]:
        """Everything that an update changes."""
        for average in self.averages.values():
            yield from _weights(average.module)
            yield average.n_averaged

    def state_dict(self) -> dict[str, Any]:
        """All averages."""
        return {name: collect_module_state(average) for name, average in self.averages.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        for name, average in self.averages.items():
            load_module_state(average, state[name])
            self.has_begun = int(average.n_averaged) > 0


def _weights(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module."""
    return [*(p.detach() for p in module.parameters()), *module.buffers()]


def autocast_dtype(precision: str) -> torch.dtype | None:
    """The type that forward passes are cast to; None for float32, which they are in anyway."""
    known = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if precision not in known:
        raise InputError(f"no precision {precision!r}{nearest(str(precision), known)}")
    return known[precision]


class Shape(Protocol):
    """The course of the learning rate over a run."""

    def lr_at(self, step: int, steps: int, lr: float) -> float:
        """The learning rate of a step, from 0; ``lr`` is the highest."""
        ...


@dataclass(frozen=True)
class WarmupCosine:
    """A straight rise over the first ``warmup`` of the steps, then half a cosine down to a thousandth."""

    warmup: float = 0.2

    def lr_at(self, step: int, steps: int, lr: float) -> float:
        """The learning rate of a step."""
        rise = self.warmup * steps
        if step < rise:
            return lr * (step + 1) / (rise + 1)
        done = (step - rise) / max(steps - rise, 1)
        return lr * (0.001 + 0.999 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from the first step on, down to a thousandth."""

    def lr_at(self, step: int, steps: int, lr: float) -> float:
        """The learning rate of a step."""
        return WarmupCosine(0.0).lr_at(step, steps, lr)


@dataclass(frozen=True)
class Constant:
    """The same in every step."""

    def lr_at(self, step: int, steps: int, lr: float) -> float:
        """The learning rate of a step."""
        return lr


@dataclass(frozen=True)
class StepDecay:
    """Multiplied by ``factor`` after every ``every`` of the run, a share of its steps."""

    every: float = 1 / 3
    factor: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.every <= 1 or not 0 < self.factor <= 1:
            raise InputError(f"every and factor lie between 0 and 1, got {self.every} and {self.factor}")

    def lr_at(self, step: int, steps: int, lr: float) -> float:
        """The learning rate of a step."""
        return lr * self.factor ** int(step / steps / self.every + 1e-9)


@dataclass(frozen=True)
class OneCycle:
    """Half a cosine up from ``start`` of the highest over the first ``warmup`` of the steps, then down to ``final``."""

    warmup: float = 0.2
    start: float = 0.04
    final: float = 4e-6

    def lr_at(self, step: int, steps: int, lr: float) -> float:
        """The learning rate of a step."""
        rise = self.warmup * steps
        if step < rise:
            return lr * (1 - (1 - self.start) * 0.5 * (1 + math.cos(math.pi * step / rise)))
        done = (step - rise) / max(steps - 1 - rise, 1)
        return lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


@dataclass(frozen=True, eq=False)
class TorchSchedule:
    """A class of `torch.optim.lr_scheduler` by name, stepped ahead of time on a parameter that nothing trains.

    What the class wants to know about the run and the table does not say (``T_max``, ``total_steps``, ``total_iters``,
    ``max_lr``) follows from the run.
    """

    table: Mapping[str, Any]
    known: dict[tuple[int, float], list[float]] = field(default_factory=dict)

    def lr_at(self, step: int, steps: int, lr: float) -> float:
        """The learning rate of a step."""
        if (steps, lr) not in self.known:
            self.known[steps, lr] = self._course(steps, lr)
        return self.known[steps, lr][step]

    def _course(self, steps: int, lr: float) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr)
        kind = TORCH_SCHEDULES.get(str(self.table.get("kind")))
        told = {"T_max": steps, "total_steps": steps, "total_iters": steps, "max_lr": lr}
        taken = {} if kind is None else constructor_arguments(kind)
        given = {name: value for name, value in told.items() if name in taken and name not in self.table}
        scheduler = build(TORCH_SCHEDULES, self.table, "train.schedule", {"optimizer": optimizer, **given})
        course = []
        for _ in range(steps):
            course.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if len(course) < steps:
                scheduler.step()
        return course


SCHEDULES: dict[str, Any] = {
    "warmup-cosine": WarmupCosine,
    "cosine": Cosine,
    "constant": Constant,
    "step": StepDecay,
    "one-cycle": OneCycle,
}
# Those that follow a measurement, or that are made of others, are no function of the step that a table could write.
_NO_COURSE = {"LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler", "LambdaLR", "MultiplicativeLR"}
TORCH_SCHEDULES: dict[str, Any] = {
    name: kind
    for name, kind in vars(lr_scheduler).items()
    if isinstance(kind, type)
    and issubclass(kind, lr_scheduler.LRScheduler)
    and not name.startswith("_")
    and name not in _NO_COURSE
}


@dataclass(frozen=True)
class Schedule:
    """How long and how fast: the learning rate of every step of a run."""

    steps: int
    lr: float
    shape: Shape = field(default_factory=WarmupCosine)

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, from 0."""
        return self.shape.lr_at(step, self.steps, self.lr)


def build_shape(table: str | Mapping[str, Any], warmup: float) -> Shape:
    """The course of the learning rate that a table describes; ``warmup`` is for those that have one."""
    table = {"kind": table} if isinstance(table, str) else dict(table)
    if table.get("kind") in TORCH_SCHEDULES:
        shape = TorchSchedule(table)
        shape.lr_at(0, 8, 1.0)  # tells what is wrong with it before anything is read
        return shape
    if "kind" in table and table["kind"] not in SCHEDULES:
        known = [*SCHEDULES, *TORCH_SCHEDULES]
        raise RecipeError(f"train.schedule.kind: no {table['kind']!r}{nearest(str(table['kind']), known)}")
    if "warmup" in table:
        raise RecipeError("train.schedule.warmup is not set here: use train.warmup")
    return build(SCHEDULES, table, "train.schedule", {"warmup": warmup})
