"""What a pairwise loss and a difficulty say to the engine, and what the engine owes them.

A loss never sees a whole matrix. It is handed *tiles* of similarities and says what each row accumulates over its
pairs (a sum, a log-sum-exp, a maximum), then how a row's value follows from what was accumulated:

    terms(tile, rows) -> {name: total(...) | lse(...) | peak(...) | collect(...)}   elementwise, on any tile
    finish(rows)      -> (n,) one value per anchor                                   never reduced further here

The engine owns everything else: tiles, masks, weights, memory, precision, the backward pass. A difficulty weighs the
pairs of a tile; the engine puts the weights *inside* the accumulators, hence one law for every loss: weight 0 = the
pair is absent, 1 = nothing changes, 2 = as if it were listed twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from mettle.pairs.similarity import Sides

Mask = Tensor | bool
"""Which pairs of a tile: a boolean tensor, or ``True`` / ``False`` for all / none of them."""

Rows = Mapping[str, Tensor]
"""What has been accumulated so far: columns (a, 1) while sweeping a tile, vectors (n,) in ``finish``.

Where a sweep reads both ends of its pairs, ``rows["nameᵀ"]`` is the same quantity of the references, (1, b).
"""

Measure = Literal["cosine", "dot", "squared", "l1"]
"""Similarity of two embeddings: cosine, dot product, minus squared distance, minus L1 distance."""


@dataclass(frozen=True)
class Tile:
    """Some anchors against some references: a block of the matrix, or a list of pairs as one column, (p, 1)."""

    s: Tensor  # (a, b) similarities, higher = more alike
    pos: Mask  # same label, not the anchor itself
    neg: Mask  # other label
    i: Tensor  # positions of the anchors in the batch, as a column: ``table[tile.i, tile.j]`` has the shape of ``s``
    j: Tensor  # positions of the references in the batch, or in the reference set, as a row
    temperature: float = 1.0  # of the loss, for difficulties that are defined on s / temperature
    biased: Tensor | None = None  # (a, b) similarities under a second encoder, where there is one
    sides: "Sides | None" = None  # the rows behind it, for what similarities are too coarse to say

    def slack(self) -> Tensor | float:
        """How far two similarities may lie apart by rounding alone: pairs that close to an extreme are tied with it."""
        return 0.0 if self.sides is None else self.sides.slack()


@dataclass(frozen=True)
class Acc:
    """One thing that every row accumulates over the pairs of ``mask``."""

    kind: Literal["total", "lse", "peak", "collect"]
    x: Tensor | float  # (a, b), or (a, b, m) for m values per row at once
    mask: Mask
    weigh: Literal["full", "present", "none"] = "full"
    ceiling: float | None = None


def total(x: Tensor | float, mask: Mask, *, weigh: Literal["full", "present", "none"] = "full") -> Acc:
    """Σ w·x over the masked pairs; ``total(1.0, mask)`` counts them.

    ``weigh="present"`` uses only whether a pair is there (w not 0), ``"none"`` ignores the difficulty.
    """
    return Acc("total", x, mask, weigh)


def lse(
    x: Tensor,
    mask: Mask,
    *,
    weigh: Literal["full", "present", "none"] = "full",
    ceiling: float | None = None,
) -> Acc:
    """Log Σ w·eˣ over the masked pairs, -inf where there are none.

    ``ceiling`` promises -ceiling <= x <= ceiling, which lets the engine share one exponential between both ends of
    a pair instead of tracking every row's maximum.
    """
    return Acc("lse", x, mask, weigh, ceiling)


def peak(x: Tensor, mask: Mask) -> Acc:
    """Max x over the masked pairs that are present (w > 0), -inf where there are none.

    Pairs with the same x share the gradient equally. Duplicates of one embedding have the same x up to the rounding of
    a product only, so the whole gradient may go to one of them; their sum is the same.
    """
    return Acc("peak", x, mask)


def collect(x: Tensor | float, mask: Mask, *, weigh: Literal["full", "present", "none"] = "none") -> Acc:
    """The w·x of the masked pairs themselves, (n, m), m = most positives of any row, the rest filled with 0.

    For losses over (anchor, positive, negative): collect the positives, then sweep the negatives against them.
    """
    return Acc("collect", x, mask, weigh)


@dataclass(frozen=True)
class Sweep:
    """One pass over the tiles. ``rows`` of earlier sweeps are handed to the terms of later ones."""

    terms: Callable[[Tile, Rows], dict[str, Acc]]
    over: Literal["all", "positives"] = "all"  # "positives": terms look at positive pairs only, which are few
    # What terms read of earlier sweeps: nothing (both ends of a pair then share the work), the anchors', or both ends'.
    reads: Literal["nothing", "rows", "both"] = "nothing"


class PairLoss(Protocol):
    """What the engine needs of a loss.

    Two optional declarations, inherited by subclasses; one that overrides the maths must restate them, or loses them
    (`mettle.pairs.declarations`):
        kernel_spec(weights)  the `KernelSpec` that the fused kernels compute, given the `KernelWeights` of the
                              difficulty or None; or `NoKernel` with the reason
        self_contained        True promises that values follow from settings, state and tiles alone: not from positions
                              in the batch, nor from draws outside ``sweeps``, so that ranks can share the work
    """

    @property
    def measure(self) -> Measure:
        """The similarity that tiles hold."""
        ...

    @property
    def temperature(self) -> float:
        """Handed on to difficulties; 1 where the loss has none."""
        ...

    def sweeps(self) -> tuple[Sweep, ...]:
        """The passes over all pairs, usually one."""
        ...

    def finish(self, rows: Rows) -> Tensor:
        """(n,) one value per anchor from what its row accumulated; finite, with finite gradient, in every row."""
        ...

    def defined(self, rows: Rows) -> Tensor:
        """(n,) whether the loss means anything for this anchor; the others are left out of the mean and counted."""
        ...

    def share(self, rows: Rows) -> Tensor:
        """(n,) how much an anchor counts in the mean over anchors; ones, unless the loss is a mean over pairs."""
        ...


class Difficulty(Protocol):
    """What makes a pair hard, as a weight per pair.

    ``stats`` names row facts that ``weigh`` needs (the hardest positive of each row, say); most need none and return
    an empty dict. Weights carry no gradient while ``detach`` is true.

    Three optional declarations, for those who have reason to make them. Subclasses inherit them; one that overrides the
    weights must restate them, or loses their promises (`mettle.pairs.declarations`):
        traits            a `Traits`: promises about the weights, and how losses use them (default: none)
        kernel_weights()  the `KernelWeights` that the fused kernels compute, or `NoKernel` with the reason
        log_weight(tile)  log u where the weights of negatives are u over its mean in the row
                          (`mettle.pairs.self_normalized`),
                          with ceiling(temperature), a bound of its size
    """

    @property
    def detach(self) -> bool:
        """Whether weights are constants for the gradient."""
        ...

    def stats(self, tile: Tile) -> dict[str, Acc]:
        """Row facts needed before weighing."""
        ...

    def weigh(self, tile: Tile, rows: Rows) -> Tensor:
        """(a, b) weights, or what broadcasts to that, at least 0; entries outside ``pos`` and ``neg`` are ignored."""
        ...
