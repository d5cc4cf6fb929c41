"""Hard examples of a million embeddings: time, memory and recall of `mettle.mine`, on two threads.

    python benchmarks/mining.py                 1,000,000 x 128, four rows a person (some minutes)
    python benchmarks/mining.py --quick         50,000 x 128
    python benchmarks/mining.py --exact         exact against approximate search at 100,000 x 128
    python benchmarks/mining.py --peer          beside `mine_hard_negatives` of sentence-transformers at 20,000 x 128

People are drawn as benchmarks/gallery.py draws them. Peak memory is that of the whole process, the embeddings and their
making included. Recall is the share of the nearest rows of other labels that were found, measured by `mine` itself on
10,000 sampled rows. The peer mines the same embeddings, handed to it by a model that looks them up, with the same
margin to the hardest positive; its search is exact, in blocks of matrix products. The numbers of the last run of each
kind are kept in mining.json.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")

import numpy as np
import torch
from record import status

from gallery import people
from mettle.mining import Guards, mine

KEPT = Path(__file__).with_suffix(".json")
EACH, DIM, MARGIN = 4, 128, 0.05
GOAL_S, GOAL_RECALL = 600, 0.95


def measure(size, **options):
    """One run of `mine`: seconds, peak memory, recall, account, and the load of the machine before and after."""
    x, labels, _, _ = people(size // EACH, EACH, DIM, 1)
    before, began = os.getloadavg()[0], time.perf_counter()
    found = mine(x, labels, guards=Guards(margin=MARGIN), **options)
    spent = time.perf_counter() - began
    account = found.account
    return {
        "size": size,
        "dim": DIM,
        "options": options,
        "seconds": round(spent, 1),
        "peak_mb": round(status("VmHWM") / 1000),
        "search": found.search.kind,
        "recall": round(found.search.recall, 4),
        "sampled": found.search.sampled,
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "candidates": account.candidates,
        "dropped": dict(account.dropped),
        "mined": account.mined,
        "without_negative": account.without_negative,
    }, found


def agreement(one, other):
    """The share of the triplets of one that the other has."""
    triplets = [set(zip(m.anchors.tolist(), m.negatives.tolist(), strict=True)) for m in (one, other)]
    return len(triplets[0] & triplets[1]) / len(triplets[0])


def compare_with_peer(size):
    """The same mining by sentence-transformers, and how many negatives both take."""
    from mettle.model.backbones import import_torchvision

    import_torchvision()  # its own operators are not beside every CPU build of torch
    import datasets
    import sentence_transformers
    from sentence_transformers.util import mine_hard_negatives

    x = people(size // EACH, EACH, DIM, 1)[0]
    ours, found = measure(size, search="exact", negatives=3, depth=30)
    rows = [str(k) for k in range(size)]
    # Every row with each other row of its label: the peer then knows all positives, and leaves them out.
    own = np.arange(size).reshape(-1, EACH)
    anchor = np.repeat(own, EACH - 1, axis=1).reshape(-1)
    positive = np.stack([np.delete(own, k, axis=1) for k in range(EACH)], axis=1).reshape(-1)
    table = datasets.Dataset.from_dict({"anchor": [rows[k] for k in anchor], "positive": [rows[k] for k in positive]})
    began = time.perf_counter()
    theirs = mine_hard_negatives(
        table,
        _LookUp(x),
        corpus=rows,
        range_max=31,  # among them the anchor itself, which is a row of the corpus
        num_negatives=3,
        absolute_margin=MARGIN,
        output_format="labeled-pair",
        verbose=False,
        use_faiss=False,
        faiss_batch_size=512,
    )
    spent = time.perf_counter() - began
    taken = {(a, b) for a, b, y in zip(theirs["anchor"], theirs["positive"], theirs["label"], strict=True) if y == 0}
    mined = {(rows[a], rows[b]) for a, b in zip(found.anchors.tolist(), found.negatives.tolist(), strict=True)}
    return {
        "size": size,
        "peer": f"sentence-transformers {sentence_transformers.__version__}",
        "seconds": ours["seconds"],
        "peer_seconds": round(spent, 1),
        "negatives": len(mined),
        "peer_negatives": len(taken),
        "in_both": len(mined & taken),
        "load": ours["load"],
    }


class _LookUp:
    """What the peer takes for a model: it finds the embedding of a row by its name."""

    device = torch.device("cpu")

    def __init__(self, embeddings):
        self.embeddings = embeddings

    def encode_document(self, names, **_):
        return self.embeddings[[int(name) for name in names]]

    encode_query = encode_document

    def get_embedding_dimension(self):
        return self.embeddings.shape[1]

    def similarity(self, one, other):
        return torch.as_tensor(one) @ torch.as_tensor(other).T

    def similarity_pairwise(self, one, other):
        return (torch.as_tensor(one) * torch.as_tensor(other)).sum(1)


def keep(name, numbers):
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    KEPT.write_text(json.dumps(kept | {name: numbers}, indent=1) + "\n")
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(2)
    if "--peer" in sys.argv:
        keep("peer", compare_with_peer(20_000))
    elif "--exact" in sys.argv:
        exact, one = measure(100_000, search="exact")
        quick, other = measure(100_000, search="approximate")
        keep("exact", {"exact": exact, "approximate": quick, "same_triplets": round(agreement(one, other), 4)})
    else:
        size = 50_000 if "--quick" in sys.argv else 1_000_000
        numbers, _ = measure(size, search="approximate")
        keep(f"{size:,} x {DIM}", numbers)
        if numbers["recall"] < GOAL_RECALL or numbers["seconds"] > GOAL_S:
            sys.exit(f"missed: recall {numbers['recall']} (goal {GOAL_RECALL}), {numbers['seconds']} s (goal {GOAL_S})")
