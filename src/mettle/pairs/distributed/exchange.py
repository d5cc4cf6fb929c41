"""Results that go between ranks outside of a loss: NumPy arrays, and the errors of ranks that have none.

    ranks = RankGroup.current()                      rank 0 of 1 without a process group
    ranks.compute(lambda: {"counts": tally})         the arrays of every rank, in the order of the ranks
    ranks.share(items)                               this rank's part of some work: items rank, rank + size, ...
    ranks.broadcast(name)                            what rank 0 has, on every rank

Every rank makes the same calls in the same order. An error on one rank is raised on all of them, and nobody waits for
what will never come; where a process is gone, the others say so.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from mettle.errors import InputError, MettleError
from mettle.pairs.distributed.batch_rows import broadcast_text, is_any_rank
from mettle.pairs.distributed.handshake import control_device, has_other_ranks

Arrays = Mapping[str, np.ndarray]
Item = TypeVar("Item")
Found = TypeVar("Found")
START_AGAIN = "Nothing was completed: look at what the other process said, and start all of them again"
PIECE = 1 << 28  # bytes of one message


class LostRankError(MettleError):
    """Another rank ended, and this one cannot go on."""


@dataclass(frozen=True)
class RankGroup:
    """Which process this is, of how many."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Self:
        """Those of `torch.distributed`; one rank where no process group was started."""
        return cls(dist.get_rank(), dist.get_world_size()) if has_other_ranks() else cls()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes what all of them have."""
        return self.rank == 0

    def share(self, items: Iterable[Item]) -> Iterator[Item]:
        """This rank's part of some work: every ``size``-th item."""
        return islice(items, self.rank, None, self.size)

    def split(self, count: int) -> list[Self]:
        """This rank's part in so many parts, each of which shares as a rank does."""
        return [type(self)(self.rank + self.size * part, self.size * count) for part in range(count)]

    def compute(self, work: Callable[[], Arrays]) -> list[dict[str, np.ndarray]]:
        """What every rank computes, by rank; arrays of numbers or text, of any shapes, each rank its own.

        Raises:
            MettleError: what was raised on some rank, on all of them, and where a rank is gone.
        """
        if self.size == 1:
            return [dict(work())]
        found: Arrays = {}
        error = None
        try:
            found = {name: np.ascontiguousarray(array) for name, array in work().items()}
        except Exception as wrong:  # whatever it is, the others must not wait
            error = wrong
        try:
            return self._exchange(found, error)
        except RuntimeError as lost:  # of gloo or nccl: a connection has closed, or nothing came in time
            raise LostRankError(
                f"rank {self.rank} of {self.size} lost another rank: its process has ended, or did not answer in time. "
                f"{START_AGAIN}"
            ) from lost

    def compute_on_first(self, work: Callable[[], Any]) -> None:
        """Let rank 0 do what all ranks would do alike, such as writing a file; the others wait, and hear of errors."""

        def run() -> Arrays:
            if self.is_first:
                work()
            return {}

        self.compute(run)

    def broadcast(self, value: Found) -> Found:
        """The value of rank 0, which JSON can hold, on every rank."""
        return value if self.size == 1 else json.loads(broadcast_text(json.dumps(value)))

    def call_on_first(self, function: Callable[..., Found]) -> Callable[..., Found]:
        """The function, called on rank 0 only: the others get what JSON can hold of its result."""
        if self.size == 1:
            return function

        def call(*args: Any, **options: Any) -> Any:
            return self.broadcast(function(*args, **options) if self.is_first else None)

        return call

    def wait(self) -> None:
        """Until all ranks have come here."""
        if self.size > 1:
            is_any_rank(False)

    def choose_device(self, device: str) -> str:
        """The device of this rank where all are told ``device``: each rank of a machine has a GPU of its own."""
        if self.size == 1 or device != "cuda":
            return device
        number, count = dist.get_node_local_rank(fallback_rank=self.rank), torch.cuda.device_count()
        if number >= count:
            raise InputError(
                f"rank {self.rank} is process {number} of its machine, which has {count} GPUs: start one process for "
                "each GPU, or set train.device = 'cpu'"
            )
        torch.cuda.set_device(number)
        return f"cuda:{number}"

    def require_equal(self, what: str, text: str) -> None:
        """Refuse ranks that do not bring the same, which ``text`` describes."""
        found = self.compute(lambda: {"text": np.frombuffer(text.encode(), np.uint8)})
        other = next((k for k, one in enumerate(found) if one["text"].tobytes() != found[0]["text"].tobytes()), None)
        if other is not None:
            raise InputError(f"ranks 0 and {other} differ in {what}: give every rank the same")

    def _exchange(self, found: Arrays, error: Exception | None) -> list[dict[str, np.ndarray]]:
        head, body = _encode(found, error)
        heads = [json.loads(bytes(raw)) for raw in _gather_bytes(head)]
        failed = next((k for k, one in enumerate(heads) if "error" in one), None)
        if failed is not None:
            if failed == self.rank and isinstance(error, MettleError):
                raise error
            raise MettleError(f"rank {failed}: {heads[failed]['error']}") from error
        bodies = _gather_bytes(body)
        return [_decode(*both) for both in zip(heads, bodies, strict=True)]


ALONE = RankGroup()
"""One process that shares nothing."""


def _encode(found: Arrays, error: Exception | None) -> tuple[np.ndarray, np.ndarray]:
    """The description of some arrays, or of an error, and the bytes of the arrays."""
    if error is not None:
        said = " ".join(str(error).split())
        said = said if isinstance(error, MettleError) else f"{type(error).__name__}: {said}"
        return _as_bytes(json.dumps({"error": said})), np.empty(0, np.uint8)
    told = {name: [array.dtype.str, list(array.shape)] for name, array in found.items()}
    parts = [array.reshape(-1).view(np.uint8) for array in found.values() if array.size]
    return _as_bytes(json.dumps(told)), np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _decode(head: dict[str, Any], body: np.ndarray) -> dict[str, np.ndarray]:
    found, at = {}, 0
    for name, (dtype, shape) in head.items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        found[name] = body[at : at + size].copy().view(dtype).reshape(shape)
        at += size
    return found


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _gather_bytes(mine: np.ndarray) -> list[np.ndarray]:
    """The bytes of all ranks, however many each has; in pieces, as a backend may not take much at once."""
    device = control_device()
    sizes = [int(size) for size in _gather_tensor(torch.tensor([len(mine)], device=device))]
    found = [np.empty(size, np.uint8) for size in sizes]
    for start in range(0, max(sizes), PIECE):
        part = torch.zeros(min(PIECE, max(sizes) - start), dtype=torch.uint8)
        own = mine[start : start + PIECE]
        part[: len(own)] = torch.from_numpy(own.copy())
        for whole, other in zip(found, _gather_tensor(part.to(device)), strict=True):
            whole[start : start + PIECE] = other.cpu().numpy()[: max(0, len(whole) - start)]
    return found


def _gather_tensor(x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return found
