"""The collapse guard: what learns is let alone, what collapses is stopped, advice names keys that the loss has."""

import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn

from mettle import losses
from mettle.data import Augment, Loader, PKBatchSampler, Samples
from mettle.data.inputs import FeatureArray
from mettle.data.loader import Batch
from mettle.data.tuples import Pairs, Triplets
from mettle.difficulty import Hardest
from mettle.errors import NumericError
from mettle.losses import ArcFace, InfoNCE, NPair, SimilarityClassification, SimilarityRanking, SupCon, Triplet
from mettle.model import Embedder, EmbedderSpec
from mettle.train import HardnessAware, Similarity, Supervised, TwoEncoder, builtin_recipes, checkpoint, load
from mettle.train import callbacks as logs
from mettle.train.callbacks import CollapseGuard, JsonLog, collapse_advice, mean_cosine, similarity_gap
from mettle.train.factory import constructor_arguments
from mettle.train.from_recipe import train
from mettle.train.optim import Schedule
from mettle.train.trainer import run_loop

from .conftest import tiny
from .test_from_recipe import Stop, content, until

CLASSES, EACH, FEATURES = 12, 8, 10


def pictures(seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), EACH)
    x = rng.normal(size=(CLASSES, FEATURES))[labels] + 0.7 * rng.normal(size=(CLASSES * EACH, FEATURES))
    return Samples.of(FeatureArray(x.astype(np.float32)), labels, split=np.zeros(len(labels), np.int8))


def network(alike: float = 0.0) -> Embedder:
    """A small network; ``alike`` is the length of a constant that is added to all embeddings."""
    torch.manual_seed(0)
    model = Embedder(EmbedderSpec("mlp", width=4, depth=2, dim=8), (FEATURES,))
    with torch.no_grad():
        model.head.bias.add_(alike)
    return model


def classes() -> torch.Tensor:
    return torch.arange(CLASSES)


METHODS = {
    "supervised": lambda model: Supervised(model, SupCon(0.1)),
    "class vectors": lambda model: Supervised(model, ArcFace(CLASSES, 8, scale=16, margin=0.2), classes=classes()),
    "two-encoder": lambda model: TwoEncoder(model, InfoNCE(0.5)),
    "hardness-aware": lambda model: HardnessAware(Triplet(0.2, squared=True), model, classes=classes()),
    "pairs": lambda model: Similarity(model, SimilarityClassification()),
    "triplets": lambda model: Similarity(model, SimilarityRanking(form="logistic", temperature=0.1)),
}


def loader(name: str) -> Loader:
    samples, change = pictures(), Augment(noise=0.3)
    if name in ("pairs", "triplets"):
        from mettle.data import ShuffledBatchSampler

        rows = (Pairs if name == "pairs" else Triplets).same_class(samples, seed=0)
        return Loader(samples, ShuffledBatchSampler(len(rows), 32, 0), change, tuples=rows)
    return Loader(samples, PKBatchSampler(samples.labels, 6, 4), change, views=2 if name == "two-encoder" else 1)


def train_method(method, batches, folder, schedule, every=4):
    """The loop with the guard against collapse; returns whether it reached its end, and the lines of its log."""
    done = run_loop(method, batches, schedule, [JsonLog(folder, every), CollapseGuard(every=every)])
    return done, logs.read_log(folder / "log.jsonl")


def train_named(name, folder, *, model, rate=1e-2, steps=60):
    return train_method(METHODS[name](model), loader(name), folder, Schedule(steps, rate))


@pytest.mark.parametrize("name", METHODS)
def test_what_learns_is_let_alone_though_it_starts_with_all_samples_alike(name, tmp_path):
    """The old limit, a mean cosine of 0.98 from the first line on, stopped all of these."""
    done, lines = train_named(name, tmp_path, model=network(alike=4.0))
    assert done and lines[0]["mean_cosine"] > 0.98
    assert lines[-1]["gap"] > lines[0]["gap"]


class PullTogether:
    """A loss that is smallest where all embeddings are one vector."""

    def __call__(self, z, y):
        return (z - z.mean(0).detach()).square().sum(1).mean()


def test_a_loss_that_pulls_everything_together_is_stopped(tmp_path):
    method = Supervised(network(), PullTogether(), weight_decay=0.0)
    with pytest.raises(NumericError, match=r"collapsed: at step \d+ the spread of a batch .* at the first step"):
        train_method(method, loader("supervised"), tmp_path, Schedule(200, 3e-2))


