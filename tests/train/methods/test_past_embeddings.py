"""Training against past embeddings: the same steps as a plain loop that keeps them in a list, resumed and refused."""

import copy

import pytest
import torch
from torch.nn.functional import normalize

from mettle.data.loader import Batch
from mettle.difficulty import Relative, Threshold
from mettle.errors import InputError, RecipeError
from mettle.losses import ArcFace, InfoNCE, LiftedStructure, Matryoshka, MinedLoss, NPair, SupCon, WeightedSum
from mettle.pairs import Queue
from mettle.train import Supervised, TwoEncoder, checkpoint, load
from mettle.train.methods.past_embeddings import QueueSettings

T = 0.5


class Network(torch.nn.Sequential):
    """In float64 up to its embeddings, with a batch norm to be kept."""

    dim = 4


def network():
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
    return Network(*layers).double()


def labelled(k):
    draw = torch.Generator().manual_seed(k)
    inputs = torch.randn(8, 3, generator=draw, dtype=torch.float64)
    return Batch(inputs, torch.arange(8) % 4 + k % 2, torch.arange(8), k, 0, 0.0)


def viewed(k):
    """Two views of four samples; every third batch has the same samples, as in a later epoch."""
    draw = torch.Generator().manual_seed(k)
    x, ids = torch.randn(4, 3, generator=draw, dtype=torch.float64), torch.arange(4) + 4 * (k % 3)
    return Batch(torch.cat([x, x + 0.1]), ids.repeat(2), ids.repeat(2), k, 0, 0.0)


def supervised(queue, loss=None, **options):
    return Supervised(network(), loss or SupCon(T), queue=queue, **options), labelled


def two_views(queue, loss=None, **options):
    return TwoEncoder(network(), loss or InfoNCE(T), queue=queue, **options), viewed


def supcon_row(x, near):
    return torch.logsumexp(x, 0) - x[near].mean()


def infonce_row(x, near):
    far = torch.logsumexp(x[~near], 0)
    return (torch.log(far.exp() + x[near].exp()) - x[near]).mean()


ROWS = {supervised: supcon_row, two_views: infonce_row}
QUEUES = {
    "partly full": QueueSettings(100),
    "wraps around": QueueSettings(19),
    "smaller than a batch": QueueSettings(5),
    "from half on": QueueSettings(19, start=0.5),
    "momentum": QueueSettings(19, "momentum", 0.7),
    "momentum from half on": QueueSettings(100, "momentum", 0.7, 0.5),
}


@pytest.mark.parametrize("build", [supervised, two_views])
@pytest.mark.parametrize("name", QUEUES)
def test_six_steps_are_those_of_a_plain_loop_that_keeps_embeddings(build, name):
    settings = QUEUES[name]
    method, batches = build(settings, optimizer="SGD", weight_decay=0.0)
    model, average = network(), network()
    held = []  # (embedding, label), the oldest first
    for k in range(6):
        batch, done = batches(k), k / 6
        found = method.step(batch, 0.5, done)
        y = batch.labels.tolist()
        z = model(batch.inputs)
        keys = z if settings.encoder == "same" else average(batch.inputs).detach()
        past = held if done >= settings.start else []
        refs, labels = [*keys, *(e for e, _ in past)], [*y, *(label for _, label in past)]
        x = normalize(z) @ normalize(torch.stack(refs)).T / T
        rows = []
        for i in range(len(y)):
            others = [j for j in range(len(refs)) if j != i]
            near = torch.tensor([labels[j] == y[i] for j in others])
            rows.append(ROWS[build](x[i, others], near))
        value = torch.stack(rows).mean()
        assert found.loss == pytest.approx(value.item(), rel=1e-9)
        gradient = torch.autograd.grad(value, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradient, strict=True):
                p -= 0.5 * g
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.copy_(settings.momentum * p + (1 - settings.momentum) * q)
        held = (held + list(zip(keys.detach(), y, strict=True)))[-settings.size :]
        stats = found.lazy_stats()
        assert stats["queue_fill"] == len(held) / settings.size
        assert stats["queue_used"] == len(past) / settings.size
    for p, q in zip(method.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_old_views_of_the_same_sample_are_no_negatives():
    method, _ = two_views(QueueSettings(100))
    method.step(viewed(0), 0.0, 0.0)
    again = viewed(3)  # the same samples
    found = method.loss.row_values(method.model(again.inputs), again.ids, **method.terms(again).queued.options)
    assert found["negatives"].tolist() == [6 + 6] * 8 and found["positives"].tolist() == [1 + 2] * 8


@pytest.mark.parametrize("build", [supervised, two_views])
@pytest.mark.parametrize("name", QUEUES)
def test_a_method_goes_on_from_its_checkpoint_bit_for_bit(build, name, tmp_path):
    method, batches = build(QUEUES[name], ema=0.5)
    for k in range(4):
        method.step(batches(k), 1e-2, k / 8)
    checkpoint.save_checkpoint(tmp_path, 4, method.state_dict())
    wanted = [method.step(batches(k), 1e-2, k / 8).loss for k in range(4, 8)]
    again, _ = build(QUEUES[name], ema=0.5)
    again.load_state_dict(checkpoint.load_latest(tmp_path)[1])
    assert [again.step(batches(k), 1e-2, k / 8).loss for k in range(4, 8)] == wanted
    one, other = (checkpoint.flatten_state(m.state_dict())[0] for m in (method, again))
    assert one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())
    assert any("past" in key and "embeddings" in key for key in one)


