"""A linear metric for features that stay as they are: d²(x, y) = (x − y)ᵀ M (x − y), in the manner of scikit-learn."""

from mettle.losses import MCML
from mettle.metric.form import squared_form
from mettle.metric.mahalanobis import Mahalanobis

__all__ = ["MCML", "Mahalanobis", "squared_form"]
