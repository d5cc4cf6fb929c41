"""Slow, obvious class-vector losses: the papers' sums as plain loops, for comparison in tests.

Nothing is imported from mettle, nothing is vectorised, nothing is fast; n <= 24 and C <= 50 are meant. What
all functions share:

* ``z`` is a float64 array (n, d) of embeddings as the network gives them (never normalised beforehand), ``y``
  n integer labels in 0..C-1, ``W`` a float64 array (C, d) of class vectors of any length. The answer is the
  array (n,) of per-sample losses; the loss of a batch is its mean.
* θ_ij is the angle between z_i and W_j, taken from coordinate differences (2 atan2(|u - v|, |u + v|) of the
  unit vectors), which is arccos of the cosine but keeps all its digits near 0 and π. An implementation that
  starts from a rounded cosine c is off by up to √(2·1e-16) = 1.5e-8 in θ there: at cosines of exactly ±1
  compare ArcFace to about scale · 1e-7 in float64, everywhere else to 1e-10.
* A zero vector stays zero when normalised: its cosine with everything is 0, its angle π/2.
* Every loss is ``cross_entropy`` of ``<name>_logits(z, y, W, ...)``, whose entry (i, j) is the logit of class j
  for sample i, the margin already applied at j = y_i. ``w`` of ``cross_entropy`` is an (n, C) matrix of
  weights with the law of pairs: 0 = the class is absent, 1 = nothing changes, 2 = as if listed twice.
* NaN input is not defended against; a label without a row in ``W`` is a ValueError.
"""

import itertools
import math

import numpy as np

# ---------------------------------------------------------------------------------------------- small things


def rows_of(x):
    """Rows as lists of Python floats."""
    return [[float(value) for value in row] for row in np.asarray(x, dtype=np.float64)]


def dot(a, b):
    """Inner product."""
    return math.fsum(p * q for p, q in zip(a, b, strict=True))


def length(a):
    """Euclidean length."""
    return math.sqrt(math.fsum(p * p for p in a))


def unit(a):
    """The vector divided by its length; zero stays zero."""
    size = length(a)
    return [p / size for p in a] if size > 0 else [0.0 for _ in a]


def angle(a, b):
    """Angle in [0, π] between two vectors; π/2 when one of them is zero."""
    u, v = unit(a), unit(b)
    if not any(u) or not any(v):
        return math.pi / 2
    apart = length([p - q for p, q in zip(u, v, strict=True)])
    along = length([p + q for p, q in zip(u, v, strict=True)])
    return 2.0 * math.atan2(apart, along)


def cosines(z, W):
    """(n, C) array of cos θ_ij: what a loss on the sphere predicts with."""
    return np.array([[dot(unit(a), unit(b)) for b in rows_of(W)] for a in rows_of(z)])


def checked(y, classes):
    """Labels as Python ints, each in 0..classes-1."""
    labels = [int(label) for label in y]
    for label in labels:
        if not 0 <= label < classes:
            raise ValueError(f"label {label} is not in 0..{classes - 1}")
    return labels


def log_sum(terms):
    """log of Σ w e^l over ``terms`` = [(l, w), ...]; -inf for an empty sum."""
    terms = [(logit, weight) for logit, weight in terms if weight != 0]
    if not terms:
        return -math.inf
    top = max(logit for logit, _ in terms)
    return top + math.log(math.fsum(weight * math.exp(logit - top) for logit, weight in terms))


def cross_entropy(logits, y, w=None):
    """ℓ_i = -log( e^{l_iy} / Σ_j w_ij e^{l_ij} ), per sample; nan where the target class itself is absent.

    Decision: the weight of the target is a multiplicity as well (listed twice, it stands twice in the
    denominator, and the average over its two copies of the same numerator changes nothing).
    """
    logits = rows_of(logits)
    losses = []
    for i, row in enumerate(logits):
        target = checked([y[i]], len(row))[0]
        weights = [1.0 if w is None else float(w[i][j]) for j in range(len(row))]
        if weights[target] == 0:
            losses.append(math.nan)
        else:
            losses.append(log_sum(list(zip(row, weights, strict=True))) - row[target])
    return np.array(losses, dtype=np.float64)


