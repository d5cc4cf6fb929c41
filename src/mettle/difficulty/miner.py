"""Miners: difficulties of weights 0 and 1 that also hand out the positions of the pairs that they leave in."""

from torch import Tensor

from mettle.errors import InputError
from mettle.pairs import Difficulty, IndexPairs, Measure, list_pairs
from mettle.pairs.selection import IndicesTuple
from mettle.pairs.validation import Reference


def mine_pairs(
    difficulty: Difficulty,
    embeddings: Tensor,
    labels: Tensor,
    *,
    ref: Reference | None = None,
    ids: Tensor | None = None,
    measure: Measure = "cosine",
) -> IndexPairs:
    """The pairs that a difficulty leaves in, as int64 positions: (anchors, positives, anchors, negatives).

    A pair of weight k is listed k times, which means the same to a loss; a weight that is no whole number is an error.
    Memory is that of the list: no (n, n) matrix is held.

    Args:
        difficulty: what weighs the pairs; `Hardest`, say, or one of your own.
        embeddings: (n, d), any floating type.
        labels: (n,) whole numbers, or (n, C) sets of classes.
        ref: (embeddings, labels) or (embeddings, labels, ids) to compare with instead of the batch itself; positives
            and negatives are then positions in it.
        ids: (n,) sample ids, to leave out pairs of equal id against a ``ref`` with ids.
        measure: the similarity of the loss that the pairs are for.
    """
    return list_pairs(difficulty, embeddings, labels, ref=ref, ids=ids, measure=measure)


def join_reference(ref: Reference | None, ref_emb: Tensor | None, ref_labels: Tensor | None) -> Reference | None:
    """The reference set of a call, given in one of two ways."""
    if ref_emb is None and ref_labels is None:
        return ref
    if ref is not None:
        raise InputError("ref= and ref_emb=, ref_labels= both say what to compare with: give one")
    if ref_emb is None or ref_labels is None:
        raise InputError("ref_emb= and ref_labels= belong together: give both, or ref=(embeddings, labels)")
    return ref_emb, ref_labels


class Miner:
    """A difficulty that is called like a miner of pytorch-metric-learning: ``miner(embeddings, labels)``."""

    def __call__(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ref: Reference | None = None,
        ids: Tensor | None = None,
        measure: Measure = "cosine",
    ) -> IndicesTuple:
        """The positions of the pairs that stay, to be given to a loss as ``indices_tuple``.

        Arguments as in `mine_pairs`; ``ref_emb, ref_labels`` is another way to write ``ref=(ref_emb, ref_labels)``.
        """
        ref = join_reference(ref, ref_emb, ref_labels)
        return self.mine(embeddings, labels, ref=ref, ids=ids, measure=measure)

    def mine(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ref: Reference | None = None,
        ids: Tensor | None = None,
        measure: Measure = "cosine",
    ) -> IndicesTuple:
        """Pairs, unless a miner thinks in triplets."""
        return mine_pairs(self, embeddings, labels, ref=ref, ids=ids, measure=measure)  # type: ignore[arg-type]
