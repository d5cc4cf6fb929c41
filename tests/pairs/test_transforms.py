"""Losses under torch.func, under create_graph and under torch.compile."""

import pytest
import torch

from covering import mark_slow_except
from mettle.difficulty import AdaptiveThreshold, Hardest, Importance, Threshold, curriculum
from mettle.losses import (
    AdaCos,
    AdaFace,
    ArcFace,
    Center,
    Circle,
    Contrastive,
    CosFace,
    CurricularFace,
    DASupCon,
    InfoNCE,
    LiftedStructure,
    MagFace,
    Margin,
    MultiSimilarity,
    NormFace,
    NPair,
    ProxyAnchor,
    ProxyNCA,
    SelfTriplet,
    Softmax,
    SoftTriple,
    SphereFace,
    SubCenterArcFace,
    SupCon,
    Triplet,
)
from mettle.pairs import class_softmax

# What torch says about itself while it transforms and compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning"),
]

PAIRWISE = {
    "supcon": SupCon(),
    "da-supcon": DASupCon(),
    "penalty": DASupCon(neg_weight="penalty"),
    "author's": DASupCon(preset="author"),
    "learned temperature": SupCon(learn_temperature=True),
    "infonce": InfoNCE(),
    "debiased": InfoNCE(prior=0.1),
    "hard negatives": InfoNCE(prior=0.1, difficulty=Importance(1.0)),
    "hardest": SupCon(difficulty=Hardest()),
    "curriculum": SupCon(difficulty=curriculum(Threshold())),
    "triplet": Triplet(),
    "batch-hard": Triplet(mining="hardest"),
    "semihard": Triplet(mining="semihard"),
    "contrastive": Contrastive(),
    "contrastive raw": Contrastive(normalise=False),
    "n-pair": NPair(),
    "lifted": LiftedStructure(),
    "self triplet": SelfTriplet(),
    "multi-similarity": MultiSimilarity(beta=10.0),
    "circle": Circle(gamma=8.0, stop_gradient=False),
    "margin": Margin(boundary="class", num_classes=300),
    "over pairs": SupCon(reduction="pairs"),
    "over nonzero": Triplet(0.2, "hardest", reduction="nonzero"),
}
CLASSES = {
    kind.__name__: kind
    for kind in (
        Softmax, NormFace, SphereFace, CosFace, ArcFace, AdaCos, Center,
        AdaFace, CurricularFace, MagFace, ProxyAnchor, ProxyNCA, SoftTriple, SubCenterArcFace,
    )
}  # fmt: skip


def make(name, classes):
    torch.manual_seed(0)
    return (CLASSES[name](classes, 4) if name in CLASSES else PAIRWISE[name]).double().eval()


