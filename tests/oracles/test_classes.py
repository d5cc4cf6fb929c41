"""The class-vector oracles judged by themselves: identities, values worked by hand, more digits where it matters."""

import itertools
import math

import numpy as np
import pytest

from oracles import classes as oracle

SEEDS = range(5)
MARGINS = (1, 2, 3, 4, 7)
PI = math.pi


def batch(seed, n=9, classes=5, dim=4):
    rng = np.random.default_rng(seed)
    z, W = rng.normal(size=(n, dim)) * rng.uniform(0.2, 3.0, size=(n, 1)), rng.normal(size=(classes, dim)) * 2
    return z, rng.integers(0, classes, size=n), W


def at(theta, size=1.0):
    """A plane vector at an angle from the first axis."""
    return [size * math.cos(theta), size * math.sin(theta)]


def close(a, b, tol=1e-11):
    np.testing.assert_allclose(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64), rtol=tol, atol=tol)


# ------------------------------------------------------------------------------------------------ small things


def test_the_angle_is_arccos_of_the_cosine():
    z, _, W = batch(0)
    c = oracle.cosines(z, W)
    close([[oracle.angle(a, b) for b in W] for a in z], np.arccos(c))


@pytest.mark.parametrize("theta", [0.0, 1e-12, 1e-7, 0.3, PI / 2, PI - 1e-7, PI - 1e-12, PI])
def test_the_angle_keeps_its_digits_at_both_ends(theta):
    assert oracle.angle([3.0, 0.0], at(theta, 0.1)) == pytest.approx(theta, abs=2e-15)


def test_a_zero_vector_is_at_a_right_angle_to_everything():
    assert oracle.angle([0.0, 0.0], [1.0, 2.0]) == PI / 2
    close(oracle.cosines([[0.0, 0.0]], [[1.0, 2.0]]), [[0.0]])
    close(oracle.normface([[0.0, 0.0]], [1], np.eye(3)[:, :2], 30.0), [math.log(3)])


def test_the_numeric_gradient_of_known_functions():
    x = np.array([[0.3, -1.2], [2.0, 0.7]])
    close(oracle.numeric_gradient(lambda v: np.sum(np.sin(3 * v)), x), 3 * np.cos(3 * x), 1e-9)
    close(oracle.numeric_gradient(lambda v: v[0, 0] * v[1, 1] ** 2, x), [[0.49, 0], [0, 2 * 0.3 * 0.7]], 1e-9)


def test_a_label_without_a_class_vector_is_refused():
    z, _, W = batch(0, n=1)
    for label in (-1, 5):
        with pytest.raises(ValueError, match=f"label {label} "):
            oracle.arcface(z, [label], W, 30.0, 0.5)
        with pytest.raises(ValueError, match=f"label {label} "):
            oracle.softmax(z, [label], W)


# ---------------------------------------------------------------------------------------- softmax and NormFace


def test_softmax_by_hand():
    # Logits (2, 0) + (0, log 3): e² against 3.
    loss = oracle.softmax([[1.0, 0.0]], [0], [[2.0, 0.0], [0.0, 5.0]], b=[0.0, math.log(3)])
    close(loss, [math.log((math.exp(2) + 3) / math.exp(2))])


def test_softmax_survives_huge_logits():
    close(oracle.softmax([[1e5], [1e5]], [0, 1], [[1.0], [-1.0]]), [0.0, 2e5])


@pytest.mark.parametrize("seed", SEEDS)
def test_modified_softmax_is_plain_softmax_on_unit_rows_and_ignores_their_length(seed):
    z, y, W = batch(seed)
    rows = W / np.linalg.norm(W, axis=1, keepdims=True)
    close(oracle.softmax(z, y, W, unit_weights=True), oracle.softmax(z, y, rows))
    close(oracle.softmax(z, y, W * 7, unit_weights=True), oracle.softmax(z, y, rows))


@pytest.mark.parametrize("seed", SEEDS)
def test_normface_is_modified_softmax_of_features_of_length_s(seed):
    z, y, W = batch(seed)
    long = 12.0 * z / np.linalg.norm(z, axis=1, keepdims=True)
    close(oracle.normface(z, y, W, 12.0), oracle.softmax(long, y, W, unit_weights=True))
    close(oracle.normface(z * 5, y, W * 3, 12.0), oracle.normface(z, y, W, 12.0))


