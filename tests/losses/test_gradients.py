"""Finite differences in float64, for every loss, option and difficulty, and what happens at kinks."""

from itertools import product

import pytest
import torch
from torch.autograd import gradcheck

from covering import mark_slow_except, take_some
from laws.members import DIFFICULTIES, FORMS, ON_SPHERE, batch, differentiable, extra, fitting, frozen, with_difficulty
from mettle.losses import Contrastive, InfoNCE, LiftedStructure, NPair, SelfTriplet, SupCon, Triplet

LABELS = {
    "mixed": [0, 0, 0, 1, 1, 2, 3],
    "no negatives": [0, 0, 0, 0],
    "one positive pair": [0, 1, 2, 3, 3],
    "pairs": [0, 0, 1, 1, 2, 2],
}


# That the tiled engine has the gradients of the dense one is a law (tests/laws): here a loss of each kind is enough.
TILED = [
    (form, "tiled", "mixed") for form in ("supcon out", "debiased", "contrastive hadsell", "triplet all", "lifted")
]
DENSE = [(form, "dense", pattern) for form in FORMS for pattern in LABELS]


@pytest.mark.parametrize(
    ("form", "engine", "pattern"),
    mark_slow_except([*DENSE, *((form, "tiled", pattern) for form in FORMS for pattern in LABELS)], [*DENSE, *TILED]),
)
def test_gradient_of_every_loss(form, engine, pattern):
    loss = differentiable(FORMS[form])
    if isinstance(loss, NPair) and pattern != "pairs":
        return
    y = torch.tensor(LABELS[pattern])
    z = torch.randn(len(y), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(11)).requires_grad_()

    def rows(x):
        output = loss.output(x, y, engine=engine, tile=3)
        return output.values[output.defined]

    assert gradcheck(rows, (z,))


WARM = [form for form in ON_SPHERE if "cold" not in form]


@pytest.mark.parametrize(
    ("form", "difficulty"),
    mark_slow_except(list(product(WARM, DIFFICULTIES)), take_some(WARM, list(DIFFICULTIES), 4)),
)
def test_gradient_with_every_difficulty(form, difficulty):
    """Detached weights: the gradient is that of the loss with its weights frozen, which finite differences check."""
    loss = with_difficulty(differentiable(FORMS[form]), DIFFICULTIES[difficulty])
    z, y = batch(10, 4, seed=2)
    options = extra(loss, z)
    if not loss.difficulty.detach:
        if difficulty == "product":
            return  # half of it is detached on purpose; its parts are checked on their own
        assert gradcheck(lambda x: loss(x, y, engine="dense", **options), (z,), fast_mode=True)
        return
    fixed = frozen(loss, z, y, **options)
    assert gradcheck(lambda x: fixed(x, y, engine="dense"), (z,), fast_mode=True)
    (a,) = torch.autograd.grad(loss(z, y, engine="tiled", tile=4, **options), z)
    (b,) = torch.autograd.grad(fixed(z, y, engine="dense"), z)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", ["triplet all", "self triplet"])
def test_gradient_of_random_draws(form):
    z, y = batch(9, 4, seed=3)

    def value(x):
        generator = torch.Generator().manual_seed(4)
        if form == "triplet all":
            return Triplet(0.3, "random", random=generator)(x, y, engine="tiled", tile=4)
        return SelfTriplet(0.1, "one_neg", random=generator)(x, y, engine="tiled", tile=4)

    assert gradcheck(value, (z,))


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("form", list(FORMS))
def test_L1_L2_gradients_are_finite_where_points_coincide_oppose_or_vanish(form, engine):
    loss = FORMS[form]
    unit = torch.eye(4, dtype=torch.float64)[0]
    rows = [unit, unit, -unit, -unit, unit * 3, torch.zeros(4, dtype=torch.float64), unit * 1e-30, unit * 1e30]
    z = torch.stack([*rows, *rows]).requires_grad_()
    labels = torch.arange(8).repeat(2) if isinstance(loss, NPair) else torch.arange(16) // 2 % 3
    if loss.measure != "cosine":  # raw products of 1e30 are infinite, as they must be
        z = z.detach().clamp(-3, 3).requires_grad_()
    value = loss(z, labels, engine=engine, tile=5)
    (gradient,) = torch.autograd.grad(value, z)
    assert torch.isfinite(value) and torch.isfinite(gradient).all()
    if getattr(loss, "measure", "") == "cosine":
        assert (gradient[5] == 0).all(), "a row without a direction gets no gradient"


