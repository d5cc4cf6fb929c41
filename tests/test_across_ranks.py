"""Embedding and evaluation by several processes give, bit for bit, what one process gives."""

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from free_port import free_port
from mettle.api import adopt
from mettle.data.dataset import Samples
from mettle.data.embeddings import read_embeddings
from mettle.data.inputs import FeatureArray
from mettle.errors import DataError, InputError, MettleError
from mettle.evaluate import retrieval, verification
from mettle.evaluate.scoring import cuda_passes
from mettle.evaluate.scoring.histogram import count_scores
from mettle.evaluate.scoring.pair_tiles import PairTiles
from mettle.evaluate.scoring.rank_parts import split_rows
from mettle.model import Embedder, EmbedderSpec
from mettle.model.embedding_shards import write_embedding_shards
from mettle.model.inference import write_embeddings
from mettle.pairs.distributed import RankGroup
from processes import Forked

N, DIM = 800, 6
RATES = (0.2, 0.03)


def clusters(dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """People who overlap, with exact copies among them, so that scores tie."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 90, N)
    x = rng.normal(size=(90, DIM))[y] + 0.7 * rng.normal(size=(N, DIM))
    x[::7] = np.round(x[::7])
    return x.astype(dtype), y


def evaluate(across_ranks: bool) -> dict[str, Any]:
    """Everything that is counted, in numbers that must not differ in a single bit."""
    found: dict[str, Any] = {}
    domain, ids = np.arange(N) % 3, np.arange(N)
    cases = {
        "fast": {"mode": "histogram"},
        "fast across domains": {"mode": "histogram", "trials": "across", "domains": domain},
        "exact": {"mode": "exact", "memory": 1 << 20},
        "in memory": {},
    }
    for dtype in (np.float32, np.float64):
        x, y = clusters(dtype)
        shelf = {"gallery": (x[300:] + 0.01, y[300:], domain[300:], ids[300:] + N)}
        some = cases | {"gallery": {"mode": "histogram", "domains": domain, "ids": ids, **shelf}}
        for name, options in some.items():
            v = verification(x, y, chunk=50, across_ranks=across_ranks, **options)
            v.refine_at(RATES)
            counts = getattr(v.scores, "counts", v.scores.genuine)
            found[f"{name} {dtype.__name__}"] = [
                hashlib.sha256(counts.tobytes()).hexdigest(),
                hashlib.sha256(v.scores.genuine.tobytes()).hexdigest(),
                [float.hex(number) for number in (v.eer, v.auc, v.min_dcf, *map(v.tar, RATES))],
                [v.operating_point(far).false_accepts for far in (0.1, 0.01, 1e-3, *RATES)],
            ]
        for apart in (False, True):
            r = retrieval(x, y, domains=domain, exclude_same_domain=apart, chunk=37, across_ranks=across_ranks)
            digest = hashlib.sha256()
            for values in (r.queries, r.subjects, *r.per_query.values()):
                digest.update(np.ascontiguousarray(values).tobytes())
            found[f"retrieval {apart} {dtype.__name__}"] = [digest.hexdigest(), r.map_at_r, dict(r.pessimistic)]
    x, y = clusters()
    found["interval"] = verification(x, y, mode="histogram", across_ranks=across_ranks).interval("tar@0.1").low
    cuda_passes.ROWS = 64  # of a tile, so that there are some for every rank
    ranks = RankGroup.current() if across_ranks else RankGroup()
    design = PairTiles.from_sets(verification(x, y).source.probe, None, "all", 50)
    c = count_scores(design, 90, exact=False, device=torch.device("cpu"), ranks=ranks)
    windows = c.look_into([(0.5, 0.9), (0.99, 1.0)], together=True)
    told = [[w.values.tolist(), w.counts.tolist(), w.above] for w in windows]
    found["device"] = [hashlib.sha256(c.counts.tobytes()).hexdigest(), told]
    return json.loads(json.dumps(found))


def samples(count: int) -> Samples:
    """Rows with every kind of column, in two batches and a bit."""
    rng = np.random.default_rng(1)
    labels = [f"person {k % 40:02d}" for k in range(count)]
    split = ["train"] * (count // 2) + [""] * (count - count // 2)  # later parts have none
    rows = FeatureArray(rng.normal(size=(count, 10)).astype(np.float32))
    return Samples.of(rows, labels, domain=np.arange(count) % 3, groups={"size": np.arange(count) % 5}, split=split)


def model() -> Embedder:
    torch.manual_seed(0)
    return Embedder(EmbedderSpec("mlp", width=8, depth=2, dim=DIM), (10,))


def run_rank(rank: int, size: int, folder: Path) -> None:
    """What one of the processes does; what it found is a file, and what was raised a line of it."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    found: dict[str, Any] = {"evaluate": evaluate(across_ranks=True)}
    found["said"] = write_embedding_shards(model(), samples(1300), folder / "z.parquet", dim=4)
    write_embedding_shards(model(), samples(3), folder / "few.parquet", weights="abc")

    def refused(call: Any) -> str:
        try:
            call()
        except MettleError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    def fail_on_last() -> dict[str, np.ndarray]:
        if rank == size - 1:
            raise MemoryError("no room")
        return {}

    x, y = clusters()
    other = x + (rank == 1) * 1e-3
    found["refused"] = {
        "there": refused(lambda: write_embedding_shards(model(), samples(9), folder / "z.parquet")),
        "samples": refused(lambda: write_embedding_shards(model(), samples(9 + rank), folder / "other.parquet")),
        "no folder": refused(lambda: write_embedding_shards(model(), samples(9), folder / "no" / "z.parquet")),
        "rows": refused(lambda: verification(other, y, mode="histogram", across_ranks=True)),
        "queries": refused(lambda: retrieval(other, y, across_ranks=True)),
        "one rank": refused(lambda: RankGroup.current().compute(fail_on_last)),
    }
    found["left"] = sorted(p.name for p in folder.iterdir() if "tmp" in p.name or p.name == "other.parquet")

    def write(found: dict[str, Any]) -> None:
        (folder / f"{rank}.json").write_text(json.dumps(found))

    write(found)

    def end_last() -> dict[str, np.ndarray]:
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    write(found | {"killed": refused(lambda: RankGroup.current().compute(end_last))})
    os._exit(0)  # there is nobody left to say goodbye to


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    """What so many processes found, started once for all tests, and the folder that they wrote into."""
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    started = [Forked(run_rank, rank, size, folder) for rank in range(size)]
    said = [one.communicate(timeout=300) for one in started]
    files = [folder / f"{rank}.json" for rank in range(size)]
    assert all(file.is_file() for file in files), said
    return [json.loads(file.read_text()) for file in files], folder


@pytest.fixture(scope="module")
def alone():
    """What one process found."""
    before = cuda_passes.ROWS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield evaluate(across_ranks=False)
    cuda_passes.ROWS = before
    torch.set_num_threads(threads)


def test_evaluation_is_the_same_in_every_bit(ranks, alone):
    for found in ranks[0]:
        assert found["evaluate"] == alone


def test_one_process_that_asks_for_ranks_is_alone(alone):
    x, y = clusters()
    v = verification(x, y, mode="histogram", chunk=50, across_ranks=True)
    assert [float.hex(v.eer), float.hex(v.auc)] == alone["fast float32"][2][:2]


def test_embeddings_of_all_ranks_are_one_table(ranks, tmp_path):
    found, folder = ranks
    write_embeddings(model(), samples(1300), tmp_path / "z.parquet", dim=4)
    one, many = read_embeddings(tmp_path / "z.parquet"), read_embeddings(folder / "z.parquet")
    assert np.array_equal(one.values, many.values) and many.values.shape == (1300, 4)
    assert np.array_equal(one.label.values(), many.label.values()) and np.array_equal(one.names, many.names)
    assert np.array_equal(one.split, many.split) and one.columns == many.columns
    assert {k: c.values().tolist() for k, c in one.groups.items()} == {
        k: c.values().tolist() for k, c in many.groups.items()
    }
    size = len(found)
    assert found[0]["said"] == f"{folder / 'z.parquet'}: 1300 embeddings of dimension 4 in {size} files"
    assert len(list((folder / "z.parquet").glob("part-*.parquet"))) == size
    few = read_embeddings(folder / "few.parquet")  # one batch: the other ranks have no row
    assert len(few) == 3


def test_other_programs_read_the_folder_as_one_table(ranks):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(ranks[1] / "z.parquet")
    assert table.num_rows == 1300 and table["ids"].to_pylist() == list(range(1300))


def test_what_is_wrong_on_one_rank_is_said_on_all(ranks):
    found = ranks[0]
    size = len(found)
    for rank, one in enumerate(found):
        said = one["refused"]
        assert "it is there already; remove it" in said["there"] and "there is no folder" in said["no folder"]
        assert (
            said["samples"] == "InputError: ranks 0 and 1 have other samples or another model: give every rank the same"
        )
        assert said["rows"] == "InputError: ranks 0 and 1 differ in what they compare: give every rank the same"
        assert said["queries"] == "InputError: ranks 0 and 1 differ in what they rank: give every rank the same"
        assert said["one rank"] == f"MettleError: rank {size - 1}: MemoryError: no room"
        assert one["left"] == []
        if rank < size - 1:
            assert "lost another rank: its process has ended" in one["killed"]
    assert "killed" not in found[-1]


def test_a_folder_that_was_changed_is_refused(tmp_path):
    def fresh(name: str) -> Path:
        write_embedding_shards(model(), samples(5), tmp_path / name, ranks=RankGroup())
        return tmp_path / name

    assert len(read_embeddings(fresh("a.parquet"))) == 5
    part = next(fresh("b.parquet").glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="is not the file that was written"):
        read_embeddings(tmp_path / "b.parquet")
    next(fresh("c.parquet").glob("part-*")).unlink()
    with pytest.raises(DataError, match="cannot read .*write the embeddings again"):
        read_embeddings(tmp_path / "c.parquet")
    manifest = fresh("d.parquet") / "_manifest.json"
    manifest.write_text(manifest.read_text().replace('"rows": 5', '"rows": 6'))
    with pytest.raises(DataError, match="is damaged"):
        read_embeddings(tmp_path / "d.parquet")
    manifest.unlink()
    with pytest.raises(DataError, match="a folder without _manifest.json"):
        read_embeddings(tmp_path / "d.parquet")
    with pytest.raises(InputError, match="let it end in .parquet"):
        write_embedding_shards(model(), samples(5), tmp_path / "e.npz", ranks=RankGroup())


@pytest.mark.parametrize("triangle", [True, False])
def test_ranks_have_about_as_many_pairs_each(triangle):
    n = 100_000
    for size in (1, 2, 3, 7):
        parts = [split_rows(n, RankGroup(rank, size), 512, triangle=triangle) for rank in range(size)]
        assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])] and parts[-1].stop == n
        pairs = [sum((n - i if triangle else 1) for i in range(n)[p]) for p in parts]
        assert max(pairs) < 1.05 * sum(pairs) / size