@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_of_softmax_is_p_minus_one_times_rows(seed):
    z, y, W = batch(seed, n=3)
    logits = oracle.softmax_logits(z, W)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(3), y] -= 1
    close(oracle.numeric_gradient(lambda v: oracle.softmax(v, y, W).sum(), z), p @ W, 1e-8)


def test_weights_are_multiplicities():
    z, y, W = batch(1, n=4, classes=4)
    y = np.array([0, 1, 2, 0])
    w = np.ones((4, 4))
    close(oracle.cosface(z, y, W, 9.0, 0.2, w), oracle.cosface(z, y, W, 9.0, 0.2))
    w[:, 3] = 0
    close(oracle.cosface(z, y, W, 9.0, 0.2, w), oracle.cosface(z, y, W[:3], 9.0, 0.2))
    w[:, 3] = 2
    close(oracle.cosface(z, y, W, 9.0, 0.2, w), oracle.cosface(z, y, W[[0, 1, 2, 3, 3]], 9.0, 0.2))
    w[0, 0] = 0
    assert np.isnan(oracle.cosface(z, y, W, 9.0, 0.2, w)).tolist() == [True, False, False, False]


# ------------------------------------------------------------------------------------------------------ center


def test_center_by_hand():
    centres = [[0.0, 0.0], [1.0, 1.0]]
    z, y = [[3.0, 4.0], [1.0, 1.0]], [0, 1]
    close(oracle.center_term(z, y, centres), [12.5, 0.0])
    close(oracle.center(z, y, centres, 0.1, [1.0, 2.0]), [2.25, 2.0])


@pytest.mark.parametrize("seed", SEEDS)
def test_center_rate_one_is_the_running_mean_and_rate_zero_is_frozen(seed):
    z, y, c = batch(seed)
    for j, row in enumerate(oracle.center_update(c, z, y, 1.0)):
        close(row, np.vstack([c[j], z[y == j]]).mean(axis=0))
    assert np.array_equal(oracle.center_update(c, z, y, 0.0), c)


@pytest.mark.parametrize("seed", SEEDS)
def test_center_update_is_linear_in_the_rate_and_leaves_absent_classes(seed):
    z, y, c = batch(seed)
    y = y % 3
    whole, half = oracle.center_update(c, z, y, 1.0), oracle.center_update(c, z, y, 0.5)
    close(half, (c + whole) / 2)
    assert np.array_equal(half[3:], c[3:])


@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_of_the_center_term_is_the_difference(seed):
    z, y, c = batch(seed)
    close(oracle.numeric_gradient(lambda v: oracle.center_term(v, y, c).sum(), z), z - c[y], 1e-8)


# -------------------------------------------------------------------------------------------------- SphereFace


@pytest.mark.parametrize("m", MARGINS)
def test_psi_runs_from_one_to_one_minus_two_m_downwards_without_jumps(m):
    theta = np.linspace(0, PI, 4001)
    values = np.array([oracle.psi(t, m) for t in theta])
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(1 - 2 * m, abs=1e-12)
    assert np.all(np.diff(values) < 0)
    assert np.abs(np.diff(values)).max() <= m * (theta[1] - theta[0]) * (1 + 1e-9)  # the slope is at most m
    for k in range(1, m):  # the two branches agree where they meet
        joint = k * PI / m
        left, right = oracle.psi(joint - 1e-9, m), oracle.psi(joint + 1e-9, m)
        assert left == pytest.approx(1 - 2 * k, abs=1e-12) and right == pytest.approx(1 - 2 * k, abs=1e-12)


def test_psi_by_hand():
    assert oracle.psi(PI / 4, 4) == pytest.approx(-1)
    assert oracle.psi(3 * PI / 8, 4) == pytest.approx(-2)  # k=1, cos(3π/2)=0
    assert oracle.psi(PI / 2, 2) == pytest.approx(-1)
    c = math.cos(0.5)
    assert oracle.psi(0.5, 4) == pytest.approx(8 * c**4 - 8 * c**2 + 1)
    for m in (0, 1.5):
        with pytest.raises(ValueError, match="whole number"):
            oracle.psi(0.5, m)


