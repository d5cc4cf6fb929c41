"""A batch of images that stay bytes until they are needed, for steps that look at a few of its rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RawInputs:
    """What was read of a batch, and how any of its rows become inputs.

    Rows are the same numbers whenever they are asked for, and whichever others come with them.
    """

    raw: Tensor  # one for each sample; several views of it are made of the same bytes
    count: int  # inputs in the batch
    device: torch.device  # of the inputs
    prepare: Callable[[slice], Tensor]

    def __len__(self) -> int:
        return self.count

    def prepare_rows(self, span: slice) -> Tensor:
        """These inputs, ready for the network and on its device."""
        # A forward pass may ask under autocast and the backward pass outside it: both see the same images.
        with torch.autocast(self.device.type, enabled=False):
            return self.prepare(slice(*span.indices(self.count)))

    def prepare_all(self) -> Tensor:
        """All of them."""
        return self.prepare_rows(slice(0, self.count))
