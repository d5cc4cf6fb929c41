"""The numbers of mettle.evaluate beside those of other libraries and of plain loops, on the same embeddings.

    python benchmarks/agreement.py            prints two tables: scores that all differ, and scores with many ties

scikit-learn comes with mettle, pytorch-metric-learning with its tests, torchmetrics is asked where it is installed; a
row whose library is not installed says so. The exit status is 1 where a number that should be equal is not.

Where scores tie, the order of rows decides in torchmetrics and pytorch-metric-learning. Then the row shows the range of
their numbers over shuffles of the rows; ours, the mean over all orders, must lie inside.
"""

import argparse
import importlib.metadata
import sys
import warnings

import numpy as np
import torch

from mettle import evaluate
from mettle.evaluate.scoring.cosine import ExactUnitVectors

CLOSE = 1e-5  # torchmetrics computes in float32
SHUFFLES = 20
K = 5
FAR = 0.05
ORDER = "the order of rows decides on ties"
DIFFERS = {  # definitions that are not ours, by library and number, and why
    ("torchmetrics", "EER"): "takes the operating point where the rates are closest; ours is where the path meets",
    ("scikit-learn", f"kNN, k = {K}"): "equal votes go to the first label; ours share the credit",
}
ON_TIES = {  # the same where scores tie
    ("scikit-learn", "MAP"): "one step for a group of equal scores; ours is the mean over its orders",
    ("scikit-learn", "kNN, k = 1"): "the first of equally near neighbours votes; ours share the vote",
}
BY_PLACE = ("NMI", "AMI", "5-way 1-shot")  # k-means starts and episodes are drawn by position: rows are not shuffled