@pytest.mark.parametrize("seed", SEEDS)
def test_sphereface_with_m_one_or_endless_lambda_is_modified_softmax(seed):
    z, y, W = batch(seed)
    plain = oracle.softmax(z, y, W, unit_weights=True)
    for lam in (0.0, 5.0):
        close(oracle.sphereface(z, y, W, 1, lam), plain)
    close(oracle.sphereface(z, y, W, 4, math.inf), plain)
    close(oracle.sphereface(z, y, W, 4, 1e12), plain, 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_sphereface_is_harder_the_larger_m_and_the_smaller_lambda(seed):
    z, y, W = batch(seed)
    by_m = [oracle.sphereface(z, y, W, m, 1.0) for m in (1, 2, 3, 4)]
    by_lambda = [oracle.sphereface(z, y, W, 4, lam) for lam in (1000.0, 5.0, 0.0)]
    for easier, harder in [*itertools.pairwise(by_m), *itertools.pairwise(by_lambda)]:
        assert np.all(harder > easier)


def test_sphereface_by_hand_and_its_schedule():
    # An embedding of length 2, λ=1, m=2, the other class at 0°: ψ(60°) = cos 120°, ψ(120°) = -cos 240° - 2.
    for theta, target in ((PI / 3, 2 * (0.5 - 0.5) / 2), (2 * PI / 3, 2 * (-0.5 - 1.5) / 2)):
        loss = oracle.sphereface([at(0, 2.0)], [0], [at(theta), at(0)], 2, 1.0)
        close(loss, [math.log(math.exp(target) + math.exp(2)) - target])
    assert oracle.sphereface_lambda(0) == 1000.0
    assert oracle.sphereface_lambda(100) == pytest.approx(1000 / 13)
    assert oracle.sphereface_lambda(10**6) == 5.0


# ------------------------------------------------------------------------------------ CosFace, ArcFace, combined


@pytest.mark.parametrize("seed", SEEDS)
def test_no_margin_is_normface(seed):
    z, y, W = batch(seed)
    plain = oracle.normface(z, y, W, 16.0)
    close(oracle.cosface(z, y, W, 16.0, 0.0), plain)
    close(oracle.combined(z, y, W, 16.0, 1.0, 0.0, 0.0), plain)
    for mode in ("keep", "none", "easy", "smooth", "detach"):
        close(oracle.arcface(z, y, W, 16.0, 0.0, mode), plain)


@pytest.mark.parametrize("seed", SEEDS)
def test_combined_has_cosface_and_arcface_inside(seed):
    z, y, W = batch(seed)
    close(oracle.combined(z, y, W, 16.0, 1.0, 0.0, 0.35), oracle.cosface(z, y, W, 16.0, 0.35))
    close(oracle.combined(z, y, W, 16.0, 1.0, 0.5, 0.0), oracle.arcface(z, y, W, 16.0, 0.5, "none"))


@pytest.mark.parametrize("mode", ["keep", "none", "easy", "smooth"])
@pytest.mark.parametrize("margin", [0.2, 0.5, 1.0])
def test_arcface_slope_is_sin_over_sin(mode, margin):
    for theta in (0.1, 0.3, 0.8, 1.4):
        c = math.cos(theta)
        slope = oracle.numeric_gradient(lambda v: oracle.arcface_target(math.acos(v[0]), margin, mode), [c], 1e-6)
        assert slope[0] == pytest.approx(math.sin(theta + margin) / math.sin(theta), rel=1e-8)
    assert math.sin(0.8) / math.sin(0.3) == pytest.approx(2.43, abs=0.005)


def test_arcface_branches_by_hand():
    m, late = 0.5, PI - 0.2
    assert oracle.arcface_target(late, m, "none") == pytest.approx(math.cos(PI + 0.3))
    assert oracle.arcface_target(late, m, "keep") == pytest.approx(math.cos(late) - 0.5 * math.sin(0.5))
    assert oracle.arcface_target(late, m, "easy") == pytest.approx(math.cos(late))
    assert oracle.arcface_target(late, m, "smooth") == pytest.approx(-2 - math.cos(PI + 0.3))
    assert oracle.arcface_target(1.7, m, "easy") == pytest.approx(math.cos(1.7))
    assert oracle.arcface_target(PI, m, "smooth") == pytest.approx(-2 + math.cos(0.5))
    assert oracle.arcface_target(PI - m + 1e-9, m, "keep") == pytest.approx(-1.117, abs=5e-4)  # the published jump
    assert oracle.arcface_target(PI - m - 1e-9, m, "keep") == pytest.approx(-1.0)
    with pytest.raises(ValueError, match="nope"):
        oracle.arcface_target(1.0, m, "nope")


@pytest.mark.parametrize("margin", [0.2, 0.5, 1.0])
def test_which_modes_fall_all_the_way(margin):
    theta = np.linspace(0, PI, 3001)
    curve = {
        mode: np.array([oracle.arcface_target(t, margin, mode) for t in theta])
        for mode in ("none", "keep", "easy", "smooth")
    }
    assert np.all(np.diff(curve["keep"]) < 0) and np.all(np.diff(curve["smooth"]) < 0)
    assert np.any(np.diff(curve["none"]) > 0) and np.any(np.diff(curve["easy"]) > 0)
    assert np.abs(np.diff(curve["smooth"])).max() < 2e-3  # no jump
    assert oracle.arcface_target(1.0, margin, "smooth") == oracle.arcface_target(1.0, margin, "none")
    close(curve["smooth"], [oracle.psi((t + margin) / 2, 2) for t in theta])  # both branches of ψ with m=2


@pytest.mark.parametrize("seed", SEEDS)
def test_detached_arcface_has_the_value_and_the_slope_one(seed):
    z, y, W = batch(seed, n=4)
    shift = oracle.arcface_shift(z, y, W, 0.5)
    value = oracle.arcface(z, y, W, 8.0, 0.5, "detach")
    close(oracle.arcface_detached(z, y, W, 8.0, shift), value)
    close(value, oracle.arcface(z, y, W, 8.0, 0.5, "none"))
    # s Σ_j (p_j - 1[j=y]) ∂cos_j/∂z with p from the logits that have the margin
    logits = oracle.arcface_logits(z, y, W, 8.0, 0.5, "none")
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(4), y] -= 1
    size = np.linalg.norm(z, axis=1, keepdims=True)
    u, v = z / size, W / np.linalg.norm(W, axis=1, keepdims=True)
    wanted = 8.0 * (p @ v - (p * (u @ v.T)).sum(axis=1, keepdims=True) * u) / size
    close(oracle.numeric_gradient(lambda x: oracle.arcface_detached(x, y, W, 8.0, shift).sum(), z), wanted, 1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_on_the_sphere_are_at_right_angles_to_the_embedding(seed):
    z, y, W = batch(seed, n=3)
    for loss in (
        lambda x: oracle.normface(x, y, W, 8.0).sum(),
        lambda x: oracle.cosface(x, y, W, 8.0, 0.35).sum(),
        lambda x: oracle.arcface(x, y, W, 8.0, 0.3, "smooth").sum(),
        lambda x: oracle.adacos_step(x, y, W, 5.0)[0].sum(),
    ):
        close((oracle.numeric_gradient(loss, z) * z).sum(axis=1), np.zeros(3), 1e-7)


def test_cosface_and_arcface_by_hand():
    W, z = [at(0), at(PI / 2)], [at(PI / 6, 9.0)]
    target = 4 * (math.cos(PI / 6) - 0.25)
    close(oracle.cosface(z, [0], W, 4.0, 0.25), [math.log(math.exp(target) + math.exp(2)) - target])
    close(oracle.arcface(z, [0], W, 4.0, PI / 6), [0.0 + math.log(2)])  # 60° to either, once the margin is added
    close(oracle.combined(z, [0], W, 4.0, 2.0, 0.0, 0.0), [math.log(2)])


@pytest.mark.parametrize("sign", [1, -1])
def test_finite_at_cosines_of_plus_and_minus_one(sign):
    z, W = [[2.0 * sign, 0.0]], [[1.0, 0.0], [0.0, 1.0]]
    for mode in ("keep", "none", "easy", "smooth", "detach"):
        assert np.isfinite(oracle.arcface(z, [0], W, 64.0, 0.5, mode)).all()
    assert np.isfinite(oracle.sphereface(z, [0], W, 4)).all()
    assert np.isfinite(oracle.adacos_step(z, [0], W, 10.0)[0]).all()


def test_more_digits_agree():
    mp = pytest.importorskip("mpmath")
    mp.mp.dps = 40
    z, y, W = batch(3, n=6)
    z[0], z[1] = W[y[0]] * 2 + 1e-9, -W[y[1]] + 1e-9  # almost exactly on the class vector and opposite it
    ours = oracle.arcface(z, y, W, 64.0, 0.5, "smooth")
    for i in range(6):
        logits = []
        for j in range(len(W)):
            a, b = [mp.mpf(float(v)) for v in z[i]], [mp.mpf(float(v)) for v in W[j]]
            inner = mp.fsum(p * q for p, q in zip(a, b, strict=True))
            theta = mp.acos(inner / mp.sqrt(mp.fsum(p * p for p in a) * mp.fsum(q * q for q in b)))
            if j == y[i]:
                theta += mp.mpf(0.5)
            logits.append(64 * (mp.cos(theta) if theta <= mp.pi else -2 - mp.cos(theta)))
        wanted = mp.log(mp.fsum(mp.exp(v) for v in logits)) - logits[y[i]]
        assert abs(ours[i] - float(wanted)) < 1e-12 * max(1, abs(wanted))


# ------------------------------------------------------------------------------------------------------ AdaCos


def test_adacos_fixed_scale_is_the_published_one():
    for classes, scale in ((10, 3.1), (100, 6.5), (10575, 13.1), (85742, 16.1)):
        assert oracle.adacos_fixed_scale(classes) == pytest.approx(scale, abs=0.06)
    assert oracle.adacos_fixed_scale(2) == 0.0
    with pytest.raises(ValueError, match="two"):
        oracle.adacos_fixed_scale(1)


def test_the_median_is_the_lower_one():
    assert oracle.lower_median([4.0, 1.0, 3.0, 2.0]) == 2.0
    assert oracle.lower_median([3.0, 1.0, 2.0]) == 2.0
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=10)
    assert oracle.lower_median(values) == torch.tensor(values).median().item()


