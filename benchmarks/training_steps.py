"""Training steps on one GPU: the trainer against loops that somebody careful would write, and a CUDA graph.

    python benchmarks/training_steps.py out.json                 every part, in less than three minutes
    python benchmarks/training_steps.py out.json --parts resnet18
    python benchmarks/training_steps.py --device cpu --quick     a try on a processor, whose numbers mean nothing

All loops of a part train the same network from the same state with the same loss (SupCon) on the same pictures:
bfloat16 autocast, channels last, fused AdamW, no decay of biases and norms.

    trainer             `run_loop` with the loader and the callbacks of every run: guards, and a log line every 10 steps
    trainer, compiled   the same with `train.compile`
    trainer, graph      the same with `train.cuda_graph`
    eager               batches ready in pinned memory, copied without waiting, the loss read every 10 steps
    compiled            the same with `torch.compile` of the whole network
    CUDA graph          of the small network: forward, backward and optimizer replayed in one launch, inputs in place

Rounds take turns; the first steps of a round are not timed. Of each loop the best round and the median are given, in
milliseconds a step. The file is written anew after every round. After ``--seconds`` no loop is built and no round
begins, and the script says which were left out. It runs where only torch, torchvision and NumPy are installed
(`stand_ins`).
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median

import numpy as np
import torch
from stand_ins import MISSING
from torch import Tensor, nn

from mettle.data.dataset import Samples
from mettle.data.inputs import ImageArray
from mettle.data.loader import Loader
from mettle.data.sampler import PKBatchSampler
from mettle.data.transforms import Augment
from mettle.losses import SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.train.callbacks.base import Callback
from mettle.train.callbacks.guards import CollapseGuard, DivergenceGuard
from mettle.train.callbacks.logs import JsonLog
from mettle.train.compilation import compile_networks
from mettle.train.methods.supervised import Supervised
from mettle.train.optim import Constant, Schedule, weight_decay_groups
from mettle.train.step_graph import record_steps
from mettle.train.trainer import run_loop

LR, DECAY, DIM, EVERY = 1e-4, 0.01, 128, 10
PARTS = {  # spec of the network, its input, classes and samples of a batch, timed steps of a round
    "resnet18": (EmbedderSpec("resnet18", dim=DIM), (3, 128, 64), (64, 4), 24),
    "convnet": (EmbedderSpec("convnet", width=32, depth=4, dim=DIM), (1, 32, 32), (32, 4), 100),
    "resnet50": (EmbedderSpec("resnet50", dim=DIM), (3, 128, 64), (64, 4), 14),
}
WARM = 6  # steps of every round before it is timed


class Data:
    """Pictures in memory, and batches of them in pinned memory for the loops that are not ours."""

    def __init__(self, shape: tuple[int, int, int], batch: tuple[int, int], device: str):
        channels, *sides = shape
        classes, each = batch
        rng = np.random.default_rng(0)
        self.labels = np.repeat(np.arange(4 * classes), 10 * each)  # an epoch has 40 batches
        means = rng.integers(40, 200, (4 * classes, 1, 1, channels))
        noise = rng.integers(-40, 40, (len(self.labels), *sides, channels))
        self.images = np.clip(means[self.labels] + noise, 0, 255).astype(np.uint8)
        self.sampler, self.device = PKBatchSampler(self.labels, classes, each, 0), device
        orders = self.sampler.epoch_batches(0)
        self.batches = [(self._pin(self.images[rows]), self._pin(self.labels[rows])) for rows in orders]

    def _pin(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self.device == "cuda" else tensor

    def loader(self) -> Loader:
        """Ours."""
        samples = Samples.of(ImageArray(self.images), self.labels)
        return Loader(samples, self.sampler, Augment(), device=self.device)

    def take(self, k: int) -> tuple[Tensor, Tensor]:
        """A batch on the device, nobody waited for."""
        images, labels = (x.to(self.device, non_blocking=True) for x in self.batches[k % len(self.batches)])
        return images.permute(0, 3, 1, 2).float().div_(255), labels


class Clock(Callback):
    """When the first steps of a round were done, and the last."""

    def __init__(self, device: str, steps: int):
        self.device, self.steps, self.times = device, steps, {}

    def on_step(self, state) -> None:
        """Look at the clock where it is due."""
        if state.step in (WARM, WARM + self.steps):
            synchronize(self.device)
            self.times[state.step] = time.perf_counter()


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def build_model(name: str, device: str) -> Embedder:
    """The network of a part, always from the same state."""
    spec, shape, *_ = PARTS[name]
    torch.manual_seed(0)
    return Embedder(spec, shape).to(device)


def trainer_round(name: str, data: Data, steps: int, compiled: bool, graph: bool = False) -> Callable[[], float]:
    """Rounds of our loop, as a recipe runs it."""
    method = Supervised(build_model(name, data.device), SupCon(), precision="bfloat16", weight_decay=DECAY)
    options = ExitStack()
    options.enter_context(compile_networks([method.model] if compiled else [], print))
    options.enter_context(record_steps(method, print) if graph else nullcontext())

    def run() -> float:
        assert options is not None  # alive: where it is collected, it ends
        clock = Clock(data.device, steps)
        with tempfile.TemporaryDirectory() as folder:
            callbacks = [*usual_callbacks(Path(folder)), clock]
            run_loop(method, data.loader(), Schedule(WARM + steps, LR, Constant()), callbacks)
        return 1000 * (clock.times[WARM + steps] - clock.times[WARM]) / steps

    return run


def usual_callbacks(folder: Path) -> list[Callback]:
    """What looks at the steps of every run."""
    return [DivergenceGuard(None, EVERY), JsonLog(folder, EVERY), CollapseGuard(0.0, 0.0)]


def careful_round(name: str, data: Data, steps: int, compiled: bool) -> Callable[[], float]:
    """Rounds of a loop as somebody careful writes it."""
    model, loss = build_model(name, data.device), SupCon()
    groups = [{k: v for k, v in g.items() if k in ("params", "weight_decay")} for g in decay_groups(model)]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=data.device == "cuda")
    network = torch.compile(model, dynamic=False) if compiled else model

    def run() -> float:
        for k in range(WARM + steps):
            if k == WARM:
                synchronize(data.device)
                began = time.perf_counter()
            x, y = data.take(k)
            with torch.autocast(data.device, torch.bfloat16):
                z = network(x)
            value = loss(z, y)
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            optimizer.step()
            if (k + 1) % EVERY == 0:
                value.item()
        synchronize(data.device)
        return 1000 * (time.perf_counter() - began) / steps

    return run


def decay_groups(model: nn.Module) -> list[dict]:
    """Weight decay for matrices and kernels only."""
    return weight_decay_groups(model.parameters(), DECAY)


def plain_supcon(z: Tensor, y: Tensor, temperature: float = 0.1) -> Tensor:
    """SupCon in plain operations, for a graph to record."""
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(own, -torch.inf)
    positive = (y[:, None] == y[None, :]) & ~own
    log_p = logits - logits.logsumexp(1, keepdim=True)
    return -(log_p.masked_fill(~positive, 0.0).sum(1) / positive.sum(1)).mean()


def graph_round(name: str, data: Data, steps: int) -> Callable[[], float]:
    """Rounds of a step that was recorded once: what the device needs when the host costs nothing."""
    model = build_model(name, data.device)
    groups = [{k: v for k, v in g.items() if k in ("params", "weight_decay")} for g in decay_groups(model)]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True, capturable=True)
    x, y = data.take(0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            z = model(x)
        plain_supcon(z, y).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()

    def run() -> float:
        graph.replay()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            graph.replay()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began) / steps

    return run


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say how long something took, and go on without it where it fails."""
    began = time.perf_counter()
    try:
        yield
        print(f"  {what}: {time.perf_counter() - began:.0f} s", flush=True)
    except Exception as problem:
        print(f"  {what} failed: {type(problem).__name__}: {' '.join(str(problem).split())[:300]}", flush=True)