def smoothed_cross_entropy(logits, y, share):
    """-Σ_j q_ij log p_ij per sample, p the softmax of the logits, q = share / C and 1 - share more at y_i."""
    losses = []
    for i, row in enumerate(rows_of(logits)):
        total, target = log_sum([(logit, 1.0) for logit in row]), checked([y[i]], len(row))[0]
        wanted = [share / len(row) + (1 - share if j == target else 0.0) for j in range(len(row))]
        losses.append(-math.fsum(q * (logit - total) for q, logit in zip(wanted, row, strict=True)))
    return np.array(losses, dtype=np.float64)


def on_sphere(z, y, W, scale, target):
    """Logits s cos θ_ij with s target(θ_iy) in place of the own class's; ``scale=None`` means s = ‖z_i‖."""
    vectors = rows_of(W)
    labels = checked(y, len(vectors))
    logits = []
    for i, row in enumerate(rows_of(z)):
        size = length(row) if scale is None else float(scale)
        own = []
        for j, vector in enumerate(vectors):
            theta = angle(row, vector)
            own.append(size * (target(theta) if j == labels[i] else math.cos(theta)))
        logits.append(own)
    return np.array(logits, dtype=np.float64)


def numeric_gradient(f, x, step=3e-5):
    """∂f/∂x of a scalar function of an array, entry by entry: four-point central differences.

    (8 (f(x+h) - f(x-h)) - (f(x+2h) - f(x-2h))) / 12h: error about h⁴, and about 1e-12 · |f| / h of rounding.
    Meaningless within 2h of a kink or jump of f (branches of margins): choose points away from them.
    """
    x = np.array(x, dtype=np.float64)
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        values = []
        for k in (1, -1, 2, -2):
            moved = x.copy()
            moved[index] += k * step
            values.append(float(f(moved)))
        gradient[index] = (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)
    return gradient


# ---------------------------------------------------------------------------------- softmax, NormFace, center


def softmax_logits(z, W, b=None, unit_weights=False):
    """z_i·W_j + b_j; with ``unit_weights`` (the modified softmax) W_j/‖W_j‖ in place of W_j: ‖z_i‖ cos θ_ij."""
    vectors = [unit(row) if unit_weights else row for row in rows_of(W)]
    bias = [0.0] * len(vectors) if b is None else [float(value) for value in b]
    rows = rows_of(z)
    return np.array([[dot(row, v) + c for v, c in zip(vectors, bias, strict=True)] for row in rows])


def softmax(z, y, W, b=None, unit_weights=False, w=None):
    """Cross-entropy of a linear classifier, plain or with class vectors on the unit sphere."""
    return cross_entropy(softmax_logits(z, W, b, unit_weights), y, w)


def normface(z, y, W, scale, w=None):
    """Cross-entropy of s cos θ_ij: features and class vectors on the unit sphere."""
    return cross_entropy(on_sphere(z, y, W, scale, math.cos), y, w)


def center_term(z, y, centres):
    """½ ‖x_i - c_{y_i}‖² per sample, without λ (the published term is λ times the mean of these)."""
    centres = rows_of(centres)
    labels = checked(y, len(centres))
    losses = []
    for row, label in zip(rows_of(z), labels, strict=True):
        losses.append(0.5 * math.fsum((p - q) ** 2 for p, q in zip(row, centres[label], strict=True)))
    return np.array(losses, dtype=np.float64)


def center(z, y, centres, weight, inner):
    """ℓ_i + λ ½ ‖x_i - c_{y_i}‖², with ``inner`` the array of ℓ_i and ``weight`` = λ."""
    return np.array([a + weight * b for a, b in zip(inner, center_term(z, y, centres), strict=True)])


def center_update(centres, z, y, rate):
    """c_j - α Σ_{i: y_i=j}(c_j - x_i) / (1 + n_j) for every class; a class not in the batch stays.

    Decision: the batch is seen as a whole (all classes from the centres before the update), neither λ nor the
    batch size enters. α=1 is the running mean of one old centre and n_j rows, α=0 keeps the centres.
    """
    centres, rows = rows_of(centres), rows_of(z)
    labels = checked(y, len(centres))
    updated = []
    for j, centre in enumerate(centres):
        members = [row for row, label in zip(rows, labels, strict=True) if label == j]
        change = []
        for k in range(len(centre)):
            change.append(math.fsum(centre[k] - row[k] for row in members) / (1 + len(members)))
        updated.append([c - rate * d for c, d in zip(centre, change, strict=True)])
    return np.array(updated, dtype=np.float64)