@pytest.mark.parametrize("before", [0.5, 3.0, 20.0])
def test_adacos_with_all_cosines_zero_is_the_fixed_scale(before):
    z, W = np.eye(9)[:2], np.eye(9)[2:]
    losses, scale = oracle.adacos_step(z, [0, 3], W, before)
    assert scale == pytest.approx(oracle.adacos_fixed_scale(7), rel=1e-14)
    close(losses, [math.log(7)] * 2)


def test_adacos_gives_the_median_sample_even_odds():
    # One sample 0.4 from its class: its own B is B_avg, and e^{s_t cos θ_med} = B_avg.
    rng = np.random.default_rng(0)
    W = rng.normal(size=(6, 3))
    W[0] = [math.cos(0.4), math.sin(0.4), 0.0]
    z, before = [[2.0, 0.0, 0.0]], 7.0
    _, scale = oracle.adacos_step(z, [0], W, before)
    others = sum(math.exp(before * c) for c in oracle.cosines(z, W)[0][1:])
    own = math.exp(scale * math.cos(0.4))
    assert own / (own + others) == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_adacos_is_normface_with_its_scale_and_averages_over_samples(seed):
    z, y, W = batch(seed)
    losses, scale = oracle.adacos_step(z, y, W, 4.0)
    close(losses, oracle.normface(z, y, W, scale))
    sums = [np.exp(4.0 * np.delete(row, label)).sum() for row, label in zip(oracle.cosines(z, W), y, strict=True)]
    theta = sorted(np.arccos(oracle.cosines(z, W)[np.arange(9), y]))[4]
    assert scale == pytest.approx(math.log(np.mean(sums)) / math.cos(min(PI / 4, theta)), rel=1e-12)


