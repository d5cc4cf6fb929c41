"""Rows of length 1, whatever their length was."""

import numpy as np
import pytest

from mettle.evaluate.scoring.cosine import normalize_rows


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_rows_have_length_one_and_keep_their_direction(scale):
    x = np.random.default_rng(0).normal(size=(20, 5))
    unit = normalize_rows(x * scale)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(unit, x / np.linalg.norm(x, axis=1, keepdims=True), rtol=1e-12)


def test_a_row_of_zeros_stays_one_and_the_argument_is_not_changed():
    x = np.array([[0, 0], [3, 4]], np.float32)
    assert normalize_rows(x).tolist() == [[0, 0], [0.6, 0.8]]
    assert x.tolist() == [[0, 0], [3, 4]]
