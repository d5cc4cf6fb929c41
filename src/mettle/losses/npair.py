"""N-pair loss: one pair per class, every other class's positive as a negative."""

from typing import Any

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.losses.base import SELECTING, PairwiseLoss, require, softplus, zero_if_empty
from mettle.pairs import (
    Difficulty,
    KernelWeights,
    Measure,
    PairOutput,
    PairStatistics,
    Reduction,
    RowValues,
    SoftmaxSpec,
    Tile,
    logsumexp_over,
    pair_loss,
    pair_statistics,
    sum_over,
)
from mettle.pairs.similarity import may_read
from mettle.pairs.validation import validate_embeddings

OTHERS = ("ref", "ids", "views", "weights", *SELECTING)  # options of losses that pair a batch in other ways


class NPair(PairwiseLoss):
    r"""N-pair loss (Sohn 2016) with its norm term.

    Formula, a_i the first and p_i the second row of class i, dot products, no normalisation:
        L_i = log(1 + Σ_{j≠i} exp(a_i·p_j − a_i·p_i)) + norm_weight/4 · (|a_i|² + |p_i|²)
    Needs:
        exactly two rows of every class, in any order; the first of a class is its anchor. Its mean is over classes,
        and rows that are positives have no value of their own (NaN in ``per_anchor``).
    Use when:
        classes are many: every class of the batch serves as a negative for all others.
    Relations:
        without the norm term it is the cross-entropy of the rows of A Pᵀ, InfoNCE at temperature 1 without
        normalisation. Normalised embeddings saturate it: logits then stay within ±1.
    """

    norm_weight: float = 0.002
    difficulty: Difficulty | None = None

    self_contained = True
    takes_references = False
    takes_pair_lists = False  # it matches whole classes

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Products of raw embeddings."""
        return "dot"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.norm_weight >= 0, f"norm_weight must be at least 0, got {self.norm_weight}")

    def reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """The own positive, and everybody else's."""
        return {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "near": sum_over(tile.similarity, tile.positive, weighting="mask"),
            "far": logsumexp_over(tile.similarity, tile.negative),
        }

    def row_loss(self, row_values: RowValues) -> Tensor:
        """Log(1 + Σ e^{far − near})."""
        alone = row_values["far"] == -torch.inf
        return softplus(zero_if_empty(row_values["far"]) - row_values["near"]).masked_fill(alone, 0)

    def kernel_spec(self, weights: KernelWeights | None) -> SoftmaxSpec:
        """Of anchors against positives; the norm term is added outside."""
        return SoftmaxSpec("npair", weights=weights)

    def output(  # type: ignore[override]
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        biased: Tensor | None = None,
        progress: float | None = None,
        **options: Any,
    ) -> PairOutput:
        """Anchors against positives; values at the anchors' rows. Options: also ``engine`` and ``tile``."""
        options = _own_options(options)
        anchors, a, p, y, both = _split(embeddings, labels, biased)
        self.observe(embeddings, labels)
        loss = self.resolve_difficulty(progress, None)
        found = pair_loss(loss, a, y, ref=(p, y), difficulty=loss.difficulty, biased=both, **options)
        norms = a.to(found.values.dtype).square().sum(1) + p.to(found.values.dtype).square().sum(1)
        values = found.values + self.norm_weight / 4 * norms
        n = len(embeddings)

        def scatter_to_anchors(x: Tensor) -> Tensor:
            return x.new_zeros(n).index_copy(0, anchors, x)

        defined = scatter_to_anchors(found.defined)
        return PairOutput(scatter_to_anchors(values), defined, None, found.engine, positives=defined)

    def statistics(  # type: ignore[override]
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        biased: Tensor | None = None,
        progress: float | None = None,
        **options: Any,
    ) -> PairStatistics:
        """What the difficulty did, counted over anchors against positives."""
        options = _own_options(options)
        _, a, p, y, both = _split(embeddings, labels, biased)
        loss = self.resolve_difficulty(progress, None)
        return pair_statistics(loss, a, y, difficulty=loss.difficulty, ref=(p, y), biased=both, **options)


def _own_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are left where a batch is paired with itself; those of other pairings are refused."""
    for name in OTHERS:
        if options.get(name) is not None and options[name] is not False:
            raise InputError(f"the N-pair loss pairs the two rows of every class: {name}= does not apply")
    return {name: given for name, given in options.items() if name not in OTHERS}


def _split(
    embeddings: Tensor, labels: Tensor, biased: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Where the anchors are; anchors, positives, their labels; and the second encoder's rows of both."""
    validate_embeddings(embeddings, labels, "embeddings", "labels")
    if biased is not None and (not isinstance(biased, Tensor) or len(biased) != len(embeddings)):
        raise InputError(f"biased must hold the second encoder's embeddings of the same {len(embeddings)} rows")
    anchors, positives = split_anchor_positive(labels)
    both = None if biased is None else (biased[anchors], biased[positives])
    return anchors, embeddings[anchors], embeddings[positives], labels[anchors], both


def split_anchor_positive(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the anchors and of their positives, class by class."""
    order = torch.argsort(labels, stable=True)
    if may_read(labels):
        known, counts = labels.unique(return_counts=True)
        if bool((counts != 2).any()):
            raise InputError(
                f"the N-pair loss needs exactly two rows of every class: class {int(known[counts != 2][0])} has "
                f"{int(counts[counts != 2][0])}. Draw batches of P classes x 2 samples"
            )
    return order[0::2], order[1::2]