def make_people(ties, seed=0, n=120, classes=12, d=6):
    """Labelled embeddings; with ties they are corners of a cube, so that most scores occur many times."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % classes)
    x = rng.normal(size=(classes, d))[y] + 0.9 * rng.normal(size=(n, d))
    return (np.sign(x), y) if ties else (x, y)


def scores_of(x):
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return np.round(unit @ unit.T, 12)


def lists_of(x, y):
    """Targets and scores of every query against all others."""
    s, others = scores_of(x), ~np.eye(len(y), dtype=bool)
    return [((y[row] == y[q]).astype(int), s[q, row]) for q, row in enumerate(others)]


def ours(x, y):
    """Every number of ours, by name."""
    v, r = evaluate.verification(x, y), evaluate.retrieval(x, y, k=(1, K))
    half = np.arange(len(y)) < len(y) // 2
    p = evaluate.probe((x[half], y[half]), (x[~half], y[~half]), k=K)
    sets = shared_labels(y)
    return {
        "AUC": v.auc,
        "EER": v.eer,
        f"TAR at FAR {FAR}": v.tar(FAR),
        "Recall@1": r.recall[1],
        f"hit rate@{K}": r.recall[K],
        f"precision@{K}": r.precision[K],
        "R-precision": r.r_precision,
        "MAP@R": r.map_at_r,
        "MAP": r.map,
        "MRR": r.mrr,
        "nDCG": r.ndcg,
        f"nDCG@{K}": r.value(f"ndcg@{K}"),
        "Recall@1, macro": r.value("recall@1", average="macro"),
        "MAP@R, macro": r.value("map_at_r", average="macro"),
        "MAP, several labels": evaluate.retrieval(x, sets, k=1).map,
        "MAP, L2": evaluate.retrieval(x, y, k=1, similarity="l2").map,
        "MAP, L1": evaluate.retrieval(x, y, k=1, similarity="l1").map,
        "MAP, dot": evaluate.retrieval(x, y, k=1, similarity="dot").map,
        "NMI": evaluate.clustering(x, y, seeds=1).nmi,
        "AMI": evaluate.clustering(x, y, seeds=1).ami,
        "F1 of pairs": evaluate.clustering(x, y, seeds=1).f1,
        "kNN, k = 1": evaluate.knn_accuracy((x[half], y[half]), (x[~half], y[~half])).accuracy,
        f"kNN, k = {K}": p.uniform.accuracy,
        "linear probe": p.linear.accuracy,
        "5-way 1-shot": evaluate.few_shot(x, y, queries=4, episodes=50).accuracy,
        "mAP, rule of Market-1501": market(x, y).map,
        "mAP, trapezoids": market(x, y).value("map_trapezoid"),
        "rank-1, rule of Market-1501": market(x, y).recall[1],
    }


def shared_labels(y):
    return [{int(one), int(one) // 3 + 100} for one in y]


def cameras(y):
    return np.arange(len(y)) % 3


def market(x, y):
    query, camera = np.arange(len(y)) < 40, cameras(y)
    return evaluate.reidentification(*((x[m], y[m], camera[m]) for m in (query, ~query)), k=(1, K))


def clusters_of(x, y):
    from sklearn.cluster import KMeans

    unit = ExactUnitVectors.from_rows(x).vectors()  # a last bit decides between centres that are equally near
    return KMeans(len(np.unique(y)), n_init=1, random_state=0).fit_predict(unit)


def scikit_learn(x, y):
    from sklearn import metrics
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    i, j = np.triu_indices(len(y), 1)
    target, s = y[i] == y[j], scores_of(x)[i, j]
    fpr, tpr, _ = metrics.roc_curve(target, s, drop_intermediate=False)
    half, lists, found = np.arange(len(y)) < len(y) // 2, lists_of(x, y), clusters_of(x, y)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    linear = LogisticRegression(C=1.0, tol=1e-8, max_iter=10_000).fit(unit[half], y[half])

    def near(k):
        return KNeighborsClassifier(k, algorithm="brute", metric="cosine").fit(unit[half], y[half])

    confused = metrics.cluster.pair_confusion_matrix(y, found)
    return {
        "AUC": metrics.roc_auc_score(target, s),
        f"TAR at FAR {FAR}": tpr[fpr <= FAR].max(),
        "MAP": np.mean([metrics.average_precision_score(t, s) for t, s in lists]),
        "nDCG": np.mean([metrics.ndcg_score(t[None], s[None]) for t, s in lists]),
        f"nDCG@{K}": np.mean([metrics.ndcg_score(t[None], s[None], k=K) for t, s in lists]),
        "NMI": metrics.normalized_mutual_info_score(y, found),
        "AMI": metrics.adjusted_mutual_info_score(y, found),
        "F1 of pairs": 2 * confused[1, 1] / (2 * confused[1, 1] + confused[0, 1] + confused[1, 0]),
        **{f"kNN, k = {k}": near(k).score(unit[~half], y[~half]) for k in (1, K)},
        "linear probe": linear.score(unit[~half], y[~half]),
    }


def torchmetrics(x, y):
    from torchmetrics.functional import classification, clustering, retrieval

    i, j = np.triu_indices(len(y), 1)
    target, s = torch.from_numpy(y[i] == y[j]).long(), torch.from_numpy(scores_of(x)[i, j] / 2 + 0.5)
    sets, found = shared_labels(y), torch.from_numpy(clusters_of(x, y)).long()
    several = [np.array([len(sets[q] & sets[c]) > 0 for c in range(len(y)) if c != q], int) for q in range(len(y))]
    lists = [(torch.from_numpy(s + 2), torch.from_numpy(t).bool()) for t, s in lists_of(x, y)]  # it drops scores ≤ 0

    def mean(function, pairs=lists, **options):
        return float(np.mean([float(function(*pair, **options)) for pair in pairs]))

    return {
        "AUC": float(classification.binary_auroc(s, target)),
        "EER": float(classification.binary_eer(s, target)),
        f"hit rate@{K}": mean(retrieval.retrieval_hit_rate, top_k=K),
        f"precision@{K}": mean(retrieval.retrieval_precision, top_k=K),
        "R-precision": mean(retrieval.retrieval_r_precision),
        "MAP": mean(retrieval.retrieval_average_precision),
        "MRR": mean(retrieval.retrieval_reciprocal_rank),
        "nDCG": mean(retrieval.retrieval_normalized_dcg),
        f"nDCG@{K}": mean(retrieval.retrieval_normalized_dcg, top_k=K),
        "MAP, several labels": mean(
            retrieval.retrieval_average_precision,
            [(s, torch.from_numpy(t).bool()) for (s, _), t in zip(lists, several, strict=True)],
        ),
        "NMI": float(clustering.normalized_mutual_info_score(found, torch.from_numpy(y).long())),
        "AMI": float(clustering.adjusted_mutual_info_score(found, torch.from_numpy(y).long())),
    }


def pytorch_metric_learning(x, y):
    from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    names = {
        "precision_at_1": "Recall@1",
        "r_precision": "R-precision",
        "mean_average_precision_at_r": "MAP@R",
        "mean_average_precision": "MAP",
        "mean_reciprocal_rank": "MRR",
    }

    def measure(distance, **options):
        made = AccuracyCalculator(
            include=tuple(names), k=len(y) - 1, device=torch.device("cpu"), knn_func=CustomKNN(distance), **options
        )
        return made.get_accuracy(torch.from_numpy(x), torch.from_numpy(y))

    cosine, macro = measure(CosineSimilarity()), measure(CosineSimilarity(), avg_of_avgs=True)
    found = {ours: cosine[theirs] for theirs, ours in names.items()}
    found |= {"Recall@1, macro": macro["precision_at_1"], "MAP@R, macro": macro["mean_average_precision_at_r"]}
    for name, p in (("MAP, L2", 2), ("MAP, L1", 1)):
        found[name] = measure(LpDistance(p=p, normalize_embeddings=False))["mean_average_precision"]
    return found


def plain_loops(x, y):
    """What no library has, pair by pair."""
    camera, s, rng = cameras(y), scores_of(x), np.random.default_rng(0)
    precision, area, first = [], [], []
    for q in range(40):
        kept = [c for c in range(40, len(y)) if not (y[c] == y[q] and camera[c] == camera[q])]
        ranked = [y[c] == y[q] for c in sorted(kept, key=lambda c: -s[q, c])]
        if not any(ranked):
            continue
        hits, before, ap, trapezoid = 0, 1.0, 0.0, 0.0
        for place, right in enumerate(ranked, start=1):
            hits += right
            ap += right * hits / place / sum(ranked)
            trapezoid += right * (before + hits / place) / 2 / sum(ranked)
            before = hits / place
        precision.append(ap)
        area.append(trapezoid)
        first.append(ranked[0])
    unit, right = x / np.linalg.norm(x, axis=1, keepdims=True), []
    for _ in range(50):
        chosen = rng.choice(12, 5, replace=False)
        drawn = [rng.permutation(np.flatnonzero(y == one))[:5] for one in chosen]
        for truth, one in enumerate(drawn):
            for query in one[1:]:
                near = np.round([unit[query] @ unit[other[0]] for other in drawn], 12)
                right.append((near[truth] == near.max()) / (near == near.max()).sum())
    dots = []
    for q in range(len(y)):
        order = sorted((c for c in range(len(y)) if c != q), key=lambda c: -np.round(x[q] @ x[c], 9))
        hits = np.cumsum([y[c] == y[q] for c in order])
        dots.append(sum(hits[k] / (k + 1) for k, c in enumerate(order) if y[c] == y[q]) / hits[-1])
    return {
        "MAP, dot": np.mean(dots),
        "5-way 1-shot": np.mean(right),
        "mAP, rule of Market-1501": np.mean(precision),
        "mAP, trapezoids": np.mean(area),
        "rank-1, rule of Market-1501": np.mean(first),
    }


PEERS = {
    "scikit-learn": scikit_learn,
    "torchmetrics": torchmetrics,
    "pytorch-metric-learning": pytorch_metric_learning,
    "plain loops": plain_loops,
}


def installed(peer):
    try:
        return "" if peer == "plain loops" else importlib.metadata.version(peer)
    except importlib.metadata.PackageNotFoundError:
        return None


def compare(ties):
    """Rows of one table, and how many numbers that should be equal are not."""
    x, y = make_people(ties)
    known, rows, wrong = ours(x, y), [], 0
    for peer, measure in PEERS.items():
        version = installed(peer)
        if version is None:
            rows.append((peer, "", "", "", "not installed"))
            continue
        try:
            theirs = measure(x, y)
        except (ImportError, RuntimeError) as problem:  # one of its own parts may not fit this torch
            rows.append((f"{peer} {version}", "", "", "", f"does not run here: {str(problem).splitlines()[0]}"))
            continue
        spread = {name: [value] for name, value in theirs.items()}
        if ties and peer in ("torchmetrics", "pytorch-metric-learning", "plain loops"):
            for seed in range(SHUFFLES):
                mix = np.random.default_rng(seed).permutation(len(y))
                if peer == "plain loops":  # sides of the rule stay what they are
                    mix = np.concatenate([np.random.default_rng(seed).permutation(40), 40 + mix[mix < len(y) - 40]])
                for name, value in measure(x[mix], y[mix]).items():
                    spread[name] += [] if name in BY_PLACE else [value]
        for name, value in theirs.items():
            low, high = min(spread[name]), max(spread[name])
            why = DIFFERS.get((peer, name)) or (ON_TIES.get((peer, name)) if ties else None)
            if abs(known[name] - value) <= CLOSE and high - low <= CLOSE:
                word = "equal"
            elif why:
                word = f"differs: {why}"
            elif low <= known[name] <= high and high - low > CLOSE:
                word = f"{ORDER}: {low:.4f} to {high:.4f}"
            else:
                word, wrong = "NOT EQUAL", wrong + 1
            rows.append((f"{peer} {version}".strip(), name, f"{known[name]:.6f}", f"{value:.6f}", word))
    return rows, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    warnings.simplefilter("ignore")
    failed = 0
    for ties, title in ((False, "Scores that all differ"), (True, "Scores with many ties")):
        rows, wrong = compare(ties)
        failed += wrong
        print(f"\n{title}\n\n| library | number | mettle | there | |\n|---|---|---|---|---|")
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
