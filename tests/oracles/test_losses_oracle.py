"""The oracles judged by themselves: identities between losses, the weight law, values worked by hand."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

_spec = importlib.util.spec_from_file_location("oracle_losses", Path(__file__).with_name("losses.py"))
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

TOL = 1e-10
SEEDS = range(5)


def batch(seed, sizes=(4, 3, 2, 1), dim=5):
    """Random rows whose labels are shuffled; the class of size 1 gives an anchor without positives."""
    rng = np.random.default_rng(seed)
    y = rng.permutation([label * 7 - 3 for label, size in enumerate(sizes) for _ in range(size)])
    return rng.normal(size=(len(y), dim)) + rng.normal(size=dim), y


def views(seed, samples=5, dim=4):
    """Two views of each sample, view-major, labels = sample ids."""
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(samples, dim))
    return np.concatenate([first, first + 0.5 * rng.normal(size=(samples, dim))]), np.tile(np.arange(samples), 2)


def close(a, b, tol=TOL):
    """Lists, arrays or numbers with None in the same places and equal values elsewhere."""
    a, b = np.atleast_1d(np.array(a, dtype=object)), np.atleast_1d(np.array(b, dtype=object))
    assert a.shape == b.shape
    for p, q in zip(a.ravel(), b.ravel(), strict=True):
        assert (p is None) == (q is None)
        if p is not None:
            assert abs(p - q) <= tol * max(1.0, abs(p), abs(q)), (p, q)


def same(first, second):
    """Both per-anchor values and the mean agree."""
    close(first[0], second[0])
    close(first[1], second[1])


def difference(function, z, step=1e-3):
    """Central differences of a scalar function of z; equal functions have equal ones at any step."""
    gradient = np.zeros_like(z)
    for index in np.ndindex(*z.shape):
        up, down = z.copy(), z.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient


def nt_xent(z, temperature):
    """SimCLR's cross-entropy for view-major pairs, written once more with NumPy."""
    u = z / np.linalg.norm(z, axis=1, keepdims=True)
    logits = u @ u.T / temperature
    np.fill_diagonal(logits, -np.inf)
    n = len(z)
    target = (np.arange(n) + n // 2) % n
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(n), target]


def cosine(z):
    u = z / np.linalg.norm(z, axis=1, keepdims=True)
    return u @ u.T


# ------------------------------------------------------------------------------------- the reduction table


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("neg_weight", ["none", "denominator", "penalty"])
@pytest.mark.parametrize("normalise", ["count", "weight"])
def test_row_01_da_supcon_without_alpha_and_beta_is_supcon_out(seed, neg_weight, normalise):
    z, y = batch(seed)
    options = {"alpha": 0.0, "beta": 0.0, "neg_weight": neg_weight, "normalise": normalise}
    same(oracle.da_supcon(z, y, 0.2, **options), oracle.supcon(z, y, 0.2))


def test_row_01_gradient():
    z, y = batch(0, sizes=(3, 2, 1), dim=3)
    ours = difference(lambda x: oracle.da_supcon(x, y, 0.2, alpha=0.0, beta=0.0)[1], z)
    close(ours, difference(lambda x: oracle.supcon(x, y, 0.2)[1], z))


@pytest.mark.parametrize("seed", SEEDS)
def test_row_01_literal_without_alpha_sums_positives_times_supcon(seed):
    z, y = batch(seed)
    rows, total = oracle.da_supcon(z, y, 0.2, alpha=0.0, beta=3.0, preset="literal", batch="sum")
    plain = oracle.supcon(z, y, 0.2)[0]
    expected = [None if v is None else v * (np.sum(y == y[i]) - 1) for i, v in enumerate(plain)]
    close(rows, expected)
    close(total, sum(v for v in expected if v is not None))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.07])
def test_row_02_supcon_with_sample_ids_is_nt_xent(seed, temperature):
    z, y = views(seed)
    for form in ("out", "in"):
        close(oracle.supcon(z, y, temperature, form)[0], nt_xent(z, temperature))
    close(oracle.info_nce(z, y, temperature)[0], nt_xent(z, temperature))


@pytest.mark.parametrize("seed", SEEDS)
def test_row_03_in_is_at_most_out(seed):
    z, y = batch(seed)
    out, inside = oracle.supcon(z, y, 0.2, "out")[0], oracle.supcon(z, y, 0.2, "in")[0]
    for i in range(len(y)):
        positives = np.sum(y == y[i]) - 1
        if positives == 0:
            assert out[i] is None
            assert inside[i] is None
        elif positives == 1:
            close(out[i], inside[i])
        else:
            assert inside[i] < out[i] - 1e-6


