"""Steps that are refused on the device: the same outcome as those that the host decides, without asking the device."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mettle.data.loader import Batch
from mettle.difficulty import AdaptiveThreshold
from mettle.errors import NumericError
from mettle.losses import ArcFace, SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.pairs import memory_queue
from mettle.train import Schedule, Supervised, from_recipe, run_loop, train
from mettle.train.callbacks import Callback, CollapseGuard, DivergenceGuard
from mettle.train.compilation import RESUMES, compile_networks
from mettle.train.methods.past_embeddings import QueueSettings
from mettle.train.optim import TensorSnapshot, fuse_optimizer
from mettle.train.trainer import LogLine

from .conftest import tiny

OPTIMIZERS = {
    "AdamW": {"kind": "AdamW", "fused": True},
    "SGD": {"kind": "SGD", "fused": True, "momentum": 0.9, "nesterov": True},
    "plain SGD": {"kind": "SGD", "fused": True},
}
OPTIONS = {
    "AdamW": {"optimizer": OPTIMIZERS["AdamW"], "clip": 1.0},
    "SGD": {"optimizer": OPTIMIZERS["SGD"]},
    "plain SGD": {"optimizer": OPTIMIZERS["plain SGD"]},
    "average": {"optimizer": OPTIMIZERS["AdamW"], "ema": 0.9},
    "queue": {"optimizer": OPTIMIZERS["AdamW"], "queue": QueueSettings(24)},
    "momentum encoder": {"optimizer": OPTIMIZERS["AdamW"], "queue": QueueSettings(24, "momentum", momentum=0.9)},
    "float16": {"optimizer": OPTIMIZERS["AdamW"], "precision": "float16"},
}


class Contrast(nn.Module):
    """A loss in a few operations that ask for no value, with a threshold that follows the data.

    A batch with a target is one that breaks it: its embeddings are finite, its loss is not.
    """

    takes_references = True
    broken = False

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, z, y, ids=None, ref=None):
        other, labels = (z, y) if ref is None else ref[:2]
        s = z @ other.T
        self.level.lerp_(s.detach().mean(), 0.5)
        same = (y[:, None] == labels[None, :]).float()
        value = (self.scale * (s - self.level) * (1 - 2 * same)).exp().mean()
        return value * torch.nan if self.broken else value


def build(on_device, loss=None, **options):
    torch.manual_seed(0)
    model = Embedder(EmbedderSpec("convnet", width=4, depth=2, dim=4), (1, 8, 8))
    method = Supervised(model, Contrast() if loss is None else loss(), **options)
    method.optimizer.decides_on_device = on_device
    return method


def step(method, k, broken=False):
    method.loss.broken = broken
    return method.step(batch(k), 1e-2, 0.5)


def batch(k, broken=False):
    x = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(k))
    if broken:
        x[0, 0, 0, 0] = torch.nan
    return Batch(x, torch.arange(12) % 4, torch.arange(12), k, 0, 0.0)


def everything(method):
    return copy.deepcopy(method.state_dict())


def assert_same(a, b, place="state"):
    assert type(a) is type(b), place
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), place
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), place
        for key in a:
            assert_same(a[key], b[key], f"{place}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), place
        for k, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{place}/{k}")
    else:
        assert a == b, place


class Reads(TorchDispatchMode):
    """Counts how often the value of a tensor is asked for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_device_decides_as_the_host_does(name):
    methods = [build(on_device, **OPTIONS[name]) for on_device in (False, True)]
    for k in range(9):
        results = [step(method, k, broken=k in (0, 4, 5)) for method in methods]
        assert results[0].is_read and results[1].is_read == (k < 3 if "queue" in OPTIONS[name] else k < 2)
        assert results[0].applied == results[1].applied == (k not in (0, 4, 5))
        assert_same(everything(methods[0])["modules"], everything(methods[1])["modules"])
    assert_same(everything(methods[0]), everything(methods[1]))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_refused_step_changes_nothing_at_all(name, on_device):
    method = build(on_device, **OPTIONS[name])
    for k in range(4):
        step(method, k)
    before = everything(method)
    result = step(method, 4, broken=True)
    assert result.is_read != on_device, "the path that is tested was taken"
    assert not result.applied and result.loss != result.loss
    after = everything(method)
    for state in (before, after):
        state["optimizer"]["optimizers"]["model"].pop("param_groups")  # the learning rate is that of the schedule
        state["optimizer"].pop("scaler")  # which a refused step lowers
    assert_same(after, before)
    assert step(method, 5).applied
    head = [state["modules"]["model"]["head.weight"] for state in (before, everything(method))]
    assert not torch.equal(*head)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "average", "queue", "momentum encoder"])
