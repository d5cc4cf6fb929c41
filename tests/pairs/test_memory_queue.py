"""The queue by itself: which rows enter, what is held, what it asks a device, and that every loss takes it."""

import copy

import pytest
import torch

from laws.members import FORMS, batch, fitting
from mettle.errors import InputError, NumericError
from mettle.losses import SupCon
from mettle.pairs import Queue


class PlainQueue:
    """What a queue is, as a list."""

    def __init__(self, size):
        self.size, self.held = size, []

    def push(self, z, y, mask=None):
        rows = range(len(z)) if mask is None else [k for k in range(len(z)) if mask[k]]
        self.held = (self.held + [(int(y[k]), z[k].tolist()) for k in rows])[-self.size :]


def content(queue):
    """What is held, in the order of time."""
    held = len(queue)
    slots = [(int(queue.next_index) - held + k) % queue.size for k in range(held)]
    return [(int(queue.labels[slot]), queue.embeddings[slot].tolist()) for slot in slots]


@pytest.mark.parametrize("size", [1, 5, 7, 30])
def test_any_batches_under_any_masks_are_those_of_a_list(size):
    generator = torch.Generator().manual_seed(size)
    queue, plain = Queue(size, 2).double(), PlainQueue(size)
    for k in range(25):
        n = int(torch.randint(1, 12, (1,), generator=generator))
        z = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        y = torch.randint(50, (n,), generator=generator)
        mask = None if k % 3 == 0 else torch.rand(n, generator=generator) < (0.0 if k % 7 == 1 else 0.5)
        queue.push(z, y, mask)
        plain.push(z, y, mask)
        assert content(queue) == plain.held


def test_only_the_newest_entries_when_asked():
    queue = Queue(6, 1).double()
    for k in range(5):
        queue.push(torch.full((2, 1), float(k), dtype=torch.float64), torch.full((2,), k))
    z, y = torch.zeros(2, 1, dtype=torch.float64), torch.tensor([8, 9])
    for last, wanted in ((None, [2, 2, 3, 3, 4, 4]), (9, [2, 2, 3, 3, 4, 4]), (3, [3, 4, 4]), (0, [])):
        options = queue.against(z, y, last=last)
        found, labels, ids = options["ref"]
        assert sorted(labels[2:].tolist()) == wanted and sorted(found[2:, 0].tolist()) == wanted
        assert labels[:2].tolist() == [8, 9] and len(ids.unique()) == len(ids)


def test_keys_take_the_place_of_the_batch_without_gradient():
    z, y = batch()
    keys = batch(seed=3)[0]
    queue = Queue(64, 5).double()
    queue.push(*batch(20, seed=7))
    loss = SupCon(0.3)
    (found,) = torch.autograd.grad(loss(z, y, **queue.against(z, y, keys=keys)), z)
    wanted = []
    x, refs = torch.nn.functional.normalize(z), torch.cat([keys.detach(), queue.embeddings[:20]])
    s, labels = x @ torch.nn.functional.normalize(refs).T / 0.3, torch.cat([y, queue.labels[:20]])
    for i in range(len(z)):
        others = [j for j in range(len(labels)) if j != i]
        near = [j for j in others if labels[j] == y[i]]
        if near:
            wanted.append(torch.logsumexp(s[i, others], 0) - s[i, near].mean())
    (exact,) = torch.autograd.grad(torch.stack(wanted).mean(), z)
    torch.testing.assert_close(found, exact)
    with pytest.raises(InputError, match="dim 5, got 4"):
        queue.against(z, y, keys=keys[:, :4])


@pytest.mark.parametrize("place", ["entering", "masked out"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_queued(value, place):
    z, y = torch.ones(4, 2), torch.arange(4)
    z[1, 0] = value
    mask = torch.tensor([True, place == "entering", True, False])
    queue = Queue(3, 2)
    queue.push(torch.zeros(2, 2), torch.arange(2))
    before = copy.deepcopy(queue.state_dict())
    if place == "masked out":
        queue.push(z, y, mask)
        assert content(queue) == [(1, [0.0, 0.0]), (0, [1.0, 1.0]), (2, [1.0, 1.0])]
        return
    with pytest.raises(NumericError, match="not queued"):
        queue.push(z, y, mask)
    # Where nobody may ask, as on a GPU: the same decision, made on the device.
    for given in (mask, None):
        queue._write(z, y, given, torch.tensor(False))
    assert all(torch.equal(queue.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("mask", [[True, False], torch.ones(3), torch.ones(4, dtype=torch.bool)])
def test_a_mask_that_is_none_is_refused(mask):
    with pytest.raises(InputError, match="enqueue_mask must be booleans, one for each of 3 embeddings"):
        Queue(4, 2).push(torch.ones(3, 2), torch.arange(3), mask)


def test_a_full_queue_asks_its_device_no_more_until_somebody_writes_to_it():
    queue = Queue(4, 2)
    fresh = copy.deepcopy(queue.state_dict())
    queue.push(torch.ones(3, 2), torch.arange(3))
    assert len(queue) == 3 and not queue.is_known_full()
    queue.push(torch.ones(3, 2), torch.arange(3))
    assert len(queue) == 4 and queue.is_known_full()
    queue.push(torch.ones(3, 2), torch.arange(3))
    assert queue.is_known_full() and len(copy.deepcopy(queue)) == 4
    queue.load_state_dict(fresh)
    assert len(queue) == 0 and not queue.is_known_full()


@pytest.mark.parametrize("name", FORMS)
def test_a_loss_takes_a_queue_exactly_if_it_says_so(name):
    loss = FORMS[name]
    z, y = fitting(loss)
    queue = Queue(30, 5).double()
    queue.push(*batch(28, seed=7))
    if not loss.takes_references:
        with pytest.raises(InputError):
            loss(z, y, **queue.against(z, y))
        return
    found = loss.per_anchor(z, y, **queue.against(z, y))
    both, labels = torch.cat([z, queue.embeddings[:28]]), torch.cat([y, queue.labels[:28]])
    torch.testing.assert_close(found, loss.per_anchor(both, labels)[: len(z)], equal_nan=True)
