"""Sound embeddings: mel spectrograms of instruments that never sounded in training, or of speakers never heard.

python examples/sound_embeddings.py [FOLDER]                                  # synthetic tones
python examples/sound_embeddings.py FOLDER audiomnist_mel.npz [EPOCHS]        # AudioMNIST (Becker et al.)

The file holds mel spectrograms as images (n, 64, 64) uint8, identity, digit, and split (0, 1, 2: train, val, test).
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import mettle
from mettle.losses import SupCon

RATE, WINDOW, HOP, BANDS = 8000, 256, 64, 32


def mel_spectrogram(waves: Tensor) -> Tensor:
    """(n, BANDS, frames) of waveforms (n, samples): power in dB below the loudest cell, -80 to 0 as 0 to 1."""
    power = torch.stft(waves, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True).abs().square()
    edges = 700 * (10 ** (torch.linspace(0, 2595 * np.log10(1 + RATE / 1400), BANDS + 2) / 2595) - 1)  # Hz
    bins = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, center, high = (edges[k : k + BANDS, None] for k in range(3))
    bank = torch.minimum((bins - low) / (center - low), (high - bins) / (high - center)).clamp(min=0)
    decibel = 10 * (bank @ power).clamp(min=1e-10).log10()
    return ((decibel - decibel.amax((1, 2), keepdim=True)) / 80 + 1).clamp(min=0)


def synthesize_tones(instruments: int, notes: int = 6, takes: int = 2) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Spectrograms, instruments and notes: an instrument is how loud its harmonics are and how fast they fade."""
    draw = torch.Generator().manual_seed(0)
    who, note = (np.repeat(column, takes) for column in np.divmod(np.arange(instruments * notes), notes))
    loudness, fading = (
        torch.rand(instruments, 8, generator=draw) ** 2,
        2 + 8 * torch.rand(instruments, 8, generator=draw),
    )
    time = torch.arange(RATE // 2) / RATE
    pitch = torch.from_numpy(110 * 2 ** (note / 6)).float()[:, None, None]
    harmonics = torch.sin(2 * torch.pi * pitch * torch.arange(1, 9)[:, None] * time)
    waves = (loudness[who, :, None] * torch.exp(-fading[who, :, None] * time) * harmonics).sum(1)
    return mel_spectrogram(waves + 0.01 * torch.randn(waves.shape, generator=draw)), who, note


class Clips(Dataset):
    """Spectrograms (1, bands, frames) of sources, by what they say or play."""

    def __init__(self, spectrograms: Tensor, source: np.ndarray, content: np.ndarray):
        self.spectrograms, self.labels, self.content = spectrograms.unsqueeze(1), source, content

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict:
        return {"input": self.spectrograms[i], "label": self.labels[i], "content": self.content[i]}


class SoundNet(nn.Module):
    """(n, 1, bands, frames) to (n, 64): convolutions, then the mean and the spread of each channel over time."""

    def __init__(self, bands: int, width: int = 32):
        super().__init__()
        parts, before = [], 1
        for after in (width, 2 * width, 4 * width):
            parts += [nn.Conv2d(before, after, 3, (2, 1), 1), nn.BatchNorm2d(after), nn.ReLU(), nn.AvgPool2d((1, 2))]
            before = after
        self.body, self.head = nn.Sequential(*parts), nn.Linear(8 * width * (bands // 8), 64)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 64) embeddings."""
        x = self.body(x).flatten(1, 2)
        return self.head(torch.cat([x.mean(2), (x.var(2) + 1e-4).sqrt()], 1))


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sound")
options = {"folder": folder, "domains": "content", "batch": (16, 4), "select": "eer", "epochs": 6}
if len(sys.argv) > 2:
    with np.load(sys.argv[2]) as file:
        images = torch.from_numpy(file["images"]).float() / 255
        clips = [
            Clips(images[file["split"] == part], *(file[name][file["split"] == part] for name in ("identity", "digit")))
            for part in (0, 1, 2)
        ]
    data, options = clips[0], options | {"val": clips[1], "test": clips[2], "epochs": int([*sys.argv, "20"][3])}
else:
    data = Clips(*synthesize_tones(instruments=40))
run = mettle.fit(SoundNet(data.spectrograms.shape[2]), data, SupCon(0.1), **options)
judged = run.evaluate().results
for name, verification in judged.verifications.items():  # in-domain: the same content; cross-domain: another one
    low, high = (getattr(verification.interval("eer"), end) for end in ("low", "high"))
    recall = judged.retrievals[name].recall[1]
    print(f"{name:<13} EER {verification.eer:.2%} [{low:.2%}, {high:.2%}]  Recall@1 {recall:.2%}")
