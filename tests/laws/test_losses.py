"""What every pairwise loss obeys, with every difficulty."""

import math
from dataclasses import dataclass

import pytest
import torch

from covering import mark_slow_except, take_some
from laws.members import (
    DIFFICULTIES,
    FORMS,
    ON_SPHERE,
    Given,
    batch,
    differentiable,
    extra,
    fitting,
    pairs_batch,
    second,
    value_and_gradient,
    with_difficulty,
)
from mettle.difficulty import Importance, Relative
from mettle.losses import LiftedStructure, NPair, SupCon, Triplet

NAMES = list(FORMS)
MINING = ("hardest", "semi-hard", "multi-similarity mining", "easy-hard", "triplet margin")
EVERY = [(form, None) for form in NAMES] + [
    (form, difficulty)
    for form in NAMES
    for difficulty in DIFFICULTIES
    # Thresholds and exponentials of a raw dot product or distance mean nothing; the rest does.
    if form in ON_SPHERE or difficulty in MINING
]


def try_members(turn: int):
    """Every form alone and with four difficulties every time, the rest ``slow``.

    Another turn takes four others, so that the laws together meet every form with every difficulty every time.
    """
    quick = [(form, None) for form in NAMES]
    quick += [pair for pair in take_some(NAMES, list(DIFFICULTIES), 4, turn) if pair in EVERY]
    quick += [pair for pair in EVERY if pair[0] not in ON_SPHERE]
    return pytest.mark.parametrize(("form", "difficulty"), mark_slow_except(EVERY, quick))


def member(form: str, difficulty: str | None):
    return FORMS[form] if difficulty is None else with_difficulty(FORMS[form], DIFFICULTIES[difficulty])


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def tile_sizes(form: str, difficulty: str | None, largest: int) -> tuple[int, ...]:
    """Of tiles with one pair, a batch has hundreds: every form and every difficulty meets them, but not every two."""
    return (1, 7, largest) if difficulty is None or form in ("supcon out", "triplet all") else (5, largest)


@try_members(0)
def test_tiled_equals_dense_in_value_and_gradient(form, difficulty):
    loss = member(form, difficulty)
    z, y = fitting(loss)
    wanted = value_and_gradient(loss, z, y, engine="dense", **extra(loss, z))
    assert torch.isfinite(wanted[1]).all()
    for tile in tile_sizes(form, difficulty, len(z)):
        found = value_and_gradient(loss, z, y, engine="tiled", tile=tile, **extra(loss, z))
        close(found[0], wanted[0])
        close(found[1], wanted[1])


@try_members(1)
def test_what_is_chosen_for_a_small_batch_equals_dense(form, difficulty):
    """Also where it is a closed form: classes of several sizes, of two, one class alone, a single positive pair."""
    loss = member(form, difficulty)
    z, y = fitting(loss)
    two, one = torch.arange(14) % 7, torch.zeros(14, dtype=torch.long)
    lonely = torch.arange(14).clamp(max=12)
    for labels in (y,) if isinstance(loss, NPair) else (y, two, one, lonely):
        wanted = value_and_gradient(loss, z, labels, engine="dense", **extra(loss, z))
        found = value_and_gradient(loss, z, labels, **extra(loss, z))
        close(found[0], wanted[0])
        close(found[1], wanted[1])


@try_members(2)
def test_tiled_equals_dense_against_a_reference_set(form, difficulty):
    loss = member(form, difficulty)
    if isinstance(loss, LiftedStructure | NPair):
        return  # the one has no such form, the other is one
    z, y = batch()
    zr, yr = batch(21, seed=3)
    biased = {"biased": (second(z), second(zr, 6))} if isinstance(loss.difficulty, Relative) else {}

    def both(**options):
        leaf, other = z.detach().clone().requires_grad_(), zr.detach().clone().requires_grad_()
        output = loss.output(leaf, y, ref=(other, yr), **biased, **options)
        return output.per_anchor().detach(), *torch.autograd.grad(output.mean(), (leaf, other))

    wanted = both(engine="dense")
    for tile in (1, 7, 21) if difficulty is None else (8, 21):
        for a, b in zip(both(engine="tiled", tile=tile), wanted, strict=True):
            close(a, b)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@try_members(3)
