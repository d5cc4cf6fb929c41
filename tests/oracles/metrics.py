"""Metrics in plain Python and exact fractions: slow, obvious, sharing nothing with the package.

Scores are Python numbers (−inf marks a failed template). A verification set is two lists, genuine and
impostor. A ranked list is a list of (score, relevant) candidates without any order.
"""

from fractions import Fraction
from itertools import pairwise, permutations
from math import comb, inf, log2


def operating_points(genuine, impostor):
    """(τ, FMR, FNMR) at every distinct finite score and +∞, ascending."""
    found = []
    for tau in [*sorted({s for s in [*genuine, *impostor] if s != -inf}), inf]:
        accepted = sum(1 for s in impostor if s >= tau)
        rejected = sum(1 for s in genuine if s < tau)
        found.append((tau, Fraction(accepted, len(impostor)), Fraction(rejected, len(genuine))))
    return found


def eer(genuine, impostor):
    """Walk along the path until FMR no longer exceeds FNMR; None if it starts on the wrong side."""
    points = operating_points(genuine, impostor)
    if points[0][1] < points[0][2]:
        return None
    for (_, x0, y0), (_, x1, y1) in pairwise(points):
        if x0 == y0:
            return x0
        if x1 < y1:  # the segment from (x0, y0) to (x1, y1) crosses the diagonal
            return (x0 * y1 - x1 * y0) / ((x0 - x1) + (y1 - y0))
    return points[-1][1]


def auc(genuine, impostor):
    wins = sum(Fraction(1) if g > i else Fraction(1, 2) if g == i else 0 for g in genuine for i in impostor)
    return Fraction(wins) / (len(genuine) * len(impostor))


def tar(genuine, impostor, far):
    """(threshold, TAR, FMR) at the first operating point with FMR ≤ far; ``far`` is a Fraction."""
    for tau, fmr, fnmr in operating_points(genuine, impostor):
        if fmr <= far:
            return tau, 1 - fnmr, fmr
    raise AssertionError("+∞ accepts nobody")


def orders(candidates):
    """Every order of the candidates in which scores never rise: all the ways to break ties."""
    for order in permutations(candidates):
        if all(a[0] >= b[0] for a, b in pairwise(order)):
            yield [relevant for _, relevant in order]


def _mean_over_orders(candidates, value):
    values = [value(order) for order in orders(candidates)]
    return sum(values, Fraction(0)) / len(values)


def recall(candidates, k):
    return _mean_over_orders(candidates, lambda order: Fraction(int(any(order[:k]))))


def recall_bounds(candidates, k):
    values = [int(any(order[:k])) for order in orders(candidates)]
    return min(values), max(values)


def recall_by_formula(candidates, k):
    """1 if a relevant item is strictly above the tie group of the K-th, else 1 − C(t−p, r)/C(t, r)."""
    kth = sorted((s for s, _ in candidates), reverse=True)[k - 1]
    above = [rel for s, rel in candidates if s > kth]
    tied = [rel for s, rel in candidates if s == kth]
    if any(above):
        return Fraction(1)
    t, p, r = len(tied), sum(tied), k - len(above)
    return 1 - Fraction(comb(t - p, r), comb(t, r))


def r_precision(candidates):
    r = sum(rel for _, rel in candidates)
    return _mean_over_orders(candidates, lambda order: Fraction(sum(order[:r]), r))


def precision(candidates, k):
    return _mean_over_orders(candidates, lambda order: Fraction(sum(order[:k]), k))


def average_precision(candidates):
    def value(order):
        places = [i for i, relevant in enumerate(order) if relevant]
        return sum((Fraction(sum(order[: i + 1]), i + 1) for i in places), Fraction(0)) / len(places)

    return _mean_over_orders(candidates, value)


def trapezoid_precision(candidates):
    """Area under the steps of recall, each with the mean of precision before and after it; at first precision is 1."""

    def value(order):
        area, hits, before = Fraction(0), 0, Fraction(1)
        for i, relevant in enumerate(order):
            hits += relevant
            after = Fraction(hits, i + 1)
            area += Fraction(int(relevant), sum(order)) * (before + after) / 2
            before = after
        return area

    return _mean_over_orders(candidates, value)


