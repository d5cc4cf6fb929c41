"""Slow, obvious pairwise losses: the papers' sums as plain loops, for comparison in tests.

Nothing is imported from mettle, nothing is vectorised, nothing is fast; n <= 24 is meant. What all
functions share:

* ``z`` is a float64 array (n, d), ``y`` n integer labels. Where the loss lives on the sphere the rows of
  ``z`` are divided by their length here; a zero row stays zero (its cosine with everything is 0, its
  squared distance to a unit vector is 1, because distances are always summed from coordinate differences
  and never taken as 2 - 2s).
* P(i) = other rows with the label of i, N(i) = rows with another label. The row itself is never a pair.
* ``ref=(z_ref, y_ref)`` *replaces* the batch as the set that anchors are compared with (m rows). Nothing is
  taken for "the row itself" then: a copy of the anchor inside ``ref`` is an ordinary positive.
* ``w`` is an (n, n) or, with ``ref``, (n, m) matrix of weights: 0 = the pair is absent (from sums *and*
  counts), 1 = nothing changes, 2 = as if listed twice. Fractions enter the same sums and counts.
* The answer starts with ``(per_anchor, mean)``: a list with ``None`` for an anchor that is undefined, and
  the mean over the others (``None`` when there is no other). An anchor without positives (none, or all of
  weight 0) is undefined; one without negatives is defined, and an empty sum over negatives is 0 (exceptions
  are said where they are made).
* Gradients through weights (detached or not) do not change a value, so no option here is about them.
* NaN input is not defended against.
"""

import math
from decimal import Decimal

import numpy as np

# ---------------------------------------------------------------------------------------------- small things


def unit(z):
    """Rows divided by their length; a zero row stays zero."""
    rows = []
    for row in np.asarray(z, dtype=np.float64):
        length = math.sqrt(math.fsum(float(x) * float(x) for x in row))
        rows.append([float(x) / length if length > 0 else float(x) for x in row])
    return rows


def raw(z):
    """Rows as lists of Python floats."""
    return [[float(x) for x in row] for row in np.asarray(z, dtype=np.float64)]


def dot(a, b):
    """Inner product."""
    return math.fsum(p * q for p, q in zip(a, b, strict=True))


def squared_distance(a, b):
    """Sum of squared coordinate differences."""
    return math.fsum((p - q) ** 2 for p, q in zip(a, b, strict=True))


def distance(a, b):
    """Euclidean distance."""
    return math.sqrt(squared_distance(a, b))


def softplus(x):
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log_sum(terms):
    """log of Σ w e^l over ``terms`` = [(l, w), ...]; -inf for an empty sum, nan for a negative one."""
    terms = [(logit, weight) for logit, weight in terms if weight != 0]
    if not terms:
        return -math.inf
    top = max(logit for logit, _ in terms)
    total = math.fsum(weight * math.exp(logit - top) for logit, weight in terms)
    if total < 0:
        return math.nan
    return top + math.log(total) if total > 0 else -math.inf


def mean_of_defined(per_anchor):
    """Mean over the entries that are not None; None when there is none."""
    values = [value for value in per_anchor if value is not None]
    return math.fsum(values) / len(values) if values else None


def weighted_mean(pairs):
    """Sum of w x / sum of w over [(x, w), ...]."""
    return math.fsum(x * w for x, w in pairs) / math.fsum(w for _, w in pairs)


def multi_view(features, y):
    """(B, V, D) features and B labels to view-major (V*B, D) and V*B labels: first views first.

    ``contrast_mode="one"`` of the SupCon repository (only view 0 is an anchor) is the mean of the first B
    entries of ``per_anchor`` on the result.
    """
    features = np.asarray(features, dtype=np.float64)
    rows, labels = [], []
    for view in range(features.shape[1]):
        for sample in range(features.shape[0]):
            rows.append(features[sample, view])
            labels.append(int(y[sample]))
    return np.array(rows), np.array(labels)


def setting(z, y, ref, normalise):
    """Anchor rows and labels, reference rows and labels, and whether they are the same set."""
    prepare = unit if normalise else raw
    anchors, labels = prepare(z), [int(label) for label in y]
    if ref is None:
        return anchors, labels, anchors, labels, True
    return anchors, labels, prepare(ref[0]), [int(label) for label in ref[1]], False


def sides(i, labels, ref_labels, same_set, w):
    """[(j, weight)] of the positives and of the negatives of anchor i; pairs of weight 0 are not listed."""
    positives, negatives = [], []
    for j in range(len(ref_labels)):
        if same_set and j == i:
            continue
        weight = 1.0 if w is None else float(w[i][j])
        if weight == 0:
            continue
        (positives if ref_labels[j] == labels[i] else negatives).append((j, weight))
    return positives, negatives


def choose(pick, i, p):
    """The negative drawn for anchor i and positive p: ``pick[(i, p)]`` if given, else ``pick[i]``."""
    return pick[(i, p)] if isinstance(pick, dict) and (i, p) in pick else pick[i]


