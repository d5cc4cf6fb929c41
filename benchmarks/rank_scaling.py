"""How training steps scale with ranks on CPUs: ``python benchmarks/rank_scaling.py [--ranks 1 2] [--rounds 3]``.

Strong: one batch of 256 for all ranks together. Weak: 128 samples for each rank. The network is
a convolutional one for images of 32 x 32. Each rank has one thread; numbers of
ranks take turns, and the table gives the best round of each. On a machine that others use too, the time that a step
takes says little; the processor time of a rank, which leaves out waiting, says how much work it has. Efficiency is the
processor time of one sample on the fewest ranks over that on these, all ranks together.
"""

import argparse
import tempfile
import time
from multiprocessing import get_context

import numpy as np
import torch
import torch.distributed as dist

from mettle.data import Augment, Loader, PKBatchSampler, Samples
from mettle.data.inputs import ImageArray
from mettle.data.rank_share import RankShare
from mettle.losses import ArcFace, SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.train import Method, Supervised

STEPS, WARM, CLASSES = 8, 2, 512


def build_method(loss: str) -> Method:
    torch.manual_seed(0)
    model = Embedder(EmbedderSpec("convnet", width=32, depth=3, dim=128), (3, 32, 32))
    classes = torch.arange(CLASSES) if loss == "ArcFace" else None
    return Supervised(model, ArcFace(CLASSES, 128) if loss == "ArcFace" else SupCon(), classes=classes)


def measure(rank: int, ranks: int, folder: str, jobs: list[tuple[str, int]], queue) -> None:
    """Seconds a step of each job, as this rank has them."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{ranks}", rank=rank, world_size=ranks)
    labels = np.arange(16 * CLASSES) // 16
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 32, 32, 3), np.uint8)
    samples, found = Samples.of(ImageArray(images), labels), []
    for loss, batch in jobs:
        method = build_method(loss)
        order = PKBatchSampler(labels, batch // 4, 4)
        loader = Loader(samples, order, Augment(), share=RankShare(rank, ranks))
        spent = []
        for step, one in enumerate(loader.batches(0, STEPS)):
            began = time.perf_counter(), time.process_time()
            method.step(one, 1e-3, step / STEPS)
            spent.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        found.append(np.median(spent[WARM:], axis=0).tolist())
    if rank == 0:
        queue.put(found)
    if ranks > 1:
        dist.destroy_process_group()


def run(ranks: int, jobs: list[tuple[str, int]]) -> list[list[float]]:
    """The same jobs on so many processes."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.Queue()
        started = [context.Process(target=measure, args=(k, ranks, folder, jobs, queue)) for k in range(ranks)]
        for process in started:
            process.start()
        found = queue.get(timeout=600)
        for process in started:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    best: dict[tuple[int, str, str], np.ndarray] = {}
    names = [(loss, kind) for loss in ("SupCon", "ArcFace") for kind in ("strong", "weak")]
    for _ in range(options.rounds):
        for ranks in options.ranks:
            jobs = [(loss, batch_size(kind, ranks)) for loss, kind in names]
            for (loss, kind), seconds in zip(names, run(ranks, jobs), strict=True):
                key = ranks, loss, kind
                best[key] = np.minimum(best.get(key, np.inf), seconds)
    one = min(options.ranks)
    print("| loss | scaling | ranks | batch | ms a step | of them processor time of a rank | efficiency |")
    print("|---|---|---|---|---|---|---|")
    for loss, kind in names:
        alone = one * best[one, loss, kind][1] / batch_size(kind, one)
        for ranks in options.ranks:
            (wall, cpu), batch = best[ranks, loss, kind], batch_size(kind, ranks)
            share = alone / (ranks * cpu / batch)
            print(f"| {loss} | {kind} | {ranks} | {batch} | {wall * 1e3:.1f} | {cpu * 1e3:.1f} | {share:.2f} |")


def batch_size(kind: str, ranks: int) -> int:
    """Samples in the batch of all ranks."""
    return 256 if kind == "strong" else 128 * ranks


if __name__ == "__main__":
    main()
