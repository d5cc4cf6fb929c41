"""Difficulties made of difficulties: a product of two, and one that grows during training."""

from dataclasses import replace
from itertools import zip_longest

from torch import Tensor

from mettle.difficulty.settings import SettingsModule, validate_difficulty, validate_number, view_with
from mettle.errors import InputError
from mettle.pairs import Difficulty, KernelWeights, LinearWeights, NoKernel, Pass, Reduction, RowValues, Tile, Traits
from mettle.pairs.declarations import declared_traits
from mettle.pairs.kernel_spec import declared_weights
from mettle.pairs.problem import evaluate_weights, statistic_passes


class Product(SettingsModule):
    """The weights of two difficulties multiplied: mine with one and weigh with the other, say."""

    first: Difficulty
    second: Difficulty

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_difficulty("first", self.first)
        validate_difficulty("second", self.second)

    @property
    def detach(self) -> bool:
        """Constant only if both are; each part still obeys its own setting."""
        return self.first.detach and self.second.detach

    @property
    def traits(self) -> Traits:
        """Promised only if both promise it; a negative is counted once if either part says so."""
        first, second = declared_traits(self.first), declared_traits(self.second)
        alike = first.positive_weights == second.positive_weights
        return Traits(
            symmetric=first.symmetric and second.symmetric,
            continuous=first.continuous and second.continuous,
            trusted=True,  # each part is checked by itself
            self_contained=first.self_contained and second.self_contained,
            positive_weights=first.positive_weights if alike else "everywhere",
            negatives="plain" if "plain" in (first.negatives, second.negatives) else "weight",
        )

    def parts(self) -> tuple[Difficulty, ...]:
        """Both difficulties."""
        return self.first, self.second

    def at(self, progress: float) -> "Product":
        """Both parts at a point of training."""
        return view_with(self, first=at_progress(self.first, progress), second=at_progress(self.second, progress))

    def observe(self, embeddings: Tensor, labels: Tensor) -> None:
        """Let both parts see a training batch."""
        for part in self.parts():
            observe_batch(part, embeddings, labels)

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """The row statistics of both."""
        parts = {"first": self.first, "second": self.second}
        return {f"{name}.{key}": acc for name, part in parts.items() for key, acc in part.row_statistics(tile).items()}

    def statistic_passes(self) -> tuple[Pass, ...]:
        """Those of both, side by side."""
        first, second = statistic_passes(self.first), statistic_passes(self.second)
        return tuple(_join_passes({"first": one, "second": two}) for one, two in zip_longest(first, second))

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        parts = {"first": self.first, "second": self.second}
        first, second = (evaluate_weights(x, tile, _part_rows(name, row_values)) for name, x in parts.items())
        return first * second


def _part_rows(name: str, row_values: RowValues) -> RowValues:
    """The row values of one part, under the names it gave them."""
    return {key.removeprefix(f"{name}."): row for key, row in row_values.items() if key.startswith(f"{name}.")}


def _join_passes(parts: dict[str, Pass | None]) -> Pass:
    """One pass for the statistics of both parts; None where a part needs no more."""
    there = {name: part for name, part in parts.items() if part is not None}

    def reductions(tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        found = {name: part.reductions(tile, _part_rows(name, row_values)) for name, part in there.items()}
        return {f"{name}.{key}": acc for name, table in found.items() for key, acc in table.items()}

    reads = {part.reads for part in there.values()}
    return Pass(reductions, reads=next(one for one in ("both", "anchor", "none") if one in reads))


class Curriculum(SettingsModule):
    r"""Any difficulty, fading in: w(progress) = 1 + r·(w − 1), r rising from 0 at ``start`` to ``strength`` at ``end``.

    A loss is told the progress of training in its call, ``loss(z, y, progress=0.3)``, as the trainer does at every
    step; without it, r is ``strength``: 1 is the difficulty inside, 0.3 keeps three tenths of its effect for good.
    """

    difficulty: Difficulty
    start: float = 0.0
    end: float = 0.1
    strength: float = 1.0

    rise = 1.0  # how much of the strength is reached: 1 unless ``at`` says otherwise

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.start < self.end <= 1:
            raise InputError(
                f"a curriculum rises from start to end, 0 <= start < end <= 1, got {self.start}, {self.end}"
            )
        if not 0 <= self.strength <= 1:
            raise InputError(f"strength lies between 0 and 1, got {self.strength}")

    def at(self, progress: float) -> "Curriculum":
        """The difficulty when this share of training is done; state is shared."""
        validate_number("progress", progress)
        rise = min(max((progress - self.start) / (self.end - self.start), 0.0), 1.0)
        return view_with(self, difficulty=at_progress(self.difficulty, progress), rise=rise)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, "curriculum", 1)  # as recipes and pages call it

    @property
    def current_strength(self) -> float:
        """R at this point of training."""
        return self.strength * self.rise

    def parts(self) -> tuple[Difficulty, ...]:
        """The difficulty inside."""
        return (self.difficulty,)

    def observe(self, embeddings: Tensor, labels: Tensor) -> None:
        """Let the difficulty inside see a training batch."""
        observe_batch(self.difficulty, embeddings, labels)

    @property
    def detach(self) -> bool:
        """As the difficulty inside."""
        return self.difficulty.detach

    @property
    def traits(self) -> Traits:
        """As the difficulty inside, whose weights are checked there."""
        return replace(declared_traits(self.difficulty), trusted=True)

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """As the difficulty inside."""
        return self.difficulty.row_statistics(tile)

    def statistic_passes(self) -> tuple[Pass, ...]:
        """As the difficulty inside."""
        return statistic_passes(self.difficulty)

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        return 1 + self.current_strength * (evaluate_weights(self.difficulty, tile, row_values) - 1)

    def kernel_weights(self) -> KernelWeights | NoKernel:
        """Those of the difficulty inside, scaled: linear ones at any strength, others at full strength."""
        inside = declared_weights(self.difficulty)
        if isinstance(inside, LinearWeights):
            return inside.scaled(self.current_strength)
        if self.current_strength == 1 or isinstance(inside, NoKernel):
            return inside  # type: ignore[return-value]  # a curriculum has a difficulty inside
        return NoKernel("of weights that fade in, the kernels know linear ones only")


curriculum = Curriculum
"""The name under which recipes and documentation know it."""


def at_progress(difficulty: Difficulty, progress: float) -> Difficulty:
    """A difficulty at a point of training; as it is, where it follows no curriculum."""
    return difficulty.at(progress) if hasattr(difficulty, "at") else difficulty  # type: ignore[attr-defined]


def observe_batch(difficulty: Difficulty, embeddings: Tensor, labels: Tensor) -> None:
    """Show a training batch to a difficulty that follows the data."""
    if hasattr(difficulty, "observe"):
        difficulty.observe(embeddings, labels)  # type: ignore[attr-defined]
