"""Numbers that are no numbers, and keys that are no keys, are refused in one line; huge rates are rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.errors import InputError
from mettle.service import Limits, Rate, create_key, revoke_key
from mettle.service.rate_limits import RateLimiter

NAN, INF = float("nan"), float("inf")


def one_line(error, *words):
    said = str(error.value)
    assert "\n" not in said and len(said) < 250 and all(word in said for word in words), said


@pytest.mark.parametrize("count", [0, -1, 1.5, 10.0, NAN, INF, "5", None, True, [3], 10**19, 10**400], ids=repr)
def test_a_count_that_is_none_is_refused(count):
    with pytest.raises(InputError) as error:
        Rate(count)
    one_line(error, "a rate is a whole number")


@pytest.mark.parametrize("seconds", [0, -1.0, NAN, INF, "60", None, True, 10**400], ids=repr)
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(InputError) as error:
        Rate(5, seconds)
    one_line(error, "a rate is", "above 0 seconds")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("body", "x"),
        ("body", NAN),
        ("body", None),
        ("workers", 1.5),
        ("workers", True),
        ("queue", -1),
        ("digits", 2.0),
        ("work_seconds", "20"),
        ("work_seconds", NAN),
        ("body_seconds", INF),
        ("per_key", 600),
        ("per_target", (30, 60)),
        ("k", Rate(5)),
    ],
)
def test_a_limit_of_another_kind_is_refused(name, value):
    with pytest.raises(InputError) as error:
        Limits(**{name: value})
    one_line(error, f"limits.{name} must be", "got")


@given(
    count=st.integers(1, 10**18),
    seconds=st.floats(1e-300, 1e300),
    names=st.lists(st.integers(0, 5), max_size=30),
    start=st.floats(0, 1e9),
)
def test_any_rate_serves_and_no_rate_serves_more_than_its_count_at_once(count, seconds, names, start):
    buckets = RateLimiter(Rate(count, seconds), clock=lambda: start)
    taken = [name for name in names if buckets.acquire(name) == 0.0]
    assert set(taken) == set(names), "the first of each name is let through"
    if seconds / count > 1e-3 and seconds < 1e6:  # as far as a clock can tell
        assert all(taken.count(name) <= count for name in set(names))


@pytest.mark.parametrize("count", [10**12, 10**15, 10**18])
def test_a_rate_beyond_the_clock_lets_everybody_through(count):
    buckets = RateLimiter(Rate(count))
    assert [buckets.acquire("k") for _ in range(1000)] == [0.0] * 1000 and len(buckets) <= 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": None}, "name of a key"),
        ({"name": 5}, "name of a key"),
        ({"name": b"desk"}, "name of a key"),
        ({"scopes": "verify"}, "scopes of a key"),
        ({"scopes": None}, "scopes of a key"),
        ({"scopes": 3}, "scopes of a key"),
        ({"scopes": ["verify", None]}, "unknown scope None"),
        ({"scopes": [["verify"]]}, "unknown scope"),
        ({"tenant": 7}, "tenant of a key"),
        ({"days": "30"}, "days until"),
        ({"days": [1]}, "days until"),
    ],
    ids=repr,
)
def test_a_key_of_the_wrong_kinds_is_one_line(tmp_path, wrong, said):
    with pytest.raises(InputError) as error:
        create_key(tmp_path / "keys.json", **({"name": "desk", "scopes": ["verify"]} | wrong))
    one_line(error, said)
    assert list(tmp_path.iterdir()) == []


def test_nobody_is_revoked_by_no_name(tmp_path):
    create_key(tmp_path / "keys.json", "desk", ["verify"])
    with pytest.raises(InputError, match="no key is named None"):
        revoke_key(tmp_path / "keys.json", None)
