"""Your network, your Dataset and a loss of pytorch-metric-learning, to a gallery that answers.

python examples/train_own_model.py [FOLDER]
"""

import sys

import torch
from pytorch_metric_learning.losses import SupConLoss
from torch import nn
from torch.utils.data import Dataset

import mettle


class Tiles(Dataset):
    """Tiles of a mosaic, 12 images of each in changing light: uint8 (3, 16, 16)."""

    def __init__(self, count: int):
        draw = torch.Generator().manual_seed(0)
        self.targets = torch.arange(12 * count) // 12
        pattern = torch.rand(count, 3, 4, 4, generator=draw).repeat_interleave(4, 2).repeat_interleave(4, 3)
        light = 0.5 + 0.5 * torch.rand(12 * count, 1, 1, 1, generator=draw)
        noise = 0.2 * torch.randn(12 * count, 3, 16, 16, generator=draw)
        self.images = (255 * (light * pattern[self.targets] + noise).clamp(0, 1)).byte()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i: int):
        return self.images[i], self.targets[i]


folder, tiles = sys.argv[1] if len(sys.argv) > 1 else "runs/tiles", Tiles(60)
net = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 32))
run = mettle.fit(net, tiles, SupConLoss(), folder=folder, epochs=5, batch=(16, 4), select="eer")
print(run.report())
with mettle.Gallery.open(f"{folder}/tiles.mettle", model=run) as gallery:
    gallery.enrol_many((f"tile {k}", list(tiles.images[12 * k : 12 * k + 3])) for k in range(60))
    print(gallery.identify(tiles.images[5]).verdict)