def test_nothing_is_read_between_log_points(name, monkeypatch):
    monkeypatch.setattr(memory_queue, "can_read", lambda value: False)  # as on a GPU
    method = build(True, **OPTIONS[name])
    for k in range(4):  # optimizer states and averages begin, the queue fills
        step(method, k)
    with Reads() as reads:
        results = [step(method, k) for k in range(4, 14)]
        assert reads.count == 0
        assert all(result.applied for result in results)


class Given:
    """A loader of these batches."""

    views = 1

    def __init__(self, broken=()):
        self.broken = broken

    def batches(self, start, stop, position=None):
        return (batch(k, k + 1 in self.broken) for k in range(start, stop))


class Remember(Callback):
    """What the lines of a run hold without asking."""

    def __init__(self, ask=()):
        self.lines, self.ask = {}, ask

    def on_step(self, state):
        if state.step in self.ask:
            assert isinstance(state.line["loss"], float)
        self.lines[state.step] = dict(state.line)


def test_the_loop_reads_at_log_points_only():
    method, reads, counts = build(True, **OPTIONS["AdamW"]), Reads(), {}

    class Count(Callback):
        def on_step(self, state):
            counts[state.step] = reads.count

    guards = [DivergenceGuard(every=10), CollapseGuard(every=10)]
    with reads:
        run_loop(method, Given(), Schedule(20, 1e-2), [*guards, Count()])
    assert counts[2] == counts[9] and counts[11] == counts[19], "from the second step on nothing is asked"


def test_a_line_has_the_loss_for_those_who_ask():
    host, device = Remember(), Remember(ask=(5,))
    run_loop(build(False, **OPTIONS["AdamW"]), Given(), Schedule(8, 1e-2), [host])
    run_loop(build(True, **OPTIONS["AdamW"]), Given(), Schedule(8, 1e-2), [device])
    assert all("loss" in line for line in host.lines.values())
    assert [step for step, line in device.lines.items() if "loss" in line] == [1, 5]
    assert device.lines[5] == host.lines[5]
    with pytest.raises(KeyError, match="nothing"):
        LogLine.__missing__(LogLine.__new__(LogLine), "nothing")


@pytest.mark.parametrize("on_device", [False, True])
def test_a_run_that_diverges_ends_with_the_same_words(on_device):
    method = build(on_device, **OPTIONS["AdamW"])
    with pytest.raises(
        NumericError, match=r"loss nan and gradient norm nan at step 14, 3 steps in a row \(samples \[0, "
    ):
        run_loop(method, Given({5, 6, 12, 13, 14}), Schedule(40, 1e-2), [DivergenceGuard(every=10)])


def test_what_a_checkpoint_remembers_of_refused_steps_is_read_for_it():
    method, guard = build(True, **OPTIONS["AdamW"]), DivergenceGuard(every=10)
    found = {}

    class Save(Callback):
        def on_step(self, state):
            if state.step == 6:
                found.update(guard.state_dict())

    run_loop(method, Given({5, 6}), Schedule(8, 1e-2), [guard, Save()])
    assert found == {"skipped": 2} and guard.skipped == 0


def test_a_method_that_remembers_more_than_tensors_is_decided_by_the_host():
    class Counting(Supervised):
        steps = 0

        def after_step(self, terms):
            self.steps += 1

    torch.manual_seed(0)
    model = Embedder(EmbedderSpec("convnet", width=4, depth=2, dim=4), (1, 8, 8))
    method = Counting(model, SupCon(), optimizer=OPTIMIZERS["AdamW"])
    method.optimizer.decides_on_device = True
    results = [method.step(batch(k, broken=k == 3), 1e-2, 0.5) for k in range(5)]
    assert all(result.is_read for result in results) and method.steps == 4


def test_inputs_that_are_not_finite_leave_no_trace():
    """Neither in the statistics of norms nor in thresholds that follow the data."""
    for on_device in (False, True):
        method = build(on_device, lambda: SupCon(difficulty=AdaptiveThreshold(momentum=0.5)), **OPTIONS["AdamW"])
        for k in range(3):
            method.step(batch(k), 1e-2, 0.5)
        before = everything(method)["modules"]
        assert not method.step(batch(3, broken=True), 1e-2, 0.5).applied
        assert_same(everything(method)["modules"], before)
        assert method.step(batch(4), 1e-2, 0.5).applied


