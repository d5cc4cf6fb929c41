"""A witness to what is held: nothing quadratic may be."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that anything made."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor):
                # What is really held: an expanded view of one number is not a matrix.
                self.size = max(self.size, made.untyped_storage().nbytes() // made.element_size())
        return out