# ---------------------------------------------------------------------------------------------------- SupCon


def supcon_row(positives, negatives, form="out"):
    """One anchor of SupCon from logits: ``positives`` and ``negatives`` are [(s/τ, weight), ...]."""
    log_denominator = log_sum(positives + negatives)
    if form == "out":  # -(1/|P|) Σ_p log( e_p / D )
        return -weighted_mean([(logit - log_denominator, weight) for logit, weight in positives])
    if form == "in":  # -log( (1/|P|) Σ_p e_p / D )
        count = math.fsum(weight for _, weight in positives)
        return -(log_sum(positives) - math.log(count) - log_denominator)
    raise ValueError(form)


def supcon(z, y, temperature=0.1, form="out", w=None, ref=None, base_temperature=None, mean_all=False):
    """SupCon, L_out or L_in.

    out: ℓ_i = -Σ_p w_ip log(e^{s_ip/τ} / D_i) / Σ_p w_ip, with D_i = Σ_{a in A(i)} w_ia e^{s_ia/τ};
    in:  ℓ_i = -log( Σ_p w_ip e^{s_ip/τ} / (Σ_p w_ip · D_i) ).

    Decisions: the weights follow the law on both sides (a positive listed twice counts twice in the average
    and twice in D_i). ``base_temperature`` multiplies everything by τ/τ_base; absent = factor 1.
    ``mean_all`` divides by all n anchors, the undefined ones adding 0, as the SupCon repository does. An
    anchor without negatives keeps the formula.
    """
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, True)
    factor = 1.0 if base_temperature is None else temperature / base_temperature
    per_anchor = []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, w)
        if not positives:
            per_anchor.append(None)
            continue
        pos = [(dot(anchors[i], refs[p]) / temperature, weight) for p, weight in positives]
        neg = [(dot(anchors[i], refs[n]) / temperature, weight) for n, weight in negatives]
        per_anchor.append(factor * supcon_row(pos, neg, form))
    if mean_all:
        return per_anchor, math.fsum(value for value in per_anchor if value is not None) / len(per_anchor)
    return per_anchor, mean_of_defined(per_anchor)


# --------------------------------------------------------------------------------- difficulty-aware SupCon


def positive_weight(s, alpha, positive, form="hinge"):
    """w⁺ = 1 + α (s⁺ - s)/s⁺, the fraction kept at >= 0 by ``hinge``."""
    excess = (positive - s) / positive
    return 1.0 + alpha * (max(excess, 0.0) if form == "hinge" else excess)


def negative_weight(s, beta, negative, form="hinge"):
    """w⁻ = 1 + β (s - s⁻)/(1 - s⁻), the fraction kept at >= 0 by ``hinge``."""
    excess = (s - negative) / (1.0 - negative)
    return 1.0 + beta * (max(excess, 0.0) if form == "hinge" else excess)


def da_supcon_row(positives, negatives, neg_weight="denominator", normalise="count"):
    """One anchor of difficulty-aware SupCon from [(s/τ, w⁺), ...] and [(s/τ, w⁻), ...]."""
    plain = [(logit, 1.0) for logit, _ in positives]
    plain_negatives = [(logit, 1.0) for logit, _ in negatives]
    if neg_weight == "denominator":
        log_denominator = log_sum(plain + negatives)
    elif neg_weight in ("none", "penalty"):
        log_denominator = log_sum(plain + plain_negatives)
    else:
        raise ValueError(neg_weight)
    total = -math.fsum(weight * (logit - log_denominator) for logit, weight in positives)
    if normalise == "count":
        value = total / len(positives)
    elif normalise == "weight":
        value = total / math.fsum(weight for _, weight in positives)
    elif normalise == "sum":
        value = total
    else:
        raise ValueError(normalise)
    if neg_weight == "penalty" and negatives:
        penalties = []
        for n, (_, weight) in enumerate(negatives):  # -log(1 - p_in) = log D - log(D without n)
            others = plain_negatives[:n] + plain_negatives[n + 1 :]
            penalties.append((weight - 1.0) * (log_denominator - log_sum(plain + others)))
        value += math.fsum(penalties) / len(penalties)
    return value


