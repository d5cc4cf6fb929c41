"""Whole training steps on a GPU: nothing waits, numbers are read on the device, a compiled step equals an eager one."""

import contextlib
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


def small_method(**options):
    from mettle.model import Embedder, EmbedderSpec
    from mettle.train import Supervised

    torch.manual_seed(0)
    model = Embedder(EmbedderSpec("convnet", width=8, depth=2, dim=16), (1, 16, 16)).cuda()
    return Supervised(model, SupCon(difficulty=Threshold()), precision="bfloat16", **options)


def small_batch(k, broken=False):
    from mettle.data.loader import Batch

    generator = torch.Generator("cuda").manual_seed(k)
    x = torch.rand(32, 1, 16, 16, device="cuda", generator=generator)
    if broken:
        x[0] = torch.nan
    y = torch.randperm(32, device="cuda", generator=generator) // 4
    return Batch(x, y, torch.arange(32, device="cuda"), k, 0, 0.0)


STEPPED = {
    "AdamW": {},
    "clipped": {"clip": 0.1},
    "SGD": {"optimizer": "SGD"},
    "average": {"ema": 0.9, "ema_start": 0.4},
}


@pytest.mark.parametrize("name", STEPPED)
def test_replayed_training_steps_equal_launched_ones(name):
    from mettle.train.step_graph import record_steps

    results, notes = {}, []
    for recorded in (False, True):
        method = small_method(**STEPPED[name])
        with record_steps(method, notes.append) if recorded else contextlib.nullcontext():
            steps = [method.step(small_batch(k, k in (12, 17)), 1e-3 * (1 + k % 3), k / 20) for k in range(20)]
            if recorded:
                assert len(method.recorder.graphs) == (2 if name == "average" else 1)
        results[recorded] = method, steps
    assert notes == []
    for k, (eager, replayed) in enumerate(zip(results[False][1], results[True][1], strict=True)):
        assert eager.applied == replayed.applied == (k not in (12, 17))
        if eager.applied:
            assert replayed.loss == pytest.approx(eager.loss, rel=2e-3)
            assert replayed.gradient == pytest.approx(eager.gradient, rel=5e-2)
            assert replayed.lazy_stats().keys() == eager.lazy_stats().keys()
    for mine, other in zip(
        *(results[r][0].state_dict()["modules"]["model"].values() for r in (False, True)), strict=True
    ):
        assert gap(mine, other.double()) < 5e-3 or not mine.is_floating_point() or mine.norm() < 1e-2
    groups = [results[r][0].state_dict()["optimizer"]["optimizers"]["model"]["param_groups"] for r in (False, True)]
    assert groups[0] == groups[1]


def test_a_loop_is_recorded_while_its_loader_copies_batches(tmp_path):
    import numpy as np

    from mettle.data import Augment, PKBatchSampler, Samples
    from mettle.data.inputs import ImageArray
    from mettle.data.loader import Loader
    from mettle.train.callbacks.guards import CollapseGuard, DivergenceGuard
    from mettle.train.callbacks.logs import JsonLog, read_log
    from mettle.train.optim import Schedule
    from mettle.train.step_graph import record_steps
    from mettle.train.trainer import run_loop

    labels = np.arange(160) // 4
    images = np.random.default_rng(0).integers(0, 256, (160, 16, 16, 1)).astype(np.uint8)
    samples, logs = Samples.of(ImageArray(images), labels), {}
    for recorded in (False, True):
        method, notes, folder = small_method(), [], tmp_path / str(recorded)
        folder.mkdir()
        loader = Loader(samples, PKBatchSampler(labels, 8, 4), Augment(flip=0.5), device="cuda")
        callbacks = [DivergenceGuard(None, 5), JsonLog(folder, 5), CollapseGuard(0.0, 0.0)]
        with record_steps(method, notes.append) if recorded else contextlib.nullcontext():
            assert run_loop(method, loader, Schedule(40, 1e-3), callbacks)
            assert notes == [] and (not recorded or len(method.recorder.graphs) == 1)
        logs[recorded] = read_log(folder / "log.jsonl")
    assert [line["step"] for line in logs[True]] == [line["step"] for line in logs[False]]
    for replayed, launched in zip(logs[True][:3], logs[False][:3], strict=True):
        assert replayed["loss"] == pytest.approx(launched["loss"], rel=1e-2)


def test_what_cannot_be_recorded_is_told_and_trains():
    from mettle.train.step_graph import record_steps

    notes = []
    method = small_method(optimizer="RMSprop")
    with record_steps(method, notes.append):
        assert all(method.step(small_batch(k), 1e-3, 0.5).applied for k in range(6))
    assert len(notes) == 1 and "not a fused one" in notes[0]


def test_items_that_live_on_the_gpu_give_the_same_batches(monkeypatch):
    import numpy as np

    from mettle.data import Augment, PKBatchSampler, Samples
    from mettle.data import loader as loading
    from mettle.data.inputs import ImageArray

    labels = np.arange(64) // 4
    images = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3)).astype(np.uint8)
    samples = Samples.of(ImageArray(images), labels).take(np.arange(63, -1, -1))
    batches = {}
    for share in (0.0, 0.1):
        monkeypatch.setattr(loading, "RESIDENT_SHARE", share)
        made = loading.Loader(samples, PKBatchSampler(samples.labels, 4, 2), Augment(flip=0.5), device="cuda", views=2)
        assert made._fits_gpu() == (share > 0)
        batches[share] = list(made.batches(0, 5))
    for a, b in zip(batches[0.0], batches[0.1], strict=True):
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.labels, b.labels) and torch.equal(a.ids, b.ids)
