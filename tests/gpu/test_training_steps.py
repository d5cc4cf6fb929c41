"""Whole training steps on a GPU: nothing waits, numbers are read on the device, a compiled step equals an eager one."""

import copy

import pytest
import torch

from mettle.difficulty import AdaptiveThreshold, Relative, Threshold
from mettle.errors import InputError
from mettle.losses import ArcFace, DASupCon, InfoNCE, SupCon
from mettle.pairs.kernels import available

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not available(), reason="triton is not installed"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, about prototypes and what it deprecates
]

LEARNED = {
    "supcon": lambda: SupCon(0.1, learn_temperature=True),
    "supcon in": lambda: SupCon(0.07, "in", learn_temperature=True),
    "da-supcon": lambda: SupCon(0.1, difficulty=Threshold(), learn_temperature=True),
    "infonce": lambda: InfoNCE(0.5, learn_temperature=True),
    "relative raw": lambda: InfoNCE(0.5, difficulty=Relative("raw"), learn_temperature=True),
}


def batch(n, d, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(n + d)
    z = torch.randn(n, d, device="cuda", generator=generator).to(dtype)
    return z, torch.randint(n // 4, (n,), device="cuda", generator=generator)


def gap(found, wanted):
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize(("n", "d"), [(1000, 128), (700, 512)])
def test_a_learned_temperature_equals_float64(name, n, d):
    loss, (z, y) = LEARNED[name]().cuda(), batch(n, d)
    biased = batch(n, d + 1)[0] if name == "relative raw" else None
    exact, wide, leaf = copy.deepcopy(loss).double(), z.double().requires_grad_(), z.clone().requires_grad_()
    found = loss.output(leaf, y, biased=biased)
    wanted = exact.output(wide, y, biased=None if biased is None else biased.double(), engine="dense")
    assert found.engine == "triton"
    found.mean().backward()
    wanted.mean().backward()
    assert gap(found.mean(), wanted.mean()) < 1e-6
    assert gap(leaf.grad, wide.grad) < 2e-6
    assert gap(loss.log_temperature.grad, exact.log_temperature.grad) < 1e-5


@pytest.mark.parametrize("loss", [SupCon(), DASupCon(), InfoNCE(0.5, 0.1)], ids=["supcon", "weights", "debiased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("n", [64, 1000, 4096])
def test_replayed_steps_equal_launched_ones(loss, dtype, n):
    from mettle.pairs.kernels import launch

    found = {}
    for may_replay in (False, True):
        launch._caches.clear()
        for seed in range(4):
            generator = torch.Generator("cuda").manual_seed(seed)
            z = torch.randn(n, 128, device="cuda", generator=generator).to(dtype).requires_grad_()
            y = torch.randint(n // 4, (n,), device="cuda", generator=generator)
            mean = loss(z, y)
            for cache in launch._caches.values():
                cache.may_replay = may_replay
            mean.backward()
            found[may_replay, seed] = mean.detach(), z.grad
    assert all(cache.recorded_step is not None for cache in launch._caches.values())
    for seed in range(4):
        for a, b in zip(found[False, seed], found[True, seed], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("loss", ["supcon", "adaptive", "learned", "arcface"])
def test_no_step_waits_for_the_device(loss):
    z, y = batch(1024, 128)
    made = {
        "supcon": SupCon(),
        "adaptive": SupCon(difficulty=AdaptiveThreshold()),
        "learned": SupCon(learn_temperature=True),
        "arcface": ArcFace(1024, 128),
    }[loss].cuda()
    leaf = z.requires_grad_()
    made(leaf, y).backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            made(leaf, y).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_label_out_of_range_gives_nan_and_the_next_call_says_why():
    loss, (z, y) = ArcFace(1024, 64).cuda(), batch(1000, 64)
    wrong = y.clone()
    wrong[3] = 1024
    value = loss(z, wrong)
    assert torch.isnan(value)
    torch.cuda.synchronize()
    with pytest.raises(InputError, match="out of range: 1024 classes are numbered 0 to 1023"):
        loss(z, y)
    assert torch.isfinite(loss(z, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_compiled_loss_equals_an_eager_one(dtype):
    loss, (z, y) = SupCon(), batch(1024, 128, dtype)
    gradients = []
    for call in (loss, torch.compile(loss, fullgraph=True)):
        leaf = z.clone().requires_grad_()
        (call(leaf, y) * 1024).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
