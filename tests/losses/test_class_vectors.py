"""Class-vector losses against loops that share no code, gradients, edges, sampling, state."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from covering import cover_axes
from laws.memory import Largest
from mettle.difficulty import AdaptiveThreshold, Hardest, Importance, Threshold, curriculum
from mettle.difficulty.settings import view_with
from mettle.errors import InputError
from mettle.losses import (
    AdaCos,
    AdaFace,
    ArcFace,
    Center,
    CosFace,
    CurricularFace,
    MagFace,
    NormFace,
    ProxyAnchor,
    ProxyNCA,
    Softmax,
    SoftTriple,
    SphereFace,
    SubCenterArcFace,
)
from mettle.pairs.class_softmax import ClassSimilarity, class_reductions, general_class_reductions
from oracles import classes as oracle
from processes import Forked

N, C, D = 7, 5, 4
MODES = ("keep", "none", "easy", "smooth", "detach")

QUALITY = 2.0, 1.5, 0.9  # mean, deviation and concentration of AdaFace


def curricular():
    loss = CurricularFace(C, D, 16.0, 0.5, momentum=1.0)  # t stays where it is
    loss.t.fill_(0.3)
    return loss


def adaptive():
    mean, deviation, concentration = QUALITY
    loss = AdaFace(C, D, 16.0, 0.4, concentration, momentum=1.0)
    loss.mean.fill_(mean), loss.deviation.fill_(deviation)
    return loss


# name: (how it is built, the published sums)
MEMBERS = {
    "proxy-nca": (lambda: ProxyNCA(C, D, 3.0), lambda z, y, W: oracle.proxy_nca(z, y, W, 3.0)),
    "proxy-nca first": (
        lambda: ProxyNCA(C, D, 1.0, include_own=False),
        lambda z, y, W: oracle.proxy_nca(z, y, W, 1.0, include_own=False),
    ),
    "proxy-anchor": (lambda: ProxyAnchor(C, D, 0.1, 8.0), lambda z, y, W: oracle.proxy_anchor(z, y, W, 0.1, 8.0)),
    "subcenter": (
        lambda: SubCenterArcFace(C, D, 16.0, 0.5, vectors_per_class=2),
        lambda z, y, W: oracle.subcenter_arcface(z, y, W, 2, 16.0, 0.5),
    ),
    "soft triple": (
        lambda: SoftTriple(C, D, vectors_per_class=3),
        lambda z, y, W: oracle.soft_triple(z, y, W, 3, 20.0, 0.01, 0.1, 0.2),
    ),
    "curricularface": (curricular, lambda z, y, W: oracle.curricularface(z, y, W, 16.0, 0.5, 0.3)),
    "adaface": (
        adaptive,
        lambda z, y, W: oracle.adaface(z, y, W, 16.0, 0.4, oracle.adaface_quality(z, *QUALITY)),
    ),
    "magface": (
        lambda: MagFace(C, D, 16.0, 0.3, 0.8, 1.0, 6.0, 2.0),
        lambda z, y, W: oracle.magface(z, y, W, 16.0, 0.3, 0.8, 1.0, 6.0, 2.0),
    ),
    "softmax": (lambda: Softmax(C, D), lambda z, y, W: oracle.softmax(z, y, W, b=np.zeros(len(W)))),
    "softmax no bias": (lambda: Softmax(C, D, bias=False), oracle.softmax),
    "modified": (
        lambda: Softmax(C, D, unit_weights=True, bias=False),
        lambda z, y, W: oracle.softmax(z, y, W, unit_weights=True),
    ),
    "modified with bias": (
        lambda: Softmax(C, D, unit_weights=True),
        lambda z, y, W: oracle.softmax(z, y, W, unit_weights=True),
    ),
    "normface": (lambda: NormFace(C, D, 12.0), lambda z, y, W: oracle.normface(z, y, W, 12.0)),
    "cosface": (lambda: CosFace(C, D, 16.0, 0.3), lambda z, y, W: oracle.cosface(z, y, W, 16.0, 0.3)),
    "cosface 64": (lambda: CosFace(C, D), lambda z, y, W: oracle.cosface(z, y, W, 64.0, 0.35)),
    **{
        f"arcface {mode}": (
            lambda mode=mode: ArcFace(C, D, 16.0, 0.5, mode),
            lambda z, y, W, mode=mode: oracle.arcface(z, y, W, 16.0, 0.5, mode),
        )
        for mode in MODES
    },
    "combined": (
        lambda: ArcFace(C, D, 16.0, 0.3, "none", multiply=1.35, subtract=0.1),
        lambda z, y, W: oracle.combined(z, y, W, 16.0, 1.35, 0.3, 0.1),
    ),
    **{
        f"sphereface {m}": (
            lambda m=m: SphereFace(C, D, m, start=5.0, floor=0.5),
            lambda z, y, W, m=m: oracle.sphereface(z, y, W, m, 5.0),
        )
        for m in (1, 2, 3, 4)
    },
    "adacos fixed": (
        lambda: AdaCos(C, D, dynamic=False),
        lambda z, y, W: oracle.normface(z, y, W, oracle.adacos_fixed_scale(C)),
    ),
    "center": (
        lambda: Center(C, D, 0.1, base=NormFace(C, D, 8.0)),
        lambda z, y, W: oracle.center(z, y, np.zeros((C, D)), 0.1, oracle.normface(z, y, W, 8.0)),
    ),
}


@pytest.fixture(params=range(4))
def data(request):
    rng = np.random.default_rng(request.param)
    return rng.normal(size=(N, D)) * rng.uniform(0.5, 3), rng.integers(0, C, N), rng.normal(size=(C, D))


def made(name, W):
    loss = MEMBERS[name][0]().double()
    with torch.no_grad():
        loss.weight.copy_(torch.as_tensor(vectors_for(name, W)))
    return loss


def vectors_for(name, W):
    """As many rows as the member has vectors: those of a class near each other."""
    K = len(MEMBERS[name][0]().weight) // len(W)
    return W if K == 1 else np.repeat(np.asarray(W), K, 0) + 0.5 * np.random.default_rng(K).normal(size=(K * C, D))


@pytest.mark.parametrize("name", MEMBERS)
def test_values_and_gradients_are_those_of_the_published_sums(name, data):
    z, y, W = data
    W = vectors_for(name, W)
    loss, wanted = made(name, W), MEMBERS[name][1]
    leaf = torch.tensor(z, requires_grad=True)
    np.testing.assert_allclose(loss.per_anchor(leaf, torch.tensor(y)).detach(), wanted(z, y, W), rtol=1e-9, atol=1e-9)
    loss(leaf, torch.tensor(y)).backward()
    if name == "arcface detach":
        shift = oracle.arcface_shift(z, y, W, 0.5)
        wanted = lambda z, y, W: oracle.arcface_detached(z, y, W, 16.0, shift)  # noqa: E731
    if name == "adaface":
        quality = oracle.adaface_quality(z, *QUALITY)
        wanted = lambda z, y, W: oracle.adaface(z, y, W, 16.0, 0.4, quality)  # noqa: E731
    for x, found, at in ((z, leaf.grad, 0), (W, loss.weight.grad, 2)):
        numeric = oracle.numeric_gradient(
            lambda x, at=at: wanted(*(x if k == at else v for k, v in enumerate((z, y, W)))).mean(), x
        )
        np.testing.assert_allclose(found, numeric, atol=1e-7, rtol=1e-6)


# name: (how it is built with a label smoothing, the logits with margin)
SMOOTHED = {
    "softmax": (lambda **o: Softmax(C, D, **o), lambda z, y, W: oracle.softmax_logits(z, W, np.zeros(len(W)))),
    "modified": (
        lambda **o: Softmax(C, D, unit_weights=True, bias=False, **o),
        lambda z, y, W: oracle.softmax_logits(z, W, unit_weights=True),
    ),
    "normface": (lambda **o: NormFace(C, D, 12.0, **o), lambda z, y, W: oracle.cosface_logits(z, y, W, 12.0, 0.0)),
    "cosface": (lambda **o: CosFace(C, D, 16.0, 0.3, **o), lambda z, y, W: oracle.cosface_logits(z, y, W, 16.0, 0.3)),
    "arcface": (lambda **o: ArcFace(C, D, 16.0, 0.5, **o), lambda z, y, W: oracle.arcface_logits(z, y, W, 16.0, 0.5)),
    "sphereface": (
        lambda **o: SphereFace(C, D, 2, start=5.0, floor=0.5, **o),
        lambda z, y, W: oracle.sphereface_logits(z, y, W, 2, 5.0),
    ),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", SMOOTHED)
def test_label_smoothing_spreads_a_share_of_the_target_over_all_classes(name, chunked, data, monkeypatch):
    if chunked:
        monkeypatch.setattr("mettle.pairs.class_softmax.CHUNK", 1)
    z, y, W = data
    make, logits = SMOOTHED[name]
    loss = made_with(make(label_smoothing=0.1), W)
    leaf = torch.tensor(z, requires_grad=True)

    def wanted(z, W):
        return oracle.smoothed_cross_entropy(logits(z, y, W), y, 0.1)

    np.testing.assert_allclose(loss.per_anchor(leaf, torch.tensor(y)).detach(), wanted(z, W), rtol=1e-9, atol=1e-9)
    loss(leaf, torch.tensor(y)).backward()
    np.testing.assert_allclose(leaf.grad, oracle.numeric_gradient(lambda x: wanted(x, W).mean(), z), atol=1e-7)
    slope = oracle.numeric_gradient(lambda x: wanted(z, x).mean(), W)
    np.testing.assert_allclose(loss.weight.grad, slope, atol=1e-7)
    assert torch.autograd.gradcheck(lambda z: loss.eval()(z, torch.tensor(y)), leaf.detach().requires_grad_())


def made_with(loss, W):
    with torch.no_grad():
        loss.double().weight.copy_(torch.as_tensor(W))
    return loss


def test_label_smoothing_is_that_of_torch_and_takes_the_drawn_classes():
    torch.manual_seed(0)
    z, y = torch.randn(N, D, dtype=torch.float64), torch.randint(0, C, (N,))
    for share in (0.0, 0.2, 0.9):
        loss = NormFace(C, D, 9.0, label_smoothing=share).double()
        wanted = torch.nn.functional.cross_entropy(loss.logits(z), y, label_smoothing=share)
        torch.testing.assert_close(loss(z, y), wanted)
    many = NormFace(40, D, 9.0, sample=0.5, label_smoothing=0.2).double()
    drawn = many.sample_classes(y)
    wanted = torch.nn.functional.cross_entropy(
        many.logits(z)[:, drawn], torch.searchsorted(drawn, y), label_smoothing=0.2
    )
    torch.testing.assert_close(many(z, y), wanted)


def test_label_smoothing_holds_nothing_quadratic_and_survives_a_zero_vector():
    b, c, d = 256, 40_000, 8
    torch.manual_seed(0)
    loss, z, y = ArcFace(c, d, label_smoothing=0.1), torch.randn(b, d, requires_grad=True), torch.randint(0, c, (b,))
    with torch.no_grad():
        loss.weight[3] = 0
    with Largest() as seen:
        loss(z, y).backward()
    assert seen.size < b * c / 4
    assert torch.isfinite(loss.weight.grad).all() and torch.isfinite(z.grad).all()


WEIGHED = {"plain": None, "threshold": Threshold(), "hardest": Hardest()}


@pytest.mark.parametrize(
    ("name", "weighed"), cover_axes([n for n in MEMBERS if n not in ("arcface detach", "adaface")], list(WEIGHED))
)
def test_gradcheck(name, weighed):
    difficulty = WEIGHED[weighed]
    if name == "center":
        return  # a base loss that is checked itself, and a square
    torch.manual_seed(3)
    if isinstance(difficulty, Threshold):  # detached weights are constants: compare with them frozen
        difficulty = Threshold(detach=False)
    loss = view_with(MEMBERS[name][0]().double().eval(), difficulty=difficulty)
    z, y = torch.randn(N, D, dtype=torch.float64, requires_grad=True), torch.randint(0, C, (N,))

    def value(z, W):
        return torch.func.functional_call(loss, {"weight": W}, (z, y))

    assert torch.autograd.gradcheck(value, (z, loss.weight))


@pytest.mark.parametrize("difficulty", [None, Threshold(alpha=0, beta=0)], ids=["fast", "engine"])
@pytest.mark.parametrize("chunk", [1, 2, 3, C])
def test_chunks_are_irrelevant_and_the_general_engine_agrees(difficulty, chunk):
    torch.manual_seed(0)
    z, y = torch.randn(N, D, dtype=torch.float64, requires_grad=True), torch.randint(0, C, (N,))
    W = torch.randn(C, D, dtype=torch.float64, requires_grad=True)
    if difficulty is None:
        got = class_reductions(torch.nn.functional.normalize(z), W, y, 30.0, chunk=chunk)
    else:
        loss = CosFace(C, D, 30.0, difficulty=difficulty).double()
        got = [loss._class_values(z, W, y)[k] for k in ("target", "others_lse")]
    cosine = torch.nn.functional.normalize(z) @ torch.nn.functional.normalize(W).T
    own = torch.nn.functional.one_hot(y, C).bool()
    wanted = cosine[own], (30 * cosine).masked_fill(own, -torch.inf).logsumexp(1)
    mix = torch.randn(2, N, dtype=torch.float64)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((torch.stack(tuple(got)) * mix).sum(), [z, W]),
        torch.autograd.grad((torch.stack(wanted) * mix).sum(), [z, W]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, C])
@pytest.mark.parametrize("K", [1, 2])
def test_chunks_of_several_vectors_are_irrelevant(K, chunk):
    torch.manual_seed(0)
    z, y = torch.randn(N, D, dtype=torch.float64, requires_grad=True), torch.randint(0, C, (N,))
    W = torch.randn(C * K, D, dtype=torch.float64, requires_grad=True)
    shape = ClassSimilarity(K, lambda s: s.amax(-1), unit_vectors=True)
    modulate = curricular().modulate

    def slopes(chunk):
        found = general_class_reductions(z, W, y, 9.0, similarity=shape, modulate=modulate, chunk=chunk)
        return *found, *torch.autograd.grad(found[0].sin().sum() + found[1].cos().sum(), (z, W))

    for a, b in zip(slopes(chunk), slopes(None), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_one_vector_by_the_general_way_is_one_vector(data):
    z, y, W = (torch.tensor(x) for x in data)
    shape = ClassSimilarity(1, lambda s: s.amax(-1), unit_vectors=True)
    wanted = class_reductions(z, W, y, 9.0, unit_features=True)
    for a, b in zip(general_class_reductions(z, W, y, 9.0, similarity=shape, unit_features=True), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [n for n in MEMBERS if n != "center"])
def test_weights_of_one_change_nothing(name, data):
    """By the engine that knows every difficulty, whatever pools vectors or changes similarities."""
    z, y, W = data
    plain = made(name, W).eval()
    weighed = view_with(plain, difficulty=Threshold(alpha=0.0, beta=0.0))
    leaf, labels = torch.tensor(z, requires_grad=True), torch.tensor(y)
    for a, b in zip(*([loss(leaf, labels), *torch.autograd.grad(loss(leaf, labels), (leaf, plain.weight))]
                      for loss in (weighed, plain)), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["subcenter", "soft triple", "curricularface", "proxy-nca"])
def test_a_wrong_class_of_weight_zero_is_absent_whatever_it_is_made_of(name, data):
    z, y, W = data
    W, y = vectors_for(name, W), y % (C - 1)  # the last class has no samples
    K = len(W) // C

    class WithoutLast:
        detach = True

        def row_statistics(self, tile):
            return {}

        def weights(self, tile, rows):
            return (tile.reference_index < C - 1).to(tile.similarity.dtype).expand_as(tile.similarity)

    weighed = view_with(made(name, W), difficulty=WithoutLast())
    assert weighed.statistics(torch.tensor(z), torch.tensor(y))["kept_negatives"] < 1
    fewer = MEMBERS[name][1](z, y, W[:-K])
    if name == "soft triple":  # its regulariser is of all classes
        fewer += MEMBERS[name][1](z, y, W) - oracle.soft_triple(z, y, W, 3, 20.0, 0.01, 0.1, 0.0)
        fewer -= MEMBERS[name][1](z, y, W[:-K]) - oracle.soft_triple(z, y, W[:-K], 3, 20.0, 0.01, 0.1, 0.0)
    np.testing.assert_allclose(weighed.per_anchor(torch.tensor(z), torch.tensor(y)).detach(), fewer, rtol=1e-9)


def test_proxy_anchor_weighs_samples_at_each_class_vector(data):
    z, y, W = data
    w = np.random.default_rng(1).choice([0.0, 0.5, 1.0, 2.0], (C, N))

    class Table:
        detach = True

        def row_statistics(self, tile):
            return {}

        def weights(self, tile, rows):
            return torch.tensor(w)[tile.anchor_index, tile.reference_index]

    loss = view_with(made("proxy-anchor", W), difficulty=Table())
    found = loss.per_anchor(torch.tensor(z), torch.tensor(y))
    np.testing.assert_allclose(found.detach(), oracle.proxy_anchor(z, y, W, 0.1, 8.0, w), rtol=1e-9)
    assert loss.statistics(torch.tensor(z), torch.tensor(y))["anchors"] == C


@pytest.mark.parametrize("K", [1, 3])
def test_every_class_vector_loss_takes_several_vectors(K):
    torch.manual_seed(0)
    y = torch.arange(60) % C
    z = torch.randn(C, D)[y] * 3 + 0.1 * torch.randn(60, D)
    for make in (Softmax, NormFace, CosFace, ArcFace, AdaCos, SphereFace, CurricularFace, AdaFace, MagFace, ProxyNCA):
        loss = make(C, D, vectors_per_class=K).start_from(z, y)
        assert loss.weight.shape == (C * K, D) and loss.num_classes == C
        assert loss.vectors().shape == ((C, D) if K == 1 else (C, K, D))
        assert torch.equal(loss.predict(z, chunk=2), loss.logits(z).argmax(1)) and loss.logits(z).shape == (60, C)
        assert (loss.predict(z) == y).float().mean() > 0.7
        loss(z.requires_grad_(), y).backward()
        assert torch.isfinite(loss.weight.grad).all() and loss.weight.grad.abs().sum() > 0
    sampled = CosFace(50, D, vectors_per_class=K, sample=0.2, sparse=True)
    sampled(z, y).backward()
    assert sampled.weight.grad.coalesce().values().shape == (10 * K, D)


def test_vectors_of_one_class_start_apart():
    torch.manual_seed(0)
    loss = SubCenterArcFace(C, D).start_from(torch.randn(40, D), torch.arange(40) % C)
    own = loss.vectors()
    assert (torch.cdist(own, own) + torch.eye(3)).min() > 1e-3


def test_samples_far_from_the_dominant_vector_are_outliers(data):
    z, y, W = data
    loss = made("subcenter", W)
    for degrees in (30.0, 60.0, 90.0):
        wanted = oracle.outliers(z, y, loss.weight.detach().numpy(), 2, degrees)
        assert loss.find_outliers(torch.tensor(z), torch.tensor(y), degrees).tolist() == wanted.tolist()


def test_running_numbers_follow_the_published_rules_and_only_in_training(data):
    z, y, W = data
    leaf, labels = torch.tensor(z, requires_grad=True), torch.tensor(y)
    curricular, adaptive = CurricularFace(C, D, 16.0, momentum=0.9).double(), AdaFace(C, D, 16.0, momentum=0.9).double()
    t, state = 0.0, (20.0, 100.0)
    with torch.no_grad():
        curricular.weight.copy_(torch.tensor(W)), adaptive.weight.copy_(torch.tensor(W))
    for _ in range(3):
        t, state = oracle.curricularface_t(z, y, W, t, 0.9), oracle.adaface_state(z, *state, 0.9)
        value = oracle.curricularface(z, y, W, 16.0, 0.5, t).mean()
        assert float(curricular(leaf, labels).detach()) == pytest.approx(value, rel=1e-9)
        value = oracle.adaface(z, y, W, 16.0, 0.4, oracle.adaface_quality(z, *state, 0.333)).mean()
        assert float(adaptive(leaf, labels).detach()) == pytest.approx(value, rel=1e-9)
    for loss in (curricular, adaptive):
        loss.eval()(leaf, labels)
        with torch.no_grad():
            loss.train()(leaf, labels)
    assert float(curricular.t) == pytest.approx(t, rel=1e-12)
    assert (float(adaptive.mean), float(adaptive.deviation)) == pytest.approx(state, rel=1e-12)


def test_margins_by_length_meet_the_fixed_ones_at_their_ends(data):
    """Poor, middling and good quality are ArcFace, CosFace and cos(θ − m) − 2m; a flat MagFace is ArcFace."""
    z, y, W = data
    leaf, labels = torch.tensor(z), torch.tensor(y)
    loss = AdaFace(C, D, 16.0, 0.4).double().eval()
    arc, cos = ArcFace(C, D, 16.0, 0.4, "detach").double(), CosFace(C, D, 16.0, 0.4).double()
    flat = MagFace(C, D, 16.0, 0.4, 0.4, weight_g=0.0).double()
    keep = ArcFace(C, D, 16.0, 0.4).double()
    for one in (loss, arc, cos, flat, keep):
        with torch.no_grad():
            one.weight.copy_(torch.tensor(W))
    torch.testing.assert_close(flat.per_anchor(leaf, labels), keep.per_anchor(leaf, labels))
    loss.deviation.fill_(1e-9)
    loss.mean.fill_(1e6)
    far = oracle_cosine(z, y, W) > -math.cos(0.4)  # beyond, the angle stays at π
    assert far.any()
    torch.testing.assert_close(loss.per_anchor(leaf, labels)[far], arc.per_anchor(leaf, labels)[far])
    loss.deviation.fill_(1e30)
    torch.testing.assert_close(loss.per_anchor(leaf, labels), cos.per_anchor(leaf, labels))


def oracle_cosine(z, y, W):
    return torch.tensor([oracle.cosines(z, W)[i][label] for i, label in enumerate(y)])


def test_row_15_no_margin_is_normalised_softmax(data):
    z, y, W = (torch.tensor(x) for x in data)
    base = made("normface", W)
    for loss in (CosFace(C, D, 12.0, 0.0), *(ArcFace(C, D, 12.0, 0.0, mode) for mode in MODES)):
        loss.double().load_state_dict(base.state_dict())
        torch.testing.assert_close(loss.per_anchor(z, y), base.per_anchor(z, y))
    modified, sphere = made("modified", W), made("sphereface 1", W)
    torch.testing.assert_close(sphere.per_anchor(z, y), modified.per_anchor(z, y))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7])
def test_row_16_psi_falls_without_a_jump(m):
    cosine = torch.linspace(0, math.pi, 5001, dtype=torch.float64).cos()
    psi = SphereFace(3, 2, m).psi(cosine)
    assert (psi.diff() < 0).all()
    assert psi.diff().abs().max() < m * math.pi / 5000 * 1.01
    torch.testing.assert_close(psi[[0, -1]], torch.tensor([1.0, 1.0 - 2 * m], dtype=torch.float64))


def test_row_17_slope_of_arcface():
    theta = torch.linspace(0.05, 2.5, 50, dtype=torch.float64)
    for mode, wanted in (("none", torch.sin(theta + 0.5) / torch.sin(theta)), ("detach", torch.ones_like(theta))):
        cosine = theta.cos().requires_grad_()
        slope = torch.autograd.grad(ArcFace(3, 2, mode=mode).target(cosine).sum(), cosine)[0]
        torch.testing.assert_close(slope, wanted)


def test_row_18_adacos_scale():
    loss = AdaCos(9, 16).double()
    fixed = math.sqrt(2) * math.log(8)
    assert float(loss.scale) == pytest.approx(fixed)
    with torch.no_grad():
        loss.weight.copy_(torch.eye(9, 16))
    z = torch.eye(16, dtype=torch.float64)[9:]  # at right angles to every class vector
    loss(z.requires_grad_(), torch.arange(7))
    assert float(loss.scale) == pytest.approx(fixed, rel=1e-9)


def test_adacos_follows_the_published_rule_and_only_in_training(data):
    z, y, W = data
    loss = AdaCos(C, D).double()
    with torch.no_grad():
        loss.weight.copy_(torch.as_tensor(W))
    leaf, labels = torch.tensor(z, requires_grad=True), torch.tensor(y)
    scale = oracle.adacos_fixed_scale(C)
    for _ in range(3):
        values, scale = oracle.adacos_step(z, y, W, scale)
        assert float(loss(leaf, labels).detach()) == pytest.approx(values.mean(), rel=1e-9)
        assert float(loss.scale) == pytest.approx(scale, rel=1e-9)
    loss.eval()
    loss(leaf, labels)
    loss.train()
    with torch.no_grad():
        loss(leaf, labels)
    assert float(loss.scale) == pytest.approx(scale, rel=1e-9)


def test_row_19_center_moves_by_the_published_rule(data):
    z, y, W = data
    for rate in (0.0, 0.5, 1.0):
        loss = Center(C, D, 0.1, rate).double()
        with torch.no_grad():
            loss.centres.copy_(torch.tensor(W))
        loss(torch.tensor(z, requires_grad=True), torch.tensor(y))
        np.testing.assert_allclose(loss.centres, oracle.center_update(W, z, y, rate), rtol=1e-12)
        loss.eval()
        before = loss.centres.clone()
        loss(torch.tensor(z, requires_grad=True), torch.tensor(y))
        assert torch.equal(before, loss.centres)


def test_row_20_sampled_classes():
    torch.manual_seed(1)
    z, y = torch.randn(6, D, dtype=torch.float64), torch.tensor([0, 3, 3, 17, 40, 0])
    for share in (0.02, 0.2, 0.5):
        loss = CosFace(50, D, 16.0, 0.3, sample=share).double()
        sampled = loss.sample_classes(y)
        assert oracle.partial_fc_follows_rule(sampled.tolist(), y.tolist(), 50, share)
        leaf = z.clone().requires_grad_()
        value = loss(leaf, y)
        wanted = oracle.partial_fc(
            z.numpy(), y.tolist(), loss.weight.detach().numpy(), sampled.tolist(),
            lambda z, y, W: oracle.cosface(z, y, W, 16.0, 0.3),
        )  # fmt: skip
        assert float(value.detach()) == pytest.approx(wanted.mean(), rel=1e-12)
        value.backward()
        left_out = torch.ones(50, dtype=torch.bool).index_fill(0, sampled, False)
        assert (loss.weight.grad[left_out] == 0).all() and (loss.weight.grad[sampled].abs().sum(1) > 0).all()
    whole, full = CosFace(50, D, 16.0, 0.3, sample=1.0).double(), CosFace(50, D, 16.0, 0.3).double()
    whole.load_state_dict(full.state_dict())
    assert torch.equal(whole.per_anchor(z, y), full.per_anchor(z, y))


def test_sampled_classes_differ_from_step_to_step_and_are_resumed():
    torch.manual_seed(1)
    z, y = torch.randn(6, D, requires_grad=True), torch.arange(6)
    loss = CosFace(100, D, sample=0.2)
    drawn = []
    for _ in range(3):
        drawn.append(loss.sample_classes(y))
        loss(z, y)
    assert not torch.equal(drawn[0], drawn[1])
    again = CosFace(100, D, sample=0.2)
    loss_state = {k: v.clone() for k, v in loss.state_dict().items()}
    again.load_state_dict(loss_state)
    assert torch.equal(again(z, y), loss(z, y))
    loss.eval()  # all classes when it is not training
    full = CosFace(100, D)
    full.load_state_dict(loss.state_dict())
    assert torch.equal(loss(z, y), full(z, y))


def test_sparse_gradients_hold_the_same_numbers():
    torch.manual_seed(1)
    z, y = torch.randn(6, D, requires_grad=True), torch.arange(6)
    plain, sparse = CosFace(100, D, sample=0.2), CosFace(100, D, sample=0.2, sparse=True)
    sparse.load_state_dict(plain.state_dict())
    plain(z, y).backward()
    sparse(z, y).backward()
    assert sparse.weight.grad.is_sparse and sparse.weight.grad.coalesce().indices().shape[1] == 20
    torch.testing.assert_close(sparse.weight.grad.to_dense(), plain.weight.grad)
    torch.optim.SparseAdam([sparse.weight]).step()


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_at_cosines_of_exactly_one_and_minus_one(name, dtype):
    loss = MEMBERS[name][0]().to(dtype)
    with torch.no_grad():
        loss.weight.copy_(torch.eye(C, D).repeat_interleave(len(loss.weight) // C, 0))
    z = torch.eye(D, dtype=dtype)
    z = torch.cat([z, -z]).requires_grad_()
    labels = torch.arange(4).repeat(2)
    loss(z, labels).backward()
    assert torch.isfinite(z.grad).all() and torch.isfinite(loss.weight.grad).all()


@pytest.mark.parametrize("name", MEMBERS)
def test_half_precision_inputs(name, data):
    z, y, W = data
    loss = made(name, W).float()
    for dtype in (torch.float16, torch.bfloat16):
        half = torch.tensor(z).to(dtype).requires_grad_()
        loss.weight.grad = None
        value = loss(half, torch.tensor(y))
        value.backward()
        exact = made(name, W)
        with torch.no_grad():
            exact.weight.copy_(loss.weight)
        if isinstance(exact, Center):
            exact.centres.zero_(), loss.centres.zero_()
        leaf = half.detach().double().requires_grad_()
        wanted = exact(leaf, torch.tensor(y))
        wanted.backward()
        assert value.dtype == torch.float32
        assert float(value.detach()) == pytest.approx(float(wanted.detach()), rel=1e-3)
        error = (half.grad.double() - leaf.grad).norm() / leaf.grad.norm()
        assert error < (2.5e-3 if dtype == torch.float16 else 1e-2)
        loss = made(name, W).float()


def test_autocast_changes_nothing(data):
    z, y, W = (torch.tensor(x) for x in data)
    loss = made("arcface keep", W).float()
    plain = loss(z.float(), y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(z.float(), y), plain)


def test_float64_in_means_float64_with_float32_class_vectors(data):
    z, y, W = data
    loss = made("cosface 64", W).float()
    exact = oracle.cosface(z, y, W.astype(np.float32).astype(np.float64), 64.0, 0.35)
    values = loss.per_anchor(torch.tensor(z), torch.tensor(y))
    assert values.dtype == torch.float64
    np.testing.assert_allclose(values.detach(), exact, rtol=1e-12, atol=1e-12)


def test_one_class_has_nothing_to_lose_and_two_classes_are_logistic():
    z, y = torch.randn(4, 3, requires_grad=True), torch.zeros(4, dtype=torch.long)
    for loss in (Softmax(1, 3), NormFace(1, 3), CosFace(1, 3), ArcFace(1, 3), SphereFace(1, 3)):
        value = loss(z, y)
        value.backward()
        assert float(value.detach()) == 0 and (z.grad == 0).all()
    loss = NormFace(2, 3, 10.0)
    cosine = loss.logits(z) / 10
    wanted = torch.nn.functional.softplus(10 * (cosine[:, 1] - cosine[:, 0])).mean()
    torch.testing.assert_close(loss(z, y), wanted)
    with pytest.raises(InputError, match="2 classes are too few"):
        AdaCos(2, 3)


@pytest.mark.parametrize(
    ("label", "says"), [(5, "label 5 is out of range: 5 classes are numbered 0 to 4"), (-1, "label -1 is out of range")]
)
@pytest.mark.parametrize("name", MEMBERS)
def test_labels_out_of_range_are_named(name, label, says):
    with pytest.raises(InputError, match=says):
        MEMBERS[name][0]()(torch.randn(2, D), torch.tensor([0, label]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CosFace(0, 3), "num_classes"),
        (lambda: CosFace(3, 0), "dim"),
        (lambda: CosFace(3, 3, scale=0.0), "scale"),
        (lambda: CosFace(3, 3, margin=-0.1), "margin"),
        (lambda: CosFace(3, 3, sample=0.0), "sample"),
        (lambda: CosFace(3, 3, sparse=True), "sparse"),
        (lambda: Softmax(3, 3, sample=0.5, sparse=True), "bias=False"),
        (lambda: CosFace(3, 3, difficulty=AdaptiveThreshold()), "use Threshold"),
        (lambda: ArcFace(3, 3, margin=4.0), "margin is an angle"),
        (lambda: ArcFace(3, 3, mode="hard"), "mode"),
        (lambda: ArcFace(3, 3, multiply=2.0), "use mode 'none'"),
        (lambda: SphereFace(3, 3, margin=1.5), "whole number"),
        (lambda: CosFace(3, 3, vectors_per_class=0), "vectors_per_class"),
        (lambda: CosFace(3, 3, label_smoothing=1.0), r"share of the target in \[0, 1\), got 1.0"),
        (lambda: CosFace(3, 3, label_smoothing=0.1, difficulty=Threshold()), "does not go with a difficulty"),
        (lambda: SubCenterArcFace(3, 3, label_smoothing=0.1), "does not go with several vectors per class"),
        (lambda: CurricularFace(3, 3, label_smoothing=0.1), "changed before their sum .CurricularFace"),
        (lambda: ProxyAnchor(3, 3, label_smoothing=0.1), "does not go with classes as anchors .ProxyAnchor"),
        (lambda: ProxyNCA(3, 3, include_own=False, label_smoothing=0.1), "needs the own class among all classes"),
        (lambda: ProxyAnchor(3, 3, vectors_per_class=2), "one proxy"),
        (lambda: MagFace(3, 3, shortest=5.0, longest=5.0), "shortest < longest"),
        (lambda: MagFace(3, 3, low_margin=0.5, high_margin=0.4), "low_margin"),
        (lambda: SubCenterArcFace(3, 3).find_outliers(torch.randn(2, 3), torch.tensor([0, 1]), 0.0), "degrees"),
        (lambda: Center(3, 3, rate=2.0), "rate"),
        (lambda: Center(3, 3, base=CosFace(4, 3)), "base has"),
        (lambda: CosFace(3, 3)(torch.randn(2, 4), torch.tensor([0, 1])), "4 wide, the class vectors 3"),
        (lambda: CosFace(3, 3)(torch.randn(2, 3), torch.tensor([0])), "one entry per embedding"),
        (lambda: CosFace(3, 3)(torch.randn(0, 3), torch.zeros(0, dtype=torch.long)), "empty"),
        (lambda: CosFace(3, 3).logits(torch.randn(3)), "floating point tensor"),
        (lambda: CosFace(3, 3).predict(torch.full((1, 3), torch.nan)), "NaN"),
    ],
)
def test_mistakes_are_named(make, says):
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("where", ["embedding", "vector"])
def test_a_broken_number_never_gives_a_loss(name, where):
    torch.manual_seed(0)
    loss, z = MEMBERS[name][0](), torch.randn(4, D)
    with torch.no_grad():
        (z if where == "embedding" else loss.weight)[0, 0] = torch.nan
    before = {k: v.clone() for k, v in loss.named_buffers()}
    value = loss(z.requires_grad_(), torch.arange(4))
    assert torch.isnan(value)
    for key in ("scale", "centres", "t", "mean", "deviation"):
        if key in before and where == "embedding":
            assert torch.equal(dict(loss.named_buffers())[key], before[key])


@pytest.mark.parametrize("name", [*MEMBERS, "adacos"])
def test_every_buffer_survives_save_and_resume(name):
    torch.manual_seed(0)
    make = (lambda: AdaCos(C, D)) if name == "adacos" else MEMBERS[name][0]
    loss = make()
    z, y = torch.randn(3, 6, D), torch.randint(0, C, (3, 6))
    for k in range(2):
        loss(z[k].requires_grad_(), y[k])
    again = make()
    again.load_state_dict({k: v.clone() for k, v in loss.state_dict().items()})
    assert torch.equal(again(z[2].requires_grad_(), y[2]), loss(z[2].requires_grad_(), y[2]))
    assert all(torch.equal(a, b) for a, b in zip(again.buffers(), loss.buffers(), strict=True))


def test_a_sample_of_weight_two_counts_as_if_listed_twice(data):
    z, y, W = (torch.tensor(x) for x in data)

    class Twice:
        detach = True

        def row_statistics(self, tile):
            return {}

        def weights(self, tile, rows):
            return torch.where(tile.anchor_index == 0, 2.0, 1.0).to(tile.similarity.dtype).expand_as(tile.similarity)

    class OwnTwice(Twice):
        def weights(self, tile, rows):
            w = super().weights(tile, rows)
            return torch.where(tile.positive, w, 1.0) if tile.positive is not False else torch.ones_like(w)

    weighted, plain = made("cosface", W), made("cosface", W)
    weighted = view_with(weighted, difficulty=OwnTwice())
    twice = torch.cat([z, z[:1]]), torch.cat([y, y[:1]])
    torch.testing.assert_close(weighted(z, y), plain(*twice))


def test_weights_of_wrong_classes_are_those_of_the_oracle(data):
    z, y, W = data
    difficulty = Threshold(alpha=0.0, beta=2.0, positive=0.7, negative=0.1)
    loss = made("cosface", W)
    loss = view_with(loss, difficulty=difficulty)
    cosine = oracle.cosines(z, W)
    w = 1 + np.clip((np.array(cosine) - 0.1) * (2.0 / 0.9), 0, None)
    w[np.arange(N), y] = 1
    wanted = oracle.cosface(z, y, W, 16.0, 0.3, w=w)
    np.testing.assert_allclose(loss.per_anchor(torch.tensor(z), torch.tensor(y)).detach(), wanted, rtol=1e-9)
    facts = loss.statistics(torch.tensor(z), torch.tensor(y))
    assert facts["hard_negatives"] > 0 and facts["negative_weight"] > 1


def test_other_difficulties_and_curricula_apply():
    torch.manual_seed(0)
    z, y = torch.randn(6, D, requires_grad=True), torch.arange(6) % C
    hardest = CosFace(C, D, difficulty=Hardest())
    plain = CosFace(C, D)
    plain.load_state_dict(hardest.state_dict())
    cosine = plain.logits(z) / 64
    own = torch.nn.functional.one_hot(y, C).bool()
    worst = cosine.masked_fill(own, -torch.inf).amax(1)
    wanted = torch.nn.functional.softplus(64 * (worst - cosine[own] + 0.35)).mean()
    torch.testing.assert_close(hardest(z, y), wanted)
    assert torch.isfinite(CosFace(C, D, difficulty=Importance(1.0))(z, y))
    ramp = CosFace(C, D, difficulty=curriculum(Threshold()))
    plain.load_state_dict(ramp.state_dict())
    torch.testing.assert_close(ramp(z, y, progress=0.0), plain(z, y))
    full = CosFace(C, D, difficulty=Threshold())
    full.load_state_dict(ramp.state_dict())
    torch.testing.assert_close(ramp(z, y, progress=1.0), full(z, y))
    torch.testing.assert_close(ramp(z, y), full(z, y))
    assert ramp.resolve_difficulty(1.0).weight is ramp.weight


@pytest.mark.parametrize(
    "make",
    [
        lambda c, d: ArcFace(c, d),
        lambda c, d: AdaCos(c, d),
        lambda c, d: SphereFace(c, d),
        lambda c, d: CosFace(c, d, sample=0.5),
        lambda c, d: CosFace(c, d, difficulty=Threshold()),
        lambda c, d: Center(c, d),
        lambda c, d: ProxyAnchor(c, d),
        lambda c, d: SubCenterArcFace(c, d, vectors_per_class=2),
        lambda c, d: CurricularFace(c, d),
    ],
)
def test_no_toy_batch_times_classes_is_never_held(make):
    b, c, d = 512, 40_000, 4
    torch.manual_seed(0)
    loss, z, y = make(c, d), torch.randn(b, d, requires_grad=True), torch.randint(0, c, (b,))
    with Largest() as seen:
        loss(z, y).backward()
        loss.predict(z.detach())
    assert seen.size < b * c / 4


def test_closed_set_classifier_in_one_call():
    torch.manual_seed(0)
    centres = torch.randn(C, D) * 4
    y = torch.arange(C).repeat(20)
    z = centres[y] + 0.1 * torch.randn(len(y), D)
    for loss in (NormFace(C, D), CosFace(C, D), Center(C, D, base=ArcFace(C, D)), Softmax(C, D, True, False)):
        loss.start_from(z, y)
        assert torch.equal(loss.predict(z), loss.logits(z).argmax(1))
        assert (loss.predict(z) == y).float().mean() > 0.95
        torch.testing.assert_close(loss.vectors().norm(dim=1), torch.ones(C))


def test_centered_means_are_directions_from_the_mean_of_all():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(C - 1), 4)  # the last class does not occur
    z = rng.normal(size=(len(y), D)) + 20  # nearly one direction, as of an untrained network
    unit = z / np.linalg.norm(z, axis=1, keepdims=True)
    overall = sum(unit) / len(unit)
    wanted = []
    for k in range(C - 1):
        mean = sum(unit[i] for i in range(len(y)) if y[i] == k) / 4 - overall
        wanted.append(mean / np.linalg.norm(mean))
    loss = ArcFace(C, D).double()
    last = loss.weight[C - 1].clone()
    loss.start_from(torch.tensor(z), torch.tensor(y), centered=True)
    np.testing.assert_allclose(loss.weight[: C - 1].detach(), wanted, atol=1e-12)
    assert torch.equal(loss.weight[C - 1], last)
    plain = ArcFace(C, D).double().start_from(torch.tensor(z), torch.tensor(y)).vectors()[: C - 1]
    assert (plain @ plain.T).min() > 0.99, "means by themselves tell no classes apart"
    center = Center(C, D, base=ArcFace(C, D)).double().start_from(torch.tensor(z), torch.tensor(y), centered=True)
    np.testing.assert_allclose(center.weight[: C - 1].detach(), wanted, atol=1e-12)
    np.testing.assert_allclose(center.centres[1], z[4:8].mean(0), rtol=1e-12)


def test_a_class_at_the_mean_of_all_keeps_its_vector():
    loss = NormFace(3, 2)
    before = loss.weight.detach().clone()
    loss.start_from(torch.eye(2)[[0, 0, 0]], torch.tensor([0, 0, 2]), centered=True)
    assert torch.equal(loss.weight, before)


@pytest.mark.parametrize("make", [NormFace, ArcFace, CosFace, Softmax])
def test_second_derivatives_are_slopes_of_first_ones(make):
    torch.manual_seed(0)
    z, loss = torch.randn(4, D, dtype=torch.float64, requires_grad=True), make(C, D).double()

    def value(z, W):
        return torch.func.functional_call(loss, {"weight": W}, (z, torch.arange(4)))

    assert torch.autograd.gradgradcheck(value, (z, loss.weight), atol=1e-4)


def test_second_derivatives_of_chunks_cost_a_matrix_and_say_so():
    torch.manual_seed(0)
    z, y = torch.randn(N, D, dtype=torch.float64, requires_grad=True), torch.randint(0, C, (N,))
    W = torch.randn(C, D, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match=f"create_graph=True computes the {N} x {C} similarities again"):
        assert torch.autograd.gradgradcheck(lambda z, W: class_reductions(z, W, y, 3.0, chunk=2), (z, W))


def print_scale_of_rank(rank: int, path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    loss = AdaCos(5, 4).double()
    z, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 5
    part = slice(0, 4) if rank == 0 else slice(4, 9)
    for _ in range(3):
        loss(z[part].requires_grad_(), y[part])
    print(repr(float(loss.scale)))
    dist.destroy_process_group()


def test_adacos_scale_is_the_same_on_every_rank(tmp_path):
    ranks = [Forked(print_scale_of_rank, rank, tmp_path / "store") for rank in (0, 1)]
    scales = [float(p.communicate(timeout=240)[0].split()[-1]) for p in ranks]
    torch.manual_seed(0)
    alone = AdaCos(5, 4).double()
    z, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 5
    for _ in range(3):
        alone(z.requires_grad_(), y)
    assert scales[0] == scales[1] == pytest.approx(float(alone.scale), rel=1e-12)
