"""Pulled negatives, levels, windows."""

import numpy as np
import pytest
import torch

from mettle.errors import InputError
from mettle.train.methods.hardness_aware import (
    Generator,
    Synthesis,
    WindowMean,
    decay_weight,
)
from mettle.train.methods.tuple_layouts import pull_negatives, safe_distance
from oracles import synthesis as oracle


def points(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def filled(window: WindowMean, *values: float) -> WindowMean:
    for value in values:
        window.update(value)
    return window


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_pulled_negatives_are_those_of_the_oracle(level, seed):
    a, p, n = points(3, 20, 5, seed=seed)
    found = pull_negatives(a, p, n, level)
    expected = [oracle.pulled(*row, level) for row in zip(a.tolist(), p.tolist(), n.tolist(), strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_row_11_alpha_0_gives_lambda_1_and_leaves_negatives_where_they_are():
    a, p, n = points(3, 50, 4)
    level = Synthesis(alpha=0.0).pull_level(filled(WindowMean(1), 3.0))
    assert level == 1.0
    torch.testing.assert_close(pull_negatives(a, p, n, level), n, rtol=1e-12, atol=1e-12)


def test_row_11_lambda_0_pulls_negatives_as_near_as_the_positive():
    a, p, n = points(3, 50, 4)
    near, far, made = safe_distance(a, p), safe_distance(a, n), safe_distance(a, pull_negatives(a, p, n, 0.0))
    torch.testing.assert_close(made[far > near], near[far > near])


@pytest.mark.parametrize("level", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_row_11_the_distance_lies_between_in_proportion(level):
    a, p, n = points(3, 200, 6, seed=7)
    near, far, made = safe_distance(a, p), safe_distance(a, n), safe_distance(a, pull_negatives(a, p, n, level))
    expected = torch.where(far > near, near + level * (far - near), far)
    assert (far > near).any() and (far <= near).any()
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)


def test_row_12_beta_0_trusts_real_tuples_only_and_a_perfect_generator_none():
    assert Synthesis(beta=0.0).real_weight(filled(WindowMean(1), 5.0)) == 1.0
    assert Synthesis(beta=1e4).real_weight(filled(WindowMean(1), 1e-3)) == 0.0
    assert Synthesis(beta=1e4).real_weight(filled(WindowMean(1), 0.0)) == 0.0
    assert Synthesis(beta=1e4, generator=False).real_weight(WindowMean(1)) == 0.0


@pytest.mark.parametrize(
    ("rate", "level", "published"),
    [(90, 400, 0.80), (90, 100, 0.41), (90, 40, 0.11), (90, 29, 0.045), (1e4, 1e5, 0.90), (1e4, 1e4, 0.37)],
)
def test_levels_have_their_published_values(rate, level, published):
    assert decay_weight(rate, "absolute", filled(WindowMean(1), level)) == pytest.approx(published, abs=0.006)
    assert decay_weight(rate, "absolute", filled(WindowMean(1), level)) == oracle.decay(rate, level)


def test_before_a_window_is_full_nothing_is_pulled_and_nothing_is_synthetic():
    window = filled(WindowMean(3), 1.0, 1.0)
    assert window.mean is None
    assert Synthesis().pull_level(window) == pytest.approx(1, abs=1e-4)
    assert Synthesis().real_weight(window) == pytest.approx(0.99, abs=1e-3)
    assert Synthesis(alpha_mode="relative").pull_level(window) == 1.0


def test_relative_rates_are_in_units_of_the_first_window():
    window = filled(WindowMean(2), 8.0, 12.0, 5.0, 5.0, 99.0)
    assert (window.first, window.mean, window.count) == (10.0, 5.0, 1)
    assert decay_weight(1.0, "relative", window) == oracle.decay(10.0, 5.0)
    again = WindowMean(2)
    again.load_state_dict(window.state_dict())
    assert again.state_dict() == window.state_dict()


def test_windows_do_not_overlap():
    window, means = WindowMean(3), []
    for value in range(9):
        window.update(float(value))
        means.append(window.mean)
    assert means == [None, None, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 7.0]


def test_gradients_are_right_everywhere_they_exist():
    a, p, n = (x.requires_grad_() for x in points(3, 6, 3, seed=3))
    assert torch.autograd.gradcheck(lambda *x: pull_negatives(*x, 0.4), (a, p, n))


@pytest.mark.parametrize("same", ["positive", "negative", "both"])
def test_coincident_points_have_finite_values_and_gradients(same):
    a, p, n = points(3, 4, 3)
    p = a.clone() if same in ("positive", "both") else p
    n = a.clone() if same in ("negative", "both") else n
    parts = [x.clone().requires_grad_() for x in (a, p, n)]
    made = pull_negatives(*parts, 0.5)
    made.sum().backward()
    assert torch.isfinite(made).all()
    assert all(torch.isfinite(x.grad).all() for x in parts)


@pytest.mark.parametrize("which", range(3))
def test_nan_in_gives_nan_out(which):
    parts = list(points(3, 2, 3))
    parts[which] = parts[which].clone()
    parts[which][0, 1] = torch.nan
    made = pull_negatives(*parts, 0.5)
    assert made[0].isnan().any() and torch.isfinite(made[1]).all()


def test_every_anchor_sees_every_negative_its_own_way():
    a, p = points(2, 5, 3, seed=5)
    bank = pull_negatives(a[:, None], p[:, None], p[None], 0.3)
    assert bank.shape == (5, 5, 3)
    for i in range(5):
        torch.testing.assert_close(bank[i, i], p[i])
        for j in range(5):
            expected = oracle.pulled(a[i].tolist(), p[i].tolist(), p[j].tolist(), 0.3)
            torch.testing.assert_close(bank[i, j], torch.tensor(expected, dtype=torch.float64))


def test_the_generator_is_that_of_the_oracle():
    net, z = Generator(4, 7, hidden=9).double(), points(12, 4)
    weights = {name: value.numpy() for name, value in net.state_dict().items()}
    np.testing.assert_allclose(net(z).detach().numpy(), oracle.generate(z.numpy(), weights), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "alpha and beta"),
        ({"window": 0}, "window"),
        ({"level": 1.5}, "level"),
        ({"real": -0.1}, "real"),
        ({"soft": 2.0}, "soft"),
        ({"javg": "last"}, "javg must be one of"),
        ({"alpha_mode": "big"}, "alpha_mode must be one of"),
        ({"l2": -1.0}, "l2"),
        ({"generator_rate": 0.0}, "generator_rate"),
    ],
)
def test_a_wrong_option_is_one_line(options, message):
    with pytest.raises(InputError, match=message):
        Synthesis(**options)