def da_supcon(
    z,
    y,
    temperature=0.1,
    alpha=1.0,
    beta=2.0,
    positive=0.7,
    negative=0.3,
    pos_form="hinge",
    neg_form="hinge",
    neg_weight="denominator",
    normalise="count",
    preset=None,
    ref=None,
    batch="mean",
    floor=False,
):
    """Difficulty-aware SupCon, every reading.

    Default: ℓ_i = -(1/|P|) Σ_p w⁺_ip (s_ip/τ - log D_i), D_i = Σ_p e^{s_ip/τ} + Σ_n w⁻_in e^{s_in/τ}:
    positive weights in the numerator only, divided by the *count*. ``preset="literal"`` overrides the
    options: literal weights, ``neg_weight="none"``, ``normalise="sum"``.

    Decisions: ``penalty`` takes p_in from the *unweighted* softmax over A(i), is added as a mean over the
    negatives whatever ``normalise`` says, and is 0 without negatives. ``normalise="weight"`` divides by Σ
    w⁺ even when literal weights make it negative. Literal negative weights below 0 stay in the denominator
    as they are, and an anchor whose denominator falls below 0 is nan; with ``floor=True`` a negative w⁻ is
    0 (the pair is absent). Literal w⁺ below 0 is never floored. ``batch="sum"`` returns the sum over
    anchors in place of the mean: the note's text has neither 1/|P(i)| nor a mean, while ``normalise="sum"``
    as an option of a row leaves the mean over anchors in place (the default here, for the literal preset
    too).
    """
    if preset == "literal":
        pos_form, neg_form, neg_weight, normalise = "literal", "literal", "none", "sum"
    elif preset not in (None, "default"):
        raise ValueError(preset)
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, True)
    per_anchor = []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, None)
        if not positives:
            per_anchor.append(None)
            continue
        pos, neg = [], []
        for p, _ in positives:
            s = dot(anchors[i], refs[p])
            pos.append((s / temperature, positive_weight(s, alpha, positive, pos_form)))
        for n, _ in negatives:
            s = dot(anchors[i], refs[n])
            weight = negative_weight(s, beta, negative, neg_form)
            neg.append((s / temperature, max(weight, 0.0) if floor else weight))
        per_anchor.append(da_supcon_row(pos, neg, neg_weight, normalise))
    if batch == "sum":
        return per_anchor, math.fsum(value for value in per_anchor if value is not None)
    return per_anchor, mean_of_defined(per_anchor)


def author_da_supcon(z, y, temperature=0.07, w_pos=2.0, w_neg=2.0, th_pos=0.1, th_neg=0.7, factor=0.3):
    """Difficulty-aware SupCon as its author coded it: (L⁺ by anchor, L⁻ by anchor, mean L⁺ + factor · mean L⁻).

    Hard pairs weigh w⁺ = 1 + (W⁺-1)(th⁺-s)/th⁺ and w⁻ = 1 + (W⁻-1)(s-th⁻)/(1-th⁻), others 1;
    L⁺_i = -Σ_p w⁺ log p_ip / Σ_p w⁺ with p the softmax over everyone else, mean over anchors with a positive;
    L⁻_i = Σ_n (w⁻)² (s_in - 1)/τ / Σ_n w⁻, mean over anchors with a negative. None where an anchor has no such pair.
    """
    unit = [[x / math.sqrt(math.fsum(v * v for v in row)) for x in row] for row in np.asarray(z, float).tolist()]
    n, labels = len(unit), list(y)
    pull, push = [], []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        s = {j: math.fsum(a * b for a, b in zip(unit[i], unit[j], strict=True)) for j in others}
        log_all = math.log(math.fsum(math.exp((s[j] - 1) / temperature) for j in others)) + 1 / temperature
        top, bottom = [], []
        for p in (j for j in others if labels[j] == labels[i]):
            w = 1 + (w_pos - 1) * (th_pos - s[p]) / th_pos if s[p] < th_pos else 1.0
            top.append(-w * (s[p] / temperature - log_all))
            bottom.append(w)
        pull.append(math.fsum(top) / math.fsum(bottom) if bottom else None)
        top, bottom = [], []
        for k in (j for j in others if labels[j] != labels[i]):
            w = 1 + (w_neg - 1) * (s[k] - th_neg) / (1 - th_neg) if s[k] > th_neg else 1.0
            top.append(w * w * (s[k] - 1) / temperature)
            bottom.append(w)
        push.append(math.fsum(top) / math.fsum(bottom) if bottom else None)
    total = 0.0
    for part, times in ((pull, 1.0), (push, factor)):
        there = [value for value in part if value is not None]
        total += times * math.fsum(there) / len(there) if there else 0.0
    return pull, push, total


# --------------------------------------------------------------------------------------------------- InfoNCE


def info_nce_row(positive, negatives, temperature, prior=0.0, count="weight"):
    """One anchor, one positive s⁺/t, negatives [(s/t, weight), ...]: (value, whether the floor acted)."""
    if not negatives:
        return 0.0, False
    number = math.fsum(weight for _, weight in negatives) if count == "weight" else len(negatives)
    # Everything is divided by e^top, so that no temperature overflows.
    top = max([positive] + [logit for logit, _ in negatives])
    total = math.fsum(weight * math.exp(logit - top) for logit, weight in negatives)
    estimate = (total - prior * number * math.exp(positive - top)) / (1.0 - prior)
    log_estimate = top + math.log(estimate) if estimate > 0 else -math.inf
    log_floor = math.log(number) - 1.0 / temperature if prior > 0 else -math.inf
    # -log(pos/(pos + Ng)) = log(1 + Ng/pos)
    return softplus(max(log_estimate, log_floor) - positive), log_estimate < log_floor