def test_row_03_equal_positive_similarities_make_in_equal_out():
    angle = 0.7
    positives = [[math.cos(angle), math.sin(angle) * math.cos(t), math.sin(angle) * math.sin(t)] for t in (0, 1, 4)]
    z = np.array([[1.0, 0.0, 0.0], *positives, [0.3, -0.5, 0.2], [-1.0, 0.1, 0.4]])
    y = [0, 0, 0, 0, 1, 1]
    close(oracle.supcon(z, y, 0.3, "in")[0][0], oracle.supcon(z, y, 0.3, "out")[0][0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shift", [-3.0, 0.01, 2.0])
def test_row_04_a_row_of_similarities_may_be_shifted(seed, shift):
    """The sum of the gradient over a row is 0: the value does not change along the direction (1, ..., 1)."""
    rng = np.random.default_rng(seed)
    pos = [(float(s), float(w)) for s, w in zip(rng.normal(size=3), rng.uniform(0.5, 3, 3), strict=True)]
    neg = [(float(s), float(w)) for s, w in zip(rng.normal(size=5), rng.uniform(0.5, 3, 5), strict=True)]

    def moved(row):
        return [(s + shift, w) for s, w in row]

    for form in ("out", "in"):
        close(oracle.supcon_row(moved(pos), moved(neg), form), oracle.supcon_row(pos, neg, form))
    for neg_weight in ("none", "denominator", "penalty"):
        for normalise in ("count", "weight", "sum"):
            ours = oracle.da_supcon_row(moved(pos), moved(neg), neg_weight, normalise)
            close(ours, oracle.da_supcon_row(pos, neg, neg_weight, normalise))
    single = pos[0][0]
    close(oracle.info_nce_row(single + shift, moved(neg), 0.5)[0], oracle.info_nce_row(single, neg, 0.5)[0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prior", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("count", ["weight", "plain"])
def test_row_05_hcl_beta_0_is_dcl(seed, prior, count):
    z, y = batch(seed)
    w = oracle.importance_weights(z, y, 0.5, beta=0.0)
    close(w, 1.0 - np.eye(len(y)))
    same(oracle.info_nce(z, y, 0.5, prior, w=w, count=count), oracle.info_nce(z, y, 0.5, prior))


@pytest.mark.parametrize("seed", SEEDS)
def test_row_05_dcl_prior_0_is_simclr_and_never_clamped(seed):
    z, y = views(seed)
    close(oracle.info_nce(z, y, 0.5, prior=0.0)[0], nt_xent(z, 0.5))
    close(oracle.info_nce(z, y, 0.5, prior=1e-13)[0], nt_xent(z, 0.5))
    assert oracle.clamp_fraction(z, y, 0.5, prior=1e-13) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_row_05_published_hcl_sum(seed):
    """R = Σ imp neg / mean imp, and the debiased estimator around it, from exponentials as printed."""
    z, y = views(seed)
    n, t, beta, prior = len(y), 0.5, 1.3, 0.1
    s = cosine(z)
    expected = []
    for i in range(n):
        p = (i + n // 2) % n
        neg = np.exp(np.array([s[i, j] for j in range(n) if j not in (i, p)]) / t)
        pos = np.exp(s[i, p] / t)
        imp = neg**beta
        reweighted = (imp * neg).sum() / imp.mean()
        ng = max((reweighted - prior * len(neg) * pos) / (1 - prior), len(neg) * math.exp(-1 / t))
        expected.append(-math.log(pos / (pos + ng)))
    w = oracle.importance_weights(z, y, t, beta)
    for count in ("plain", "weight"):
        close(oracle.info_nce(z, y, t, prior, w=w, count=count)[0], expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_row_06_hcl_large_beta_keeps_the_hardest_negative(seed):
    z, y = batch(seed)
    s = cosine(z)
    gaps = [np.diff(np.sort(s[i][y != y[i]])[-2:])[0] for i in range(len(y))]
    beta = 40.0 * 0.5 / min(gaps)
    w = oracle.importance_weights(z, y, 0.5, beta)
    for i in range(len(y)):
        others = np.flatnonzero(y != y[i])
        total = sum(w[i, j] * math.exp(s[i, j] / 0.5) for j in others)
        close(total, len(others) * max(math.exp(s[i, j] / 0.5) for j in others))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["similarity", "raw", "distance"])
def test_row_07_wcl_ones_is_dcl_and_equal_encoders_give_one_and_a_half(seed, form):
    z, y = batch(seed)
    other = y[:, None] != y[None, :]
    ones = 1.0 - np.eye(len(y))
    for count in ("plain", "weight"):
        same(oracle.info_nce(z, y, 0.5, 0.1, w=ones, count=count), oracle.info_nce(z, y, 0.5, 0.1))
    w = oracle.relative_weights(z, z, y, 0.5, form)
    close(w[other], np.full(other.sum(), 1.5))
    assert abs(oracle.info_nce(z, y, 0.5, 0.1, w=w, count="plain")[1] - oracle.info_nce(z, y, 0.5, 0.1)[1]) > 1e-3


def isolated_ng(z, y, i, p, prior, w, count):
    """Ng of one (anchor, positive), recovered from the loss of that pair alone: Ng = pos (e^ℓ - 1)."""
    s = cosine(z)
    others = [j for j in range(len(y)) if y[j] != y[i]]
    row = [(s[i, j] / 0.5, w) for j in others]
    value, clamped = oracle.info_nce_row(s[i, p] / 0.5, row, 0.5, prior, count)
    return math.exp(s[i, p] / 0.5) * math.expm1(value), clamped


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("w", [1.2, 1.5, 2.0])
def test_row_08_wcl_constant_weight_is_dcl_with_a_smaller_prior(seed, w):
    z, y = batch(seed)
    prior, seen = 0.05, 0
    for i in range(len(y)):
        for p in range(len(y)):
            if p == i or y[p] != y[i]:
                continue
            ours, clamped = isolated_ng(z, y, i, p, prior, w, "plain")
            theirs, also_clamped = isolated_ng(z, y, i, p, prior / w, 1.0, "plain")
            if clamped or also_clamped:
                continue
            seen += 1
            close(ours, w * (1 - prior / w) / (1 - prior) * theirs)
    assert seen > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.07])
def test_row_09_wcl_weight_is_one_plus_a_sigmoid(seed, temperature):
    z, y = batch(seed)
    biased = batch(seed + 100)[0]
    d, b = cosine(z) / temperature, cosine(biased) / temperature
    w = oracle.relative_weights(z, biased, y, temperature)
    plain = oracle.relative_weights(z, biased, y, temperature, "raw")
    for i in range(len(y)):
        others = np.flatnonzero(y != y[i])
        nu_d = 0.5 * np.log(np.exp(2 * d[i, others]).sum())
        nu_b = 0.5 * np.log(np.exp(2 * b[i, others]).sum())
        for j in others:
            delta = (d[i, j] - nu_d) - (b[i, j] - nu_b)
            close(w[i, j], 1 + 1 / (1 + math.exp(-delta)))
            close(plain[i, j], 1 + 1 / (1 + math.exp(b[i, j] - d[i, j])))
            assert 1 < w[i, j] < 2


@pytest.mark.parametrize("seed", SEEDS)
def test_row_09_distance_form_has_the_opposite_monotonicity(seed):
    """A negative moved closer in the first encoder gets more similarity weight and less distance weight."""
    z, y = batch(seed)
    biased = batch(seed + 100)[0]
    i, j = 0, int(np.flatnonzero(y != y[0])[0])
    nearer = z.copy()
    u = z / np.linalg.norm(z, axis=1, keepdims=True)
    nearer[j] = 0.5 * u[i] + 0.5 * u[j]
    for form, sign in (("similarity", 1), ("raw", 1), ("distance", -1)):
        before = oracle.relative_weights(z, biased, y, 0.5, form)[i, j]
        after = oracle.relative_weights(nearer, biased, y, 0.5, form)[i, j]
        assert sign * (after - before) > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prior", [0.01, 0.1, 0.5])
def test_row_10_self_triplet_mean_debiasing_is_a_rescale(seed, prior):
    z, y = batch(seed)
    plain = oracle.self_triplet(z, y, 0.0, "mean")[0]
    expected = [None if v is None else v / (1 - prior) for v in plain]
    close(oracle.self_triplet(z, y, prior, "mean")[0], expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_row_10_self_triplet_forms(seed):
    """The derived form of sum_N, its batch sum on the sphere, and the forms that coincide without a prior."""
    z, y = views(seed)
    n, prior = len(y), 0.1
    s = cosine(z)
    expected = []
    for i in range(n):
        p = (i + n // 2) % n
        total = sum(2 - 2 * s[i, j] for j in range(n) if j not in (i, p))
        expected.append(((1 + prior * (n - 3)) * (2 - 2 * s[i, p]) - total) / (1 - prior))
    close(oracle.self_triplet(z, y, prior)[0], expected)
    same(oracle.self_triplet(z, y, 0.0, "sum_N"), oracle.self_triplet(z, y, 0.0, "readme"))
    draws = [oracle.self_triplet(z, y, prior, "one_neg", pick=[(i + k) % n for i in range(n)])[0] for k in range(1, n)]
    draws.pop(n // 2 - 1)  # that shift is the positive
    close(np.mean(draws, axis=0), oracle.self_triplet(z, y, prior, "mean")[0])
    paired = oracle.self_triplet(z, y, 0.0, "paired")[0]
    close(paired, [(n - 2) * v for v in oracle.self_triplet(z, y, 0.0, "mean")[0]])


@pytest.mark.parametrize("seed", SEEDS)
def test_row_13_npair_is_cross_entropy_and_info_nce(seed):
    rng = np.random.default_rng(seed)
    classes = 5
    a, p = rng.normal(size=(classes, 4)) * 2, rng.normal(size=(classes, 4)) * 2
    rows, value = oracle.npair(np.concatenate([a, p]), np.tile(np.arange(classes), 2))
    logits = a @ p.T
    entropy = [math.log(np.exp(logits[i]).sum()) - logits[i, i] for i in range(classes)]
    close(rows[:classes], entropy)
    assert rows[classes:] == [None] * classes
    close(value, np.mean(entropy))
    ids = np.arange(classes)
    close(oracle.info_nce(a, ids, temperature=1.0, ref=(p, ids), normalise=False)[0], entropy)
    with_norms = oracle.npair(np.concatenate([a, p]), np.tile(ids, 2), norm_weight=0.02)[1]
    close(with_norms, value + 0.005 * ((a**2).sum(axis=1).mean() + (p**2).sum(axis=1).mean()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("squared", [False, True])
def test_row_14_soft_triplet_is_a_two_way_softmax(seed, squared):
    z = np.random.default_rng(seed).normal(size=(3, 4))
    y = [0, 0, 1]
    u = z / np.linalg.norm(z, axis=1, keepdims=True)
    rows = oracle.triplet(z, y, margin=0.0, squared=squared, soft=True)[0]
    for i, p in ((0, 1), (1, 0)):
        near, far = np.linalg.norm(u[i] - u[p]), np.linalg.norm(u[i] - u[2])
        near, far = (near**2, far**2) if squared else (near, far)
        close(rows[i], -math.log(math.exp(-near) / (math.exp(-near) + math.exp(-far))))
    assert rows[2] is None
    if squared:  # unit vectors: SupCon with one positive and one negative at τ = ½
        close(rows[:2], oracle.supcon(z, y, 0.5)[0][:2])


# ------------------------------------------------------------------------------------------- the weight law

LOSSES = {
    "supcon_out": lambda z, y, **k: oracle.supcon(z, y, 0.2, "out", **k),
    "supcon_in": lambda z, y, **k: oracle.supcon(z, y, 0.2, "in", **k),
    "info_nce": lambda z, y, **k: oracle.info_nce(z, y, 0.5, **k),
    "debiased": lambda z, y, **k: oracle.info_nce(z, y, 0.5, 0.2, **k),
    "self_triplet_sum": lambda z, y, **k: oracle.self_triplet(z, y, 0.2, "sum_N", **k),
    "self_triplet_mean": lambda z, y, **k: oracle.self_triplet(z, y, 0.2, "mean", **k),
    "self_triplet_readme": lambda z, y, **k: oracle.self_triplet(z, y, 0.2, "readme", **k),
    "self_triplet_paired": lambda z, y, **k: oracle.self_triplet(z, y, 0.0, "paired", **k),
    "contrastive_squared": lambda z, y, **k: oracle.contrastive(z, y, 0.2, 1.0, "squared", **k),
    "contrastive_hadsell": lambda z, y, **k: oracle.contrastive(z, y, 0.2, 1.0, "hadsell", **k),
    "contrastive_linear": lambda z, y, **k: oracle.contrastive(z, y, 0.2, 1.0, "linear", **k),
    "triplet_all": lambda z, y, **k: oracle.triplet(z, y, 0.2, mining="all", **k),
    "triplet_mean_all": lambda z, y, **k: oracle.triplet(z, y, 0.2, mining="all", average="all", **k),
    "triplet_soft": lambda z, y, **k: oracle.triplet(z, y, 0.2, True, True, **k),
    "triplet_hardest": lambda z, y, **k: oracle.triplet(z, y, 0.2, mining="hardest", **k),
    "triplet_tf": lambda z, y, **k: oracle.triplet(z, y, 0.2, mining="semihard_tf", **k),
    "triplet_set": lambda z, y, **k: oracle.triplet(z, y, 0.2, mining="semihard_set", **k),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOSSES)
def test_law_weights_are_multiplicities(name, seed):
    """Weights 0, 1, 2, 3 on the columns of a reference set = that many copies of each of its rows."""
    loss = LOSSES[name]
    z, y = batch(seed)
    z_ref, y_ref = batch(seed + 50, sizes=(4, 4, 3, 2))
    copies = np.random.default_rng(seed).integers(0, 4, size=len(y_ref))
    w = np.tile(copies.astype(float), (len(y), 1))
    listed = np.repeat(np.arange(len(y_ref)), copies)
    same(loss(z, y, w=w, ref=(z_ref, y_ref)), loss(z, y, ref=(z_ref[listed], y_ref[listed])))


@pytest.mark.parametrize("name", LOSSES)
def test_law_ones_change_nothing_and_the_batch_is_its_own_reference(name):
    loss = LOSSES[name]
    z, y = batch(1)
    same(loss(z, y), loss(z, y, w=np.ones((len(y), len(y)))))
    same(loss(z, y), loss(z, y, ref=(z, y), w=1.0 - np.eye(len(y))))


@pytest.mark.parametrize("name", LOSSES)
def test_law_row_order_label_names_rotation_and_scale_are_irrelevant(name):
    loss = LOSSES[name]
    z, y = batch(2)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(y))
    rotation = np.linalg.qr(rng.normal(size=(z.shape[1], z.shape[1])))[0]
    rows, mean = loss(z, y)[:2]
    changed, changed_mean = loss(3.0 * z[order] @ rotation, 10 - y[order])[:2]
    close([rows[i] for i in order], changed)
    close(mean, changed_mean)


@pytest.mark.parametrize("name", LOSSES)
def test_law_one_class_is_defined_and_no_positive_is_not(name):
    loss = LOSSES[name]
    z, _ = batch(3)
    rows, mean = loss(z, np.zeros(len(z), dtype=int))[:2]
    assert all(row is not None and math.isfinite(row) for row in rows)
    if not name.startswith("contrastive"):
        rows, mean = loss(z, np.arange(len(z)))[:2]
        assert rows == [None] * len(z)
        assert mean is None


def test_law_lifted_and_npair_weights():
    z, y = batch(4, sizes=(2, 2, 2), dim=3)
    ones = np.ones((6, 6))
    same(oracle.lifted(z, y), oracle.lifted(z, y, w=ones))
    same(oracle.npair(z, y), oracle.npair(z, y, w=ones))
    # Weight 2 on every negative = every negative listed twice; weight 0 on a class = a batch without it.
    far = np.where(y[:, None] == y[None, :], 1.0, 2.0)
    for key, value in oracle.lifted(z, y, w=far)[2]["terms"].items():
        close(value, oracle.lifted(z, y)[2]["terms"][key] + math.log(2.0))
    kept = y != y[0]
    gone = np.outer(kept, kept).astype(float)
    rows = oracle.lifted(z, y, w=gone)[0]
    close([row for row, keep in zip(rows, kept, strict=True) if keep], oracle.lifted(z[kept], y[kept])[0])
    rows = oracle.npair(z, y, w=gone)[0]
    close([row for row, keep in zip(rows, kept, strict=True) if keep], oracle.npair(z[kept], y[kept])[0])


# ------------------------------------------------------------------------------------------- worked by hand

# Unit vectors at 0, 60, 90 and 180 degrees: cosines to the first 1, ½, 0, -1; distances 0, 1, √2, 2.
FAN = np.array([[2.0, 0.0], [0.5, math.sqrt(3) / 2], [0.0, 3.0], [-1.0, 0.0]])


def test_hand_supcon_and_da_supcon():
    y = [0, 0, 1, 2]
    e = math.exp
    close(oracle.supcon(FAN, y, 0.5)[0][0], -math.log(e(1) / (e(1) + 1 + e(-2))))
    assert oracle.supcon(FAN, y, 0.5)[0][2:] == [None, None]
    close(oracle.supcon(FAN, y, 0.5, mean_all=True)[1], oracle.supcon(FAN, y, 0.5)[1] / 2)
    close(oracle.supcon(FAN, y, 0.5, base_temperature=0.25)[1], 2 * oracle.supcon(FAN, y, 0.5)[1])
    # w⁺ = 1 + 2 (0.8 - 0.5)/0.8 = 1.75; w⁻ = 1 + 3 (0 + 0.5)/1.5 = 2 at cosine 0, 1 at cosine -1.
    options = {"alpha": 2.0, "beta": 3.0, "positive": 0.8, "negative": -0.5}
    denominator = e(1) + 2 + e(-2)
    close(oracle.da_supcon(FAN, y, 0.5, **options)[0][0], -1.75 * math.log(e(1) / denominator))
    weight = oracle.da_supcon(FAN, y, 0.5, normalise="weight", **options)[0][0]
    close(weight, -math.log(e(1) / denominator))
    plain = e(1) + 1 + e(-2)
    none = oracle.da_supcon(FAN, y, 0.5, neg_weight="none", **options)[0][0]
    close(none, -1.75 * math.log(e(1) / plain))
    penalty = oracle.da_supcon(FAN, y, 0.5, neg_weight="penalty", **options)[0][0]
    close(penalty, none - (2 - 1) * math.log(1 - 1 / plain) / 2)
    # Literal: cosine -1 gives 1 + 3 (-1 + 0.5)/1.5 = 0, so that negative is absent.
    literal = oracle.da_supcon(FAN, y, 0.5, neg_form="literal", **options)[0][0]
    close(literal, -1.75 * math.log(e(1) / (e(1) + 2)))


@pytest.mark.parametrize("seed", SEEDS)
def test_hand_literal_preset_ignores_beta(seed):
    z, y = batch(seed)
    same(oracle.da_supcon(z, y, beta=0.0, preset="literal"), oracle.da_supcon(z, y, beta=9.0, preset="literal"))


def test_hand_literal_negative_weights_below_zero():
    y = [0, 0, 1, 1]
    z = np.array([[1.0, 0.0], [-0.9, 0.5], [0.0, 1.0], [0.1, 1.0]])
    assert math.isnan(oracle.da_supcon(z, y, 0.5, beta=90.0, negative=0.6, neg_form="literal")[0][0])
    floored = oracle.da_supcon(z, y, 0.5, beta=90.0, negative=0.6, neg_form="literal", floor=True)[0][0]
    close(floored, 0.0)  # both negatives absent, one positive: log 1


def test_hand_threshold_weights():
    w = oracle.threshold_weights(FAN, [0, 0, 1, 2], 2.0, 3.0, 0.8, -0.5)
    close(w[0], [0.0, 1.75, 2.0, 1.0])
    w = oracle.threshold_weights(FAN, [0, 0, 1, 2], 2.0, 3.0, 0.4, -0.5, form="literal")
    close(w[0], [0.0, 0.5, 2.0, 0.0])


def test_hand_info_nce_mean_over_positives_and_clamp():
    y, t = [0, 0, 0, 1], 0.5
    e = math.exp
    expected = [-math.log(pos / (pos + e(-2))) for pos in (e(1), 1.0)]
    close(oracle.info_nce(FAN, y, t)[0][0], sum(expected) / 2)
    # One negative at cosine -1: the estimate is below e^{-1/t}, so Ng is the floor, which is e^{-2} again.
    close(oracle.info_nce(FAN, y, t, prior=0.3)[0][0], sum(expected) / 2)
    # Anchor 1 sees it at cosine -½.
    ng = [max((e(-1) - 0.3 * pos) / 0.7, e(-2)) for pos in (e(1), e(2 * math.sqrt(3) / 2))]
    values = [-math.log(p / (p + g)) for p, g in zip((e(1), e(math.sqrt(3))), ng, strict=True)]
    close(oracle.info_nce(FAN, y, t, prior=0.3)[0][1], sum(values) / 2)
    assert oracle.clamp_fraction(FAN, y, t, prior=0.3) > 0.3
    assert oracle.info_nce(FAN, [0, 0, 0, 0], t, prior=0.3)[0] == [0.0] * 4


@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-4])
def test_hand_tiny_temperatures_are_finite(temperature):
    z, y = batch(0)
    values = [oracle.supcon(z, y, temperature)[1], oracle.supcon(z, y, temperature, "in")[1]]
    values.append(oracle.da_supcon(z, y, temperature)[1])
    w = oracle.importance_weights(z, y, temperature, 1.0)
    values.append(oracle.info_nce(z, y, temperature, 0.1, w=w)[1])
    w = oracle.relative_weights(z, batch(9)[0], y, temperature)
    values.append(oracle.info_nce(z, y, temperature, 0.1, w=w, count="plain")[1])
    assert all(math.isfinite(value) for value in values)


def test_hand_contrastive():
    y, root = [0, 0, 1, 2], math.sqrt(2)
    expected = {
        "squared": 1 - 0.25 + (2.25 - 2) / 2,
        "hadsell": 0.5**2 + (1.5 - root) ** 2 / 2,
        "linear": 0.5 + (1.5 - root) / 2,
    }
    for form, value in expected.items():
        rows, _, details = oracle.contrastive(FAN, y, 0.5, 1.5, form)
        close(rows[0], value)
        assert details["terms"][(0, 3)] == 0.0
        assert details["positive"]["count"] == 2
        assert details["negative"]["count"] == 10
        close(details["positive"]["total"], 2 * details["terms"][(0, 1)])
        assert rows[3] is not None
        assert oracle.contrastive(FAN, y, 0.5, 1.5, form, need_positive=True)[0][2:] == [None, None]


def test_hand_triplet():
    y, root = [0, 0, 1, 2], math.sqrt(2)
    # Anchor 0: d_ap = 1, d_an = √2 and 2.
    terms = oracle.triplet(FAN, y, margin=0.5)[2]["terms"]
    close([terms[(0, 1, 2)], terms[(0, 1, 3)]], [1.5 - root, 0.0])
    for mining in ("all", "hardest", "semihard_tf", "semihard_set"):
        close(oracle.triplet(FAN, y, margin=0.5, mining=mining)[0][0], 1.5 - root)
    close(oracle.triplet(FAN, y, margin=0.5, average="all")[0][0], (1.5 - root) / 2)
    close(oracle.triplet(FAN, y, margin=0.5, mining="random", pick=[3, 3, 0, 0])[0][0], 0.0)
    # Squared: d_ap = 1, d_an = 2 and 4; the first is semi-hard only with a margin of at least 1.
    close(oracle.triplet(FAN, y, margin=0.5, squared=True, mining="semihard_set")[0][0], 0.0)
    close(oracle.triplet(FAN, y, margin=1.5, squared=True, mining="semihard_set")[0][0], 0.5)
    # Anchor 1: d_ap = 1, d_an = 2 sin 15° < 1 and 2 sin 60° = √3. TF takes the second, hardest the first.
    near = 2 * math.sin(math.pi / 12)
    close(oracle.triplet(FAN, y, margin=1.0, mining="semihard_tf")[0][1], 2 - math.sqrt(3))
    close(oracle.triplet(FAN, y, margin=1.0, mining="hardest")[0][1], 2 - near)
    close(oracle.triplet(FAN, y, margin=1.0, mining="all")[0][1], (4 - near - math.sqrt(3)) / 2)
    # No negative farther than the positive: TF falls back to the farthest one.
    z = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.5, math.sqrt(3) / 2]])
    close(oracle.triplet(z, y, margin=0.3, mining="semihard_tf")[0][0], 2 - root + 0.3)
    # Collapse: every distance 0, the loss is the margin.
    assert oracle.triplet(np.ones((4, 2)), [0, 0, 1, 1], margin=0.3, mining="hardest")[1] == 0.3


def test_hand_triplet_pooled_average_differs_from_the_mean_over_anchors():
    z, y = batch(0)
    _, mean, details = oracle.triplet(z, y, margin=0.2)
    active = [value for value in details["terms"].values() if value > 0]
    close(details["pooled_active"], sum(active) / len(active))
    close(details["pooled_all"], sum(active) / len(details["terms"]))
    assert abs(details["pooled_active"] - mean) > 1e-4


def test_hand_lifted():
    z = np.array([[0.0], [1.0], [3.0], [5.0]])
    y = [0, 0, 1, 1]
    rows, mean, details = oracle.lifted(z, y)
    e = math.exp
    first = 1 + math.log(e(1 - 3) + e(1 - 5) + e(1 - 2) + e(1 - 4))
    second = 2 + math.log(e(1 - 3) + e(1 - 2) + e(1 - 5) + e(1 - 4))
    close(details["terms"][(0, 1)], first)
    close(details["terms"][(3, 2)], second)
    assert first > 0
    close(rows, [first**2 / 2, first**2 / 2, second**2 / 2, second**2 / 2])
    close([mean, details["loss"]], [(first**2 + second**2) / 4] * 2)
    # Unequal classes: the published loss averages pairs, the mean averages anchors.
    z, y = batch(1)
    _, mean, details = oracle.lifted(z, y)
    squares = [max(value, 0.0) ** 2 for value in details["terms"].values()]
    close(details["loss"], sum(squares) / (2 * len(squares)))
    assert oracle.lifted(z, np.zeros(len(y), dtype=int))[1] == 0.0


def test_hand_npair_wants_two_rows_a_class():
    with pytest.raises(ValueError, match="two rows"):
        oracle.npair(FAN, [0, 0, 0, 1])


def test_hand_self_triplet():
    y = [0, 0, 1, 2]
    # Anchor 0: d²₊ = 1, d²_j = 2 and 4, N = 2, prior ¼.
    values = {"sum_N": 1 - (6 - 0.5) / 0.75, "mean": 1 - (3 - 0.25) / 0.75, "readme": 1 - (6 - 0.25) / 0.75}
    for form, value in values.items():
        close(oracle.self_triplet(FAN, y, 0.25, form)[0][0], value)
    close(oracle.self_triplet(FAN, y, 0.25, "one_neg", pick={0: 3, (1, 0): 2})[0][0], 1 - (4 - 0.25) / 0.75)
    close(oracle.self_triplet(FAN, y, 0.0, "paired")[0][0], -4.0)
    close(oracle.self_triplet(FAN, [0, 0, 0, 0], 0.25, "readme")[0][0], (1 + 2 + 4) / 3)


def test_hand_relative_weights_epsilon_and_coincident_points():
    z, y = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]), [0, 1, 2]
    close(oracle.relative_weights(z, z, y, form="distance")[0, 1:], [1.0, 1.0])
    published = oracle.relative_weights(z, z, y, epsilon=1e-6)[0, 1]
    ratio = 1 / math.sqrt(2)
    close(published, 1 + ratio / (2 * ratio + 1e-6))


