"""Geometry of an embedding space: is it used, is it even, does anybody sit next to everybody?

alignment       mean |u_i − u_j|² over genuine pairs: how close relatives are (0 is closest)
uniformity      log mean e^{−2|u_i − u_j|²} over all pairs: how evenly vectors spread (lower is more even)
effective rank  e^{H(p)}, p = σ / Σσ of the centred vectors: how many directions are used
hubness         skewness of how often a sample is among the k nearest of others; a hub is near to everybody
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mettle.evaluate.inputs import both_kinds, check_embeddings, check_int
from mettle.evaluate.scoring.cosine import ExactUnitVectors
from mettle.unknown_names import explain_arguments

MOST = 8192  # rows that pairs are formed of; more are thinned at random, with a fixed seed
ALIKE = 0.95  # mean cosine of strangers from which all vectors point the same way
FEW = 0.1  # share of the possible directions below which most are unused
_CELLS = 1 << 20


def effective_rank(vectors: np.ndarray) -> float:
    """e^{H(p)} with p the share of each singular value of the centred vectors; 0 if they are all equal."""
    values = np.linalg.svd(vectors - vectors.mean(axis=0), compute_uv=False)
    values = values[values > 1e-6 * np.sqrt(len(vectors))]
    if not len(values):
        return 0.0
    p = values / values.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


@dataclass(frozen=True, eq=False)
class Geometry:
    """What the space looks like.

    Attributes:
        alignment: mean squared distance of genuine pairs.
        uniformity: log mean Gaussian potential of all pairs.
        strangers: mean cosine of impostor pairs.
        effective_rank: directions in use.
        dimension: d.
        hubness: skewness of the k-occurrence.
        occurrence: (n,) how often each judged sample is among the k nearest of another.
        k: neighbours counted.
        rows: positions of the judged samples.
        verdict: in words, whether the space has collapsed.
    """

    alignment: float
    uniformity: float
    strangers: float
    effective_rank: float
    dimension: int
    hubness: float
    occurrence: np.ndarray
    k: int
    rows: np.ndarray
    verdict: str

    def __repr__(self) -> str:
        return (
            f"Geometry(alignment={self.alignment:.4f}, uniformity={self.uniformity:.4f}, "
            f"effective_rank={self.effective_rank:.1f} of {self.dimension}, hubness={self.hubness:.2f}, "
            f"{self.verdict!r})"
        )

    @property
    def collapsed(self) -> bool:
        """Whether the verdict is a collapse."""
        return not self.verdict.startswith("no collapse")

    @property
    def hubs(self) -> np.ndarray:
        """Positions by how often they are somebody's neighbour, most often first."""
        return self.rows[np.argsort(-self.occurrence, kind="stable")]

    @property
    def orphans(self) -> float:
        """Share of samples that are nobody's neighbour."""
        return float((self.occurrence == 0).mean())

    def summary(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        names = ("alignment", "uniformity", "strangers", "effective_rank", "dimension", "hubness", "k", "verdict")
        largest = float(self.occurrence.max())
        return {n: getattr(self, n) for n in names} | {"largest_hub": largest, "orphans": self.orphans}


@explain_arguments
def geometry(embeddings: Any, labels: Any, *, k: int = 10, seed: int = 0) -> Geometry:
    """Describe the space of unit vectors.

    Args:
        embeddings: (n, d) array or tensor.
        labels: (n,) integers or text.
        k: neighbours for hubness, at most n − 1.
        seed: of the thinning above 8192 rows.

    Example:
        >>> import numpy as np
        >>> x = np.ones((20, 8)) + 0.01 * np.random.default_rng(0).normal(size=(20, 8))
        >>> geometry(x, np.arange(20) % 5).verdict
        'collapse: all vectors point almost the same way (strangers have a mean cosine of 1.000)'
    """
    rows = check_embeddings(embeddings, labels)
    check_int(seed, "seed", 0)
    check_int(k, "k", 1)
    keep = np.arange(len(rows))
    if len(rows) > MOST:
        keep = np.sort(np.random.default_rng(seed).choice(len(rows), MOST, replace=False))
    unit, y = ExactUnitVectors.from_rows(rows.values[keep]), rows.labels[keep]
    n, k = len(keep), min(k, len(keep) - 1)
    sums = np.zeros(3)  # genuine cosines, impostor cosines, potentials
    pairs = np.zeros(2, np.int64)
    occurrence = np.zeros(n)
    for start in range(0, n, step := max(1, _CELLS // n)):
        part = slice(start, min(start + step, n))
        s = unit.take(part).cosine(unit)
        own = np.arange(part.stop - start), np.arange(part.start, part.stop)
        same = y[part, None] == y
        same[own] = False
        potential = np.exp(4 * s - 4)  # e^{−2(2 − 2s)}
        potential[own] = 0
        relatives = s[same].sum(dtype=np.float64)
        apart = s.sum(dtype=np.float64) - s[own].sum(dtype=np.float64) - relatives
        sums += relatives, apart, potential.sum(dtype=np.float64)
        pairs += int(same.sum()), (part.stop - start) * (n - 1) - int(same.sum())
        s[own] = -np.inf
        edge = np.partition(s, -k, axis=1)[:, -k, None]
        inside, tied = s > edge, s == edge
        left = k - inside.sum(axis=1, keepdims=True)
        occurrence += (inside + tied * (left / tied.sum(axis=1, keepdims=True))).sum(axis=0)
    both_kinds(int(pairs[0]) // 2, int(pairs[1]) // 2)
    strangers, rank = float(sums[1] / pairs[1]), effective_rank(unit.vectors())
    occurrence = np.round(occurrence, 9)
    uniformity = float(np.log(sums[2] / (n * (n - 1))))
    spread = occurrence.std()
    skew = float(((occurrence - occurrence.mean()) ** 3).mean() / spread**3) if spread > 1e-9 else 0.0
    d = rows.dim
    verdict = _describe_space(strangers, rank, min(d, n - 1), d)
    return Geometry(
        2 - 2 * float(sums[0] / pairs[0]), uniformity, strangers, rank, d, skew, occurrence, k, keep, verdict
    )


def _describe_space(strangers: float, rank: float, possible: int, d: int) -> str:
    if strangers > ALIKE:
        return f"collapse: all vectors point almost the same way (strangers have a mean cosine of {strangers:.3f})"
    if possible > 10 and rank < FEW * possible:
        return f"dimensional collapse: about {rank:.0f} of {d} directions are used"
    return f"no collapse: about {rank:.0f} of {d} directions are used"
