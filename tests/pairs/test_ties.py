"""Duplicates of one picture tie, wherever they stand and whichever engine looks; statistics say what a call did."""

from dataclasses import dataclass, replace

import pytest
import torch

from laws.members import with_difficulty
from mettle.difficulty import Hardest
from mettle.losses import Contrastive, InfoNCE, LiftedStructure
from mettle.losses.base import PairwiseLoss
from mettle.pairs import Difficulty, max_over, sum_over

LOSSES = {
    "cosines": InfoNCE(0.5),
    "distances": LiftedStructure(),
    "raw pairs": Contrastive(normalise=False),
}


@dataclass(frozen=True)
class Closest:
    """The closest negatives of each anchor: all that tie up to rounding, or to the last bit only."""

    exact: bool = False
    detach: bool = True

    def row_statistics(self, tile):
        return {"near": max_over(tile.similarity, tile.negative)}

    def weights(self, tile, rows):
        least = rows["near"] if self.exact else rows["near"] - tile.rounding_error()
        return (tile.similarity >= least) | tile.positive


def doubled(n: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Every sample twice."""
    z = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return torch.cat([z, z]), (torch.arange(n) // 3).repeat(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("hard", [Closest(), Hardest("negatives")], ids=repr)
@pytest.mark.parametrize("name", LOSSES)
def test_duplicates_all_stay_in_every_order_and_engine(name, hard, dtype):
    """Rounding to the last bit would choose one of two equal negatives, here or there: the sums differ by log 2."""
    loss = with_difficulty(LOSSES[name], hard)
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 1e-6}
    for seed, (n, d) in enumerate([(23, 7), (37, 33), (61, 64), (90, 16)]):
        z, y = doubled(n, d, seed, dtype)
        order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(seed))
        wanted = loss.per_anchor(z, y, engine="dense")
        torch.testing.assert_close(loss.per_anchor(z[order], y[order], engine="dense"), wanted[order], **near)
        for tile in (13, 64):
            torch.testing.assert_close(loss.per_anchor(z, y, engine="tiled", tile=tile), wanted, **near)
        seen = loss.statistics(z, y)
        assert seen.kept_negatives == pytest.approx(2 / (2 * n - 2 * 3), rel=0.1)  # the last class may be smaller


def test_pairs_that_differ_by_more_than_rounding_do_not_tie():
    z, y = doubled(40, 16, 0, torch.float32)
    z[40:] += 1e-3 * torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    assert InfoNCE(0.5, difficulty=Closest()).statistics(z, y).kept_negatives == pytest.approx(1 / 74, rel=0.05)


def test_the_rounding_error_grows_with_the_rows_and_not_with_their_neighbours():
    """A row a thousand times as long must not make the others tie."""
    z, y = doubled(30, 8, 0, torch.float32)
    z[30:] += 1e-2 * torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    z[7] *= 1000
    loss = LiftedStructure(difficulty=Closest())
    assert loss.statistics(z, y).kept_negatives == pytest.approx(1 / 54, rel=0.05)
    small = loss.statistics(1e-6 * z, y)
    assert small.kept_negatives == pytest.approx(1 / 54, rel=0.05)


class Present(PairwiseLoss):
    """Each anchor's number of negatives that its difficulty left in."""

    difficulty: Difficulty | None = None
    temperature: float = 1.0

    def reductions(self, tile, rows):
        return {
            "negatives": sum_over(1.0, tile.negative, weighting="mask"),
            "all": sum_over(1.0, tile.negative, weighting="none"),
        }

    def row_loss(self, rows):
        return rows["negatives"]

    def is_defined(self, rows):
        return rows["all"] > 0


@pytest.mark.parametrize("n", [23, 61, 150])
def test_statistics_count_what_a_call_sees(n):
    """Weights that hang on the last bit: statistics look at the same products in the same order as the loss."""
    loss = Present(Closest(exact=True))
    for seed in range(20):
        z, y = doubled(n, 9, seed)
        order = torch.randperm(2 * n, generator=torch.Generator().manual_seed(seed))
        found = loss.output(z[order], y[order])
        assert found.engine == ("dense" if n < 128 else "tiled")
        kept = found.values.sum() / (y[:, None] != y).sum()
        assert loss.statistics(z[order], y[order]).kept_negatives == pytest.approx(float(kept), rel=1e-12)


def test_statistics_of_an_engine_and_a_tile_that_were_asked_for():
    from mettle.pairs import pair_statistics

    loss = Present(Closest(exact=True))
    z, y = doubled(61, 9, 0)
    for options in ({"engine": "dense"}, {"engine": "tiled", "tile": 17}, {"engine": "tiled", "tile": 40}):
        kept = loss.output(z, y, **options).values.sum() / (y[:, None] != y).sum()
        seen = pair_statistics(loss, z, y, difficulty=loss.difficulty, **options)
        assert seen.engine == options["engine"]
        assert seen.kept_negatives == pytest.approx(float(kept), rel=1e-12)
    with pytest.raises(TypeError):
        pair_statistics(loss, z, y, enigne="dense")


def test_the_engine_that_statistics_name_is_the_one_they_used():
    """Two passes of the loss make it tiled at a size where counting alone would be dense."""
    z, y = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)), torch.arange(300) // 3
    loss = replace(InfoNCE(0.5), prior=0.1)
    assert loss.statistics(z, y).engine == loss.output(z, y).engine == "tiled"
