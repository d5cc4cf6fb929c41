"""Similarity learning as plain loops over pairs and triplets; shares no code with the package."""

import math


def alike(a, b, measure: str) -> float:
    """f(a, b) of two lists of numbers."""
    if measure == "cosine":
        length_a = math.sqrt(math.fsum(x * x for x in a))
        length_b = math.sqrt(math.fsum(y * y for y in b))
        if length_a == 0 or length_b == 0:
            return 0.0
        return math.fsum(x / length_a * (y / length_b) for x, y in zip(a, b, strict=True))
    if measure == "dot":
        return math.fsum(x * y for x, y in zip(a, b, strict=True))
    if measure == "l1":
        return -math.fsum(abs(x - y) for x, y in zip(a, b, strict=True))
    squared = math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    return {"squared": -squared, "euclidean": -math.sqrt(squared)}[measure]


def regression(x1, x2, target, measure: str) -> list[float]:
    values = []
    for a, b, y in zip(x1, x2, target, strict=True):
        values.append((alike(a, b, measure) - y) ** 2)
    return values


def classification(x1, x2, target, scale: float, bias: float, measure: str) -> list[float]:
    values = []
    for a, b, y in zip(x1, x2, target, strict=True):
        p = 1 / (1 + math.exp(-(scale * alike(a, b, measure) + bias)))
        values.append(-(y * math.log(p) + (1 - y) * math.log(1 - p)))
    return values


def ranking(x, positive, negative, form: str, margin: float, temperature: float, measure: str) -> list[float]:
    values = []
    for a, p, n in zip(x, positive, negative, strict=True):
        near, far = alike(a, p, measure), alike(a, n, measure)
        if form == "hinge":
            values.append(max(0.0, margin - near + far))
        elif form == "logistic":
            values.append(math.log(1 + math.exp((far - near) / temperature)))
        else:
            e = [math.exp(-near / temperature), math.exp(-far / temperature)]
            values.append((e[0] / (e[0] + e[1])) ** 2)
    return values


def mean(values, weight=None) -> float:
    weight = [1.0] * len(values) if weight is None else weight
    return math.fsum(w * v for w, v in zip(weight, values, strict=True)) / math.fsum(weight)


def rank(values) -> list[float]:
    """1-based ranks, ties sharing their mean rank, by counting."""
    return [1 + sum(o < v for o in values) + (sum(o == v for o in values) - 1) / 2 for v in values]


def spearman(a, b) -> float:
    ra, rb = rank(a), rank(b)
    ma, mb = sum(ra) / len(ra), sum(rb) / len(rb)
    top = sum((x - ma) * (y - mb) for x, y in zip(ra, rb, strict=True))
    return top / math.sqrt(sum((x - ma) ** 2 for x in ra) * sum((y - mb) ** 2 for y in rb))


def auc(scores, same) -> float:
    """Chance that a same pair scores above a different one, by comparing every two."""
    wins = pairs = 0.0
    for s, t in zip(scores, same, strict=True):
        for r, u in zip(scores, same, strict=True):
            if t and not u:
                pairs += 1
                wins += (s > r) + 0.5 * (s == r)
    return wins / pairs
