"""Batches for training: `Loader`, over torch's ``DataLoader``.

    sampler      which samples, a pure function of (seed, epoch); here, in the main process
    DataLoader   worker processes read, decode and apply a transform; pinned memory where the target is a GPU
    thread       moves to the device and augments there, two batches ahead of the training step

Whatever is random is a function of (seed, epoch, sample id), so that neither the number of workers nor a stop and a
resume changes any batch.
"""

import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mettle.data.dataset import Column, Samples
from mettle.data.rank_share import RankShare
from mettle.data.raw_inputs import RawInputs
from mettle.data.sampler import EpochBatchSampler, check_integer
from mettle.data.transforms import Augment, BatchTransform, to_input_tensor, transform_items
from mettle.data.tuples import Tuples
from mettle.errors import DataError, MettleError
from mettle.rng import hash_bits

Item = TypeVar("Item")
_Read: TypeAlias = "tuple[_Request, Tensor, Tensor | None]"  # images or rows; of whole images their width over height
UNCHANGED = Augment()
ALONE = RankShare()
RESIDENT_SHARE = 0.1  # of the free memory of a GPU, that items in memory may take of it
RESIDENT_STEPS = 32  # whose positions go to a GPU in one copy, where the items are there
AHEAD = 2  # finished batches that wait while one is in use


@dataclass(frozen=True)
class Batch:
    """Inputs ready for the model. With several views, all of view 0 come first, then all of view 1.

    Of pairs and triplets, all first members come first, then all second ones; targets and weights are theirs. Where
    several ranks share a batch, the inputs are those of this rank, and everything else is of the whole batch.
    """

    inputs: Any  # a tensor; or `RawInputs`, of a loader that keeps bytes
    labels: Tensor
    ids: Tensor
    step: int
    epoch: int
    waited: float  # seconds the training step waited for this batch
    target: Tensor | None = None  # one per pair
    weight: Tensor | None = None  # one per pair or triplet
    epoch_step: int = 0  # which batch of its epoch this is, from 0
    ends_epoch: bool = False
    rank_rows: tuple[np.ndarray, ...] | None = None  # of each rank, which rows its inputs are; None: all are here

    @property
    def next_position(self) -> tuple[int, int]:
        """(epoch, batch of it) that follows: what `Loader.batches` goes on from after a resume."""
        return (self.epoch + 1, 0) if self.ends_epoch else (self.epoch, self.epoch_step + 1)


