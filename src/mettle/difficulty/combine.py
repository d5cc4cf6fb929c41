"""Difficulties made of difficulties: a product of two, and one that grows during training."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from mettle.difficulty.validation import settings, weighing
from mettle.errors import InputError
from mettle.pairs import Acc, Difficulty, KernelWeights, LinearWeights, NoKernel, Rows, Tile, Traits
from mettle.pairs.declarations import traits_of
from mettle.pairs.kernel_spec import declared_weights
from mettle.pairs.problem import weights


@dataclass(frozen=True)
class Product:
    """The weights of two difficulties multiplied: mine with one and weigh with the other, say."""

    first: Difficulty
    second: Difficulty

    def __post_init__(self) -> None:
        weighing("first", self.first)
        weighing("second", self.second)

    @property
    def detach(self) -> bool:
        """Constant only if both are; each part still obeys its own setting."""
        return self.first.detach and self.second.detach

    @property
    def traits(self) -> Traits:
        """Promised only if both promise it; a negative is counted once if either part says so."""
        first, second = traits_of(self.first), traits_of(self.second)
        alike = first.positive_weights == second.positive_weights
        return Traits(
            symmetric=first.symmetric and second.symmetric,
            continuous=first.continuous and second.continuous,
            trusted=True,  # each part is looked at by itself
            self_contained=first.self_contained and second.self_contained,
            positive_weights=first.positive_weights if alike else "everywhere",
            negatives="plain" if "plain" in (first.negatives, second.negatives) else "weight",
        )

    def at(self, progress: float) -> "Product":
        """Both parts at a point of training."""
        return Product(_later(self.first, progress), _later(self.second, progress))

    def observe(self, embeddings: Tensor, labels: Tensor) -> None:
        """Let both parts see a training batch."""
        for part in (self.first, self.second):
            _observe(part, embeddings, labels)

    def stats(self, tile: Tile) -> dict[str, Acc]:
        """The row facts of both."""
        parts = {"first": self.first, "second": self.second}
        return {f"{name}.{key}": acc for name, part in parts.items() for key, acc in part.stats(tile).items()}

    def weigh(self, tile: Tile, rows: Rows) -> Tensor:
        """(a, b) weights."""
        return _part(self.first, "first.", tile, rows) * _part(self.second, "second.", tile, rows)


@dataclass(frozen=True)
class curriculum:
    r"""Any difficulty, fading in: w(progress) = 1 + r·(w − 1), r rising from 0 at ``start`` to ``strength`` at ``end``.

    ``at(progress)`` is the difficulty at a point of training between 0 and 1; the trainer asks for it every step. Used
    without a progress it is at its ``strength``: 1 is the difficulty inside, 0.3 keeps three tenths of its effect for
    good. What ``at`` gives has the r of its point as ``strength``, and still knows how far it rises (``most``).
    """

    difficulty: Difficulty
    start: float = 0.0
    end: float = 0.1
    strength: float = 1.0
    most: float = field(init=False, repr=False)  # r at the end, whatever it is now

    def __post_init__(self) -> None:
        object.__setattr__(self, "most", self.strength)
        settings(self)
        if not 0 <= self.start < self.end <= 1:
            raise InputError(
                f"a curriculum rises from start to end, 0 <= start < end <= 1, got {self.start}, {self.end}"
            )
        if not 0 <= self.strength <= 1:
            raise InputError(f"strength lies between 0 and 1, got {self.strength}")

    def at(self, progress: float) -> "curriculum":
        """The difficulty when this share of training is done."""
        rise = min(max((progress - self.start) / (self.end - self.start), 0.0), 1.0)
        now = curriculum(_later(self.difficulty, progress), self.start, self.end, self.most * rise)
        object.__setattr__(now, "most", self.most)
        return now

    def observe(self, embeddings: Tensor, labels: Tensor) -> None:
        """Let the difficulty inside see a training batch."""
        _observe(self.difficulty, embeddings, labels)

    @property
    def detach(self) -> bool:
        """As the difficulty inside."""
        return self.difficulty.detach

    @property
    def traits(self) -> Traits:
        """As the difficulty inside, whose weights are looked at there."""
        return replace(traits_of(self.difficulty), trusted=True)

    def stats(self, tile: Tile) -> dict[str, Acc]:
        """As the difficulty inside."""
        return self.difficulty.stats(tile)

    def weigh(self, tile: Tile, rows: Rows) -> Tensor:
        """(a, b) weights."""
        return 1 + self.strength * (weights(self.difficulty, tile, rows) - 1)

    def kernel_weights(self) -> KernelWeights | NoKernel:
        """Those of the difficulty inside, scaled: linear ones at any strength, others at full strength."""
        inside = declared_weights(self.difficulty)
        if isinstance(inside, LinearWeights):
            return inside.scaled(self.strength)
        if self.strength == 1 or isinstance(inside, NoKernel):
            return inside  # type: ignore[return-value]  # a curriculum has a difficulty inside
        return NoKernel("of weights that fade in, the kernels know linear ones only")


def _part(difficulty: Difficulty, mark: str, tile: Tile, rows: Rows) -> Tensor:
    return weights(difficulty, tile, {n.removeprefix(mark): row for n, row in rows.items() if n.startswith(mark)})


def _later(difficulty: Difficulty, progress: float) -> Difficulty:
    return difficulty.at(progress) if hasattr(difficulty, "at") else difficulty  # type: ignore[attr-defined]


def _observe(difficulty: Difficulty, embeddings: Tensor, labels: Tensor) -> None:
    if hasattr(difficulty, "observe"):
        difficulty.observe(embeddings, labels)  # type: ignore[attr-defined]


def nested(difficulty: Difficulty | None) -> Iterator[Difficulty]:
    """A difficulty and all that it is made of."""
    if difficulty is not None:
        yield difficulty
        for name in ("first", "second", "difficulty"):
            yield from nested(getattr(difficulty, name, None))
