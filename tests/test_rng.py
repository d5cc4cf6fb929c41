import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mettle.rng import hash_bits, permutation, uniform_per_id


def test_draws_depend_on_the_sample_not_on_its_company():
    ids = np.array([5, 2**40, 17])
    together = uniform_per_id(1, 2, ids, 6)
    for k in range(3):
        assert (uniform_per_id(1, 2, ids[k : k + 1], 6) == together[k]).all()
    assert (uniform_per_id(1, 2, ids[::-1], 6) == together[::-1]).all()


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 50))
def test_every_argument_matters(seed, epoch, stream):
    ids = np.arange(8)
    base = uniform_per_id(seed, epoch, ids, 4, stream=stream)
    assert ((base >= 0) & (base < 1)).all()
    for other in (
        uniform_per_id(seed + 1, epoch, ids, 4, stream=stream),
        uniform_per_id(seed, epoch + 1, ids, 4, stream=stream),
        uniform_per_id(seed, epoch, ids + 8, 4, stream=stream),
        uniform_per_id(seed, epoch, ids, 4, stream=stream + 1),
    ):
        assert (base != other).all()  # that two are merely close is a matter of luck


def test_draws_are_uniform_and_uncorrelated():
    u = uniform_per_id(0, 0, np.arange(20_000), 4)
    assert np.abs(u.mean(0) - 0.5).max() < 0.01
    assert np.abs(u.var(0) - 1 / 12).max() < 0.002
    assert np.abs(np.corrcoef(u.T) - np.eye(4)).max() < 0.03
    counts = np.histogram(u[:, 0], 64, (0, 1))[0]
    assert ((counts - 312.5) ** 2 / 312.5).sum() < 110  # chi-square, 63 degrees of freedom, far tail


def test_known_values_never_change():
    """Stored, because runs on disk must resume under later versions."""
    assert hash_bits(1, 2, np.array([3]))[0] == hash_bits(1, 2, 3)[0]
    assert [int(v) for v in hash_bits(0, 1, np.arange(3))] == [
        768889509309083662,
        3921992799272616245,
        5706241220826143957,
    ]


@given(st.integers(0, 200), st.integers(0, 5))
def test_shuffled_is_a_permutation(n, epoch):
    assert sorted(permutation(n, 7, epoch)) == list(range(n))
