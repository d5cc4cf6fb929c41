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

    @property
    def row_warps(self) -> int:
        """Among how many warps the rows of a product are dealt out, 16 at a time."""
        return min(self.warps, self.rows // 16)


@dataclass(frozen=True)
class Choice:
    """The two passes over the negatives; ``written``: h goes through memory to the library product."""

    forward: Shape
    backward: Shape
    written: bool = False


_HALF = {
    64: Choice(Shape(128, 128, 64, 4, 3, half=True), Shape(64, 128, 64, 4, 3)),
    128: Choice(Shape(128, 64, 128, 4, 3, half=True), Shape(64, 128, 128, 4, 2)),
    256: Choice(Shape(128, 128, 64, 4, 3, half=True), Shape(64, 64, 256, 4, 2, tma=True)),
    512: Choice(Shape(128, 128, 64, 4, 3, half=True), Shape(128, 128, 64, 4, 3), written=True),
}
_SPLIT = {
    64: Choice(Shape(64, 64, 64, 4, 2, half=True), Shape(64, 64, 64, 4, 2)),
    128: Choice(Shape(64, 64, 128, 4, 2, half=True), Shape(64, 64, 128, 4, 2)),
    256: Choice(Shape(128, 128, 64, 8, 3, half=True), Shape(128, 64, 256, 8, 1)),
    512: Choice(Shape(128, 128, 64, 8, 3, half=True), Shape(128, 128, 64, 8, 3), written=True),
}


PEAK = Shape(128, 64, 0, 8, 3)  # batch-hard mining, for any width that rows are held in


@cache
def choice(mode: str, width: int, *, other: int = 0, heavy: bool = False) -> Choice:
    """For embeddings of this padded width.

    ``other`` is the width of a second encoder's, 0 where there is none. ``heavy``: a pair takes more than its
    similarity and one exponential, so its numbers need more registers.
    """
    if mode == "exact":
        depth = width if width <= 256 else 128
        shape = Shape(16, 16, depth, 4, 1, half=True)
        return Choice(shape, shape, written=width > 256)
    table = _HALF if mode == "half" else _SPLIT
    found = table[next(size for size in sorted(table) if size >= min(width, 512))]
    if other:
        return _paired(mode, width, other)
    found = _fitted(found, mode, width)
    if find_spec("triton.tools.tensor_descriptor") is None:  # newer than the oldest triton we run on
        found = replace(found, backward=replace(found.backward, tma=False))
    return replace(found, forward=_roomy(found.forward), backward=_roomy(found.backward)) if heavy else found


def _fitted(found: Choice, mode: str, width: int) -> Choice:
    """The nearest entry with its depth cut to this width."""
    forward, backward = found.forward, found.backward
    if width > 256 and not found.written and width not in _HALF:
        # Held in registers, a gradient's width is a power of two; others go through memory.
        return Choice(forward, Shape(128, 128, 64, 8, 4), written=True)
    if width <= 256:
        cut = {shape: min(shape.depth, width) for shape in (forward, backward)}
        forward = _deep(forward, width if forward.depth > 64 or width <= 64 else cut[forward])
        backward = _deep(backward, width if not found.written else min(64, width))
    return Choice(forward, backward, found.written)


def _roomy(shape: Shape) -> Shape:
    """At most 64 entries of a tile for a thread; 32 where these were 64 already."""
    if shape.rows * shape.columns < 128 * 128:
        return shape
    return replace(shape, warps=8) if shape.warps == 4 else replace(shape, columns=64)


def _paired(mode: str, width: int, other: int) -> Choice:
    """Two encoders: two products per tile, so smaller tiles."""
    wide = max(width, other)
    if wide <= 128:
        if mode == "half":
            return Choice(Shape(128, 64, width, 4, 1, half=True), Shape(64, 64, width, 4, 2))
        return Choice(Shape(64, 64, width, 4, 1, half=True), Shape(128, 32, width, 8, 3))
    depth = min(64, width, other)
    shape = Shape(128, 64, depth, 8, 3) if mode == "half" else Shape(64, 64, depth, 4, 2)
    return Choice(shape, shape, written=True)


def _deep(shape: Shape, depth: int) -> Shape:
    return replace(shape, depth=depth)
