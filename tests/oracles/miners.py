"""Slow, obvious mining: which pairs or triplets stay, as plain loops over similarities.

Nothing is imported from mettle.

``s`` is a nested list or array (n, m) of similarities, ``y`` and ``ref_y`` are labels; ``same_set`` says that both
sides are the same rows, so that a row is never paired with itself. Every answer is a set of (anchor, other).
"""

import math


def sides(i, y, ref_y, same_set):
    """Positions of the positives and of the negatives of an anchor."""
    others = [j for j in range(len(ref_y)) if not (same_set and i == j)]
    return [j for j in others if ref_y[j] == y[i]], [j for j in others if ref_y[j] != y[i]]


def multi_similarity(s, y, ref_y, same_set, epsilon=0.1):
    """Wang et al. 2019: pairs that are within epsilon of the hardest pair of the other side, or harder."""
    kept_positives, kept_negatives = set(), set()
    for i in range(len(y)):
        positives, negatives = sides(i, y, ref_y, same_set)
        for j in negatives:
            if any(s[i][j] + epsilon > s[i][p] for p in positives):  # the least similar one is the first to be passed
                kept_negatives.add((i, j))
        for j in positives:
            if any(s[i][j] - epsilon < s[i][n] for n in negatives):
                kept_positives.add((i, j))
    return kept_positives, kept_negatives


def hardest(s, y, ref_y, same_set):
    """Batch-hard: the least similar positive and the most similar negative, each for itself."""
    kept_positives, kept_negatives = set(), set()
    for i in range(len(y)):
        positives, negatives = sides(i, y, ref_y, same_set)
        if positives:
            kept_positives.add((i, min(positives, key=lambda j: s[i][j])))
        if negatives:
            kept_negatives.add((i, max(negatives, key=lambda j: s[i][j])))
    return kept_positives, kept_negatives


def semi_hard(s, y, ref_y, same_set, margin):
    """All positives; negatives below the hardest positive, by no more than the margin."""
    kept_positives, kept_negatives = set(), set()
    for i in range(len(y)):
        positives, negatives = sides(i, y, ref_y, same_set)
        kept_positives |= {(i, j) for j in positives}
        if positives:
            worst = min(s[i][j] for j in positives)
            kept_negatives |= {(i, j) for j in negatives if worst - margin <= s[i][j] < worst}
    return kept_positives, kept_negatives


def easy_hard(s, y, ref_y, same_set, positives="easy", negatives="semihard"):
    """Xuan et al. 2020: one pair of each side; no ties are expected."""
    kept_positives, kept_negatives = set(), set()
    for i in range(len(y)):
        p, n = sides(i, y, ref_y, same_set)

        def pick(among, side, how, beyond=None, row=s[i]):
            if how == "semihard":
                among = [j for j in among if (row[j] > beyond if side == "positives" else row[j] < beyond)]
            if not among:
                return None
            most_similar = (how == "easy") == (side == "positives")
            return (max if most_similar else min)(among, key=lambda j: row[j])

        if "all" in (positives, negatives):
            for side, how, among, kept in (
                ("positives", positives, p, kept_positives),
                ("negatives", negatives, n, kept_negatives),
            ):
                found = among if how == "all" else [j for j in [pick(among, side, how)] if j is not None]
                kept |= {(i, j) for j in found}
            continue
        if positives == "semihard":
            chosen_n = pick(n, "negatives", negatives)
            chosen_p = None if chosen_n is None else pick(p, "positives", positives, s[i][chosen_n])
        else:
            chosen_p = pick(p, "positives", positives)
            chosen_n = None if chosen_p is None else pick(n, "negatives", negatives, s[i][chosen_p])
        if chosen_p is not None and chosen_n is not None:
            kept_positives.add((i, chosen_p))
            kept_negatives.add((i, chosen_n))
    return kept_positives, kept_negatives


def pair_margin(s, y, ref_y, same_set, positive, negative):
    """Positives below one similarity, negatives above another."""
    kept_positives, kept_negatives = set(), set()
    for i in range(len(y)):
        p, n = sides(i, y, ref_y, same_set)
        kept_positives |= {(i, j) for j in p if s[i][j] < positive}
        kept_negatives |= {(i, j) for j in n if s[i][j] > negative}
    return kept_positives, kept_negatives


def distance(a, b):
    """Euclidean."""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def angle(a, p, n):
    """In degrees, at the negative, between the centre of the other two and either of them."""
    centre = [(x + y) / 2 for x, y in zip(a, p, strict=True)]
    return math.degrees(math.atan2(distance(a, p), 2 * distance(n, centre)))


def gap(a, p, n):
    """How much farther the negative is than the positive."""
    return distance(a, n) - distance(a, p)


def triplets(z, ref, y, ref_y, same_set, wanted):
    """Every (anchor, positive, negative) for which ``wanted(a, p, n)`` holds of the rows."""
    found = set()
    for i in range(len(y)):
        positives, negatives = sides(i, y, ref_y, same_set)
        for p in positives:
            for n in negatives:
                if wanted(z[i], ref[p], ref[n]):
                    found.add((i, p, n))
    return found


def distance_weights(d, cutoff, limit, dim):
    """Weights of negatives at distances ``d`` with mean 1, in exact arithmetic of logarithms (Wu et al. 2017)."""
    logs = []
    for x in d:
        c = max(x, cutoff)
        logs.append(-((dim - 2) * math.log(c) + (dim - 3) / 2 * math.log(1 - c * c / 4)) if x < limit else None)
    there = [x for x in logs if x is not None]
    if not there:
        return [0.0] * len(d)
    top = max(there)
    total = sum(math.exp(x - top) for x in there)
    return [0.0 if x is None else len(d) * math.exp(x - top) / total for x in logs]