def test_row_order_is_irrelevant(form, difficulty, engine):
    loss = member(form, difficulty)
    if isinstance(loss, NPair):
        return  # ordered on purpose: the first row of a class is its anchor
    z, y = batch()
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(1))
    options = {name: value[order] for name, value in extra(loss, z).items()}
    a, ga = value_and_gradient(loss, z, y, engine=engine, tile=8, **extra(loss, z))
    b, gb = value_and_gradient(loss, z[order], y[order], engine=engine, tile=8, **options)
    close(b, a[order])
    close(gb, ga[order])


@try_members(4)
def test_the_names_of_labels_are_irrelevant(form, difficulty):
    loss = member(form, difficulty)
    z, y = fitting(loss)
    names = torch.randperm(1000, generator=torch.Generator().manual_seed(2)) * (2**40 + 1) - 2**45
    a, ga = value_and_gradient(loss, z, y, engine="tiled", tile=8, **extra(loss, z))
    b, gb = value_and_gradient(loss, z, names[y], engine="tiled", tile=8, **extra(loss, z))
    close(b, a)
    close(gb, ga)


@try_members(5)
def test_rotating_all_embeddings_is_irrelevant(form, difficulty):
    loss = member(form, difficulty)
    z, y = fitting(loss)
    turn, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    a, ga = value_and_gradient(loss, z, y, **extra(loss, z))
    b, gb = value_and_gradient(loss, z @ turn, y, **extra(loss, z))
    close(b, a, 1e-8)
    close(gb, ga @ turn, 1e-8)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("form", NAMES)
def test_weight_zero_removes_a_pair_and_two_lists_it_twice(form, engine):
    """Against a reference set: a column of weight 0 is no column, one of weight 2 is that column twice."""
    loss = FORMS[form]
    if isinstance(loss, LiftedStructure):
        return  # has no reference set: its law is tried against the oracle
    if isinstance(loss, NPair):
        return  # one pair per class is its input, so nothing can be listed twice
    if form == "supcon sum":
        return  # a documented exception: without division by the weight, a repeated positive counts twice in the sum
    if form == "supcon linear":
        return  # a documented exception: the linear push applies a negative's weight twice, as its author coded it
    z, y = batch(12, seed=4)
    zr, yr = batch(15, seed=5)
    for column in range(0, 15, 2 if engine == "dense" else 5):
        for weight in (0.0, 2.0):
            table = torch.ones(12, 15, dtype=torch.float64)
            table[:, column] = weight
            weighed = with_difficulty(loss, Given(table))
            listed = [k for k in range(15) if k != column] + [column] * int(weight)
            found = value_and_gradient(weighed, z, y, ref=(zr, yr), engine=engine, tile=4)
            wanted = value_and_gradient(loss, z, y, ref=(zr[listed], yr[listed]), engine=engine, tile=4)
            close(found[0], wanted[0], 1e-9)
            close(found[1], wanted[1], 1e-9)


@pytest.mark.parametrize("form", NAMES)
def test_weight_one_changes_nothing(form):
    loss = FORMS[form]
    z, y = fitting(loss)
    n = len(z) // 2 if isinstance(loss, NPair) else len(z)
    ones = with_difficulty(loss, Given(torch.ones(n, n, dtype=torch.float64)))
    for a, b in zip(value_and_gradient(ones, z, y), value_and_gradient(loss, z, y), strict=True):
        close(a, b)


