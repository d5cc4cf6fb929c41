"""Gradient caching: the gradient of the whole batch, in the memory of a micro-batch."""

import copy
import json
import os
import sys
import traceback
import weakref
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from mettle.data.dataset import Samples
from mettle.data.inputs import ImageArray
from mettle.data.loader import Batch
from mettle.difficulty import Relative, Threshold
from mettle.errors import InputError
from mettle.losses import AdaCos, ArcFace, CosFace, InfoNCE, SimilarityClassification, SupCon, Triplet, WeightedSum
from mettle.model import ModuleEmbedder
from mettle.pairs import across_ranks
from mettle.train import GradientCaching, HardnessAware, Similarity, Supervised, TwoEncoder, train
from mettle.train.from_recipe import GivenObjects
from mettle.train.gradient_caching import cached_forward
from mettle.train.methods.distillation import DistillationSettings
from mettle.train.methods.hardness_aware import Synthesis
from mettle.train.methods.past_embeddings import QueueSettings
from mettle.train.recipe import parse_recipe
from processes import Forked

from .conftest import tiny

N, WIDE, DIM = 26, 5, 4
SIDE = 64  # of large pictures
LOSS_BYTES = 1 << 25  # that a loss over 4,096 embeddings takes on a processor


class Noise(nn.Module):
    """Augmentation inside of a network: another one for every input, each time."""

    def forward(self, x):
        return x * (1 + 0.3 * torch.randn(len(x), 1, dtype=x.dtype)) + 0.1 * torch.rand_like(x)


def perceptron(*more, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDE, 12), nn.Tanh(), *more, nn.Linear(12, DIM)).double()


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels_of(count):
    return torch.arange(count) % 6


