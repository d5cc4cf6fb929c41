"""Both passes of :mod:`mettle.evaluate.scoring.histogram` on an accelerator.

Exact scores are sums of multiples of 2⁻⁵², so they are the same bits in any order of summation and on any device. Fast
scores of float32 embeddings compared with each other come from fused kernels (how far they can be
off is said below); others from tiles of float32 products, or float64 where a setting lets float32 be of lower
precision (TF32).

Impostor pairs of a set whose fast score falls into a window, listed by one kernel: pass 2 on a CUDA device.

The kernel is :func:`mettle.pairs.kernels.histograms.list_impostor_pairs`. It splits rows into two bfloat16 halves,
x = h + l with errors of 2⁻⁹ and 2⁻¹⁸ of x, and takes three of four products, so a score is off by

    δ = 3·2⁻¹⁸ + (13/4·d + 64)·2⁻²⁴       halves kept and dropped; 3d products, sixteen to a sum that cuts off 17 bits

where the last term holds normalisation and bins too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mettle.evaluate.inputs import EmbeddingSet
from mettle.evaluate.scoring.bins import EvenBins, ScoreWindow, WindowCollector
from mettle.evaluate.scoring.cosine import ExactUnitTensor
from mettle.evaluate.scoring.cpu_passes import ABSENT, LEAST, FastPasses
from mettle.evaluate.scoring.pair_tiles import PairTiles
from mettle.evaluate.scoring.rank_parts import split_rows
from mettle.pairs.distributed import ALONE, RankGroup
from mettle.pairs.kernels import available

ROWS = 4096  # of a tile
ALIGNED = 512  # rows: a multiple of the row blocks of all kernels
AT_ONCE = 1 << 26  # components of exactly scored pairs
ROOM = 1 << 24  # rows of tiles that are listed; windows that reach more are a matter for torch's products


@dataclass(frozen=True, eq=False)
class CudaPasses:
    """Pass 1 and pass 2 on one device."""

    design: PairTiles
    device: Any
    ranks: RankGroup = ALONE  # of all rows and genuine pairs, those of this rank

    @property
    def has_kernels(self) -> bool:
        """Whether fused kernels do the quadratic part."""
        design = self.design
        plain = design.is_symmetric and design.domain is None and not design.is_float64
        device = torch.device(self.device)
        if not plain or device.type != "cuda":
            return False
        return available(torch.cuda.current_device() if device.index is None else device.index)

    @property
    def score_error_bound(self) -> float:
        """δ: how far a fast score can be from the exact one."""
        if not self.has_kernels:
            return FastPasses(self.design).score_error_bound
        return score_error_bound(self.design.dim)

    def genuine_scores(self) -> np.ndarray:
        """Every genuine score, exactly, ascending."""
        row, col = self.subject
        first, last = torch.searchsorted(col, row), torch.searchsorted(col, row, right=True)
        if self.design.is_symmetric:
            first = torch.arange(1, len(row) + 1, device=self.device)
        count = last - first
        i = torch.repeat_interleave(count)
        j = torch.arange(len(i), device=self.device) - (count.cumsum(0) - count - first)[i]
        keep = torch.ones_like(i, dtype=torch.bool)
        if self.design.ids is not None:
            ids = [self._to_device(side) for side in self.design.ids]
            keep &= ids[0][i] != ids[1][j]
        if self.domain is not None:
            keep &= (self.domain[0][i] == self.domain[1][j]) == (self.design.keep == "within")
        i, j = i[keep], j[keep]
        if self.ranks.size > 1:
            i, j = (side[self.ranks.rank :: self.ranks.size] for side in (i, j))
        return self._exact_scores(i, j).sort().values.cpu().numpy()

    def count_bins(self, bins: EvenBins) -> np.ndarray:
        """Pass 1."""
        if self.has_kernels:
            from mettle.pairs.kernels.histograms import score_histogram

            ends = bins.edges[[0, -1]].tolist()
            return (
                score_histogram(self.rows[0].float(), self.subject[0].long(), bins.count, *ends, rows=self._own_rows)[1]
                .cpu()
                .numpy()
            )
        tally = torch.zeros(bins.count, dtype=torch.int64, device=self.device)
        for _, _, tile in self._scaled_tiles(bins.unreached_score, bins.scale, bins.shift):
            tally += torch.bincount(tile.reshape(-1).to(torch.int32), minlength=bins.count)
        found = tally.cpu().numpy()
        found[0] = 0  # what was absent
        return found

    def refine_windows(self, windows: Sequence[tuple[float, float]]) -> list[ScoreWindow]:
        """Pass 2."""
        sieves = [WindowCollector(*w, np.dtype(self.design.dtype)) for w in windows]
        if not (self.has_kernels and self._fill_from_kernel(sieves)):
            self._fill_from_tiles(sieves)
        return [sieve.window() for sieve in sieves]

    def _fill_from_kernel(self, sieves: Sequence[WindowCollector]) -> bool:
        """Fill the sieves from the kernel's lists; False where those have no room for all."""
        windows = [self._fast_score_ends(sieve) for sieve in sieves]
        found = impostor_candidates(self.rows[0].float(), self.subject[0].long(), windows, rows=self._own_rows)
        for sieve, pairs in zip(sieves, found or (), strict=found is not None):
            sieve.above += pairs.above
            sieve.add(self._exact_scores(pairs.first, pairs.second).cpu().numpy())
        return found is not None

    def _fill_from_tiles(self, sieves: Sequence[WindowCollector]) -> None:
        """Fill the sieves tile by tile."""
        above = torch.zeros(len(sieves), dtype=torch.int64, device=self.device)
        for rows, cols, tile in self._scaled_tiles():
            flat, width = tile.reshape(-1), cols.stop - cols.start
            for k, sieve in enumerate(sieves):
                low, high = self._fast_score_ends(sieve)
                above[k] += torch.count_nonzero(flat > high)
                at = ((flat >= low) & (flat <= high)).nonzero()[:, 0]
                sieve.add(self._exact_scores(rows.start + at // width, cols.start + at % width).cpu().numpy())
        for sieve, over in zip(sieves, above.tolist(), strict=True):
            sieve.above += over

    @cached_property
    def _own_rows(self) -> slice:
        """The rows whose pairs this rank looks at; both passes of the kernels and the tiles agree on them."""
        size = len(self.design.subject[0])
        return split_rows(size, self.ranks, ALIGNED if self.has_kernels else ROWS, triangle=self.design.is_symmetric)

    def _fast_score_ends(self, sieve: WindowCollector) -> tuple[float, float]:
        """Between what fast scores the exact ones inside a window can be."""
        tiny = 4 * float(torch.finfo(torch.float64 if self.design.is_float64 else torch.float32).eps)
        low, high = (max(end, LEAST) for end in sieve.ends)
        return low - self.score_error_bound - tiny, high + self.score_error_bound + tiny

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The embeddings in the order of the design."""
        one, two = (self._order_rows(*side) for side in zip(self.design.rows, self.design.order, strict=True))
        return one, one if self.design.is_symmetric else two

    def _order_rows(self, rows: EmbeddingSet, order: np.ndarray) -> Tensor:
        given = rows.given if isinstance(rows.given, Tensor) else torch.from_numpy(np.ascontiguousarray(rows.given))
        return given.to(self.device)[self._to_device(order)]

    @cached_property
    def subject(self) -> tuple[Tensor, Tensor]:
        """Subject codes of both sides."""
        return self._to_device(self.design.subject[0]), self._to_device(self.design.subject[1])

    @cached_property
    def domain(self) -> tuple[Tensor, Tensor] | None:
        """Domain codes of both sides, where they matter."""
        sides = self.design.domain
        return None if sides is None else (self._to_device(sides[0]), self._to_device(sides[1]))

    @cached_property
    def exact(self) -> tuple[ExactUnitTensor, ExactUnitTensor]:
        """Both sides on the integer grid."""
        one = ExactUnitTensor.from_rows(self.rows[0], self.design.is_float64)
        return one, one if self.design.is_symmetric else ExactUnitTensor.from_rows(self.rows[1], self.design.is_float64)

    @cached_property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """Both sides for products."""
        single = not self.design.is_float64 and torch.get_float32_matmul_precision() == "highest"
        one, two = (side.vectors().to(torch.float32 if single else torch.float64) for side in self.exact)
        return one, one if self.design.is_symmetric else two

    def _scaled_tiles(
        self, absent: float = ABSENT, scale: float = 1.0, shift: float = 0.0
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Tiles of s·scale + shift, in one product each; ``absent`` stands for the s of what is no impostor pair."""
        first, second = self.vectors
        offset = torch.full((1,), shift, dtype=first.dtype, device=self.device)
        absent = absent * scale + shift
        for rows, cols, mixed in self.design.tiles(ROWS, self._own_rows):
            tile = torch.addmm(offset, first[rows], second[cols].T, alpha=scale)
            if mixed:
                out = self.subject[0][rows, None] == self.subject[1][None, cols]
                if self.design.is_symmetric:
                    at = torch.arange(len(first), device=self.device)
                    out |= at[rows, None] >= at[None, cols]
                tile.masked_fill_(out, absent)
            if self.domain is not None:
                same = self.domain[0][rows, None] == self.domain[1][None, cols]
                tile.masked_fill_(~same if self.design.keep == "within" else same, absent)
            yield rows, cols, tile

    def _exact_scores(self, i: Tensor, j: Tensor) -> Tensor:
        """The exact scores of some pairs."""
        one, two = self.exact
        step = max(1, AT_ONCE // self.design.dim)
        parts = [one.rowwise_cosine(two, i[at : at + step], j[at : at + step]) for at in range(0, len(i), step)]
        none = torch.empty(0, dtype=torch.float64 if self.design.is_float64 else torch.float32, device=self.device)
        return torch.cat([none, *parts])

    def _to_device(self, a: np.ndarray) -> Tensor:
        return torch.from_numpy(a).to(self.device)


def score_error_bound(d: int) -> float:
    """δ: how far a fast score of either pass can be from the exact one."""
    return 3 * 2.0**-18 + (3.25 * d + 64) * 2.0**-24


def impostor_candidates(
    z: Tensor,
    labels: Tensor,
    windows: Sequence[tuple[float, float]],
    room: int = ROOM,
    *,
    rows: slice | None = None,
) -> list[Any] | None:
    """The impostor pairs i < j with a fast score between two ends, for every window, in no order.

    Args:
        z: (n, d) embeddings, float32.
        labels: (n,) int64, ascending.
        windows: ends, both included.
        room: rows of tiles with such a pair that are listed at most.
        rows: i is among these; by default all.

    Returns:
        One list for each window, or None where there is no room for all.
    """
    from mettle.pairs.kernels.histograms import list_impostor_pairs  # needs triton

    return list_impostor_pairs(z, labels, windows, room // len(windows), rows)
