"""`mettle.fit` on a GPU: a network and data of one's own, validated while training."""

import numpy as np
import pytest
import torch
from torch import nn

import mettle
from mettle.losses import SupCon

pytest.importorskip("pydantic", reason="recipes need it")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),
]


def photos():
    rng = np.random.default_rng(0)
    base = rng.integers(60, 200, (20, 3, 16, 16))
    return [
        (torch.from_numpy(np.clip(base[who] + rng.normal(0, 30, (3, 16, 16)), 0, 255).astype(np.uint8)), who)
        for who in range(20)
        for _ in range(6)
    ]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 16))


def test_fit_trains_validates_and_evaluates_on_the_gpu(tmp_path):
    options = {"steps": 40, "batch": (6, 4), "select": "eer", "val": 0.25, "ema": 0.9, "augment": "mild", "quiet": True}
    run = mettle.fit(network(), photos(), SupCon(0.2), folder=tmp_path / "run", device="cuda", **options)
    assert run.finished and run.contract()["selection"]["metric"] == "eer"
    found = run.evaluate().metrics
    assert found["scenarios"]["all"]["verification"]["eer"]["value"] < 0.3
    z = run.embed(torch.stack([x for x, _ in photos()[:4]]).permute(0, 2, 3, 1).numpy())
    assert z.shape == (4, 16) and np.isfinite(z).all()
