import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from mettle.errors import InputError
from mettle.losses import SimilarityClassification, SimilarityRanking
from mettle.model import Embedder, EmbedderSpec, SiameseNet, TripletNet


def encoder(seed: int = 0, dim: int = 4) -> nn.Module:
    """Small, smooth, in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, dim)).double()


def inputs(k: int, n: int = 6, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 5, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(k)]


def net(head: str) -> SiameseNet:
    return SiameseNet(encoder(), head, dim=4).double()


@pytest.mark.parametrize("head", ["distance", "difference"])
def test_swapping_the_inputs_changes_nothing(head):
    model, (a, b) = net(head), inputs(2)
    torch.testing.assert_close(model(a, b), model(b, a))
    embedder = SiameseNet(Embedder(EmbedderSpec(width=2, depth=2, dim=4), (1, 8, 8)), head).train()
    x, y = torch.rand(5, 1, 8, 8), torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(embedder(x, y), embedder(y, x))  # in training mode too: one batch for batch norm


def test_distance_is_that_of_the_embeddings():
    model, (a, b) = net("distance"), inputs(2)
    h = [model.encoder(x) for x in (a, b)]
    torch.testing.assert_close(model(a, b), torch.stack([(p - q).norm() for p, q in zip(*h, strict=True)]))
    assert (model(a, a) == 0).all() and sum(p.numel() for p in model.parameters()) == 7 * 6 + 4 * 8


def test_difference_is_a_linear_map_of_the_absolute_difference():
    model, (a, b) = net("difference"), inputs(2)
    w, c = model.head.weight[0], model.head.bias[0]
    wanted = [(model.encoder(p) - model.encoder(q)).abs() @ w + c for p, q in zip(a, b, strict=True)]
    torch.testing.assert_close(model(a, b), torch.stack(wanted))
    assert model(a, b).shape == (6,)


@pytest.mark.parametrize("head", ["distance", "difference"])
def test_gradient_flows_through_both_branches(head):
    model, (a, b) = net(head), inputs(2)
    assert gradcheck(model, (a, b))
    first, second = torch.autograd.grad(model(a, b).sum(), (a, b))
    assert (first.norm(dim=1) > 0).all() and (second.norm(dim=1) > 0).all()
    # Each branch alone moves the shared weights, and together they move them by the sum.
    weight = model.encoder[0].weight
    (whole,) = torch.autograd.grad(model(a, b).sum(), weight)
    halves = []
    for still in (0, 1):
        h = [model.encoder(x) for x in (a, b)]
        h[still] = h[still].detach()
        f = (h[0] - h[1]).norm(dim=1) if head == "distance" else model.head((h[0] - h[1]).abs())
        halves.append(torch.autograd.grad(f.sum(), weight)[0])
    assert halves[0].norm() > 0 and halves[1].norm() > 0
    torch.testing.assert_close(whole, halves[0] + halves[1])


def test_coincident_inputs_have_a_finite_gradient():
    model, (a,) = net("distance"), inputs(1)
    model(a, a).sum().backward()
    assert torch.isfinite(a.grad).all()


def test_the_triplet_network_is_hoffer_and_ailon():
    model, x = TripletNet(encoder()), inputs(3)
    h = [model.encoder(part) for part in x]
    for i in range(6):
        near, far = ((h[0][i] - h[k][i]).norm() for k in (1, 2))
        p = near.exp() / (near.exp() + far.exp())
        torch.testing.assert_close(model(*x)[i], torch.stack([near, far]))
        torch.testing.assert_close(model.per_item(*x)[i], p**2)
    torch.testing.assert_close(model.loss(*x), model.per_item(*x).mean())
    assert gradcheck(model.loss, tuple(x))
    assert all((g.norm(dim=1) > 0).all() for g in torch.autograd.grad(model.loss(*x), x))


def test_the_triplet_network_is_softmax_ranking_of_distances():
    model, x = TripletNet(encoder()), inputs(3)
    ranking = SimilarityRanking("softmax", temperature=1.0, measure="euclidean")
    torch.testing.assert_close(model.per_item(*x), ranking.per_item(*(model.encoder(part) for part in x)))


def test_equal_distances_cost_a_quarter_and_a_far_negative_nothing():
    class Plain(nn.Module):
        def forward(self, x):
            return x

    model = TripletNet(Plain())
    x = torch.zeros(3, 2)
    positive = torch.tensor([[1.0, 0], [0, 0], [50, 0]])
    negative = torch.tensor([[0.0, 1], [50, 0], [0, 0]])
    torch.testing.assert_close(model.per_item(x, positive, negative), torch.tensor([0.25, 0.0, 1.0]))


@pytest.mark.parametrize("head", ["distance", "difference"])
def test_a_siamese_network_learns_with_a_loss_over_similarities(head):
    torch.manual_seed(0)
    label = torch.arange(40) % 4
    x = torch.eye(5)[label] + 0.2 * torch.randn(40, 5)
    a, b = torch.randint(40, (2, 300))
    same = (label[a] == label[b]).float()
    model, loss = SiameseNet(encoder().float(), head, dim=4), SimilarityClassification(measure="euclidean")
    optimiser = torch.optim.Adam([*model.parameters(), *loss.parameters()], 0.02)
    for _ in range(80):
        f = model(x[a], x[b])
        value = loss.from_similarity(-f if head == "distance" else f, same).mean()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    assert value < 0.2


def test_nan_stays_nan():
    (a, b, c) = (x.detach() for x in inputs(3))
    a[2, 1] = torch.nan
    for head in ("distance", "difference"):
        assert net(head)(a, b).isnan().tolist() == [False, False, True, False, False, False]
    assert TripletNet(encoder()).loss(a, b, c).isnan()


def test_half_precision_embeddings_are_compared_in_float32():
    (a, b) = (x.detach().to(torch.bfloat16) for x in inputs(2))
    model = SiameseNet(encoder().to(torch.bfloat16))
    assert model(a, b).dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SiameseNet(encoder(), "difference"), r"pass dim=\.\.\."),
        (lambda: SiameseNet(encoder(), "dist"), "head must be"),
        (lambda: net("distance")(*inputs(1), inputs(1, n=5)[0]), "row i of each belongs together"),
        (lambda: net("distance")(*inputs(2, n=0)), "inputs are empty"),
        (lambda: TripletNet(nn.Unflatten(1, (5, 1)))(*inputs(3)), r"embeddings \(n, dim\)"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(InputError, match=message):
        make()
