"""How kernels are cut and launched: measured tile sizes by precision and width, splits of columns, compile-time flags.

No tuning at run time: one line of the tables each, found by ``benchmarks/tiles.py``.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

Precision = Literal["ieee", "bf16x3", "fp16"]
NegativeTermName = Literal["plain", "threshold", "importance", "relative", "relative_raw", "hinge", "circle"]
RowLossName = Literal["supcon_out", "supcon_in", "infonce", "npair", "contrastive", "two_sided", "circle"]
HingeForm = Literal["squared", "hadsell", "linear"]

LEAST_TILES = 4  # that a split of the columns is worth
MOST_SPLITS = 64  # they are added up one after another
START_TILES = 3.0  # that a program could do in the time of its beginning and its end
SUMMED_COLUMNS = 1024  # that tensor cores sum up with the accuracy of float32
SPARE_ENTRIES = 1 << 23  # of partial gradients
LARGE_BATCH = 16384  # rows from which tensor descriptors are worth the host's time
POSITIVE_BLOCK = 16  # rows, and columns, of a block of positives


def cdiv(whole: int, size: int) -> int:
    """How many parts of this size cover the whole (triton's own function of the kind takes ten times as long)."""
    return -(-whole // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of two from ``n`` up."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is cut and launched."""

    block_m: int
    block_n: int
    block_k: int  # columns of the embeddings per product; all of them where rows are held
    num_warps: int
    num_stages: int
    use_tma: bool = False  # blocks arrive through tensor descriptors
    symmetric: bool = False  # forward: each pair once, for both of its ends, by atomic additions
    rows_in_registers: bool = False  # not in shared memory

    @property
    def programs_per_sm(self) -> int:
        """How many backward programs run on a multiprocessor at a time, if their threads take all registers."""
        return 8 // self.num_warps

    @property
    def row_warps(self) -> int:
        """Among how many warps the rows of a product are dealt out, 16 at a time."""
        return min(self.num_warps, self.block_m // 16)

    @property
    def launch_options(self) -> dict[str, int]:
        """What triton is told beside the kernel's own arguments."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def constexprs(self, precision: str, head_dim: int) -> dict[str, Any]:
        """Of kernels that walk tiles of one encoder and neither use descriptors nor know a loss."""
        return {
            "HEAD_DIM": head_dim,
            "BLOCK_K": self.block_k,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "PRECISION": precision,
        }


def _in_registers(
    block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, symmetric: bool = False
) -> TileConfig:
    """Rows in registers and columns by tensor descriptors: one without the other is no gain."""
    return TileConfig(
        block_m, block_n, block_k, num_warps, num_stages, use_tma=True, symmetric=symmetric, rows_in_registers=True
    )


@dataclass(frozen=True)
class KernelConfig:
    """The two passes over the negatives; ``scores_in_memory``: dL/ds goes through memory to the library product."""

    forward: TileConfig
    backward: TileConfig
    scores_in_memory: bool = False
    one_sided: TileConfig | None = None  # forward without sums of columns, where a thread can then hold more

    def forward_tile(self, symmetric: bool) -> TileConfig:
        """The forward pass that visits each pair once, for both of its ends, or not."""
        return self.forward if symmetric or self.one_sided is None else self.one_sided


@dataclass(frozen=True)
class NegativesConfig:
    """What the kernels over negatives are compiled for. The only maker of their flags."""

    tile: TileConfig
    precision: str
    head_dim: int
    second_head_dim: int = 0  # 0: there is no second encoder
    negative_term: str = "plain"
    square: bool = False  # a plain pair adds e², importance weights have beta = 1
    hinge_form: str = "hadsell"
    online: bool = False
    mined: bool = False  # of the negatives of a row, those above a threshold of its own

    @property
    def block_k(self) -> int:
        """Columns of the embeddings per product."""
        return min(self.tile.block_k, self.head_dim)

    @property
    def second_block_k(self) -> int:
        """The same for the second encoder; the first stands for it where there is none."""
        second = self.second_head_dim or self.head_dim
        return second if max(self.head_dim, second) <= 128 else min(64, second)

    def _constexprs(self) -> dict[str, Any]:
        return {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM2": self.second_head_dim or self.head_dim,
            "BLOCK_K2": self.second_block_k,
            "BLOCK_M": self.tile.block_m,
            "BLOCK_N": self.tile.block_n,
            "PRECISION": self.precision,
            "USE_TMA": self.tile.use_tma,
            "TERM": self.negative_term,
            "SQUARE": self.square,
            "HINGE_FORM": self.hinge_form,
            "HAS_SECOND_ENCODER": self.second_head_dim > 0,
            "ONLINE": self.online,
            "MINED": self.mined,
            **self.tile.launch_options,
        }

    def forward_constexprs(self, *, has_second_sum: bool, symmetric: bool) -> dict[str, Any]:
        """Of `forward.negatives_forward`."""
        return self._constexprs() | {
            "BLOCK_K": self.block_k,
            "HAS_SECOND_SUM": has_second_sum,
            "SYMMETRIC": symmetric,
            "ROW_WARPS": self.tile.row_warps,
            "ROWS_IN_REGISTERS": self.tile.rows_in_registers,
        }

    def nearest_constexprs(self, vectors: int) -> dict[str, Any]:
        """Of the kernels of `nearest_vector`."""
        made = self.tile.constexprs(self.precision, self.head_dim) | {"BLOCK_K": self.block_k, "VECTORS": vectors}
        return made | self.tile.launch_options

    def score_gradients_constexprs(
        self, *, second_sum_has_grad: bool, differentiable_weights: bool, row_end: bool, column_end: bool
    ) -> dict[str, Any]:
        """Of `backward.score_gradients_kernel`; ``row_end``, ``column_end``: which ends of a pair have a value."""
        return self._constexprs() | {
            "BLOCK_K": self.block_k,
            "SECOND_SUM_HAS_GRAD": second_sum_has_grad,
            "DIFFERENTIABLE_WEIGHTS": differentiable_weights,
            "ROW_END": row_end,
            "COLUMN_END": column_end,
        }

    def backward_constexprs(self, *, flush_every: int, **ends: bool) -> dict[str, Any]:
        """Of `backward.negatives_backward`: those of `score_gradients_constexprs`, and how it sums up."""
        made = self.score_gradients_constexprs(**ends)
        del made["BLOCK_K"]  # rows are always held
        return made | {"ROWS_IN_REGISTERS": self.tile.rows_in_registers, "FLUSH_EVERY": flush_every}


@dataclass(frozen=True)
class PositivesConfig:
    """What the kernels over positives are compiled for. The only maker of their flags."""

    precision: str
    head_dim: int
    row_loss: str
    self_pairs: str  # which column is a row's own sample: "none", on the "diagonal", or in a "column" of its own
    weighted: bool = False
    numerator_only: bool = False
    debiased: bool = False
    hinge_form: str = "hadsell"
    mined: bool = False  # of the positives of a row, those below a limit of its own

    @property
    def block_k(self) -> int:
        """Columns of the embeddings per product, and per program of the backward pass."""
        return self.head_dim if self.head_dim <= 128 else 64

    def _constexprs(self) -> dict[str, Any]:
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_K": self.block_k,
            "BLOCK_M": POSITIVE_BLOCK,
            "BLOCK_N": POSITIVE_BLOCK,
            "INPUT_PRECISION": "ieee" if self.precision == "ieee" else "tf32x3",
            "ROW_LOSS": self.row_loss,
            "SELF": self.self_pairs,
            "WEIGHTED": self.weighted,
            "NUMERATOR_ONLY": self.numerator_only,
            "DEBIASED": self.debiased,
            "HINGE_FORM": self.hinge_form,
            "MINED": self.mined,
        }

    def threshold_constexprs(self) -> dict[str, Any]:
        """Of `forward.mining_threshold_kernel`."""
        made = self._constexprs()
        return {
            name: made[name] for name in ("HEAD_DIM", "BLOCK_K", "BLOCK_M", "BLOCK_N", "INPUT_PRECISION", "SELF")
        } | {"num_warps": 1 if self.head_dim <= 128 else 2}

    def forward_constexprs(
        self, *, negative_term: str, online: bool, divide_by: str, all_anchors: bool, count_by_weight: bool
    ) -> dict[str, Any]:
        """Of `forward.positives_forward`."""
        return self._constexprs() | {
            "TERM": negative_term,
            "ONLINE": online,
            "DIVIDE_BY": divide_by,
            "ALL_ANCHORS": all_anchors,
            "COUNT_BY_WEIGHT": count_by_weight,
            "num_warps": 1 if self.head_dim <= 128 else 2,
        }

    def backward_constexprs(
        self, *, differentiable_weights: bool, row_end: bool, column_end: bool, scaled_later: bool = False
    ) -> dict[str, Any]:
        """Of `backward.positives_backward`."""
        return self._constexprs() | {
            "SCALED_LATER": scaled_later,
            "DIFFERENTIABLE_WEIGHTS": differentiable_weights,
            "ROW_END": row_end,
            "COLUMN_END": column_end,
            "num_warps": 2,
        }


_SMALL = {
    "fp16": {
        64: KernelConfig(TileConfig(128, 128, 64, 4, 3, symmetric=True), TileConfig(64, 128, 64, 4, 3)),
        128: KernelConfig(TileConfig(128, 128, 128, 4, 2, symmetric=True), TileConfig(64, 128, 128, 4, 3)),
        256: KernelConfig(TileConfig(128, 128, 64, 4, 3, symmetric=True), TileConfig(64, 64, 256, 4, 2)),
        512: KernelConfig(
            TileConfig(128, 128, 64, 4, 3, symmetric=True),
            TileConfig(128, 128, 64, 4, 3),
            scores_in_memory=True,
            one_sided=TileConfig(128, 256, 64, 8, 3),
        ),
    },
    "bf16x3": {
        64: KernelConfig(TileConfig(64, 64, 64, 4, 2, symmetric=True), TileConfig(64, 64, 64, 4, 2)),
        128: KernelConfig(TileConfig(64, 64, 128, 4, 2, symmetric=True), TileConfig(64, 64, 128, 4, 2)),
        256: KernelConfig(TileConfig(128, 128, 64, 8, 3, symmetric=True), TileConfig(128, 64, 256, 8, 1)),
        512: KernelConfig(
            TileConfig(128, 128, 64, 8, 3, symmetric=True), TileConfig(128, 128, 64, 8, 3), scores_in_memory=True
        ),
    },
}
_LARGE = {
    "fp16": {
        128: KernelConfig(_in_registers(128, 64, 128, 4, 3, symmetric=True), _in_registers(64, 128, 128, 4, 2)),
        256: KernelConfig(
            TileConfig(128, 128, 64, 4, 3, use_tma=True, symmetric=True), TileConfig(64, 64, 256, 4, 2, use_tma=True)
        ),
    },
    "bf16x3": {
        64: KernelConfig(_in_registers(64, 64, 64, 4, 3, symmetric=True), TileConfig(64, 64, 64, 4, 2)),
        128: KernelConfig(_in_registers(64, 32, 128, 4, 3, symmetric=True), _in_registers(64, 64, 128, 4, 3)),
        256: KernelConfig(_in_registers(64, 32, 256, 4, 3, symmetric=True), TileConfig(128, 64, 256, 8, 1)),
    },
}
# Two encoders: two products per tile, so smaller tiles. Up to 128 columns each:
_SMALL_TWO_ENCODERS = {
    "fp16": KernelConfig(TileConfig(128, 64, 128, 4, 1, symmetric=True), TileConfig(64, 64, 128, 4, 2)),
    "bf16x3": KernelConfig(TileConfig(64, 64, 128, 4, 1, symmetric=True), TileConfig(128, 32, 128, 8, 3)),
}
_LARGE_TWO_ENCODERS = {
    "fp16": KernelConfig(TileConfig(128, 64, 128, 4, 1, symmetric=True), _in_registers(64, 64, 128, 4, 2)),
    "bf16x3": KernelConfig(_in_registers(64, 32, 128, 4, 3, symmetric=True), _in_registers(64, 32, 128, 4, 3)),
}
_MINING = TileConfig(128, 64, 0, 8, 3)  # for any width that rows are held in


@cache
def select_config(
    precision: str,
    head_dim: int,
    *,
    second_head_dim: int = 0,
    register_heavy: bool = False,
    two_numbers_per_end: bool = False,
    large: bool = False,
) -> KernelConfig:
    """For embeddings of this padded width.

    ``second_head_dim`` is the width of a second encoder's, 0 where there is none. ``register_heavy``: a pair takes more
    than its similarity and one exponential, so its numbers need more registers; ``two_numbers_per_end``: and its
    gradient looks at two numbers of each end. ``large``: there are `LARGE_BATCH` rows.
    """
    if precision == "ieee":
        tile = TileConfig(16, 16, head_dim if head_dim <= 256 else 128, 4, 1, symmetric=True)
        return KernelConfig(tile, tile, scores_in_memory=head_dim > 256)
    if second_head_dim:
        return _select_two_encoders(precision, head_dim, second_head_dim, large)
    size = next(size for size in (64, 128, 256, 512) if size >= min(head_dim, 512))
    found = _SMALL[precision][size]
    found = _fit_head_dim(_LARGE[precision].get(size, found) if large else found, head_dim)
    if not register_heavy:
        return found
    backward = _spare_registers(found.backward)
    if two_numbers_per_end and precision == "fp16":
        # Two numbers of each end and the rows are too much for the registers; with a third stage they would
        # be a kilobyte too much for two programs on a multiprocessor.
        stages = 2 if backward.block_k >= 128 else backward.num_stages
        backward = replace(backward, rows_in_registers=False, num_stages=stages)
    return KernelConfig(_spare_registers(found.forward), backward, found.scores_in_memory)


def select_mining_tile(precision: str, head_dim: int) -> TileConfig:
    """For batch-hard mining."""
    tile = select_config(precision, head_dim).forward
    if precision != "ieee" and tile.block_k == head_dim <= 128:
        return replace(_MINING, block_k=head_dim)
    return tile


def _select_two_encoders(precision: str, head_dim: int, second_head_dim: int, large: bool) -> KernelConfig:
    if max(head_dim, second_head_dim) <= 128:
        return _fit_head_dim((_LARGE_TWO_ENCODERS if large else _SMALL_TWO_ENCODERS)[precision], head_dim)
    block_k = min(64, head_dim, second_head_dim)
    tile = TileConfig(128, 64, block_k, 8, 3) if precision == "fp16" else TileConfig(64, 64, block_k, 4, 2)
    return KernelConfig(tile, tile, scores_in_memory=True)


def _fit_head_dim(found: KernelConfig, head_dim: int) -> KernelConfig:
    """The entry with its depths cut to this width."""
    forward, backward = (replace(x, block_k=min(x.block_k, head_dim)) for x in (found.forward, found.backward))
    return replace(found, forward=forward, backward=backward)


def _spare_registers(tile: TileConfig) -> TileConfig:
    """At most 64 entries of a tile for a thread; 32 where these were 64 already."""
    if tile.block_m * tile.block_n < 128 * 128:
        return tile
    if tile.num_warps == 8:
        return replace(tile, block_n=64)
    return replace(tile, block_n=64, num_stages=3) if tile.block_k == 128 else replace(tile, num_warps=8)


@cache
def count_multiprocessors(device: int) -> int:
    """How many a GPU has; asked on every launch, so asked once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_columns(blocks: int, tiles: int, device: torch.device, programs_per_sm: int) -> int:
    """Into how many parts to cut the columns so that every multiprocessor gets its programs, or nearly."""
    if device.type != "cuda":
        return 2 if tiles > 2 else 1
    programs = programs_per_sm * count_multiprocessors(device.index)
    return max(1, min(programs // blocks, tiles // LEAST_TILES, MOST_SPLITS))


@cache
def balance_waves(blocks: int, tiles: int, device: torch.device, programs_per_sm: int, most: int) -> int:
    """Into how many parts, ``most`` at the most, so that the last programs do not run while others are idle.

    Programs run in waves; one takes the time of its tiles and `START_TILES`.
    """
    if device.type != "cuda":
        return 2 if tiles > 2 else 1
    at_once = programs_per_sm * count_multiprocessors(device.index)
    most = max(1, min(most, tiles // LEAST_TILES, MOST_SPLITS))
    times = [cdiv(blocks * s, at_once) * (tiles / s + START_TILES) for s in range(1, most + 1)]
    nearly = 1.02 * min(times)
    return next(s for s, time in enumerate(times, 1) if time <= nearly)


def most_gradient_splits(d: int, head_dim: int, second_head_dim: int, padded: int) -> int:
    """How many partial gradients of each row may exist at once, so that a step takes 8 n d floats and 64 MB at most.

    One of the eight is the result; the rows that are compared take two of their padded widths.
    """
    rest = (7 * d - 2 * (head_dim + second_head_dim)) // head_dim
    return max(1, min(3, rest) + SPARE_ENTRIES // (padded * head_dim))


def flush_interval(precision: str, tiles: int, block_n: int) -> int:
    """How many tiles a sum of gradients may go over, 0 for all: in half precision other errors are larger."""
    most = SUMMED_COLUMNS // block_n
    return most if precision == "bf16x3" and tiles > most else 0
