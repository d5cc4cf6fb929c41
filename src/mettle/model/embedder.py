"""`Embedder`: input -> backbone -> pool -> head -> embedding, and after a neck a second one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mettle.errors import InputError, RecipeError, nearest
from mettle.model.backbones import Backbone, build_backbone, remove_last_stride
from mettle.model.neck import Neck, Space, build_neck, check_neck
from mettle.model.pretrained import LoadedWeights, load_start

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
    pretrained: bool = False  # the weights that timm or torchvision has for this backbone
    weights: str | None = None  # others instead: a file, a run, a graph, see `mettle.model.pretrained`
    weights_match: Literal["name", "order"] = "name"  # how tensors of a file find their places
    mean: Sequence[float] | None = None  # of each channel of the inputs; None: of the training data
    std: Sequence[float] | None = None
    last_stride: int = 2  # of the last stage of a ResNet: 1 doubles the sides of its feature map
    flip: bool = False  # in eval mode the embedding is the mean of an image's and of its mirror image's
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
        for name in ("unit", "pretrained", "flip"):
            if not isinstance(getattr(self, name), bool):
                raise RecipeError(f"model.{name} must be true or false, got {getattr(self, name)!r}")
        if self.weights is not None and (not isinstance(self.weights, str) or not self.weights):
            raise RecipeError(f"model.weights must be the name of a file, a run or weights, got {self.weights!r}")
        if self.weights is not None and self.pretrained:
            raise RecipeError("model.weights and model.pretrained say two things: leave one of them out")
        if self.weights_match not in ("name", "order"):
            raise RecipeError(f"model.weights_match must be 'name' or 'order', got {self.weights_match!r}")
        _check_normalization(self)
        if self.last_stride not in (1, 2) or isinstance(self.last_stride, bool):
            raise RecipeError(f"model.last_stride must be 1 or 2, got {self.last_stride!r}")
        check_neck(self.neck, self.embedding)

    def to_table(self) -> dict[str, Any]:
        """The arguments that rebuild it; of options that may be off only those that are on."""
        optional = {"neck": "none", "weights": None, "weights_match": "name", "mean": None, "std": None}
        optional |= {"last_stride": 2, "flip": False}
        table = {key: value for key, value in vars(self).items() if key not in optional or value != optional[key]}
        if self.neck == "none":
            table.pop("embedding")
        return {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}


def _check_normalization(spec: EmbedderSpec) -> None:
    """Refuse a mean without a standard deviation, and numbers that nothing can be divided by."""
    if (spec.mean is None) != (spec.std is None):
        raise RecipeError("model.mean and model.std belong together: give both, or neither")
    for name, values in (("mean", spec.mean), ("std", spec.std)):
        if values is None:
            continue
        found = tuple(values) if isinstance(values, list | tuple) else ()
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in found)
        if not found or not numbers or (name == "std" and min(found) <= 0):
            wanted = "finite numbers, one for each channel" + (", above 0" if name == "std" else "")
            raise RecipeError(f"model.{name} must be {wanted}, got {values!r}")
        object.__setattr__(spec, name, tuple(map(float, found)))


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
    ``load_pretrained=False`` does not ask for pretrained weights: others are about to be loaded in their place. What
    was loaded is told by ``pretrained``, None where nothing was.
    """

    def __init__(self, spec: EmbedderSpec, shape: tuple[int, ...], *, load_pretrained: bool = True):
        super().__init__()
        self.spec, self.shape = spec, tuple(shape)
        self.takes_features = False  # in place of images: those of a frozen backbone are computed once for training
        channels = shape[0]
        size = (channels, 1, 1) if len(shape) == 3 else (channels,)
        self.input_mean: Tensor
        self.input_std: Tensor
        self.register_buffer("input_mean", torch.zeros(size))
        self.register_buffer("input_std", torch.ones(size))
        pretrained = spec.pretrained and load_pretrained and not spec.backbone.startswith("torchvision/")
        self.backbone: Backbone = build_backbone(spec.backbone, self.shape, spec.width, spec.depth, pretrained)
        if spec.last_stride == 1:
            remove_last_stride(self.backbone, spec.backbone, self.shape)
        found = self._infer_output(self.backbone, torch.zeros(1, *self.shape))
        if spec.pool == "gem" and found.ndim != 4:
            raise RecipeError(f"model.pool = 'gem' is of a feature map, {spec.backbone!r} gives none: leave it out")
        if spec.flip and len(self.shape) != 3:
            raise RecipeError("model.flip mirrors images, the data are rows: leave it out")
        self.pool = _build_pool(spec.pool) if found.ndim == 4 else nn.Identity()
        self.head = _build_head(spec.head, self._infer_output(self.pool, found).shape[1], spec.dim)
        self.neck = build_neck(spec.neck, spec.dim, spec.unit)
        if spec.mean is not None and spec.std is not None:
            self._set_normalization(spec.mean, spec.std)
        self.pretrained: LoadedWeights | None = load_start(self) if load_pretrained else None
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

    @property
    def has_given_normalization(self) -> bool:
        """Whether centring and scaling were given with the description or the weights, and not to be fitted."""
        return self.spec.mean is not None or (self.pretrained is not None and self.pretrained.sets_normalization)

    def _set_normalization(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != self.shape[0] or len(std) != self.shape[0]:
            raise RecipeError(
                f"model.mean and model.std have {len(mean)} and {len(std)} numbers, inputs have {self.shape[0]} "
                f"channels: give one for each{', or set data.channels' if len(self.shape) == 3 else ''}"
            )
        self.input_mean.copy_(torch.tensor(mean).view_as(self.input_mean))
        self.input_std.copy_(torch.tensor(std).view_as(self.input_std))

    def fit_normalization(self, inputs: Tensor) -> None:
        """Set centring and scaling from a sample of training inputs, unless they were given."""
        if self.has_given_normalization:
            return
        dims = (0, 2, 3) if inputs.ndim == 4 else (0,)
        self.input_mean.copy_(inputs.mean(dims).view_as(self.input_mean))
        # A constant column has no scale of its own.
        spread = inputs.std(dims)
        self.input_std.copy_(torch.where(spread < 1e-6, 1.0, spread).view_as(self.input_std))

    def features(self, x: Tensor) -> Tensor:
        """(b, f) what the head sees: the input of linear probes."""
        if self.takes_features and x.ndim == 2 and len(self.shape) == 3:
            return x
        if x.shape[1:] != self.shape:
            raise InputError(f"this model takes inputs of shape {self.shape}, got {tuple(x.shape[1:])}")
        x = (x - self.input_mean) / self.input_std
        return self.pool(self.backbone(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x))

    def before_neck(self, x: Tensor) -> Tensor:
        """(b, dim) embeddings before the neck, if there is one."""
        z = self.head(self.features(x))
        return (
            nn.functional.normalize(z.to(torch.promote_types(z.dtype, torch.float32)), dim=1) if self.spec.unit else z
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, dim) embeddings: of the two that a neck makes, those that `embedding` names.

        With ``flip``, in eval mode, the mean of those of an image and of its mirror image, of length 1 where
        embeddings are.
        """
        z = self._embed_once(x)
        if self.training or not self.spec.flip:
            return z
        z = (z + self._embed_once(x.flip(-1))) / 2
        return nn.functional.normalize(z, dim=1) if self.spec.unit else z

    def _embed_once(self, x: Tensor) -> Tensor:
        z = self.before_neck(x)
        return z if self.neck is None or self.embedding == "before" else self.neck(z)


class GeM(nn.Module):
    """Generalised mean over the picture (Radenović et al. 2019): (mean xᵖ)^(1/p), p learned, one for all channels.

    Between average (p = 1) and maximum (p → ∞). Features below 1e-6 count as 1e-6: a power needs positive numbers,
    which those after a ReLU are.
    """

    def __init__(self, p: float = 3.0):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) to (b, c)."""
        return (
            x.to(torch.promote_types(x.dtype, torch.float32)).clamp(min=1e-6).pow(self.p).mean((2, 3)).pow(1 / self.p)
        )


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