def test_mettle_embed_under_torchrun(tmp_path, monkeypatch):
    """Two processes with what torchrun tells them embed into a folder."""
    torch.manual_seed(0)
    run = adopt(torch.nn.Linear(10, DIM), tmp_path / "run", example=torch.rand(4, 10)).folder
    y = np.arange(72) // 4
    x = np.random.default_rng(0).normal(size=(18, 10))[y] + 0.5 * np.random.default_rng(1).normal(size=(72, 10))
    np.savez(tmp_path / "rows.npz", rows=x.astype(np.float32), label=y)

    folder = tmp_path / "z.parquet"
    said = start(monkeypatch, 2, "embed", run, tmp_path / "rows.npz", "-o", folder)
    assert said == [(f"{folder}: 72 embeddings of dimension {DIM} in 2 files\n", ""), ("", "")]
    assert len(read_embeddings(folder)) == 72


@pytest.mark.slow  # an audit takes long in one process, too
def test_an_audit_by_two_processes_is_that_of_one(tmp_path, monkeypatch):
    folder = tmp_path / "z.parquet"
    write_embedding_shards(model(), samples(72), folder, ranks=RankGroup())
    said = start(monkeypatch, 2, "audit", folder, "-o", tmp_path / "two")
    assert said[0][0].startswith(f"{folder}: 72 embeddings of dimension {DIM}\n") and said[1] == ("", "")
    start(monkeypatch, 1, "audit", folder, "-o", tmp_path / "one")
    one, two = (json.loads((tmp_path / name / "audit.json").read_text()) for name in ("one", "two"))
    assert one["scenarios"]["all"]["verification"]["mode"] == "histogram"
    assert {key: value for key, value in one.items() if key != "command"} == {
        key: value for key, value in two.items() if key != "command"
    }


