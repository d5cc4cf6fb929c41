"""Training from JPEG files on one GPU, beside what its two halves do alone.

    python benchmarks/pipeline.py out.json                        every part, in less than 150 seconds
    python benchmarks/pipeline.py --parts large --network resnet50
    python benchmarks/pipeline.py --device cpu --workers 2 --quick     a try on a processor

The script writes its own files, 500 x 375 pixels in colour, and measures three rates, in images a second:

    steps        the trainer with the same pictures and the same augmentation, decoded in memory before
    DataLoader   a bare DataLoader of torch over the files: decoding, the same changes by torchvision's v2 transforms on
                 uint8 tensors, float32 in pinned memory; nobody trains
    end to end   the trainer from the files

The goal is an end to end rate of at least 0.9 of the smaller of the other two. Both loaders have the same files,
batches, number of processes (14) and prefetching, and give 224 x 224 pixels; random changes are those of
the preset that the part is named after. What decodes for the bare DataLoader is Pillow or torchvision.io, whichever is
faster here. Workers start, and their queues settle, before a rate is timed. Rounds take turns; the table has medians.
The file is written anew after every rate. After ``--seconds`` no other round begins.

It runs where only torch, torchvision, NumPy and Pillow are installed. Our decoder needs Pillow.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

from stand_ins import MISSING
from training_steps import DECAY, DIM, LR, synchronize, usual_callbacks

if "PIL" in MISSING.missing:
    sys.exit("pipeline.py: Pillow is not installed here, and mettle decodes with Pillow: nothing was measured")

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from mettle.data.dataset import Samples
from mettle.data.inputs import ImageFiles, load_into_memory
from mettle.data.loader import Loader
from mettle.data.sampler import PKBatchSampler
from mettle.data.transforms import Augment, find_preset
from mettle.losses import SupCon
from mettle.model import Embedder, EmbedderSpec
from mettle.model.backbones import import_torchvision
from mettle.train.callbacks.base import Callback
from mettle.train.methods.supervised import Supervised
from mettle.train.optim import Constant, Schedule
from mettle.train.trainer import run_loop

HEIGHT, WIDTH, QUALITY = 375, 500, 90  # of the files
PARTS = ("large", "photo")  # augmentation presets
PREFETCH = 2  # batches that each process reads ahead
GOAL = 0.9


def write_files(folder: Path, count: int) -> list[Path]:
    """JPEG files with large shapes, edges and fine texture, about as many bytes as a photograph of this size has."""

    def write(number: int) -> Path:
        rng = np.random.default_rng(number)
        picture = np.zeros((HEIGHT, WIDTH, 3), np.float32)
        for cells, height in ((4, 160), (24, 50), (120, 40)):  # cells along the shorter side, and how much they differ
            grid = rng.integers(0, 256, (cells, cells * WIDTH // HEIGHT, 3), np.uint8)
            layer = Image.fromarray(grid).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            picture += height * (np.asarray(layer, np.float32) / 255 - 0.5)
        path = folder / f"{number:05d}.jpg"
        Image.fromarray((picture + 128).clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
        return path

    with ThreadPoolExecutor() as threads:
        return list(threads.map(write, range(count)))


def torchvision_changes(augment: Augment, side: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The changes of a preset as torchvision makes them: (3, h, w) uint8 in, (3, side, side) float32 in [0, 1] out."""
    import_torchvision()  # not at the top: our workers, which import this script, have no use for it
    from torchvision.transforms import v2

    ratio = (1 / augment.aspect, augment.aspect)
    steps = [v2.RandomResizedCrop(side, augment.crop, ratio, antialias=True), v2.RandomHorizontalFlip(augment.flip)]
    if any(augment.jitter):
        steps.append(v2.RandomApply([v2.ColorJitter(*augment.jitter)], augment.jitter_share))
    steps.append(v2.ToDtype(torch.float32, scale=True))
    if augment.erase:
        steps.append(v2.RandomErasing(augment.erase))
    return v2.Compose(steps)


def decode_by_pillow(path: Path) -> torch.Tensor:
    """(3, h, w) uint8."""
    with Image.open(path) as picture:
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)


