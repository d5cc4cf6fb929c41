"""A step of a small batch calls about as many ATen operators as plain torch: `benchmarks/small_batches.py` times it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from small_batches import cases, count_calls


@pytest.mark.parametrize("name", cases(128))
def test_a_step_takes_at_most_a_fifth_more_calls_than_plain_torch(name):
    ours, plain, z, y = cases(128)[name]
    assert abs(float(ours(z, y).detach()) / float(plain(z, y).detach()) - 1) < 1e-5, "the same formula"
    assert count_calls(ours, z, y) <= 1.2 * count_calls(plain, z, y)
