"""Linear metrics for features that stay as they are: d²(x, y) = (x − y)ᵀ M (x − y), in the manner of scikit-learn."""

from mettle.metric.linear import squared_form
from mettle.metric.mahalanobis import Mahalanobis

__all__ = ["Mahalanobis", "squared_form"]
