"""Hardness-aware synthesis written out sample by sample, in plain Python and NumPy. Slow and obvious."""

import math

import numpy as np


def pulled(z, positive, negative, level):
    """One negative, pulled."""
    near = math.sqrt(sum((a - b) ** 2 for a, b in zip(z, positive, strict=True)))
    far = math.sqrt(sum((a - b) ** 2 for a, b in zip(z, negative, strict=True)))
    if far <= near:
        return list(negative)
    factor = (level * far + (1 - level) * near) / far
    return [a + factor * (n - a) for a, n in zip(z, negative, strict=True)]


def triplet_sum(triples, margin):
    """Σ [‖a−p‖² − ‖a−n‖² + margin]₊ over (a, p, n)."""
    total = 0.0
    for a, p, n in triples:
        gap = float(((a - p) ** 2).sum() - ((a - n) ** 2).sum()) + margin
        total += max(gap, 0.0)
    return total


def npair_rows(anchors, bank, norm_weight):
    """Anchor i against its own row bank[i]; bank[i][i] is its positive."""
    total = 0.0
    for i, a in enumerate(anchors):
        own = float(a @ bank[i][i])
        others = sum(math.exp(float(a @ bank[i][j]) - own) for j in range(len(bank[i])) if j != i)
        norms = float(a @ a) + float(bank[i][i] @ bank[i][i])
        total += math.log(1 + others) + norm_weight / 4 * norms
    return total / len(anchors)


def cross_entropy(logits, labels):
    """Mean over rows."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        total += math.log(sum(math.exp(x) for x in row)) - row[label]
    return total / len(labels)


def generate(z, weights, eps=1e-5):
    """Linear, ReLU, batch norm with the batch's own statistics, linear."""
    h = np.maximum(z @ weights["layers.0.weight"].T + weights["layers.0.bias"], 0)
    h = (h - h.mean(0)) / np.sqrt(h.var(0) + eps)
    h = h * weights["layers.2.weight"] + weights["layers.2.bias"]
    return h @ weights["layers.3.weight"].T + weights["layers.3.bias"]


def decay(rate, level):
    """e^{−rate / level}."""
    return math.exp(-rate / level)
