"""Negatives by the inverse of how common their distance is on the sphere: as weights, or as a random draw."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mettle.difficulty.importance import MIN_LOG_WEIGHT
from mettle.difficulty.miner import join_reference, mine_pairs
from mettle.difficulty.mining import max_over_columns
from mettle.difficulty.settings import SettingsModule, validate_fields, validate_integers
from mettle.errors import InputError
from mettle.pairs import (
    Mask,
    Pass,
    Reduction,
    RowValues,
    Tile,
    Traits,
    gather_over,
    logsumexp_over,
    sum_over,
)
from mettle.pairs.random_negative import HasGenerator, Random, draw_seed, pair_hash, validate_generator
from mettle.pairs.selection import IndicesTuple
from mettle.pairs.similarity import widest_dtype
from mettle.pairs.validation import Reference


@dataclass(frozen=True)
class DistanceWeighted:
    r"""Negatives weigh by the inverse of how common their distance is on the sphere (Wu et al. 2017).

    Formula, on unit vectors of dimension D, d = √(2 − 2s), N the number of negatives of the anchor:
        q(d) = d^{D−2} · (1 − d²/4)^{(D−3)/2}, the density of distances of points spread evenly over the sphere
        negatives  w = N · u / Σ_n u,  u = 1 / q(max(d, cutoff)) where d < limit, else 0;  positives  w = 1
    The weights of an anchor's negatives have mean 1, so that the scale of a loss stays what it is.
    Needs:
        a loss on unit vectors.
    Use when:
        random negatives are all equally far, as they are in high dimensions, and the hardest are too noisy.
    Relations:
        the expectation of `DistanceWeightedSampling`, up to a factor for each anchor.
    """

    cutoff: float = 0.5
    limit: float = 1.4
    dim: int | None = None
    detach: bool = True

    traits = Traits(trusted=True, self_contained=True)

    def __post_init__(self) -> None:
        validate_fields(self)
        validate_range(self.cutoff, self.limit, self.dim)

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """The sum of the unnormalised weights and the number of negatives."""
        near = near_negatives(tile, self.limit)
        log_sum = logsumexp_over(log_inverse_density(tile, self.cutoff, self.limit, self.dim), near)
        return {"sum": log_sum, "count": sum_over(1.0, tile.negative)}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        some = row_values["sum"] > -torch.inf
        log_count = torch.where(some, row_values["count"], 1).log()
        log_w = log_inverse_density(tile, self.cutoff, self.limit, self.dim) - row_values["sum"].masked_fill(~some, 0)
        # No negative can weigh more than all of them together; other pairs could, and are not meant. And none below the
        # limit weighs nothing, however little: a weight of 0 means that the pair is not there.
        w = (log_w.clamp(max=1) + log_count).clamp(min=MIN_LOG_WEIGHT).exp()
        w = w * near_negatives(tile, self.limit)
        return w if tile.positive is False else torch.where(tile.positive, 1, w)  # type: ignore[arg-type]


class DistanceWeightedSampling(HasGenerator, SettingsModule):
    r"""One negative for each positive, drawn by distance-weighted sampling (Wu et al. 2017).

    Formula, u and its settings as in `DistanceWeighted`:
        for every positive of an anchor one of its negatives is drawn with probability u / Σ_n u, independently
        negatives  w = how often it was drawn;  positives  w = 1
    Every call draws anew, from ``random`` or from torch's own generator. An anchor without negatives below the limit
    keeps its positives and no negative; called as a miner, it has no triplet.
    """

    cutoff: float = 0.5
    limit: float = 1.4
    dim: int | None = None
    random: Random = field(default=None, repr=False)

    detach = True
    traits = Traits(trusted=True)  # draws go by positions in the batch

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_range(self.cutoff, self.limit, self.dim)
        validate_generator(self.random)

    def row_statistics(self, tile: Tile) -> dict[str, Reduction]:
        """One entry for each positive."""
        return {"positive": gather_over(1.0, tile.positive)}

    def statistic_passes(self) -> tuple[Pass, ...]:
        """Which negative has the highest Gumbel score for each positive: first the score, then whose it is."""
        seed = draw_seed(self.random)
        return (
            Pass(lambda tile, _: self.row_statistics(tile)),
            Pass(lambda tile, rows: self._highest_scores(tile, rows, seed), reads="anchor"),
            Pass(lambda tile, rows: self._draw_negatives(tile, rows, seed), reads="anchor"),
        )

    def _gumbel_scores(self, tile: Tile, count: int, seed: int) -> Iterator[Tensor]:
        """(a, b) for each of ``count`` positives: scores, of which that of negative n is the highest with chance u_n.

        Log u plus Gumbel noise; -inf for what cannot be drawn.
        """
        log_u = log_inverse_density(tile, self.cutoff, self.limit, self.dim)
        log_u = log_u.to(widest_dtype(log_u.device))
        log_u = log_u.masked_fill(~torch.as_tensor(near_negatives(tile, self.limit), device=log_u.device), -torch.inf)
        for k in range(count):  # one positive at a time, so that a tile stays a tile
            yield log_u - (-pair_hash(tile, seed + k).log()).log()

    def _highest_scores(self, tile: Tile, row_values: RowValues, seed: int) -> dict[str, Reduction]:
        """The highest Gumbel score for each positive."""
        highest = [
            scores.amax(1, keepdim=True) for scores in self._gumbel_scores(tile, row_values["positive"].shape[2], seed)
        ]
        return {"score": max_over_columns(torch.stack(highest, 2))}

    def _draw_negatives(self, tile: Tile, row_values: RowValues, seed: int) -> dict[str, Reduction]:
        """The position of the negative that was drawn for each positive, -inf where there is none."""
        highest, position = row_values["score"], tile.reference_index.to(row_values["score"].dtype)
        drawn = [
            torch.where((scores == highest[..., k]) & (scores > -torch.inf), position, -torch.inf).amax(1, keepdim=True)
            for k, scores in enumerate(self._gumbel_scores(tile, highest.shape[2], seed))
        ]
        return {"drawn": max_over_columns(torch.stack(drawn, 2))}

    def weights(self, tile: Tile, row_values: RowValues) -> Tensor:
        """(a, b) weights."""
        drawn = row_values["drawn"].masked_fill(row_values["positive"] == 0, -torch.inf)
        w = torch.zeros_like(tile.similarity)
        for k in range(drawn.shape[2]):  # one positive at a time, so that a tile stays a tile
            w += tile.reference_index == drawn[..., k]
        return w if tile.positive is False else torch.where(tile.positive, 1, w)  # type: ignore[arg-type]

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        *,
        ref: Reference | None = None,
        ids: Tensor | None = None,
    ) -> IndicesTuple:
        """(anchors, positives, negatives): every positive of an anchor with a negative that was drawn for it."""
        ref = join_reference(ref, ref_emb, ref_labels)
        anchors, positives, drawn_for, negatives = mine_pairs(self, embeddings, labels, ref=ref, ids=ids)
        has_negative = torch.zeros(len(embeddings), dtype=torch.bool, device=embeddings.device)
        has_negative[drawn_for] = True
        there = has_negative[anchors]
        # As many as positives, and independent of one another: which belongs to which does not matter, if it is
        # not always the first to the first.
        mixed = torch.randperm(len(negatives), generator=self.random).to(negatives.device)
        order = mixed[drawn_for[mixed].argsort(stable=True)]
        return anchors[there], positives[there], negatives[order]


def log_inverse_density(tile: Tile, cutoff: float, limit: float, dim: int | None) -> Tensor:
    """(a, b) −log q(d) at distances of ``cutoff`` to ``limit``; what lies outside is taken for the nearer end."""
    if tile.operands is not None and tile.operands.measure != "cosine":
        raise InputError(
            "distance weighting is about distances on the unit sphere, and the loss here compares by "
            f"{tile.operands.measure!r}: use a loss on unit vectors"
        )
    if dim is None and tile.operands is None and tile.similarity.numel() > 1:
        raise InputError("the dimension of the embeddings is not known here: give distance weighting dim=")
    if dim is None:
        dim = 3 if tile.operands is None else tile.operands.z.shape[1]  # of one pair without rows nothing matters
    s = tile.similarity.clamp(1 - limit**2 / 2, 1 - cutoff**2 / 2)
    return -((dim - 2) / 2 * (2 - 2 * s).log() + (dim - 3) / 2 * ((1 + s) / 2).log())


def near_negatives(tile: Tile, limit: float) -> Mask:
    """Negatives closer than the limit."""
    return False if tile.negative is False else tile.negative & (tile.similarity > 1 - limit**2 / 2)


def validate_range(cutoff: float, limit: float, dim: int | None) -> None:
    """Refuse distances that are not on the sphere in this order."""
    if not 0 < cutoff < limit < 2:
        raise InputError(f"distances on the sphere: 0 < cutoff < limit < 2 is wanted, got {cutoff} and {limit}")
    if dim is not None:
        validate_integers(dim=dim)
        if dim < 2:
            raise InputError(f"dim must be at least 2, got {dim}")
