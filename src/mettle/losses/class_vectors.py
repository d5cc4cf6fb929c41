"""The thin shell that every class-vector loss shares: one vector per class, cross-entropy over similarities to them.

A member says how similarities are taken (features and vectors of length 1 or not, which scale) and what its margin
makes of the similarity to the own class (``target``). Everything else is here:

    L_i = log(1 + e^{far_i − t_i}),   t_i = scale · target(cos θ_y),   far_i = log Σ_{j≠y} e^{scale · cos θ_j}
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from mettle.data.draws import hashed
from mettle.difficulty import AdaptiveThreshold
from mettle.difficulty.combine import nested
from mettle.difficulty.validation import numbers, weighing, whole
from mettle.errors import InputError
from mettle.losses.base import Pairwise, need, softplus
from mettle.pairs import Acc, Difficulty, Measure, Rows, Sweep, Tile, lse, pair_facts, total
from mettle.pairs.class_softmax import class_rows
from mettle.pairs.dispatch import broken, check, row_sums
from mettle.pairs.similarity import unit, widen


class ClassVectors(nn.Module):
    """Cross-entropy over one vector per class.

    Args:
        num_classes: C.
        dim: width of the embeddings.
        difficulty: weighs samples (their pair with the own class) and wrong classes, like any other pairs.
        sample: share of the classes to compare with in each training step: those of the batch and a random rest.
        sparse: gradients of the class vectors hold the sampled rows only (for optimisers that take such).
        seed: of the sampled classes, together with the number of the step.
    """

    unit_features = True
    unit_vectors = True
    self_contained = True
    scale: float | Tensor
    draw: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        difficulty: Difficulty | None = None,
        sample: float = 1.0,
        sparse: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        whole(num_classes=num_classes, dim=dim)
        numbers(sample=sample)
        if difficulty is not None:
            weighing("difficulty", difficulty)
        need(num_classes >= 1, f"num_classes must be at least 1, got {num_classes}")
        need(dim >= 1, f"dim must be at least 1, got {dim}")
        need(0 < sample <= 1, f"sample is a share of the classes in (0, 1], got {sample}")
        need(
            not any(isinstance(part, AdaptiveThreshold) for part in nested(difficulty)),
            "an adaptive threshold follows pairs of samples, here samples meet class vectors: use Threshold",
        )
        need(sample < 1 or not sparse, "sparse gradients hold the sampled rows: they need sample below 1")
        self.difficulty, self.sample, self.sparse, self.seed = difficulty, sample, sparse, seed
        self.weight = nn.Parameter(torch.randn(num_classes, dim) / dim**0.5)
        self.register_buffer("draw", torch.zeros((), dtype=torch.long))  # training steps that have drawn classes

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.weight)

    @property
    def by_row(self) -> bool:
        """Whether samples do not see each other, so that ranks need only their own (`mettle.pairs.across_ranks`)."""
        return self.difficulty is None and self.sample == 1

    def target(self, cosine: Tensor) -> Tensor:
        """What the margin makes of the cosine to the own class."""
        return cosine

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The mean over samples, a scalar with gradient."""
        values, share = self._values(embeddings, labels)
        return values.mean() if share is None else (values * share).sum() / share.sum()

    def per_anchor(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """(n,) one value per sample."""
        return self._values(embeddings, labels)[0]

    def logits(self, embeddings: Tensor) -> Tensor:
        """(n, C) scaled similarities to every class, without margin, for prediction."""
        z = self._directed(embeddings)
        return float(self.scale) * (z @ self._pointed(self._vectors(), z).T)

    @torch.no_grad()
    def predict(self, embeddings: Tensor, chunk: int = 4096) -> Tensor:
        """(n,) the most similar class of each embedding, in bounded memory: a closed-set classifier."""
        z, vectors = self._directed(embeddings), self._vectors()
        top, best = z.new_full((len(z),), -torch.inf), torch.zeros(len(z), dtype=torch.long, device=z.device)
        for start in range(0, len(vectors), chunk):
            s, at = (z @ self._pointed(vectors[start : start + chunk], z).T).max(1)
            best, top = torch.where(s > top, at + start, best), torch.maximum(s, top)
        if not bool(torch.isfinite(z).all()):
            raise InputError("embeddings hold NaN or infinity: no class can be predicted from them")
        return best

    @torch.no_grad()
    def vectors(self) -> Tensor:
        """(C, dim) the class vectors by themselves, of length 1 where the loss takes them so: for use elsewhere."""
        return (unit(self.weight) if self.unit_vectors else self.weight).clone()

    @torch.no_grad()
    def start_from(self, embeddings: Tensor, labels: Tensor, *, centered: bool = False) -> Self:
        """Set the vectors of the classes that occur to the means of their samples.

        Args:
            embeddings: (n, dim) of a first pass.
            labels: (n,) from 0 to C - 1.
            centered: subtract the mean of all embeddings first and give the vectors length 1, as random ones have.
                Embeddings of an untrained network nearly point one way, and class means with them: what they have in
                common tells no classes apart. A class whose mean is the mean of all keeps the vector it has.
        """
        labels = self._check(embeddings, labels)
        z = unit(widen(embeddings)) if self.unit_features else widen(embeddings)
        known, means = class_means(z - z.mean(0) if centered else z, labels)
        if centered:
            size = means.norm(dim=1)
            apart = size > torch.finfo(means.dtype).eps * z.norm(dim=1).mean()
            known, means = known[apart], means[apart] / size[apart, None]
        self.weight[known] = means.to(self.weight.dtype)
        return self

    @torch.no_grad()
    def facts(self, embeddings: Tensor, labels: Tensor) -> dict[str, Any]:
        """How near samples are to their class vectors, and what the difficulty did."""
        labels = self._check(embeddings, labels)
        z = widen(embeddings)
        own = (unit(z) * unit(self.weight[labels].to(z.dtype))).sum(1).clamp(-1, 1)
        found: dict[str, Any] = {
            "target_cosine": float(own.mean()),
            "target_degrees": float(own.acos().rad2deg().mean()),
            "scale": float(self.scale),
        }
        if self.difficulty is not None:
            z, ref = self._features(z), (self._pointed(self._vectors(), z), self._numbers(self.num_classes))
            shape = _Shape(self._steepness(), self._measure())
            found |= pair_facts(shape, z, labels, difficulty=self.difficulty, ref=ref).as_dict()
        return found

    def at(self, progress: float) -> Self:
        """The loss at a point of training, for difficulties that follow a curriculum; shares all parameters."""
        later = getattr(self.difficulty, "at", None)
        if later is None:
            return self
        now = copy(self)
        now.__dict__["difficulty"] = later(progress)
        return now

    def _values(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """One value per sample, and how much it counts in the mean; None where all count alike."""
        judge, labels = self._asked(embeddings, labels)
        if self.sample < 1:  # classes are drawn by the labels, so nothing can start without them
            judge()
        with torch.autocast(embeddings.device.type, enabled=False):
            z, (vectors, labels) = self._features(widen(embeddings)), self._chosen(labels)
            rows = self._rows(z, vectors, labels, half=embeddings.dtype in (torch.float16, torch.bfloat16))
            far = rows["far"]
            far = far.masked_fill(far == -torch.inf, torch.finfo(far.dtype).min)  # no other class: nothing to lose
            values = softplus(far - self.logit(rows["target"], z)) + broken(z)
        judge()
        return values, rows.get("weight")

    def logit(self, own: Tensor, z: Tensor) -> Tensor:
        """The own class's logit, with margin, from what the rows hold of it.

        A cosine is multiplied by the scale, or by the length of the feature where that is kept.
        """
        if self.unit_features:
            return float(self.scale) * self.target(own)
        size = z.norm(dim=1)
        return size * self.target(own / torch.where(size == 0, 1, size))

    def _rows(self, z: Tensor, vectors: Tensor, labels: Tensor, half: bool = False) -> Rows:
        if self.difficulty is None:
            sphere, steepness = self.unit_features, self._steepness()
            half = half and sphere  # features that keep their length may be too long for float16
            target, far = class_rows(
                z, vectors, labels, steepness, unit_vectors=self.unit_vectors, unit_features=sphere, half=half
            )
            return {"target": target, "far": far}
        shape, ref = (
            _Shape(self._steepness(), self._measure()),
            (self._pointed(vectors, z), self._numbers(len(vectors))),
        )
        return row_sums(shape, z, labels, ref=ref, difficulty=self.difficulty)[0]

    def _steepness(self) -> float:
        return float(self.scale) if self.unit_features else 1.0

    def _measure(self) -> Measure:
        return "cosine" if self.unit_features else "dot"

    def _features(self, z: Tensor) -> Tensor:
        """What the vectors are compared with; a bias is one more feature."""
        return z

    def _vectors(self) -> Tensor:
        return self.weight

    def _numbers(self, count: int) -> Tensor:
        return torch.arange(count, device=self.weight.device)

    def _directed(self, embeddings: Tensor) -> Tensor:
        """Embeddings ready for a matrix product with class vectors."""
        dim = self.weight.shape[1]
        need(
            isinstance(embeddings, Tensor)
            and embeddings.ndim == 2
            and embeddings.shape[1] == dim
            and embeddings.is_floating_point(),
            f"embeddings must be a floating point tensor (n, {dim}), got "
            f"{tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__}",
        )
        z = self._features(widen(embeddings))
        return unit(z) if self.unit_features and len(z) else z

    def _pointed(self, vectors: Tensor, z: Tensor) -> Tensor:
        """Class vectors ready for a matrix product with ``z``."""
        vectors = vectors.to(z.dtype)
        return unit(vectors) if self.unit_vectors else vectors

    def _chosen(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The class vectors to compare with in this step, and the labels as positions among them."""
        if self.sample == 1 or not (self.training and torch.is_grad_enabled()):
            return self._vectors(), labels
        numbers = self.sampled(labels)
        self.draw += 1
        vectors = nn.functional.embedding(numbers, self._vectors(), sparse=self.sparse)
        return vectors, torch.searchsorted(numbers, labels)

    def sampled(self, labels: Tensor) -> Tensor:
        """The classes of the batch and a random rest, ``sample`` x C together (or the batch's alone), in order."""
        own = labels.unique()
        rest = int(self.sample * self.num_classes) - len(own)
        if rest <= 0:
            return own
        generator = torch.Generator(labels.device).manual_seed(int(hashed(self.seed, int(self.draw))[0] >> 1))
        luck = torch.rand(self.num_classes, generator=generator, device=labels.device)
        luck[own] = 2
        return luck.topk(len(own) + rest).indices.sort().values

    def _check(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """One line that says what is wrong, before any work; else the labels as int64."""
        judge, labels = self._asked(embeddings, labels)
        judge()
        return labels

    def _asked(self, embeddings: Tensor, labels: Tensor) -> tuple[Callable[[], None], Tensor]:
        """All checked but the range of the labels, which a GPU tells late; and labels that are safe till then."""
        check(embeddings, labels, "embeddings", "labels")
        dim = self.weight.shape[1]
        need(embeddings.shape[1] == dim, f"embeddings are {embeddings.shape[1]} wide, the class vectors {dim}")
        need(
            embeddings.device == self.weight.device,
            f"embeddings are on {embeddings.device}, the class vectors on {self.weight.device}: use loss.to(device)",
        )
        return in_range(labels, self.num_classes)

    def extra_repr(self) -> str:
        """Sizes and what is not at its default."""
        parts = [f"{self.num_classes}, {self.weight.shape[1]}"]
        if self.unit_features and not isinstance(self.scale, Tensor):
            parts.append(f"scale={self.scale}")
        if self.difficulty is not None:
            parts.append(f"difficulty={self.difficulty}")
        if self.sample < 1:
            parts.append(f"sample={self.sample}, sparse={self.sparse}, seed={self.seed}")
        return ", ".join(parts)


def class_means(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The labels that occur, and the mean of the rows of each; on a processor, where equal sums have equal bits."""
    rows = z.cpu()
    known, at, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
    means = rows.new_zeros(len(known), rows.shape[1]).index_add_(0, at, rows) / counts[:, None]
    return known.to(z.device), means.to(z.device)


@dataclass(frozen=True)
class _Shape(Pairwise):
    """What a sample accumulates over class vectors, for the engine that knows every difficulty."""

    size: float
    measure: Measure = "cosine"
    difficulty: Difficulty | None = None

    @property
    def temperature(self) -> float:  # type: ignore[override]
        """Difficulties see similarity / temperature."""
        return 1 / self.size

    def sweeps(self) -> tuple[Sweep, ...]:
        """Wrong classes, then the own one."""
        return (Sweep(self.terms), Sweep(self.own, over="positives"))

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Wrong classes push."""
        top = self.size if self.measure == "cosine" else None
        return {"far": lse(tile.s * self.size, tile.neg, ceiling=top)}

    def own(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """The own class's similarity, and how much the sample counts."""
        return {"target": total(tile.s, tile.pos, weigh="none"), "weight": total(1.0, tile.pos)}


__all__ = ["ClassVectors"]


def in_range(labels: Tensor, known: int) -> tuple[Callable[[], None], Tensor]:
    """What judges the labels, to be called before a result is used, and the labels as int64, safe until then.

    On a processor they are judged at once. A GPU asked for a number stands still while it is read. So the range is
    asked for first, work is started on labels moved into it, and the answer is judged when there is work for longer
    than the reading takes.
    """
    labels = labels.long()  # torch reads an index of another type as a mask, or not at all

    def judge() -> None:
        if told is not None:
            told.synchronize()
        low, high = ends.tolist()
        wrong = low if low < 0 else high
        need(0 <= wrong < known, f"label {wrong} is out of range: {known} classes are numbered 0 to {known - 1}")

    told = None
    if not labels.is_cuda:
        ends = torch.stack(torch.aminmax(labels))
        judge()
        return (lambda: None), labels
    with torch.cuda.device_of(labels):
        if torch.cuda.is_current_stream_capturing():  # a graph cannot ask anything
            return (lambda: None), labels
        ends, told = torch.stack(torch.aminmax(labels)).to("cpu", non_blocking=True), torch.cuda.Event()
        told.record()
    return judge, labels.clamp(0, known - 1)
