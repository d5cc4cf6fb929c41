"""Weights of a difficulty, taken as a table: losses must use them as they use the difficulty itself."""

from dataclasses import replace

import torch

from mettle.difficulty import Relative
from mettle.difficulty.fixed_weights import FixedWeights
from mettle.losses import InfoNCE
from mettle.pairs.diagnostics import pair_weights


def test_a_table_of_relative_weights_counts_negatives_as_relative_does():
    """With a prior it matters whether a negative of weight 1.5 counts once or one and a half times."""
    generator = torch.Generator().manual_seed(0)
    z, other = (torch.randn(12, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = torch.arange(6).repeat(2)
    loss = InfoNCE(0.5, 0.1, Relative())
    weights = pair_weights(loss, z, ids, difficulty=loss.difficulty, biased=other)
    table = replace(loss, difficulty=FixedWeights(weights))
    torch.testing.assert_close(table(z, ids), loss(z, ids, biased=other))
    torch.testing.assert_close(loss(z, ids, weights=weights), loss(z, ids, biased=other))
    assert not torch.isclose(replace(table, count="weight")(z, ids), loss(z, ids, biased=other), rtol=1e-3)
