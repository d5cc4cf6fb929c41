"""Evaluation that refuses rather than flatters.

    inputs ─► scoring ─┬─► roc ─────► verification     same or different? eer, auc, tar(far), threshold(far), roc
       │               │   bootstrap                   interval(name): subjects resampled, never pairs
       │               ├─► ranking ─► retrieval        who is nearest? recall[k], map, map_at_r, mrr, ndcg, per query
       │               │              reidentification  the same by the rule of Market-1501
       │               └─► identification              who is it, if anybody? rank, tpir(fpir)
       │                   clustering, probe, few_shot do clusters find the labels? can a simple classifier read them?
       └ one door for arguments: finite, both kinds of pairs, integer labels, no zero vectors, or an error

    metrics     every number of these is one entry: value, interval, rows of pages and docs follow from it

    groups      any of these by any attribute, the worst group, errors at the global threshold
    compare     two models on the same people: interval of the difference
    calibrate   a threshold set on some people, carried to others
    Plan, gate  protocols as files that name ids (made by :mod:`mettle.evaluate.protocol`); what leaks fails
    audit       all of it for a file of embeddings (read_embeddings), from any model
    label_errors, same_subject, hardest, confusion, difficulty, geometry    what is hard, and why

Every function takes NumPy arrays or tensors and returns a frozen result. Scores are exact (see
:mod:`mettle.evaluate.scoring.scores`), so no exact number depends on chunking, order or device; equal scores are ties
and are treated as ties.
"""

from typing import TYPE_CHECKING

from mettle.data.embeddings import Embedded, read_embeddings
from mettle.evaluate.audit import Audit, audit
from mettle.evaluate.bootstrap import Interval
from mettle.evaluate.calibration import Calibration, TransferredThreshold, calibrate
from mettle.evaluate.clustering import Clustering, clustering
from mettle.evaluate.compare import Comparison, compare
from mettle.evaluate.diagnostics.geometry import Geometry, geometry
from mettle.evaluate.diagnostics.hard_pairs import hardest_pairs
from mettle.evaluate.diagnostics.label_errors import confusion, label_errors, same_subject, sample_difficulty
from mettle.evaluate.diagnostics.leakage import (
    Leak,
    SplitSide,
    assert_no_leakage,
    file_hashes,
    find_leakage,
    picture_looks,
)
from mettle.evaluate.few_shot import FewShot, few_shot
from mettle.evaluate.groups import DomainMatrix, Group, Groups, class_size, domain_matrix, groups, quantile_bins
from mettle.evaluate.identification import Identification, identification
from mettle.evaluate.inputs import NotMeasurable
from mettle.evaluate.linear_probe import Probe, ProbeAccuracy, knn_accuracy, probe
from mettle.evaluate.peer_names import PEERS, PLANNED
from mettle.evaluate.protocol import Protocol, read_trials
from mettle.evaluate.retrieval import Retrieval, reidentification, retrieval, retrieval_from_scores
from mettle.evaluate.roc import OperatingPoint
from mettle.evaluate.run.validation import ValidationScore
from mettle.evaluate.scoring.reranking import KReciprocal, QueryExpansion
from mettle.evaluate.verification import SystemRates, Verification, from_scores, verification
from mettle.unknown_names import explain_missing_name

__all__ = [
    "Audit",
    "Calibration",
    "Clustering",
    "Comparison",
    "DomainMatrix",
    "Embedded",
    "FewShot",
    "Geometry",
    "Group",
    "Groups",
    "Identification",
    "Interval",
    "KReciprocal",
    "Leak",
    "NotMeasurable",
    "OperatingPoint",
    "Probe",
    "ProbeAccuracy",
    "Protocol",
    "QueryExpansion",
    "Retrieval",
    "SplitSide",
    "SystemRates",
    "TransferredThreshold",
    "ValidationScore",
    "Verification",
    "assert_no_leakage",
    "audit",
    "calibrate",
    "class_size",
    "clustering",
    "compare",
    "confusion",
    "domain_matrix",
    "few_shot",
    "file_hashes",
    "find_leakage",
    "from_scores",
    "geometry",
    "groups",
    "hardest_pairs",
    "identification",
    "knn_accuracy",
    "label_errors",
    "picture_looks",
    "probe",
    "quantile_bins",
    "read_embeddings",
    "read_trials",
    "reidentification",
    "retrieval",
    "retrieval_from_scores",
    "same_subject",
    "sample_difficulty",
    "verification",
]


if not TYPE_CHECKING:  # a checker of types should go on refusing what is not there

    def __getattr__(name: str):
        raise explain_missing_name(__name__, name, __all__, PEERS, PLANNED)
