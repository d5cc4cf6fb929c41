"""Judged embeddings without a run, and the name that must never become markup."""

import numpy as np

from mettle.data.samples import Samples
from mettle.evaluate.protocol import Judged, judge

HOSTILE = "<script>alert(1)</script>"


class Grey:
    """Pictures made of nothing, for tables whose pictures do not matter."""

    kind = "image"
    shape = (8, 8, 1)
    resident = True

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def read(self, at):
        return np.zeros((len(at), 8, 8, 1), np.uint8)

    def fingerprint(self):
        return "grey"


def judged(mode: str, n: int = 90, labels: int = 15, seed: int = 0) -> Judged:
    rng = np.random.default_rng(seed)
    y = np.tile(np.arange(labels), n // labels)
    domain = rng.integers(0, 3, n) if mode != "all" else None
    role = np.where(np.arange(n) < n // 2, "query", "gallery") if mode == "roles" else None
    z = rng.normal(size=(labels, 6))[y] + rng.normal(size=(n, 6))
    return judge(z.astype(np.float32), Samples.of(Grey(n), y, domain=domain, role=role), (1,))
