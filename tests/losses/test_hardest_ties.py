"""Duplicates of one sample are tied: mining keeps all of them, whatever the order of rows and the engine."""

import pytest
import torch

from mettle.difficulty import Hardest
from mettle.losses import InfoNCE, SupCon


@pytest.mark.parametrize("loss", [SupCon(0.1, difficulty=Hardest()), InfoNCE(0.2, difficulty=Hardest())], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order_and_engine_do_not_matter(loss, dtype):
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(12, 37, generator=generator, dtype=dtype).repeat_interleave(4, 0)
    y = torch.arange(48) // 8
    wanted = loss.per_anchor(z, y, engine="dense")
    for seed in range(4):
        order = torch.randperm(48, generator=torch.Generator().manual_seed(seed))
        for engine in ("dense", "tiled"):
            got = loss.per_anchor(z[order], y[order], engine=engine, tile=7)
            torch.testing.assert_close(got, wanted[order], rtol=1e-5, atol=1e-5)


def test_all_four_copies_of_the_hardest_stay():
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(12, 37, generator=generator, dtype=torch.float64).repeat_interleave(4, 0)
    facts = SupCon(0.1, difficulty=Hardest()).statistics(z, torch.arange(48) // 8)
    # 4 of 7 positives (another sample of the class), 4 of 40 negatives
    assert abs(facts.kept_positives - 4 / 7) < 1e-9 and abs(facts.kept_negatives - 4 / 40) < 1e-9
