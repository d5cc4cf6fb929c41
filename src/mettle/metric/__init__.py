"""A linear metric for features that stay as they are: d²(x, y) = (x − y)ᵀ M (x − y), in the manner of scikit-learn."""

from mettle.metric.form import squared_form
from mettle.metric.mahalanobis import Mahalanobis
from mettle.metric.mcml import MCML

__all__ = ["MCML", "Mahalanobis", "squared_form"]
