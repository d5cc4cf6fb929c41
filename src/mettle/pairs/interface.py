"""What a pairwise loss and a difficulty say to the engine, and what the engine owes them.

A loss never sees a whole matrix. It is handed *tiles* of similarities and says what each row accumulates over its
pairs (a sum, a log-sum-exp, a maximum), then how a row's value follows from what was accumulated:

    reductions(tile, row_values) -> {name: sum_over(...) | logsumexp_over(...) | max_over(...) | gather_over(...)}
    row_loss(row_values)         -> (n,) one value per anchor, never reduced further here

`reductions` is elementwise, so it can be evaluated on any tile.

The engine owns everything else: tiles, masks, weights, memory, precision, the backward pass. A difficulty weighs the
pairs of a tile; the engine puts the weights *inside* the accumulators, hence one law for every loss: weight 0 = the
pair is absent, 1 = nothing changes, 2 = as if it were listed twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from mettle.pairs.similarity import TileOperands

Mask = Tensor | bool
"""Which pairs of a tile: a boolean tensor, or ``True`` / ``False`` for all / none of them."""

RowValues = Mapping[str, Tensor]
"""What rows have accumulated so far: columns (a, 1) beside a tile, vectors (n,) in ``row_loss``.

Where a pass reads both ends of its pairs, ``row_values["nameᵀ"]`` is the same quantity of the references, (1, b).
"""

Weighting = Literal["weight", "square", "mask", "none"]
"""What a reduction takes from the difficulty: its weights, their squares, only which pairs it leaves in (w not 0), or
nothing."""

Measure = Literal["cosine", "dot", "euclidean", "squared", "l1", "snr"]
"""Similarity of two embeddings: cosine, dot product, minus a distance (Euclidean, its square, L1), or minus the
signal-to-noise distance Var(a − b) / Var(a) of anchor a and reference b (Yuan et al. 2019), which is not symmetric."""


@dataclass(frozen=True)
class Tile:
    """Some anchors against some references: a block of the matrix, or a list of pairs as one column, (p, 1)."""

    similarity: Tensor  # (a, b) similarities, higher = more alike
    positive: Mask  # same label, not the anchor itself
    negative: Mask  # other label
    # Positions in the batch (of references: in the reference set), as a column and as a row, so that
    # ``table[tile.anchor_index, tile.reference_index]`` has the shape of ``similarity``.
    anchor_index: Tensor
    reference_index: Tensor
    temperature: float | Tensor = 1.0  # of the loss, for difficulties that are defined on similarity / temperature
    second_similarity: Tensor | None = None  # (a, b) similarities under a second encoder, where there is one
    operands: "TileOperands | None" = None  # the rows behind it, for what similarities are too coarse to say
    # Labels as a column and as a row, for a loss that declares ``reads_labels``: it has a number for each class.
    anchor_label: Tensor | None = None
    reference_label: Tensor | None = None
    repeats: Tensor | None = None  # (a, b) how often a pair is listed, where pairs are given as a list: the engine's
    target: Tensor | None = None  # (a, b) soft targets, for a loss that declares ``takes_targets``

    def rounding_error(self) -> Tensor | float:
        """How far two similarities may lie apart by rounding alone: pairs that close to an extreme are tied with it."""
        return 0.0 if self.operands is None else self.operands.rounding_error(self.similarity)


@dataclass(frozen=True)
class Reduction:
    """One quantity that every row accumulates over the pairs of ``mask``."""

    kind: Literal["sum", "logsumexp", "max", "gather"]
    values: Tensor | float  # (a, b), or (a, b, m) for m values per row at once
    mask: Mask
    weighting: Weighting = "weight"
    bound: float | None = None


def sum_over(values: Tensor | float, mask: Mask, *, weighting: Weighting = "weight") -> Reduction:
    """Σ w·values over the masked pairs; ``sum_over(1.0, mask)`` counts them.

    ``weighting="mask"`` uses only whether a pair is there (w not 0), ``"none"`` ignores the difficulty, ``"square"``
    weighs every pair by w².
    """
    return Reduction("sum", values, mask, weighting)


def logsumexp_over(
    values: Tensor,
    mask: Mask,
    *,
    weighting: Weighting = "weight",
    bound: float | None = None,
) -> Reduction:
    """Log Σ w·exp(values) over the masked pairs, -inf where there are none.

    ``bound`` promises -bound <= values <= bound, which lets the engine share one exponential between both ends of
    a pair instead of tracking every row's maximum.
    """
    return Reduction("logsumexp", values, mask, weighting, bound)


def max_over(values: Tensor, mask: Mask) -> Reduction:
    """The maximum over the masked pairs that are present (w > 0), -inf where there are none.

    Pairs with the same value share the gradient equally. Duplicates of one embedding have the same value up to the
    rounding of a product only, so the whole gradient may go to one of them; their sum is the same.
    """
    return Reduction("max", values, mask)


def gather_over(values: Tensor | float, mask: Mask, *, weighting: Weighting = "none") -> Reduction:
    """The w·values of the masked pairs themselves, (n, m), m = most positives of any row, the rest filled with 0.

    For losses over (anchor, positive, negative): gather the positives, then compare the negatives with them.
    """
    return Reduction("gather", values, mask, weighting)


@dataclass(frozen=True)
class Pass:
    """One pass over the tiles. The row values of earlier passes are handed to the reductions of later ones."""

    reductions: Callable[[Tile, RowValues], dict[str, Reduction]]
    over: Literal["all", "positives"] = "all"  # "positives": positive pairs only, which are few
    # Which row values of earlier passes it reads: none (both ends of a pair then share the work), those of the anchors,
    # or those of both ends.
    reads: Literal["none", "anchor", "both"] = "none"


class PairLoss(Protocol):
    """What the engine needs of a loss.

    Three optional settings:
        sorted_anchors        True promises anchors whose labels ascend, which the kernels then need not sort
        reads_labels          True asks for the labels of a tile's anchors and references beside its positions
        takes_targets         True promises to read ``tile.target``, where targets are soft

    Two optional declarations, inherited by subclasses; one that overrides the maths must restate them, or loses them
    (`mettle.pairs.declarations`):
        kernel_spec(weights)  the `KernelSpec` that the fused kernels compute, given the `KernelWeights` of the
                              difficulty or None; or `NoKernel` with the reason
        self_contained        True promises that values follow from settings, state and tiles alone: not from positions
                              in the batch, nor from random numbers drawn outside ``passes``, so that ranks can
                              share the work
    """

    @property
    def measure(self) -> Measure:
        """The similarity that tiles hold."""
        ...

    @property
    def temperature(self) -> float:
        """Handed on to difficulties; 1 where the loss has none."""
        ...

    def passes(self) -> tuple[Pass, ...]:
        """The passes over all pairs, usually one."""
        ...

    def row_loss(self, row_values: RowValues) -> Tensor:
        """(n,) one value per anchor from what its row accumulated; finite, with finite gradient, in every row."""
        ...

    def is_defined(self, row_values: RowValues) -> Tensor:
        """(n,) whether the loss means anything for this anchor; the others are left out of the mean and counted."""
        ...

    def anchor_weight(self, row_values: RowValues) -> Tensor | None:
        """(n,) how much an anchor counts in the mean over anchors; None, unless the loss is a mean over pairs."""
        ...


class Difficulty(Protocol):
    """What makes a pair hard, as a weight per pair.

    ``row_statistics`` names what ``weights`` needs to know of a row (its hardest positive, say); most need
    none and return an empty dict. Weights carry no gradient while ``detach`` is true.

    Where one statistic builds on another, ``statistic_passes()`` gives them as several `Pass`es; ``row_statistics`` is
    then what the first of them accumulates.

    Three optional declarations, for those who have reason to make them. Subclasses inherit them; one that overrides the
    weights must restate them, or loses their promises (`mettle.pairs.declarations`):
        traits            a `Traits`: promises about the weights, and how losses use them (default: none)
        kernel_weights()  the `KernelWeights` that the fused kernels compute, or `NoKernel` with the reason
        log_weight(tile)  log u where the weights of negatives are u over its mean in the row
                          (`mettle.pairs.self_normalized`), with log_weight_bound(temperature) >= |log u|
    """

    @property
    def detach(self) -> bool:
        """Whether weights are constants for the gradient."""
        ...

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """What ``weights`` needs to know of each row; most difficulties need nothing."""
        ...

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights, or what broadcasts to that, at least 0; only positive and negative pairs are looked at."""
        ...


def temperature_of(loss: PairLoss) -> float | Tensor:
    """What a loss divides similarities by now: a number, or a learned temperature with gradient."""
    current = getattr(loss, "current_temperature", None)
    return loss.temperature if current is None else current()
