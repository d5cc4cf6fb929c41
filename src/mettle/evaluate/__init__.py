"""Evaluation that refuses rather than flatters.

    checks ─► scores ─► curve ─┬─► verification   same or different? eer, auc, tar(far), threshold(far), roc
       │         │   intervals ┘                  interval(name): subjects resampled, never pairs
       │         └──► ranking ───► retrieval      who is nearest? recall[k], map_at_r, r_precision, per query
       └ one door for arguments: finite, both kinds of pairs, integer labels, no zero vectors, or an error

Every function takes NumPy arrays or tensors and returns a frozen result. Scores are exact (see
:mod:`mettle.evaluate.scores`), so no number depends on chunking, order or device; equal scores are ties and
are treated as ties.
"""

from mettle.evaluate.checks import NotMeasurable
from mettle.evaluate.intervals import Interval
from mettle.evaluate.retrieval import Retrieval, retrieval
from mettle.evaluate.verification import OperatingPoint, Verification, from_scores, verification

__all__ = [
    "Interval",
    "NotMeasurable",
    "OperatingPoint",
    "Retrieval",
    "Verification",
    "from_scores",
    "retrieval",
    "verification",
]
