"""Reading numbers from a GPU while the work that was queued after them goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


class StreamPoint:
    """A point in the work of a device. What was queued before it can be read without waiting for what follows.

    A plain ``.item()`` waits for everything that was queued until then. On a processor there is nothing to wait for.
    """

    def __init__(self, device: torch.device):
        self.device = device
        on_gpu = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        self.event = torch.cuda.current_stream(device).record_event() if on_gpu else None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, tensors from before this point may be used and read; all of that is done when it ends."""
        if self.event is None:
            yield
            return
        stream = _reading_stream(self.device)
        stream.wait_event(self.event)
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()


@cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
