"""`Preprocess`: from an image as people have it to the pixels that a network takes.

| step | |
|---|---|
| decode | EXIF orientation applied, transparency on white, grey or RGB; limits as in `mettle.data.image_decoding` |
| resize | ``resize``, ``crop`` and ``interpolation``, see `mettle.data.image_decoding.resize_image` |
| scale | uint8 to [0, 1] |
| normalize | ``(x - mean) / std`` for each channel, inside the model, so that it also is in an exported graph |

What timm and torchvision say of their own preprocessing translates into one by `Preprocess.translate`. Neither is
imported here: their objects are told by the names of their types.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from mettle.data.image_decoding import (
    PAD_COLOR,
    Channels,
    Interpolation,
    Resize,
    Sides,
    as_size,
    check_crop,
    check_interpolation,
    check_resize,
    decode_image,
)
from mettle.data.inputs import ImageArray
from mettle.errors import InputError, nearest

MAX_SIDE = 8192  # pixels: a description from elsewhere must not fill the memory
TIMM_DEFAULTS = {  # of `timm.data.resolve_data_config`, for what a configuration leaves out
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_pct": 0.875,
    "crop_mode": "center",
}


@dataclass(frozen=True)
class Preprocess:
    """What happens to an image before a network sees it.

    Args:
        size: what the network takes: (height, width), or one side of a square.
        resize: ``"crop"``, ``"pad"`` or ``"stretch"``: how an image of another shape gets that size.
        crop: the share of the sides that a center crop keeps (timm's ``crop_pct``). The image is then resized and
            cropped exactly as by torchvision's ``Resize`` and ``CenterCrop``; None, which keeps as much as possible,
            samples the center in one step instead.
        mean: for each channel, of values in [0, 1]; None where the network takes values in [0, 1].
        std: for each channel.
        channels: 3 for RGB, 1 for grey.
        interpolation: the filter that resizes, antialiased.
    """

    size: Sides
    resize: Resize = "crop"
    crop: float | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    channels: Channels = 3
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        size = as_size(self.size)
        if size is None or max(size) > MAX_SIDE:
            raise InputError(f"size must be (height, width) or one side, at most {MAX_SIDE} pixels, got {self.size!r}")
        if isinstance(self.channels, bool) or self.channels not in (1, 3):
            raise InputError(f"channels must be 1 (grey) or 3 (RGB), got {self.channels!r}")
        if (self.mean is None) != (self.std is None):
            raise InputError("mean and std belong together: give both, or neither")
        checked = {
            "size": size,
            "resize": check_resize(self.resize),
            "crop": check_crop(self.crop),
            "interpolation": check_interpolation(self.interpolation),
            "channels": int(self.channels),
            "mean": _check_channel_values("mean", self.mean, self.channels),
            "std": _check_channel_values("std", self.std, self.channels),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.std is not None and not all(value > 0 for value in self.std):
            raise InputError(f"std must be above 0 in each channel, got {list(self.std)}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(c, h, w) of one input of the network."""
        height, width = self.size  # type: ignore[misc]
        return self.channels, height, width

    def decode(self, item: Any) -> np.ndarray:
        """(h, w, c) uint8 of one image: a path, the bytes of a file, a Pillow image, a uint8 array or tensor.

        Raises:
            DataError: the image cannot be read; one line says why.
            InputError: this is no image.
        """
        ways: dict[str, Any] = {"resize": self.resize, "crop": self.crop, "interpolation": self.interpolation}
        if isinstance(item, str):
            item = Path(item)
        if hasattr(item, "save") and hasattr(item, "convert"):  # a Pillow image: one road for all, by way of its bytes
            buffer = io.BytesIO()
            item.convert("RGB" if item.mode not in ("L", "RGB", "RGBA", "LA", "P") else item.mode).save(buffer, "PNG")
            item = buffer.getvalue()
        if isinstance(item, bytes | Path):
            return decode_image(item, size=self.size, channels=self.channels, **ways)
        if hasattr(item, "detach"):  # a tensor: as torch has it, channels first
            item = item.detach().cpu().numpy()
            item = item.transpose(1, 2, 0) if item.ndim == 3 and item.shape[0] in (1, 3) else item
        if isinstance(item, np.ndarray) and item.dtype == np.uint8 and item.ndim in (2, 3):
            return ImageArray(item[None]).with_size(self.size, self.channels, **ways).array[0]
        raise InputError(
            f"an image is a path, the bytes of a file, a Pillow image or a uint8 array: got {type(item).__name__}"
        )

    def stack(self, items: Iterable[Any]) -> np.ndarray:
        """(n, h, w, c) uint8 of several images, see `decode`; `mettle.data.to_input_tensor` makes them a batch."""
        found = [self.decode(item) for item in items]
        if not found:
            raise InputError("no images were given")
        return np.stack(found)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads; what is None is left out."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items() if v is not None}

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> "Preprocess":
        """The inverse of `to_json`.

        Raises:
            InputError: a key is unknown or missing, or a value is not what it must be.
        """
        if not isinstance(mapping, Mapping):
            raise InputError(f"preprocessing is described by a mapping with 'size', got {type(mapping).__name__}")
        known = [field.name for field in fields(cls)]
        for key in mapping:
            if key not in known:
                raise InputError(f"preprocessing has no {key!r}{nearest(str(key), known)}")
        missing = [field.name for field in fields(cls) if field.default is MISSING and field.name not in mapping]
        if missing:
            raise InputError(f"preprocessing lacks {missing[0]!r}: it is described by a mapping with 'size'")
        return cls(**mapping)

    @classmethod
    def from_contract(cls, entry: Mapping[str, Any]) -> "Preprocess":
        """That of a run, from ``contract.json["input"]``: its shape, and of the other keys those that are ours."""
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        if not isinstance(shape, Sequence) or len(shape) != 3:
            raise InputError(f"the run does not take images: its inputs have shape {shape!r}, not (c, h, w)")
        ours = {field.name for field in fields(cls)} - {"size", "channels"}
        known = {key: value for key, value in entry.items() if key in ours}
        return cls.from_json({"size": list(shape[1:]), "channels": shape[0], **known})

    @classmethod
    def translate(cls, given: Any) -> "Preprocess":
        """A `Preprocess` from what other libraries describe theirs by.

        Args:
            given: a `Preprocess`, as it is; a data configuration of timm (``timm.data.resolve_data_config``,
                ``model.pretrained_cfg``); a ``Compose`` of torchvision (v1 or v2) for evaluation, as also
                ``timm.data.create_transform`` makes it; the ``transforms()`` of torchvision's pretrained weights.

        Raises:
            InputError: there is no translation; the step that has none is named.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return _translate_timm(given) if "input_size" in given else cls.from_json(given)
        if _is_from(given, "torchvision.transforms") and type(given).__name__ == "ImageClassification":
            resize, size = tuple(given.resize_size), tuple(given.crop_size)
            ways = _crop_of_resize(resize, size, f"{type(given).__name__}(...)")
            return cls(mean=given.mean, std=given.std, interpolation=_interpolation_name(given.interpolation), **ways)
        steps = _flatten_steps(given)
        if steps is None:
            raise InputError(
                f"preprocess must be a mettle.model.Preprocess, a data configuration of timm or a Compose of "
                f"torchvision, got {type(given).__name__}"
            )
        return _translate_steps(steps)


def _check_channel_values(name: str, values: Any, channels: int) -> tuple[float, ...] | None:
    if values is None:
        return None
    try:
        found = [] if isinstance(values, str) else list(values)
    except TypeError:
        found = []
    numbers = all(isinstance(v, Real) and not isinstance(v, bool) and math.isfinite(v) for v in found)
    if len(found) != channels or not numbers:
        raise InputError(f"{name} must be {channels} finite numbers, one for each channel, got {values!r}")
    return tuple(map(float, found))


def _translate_timm(config: Mapping[str, Any]) -> Preprocess:
    """From the data configuration of a timm model; its keys about anything else are passed over."""

    def value(name: str) -> Any:
        found = config.get(name)
        return TIMM_DEFAULTS[name] if found is None else found

    shape = config["input_size"]
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 3:
        raise InputError(f"the input_size of a timm configuration is (channels, height, width), got {shape!r}")
    modes: dict[str, Resize] = {"center": "crop", "squash": "stretch", "border": "pad"}
    mode, mean, std = value("crop_mode"), *(_repeat(value(name), shape[0]) for name in ("mean", "std"))
    if mode not in modes:
        raise InputError(f"crop_mode {mode!r} of a timm configuration has no translation{nearest(str(mode), modes)}")
    checked = Preprocess(tuple(shape[1:]), modes[mode], value("crop_pct"), mean, std, shape[0], value("interpolation"))
    if mode == "border" and any(round(255 * v) != PAD_COLOR for v in checked.mean or ()):
        raise InputError(
            f"crop_mode 'border' of a timm configuration pads with its mean {mean} and has no translation: padding is "
            f"grey ({PAD_COLOR}) here; give a Preprocess with resize='pad' instead"
        )
    return checked


def _repeat(values: Any, channels: int) -> Any:
    return tuple(values) * channels if isinstance(values, Sequence) and len(values) == 1 else values


def _is_from(given: Any, package: str) -> bool:
    module = type(given).__module__
    return module == package or module.startswith(f"{package}.")


def _flatten_steps(given: Any) -> list[Any] | None:
    """The steps of a composed transform, also of those inside others; None where it is not one."""
    if type(given).__name__ == "Compose" and _is_from(given, "torchvision"):
        inner = given.transforms
    elif type(given).__name__ == "Sequential" and _is_from(given, "torch"):
        inner = given
    else:
        return None
    return [step for one in inner for step in (_flatten_steps(one) or [one])]


def _translate_steps(steps: Sequence[Any]) -> Preprocess:
    """From the steps of a transform for evaluation."""
    resize: tuple[int, ...] | None = None
    size: tuple[int, ...] | None = None
    interpolation: Interpolation = "bilinear"
    mean = std = None
    channels = 3
    is_tensor = is_scaled = False
    for step in steps:
        name, said = type(step).__name__, " ".join(repr(step).split())[:120]
        refused = InputError(f"the step {said} of the transform has no translation into a Preprocess")
        known = _is_from(step, "torchvision.transforms") or _is_from(step, "timm.data")
        if not known or mean is not None:  # nothing follows a normalization
            raise refused
        if name == "Resize" and resize is None and size is None:
            resize, interpolation = _as_sides(step.size), _interpolation_name(step.interpolation)
            plain = getattr(step, "max_size", None) is None
            # Of tensors, torchvision's "nearest" takes other pixels than Pillow's does.
            exact = str(getattr(step.interpolation, "value", "")) != "nearest"
            like_pillow = not is_tensor or (getattr(step, "antialias", True) is not False and exact)
            if resize is None or not plain or not like_pillow:
                raise refused
        elif name == "CenterCrop" and resize is not None and size is None:
            size = _as_sides(step.size)
        elif name == "Grayscale" and step.num_output_channels == 1:
            channels = 1
        elif name in ("ToTensor", "MaybeToTensor"):
            is_tensor = is_scaled = True
        elif name in ("ToImage", "PILToTensor", "MaybePILToTensor", "ToPureTensor"):
            is_tensor = True
        elif name in ("ToDtype", "ConvertImageDtype") and str(step.dtype) == "torch.float32":
            is_scaled = is_scaled or name == "ConvertImageDtype" or step.scale
            if not (is_scaled and is_tensor):
                raise refused
        elif name == "Normalize" and is_scaled:
            mean, std = (_repeat(np.asarray(v, np.float64).ravel().tolist(), channels) for v in (step.mean, step.std))
        else:
            raise refused
    if resize is None:
        raise InputError("the transform has no Resize: a network takes images of one size; begin it with Resize")
    if not is_scaled:
        raise InputError(
            "the transform does not scale images to float32 in [0, 1]: add ToTensor(), or ToImage() and "
            "ToDtype(torch.float32, scale=True)"
        )
    what = f"Resize({list(resize)}) and CenterCrop({list(size)})" if size else f"Resize({list(resize)})"
    ways = _crop_of_resize(resize, size, what)
    return Preprocess(mean=mean, std=std, channels=channels, interpolation=interpolation, **ways)  # type: ignore[arg-type]


def _as_sides(size: Any) -> tuple[int, ...] | None:
    """The size of a step of torchvision: one side, or (height, width); None where it has none."""
    if size is None:
        return None
    return (int(size),) if isinstance(size, int) else tuple(int(side) for side in size)


def _crop_of_resize(resize: tuple[int, ...], size: tuple[int, ...] | None, what: str) -> dict[str, Any]:
    """Size, way and share of what ``Resize(resize)`` and then ``CenterCrop(size)`` do."""
    if len(resize) == 1 and size is None:
        raise InputError(f"{what} leaves images of several sizes: add CenterCrop, or give Resize (height, width)")
    wanted = size if size is not None else resize
    height, width = wanted * 2 if len(wanted) == 1 else wanted
    scaled = resize * 2 if len(resize) == 1 else resize
    way = "crop" if len(resize) == 1 else "stretch"
    share = height / scaled[0]
    # The size before the crop is found again by rounding down, which must not lose a pixel to the last bit.
    while 0 < share <= 1 and math.floor(height / share) < scaled[0]:
        share = math.nextafter(share, 0.0)
    same = 0 < share <= 1 and tuple(math.floor(side / share) for side in (height, width)) == tuple(scaled)
    if not same:
        raise InputError(f"{what} has no translation: the crop must keep the same share, at most all, of both sides")
    return {"size": (height, width), "resize": way, "crop": share}


def _interpolation_name(mode: Any) -> Interpolation:
    """Pillow's name of an interpolation mode of torchvision: an enumeration, or the number that Pillow has for it."""
    if isinstance(mode, int):
        numbers: dict[int, Interpolation] = {
            0: "nearest",
            1: "lanczos",
            2: "bilinear",
            3: "bicubic",
            4: "box",
            5: "hamming",
        }
        return numbers.get(mode, str(mode))  # type: ignore[return-value]
    name = str(getattr(mode, "value", mode))
    return "nearest" if name == "nearest-exact" else name  # type: ignore[return-value]
