"""`Embedder`: input -> backbone -> pool -> head -> embedding, and after a neck a second one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mettle.errors import InputError, RecipeError, nearest
from mettle.model.backbones import Backbone, build_backbone
from mettle.model.neck import Neck, Space, build_neck, check_neck

MOST = {"width": 65536, "depth": 1000, "dim": 65536}  # a description from elsewhere must not fill the memory
KNOWN = {"pool": ("average", "gem", "flatten"), "head": ("linear", "mlp", "norm", "none")}


@dataclass(frozen=True)
class EmbedderSpec:
    """What an embedder is made of; enough to rebuild it for a given input shape."""

    backbone: str = "convnet"
    width: int = 32  # of the own backbones: channels of the first block, or units of an MLP layer / 8
    depth: int = 4  # of the own backbones: blocks, or layers
    pool: Literal["average", "gem", "flatten"] = "average"
    head: Literal["linear", "mlp", "norm", "none"] = "linear"
    dim: int = 128
    unit: bool = True  # embeddings of length 1
    pretrained: bool = False  # weights of a timm backbone
    neck: Neck = "none"  # between the two spaces that losses may be in, see `mettle.model.neck`
    embedding: Space = "before"  # the neck or after it: which one the model gives

    def __post_init__(self) -> None:
        if not isinstance(self.backbone, str):
            raise RecipeError(f"model.backbone must be a name, such as 'convnet', got {self.backbone!r}")
        for name, most in MOST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise RecipeError(f"model.{name} must be a whole number, got {value!r}")
            if not 1 <= int(value) <= most:
                raise RecipeError(f"model.{name} must be between 1 and {most}, got {value}")
        for name, known in KNOWN.items():
            value = getattr(self, name)
            if value not in known:
                raise RecipeError(f"model.{name} = {value!r} is not known{nearest(str(value), known)}")
        for name in ("unit", "pretrained"):
            if not isinstance(getattr(self, name), bool):
                raise RecipeError(f"model.{name} must be true or false, got {getattr(self, name)!r}")
        check_neck(self.neck, self.embedding)

    def to_table(self) -> dict[str, Any]:
        """The arguments that rebuild it; what is said about a neck is left out where there is none."""
        return {
            key: value for key, value in vars(self).items() if self.neck != "none" or key not in ("neck", "embedding")
        }


@runtime_checkable
class EmbeddingModel(Protocol):
    """A module from inputs to embeddings, as the rest of mettle takes it: ours, a wrapped one, an exported graph.

    Beside what every ``nn.Module`` has it knows the shape of one input and how long its embeddings are.
    """

    shape: tuple[int, ...]  # of one input: (c, h, w) of images in [0, 1], (f,) of rows, or any other
    training: bool

    @property
    def dim(self) -> int:
        """How many numbers an embedding has."""
        ...

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim) embeddings of a batch."""
        ...

    def features(self, x: Tensor) -> Tensor:
        """(b, f) what linear probes are given: what the head sees, or the embeddings where there is no head."""
        ...

    # What every module has.
    def __call__(self, x: Tensor) -> Tensor: ...  # noqa: D102
    def modules(self) -> Iterator[nn.Module]: ...  # noqa: D102
    def parameters(self) -> Iterator[nn.Parameter]: ...  # noqa: D102
    def buffers(self) -> Iterator[Tensor]: ...  # noqa: D102
    def state_dict(self) -> Mapping[str, Any]: ...  # noqa: D102
    def to(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102


@contextmanager
def eval_mode(model: nn.Module | EmbeddingModel) -> Iterator[None]:
    """Put a module in eval mode for a while, and then each of its parts back in the mode that it was in."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


def find_device(model: nn.Module | EmbeddingModel) -> torch.device:
    """Where a module computes: the device of its first parameter or buffer, else the CPU."""
    tensor = next(model.parameters(), None)
    tensor = next(model.buffers(), None) if tensor is None else tensor
    return torch.device("cpu") if tensor is None else tensor.device


class Embedder(nn.Module):
    """Pictures (b, c, h, w) in [0, 1], or rows (b, f), to embeddings (b, dim).

    Centring and scaling of the input are part of the module, so that whoever holds the weights cannot get them wrong.
    ``load_pretrained=False`` does not ask for pretrained weights: others are about to be loaded in their place.
    """

    def __init__(self, spec: EmbedderSpec, shape: tuple[int, ...], *, load_pretrained: bool = True):
        super().__init__()
        self.spec, self.shape = spec, tuple(shape)
        channels = shape[0]
        size = (channels, 1, 1) if len(shape) == 3 else (channels,)
        self.input_mean: Tensor
        self.input_std: Tensor
        self.register_buffer("input_mean", torch.zeros(size))
        self.register_buffer("input_std", torch.ones(size))
        pretrained = spec.pretrained and load_pretrained
        self.backbone: Backbone = build_backbone(spec.backbone, self.shape, spec.width, spec.depth, pretrained)
        found = self._infer_output(self.backbone, torch.zeros(1, *self.shape))
        self.pool = _build_pool(spec.pool) if found.ndim == 4 else nn.Identity()
        self.head = _build_head(spec.head, self._infer_output(self.pool, found).shape[1], spec.dim)
        self.neck = build_neck(spec.neck, spec.dim, spec.unit)
        if len(shape) == 3:  # about twice as fast for convolutions on CPUs and on tensor cores
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def dim(self) -> int:
        """How many numbers an embedding has."""
        return self.spec.dim

    @property
    def embedding(self) -> Space:
        """Which embedding is given where there is a neck: that before it, or that after it."""
        return self.spec.embedding

    @staticmethod
    @torch.no_grad()
    def _infer_output(part: nn.Module, x: Tensor) -> Tensor:
        """What a part makes of an input, to learn its shape (without moving running statistics)."""
        found = part.eval()(x)
        part.train()
        return found

    def fit_normalization(self, inputs: Tensor) -> None:
        """Set centring and scaling from a sample of training inputs."""
        dims = (0, 2, 3) if inputs.ndim == 4 else (0,)
        self.input_mean.copy_(inputs.mean(dims).view_as(self.input_mean))
        # A constant column has no scale of its own.
        spread = inputs.std(dims)
        self.input_std.copy_(torch.where(spread < 1e-6, 1.0, spread).view_as(self.input_std))

    def features(self, x: Tensor) -> Tensor:
        """(b, f) what the head sees: the input of linear probes."""
        if x.shape[1:] != self.shape:
            raise InputError(f"this model takes inputs of shape {self.shape}, got {tuple(x.shape[1:])}")
        x = (x - self.input_mean) / self.input_std
        return self.pool(self.backbone(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x))

    def before_neck(self, x: Tensor) -> Tensor:
        """(b, dim) embeddings before the neck, if there is one."""
        z = self.head(self.features(x))
        return nn.functional.normalize(z.float(), dim=1) if self.spec.unit else z

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim) embeddings: of the two that a neck makes, those that `embedding` names."""
        z = self.before_neck(x)
        return z if self.neck is None or self.embedding == "before" else self.neck(z)


class GeM(nn.Module):
    """Generalised mean over the picture: (mean xᵖ)^(1/p), p learned, between average (1) and maximum (∞)."""

    def __init__(self, p: float = 3.0):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) to (b, c)."""
        return x.float().clamp(min=1e-6).pow(self.p).mean((2, 3)).pow(1 / self.p)


class Average(nn.Module):
    """Mean over the picture."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) to (b, c)."""
        return x.mean((2, 3))


def _build_pool(name: str) -> nn.Module:
    pools = {"average": Average, "gem": GeM, "flatten": nn.Flatten}
    return pools[name]()


def _build_head(name: str, features: int, dim: int) -> nn.Module:
    if name == "linear":
        return nn.Linear(features, dim)
    if name == "norm":  # the head that HDML was published with
        return nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, dim))
    if name == "mlp":
        return nn.Sequential(nn.Linear(features, features), nn.ReLU(inplace=True), nn.Linear(features, dim))
    if features != dim:  # "none"
        raise RecipeError(f"head = 'none' gives {features} numbers: set model.dim = {features}, or choose a head")
    return nn.Identity()
