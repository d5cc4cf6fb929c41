"""What a checkpoint must hold beside networks: difficulties that follow the data, each tensor once."""

import copy

import pytest
import torch
from torch import nn

from mettle.data.loader import Batch
from mettle.difficulty import AdaptiveThreshold, Product, Relative, Threshold, curriculum
from mettle.losses import ArcFace, Center, InfoNCE, SelfTriplet, SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.pairs import across_ranks
from mettle.train import Supervised, TwoEncoder, checkpoint
from mettle.train.from_recipe import train

from ..conftest import make_npz
from ..test_from_recipe import Stop, content, until
from .test_two_encoder import tiny


class Learned(nn.Module):
    """A difficulty with a parameter of its own: how much a hard class counts."""

    detach = False

    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(()))

    def row_statistics(self, tile):
        return {}

    def weights(self, tile, rows):
        if torch.is_grad_enabled():
            self.seen += 1
        return 1 + self.more.square() * tile.similarity.square()


class Outer(nn.Module):
    """A difficulty around another one, both with a state."""

    detach = True

    def __init__(self, difficulty):
        super().__init__()
        self.difficulty = difficulty

    def observe(self, embeddings, labels):
        self.difficulty.observe(embeddings, labels)

    def row_statistics(self, tile):
        return {}

    def weights(self, tile, rows):
        return self.difficulty.weights(tile, rows)


def network(seed=0):
    torch.manual_seed(seed)
    return Embedder(EmbedderSpec("mlp", width=1, depth=1, dim=4), (3,))


def labelled(k):
    draw = torch.Generator().manual_seed(k)
    return Batch(torch.randn(12, 3, generator=draw), torch.arange(12) % 4, torch.arange(12), k, 0, 0.0)


def viewed(k):
    x, ids = torch.randn(8, 3, generator=torch.Generator().manual_seed(k)), torch.arange(8)
    return Batch(torch.cat([x, x + 0.1]), ids.repeat(2), ids.repeat(2), k, 0, 0.0)


def adaptive():
    return AdaptiveThreshold(momentum=0.5)


def twice():
    one = adaptive()
    return Product(one, one)


SUPERVISED = {
    "plain": lambda: SupCon(difficulty=adaptive()),
    "twice": lambda: SupCon(difficulty=twice()),
    "outer": lambda: SupCon(difficulty=Outer(adaptive())),
    "ranks": lambda: across_ranks(SupCon(difficulty=adaptive())),
    "ranks, product": lambda: across_ranks(SupCon(difficulty=Product(adaptive(), Threshold()))),
    "ranks, curriculum": lambda: across_ranks(SupCon(difficulty=curriculum(adaptive(), end=0.5))),
    "class vectors": lambda: ArcFace(4, 4, difficulty=Learned()),
    "class vectors, product": lambda: ArcFace(4, 4, difficulty=Product(Learned(), Threshold())),
    "centres": lambda: Center(4, 4, base=ArcFace(4, 4, difficulty=Learned())),
    "ranks, class vectors": lambda: across_ranks(ArcFace(4, 4, difficulty=Learned())),
}

VIEWS = {
    "adaptive": lambda: (InfoNCE(0.5, difficulty=adaptive()), None),
    "ranks": lambda: (across_ranks(InfoNCE(0.5, difficulty=adaptive())), None),
    "with a biased encoder": lambda: (
        InfoNCE(0.5, difficulty=Product(Relative(), adaptive())),
        SelfTriplet(difficulty=adaptive()),
    ),
}


def supervised(name):
    torch.manual_seed(1)
    return Supervised(network(), SUPERVISED[name](), weight_decay=0.1), labelled


def two(name):
    torch.manual_seed(1)
    loss, other = VIEWS[name]()
    return TwoEncoder(network(), loss, None if other is None else network(1), other), viewed


EVERY = [(supervised, name) for name in SUPERVISED] + [(two, name) for name in VIEWS]


def moved(method, batches, steps):
    return [method.step(batches(k), 1e-2, k / 10).loss for k in steps]


@pytest.mark.parametrize(("build", "name"), EVERY, ids=[f"{b.__name__}: {n}" for b, n in EVERY])
def test_a_method_goes_on_from_its_checkpoint_as_if_nothing_had_been(build, name, tmp_path):
    method, batches = build(name)
    moved(method, batches, range(5))
    checkpoint.save_checkpoint(tmp_path, 5, method.state_dict())
    wanted = moved(method, batches, range(5, 9))
    again, _ = build(name)
    _, state, _ = checkpoint.load_latest(tmp_path)
    again.load_state_dict(state)
    assert moved(again, batches, range(5, 9)) == wanted
    fresh, _ = build(name)
    assert moved(fresh, batches, range(5, 9)) != wanted, "what was restored mattered"


