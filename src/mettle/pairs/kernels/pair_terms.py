# pyright: reportIndexIssue=false, reportMissingImports=false, reportPossiblyUnboundVariable=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportReturnType=false
"""What one positive pair comes to: against the negatives of its row, or alone by its distance."""

import triton
import triton.language as tl


@triton.jit
def log1p(u):
    """Log(1 + u), also for tiny u."""
    return tl.where(u < 1e-4, u - 0.5 * u * u, tl.log(1.0 + u))


@triton.jit
def softplus(y):
    """Log(1 + eʸ)."""
    return tl.where(y > 0, y, 0.0) + log1p(tl.exp(-tl.abs(y)))


@triton.jit
def sigmoid(y):
    """1 / (1 + e⁻ʸ)."""
    return 1.0 / (1.0 + tl.exp(-y))


@triton.jit
def against(x, far, count, ceiling, prior, PRIOR: tl.constexpr):
    """Log G, its derivatives for x and for ``far``, and where the floor holds it up; ``count`` is a logarithm."""
    if PRIOR:
        taken = x + count + tl.log(prior) - far
        left = taken < 0
        part = tl.exp(tl.where(left, taken, -1.0))
        rest = tl.log(1.0 - part) + far - tl.log(1.0 - prior)
        floor = count - ceiling + 0.0 * x + tl.where(far == far, 0.0, far)  # what is broken stays so
        free = left & (rest > floor)
        return (
            tl.where(free, rest, floor),
            tl.where(free, -part / (1.0 - part), 0.0),
            tl.where(free, 1.0 / (1.0 - part), 0.0),
            tl.where(free, 0.0, 1.0),
        )
    else:
        return far + 0.0 * x, 0.0 * x, 1.0 + 0.0 * x, 0.0 * x


@triton.jit
def pull(s, margin, SHAPE: tl.constexpr):
    """The hinge of a positive on its distance."""
    squared = tl.maximum(2.0 - 2.0 * s, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if SHAPE == "squared":
        return tl.maximum(squared - margin * margin, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        miss = tl.maximum(tl.sqrt(squared) - margin, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return miss * miss if SHAPE == "hadsell" else miss


@triton.jit
def pulls(s, margin, SHAPE: tl.constexpr):
    """Its derivative."""
    squared = 2.0 - 2.0 * s
    if SHAPE == "squared":
        return tl.where((squared > 0) & (squared > margin * margin), -2.0, 0.0)
    else:
        d = tl.sqrt(tl.where(squared > 0, squared, 1.0))
        miss = d - margin
        slope = -2.0 * miss / d if SHAPE == "hadsell" else -1.0 / d
        return tl.where((squared > 0) & (miss > 0), slope, 0.0)
