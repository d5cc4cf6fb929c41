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


def npair_rows(anchors, bank, norm_weight, norm_rows="synthetic"):
    """Anchor i against its own row bank[i]; bank[i][i] is its positive. Norms of all of the bank, or of positives."""
    total = 0.0
    p = len(anchors)
    everyone = sum(float(bank[i][j] @ bank[i][j]) for i in range(p) for j in range(p)) / p**2
    for i, a in enumerate(anchors):
        own = float(a @ bank[i][i])
        others = sum(math.exp(float(a @ bank[i][j]) - own) for j in range(len(bank[i])) if j != i)
        norms = float(a @ a) + (everyone if norm_rows == "synthetic" else float(bank[i][i] @ bank[i][i]))
        total += math.log(1 + others) + norm_weight / 4 * norms
    return total / len(anchors)


def bank_of(anchors, positives, labels, level):
    """bank[i][j]: the positive of pair j as anchor i sees it, pulled unless it is of its own class."""
    bank = []
    for a, p, own in zip(anchors, positives, labels, strict=True):
        row = [q if other == own else pulled(a, p, q, level) for q, other in zip(positives, labels, strict=True)]
        bank.append(np.array(row))
    return np.array(bank)


def pairwise_mean(anchors, bank, labels, row_loss):
    """Mean over anchors of row_loss(anchor, positives, negatives), of each one's own row of the bank."""
    total = 0.0
    for i, a in enumerate(anchors):
        positives = [bank[i][j] for j in range(len(labels)) if labels[j] == labels[i]]
        negatives = [bank[i][j] for j in range(len(labels)) if labels[j] != labels[i]]
        total += row_loss(a, positives, negatives)
    return total / len(anchors)


def cosine(a, b):
    """Of two vectors of any length."""
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def supcon_row(temperature):
    """−(1/|P|) Σ_p log(e^{s_p/τ} / Σ_{P and N} e^{s/τ})."""

    def row(a, positives, negatives):
        denominator = sum(math.exp(cosine(a, b) / temperature) for b in [*positives, *negatives])
        return -sum(math.log(math.exp(cosine(a, p) / temperature) / denominator) for p in positives) / len(positives)

    return row


def contrastive_row(positive, negative):
    """Mean [d − m₊]₊² over positives plus mean [m₋ − d]₊² over negatives, d the distance on the sphere."""

    def row(a, positives, negatives):
        def distance(b):
            return math.sqrt(max(2 - 2 * cosine(a, b), 0.0))

        pull = sum(max(distance(p) - positive, 0.0) ** 2 for p in positives) / len(positives)
        push = sum(max(negative - distance(n), 0.0) ** 2 for n in negatives) / len(negatives)
        return pull + push

    return row


def levels(losses, generator_losses, alpha, beta, window, javg):
    """λ and the weight of the real tuples before every step and after the last, from (J + l2 term, J) and J_gen.

    The published collector: it starts at 1e6 and, whenever ``window`` steps are full, becomes their mean.
    """
    metric, generator, collected, made, found = 1e6, 1e6, [], [], []
    for (real, plain), j_gen in zip(losses, generator_losses, strict=True):
        weight = math.exp(-beta / generator)
        found.append((math.exp(-alpha / metric), weight))
        collected.append(weight * real if javg == "repo" else plain)
        made.append(j_gen)
        if len(collected) == window:
            metric, generator = sum(collected) / window, sum(made) / window
            collected, made = [], []
    return [*found, (math.exp(-alpha / metric), math.exp(-beta / generator))]


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
