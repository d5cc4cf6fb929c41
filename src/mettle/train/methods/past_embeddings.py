"""A queue of past embeddings for the methods that compare a batch with them, and the encoder that fills it.

same      the queue holds embeddings of the trained network itself (cross-batch memory, XBM, Wang et al. 2020)
momentum  it holds those of a moving average of the network (momentum contrast, MoCo, He et al. 2020)
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mettle.errors import InputError
from mettle.pairs import Queue
from mettle.train.gradient_caching import cached_forward


@dataclass(frozen=True)
class QueueSettings:
    """A queue of past embeddings.

    Args:
        size: the most embeddings that are held.
        encoder: whose embeddings: of the ``same`` network, or of its moving average (``momentum``).
        momentum: how much of that average stays in a step.
        start: the share of training after which batches are compared with the queue; it is filled from the first step.
    """

    size: int
    encoder: Literal["same", "momentum"] = "same"
    momentum: float = 0.999
    start: float = 0.0

    def __post_init__(self) -> None:
        if self.encoder not in ("same", "momentum"):
            raise InputError(f"encoder of a queue must be 'same' or 'momentum', got {self.encoder!r}")
        for name in ("momentum", "start"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} of a queue must be at least 0 and below 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class QueuedBatch:
    """A batch that is compared with the queue, and enters it once its step has been made."""

    keys: Tensor
    labels: Tensor
    options: dict[str, Any]  # of the loss: the comparison with the batch itself, or with its keys, and with the queue

    def constant_options(self) -> dict[str, Any]:
        """The same comparison without a graph, for statistics."""
        embeddings, *others = self.options["ref"]
        return self.options | {"ref": (embeddings.detach(), *others)}


class PastEmbeddings(nn.Module):
    """The queue of a method, and the momentum encoder where there is one. Part of the state of the method."""

    def __init__(self, model: Any, settings: QueueSettings, cached: int = 0):
        """``cached``: inputs that the momentum encoder sees at a time; 0 for the whole batch."""
        super().__init__()
        self.cached = cached
        like = next(model.parameters())
        self.settings = settings
        self.queue = Queue(settings.size, model.dim).to(like.device, like.dtype)
        self.encoder = copy.deepcopy(model).requires_grad_(False) if settings.encoder == "momentum" else None

    def compare(self, keys: Tensor | None, embeddings: Tensor, labels: Tensor, fraction_done: float) -> QueuedBatch:
        """A batch against its own rows, or its keys of `embed_keys`, and the queue."""
        last = None if fraction_done >= self.settings.start else 0
        if keys is None:
            return QueuedBatch(embeddings.detach(), labels, self.queue.against(embeddings, labels, last=last))
        return QueuedBatch(keys, labels, self.queue.against(embeddings, labels, keys=keys, last=last))

    @torch.no_grad()
    def embed_keys(self, inputs: Any) -> Tensor:
        """The embeddings of the momentum encoder, in the space that losses see: before a neck."""
        encoder: Any = self.encoder
        kept = [buffer.clone() for buffer in encoder.buffers()]
        forward = encoder if getattr(encoder, "neck", None) is None else encoder.before_neck
        keys = cached_forward(encoder, inputs, self.cached, forward)
        for buffer, value in zip(encoder.buffers(), kept, strict=True):  # they follow those of the network, in `update`
            buffer.copy_(value)
        return keys

    def statistics(self, batch: QueuedBatch) -> dict[str, float]:
        """As shares of the size of the queue: how full it is, and how much of it this batch was compared with."""
        used = len(batch.options["ref"][0]) - len(batch.labels)
        return {"queue_fill": len(self.queue) / self.queue.size, "queue_used": used / self.queue.size}

    def changing_tensors(self) -> Iterator[Tensor]:
        """What `update` changes while the queue is full: its count stays as it is then."""
        yield from (self.queue.embeddings, self.queue.labels, self.queue.next_index)
        if self.encoder is not None:
            yield from (p.detach() for p in self.encoder.parameters())
            yield from self.encoder.buffers()

    @torch.no_grad()
    def update(self, model: nn.Module, batches: Iterable[QueuedBatch]) -> None:
        """After a step that was made: its batches enter the queue, the encoder follows the network."""
        for batch in batches:
            self.queue.push(batch.keys, batch.labels)
        if self.encoder is not None:
            average = get_ema_multi_avg_fn(self.settings.momentum)
            average(list(self.encoder.parameters()), list(model.parameters()), None)
            for buffer, value in zip(self.encoder.buffers(), model.buffers(), strict=True):
                buffer.copy_(value)