@dataclass(frozen=True, eq=False)
class Loader:
    """Batches by step number; a batch is a pure function of (seed, step)."""

    samples: Samples
    sampler: EpochBatchSampler
    augment: Augment
    seed: int = 0
    views: int = 1
    workers: int = 0  # processes that read and decode; 0 reads in a thread, right when images are in memory
    device: str = "cpu"
    tuples: Tuples | None = None  # pairs or triplets of these samples: the sampler then gives positions of their rows
    # Of one image or row, see `transforms.transform_items`, or a `BatchTransform` of all of them.
    transform: Callable[[Tensor], Any] | None = None
    prefetch: int = 2  # batches that each worker reads ahead
    share: RankShare = ALONE  # of every batch: which inputs are read here
    keep_raw: bool = False  # whether images stay bytes until their rows are asked for, see `RawInputs`

    def __post_init__(self) -> None:
        for name, least in (("workers", 0), ("views", 1), ("prefetch", 1)):
            check_integer(getattr(self, name), name, least)

    def batches(self, start: int, stop: int, position: tuple[int, int] | None = None) -> Iterator[Batch]:
        """The batches of steps ``start`` to ``stop`` - 1.

        Args:
            start: the first step.
            stop: the step after the last.
            position: ``Batch.next_position`` of the step before ``start``. Without it the epochs before are drawn to
                count their batches.
        """
        source = _Source(self.samples, self._item_transform, self.seed, self._reads_uncropped)
        requests = _Requests(self, start, stop, position)
        is_resident = self._fits_gpu()
        reader = self._gather_resident(requests) if is_resident else self._read(source, requests)
        # A thread would cost a small step more time than these few launches do.
        in_turn = self._is_serial or self._keeps_bytes or (is_resident and self._is_unchanged)
        with closing(reader) as items, closing(self._finish_all(items, in_turn)) as ready:
            while True:
                began = time.perf_counter()
                found = next(ready, None)
                if found is None:
                    return
                yield found.as_batch(time.perf_counter() - began)

    def count_batches(self, epochs: int) -> int:
        """How many batches so many epochs have."""
        return sum(len(self.sampler.epoch_batches(number)) for number in range(epochs))

    @property
    def _item_transform(self) -> Callable[[Tensor], Any] | None:
        return None if isinstance(self.transform, BatchTransform) else self.transform

    @property
    def _draws_per_item(self) -> bool:
        """Whether items come out of the workers already changed, each view in its own way."""
        return self._item_transform is not None or getattr(self.samples.inputs, "is_seeded", False)

    def _plan(self, start: int, position: tuple[int, int] | None) -> Iterator["_Request"]:
        """What to read for each step from ``start`` on, without end."""
        epoch, first = (0, start) if position is None else position
        step = start
        while True:
            batches, copies = self.sampler.epoch_batches(epoch), self.sampler.copy_numbers(epoch)
            if not batches:
                raise DataError("no full batch can be formed: lower batch.classes or batch.samples")
            for k in range(first, len(batches)):
                rows, copy = batches[k], None if copies is None else copies[k]
                yield self._request(step, epoch, k, k + 1 == len(batches), rows, copy)
                step += 1
            epoch, first = epoch + 1, max(first - len(batches), 0)

    def _request(
        self, step: int, epoch: int, k: int, ends_epoch: bool, rows: np.ndarray, copy: np.ndarray | None
    ) -> "_Request":
        batch_rows, own = rows, self.share.own(len(rows))
        rows, copy = rows[own], None if copy is None else copy[own]
        positions = self._find_positions(rows)
        ids = self.samples.ids[positions]
        if copy is not None:  # a copy of a sample is changed in its own way
            mixed = (hash_bits(ids, copy, 23) >> np.uint64(1)).astype(np.int64)
            ids = np.where(copy == 0, ids, mixed)
        # A sample that is first in one pair and second in another is changed in two ways.
        parts = self.views if self.tuples is None else len(self.tuples.roles)
        each = len(positions) if self.tuples is None else len(rows)
        return _Request(step, epoch, k, ends_epoch, batch_rows, positions, ids, parts, each)

    def _find_positions(self, rows: np.ndarray) -> np.ndarray:
        """The samples of these rows of the sampler; of tuples all first members, then all second ones."""
        return rows if self.tuples is None else self._members[rows].T.reshape(-1)

    def _read(self, source: "_Source", requests: "_Requests") -> Generator[_Read, None, None]:
        """What the workers, or a thread, make of the requests, in their order."""
        options: dict[str, Any] = {"generator": torch.Generator().manual_seed(0)}  # the global one is the model's
        if self.workers:
            # As safe as fresh processes, where a fork of one that has used threads can hang, and imports torch once.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["mettle.data.loader"])
            options |= {"multiprocessing_context": context, "worker_init_fn": _ignore_interrupts}
            options |= {
                "prefetch_factor": self.prefetch
            }  # one pass for all epochs: the workers live as long as it does
        loader = _DataLoader(
            source,  # type: ignore[arg-type]
            batch_sampler=requests,  # type: ignore[arg-type] - a batch is asked for as a whole, not by a list of numbers
            num_workers=self.workers,
            collate_fn=_keep,
            pin_memory=self.device.startswith("cuda"),
            **options,
        )
        ahead = 1 if self._keeps_bytes else AHEAD
        return self._check(_in_thread(loader, ahead) if self.workers == 0 and not self._is_serial else loader)

    def _fits_gpu(self) -> bool:
        """Whether all items are arrays in memory that the GPU has plenty of room for: it then gathers the batches."""
        array = getattr(self.samples.inputs, "array", None)
        is_plain = self.workers == 0 and self.transform is None and not self._draws_per_item
        if not self.device.startswith("cuda") or not is_plain or self._reads_uncropped or array is None:
            return False
        return array.nbytes <= RESIDENT_SHARE * torch.cuda.mem_get_info(self.device)[0]

    def _gather_resident(self, requests: "_Requests") -> Generator[_Read, None, None]:
        """The requests in their order, from copies of all items, labels and ids on the device."""
        items = torch.from_numpy(np.ascontiguousarray(self.samples.inputs.array)).to(self.device)  # type: ignore[attr-defined]
        columns = torch.from_numpy(np.stack([self.samples.labels, self.samples.ids])).to(self.device)
        index, left = self.samples.storage_index, iter(requests)
        while some := list(islice(left, RESIDENT_STEPS)):
            wanted = [index[one.positions] for one in some] + [self._find_positions(one.batch_rows) for one in some]
            positions = copy_to_device(torch.from_numpy(np.concatenate(wanted)), self.device).split(
                [len(one) for one in wanted]
            )
            for request, own, whole in zip(some, positions, positions[len(some) :], strict=False):
                request = replace(request, columns=columns.index_select(1, whole))
                yield request, items.index_select(0, own), None

    @property
    def _is_serial(self) -> bool:
        """Whether everything is done between the steps, in the caller's own thread.

        What somebody else wrote draws from the generators of its process, where a model may draw at the same time.
        """
        return isinstance(self.transform, BatchTransform) or (self.workers == 0 and self._draws_per_item)

    @cached_property
    def _is_unchanged(self) -> bool:
        return self.augment == UNCHANGED

    def _finish_all(self, items: Iterator[_Read], in_turn: bool) -> Generator["_BatchTensors", None, None]:
        if in_turn:
            return (self._finish(item) for item in items)
        if not self.device.startswith("cuda"):
            return _in_thread(self._finish(item) for item in items)
        return _in_thread(self._finish_beside(items))

    def _finish_beside(self, items: Iterator[_Read]) -> Iterator["_BatchTensors"]:
        """Batches finished on a stream of their own: copies and changes do not wait for the training steps before them.

        The stream that takes a batch waits for it, see `_BatchTensors.as_batch`.
        """
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.default_stream(self.device))  # what the augmentation holds may still be copied
        with torch.cuda.stream(stream):  # of this thread, which does nothing else
            for item in items:
                yield replace(self._finish(item), ready=stream.record_event())

    def _check(self, found: Iterable[Any]) -> Generator[_Read, None, None]:
        """Raise what went wrong in a worker as the one line that it is."""
        last: list[int] = []
        try:
            for request, item, aspect in found:
                if isinstance(item, MettleError):
                    raise item
                last = request.ids[:4].tolist()
                yield request, item, aspect
        except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as problem:
            # A worker that is killed while it hands over a batch leaves a broken pipe or socket; what it raised itself
            # comes with its traceback.
            is_dead = not isinstance(problem, RuntimeError) or "DataLoader worker" in str(problem)
            if self.workers == 0 or not is_dead or "Traceback" in str(problem):
                raise
            raise DataError(
                f"a loader worker died while reading what follows samples {last}...: out of memory, or killed from "
                "outside. The run can be resumed"
            ) from None

    @property
    def _reads_uncropped(self) -> bool:
        """Whether random crops are taken from the whole images, not from what evaluation sees of them."""
        crops = self.augment.takes_crops() and self.transform is None and not self._draws_per_item
        return crops and getattr(self.samples.inputs, "uncropped", None) is not None

    @cached_property
    def _members(self) -> np.ndarray:
        assert self.tuples is not None
        at = self.tuples.positions(self.samples)
        if (at < 0).any():
            row, role = np.argwhere(at < 0)[0]
            raise self.tuples.error(row, f"sample {self.tuples.members[row, role]} is not among the samples")
        return at

    def _tuple_targets(self, rows: np.ndarray) -> dict[str, Tensor]:
        """What a table of tuples says of these rows."""
        if self.tuples is None:
            return {}
        columns = {"target": self.tuples.target, "weight": self.tuples.weight}
        return {
            name: copy_to_device(torch.from_numpy(c[rows]).float(), self.device)
            for name, c in columns.items()
            if c is not None
        }

    def _finish(self, read: _Read) -> "_BatchTensors":
        """Inputs on the device, augmented."""
        request, raw, _ = read
        stays = self._keeps_bytes and raw.dtype == torch.uint8
        inputs: Any = self._keep_bytes(read) if stays else self._make_inputs(read)
        labels, ids = self._labels_and_ids(request)
        tensors = {"inputs": inputs, "labels": labels, "ids": ids}
        rank_rows = self.share.rows(len(request.batch_rows), request.parts)
        return _BatchTensors(request, tensors | self._tuple_targets(request.batch_rows), rank_rows)

    def _make_inputs(self, read: _Read) -> Tensor:
        """All inputs of a batch, all of view 0 before all of view 1."""
        request, raw, aspect = read
        x = self._as_inputs(raw)
        one_for_all = not self._draws_per_item and self.tuples is None  # of an unchanged sample all views are made here
        parts = [x] * self.views if one_for_all else list(x.split(request.each))
        sides: Any = [None] * len(parts)
        if aspect is not None:
            sides = list(aspect.to(self.device).split(request.each)) * (self.views if self.tuples is None else 1)
        views: list[Tensor] = [
            self._change(part, side, request.part_ids(v), request.epoch, v)
            for v, (part, side) in enumerate(zip(parts, sides, strict=True))
        ]
        if isinstance(self.transform, BatchTransform):
            views = [
                self.transform(part, request.part_ids(v), seed=self.seed, epoch=request.epoch, view=v)
                for v, part in enumerate(views)
            ]
        return views[0] if len(views) == 1 else torch.cat(views)

    def _as_inputs(self, raw: Tensor) -> Tensor:
        """What was read, as the augmentation takes it."""
        if self._item_transform is not None and raw.dtype == torch.uint8:  # channels are first already
            return raw.to(self.device, non_blocking=True).float().div_(255)
        if not self._is_unchanged and self.device == "cpu" and raw.dtype == torch.uint8 and raw.ndim == 4:
            return raw  # the augmentation takes bytes
        return to_input_tensor(raw, self.device)

    def _change(self, x: Tensor, aspect: Tensor | None, ids: np.ndarray, epoch: int, view: int) -> Tensor:
        """One view of some samples; each is changed in its own way, whichever others there are."""
        how: dict[str, Any] = {} if aspect is None else {"aspect": aspect, "size": self.samples.inputs.shape[:2]}
        if self._is_unchanged and not how:
            return x
        return self.augment(x, ids, seed=self.seed, epoch=epoch, view=view, **how)

    @property
    def _keeps_bytes(self) -> bool:
        """Whether batches stay bytes: each image becomes an input without the others."""
        is_image = self.samples.inputs.kind == "image"
        return self.keep_raw and is_image and not isinstance(self.transform, BatchTransform)

    def _keep_bytes(self, read: _Read) -> RawInputs:
        """A batch whose rows are made when they are asked for, equal to those of `_make_inputs`."""
        request, raw, aspect = read

        def prepare(span: slice) -> Tensor:
            found = []
            for v in range(span.start // request.each, -(-span.stop // request.each)):
                first = v * request.each
                own = slice(max(span.start - first, 0), min(span.stop - first, request.each))
                at = own if len(raw) == request.each else slice(first + own.start, first + own.stop)
                side = None if aspect is None else aspect[at].to(self.device)
                found.append(self._change(self._as_inputs(raw[at]), side, request.part_ids(v)[own], request.epoch, v))
            return found[0] if len(found) == 1 else torch.cat(found)

        return RawInputs(raw, request.parts * request.each, torch.device(self.device), prepare)

    def _labels_and_ids(self, request: "_Request") -> tuple[Tensor, Tensor]:
        """Those of the batch of all ranks, on the device."""
        if request.columns is not None:
            labels, ids = request.columns.repeat(1, self.views) if self.views > 1 else request.columns
            return labels, ids
        positions = self._find_positions(request.batch_rows)
        columns = np.stack([self.samples.labels[positions], self.samples.ids[positions]])
        labels, ids = copy_to_device(torch.from_numpy(np.tile(columns, self.views)), self.device)
        return labels, ids


def copy_to_device(values: Tensor, device: str) -> Tensor:
    """Values on a device. A GPU gets them from pinned memory, so that nobody waits for the copy."""
    return (values.pin_memory() if device.startswith("cuda") else values).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class ForeignLoader:
    """Batches of somebody else's ``DataLoader``, in its own order: (inputs, labels, ...) or mappings with both.

    Its order is not a function of (seed, step), so a run that is resumed goes on with another order than it would have
    had, from the beginning of the epoch that it was stopped in.
    """

    loader: DataLoader
    label: Column  # labels of a batch are names of this column, and become its codes
    columns: tuple[str | None, str | None] = (None, None)  # of inputs and labels, where batches are mappings
    device: str = "cpu"
    views: int = 1
    convert: Callable[[Tensor], Tensor] | None = None  # of inputs that are no uint8 images

    def batches(self, start: int, stop: int, position: tuple[int, int] | None = None) -> Iterator[Batch]:
        """The batches of steps ``start`` to ``stop`` - 1."""
        codes = {name: code for code, name in enumerate(self.label.names)}
        epoch, step, taken = (start // max(len(self.loader), 1) if position is None else position[0]), start, 0
        began = time.perf_counter()
        while step < stop:
            before = step
            for number, (given, last) in enumerate(_mark_last(self.loader)):
                inputs, labels = self._convert(given, codes)
                waited = time.perf_counter() - began
                ids = torch.arange(taken, taken + len(labels), device=self.device)
                taken += len(labels)
                yield Batch(inputs, labels, ids, step, epoch, waited, epoch_step=number, ends_epoch=last)
                began, step = time.perf_counter(), step + 1
                if step == stop:
                    return
            if step == before:
                raise DataError("the DataLoader gave no batch: it has fewer items than a batch, or none")
            epoch += 1

    def count_batches(self, epochs: int) -> int:
        """How many batches so many epochs have."""
        return epochs * len(self.loader)

    def _convert(self, given: Any, codes: Mapping[str, int]) -> tuple[Tensor, Tensor]:
        inputs, labels = (
            (given[self.columns[0]], given[self.columns[1]]) if isinstance(given, Mapping) else (given[0], given[1])
        )
        names = [str(value) for value in (labels.tolist() if hasattr(labels, "tolist") else labels)]
        unknown = [name for name in names if name not in codes]
        if unknown:
            raise DataError(
                f"the DataLoader gave the label {unknown[0]!r}, which none of the items of its data set has"
            )
        found = copy_to_device(torch.tensor([codes[name] for name in names]), self.device)
        if len(inputs) != len(found):
            raise DataError(
                f"the DataLoader gave {len(inputs)} inputs with {len(found)} labels: one for each is wanted"
            )
        x = inputs.to(self.device, non_blocking=True)
        if x.dtype == torch.uint8:
            return x.float().div_(255), found
        return x if self.convert is None else self.convert(x), found


def _mark_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Each item, and whether it is the last."""
    source = iter(items)
    for item in source:
        for following in source:
            yield item, False
            item = following
        yield item, True


@dataclass(frozen=True, eq=False)
class _Request:
    """What to read for one step."""

    step: int
    epoch: int
    epoch_step: int
    ends_epoch: bool
    batch_rows: np.ndarray  # positions of samples, or of tuples, in the batch of all ranks
    positions: np.ndarray  # of the samples that are read here; of tuples all first members, then all second ones
    ids: np.ndarray  # that random changes are drawn for, as many
    parts: int  # views of a sample, or members of a tuple
    each: int  # samples in a part
    columns: Tensor | None = None  # (2, n) labels and ids of the batch of all ranks, where they are on the device

    def part_ids(self, part: int) -> np.ndarray:
        """The ids of one view, or of one member of all tuples."""
        return self._cut(self.ids, part)

    def part_positions(self, part: int) -> np.ndarray:
        """The positions of the same samples."""
        return self._cut(self.positions, part)

    def _cut(self, values: np.ndarray, part: int) -> np.ndarray:
        return values if len(values) == self.each else values[part * self.each : (part + 1) * self.each]


@dataclass(frozen=True, eq=False)
class _BatchTensors:
    """What a batch is made of, and, where that was done on another stream of a GPU, when it is there."""

    request: _Request
    tensors: dict[str, Tensor]  # by the fields of `Batch`
    rank_rows: tuple[np.ndarray, ...] | None = None
    ready: Any = None  # an event of CUDA

    def as_batch(self, waited: float) -> Batch:
        """The batch, for the stream that asks for it."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.tensors["inputs"].device)
            stream.wait_event(self.ready)
            for tensor in self.tensors.values():
                tensor.record_stream(stream)  # its memory is not used again before this stream is done with it
        request = self.request
        place: dict[str, Any] = {"epoch_step": request.epoch_step, "ends_epoch": request.ends_epoch}
        place |= {"rank_rows": self.rank_rows}
        return Batch(**self.tensors, step=request.step, epoch=request.epoch, waited=waited, **place)


@dataclass(frozen=True, eq=False)
class _Requests:
    """The requests of some steps, as the batch sampler of a ``DataLoader``."""

    loader: Loader
    start: int
    stop: int
    position: tuple[int, int] | None

    def __iter__(self) -> Iterator[_Request]:
        for _, request in zip(range(self.start, self.stop), self.loader._plan(self.start, self.position), strict=False):
            yield request

    def __len__(self) -> int:
        return max(self.stop - self.start, 0)


@dataclass(frozen=True, eq=False)
class _Source:
    """What a worker reads from: a data set of torch whose index is a whole request."""

    samples: Samples
    transform: Callable[[Tensor], Any] | None
    seed: int
    uncropped: bool

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, request: _Request) -> "tuple[_Request, Tensor | MettleError, Tensor | None]":
        """Read one batch; a problem with it comes back instead of it, for torch would wrap it into a traceback."""
        try:
            if self.uncropped:
                array, aspect = self.samples.read_uncropped(request.positions)
                return request, torch.from_numpy(array), torch.from_numpy(aspect)
            is_seeded = getattr(self.samples.inputs, "is_seeded", False)
            if self.transform is None and not is_seeded:
                return request, torch.from_numpy(self.samples.read(request.positions)), None
            return request, torch.cat([self._read_part(request, v, is_seeded) for v in range(request.parts)]), None
        except MettleError as problem:
            return request, problem, None

    def _read_part(self, request: _Request, part: int, is_seeded: bool) -> Tensor:
        """One view of all samples, or one member of all tuples, with random numbers of its own."""
        ids, how = request.part_ids(part), {"seed": self.seed, "epoch": request.epoch, "view": part}
        positions = request.part_positions(part)
        array = self.samples.read_seeded(positions, ids, **how) if is_seeded else self.samples.read(positions)
        return torch.from_numpy(array) if self.transform is None else transform_items(self.transform, array, ids, **how)


class _DataLoader(DataLoader):
    """torch's, without its opinion on how many workers a machine should have."""

    def check_worker_number_rationality(self) -> None:
        """The number was chosen by whoever wrote ``batch.workers``."""


def _keep(items: Any) -> Any:
    return items


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches a whole process group; the training loop still needs the batch that it waits for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(frozen=True)
class _End:
    """What a thread says last."""

    problem: BaseException | None = None


def _in_thread(source: Iterable[Item], ahead: int = AHEAD) -> Generator[Item, None, None]:
    """The items of ``source``, made in a thread of their own, at most ``ahead`` of them in advance."""
    items: queue.Queue[Any] = queue.Queue(ahead)
    stopped = threading.Event()

    def put(item: Any) -> bool:
        while not stopped.is_set():
            try:
                items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        problem = None
        try:
            for item in source:
                if not put(item):
                    break
        except BaseException as error:
            problem = error
        put(_End(problem))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if item.problem is not None:
            raise item.problem
    finally:
        stopped.set()
        thread.join()