def in_parts(network, x, parts):
    """The same micro-batches with plain autograd, which holds all of them."""
    bounds = [k * len(x) // parts for k in range(parts + 1)]
    return torch.cat([network(x[start:stop]) for start, stop in pairwise(bounds)])


LOSSES = {
    "supcon": lambda: SupCon(0.2, difficulty=Threshold()),
    "triplet": lambda: Triplet(0.3, mining="hardest"),
    "class vectors": lambda: CosFace(6, DIM).double(),
    "moving scale": lambda: AdaCos(6, DIM).double(),
    "sum": lambda: WeightedSum(
        {"pairs": SupCon(0.2), "classes": ArcFace(6, DIM)}, {"pairs": 1.0, "classes": 0.5}
    ).double(),
    "function": lambda: lambda z, y: (z - z.mean(0)).square().sum() * (y + 1).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_whole_batch(name):
    x, network = drawn(N, WIDE), perceptron()
    torch.manual_seed(2)
    loss = LOSSES[name]()
    other = copy.deepcopy(loss)
    own = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    wanted = loss(network(x), labels_of(N))
    found = other(GradientCaching(network, rows=4)(x), labels_of(N))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    theirs = list(other.parameters()) if isinstance(other, nn.Module) else []
    expected = torch.autograd.grad(wanted, [*network.parameters(), *own])
    torch.testing.assert_close(
        torch.autograd.grad(found, [*network.parameters(), *theirs]), expected, rtol=1e-10, atol=1e-12
    )


def test_float32_is_exact_to_a_millionth():
    network, x = perceptron().float(), drawn(N, WIDE).float()
    wanted = torch.autograd.grad(SupCon(0.2)(network(x), labels_of(N)), list(network.parameters()))
    found = torch.autograd.grad(SupCon(0.2)(cached_forward(network, x, 5), labels_of(N)), list(network.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "parts"), [(1, 26), (4, 7), (13, 2), (25, 2), (26, 1), (1000, 1)])
def test_dropout_and_augmentation_are_drawn_again_and_everything_after_is_as_ever(rows, parts):
    network, x = perceptron(Noise(), nn.Dropout(0.4)), drawn(N, WIDE).requires_grad_()
    torch.manual_seed(3)
    wanted = in_parts(network, x, parts)
    expected = torch.autograd.grad(SupCon(0.2)(wanted, labels_of(N)), [x, *network.parameters()])
    after = torch.rand(3)
    torch.manual_seed(3)
    found = cached_forward(network, x, rows)
    gradients = torch.autograd.grad(SupCon(0.2)(found, labels_of(N)), [x, *network.parameters()])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_that_of_both_passes(dtype):
    network, x = perceptron(nn.Dropout(0.2)).float(), drawn(N, WIDE).float()

    def gradients(forward):
        torch.manual_seed(4)
        with torch.autocast("cpu", dtype):
            z = forward()
        assert z.dtype == dtype
        # The cast is within reach of what follows in the same block: a plain pass still has its gradient.
        return torch.autograd.grad(1024 * SupCon(0.2)(z.float(), labels_of(N)), list(network.parameters()))

    wanted = gradients(lambda: in_parts(network, x, 7))
    found = gradients(lambda: cached_forward(network, x, 4))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


def test_a_plain_pass_beside_a_cached_one_keeps_its_gradient_in_mixed_precision():
    network, x = perceptron().float(), drawn(N, WIDE).float()
    with torch.autocast("cpu", torch.bfloat16):
        cached_forward(network, x, 4)
        z = network(x)
    assert all(
        g is not None for g in torch.autograd.grad(z.float().sum(), list(network.parameters()), allow_unused=True)
    )


def test_batch_norms_see_micro_batches_and_move_once():
    network, x = perceptron(nn.BatchNorm1d(12)), drawn(N, WIDE)
    plain = copy.deepcopy(network)
    wanted = in_parts(plain, x, 3)
    found = cached_forward(network, x, 9)
    torch.testing.assert_close(found, wanted)
    SupCon(0.2)(wanted, labels_of(N)).backward()
    SupCon(0.2)(found, labels_of(N)).backward()
    assert int(dict(network.named_buffers())["2.num_batches_tracked"]) == 3
    for a, b in zip(network.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_parameters_in_half_precision_get_sums_in_float32():
    network = nn.Linear(1, 1, bias=False).bfloat16()
    cached_forward(network, torch.ones(4096, 1, dtype=torch.bfloat16), 1).sum().backward()
    assert network.weight.grad is not None
    assert network.weight.grad.item() == 4096  # one by one in bfloat16 they would stop at 256


def test_inputs_may_be_any_tuples_and_mappings_of_tensors():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.scale = nn.Embedding(9, DIM), nn.Parameter(torch.tensor(2.0))

        def forward(self, ids, *, mask, temperature):
            return (self.words(ids) * mask["attention"][:, :, None]).sum(1) * self.scale / temperature

    torch.manual_seed(0)
    network, ids = Text(), torch.randint(0, 9, (N, 3))
    options = {"mask": {"attention": torch.rand(N, 3)}, "temperature": torch.tensor(0.7, requires_grad=True)}
    given = [*network.parameters(), options["temperature"]]
    wanted = torch.autograd.grad(SupCon(0.2)(network(ids, **options), labels_of(N)), given)
    found = torch.autograd.grad(SupCon(0.2)(GradientCaching(network, 7)(ids, **options), labels_of(N)), given)
    torch.testing.assert_close(found, wanted)


def test_without_gradient_there_is_one_pass():
    calls = []
    network = perceptron()
    network.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        z = cached_forward(network, drawn(N, WIDE), 10)
    assert len(calls) == 3
    assert not z.requires_grad


class Counts(nn.Module):
    """What it gives follows from how often it was called."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDE, DIM), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


def test_what_cannot_be_cached_is_refused_in_one_line():
    x, network = drawn(N, WIDE).float(), nn.Linear(WIDE, DIM)
    with pytest.raises(InputError, match="gave other embeddings when the same inputs came again"):
        cached_forward(Counts(), x, 4).sum().backward()
    with pytest.raises(InputError, match="create_graph"):
        torch.autograd.grad(cached_forward(network, x, 4).square().sum(), network.weight, create_graph=True)
    with pytest.raises(InputError, match="a row per input, got tuple"):
        cached_forward(network, x, 4, lambda part: (network(part), part))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a row per input, got \\(\\)"):
        cached_forward(network, x, 4, lambda part: network(part).sum())
    with pytest.raises(InputError, match=r"a row per input, got \(26, 5\), \(3, 5\)"):
        cached_forward(network, (x, x[:3]), 4)
    with pytest.raises(InputError, match="no tensor"):
        GradientCaching(network, 4)("words")
    for rows in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="whole number, at least 1"):
            GradientCaching(network, rows)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module"):
        GradientCaching(lambda x: x)  # type: ignore[arg-type]


def test_weights_that_changed_between_both_passes_are_refused_by_torch():
    network, x = nn.Linear(WIDE, DIM), drawn(N, WIDE).float()
    value = cached_forward(network, x, 4).square().sum()
    with torch.no_grad():
        network.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_embeddings_that_are_not_finite_are_told_by_the_loss_as_ever():
    network, x = perceptron(), drawn(N, WIDE)
    x[3] = torch.nan
    value = cached_forward(network, x, 4).sum()
    value.backward()
    assert value.isnan()


# Methods: a step is the same step.


class Wrapped(nn.Module):
    """A network without batch norm, with what methods ask of ours."""

    def __init__(self, seed=0):
        super().__init__()
        self.backbone, self.head, self.dim, self.shape = (
            perceptron(seed=seed),
            nn.Linear(DIM, DIM).double(),
            DIM,
            (WIDE,),
        )
        self.spec = type("Spec", (), {"unit": True})

    def features(self, x):
        return self.backbone(x)

    def forward(self, x):
        return nn.functional.normalize(self.head(self.features(x)), dim=1)


def wrapped(seed=0) -> Any:
    return Wrapped(seed)


def with_neck() -> Any:
    return ModuleEmbedder(perceptron(), (WIDE,), neck="batchnorm", dim=DIM).double()


def labelled(k):
    return Batch(drawn(24, WIDE, seed=k), torch.arange(24) // 4, torch.arange(24), k, 0, 0.0)


def viewed(k):
    x, ids = drawn(12, WIDE, seed=k), torch.arange(12)
    return Batch(torch.cat([x, x + 0.1]), ids.repeat(2), ids.repeat(2), k, 0, 0.0)


def paired(k):
    more: dict[str, Any] = {"target": (torch.arange(12) % 2).double(), "weight": torch.ones(12).double()}
    return Batch(drawn(24, WIDE, seed=k), torch.arange(24) // 4, torch.arange(24), k, 0, 0.0, **more)


QUEUE = QueueSettings(40)
CLASSES = torch.arange(6)
SPACES: dict[str, Any] = {"pairs": "before", "classes": "after"}
METHODS: dict[str, tuple[Any, Any]] = {
    "supervised": (lambda **o: Supervised(wrapped(), SupCon(0.2), **o), labelled),
    "clipped average": (lambda **o: Supervised(wrapped(), SupCon(0.2), clip=0.1, ema=0.5, **o), labelled),
    "class vectors": (lambda **o: Supervised(wrapped(), CosFace(6, DIM).double(), classes=CLASSES, **o), labelled),
    "two spaces": (
        lambda **o: Supervised(
            with_neck(),
            WeightedSum({"pairs": SupCon(0.2), "classes": ArcFace(6, DIM)}, spaces=SPACES).double(),
            classes=CLASSES,
            **o,
        ),
        labelled,
    ),
    "distillation": (
        lambda **o: Supervised(wrapped(), SupCon(0.2), ema=0.5, distill=DistillationSettings(1.0), **o),
        labelled,
    ),
    "queue": (lambda **o: Supervised(wrapped(), SupCon(0.2), queue=QUEUE, **o), labelled),
    "momentum queue": (
        lambda **o: TwoEncoder(wrapped(), InfoNCE(0.5), queue=QueueSettings(40, "momentum", 0.9), **o),
        viewed,
    ),
    "two encoders": (
        lambda **o: TwoEncoder(wrapped(), InfoNCE(0.5, difficulty=Relative()), wrapped(seed=7), **o),
        viewed,
    ),
    "similarity": (lambda **o: Similarity(wrapped(), SimilarityClassification().double(), **o), paired),
    "hardness-aware": (
        lambda **o: HardnessAware(
            Triplet(0.3, squared=True),
            wrapped(),
            classes=CLASSES,
            synthesis=Synthesis(generator_rate=1e-6),  # with SGD the published one, for Adam, diverges
            **o,
        ),
        labelled,
    ),
}


def steps(name, count, **options):
    make, batch = METHODS[name]
    torch.manual_seed(0)
    method = make(optimizer="SGD", **options)
    largest = []
    for network in (method.model, getattr(method, "biased", None)):
        if network is not None:
            part = getattr(network, "backbone", getattr(network, "module", None))
            assert part is not None
            part.register_forward_pre_hook(lambda _, given: largest.append(len(given[0])))
    results = [method.step([batch(2 * k), batch(2 * k + 1)], 0.1, k / count) for k in range(count)]
    assert all(result.applied for result in results)
    return method, [result.loss for result in results], max(largest)


@pytest.mark.parametrize("name", METHODS)
def test_the_steps_of_every_method_are_the_same(name):
    plain, wanted, _ = steps(name, 3)
    cached, found, largest = steps(name, 3, cached=5)
    assert largest <= 5
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
    for key, module in plain.modules.items():
        for p, q in zip(module.state_dict().values(), cached.modules[key].state_dict().values(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-6 if p.dtype == torch.float32 else 1e-9, atol=1e-11)


def test_a_recipe_with_the_key_trains_says_what_batch_norms_see_and_resumes(source, tmp_path):
    notes: list[str] = []
    recipe = tiny(source).with_values({"batch.cached": 5})
    outcome = train(recipe, tmp_path / "run", tensorboard=False, on_note=notes.append)
    assert [note for note in notes if "micro-batch" in note] == [
        note for note in outcome.notes if "micro-batch" in note
    ]
    assert sum("those of at most 5 inputs" in note for note in notes) == 1
    assert outcome.finished


# Memory.


class Alive(TorchDispatchMode):
    """The most bytes that were held at once of what was made inside."""

    def __init__(self, *given):
        super().__init__()
        self.now = self.most = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor):
                self._count(made.untyped_storage())
        return out

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or size == 0:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self.known.discard(key)
        self.now -= size


def pictures_network():
    torch.manual_seed(0)
    layers = []
    for k in range(3):
        layers += [nn.Conv2d(16 if k else 1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))


def most_held(run, *given):
    with Alive(*given) as alive:
        run()
    return alive.most


def test_a_batch_of_4096_takes_the_memory_of_64():
    network, x, y = pictures_network(), torch.randn(4096, 1, 12, 12), torch.arange(4096) // 8
    weights = sum(p.numel() for p in network.parameters()) * 4
    small_tiles = {"engine": "tiled", "tile": 256}

    def step(forward, count):
        SupCon(0.2)(forward(x[:count]), y[:count], **small_tiles).backward()
        network.zero_grad()

    small = most_held(lambda: step(network, 64), x)
    cached = most_held(lambda: step(lambda part: cached_forward(network, part, 64), 4096), x)
    z = torch.randn(4096, 8, requires_grad=True)
    assert (
        most_held(lambda: SupCon(0.2)(z, y, **small_tiles).backward(), z) < small
    )  # the loss is over when the second pass begins
    embeddings, states = z.numel() * 4, 64 * 5056  # of random numbers, in bytes
    assert cached <= small + 4 * embeddings + 4 * weights + states
    assert most_held(lambda: step(network, 512), x) > 6 * small


def status(key: str) -> int:
    """A number of bytes that Linux tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def train_pictures(folder: str, count: int, cached: int) -> None:
    """Two steps of the trainer on so many pictures a batch; prints the most memory that they took."""
    torch.set_num_threads(1)
    pixels = np.random.default_rng(0).integers(0, 256, (4096, SIDE, SIDE, 3), np.uint8)
    samples = Samples.of(ImageArray(pixels), np.arange(4096) // 8, split=["train"] * 4096)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16 * 16, 8))
    values = {"data": {"source": "given"}, "loss": {"kind": "SupCon"}, "model": {"backbone": "given:given"}}
    values |= {"batch": {"classes": count // 8, "samples": 8, "cached": cached, "augment": "mild"}}
    recipe = parse_recipe(values | {"train": {"steps": 2, "device": "cpu", "collapse_gap": 0}})
    given = GivenObjects(samples, model=ModuleEmbedder.from_example(network, pixels[:4]), loss=SupCon(0.2))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = status("VmRSS")
    train(recipe, Path(folder) / f"{count}-{cached}", given=given, tensorboard=False)
    print(status("VmHWM") - before, flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of a process")
def test_the_trainer_takes_the_memory_of_64_and_a_batch_of_bytes(tmp_path):
    cases = {"small": (64, 0), "cached": (4096, 64), "plain": (4096, 0)}
    peak = {}
    for name, (count, cached) in cases.items():
        out, err = Forked(train_pictures, str(tmp_path), count, cached).communicate(timeout=300)
        assert out, err
        peak[name] = int(out.split()[-1])
    raw = 4096 * SIDE * SIDE * 3
    # One batch in use, one that waits and one that is being read.
    assert peak["cached"] < peak["small"] + 3 * raw + LOSS_BYTES
    assert peak["plain"] > peak["small"] + 10 * raw


def test_the_trainer_sees_the_same_inputs_with_and_without(source, tmp_path):
    """Losses of all steps are equal, with pictures that are changed at random, each micro-batch by itself."""
    found = {}
    for cached in (0, 5):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 8))
        recipe = tiny(source).with_values({"batch.cached": cached})
        recipe = recipe.with_values({"train.log_every": 1, "train.optimizer": {"kind": "SGD"}, "train.rate": 1e-3})
        model = ModuleEmbedder.from_example(network, np.zeros((4, 12, 12, 1), np.uint8))
        folder = tmp_path / str(cached)
        train(recipe, folder, given=GivenObjects(model=model, loss=SupCon(0.2)), tensorboard=False)
        found[cached] = [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert len(found[5]) == 12 and found[5] == pytest.approx(found[0], rel=1e-6)


# Ranks.


def work(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {}
    own = slice(0, 12) if rank == 0 else slice(12, N)  # 3 and 4 micro-batches of 4
    for name in ("plain", "norm"):
        network = perceptron(nn.Dropout(0.0), *([nn.BatchNorm1d(12)] if name == "norm" else []))
        loss = across_ranks(SupCon(0.2))
        wrapped = DistributedDataParallel(GradientCaching(network, 4))
        for _ in range(2):  # a second step finds the buckets of the first one ready
            network.zero_grad()
            loss(wrapped(drawn(N, WIDE)[own]), labels_of(N)[own]).backward()
        value = loss(wrapped(drawn(N, WIDE)[own]), labels_of(N)[own]).detach()
        found[name] = [value, *(p.grad for p in network.parameters())]
    try:
        cached_forward(DistributedDataParallel(network), drawn(N, WIDE), 4)
    except InputError as refusal:
        found["refusal"] = str(refusal)
    if rank == 0:
        torch.save(found, os.path.join(folder, "found.pt"))
    dist.destroy_process_group()


def launch(folder):
    """Both ranks, by forks of a process that has loaded everything."""
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            try:
                work(rank, folder)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        raise SystemExit("a rank failed")


def test_ranks_get_the_gradient_of_one_process(tmp_path):
    launched = Forked(launch, str(tmp_path))
    said = launched.communicate(timeout=120)
    assert launched.wait() == 0, "".join(said)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    network = perceptron()
    value = SupCon(0.2)(network(drawn(N, WIDE)), labels_of(N))
    wanted = [value.detach(), *torch.autograd.grad(value, list(network.parameters()))]
    torch.testing.assert_close(found["plain"], wanted, rtol=1e-10, atol=1e-12)
    assert all(bool(torch.isfinite(x).all()) for x in found["norm"])
    assert "put it around the cached network" in found["refusal"]
