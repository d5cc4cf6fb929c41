"""Random changes to a batch, each sample's own, drawn from (seed, epoch, id): see :mod:`mettle.rng`.

Turning, scaling, shifting, shearing, cropping and mirroring are one affine map, so a batch is resampled once, on
whatever device it lives on. Colours change in one order for all samples: brightness, contrast, saturation, hue.
Erasing comes last.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mettle.errors import InputError, RecipeError, nearest
from mettle.rng import hash_bits, uniform_per_id

CACHED = 8 * 2**20  # bytes of pictures that a processor changes at a time: what comes in between stays in its cache
LEAST_BYTES = 64 * 64  # pixels from which a processor crops and mirrors bytes picture by picture, not floats together


@dataclass(frozen=True)
class Augment:
    """How far each change may go; zero switches it off."""

    rotate: float = 0.0  # degrees, either way
    scale: tuple[float, float] = (1.0, 1.0)  # side of the visible window, relative to the picture
    shift: float = 0.0  # of the side, either way
    shear: float = 0.0  # of the height, either way
    flip: float = 0.0  # probability of mirroring
    contrast: float = 0.0  # factor 1 ± this
    brightness: float = 0.0  # of the full range, either way
    pad: float = 0.0  # of the shorter side: padded with black so far on all sides, then cropped back at random
    erase: float = 0.0  # probability of blanking a window of 20 to 40 % of the side
    erase_area: tuple[float, float] | None = None  # instead, the share of the picture that the window covers
    erase_aspect: float = 1.0  # and its height over width: between 1 / this and this
    erase_fill: Literal["black", "noise"] = "black"  # or a random value for every pixel
    noise: float = 0.0  # standard deviation added to pixels, or to rows in units of each feature's spread in ``pool``
    corrupt: float = 0.0  # probability of replacing a feature of a row by that of another row
    crop: tuple[float, float] = (1.0, 1.0)  # share of the area that a window keeps
    aspect: float = 1.0  # and its width over height: between 1 / this and this
    jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # brightness, contrast, saturation, hue
    jitter_share: float = 1.0  # probability of jittering at all
    grey: float = 0.0  # probability of losing all colour
    blur: float = 0.0  # probability of smoothing with three taps, of a width between 0.1 and 2 pixels
    # Rows that replacements come from, and whose spread noise is measured in; without, those of the batch, and 1.
    pool: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        low, high = self.erase_area or (0.0, 1.0)
        if not 0 <= low <= high <= 1:
            raise InputError(f"erase_area must be two shares of the picture, the smaller first, got {self.erase_area}")
        if not self.erase_aspect > 0:
            raise InputError(f"erase_aspect must be above 0, got {self.erase_aspect}")
        if self.erase_fill not in ("black", "noise"):
            raise InputError(f"erase_fill must be 'black' or 'noise', got {self.erase_fill!r}")
        if not 0 <= self.pad <= 1:
            raise InputError(f"pad must be a share of the shorter side, got {self.pad}")

    def __call__(
        self,
        x: Tensor,
        ids: np.ndarray,
        *,
        seed: int,
        epoch: int,
        view: int = 0,
        aspect: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Tensor:
        """Pictures (b, c, h, w) or rows (b, f) changed, on the device of ``x``.

        Pictures may also be (b, h, w, c) uint8. A processor crops, mirrors and shifts those as bytes, which takes a
        fraction of the time; pixels then differ by rounding, and smaller crops are antialiased.

        Pictures that are stretched to a canvas come with their ``aspect``, (b,) width over height, and with the
        ``size`` (h, w) that the network takes: crops then have the proportions of the picture, not of the canvas.
        """
        u = torch.from_numpy(uniform_per_id(seed, epoch, ids, 26, stream=view)).to(x.device, torch.float32)
        if x.dtype == torch.uint8 and x.ndim == 4 and not self.moves_bytes(x):
            x = to_input_tensor(x, str(x.device))
        if x.ndim == 4:
            some = max(1, CACHED // max(4 * x[0].numel(), 1)) if x.device.type == "cpu" and len(x) else len(x)
            if len(x) <= some or (aspect is None and self == Augment()):
                x = self._change_pictures(x, u, aspect, size)
            else:
                sides = [None] * -(-len(x) // some) if aspect is None else aspect.split(some)
                parts = zip(x.split(some), u.split(some), sides, strict=True)
                x = torch.cat([self._change_pictures(*part, size) for part in parts])
        if self.noise or (self.corrupt and x.ndim == 2):
            x = self._add_noise(x, ids, seed, epoch, view)
        return x

    def _change_pictures(self, x: Tensor, u: Tensor, aspect: Tensor | None, size: tuple[int, int] | None) -> Tensor:
        """Pictures changed, each by itself: how many there are at a time changes no pixel."""
        if x.dtype == torch.uint8:
            found = self._move_bytes(x, u, aspect, size)
        else:
            found = self._pad_and_crop(self._warp(x, u, aspect, size), u)
        found = self._change_colors(found, u)
        if not self.erase:
            return found
        if x.device.type == "cpu":
            return self._erase_in_place(found.clone() if found is x else found, u)
        return self._erase_together(found, u)

    def moves_bytes(self, x: Tensor) -> bool:
        """Whether uint8 pictures (b, h, w, c) are cropped, mirrored and shifted before they become floats."""
        is_upright = not (self.rotate or self.shift or self.shear) and self.scale == (1.0, 1.0)
        return is_upright and x.device.type == "cpu" and x.shape[1] * x.shape[2] >= LEAST_BYTES

    def takes_crops(self) -> bool:
        """Whether training sees windows of the pictures."""
        return self.crop != (1.0, 1.0)

    def _warp(self, x: Tensor, u: Tensor, aspect: Tensor | None, out: tuple[int, int] | None) -> Tensor:
        whole = self.scale == (1.0, 1.0) == self.crop
        if whole and not (self.rotate or self.shift or self.shear or self.flip) and aspect is None:
            return x
        centred = 2 * u - 1
        angle = centred[:, 0] * (self.rotate * torch.pi / 180)
        size = self.scale[0] + u[:, 1] * (self.scale[1] - self.scale[0])
        mirror = torch.where(u[:, 2] < self.flip, -1.0, 1.0)
        cos, sin = angle.cos() * size, angle.sin() * size
        lean = centred[:, 3] * self.shear
        wide, high = self._crop_sides(u, aspect, out)
        # A window smaller than the picture may lie anywhere inside it; beyond that, ``shift`` pushes it further.
        sides = (wide * size, high * size)
        tx, ty = (centred[:, 4 + k] * ((1 - side).clamp(min=0) + 2 * self.shift) for k, side in enumerate(sides))
        along, across = mirror * wide, high
        rows = [cos * along, (lean * cos - sin) * across, tx, sin * along, (cos + lean * sin) * across, ty]
        theta = torch.stack(rows, 1).view(-1, 2, 3)
        shape = [*x.shape[:2], *(x.shape[2:] if out is None else out)]
        grid = torch.nn.functional.affine_grid(theta, shape, align_corners=False)
        return torch.nn.functional.grid_sample(x, grid, padding_mode="border", align_corners=False)

    def _move_bytes(self, x: Tensor, u: Tensor, aspect: Tensor | None, out: tuple[int, int] | None) -> Tensor:
        """`_warp` and `_pad_and_crop` of (b, h, w, c) uint8 pictures that stay upright: (b, c, h, w) float32.

        Windows begin and end at whole pixels.
        """
        h, w = x.shape[1:3]
        wide, high = self._crop_sides(u, aspect, out)
        windows = [_window_pixels(u[:, 5], high, h), _window_pixels(u[:, 4], wide, w)]
        mirrored = (u[:, 2] < self.flip).tolist()
        far = round(self.pad * min(out or (h, w)))
        shifts = (u[:, 24:26] * (2 * far + 1)).long().clamp(max=2 * far).sub_(far).tolist()
        size = tuple(out or (h, w))
        found = x.new_empty((len(x), x.shape[3], *size), dtype=torch.float32)
        for i, (rows, columns) in enumerate(zip(*windows, strict=True)):
            one = x[i, slice(*rows), slice(*columns)].permute(2, 0, 1)
            if one.shape[1:] != size:
                one = torch.nn.functional.interpolate(one[None], size, mode="bilinear", antialias=True)[0]
            if mirrored[i]:
                one = one.flip(2)
            if far:
                one = _shift_picture(one, *shifts[i])
            found[i] = one
            found[i].div_(255)
        return found

    def _crop_sides(self, u: Tensor, aspect: Tensor | None, out: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        """Width and height of a crop, relative to the picture; one that is too wide or too high becomes smaller."""
        area = self.crop[0] + u[:, 12] * (self.crop[1] - self.crop[0])
        ratio = ((2 * u[:, 13] - 1) * math.log(self.aspect)).exp()
        if aspect is not None and out is not None:
            ratio = ratio * (out[1] / out[0]) / aspect
        wide, high = (area * ratio).sqrt(), (area / ratio).sqrt()
        over = torch.maximum(wide, high).clamp(min=1)
        return wide / over, high / over

    def _change_colors(self, x: Tensor, u: Tensor) -> Tensor:
        if any(self.jitter):
            x = self._jitter_colors(x, u)
        if self.grey and x.shape[1] == 3:
            x = torch.where((u[:, 19] < self.grey)[:, None, None, None], _luma(x).expand_as(x), x)
        if self.blur:
            x = self._blur_some(x, u)
        if self.contrast or self.brightness:
            centred = (2 * u - 1)[:, :, None, None, None]
            mean = x.mean((1, 2, 3), keepdim=True)
            x = (x - mean).mul_(1 + self.contrast * centred[:, 6]).add_(mean).add_(self.brightness * centred[:, 7])
        return x

    def _pad_and_crop(self, x: Tensor, u: Tensor) -> Tensor:
        """Pictures moved by whole pixels, with black where nothing was."""
        h, w = x.shape[2:]
        far = round(self.pad * min(h, w))
        if not far:
            return x
        down, right = ((u[:, k, None] * (2 * far + 1)).long().clamp(max=2 * far) for k in (24, 25))
        rows, columns = down + torch.arange(h, device=x.device), right + torch.arange(w, device=x.device)
        padded, each = torch.nn.functional.pad(x, (far,) * 4), torch.arange(len(x), device=x.device)
        moved = padded.permute(0, 2, 3, 1)[each[:, None, None], rows[:, :, None], columns[:, None, :]]
        return moved.permute(0, 3, 1, 2).contiguous()

    def _erase_in_place(self, x: Tensor, u: Tensor) -> Tensor:
        """As `_erase_together`, but a processor writes nothing outside of the windows."""
        inside_y, inside_x = self._find_windows(x, u)
        values = torch.from_numpy(_noise_table())
        numbers = torch.arange(x[0].numel()).view(x.shape[1:])
        for i in (u[:, 11] < self.erase).nonzero().view(-1).tolist():
            (top, bottom), (left, right) = (_find_run(inside[i]) for inside in (inside_y, inside_x))
            if self.erase_fill == "black":
                x[i, :, top:bottom, left:right] = 0
            else:
                start = int(u[i, 23] * len(values))
                x[i, :, top:bottom, left:right] = values[(start + numbers[:, top:bottom, left:right]) % len(values)]
        return x

    def _erase_together(self, x: Tensor, u: Tensor) -> Tensor:
        """A window of some pictures blanked; see `_find_windows` for its size."""
        inside_y, inside_x = self._find_windows(x, u)
        gone = ((u[:, 11] < self.erase)[:, None, None] & inside_y[:, :, None] & inside_x[:, None, :])[:, None]
        if self.erase_fill == "black":
            return x.masked_fill(gone, 0)
        values = torch.from_numpy(_noise_table()).to(x.device, x.dtype)
        start = (u[:, 23, None] * len(values)).long()
        places = (start + torch.arange(x[0].numel(), device=x.device)) % len(values)
        return torch.where(gone, values[places].view(x.shape), x)

    def _find_windows(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """(b, h) and (b, w) which rows and which columns of each picture lie in the window that is blanked."""
        h, w = x.shape[2:]
        if self.erase_area is None:
            y, z = torch.arange(h, device=x.device) / h, torch.arange(w, device=x.device) / w
            side = 0.2 + 0.2 * u[:, 8, None]
            inside_y = (y >= u[:, 9, None] * (1 - side)) & (y < u[:, 9, None] * (1 - side) + side)
            inside_z = (z >= u[:, 10, None] * (1 - side)) & (z < u[:, 10, None] * (1 - side) + side)
            return inside_y, inside_z
        area = (self.erase_area[0] + u[:, 8, None] * (self.erase_area[1] - self.erase_area[0])) * h * w
        ratio = ((2 * u[:, 22, None] - 1) * math.log(self.erase_aspect)).exp()
        inside = []
        for length, side, k in ((h, (area * ratio).sqrt(), 9), (w, (area / ratio).sqrt(), 10)):
            side = side.clamp(max=length)  # one that is too long becomes shorter
            start, middle = u[:, k, None] * (length - side), torch.arange(length, device=x.device) + 0.5
            inside.append((middle >= start) & (middle < start + side))
        return inside[0], inside[1]

    def _jitter_colors(self, x: Tensor, u: Tensor) -> Tensor:
        """Factors of 1 ± this for brightness, contrast and saturation; a turn of ± this for hue; clipped to [0, 1]."""
        drawn = torch.where(u[:, 14] < self.jitter_share, 1.0, 0.0)[:, None] * (2 * u[:, 15:19] - 1)
        b, c, s, h = (drawn[:, k, None, None, None] * self.jitter[k] for k in range(4))
        x = (x * (1 + b)).clamp_(0, 1)  # what is new here is changed in place from now on
        mean = (_luma(x) if x.shape[1] == 3 else x).mean((1, 2, 3), keepdim=True)
        x = x.sub_(mean).mul_(1 + c).add_(mean).clamp_(0, 1)
        if x.shape[1] != 3:
            return x
        grey = _luma(x)
        x = x.sub_(grey).mul_(1 + s).add_(grey).clamp_(0, 1)
        if not self.jitter[3]:
            return x
        turn = 2 * torch.pi * h.view(-1)
        still, zero = torch.ones_like(turn), torch.zeros_like(turn)
        cos, sin = turn.cos(), turn.sin()
        around = torch.stack([still, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(-1, 3, 3)
        to, back = (torch.tensor(m, dtype=x.dtype, device=x.device) for m in (YIQ, RGB))
        return torch.einsum("nab,nbhw->nahw", back @ around @ to, x).clamp_(0, 1)

    def _blur_some(self, x: Tensor, u: Tensor) -> Tensor:
        """A three-tap Gaussian along both sides, borders repeated."""
        side = (-1 / (2 * (0.1 + 1.9 * u[:, 21]).square())).exp()
        k = torch.where(u[:, 20] < self.blur, side / (1 + 2 * side), 0.0)[:, None, None, None]
        for dim in (2, 3):
            n = x.shape[dim]
            low = torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 0, n - 1)], dim)
            high = torch.cat([x.narrow(dim, 1, n - 1), x.narrow(dim, n - 1, 1)], dim)
            x = low.add_(high).sub_(x, alpha=2).mul_(k).add_(x)
        return x

    def _add_noise(self, x: Tensor, ids: np.ndarray, seed: int, epoch: int, view: int) -> Tensor:
        size = int(np.prod(x.shape[1:]))
        if self.corrupt and x.ndim == 2:
            u = torch.from_numpy(uniform_per_id(seed, epoch, ids, 2 * size, stream=view + 64)).to(x.device)
            pool = x if self.pool is None else self.pool.to(x.device, x.dtype)
            donor = (u[:, size:] * len(pool)).long()
            x = torch.where(u[:, :size] < self.corrupt, pool.gather(0, donor), x)
        if self.noise:
            u = torch.from_numpy(uniform_per_id(seed, epoch, ids, 2 * size, stream=view + 32)).to(x.device)
            normal = (-2 * (1 - u[:, :size]).log()).sqrt() * (2 * torch.pi * u[:, size:]).cos()
            spread = 1.0
            if self.pool is not None and x.ndim == 2:
                spread = self.pool.to(x.device, x.dtype).std(0)
            x = x + self.noise * spread * normal.to(x.dtype).view(x.shape)
        return x


def _window_pixels(place: Tensor, side: Tensor, length: int) -> list[tuple[int, int]]:
    """First pixel, and the one after the last, of windows with a relative side, placed by numbers in [0, 1)."""
    first = place * (1 - side) * length
    begin = first.round().long().clamp(max=length - 1)
    end = torch.maximum((first + side * length).round().long(), begin + 1)
    return list(zip(begin.tolist(), end.clamp(max=length).tolist(), strict=True))


def _find_run(inside: Tensor) -> tuple[int, int]:
    """First and last + 1 of the places that are true, which follow each other."""
    places = inside.nonzero()
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _shift_picture(x: Tensor, down: int, right: int) -> Tensor:
    """What (c, h, w) shows when the frame moves, with black where nothing was."""
    h, w = x.shape[1:]
    found = torch.zeros_like(x)
    rows, columns = slice(max(down, 0), min(h + down, h)), slice(max(right, 0), min(w + right, w))
    rows_to = slice(max(-down, 0), min(h - down, h))
    columns_to = slice(max(-right, 0), min(w - right, w))
    found[:, rows_to, columns_to] = x[:, rows, columns]
    return found


@lru_cache(maxsize=1)
def _noise_table() -> np.ndarray:
    """Random numbers in [0, 1) that windows are filled with, each picture's from another place on."""
    return uniform_per_id(0, 0, np.zeros(1, np.int64), 1 << 16, stream=96)[0].astype(np.float32)


