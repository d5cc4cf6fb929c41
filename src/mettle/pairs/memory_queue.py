"""A reference set beyond the batch: the embeddings of the last few batches (cross-batch memory)."""

from typing import Any

import torch
from torch import Tensor, nn

from mettle.errors import InputError, NumericError
from mettle.pairs.similarity import can_read
from mettle.pairs.validation import validate_embeddings


class Queue(nn.Module):
    """Keeps the last ``size`` embeddings and labels; saved, resumed and moved like any module.

    Old embeddings get no gradient. A batch is compared with itself and with the queue:

        value = loss(z, y, **queue.against(z, y))
        queue.push(z, y)

    On a GPU nothing waits for the device once the queue is full; until then the number of entries is asked for.
    """

    embeddings: Tensor
    labels: Tensor
    count: Tensor
    next_index: Tensor

    def __init__(self, size: int, dim: int):
        super().__init__()
        for name, given in (("size", size), ("dim", dim)):
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise InputError(f"{name} of a queue must be a whole number of at least 1, got {given!r}")
        self.register_buffer("embeddings", torch.zeros(size, dim))
        self.register_buffer("labels", torch.zeros(size, dtype=torch.long))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("next_index", torch.zeros((), dtype=torch.long))
        # The count and its version when it was seen to be full: valid until somebody writes to it (a loaded state).
        self._seen_full: tuple[Tensor, int] | None = None

    @property
    def size(self) -> int:
        """The most embeddings that are held."""
        return len(self.embeddings)

    def __len__(self) -> int:
        if self.is_known_full():
            return self.size
        held = int(self.count)
        if held == self.size:
            self._seen_full = self.count, self.count._version
        return held

    def is_known_full(self) -> bool:
        """Whether the queue is full, as far as the host knows; asks no device."""
        seen = self._seen_full
        return seen is not None and seen[0] is self.count and seen[1] == self.count._version

    @torch.no_grad()
    def push(self, z: Tensor, y: Tensor, enqueue_mask: Tensor | None = None) -> None:
        """Add a batch, forgetting the oldest entries when full.

        Embeddings that are not finite would spoil every later loss. Where they can be looked at, they are an error; on
        a GPU, which would stand still for the question, the batch is not queued.

        Args:
            z: (n, d) embeddings.
            y: (n,) labels.
            enqueue_mask: (n,) booleans: which rows enter; all by default.
        """
        self._check(z, y)
        entering = None if enqueue_mask is None else check_mask(enqueue_mask, z).to(z.device)
        rows = torch.isfinite(z).all(1)
        if entering is not None:
            rows = rows | ~entering
        finite = rows.all()
        if can_read(finite) and not bool(finite):
            raise NumericError(
                "a batch with NaN or infinite embeddings was not queued: it would spoil every later loss"
            )
        self._write(z.detach(), y, entering, finite)

    def _write(self, z: Tensor, y: Tensor, entering: Tensor | None, finite: Tensor) -> None:
        """Write the last rows that enter over the oldest entries, or nothing where not all is finite; never waits."""
        most = min(len(z), self.size)  # that can enter and stay
        if entering is None:
            z, y = z[-most:], y[-most:]
            number = finite * most
        else:
            count = entering.sum()
            order = torch.argsort((~entering).to(torch.uint8), stable=True)  # rows that enter first, in their order
            chosen = order[(count - most).clamp(min=0) + torch.arange(most, device=z.device)]
            z, y = z[chosen], y[chosen]
            number = finite * count.clamp(max=most)
        place = torch.arange(most, device=z.device)
        slots, enters = (place + self.next_index) % self.size, place < number
        self.embeddings[slots] = torch.where(enters[:, None], z.to(self.embeddings.dtype), self.embeddings[slots])
        self.labels[slots] = torch.where(enters, y.long(), self.labels[slots])
        self.next_index.copy_((self.next_index + number) % self.size)
        if not self.is_known_full():
            self.count.copy_((self.count + number).clamp(max=self.size))

    def against(self, z: Tensor, y: Tensor, *, keys: Tensor | None = None, last: int | None = None) -> dict[str, Any]:
        """Arguments that compare a batch with itself (with gradient, but no row with itself) and with the queue.

        Args:
            z: (n, d) embeddings, the anchors.
            y: (n,) labels.
            keys: (n, d) embeddings of the same rows by another encoder, such as a moving average of the first (MoCo, He
                et al. 2020). They take the place of the batch among the references, without gradient.
            last: how many of the newest entries to compare with; all by default.
        """
        self._check(z, y)
        if keys is not None:
            self._check(keys, y)
        batch = z if keys is None else keys.detach().to(z.dtype)
        embeddings, labels = self.append_held(batch, y, last)
        own = torch.arange(len(z), device=z.device)
        ids = torch.cat([own, -1 - torch.arange(len(labels) - len(y), device=z.device)])
        return {"ids": own, "ref": (embeddings, labels, ids)}

    def append_held(self, z: Tensor, y: Tensor, last: int | None = None) -> tuple[Tensor, Tensor]:
        """A batch and behind it the queue, or only the ``last`` entries of it: embeddings and labels."""
        held = len(self)
        if last is None or last >= held:
            old, labels = self.embeddings[:held], self.labels[:held]
        else:
            slots = (self.next_index - max(last, 0) + torch.arange(max(last, 0), device=z.device)) % self.size
            old, labels = self.embeddings[slots], self.labels[slots]
        return torch.cat([z, old.to(z.dtype)]), torch.cat([y, labels])

    def _check(self, z: Tensor, y: Tensor) -> None:
        """Refuse a batch that does not fit what is held."""
        validate_embeddings(z, y, "embeddings", "labels")
        if z.shape[1] != self.embeddings.shape[1]:
            raise InputError(f"this queue holds embeddings of dim {self.embeddings.shape[1]}, got {z.shape[1]}")
        if z.device != self.embeddings.device:
            where = self.embeddings.device
            raise InputError(f"this queue is on {where}, embeddings on {z.device}: move it there with queue.to(...)")


def check_mask(enqueue_mask: Tensor, z: Tensor) -> Tensor:
    """A mask of the rows of a batch; refused where it is none."""
    if not isinstance(enqueue_mask, Tensor) or enqueue_mask.dtype != torch.bool or enqueue_mask.shape != z.shape[:1]:
        is_tensor = isinstance(enqueue_mask, Tensor)
        got = f"{enqueue_mask.dtype} of shape {tuple(enqueue_mask.shape)}" if is_tensor else type(enqueue_mask).__name__
        raise InputError(f"enqueue_mask must be booleans, one for each of {len(z)} embeddings, got {got}")
    return enqueue_mask