def batch(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.arange(n // 2).repeat(2)


def eager_gradient(loss, z, y):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(loss(z, y), z)[0]


@pytest.mark.parametrize("n", [24, 600])
@pytest.mark.parametrize("name", [*PAIRWISE, *CLASSES])
def test_torch_func_at_any_size(name, n):
    z, y = batch(n)
    loss = make(name, n // 2)
    expected = eager_gradient(loss, z, y)
    direction = torch.randn_like(z)
    torch.testing.assert_close(torch.func.grad(lambda z: loss(z, y))(z), expected, rtol=1e-8, atol=1e-12)
    value, derivative = torch.func.jvp(lambda z: loss(z, y), (z,), (direction,))
    torch.testing.assert_close(value, loss(z, y), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(derivative, (expected * direction).sum(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", [*PAIRWISE, *CLASSES])
def test_vmap_over_independent_batches(name):
    loss = make(name, 8)
    z, y = zip(*(batch(16, seed) for seed in range(3)), strict=True)
    y = [one[torch.randperm(16, generator=torch.Generator().manual_seed(k))] for k, one in enumerate(y)]
    found = torch.vmap(loss)(torch.stack(z), torch.stack(y))
    torch.testing.assert_close(found, torch.stack([loss(a, b) for a, b in zip(z, y, strict=True)]))


@pytest.mark.parametrize("name", PAIRWISE)
def test_hessian(name):
    loss, (z, y) = make(name, 5), batch(10)
    found = torch.func.hessian(lambda z: loss(z, y))(z)
    direction = torch.randn_like(z)
    step = 1e-6 * direction
    moved = eager_gradient(loss, z + step, y) - eager_gradient(loss, z - step, y)
    product = torch.einsum("ijkl,kl->ij", found, direction)
    torch.testing.assert_close(product, moved / 2e-6, rtol=1e-4, atol=1e-5 * float(1 + product.detach().abs().max()))


@pytest.mark.parametrize(
    "name", ["supcon", "da-supcon", "hard negatives", "batch-hard", "lifted", "learned temperature"]
)
@pytest.mark.parametrize("engine", ["auto", "dense", "tiled"])
def test_second_derivatives_in_every_engine(name, engine, recwarn):
    loss, (z, y) = make(name, 12), batch(24)

    def gradient(engine):
        leaf = z.clone().requires_grad_()
        first = torch.autograd.grad(loss(leaf, y, engine=engine), leaf, create_graph=True)[0]
        return torch.autograd.grad((first * first.detach().cos()).sum(), leaf)[0]

    torch.testing.assert_close(gradient(engine), gradient("dense"), rtol=1e-8, atol=1e-10)
    said = [str(w.message) for w in recwarn]
    assert any("24 x 24" in text and "MB" in text for text in said) == (engine == "tiled")


def test_second_derivatives_of_class_vectors_in_chunks(monkeypatch):
    loss, (z, y) = make("ArcFace", 12), batch(24)

    def gradient():
        leaf = z.clone().requires_grad_()
        first = torch.autograd.grad(loss(leaf, y), leaf, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), [leaf, loss.weight])

    expected = gradient()
    monkeypatch.setattr(class_softmax, "CHUNK", 0)
    with pytest.warns(UserWarning, match="24 x 12 similarities again"):
        found = gradient()
    torch.testing.assert_close(found, expected)


# One of each kind: closed form, weights, mining, an output of its own, a parameter, margins, running state, centres.
COMPILED = ["supcon", "hard negatives", "batch-hard", "n-pair", "learned temperature", "ArcFace", "AdaCos", "Center"]
COMPILED += ["over pairs", "over nonzero"]


@pytest.mark.parametrize("name", mark_slow_except([*PAIRWISE, *CLASSES], COMPILED))
def test_compile_without_graph_breaks(name):
    torch._dynamo.reset()
    loss, (z, y) = make(name, 12), batch(24)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaf = z.clone().requires_grad_()
    found = torch.autograd.grad(compiled(leaf, y), leaf)[0]
    torch.testing.assert_close(found, eager_gradient(loss, z, y), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["supcon", "hard negatives", "batch-hard", "n-pair", "learned temperature", "over pairs"]
)
def test_a_large_batch_is_one_operator_of_the_compiled_graph(name):
    torch._dynamo.reset()
    loss, (z, y) = make(name, 300), batch(600)
    operators = []

    def backend(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    leaf = z.clone().requires_grad_()
    found = torch.autograd.grad(3 * compiled(leaf, y), leaf)[0]
    traced = name in ("n-pair", "learned temperature")  # an output of its own, a parameter
    assert any("pair_loss_mean" in one for one in operators) != traced
    torch.testing.assert_close(found, 3 * eager_gradient(loss, z, y), rtol=1e-8, atol=1e-12)


def test_thresholds_that_follow_the_data_move_in_a_compiled_step_as_in_eager_mode():
    torch._dynamo.reset()
    z, y = batch(40)
    z = z.float()  # functionalization loses changes of float64 scalars (torch 2.13)
    losses = [SupCon(difficulty=AdaptiveThreshold(momentum=0.5)) for _ in range(2)]
    compiled = torch.compile(losses[0], fullgraph=True, backend="aot_eager")
    for loss in (compiled, losses[1]):
        leaf = z.clone().requires_grad_()
        loss(leaf, y).backward()
    assert float(losses[0].difficulty.positive) != 0.7
    torch.testing.assert_close(losses[0].state_dict(), losses[1].state_dict())


def test_a_batch_without_positives_is_nan_where_nobody_can_look():
    torch._dynamo.reset()
    z, y = torch.randn(6, 4), torch.arange(6)
    assert torch.isnan(torch.compile(SupCon(), fullgraph=True, backend="aot_eager")(z, y))
    assert torch.isnan(torch.vmap(SupCon())(z[None], y[None])).all()
    assert float(torch.compile(SupCon(empty="zero"), fullgraph=True, backend="aot_eager")(z, y)) == 0
