"""Weights that a difficulty of one's own may give: one per pair, or whatever broadcasts to that."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from covering import cover_axes
from laws.members import FORMS, Given, batch, value_and_gradient, with_difficulty
from mettle.difficulty import Product, Threshold, curriculum
from mettle.errors import InputError
from mettle.losses import InfoNCE, NPair, SelfTriplet, SupCon
from mettle.losses.base import PairwiseLoss
from mettle.pairs import Difficulty, Pass, max_over, sum_over

Z, Y = batch()
ROWS = torch.rand(14, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5


@dataclass(frozen=True, eq=False)
class Says:
    """Whatever the function says."""

    weight: Any
    detach: bool = True

    def row_statistics(self, tile):
        return {}

    def weights(self, tile, rows):
        return self.weight(tile)


SMALLER = {
    "one per anchor": (lambda tile: ROWS[tile.anchor_index], ROWS[:, None].expand(14, 14)),
    "one per reference": (lambda tile: ROWS[tile.reference_index], ROWS[None].expand(14, 14)),
    "a number": (lambda tile: 0.5, torch.full((14, 14), 0.5)),
    "a whole number": (lambda tile: 2, torch.full((14, 14), 2.0)),
    "a tensor without dimensions": (lambda tile: torch.tensor(0.5), torch.full((14, 14), 0.5)),
    "yes or no": (lambda tile: ROWS[tile.anchor_index] > 0.9, (ROWS > 0.9)[:, None].expand(14, 14).double()),
    "single precision": (lambda tile: ROWS.float()[tile.anchor_index], ROWS.float()[:, None].expand(14, 14).double()),
}


@pytest.mark.parametrize(
    ("form", "case"), cover_axes([name for name, loss in FORMS.items() if not isinstance(loss, NPair)], list(SMALLER))
)
def test_smaller_weights_are_laid_over_the_tile(form, case):
    small, table = SMALLER[case]
    wanted = value_and_gradient(with_difficulty(FORMS[form], Given(table.double())), Z, Y, engine="dense")
    for options in ({"engine": "dense"}, {"engine": "tiled", "tile": 4}, {"engine": "tiled", "tile": 14}):
        found = value_and_gradient(with_difficulty(FORMS[form], Says(small)), Z, Y, **options)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("loss", [InfoNCE(0.3, 0.1), SelfTriplet(form="mean")], ids=repr)
def test_a_batch_too_large_for_dense_gives_what_dense_gives(loss):
    """At the size where the engine changes by itself."""
    z, y = torch.randn(600, 8, generator=torch.Generator().manual_seed(0)), torch.arange(600) // 2
    trust = torch.rand(600, generator=torch.Generator().manual_seed(1))
    weighed = with_difficulty(loss, Says(lambda tile: trust[tile.anchor_index]))
    found, wanted = weighed.output(z, y), weighed.output(z, y, engine="dense")
    assert (found.engine, wanted.engine) == ("tiled", "dense")
    torch.testing.assert_close(found.mean(), wanted.mean())


@pytest.mark.parametrize("wrap", [lambda it: Product(it, Threshold()), lambda it: curriculum(it).at(0.05)])
def test_inside_others_too(wrap):
    loss, given = SupCon(0.2), Given(ROWS[:, None].expand(14, 14))
    wanted = with_difficulty(loss, wrap(given)).per_anchor(Z, Y, engine="dense")
    small = with_difficulty(loss, wrap(Says(lambda tile: ROWS[tile.anchor_index])))
    for engine in ("dense", "tiled"):
        found = small.per_anchor(Z, Y, engine=engine, tile=4)
        torch.testing.assert_close(found, wanted, equal_nan=True)


@dataclass(frozen=True)
class Rival:
    """Live weights that grow with the anchor's closest negative: one per anchor, or written out for every pair."""

    spread: bool
    detach: bool = False

    def row_statistics(self, tile):
        return {"near": max_over(tile.similarity, tile.negative)}

    def weights(self, tile, rows):
        w = 1 + rows["near"].square()
        return w.expand_as(tile.similarity) if self.spread else w


