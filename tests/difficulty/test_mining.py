"""Miners keep the pairs that their papers keep: plain loops, and the miners of pytorch-metric-learning."""

import pytest
import torch
from tests.oracles import miners as oracle

from mettle.difficulty import MultiSimilarityMining
from mettle.losses import Contrastive
from mettle.pairs import pair_weights


def cosines(a, b):
    return torch.nn.functional.normalize(a, dim=1) @ torch.nn.functional.normalize(b, dim=1).T


def draw(seed, n, d, classes, dtype=torch.float64):
    """Classes of different sizes, some of one sample."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=generator)
    z = torch.randn(classes, d, generator=generator, dtype=torch.float64)[y]
    return (z + torch.randn(n, d, generator=generator, dtype=torch.float64)).to(dtype), y


def kept(difficulty, z, y, **options):
    """The positives and negatives of weight 1, all others being of weight 0."""
    w, positive, negative = (x.cpu() for x in weights_and_masks(difficulty, z, y, **options))
    assert set(w[positive | negative].tolist()) <= {0.0, 1.0}
    return tuple({(int(i), int(j)) for i, j in ((w > 0) & mask).nonzero()} for mask in (positive, negative))


def weights_and_masks(difficulty, z, y):
    same = y[:, None] == y
    w = pair_weights(Contrastive(difficulty=difficulty), z, y, difficulty=difficulty)
    return w, same & ~torch.eye(len(y), dtype=torch.bool), ~same


SIZES = [(12, 4, 5), (25, 8, 6), (40, 3, 12)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.6])
def test_multi_similarity_mining_equals_plain_loops(size, epsilon, seed):
    z, y = draw(seed, *size)
    wanted = oracle.multi_similarity(cosines(z, z).tolist(), y.tolist(), y.tolist(), True, epsilon)
    assert kept(MultiSimilarityMining(epsilon), z, y) == wanted
    assert wanted[0] and wanted[1]
