# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""What partial results come to: the sums of a row over parts of the columns, the mean over all rows."""

import triton
import triton.language as tl


@triton.jit
def log_sum(PARTIAL, rows, padded, splits, SIZE: tl.constexpr):
    """Log₂ Σ of partial (maximum, sum) pairs."""
    top = tl.full((SIZE,), -float("inf"), tl.float32)
    for p in range(splits):
        top = tl.maximum(top, tl.load(PARTIAL + 2 * p * padded + rows))
    safe = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros((SIZE,), tl.float32)
    for p in range(splits):
        here = tl.load(PARTIAL + 2 * p * padded + rows)
        total += tl.exp2(here - safe) * tl.load(PARTIAL + (2 * p + 1) * padded + rows)
    return safe + tl.log2(total)


@triton.jit
def plain_sum(PARTIAL, rows, padded, splits, which, SIZE: tl.constexpr):
    """Σ of partial sums."""
    total = tl.zeros((SIZE,), tl.float32)
    for p in range(splits):
        total += tl.load(PARTIAL + (2 * p + which) * padded + rows)
    return total


@triton.jit
def shift_kernel(OWN, OTHER, SHIFT, padded, splits, other_splits, SIZE: tl.constexpr):
    """e^{ν_own − ν_other}, ν = ½ log Σ e^{2x}: how concentrated one encoder's row is against the other's."""
    rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    own = plain_sum(OWN, rows, padded, splits, 0, SIZE)
    other = plain_sum(OTHER, rows, padded, other_splits, 0, SIZE)
    some = (own > 0) & (other > 0)
    tl.store(SHIFT + rows, tl.where(some, tl.sqrt(own / tl.where(some, other, 1.0)), 1.0))


@triton.jit
def mean_kernel(SUMS, STATS, MEAN, count, SIZE: tl.constexpr):
    """The mean over anchors; 1 / their number and the largest coefficient for the way back. One program."""
    total = tl.zeros((SIZE,), tl.float32)
    anchors = tl.zeros((SIZE,), tl.float32)
    most = tl.zeros((SIZE,), tl.float32)
    for start in range(0, count, SIZE):
        at = start + tl.arange(0, SIZE)
        there = at < count
        total += tl.load(SUMS + 3 * at, mask=there, other=0.0)
        anchors += tl.load(SUMS + 3 * at + 1, mask=there, other=0.0)
        most = tl.maximum(most, tl.load(SUMS + 3 * at + 2, mask=there, other=0.0))
    number = tl.sum(anchors, 0)
    largest = tl.max(most, 0)
    tl.store(MEAN, tl.sum(total, 0) / number)
    tl.store(STATS + 1, 1.0 / number)
    tl.store(STATS + 2, tl.where(largest > 0, largest, 1.0))
