"""A queue of past embeddings on a GPU: in the kernels, without a wait of its own, and never with what is broken."""

import copy

import pytest
import torch

from mettle.losses import Contrastive, CrossBatchMemory, InfoNCE, SupCon
from mettle.pairs import Queue
from mettle.pairs.kernels import available

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not available(), reason="triton is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
N, D, SIZE = 256, 64, 1000


def batch(k):
    generator = torch.Generator("cuda").manual_seed(k)
    z = torch.randn(N, D, device="cuda", generator=generator)
    return z, torch.randint(60, (N,), device="cuda", generator=generator)


def filled():
    queue = Queue(SIZE, D).cuda()
    for k in range(6):
        queue.push(*batch(k))
    assert len(queue) == SIZE
    return queue


@pytest.fixture
def no_waiting():
    """Every wait for the device becomes an error."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(mode)


def test_a_full_queue_waits_for_nothing(request):
    queue, (z, y) = filled(), batch(9)
    mask = torch.arange(N, device="cuda") % 2 == 0
    request.getfixturevalue("no_waiting")
    for _ in range(3):
        options = queue.against(z, y, keys=z + 1, last=700)
        options = queue.against(z, y)
        queue.push(z, y)
        queue.push(z, y, enqueue_mask=mask)
    assert options["ref"][0].shape == (N + SIZE, D)


@pytest.mark.parametrize("loss", [SupCon(0.1), InfoNCE(0.2), Contrastive(0.0, 1.0)], ids=repr)
@pytest.mark.parametrize("momentum", [False, True])
def test_the_kernels_compute_it(loss, momentum):
    queue, (z, y) = filled(), batch(9)
    keys = batch(10)[0] if momentum else None
    leaf, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    found = loss.output(leaf, y, **queue.against(leaf, y, keys=keys))
    exact = queue.double().against(wide, y, keys=None if keys is None else keys.double())
    wanted = loss.output(wide, y, engine="dense", **exact)
    assert found.engine == "triton"
    torch.testing.assert_close(found.mean().double(), wanted.mean(), rtol=2e-5, atol=2e-5)
    found.mean().backward()
    wanted.mean().backward()
    assert (leaf.grad - wide.grad).norm() < 1e-4 * wide.grad.norm()
    assert loss.statistics(z, y, **queue.float().against(z, y, keys=keys)).not_fused == ""


@pytest.mark.parametrize("full", [False, True])
def test_what_is_not_finite_is_not_queued(full):
    queue, (z, y) = filled() if full else Queue(SIZE, D).cuda(), batch(9)
    before = copy.deepcopy(queue.state_dict())
    z[3, 5] = torch.nan
    queue.push(z, y)
    assert all(torch.equal(value, before[name]) for name, value in queue.state_dict().items())
    queue.push(z, y, torch.arange(N) != 3)
    assert bool(torch.isfinite(queue.embeddings).all()) and not torch.equal(queue.labels, before["labels"])


def test_cross_batch_memory_is_that_of_the_cpu():
    ours, other = (CrossBatchMemory(SupCon(0.1), SIZE, D).to(place) for place in ("cuda", "cpu"))
    for k in range(6):
        z, y = batch(k)
        for mask in (None, torch.arange(N) >= N // 2):
            found, wanted = ours(z, y, enqueue_mask=mask), other(z.cpu(), y.cpu(), enqueue_mask=mask)
            torch.testing.assert_close(found.cpu(), wanted, rtol=2e-5, atol=2e-5)
    assert torch.equal(ours.queue.labels.cpu(), other.queue.labels)
