"""Evaluation that refuses rather than flatters.

    checks ─► scores ─┬─► point ─┬─► verification   same or different? eer, auc, tar(far), threshold(far), roc, det
       │      counted ┘ intervals┘                  interval(name): subjects resampled, never pairs
       │         ├──► ranking ───► retrieval        who is nearest? recall[k], map_at_r, r_precision, per query
       │         └──► identification                who is it, if anybody? rank, tpir(fpir)
       │              clustering, probe             do clusters find the labels? can a simple classifier read them?
       └ one door for arguments: finite, both kinds of pairs, integer labels, no zero vectors, or an error

    groups      any of these by any attribute, the worst group, errors at the global threshold
    compare     two models on the same people: interval of the difference
    calibrate   a threshold set on some people, carried to others
    Plan, gate  protocols as files that name ids (made by :mod:`mettle.evaluate.plan`); what leaks fails
    audit       all of it for a file of embeddings (read_embeddings), from any model
    label_errors, same_subject, hardest, confusion, difficulty, geometry    what is hard, and why

Every function takes NumPy arrays or tensors and returns a frozen result. Scores are exact (see
:mod:`mettle.evaluate.scores`), so no exact number depends on chunking, order or device; equal scores are ties and
are treated as ties.
"""

from typing import TYPE_CHECKING

from mettle.evaluate.audit import Audit, audit
from mettle.evaluate.calibrate import Calibration, Carried, calibrate
from mettle.evaluate.checks import NotMeasurable
from mettle.evaluate.clustering import Clustering, clustering
from mettle.evaluate.compare import Comparison, compare
from mettle.evaluate.failures import SystemRates
from mettle.evaluate.geometry import Geometry, geometry
from mettle.evaluate.group import Group, Groups
from mettle.evaluate.groups import bands, class_size, groups
from mettle.evaluate.identification import Identification, identification
from mettle.evaluate.intervals import Interval
from mettle.evaluate.leakage import Leak, Part, file_hashes, gate, leaks, picture_looks
from mettle.evaluate.peer_names import PEERS, PLANNED
from mettle.evaluate.plan import Plan
from mettle.evaluate.point import OperatingPoint
from mettle.evaluate.probe import Accuracy, Probe, probe
from mettle.evaluate.retrieval import Retrieval, retrieval
from mettle.evaluate.suspects import confusion, difficulty, hardest, label_errors, same_subject
from mettle.evaluate.table import Embedded, read_embeddings
from mettle.evaluate.trials import Matrix, domain_matrix, read_trials
from mettle.evaluate.validation import ValidationScore
from mettle.evaluate.verification import from_scores, verification
from mettle.evaluate.verified import Verification
from mettle.unknown_names import explain_missing_name

__all__ = [
    "Accuracy",
    "Audit",
    "Calibration",
    "Carried",
    "Clustering",
    "Comparison",
    "Embedded",
    "Geometry",
    "Group",
    "Groups",
    "Identification",
    "Interval",
    "Leak",
    "Matrix",
    "NotMeasurable",
    "OperatingPoint",
    "Part",
    "Plan",
    "Probe",
    "Retrieval",
    "SystemRates",
    "ValidationScore",
    "Verification",
    "audit",
    "bands",
    "calibrate",
    "class_size",
    "clustering",
    "compare",
    "confusion",
    "difficulty",
    "domain_matrix",
    "file_hashes",
    "from_scores",
    "gate",
    "geometry",
    "groups",
    "hardest",
    "identification",
    "label_errors",
    "leaks",
    "picture_looks",
    "probe",
    "read_embeddings",
    "read_trials",
    "retrieval",
    "same_subject",
    "verification",
]


if not TYPE_CHECKING:  # a checker of types should go on refusing what is not there

    def __getattr__(name: str):
        raise explain_missing_name(__name__, name, __all__, PEERS, PLANNED)
