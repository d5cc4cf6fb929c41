r"""New points: negatives pulled towards their anchor, and the features that such points would have had.

Hardness-aware deep metric learning (HDML, Zheng et al. 2019). The third door of a difficulty: neither weights nor
margins, but samples that are not in the data. Of an anchor z, its positive z⁺ and a negative z⁻:

    augmentor   ẑ⁻ = z + (λ d⁻ + (1 − λ) d⁺) / d⁻ · (z⁻ − z)  where d⁻ > d⁺, else z⁻;  so d(z, ẑ⁻) = d⁺ + λ (d⁻ − d⁺)
    generator   ỹ = i(ẑ⁻): the features of which ẑ⁻ would be the embedding, still of the class of z⁻
    levels      λ = e^{−α / J_avg} falls as the metric loss does; e^{−β / J_gen} is how much the real tuples still count

It is used by `mettle.train.HardnessAware`.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mettle.difficulty import validate_fields, validate_integers
from mettle.errors import InputError

START = 1e6  # what both levels are taken to be before a window is full: nothing pulled, nothing synthetic


@dataclass(frozen=True)
class Synthesis:
    """How hard synthetic negatives are, and how much they count. Defaults are the published ones.

    ``alpha`` and ``beta`` have the units of the losses they divide: the published values fit sums over 120 images and
    1,024 features. In ``relative`` mode they are multiples of the first full window, which fits any data.
    """

    alpha: float = 90.0  # λ = e^{−alpha / J_avg}
    beta: float = 1e4  # weight of the real tuples = e^{−beta / J_gen}
    alpha_mode: Literal["absolute", "relative"] = "absolute"
    beta_mode: Literal["absolute", "relative"] = "absolute"
    javg: Literal["repo", "metric"] = "repo"  # average of weight · (J + l2 term), as published in code, or of J itself
    window: int = 64  # steps that are averaged, one window after the other
    level: float | None = None  # λ itself, in place of e^{−alpha / J_avg}: 1 switches the augmentor off
    real: float | None = None  # the weight of real tuples itself, in place of e^{−beta / J_gen}
    generator: bool = True  # False: ẑ⁻ is used as it is
    soft: float = 0.5  # share of the class term in J_gen: 0 = reconstruction only, 1 = class term only
    hidden: int = 512  # units of the generator
    generator_rate: float = 1e-2  # learning rates of the generator and of the softmax head
    head_rate: float = 1e-3
    l2: float = 0.0  # times half the squared weights, added to the real loss

    def __post_init__(self) -> None:
        validate_fields(self)
        validate_integers(window=self.window, hidden=self.hidden)
        need = [
            (self.alpha >= 0 and self.beta >= 0, f"alpha and beta are at least 0, got {self.alpha}, {self.beta}"),
            (self.window >= 1, f"window is a number of steps, at least 1, got {self.window}"),
            (self.level is None or 0 <= self.level <= 1, f"level (λ) lies between 0 and 1, got {self.level}"),
            (self.real is None or 0 <= self.real <= 1, f"real is a weight between 0 and 1, got {self.real}"),
            (0 <= self.soft <= 1, f"soft is a share between 0 and 1, got {self.soft}"),
            (self.hidden >= 1, f"hidden is a number of units, at least 1, got {self.hidden}"),
            (self.generator_rate > 0 and self.head_rate > 0, "generator_rate and head_rate must be above 0"),
            (self.l2 >= 0, f"l2 is at least 0, got {self.l2}"),
        ]
        for name, known in (("javg", ("repo", "metric")), ("alpha_mode", MODES), ("beta_mode", MODES)):
            need.append((getattr(self, name) in known, f"{name} must be one of {known}, got {getattr(self, name)!r}"))
        for fine, message in need:
            if not fine:
                raise InputError(message)

    def pull_level(self, metric: "WindowMean") -> float:
        """λ: 1 leaves negatives where they are, 0 pulls them as near as the positive."""
        return decay_weight(self.alpha, self.alpha_mode, metric) if self.level is None else self.level

    def real_weight(self, generator: "WindowMean") -> float:
        """Weight of the real tuples; the synthetic ones get the rest."""
        if self.real is not None:
            return self.real
        if not self.generator:  # nothing is generated, so nothing is mistrusted: the limit J_gen → 0
            return 1.0 if self.beta == 0 else 0.0
        return decay_weight(self.beta, self.beta_mode, generator)


MODES = ("absolute", "relative")


class WindowMean:
    """Mean of the last full window of steps, window after window (not sliding)."""

    def __init__(self, size: int):
        self.size, self.total, self.count = size, 0.0, 0
        self.mean: float | None = None
        self.first: float | None = None  # mean of the first full window

    def update(self, value: float) -> None:
        """One more step."""
        self.total, self.count = self.total + value, self.count + 1
        if self.count == self.size:
            self.mean = self.total / self.size
            self.first = self.mean if self.first is None else self.first
            self.total, self.count = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        vars(self).update(state)


def decay_weight(rate: float, mode: str, window: WindowMean) -> float:
    """e^{−rate / J}, J the last full window; in ``relative`` mode the rate is in units of the first one."""
    if mode == "relative":
        if window.first is None or window.mean is None:
            return 1.0
        rate = rate * window.first
    level = START if window.mean is None else window.mean
    if rate == 0:
        return 1.0
    return math.exp(-rate / level) if level > 0 else 0.0


def pull_negatives(anchor: Tensor, positive: Tensor, negative: Tensor, level: float) -> Tensor:
    """Negatives pulled towards their anchors: ẑ⁻ above, with gradient to all three, safe where points coincide.

    Leading dimensions broadcast: (p, 1, d) anchors and positives with (1, p, d) negatives give all (p, p, d).
    """
    near, far = safe_distance(anchor, positive), safe_distance(anchor, negative)
    inside = far <= near  # false for NaN, which then comes out
    safe = torch.where(far == 0, 1.0, far)
    moved = anchor + ((level * far + (1 - level) * near) / safe)[..., None] * (negative - anchor)
    return torch.where(inside[..., None], negative.expand_as(moved), moved)


def safe_distance(a: Tensor, b: Tensor) -> Tensor:
    """Distance, with gradient 0 where it is 0."""
    square = (a - b).square().sum(-1)
    same = square == 0
    return torch.where(same, 0.0, torch.where(same, 1.0, square).sqrt())


class Generator(nn.Module):
    """Embeddings to features: linear, ReLU, batch norm, linear."""

    def __init__(self, dim: int, features: int, hidden: int = 512):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden), nn.ReLU(inplace=True), nn.BatchNorm1d(hidden), nn.Linear(hidden, features)
        )

    def forward(self, z: Tensor) -> Tensor:
        """(n, dim) to (n, features)."""
        return self.layers(z)
