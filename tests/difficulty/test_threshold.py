"""The running threshold is a mean of what was seen; only the threshold itself is kept within bounds."""

import math

import pytest
import torch

from mettle.difficulty import AdaptiveThreshold, Threshold
from mettle.errors import InputError
from mettle.losses import SupCon


@pytest.mark.parametrize(("momentum", "wanted"), [(0.5, 0.5 * 0.7 + 0.5 * -0.5), (0.1, 0.05)])
def test_a_batch_of_far_positives_counts_as_it_is(momentum, wanted):
    difficulty = AdaptiveThreshold(momentum=momentum)
    root = 3**0.5 / 2
    z = torch.tensor([[1.0, 0], [-0.5, root], [0.0, 1], [-root, -0.5]], requires_grad=True)
    SupCon(difficulty=difficulty)(z, torch.tensor([0, 0, 1, 1]))
    assert float(difficulty.positive) == pytest.approx(wanted, abs=1e-6)


def plain_thresholds(z, y, quantile, positive_quantile=None):
    """The mean cosine of positives, or a quantile of it, and a quantile of those of negatives, pair by pair."""
    unit = [[x / math.sqrt(sum(v * v for v in row)) for x in row] for row in z.tolist()]
    pos, neg = [], []
    for i, a in enumerate(unit):
        for j, b in enumerate(unit):
            if i != j:
                (pos if y[i] == y[j] else neg).append(sum(p * q for p, q in zip(a, b, strict=True)))
    middle = sum(pos) / len(pos) if positive_quantile is None else sorted(pos)[int(positive_quantile * len(pos)) - 1]
    return middle, sorted(neg)[int(quantile * len(neg)) - 1]


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("common", [0.0, 8.0], ids=["spread", "nearly one direction"])
def test_without_momentum_thresholds_are_those_of_the_batch(quantile, common):
    """Also where all cosines lie near 1, as those of a small untrained network on photographs do."""
    torch.manual_seed(0)
    y = torch.arange(48) // 4
    z = torch.randn(12, 8)[y] + torch.randn(48, 8) + common
    difficulty = AdaptiveThreshold(momentum=0.0, quantile=quantile)
    loss = SupCon(difficulty=difficulty)
    loss(z.requires_grad_(), y)
    positive, negative = plain_thresholds(z, y.tolist(), quantile)
    assert (float(difficulty.positive), float(difficulty.negative)) == pytest.approx((positive, negative), abs=1e-5)
    seen = loss.statistics(z, y)
    assert seen.hard_negatives == pytest.approx(1 - quantile, abs=0.01)
    assert 0.3 < seen.hard_positives < 0.7
    if common:
        assert negative > 0.95
        assert SupCon(difficulty=Threshold()).statistics(z, y).hard_negatives == 1.0, (
            "a fixed threshold chooses nothing"
        )


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_positives_are_hard_below_a_quantile_of_theirs(share):
    torch.manual_seed(0)
    y = torch.arange(60) // 5
    z = torch.randn(12, 8)[y] + torch.randn(60, 8)
    difficulty = AdaptiveThreshold(4.0, momentum=0.0, positive_quantile=share)
    loss = SupCon(difficulty=difficulty)
    loss(z.requires_grad_(), y)
    positive, negative = plain_thresholds(z, y.tolist(), 0.9, share)
    assert (float(difficulty.positive), float(difficulty.negative)) == pytest.approx((positive, negative), abs=1e-5)
    assert loss.statistics(z, y).hard_positives == pytest.approx(share, abs=0.02)
    assert f"positive_quantile={share}" in repr(difficulty)


def test_a_batch_without_positives_moves_no_quantile_of_them():
    difficulty = AdaptiveThreshold(momentum=0.0, positive_quantile=0.5)
    difficulty.observe(torch.randn(6, 4), torch.arange(6))
    assert float(difficulty.positive) == pytest.approx(0.7) and math.isfinite(float(difficulty.negative))


@pytest.mark.parametrize("share", [0, 1, 1.5, float("nan"), "half"])
def test_a_quantile_of_positives_is_between_0_and_1(share):
    with pytest.raises(InputError, match="positive_quantile"):
        AdaptiveThreshold(positive_quantile=share)