# ------------------------------------------------------------------------------------------------- SphereFace


def psi(theta, m):
    """ψ(θ) = (-1)^k cos(mθ) - 2k on kπ/m <= θ <= (k+1)π/m, k = 0..m-1."""
    if int(m) != m or m < 1:
        raise ValueError(f"m is {m}: a positive whole number is meant")
    for k in range(int(m)):
        if theta <= (k + 1) * math.pi / m or k == m - 1:
            return (-1) ** k * math.cos(m * theta) - 2 * k
    raise ValueError(theta)


def sphereface_target(theta, m, lam):
    """(λ cos θ + ψ(θ)) / (1 + λ): what ‖z‖ is multiplied with at the own class; λ = inf is cos θ."""
    if math.isinf(lam):
        return math.cos(theta)
    return (lam * math.cos(theta) + psi(theta, m)) / (1.0 + lam)


def sphereface_lambda(step, start=1000.0, gamma=0.12, floor=5.0):
    """The published annealing λ_t = max(floor, start / (1 + γ t)), t = 0, 1, 2, ..."""
    return max(floor, start / (1.0 + gamma * step))


def sphereface_logits(z, y, W, m, lam):
    """‖z‖ cos θ_j, at the own class ‖z‖ (λ cos θ + ψ(θ)) / (1 + λ); class vectors unit, no bias."""
    return on_sphere(z, y, W, None, lambda theta: sphereface_target(theta, m, lam))


def sphereface(z, y, W, m, lam=0.0, w=None):
    """A-Softmax: cross-entropy of ``sphereface_logits``."""
    return cross_entropy(sphereface_logits(z, y, W, m, lam), y, w)


# ---------------------------------------------------------------------------------- CosFace, ArcFace, combined


def cosface_logits(z, y, W, scale, margin):
    """s cos θ_j, at the own class s (cos θ - m)."""
    return on_sphere(z, y, W, scale, lambda theta: math.cos(theta) - margin)


def cosface(z, y, W, scale, margin, w=None):
    """Additive cosine margin: cross-entropy of ``cosface_logits``."""
    return cross_entropy(cosface_logits(z, y, W, scale, margin), y, w)


def arcface_target(theta, margin, mode="keep"):
    """What s is multiplied with at the own class.

    ==========  =====================================================================================
    none        cos(θ+m)
    keep        cos(θ+m), but cos θ - m sin m when cos θ <= cos(π-m)
    easy        cos(θ+m), but cos θ when cos θ <= 0
    smooth      cos(θ+m), but -2 - cos(θ+m) when θ+m > π
    detach      cos(θ+m): the value of ``none``; only its gradient differs, see ``arcface_detached``
    ==========  =====================================================================================

    Decisions: the reference's table says of detach "value as above", and names as its source the same public
    code (current insightface) as for ``none``: hence the value of ``none``. For detach over another branch,
    give that branch as the mode. 0 <= m <= π is meant.
    """
    shifted = math.cos(theta + margin)
    if mode in ("none", "detach"):
        return shifted
    if mode == "keep":
        beyond = math.cos(theta) <= math.cos(math.pi - margin)
        return math.cos(theta) - margin * math.sin(margin) if beyond else shifted
    if mode == "easy":
        return math.cos(theta) if math.cos(theta) <= 0 else shifted
    if mode == "smooth":
        return -2.0 - shifted if theta + margin > math.pi else shifted
    raise ValueError(mode)


def arcface_logits(z, y, W, scale, margin, mode="keep"):
    """s cos θ_j, at the own class s times ``arcface_target(θ, m, mode)``."""
    return on_sphere(z, y, W, scale, lambda theta: arcface_target(theta, margin, mode))


def arcface(z, y, W, scale, margin, mode="keep", w=None):
    """Additive angular margin: cross-entropy of ``arcface_logits``."""
    return cross_entropy(arcface_logits(z, y, W, scale, margin, mode), y, w)


