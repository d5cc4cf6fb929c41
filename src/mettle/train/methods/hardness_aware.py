r"""Hardness-aware metric learning: a tuple loss on real samples and on synthetic ones that get harder with time.

HDML (Zheng et al. 2019) uses a difficulty neither as a weight nor as a margin, but to make samples that are not in the
data. Of an anchor z, its positive z⁺ and a negative z⁻:

    augmentor   ẑ⁻ = z + (λ d⁻ + (1 − λ) d⁺) / d⁻ · (z⁻ − z)  where d⁻ > d⁺, else z⁻;  so d(z, ẑ⁻) = d⁺ + λ (d⁻ − d⁺)
    generator   ỹ = i(ẑ⁻): the features of which ẑ⁻ would be the embedding, still of the class of z⁻
    levels      λ = e^{−α / J_avg} falls as the metric loss does; e^{−β / J_gen} is how much the real tuples still count
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from mettle.data.loader import Batch
from mettle.difficulty import validate_fields, validate_integers
from mettle.errors import InputError
from mettle.losses import PairwiseLoss
from mettle.model import Embedder
from mettle.model.embedder import eval_mode
from mettle.train.methods.base import LossTerms, Method, check_classes, class_indices, progress_option
from mettle.train.methods.tuple_layouts import NormRows, TupleRows, tuple_layout
from mettle.train.optim import OptimSettings

SOFT = 1e4  # what the class term of J_gen is multiplied by
MODES = ("absolute", "relative")
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
START = 1e6  # what both levels are taken to be before a window is full: nothing pulled, nothing synthetic


@dataclass(frozen=True)
class Synthesis:
    """How hard synthetic negatives are, and how much they count. Defaults are the published ones.

    ``alpha`` and ``beta`` have the units of the losses they divide: the published values fit sums over 120 images and
    1,024 features. In ``relative`` mode they are multiples of the first full window, which fits any data.
    """

    alpha: float = 90.0  # λ = e^{−alpha / J_avg}
    beta: float = 1e4  # weight of the real tuples = e^{−beta / J_gen}
    alpha_mode: Literal["absolute", "relative"] = "absolute"
    beta_mode: Literal["absolute", "relative"] = "absolute"
    javg: Literal["repo", "metric"] = "repo"  # average of weight · (J + l2 term), as published in code, or of J itself
    window: int = 64  # steps that are averaged, one window after the other
    level: float | None = None  # λ itself, in place of e^{−alpha / J_avg}: 1 switches the augmentor off
    real: float | None = None  # the weight of real tuples itself, in place of e^{−beta / J_gen}
    generator: bool = True  # False: ẑ⁻ is used as it is
    soft: float = 0.5  # share of the class term in J_gen: 0 = reconstruction only, 1 = class term only
    hidden: int = 512  # units of the generator
    generator_rate: float = 1e-2  # learning rates of the generator and of the softmax head
    head_rate: float = 1e-3
    l2: float = 0.0  # times half the squared weights and biases of all layers but norms, added to the real loss
    norm_rows: NormRows = "synthetic"  # of `NPair`: whose lengths its norm term takes, see `NPairLayout`

    def __post_init__(self) -> None:
        validate_fields(self)
        validate_integers(window=self.window, hidden=self.hidden)
        need = [
            (self.alpha >= 0 and self.beta >= 0, f"alpha and beta are at least 0, got {self.alpha}, {self.beta}"),
            (self.window >= 1, f"window is a number of steps, at least 1, got {self.window}"),
            (self.level is None or 0 <= self.level <= 1, f"level (λ) lies between 0 and 1, got {self.level}"),
            (self.real is None or 0 <= self.real <= 1, f"real is a weight between 0 and 1, got {self.real}"),
            (0 <= self.soft <= 1, f"soft is a share between 0 and 1, got {self.soft}"),
            (self.hidden >= 1, f"hidden is a number of units, at least 1, got {self.hidden}"),
            (self.generator_rate > 0 and self.head_rate > 0, "generator_rate and head_rate must be above 0"),
            (self.l2 >= 0, f"l2 is at least 0, got {self.l2}"),
        ]
        choices = {"javg": ("repo", "metric"), "alpha_mode": MODES, "beta_mode": MODES, "norm_rows": get_args(NormRows)}
        for name, known in choices.items():
            need.append((getattr(self, name) in known, f"{name} must be one of {known}, got {getattr(self, name)!r}"))
        for fine, message in need:
            if not fine:
                raise InputError(message)

    def pull_level(self, metric: "WindowMean") -> float:
        """λ: 1 leaves negatives where they are, 0 pulls them as near as the positive."""
        return decay_weight(self.alpha, self.alpha_mode, metric) if self.level is None else self.level

    def real_weight(self, generator: "WindowMean") -> float:
        """Weight of the real tuples; the synthetic ones get the rest."""
        if self.real is not None:
            return self.real
        if not self.generator:  # nothing is generated, so nothing is mistrusted: the limit J_gen → 0
            return 1.0 if self.beta == 0 else 0.0
        return decay_weight(self.beta, self.beta_mode, generator)


class WindowMean:
    """Mean of the last full window of steps, window after window (not sliding)."""

    def __init__(self, size: int):
        self.size, self.total, self.count = size, 0.0, 0
        self.mean: float | None = None
        self.first: float | None = None  # mean of the first full window

    def update(self, value: float) -> None:
        """One more step."""
        self.total, self.count = self.total + value, self.count + 1
        if self.count == self.size:
            self.mean = self.total / self.size
            self.first = self.mean if self.first is None else self.first
            self.total, self.count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        vars(self).update(state)


def decay_weight(rate: float, mode: str, window: WindowMean) -> float:
    """e^{−rate / J}, J the last full window; in ``relative`` mode the rate is in units of the first one."""
    if mode == "relative":
        if window.first is None or window.mean is None:
            return 1.0
        rate = rate * window.first
    level = START if window.mean is None else window.mean
    if rate == 0:
        return 1.0
    return math.exp(-rate / level) if level > 0 else 0.0


class Generator(nn.Module):
    """Embeddings to features: linear, ReLU, batch norm, linear."""

    def __init__(self, dim: int, features: int, hidden: int = 512):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(inplace=True), nn.BatchNorm1d(hidden), nn.Linear(hidden, features)
        )

    def forward(self, z: Tensor) -> Tensor:
        """(n, dim) to (n, features)."""
        return self.layers(z)


class HardnessAwareTerms(NamedTuple):
    """The losses of one batch, each with the gradient paths that the published method has."""

    metric: Tensor  # for backbone and embedding layer: weight · real + (1 − weight) · synthetic
    generator: Tensor  # J_gen, for the generator
    head: Tensor  # cross-entropy of real features, for the softmax head
    real: Tensor  # J(T), the l2 term included
    plain: Tensor  # J(T) by itself
    synthetic: Tensor  # J(T̃)
    embeddings: Tensor
    labels: Tensor  # as the loss reads them: places among the classes, where it has a number for each class
    statistics: dict[str, Tensor]


class HardnessAware(Method):
    r"""HDML (Zheng et al. 2019) around a pairwise loss J: ``HardnessAware(Triplet(...))``, ``HardnessAware(SupCon())``.

    Formula, y the features of a sample, z their embedding, T the tuples of a batch, T̃ the same with pulled negatives
    (`pull_negatives`), sent through the generator and the embedding layer:
        J_metric = e^{−β/J_gen} J(T) + (1 − e^{−β/J_gen}) J(T̃)           trains backbone and embedding layer
        J_gen    = (1−s) Σ‖y − i(z)‖² + s·10⁴·mean CE(W i(ẑ), label)      trains the generator i
        CE(W y, label)                                                    trains the softmax head W
    All three step together. J(T̃) reaches the backbone through generator and augmentor, which it does not train; J_avg
    and J_gen in the exponents are constants, means of the last full window of steps.
    Tuples:
        Triplet  of P classes x K samples: neighbours of a class are anchor and positive, the class that comes next in
                 the batch gives the negative; J is the sum over triples
        NPair    of P classes x 2 samples: every other class's positive is pulled for every anchor, P² new points;
                 J is the mean over anchors
        others   of P classes x K samples: neighbours of a class are anchor and positive, m pairs; every positive is
                 pulled for every anchor of another class, m² new points; J is the loss's own mean over the m anchors,
                 each against its own m points (Contrastive, SupCon, InfoNCE, mined triplets, with a difficulty or not)
    ``classes`` are the labels that occur in training, sorted.
    """

    def __init__(
        self,
        loss: PairwiseLoss,
        model: Embedder,
        *,
        classes: Tensor,
        synthesis: Synthesis | None = None,
        **options: Any,
    ):
        self.plan = synthesis or Synthesis()
        self.tuples = tuple_layout(loss, self.plan.norm_rows)
        if not isinstance(classes, Tensor) or len(classes) < 2:
            raise InputError("classes= must be the labels that occur in training, sorted, two or more of them")
        check_classes(classes)
        if getattr(model, "neck", None) is not None:
            raise InputError(
                "HardnessAware takes a model without a neck: it embeds synthetic features by the head alone"
            )
        self.average_metric, self.average_generator = WindowMean(self.plan.window), WindowMean(self.plan.window)
        self.classes = classes.cpu()  # where unknown labels are told at once
        networks: dict[str, nn.Module] = {"model": model}
        if self.plan.generator:
            like, size = next(model.parameters()), feature_dim(model)
            self.generator = Generator(model.dim, size, self.plan.hidden).to(like.device, like.dtype)
            self.head = nn.Linear(size, len(classes)).to(like.device, like.dtype)
            networks |= {"generator": self.generator, "head": self.head}
        super().__init__(networks, {"model": loss}, OptimSettings(**options), no_decay=("generator", "head"))

    def learning_rates(self, lr: float) -> dict[str, float]:
        """Those of generator and head are constant, as published."""
        return {"model": lr, "generator": self.plan.generator_rate, "head": self.plan.head_rate}

    def compute_losses(self, batch: Batch, fraction_done: float) -> LossTerms:
        """The three losses of a batch, by the network that each trains."""
        found, levels = self.terms(batch, fraction_done), self.levels()
        losses = {"model": found.metric, "generator": found.generator, "head": found.head}
        losses = {name: losses[name] for name in self.optimizer.optimizers}
        z = found.embeddings.detach()

        def statistics(norms: Mapping[str, float]) -> dict[str, Any]:
            progress = progress_option(self.loss, fraction_done)
            stats: dict[str, Any] = self.loss.statistics(z, found.labels, **progress).as_dict() | levels
            stats |= {"loss_real": found.plain.item(), "loss_generator": found.generator.item()}
            return stats | {name: tensor.item() for name, tensor in found.statistics.items()}

        return LossTerms(losses, z, statistics, found)

    def after_step(self, terms: Sequence[LossTerms]) -> None:
        """Both windows take in the losses of the step."""
        found: list[HardnessAwareTerms] = [one.details for one in terms]
        sums = [torch.stack([x.detach().float() for x in (one.real, one.plain, one.generator)]) for one in found]
        real, plain, generator = (torch.stack(sums).mean(0) if len(sums) > 1 else sums[0]).tolist()
        weight = self.plan.real_weight(self.average_generator)
        self.average_metric.update(weight * real if self.plan.javg == "repo" else plain)
        self.average_generator.update(generator)

    def levels(self) -> dict[str, float]:
        """Where the method stands: λ, both mixing weights, and the averages that they follow from."""
        weight = self.plan.real_weight(self.average_generator)
        known = {"j_avg": self.average_metric.mean, "j_gen": self.average_generator.mean}
        return {
            "lambda": self.plan.pull_level(self.average_metric),
            "weight_real": weight,
            "weight_synthetic": 1 - weight,
            **{name: value for name, value in known.items() if value is not None},
        }

    def terms(self, batch: Batch, fraction_done: float = 1.0) -> HardnessAwareTerms:
        """The losses of a batch, on one graph."""
        # On the processor: tuples are told from labels, so a GPU is asked for them anyway, and an index that is none
        # would end its whole process.
        labels = class_indices(batch.labels.cpu(), self.classes).to(batch.labels.device)
        loss_labels = labels if getattr(self.loss, "reads_labels", False) else batch.labels
        rows = self.tuples.tuple_rows(loss_labels)
        level, weight = self.plan.pull_level(self.average_metric), self.plan.real_weight(self.average_generator)
        with self.autocast():
            y = self.run_network(self.model, batch, self.model.features)
            z = to_float32(self.embedding(y))
        hard, source = self.tuples.synthesize_negatives(z, rows, level)
        stats = {"pulled": self.tuples.share_movable(z, rows)}
        plain = self.tuples.tuple_loss(z, z, self.tuples.negatives(z, rows), rows, fraction_done)
        if not self.plan.generator:
            synthetic, generator, head = (
                self.tuples.tuple_loss(z, z, hard, rows, fraction_done),
                plain.new_zeros(()),
                plain.new_zeros(()),
            )
        else:
            with self.autocast():
                back = to_float32(self.generator(torch.cat([z, hard])))
                with keep_running_stats(self.model.head):
                    z_back, z_hard = to_float32(self.embedding(back)).split([len(z), len(hard)])
            synthetic = self.tuples.tuple_loss(z_back, z_back, z_hard, rows, fraction_done)
            generator, head, more = self._generated(to_float32(y), back, labels, labels[source], rows)
            stats |= more
        real = plain + self.plan.l2 * self._squares() if self.plan.l2 else plain
        metric = weight * real + (1 - weight) * synthetic
        stats["loss_synthetic"] = synthetic.detach()
        return HardnessAwareTerms(metric, generator, head, real, plain, synthetic, z, loss_labels, stats)

    def _generated(
        self, y: Tensor, back: Tensor, labels: Tensor, source: Tensor, rows: TupleRows
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """J_gen, the loss of the softmax head, and how good generator and head are."""
        share, y = self.plan.soft, y.detach()
        recovered, made = back.split([len(y), len(source)])
        missed = (recovered - y).square().sum()
        logits = self.head(made)
        as_they_are = self.tuples.class_term_rows(rows)  # rows that go into the class term as they are
        soft = self.tuples.class_term(self.head(recovered[as_they_are]), labels[as_they_are], logits, source)
        generator = (1 - share) * missed + share * SOFT * soft
        own = self.head(y)
        head = cross_entropy(own, labels)
        with torch.no_grad():
            spread = (y - y.mean(0)).square().sum()
            stats = {
                "reconstruction": missed / spread,  # 1 is what the mean feature would reach
                "head_real": (own.argmax(1) == labels).float().mean(),
                "head_synthetic": (logits.argmax(1) == source).float().mean(),
            }
        return generator, head, stats

    def embedding(self, y: Tensor) -> Tensor:
        """Features to embeddings: the same layer for real and synthetic ones."""
        z = self.model.head(y)
        return normalize(to_float32(z), dim=1) if self.model.spec.unit else z

    def _squares(self) -> Tensor:
        """Half the squared weights and biases of backbone and embedding layer, without those of norms, as published."""
        layers = (part for part in self.model.modules() if not isinstance(part, NORMS))
        squares = [p.square().sum() for layer in layers for p in layer.parameters(recurse=False)]
        return torch.stack(squares).sum() / 2

    def state_dict(self) -> dict[str, Any]:
        """All networks, all optimizers, both windows."""
        windows = {"metric": self.average_metric.state_dict(), "generator": self.average_generator.state_dict()}
        return super().state_dict() | {"windows": windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        super().load_state_dict(state)
        self.average_metric.load_state_dict(state["windows"]["metric"])
        self.average_generator.load_state_dict(state["windows"]["generator"])


def feature_dim(model: Embedder) -> int:
    """How many features the head of a model sees."""
    place = next(model.parameters())
    with torch.no_grad(), eval_mode(model):
        return model.features(torch.zeros(1, *model.shape, device=place.device, dtype=place.dtype)).shape[1]


@contextmanager
def keep_running_stats(module: nn.Module) -> Iterator[None]:
    """Batch norms normalise as ever, but what they keep for later stays that of real features."""
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm1d)]
    momenta = [part.momentum for part in norms]
    for part in norms:
        part.momentum = 0.0
    try:
        yield
    finally:
        for part, momentum in zip(norms, momenta, strict=True):
            part.momentum = momentum


def to_float32(x: Tensor) -> Tensor:
    """Half precision to float32; everything else as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
