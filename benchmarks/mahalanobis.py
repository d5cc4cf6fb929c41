"""Learned linear metrics on classes that were not learned from: nearest neighbour right, against Euclid, LDA and NCA.

    python benchmarks/mahalanobis.py                          digits and glyphs (some minutes on two cores)
    python benchmarks/mahalanobis.py --omniglot FILE.npz      also Omniglot: an .npz with images (n, 28, 28) and label
    python benchmarks/mahalanobis.py --quick                  two splits, fewer classes

Features are pixels, averaged to at most 14 x 14. Of every set half of the drawn classes are learned from, the other
half are searched, every sample among all others; five splits of the classes. Digits have ten classes only: there
samples are split too, and all classes are known. LDA is scikit-learn's with shrinkage by Ledoit and Wolf. The last
cell says whether `Mahalanobis()` is within one standard error of the best of Euclid, LDA and NCA: that of the
difference over the splits.
"""

import argparse
import time
import warnings

import numpy as np
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from mettle.data import read
from mettle.evaluate import retrieval
from mettle.metric import LFDA, NCA, Mahalanobis

METHODS = {
    "Euclid": lambda: None,
    "LDA": lambda: LinearDiscriminantAnalysis(solver="eigen", shrinkage="auto"),
    "NCA": lambda: NCA(),
    "LFDA": LFDA,
    "Mahalanobis": lambda: Mahalanobis(random_state=0),
}
RIVALS = ("Euclid", "LDA", "NCA")


def shrink(images, side=14):
    """Images averaged over blocks to at most this side."""
    n, height, _ = images.shape
    block = -(-height // side)
    cut = height // block * block
    x = images[:, :cut, :cut].astype(float)
    return x.reshape(n, cut // block, block, cut // block, block).mean(axis=(2, 4)).reshape(n, -1) / 255


def glyph_pixels():
    samples = read("glyphs")
    return shrink(samples.inputs.read(np.arange(len(samples)))[..., 0]), samples.labels


def omniglot_pixels(path):
    with np.load(path) as file:
        return shrink(file["images"]), file["label"]


def split_classes(x, y, seed, classes, each):
    """Some samples of so many classes to learn from, and of as many others to search."""
    rng = np.random.default_rng(seed)
    names, counts = np.unique(y, return_counts=True)
    chosen = rng.choice(names[counts >= each], 2 * classes, replace=False)
    at = np.concatenate([rng.choice(np.flatnonzero(y == one), each, replace=False) for one in chosen])
    half = classes * each
    return (x[at[:half]], y[at[:half]]), (x[at[half:]], y[at[half:]])


def split_samples(x, y, seed):
    at = np.random.default_rng(seed).permutation(len(y))
    half = len(y) // 2
    return (x[at[:half]], y[at[:half]]), (x[at[half:]], y[at[half:]])


def nearest_right(method, train, test):
    """How often the nearest of all other test samples has the same label, and seconds of fitting."""
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = None if method is None else method.fit(*train)
    spent = time.process_time() - began
    z = test[0] if fitted is None else fitted.transform(test[0])
    z = z + 1e-12 * (~z.any(axis=1))[:, None]  # a blank picture is a place too
    return retrieval(z, test[1], k=1, similarity="l2").recall[1], spent


def measure(splits):
    """Each method on each split: shares and seconds."""
    found = {name: [nearest_right(make(), *split) for split in splits] for name, make in METHODS.items()}
    return {name: np.array(values).T for name, values in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--omniglot", metavar="FILE.npz")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    count, classes, each = (2, 30, 6) if given.quick else (5, 100, 8)
    digits = load_digits(return_X_y=True)
    sets = {"digits, other samples": [split_samples(*digits, seed) for seed in range(count)]}
    sets["digits, other classes"] = [split_classes(*digits, seed, 5, 100) for seed in range(count)]
    glyphs = glyph_pixels()
    sets["glyphs, other classes"] = [split_classes(*glyphs, seed, classes, each) for seed in range(count)]
    if given.omniglot:
        characters = omniglot_pixels(given.omniglot)
        sets["Omniglot, other classes"] = [split_classes(*characters, seed, classes, each) for seed in range(count)]
    print(f"| nearest right, {count} splits | {' | '.join(METHODS)} | best of three − Mahalanobis | |", flush=True)
    print("|---" * (len(METHODS) + 3) + "|")
    for title, splits in sets.items():
        found = measure(splits)
        best = max(RIVALS, key=lambda name: found[name][0].mean())
        gap = found[best][0] - found["Mahalanobis"][0]
        error = gap.std(ddof=1) / np.sqrt(count)
        word = "within one standard error" if gap.mean() <= error else "behind"
        cells = [f"{shares.mean():.1%} ({spent.mean():.1f} s)" for shares, spent in found.values()]
        print(f"| {title} | {' | '.join(cells)} | {gap.mean():+.2%} ± {error:.2%} ({best}) | {word} |", flush=True)


if __name__ == "__main__":
    main()
