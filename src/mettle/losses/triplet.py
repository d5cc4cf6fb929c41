"""Triplet loss: a positive closer than a negative by a margin."""

from dataclasses import field
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty import Hardest
from mettle.losses.base import PairwiseLoss, require, softplus, zero_if_empty
from mettle.losses.distances import Metric, check_metric, tile_distance, tile_measure
from mettle.pairs import (
    BatchHardSpec,
    Difficulty,
    HardestWeights,
    KernelWeights,
    Mask,
    Measure,
    NoKernel,
    PairOutput,
    Pass,
    Reduction,
    RowValues,
    Tile,
    gather_over,
    max_over,
    sum_over,
)
from mettle.pairs.declarations import declared_log_weight, overridden_since
from mettle.pairs.dispatch import autocast_disabled, nan_if_not_finite
from mettle.pairs.pair_list import rowwise_similarity
from mettle.pairs.problem import difficulty_statistics, evaluate_weights
from mettle.pairs.random_negative import (
    HasGenerator,
    Random,
    draw_seed,
    max_hash,
    selected_negative,
    validate_generator,
)
from mettle.pairs.selection import IndicesTuple, resolve_labels, select_pairs
from mettle.pairs.similarity import (
    TileOperands,
    may_read,
    prepare_embeddings,
    prepare_sides,
    similarity,
    squared_distance,
    widest_dtype,
)
from mettle.pairs.validation import Reference, validate_inputs

MANY = 10  # positives of an anchor from which putting them in order is less work than meeting them one by one
TIED = 4  # negatives of a row at exactly one distance: in float32 two are common, more are copies