# --------------------------------------------------------------------------------------------- sampled classes


def inners():
    return {
        "softmax": oracle.softmax,
        "cosface": lambda z, y, W: oracle.cosface(z, y, W, 8.0, 0.35),
        "arcface": lambda z, y, W: oracle.arcface(z, y, W, 8.0, 0.5),
        "sphereface": lambda z, y, W: oracle.sphereface(z, y, W, 4, 5.0),
    }


@pytest.mark.parametrize("name", inners())
def test_all_classes_sampled_is_the_full_loss_in_any_order_and_none_counts_twice(name):
    z, y, W = batch(2)
    inner = inners()[name]
    close(oracle.partial_fc(z, y, W, [4, 2, 0, 1, 3, 3], inner), inner(z, y, W))


@pytest.mark.parametrize("name", inners())
def test_fewer_classes_cost_less_and_leave_other_rows_alone(name):
    z, y, W = batch(2, n=4, classes=7)
    y = np.array([1, 5, 1, 2])
    inner, sampled = inners()[name], [1, 2, 4, 5]
    assert np.all(oracle.partial_fc(z, y, W, sampled, inner) < inner(z, y, W))
    gradient = oracle.numeric_gradient(lambda v: oracle.partial_fc(z, y, v, sampled, inner).sum(), W)
    assert np.all(gradient[[0, 3, 6]] == 0) and np.all(np.abs(gradient[sampled]).max(axis=1) > 1e-6)
    mask = np.isin(np.arange(7), sampled) * np.ones((4, 1))
    if name == "cosface":  # leaving classes out is giving them weight 0
        close(oracle.partial_fc(z, y, W, sampled, inner), oracle.cosface(z, y, W, 8.0, 0.35, mask))