class Constant(nn.Module):
    """A layer whose units are all dead."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return 0 * self.inside(x) + 1.0


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_stopped_where_all_embeddings_are_one_vector_from_the_start(name, tmp_path):
    model = network()
    model.head = Constant(model.head)
    with pytest.raises(NumericError, match="collapsed: at step 32 all embeddings of a batch are the same"):
        train_named(name, tmp_path, model=model)


class Shuffled:
    """Pushes everything apart and knows no labels."""

    def __call__(self, z, y):
        return z.sum(0).square().sum() / len(z) - 0.0 * z.sum()


def test_embeddings_that_say_nothing_of_their_labels_are_stopped(tmp_path):
    samples = pictures()
    noise = np.random.default_rng(1).normal(size=(len(samples), FEATURES)).astype(np.float32)
    batches = Loader(Samples.of(FeatureArray(noise), samples.labels), PKBatchSampler(samples.labels, 12, 8), Augment())
    with pytest.raises(NumericError, match="collapsed.*no closer"):
        train_method(Supervised(network(), Shuffled()), batches, tmp_path, Schedule(120, 1e-4), every=2)


def test_the_keys_turn_the_guard_off(source, tmp_path, monkeypatch):
    def constant(self, x):
        return torch.ones(len(x), self.dim) + 0 * self.head(self.features(x))

    monkeypatch.setattr(Embedder, "forward", constant)
    with pytest.raises(NumericError, match="collapsed: at step 4 "):
        train(tiny(source, log_every=1, collapse_patience=2), tmp_path / "run", tensorboard=False)
    off = tiny(source, log_every=1, collapse_spread=0.0, collapse_gap=0.0)
    assert train(off, tmp_path / "off", tensorboard=False).finished


@pytest.mark.parametrize("cut", [1, 5, 9])
def test_a_resumed_run_is_stopped_at_the_same_step(source, tmp_path, monkeypatch, cut):
    """What the guard has seen is in the checkpoint: how far apart embeddings were at first, and the last lines."""
    real = Embedder.forward
    steps = iter(range(10**6))

    def shrinking(self, x):
        z = real(self, x)
        if not self.training:
            return z
        return torch.nn.functional.normalize(z * 0.01 ** next(steps) + 1)

    def outcome(folder, start):
        nonlocal steps
        steps = iter(range(start, 10**6))
        with pytest.raises(NumericError, match="collapsed") as caught:
            train(tiny(source, log_every=1), folder, resume=folder.exists(), tensorboard=False)
        return str(caught.value)

    monkeypatch.setattr(Embedder, "forward", shrinking)
    whole = outcome(tmp_path / "whole", 0)
    steps = iter(range(10**6))
    with pytest.raises((Stop, NumericError)):
        train(tiny(source, log_every=1), tmp_path / "cut", tensorboard=False, on_step=until(cut))
    assert outcome(tmp_path / "cut", (cut - 1) // 2 * 2) == whole


def test_the_state_of_the_guard_comes_back_bit_for_bit(source, tmp_path):
    recipe = tiny(source, log_every=1)
    train(recipe, tmp_path / "whole", tensorboard=False)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "cut", tensorboard=False, on_step=until(9))
    train(recipe, tmp_path / "cut", resume=True, tensorboard=False)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    state = checkpoint.load_latest(tmp_path / "cut" / "checkpoints")[1]["callbacks"]["CollapseGuard"]
    lines = logs.read_log(tmp_path / "cut" / "log.jsonl")
    assert state["spreads"] == [1 - line["mean_cosine"] for line in lines[-5:]]
    assert state["gaps"] == [line["gap"] for line in lines[-5:]] and 0 < state["first"] < 1


def batch(labels, ids=None, target=None, weight=None):
    labels = torch.as_tensor(labels)
    ids = torch.arange(len(labels)) if ids is None else torch.as_tensor(ids)
    return Batch(torch.zeros(len(labels), 1), labels, ids, 0, 0, 0.0, target, weight)


def test_gap_and_mean_cosine_are_those_of_all_pairs():
    torch.manual_seed(0)
    z, y = torch.randn(20, 5) + 1, torch.arange(20) % 6
    s = torch.nn.functional.cosine_similarity(z[:, None], z[None], dim=2)
    same, other = y[:, None] == y[None], ~torch.eye(20, dtype=torch.bool)
    assert mean_cosine(z) == pytest.approx(float(s[other].mean()), abs=1e-6)
    wanted = 1 - float((1 - s[same & other]).mean() / (1 - s[~same]).mean())
    assert similarity_gap(z, batch(y)) == pytest.approx(wanted, abs=1e-5)
    views = torch.arange(10).repeat(2)
    same = views[:, None] == views[None]
    wanted = 1 - float((1 - s[same & other]).mean() / (1 - s[~same]).mean())
    assert similarity_gap(z, batch(y, views), by_id=True) == pytest.approx(wanted, abs=1e-5)


def test_gap_of_pairs_and_triplets():
    a, b, c = torch.eye(3)[[0, 1]], torch.eye(3)[[0, 1]], torch.eye(3)[[1, 2]]
    one = torch.ones(2)
    assert similarity_gap(torch.cat([a, b, c]), batch(range(6), weight=one)) == pytest.approx(1.0)
    assert similarity_gap(torch.cat([a, c, b]), batch(range(6), weight=one)) == 0.0
    x, y = torch.eye(3)[[0, 1, 2]], torch.tensor([[1.0, 0, 0], [1, 1, 0], [1, 0, 0]])
    graded = batch(range(6), target=torch.tensor([5.0, 4.0, 1.0]), weight=torch.ones(3))
    assert similarity_gap(torch.cat([x, y]), graded) == pytest.approx(1 - (1 - 0.5**0.5) / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("z", "labels"),
    [
        (torch.randn(4, 2), [0, 1, 2, 3]),
        (torch.randn(4, 2), [0, 0, 0, 0]),
        (torch.full((4, 2), torch.nan), [0, 0, 1, 1]),
    ],
    ids=["no positives", "no negatives", "nan"],
)
def test_a_batch_that_cannot_show_a_gap_shows_none(z, labels):
    assert similarity_gap(z, batch(labels)) is None


def test_equal_pairs_without_a_gap_of_targets_show_none():
    same = batch(range(4), target=torch.ones(2), weight=torch.ones(2))
    assert similarity_gap(torch.randn(4, 2), same) is None


def reason(first, spreads, gaps, **limits):
    guard = CollapseGuard(**limits)
    guard.load_state_dict({"first": first, "spreads": spreads, "gaps": gaps})
    return guard.find_collapse()


def test_noise_about_a_small_gap_is_no_collapse_and_about_none_is():
    assert reason(0.2, [0.1] * 5, [0.066, -0.008, 0.046, 0.158, 0.052]) is None  # measured: a slow learner
    assert reason(0.2, [0.1] * 5, [0.001, -0.004, 0.003, 0.002, -0.001]) is not None
    assert reason(0.2, [0.1] * 4, [0.0] * 4) is None, "four lines are not enough"
    assert reason(0.2, [0.0019, 0.0019, 0.0021, 0.0019, 0.0019], [0.4] * 5) is None
    assert "0.0095 of the 0.2" in reason(0.2, [0.0019] * 5, [0.4] * 5)
    assert reason(None, [0.0] * 5, [0.4] * 5) is None
    assert "same vector" in reason(0.0, [1e-9] * 5, [])
    assert reason(0.2, [-1e-16] * 5, [], spread=0.0) is None
    assert reason(0.2, [0.1] * 5, [-0.5] * 5, gap=0.0) is None


def test_a_guard_looks_at_the_last_lines_only():
    guard = CollapseGuard(patience=2)
    guard.first = 0.5
    for step, cosine in enumerate([0.999, 0.5, 0.999, 0.5]):
        guard.judge(step, cosine, None)
    guard.judge(4, 0.999, None)
    with pytest.raises(NumericError, match="at step 5 the spread"):
        guard.judge(5, 0.999, None)


@pytest.mark.parametrize("name", builtin_recipes())
def test_advice_names_only_keys_of_the_loss(name):
    recipe = load(name)
    loss = recipe.build_loss()
    advice = collapse_advice(loss, recipe.loss_keys)
    keys = set(re.findall(r"loss\.(\w+)", advice))
    assert keys <= set(constructor_arguments(getattr(losses, recipe.loss["kind"])))
    assert keys - {"difficulty"} <= set(inspect.signature(getattr(losses, recipe.loss["kind"])).parameters)
    assert ("difficulty" in keys) == (recipe.loss.get("difficulty") is not None)
    assert ("weigh hard pairs less" in advice) == (getattr(loss, "difficulty", None) is not None)


def test_advice_by_example():
    assert collapse_advice(SupCon(0.1)) == "Lower train.rate, raise train.warmup or raise loss.temperature"
    assert "loss.temperature" not in collapse_advice(Triplet(mining="hardest"))
    assert "loss.mining" in collapse_advice(Triplet(mining="hardest"))
    assert "loss.difficulty" in collapse_advice(Triplet(difficulty=Hardest()))
    assert "loss.margin" in collapse_advice(ArcFace(3, 4)) and "loss.temperature" not in collapse_advice(ArcFace(3, 4))
    assert collapse_advice(NPair()) == collapse_advice(None) == collapse_advice(lambda z, y: z.sum())