def test_a_run_is_measured_by_all_ranks_and_written_by_one(tmp_path, monkeypatch):
    torch.manual_seed(0)
    runs = [adopt(torch.nn.Linear(10, DIM), tmp_path / name, example=torch.rand(4, 10)).folder for name in "ab"]
    for file in runs[0].iterdir():
        if file.is_file():
            (runs[1] / file.name).write_bytes(file.read_bytes())
    y = np.arange(240) // 4
    x = np.random.default_rng(0).normal(size=(60, 10))[y] + 0.5 * np.random.default_rng(1).normal(size=(240, 10))
    np.savez(tmp_path / "rows.npz", rows=x.astype(np.float32), label=y)
    said = [
        start(monkeypatch, size, "evaluate", run, "--data", tmp_path / "rows.npz")
        for size, run in zip((1, 2), runs, strict=True)
    ]
    assert said[1][1] == ("", "") and said[0][0][0].replace(str(runs[0]), str(runs[1])) == said[1][0][0]
    one, two = (json.loads((run / "metrics.json").read_text()) for run in runs)
    assert one.pop("run") != two.pop("run") and one == two
    assert one["scenarios"]["all"]["verification"]["mode"] == "histogram"
    one, two = (json.loads((run / "contract.json").read_text()) for run in runs)
    assert one["thresholds"] == two["thresholds"] != {}


def start(monkeypatch: pytest.MonkeyPatch, size: int, *words: Any) -> list[tuple[str, str]]:
    """A command as so many processes that torchrun has started; what each said."""
    told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank in range(size):
        for name, value in (told | {"RANK": str(rank), "LOCAL_RANK": str(rank)}).items():
            monkeypatch.setenv(name, value)
        started.append(Forked(run_command, tuple(map(str, words))))
    said = [one.communicate(timeout=200) for one in started]
    assert [one.returncode for one in started] == [0] * size, said
    return said


def run_command(words: tuple[str, ...]) -> None:
    from mettle.cli import main
    from mettle.evaluate import verification as function

    torch.set_num_threads(1)
    sys.modules[function.__module__].EXACT_PAIRS = 100  # more are counted, by all ranks
    sys.argv = ["mettle", *words]
    main()