def test_partial_fc_needs_every_label():
    z, _, W = batch(2, n=2)
    with pytest.raises(ValueError, match="not among"):
        oracle.partial_fc(z, [0, 4], W, [0, 1], oracle.softmax)


def test_the_published_sampling_rule():
    follows = oracle.partial_fc_follows_rule
    assert follows([1, 3, 5], [5, 1, 1], 30, 0.1)
    assert follows([1, 2, 3, 5], [5, 1, 2, 3], 30, 0.1)  # more classes in the batch than places
    assert not follows([1, 2, 3, 5], [5, 1], 30, 0.1)
    assert not follows([1, 2, 3], [5, 1], 30, 0.1)
    assert not follows([3, 1, 5], [5, 1], 30, 0.1)
    assert not follows([1, 1, 5], [5, 1], 30, 0.1)
    assert follows(range(30), [4], 30, 1.0)


# ------------------------------------------------------------------- several vectors, proxies, margins by length


@pytest.mark.parametrize("seed", SEEDS)
def test_one_vector_per_class_and_flat_margins_are_known_losses(seed):
    z, y, W = batch(seed)
    close(oracle.subcenter_arcface(z, y, W, 1, 16.0, 0.5), oracle.arcface(z, y, W, 16.0, 0.5))
    close(oracle.soft_triple(z, y, W, 1, 20.0, 0.1, 0.1, 0.2), oracle.cosface(z, y, W, 20.0, 0.1))
    close(oracle.proxy_nca(z, y, W, 4.0), oracle.normface(z, y, W, 8.0))
    close(oracle.magface(z, y, W, 16.0, 0.4, 0.4, 1.0, 9.0, 0.0), oracle.arcface(z, y, W, 16.0, 0.4))
    close(oracle.adaface(z, y, W, 16.0, 0.3, np.zeros(len(z))), oracle.cosface(z, y, W, 16.0, 0.3))


@pytest.mark.parametrize("seed", SEEDS)
def test_equal_vectors_of_a_class_are_one(seed):
    z, y, W = batch(seed)
    close(oracle.subcenter_arcface(z, y, np.repeat(W, 3, 0), 3, 16.0, 0.5), oracle.arcface(z, y, W, 16.0, 0.5))
    close(oracle.soft_triple(z, y, np.repeat(W, 3, 0), 3, 20.0, 0.1, 0.1, 0.2), oracle.cosface(z, y, W, 20.0, 0.1))


def test_the_first_proxy_nca_by_hand():
    # d to the own proxy 0, to the other 2: -log(e^0 / e^-2) = -2.
    close(oracle.proxy_nca([[3.0, 0.0]], [0], [[1.0, 0.0], [0.0, 1.0]], 1.0, include_own=False), [-2.0])


def test_proxy_anchor_by_hand():
    # Cosines 1 to the own class and 0 to the other, no margin, alpha 1; the second class has no samples.
    value = oracle.proxy_anchor([[2.0, 0.0]], [0], [[1.0, 0.0], [0.0, 1.0]], 0.0, 1.0)
    close(value, [2 * math.log(1 + math.exp(-1)), math.log(2)])


def test_a_hard_wrong_class_counts_by_its_square_at_first():
    # Own class at 90 degrees, the other at 0: cos = 1 counts as 1 · (t + 1).
    for t in (0.0, 0.5):
        found = oracle.curricularface([[1.0, 0.0]], [1], [[1.0, 0.0], [0.0, 1.0]], 1.0, 0.1, t)
        close(found, [math.log(1 + math.exp(1 + t - math.cos(PI / 2 + 0.1)))])
