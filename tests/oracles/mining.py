"""Mining as slow loops over all triplets, in plain floats."""

import math


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def mine(
    rows,
    labels,
    *,
    ids=None,
    across=None,
    second=None,
    positives="hardest",
    negatives=1,
    skip=0,
    depth=10,
    margin=None,
    relative_margin=None,
    max_score=None,
    min_score=None,
    second_margin=0.0,
):
    """Triplets (anchor, positive, negative, their scores), and how many candidates each rule dropped."""
    n = len(rows)
    ids = list(range(n)) if ids is None else ids
    triplets, counts = [], {"candidates": 0, "spare": 0, "copies": 0}
    for a in range(n):
        own = [p for p in range(n) if labels[p] == labels[a] and ids[p] != ids[a]]
        if across is not None:
            own = [p for p in own if across[p] != across[a]]
        if not own:
            continue
        if positives == "hardest":
            own = [min(own, key=lambda p: (round(cosine(rows[a], rows[p]), 9), p))]
        others = [k for k in range(n) if labels[k] != labels[a] and (across is None or across[k] == across[a])]
        others.sort(key=lambda k: (-round(cosine(rows[a], rows[k]), 9), k))
        for p in own:
            near, left = cosine(rows[a], rows[p]), 0
            for k in others[skip:depth]:
                counts["candidates"] += 1
                s = cosine(rows[a], rows[k])
                rule = None
                if list(rows[k]) == list(rows[a]):
                    rule = "copies"
                elif margin is not None and s > near - margin:
                    rule = "margin"
                elif relative_margin is not None and s > near - relative_margin * abs(near):
                    rule = "relative margin"
                elif max_score is not None and s > max_score:
                    rule = "maximum score"
                elif min_score is not None and s < min_score:
                    rule = "minimum score"
                elif second is not None and cosine(second[a], second[k]) > cosine(second[a], second[p]) - second_margin:
                    rule = "second model"
                if rule is not None:
                    counts[rule] = counts.get(rule, 0) + 1
                elif left < negatives:
                    triplets.append((a, p, k, near, s))
                    left += 1
                else:
                    counts["spare"] += 1
    return triplets, counts
