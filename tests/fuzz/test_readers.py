"""Changed files of every kind are read, or refused in one line; `make fuzz` does the same for as long as one likes."""

import random
import warnings

import pytest

from mettle.errors import DataError
from tests.fuzz.engine import Target, fuzz, is_one_line, mutate, summarize
from tests.fuzz.readers import RUN_FILES, build_targets
from tests.small_runs import small_run

QUICK = 40  # files for each reader
SLOW = 3000


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    return build_targets(folder, small_run(folder, steps=3).run.folder)


@pytest.mark.parametrize("runs", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_changed_files_are_read_or_refused_in_one_line(targets, tmp_path, runs):
    counts = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, target in targets.items():
            share = runs // 4 if name.startswith("run folder") else runs  # a model is built for each
            counts[name] = fuzz(name, target, tmp_path, share)
    findings = [str(found) for one in counts.values() for found in one.findings.values()]
    assert not findings, "\n".join([*findings, summarize(counts)])
    assert sum(one.accepted for one in counts.values()) > 0


def test_every_file_of_a_run_is_changed(targets):
    assert {f"run folder: {name}" for name in RUN_FILES} <= set(targets)


def test_the_fuzzer_finds_what_lies_behind_several_conditions(tmp_path):
    """A fault that no single change reaches from the seed: the corpus has to grow towards it."""

    def read(path):
        content = path.read_bytes()
        step = 0
        from mettle.errors import nearest

        nearest("a", ["b"])  # a file that is watched
        for wanted in b"NaN":
            if wanted not in content:
                raise DataError("refused")
            step += 1
        raise KeyError(step)

    counts = fuzz("planted", Target(_unless_changed(read), [b"0,1,2"], ".txt"), tmp_path, 400)
    assert [found.problem for found in counts.findings.values()] == ["KeyError"]
    assert counts.refused > 0


def _unless_changed(read):
    def reader(path):
        if path.read_bytes() != b"0,1,2":
            read(path)

    return reader


def test_only_one_line_of_mettle_is_a_refusal():
    assert is_one_line(DataError("no such file"))
    assert (
        not is_one_line(DataError("two\nlines")) and not is_one_line(DataError("")) and not is_one_line(KeyError("a"))
    )
    assert not is_one_line(DataError("x" * 5000))


def test_the_same_seed_makes_the_same_changes():
    one, other = (mutate(b"content", [b"other"], random.Random(3)) for _ in range(2))
    assert one == other
