"""Products of parameters of which a cover runs every time and the rest where there is time for it."""

from itertools import product

import pytest


def cover_axes(*axes):
    """The product of the axes: cases in which every value of every axis occurs are quick, all others ``slow``."""
    longest = max(map(len, axes))
    quick = {tuple(k % len(axis) for axis in axes) for k in range(longest)}
    found = []
    for at in product(*(range(len(axis)) for axis in axes)):
        values = [value for k, axis in zip(at, axes, strict=True) for value in _as_tuple(axis[k])]
        found.append(pytest.param(*values, marks=() if at in quick else pytest.mark.slow))
    return found


def mark_slow_except(values, quick):
    """The values as cases, ``slow`` but for those in ``quick``."""
    assert all(value in values for value in quick)
    return [pytest.param(*_as_tuple(value), marks=() if value in quick else pytest.mark.slow) for value in values]


def take_some(first, second, each, turn=0):
    """Pairs in which every value of both occurs: so many second ones for every first; another turn takes others."""
    starts = range(each * turn, each * turn + len(first))
    return [(a, second[(k + i) % len(second)]) for k, a in zip(starts, first, strict=True) for i in range(each)]


def take_turns(members, ways):
    """All members in all ways: each in one of them every time, the rest ``slow``; forms and difficulties meet all."""
    names, forms, hards = list(ways), *(list(dict.fromkeys(one[k] for one in members)) for k in (0, 1))
    quick = [(f, h, names[(forms.index(f) + hards.index(h)) % len(names)]) for f, h in members]
    return mark_slow_except([(*one, way) for one in members for way in names], quick)


def _as_tuple(value):
    return value if isinstance(value, tuple) else (value,)