def arcface_shift(z, y, W, margin, mode="none"):
    """target(θ_iy) - cos θ_iy per sample: the number that the detached mode adds to the target cosine."""
    vectors = rows_of(W)
    shifts = []
    for row, label in zip(rows_of(z), checked(y, len(vectors)), strict=True):
        theta = angle(row, vectors[label])
        shifts.append(arcface_target(theta, margin, mode) - math.cos(theta))
    return np.array(shifts, dtype=np.float64)


def arcface_detached(z, y, W, scale, shift, w=None):
    """ArcFace whose margin is a given number per sample: s (cos θ_y + shift_i) at the own class.

    With ``shift = arcface_shift(z0, y, W0, m)`` held fixed the value at (z0, W0) is ArcFace's, and the
    gradient there (``numeric_gradient``) is the one of the detached mode: through cos θ, with slope 1.
    """
    logits = on_sphere(z, y, W, scale, math.cos)
    for i, label in enumerate(y):
        logits[i][int(label)] += scale * float(shift[i])
    return cross_entropy(logits, y, w)


def combined_logits(z, y, W, scale, m1, m2, m3):
    """s cos θ_j, at the own class s (cos(m₁θ + m₂) - m₃), literally: no branch where m₁θ + m₂ > π."""
    return on_sphere(z, y, W, scale, lambda theta: math.cos(m1 * theta + m2) - m3)


def combined(z, y, W, scale, m1, m2, m3, w=None):
    """Combined margin: cross-entropy of ``combined_logits``."""
    return cross_entropy(combined_logits(z, y, W, scale, m1, m2, m3), y, w)


# ----------------------------------------------------------------------------------------------------- AdaCos


def adacos_fixed_scale(C):
    """√2 ln(C - 1); 0 for two classes, and no scale at all for one."""
    if C < 2:
        raise ValueError(f"{C} classes: the fixed scale needs at least two")
    return math.sqrt(2.0) * math.log(C - 1)