def info_nce(z, y, temperature=0.5, prior=0.0, w=None, ref=None, count="weight", normalise=True):
    """InfoNCE / NT-Xent, debiased by ``prior`` (τ⁺).

    For every positive p of anchor i, alone against the negatives, with pos = e^{s_ip/t}:
    Ng = max( (Σ_j w_ij e^{s_ij/t} - τ⁺ N pos)/(1 - τ⁺), N e^{-1/t} ), ℓ_ip = -log( pos/(pos + Ng) );
    then ℓ_i = Σ_p w_ip ℓ_ip / Σ_p w_ip.

    Decisions: other positives are in neither sum. A positive's weight is its share in the average, not a
    factor of ``pos`` (a positive listed twice is twice alone against the negatives). N: ``count="weight"``
    is the law, N = Σ_j w_ij, so that weight 2 equals listing the negative twice; ``count="plain"`` counts
    every negative of nonzero weight once, as the published estimators do, whose weights are importance
    weights. The two agree for the exponential importance weights (their row mean is 1) and differ for
    relative weights, whose published form needs ``plain``. Without negatives N = 0, Ng = 0 and ℓ = 0
    (defined). With ``prior=0`` there is no floor at all: on the sphere with ``count="weight"`` it could
    never act, but it could for inner products below -1 or for weights below 1 under ``plain``.
    ``normalise=False`` uses inner products of the rows as given (with a prior the floor N e^{-1/t} is then
    kept, though it has no meaning beyond the formula).
    """
    if count not in ("weight", "plain"):
        raise ValueError(count)
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, normalise)
    per_anchor = []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, w)
        if not positives:
            per_anchor.append(None)
            continue
        neg = [(dot(anchors[i], refs[n]) / temperature, weight) for n, weight in negatives]
        values = []
        for p, weight in positives:
            value, _ = info_nce_row(dot(anchors[i], refs[p]) / temperature, neg, temperature, prior, count)
            values.append((value, weight))
        per_anchor.append(weighted_mean(values))
    return per_anchor, mean_of_defined(per_anchor)


def clamp_fraction(z, y, temperature=0.5, prior=0.0, w=None, ref=None, count="weight"):
    """Share of (anchor, positive) pairs that have negatives whose Ng is the floor; None without any."""
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, True)
    clamped = []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, w)
        neg = [(dot(anchors[i], refs[n]) / temperature, weight) for n, weight in negatives]
        for p, _ in positives:
            if neg:
                logit = dot(anchors[i], refs[p]) / temperature
                clamped.append(info_nce_row(logit, neg, temperature, prior, count)[1])
    return sum(clamped) / len(clamped) if clamped else None


# -------------------------------------------------------------------------------------------- weight matrices


def _weights(z, y, ref, rule):
    """(n, m) weights: 0 for the row itself, 1 for positives, ``rule(i, negatives)`` for negatives."""
    n, m = len(z), len(z) if ref is None else len(ref[0])
    labels = [int(label) for label in y]
    ref_labels = labels if ref is None else [int(label) for label in ref[1]]
    w = np.zeros((n, m))
    for i in range(n):
        positives, negatives = sides(i, labels, ref_labels, ref is None, None)
        for p, _ in positives:
            w[i, p] = 1.0
        if negatives:
            for j, weight in rule(i, [j for j, _ in negatives]).items():
                w[i, j] = weight
    return w


def importance_weights(z, y, temperature=0.5, beta=1.0, ref=None):
    """Hard-negative contrastive weights: w_ij = e^{β s_ij/t} / mean over N(i) of e^{β s_ij/t}.

    Decisions: positives have weight 1 (their self-normalised importance cancels), the row itself 0.
    """
    anchors, _, refs, _, _ = setting(z, y, ref, True)

    def rule(i, negatives):
        logits = {j: beta * dot(anchors[i], refs[j]) / temperature for j in negatives}
        log_mean = log_sum([(logit, 1.0) for logit in logits.values()]) - math.log(len(negatives))
        return {j: math.exp(logit - log_mean) for j, logit in logits.items()}

    return _weights(z, y, ref, rule)


def relative_weights(z, z_biased, y, temperature=0.5, form="similarity", epsilon=0.0, ref=None, ref_biased=None):
    """Relative-difficulty weights of negatives: w_ij = 1 + a_ij/(b_ij + a_ij + ε).

    a is taken from ``z``, b from ``z_biased``. similarity: a, b = e^{s/t} divided by the row's Euclidean
    norm over N(i); raw: a, b = e^{s/t} as they are; distance: a, b = squared distances divided by the row's
    Euclidean norm over N(i).

    Decisions: the published code has ε = 1e-6; the default here is 0, the stable equivalent. 0/0 (only in
    ``distance``, coincident points, ε = 0) is read as 0, which is what the published ε gives: w = 1. Both
    embeddings are normalised. Positives have weight 1, the row itself 0. With ``ref``, ``ref_biased`` (m
    rows) is what the second encoder made of the reference set. Exponentials are taken in decimal
    arithmetic, so the formula is literal at any temperature.
    """
    anchors, _, refs, _, _ = setting(z, y, ref, True)
    biased = unit(z_biased)
    biased_refs = biased if ref is None else unit(ref_biased)

    def values(rows, others, i, negatives):
        if form == "distance":
            row = {j: Decimal(squared_distance(rows[i], others[j])) for j in negatives}
        elif form in ("similarity", "raw"):
            row = {j: Decimal(dot(rows[i], others[j]) / temperature).exp() for j in negatives}
        else:
            raise ValueError(form)
        if form == "raw":
            return row
        norm = sum((value * value for value in row.values()), Decimal(0)).sqrt()
        return {j: value / norm if norm > 0 else value for j, value in row.items()}

    def rule(i, negatives):
        ours, theirs = values(anchors, refs, i, negatives), values(biased, biased_refs, i, negatives)
        weights = {}
        for j in negatives:
            below = theirs[j] + ours[j] + Decimal(epsilon)
            weights[j] = 1.0 + (float(ours[j] / below) if below > 0 else 0.0)
        return weights

    return _weights(z, y, ref, rule)


