"""Files are read in processes that can be killed: they say what is read in place, and no file costs too much."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mettle.data import check, read
from mettle.data.image_decoding import ImageTarget, decode_image, decode_to_sizes
from mettle.data.parquet import read_parquet_arrays, read_parquet_schema, read_parquet_texts
from mettle.data.reader_pool import (
    ReaderLimitExceeded,
    ReaderLimits,
    ReaderPool,
    ReaderUnavailable,
    active_pool,
    call_reader,
)
from mettle.errors import DataError, InputError
from tests.data import corpus
from tests.service.hostile_uploads import large_png, slow_jpeg

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def pool():
    with ReaderPool(1, ReaderLimits(seconds=60)) as pool:
        yield pool


@pytest.fixture
def strict():
    with ReaderPool(1, ReaderLimits(seconds=0.5, megabytes=100)) as pool:
        yield pool


def test_pictures_are_those_that_are_decoded_in_place(pool):
    targets = [ImageTarget(), ImageTarget((8, 8), "pad")]
    for name, one in corpus.good().items():
        here, aspect = decode_to_sizes(one.data, targets, name=name)
        with pool.active():
            there, same = decode_to_sizes(one.data, targets, name=name)
        assert aspect == same
        for a, b in zip(here, there, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


def test_bad_pictures_are_refused_with_the_same_words(pool):
    for name, one in corpus.bad().items():
        with pytest.raises(DataError) as here:
            decode_image(one.data, name=name)
        with pool.active(), pytest.raises(DataError) as there:
            decode_image(one.data, name=name)
        assert str(here.value) == str(there.value)


def test_tables_are_those_that_are_read_in_place(pool, tmp_path):
    path, n = tmp_path / "table.parquet", 50
    vectors = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    columns = {
        "label": [f"Žofie {i % 7}\n" if i % 5 else None for i in range(n)],
        "e": list(vectors),
        "number": np.arange(n),
        "share": np.linspace(0, 1, n),
        "true": [i % 2 == 0 for i in range(n)],
    }
    parquet.write_table(arrow.table(columns), path)

    def everything():
        texts = read_parquet_texts(path) if "e" not in columns else None
        return read_parquet_schema(path), texts, read_parquet_arrays(path, ["e"])

    here = everything()
    with pool.active():
        there = everything()
    assert here[0] == there[0]
    np.testing.assert_array_equal(here[2][0], vectors)
    np.testing.assert_array_equal(there[2][0], vectors)
    assert list(here[2][1]) == list(there[2][1])
    for name, column in here[2][1].items():
        np.testing.assert_array_equal(column, there[2][1][name])
    parquet.write_table(arrow.table({name: columns[name] for name in columns if name != "e"}), path)
    here = read_parquet_texts(path)
    with pool.active():
        assert read_parquet_texts(path) == here


@pytest.mark.parametrize(
    ("content", "why"),
    [(slow_jpeg, "more than 0.5 s"), (large_png, "more than 1.. MB of memory")],
    ids=["time", "memory"],
)
def test_a_picture_that_costs_too_much_is_a_line_and_the_next_is_read(strict, content, why):
    with strict.active():
        with pytest.raises(ReaderLimitExceeded, match=f"cannot decode 'p': reading it takes {why}$"):
            decode_image(content(), name="p")
        assert decode_image(corpus.encoded(corpus.BASE, "PNG")).shape == corpus.BASE.shape


def test_a_table_that_unfolds_to_gigabytes_is_a_line(strict, tmp_path):
    path, rows = tmp_path / "table.parquet", 20_000_000
    codes = arrow.array(np.zeros(rows, np.int32))
    parquet.write_table(
        arrow.table({"label": arrow.DictionaryArray.from_arrays(codes, ["somebody"])}), path, compression="zstd"
    )
    assert path.stat().st_size < 1 << 20
    with strict.active(), pytest.raises(ReaderLimitExceeded, match="cannot read '.*table.parquet': reading it takes"):
        read(path)


def test_a_crash_of_a_decoder_is_a_line(pool):
    with pytest.raises(ReaderLimitExceeded, match="crashes its decoder"):
        pool.call(os.abort)
    assert pool.call(os.getpid) != os.getpid()


def test_a_process_that_was_killed_from_outside_is_replaced(pool):
    first = pool.call(os.getpid)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.05)
    assert pool.call(os.getpid) not in (first, os.getpid())
    assert pool.is_ready


def test_a_process_is_used_again(pool):
    assert len({pool.call(os.getpid) for _ in range(5)}) == 1


def test_closing_kills_processes_that_read():
    pool, told = ReaderPool(1), []
    pool.start()

    def wait() -> None:
        with pytest.raises(DataError):
            pool.call(time.sleep, 60)
        told.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    pool.close()
    thread.join(30)
    assert told and not pool.is_ready
    with pytest.raises(ReaderUnavailable):
        pool.call(os.getpid)


def test_processes_end_with_the_one_that_started_them():
    """Even where it is killed while they read: the system ends them when their time is over."""
    code = (
        "import os, threading, time\n"
        "from mettle.data.reader_pool import ReaderLimits, ReaderPool\n"
        "pool = ReaderPool(1, ReaderLimits(seconds=0.5))\n"
        "print(pool.call(os.getpid), flush=True)\n"
        "threading.Thread(target=pool.call, args=(time.sleep, 600)).start()\n"
        "time.sleep(0.1)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(200):
        if not stat.exists() or stat.read_text().split()[2] == "Z":  # it is nobody's child any more
            return
        time.sleep(0.05)
    raise AssertionError("a process that reads outlives the one that started it")


def test_a_process_writes_no_file(pool, tmp_path):
    with pytest.raises(DataError):
        pool.call(Path.write_bytes, tmp_path / "file", b"text")
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size == 0


def test_the_processes_load_no_torch(pool):
    assert "torch" not in pool.call(eval, "list(__import__('sys').modules)")


def test_an_answer_is_never_unpickled_and_holds_no_objects(pool):
    with pytest.raises(ReaderLimitExceeded, match="confuses its decoder|crashes"):
        pool.call(np.full, 3, None, object)


def test_without_a_pool_everything_is_read_here():
    assert active_pool() is None
    assert call_reader(os.getpid) == os.getpid()


def test_threads_that_read_use_the_pool_of_the_one_that_started_them(strict, tmp_path):
    for label in "ab":
        for i in range(2):
            file = tmp_path / label / f"{i}.jpg"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(corpus.encoded(np.roll(corpus.BASE, i + 3 * (label == "b"), 0), "JPEG"))
    (tmp_path / "a" / "2.jpg").write_bytes(slow_jpeg())
    with strict.active():
        found = check(read(tmp_path, policy="trust"), policy="trust")
    assert [problem.text for problem in found.problems if "0.5 s" in problem.text]


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"seconds": float("nan")}, {"megabytes": 0}, {"megabytes": 1.5}])
def test_limits_that_are_none_are_refused(limits):
    with pytest.raises(InputError, match="limits of a reader"):
        ReaderLimits(**limits)


def test_a_large_file_is_given_more():
    small, large = ReaderLimits().for_file(0), ReaderLimits().for_file(1 << 30)
    assert small == (5.0, 1 << 30) and large[0] > 100 and large[1] > 10 << 30
