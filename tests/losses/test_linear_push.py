"""Difficulty-aware SupCon as its author coded it, against that code's formulas, and its linear push by itself."""

import numpy as np
import pytest
import torch

from laws.members import Given
from mettle.difficulty import Hardest, Importance, Relative, Threshold
from mettle.errors import InputError
from mettle.losses import DASupCon, SupCon
from mettle.pairs import pair_weights
from oracles import losses as oracle

ENGINES = {"dense": {"engine": "dense"}, "tiled": {"engine": "tiled", "tile": 3}}


def batch(sizes=(3, 3, 2, 4), seed=0, spread=0.6):
    """Classes about centres of their own, so that some pairs of either kind are hard."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    z = rng.normal(size=(len(sizes), 4))[y] + spread * rng.normal(size=(len(y), 4))
    rows = [np.flatnonzero(y == k) for k in range(len(sizes))]
    z[rows[0][0]] = -z[rows[0][1]]  # far beyond the threshold of positives, and of negatives
    z[rows[-1][0]] = z[rows[0][-1]] + 0.1 * z[rows[-1][0]]
    return torch.tensor(z, requires_grad=True), torch.tensor(y)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.0, "beta": 0.0},
        {"alpha": 0.5, "positive": 0.5, "negative": 0.3},
        {"beta": 3.0, "push_factor": 1.0},
    ],
    ids=["published", "without weights", "class defaults", "hard"],
)
def test_the_author_preset_is_the_authors_formula(options, seed, engine):
    z, y = batch(seed=seed)
    loss = DASupCon(preset="author", **options)
    hard = loss.difficulty
    pull, push, total = oracle.author_da_supcon(
        z.detach().numpy(),
        y.tolist(),
        w_pos=1 + hard.alpha,
        w_neg=1 + hard.beta,
        th_pos=hard.positive,
        th_neg=hard.negative,
        factor=loss.push_factor,
    )
    assert loss(z, y, **ENGINES[engine]).item() == pytest.approx(total, rel=1e-12, abs=1e-12)
    rows = [a + loss.push_factor * b for a, b in zip(pull, push, strict=True)]
    np.testing.assert_allclose(loss.per_anchor(z, y, **ENGINES[engine]).detach().numpy(), rows, rtol=1e-12, atol=1e-12)


def test_both_thresholds_are_passed_in_the_batches_above():
    """Otherwise every weight would be 1, and the comparison would say nothing about weights."""
    for seed in range(3):
        statistics = DASupCon(preset="author").statistics(*batch(seed=seed))
        assert statistics.hard_positives > 0 and statistics.hard_negatives > 0


def test_an_anchor_without_positives_is_left_out_of_both_terms():
    """The deviation from the published means: there the push of such an anchor still counts."""
    z, y = batch((3, 3, 1, 4))
    pull, push, total = oracle.author_da_supcon(z.detach().numpy(), y.tolist())
    rows = [a + 0.3 * b for a, b in zip(pull, push, strict=True) if a is not None]
    found = DASupCon(preset="author")(z, y).item()
    assert len(rows) == 10 and found == pytest.approx(np.mean(rows), rel=1e-12)
    assert abs(found - total) > 1e-3


def test_one_class_alone_has_nothing_to_push():
    z, y = batch((5,))
    assert DASupCon(preset="author")(z, y).item() == pytest.approx(
        oracle.author_da_supcon(z.detach().numpy(), y.tolist())[2], rel=1e-12
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_without_alpha_and_beta_the_push_stays(engine):
    """It is not SupCon then, but SupCon and a constant force on every negative: the control."""
    z, y = batch()
    aware, plain = DASupCon(preset="author", alpha=0.0, beta=0.0), SupCon(0.07)
    control = SupCon(0.07, neg_weight="linear")
    (g, p, c) = (torch.autograd.grad(loss(z, y, **ENGINES[engine]), z)[0] for loss in (aware, plain, control))
    torch.testing.assert_close(g, c, rtol=1e-10, atol=1e-12)
    unit = torch.nn.functional.normalize(z)
    different = y[:, None] != y[None, :]
    s = unit @ unit.T
    push = ((s - 1) / 0.07 * different).sum(1) / different.sum(1)
    torch.testing.assert_close(g - p, torch.autograd.grad(0.3 * push.mean(), z)[0], rtol=1e-9, atol=1e-11)
    assert (g - p).norm() > 0.1
    torch.testing.assert_close(
        SupCon(0.07, neg_weight="linear", push_factor=0.0)(z, y), plain(z, y), rtol=1e-12, atol=1e-12
    )


def test_the_push_on_a_negative_is_the_same_however_far_it_is():
    """Constant force w² · factor / (τ Σ w), which a hard negative gets at most (1 + beta)² times."""
    s = torch.tensor([[0.9, -0.8, 0.2]], dtype=torch.float64)
    w = 1 + ((s - 0.7) / 0.3).clamp(min=0)
    angles = torch.arccos(s[0])
    z = torch.cat([torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), angles])
    z = torch.stack([z.cos(), z.sin()], 1).requires_grad_()
    y = torch.tensor([0, 0, 1, 2, 3])
    loss, without = DASupCon(preset="author"), DASupCon(preset="author", neg_weight="none")
    value = loss.per_anchor(z, y)[0] - without.per_anchor(z, y)[0]
    assert value.item() == pytest.approx(0.3 * float((w.square() * (s - 1)).sum() / w.sum()) / 0.07, rel=1e-12)
    force = 0.3 * w.square() / (0.07 * w.sum())
    (gradient,) = torch.autograd.grad(value, z)
    along = gradient[2:].norm(dim=1) / angles.sin().abs()  # of the direction that is tangent to the sphere
    torch.testing.assert_close(along, force[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("detach", [True, False])
def test_gradients(engine, detach):
    z, y = batch((3, 2, 2, 1), seed=4)
    if detach:  # detached weights are constants, which a finite difference must hold fixed
        unit = torch.nn.functional.normalize(z.detach())
        s = unit @ unit.T
        same = y[:, None] == y[None, :]
        hard = Threshold(1.0, 1.0, 0.1, 0.7)
        w = torch.where(same, 1 + (0.1 - s).clamp(min=0) / 0.1, 1 + (s - 0.7).clamp(min=0) / 0.3)
        fixed = SupCon(0.5, difficulty=Given(w, "numerator"), neg_weight="linear", normalise="weight")
        aware = SupCon(0.5, difficulty=hard, neg_weight="linear", normalise="weight")
        (a,), (b,) = (torch.autograd.grad(loss(z, y, **ENGINES[engine]), z) for loss in (aware, fixed))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    else:
        fixed = SupCon(0.5, difficulty=Threshold(1.0, 1.0, 0.3, 0.5, detach=False), neg_weight="linear")
    assert torch.autograd.gradcheck(lambda x: fixed(x, y, **ENGINES[engine]), (z,), atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hard", [Importance(0.7), Hardest(), Relative()], ids=lambda hard: type(hard).__name__)
def test_every_difficulty_pushes_by_its_squared_weights(hard, engine):
    z, y = batch(seed=6)
    other = torch.randn(z.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options = {"biased": other} if isinstance(hard, Relative) else {}
    loss = SupCon(0.2, difficulty=hard, neg_weight="linear", push_factor=0.7)
    w = pair_weights(loss, z.detach(), y, difficulty=hard, **options)
    unit = torch.nn.functional.normalize(z.detach())
    s, negative = unit @ unit.T, y[:, None] != y[None, :]
    push = (w.square() * (s - 1) / 0.2 * negative).sum(1) / (w * negative).sum(1)
    none = SupCon(0.2, difficulty=hard, neg_weight="none")
    found = [one.per_anchor(z, y, **options, **ENGINES[engine]).detach() for one in (loss, none)]
    torch.testing.assert_close(found[0] - found[1], 0.7 * push, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_views_and_references_are_pushed_too(engine):
    z, _ = batch((4, 4, 4))
    ids = torch.arange(6)
    loss = DASupCon(preset="author")
    views = loss(z.view(2, 6, 4).transpose(0, 1), ids, views=True, **ENGINES[engine])
    torch.testing.assert_close(views, loss(z, ids.repeat(2), **ENGINES[engine]))
    y = torch.arange(12) % 3
    kept = loss.per_anchor(z, y, ref=(z, y, torch.arange(12)), ids=torch.arange(12), **ENGINES[engine])
    torch.testing.assert_close(kept, loss.per_anchor(z, y))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SupCon(neg_weight="linear", learn_temperature=True), "leave learn_temperature off"),
        (lambda: SupCon(neg_weight="linear", push_factor=-1.0), "push_factor must be at least 0, got -1"),
        (lambda: DASupCon(preset="authors"), "preset must be 'default' or 'literal' or 'author', got 'authors'"),
    ],
)
def test_what_has_no_meaning_is_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_the_presets_are_their_table():
    assert DASupCon().settings == DASupCon(0.1, 1.0, 2.0, 0.7, 0.3).settings
    author = DASupCon(preset="author")
    assert author.difficulty == Threshold(1.0, 1.0, 0.1, 0.7) and author.temperature == 0.07
    assert DASupCon(0.2, beta=0.0, preset="author").difficulty == Threshold(1.0, 0.0, 0.1, 0.7)
