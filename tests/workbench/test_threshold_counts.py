"""Positions of the slider are round numbers; scores that are round numbers too lie between the first and the last."""

import numpy as np
import pytest

from mettle.workbench.threshold_counts import slider_positions


@pytest.mark.parametrize("steps", [10**3, 10**4, 10**5, 10**6])
def test_round_scores_are_enclosed_however_their_products_are_rounded(steps):
    for whole in range(-2000, 2001, 7):
        score = whole / steps
        for low, high in (
            (score - 0.3, score),
            (score, score + 0.05),
            (np.nextafter(score, -2), score + 1e-3),
            (score - 1e-3, np.nextafter(score, 2)),
        ):
            found = slider_positions(float(low), float(high))
            assert found[0] <= low and found[-1] > high, (low, high)


def test_a_score_whose_product_is_rounded_down_is_below_the_last_position():
    assert 0.3112 * 10**4 < 3112  # so its whole part is that of the step before
    assert slider_positions(0.0, 0.3112)[-1] > 0.3112