@pytest.mark.parametrize("encoder", ["same", "momentum"])
def test_a_refused_step_touches_neither_queue_nor_encoder(encoder):
    method, batches = supervised(QueueSettings(19, encoder))
    for k in range(3):
        method.step(batches(k), 1e-2, 0.0)
    before = copy.deepcopy(method.past.state_dict())
    broken = batches(3)
    broken.inputs[2, 0] = torch.inf
    assert not method.step(broken, 1e-2, 0.0).applied
    assert all(torch.equal(value, before[name]) for name, value in method.past.state_dict().items())
    assert method.step(batches(4), 1e-2, 0.0).applied
    assert not torch.equal(method.past.queue.embeddings, before["queue.embeddings"])


def test_several_batches_of_a_step_meet_the_same_queue_and_enter_it_in_order():
    method, batches = supervised(QueueSettings(100))
    method.step([batches(0), batches(1)], 1e-2, 0.0)
    assert method.past.queue.labels[:16].tolist() == [*batches(0).labels, *batches(1).labels]
    stats = method.step([batches(2), batches(3)], 1e-2, 0.0).lazy_stats()
    assert (stats["queue_used"], stats["queue_fill"]) == (0.16, 0.32)


def test_a_sum_and_a_difficulty_take_the_queue():
    loss = WeightedSum([SupCon(T), SupCon(T, difficulty=Threshold())], [1.0, 0.5])
    method, batches = supervised(QueueSettings(100), loss)
    method.step(batches(0), 0.0, 0.0)
    z, y = method.model(batches(1).inputs), batches(1).labels
    options = method.past.queue.against(z, y)
    wanted = SupCon(T)(z, y, **options) + 0.5 * SupCon(T, difficulty=Threshold())(z, y, **options)
    result = method.step(batches(1), 0.0, 0.0)
    assert result.loss == pytest.approx(wanted.item(), rel=1e-9)
    assert {"SupCon loss", "SupCon 2 gradient", "queue_fill"} <= set(result.lazy_stats())


def test_prefixes_are_compared_with_prefixes_of_the_queue():
    method, batches = supervised(QueueSettings(100), Matryoshka(SupCon(T), (2, 4)))
    method.step(batches(0), 0.0, 0.0)
    z, y = method.model(batches(1).inputs), batches(1).labels
    queue = Queue(100, 2).double()
    queue.push(method.past.queue.embeddings[:8, :2], batches(0).labels)
    wanted = SupCon(T)(z[:, :2], y, **queue.against(z[:, :2], y)) + SupCon(T)(z, y, **method.past.queue.against(z, y))
    assert method.step(batches(1), 0.0, 0.0).loss == pytest.approx(wanted.item(), rel=1e-9)


LOSSES = [
    ArcFace(4, 4),
    NPair(),
    LiftedStructure(),
    MinedLoss(SupCon(), lambda z, y: None),
    WeightedSum([SupCon(), ArcFace(4, 4)]),
    Matryoshka([ArcFace(4, 2), ArcFace(4, 4)], (2, 4)),
    lambda z, y: z.sum(),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("build", [supervised, two_views])
def test_a_loss_that_cannot_is_refused(build, loss):
    with pytest.raises(InputError, match="cannot compare a batch with a queue of past embeddings"):
        build(QueueSettings(10), loss)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="Relative"):
        TwoEncoder(network(), InfoNCE(difficulty=Relative()), network(), queue=QueueSettings(10))
    with pytest.raises(InputError, match="encoder of a queue must be 'same' or 'momentum', got 'other'"):
        QueueSettings(10, "other")
    with pytest.raises(InputError, match=r"momentum of a queue must be at least 0 and below 1, got 1\.0"):
        QueueSettings(10, "momentum", 1.0)
    with pytest.raises(InputError, match="start of a queue"):
        QueueSettings(10, start=-0.1)
    with pytest.raises(InputError, match="size of a queue must be a whole number of at least 1, got 0"):
        Supervised(network(), SupCon(), queue=QueueSettings(0))


RECIPES = {
    "class vectors": ("arcface", ["batch.queue=9"], "ArcFace cannot compare a batch with a queue"),
    "lifted": ("lifted", ["batch.queue=9"], "LiftedStructure cannot compare"),
    "relative": ("wcl", ["batch.queue=9"], "a queue does not go with a Relative difficulty"),
    "hardness-aware": ("hdml-npair", ["batch.queue=9"], "needs train.method = 'supervised' or 'two-encoder', got"),
    "similarity": ("siamese", ["batch.queue=9"], "needs train.method = 'supervised' or 'two-encoder', got"),
    "jtt": ("jtt", ["batch.queue=9"], "needs train.method = 'supervised' or 'two-encoder', got 'jtt'"),
    "negative": ("supcon", ["batch.queue=-1"], "recipe key batch.queue"),
    "encoder": ("supcon", ["batch.queue=9", "batch.queue_encoder=other"], "recipe key batch.queue_encoder"),
    "momentum": ("moco", ["batch.queue_momentum=1.0"], "recipe key batch.queue_momentum"),
    "no queue": ("supcon", ["batch.queue_start=0.5"], "batch.queue_start changes nothing here: it needs batch.queue,"),
    "no average": ("xbm", ["batch.queue_momentum=0.5"], "it needs batch.queue_encoder = 'momentum'"),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_that_cannot_is_refused_when_it_is_read(case):
    name, overrides, message = RECIPES[case]
    with pytest.raises(RecipeError, match=message):
        load(name, overrides)


def test_the_shipped_recipes_say_what_they_hold():
    assert "with a queue of 256 embeddings" in load("xbm").title()
    assert "with a momentum queue of 2048 embeddings" in load("moco").title()
