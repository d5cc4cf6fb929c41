"""Both passes of :mod:`mettle.evaluate.counted` on an accelerator.

Exact scores are sums of multiples of 2⁻⁵², so they are the same bits in any order of summation and on any device. Fast
scores are float32 products; where a setting lets them be of lower precision (TF32), float64 is taken instead, because
the bound δ would not hold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mettle.evaluate.counted import ABSENT, Even, Fast, Window, windowed
from mettle.evaluate.scores import Design, Unit

ROWS = 4096  # of a tile


@dataclass(frozen=True, eq=False)
class Passes:
    """Pass 1 and pass 2 on one device."""

    design: Design
    first: Tensor
    second: Tensor
    limbs: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    subject: tuple[Tensor, Tensor]
    domain: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, design: Design, device: Any) -> "Passes":
        """Move what the passes need to the device."""
        design = replace(design, chunk=ROWS)

        def moved(a: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(a)).to(device)

        def limbs(unit: Unit) -> tuple[Tensor, ...]:
            return tuple(moved(a) for a in (unit.high, unit.low) if a is not None)

        one = limbs(design.probe)
        two = one if design.own else limbs(design.gallery)
        single = design.probe.dtype is np.float32 and torch.get_float32_matmul_precision() == "highest"
        first = sum(one[1:], one[0]).to(torch.float32 if single else torch.float64)
        second = first if design.own else sum(two[1:], two[0]).to(first.dtype)
        domain = None if design.domain is None else (moved(design.domain[0]), moved(design.domain[1]))
        return cls(design, first, second, (one, two), (moved(design.subject[0]), moved(design.subject[1])), domain)

    @property
    def slack(self) -> float:
        """δ: how far a fast score can be from the exact one."""
        return Fast(self.design).slack

    def genuine(self) -> np.ndarray:
        """Every genuine score, exactly."""
        i, j = self.design.genuine_pairs()
        step = 1 << 17
        parts = [self._exact(i[at : at + step], j[at : at + step]) for at in range(0, len(i), step)]
        return np.concatenate(parts) if parts else np.empty(0, self.design.dtype)

    def count(self, bins: Even) -> np.ndarray:
        """Pass 1."""
        tally = torch.zeros(bins.count, dtype=torch.int64, device=self.first.device)
        for _, _, tile in self._tiles(bins.nowhere, bins.scale, bins.shift):
            tally += torch.bincount(tile.reshape(-1).to(torch.int32), minlength=bins.count)
        found = tally.cpu().numpy()
        found[0] = 0  # what was absent
        return found

    def walk(self, windows: Sequence[tuple[float, float]]) -> list[Window]:
        """Pass 2."""
        values: list[list[np.ndarray]] = [[] for _ in windows]
        device, tiny = self.first.device, 4 * float(torch.finfo(self.first.dtype).eps)
        above = torch.zeros(len(windows), dtype=torch.int64, device=device)
        for rows, cols, tile in self._tiles():
            flat = tile.reshape(-1)
            for k, (low, high) in enumerate(windows):
                low, high = max(low, -1.00005), max(high, -1.00005)
                top = high + self.slack + tiny
                above[k] += torch.count_nonzero(flat > top)
                at = ((flat >= low - self.slack - tiny) & (flat <= top)).nonzero()[:, 0]
                i, j = np.divmod(at.cpu().numpy(), cols.stop - cols.start)
                s = self._exact(rows.start + i, cols.start + j)
                typed = np.asarray([low, high], s.dtype)
                above[k] += int(np.count_nonzero(s > typed[1]))
                values[k].append(s[(s >= typed[0]) & (s <= typed[1])])
        return windowed(windows, values, above.tolist())

    def _tiles(
        self, absent: float = ABSENT, scale: float = 1.0, shift: float = 0.0
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles of s·scale + shift, in one product each; ``absent`` stands for the s of what is no impostor pair."""
        offset = torch.full((1,), shift, dtype=self.first.dtype, device=self.first.device)
        absent = absent * scale + shift
        for rows, cols, mixed in self.design.tiles():
            tile = torch.addmm(offset, self.first[rows], self.second[cols].T, alpha=scale)
            if mixed:
                out = self.subject[0][rows, None] == self.subject[1][None, cols]
                if self.design.own:
                    at = torch.arange(len(self.first), device=tile.device)
                    out |= at[rows, None] >= at[None, cols]
                tile.masked_fill_(out, absent)
            if self.domain is not None:
                same = self.domain[0][rows, None] == self.domain[1][None, cols]
                tile.masked_fill_(~same if self.design.keep == "within" else same, absent)
            yield rows, cols, tile

    def _exact(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        device = self.first.device
        a, b = torch.from_numpy(i).to(device), torch.from_numpy(j).to(device)
        one, two = ([limb[at] for limb in side] for side, at in zip(self.limbs, (a, b), strict=True))
        dot = (one[0] * two[0]).sum(1)
        if len(one) == 1:
            return dot.float().clamp_(-1, 1).cpu().numpy()
        cross = (one[0] * two[1]).sum(1) + (one[1] * two[0]).sum(1)
        return np.round((dot + cross).cpu().numpy(), 12)