Times = dict[str, dict[str, float]]  # of every loop


def measure(name: str, asked: argparse.Namespace, deadline: float, keep: Callable[[Times], None]) -> None:
    """The times of all loops of a part, rounds in turns; what was found by then is handed to ``keep`` after each."""
    _, shape, batch, steps = PARTS[name]
    device = asked.device
    steps, batch = (2, (8, 4)) if asked.quick else (steps, batch)
    data = Data(shape, batch, device)
    kinds: dict[str, Callable[[], Callable[[], float]]] = {
        "eager": lambda: careful_round(name, data, steps, compiled=False),
        "trainer": lambda: trainer_round(name, data, steps, compiled=False),
        "compiled": lambda: careful_round(name, data, steps, compiled=True),
        "trainer, compiled": lambda: trainer_round(name, data, steps, compiled=True),
        "trainer, graph": lambda: trainer_round(name, data, steps, compiled=False, graph=True),
    }
    if device != "cuda":
        del kinds["trainer, graph"]
    if name == "convnet" and device == "cuda":
        kinds["CUDA graph"] = lambda: graph_round(name, data, steps)
    ready: dict[str, Callable[[], float]] = {}
    for kind, build in kinds.items():
        if time.perf_counter() > deadline:
            print(f"  {name}, {kind}: left out, there is no time", flush=True)
            continue
        with told(f"{name}, {kind}, first round"):
            run = build()
            run()
            ready[kind] = run
    times: dict[str, list[float]] = {kind: [] for kind in ready}
    for turn in range(asked.rounds):
        if turn and time.perf_counter() > deadline:
            print(f"  {name}: {turn} of {asked.rounds} rounds, there is no time for more", flush=True)
            break
        for kind, run in ready.items():
            times[kind].append(run())
        keep({kind: {"best": round(min(t), 3), "median": round(median(t), 3)} for kind, t in times.items()})