def threshold_weights(z, y, alpha=1.0, beta=2.0, positive=0.7, negative=0.3, form="hinge", ref=None):
    """w⁺ of the positives and w⁻ of the negatives; 0 for the row itself.

    ``form`` is hinge or literal, for both sides. Decision: literal weights are returned as they come, below
    0 too; the law says nothing about those.
    """
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, True)
    w = np.zeros((len(anchors), len(refs)))
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, None)
        for p, _ in positives:
            w[i, p] = positive_weight(dot(anchors[i], refs[p]), alpha, positive, form)
        for n, _ in negatives:
            w[i, n] = negative_weight(dot(anchors[i], refs[n]), beta, negative, form)
    return w


# ---------------------------------------------------------------------------------------------- self-triplet


def self_triplet(z, y, prior=0.0, form="sum_N", w=None, ref=None, pick=None):
    """The bias-amplifying triplet: squared distances on the sphere, no hinge, no margin.

    sum_N:   d²₊ - (Σ_j d²_j - τ⁺ N d²₊)/(1 - τ⁺)
    mean:    d²₊ - (mean_j d²_j - τ⁺ d²₊)/(1 - τ⁺)
    readme:  d²₊ - (Σ_j d²_j - τ⁺ d²₊)/(1 - τ⁺)
    one_neg: any of these with the one negative drawn (N = 1)
    paired:  Σ_j (d²₊ - d²_j), the README's other sum, defined without a prior only.
    ``prior=0`` is the non-debiased loss: d²₊ - Σ_j d²_j for sum_N and readme.

    Decisions: several positives are each taken alone against the negatives and averaged. Weights: Σ_j w
    d²_j, N = Σ_j w, the average over positives weighted. An anchor without negatives has only the positive
    part, d²₊ (``paired``: an empty sum, 0); the prior's correction belongs to the negatives and is absent
    with them. ``one_neg`` takes its draw from ``pick``: ``pick[i]`` or ``pick[(i, p)]`` is the index of the
    negative; its expectation over a uniform draw is ``mean``. Weights of negatives are not defined for
    ``one_neg`` (w is refused), nor a prior for ``paired``.
    """
    if form == "paired" and prior != 0:
        raise ValueError("paired has no debiased form")
    if form == "one_neg" and w is not None:
        raise ValueError("one_neg takes no weights")
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, True)
    per_anchor = []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, w)
        if not positives:
            per_anchor.append(None)
            continue
        number = math.fsum(weight for _, weight in negatives)
        total = math.fsum(weight * squared_distance(anchors[i], refs[n]) for n, weight in negatives)
        values = []
        for p, weight in positives:
            near = squared_distance(anchors[i], refs[p])
            if form == "paired":
                value = number * near - total
            elif not negatives:
                value = near
            elif form == "sum_N":
                value = near - (total - prior * number * near) / (1.0 - prior)
            elif form == "mean":
                value = near - (total / number - prior * near) / (1.0 - prior)
            elif form == "readme":
                value = near - (total - prior * near) / (1.0 - prior)
            elif form == "one_neg":
                far = squared_distance(anchors[i], refs[choose(pick, i, p)])
                value = near - (far - prior * near) / (1.0 - prior)
            else:
                raise ValueError(form)
            values.append((value, weight))
        per_anchor.append(weighted_mean(values))
    return per_anchor, mean_of_defined(per_anchor)


# ----------------------------------------------------------------------------------------------- contrastive


def contrastive_term(d, positive_pair, positive_margin, negative_margin, form):
    """The value of one pair at distance d."""
    if form == "squared":  # y d² + (1-y) [m² - d²]₊
        if positive_margin < 0:
            raise ValueError("the squared form squares its positive margin, which must be >= 0")
        if positive_pair:
            return max(d * d - positive_margin**2, 0.0)
        return max(negative_margin**2 - d * d, 0.0)
    gap = max(d - positive_margin, 0.0) if positive_pair else max(negative_margin - d, 0.0)
    if form == "hadsell":  # y d² + (1-y) [m - d]₊²
        return gap * gap
    if form == "linear":  # [d - m_pos]₊ + [m_neg - d]₊
        return gap
    raise ValueError(form)