def lower_median(values):
    """The middle value of the sorted list, the smaller of the two middle ones of an even number (torch.median)."""
    return sorted(values)[(len(values) - 1) // 2]


def adacos_scale(z, y, W, scale_before):
    """s_t = ln B_avg / cos(min(π/4, θ_med)), B_avg = (1/n) Σ_i Σ_{k≠y_i} e^{s_{t-1} cos θ_ik}.

    θ_med is the *lower* median of the angles to the own classes. Two classes: whatever the rule gives, which
    may be 0 or negative; no smallest scale here.
    """
    vectors, rows = rows_of(W), rows_of(z)
    labels = checked(y, len(vectors))
    if len(vectors) < 2:
        raise ValueError("one class has no wrong classes: the dynamic scale needs at least two")
    wrong, own = [], []
    for row, label in zip(rows, labels, strict=True):
        for k, vector in enumerate(vectors):
            if k == label:
                own.append(angle(row, vector))
            else:
                wrong.append((scale_before * math.cos(angle(row, vector)), 1.0 / len(rows)))
    return log_sum(wrong) / math.cos(min(math.pi / 4.0, lower_median(own)))


def adacos_step(z, y, W, scale_before):
    """(losses with the new scale, new scale): the scale is renewed first, then used on the same batch."""
    scale = adacos_scale(z, y, W, scale_before)
    return normface(z, y, W, scale), scale


# --------------------------------------------------------------------------------------------- sampled classes


def partial_fc(z, y, W, sampled_classes, inner):
    """``inner(z, labels, rows)`` over the sampled rows of W only, in increasing order, labels remapped.

    No correction for the classes left out. Every label must be among the sampled classes. Example of
    ``inner``: ``lambda z, y, W: cosface(z, y, W, 30.0, 0.35)``. The rows left out do not enter, so the
    numeric gradient of a sum of the losses with respect to W is exactly 0 there.
    """
    chosen = sorted({int(c) for c in sampled_classes})
    checked(chosen, len(W))
    place = {c: k for k, c in enumerate(chosen)}
    missing = [int(label) for label in y if int(label) not in place]
    if missing:
        raise ValueError(f"labels {missing} are not among the sampled classes")
    rows = np.array([np.asarray(W, dtype=np.float64)[c] for c in chosen])
    return inner(z, [place[int(label)] for label in y], rows)


def partial_fc_follows_rule(sampled_classes, y, C, rate):
    """Whether a sample obeys the published rule.

    Sorted, no class twice, all classes of the batch in it, and int(rate · C) of them in all, or as many as
    the batch has if that is more.
    """
    sampled, positives = [int(c) for c in sampled_classes], {int(label) for label in y}
    ordered = all(a < b for a, b in itertools.pairwise(sampled))
    inside = all(0 <= c < C for c in sampled)
    return ordered and inside and positives <= set(sampled) and len(sampled) == max(len(positives), int(rate * C))


# ------------------------------------------------------------------------ several vectors per class, and proxies


def grouped(W, K):
    """The vectors of each class: K rows of W, one class behind the other."""
    rows = rows_of(W)
    return [rows[k : k + K] for k in range(0, len(rows), K)]


def subcenter_arcface(z, y, W, K, scale, margin, mode="keep", w=None):
    """ArcFace at the smallest of the angles to the K vectors of each class."""
    classes = grouped(W, K)
    logits = []
    for row, label in zip(rows_of(z), checked(y, len(classes)), strict=True):
        angles = [min(angle(row, vector) for vector in vectors) for vectors in classes]
        logits.append([scale * math.cos(theta) for theta in angles])
        logits[-1][label] = scale * arcface_target(angles[label], margin, mode)
    return cross_entropy(logits, y, w)


def soft_similarity(row, vectors, gamma):
    """Σ_k softmax_k(s_k / γ) s_k over the cosines to the vectors of a class."""
    s = [dot(unit(row), unit(vector)) for vector in vectors]
    shares = [math.exp((value - max(s)) / gamma) for value in s]
    return math.fsum(a * b for a, b in zip(shares, s, strict=True)) / math.fsum(shares)


def soft_triple(z, y, W, K, scale, margin, gamma, tau, w=None):
    """Cross-entropy of λ S_ij, λ (S_iy - δ) at the own class, plus τ times the distance between vectors of a class.

    The regulariser is Σ_j Σ_{k<l} ‖ŵ_jk - ŵ_jl‖ / (C K (K - 1)): each pair once, divided by how often it could be met.
    """
    classes = grouped(W, K)
    logits = []
    for row, label in zip(rows_of(z), checked(y, len(classes)), strict=True):
        logits.append([scale * soft_similarity(row, vectors, gamma) for vectors in classes])
        logits[-1][label] -= scale * margin
    spread = 0.0
    for vectors in classes:
        for a, b in itertools.combinations([unit(v) for v in vectors], 2):
            spread += length([p - q for p, q in zip(a, b, strict=True)])
    extra = tau * spread / (len(classes) * K * (K - 1)) if K > 1 else 0.0
    return cross_entropy(logits, y, w) + extra


def outliers(z, y, W, K, degrees):
    """Whether a sample is farther than so many degrees from the vector nearest to most samples of its class."""
    classes, rows = grouped(W, K), rows_of(z)
    labels = checked(y, len(classes))
    found = []
    for row, label in zip(rows, labels, strict=True):
        votes = [0] * K
        for other, its in zip(rows, labels, strict=True):
            if its == label:
                angles = [angle(other, vector) for vector in classes[label]]
                votes[angles.index(min(angles))] += 1
        dominant = classes[label][votes.index(max(votes))]
        found.append(math.degrees(angle(row, dominant)) > degrees)
    return np.array(found)


def proxy_nca(z, y, W, scale, include_own=True):
    """-log( e^{-s d_y} / Σ_j e^{-s d_j} ), d the squared distance of unit vectors; the sum with or without the own."""
    vectors = [unit(row) for row in rows_of(W)]
    losses = []
    for row, label in zip(rows_of(z), checked(y, len(vectors)), strict=True):
        x = [-scale * math.fsum((p - q) ** 2 for p, q in zip(unit(row), v, strict=True)) for v in vectors]
        losses.append(log_sum([(v, 1.0) for j, v in enumerate(x) if include_own or j != label]) - x[label])
    return np.array(losses)


def proxy_anchor(z, y, W, margin, alpha, w=None):
    """One value per class, (C,), whose mean is the loss; ``w`` is (C, n), the weights of class vectors and samples."""
    vectors, rows = rows_of(W), rows_of(z)
    labels = checked(y, len(vectors))
    near, far = [], []
    for j, vector in enumerate(vectors):
        own, others = [(0.0, 1.0)], [(0.0, 1.0)]
        for i, row in enumerate(rows):
            s, weight = dot(unit(row), unit(vector)), 1.0 if w is None else float(w[j][i])
            if labels[i] == j:
                own.append((-alpha * (s - margin), weight))
            else:
                others.append((alpha * (s + margin), weight))
        near.append(log_sum(own) if any(weight for _, weight in own[1:]) else None)
        far.append(log_sum(others))
    present = sum(value is not None for value in near)
    return np.array([(0.0 if a is None else a * len(near) / present) + b for a, b in zip(near, far, strict=True)])


# -------------------------------------------------------------------------- CurricularFace, AdaFace, MagFace


def curricularface(z, y, W, scale, margin, t, w=None):
    """ArcFace (keep) whose wrong classes beyond cos(θ_y + m) count as cos θ_j (t + cos θ_j)."""
    vectors = rows_of(W)
    logits = []
    for row, label in zip(rows_of(z), checked(y, len(vectors)), strict=True):
        angles = [angle(row, vector) for vector in vectors]
        easy = math.cos(angles[label] + margin)
        own = [math.cos(a) if math.cos(a) <= easy else math.cos(a) * (t + math.cos(a)) for a in angles]
        own[label] = arcface_target(angles[label], margin, "keep")
        logits.append([scale * value for value in own])
    return cross_entropy(logits, y, w)


def curricularface_t(z, y, W, t, momentum):
    """momentum · t + (1 - momentum) · mean cos θ_y."""
    own = [math.cos(angle(row, W[int(label)])) for row, label in zip(rows_of(z), y, strict=True)]
    return momentum * t + (1 - momentum) * math.fsum(own) / len(own)


def adaface_quality(z, mean, deviation, h):
    """clip(h (‖z‖ - μ) / (σ + 0.001), -1, 1), ‖z‖ between 0.001 and 100."""
    sizes = [min(max(length(row), 1e-3), 100.0) for row in rows_of(z)]
    return np.array([min(max(h * (size - mean) / (deviation + 1e-3), -1.0), 1.0) for size in sizes])


def adaface_state(z, mean, deviation, momentum):
    """Both moved towards the mean and the (n - 1) standard deviation of the lengths of a batch."""
    sizes = [min(max(length(row), 1e-3), 100.0) for row in rows_of(z)]
    middle = math.fsum(sizes) / len(sizes)
    spread = math.sqrt(math.fsum((size - middle) ** 2 for size in sizes) / (len(sizes) - 1))
    return momentum * mean + (1 - momentum) * middle, momentum * deviation + (1 - momentum) * spread


def adaface(z, y, W, scale, margin, quality, w=None):
    """s (cos(θ - m q) - m (1 + q)) at the own class, the angle kept in [0, π]; ``quality`` is q, one per sample."""
    vectors = rows_of(W)
    logits = []
    for row, label, q in zip(rows_of(z), checked(y, len(vectors)), quality, strict=True):
        angles = [angle(row, vector) for vector in vectors]
        own = [math.cos(a) for a in angles]
        own[label] = math.cos(min(max(angles[label] - margin * q, 0.0), math.pi)) - margin * (1 + q)
        logits.append([scale * value for value in own])
    return cross_entropy(logits, y, w)


def magface(z, y, W, scale, low, high, shortest, longest, weight_g, w=None):
    """ArcFace (keep) with the margin m(a) of the length a of each sample, plus λ (1/a + a/u_a²)."""
    vectors, logits, extra = rows_of(W), [], []
    for row, label in zip(rows_of(z), checked(y, len(vectors)), strict=True):
        a = min(max(length(row), shortest), longest)
        margin = low + (high - low) * (a - shortest) / (longest - shortest)
        angles = [angle(row, vector) for vector in vectors]
        own = [math.cos(theta) for theta in angles]
        own[label] = arcface_target(angles[label], margin, "keep")
        logits.append([scale * value for value in own])
        extra.append(weight_g * (1 / a + a / longest**2))
    return cross_entropy(logits, y, w) + np.array(extra)
