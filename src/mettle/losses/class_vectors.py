"""The thin shell that class-vector losses share: one or several vectors per class, cross-entropy over similarities.

A member says how similarities are taken (features and vectors of length 1 or not, which scale) and what its margin
makes of the similarity to the own class (``target``). Everything else is here:

    L_i = log(1 + e^{far_i − t_i}),   t_i = scale · target(cos θ_y),   far_i = log Σ_{j≠y} e^{scale · cos θ_j}

Where a class has K vectors, cos θ_j is the similarity to the nearest of them, unless a member pools them otherwise.

With label smoothing ε (Szegedy et al. 2016) the own class is the target with 1 − ε, and ε is spread over all C classes,
the own one included. The logits are those of the loss, so that of the own class has its margin:

    L_i = log(1 + e^{far_i − t_i}) + ε · ( t_i − (t_i + Σ_{j≠y} scale · cos θ_j) / C )

The sum over classes is one product with the sum of the class vectors, so no B x C matrix is needed for it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from mettle.difficulty import AdaptiveThreshold
from mettle.difficulty.settings import (
    WriteOnceModule,
    validate_choice,
    validate_difficulty,
    validate_integers,
    validate_numbers,
    view_with,
)
from mettle.errors import InputError
from mettle.losses.base import PairwiseLoss, require, softplus
from mettle.pairs import (
    Difficulty,
    Measure,
    PairOutput,
    Pass,
    Reduction,
    RowValues,
    Tile,
    logsumexp_over,
    pair_statistics,
    sum_over,
)
from mettle.pairs.class_softmax import (
    ClassSimilarity,
    class_losses,
    class_reductions,
    general_class_reductions,
    reduce_classes,
    takes_kernels,
)
from mettle.pairs.declarations import iterate_parts
from mettle.pairs.dispatch import autocast_disabled, is_known_finite, nan_if_not_finite, reduce_rows
from mettle.pairs.kernel_spec import MarginSpec, declared_margin
from mettle.pairs.loss_reduction import LossReduction
from mettle.pairs.similarity import at_least_float32, may_read, normalize_rows
from mettle.pairs.validation import Reference, validate_embeddings
from mettle.rng import hash_bits

ClassPairs = tuple[PairwiseLoss, Tensor, Tensor, Reference]
"""What the engine that knows every difficulty compares: a loss, anchors, their labels, and references."""

APART = 0.1  # of the random vectors, which stays in those of one class that start at its mean


class ClassVectors(WriteOnceModule):
    """Cross-entropy over one vector per class, or over several.

    Args:
        num_classes: C.
        dim: width of the embeddings.
        vectors_per_class: K. A sample is as similar to a class as to the nearest of its vectors (`pool`).
        difficulty: weighs samples (their pair with the own class) and wrong classes, like any other pairs.
        sample: share of the classes to compare with in each training step: those of the batch and a random rest.
        sparse: gradients of the class vectors hold the sampled rows only (for optimisers that take such).
        seed: of the sampled classes, together with the number of the step.
        label_smoothing: ε, the share of the target that is spread over all classes; with ``sample``, over those that
            are compared with.
        reduction: what the call makes of its values (`mettle.pairs.loss_reduction`). Every sample has one positive
            pair, the one with its own class; a difficulty's weight of that pair is the sample's weight.
    """

    unit_features = True
    unit_vectors = True
    self_contained = True
    takes_progress = True
    modulates_negatives = False  # whether `modulate` changes similarities to wrong classes
    anchors_are_classes = False  # whether values belong to classes instead of samples
    regularizes_vectors = False  # whether `regularizer` looks at the vectors of all classes
    scale: float | Tensor
    draw: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        vectors_per_class: int = 1,
        difficulty: Difficulty | None = None,
        sample: float = 1.0,
        sparse: bool = False,
        seed: int = 0,
        label_smoothing: float = 0.0,
        reduction: LossReduction = "mean",
    ):
        super().__init__()
        validate_choice("reduction", reduction, LossReduction)
        validate_integers(num_classes=num_classes, dim=dim, vectors_per_class=vectors_per_class)
        validate_numbers(sample=sample, label_smoothing=label_smoothing)
        if difficulty is not None:
            validate_difficulty("difficulty", difficulty)
        require(num_classes >= 1, f"num_classes must be at least 1, got {num_classes}")
        require(dim >= 1, f"dim must be at least 1, got {dim}")
        require(vectors_per_class >= 1, f"vectors_per_class must be at least 1, got {vectors_per_class}")
        require(0 < sample <= 1, f"sample is a share of the classes in (0, 1], got {sample}")
        require(
            not any(isinstance(part, AdaptiveThreshold) for part in iterate_parts(difficulty)),
            "an adaptive threshold follows pairs of samples, here samples meet class vectors: use Threshold",
        )
        require(sample < 1 or not sparse, "sparse gradients hold the sampled rows: they need sample below 1")
        require(
            0 <= label_smoothing < 1,
            f"label_smoothing is a share of the target in [0, 1), got {label_smoothing}",
        )
        if label_smoothing:
            self._check_label_smoothing(difficulty, vectors_per_class)
        self.label_smoothing = label_smoothing
        self.difficulty, self.sample, self.sparse, self.seed = difficulty, sample, sparse, seed
        self.vectors_per_class = vectors_per_class
        self.reduction: LossReduction = reduction
        self.weight = nn.Parameter(self._random_vectors(num_classes * vectors_per_class, dim))
        self.register_buffer("draw", torch.zeros((), dtype=torch.long))  # training steps that have drawn classes

    def _random_vectors(self, rows: int, dim: int) -> Tensor:
        """Where the vectors start."""
        return torch.randn(rows, dim) / dim**0.5

    def _check_label_smoothing(self, difficulty: Difficulty | None, vectors_per_class: int) -> None:
        """Refuse smoothing where the logits of a sample do not sum to one product with the sum of all vectors."""
        reasons = {
            "a difficulty": difficulty is not None,
            "several vectors per class": vectors_per_class > 1,
            "similarities to wrong classes that are changed before their sum": self.modulates_negatives,
            "classes as anchors": self.anchors_are_classes,
        }
        for reason, is_so in reasons.items():
            require(
                not is_so, f"label_smoothing does not go with {reason} ({type(self).__name__}): leave one of both out"
            )

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.weight) // self.vectors_per_class

    @property
    def dim(self) -> int:
        """Width of the embeddings."""
        return self.weight.shape[1]

    @property
    def by_row(self) -> bool:
        """Whether it is a mean of samples that do not see each other (`mettle.pairs.across_ranks`)."""
        return self.difficulty is None and self.sample == 1 and self.reduction in ("mean", "pairs")

    def target(self, cosine: Tensor) -> Tensor:
        """What the margin makes of the cosine to the own class."""
        return cosine

    def pool(self, similarity: Tensor) -> Tensor:
        """From similarities to the vectors of each class, (..., K), to that of the class: the nearest one counts."""
        return similarity.max(-1).values

    def margin_spec(self) -> MarginSpec | None:
        """What ``target`` and ``sample_loss`` come to, for the kernels; None where they are not in their family.

        A subclass that overrides the maths and does not restate this loses it.
        """
        return None

    def modulate(self, similarity: Tensor, own: Tensor) -> Tensor:
        """What is summed in place of similarities to wrong classes, (B, c), given those to the own class, (B, 1)."""
        raise NotImplementedError

    def sample_loss(self, others: Tensor, logit: Tensor) -> Tensor:
        """The loss of a sample: log Σ e^x over wrong classes against the logit of its own."""
        return softplus(others - logit)

    def regularizer(self, z: Tensor, vectors: Tensor) -> Tensor | None:
        """What is added to every value: one number, or one per sample; None for nothing."""
        return None

    def forward(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """The mean over samples, or another ``reduction``; ``progress`` of training is for a curriculum."""
        values, weight = self.resolve_difficulty(progress)._values(embeddings, labels)
        if self.reduction != "mean":
            return reduce_samples(values, weight, self.reduction)
        return values.mean() if weight is None else (values * weight).sum() / weight.sum()

    def per_anchor(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> Tensor:
        """(n,) one value per sample."""
        return self.resolve_difficulty(progress)._values(embeddings, labels)[0]

    def logits(self, embeddings: Tensor) -> Tensor:
        """(n, C) scaled similarities to every class, without margin, for prediction."""
        return self._logit_scale() * self._similarity().to_all(self._prepare_features(embeddings), self._vectors())

    @torch.no_grad()
    def predict(self, embeddings: Tensor, chunk: int = 4096) -> Tensor:
        """(n,) the most similar class of each embedding, in bounded memory: a closed-set classifier."""
        z, similarity = self._prepare_features(embeddings), self._similarity()
        top, best = z.new_full((len(z),), -torch.inf), torch.zeros(len(z), dtype=torch.long, device=z.device)
        for k, part in enumerate(self._vectors().split(chunk * self.vectors_per_class)):
            s, at = similarity.to_all(z, part).max(1)
            best, top = torch.where(s > top, at + k * chunk, best), torch.maximum(s, top)
        if not bool(torch.isfinite(z).all()):
            raise InputError("embeddings hold NaN or infinity: no class can be predicted from them")
        return best

    @torch.no_grad()
    def vectors(self) -> Tensor:
        """(C, dim) the class vectors by themselves, of length 1 where the loss takes them so: for use elsewhere.

        With K > 1 vectors per class they are (C, K, dim).
        """
        return self._by_class(normalize_rows(self.weight) if self.unit_vectors else self.weight).clone()

    @torch.no_grad()
    def start_from(self, embeddings: Tensor, labels: Tensor, *, centered: bool = False) -> Self:
        """Set the vectors of the classes that occur to the means of their samples.

        Args:
            embeddings: (n, dim) of a first pass.
            labels: (n,) from 0 to C - 1.
            centered: subtract the mean of all embeddings first and give the vectors length 1, as random ones have.
                Embeddings of an untrained network nearly point one way, and class means with them: what they have in
                common tells no classes apart. A class whose mean is the mean of all keeps the vector it has.

        With several vectors per class each keeps a tenth of where it was: equal ones would never part.
        """
        self._set_vectors(*self._find_starts(self._check(embeddings, labels), embeddings, centered))
        return self

    def _find_starts(self, labels: Tensor, embeddings: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
        """The classes whose vectors get another start, and that start of each."""
        z = normalize_rows(at_least_float32(embeddings)) if self.unit_features else at_least_float32(embeddings)
        known, means = class_means(z - z.mean(0) if centered else z, labels)
        if centered:
            size = means.norm(dim=1)
            apart = size > torch.finfo(means.dtype).eps * z.norm(dim=1).mean()
            known, means = known[apart], means[apart] / size[apart, None]
        return known, means

    def _set_vectors(self, classes: Tensor, means: Tensor) -> None:
        rows = self._rows_of(classes)
        start = means.to(self.weight.dtype).repeat_interleave(self.vectors_per_class, 0)
        self.weight[rows] = start if self.vectors_per_class == 1 else start + APART * self.weight[rows]

    @torch.no_grad()
    def statistics(self, embeddings: Tensor, labels: Tensor, *, progress: float | None = None) -> dict[str, Any]:
        """How near samples are to their class vectors, and what the difficulty did."""
        labels = self._check(embeddings, labels)
        z = at_least_float32(embeddings)
        nearness = ClassSimilarity(self.vectors_per_class, self.pool, unit_vectors=True)
        own = nearness.to_own(normalize_rows(z), self.weight, labels).clamp(-1, 1)
        found: dict[str, Any] = {
            "target_cosine": float(own.mean()),
            "target_degrees": float(own.acos().rad2deg().mean()),
            "scale": float(self.scale),
        }
        if self.difficulty is not None:
            difficulty = self.resolve_difficulty(progress).difficulty
            pairs, anchors, labels, ref = self._class_pairs(self._features(z), self._vectors(), labels)
            found |= pair_statistics(pairs, anchors, labels, difficulty=difficulty, ref=ref).as_dict()
        return found

    def resolve_difficulty(self, progress: float | None) -> Self:
        """The loss for one call, with its curriculum at this point of training; shares all parameters."""
        at = getattr(self.difficulty, "at", None)
        return self if progress is None or at is None else view_with(self, difficulty=at(progress))

    def _values(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """One value per sample, and how much it counts in the mean; None where all count alike."""
        if self.sample < 1:  # classes are drawn by the labels, so nothing can start without them
            labels, unknown = self._check(embeddings, labels), None
        else:
            labels, unknown = self._validate_inputs(embeddings, labels)
        with autocast_disabled(embeddings.device.type):
            vectors, labels = self._select_classes(labels)
            half = embeddings.dtype in (torch.float16, torch.bfloat16)
            # On the sphere the kernels read half precision as it is.
            direct = half and self.unit_features and self.difficulty is None and takes_kernels(embeddings)
            z = self._features(embeddings if direct else at_least_float32(embeddings))
            values, weight = self._evaluate(z, vectors, labels, half)
            # A sample that is broken has no direction, so on the sphere its own value says so.
            by_itself = self.unit_features and self.difficulty is None and not self.anchors_are_classes
            if not by_itself and not is_known_finite(z):
                values = values + nan_if_not_finite(z)
            if unknown is not None:
                values = values.masked_fill(unknown.any() if self.anchors_are_classes else unknown, torch.nan)
        return values, weight

    def _evaluate(self, z: Tensor, vectors: Tensor, labels: Tensor, half: bool) -> tuple[Tensor, Tensor | None]:
        """Values, and how much each counts; of features and class vectors as they are compared."""
        return self._sample_values(self._class_values(z, vectors, labels, half=half), z, vectors)

    def _sample_values(self, row_values: RowValues, z: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values, and how much each counts; of what every sample accumulated over the classes."""
        others = row_values["others_lse"]
        if len(vectors) == self.vectors_per_class or self.difficulty is not None:  # no other class: nothing to lose
            others = others.masked_fill(others == -torch.inf, torch.finfo(others.dtype).min)
        values = class_losses(
            row_values["target"],
            others,
            declared_margin(self),
            lambda own, far: self.sample_loss(far, self.logit(own, z)),
        )
        if self.label_smoothing:
            values = values + self.label_smoothing * self._gap_to_mean_logit(row_values["target"], z, vectors)
        more = self.regularizer(z, vectors)
        return values if more is None else values + more, row_values.get("weight")

    def _gap_to_mean_logit(self, own: Tensor, z: Tensor, vectors: Tensor) -> Tensor:
        """(B,) how far the logit of the own class lies above the mean of those of all classes."""
        features = at_least_float32(z)
        features = normalize_rows(features) if self.unit_features else features
        total = features @ sum_vectors(vectors.to(features.dtype), self.unit_vectors)
        logit = self.logit(own, z)
        return logit - (logit + self._logit_scale() * (total - own)) / len(vectors)

    def logit(self, own: Tensor, z: Tensor) -> Tensor:
        """The own class's logit, with margin, from what the rows hold of it.

        A cosine is multiplied by the scale, or by the length of the feature where that is kept.
        """
        if self.unit_features:
            return self._logit_scale() * self.target(own)
        size = z.norm(dim=1)
        return size * self.target(own / torch.where(size == 0, 1, size))

    def _class_values(self, z: Tensor, vectors: Tensor, labels: Tensor, half: bool = False) -> RowValues:
        if self.difficulty is not None:
            pairs, z, labels, ref = self._class_pairs(z, vectors, labels)
            if self.vectors_per_class == 1:
                return reduce_rows(pairs, z, labels, ref=ref, difficulty=self.difficulty)[0]
            return reduce_classes(pairs, z, vectors, labels, self.difficulty, self._similarity())
        target, others = self._reduce_classes(z, vectors, labels, half)
        return {"target": target, "others_lse": others}

    def all_class_values(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(B,) similarity to the own class, and (B,) log-sum-exp of scaled similarities to all others."""
        return self._reduce_classes(self._features(at_least_float32(embeddings)), self._vectors(), labels)

    def own_similarity(self, z: Tensor, labels: Tensor) -> Tensor:
        """(B,) of every sample to the class of its label, ``z`` as it is compared."""
        return self._similarity().to_own(z, self.weight, labels)

    def _reduce_classes(self, z: Tensor, vectors: Tensor, labels: Tensor, half: bool = False) -> tuple[Tensor, Tensor]:
        """Similarity to the own class, and log-sum-exp of the others, without a difficulty."""
        sphere, steepness = self.unit_features, self._logit_scale()
        if self.vectors_per_class > 1 or self.modulates_negatives:
            modulate = self.modulate if self.modulates_negatives else None
            return general_class_reductions(
                z, vectors, labels, steepness,
                similarity=self._similarity(), modulate=modulate, unit_features=sphere, half=half and sphere,
            )  # fmt: skip
        half = half and sphere  # features that keep their length may be too long for float16
        return class_reductions(
            z, vectors, labels, steepness, unit_vectors=self.unit_vectors, unit_features=sphere, half=half
        )

    def _class_pairs(self, z: Tensor, vectors: Tensor, labels: Tensor) -> ClassPairs:
        """Samples against class vectors."""
        modulate = self.modulate if self.modulates_negatives else None
        pairs = _ClassPairs(float(self._logit_scale()), self._measure(), modulate=modulate)
        return pairs, z, labels, (self._prepare_vectors(vectors, z), self._class_indices(len(vectors)))

    def _similarity(self) -> ClassSimilarity:
        pool = None if type(self).pool is ClassVectors.pool else self.pool
        return ClassSimilarity(self.vectors_per_class, pool, self.unit_vectors)

    def _logit_scale(self) -> float | Tensor:
        """What similarities are multiplied by; under ``torch.compile`` a scale that moves stays a tensor."""
        if not self.unit_features:
            return 1.0
        moves = isinstance(self.scale, Tensor) and not may_read(self.scale)
        return self.scale.to(self.weight.dtype) if moves else float(self.scale)  # type: ignore[union-attr]

    def _measure(self) -> Measure:
        return "cosine" if self.unit_features else "dot"

    def _features(self, z: Tensor) -> Tensor:
        """What the vectors are compared with; a bias is one more feature."""
        return z

    def _vectors(self) -> Tensor:
        return self.weight

    def _class_indices(self, count: int) -> Tensor:
        """The classes of so many vectors."""
        found = torch.arange(count, device=self.weight.device)
        return found if self.vectors_per_class == 1 else found // self.vectors_per_class

    def _by_class(self, rows: Tensor) -> Tensor:
        """The vectors of each class, (C, K, dim); (C, dim) where it has one."""
        return rows if self.vectors_per_class == 1 else rows.unflatten(0, (-1, self.vectors_per_class))

    def _rows_of(self, classes: Tensor) -> Tensor:
        """Where the vectors of these classes are."""
        k = self.vectors_per_class
        return classes if k == 1 else (classes[:, None] * k + torch.arange(k, device=classes.device)).flatten()

    def _prepare_features(self, embeddings: Tensor) -> Tensor:
        """Embeddings ready for a matrix product with class vectors."""
        dim = self.dim
        require(
            isinstance(embeddings, Tensor)
            and embeddings.ndim == 2
            and embeddings.shape[1] == dim
            and embeddings.is_floating_point(),
            f"embeddings must be a floating point tensor (n, {dim}), got "
            f"{tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__}",
        )
        z = self._features(at_least_float32(embeddings))
        return normalize_rows(z) if self.unit_features and len(z) else z

    def _prepare_vectors(self, vectors: Tensor, z: Tensor) -> Tensor:
        """Class vectors ready for a matrix product with ``z``."""
        vectors = vectors.to(z.dtype)
        return normalize_rows(vectors) if self.unit_vectors else vectors

    def _select_classes(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The class vectors to compare with in this step, and the labels as positions among them."""
        if self.sample == 1 or not (self.training and torch.is_grad_enabled()):
            return self._vectors(), labels
        classes = self.sample_classes(labels)
        self.draw += 1
        vectors = nn.functional.embedding(self._rows_of(classes), self._vectors(), sparse=self.sparse)
        return vectors, torch.searchsorted(classes, labels)

    def sample_classes(self, labels: Tensor) -> Tensor:
        """The classes of the batch and a random rest, ``sample`` x C together (or the batch's alone), in order."""
        return draw_classes(labels.unique(), self.num_classes, self.sample, hash_bits(self.seed, int(self.draw))[0])

    def _check(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """One line that says what is wrong, before any work; else the labels as int64. A GPU is waited for."""
        self._validate_shapes(embeddings, labels)
        labels = labels.long()
        if may_read(labels):
            raise_out_of_range(torch.stack(torch.aminmax(labels)), self.num_classes)
        return labels

    def _validate_inputs(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """The labels as int64, and which of them number no class: None where all are known to.

        A GPU asked for a number stands still while it is read. So the values of such samples become NaN, and the line
        that says why is raised by the next call, which finds the answer ready.
        """
        self._validate_shapes(embeddings, labels)
        labels = labels.long()  # torch reads an index of another type as a mask, or not at all
        if not may_read(labels):
            return labels, None
        if not labels.is_cuda:
            raise_out_of_range(torch.stack(torch.aminmax(labels)), self.num_classes)
            return labels, None
        inside = labels.clamp(0, self.num_classes - 1)
        unknown = inside != labels
        self._ask_whether_any(unknown)
        return inside, unknown

    def _ask_whether_any(self, unknown: Tensor) -> None:
        """Judge the labels of an earlier call, if the answer has arrived, and ask for that of this one."""
        asked: tuple[Tensor, torch.cuda.Event] | None = self.__dict__.get("_asked_for_labels")
        if asked is not None:
            answer, event = asked
            if not event.query():
                return
            self.__dict__["_asked_for_labels"] = None
            if bool(answer):
                known = self.num_classes
                raise InputError(
                    f"labels of an earlier batch are out of range: {known} classes are numbered 0 to {known - 1}"
                )
        with torch.cuda.device_of(unknown):
            # Pinned: a copy to other memory waits for everything before it.
            answer, event = torch.empty((), dtype=torch.bool, pin_memory=True), torch.cuda.Event()
            answer.copy_(unknown.any(), non_blocking=True)
            event.record()
        self.__dict__["_asked_for_labels"] = answer, event

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_asked_for_labels"}

    def _validate_shapes(self, embeddings: Tensor, labels: Tensor) -> None:
        """All but the range of the labels."""
        validate_embeddings(embeddings, labels, "embeddings", "labels")
        dim = self.dim
        require(embeddings.shape[1] == dim, f"embeddings are {embeddings.shape[1]} wide, the class vectors {dim}")
        require(
            embeddings.device == self.weight.device,
            f"embeddings are on {embeddings.device}, the class vectors on {self.weight.device}: use loss.to(device)",
        )

    def extra_repr(self) -> str:
        """Sizes and what is not at its default."""
        parts = [f"{self.num_classes}, {self.dim}"]
        if self.unit_features and not isinstance(self.scale, Tensor):
            parts.append(f"scale={self.scale}")
        if self.vectors_per_class > 1:
            parts.append(f"vectors_per_class={self.vectors_per_class}")
        if self.difficulty is not None:
            parts.append(f"difficulty={self.difficulty}")
        if self.sample < 1:
            parts.append(f"sample={self.sample}, sparse={self.sparse}, seed={self.seed}")
        if self.label_smoothing:
            parts.append(f"label_smoothing={self.label_smoothing}")
        if self.reduction != "mean":
            parts.append(f"reduction={self.reduction!r}")
        return ", ".join(parts)


def reduce_samples(values: Tensor, weight: Tensor | None, reduction: LossReduction) -> Tensor:
    """What is made of one value per sample; a sample of weight 0 is absent."""
    present = torch.ones_like(values, dtype=torch.bool) if weight is None else weight != 0
    return PairOutput(values, present, weight, "classes", positives=present).reduce(reduction)


def draw_classes(own: Tensor, known: int, share: float, seed: Any) -> Tensor:
    """These classes and a random rest of those that are known, so large a share of them together, in order."""
    rest = int(share * known) - len(own)
    if rest <= 0:
        return own
    generator = torch.Generator(own.device).manual_seed(int(seed >> 1))
    luck = torch.rand(known, generator=generator, device=own.device)
    luck[own] = 2
    return luck.topk(len(own) + rest).indices.sort().values


def sum_vectors(vectors: Tensor, unit: bool) -> Tensor:
    """(d,) the sum of class vectors, each of length 1 if ``unit``, without a copy of them."""
    if not unit:
        return vectors.sum(0)
    length = vectors.norm(dim=1)
    return (1 / torch.where(length > 0, length, 1)) @ vectors


def class_means(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The labels that occur, and the mean of the rows of each; on a processor, where equal sums have equal bits."""
    row_values = z.cpu()
    known, at, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
    means = row_values.new_zeros(len(known), row_values.shape[1]).index_add_(0, at, row_values) / counts[:, None]
    return known.to(z.device), means.to(z.device)


class _ClassPairs(PairwiseLoss):
    """What a sample accumulates over class vectors, for the engine that knows every difficulty."""

    scale: float
    similarity: Measure = "cosine"
    difficulty: Difficulty | None = None
    modulate: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def measure(self) -> Measure:
        """Cosines, or products of features that keep their length."""
        return self.similarity

    @property
    def temperature(self) -> float:  # type: ignore[override]
        """Difficulties see similarity / temperature."""
        return 1 / self.scale

    def passes(self) -> tuple[Pass, ...]:
        """Wrong classes and the own one; the own one first, where wrong ones are measured by it."""
        own, wrong = Pass(self.own, over="positives"), Pass(self.reductions)
        return (wrong, own) if self.modulate is None else (own, replace(wrong, reads="anchor"))

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Wrong classes push."""
        if self.modulate is not None:
            s = self.modulate(tile.similarity, row_values["target"])
            return {"others_lse": logsumexp_over(s * self.scale, tile.negative)}
        bound = self.scale if self.measure == "cosine" else None
        return {"others_lse": logsumexp_over(tile.similarity * self.scale, tile.negative, bound=bound)}

    def own(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """The own class's similarity, and how much the sample counts."""
        return {
            "target": sum_over(tile.similarity, tile.positive, weighting="none"),
            "weight": sum_over(1.0, tile.positive),
        }


__all__ = ["ClassVectors"]


def raise_out_of_range(ends: Tensor, known: int) -> None:
    """Refuse labels of which these are the smallest and the largest, unless all of them number a class."""
    low, high = ends.tolist()
    wrong = low if low < 0 else high
    require(0 <= wrong < known, f"label {wrong} is out of range: {known} classes are numbered 0 to {known - 1}")
