"""Scores of chosen rows are exact, and no row is told by -1 and minus infinity."""

import numpy as np

from mettle.gallery.index.faiss_index import score_rows


def test_scores_of_chosen_rows_are_products_and_absent_rows_have_none():
    rng = np.random.default_rng(0)
    probes, vectors = rng.normal(size=(40, 6)).astype(np.float32), rng.normal(size=(50, 6))
    rows = rng.integers(-1, 50, (40, 9)).astype(np.int32)
    assert (rows == -1).any()
    wanted = np.asarray([[probes[i] @ vectors[j] if j >= 0 else -np.inf for j in rows[i]] for i in range(40)])
    np.testing.assert_allclose(score_rows(probes, vectors, rows), wanted, atol=1e-5)