def as_table(found: dict[str, Times]) -> str:
    """Milliseconds a step, and the ratio to the careful loop of the same kind."""
    lines = ["| network | loop | best, ms | median, ms | of the careful loop |", "|---|---|---|---|---|"]
    for name, rows in found.items():
        for kind, row in rows.items():
            rivals = {"trainer": "eager", "trainer, compiled": "compiled", "trainer, graph": "CUDA graph"}
            rival = rivals.get(kind)
            ratio = f"{row['median'] / rows[rival]['median']:.3f}" if rival in rows else ""
            lines.append(f"| {name} | {kind} | {row['best']:.2f} | {row['median']:.2f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the parts, one after the other."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description="Training steps against careful loops.")
    parser.add_argument("out", nargs="?", help="where the numbers go, as JSON")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=130.0, help="after which no loop is built, no round begins")
    parser.add_argument("--quick", action="store_true", help="two steps of small batches")
    asked = parser.parse_args()
    found: dict[str, Times] = {}
    place = torch.cuda.get_device_name() if asked.device == "cuda" else asked.device
    missing = f", without {', '.join(sorted(MISSING.missing))}" if MISSING.missing else ""
    print(f"torch {torch.__version__}, {place}{missing}", flush=True)
    for name in asked.parts:

        def keep(times: Times, name: str = name) -> None:
            found[name] = times
            if asked.out:
                record = {"torch": torch.__version__, "device": place, "milliseconds": found}
                Path(asked.out).write_text(json.dumps(record, indent=1) + "\n")

        measure(name, asked, began + asked.seconds, keep)
        if name in found:
            print(as_table({name: found[name]}), flush=True)
    print(as_table(found))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
