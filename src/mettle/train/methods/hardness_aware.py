"""Hardness-aware metric learning: a tuple loss on real samples and on synthetic ones that get harder with time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from mettle.data.loader import Batch
from mettle.errors import InputError
from mettle.losses import NPair, Triplet
from mettle.model import Embedder
from mettle.train.methods.base import StepResult, check_classes, numbered
from mettle.train.methods.batch_tuples import Rows, layout
from mettle.train.methods.synthesis import Generator, Synthesis, Window
from mettle.train.optim import Optimisers

SOFT = 1e4  # what the class term of J_gen is multiplied by


class Terms(NamedTuple):
    """The losses of one batch, each with the gradient paths that the published method has."""

    metric: Tensor  # for backbone and embedding layer: weight · real + (1 − weight) · synthetic
    generator: Tensor  # J_gen, for the generator
    head: Tensor  # cross-entropy of real features, for the softmax head
    real: Tensor  # J(T), the l2 term included
    plain: Tensor  # J(T) by itself
    synthetic: Tensor  # J(T̃)
    embeddings: Tensor
    facts: dict[str, Tensor]


class HardnessAware:
    r"""HDML (Zheng et al. 2019) around a tuple loss J: ``HardnessAware(Triplet(...))``, ``HardnessAware(NPair(...))``.

    Formula, y the features of a sample, z their embedding, T the tuples of a batch, T̃ the same with pulled negatives
    (`mettle.train.methods.synthesis`), sent through the generator and the embedding layer:
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
    The networks come with ``model=`` and ``classes=`` (the labels that occur in training, sorted), or later: ``on``.
    """

    def __init__(
        self,
        loss: Triplet | NPair,
        model: Embedder | None = None,
        *,
        classes: Tensor | None = None,
        synthesis: Synthesis | None = None,
        weight_decay: float = 0.01,
        clip: float = 0.0,
        precision: str = "float32",
    ):
        self.loss, self.tuples, self.plan = loss, layout(loss), synthesis or Synthesis()
        self._options: dict[str, Any] = {"weight_decay": weight_decay, "clip": clip, "precision": precision}
        self.average, self.generated = Window(self.plan.window), Window(self.plan.window)
        self.model: Embedder = model  # type: ignore[assignment] - None until `on` brings one
        if model is not None:
            self._build(model, classes)

    def on(self, model: Embedder, classes: Tensor) -> "HardnessAware":
        """The same method with these networks."""
        return HardnessAware(self.loss, model, classes=classes, synthesis=self.plan, **self._options)

    def _build(self, model: Embedder, classes: Tensor | None) -> None:
        if classes is None or len(classes) < 2:
            raise InputError("classes= must be the labels that occur in training, sorted, two or more of them")
        check_classes(classes)
        place = next(model.parameters())
        size = width(model)
        self.classes = classes.cpu()  # where unknown labels are told at once
        self.modules: dict[str, nn.Module] = {"model": model}
        if self.plan.generator:
            self.generator = Generator(model.spec.dim, size, self.plan.hidden).to(place.device, place.dtype)
            self.head = nn.Linear(size, len(classes)).to(place.device, place.dtype)
            self.modules |= {"generator": self.generator, "head": self.head}
        self.optimisers = Optimisers(
            {name: list(part.parameters()) for name, part in self.modules.items()},
            device=place.device.type,
            clip=self._options["clip"],
            precision=self._options["precision"],
            weight_decay={"model": self._options["weight_decay"]},
        )
        self.patience = self.optimisers.patience

    def step(self, batch: Batch, rate: float, progress: float) -> StepResult:
        """One step of all three optimisers, unless something is not finite."""
        if self.model is None:
            raise InputError("HardnessAware has no networks yet: pass model= and classes=, or use on(model, classes)")
        for module in self.modules.values():
            module.train()
        found = self.terms(batch)
        losses = {"model": found.metric, "generator": found.generator, "head": found.head}
        losses = {name: losses[name] for name in self.modules}
        rates = {"model": rate, "generator": self.plan.generator_rate, "head": self.plan.head_rate}
        norms, applied = self.optimisers.step(losses, rates)
        sums = torch.stack([x.detach().float() for x in (found.metric, found.real, found.plain, found.generator)])
        value, real, plain, generator = sums.tolist()
        facts = self.levels() | {"loss_real": plain, "loss_generator": generator}
        if applied:
            weight = self.plan.trust(self.generated)
            self.average.push(weight * real if self.plan.javg == "repo" else plain)
            self.generated.push(generator)

        def told() -> dict[str, Any]:
            return facts | {name: tensor.item() for name, tensor in found.facts.items()}

        return StepResult(value, norms["model"], applied, found.embeddings.detach(), told)

    def levels(self) -> dict[str, float]:
        """Where the method stands: λ, both mixing weights, and the averages that they follow from."""
        weight = self.plan.trust(self.generated)
        known = {"j_avg": self.average.mean, "j_gen": self.generated.mean}
        return {
            "lambda": self.plan.pull(self.average),
            "weight_real": weight,
            "weight_synthetic": 1 - weight,
            **{name: value for name, value in known.items() if value is not None},
        }

    def terms(self, batch: Batch) -> Terms:
        """The losses of a batch, on one graph."""
        # On the processor: tuples are told from labels, so a GPU is asked for them anyway, and an index that is none
        # would end its whole process.
        labels = numbered(batch.labels.cpu(), self.classes).to(batch.labels.device)
        rows = self.tuples.rows(batch.labels)
        level, weight = self.plan.pull(self.average), self.plan.trust(self.generated)
        with self.optimisers.autocast():
            y = self.model.features(batch.inputs)
            z = whole(self.embedding(y))
        hard, source = self.tuples.pulled(z, rows, level)
        facts = {"pulled": self.tuples.moved(z, rows)}
        plain = self.tuples.value(z, z, self.tuples.negatives(z, rows), rows)
        if not self.plan.generator:
            synthetic, generator, head = self.tuples.value(z, z, hard, rows), plain.new_zeros(()), plain.new_zeros(())
        else:
            with self.optimisers.autocast():
                back = whole(self.generator(torch.cat([z, hard])))
                with still(self.model.head):
                    z_back, z_hard = whole(self.embedding(back)).split([len(z), len(hard)])
            synthetic = self.tuples.value(z_back, z_back, z_hard, rows)
            generator, head, more = self._generated(whole(y), back, labels, labels[source], rows)
            facts |= more
        real = plain + self.plan.l2 * self._squares() if self.plan.l2 else plain
        metric = weight * real + (1 - weight) * synthetic
        facts["loss_synthetic"] = synthetic.detach()
        return Terms(metric, generator, head, real, plain, synthetic, z, facts)

    def _generated(
        self, y: Tensor, back: Tensor, labels: Tensor, source: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """J_gen, the loss of the softmax head, and how good generator and head are."""
        share, y = self.plan.soft, y.detach()
        recovered, made = back.split([len(y), len(source)])
        missed = (recovered - y).square().sum()
        logits = self.head(made)
        kept = self.tuples.kept(rows)  # rows that go into the class term as they are
        soft = self.tuples.soft(self.head(recovered[kept]), labels[kept], logits, source)
        generator = (1 - share) * missed + share * SOFT * soft
        own = self.head(y)
        head = cross_entropy(own, labels)
        with torch.no_grad():
            spread = (y - y.mean(0)).square().sum()
            facts = {
                "reconstruction": missed / spread,  # 1 is what the mean feature would reach
                "head_real": (own.argmax(1) == labels).float().mean(),
                "head_synthetic": (logits.argmax(1) == source).float().mean(),
            }
        return generator, head, facts

    def embedding(self, y: Tensor) -> Tensor:
        """Features to embeddings: the same layer for real and synthetic ones."""
        z = self.model.head(y)
        return normalize(whole(z), dim=1) if self.model.spec.unit else z

    def _squares(self) -> Tensor:
        total = [p.square().sum() for p in self.model.parameters() if p.ndim > 1]
        return torch.stack(total).sum() / 2

    def facts(self, embeddings: Tensor, batch: Batch, progress: float) -> dict[str, Any]:
        """Those of the tuple loss; what the synthesis did comes with the step."""
        return dict(self.loss.statistics(embeddings, batch.labels).as_dict())

    def state(self) -> dict[str, Any]:
        """All networks, all optimisers, both windows."""
        return {
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "average": self.average.state(),
            "generated": self.generated.state(),
            **self.optimisers.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        self.average.load_state(state["average"])
        self.generated.load_state(state["generated"])
        self.optimisers.load_state(state)


def width(model: Embedder) -> int:
    """How many features the head of a model sees."""
    training = model.training
    place = next(model.parameters())
    with torch.no_grad():
        found = model.eval().features(torch.zeros(1, *model.shape, device=place.device, dtype=place.dtype)).shape[1]
    model.train(training)
    return found


@contextmanager
def still(module: nn.Module) -> Iterator[None]:
    """Batch norms normalise as ever, but what they keep for later stays that of real features."""
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm1d)]
    kept = [part.momentum for part in norms]
    for part in norms:
        part.momentum = 0.0
    try:
        yield
    finally:
        for part, momentum in zip(norms, kept, strict=True):
            part.momentum = momentum


def whole(x: Tensor) -> Tensor:
    """Half precision to float32; everything else as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