def decode_by_torchvision(path: Path) -> torch.Tensor:
    """(3, h, w) uint8."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    return decode_jpeg(read_file(str(path)), ImageReadMode.RGB)  # type: ignore[return-value] - one file, one tensor


def faster_decoder(paths: list[Path], change: Callable) -> Callable[[Path], torch.Tensor]:
    """That of the two that some files take less time with in this process, changes included."""
    times = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    for decode in (decode_by_pillow, decode_by_torchvision):
        try:
            change(decode(paths[0]))
            began = time.perf_counter()
            for path in paths[:60]:
                change(decode(path))
            times[decode] = (time.perf_counter() - began) / len(paths[:60])
            print(f"  {decode.__name__}: {1e3 * times[decode]:.2f} ms an image with its changes")
        except (RuntimeError, OSError, AttributeError) as problem:
            print(f"  {decode.__name__} does not work here: {' '.join(str(problem).split())[:90]}")
    torch.set_num_threads(threads)
    return min(times, key=lambda decode: times[decode])


class Files(Dataset):
    """The files as anybody would read them."""

    def __init__(self, paths: list[Path], labels: np.ndarray, decode: Callable, change: Callable):
        self.paths, self.labels, self.decode, self.change = paths, labels, decode, change

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.change(self.decode(self.paths[i])), int(self.labels[i])


class RateMeter:
    """Batches a second, from the first one on that came after the queues had settled.

    A reader that is slower than what uses its batches is settled once a batch had to be waited for: what the queues
    held before is used up. Where none had to be, the queues are full, and stay so.
    """

    def __init__(self, settle: int, seconds: float, device: str):
        self.settle, self.seconds, self.device = settle, seconds, device
        self.seen, self.counted, self.began, self.rate = 0, 0, 0.0, 0.0

    def count_batch(self, waited: float) -> bool:
        """Count one; whether that was enough."""
        self.seen += 1
        if not self.began:
            if self.seen >= 3 * self.settle or (self.seen >= self.settle and waited > 1e-3):
                synchronize(self.device)
                self.began = time.perf_counter()
            return False
        self.counted += 1
        if time.perf_counter() - self.began < self.seconds:
            return False
        synchronize(self.device)
        self.rate = self.counted / (time.perf_counter() - self.began)
        return True


class StopAtRate(Callback):
    """Ends a run once its rate is known."""

    def __init__(self, meter: RateMeter):
        self.meter = meter

    def on_step(self, state) -> None:
        """Count the batch of this step."""
        state.stop_requested = self.meter.count_batch(state.batch.waited)


class Bench:
    """The files, the network, and the three rates of one preset."""

    def __init__(self, asked: argparse.Namespace, paths: list[Path], preset: str):
        classes, each = (8, 2) if asked.quick else (asked.batch // 4, 4)
        self.asked, self.paths, self.side, self.batch = asked, paths, 64 if asked.quick else 224, classes * each
        self.seconds = 1.0 if asked.quick else asked.timed
        self.labels = np.arange(len(paths)) // 8
        self.sampler, self.augment = PKBatchSampler(self.labels, classes, each), find_preset(preset)
        self.change = torchvision_changes(self.augment, self.side)
        self.decode = faster_decoder(paths, self.change)
        self.files = ImageFiles(paths, self.side)
        self.decoded = load_into_memory(self.files, 8 << 30)

    def measure_steps(self) -> float:
        """The trainer, with decoded pictures."""
        return self._train(Loader(self._samples(self.decoded), self.sampler, self.augment, device=self.asked.device), 8)

    def measure_files(self) -> float:
        """The trainer, with files."""
        samples, workers = self._samples(self.files), {"workers": self.asked.workers, "prefetch": PREFETCH}
        loader = Loader(samples, self.sampler, self.augment, device=self.asked.device, **workers)
        return self._train(loader, PREFETCH * self.asked.workers)

    def measure_torch(self) -> float:
        """A bare DataLoader."""
        batches = [rows for epoch in range(100) for rows in self.sampler.epoch_batches(epoch)]
        meter = RateMeter(PREFETCH * self.asked.workers, self.seconds, self.asked.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than processors are asked for
            loader = DataLoader(
                Files(self.paths, self.labels, self.decode, self.change),
                batch_sampler=batches,  # type: ignore[arg-type] - a list of arrays is one
                num_workers=self.asked.workers,
                prefetch_factor=PREFETCH,
                pin_memory=self.asked.device == "cuda",
            )
            found, enough = iter(loader), False
        while not enough:
            began = time.perf_counter()
            next(found)
            enough = meter.count_batch(time.perf_counter() - began)
        return self.batch * meter.rate

    def _samples(self, inputs) -> Samples:
        return Samples.of(inputs, self.labels)

    def _train(self, loader: Loader, settle: int) -> float:
        torch.manual_seed(0)
        model = Embedder(EmbedderSpec(self.asked.network, dim=DIM), (3, self.side, self.side)).to(self.asked.device)
        method = Supervised(model, SupCon(), precision="bfloat16", weight_decay=DECAY)
        meter = RateMeter(settle, self.seconds, self.asked.device)
        with tempfile.TemporaryDirectory() as folder:
            run_loop(
                method, loader, Schedule(10**6, LR, Constant()), [*usual_callbacks(Path(folder)), StopAtRate(meter)]
            )
        return self.batch * meter.rate


Rates = dict[str, list[float]]  # images a second, of every kind


def measure(bench: Bench, rounds: int, deadline: float, keep: Callable[[Rates], None]) -> Rates:
    """Images a second of all three, rounds in turns; what was found by then is handed to ``keep`` after each rate."""
    kinds = {"steps": bench.measure_steps, "DataLoader": bench.measure_torch, "end to end": bench.measure_files}
    rates: Rates = {kind: [] for kind in kinds}
    for turn in range(rounds):
        if turn and time.perf_counter() > deadline:
            print("  there is no time for another round")
            break
        for kind, measure_rate in kinds.items():
            began = time.perf_counter()
            rates[kind].append(measure_rate())
            keep(rates)
            print(f"  {kind}: {rates[kind][-1]:.0f} images/s, {time.perf_counter() - began:.0f} s", flush=True)
    return rates


def main() -> None:
    """Measure the parts, one after the other."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description="Training from JPEG files beside a bare DataLoader.")
    parser.add_argument("out", nargs="?", help="where the numbers go, as JSON")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help="augmentation presets")
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--files", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timed", type=float, default=4.0, help="seconds for which each rate is timed")
    parser.add_argument("--seconds", type=float, default=130.0, help="after which no other round begins")
    parser.add_argument("--folder", help="where the files are written; the default is where temporary files go")
    parser.add_argument("--quick", action="store_true", help="64 pixels, batches of 16, one second each")
    asked = parser.parse_args()
    place = torch.cuda.get_device_name() if asked.device == "cuda" else asked.device
    print(f"torch {torch.__version__}, Pillow {Image.__version__}, {place}, {asked.network}, {asked.workers} workers")
    if Path("/dev/shm").is_dir() and (free := shutil.disk_usage("/dev/shm").free) < 4 << 30:
        print(f"  /dev/shm, which workers hand batches over in, has only {free >> 20} MiB: they may be killed")
    lines = [f"| changes | {asked.network} steps | DataLoader | end to end | of the smaller |", "|---|---|---|---|---|"]
    found: dict[str, dict] = {}

    def keep(preset: str, rates: Rates, ratio: float | None = None) -> None:
        found[preset] = {"images_per_second": rates, "ratio": None if ratio is None else round(ratio, 3)}
        if asked.out:
            record = {"torch": torch.__version__, "device": place, "network": asked.network, "rates": found}
            Path(asked.out).write_text(json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        paths = write_files(Path(folder), 128 if asked.quick else asked.files)
        size = sum(path.stat().st_size for path in paths) / len(paths)
        print(f"  {len(paths)} files of {size / 1024:.0f} KiB: {time.perf_counter() - began:.0f} s", flush=True)
        for number, preset in enumerate(asked.parts):
            bench = Bench(asked, paths, preset)
            # Every part gets its share of the time that is left.
            left = began + asked.seconds - time.perf_counter()
            half = time.perf_counter() + left / (len(asked.parts) - number) / 2
            rates = measure(bench, asked.rounds, half, partial(keep, preset))
            steps, torch_rate, ours = (median(values) for values in rates.values())
            ratio = ours / min(steps, torch_rate)
            lines.append(f"| {preset} | {steps:.0f} | {torch_rate:.0f} | {ours:.0f} | {ratio:.2f} |")
            keep(preset, rates, ratio)
    print("\n".join(lines))
    print(f"images a second; the goal is {GOAL} of the smaller; {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