# Brightness and two colour axes: hue is a turn of the latter, which one matrix per sample does.
YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
RGB = tuple(map(tuple, np.linalg.inv(np.array(YIQ)).tolist()))


def _luma(x: Tensor) -> Tensor:
    """(b, 1, h, w) how bright three colours look."""
    return (x * torch.tensor(YIQ[0], dtype=x.dtype, device=x.device).view(3, 1, 1)).sum(1, keepdim=True)


PRESETS: dict[str, Augment] = {
    "none": Augment(),
    "mild": Augment(rotate=10, scale=(0.9, 1.1), shift=0.06, shear=0.1, contrast=0.3, brightness=0.1),
    # A random resized crop of the whole photograph, mirrored or not, in other light, partly covered.
    "photo": Augment(
        crop=(0.3, 1.0), aspect=4 / 3, flip=0.5, jitter=(0.3, 0.3, 0.3, 0.05), jitter_share=0.8, erase=0.25
    ),
    # Two views of small pictures as in the DCL and HCL code; of larger ones as in that of WCL.
    "small": Augment(
        crop=(0.08, 1.0), aspect=4 / 3, flip=0.5, jitter=(0.4, 0.4, 0.4, 0.1), jitter_share=0.8, grey=0.2, blur=0.5
    ),
    "large": Augment(crop=(0.7, 1.0), aspect=4 / 3, flip=0.5),
    "rows": Augment(noise=0.1, corrupt=0.1),
    "mirror": Augment(flip=0.5),
    "shift": Augment(pad=10 / 128),  # pad and crop, 10 pixels of 256 x 128 (Luo et al. 2019)
    # Random erasing (Zhong et al. 2020): 2 to 40 % of the area, 0.3 to 3.33 times as high as wide, random pixels.
    "erase": Augment(erase=0.5, erase_area=(0.02, 0.4), erase_aspect=10 / 3, erase_fill="noise"),
}
PRESETS["reid"] = replace(PRESETS["erase"], pad=PRESETS["shift"].pad, flip=0.5)  # all three: Luo et al. 2019


