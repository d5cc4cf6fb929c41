"""Tile sizes by operand precision and width: measured choices, one line each, no tuning at run time."""

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec


def parts(whole: int, size: int) -> int:
    """How many parts of this size cover the whole (triton's own function of the kind takes ten times as long)."""
    return -(-whole // size)


def power(n: int) -> int:
    """The smallest power of two from ``n`` up."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Shape:
    """How one kernel is cut and launched."""

    rows: int
    columns: int
    depth: int  # columns of the embeddings per product; the width itself where rows are held
    warps: int
    stages: int
    tma: bool = False  # blocks arrive through tensor descriptors
    half: bool = False  # forward: each pair once, for both of its ends, by atomic additions
    firm: bool = False  # rows are held in registers, not in shared memory

    @property
    def beside(self) -> int:
        """How many programs of the way back run on a multiprocessor at a time, if their threads take all registers."""
        return 8 // self.warps

    @property
    def row_warps(self) -> int:
        """Among how many warps the rows of a product are dealt out, 16 at a time."""
        return min(self.warps, self.rows // 16)


def _firm(rows: int, columns: int, depth: int, warps: int, stages: int, half: bool = False) -> Shape:
    """Rows in registers and columns by tensor descriptors: one without the other is no gain."""
    return Shape(rows, columns, depth, warps, stages, tma=True, half=half, firm=True)


@dataclass(frozen=True)
class Choice:
    """The two passes over the negatives; ``written``: h goes through memory to the library product."""

    forward: Shape
    backward: Shape
    written: bool = False
    one_sided: Shape | None = None  # forward without sums of columns, where a thread can then hold more

    def visiting(self, once: bool) -> Shape:
        """The forward pass that visits each pair once, for both of its ends, or not."""
        return self.forward if once or self.one_sided is None else self.one_sided


_FEW = {
    "half": {
        64: Choice(Shape(128, 128, 64, 4, 3, half=True), Shape(64, 128, 64, 4, 3)),
        128: Choice(Shape(128, 128, 128, 4, 2, half=True), Shape(64, 128, 128, 4, 3)),
        256: Choice(Shape(128, 128, 64, 4, 3, half=True), Shape(64, 64, 256, 4, 2)),
        512: Choice(
            Shape(128, 128, 64, 4, 3, half=True),
            Shape(128, 128, 64, 4, 3),
            written=True,
            one_sided=Shape(128, 256, 64, 8, 3),
        ),
    },
    "split": {
        64: Choice(Shape(64, 64, 64, 4, 2, half=True), Shape(64, 64, 64, 4, 2)),
        128: Choice(Shape(64, 64, 128, 4, 2, half=True), Shape(64, 64, 128, 4, 2)),
        256: Choice(Shape(128, 128, 64, 8, 3, half=True), Shape(128, 64, 256, 8, 1)),
        512: Choice(Shape(128, 128, 64, 8, 3, half=True), Shape(128, 128, 64, 8, 3), written=True),
    },
}
_MANY = {
    "half": {
        128: Choice(_firm(128, 64, 128, 4, 3, half=True), _firm(64, 128, 128, 4, 2)),
        256: Choice(Shape(128, 128, 64, 4, 3, tma=True, half=True), Shape(64, 64, 256, 4, 2, tma=True)),
    },
    "split": {
        64: Choice(_firm(64, 64, 64, 4, 3, half=True), Shape(64, 64, 64, 4, 2)),
        128: Choice(_firm(64, 32, 128, 4, 3, half=True), _firm(64, 64, 128, 4, 3)),
        256: Choice(_firm(64, 32, 256, 4, 3, half=True), Shape(128, 64, 256, 8, 1)),
    },
}
# Two encoders: two products per tile, so smaller tiles. Up to 128 columns each:
_FEW_PAIRED = {
    "half": Choice(Shape(128, 64, 128, 4, 1, half=True), Shape(64, 64, 128, 4, 2)),
    "split": Choice(Shape(64, 64, 128, 4, 1, half=True), Shape(128, 32, 128, 8, 3)),
}
_MANY_PAIRED = {
    "half": Choice(Shape(128, 64, 128, 4, 1, half=True), _firm(64, 64, 128, 4, 2)),
    "split": Choice(_firm(64, 32, 128, 4, 3, half=True), _firm(64, 32, 128, 4, 3)),
}
PEAK = Shape(128, 64, 0, 8, 3)  # batch-hard mining, for any width that rows are held in
MANY = 16384  # rows from which tensor descriptors are worth the host's time


@cache
def choice(
    mode: str, width: int, *, other: int = 0, heavy: bool = False, two: bool = False, many: bool = False
) -> Choice:
    """For embeddings of this padded width.

    ``other`` is the width of a second encoder's, 0 where there is none. ``heavy``: a pair takes more than its
    similarity and one exponential, so its numbers need more registers; ``two``: and on the way back it looks at two
    coefficients of each end. ``many``: there are `MANY` rows.
    """
    if mode == "exact":
        depth = width if width <= 256 else 128
        shape = Shape(16, 16, depth, 4, 1, half=True)
        return Choice(shape, shape, written=width > 256)
    many = many and find_spec("triton.tools.tensor_descriptor") is not None  # newer than the oldest triton we run on
    if other:
        return _paired(mode, width, other, many)
    size = next(size for size in (64, 128, 256, 512) if size >= min(width, 512))
    found = _FEW[mode][size]
    found = _fitted(_MANY[mode].get(size, found) if many else found, width)
    if not heavy:
        return found
    backward = _roomy(found.backward)
    if two and mode == "half":
        # Two coefficients of each end and the rows are too much for the registers; with a third stage they would be a
        # kilobyte too much for two programs on a multiprocessor.
        backward = replace(backward, firm=False, stages=2 if backward.depth >= 128 else backward.stages)
    return Choice(_roomy(found.forward), backward, found.written)


def _paired(mode: str, width: int, other: int, many: bool) -> Choice:
    if max(width, other) <= 128:
        return _fitted((_MANY_PAIRED if many else _FEW_PAIRED)[mode], width)
    depth = min(64, width, other)
    shape = Shape(128, 64, depth, 8, 3) if mode == "half" else Shape(64, 64, depth, 4, 2)
    return Choice(shape, shape, written=True)


def _fitted(found: Choice, width: int) -> Choice:
    """The entry with its depths cut to this width."""
    forward, backward = (replace(x, depth=min(x.depth, width)) for x in (found.forward, found.backward))
    return replace(found, forward=forward, backward=backward)


def _roomy(shape: Shape) -> Shape:
    """At most 64 entries of a tile for a thread; 32 where these were 64 already."""
    if shape.rows * shape.columns < 128 * 128:
        return shape
    if shape.warps == 8:
        return replace(shape, columns=64)
    return replace(shape, columns=64, stages=3) if shape.depth == 128 else replace(shape, warps=8)