@pytest.mark.parametrize("name", VIEWS)
def test_thresholds_are_what_makes_the_difference(name):
    """Restored networks alone give other losses, so that a checkpoint without thresholds would be noticed."""
    method, batches = two(name)
    moved(method, batches, range(5))
    state = copy.deepcopy(method.state_dict())
    wanted = moved(method, batches, range(5, 9))
    again, _ = two(name)
    fresh = again.state_dict()["modules"]
    for part in set(fresh) - {"model", "biased"}:
        state["modules"][part] = copy.deepcopy(fresh[part])
    again.load_state_dict(state)
    assert moved(again, batches, range(5, 9)) != wanted


def test_a_loss_holds_its_difficulties_in_a_checkpoint():
    assert list(supervised("plain")[0].state_dict()["modules"]) == ["model", "loss"]
    assert list(supervised("class vectors, product")[0].state_dict()["modules"]) == ["model", "loss"]
    assert list(two("adaptive")[0].state_dict()["modules"]) == ["model", "loss"]
    assert set(supervised("plain")[0].state_dict()["modules"]["loss"]) == {"difficulty.positive", "difficulty.negative"}


def test_a_loss_without_a_state_is_not_in_a_checkpoint(tmp_path):
    torch.manual_seed(1)
    method, again = (Supervised(network(), SupCon()) for _ in range(2))
    moved(method, labelled, range(5))
    state = copy.deepcopy(method.state_dict())
    checkpoint.save_checkpoint(tmp_path, 5, {**state, "modules": {"model": state["modules"]["model"]}})
    wanted = moved(method, labelled, range(5, 9))
    again.load_state_dict(checkpoint.load_latest(tmp_path)[1])
    assert moved(again, labelled, range(5, 9)) == wanted


def test_a_learned_difficulty_is_trained_once():
    method, _ = supervised("class vectors")
    assert sum(p is method.loss.difficulty.more for p in method.optimizer.parameters["model"]) == 1
    before = method.loss.difficulty.more.item()
    moved(method, labelled, range(3))
    assert method.loss.difficulty.more.item() != before


def test_a_recipe_with_two_views_and_running_thresholds_resumes_bit_for_bit(tmp_path):
    hard = {"kind": "AdaptiveThreshold", "momentum": 0.5}
    recipe = tiny(make_npz(tmp_path / "p.npz"), {"kind": "InfoNCE", "difficulty": hard})
    train(recipe, tmp_path / "whole", tensorboard=False)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", tensorboard=False, on_step=until(7))
    train(recipe, tmp_path / "run", resume=True, tensorboard=False)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


class Sum:
    """A loss with an ordinary gradient, whose value is infinite or broken when asked."""

    more = 0.0

    def __call__(self, z, y):
        return z.float()[:, 0].sum() + self.more


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_refused_step_changes_nothing_in_any_precision(precision, value):
    loss = Sum()
    method = Supervised(network(), loss, precision=precision)
    for k in range(12):  # until the scale of the loss has settled
        last = method.step(labelled(k), 1e-2, 0.0)
    assert last.applied
    loss.more = value
    before = copy.deepcopy(
        [dict(method.model.named_parameters()), method.optimizer.optimizers["model"].state_dict()["state"]]
    )
    result = method.step(labelled(20), 1e-2, 0.0)
    assert not result.applied
    optimizer = method.optimizer.optimizers["model"]
    after = [dict(method.model.named_parameters()), optimizer.state_dict()["state"]]
    assert all(torch.equal(before[0][name], p) for name, p in after[0].items())
    assert all(torch.equal(before[1][k][name], t) for k, part in after[1].items() for name, t in part.items())
    loss.more = 0.0
    assert method.step(labelled(21), 1e-2, 0.0).applied


def test_a_scale_that_is_too_high_is_still_lowered_by_refusing():
    class Large:
        def __call__(self, z, y):
            return z.float()[:, 0].sum() * 1e35

    method = Supervised(network(), Large(), precision="float16")
    before = method.optimizer.scaler.get_scale()
    result = method.step(labelled(0), 1e-2, 0.0)
    assert not result.applied and method.optimizer.scaler.get_scale() < before