def find_preset(name: str) -> Augment:
    """An augmentation by name, or several together, ``"mild+erase"``."""
    found, changed = Augment(), set[str]()
    for one in name.split("+"):
        if one not in PRESETS:
            raise RecipeError(f"no augmentation {one!r}{nearest(one, PRESETS)}")
        more = {key: value for key, value in vars(PRESETS[one]).items() if value != getattr(Augment(), key)}
        if both := sorted(changed & set(more)):
            raise RecipeError(f"batch.augment = {name!r}: {one!r} sets {', '.join(both)} again: leave one of them out")
        found, changed = replace(found, **more), changed | set(more)
    return found


def to_input_tensor(array: np.ndarray | Tensor, device: str) -> Tensor:
    """Inputs as a network takes them; what they are is told by their dtype.

    uint8 images (b, h, w, c) become (b, c, h, w) float32 in [0, 1]; whole numbers of other types, such as token ids,
    become int64; everything else becomes float32 and keeps its shape.
    """
    x = torch.as_tensor(array).to(device, non_blocking=True)
    if x.dtype == torch.uint8 and x.ndim == 4:
        return x.permute(0, 3, 1, 2).contiguous().float().div_(255)
    return x.long() if is_integer_dtype(x.dtype) else x.float()


def is_integer_dtype(dtype: torch.dtype) -> bool:
    """Whether numbers of this type are token ids and the like: whole, and neither images (uint8) nor booleans."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype not in (torch.uint8, torch.bool)


def as_array_transform(transform: Callable[..., Mapping[str, Any]]) -> Callable[[Tensor], np.ndarray]:
    """A transform for `transform_items` from one of albumentations' kind: ``transform(image=array)["image"]``."""
    return _ArrayTransform(transform)


