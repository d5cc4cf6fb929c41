"""Which metric finds the right neighbours? Euclid, two covariances and a learned one on handwritten digits.

Pixels at the border say nothing about a digit and some others say little; noise is added to make that harder. Run:
    python examples/mahalanobis.py
"""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier

from mettle.losses import SupCon
from mettle.metric import Mahalanobis

SEED = 0


def digits(noise: float) -> tuple[np.ndarray, np.ndarray]:
    """64 pixels, and 32 directions of noise mixed into them by a rotation, so that no single feature is to blame."""
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(SEED)
    turn = np.linalg.qr(rng.normal(size=(96, 96)))[0]
    return np.c_[x, noise * rng.normal(size=(len(x), 32))] @ turn, y


def main() -> None:
    """Print the share of test digits whose five nearest neighbours vote for the right class."""
    metrics = {
        "Euclid": None,
        "covariance": Mahalanobis("covariance"),
        "within classes": Mahalanobis("within_class"),
        "within, rank 9": Mahalanobis("within_class", n_components=9),
        "learned": Mahalanobis(batch=(10, 20), tol=1e-2, random_state=SEED),
        "learned, rank 9": Mahalanobis(n_components=9, batch=(10, 20), tol=1e-2, random_state=SEED),
        "SupCon, rank 32": Mahalanobis(loss=SupCon(0.1), n_components=32, batch=(10, 20), tol=1e-2, random_state=SEED),
    }
    print(f"{'':16} " + "".join(f"noise {noise:<6}" for noise in (0, 10, 20)))
    for name, metric in metrics.items():
        found = []
        for noise in (0, 10, 20):
            x, y = digits(noise)
            x1, x2, y1, y2 = train_test_split(x, y, test_size=0.5, random_state=SEED, stratify=y)
            if metric is not None:
                x1, x2 = metric.fit(x1, y1).transform(x1), metric.transform(x2)
            found.append(KNeighborsClassifier(5).fit(x1, y1).score(x2, y2))
        print(f"{name:16} " + "".join(f"{share:<12.3f}" for share in found), flush=True)


if __name__ == "__main__":
    main()
