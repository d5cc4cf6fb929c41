"""Triplet loss: a positive closer than a negative by a margin."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mettle.difficulty import Hardest
from mettle.losses.base import Pairwise, filled, need, softplus
from mettle.losses.distance import distance, squared_distance
from mettle.losses.ordered import following, hinges, shared
from mettle.losses.random_negative import Random, check, drawn, highest, winner
from mettle.pairs import (
    Acc,
    BatchHardSpec,
    Difficulty,
    HardestWeights,
    KernelWeights,
    Mask,
    Measure,
    NoKernel,
    Rows,
    Sweep,
    Tile,
    collect,
    peak,
    total,
)
from mettle.pairs.declarations import log_weight_of, overridden_since
from mettle.pairs.problem import stats_of, weights

MANY = 10  # positives of an anchor from which putting them in order is less work than meeting them one by one
MINING = ("all", "hardest", "semihard", "semihard-set", "random")


@dataclass(frozen=True)
class Triplet(Pairwise):
    r"""Triplet loss (Weinberger and Saul 2009, Schroff et al. 2015), with the usual ways of mining.

    Formula, d the distance (``squared`` or not), m the margin:
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

    temperature = 1.0
    self_contained = True

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.margin >= 0, f"margin must be at least 0, got {self.margin}")
        need(self.mining in MINING, f"mining must be one of {MINING}, got {self.mining!r}")
        need(self.average in ("active", "all"), f"average must be 'active' or 'all', got {self.average!r}")
        check(self.random)

    @property
    def measure(self) -> Measure:  # type: ignore[override]
        """Cosine on the sphere, else the distance itself."""
        return "cosine" if self.normalise else "squared"

    def sweeps(self) -> tuple[Sweep, ...]:
        """Batch-hard needs one pass; the others collect the positives first and meet the negatives after."""
        if self.mining == "hardest" or (self.mining == "all" and self.weighs_hardest()):
            return (Sweep(self.extremes),)
        if self.mining == "random":
            seed = drawn(self.random)
            return (
                Sweep(lambda tile, rows: self.collected(tile, rows) | highest(tile, seed), reads="rows"),
                Sweep(lambda tile, rows: winner(tile, rows, self.distance(tile), seed), reads="rows"),
            )
        second = self.beyond if self.mining == "semihard" else self.triplets
        return Sweep(self.collected), Sweep(second, reads="rows")

    def weighs_hardest(self) -> bool:
        """Whether the difficulty leaves the hardest pair of each side, as ``mining="hardest"`` does."""
        it = self.difficulty
        return isinstance(it, Hardest) and it.side == "both" and overridden_since(type(it), "kernel_weights") is None

    def distance(self, tile: Tile) -> Tensor:
        """Of the pairs of a tile."""
        return (squared_distance if self.squared else distance)(tile, self.measure)

    def surplus(self, gap: Tensor) -> Tensor:
        """How much a triplet misses the margin by."""
        return softplus(gap + self.margin) if self.soft else (gap + self.margin).clamp(min=0)

    def counts(self, tile: Tile) -> dict[str, Acc]:
        """Who has a positive and a negative."""
        return {
            "positives": total(1.0, tile.pos, weigh="present"),
            "negatives present": total(1.0, tile.neg, weigh="present"),
        }

    def extremes(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """The farthest positive and the closest negative."""
        d = self.distance(tile)
        return self.counts(tile) | {"farthest": peak(d, tile.pos), "closest": peak(-d, tile.neg)}

    def collected(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """The positives of each anchor and their weights."""
        return self.counts(tile) | {
            "near": collect(self.distance(tile), tile.pos),
            "near weight": collect(1.0, tile.pos, weigh="full"),
        }

    def triplets(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """Every negative against every positive."""
        d, near, weight = self.distance(tile), rows["near"], rows["near weight"]
        if near.shape[2] >= MANY and not self.soft:  # softpluses have no running sums
            value, active, count = hinges(d, near, weight, self.margin, within=self.mining == "semihard-set")
        else:
            value, active, count = self.one_by_one(d, near, weight)
        return {
            "value": total(value, tile.neg),
            "active": total(active, tile.neg),
            "count": total(count, tile.neg),
        }

    def one_by_one(self, d: Tensor, near: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every negative: the sum of its misses, the weight of those above 0, the weight of all."""
        value, active, count = torch.zeros_like(d), torch.zeros_like(d), torch.zeros_like(d)
        for k in range(near.shape[2]):  # one positive at a time, so that a tile stays a tile
            gap, w = near[..., k] - d, weight[..., k]
            miss = self.surplus(gap)
            if self.mining == "semihard-set":
                w = w * ((gap < 0) & (gap >= -self.margin))
            value, count = value + w * miss, count + w
            active = active + w * (miss > 0)
        return value, active, count

    def beyond(self, tile: Tile, rows: Rows) -> dict[str, Acc]:
        """For each positive the closest negative beyond it, and the farthest negative of all."""
        d, near = self.distance(tile), rows["near"]
        closest = following(d, self._there(tile, rows), near) if near.shape[2] >= MANY else None
        if closest is None:
            beyond = peak(torch.where(d[..., None] > near, -d[..., None], -torch.inf), tile.neg)
        else:  # a column or two stand for the whole tile; one, where there is no other tile to share with
            closest = shared(closest) if whole(tile) else closest
            beyond = Acc("peak", -closest, torch.ones_like(closest[..., 0], dtype=torch.bool), "none")
        return {"beyond": beyond, "farthest": peak(d, tile.neg)}

    def _there(self, tile: Tile, rows: Rows) -> Mask:
        """The negatives of a tile that the difficulty has not taken out."""
        if self.difficulty is None or log_weight_of(self.difficulty) is not None:  # exponential weights are never 0
            return tile.neg
        return tile.neg & (weights(self.difficulty, tile, stats_of(rows)) != 0)

    def finish(self, rows: Rows) -> Tensor:
        """One value per anchor."""
        alone = rows["negatives present"] == 0  # nothing to be closer than
        if "closest" in rows:
            return self.surplus(filled(rows["farthest"]) + filled(rows["closest"])).masked_fill(alone, 0)
        if "value" in rows:
            by = rows["active"] if self.average == "active" else rows["count"]
            return rows["value"] / torch.where(by == 0, 1, by)
        near, weight = rows["near"], rows["near weight"]
        if "beyond" in rows:
            found = rows["beyond"] > -torch.inf
            far = torch.where(found, -rows["beyond"].masked_fill(~found, 0), filled(rows["farthest"])[:, None])
        else:
            far = (rows["far"] / rows["negatives"].clamp(min=1))[:, None]
        miss = self.surplus(near - far) * weight
        by = ((miss > 0) * weight if self.average == "active" else weight).sum(1)
        return (miss.sum(1) / torch.where(by == 0, 1, by)).masked_fill(alone, 0)

    def defined(self, rows: Rows) -> Tensor:
        """Anchors with a positive; without a negative the loss is 0."""
        return rows["positives"] > 0

    def kernel_spec(self, weights: KernelWeights | None) -> BatchHardSpec | NoKernel:
        """Batch-hard on the sphere."""
        hardest = self.mining == "hardest"
        if weights is not None:
            hardest = isinstance(weights, HardestWeights) and self.mining in ("hardest", "all")
        if self.measure == "cosine" and hardest:
            return BatchHardSpec()
        return NoKernel("of the triplet losses, the kernels know batch-hard on unit vectors")


def whole(tile: Tile) -> bool:
    """Whether a tile holds every pair there is."""
    return tile.sides is not None and tile.s.shape == (len(tile.sides.z), len(tile.sides.ref))