@dataclass(frozen=True)
class _ArrayTransform:
    transform: Callable[..., Mapping[str, Any]]

    def __call__(self, image: Tensor) -> np.ndarray:
        return self.transform(image=image.permute(1, 2, 0).numpy())["image"]


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Put the generators of torch's CPU, NumPy and `random` back as they were before."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def seed_generators(bits: int) -> None:
    """Seed the generators of torch's CPU, NumPy and `random`, which foreign code draws from."""
    # The CPU's generator alone: `torch.manual_seed` would also reset those of GPUs that a model is trained on.
    torch.default_generator.manual_seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)
    random.seed(bits)


@dataclass(frozen=True)
class BatchTransform:
    """A transform of a whole batch, (b, c, h, w) in [0, 1] or (b, ...) tensors, on the device of training.

    It may draw from torch, NumPy and `random`, which are seeded from (seed, epoch, first id of the batch, view).
    """

    transform: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, ids: np.ndarray, *, seed: int, epoch: int, view: int = 0) -> Tensor:
        """The batch, changed."""
        with preserve_generators():
            seed_generators(int(hash_bits(seed, epoch, view, 37, int(ids[0]))[0]))
            found = self.transform(x)
        if not isinstance(found, Tensor) or len(found) != len(x):
            raise InputError(
                f"a transform of a batch must give a tensor with its {len(x)} rows, got {type(found).__name__}"
            )
        return found