class Triplet(HasGenerator, PairwiseLoss):
    r"""Triplet loss (Weinberger and Saul 2009, Schroff et al. 2015), with the usual ways of mining.

    Formula, d the distance (Euclidean, ``squared`` or not, or another ``metric``), m the margin:
        L_apn = [d_ap − d_an + m]₊, or softplus(d_ap − d_an + m) when ``soft``
        all           mean over the active triplets of an anchor (those above 0), or over ``average="all"`` of them
        hardest       the farthest positive and the closest negative of each anchor (batch-hard)
        semihard      for every positive the closest negative beyond it, else the farthest negative
        semihard-set  all triplets with 0 < d_an − d_ap <= m
        random        for every anchor one negative drawn at random
    Needs:
        labels, positives and negatives in the batch. ``normalise`` puts embeddings on the unit sphere.
    Use when:
        classes are many and samples few. ``hardest`` from scratch can collapse to a point, where the loss is exactly
        m: start with ``semihard``.
    Relations:
        ``mining="hardest"`` is ``difficulty=Hardest()``. With soft, m = 0 and two candidates it is a softmax over
        −d: NCA with one negative.
    """

    margin: float = 0.2
    mining: Literal["all", "hardest", "semihard", "semihard-set", "random"] = "all"
    squared: bool = False
    soft: bool = False
    normalise: bool = True
    average: Literal["active", "all"] = "active"
    difficulty: Difficulty | None = None
    random: Random = field(default=None, repr=False)
    metric: Metric = field(default="euclidean", kw_only=True)

    self_contained = True
    takes_triplets = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_metric(self.metric, normalise=self.normalise, squared=self.squared)
        require(self.margin >= 0, f"margin must be at least 0, got {self.margin}")
        validate_generator(self.random)

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Cosine on the sphere, else the distance itself."""
        return tile_measure(self.metric, normalise=self.normalise)

    def passes(self) -> tuple[Pass, ...]:
        """Batch-hard needs one pass; the others gather the positives first and compare the negatives with them."""
        if self.mining == "hardest" or (self.mining == "all" and self.weighs_hardest()):
            return (Pass(self.hardest_reductions),)
        if self.mining == "random":
            seed = draw_seed(self.random)
            return (
                Pass(lambda tile, rows: self.positive_distances(tile, rows) | max_hash(tile, seed), reads="anchor"),
                Pass(lambda tile, rows: selected_negative(tile, rows, self.distance(tile), seed), reads="anchor"),
            )
        second = self.semihard_reductions if self.mining == "semihard" else self.triplets
        return Pass(self.positive_distances), Pass(second, reads="anchor")

    def weighs_hardest(self) -> bool:
        """Whether the difficulty leaves the hardest pair of each side, as ``mining="hardest"`` does."""
        it = self.difficulty
        return isinstance(it, Hardest) and it.side == "both" and overridden_since(type(it), "kernel_weights") is None

    def distance(self, tile: Tile) -> Tensor:
        """Of the pairs of a tile."""
        return squared_distance(tile, self.measure) if self.squared else tile_distance(tile, self.metric, self.measure)

    def margin_violation(self, gap: Tensor) -> Tensor:
        """How much a triplet misses the margin by."""
        return softplus(gap + self.margin) if self.soft else (gap + self.margin).clamp(min=0)

    def counts(self, tile: Tile) -> dict[str, Reduction]:
        """Who has a positive and a negative."""
        return {
            "positives": sum_over(1.0, tile.positive, weighting="mask"),
            "negatives present": sum_over(1.0, tile.negative, weighting="mask"),
        }

    def hardest_reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """The farthest positive and the closest negative."""
        d = self.distance(tile)
        return self.counts(tile) | {"farthest": max_over(d, tile.positive), "closest": max_over(-d, tile.negative)}

    def positive_distances(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """The positives of each anchor and their weights."""
        return self.counts(tile) | {
            "near": gather_over(self.distance(tile), tile.positive),
            "near weight": gather_over(1.0, tile.positive, weighting="weight"),
        }

    def triplets(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """Every negative against every positive."""
        d, near, weight = self.distance(tile), row_values["near"], row_values["near weight"]
        if near.shape[2] >= MANY and not self.soft:  # softpluses have no running sums
            value, active, count = sorted_hinge_sums(d, near, weight, self.margin, within=self.mining == "semihard-set")
        else:
            value, active, count = self.one_by_one(d, near, weight)
        return {
            "value": sum_over(value, tile.negative),
            "active": sum_over(active, tile.negative),
            "count": sum_over(count, tile.negative),
        }

    def one_by_one(self, d: Tensor, near: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every negative: the sum of its misses, the weight of those above 0, the weight of all."""
        value, active, count = torch.zeros_like(d), torch.zeros_like(d), torch.zeros_like(d)
        for k in range(near.shape[2]):  # one positive at a time, so that a tile stays a tile
            gap, w = near[..., k] - d, weight[..., k]
            miss = self.margin_violation(gap)
            if self.mining == "semihard-set":
                w = w * ((gap < 0) & (gap >= -self.margin))
            value, count = value + w * miss, count + w
            active = active + w * (miss > 0)
        return value, active, count

    def semihard_reductions(self, tile: Tile, row_values: RowValues) -> dict[str, Reduction]:
        """For each positive the closest negative beyond it, and the farthest negative of all."""
        d, near = self.distance(tile), row_values["near"]
        closest = next_negatives(d, self._present_negatives(tile, row_values), near) if near.shape[2] >= MANY else None
        if closest is None:
            beyond = max_over(torch.where(d[..., None] > near, -d[..., None], -torch.inf), tile.negative)
        else:  # a column or two stand for the whole tile; one, where there is no other tile to share with
            closest = share_ties(closest) if is_whole_matrix(tile) else closest
            beyond = Reduction("max", -closest, torch.ones_like(closest[..., 0], dtype=torch.bool), "none")
        return {"beyond": beyond, "farthest": max_over(d, tile.negative)}

    def _present_negatives(self, tile: Tile, row_values: RowValues) -> Mask:
        """The negatives of a tile that the difficulty has not taken out."""
        # Exponential weights are never 0.
        if self.difficulty is None or declared_log_weight(self.difficulty) is not None:
            return tile.negative
        return tile.negative & (evaluate_weights(self.difficulty, tile, difficulty_statistics(row_values)) != 0)

    def row_loss(self, row_values: RowValues) -> Tensor:
        """One value per anchor."""
        if "closest" in row_values:  # -inf where a side is empty: the triplet keeps every margin
            return self.margin_violation(row_values["farthest"] + row_values["closest"])
        alone = row_values["negatives present"] == 0  # nothing to be closer than
        if "value" in row_values:
            by = row_values["active"] if self.average == "active" else row_values["count"]
            return row_values["value"] / torch.where(by == 0, 1, by)
        near, weight = row_values["near"], row_values["near weight"]
        if "beyond" in row_values:
            found = row_values["beyond"] > -torch.inf
            farthest = zero_if_empty(row_values["farthest"])[:, None]
            far = torch.where(found, -row_values["beyond"].masked_fill(~found, 0), farthest)
        else:
            far = (row_values["far"] / row_values["negatives"].clamp(min=1))[:, None]
        miss = self.margin_violation(near - far) * weight
        by = ((miss > 0) * weight if self.average == "active" else weight).sum(1)
        return (miss.sum(1) / torch.where(by == 0, 1, by)).masked_fill(alone, 0)

    def is_defined(self, row_values: RowValues) -> Tensor:
        """Anchors with a positive; without a negative the loss is 0."""
        return row_values["positives"] > 0

    def given_triplets(
        self, embeddings: Tensor, labels: Tensor | None, ref: Reference | None, triplets: IndicesTuple
    ) -> PairOutput:
        """One value per anchor: the mean over those of the given triplets that are active, or over all of them.

        Distances are computed once for each pair, from two rows or from the whole matrix, whichever is smaller.
        """
        require(
            self.mining == "all" and self.difficulty is None,
            "Triplet takes given triplets as they are, with mining='all' and without a difficulty: to mine or "
            "weigh, give pairs (anchors, positives, anchors, negatives)",
        )
        selection = select_pairs(embeddings, ref, indices_tuple=triplets)
        labels, ref, _ = resolve_labels(embeddings, labels, ref, selection)
        validate_inputs(embeddings, labels, ref, None, None)
        n, columns = len(embeddings), len(embeddings) if ref is None else len(ref[0])
        anchor, positive, negative = (x.long() for x in triplets)
        pair, index = torch.unique(
            torch.cat([anchor, anchor]) * columns + torch.cat([positive, negative]), return_inverse=True
        )
        i, j = pair // columns, pair % columns
        with autocast_disabled(embeddings.device.type):
            if ref is None and self.measure != "snr":
                a = b = prepare_embeddings(embeddings, self.measure)
            else:
                a, b = prepare_sides(embeddings, embeddings if ref is None else ref[0], self.measure)
            if len(pair) * a.shape[1] < n * columns:
                s = rowwise_similarity(a[i], b[j], self.measure)
            else:
                s = similarity(a, b, self.measure)[i, j]
            operands = TileOperands(a.detach(), b.detach(), i, j, self.measure)
            d = self.distance(Tile(s[:, None], True, True, i[:, None], j[:, None], operands=operands)).squeeze(1)
            near, far = d[index].chunk(2)
            miss = self.margin_violation(near - far)
            by = (miss > 0).to(d.dtype) if self.average == "active" else torch.ones_like(d[index][: len(anchor)])
            total, count = (d.new_zeros(n).index_add(0, anchor, x) for x in (miss, by))
            values = total / torch.where(count == 0, 1, count)
            for given in (embeddings, *(ref or ())[:1]):
                values = values + nan_if_not_finite(given).to(values.dtype)
        listed = torch.bincount(anchor, minlength=n)
        return PairOutput(values, listed > 0, None, "list", positives=listed)

    def kernel_spec(self, weights: KernelWeights | None) -> BatchHardSpec | NoKernel:
        """Batch-hard on the sphere."""
        hardest = self.mining == "hardest"
        if weights is not None:
            hardest = isinstance(weights, HardestWeights) and self.mining in ("hardest", "all")
        if self.measure == "cosine" and self.metric == "euclidean" and hardest:
            return BatchHardSpec()
        return NoKernel("of the triplet losses, the kernels know batch-hard on unit vectors")


