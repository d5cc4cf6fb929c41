"""Steps whose launches are replayed equal steps that are launched one by one, bit for bit, in triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("a GPU is here: tests/gpu runs the same kernels on it", allow_module_level=True)

from mettle.difficulty import Importance, Threshold
from mettle.losses import InfoNCE, NPair, SupCon
from mettle.pairs.kernels import LoweredSpec, collect_inputs, function, launch, lower_loss
from mettle.pairs.kernels.function import evaluate_spec, mean_and_gradient

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, on masked entries

LOSSES = {
    "weights": SupCon(0.1, normalise="sum", mean_all=True, difficulty=Threshold(positive=0.6, negative=0.1)),
    "hard": InfoNCE(0.5, 0.1, Importance(1.0)),
    "dot product": NPair(),
}


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Empty caches, sums that nobody has to clear, and a list of the passes that were launched one by one."""
    monkeypatch.setattr(launch, "_caches", {})
    passes = []
    for name in ("_launch_forward", "_launch_backward"):
        original = getattr(function.PairLossCall, name)
        counted = lambda self, *given, name=name, original=original: passes.append(name) or original(self, *given)  # noqa: E731
        monkeypatch.setattr(function.PairLossCall, name, counted)
    torch.use_deterministic_algorithms(True)
    yield passes
    torch.use_deterministic_algorithms(False)


def batch(seed, n=21, d=9, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator).to(dtype), torch.randint(6, (n,), generator=generator)


def lower(loss, z, y) -> LoweredSpec:
    found = lower_loss(loss, loss.difficulty, collect_inputs(z, y, None, None, None))
    assert isinstance(found, LoweredSpec)
    return found


def step(loss, z, y):
    leaf = z.clone().requires_grad_()
    found = evaluate_spec(lower(loss, z, y), leaf, y)
    return [found.values.detach(), found.defined, found.mean.detach(), *torch.autograd.grad(found.mean, leaf)]


def launch_anew(monkeypatch, function, *given):
    """The same without anything that was recorded."""
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_caches", {})
        return function(*given)


def assert_equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))


@pytest.mark.parametrize("name", LOSSES)
def test_replayed_steps_equal_launched_ones(name, monkeypatch, launches):
    for seed in range(3):
        found, passes = step(LOSSES[name], *batch(seed)), list(launches)
        launches.clear()
        assert passes == (["_launch_forward", "_launch_backward"] if seed < 2 else []), seed
        assert_equal(found, launch_anew(monkeypatch, step, LOSSES[name], *batch(seed)))
        launches.clear()


def test_a_spec_that_changes_in_every_step_is_not_recorded(monkeypatch, launches):
    for seed in range(3):
        loss = SupCon(0.1 + 0.01 * seed)
        found = step(loss, *batch(seed))
        assert_equal(found, launch_anew(monkeypatch, step, loss, *batch(seed)))
    assert len(launches) == 12


def test_two_graphs_live_at_once_and_are_gone_through_twice(monkeypatch):
    loss = SupCon(0.1)
    for seed in range(2):
        step(loss, *batch(seed))
    leaves = [batch(seed)[0].requires_grad_() for seed in (2, 3)]
    means = [
        evaluate_spec(lower(loss, z, y), z, y).mean for z, y in zip(leaves, (batch(2)[1], batch(3)[1]), strict=True)
    ]
    for seed, leaf, mean in ((3, leaves[1], means[1]), (2, leaves[0], means[0])):
        wanted = launch_anew(monkeypatch, step, loss, *batch(seed))[-1]
        for factor in (1.0, 3.0):
            (found,) = torch.autograd.grad(factor * mean, leaf, retain_graph=True)
            torch.testing.assert_close(found, factor * wanted, rtol=1e-6, atol=1e-7)


def test_gradients_that_were_not_recorded_are_computed_launch_by_launch(monkeypatch, launches):
    def step_of_values(loss, z, y):
        leaf = z.clone().requires_grad_()
        found = evaluate_spec(lower(loss, z, y), leaf, y)
        total = (torch.where(found.defined, found.values, 0) * torch.linspace(0, 1, len(z))).sum() + found.mean
        return torch.autograd.grad(total, leaf)

    loss = SupCon(0.1)
    for seed in range(3):
        step(loss, *batch(seed))
    for seed in range(3, 5):
        found = step_of_values(loss, *batch(seed))
        assert_equal(found, launch_anew(monkeypatch, step_of_values, loss, *batch(seed)))
    launches.clear()
    step_of_values(loss, *batch(5))
    assert launches == ["_launch_forward", "_launch_backward"], "the forward pass only once"


def test_gradients_of_two_types_share_a_forward_pass(monkeypatch, launches):
    def compiled(loss, z, y):
        mean, gradient, defined = mean_and_gradient(lower(loss, z, y), z, y, True)
        assert gradient is not None
        return mean, gradient, defined

    loss = SupCon(0.1)
    for seed in range(2):
        step(loss, *batch(seed, dtype=torch.float16))
    for seed in range(2, 4):
        given = batch(seed, dtype=torch.float16)
        launches.clear()
        both = compiled(loss, *given), step(loss, *given)
        assert len(launches) == (2 if seed == 2 else 0)
        assert both[0][1].dtype == torch.float32 and both[1][-1].dtype == torch.float16
        assert_equal(both[0], launch_anew(monkeypatch, compiled, loss, *given))
        assert_equal(both[1], launch_anew(monkeypatch, step, loss, *given))


def test_calls_without_gradient_are_replayed_and_record_nothing(launches):
    loss = SupCon(0.1)
    z, y = batch(0)
    with torch.no_grad():
        for _ in range(3):
            evaluate_spec(lower(loss, z, y), z, y)
    assert all(cache.recorded_step is None for cache in launch._caches.values())
    for seed in range(2):
        step(loss, *batch(seed))
    launches.clear()
    assert torch.equal(evaluate_spec(lower(loss, z, y), z, y).mean, step(loss, z, y)[2])
    assert not launches
