"""Numbers whose squares no float64 holds are refused in one line; all others give the same metric in any unit."""

import numpy as np
import pytest

from mettle.errors import InputError
from mettle.metric import Mahalanobis


def points():
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(4), 10)
    return rng.normal(size=(4, 5))[y] + 0.5 * rng.normal(size=(40, 5)), y


@pytest.mark.parametrize("method", ["learned", "within_class", "covariance"])
@pytest.mark.parametrize("unit", [1e-300, 1e-200, 1e-160, 1e160, 1e200, 1e300])
def test_variances_out_of_reach_are_refused(method, unit):
    x, y = points()
    with pytest.raises(InputError, match="feature 0 varies by .* change its unit"):
        Mahalanobis(method).fit(x * unit, y)


@pytest.mark.parametrize("unit", [1e-140, 1e-30, 1e30, 1e140])
def test_units_change_no_distance(unit):
    x, y = points()
    one, other = Mahalanobis("within_class").fit(x, y), Mahalanobis("within_class").fit(x * unit, y)
    assert np.allclose(one.transform(x), other.transform(x * unit), rtol=1e-9)


def test_a_feature_that_never_varies_may_be_of_any_size():
    x, y = points()
    x[:, 2] = 1e-200
    assert np.isfinite(Mahalanobis("within_class").fit(x, y).transform(x)).all()