def is_whole_matrix(tile: Tile) -> bool:
    """Whether a tile holds every pair there is."""
    return tile.operands is not None and tile.similarity.shape == (len(tile.operands.z), len(tile.operands.ref))


def sorted_hinge_sums(
    d: Tensor, near: Tensor, weight: Tensor, margin: float, *, within: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every negative at distance ``d`` (a, b), over the positives of its anchor, ``near`` and ``weight`` (a, 1, m).

    Returns Σ w·[near − d + margin]₊, the weight of the terms above 0, and the weight of all terms, (a, b) each;
    ``within``: over positives closer than the negative only, by no more than the margin.
    """
    dtype = widest_dtype(d.device)
    near, order = near.squeeze(1).to(dtype).sort(1)
    weight = weight.squeeze(1).to(dtype).gather(1, order)
    far = d.to(dtype).contiguous()
    kept, least = near.detach(), far.detach() - margin
    first = torch.searchsorted(kept, least)  # a hinge of exactly 0 has the gradient of those above
    above = torch.searchsorted(kept, least, right=True)
    last = torch.searchsorted(kept, far.detach()) if within else torch.full_like(first[:, :1], near.shape[1])
    first, above = torch.minimum(first, last), torch.minimum(above, last)

    def run(x: Tensor, start: Tensor) -> Tensor:
        sums = torch.nn.functional.pad(x, (1, 0)).cumsum(1)
        return sums.gather(1, last) - sums.gather(1, start)

    met = run(weight, first)
    value = run(weight * near, first) + met * (margin - far)
    count = met if within else weight.sum(1, keepdim=True).expand_as(far)
    return value.to(d.dtype), run(weight, above).to(d.dtype), count.to(d.dtype)


def next_negatives(d: Tensor, there: Mask, near: Tensor) -> Tensor | None:
    """For every positive in ``near`` (a, 1, m) the closest negative of ``d`` (a, b) beyond it, infinity where none is.

    Returns (a, c, m): the negatives that tie for it stand below each other, because they share its gradient. None where
    more than `TIED` do.
    """
    far = d if there is True else d.masked_fill(~torch.as_tensor(there, device=d.device), torch.inf)
    far = torch.nn.functional.pad(far.contiguous().sort(1).values, (0, TIED + 1), value=torch.inf)
    at = torch.searchsorted(far.detach(), near.squeeze(1).detach().contiguous(), right=True)
    at = at.clamp(max=d.shape[1])
    found = [far.gather(1, at)]
    for step in range(1, TIED + 1):
        further = far.gather(1, at + step)
        tied = (further == found[0]) & (further < torch.inf)
        if may_read(tied) and not bool(tied.any()):
            return torch.stack(found, 1)
        found.append(further.masked_fill(~tied, torch.inf))
    return None if may_read(d) else torch.stack(found, 1)


def share_ties(found: Tensor) -> Tensor:
    """(a, 1, m) of what `following` gives: one column in which the negatives that tie share the gradient."""
    there = found < torch.inf
    mean = found.masked_fill(~there, 0).sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)
    # The mean of equal numbers has the right gradient; its value may be off by a rounding.
    return torch.where(there[:, :1], mean + (found[:, :1].masked_fill(~there[:, :1], 0) - mean).detach(), torch.inf)
