"""Slow, obvious mining: which pairs or triplets stay, as plain loops over similarities.

Nothing is imported from mettle.

``s`` is a nested list or array (n, m) of similarities, ``y`` and ``ref_y`` are labels; ``same_set`` says that both
sides are the same rows, so that a row is never paired with itself. Every answer is a set of (anchor, other).
"""


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