def test_class_vectors_are_decided_on_the_device_too():
    methods = [build(d, lambda: ArcFace(4, 4), classes=torch.arange(4), **OPTIONS["AdamW"]) for d in (False, True)]
    for k in range(5):
        results = [method.step(batch(k, broken=k == 3), 1e-2, 0.5) for method in methods]
        assert results[0].applied == results[1].applied == (k != 3)
    assert not step(methods[1], 6).is_read
    step(methods[0], 6)
    assert_same(everything(methods[0])["modules"], everything(methods[1])["modules"])


def test_a_snapshot_goes_back_into_the_same_tensors():
    tensors = [torch.rand(3), torch.tensor(4), torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    values, snapshot = [t.clone() for t in tensors], TensorSnapshot(tensors)
    for refused, back in ((torch.tensor(False), False), (torch.tensor(True), True), (None, True)):
        for tensor in tensors:
            tensor.fill_(7)
        snapshot.restore(refused)
        assert all(torch.equal(t, v) == back for t, v in zip(tensors, values, strict=True))


def test_optimizers_are_fused_where_torch_can_and_the_table_is_open():
    assert fuse_optimizer("AdamW") == {"kind": "AdamW", "fused": True}
    assert fuse_optimizer({"kind": "SGD", "momentum": 0.9}) == {"kind": "SGD", "momentum": 0.9, "fused": True}
    for table in ("RMSprop", {"kind": "AdamW", "fused": False}, {"kind": "Adam", "foreach": True}):
        assert fuse_optimizer(table) == table
    assert not build(False).optimizer.is_fused, "nothing changes on a processor"


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_checkpoint_of_another_device_keeps_how_this_one_steps(kind):
    table = OPTIMIZERS[kind]
    plain = {key: value for key, value in table.items() if key != "fused"}
    for first, second in ((plain, table), (table, plain)):
        before, after = build(False, optimizer=first), build(second is table, optimizer=second)
        for k in range(3):
            step(before, k)
        after.load_state_dict(everything(before))
        fused = [bool(group["fused"]) for group in after.optimizer.optimizers["model"].param_groups]
        assert set(fused) == {second is table}
        results = [step(after, k, broken=k == 5) for k in range(3, 7)]
        assert [result.applied for result in results] == [True, True, False, True]
        for k in range(3, 7):
            step(before, k, broken=k == 5)
        for a, b in zip(before.model.parameters(), after.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_a_compiled_network_is_the_same_network():
    def failing(graph, inputs):
        raise RuntimeError("no compiler\nhere")

    torch.manual_seed(0)
    network, notes = nn.Sequential(nn.Linear(3, 3)), []
    names, x = list(network.state_dict()), torch.rand(2, 3)
    wanted = network(x)
    with compile_networks([network], notes.append, backend="eager"):
        assert network._compiled_call_impl is not None
        assert torch.equal(network(x), wanted)
        assert list(network.state_dict()) == names
        assert copy.deepcopy(network)._compiled_call_impl is None, "averages are not compiled"
    assert network._compiled_call_impl is None and not notes
    torch._dynamo.reset()
    with compile_networks([network], notes.append, backend=failing):
        assert torch.equal(network(x), wanted) and torch.equal(network(x), wanted)
    assert len(notes) == 1 and "\n" not in notes[0] and "cannot be compiled" in notes[0]


def test_a_recipe_compiles_its_network_and_says_what_holds(source, tmp_path, monkeypatch):
    compiled, notes = [], []

    @contextmanager
    def remember(networks, on_note):
        compiled.extend(networks)
        with compile_networks(networks, on_note, backend="eager"):
            yield

    monkeypatch.setattr(from_recipe, "compile_networks", remember)
    plain = train(tiny(source), tmp_path / "plain", tensorboard=False, on_note=notes.append)
    assert not compiled and RESUMES not in notes
    result = train(tiny(source, compile=True), tmp_path / "compiled", tensorboard=False, on_note=notes.append)
    assert compiled == [result.model] and RESUMES in notes
    for folder in ("plain", "compiled"):
        assert (tmp_path / folder / "model.safetensors").exists()
    assert result.model.state_dict().keys() == plain.model.state_dict().keys()
    for name, weight in result.model.state_dict().items():
        torch.testing.assert_close(weight, plain.model.state_dict()[name], msg=name)
