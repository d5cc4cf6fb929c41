"""The running threshold is a mean of what was seen; only the threshold itself is kept within bounds."""

import pytest
import torch

from mettle.difficulty import AdaptiveThreshold
from mettle.losses import SupCon


@pytest.mark.parametrize(("momentum", "wanted"), [(0.5, 0.5 * 0.7 + 0.5 * -0.5), (0.1, 0.05)])
def test_a_batch_of_far_positives_counts_as_it_is(momentum, wanted):
    difficulty = AdaptiveThreshold(momentum=momentum)
    root = 3**0.5 / 2
    z = torch.tensor([[1.0, 0], [-0.5, root], [0.0, 1], [-root, -0.5]], requires_grad=True)
    SupCon(difficulty=difficulty)(z, torch.tensor([0, 0, 1, 1]))
    assert float(difficulty.positive) == pytest.approx(wanted, abs=1e-6)
