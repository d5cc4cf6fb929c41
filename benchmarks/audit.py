"""How long an audit of many embeddings takes.

    python benchmarks/audit.py [--rows 50000] [--dim 128]

Embeddings are identities at random places with noise around them, eight rows of each. The summary comes with all
intervals; both are timed by the clock and in processor time.
"""

import argparse
import time

import numpy as np

from mettle import evaluate

EACH = 8  # rows of an identity
NOISE = 1.8  # of a number, beside the spread of identities


def make_embeddings(rows: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, dim) float32 and their labels."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(rows // EACH), EACH)
    places = rng.standard_normal((rows // EACH, dim), dtype=np.float32)
    return places[labels] + np.float32(NOISE) * rng.standard_normal((len(labels), dim), dtype=np.float32), labels


def main() -> None:
    """Time an audit and its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args()
    embeddings, labels = make_embeddings(options.rows, options.dim)
    clock, processor = time.perf_counter(), time.process_time()
    found = evaluate.audit(embeddings, labels)
    for name in ("audit", "audit and summary"):
        print(f"{name}: {time.perf_counter() - clock:.1f} s, {time.process_time() - processor:.1f} s of processors")
        found.summary()


if __name__ == "__main__":
    main()
