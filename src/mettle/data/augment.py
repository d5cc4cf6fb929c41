"""Random changes to a batch, each sample's own, drawn from (seed, epoch, id): see `draws`.

Turning, scaling, shifting, shearing, cropping and mirroring are one affine map, so a batch is resampled once, on
whatever device it lives on.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mettle.data.draws import draws
from mettle.errors import RecipeError, nearest


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
    erase: float = 0.0  # probability of blanking a window of 20 to 40 % of the side
    noise: float = 0.0  # standard deviation added to rows (or pixels), in units of the input
    corrupt: float = 0.0  # probability of replacing a feature of a row by that of another row of the batch

    def __call__(self, x: Tensor, ids: np.ndarray, *, seed: int, epoch: int, view: int = 0) -> Tensor:
        """Pictures (b, c, h, w) or rows (b, f) changed, on the device of ``x``."""
        u = torch.from_numpy(draws(seed, epoch, ids, 16, stream=view)).to(x.device, torch.float32)
        if x.ndim == 4:
            x = self._look(self._move(x, u), u)
        if self.noise or (self.corrupt and x.ndim == 2):
            x = self._disturb(x, ids, seed, epoch, view)
        return x

    def _move(self, x: Tensor, u: Tensor) -> Tensor:
        if not (self.rotate or self.shift or self.shear or self.flip or self.scale != (1.0, 1.0)):
            return x
        centred = 2 * u - 1
        angle = centred[:, 0] * (self.rotate * torch.pi / 180)
        size = self.scale[0] + u[:, 1] * (self.scale[1] - self.scale[0])
        mirror = torch.where(u[:, 2] < self.flip, -1.0, 1.0)
        cos, sin = angle.cos() * size, angle.sin() * size
        lean = centred[:, 3] * self.shear
        # A window smaller than the picture may lie anywhere inside it; beyond that, ``shift`` pushes it further.
        free = (1 - size).clamp(min=0)
        tx, ty = (centred[:, k] * (free + 2 * self.shift) for k in (4, 5))
        rows = [cos * mirror, (lean * cos - sin), tx, sin * mirror, (cos + lean * sin), ty]
        theta = torch.stack(rows, 1).view(-1, 2, 3)
        grid = torch.nn.functional.affine_grid(theta, list(x.shape), align_corners=False)
        return torch.nn.functional.grid_sample(x, grid, padding_mode="border", align_corners=False)

    def _look(self, x: Tensor, u: Tensor) -> Tensor:
        if self.contrast or self.brightness:
            centred = (2 * u - 1)[:, :, None, None, None]
            mean = x.mean((1, 2, 3), keepdim=True)
            x = (x - mean) * (1 + self.contrast * centred[:, 6]) + mean + self.brightness * centred[:, 7]
        if self.erase:
            h, w = x.shape[2:]
            y, z = torch.arange(h, device=x.device) / h, torch.arange(w, device=x.device) / w
            side = 0.2 + 0.2 * u[:, 8, None]
            inside_y = (y >= u[:, 9, None] * (1 - side)) & (y < u[:, 9, None] * (1 - side) + side)
            inside_z = (z >= u[:, 10, None] * (1 - side)) & (z < u[:, 10, None] * (1 - side) + side)
            gone = (u[:, 11] < self.erase)[:, None, None] & inside_y[:, :, None] & inside_z[:, None, :]
            x = x.masked_fill(gone[:, None], 0)
        return x

    def _disturb(self, x: Tensor, ids: np.ndarray, seed: int, epoch: int, view: int) -> Tensor:
        size = int(np.prod(x.shape[1:]))
        if self.corrupt and x.ndim == 2:
            u = torch.from_numpy(draws(seed, epoch, ids, 2 * size, stream=view + 64)).to(x.device)
            donor = (u[:, size:] * len(x)).long()
            x = torch.where(u[:, :size] < self.corrupt, x.gather(0, donor), x)
        if self.noise:
            u = torch.from_numpy(draws(seed, epoch, ids, 2 * size, stream=view + 32)).to(x.device)
            normal = (-2 * (1 - u[:, :size]).log()).sqrt() * (2 * torch.pi * u[:, size:]).cos()
            x = x + self.noise * normal.to(x.dtype).view(x.shape)
        return x


PRESETS: dict[str, Augment] = {
    "none": Augment(),
    "mild": Augment(rotate=10, scale=(0.9, 1.1), shift=0.06, shear=0.1, contrast=0.3, brightness=0.1),
    "photo": Augment(rotate=5, scale=(0.7, 1.0), shift=0.02, flip=0.5, contrast=0.3, brightness=0.15, erase=0.25),
    "rows": Augment(noise=0.1, corrupt=0.1),
}


def preset(name: str) -> Augment:
    """An augmentation by name."""
    if name not in PRESETS:
        raise RecipeError(f"no augmentation {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]