def transform_items(
    transform: Callable[[Tensor], Any], items: np.ndarray, ids: np.ndarray, *, seed: int, epoch: int, view: int = 0
) -> Tensor:
    """Apply somebody else's transform to every item, with all random numbers drawn from (seed, epoch, id, view).

    Args:
        transform: takes an image as a (c, h, w) uint8 tensor, as those of torchvision's v2 do, or any other item as
            a tensor of its own shape. It may draw from torch, NumPy and `random`, which are seeded before each item
            and put back as they were after the last.
        items: (b, h, w, c) uint8 images, (b, f) rows or other arrays.
        ids: of their samples.
        seed: of the run.
        epoch: from 0.
        view: which of several views of a sample this is.

    Returns:
        (b, c, h, w) uint8 or float tensor of images, or (b, f) rows.

    Raises:
        InputError: the transform gives something else, or items of several shapes.
    """
    bits = hash_bits(seed, epoch, view, 29, np.asarray(ids))
    are_images = items.ndim == 4 and items.dtype == np.uint8
    found = []
    with preserve_generators():
        for item, one in zip(items, bits.tolist(), strict=True):
            seed_generators(one)
            given = torch.from_numpy(np.ascontiguousarray(item))
            found.append(_as_item(transform(given.permute(2, 0, 1).contiguous() if are_images else given)))
    shapes = {tuple(item.shape) for item in found}
    if len(shapes) > 1:
        sizes = " and ".join(map(str, sorted(shapes)[:2]))
        raise InputError(f"transform must give items of one shape, got {sizes}: end it with a resize or a crop")
    return torch.stack(found)


def _as_item(found: Any) -> Tensor:
    """What a transform gave, as a tensor: of arrays and Pillow images the channels come first."""
    if isinstance(found, Tensor):
        return found.detach().as_subclass(Tensor)
    if isinstance(found, np.ndarray | Image.Image):
        array = torch.from_numpy(np.array(found))
        if array.ndim == 2 and isinstance(found, Image.Image):
            array = array[:, :, None]
        return array.permute(2, 0, 1).contiguous() if array.ndim == 3 else array
    raise InputError(f"transform must give a tensor, an array or an image, got {type(found).__name__}")