def contrastive(
    z,
    y,
    positive_margin=0.0,
    negative_margin=1.0,
    form="squared",
    w=None,
    normalise=True,
    ref=None,
    need_positive=False,
):
    """Contrastive loss of pairs at Euclidean distance d: returns (per_anchor, mean, details).

    squared: [d² - m_pos²]₊ and [m_neg² - d²]₊; hadsell: [d - m_pos]₊² and [m_neg - d]₊²; linear: [d -
    m_pos]₊ and [m_neg - d]₊; no factor ½. ℓ_i = Σ_P w t / Σ_P w + Σ_N w t / Σ_N w, an absent side adding 0.

    ``details``: ``terms`` {(i, j): unweighted value} for ordered pairs of weight != 0, and for ``positive``
    and ``negative`` each a dict with ``total`` (Σ w t), ``count`` (Σ w), ``active`` (Σ w where t > 0), over
    all ordered pairs: the average over all pairs is total/count per side, over the nonzero ones (as in
    pytorch-metric-learning) total/active.

    Decisions: the positive margin of the two squared forms is ours (at 0 they are the published ones). An
    anchor with one side is defined; with ``need_positive=True`` an anchor without positives is undefined,
    as for the other losses.
    """
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, normalise)
    details = {"terms": {}}
    for name in ("positive", "negative"):
        details[name] = {"total": 0.0, "count": 0.0, "active": 0.0}
    per_anchor = []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, w)
        value = 0.0
        for name, listed in (("positive", positives), ("negative", negatives)):
            terms = []
            for j, weight in listed:
                d = distance(anchors[i], refs[j])
                term = contrastive_term(d, name == "positive", positive_margin, negative_margin, form)
                details["terms"][(i, j)] = term
                details[name]["total"] += weight * term
                details[name]["count"] += weight
                details[name]["active"] += weight if term > 0 else 0.0
                terms.append((term, weight))
            if terms:
                value += weighted_mean(terms)
        undefined = not positives if need_positive else not (positives or negatives)
        per_anchor.append(None if undefined else value)
    return per_anchor, mean_of_defined(per_anchor), details


# --------------------------------------------------------------------------------------------------- triplet


def mined(near, far, margin, mining):
    """Triplets of one anchor as [(p, n), ...] from distances ``near`` {p: d_ap} and ``far`` {n: d_an}."""
    if not near or not far:
        return []
    if mining == "all":
        return [(p, n) for p in near for n in far]
    if mining == "hardest":
        return [(max(near, key=near.get), min(far, key=far.get))]
    if mining == "semihard_tf":
        triplets = []
        for p in near:
            farther = [n for n in far if far[n] > near[p]]
            triplets.append((p, min(farther, key=far.get) if farther else max(far, key=far.get)))
        return triplets
    if mining == "semihard_set":
        return [(p, n) for p in near for n in far if 0 < far[n] - near[p] <= margin]
    raise ValueError(mining)


def triplet(
    z,
    y,
    margin=0.2,
    squared=False,
    soft=False,
    mining="all",
    normalise=True,
    w=None,
    average="active",
    ref=None,
    pick=None,
):
    """Triplet loss [d_ap - d_an + m]₊: returns (per_anchor, mean, details).

    d is the Euclidean distance or its square. soft: softplus(d_ap - d_an + m). mining: ``all`` triplets;
    ``hardest`` (largest d_ap, smallest d_an of the anchor); ``semihard_tf`` (per positive the closest
    negative with d_an > d_ap, else the farthest negative); ``semihard_set`` (all triplets with 0 < d_an -
    d_ap <= m); ``random`` (per positive the negative ``pick[(i, p)]`` or ``pick[i]``).

    ``details``: ``terms`` {(i, p, n): value}, ``weights`` {(i, p, n): weight}, and the averages over the
    whole batch's triplets, ``pooled_all`` and ``pooled_active`` (0 without any).

    Decisions: a triplet weighs w_ip · w_in in ``all`` and ``semihard_set``, w_ip where one negative is
    chosen per positive, 1 in ``hardest`` (listing a pair twice gives that many triplets more, or none). ℓ_i
    is the mean over the anchor's own mined triplets, over the active ones (value > 0; 0 when none is) with
    ``average="active"``, over all of them with ``"all"``; the mean is then over anchors, those at 0
    included. The pooled averages are the other reading of "mean over active triplets". ``soft`` keeps the
    margin inside; margin = 0 is the published soft form, in which every triplet is active. An anchor with
    positives and without negatives, or from which mining leaves no triplet, is 0 and defined (a minimum
    over nothing is +inf). Mining compares the distance in use (squared or not: this matters to
    semihard_set), sees only pairs of weight != 0, and of tied candidates takes the first (the value does
    not depend on it).
    """
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, normalise)
    measure = squared_distance if squared else distance
    terms, weights, per_anchor = {}, {}, []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, w)
        if not positives:
            per_anchor.append(None)
            continue
        near = {p: measure(anchors[i], refs[p]) for p, _ in positives}
        far = {n: measure(anchors[i], refs[n]) for n, _ in negatives}
        if mining == "random":
            triplets = [(p, choose(pick, i, p)) for p in near] if far else []
        else:
            triplets = mined(near, far, margin, mining)
        own = []
        for p, n in triplets:
            gap = near[p] - far[n] + margin  # a drawn n that is not a negative of the anchor is a KeyError
            value = softplus(gap) if soft else max(gap, 0.0)
            weight = 1.0 if mining == "hardest" else dict(positives)[p]
            if mining in ("all", "semihard_set"):
                weight *= dict(negatives)[n]
            terms[(i, p, n)], weights[(i, p, n)] = value, weight
            own.append((value, weight))
        per_anchor.append(average_of(own, average))
    everything = [(terms[key], weights[key]) for key in terms]
    details = {"terms": terms, "weights": weights}
    details["pooled_all"] = average_of(everything, "all")
    details["pooled_active"] = average_of(everything, "active")
    return per_anchor, mean_of_defined(per_anchor), details