def test_live_weights_of_an_anchor_get_the_gradient_of_all_of_its_pairs():
    wanted = value_and_gradient(InfoNCE(0.3, 0.1, Rival(True), "weight"), Z, Y, engine="dense")
    plain = value_and_gradient(InfoNCE(0.3, 0.1), Z, Y)
    assert not torch.allclose(wanted[1], plain[1], rtol=1e-3)
    for options in ({"engine": "dense"}, {"engine": "tiled", "tile": 4}):
        found = value_and_gradient(InfoNCE(0.3, 0.1, Rival(False), "weight"), Z, Y, **options)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_statistics_count_them():
    found = SupCon(0.2, difficulty=Says(lambda tile: ROWS[tile.anchor_index])).statistics(Z, Y)
    wanted = SupCon(0.2, difficulty=Given(ROWS[:, None].expand(14, 14))).statistics(Z, Y)
    assert found.as_dict() == wanted.as_dict() and found.negative_weight != 1


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (lambda tile: torch.ones(3, 2), r"weights of shape \(3, 2\) for a tile of"),
        (lambda tile: torch.ones(*tile.similarity.shape, 1), "broadcasts"),
        (lambda tile: "much", "must give a tensor or a number, got str"),
        (lambda tile: None, "got NoneType"),
        (lambda tile: -1.0, "negative or NaN"),
        (lambda tile: float("nan"), "negative or NaN"),
    ],
)
def test_what_is_no_weight_is_refused(weight, said, engine):
    with pytest.raises(InputError, match=said):
        SupCon(0.2, difficulty=Says(weight))(Z, Y, engine=engine, tile=14)


class Own(PairwiseLoss):
    """A loss of one's own, whose reductions have the shape that the function gives them."""

    x: Any
    difficulty: Difficulty | None = None

    def reductions(self, tile, rows):
        return {"positives": sum_over(1.0, tile.positive), "value": sum_over(self.x(tile), tile.negative)}

    def passes(self):
        return (Pass(self.reductions, reads="anchor"),)

    def row_loss(self, rows):
        return rows["value"].reshape(len(rows["value"]), -1).sum(1)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
class TestReductions:
    """The same for the reductions of a loss of one's own: tiles of strangers have no mask that would spread them."""

    def test_a_reduction_of_the_anchor_counts_for_every_pair(self, engine):
        found = Own(lambda tile: ROWS[tile.anchor_index]).output(Z, Y, engine=engine, tile=3).values
        torch.testing.assert_close(found, ROWS * (Y[:, None] != Y).sum(1))

    def test_several_values_at_once(self, engine):
        both = Own(lambda tile: torch.stack([ROWS[tile.anchor_index], ROWS[tile.anchor_index] ** 2], 2))
        values = both.output(Z, Y, engine=engine, tile=3).values
        torch.testing.assert_close(values, (ROWS + ROWS**2) * (Y[:, None] != Y).sum(1))

    def test_a_reduction_that_does_not_fit_is_named(self, engine):
        with pytest.raises(
            InputError, match=r"the reduction 'value' has a shape of .* on a tile of .*one value per pair"
        ):
            Own(lambda tile: torch.ones(5, 7))(Z, Y, engine=engine, tile=3)


def test_positions_of_a_reference_set_stay_within_it():
    """Also on the tile that engines ask for names: a table narrower than the batch must be enough."""
    zr, yr = batch(4, seed=2)
    table = torch.ones(14, 4, dtype=torch.float64)
    loss = Own(lambda tile: table[tile.anchor_index, tile.reference_index])
    y = Y.clone()
    y[-1] = -1  # the lowest label, so that the last row comes first when sorted
    found = loss.output(Z, y, ref=(zr, yr), engine="tiled").values
    torch.testing.assert_close(found, (y[:, None] != yr).sum(1).double())