def reciprocal_rank(candidates):
    return _mean_over_orders(candidates, lambda order: Fraction(1, 1 + order.index(True)))


def ndcg(candidates, k):
    """In floats: logarithms are no fractions."""

    def gain(order):
        return sum(1 / log2(i + 2) for i, relevant in enumerate(order[:k]) if relevant)

    best = gain(sorted((relevant for _, relevant in candidates), reverse=True))
    found = [gain(order) / best for order in orders(candidates)]
    return sum(found) / len(found)


def map_at_r(candidates):
    r = sum(rel for _, rel in candidates)

    def value(order):
        return sum((Fraction(sum(order[: i + 1]), i + 1) for i in range(r) if order[i]), Fraction(0)) / r

    return _mean_over_orders(candidates, value)


def resampled(genuine, impostor, weights):
    """Repeat scores by weight: genuine (score, s) w_s times, impostor (score, s, t) w_s·w_t times."""
    return (
        [score for score, s in genuine for _ in range(weights[s])],
        [score for score, s, t in impostor for _ in range(weights[s] * weights[t])],
    )


def min_dcf(genuine, impostor, prior, miss, false_accept):
    """Least normalised detection cost over the operating points; ``prior`` and costs are Fractions."""
    a, b = miss * prior, false_accept * (1 - prior)
    return min((a * fnmr + b * fmr) / min(a, b) for _, fmr, fnmr in operating_points(genuine, impostor))


def fused(scores, labels, rule):
    """One score per identity: {label: max or mean of its templates' scores}."""
    people = {}
    for score, label in zip(scores, labels, strict=True):
        people.setdefault(label, []).append(score)
    return {who: max(s) if rule == "max" else sum(s, Fraction(0)) / len(s) for who, s in people.items()}


def among_best(people, who, rank):
    """Chance that ``who`` is among the ``rank`` best when equal scores are in random order, by listing the orders."""
    hits = total = 0
    for order in permutations(people):
        if all(people[a] >= people[b] for a, b in pairwise(order)):
            total += 1
            hits += who in order[:rank]
    return Fraction(hits, total)


def tpir(mated, unknown, fpir, rank):
    """TPIR at the first threshold with FPIR ≤ fpir.

    ``mated`` is a list of (own label, {label: score}), ``unknown`` of {label: score}.
    """
    own = [people[who] for who, people in mated]
    alarms = [max(people.values()) for people in unknown]
    for tau in [*sorted({*own, *alarms}), inf]:
        if Fraction(sum(1 for s in alarms if s >= tau), len(alarms)) <= fpir:
            hits = [among_best(p, who, rank) if p[who] >= tau else Fraction(0) for who, p in mated]
            return sum(hits, Fraction(0)) / len(hits), tau
    raise AssertionError("+∞ alarms nobody")


def pair_f1(labels, clusters):
    """F1 over pairs of samples, pair by pair."""
    n = len(labels)
    same_label = [labels[i] == labels[j] for i in range(n) for j in range(i)]
    same_cluster = [clusters[i] == clusters[j] for i in range(n) for j in range(i)]
    both = sum(a and b for a, b in zip(same_label, same_cluster, strict=True))
    return Fraction(2 * both, sum(same_label) + sum(same_cluster))


def votes(scores, labels, truth, k, weigh):
    """Chance that weighted votes of the k nearest elect ``truth``; the k-th place's ties share, as do equal votes."""
    edge = sorted(scores, reverse=True)[k - 1]
    above = sum(1 for s in scores if s > edge)
    tied = sum(1 for s in scores if s == edge)
    total = {}
    for s, label in zip(scores, labels, strict=True):
        part = 1 if s > edge else (k - above) / tied if s == edge else 0
        total[label] = total.get(label, 0.0) + part * weigh(s)
    best = max(total.values())
    winners = [label for label, v in total.items() if abs(v - best) <= 1e-9 * best]
    return (truth in winners) / len(winners)


def normalised(score, first, second):
    """½·((s − μ_i)/σ_i + (s − μ_j)/σ_j) for the cohort scores of the two sides."""
    found = 0.0
    for cohort in (first, second):
        mean = sum(cohort) / len(cohort)
        deviation = (sum((c - mean) ** 2 for c in cohort) / (len(cohort) - 1)) ** 0.5
        found += (score - mean) / deviation / 2
    return found