def average_of(pairs, average):
    """Weighted mean of [(value, weight), ...], over all or over the values > 0; 0 without any."""
    if average not in ("active", "all"):
        raise ValueError(average)
    chosen = [(value, weight) for value, weight in pairs if average == "all" or value > 0]
    return weighted_mean(chosen) if chosen else 0.0


# ----------------------------------------------------------------------------------- N-pair, lifted structure


def npair(z, y, norm_weight=0.0, w=None, normalise=False):
    """N-pair: (1/n) Σ_i log(1 + Σ_{j≠i} e^{a_i·p_j - a_i·p_i}) + ρ/4 (mean |a|² + mean |p|²).

    ρ is ``norm_weight``. The anchor is the first row of each class, the positive the second; exactly
    two rows a class. ``per_anchor`` has one entry per row of ``z``: None for the positives. Decisions: the
    norm term is given to its own anchor, ρ/4 (|a_i|² + |p_i|²), which makes the mean over anchors the
    published value. Not normalised by default. ``w`` is (n, n) over rows of ``z``: w[a_i, p_j] multiplies
    e^{a_i·p_j - a_i·p_i}; the pair's own weight cancels (one positive averaged with itself), except that 0
    makes the anchor undefined. The norm term is not weighted.
    """
    rows = unit(z) if normalise else raw(z)
    labels = [int(label) for label in y]
    classes = {}
    for i, label in enumerate(labels):
        classes.setdefault(label, []).append(i)
    if any(len(members) != 2 for members in classes.values()):
        raise ValueError("N-pair needs exactly two rows per class")
    per_anchor = [None] * len(rows)
    for a, p in classes.values():
        if w is not None and w[a][p] == 0:
            continue
        own = dot(rows[a], rows[p])
        terms = [(0.0, 1.0)]
        for other_anchor, other in classes.values():
            if other_anchor != a:
                terms.append((dot(rows[a], rows[other]) - own, 1.0 if w is None else float(w[a][other])))
        norms = dot(rows[a], rows[a]) + dot(rows[p], rows[p])
        per_anchor[a] = log_sum(terms) + norm_weight / 4.0 * norms
    return per_anchor, mean_of_defined(per_anchor)


def lifted(z, y, margin=1.0, normalise=False, w=None):
    """Lifted structure: returns (per_anchor, mean, details).

    J_ij = D_ij + log( Σ_{k in N(i)} w_ik e^{m - D_ik} + Σ_{l in N(j)} w_jl e^{m - D_jl} ), D Euclidean (not
    squared), L = (1/2|P|) Σ_{(i,j) in P} [J_ij]₊².

    ``details``: ``terms`` {(i, j): J_ij} over ordered positive pairs and ``loss``, the published L, the
    mean over all positive pairs. Decisions: pairs are ordered (J is symmetric, so L is the same as over
    unordered ones; with weights that differ between (i, j) and (j, i) the ordered reading is meant). ℓ_i =
    Σ_{j in P(i)} w_ij [J_ij]₊² / (2 Σ_j w_ij); its mean over anchors is L when all classes have one size
    (and w = 1), and is the per-anchor reading otherwise. A pair without any negative has J = -inf and adds
    0. Not normalised by default.
    """
    rows = unit(z) if normalise else raw(z)
    labels = [int(label) for label in y]
    terms, everything, per_anchor = {}, [], []
    for i in range(len(rows)):
        positives, negatives = sides(i, labels, labels, True, w)
        own = []
        for j, weight in positives:
            around = [(margin - distance(rows[i], rows[k]), wk) for k, wk in negatives]
            others = sides(j, labels, labels, True, w)[1]
            around += [(margin - distance(rows[j], rows[k]), wk) for k, wk in others]
            terms[(i, j)] = distance(rows[i], rows[j]) + log_sum(around)
            own.append((max(terms[(i, j)], 0.0) ** 2 / 2.0, weight))
        everything += own
        per_anchor.append(weighted_mean(own) if own else None)
    loss = weighted_mean(everything) if everything else None
    return per_anchor, mean_of_defined(per_anchor), {"terms": terms, "loss": loss}


