"""Every loss and option against the paper's sums, written as loops by someone who never saw the package."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from laws.members import Given, second
from mettle.difficulty import Importance, Relative, Threshold
from mettle.errors import InputError
from mettle.losses import (
    Circle,
    Contrastive,
    DASupCon,
    InfoNCE,
    LiftedStructure,
    Margin,
    MultiSimilarity,
    NPair,
    SelfTriplet,
    SmoothAP,
    SupCon,
    Triplet,
)
from oracles import losses as oracle
from oracles.classes import numeric_gradient

PATTERNS = {
    "mixed": [3, 3, 2, 4, 1, 1],
    "pairs": [2, 2, 2, 2],
    "one class": [6],
    "all alone but two": [1, 1, 1, 2, 1],
    "two big": [6, 5],
}


@pytest.fixture(params=PATTERNS, ids=lambda name: name.replace(" ", "-"))
def data(request):
    rng = np.random.default_rng(len(request.param))
    y = rng.permutation(np.repeat(np.arange(len(PATTERNS[request.param])), PATTERNS[request.param]))
    return rng.normal(size=(len(y), 5)), y


def check(loss, z, y, wanted, **options):
    values = np.array([np.nan if v is None else v for v in wanted[0]])
    for engine, tile in (("dense", 1), ("tiled", 3)):
        output = loss.output(torch.tensor(z), torch.tensor(y), engine=engine, tile=tile, **options)
        np.testing.assert_allclose(output.per_anchor().detach().numpy(), values, rtol=1e-9, atol=1e-9)
        if wanted[1] is not None:
            np.testing.assert_allclose(float(output.mean().detach()), wanted[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["out", "in"])
@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01])
def test_supcon(data, form, temperature):
    z, y = data
    check(SupCon(temperature, form=form), z, y, oracle.supcon(z, y, temperature, form))


@pytest.mark.parametrize("form", ["out", "in"])
def test_supcon_with_law_weights(data, form):
    z, y = data
    w = np.random.default_rng(1).choice([0.0, 0.5, 1.0, 2.0], (len(y), len(y)))
    check(SupCon(0.3, form=form, difficulty=Given(torch.tensor(w))), z, y, oracle.supcon(z, y, 0.3, form, w=w))


@pytest.mark.parametrize("neg_weight", ["none", "denominator", "penalty"])
@pytest.mark.parametrize("normalise", ["count", "weight", "sum"])
@pytest.mark.parametrize("form", ["hinge", "literal"])
def test_difficulty_aware_supcon(data, neg_weight, normalise, form):
    z, y = data
    hard = Threshold(1.5, 3.0, 0.6, 0.2, form=form)
    wanted = oracle.da_supcon(z, y, 0.2, 1.5, 3.0, 0.6, 0.2, form, form, neg_weight, normalise, floor=True)
    loss = SupCon(0.2, difficulty=hard, normalise=normalise, neg_weight=neg_weight)
    check(loss, z, y, wanted)


def test_difficulty_aware_supcon_presets(data):
    z, y = data
    check(DASupCon(0.2), z, y, oracle.da_supcon(z, y, 0.2))
    check(DASupCon(0.2, preset="literal"), z, y, oracle.da_supcon(z, y, 0.2, preset="literal"))


@pytest.mark.parametrize("prior", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("temperature", [0.5, 0.05])
def test_infonce_and_debiased(data, prior, temperature):
    z, y = data
    check(InfoNCE(temperature, prior), z, y, oracle.info_nce(z, y, temperature, prior))


@pytest.mark.parametrize("count", ["plain", "weight"])
def test_infonce_with_weights(data, count):
    z, y = data
    w = np.random.default_rng(1).choice([0.0, 0.5, 1.0, 2.0], (len(y), len(y)))
    loss = InfoNCE(0.4, 0.1, Given(torch.tensor(w)), count)
    check(loss, z, y, oracle.info_nce(z, y, 0.4, 0.1, w=w, count=count))


@pytest.mark.parametrize("beta", [0.0, 1.0, 6.0])
def test_hard_negative_contrastive(data, beta):
    z, y = data
    w = oracle.importance_weights(z, y, 0.5, beta)
    check(InfoNCE(0.5, 0.1, Importance(beta)), z, y, oracle.info_nce(z, y, 0.5, 0.1, w=w, count="plain"))


@pytest.mark.parametrize("form", ["similarity", "raw", "distance"])
def test_difficulty_based_debiased_contrastive(data, form):
    z, y = data
    other = second(torch.tensor(z))
    w = oracle.relative_weights(z, other.numpy(), y, 0.5, form)
    wanted = oracle.info_nce(z, y, 0.5, 0.1, w=w, count="plain")
    check(InfoNCE(0.5, 0.1, Relative(form)), z, y, wanted, biased=other)


def test_infonce_against_a_reference_set(data):
    z, y = data
    rng = np.random.default_rng(8)
    zr, yr = rng.normal(size=(9, 5)), rng.integers(0, 4, 9)
    wanted = oracle.info_nce(z, y, 0.5, 0.1, ref=(zr, yr))
    if any(v is not None for v in wanted[0]):
        check(InfoNCE(0.5, 0.1), z, y, wanted, ref=(torch.tensor(zr), torch.tensor(yr)))


def test_clamp_fraction_is_counted(data):
    z, y = data
    wanted = oracle.clamp_fraction(z, y, 0.1, 0.4)
    found = InfoNCE(0.1, 0.4).statistics(torch.tensor(z), torch.tensor(y)).clamp_fraction
    assert found == pytest.approx(wanted or 0.0)


@pytest.mark.parametrize("prior", [0.0, 0.2])
@pytest.mark.parametrize("form", ["sum_N", "mean", "readme"])
def test_self_triplet(data, form, prior):
    z, y = data
    check(SelfTriplet(prior, form), z, y, oracle.self_triplet(z, y, prior, form))


def test_self_triplet_paired(data):
    z, y = data
    check(SelfTriplet(0.0, "paired"), z, y, oracle.self_triplet(z, y, 0.0, "paired"))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("form", ["squared", "hadsell", "linear"])
@pytest.mark.parametrize("margins", [(0.0, 1.0), (0.4, 1.4)])
def test_contrastive(data, form, normalise, margins):
    z, y = data
    wanted = oracle.contrastive(z, y, *margins, form, normalise=normalise, need_positive=True)
    check(Contrastive(*margins, form, normalise), z, y, wanted[:2])


@pytest.mark.parametrize("mining", ["all", "hardest", "semihard", "semihard-set"])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("average", ["active", "all"])
def test_triplet(data, mining, squared, soft, normalise, average):
    z, y = data
    name = {"semihard": "semihard_tf", "semihard-set": "semihard_set"}.get(mining, mining)
    wanted = oracle.triplet(z, y, 0.3, squared, soft, name, normalise, average=average)
    check(Triplet(0.3, mining, squared, soft, normalise, average), z, y, wanted[:2])


@pytest.mark.parametrize("mining", ["all", "hardest", "semihard"])
def test_triplet_with_weights(data, mining):
    z, y = data
    w = np.random.default_rng(1).choice([0.0, 0.5, 1.0, 2.0], (len(y), len(y)))
    name = {"semihard": "semihard_tf"}.get(mining, mining)
    wanted = oracle.triplet(z, y, 0.3, mining=name, w=w)
    check(Triplet(0.3, mining, difficulty=Given(torch.tensor(w))), z, y, wanted[:2])


@pytest.mark.parametrize("normalise", [True, False])
def test_lifted_structure(data, normalise):
    z, y = data
    per_anchor, _, details = oracle.lifted(z, y, 1.0, normalise)
    check(LiftedStructure(1.0, normalise), z, y, (per_anchor, details["loss"]))


def test_lifted_structure_with_weights(data):
    z, y = data
    w = np.random.default_rng(1).choice([0.0, 1.0, 2.0], (len(y), len(y)))
    per_anchor, _, _ = oracle.lifted(z, y, 1.0, False, w=w)
    check(LiftedStructure(difficulty=Given(torch.tensor(w))), z, y, (per_anchor, None))


@pytest.mark.parametrize("norm_weight", [0.0, 0.1])
def test_n_pair(norm_weight):
    rng = np.random.default_rng(0)
    y = rng.permutation(np.repeat(np.arange(6), 2))
    z = rng.normal(size=(12, 4))
    check(NPair(norm_weight), z, y, oracle.npair(z, y, norm_weight))


def test_supcon_scale_and_divisor_options(data):
    z, y = data
    wanted = oracle.supcon(z, y, 0.2, base_temperature=0.07)
    check(SupCon(0.2, base_temperature=0.07), z, y, wanted)
    wanted = oracle.supcon(z, y, 0.2, mean_all=True)
    output = SupCon(0.2, mean_all=True).output(torch.tensor(z), torch.tensor(y))
    np.testing.assert_allclose(float(output.mean()), wanted[1], rtol=1e-9)


def test_positive_weights_everywhere_follow_the_law(data):
    z, y = data
    hard = Threshold(1.5, 3.0, 0.6, 0.2)
    w = oracle.threshold_weights(z, y, 1.5, 3.0, 0.6, 0.2)
    check(SupCon(0.3, difficulty=hard, pos_weight="everywhere"), z, y, oracle.supcon(z, y, 0.3, w=w))


NAMED = {
    "multi-similarity": (MultiSimilarity(2.0, 50.0, 0.5), oracle.multi_similarity),
    "circle": (Circle(0.25, 30.0), lambda z, y, **o: oracle.circle(z, y, 0.25, 30.0, **o)),
    "margin": (Margin(0.2, 1.25, nu=0.1), lambda z, y, **o: oracle.margin(z, y, 0.2, 1.25, 0.1, **o)),
    "margin raw": (
        Margin(0.5, 3.0, boundary="fixed", normalise=False),
        lambda z, y, **o: oracle.margin(z, y, 0.5, 3.0, normalise=False, **o),
    ),
    "smooth ap": (SmoothAP(0.05), lambda z, y, **o: oracle.smooth_ap(z, y, 0.05, **o)),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_losses_alone_weighed_and_against_a_reference_set(data, name):
    z, y = data
    loss, published = NAMED[name]
    rng = np.random.default_rng(1)
    check(loss, z, y, published(z, y))
    w = rng.choice([0.0, 0.5, 1.0, 2.0], (len(y), len(y)))
    check(replace(loss, difficulty=Given(torch.tensor(w))), z, y, published(z, y, w=w))
    zr, yr = rng.normal(size=(9, 5)), rng.integers(0, 4, 9)
    wanted = published(z, y, ref=(zr, yr))
    if any(v is not None for v in wanted[0]):
        check(loss, z, y, wanted, ref=(torch.tensor(zr), torch.tensor(yr)))


def test_circle_holds_its_weights_constant(data):
    z, y = data
    leaf = torch.tensor(z, requires_grad=True)
    wanted = numeric_gradient(lambda x: oracle.circle(x, y, 0.25, 10.0, frozen=z)[1], z)
    for options in ({"engine": "dense"}, {"engine": "tiled", "tile": 3}):
        (found,) = torch.autograd.grad(Circle(0.25, 10.0)(leaf, torch.tensor(y), **options), leaf)
        np.testing.assert_allclose(found, wanted, atol=1e-7)
    live = numeric_gradient(lambda x: oracle.circle(x, y, 0.25, 10.0)[1], z)
    (found,) = torch.autograd.grad(Circle(0.25, 10.0, stop_gradient=False)(leaf, torch.tensor(y)), leaf)
    np.testing.assert_allclose(found, live, atol=1e-7)


@pytest.mark.parametrize("nu", [0.0, 0.3])
def test_every_class_has_its_boundary(data, nu):
    z, y = data
    beta = np.random.default_rng(2).uniform(0.9, 1.5, 6)
    loss = Margin(0.2, 1.2, nu, "class", 6).double()
    with torch.no_grad():
        loss.boundaries.copy_(torch.tensor(beta))
    check(loss, z, y, oracle.margin(z, y, 0.2, beta, nu))

    def mean(beta):
        return oracle.margin(z, y, 0.2, beta, nu)[1]

    for options in ({"engine": "dense"}, {"engine": "tiled", "tile": 3}):
        value = loss(torch.tensor(z), torch.tensor(y), **options)
        (found,) = torch.autograd.grad(value, loss.boundaries)
        np.testing.assert_allclose(found, numeric_gradient(mean, beta), atol=1e-7)


def test_margins_that_all_pairs_keep_are_a_loss_of_zero():
    z = torch.eye(4, dtype=torch.float64)[[0, 0, 1, 1]].requires_grad_()
    value = Margin(0.1, 0.7, boundary="fixed")(z, torch.tensor([0, 0, 1, 1]))
    value.backward()
    assert value == 0 and (z.grad == 0).all()


@pytest.mark.parametrize("label", [-1, 2])
def test_a_boundary_of_no_class_is_refused(label):
    with pytest.raises(InputError, match=f"label {label} is out of range: 2 classes are numbered 0 to 1"):
        Margin(boundary="class", num_classes=2)(torch.randn(3, 4), torch.tensor([0, 0, label]))
    with pytest.raises(InputError, match="needs num_classes"):
        Margin(boundary="class")
