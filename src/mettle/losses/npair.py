"""N-pair loss: one pair per class, every other class's positive as a negative."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mettle.errors import InputError
from mettle.losses.base import Pairwise, filled, need, softplus
from mettle.pairs import (
    Acc,
    Difficulty,
    KernelWeights,
    Measure,
    PairFacts,
    PairOutput,
    Rows,
    SoftmaxSpec,
    Tile,
    lse,
    pair_facts,
    pair_loss,
    total,
)
from mettle.pairs.dispatch import check

OTHERS = ("ref", "ids", "views")  # options of losses that pair a batch with something else


@dataclass(frozen=True)
class NPair(Pairwise):
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

    temperature = 1.0
    self_contained = True

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Products of raw embeddings."""
        return "dot"

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.norm_weight >= 0, f"norm_weight must be at least 0, got {self.norm_weight}")

    def terms(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """The own positive, and everybody else's."""
        return {
            "positives": total(1.0, tile.pos, weigh="present"),
            "near": total(tile.s, tile.pos, weigh="present"),
            "far": lse(tile.s, tile.neg),
        }

    def finish(self, rows: Rows) -> Tensor:
        """Log(1 + Σ e^{far − near})."""
        alone = rows["far"] == -torch.inf
        return softplus(filled(rows["far"]) - rows["near"]).masked_fill(alone, 0)

    def kernel_spec(self, weights: KernelWeights | None) -> SoftmaxSpec:
        """Of anchors against positives; the norm term is added outside."""
        return SoftmaxSpec("npair", weights=weights)

    def output(self, embeddings: Tensor, labels: Tensor, *, biased: Tensor | None = None, **options) -> PairOutput:  # type: ignore[override]
        """Anchors against positives; values at the anchors' rows. Options: ``biased``, ``engine``, ``tile``."""
        options = _by_itself(options)
        anchors, a, p, y, both = _split(embeddings, labels, biased)
        self._observe(embeddings, labels)
        found = pair_loss(self, a, y, ref=(p, y), difficulty=self.difficulty, biased=both, **options)
        norms = a.to(found.values.dtype).square().sum(1) + p.to(found.values.dtype).square().sum(1)
        values = found.values + self.norm_weight / 4 * norms
        n = len(embeddings)

        def lay(x: Tensor) -> Tensor:
            return x.new_zeros(n).index_copy(0, anchors, x)

        return PairOutput(lay(values), lay(found.defined), lay(found.share), found.engine)

    def facts(self, embeddings: Tensor, labels: Tensor, *, biased: Tensor | None = None, **options) -> PairFacts:  # type: ignore[override]
        """What the difficulty did, counted over anchors against positives."""
        options = _by_itself(options)
        _, a, p, y, both = _split(embeddings, labels, biased)
        return pair_facts(self, a, y, difficulty=self.difficulty, ref=(p, y), biased=both, **options)


def _by_itself(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are left where a batch is paired with itself; those of other pairings are refused."""
    for name in OTHERS:
        if options.get(name) is not None and options[name] is not False:
            raise InputError(f"the N-pair loss pairs a batch with itself: {name}= does not apply")
    return {name: given for name, given in options.items() if name not in OTHERS}


def _split(
    embeddings: Tensor, labels: Tensor, biased: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Where the anchors are; anchors, positives, their labels; and the second encoder's rows of both."""
    check(embeddings, labels, "embeddings", "labels")
    if biased is not None and (not isinstance(biased, Tensor) or len(biased) != len(embeddings)):
        raise InputError(f"biased must hold the second encoder's embeddings of the same {len(embeddings)} rows")
    anchors, positives = paired(labels)
    both = None if biased is None else (biased[anchors], biased[positives])
    return anchors, embeddings[anchors], embeddings[positives], labels[anchors], both


def paired(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the anchors and of their positives, class by class."""
    order = torch.argsort(labels, stable=True)
    counts = labels.unique(return_counts=True)[1]
    if bool((counts != 2).any()):
        some = labels.unique()[counts != 2][0]
        raise InputError(
            f"the N-pair loss needs exactly two rows of every class: class {int(some)} has "
            f"{int(counts[counts != 2][0])}. Draw batches of P classes x 2 samples"
        )
    return order[0::2], order[1::2]