# --------------------------------------------------------------- multi-similarity, circle, margin, smooth-AP


def multi_similarity(z, y, alpha=2.0, beta=50.0, base=0.5, w=None, ref=None):
    """(1/α) log(1 + Σ_p w e^{-α(s - λ)}) + (1/β) log(1 + Σ_n w e^{β(s - λ)})."""
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, True)
    per_anchor = []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, w)
        if not positives:
            per_anchor.append(None)
            continue
        near = [(0.0, 1.0)] + [(-alpha * (dot(anchors[i], refs[p]) - base), weight) for p, weight in positives]
        far = [(0.0, 1.0)] + [(beta * (dot(anchors[i], refs[n]) - base), weight) for n, weight in negatives]
        per_anchor.append(log_sum(near) / alpha + log_sum(far) / beta)
    return per_anchor, mean_of_defined(per_anchor)


def circle(z, y, m=0.4, gamma=80.0, w=None, ref=None, frozen=None):
    """log(1 + Σ_n e^{γ a_n (s_n - m)} Σ_p e^{-γ a_p (s_p - 1 + m)}), a_p = [1 + m - s_p]₊, a_n = [s_n + m]₊.

    ``frozen``: the embeddings that a is taken from, where it is constant. An anchor without negatives is 0.
    """
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, True)
    fixed = refs if frozen is None else unit(frozen)
    fixed_anchors = anchors if frozen is None else fixed
    per_anchor = []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, w)
        if not positives:
            per_anchor.append(None)
            continue
        near, far = [], []
        for p, weight in positives:
            a = max(1 + m - dot(fixed_anchors[i], fixed[p]), 0.0)
            near.append((-gamma * a * (dot(anchors[i], refs[p]) - 1 + m), weight))
        for n, weight in negatives:
            a = max(dot(fixed_anchors[i], fixed[n]) + m, 0.0)
            far.append((gamma * a * (dot(anchors[i], refs[n]) - m), weight))
        per_anchor.append(softplus(log_sum(near) + log_sum(far)) if far else 0.0)
    return per_anchor, mean_of_defined(per_anchor)


def margin(z, y, m=0.2, beta=1.2, nu=0.0, normalise=True, w=None, ref=None):
    """Every triplet of an anchor adds [d_p - β + m]₊ + [β - d_n + m]₊; divided by how many of both terms are above 0.

    ``beta`` is a number, or a list with the boundary of every class; ``nu`` times that of the anchor is added. The
    mean over anchors is weighed by the number of active terms: that of all triplets together.
    """
    anchors, labels, refs, ref_labels, same = setting(z, y, ref, normalise)
    per_anchor, totals, counts = [], [], []
    for i in range(len(anchors)):
        b = float(beta) if np.isscalar(beta) else float(beta[labels[i]])
        positives, negatives = sides(i, labels, ref_labels, same, w)
        total = count = 0.0
        for p, wp in positives:
            for n, wn in negatives:
                pull = max(distance(anchors[i], refs[p]) - b + m, 0.0)
                push = max(b - distance(anchors[i], refs[n]) + m, 0.0)
                total += wp * wn * (pull + push)
                count += wp * wn * ((pull > 0) + (push > 0))
        per_anchor.append((total / count if count else 0.0) + nu * b if positives else None)
        if positives:
            totals.append(total + nu * b * count)
            counts.append(count)
    if not math.fsum(counts):  # nothing is active: a plain mean
        return per_anchor, mean_of_defined(per_anchor)
    return per_anchor, math.fsum(totals) / math.fsum(counts)


def smooth_ap(z, y, temperature=0.01, w=None, ref=None):
    """1 - mean over positives p of R(p, P) / R(p, P ∪ N), R(p, S) = 1 + Σ_{j in S, j≠p} σ((s_j - s_p)/t).

    Decision: a positive of weight w is w positives at one place, each of which stands half before every other one.
    """

    def before(a, b):
        x = (a - b) / temperature
        return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))

    anchors, labels, refs, ref_labels, same = setting(z, y, ref, True)
    per_anchor = []
    for i in range(len(anchors)):
        positives, negatives = sides(i, labels, ref_labels, same, w)
        if not positives:
            per_anchor.append(None)
            continue
        s = {j: dot(anchors[i], refs[j]) for j, _ in positives + negatives}
        precisions = []
        for p, wp in positives:
            rank = 1.0 + (wp - 1) * 0.5 + math.fsum(wq * before(s[q], s[p]) for q, wq in positives if q != p)
            precisions.append((rank / (rank + math.fsum(wn * before(s[n], s[p]) for n, wn in negatives)), wp))
        per_anchor.append(1 - weighted_mean(precisions))
    return per_anchor, mean_of_defined(per_anchor)