def test_coincident_points_have_the_documented_subgradient():
    """d = 0: no direction, no gradient through the distance."""
    z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 1, 0])
    for form in ("squared", "hadsell", "linear"):
        only = Contrastive(0.0, 1.0, form, normalise=False)
        rows = only.output(z, y)
        (gradient,) = torch.autograd.grad(rows.values[0], z)
        assert (gradient[1] == 0).all(), form


def test_row_17_of_the_claims_a_stalled_negative_escapes_by_hadsell_only():
    """A negative almost on its anchor: the note's squared form hardly pushes, Hadsell's and the linear form do."""
    push = {}
    for form in ("squared", "hadsell", "linear"):
        z = torch.tensor([[1.0, 0.0], [1.0, 1e-6], [3.0, 0.0]], dtype=torch.float64, requires_grad=True)
        loss = Contrastive(0.0, 1.0, form, normalise=False)
        (gradient,) = torch.autograd.grad(loss.output(z, torch.tensor([0, 1, 0])).values[0], z)
        push[form] = float(gradient[1].norm())
    assert push["squared"] < 1e-5 < 0.5 < min(push["hadsell"], push["linear"])


def test_ties_share_the_gradient_of_the_hardest():
    z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.6, -0.8]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 0, 1, 2])
    for engine in ("dense", "tiled"):
        rows = Triplet(0.5, "hardest", squared=True).output(z, y, engine=engine, tile=1)
        (gradient,) = torch.autograd.grad(rows.values[0], z)
        torch.testing.assert_close(gradient[2].norm(), gradient[3].norm())
        assert gradient[2].norm() > 0


def second_derivative(loss, z, y, **options):
    (slope,) = torch.autograd.grad(loss(z, y, **options), z, create_graph=True)
    return torch.autograd.grad((slope * torch.arange(z.shape[1])).sin().sum(), z)[0]


@pytest.mark.parametrize("form", list(FORMS))
def test_second_derivatives_are_those_of_the_whole_matrix_in_every_engine(form):
    """The tiled engine computes the matrix again with a graph, and says so; other engines need not."""
    loss = FORMS[form]
    z, y = fitting(loss)
    wanted = second_derivative(loss, z, y, engine="dense")
    assert wanted.isfinite().all()
    with pytest.warns(UserWarning, match="create_graph=True computes the .* similarities again as one matrix"):
        found = second_derivative(loss, z, y, engine="tiled", tile=4)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(second_derivative(loss, z, y), wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("difficulty", ["threshold", "threshold live", "importance", "relative"])
def test_second_derivatives_with_a_difficulty(difficulty):
    loss = with_difficulty(SupCon(0.2), DIFFICULTIES[difficulty])
    z, y = batch()
    wanted = second_derivative(loss, z, y, engine="dense", **extra(loss, z))
    with pytest.warns(UserWarning, match="create_graph=True computes the"):
        found = second_derivative(loss, z, y, engine="tiled", tile=4, **extra(loss, z))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)


def test_second_derivatives_of_tiles_are_slopes_of_first_ones():
    z, y = batch(8, 3)
    with pytest.warns(UserWarning, match="create_graph=True computes the 8 x 8"):
        assert torch.autograd.gradgradcheck(lambda x: SupCon(0.5)(x, y, engine="tiled", tile=3), (z,))


@pytest.mark.parametrize("loss", [SupCon(0.2), InfoNCE(0.5, 0.1), LiftedStructure(), Triplet(0.2)], ids=repr)
def test_anchors_without_positives_get_gradient_only_as_negatives(loss):
    z, y = fitting(loss)
    lonely = [k for k in range(len(y)) if (y == y[k]).sum() == 1]
    assert lonely
    output = loss.output(z, y)
    assert not output.defined[lonely].any() and output.defined.sum() == len(y) - len(lonely)
    assert output.per_anchor()[lonely].isnan().all()
    if not isinstance(loss, LiftedStructure):  # whose mean is over pairs
        torch.testing.assert_close(output.values[output.defined].mean(), output.mean())