@pytest.mark.parametrize("form", NAMES)
def test_a_live_weight_gets_the_gradient_of_a_formula(form):
    """Weights that are not detached: w = w(s) written out by hand gives the same as the engine's chain rule."""
    loss = FORMS[form]
    if form not in ON_SPHERE or loss.difficulty is not None:
        return

    @dataclass(frozen=True)
    class Curve:
        detach: bool = False

        def row_statistics(self, tile):
            return {}

        def weights(self, tile, rows):
            return 1.5 + 0.5 * tile.similarity

    live = with_difficulty(differentiable(loss), Curve())
    z, y = batch()
    leaf = z.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: live(x, y, engine="tiled", tile=5), (leaf,), fast_mode=True)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("form", ON_SPHERE)
def test_exponential_weights_in_one_pass_equal_those_in_two(form, detach, engine):
    """`Importance` folded into the loss, against the plain way: a pass for the mean, then weights pair by pair."""

    @dataclass(frozen=True)
    class Plain:
        inner: Importance

        def __getattr__(self, name):
            if name == "log_weight":
                raise AttributeError(name)
            return getattr(self.inner, name)

    folded = Importance(0.7, detach=detach)
    z, y = batch()
    found = value_and_gradient(with_difficulty(FORMS[form], folded), z, y, engine=engine, tile=4)
    wanted = value_and_gradient(with_difficulty(FORMS[form], Plain(folded)), z, y, engine=engine, tile=4)
    close(found[0], wanted[0], 1e-8)
    close(found[1], wanted[1], 1e-8)


def test_the_documented_exception_of_threshold_in_supcon():
    """Positive weights act in the numerator only and are divided by the count: weight 2 is not "listed twice"."""
    z, y = batch()
    table = torch.full((14, 14), 2.0, dtype=torch.float64)
    published = with_difficulty(SupCon(0.2), Given(table, positive_weights="numerator"))
    law = with_difficulty(SupCon(0.2), Given(table))
    a, _ = value_and_gradient(published, z, y)
    b, _ = value_and_gradient(law, z, y)
    plain, _ = value_and_gradient(SupCon(0.2), z, y)
    close(b, plain + math.log(2))  # everything twice: the denominator doubles
    assert not torch.allclose(a, plain, equal_nan=True)


@pytest.mark.parametrize("form", ["self triplet", "triplet all"])
def test_random_draws_follow_their_generator_and_ignore_the_engine(form):
    from mettle.losses import SelfTriplet

    z, y = batch()

    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        if form == "triplet all":
            return Triplet(0.3, "random", random=generator)
        return SelfTriplet(0.1, "one_neg", random=generator)

    first = value_and_gradient(made(1), z, y, engine="dense")
    for engine, tile in (("dense", 1), ("tiled", 1), ("tiled", 5), ("tiled", 14)):
        for a, b in zip(value_and_gradient(made(1), z, y, engine=engine, tile=tile), first, strict=True):
            close(a, b)
    assert any(not torch.allclose(value_and_gradient(made(k), z, y)[0], first[0], equal_nan=True) for k in (2, 3, 4))


def test_random_draws_are_fair():
    """Each negative of an anchor is drawn about equally often."""
    from mettle.pairs import Tile
    from mettle.pairs.random_negative import pair_hash

    n, draws = 20, 4000
    s, at = torch.zeros(n, n), torch.arange(n)
    wins = torch.zeros(n, n)
    for seed in range(draws):
        wins[at, pair_hash(Tile(s, False, True, at[:, None], at[None, :]), seed).argmax(1)] += 1
    expected = draws / n
    chi = ((wins - expected) ** 2 / expected).sum(1)
    assert chi.mean() < 24 and chi.max() < 60  # 19 degrees of freedom


def test_one_n_pair_batch_is_the_cross_entropy_of_its_products():
    z, y = pairs_batch()
    order = torch.argsort(y, stable=True)
    a, p = z[order[0::2]], z[order[1::2]]
    wanted = torch.nn.functional.cross_entropy(a @ p.T, torch.arange(7), reduction="none")
    found = NPair(0.0).per_anchor(z, y)
    close(found[order[0::2]], wanted)
    assert found[order[1::2]].isnan().all()
