"""`ModuleEmbedder`: anybody's module made into what the rest of mettle takes."""

from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from mettle.data.transforms import to_input_tensor
from mettle.errors import InputError
from mettle.model.embedder import eval_mode, find_device
from mettle.model.neck import BatchNormNeck, Neck, Space, build_neck, check_neck
from mettle.model.preprocess import Preprocess

InputDtype = Literal["float32", "int64"]


class ModuleEmbedder(nn.Module):
    """Any module from inputs (b, ...) to embeddings (b, dim).

    Where the preprocessing has a mean and a standard deviation, they become part of the model: images in [0, 1] come
    in, as they do for `Embedder`, and the module sees normalized ones.

    Args:
        module: gives one (b, dim) floating-point tensor.
        shape: of one input.
        dtype: of the inputs: ``"float32"``, or ``"int64"`` for token ids.
        preprocess: what happens to an image before; only for modules that take images.
        dim: how long the embeddings are; without it the module is run once, on zeros.
        neck: ``"batchnorm"`` puts one behind the module, see `mettle.model.neck`.
        embedding: which embedding is given, the module's own, ``"before"`` the neck, or the one ``"after"`` it.

    Raises:
        InputError: the module does not take such inputs, or gives something else.
    """

    input_mean: Tensor | None
    input_std: Tensor | None

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        *,
        dtype: InputDtype = "float32",
        preprocess: Preprocess | None = None,
        dim: int | None = None,
        neck: Neck = "none",
        embedding: Space = "before",
    ):
        super().__init__()
        if dtype not in get_args(InputDtype):
            raise InputError(f"dtype must be 'float32' or 'int64', got {dtype!r}")
        if preprocess is not None and (preprocess.shape != tuple(shape) or dtype != "float32"):
            given = f"inputs of shape {tuple(shape)} and type {dtype}"
            raise InputError(f"preprocess gives images (c, h, w) = {preprocess.shape}, the module takes {given}")
        self.module, self.shape, self.preprocess = module, tuple(int(side) for side in shape), preprocess
        self.dtype: InputDtype = dtype
        normalization = None if preprocess is None or preprocess.mean is None else (preprocess.mean, preprocess.std)
        for name, values in zip(("input_mean", "input_std"), normalization or (None, None), strict=True):
            buffer = None if values is None else torch.tensor(values, device=find_device(module)).view(-1, 1, 1)
            self.register_buffer(name, buffer)
        check_neck(neck, embedding)
        self._dim = dim if dim is not None else self._infer_dim()
        made = build_neck(neck, self._dim)
        self.neck: BatchNormNeck | None = None if made is None else made.to(find_device(module))
        self.embedding: Space = embedding

    @classmethod
    def from_example(
        cls,
        module: nn.Module,
        example: Tensor | np.ndarray,
        *,
        preprocess: Preprocess | None = None,
        neck: Neck = "none",
        embedding: Space = "before",
    ) -> "ModuleEmbedder":
        """Wrap a module for inputs like these, after it was run on them once.

        The module runs in eval mode without gradient and is then put back in the mode that it was in.

        Args:
            module: gives one (b, dim) floating-point tensor.
            example: a batch of inputs: floats, token ids, or uint8 images (b, h, w, c).
            preprocess: what happens to an image before.
            neck: what is put behind the module, if anything.
            embedding: which embedding is given where there is a neck.

        Raises:
            InputError: the module fails on the example or gives something else than embeddings; one line says what.
        """
        if not isinstance(module, nn.Module):
            raise InputError(f"the model must be a torch.nn.Module, got {type(module).__name__}")
        x = _as_batch(example)
        shape, dtype = tuple(x.shape[1:]), "float32" if x.dtype.is_floating_point else "int64"
        z = cls(module, shape, dtype=dtype, preprocess=preprocess, dim=1)._run_once(x)
        if not torch.isfinite(z).all():
            raise InputError("the module gives NaN or infinity for the example: check its weights and the example")
        dim = z.shape[1]
        return cls(module, shape, dtype=dtype, preprocess=preprocess, dim=dim, neck=neck, embedding=embedding)

    @property
    def dim(self) -> int:
        """How many numbers an embedding has."""
        return self._dim

    def before_neck(self, x: Tensor) -> Tensor:
        """(b, dim) embeddings of the module itself."""
        if tuple(x.shape[1:]) != self.shape:
            raise InputError(f"this model takes inputs of shape {self.shape}, got {tuple(x.shape[1:])}")
        if self.input_mean is not None and self.input_std is not None:
            x = (x - self.input_mean) / self.input_std
        return self.module(x)

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim) embeddings: of the two that a neck makes, those that `embedding` names."""
        z = self.before_neck(x)
        return z if self.neck is None or self.embedding == "before" else self.neck(z)

    def features(self, x: Tensor) -> Tensor:
        """(b, dim) embeddings: nothing is known of a head."""
        return self(x)

    def _infer_dim(self) -> int:
        kind = torch.float32 if self.dtype == "float32" else torch.int64
        return self._run_once(torch.zeros(2, *self.shape, dtype=kind)).shape[1]

    @torch.no_grad()
    def _run_once(self, x: Tensor) -> Tensor:
        """(b, dim) of a batch that is tried, checked to be that."""
        with eval_mode(self):
            try:
                z = self.before_neck(x.to(find_device(self)))
            except Exception as problem:  # whatever a module raises: it is not ours
                said = (str(problem).strip() or type(problem).__name__).splitlines()[0][:200]
                given = f"inputs of shape {tuple(x.shape)} and type {str(x.dtype).removeprefix('torch.')}"
                raise InputError(f"the module fails on {given}: {said}") from problem
        return check_embeddings(z, len(x))


def check_embeddings(z: Any, count: int) -> Tensor:
    """What a module gave for ``count`` inputs, if it is one floating-point tensor (count, dim); else an error."""
    if not isinstance(z, Tensor):
        raise InputError(
            f"the module must give one tensor (n, dim), got a {type(z).__name__}: return one tensor, or wrap the "
            "module in one that does"
        )
    shape = tuple(z.shape)
    if z.ndim != 2:
        advice = "flatten or pool the feature map" if z.ndim > 2 else "return one row for each input"
        raise InputError(f"the module must give embeddings (n, dim), got shape {shape}: {advice}")
    if len(z) != count or z.shape[1] == 0:
        raise InputError(f"the module must give one row for each of {count} inputs, got shape {shape}")
    if not z.is_floating_point():
        kind = str(z.dtype).removeprefix("torch.")
        raise InputError(f"the module must give floating-point embeddings, got {kind}: return them before any argmax")
    return z


def _as_batch(example: Any) -> Tensor:
    """An example as a network takes it: see `mettle.data.transforms.to_input_tensor`."""
    if not isinstance(example, Tensor | np.ndarray) or example.ndim < 2 or len(example) == 0:
        found = tuple(example.shape) if hasattr(example, "shape") else type(example).__name__
        raise InputError(f"example must be a batch of inputs (n, ...), a tensor or an array, got {found}")
    try:
        return to_input_tensor(example, "cpu")
    except TypeError:
        raise InputError(f"example must hold numbers, got {example.dtype}") from None
