"""A reference set beyond the batch: the embeddings of the last few batches (cross-batch memory)."""

from typing import Any

import torch
from torch import Tensor, nn

from mettle.errors import InputError, NumericError
from mettle.pairs.validation import validate_embeddings


class Queue(nn.Module):
    """Keeps the last ``size`` embeddings and labels; saved, resumed and moved like any module.

    Old embeddings get no gradient. A batch is compared with itself and with the queue:

        value = loss(z, y, **queue.against(z, y))
        queue.push(z, y)
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

    def __len__(self) -> int:
        return int(self.count)

    @torch.no_grad()
    def push(self, z: Tensor, y: Tensor) -> None:
        """Add a batch, forgetting the oldest entries when full."""
        self._check(z, y)
        if not bool(torch.isfinite(z).all()):
            raise NumericError(
                "a batch with NaN or infinite embeddings was not queued: it would spoil every later loss"
            )
        size = len(self.embeddings)
        z, y = z.detach()[-size:], y[-size:]
        at = (torch.arange(len(z), device=z.device) + self.next_index) % size
        self.embeddings[at] = z.to(self.embeddings.dtype)
        self.labels[at] = y
        self.next_index.copy_((self.next_index + len(z)) % size)
        self.count.copy_((self.count + len(z)).clamp(max=size))

    def against(self, z: Tensor, y: Tensor) -> dict[str, Any]:
        """Arguments that compare a batch with itself (with gradient, but no row with itself) and with the queue."""
        self._check(z, y)
        held = len(self)
        own = torch.arange(len(z), device=z.device)
        ids = torch.cat([own, -1 - torch.arange(held, device=z.device)])
        ref = torch.cat([z, self.embeddings[:held].to(z.dtype)])
        return {"ids": own, "ref": (ref, torch.cat([y, self.labels[:held]]), ids)}

    def _check(self, z: Tensor, y: Tensor) -> None:
        """Refuse a batch that does not fit what is held."""
        validate_embeddings(z, y, "embeddings", "labels")
        if z.shape[1] != self.embeddings.shape[1]:
            raise InputError(f"this queue holds embeddings of dim {self.embeddings.shape[1]}, got {z.shape[1]}")
        if z.device != self.embeddings.device:
            where = self.embeddings.device
            raise InputError(f"this queue is on {where}, embeddings on {z.device}: move it there with queue.to(...)")