def test_hand_multi_view():
    features = np.random.default_rng(0).normal(size=(3, 2, 4))
    z, y = oracle.multi_view(features, [5, 6, 7])
    assert list(y) == [5, 6, 7, 5, 6, 7]
    assert np.array_equal(z[4], features[1, 1])


# --------------------------------------------------------------- multi-similarity, circle, margin, smooth-AP


def test_named_losses_by_hand():
    # Anchor at the first axis, its positive at 60 degrees, its negative at 90.
    z = [[1.0, 0.0], [0.5, math.sqrt(0.75)], [0.0, -1.0]]
    y = [0, 0, 1]
    assert oracle.multi_similarity(z, y, 2.0, 4.0, 0.5)[0][0] == pytest.approx(
        math.log(2) / 2 + math.log(1 + math.exp(-2)) / 4
    )
    near, far = -(1 + 0.25 - 0.5) * (0.5 - 0.75), 0.25 * (0 - 0.25)
    assert oracle.circle(z, y, 0.25, 1.0)[0][0] == pytest.approx(math.log(1 + math.exp(near + far)))
    # Distances 1 and √2, boundary 1.2 and margin 0.3: hinges of 0.1 and 0.0858, both active.
    assert oracle.margin(z, y, 0.3, 1.2)[0][0] == pytest.approx((0.1 + 1.5 - math.sqrt(2)) / 2)
    assert oracle.smooth_ap(z, y, 0.25)[0][0] == pytest.approx(1 - 1 / (1 + 1 / (1 + math.exp(2))))


def test_smooth_average_precision_becomes_the_sorted_one():
    # Positives at ranks 1 and 3 of four: (1/1 + 2/3) / 2.
    angles = [0.0, 0.1, 0.2, 0.3, 0.4]
    z = [[math.cos(a), math.sin(a)] for a in angles]
    assert oracle.smooth_ap(z, [0, 0, 1, 0, 1], 1e-5)[0][0] == pytest.approx(1 - (1 + 2 / 3) / 2)
