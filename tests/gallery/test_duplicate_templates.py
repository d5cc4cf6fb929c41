"""Templates that are the same up to rounding: those that comparing all with all finds, in time that is linear."""

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_fixtures import FileShelf, ServerShelf, units

from mettle.gallery.binding import Binding
from mettle.gallery.enrolment import select_new_rows


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def plainly(rows: np.ndarray, known: np.ndarray) -> list[int]:
    """Positions of the rows that nobody before them equals within 1e-5."""
    have = np.concatenate([known, rows]).astype(np.float64)
    apart = [np.linalg.norm(have[:i] - have[i], axis=1) for i in range(len(known), len(have))]
    return [i for i, distances in enumerate(apart) if not (distances <= 1e-5).any()]


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 5, 9, 64]), st.integers(1, 60), st.integers(0, 40))
def test_the_same_are_those_that_comparing_all_with_all_finds(seed, dim, count, known):
    rng = np.random.default_rng(seed)
    centre, width = rng.normal(size=dim), 10.0 ** rng.integers(-5, 1)
    base = unit(centre + width * rng.normal(size=(max(1, count // 2), dim)))
    noise = rng.choice([0, 1e-7, 3e-6, 2e-5, 1e-4], size=(count + known, 1)) / np.sqrt(dim)
    rows = unit(base[rng.integers(len(base), size=count + known)] + noise * rng.normal(size=(count + known, dim)))
    distances = np.linalg.norm(rows[:, None].astype(np.float64) - rows, axis=2)
    edge = np.abs(distances - 1e-5) < 1e-10  # on the very edge, two ways of computing may differ
    kept = select_new_rows(rows[known:], rows[:known])
    if not edge.any():
        assert np.array_equal(kept, rows[known:][plainly(rows[known:], rows[:known])])


def test_rows_on_both_sides_of_every_edge_meet():
    rng = np.random.default_rng(0)
    rows = unit(rng.normal(size=(20_000, 8)))
    step = rng.normal(size=rows.shape)
    moved = rows + 9e-6 * step / np.linalg.norm(step, axis=1, keepdims=True)
    assert len(select_new_rows(moved.astype(np.float32), rows)) == 0


def test_rows_that_are_not_quite_of_unit_length_are_the_same_too():
    rows = np.float32(0.9995) * units(1, 3)
    assert len(select_new_rows(rows, rows)) == 0 and len(select_new_rows(rows, rows[:0])) == 3


def seconds(work) -> float:
    """Of the processor, the least of three: a shared machine only ever adds, and more to what takes longer."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize("spread", [10.0, 0.3, 0.01], ids=["anywhere", "a person", "a film"])
def test_time_grows_with_the_number_of_rows(spread):
    """Eight times as many took sixty times as long when all were compared with all."""
    rng = np.random.default_rng(1)
    centre = unit(rng.normal(size=(1, 64)))
    rows = unit(centre + spread * rng.normal(size=(40_000, 64)) / 8)
    few, many = (seconds(lambda n=n: select_new_rows(rows[:n], rows[:0])) for n in (5_000, 40_000))
    print(f"{spread}: {few:.3f} s for 5,000, {many:.3f} s for 40,000: {many / few:.1f} times as long")
    assert many / few < 32, f"{few:.3f} s for 5,000 and {many:.3f} s for 40,000"


def test_copies_of_one_row_take_no_longer():
    one = units(1, 1, 64)
    rng = np.random.default_rng(2)
    apart = unit(rng.normal(size=(40_000, 64)))
    same = unit(one + 1e-7 * rng.normal(size=(40_000, 64)))
    base = seconds(lambda: select_new_rows(apart, apart[:0]))
    assert len(select_new_rows(same, same[:0])) == 1
    assert seconds(lambda: select_new_rows(same, same[:0])) < 8 * base
    assert seconds(lambda: select_new_rows(np.repeat(one, 40_000, 0), one)) < 8 * base


def spent(postgres) -> float:
    """Seconds of the processor that this thread has had, and those at the other end of its connections."""
    if postgres is None:
        return time.thread_time()
    others = postgres.sql("SELECT pid FROM pg_stat_activity WHERE application_name = 'mettle'")
    theirs = sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for (pid,) in others)
    return time.thread_time() + theirs / 1e9


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_many_templates_of_one_name_are_enrolled_in_time_that_grows_with_them(kind, folder, request):
    postgres = request.getfixturevalue("postgres") if kind == "postgresql" else None
    shelf = ServerShelf(postgres) if postgres else FileShelf(folder / "g")
    storage, rows = shelf.create(Binding(16)), units(3, 16_500, 16)

    def took(name: str, count: int) -> float:
        start = spent(postgres)
        assert len(storage.enrol(name, rows[:count], distinct=True).numbers) == count
        return spent(postgres) - start

    took("warm", 500)
    few, many = min(took(f"few {i}", 2000) for i in range(3)), min(took(f"many {i}", 16_000) for i in range(2))
    print(f"{kind}: {few:.3f} s for 2,000, {many:.3f} s for 16,000: {many / few:.1f} times as long")
    assert many / few < 32
    again = storage.enrol("few 0", rows[:2001], distinct=True)
    assert (len(again.numbers), again.skipped) == (1, 2000)
    storage.close()
