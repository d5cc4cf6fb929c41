"""Linear metrics for features that stay as they are: d²(x, y) = (x − y)ᵀ M (x − y), in the manner of scikit-learn."""

from mettle.metric.axioms import AxiomCheck, Counterexample, check_axioms
from mettle.metric.lfda import LFDA
from mettle.metric.linear import squared_form
from mettle.metric.mahalanobis import Mahalanobis
from mettle.metric.nca import NCA

__all__ = [  # noqa: RUF022 - LFDA and NCA are classes, no constants
    "AxiomCheck",
    "Counterexample",
    "LFDA",
    "Mahalanobis",
    "NCA",
    "check_axioms",
    "squared_form",
]
